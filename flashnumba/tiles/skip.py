"""Whether a tile of scores is worth its exponentials: each row's greatest score beside the maximum it has already.

With m the running maximum of a row and f the factor of its exponents (:mod:`flashnumba.tiles.attention`), no weight of
a tile whose greatest score is t exceeds ``2^((t - m) f)`` of the row's greatest. A row can do without the tile if ::

    (t - m) f < limit        limit = log2 of the threshold, which is below 1

and a tile is left out if all of its rows can. The running maximum of the papers takes the tile in; as a tile that
raises it is never below the limit, the two say the same. A row that has seen nothing has m = -inf and needs the tile;
limit = -inf leaves out nothing. A NaN compares as false, so it too needs the tile; but a maximum passes over a NaN
beside other scores, so one in a key of a tile that is left out is not seen.

The four lanes of a row need not tell each other their maxima before they vote: if none of them needs the tile, the row
does not. So a tile left out costs no shuffle. Rows beyond the last have scores of zero, and would vote for every tile;
:func:`make_shut_out` gives them a maximum that no zero comes near. Two cases are left in which they do vote, for a tile
that is then computed for nothing: keys that are not finite, times zero no number; and a factor below 1e-36.

Who votes::

    "warp"     each warp decides for its rows
    "block"    all warps of the block have to agree

Agreement is not waited for where it does not matter: a warp that needs the tile says so and goes on; only one that
could do without waits for what the others say. If nothing is ever left out, nobody waits. A word a warp in shared
memory says in which tile the warp last needed something, so nothing has to be reset.

Sources: BLASST, arXiv 2512.12087 (the test, the vote); SpargeAttn, arXiv 2502.18137, section 3.4 (by warp).
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import bar_arrive, bar_sync, vote_any
from flashnumba.machine.numba import cuda, float32, int32, uint32
from flashnumba.tiles.online import NOTHING
from flashnumba.tiles.sizes import AttentionTiles

__all__ = ["FAULTS", "FEWEST", "VOTES", "make_agree", "make_needs", "make_shut_out"]

VOTES = ("", "warp", "block")
"""Nobody votes; each warp; all of a block."""
FEWEST = -190.0
"""The smallest limit but -inf. Rows that are not there lie below it."""
OUT = 200.0
FAULTS = ("tile_wide", "unscaled", "first", "alone", "vote_barrier", "stale_flag", "padding")
"""What can be planted: one maximum for all rows; a difference of unscaled scores; a first tile that may be left out;
block votes that nobody asks the others about; the barrier of the vote; words that are not of this tile; rows beyond the
last that vote."""
BARRIER = 1
"""The named barrier of votes."""


@cache
def make_needs(tiles: AttentionTiles, broken: str = "", *, together: bool = True) -> DeviceFunction:
    """``needs(tops, m, factor, limit) -> bool``: whether some row of the warp needs the tile, the same in all lanes.

    ``tops`` are of :attr:`flashnumba.tiles.attention.Steps.tops`. Not ``together``: whether some row of the lane does.
    """
    rows = 2 * tiles.frags
    wide, unscaled, first = broken == "tile_wide", broken == "unscaled", broken == "first"

    @device
    def needs(tops, m, factor, limit):
        needed = False
        for r in range(rows):
            top, high = tops[r], m[r]
            if wide:
                for i in range(rows):
                    high = max(high, m[i])
            if first and high == float32(NOTHING):
                high = float32(0)
            if unscaled:
                factor = float32(1)
            needed = needed or not ((top - high) * factor < limit)
        return vote_any(needed) if together else needed

    return needs


@cache
def make_shut_out(tiles: AttentionTiles, broken: str = "") -> DeviceFunction:
    """``shut_out(m, rows_left, factor)``: rows from ``rows_left`` on, counted from the lane's first, vote for nothing.

    Their maximum is ``OUT / factor``: an exponent of -200 for their scores of zero, which is not so far from 0 that a
    warp would have to subtract the maximum from S (:data:`flashnumba.tiles.attention.NEAR`).
    """
    rows, votes = 2 * tiles.frags, broken == "padding"

    @device
    def shut_out(m, rows_left, factor):
        high = float32(OUT) / factor
        for r in range(rows):
            if rows_left <= 16 * (r // 2) + 8 * (r % 2) and high < float32(-NOTHING) and not votes:
                m[r] = high

    return shut_out


@cache
def make_agree(tiles: AttentionTiles, vote: str, broken: str = "") -> DeviceFunction:
    """``agree(flags, needed, step) -> bool``: whether the tile is to be computed; ``needed`` by the warp.

    Args:
        vote: of :data:`VOTES`. By ``"block"`` all warps call it in every step, ``flags`` is a shared uint32 array with
            a word a warp, zeros, and some barrier of the block lies between two steps; ``step`` counts from 1, uint32.
    """
    warps, threads = tiles.warps, tiles.threads
    waits, fixed = broken != "vote_barrier", broken == "stale_flag"

    @device
    def alone(flags, needed, step):
        return needed

    @device
    def together(flags, needed, step):
        said = uint32(1) if fixed else step
        if needed:
            if (cuda.threadIdx.x & 31) == 0:
                flags[cuda.threadIdx.x >> 5] = said
            bar_arrive(int32(BARRIER), int32(threads))  # the others may rely on the word; this warp waits for nobody
        else:
            if waits:
                bar_sync(int32(BARRIER), int32(threads))  # every warp that needs the tile has said so
            for w in range(warps):
                needed |= flags[w] == said
        return needed

    return together if vote == "block" and warps > 1 and broken != "alone" else alone
