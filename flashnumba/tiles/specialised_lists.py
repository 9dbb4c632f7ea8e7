"""Which keys a tile of warp-specialised attention has: those that follow, or blocks gathered from a list.

wgmma wants many keys at once, and a mask of blocks is the better the smaller its blocks. So a tile is gathered: the
copy engine brings the blocks of a list one by one to where a tile has its rows, and whoever multiplies sees a tile::

    list of a row tile    0 3 4 | 9 12 -        tiles of three blocks; "-" is none
    K in shared memory    K_0 K_3 K_4           K_9 K_12 zeros

Lists are in ascending order, and what a row sees of the keys ends somewhere: so of a gathered tile, as of any other, it
sees the first so many columns, and only tiles at the end of a list have columns that some row does not see. ``none`` is
the block after the last, of which the copy engine brings zeros, and no row sees any of it.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import global_address, ld_global_b32
from flashnumba.machine.numba import cuda, float32, int32, int64, uint32, uint64
from flashnumba.tiles.rows import make_hide
from flashnumba.tiles.schedule import seen_keys
from flashnumba.tiles.specialised_tiles import SpecialisedTiles

__all__ = ["FAULTS", "Keys", "make_hide_tile", "make_keys"]

FAULTS = ("next", "count", "none", "loose")
"""What can be planted with lists: blocks that follow one another instead of the list's; the last of a list is not
visited; where there is none, the last block once more; no tile of a list is masked."""


class Keys(NamedTuple):
    """Device functions. ``listed`` is ``(numbers, count, none)``: where the row tile's list is, its length, int32, and
    the block after the last, int32.

    Attributes:
        count: ``(counts, batch, head, tile) -> int32``: blocks that a row tile has; 0 without lists.
        open: ``(indices, batch, head, tile, count, n_rows) -> listed``.
        tiles: ``(listed, tile, m_rows, n_rows, causal, scale) -> (last, whole)``, int32: tiles of keys of a row tile,
            and how many of them, from the first on, all its rows see whole.
        find: ``(at, listed, j)``: the blocks of tile j into an int32 array; without lists the tile itself.
    """

    count: DeviceFunction
    open: DeviceFunction
    tiles: DeviceFunction
    find: DeviceFunction


@cache
def make_keys(tiles: SpecialisedTiles, broken: str = "") -> Keys:
    """Keys by list if ``tiles.block``. ``broken``: of :data:`FAULTS`, or ``causal``."""
    bm, bn, block, pieces = tiles.bm, tiles.bn, tiles.keys, tiles.bn // tiles.keys
    next_row, short, loose = int(broken != "causal"), int(broken == "count"), broken == "loose"
    in_order, again = broken == "next", broken == "none"
    # Blocks that some row of a tile sees and another does not, or none, or not whole; and those that are none.
    cut, ending = ((bm - 1 + block - 1) // block + 1 + pieces - 1 + pieces - 1) // pieces, 1

    @device
    def no_count(counts, batch, head, tile):
        return int32(0)

    @device
    def count(counts, batch, head, tile):
        return int32(max(0, counts[batch, head, tile] - short))

    @device
    def nothing(indices, batch, head, tile, count, n_rows):
        return uint64(0), int32(0), int32(0)

    @device
    def begin(indices, batch, head, tile, count, n_rows):
        row = (int64(batch) * indices.shape[1] + int64(head)) * indices.shape[2] + int64(tile)
        none = int32((n_rows + (block - 1)) // block)
        return global_address(indices) + uint64(4 * row * indices.shape[3]), count, none

    @device
    def in_turn(listed, tile, m_rows, n_rows, causal, scale):
        end, whole = seen_keys(tile * bm, bm, n_rows, n_rows - m_rows, causal, next_row)
        if scale == float32(0):
            whole = int64(0)  # S is made zero where it is masked
        return int32((end + (bn - 1)) // bn), int32(whole // bn)

    @device
    def by_list(listed, tile, m_rows, n_rows, causal, scale):
        last = int32((listed[1] + int32(pieces - 1)) // int32(pieces))
        whole = last - (int32(cut) if causal != 0 else int32(ending))
        if loose:
            whole = last
        if scale == float32(0):
            whole = int32(0)
        return last, max(whole, int32(0))

    @device
    def follow(at, listed, j):
        at[0] = int32(j)

    @device
    def look_up(at, listed, j):
        numbers, count, none = listed
        for i in range(pieces):
            entry, found = int32(j) * int32(pieces) + int32(i), none
            if again:
                entry = min(entry, count - int32(1))
            if entry < count:
                found = entry if in_order else int32(ld_global_b32(numbers + uint64(4) * uint64(uint32(entry))))
            at[i] = found

    return Keys(count, begin, by_list, look_up) if tiles.block else Keys(no_count, nothing, in_turn, follow)


@cache
def make_hide_tile(tiles: SpecialisedTiles, mask: DeviceFunction, keys: Keys, broken: str = "") -> DeviceFunction:
    """``hide(s, listed, j, row, offset, causal, n_rows, lane)``: S of tile j is -inf where a row must not look, as
    :func:`flashnumba.tiles.rows.make_hide` has it. ``broken``: ``tail`` or ``causal``."""
    tail, next_row, block, pieces = broken != "tail", int(broken != "causal"), tiles.keys, tiles.bn // tiles.keys
    find, hide_in_turn = keys.find, make_hide(tiles.of_consumer, mask, tail=tail, next_row=next_row)

    @device
    def in_turn(s, listed, j, row, offset, causal, n_rows, lane):
        hide_in_turn(s, int64(j), row, int64(1), offset, causal, n_rows, lane)

    @device
    def by_list(s, listed, j, row, offset, causal, n_rows, lane):
        at = cuda.local.array(pieces, int32)
        visible = cuda.local.array(2, int32)
        find(at, listed, j)
        for half in range(2):
            limit, seen = n_rows, int64(0)
            if not tail:
                limit = int64(listed[2]) * block
            if causal != 0:
                limit = min(limit, row + int64(8 * half) + offset + next_row)
            for i in range(pieces):
                seen += min(max(limit - int64(at[i]) * block, int64(0)), int64(block))
            visible[half] = int32(seen)
        mask(s, visible, lane)

    return by_list if tiles.block else in_turn
