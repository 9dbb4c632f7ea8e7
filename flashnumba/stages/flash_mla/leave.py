"""What a block leaves of its rows: O and LSE where it has seen all keys, otherwise the state of its part."""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import global_address, ld_shared_f32, st_global_b32, st_global_v2_f32
from flashnumba.machine.numba import float32, int32, int64, uint32, uint64
from flashnumba.stages.flash_mla.sizes import MLATiles
from flashnumba.tiles.attention import log_sum, share_of
from flashnumba.tiles.elements import vectors

__all__ = ["make_leave", "make_total"]


@cache
def make_total(bm: int, parts: int) -> DeviceFunction:
    """``total(stats, row) -> float32``: the sum of what ``parts`` parts of the keys left for one of ``bm`` rows."""

    @device
    def total(stats, row):
        sum_of = float32(0)
        for p in range(parts):
            sum_of += ld_shared_f32(stats + uint32(4 * p * bm) + uint32(4) * row)
        return sum_of

    return total


@cache
def make_leave(
    tiles: MLATiles, element: str, arch: str, total: DeviceFunction, *, pairs: bool = False, paged: bool = True
) -> DeviceFunction:
    """``leave(acc, m, stats, acc_parts, m_parts, l_parts, o, lse, factor, request, split, row0, rows, heads, warp,
    lane)``: with ``split`` below zero O and LSE, otherwise the state, to that place.

    Args:
        total: ``(stats, row) -> float32``: a row's sum.
        pairs: a lane's groups of columns are pairs of neighbours, see ``codes.py``.
        paged: there may be parts.
    """
    columns, dv, o_frags = tiles.columns, tiles.dv, tiles.bm // 16
    o_groups, o_rows = columns // 8, 2 * o_frags
    pack = vectors(element, 4, arch=arch).pack

    @device
    def column_at(n, lane):
        """Bytes of 16 bits from a warp's first column to the lane's of group n."""
        if pairs:
            return uint64(32 * (n // 2) + 4 * (n % 2)) + uint64(8) * uint64(lane & 3)
        return uint64(16 * n) + uint64(4) * uint64(lane & 3)

    @device
    def leave_state(acc, m, stats, acc_parts, m_parts, l_parts, split, row0, rows, warp, lane):
        for r in range(o_rows):
            in_tile = int32((lane >> 2) + int32(16 * (r // 2) + 8 * (r % 2)))
            row = int32(row0 + in_tile)
            if row < rows:
                if warp == 0 and (lane & 3) == 0:
                    m_parts[split, row] = m[r]
                    l_parts[split, row] = total(stats, uint32(in_tile))
                to = global_address(acc_parts) + uint64(
                    4 * ((int64(split) * int64(rows) + int64(row)) * dv + int64(warp) * columns)
                )
                for n in range(o_groups):
                    at = ((r // 2) * o_groups + n) * 4 + 2 * (r % 2)
                    st_global_v2_f32(to + uint64(2) * column_at(n, lane), acc, at)

    @device
    def leave_output(acc, m, stats, o, lse, factor, request, row0, rows, heads, warp, lane):
        for r in range(o_rows):
            in_tile = int32((lane >> 2) + int32(16 * (r // 2) + 8 * (r % 2)))
            row = int32(row0 + in_tile)
            if row < rows:
                summed = total(stats, uint32(in_tile))
                share = share_of(summed)
                if warp == 0 and (lane & 3) == 0:
                    lse[request, row % heads, row // heads] = log_sum(m[r], summed, factor)
                to = global_address(o) + uint64(
                    2 * ((int64(request) * int64(rows) + int64(row)) * dv + int64(warp) * columns)
                )
                for n in range(o_groups):
                    at = ((r // 2) * o_groups + n) * 4 + 2 * (r % 2)
                    word = pack(acc[at] * share, acc[at + 1] * share)
                    st_global_b32(to + column_at(n, lane), word)

    @device
    def leave(acc, m, stats, acc_parts, m_parts, l_parts, o, lse, factor, request, split, row0, rows, heads, warp,
              lane):  # fmt: skip
        if paged and split >= 0:
            leave_state(acc, m, stats, acc_parts, m_parts, l_parts, split, row0, rows, warp, lane)
        else:
            leave_output(acc, m, stats, o, lse, factor, request, row0, rows, heads, warp, lane)

    return leave
