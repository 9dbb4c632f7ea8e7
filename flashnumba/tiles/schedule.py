"""Which rows of which head a block works on, and in which order: schedules of attention's row tiles.

Under a causal mask the row tiles of a head are a staircase: tile i computes about i + 1 tiles of keys. A grid is done
when its last block is, so it matters who has how much, and who begins when::

    plain           block = one tile; head after head, from the shortest to the longest
    head by head    block = one tile; head after head, from the longest to the shortest
    paired          block = tiles i and n - 1 - i of a head, n + 1 tiles of keys; of an odd n the middle one alone
    longest first   block = one tile; all heads' last tiles, then all heads' last but one, and so on
    persistent      as many blocks as there is room for; each draws the next tile, longest first, from a counter

A GPU starts blocks in the order of their numbers, each as soon as there is room. So "longest first" is the classical
rule of list scheduling, and short tiles fill the gaps at the end. Taken over *all* heads it would keep the keys of all
heads in use, and the L2 cache does not hold them; so heads go by in sections whose K and V it holds, and only within a
section is it tile by tile.

These are device functions on integers, and a kernel has its work from them; as a Python function, by
:func:`flashnumba.machine.emulator.as_python`, the same code says where each tile goes without running a kernel. The
number of a block and what is counted in blocks is uint32, so a grid has at most 2^31 - 1 blocks.

Sources: Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17, 1969 (list scheduling, longest
first); FlashAttention-3, arXiv 2407.08608, and its tile schedulers (reversed row tiles, sections of heads for L2).
"""

from __future__ import annotations

from dataclasses import dataclass

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.numba import int64, uint32
from flashnumba.tiles.raster import in_bands

__all__ = ["L2_BYTES", "SCHEDULES", "Schedule", "head_by_head", "heads_near", "longest_first", "paired", "plain",
           "seen_keys", "tiles_of_keys"]  # fmt: skip

L2_BYTES = 32 << 20
"""K and V that heads worked on at one time may have: what an H200's L2 cache of 50 MB holds beside all else."""


@device
def seen_keys(row0, rows, n, offset, causal, next_row):
    """(end, whole): keys [0, end) are visible to some of the ``rows`` rows from ``row0`` on, [0, whole) to all.

    Row i sees keys up to ``i + offset``; ``next_row`` is 1, and 0 plants a fault. Rows beyond the last count as if they
    were there.
    """
    end, whole = n, n
    if causal != 0:
        end = min(n, max(int64(0), row0 + rows + offset))
        whole = min(n, row0 + offset + next_row)
    return end, whole


@device
def tiles_of_keys(tile, m, n, bm, bn, causal):
    """How many tiles of ``bn`` keys row tile ``tile`` of ``bm`` rows computes."""
    end, _ = seen_keys(tile * bm, bm, n, n - m, causal, 1)
    return (end + (bn - 1)) // bn


@device
def heads_near(heads, group, n, row_bytes):
    """Heads of a section: those whose K and V, ``n`` rows of ``row_bytes`` each, :data:`L2_BYTES` hold; one group at
    least, and whole groups of ``group`` heads that share K and V. Sections are about equal, so that none is short."""
    kilobytes = max(uint32(1), uint32(int64(n) * int64(row_bytes) >> 9))  # of K and V
    fit = max(uint32(1), uint32(L2_BYTES >> 10) // kilobytes)
    groups = uint32(heads) // uint32(group)
    sections = uint32(groups + fit - uint32(1)) // fit
    return uint32(uint32(groups + sections - uint32(1)) // sections * uint32(group))


# -- which piece a number is: (number, tiles of a head, heads in all, heads near, causal) -> (head, tile) --------------
@device
def plain(number, tiles, heads, near, causal):
    """Head after head, from the first tile to the last."""
    return uint32(number) // uint32(tiles), uint32(number) % uint32(tiles)


@device
def head_by_head(number, tiles, heads, near, causal):
    """Head after head, each from its longest tile to its shortest; without a mask as :func:`plain`."""
    head, tile = uint32(number) // uint32(tiles), uint32(number) % uint32(tiles)
    if causal != 0:
        tile = uint32(uint32(tiles) - uint32(1) - tile)
    return head, tile


@device
def longest_first(number, tiles, heads, near, causal):
    """Section after section; in a section the last tile of each head, then the last but one of each.

    Without a mask all tiles are alike: plain.
    """
    head, tile = uint32(number) // uint32(tiles), uint32(number) % uint32(tiles)
    if causal != 0:
        head, rank = in_bands(number, heads, tiles, near)
        tile = uint32(uint32(tiles) - uint32(1) - rank)
    return head, tile


@device
def paired(number, tiles, heads, near, causal):
    """The longer tiles of all pairs, and then, in the same order, the shorter ones; the middle of an odd number has no
    partner, for which stands the tile ``tiles``, which is none. Pairs nearest the middle come last in a section."""
    pairs = uint32((tiles + 1) // 2)
    turn = uint32(number) // uint32(pairs * heads)
    head, pair = in_bands(uint32(number) - uint32(turn * pairs * heads), heads, pairs, near)
    tile = uint32(uint32(tiles) - uint32(1) - pair)
    if turn != 0:
        tile = pair if pair < tile else uint32(tiles)
    return head, tile


@dataclass(frozen=True)
class Schedule:
    """A way to deal out row tiles.

    Attributes:
        name: as tables have it.
        piece: ``(number, tiles, heads, near, causal) -> (head, tile)``, uint32: which row tile piece ``number`` of the
            work is; ``tiles`` are those of a head, ``heads`` counts all heads of the batch, ``near`` is
            :func:`heads_near`.
        turns: pieces a block does: number ``b`` first and then every ``grid``-th.
        drawn: as many blocks as there is room for draw one piece after the other from a counter.
    """

    name: str
    piece: DeviceFunction
    turns: int = 1
    drawn: bool = False

    def blocks(self, tiles: int, heads: int) -> int:
        """Blocks that ``heads`` heads of ``tiles`` row tiles are; more than that have nothing to draw."""
        return heads * -(-tiles // self.turns)


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule("plain", plain),
        Schedule("head_by_head", head_by_head),
        Schedule("paired", paired, turns=2),
        Schedule("longest_first", longest_first),
        Schedule("persistent", longest_first, drawn=True),
    )
}
