"""Which rows of which head a block works on, and in which order: schedules of attention's row tiles.

Under a causal mask the row tiles of a head are a staircase: tile i computes about i + 1 tiles of keys. A grid is done
when its last block is, so it matters who has how much, and who begins when::

    plain           block = one tile; head after head, from the shortest to the longest
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

__all__ = ["L2_BYTES", "SCHEDULES", "Schedule", "heads_near", "longest_first", "paired", "plain", "tiles_of_keys"]

L2_BYTES = 32 << 20
"""K and V that heads worked on at one time may have: what an H200's L2 cache of 50 MB holds beside all else."""


@device
def tiles_of_keys(tile, m, n, bm, bn, causal):
    """How many tiles of ``bn`` keys row tile ``tile`` computes: all that hold a key which its last row sees.

    A last tile that is not whole counts like a whole one: rows beyond the last are computed as if they were there.
    """
    end = int64(n)
    if causal != 0:
        end = min(end, max(int64(0), (tile + 1) * bm + n - m))
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


# -- which unit of work is what: (number, turn, tiles of a head, heads in all, heads near, causal) -> (head, tile) ------
@device
def plain(number, turn, tiles, heads, near, causal):
    """Head after head, from the first tile to the last."""
    return uint32(number) // uint32(tiles), uint32(number) % uint32(tiles)


@device
def longest_first(number, turn, tiles, heads, near, causal):
    """Section after section; in a section the last tile of each head, then the last but one of each.

    Without a mask all tiles are alike: plain.
    """
    head, tile = uint32(number) // uint32(tiles), uint32(number) % uint32(tiles)
    if causal != 0:
        head, rank = in_bands(number, heads, tiles, near)
        tile = uint32(uint32(tiles) - uint32(1) - rank)
    return head, tile


@device
def paired(number, turn, tiles, heads, near, causal):
    """The longest and the shortest tile of a head, by turns; the pairs nearest the middle last, as an odd one out is
    half as long."""
    head, pair = in_bands(number, heads, (tiles + 1) // 2, near)
    return head, pair if turn == 1 else uint32(uint32(tiles) - uint32(1) - pair)


@device
def one_turn(number, tiles, heads, near):
    return 1


@device
def turns_of_pair(number, tiles, heads, near):
    """2, and 1 for the middle tile of an odd number, which is its own partner."""
    _, pair = in_bands(number, heads, (tiles + 1) // 2, near)
    return 1 if 2 * pair + 1 == tiles else 2


@dataclass(frozen=True)
class Schedule:
    """A way to deal out row tiles.

    Attributes:
        name: as tables have it.
        work: ``(number, turn, tiles, heads, near, causal) -> (head, tile)``, uint32: what unit ``number`` of the work
            does at its ``turn``; ``tiles`` are those of a head, ``heads`` counts all heads of the batch.
        turns: ``(number, tiles, heads, near) -> int``: how many tiles a unit is.
        pairs: a unit is a pair, so there are half as many.
        drawn: blocks stay and draw unit after unit from a counter; otherwise a block is a unit.
    """

    name: str
    work: DeviceFunction
    turns: DeviceFunction
    pairs: bool = False
    drawn: bool = False

    def units(self, tiles: int, heads: int) -> int:
        """Units of work that ``heads`` heads of ``tiles`` row tiles are."""
        return heads * (-(-tiles // 2) if self.pairs else tiles)


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule("plain", plain, one_turn),
        Schedule("paired", paired, turns_of_pair, pairs=True),
        Schedule("longest_first", longest_first, one_turn),
        Schedule("persistent", longest_first, one_turn, drawn=True),
    )
}
