"""The rows of a warp in an attention kernel: which keys they see, and how O leaves.

Rows and registers are as in :mod:`flashnumba.tiles.attention`: of fragment f, a lane has row ``16 f + lane / 4`` (half
0) and the row eight below it (half 1).
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import (
    global_address,
    ld_shared_v4,
    st_global_b16,
    st_global_v4,
    st_shared_b32,
    syncwarp,
)
from flashnumba.machine.numba import cuda, float32, int32, int64, uint16, uint32, uint64
from flashnumba.tiles.attention import log_sum, share_of
from flashnumba.tiles.elements import vectors
from flashnumba.tiles.reduce import lanes_sum
from flashnumba.tiles.sizes import AttentionTiles
from flashnumba.tiles.swizzle import swizzle

__all__ = ["address_of", "make_hide", "make_store", "make_store_sums"]


@device
def address_of(x, batch, head, row):
    """The address of a row of a 4-D array, int64."""
    return int64(global_address(x)) + batch * x.strides[0] + head * x.strides[1] + row * x.strides[2]


@cache
def make_store_sums(tiles: AttentionTiles, total: DeviceFunction, weight: float = 1.0) -> DeviceFunction:
    """``store_sums(lse, m, l, factor, batch, head, row, rows, lane)``: the logarithm of each row's sum, written.

    The lane's first row is ``row``, and the head has ``rows``; m and l are as :class:`flashnumba.tiles.attention.Steps`
    leaves them.

    Args:
        total: of ``Steps``.
        weight: a factor that the sums are in units of, to be divided by.
    """
    rows_held, weighted = 2 * tiles.frags, weight != 1

    @device
    def store_sums(lse, m, l, factor, batch, head, row, rows, lane):
        for r in range(rows_held):
            at = row + (16 * (r // 2) + 8 * (r % 2))
            sum_of_row = total(l[r])
            if (lane & 3) == 0 and at < rows:
                if weighted:
                    sum_of_row *= float32(weight)
                lse[batch, head, at] = log_sum(m[r], sum_of_row, factor)

    return store_sums


@cache
def make_hide(tiles: AttentionTiles, mask: DeviceFunction, *, tail: bool = True, next_row: int = 1) -> DeviceFunction:
    """``hide(s, j, row, group, offset, causal, n_rows, lane)``: S of key tile j is -inf where a row must not look.

    That is beyond the end, and if causal beyond key ``query + offset``, where the lane's first row is ``row`` and
    ``group`` rows that follow one another belong to one query.

    Args:
        mask: of :class:`flashnumba.tiles.attention.Steps`.
        tail, next_row: False and 0 plant a fault.
    """
    bn, rows_held = tiles.bn, 2 * tiles.frags

    @device
    def hide(s, j, row, group, offset, causal, n_rows, lane):
        visible = cuda.local.array(rows_held, int32)
        for r in range(rows_held):
            limit = n_rows
            if not tail:
                limit = (j + 1) * bn
            if causal != 0:
                limit = min(limit, (row + int64(16 * (r // 2) + 8 * (r % 2))) // group + offset + next_row)
            visible[r] = int32(min(max(limit - j * bn, int64(0)), int64(bn)))
        mask(s, visible, lane)

    return hide


@cache
def make_store(
    tiles: AttentionTiles, element: str, vector: int = 16, arch: str = "80", *, even: bool = True,
    in_fours: bool = False,
) -> DeviceFunction:  # fmt: skip
    """``store(o_from, row_step, column_step, acc, l, tile, warp_row, lane, rows, columns)``: O / l, written.

    By way of the warp's own rows of ``tile``, shared memory in the layout of Q that nobody else reads or fills any
    more, so that stores are 16 bytes wide. ``rows`` and ``columns`` are those left from ``o_from`` on.

    Args:
        in_fours: a lane has four neighbouring columns of sixteen, as :mod:`flashnumba.tiles.fp8_halves` leaves them.
    """
    d_groups, chunks, frags, place = tiles.d // 8, tiles.d // 8, tiles.frags, swizzle(tiles.d).at
    rows_held, wide = 2 * frags, vector == 16
    pack, row_total = vectors(element, 4, arch=arch).pack, lanes_sum(4)

    @device
    def put(tile, row, acc, at, n, lane, share):
        """Column groups n and n + 1, of eight each; ``at`` is where those of n begin."""
        if in_fours:
            to = place(tile, row, n + ((lane & 3) >> 1)) + uint32(8 * (lane & 1))
            for i in range(2):
                st_shared_b32(to + uint32(4 * i), pack(acc[at + i] * share, acc[at + 4 + i] * share))
        else:
            for i in range(2):
                to = place(tile, row, n + i) + uint32(4 * (lane & 3))
                st_shared_b32(to, pack(acc[at + 4 * i] * share, acc[at + 4 * i + 1] * share))

    @device
    def put_row(tile, warp_row, lane, acc, l, r):
        share = share_of(row_total(l[r]))
        row = warp_row + 16 * (r // 2) + 8 * (r % 2) + (lane >> 2)
        for n in range(d_groups // 4):
            put(tile, row, acc, ((r // 2) * d_groups + 2 * n) * 4 + 2 * (r % 2), 2 * n, lane, share)
        for n in range(d_groups // 4, d_groups // 2):
            put(tile, row, acc, ((r // 2) * d_groups + 2 * n) * 4 + 2 * (r % 2), 2 * n, lane, share)

    @device
    def store(o_from, row_step, column_step, acc, l, tile, warp_row, lane, rows, columns):
        syncwarp()  # no lane reads the warp's rows any more
        # In two loops each, as one would be too long for the compiler to unroll where bfloat16 is rounded in integers.
        for r in range(frags):
            put_row(tile, warp_row, lane, acc, l, r)
        for r in range(frags, rows_held):
            put_row(tile, warp_row, lane, acc, l, r)
        syncwarp()  # the rows are there
        raw = cuda.local.array(4, uint32)
        for i in range(frags * 16 * chunks // 32):
            index = uint32(lane) + uint32(32 * i)
            row = int64(warp_row) + int64(index // uint32(chunks))
            column = int64(8) * int64(index % uint32(chunks))
            if row < rows and (even or column < columns):
                ld_shared_v4(raw, 0, place(tile, row, index % uint32(chunks)))
                to = o_from + row * row_step + column * column_step
                if wide:
                    st_global_v4(uint64(to), raw, 0)
                else:
                    for e in range(8):
                        if column + e < columns:
                            st_global_b16(uint64(to + e * column_step), uint16(raw[e // 2] >> uint32(16 * (e % 2))))

    return store
