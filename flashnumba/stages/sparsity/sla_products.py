"""Products of whole tiles in shared memory, of which the linear part of SLA is made, and their results on the way out.

A state h_j = phi(K_j)^T V_j is a D x D tile, and all that the linear part does is multiply such tiles with tiles of 64
rows, from the left or transposed. A warp owns ``rows / warps`` rows of a product and all of its columns, so that a row
is four lanes' business, as in attention (:mod:`flashnumba.tiles.attention`)::

    c[(f * columns / 8 + n) * 4 + 2 * half + i]      row 16 f + 8 half + lane / 4, column 8 n + 2 (lane % 4) + i

Source: the operands are those of :mod:`flashnumba.tiles.operands`.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import (
    lane_id,
    ld_global_b32,
    ld_shared_b16,
    ld_shared_b32,
    st_shared_b32,
    syncwarp,
)
from flashnumba.machine.numba import cuda, float32, int32, int64, uint32, uint64
from flashnumba.stages.sparsity.sla_pieces import is_even
from flashnumba.tiles.elements import vectors
from flashnumba.tiles.operands import make_operand
from flashnumba.tiles.reduce import lanes_sum
from flashnumba.tiles.rows import make_store
from flashnumba.tiles.sizes import AttentionTiles
from flashnumba.tiles.swizzle import swizzle
from flashnumba.tiles.tensor import make_multiply

__all__ = ["WARPS", "RowSteps", "make_column_sums", "make_product", "make_project_rows", "make_row_steps",
           "make_store_state"]  # fmt: skip

WARPS = 4


@cache
def make_product(
    element: str, rows: int, columns: int, depth: int, a_along: bool, b_along: bool, arch: str = "80",
    *, swizzled: bool = True,
) -> tuple[DeviceFunction, DeviceFunction]:  # fmt: skip
    """``multiply(c, a_tile, b_tile, warp)`` and ``multiply_packed(c, p, b_tile)``: C += A B by :data:`WARPS` warps.

    Args:
        a_along, b_along: whether the lines of a tile run along what is summed over; ``ldmatrix`` transposes the others.
        swizzled: False plants a fault.

    ``p`` holds A in registers, four words for each 16 rows, by steps of 16 of the depth.
    """
    frags, groups = rows // (16 * WARPS), columns // 8
    part_a = make_operand("a", a_along, 16 * frags, rows, depth, swizzled)
    part_b = make_operand("b", b_along, columns, columns, depth)
    locate_a, load_a, a_words, a_offsets = part_a.locate, part_a.load, part_a.registers, part_a.offsets
    locate_b, load_b, b_words, b_offsets = part_b.locate, part_b.load, part_b.registers, part_b.offsets
    product, steps, own = make_multiply(element, arch), depth // 16, 16 * frags

    @device
    def multiply(c, a_tile, b_tile, warp):
        a = cuda.local.array(a_words, uint32)
        b = cuda.local.array(b_words, uint32)
        from_a = cuda.local.array(a_offsets, uint32)
        from_b = cuda.local.array(b_offsets, uint32)
        locate_a(from_a, uint32(warp) * uint32(own))
        locate_b(from_b, uint32(0))
        for s in range(steps):
            load_a(a, 0, a_tile, from_a, s)
            load_b(b, 0, b_tile, from_b, s)
            for f in range(frags):
                for n in range(groups):
                    product(c, (f * groups + n) * 4, a, 4 * f, b, 2 * n)

    @device
    def multiply_packed(c, p, b_tile):
        b = cuda.local.array(b_words, uint32)
        from_b = cuda.local.array(b_offsets, uint32)
        locate_b(from_b, uint32(0))
        for s in range(steps):
            load_b(b, 0, b_tile, from_b, s)
            for f in range(frags):
                for n in range(groups):
                    product(c, (f * groups + n) * 4, p, 4 * (s * frags + f), b, 2 * n)

    return multiply, multiply_packed


class RowSteps(NamedTuple):
    """Device functions on 64 rows by ``d`` columns of float32, a warp's 16 of them in ``c[d / 2]``.

    ``tile`` is a tile of 64 rows of d 16-bit elements in shared memory; ``warp_row`` the warp's first row.

    Attributes:
        clear: ``(c)``.
        pack: ``(c, p)``: rounded, A operands.
        dot_tile: ``(c, tile, warp_row, lane, sums)``: of each of the lane's two rows the sum of c times the tile.
        dot_rows: ``(c, source, row_step, warp_row, lane, rows, sums)``: the same with 16-bit rows from global address
            ``source``, of which there are ``rows``.
        take: ``(c, tile, warp_row, lane)``: c from the tile.
        put: ``(c, tile, warp_row, lane)``: rounded, into the tile.
        pull_back: ``(c, tile, warp_row, lane)``: from dphi to dx, with phi in the tile.
        add: ``(c, source, row_step, warp_row, lane, rows)``: c += the 16-bit rows from global address ``source``, of
            which there are ``rows``.
        add_outer: ``(c, weight, source, lane)``: c += weight[row] times that row.
        store: as :func:`flashnumba.tiles.rows.make_store`, not divided: ``(to, row_step, column_step, c, tile,
            warp_row, lane, rows, columns)``.
    """

    clear: DeviceFunction
    pack: DeviceFunction
    dot_tile: DeviceFunction
    dot_rows: DeviceFunction
    take: DeviceFunction
    put: DeviceFunction
    pull_back: DeviceFunction
    add: DeviceFunction
    add_outer: DeviceFunction
    store: DeviceFunction


@cache
def make_row_steps(
    d: int, element: str, slope: DeviceFunction | None = None, arch: str = "80", *, columns: int = 0
) -> RowSteps:
    """The steps; ``slope`` of :func:`flashnumba.stages.sparsity.sla_features.make_pull_back`. ``columns`` as
    :func:`~.sla_features.make_features`: rows in global memory have as many, up to the next multiple of 8."""
    groups, regs, place = d // 8, d // 2, swizzle(d).at
    there, even = -(-(columns or d) // 8), is_even(d, columns)
    wide = vectors(element, 4, arch=arch)
    low, high, pair = wide.low, wide.high, wide.pack
    quad_sum = lanes_sum(4)
    store_divided = make_store(AttentionTiles(d, 64, 64, WARPS), element, 16, arch, even=even)

    @device
    def clear(c):
        for i in range(regs):
            c[i] = float32(0)

    @device
    def pack(c, p):
        for n in range(groups):
            for half in range(2):
                p[2 * n + half] = pair(c[4 * n + 2 * half], c[4 * n + 2 * half + 1])

    @device
    def word_at(tile, warp_row, lane, n, half):
        """The word of a tile that lies where c[4 n + 2 half] and the next do."""
        return place(tile, warp_row + (lane >> 2) + 8 * half, n) + uint32(4 * (lane & 3))

    @device
    def dot_tile(c, tile, warp_row, lane, sums):
        for half in range(2):
            total = float32(0)
            for n in range(groups):
                word = ld_shared_b32(word_at(tile, warp_row, lane, n, half))
                total += c[4 * n + 2 * half] * low(word) + c[4 * n + 2 * half + 1] * high(word)
            sums[half] = quad_sum(total)

    @device
    def dot_rows(c, source, row_step, warp_row, lane, rows, sums):
        for half in range(2):
            row, total = int64(warp_row) + int64(lane >> 2) + int64(8 * half), float32(0)
            if row < rows:
                for n in range(there):
                    word = ld_global_b32(uint64(source + row * row_step + int64(16 * n) + int64(4) * int64(lane & 3)))
                    total += c[4 * n + 2 * half] * low(word) + c[4 * n + 2 * half + 1] * high(word)
            sums[half] = quad_sum(total)

    @device
    def take(c, tile, warp_row, lane):
        for n in range(groups):
            for half in range(2):
                word = ld_shared_b32(word_at(tile, warp_row, lane, n, half))
                c[4 * n + 2 * half] = low(word)
                c[4 * n + 2 * half + 1] = high(word)

    @device
    def put(c, tile, warp_row, lane):
        for n in range(groups):
            for half in range(2):
                st_shared_b32(
                    word_at(tile, warp_row, lane, n, half), pair(c[4 * n + 2 * half], c[4 * n + 2 * half + 1])
                )

    @device
    def pull_back(c, tile, warp_row, lane):
        mean = cuda.local.array(2, float32)
        dot_tile(c, tile, warp_row, lane, mean)
        for n in range(groups):
            for half in range(2):
                word, at = ld_shared_b32(word_at(tile, warp_row, lane, n, half)), 4 * n + 2 * half
                c[at] = slope(low(word), c[at], mean[half])
                c[at + 1] = slope(high(word), c[at + 1], mean[half])

    @device
    def add(c, source, row_step, warp_row, lane, rows):
        for half in range(2):
            row = int64(warp_row) + int64(lane >> 2) + int64(8 * half)
            if row < rows:
                for n in range(there):
                    word = ld_global_b32(uint64(source + row * row_step + int64(16 * n) + int64(4) * int64(lane & 3)))
                    c[4 * n + 2 * half] += low(word)
                    c[4 * n + 2 * half + 1] += high(word)

    @device
    def add_outer(c, weight, source, lane):
        for n in range(groups):
            word = ld_global_b32(uint64(source + int64(16 * n) + int64(4) * int64(lane & 3)))
            for half in range(2):
                c[4 * n + 2 * half] += weight[half] * low(word)
                c[4 * n + 2 * half + 1] += weight[half] * high(word)

    @device
    def store(to, row_step, column_step, c, tile, warp_row, lane, rows, columns):
        nothing = cuda.local.array(2, float32)
        nothing[0] = nothing[1] = float32(0)  # an empty sum: c is not divided
        store_divided(to, row_step, column_step, c, nothing, tile, warp_row, lane, rows, columns)

    return RowSteps(clear, pack, dot_tile, dot_rows, take, put, pull_back, add, add_outer, store)


@cache
def make_project_rows(d: int, element: str, arch: str = "80") -> DeviceFunction:
    """``project(tile, proj_tile, warp)``: 64 rows become their products with proj, d x d, rounded; a warp's 16 of
    them, which no other warp reads meanwhile."""
    multiply, _ = make_product(element, 64, d, d, True, False, arch)
    steps, regs = make_row_steps(d, element, None, arch), d // 2
    clear, put = steps.clear, steps.put

    @device
    def project(tile, proj_tile, warp):
        c = cuda.local.array(regs, float32)
        clear(c)
        multiply(c, tile, proj_tile, warp)
        syncwarp()  # no lane reads the warp's rows any more
        put(c, tile, int32(16) * warp, int32(lane_id()))

    return project


@cache
def make_store_state(d: int, element: str, arch: str = "80") -> tuple[int, DeviceFunction, DeviceFunction]:
    """(registers, ``clear(c)``, ``store(to, c, tile, warp, lane)``): a D x D result of :data:`WARPS` warps, packed.

    ``tile`` is room for it, d rows of d 16-bit elements in shared memory; ``to`` a global address.
    """
    frags = d // (16 * WARPS)
    regs, rows_held, own = frags * d // 2, 2 * frags, 16 * frags
    store_divided = make_store(AttentionTiles(d, d, 64, WARPS), element, 16, arch)

    @device
    def clear(c):
        for i in range(regs):
            c[i] = float32(0)

    @device
    def store(to, c, tile, warp, lane):
        nothing = cuda.local.array(rows_held, float32)
        for r in range(rows_held):
            nothing[r] = float32(0)
        row_step, column_step = int64(2 * d), int64(2)
        store_divided(to, row_step, column_step, c, nothing, tile, warp * int32(own), lane, int64(d), int64(d))

    return regs, clear, store


@cache
def make_column_sums(d: int, element: str, arch: str = "80", *, weighted: bool = False) -> DeviceFunction:
    """``column_sum(tile, column)``: the sum of a column of a tile of 64 rows, float32; threads take columns. As
    ``weighted`` one argument more: a shared array of 64 weights."""
    single, place = vectors(element, 2, arch=arch).low, swizzle(d).at

    @device
    def column_sum(tile, column):
        total = float32(0)
        for row in range(64):
            at = place(tile, uint32(row), uint32(column) >> uint32(3)) + uint32(2) * (uint32(column) & uint32(7))
            total += single(uint32(ld_shared_b16(at)))
        return total

    @device
    def weighted_sum(tile, column, weights):
        total = float32(0)
        for row in range(64):
            at = place(tile, uint32(row), uint32(column) >> uint32(3)) + uint32(2) * (uint32(column) & uint32(7))
            total += weights[row] * single(uint32(ld_shared_b16(at)))
        return total

    return weighted_sum if weighted else column_sum
