"""What the kernels of gradients on tensor cores share: tiles that come step by step, weights, and results that leave.

Rows and registers are as in :mod:`flashnumba.tiles.attention`: of fragment f of the block's own rows a lane has row
``16 f + lane / 4`` (half 0) and the row eight below it (half 1), and of eight columns the columns ``2 (lane % 4)`` and
the next. ::

    c[(f * others / 8 + n) * 4 + 2 * half + i]        own row 16 f + 8 half + lane / 4, other row 8 n + 2 (lane % 4) + i
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import (
    cp_async_4_zfill,
    ex2_approx,
    global_address,
    ld_global_f32,
    st_shared_f32,
)
from flashnumba.machine.numba import cuda, float32, int32, int64, uint32, uint64
from flashnumba.stages.backward.mma_tiles import Tiles
from flashnumba.tiles.attention import Steps, make_steps
from flashnumba.tiles.copy_tile import copies_ahead, make_copy_tile, make_waiting
from flashnumba.tiles.elements import vectors
from flashnumba.tiles.rows import make_store

__all__ = ["Parts", "make_parts"]


class Parts(NamedTuple):
    """Device functions of a block.

    Attributes:
        steps: products and lane addresses of the forward.
        copy_own: tile of the block's own rows, arguments of :func:`flashnumba.tiles.copy_tile.make_copy_tile`.
        copy_other: the same for a tile of a step.
        copy_statistics: ``copy_statistics(to, delta, origin, bias, first, rows)``: of rows from the flat index
            ``first`` on, of which there are ``rows``; zeros after them.
        wait, commit: for copies.
        weight: ``weight(s, origin, factor, bias2) -> P``.
        pack: ``pack(c, p, k)``: columns 16 k .. 16 k + 15 of c, rounded, into ``p[4 frags k ...]``, A operands.
        clear: ``clear(acc)``.
        store: ``store(to, row_step, column_step, acc, factor, tile, warp_row, lane, rows, columns)``: acc times factor,
            by way of ``tile``, which nobody but the warp uses any more.
    """

    steps: Steps
    copy_own: DeviceFunction
    copy_other: DeviceFunction
    copy_statistics: DeviceFunction
    wait: DeviceFunction
    commit: DeviceFunction
    weight: DeviceFunction
    pack: DeviceFunction
    clear: DeviceFunction
    store: DeviceFunction


@cache
def make_parts(
    tiles: Tiles, element: str, vector: int, arch: str, *, even: bool, waits: bool = True, swizzled: bool = True
) -> Parts:  # fmt: skip
    """The parts for float16 or bfloat16; arguments as :func:`flashnumba.tiles.forward.make_attend`. ``waits`` and
    ``swizzled`` plant faults if False."""
    threads, other, frags, groups, d = tiles.threads, tiles.other, tiles.frags, tiles.columns // 8, tiles.d
    ahead = copies_ahead(vector, arch)
    store_divided = make_store(tiles.steps, element, vector, arch, even=even)
    pair = vectors(element, 4, arch=arch).pack
    rounds = -(-other // threads)
    acc_size, rows_held = frags * d // 2, 2 * frags

    @device
    def number_ahead(to, source, there):
        cp_async_4_zfill(to, uint64(source), uint32(4) if there else uint32(0))

    @device
    def number_now(to, source, there):
        value = float32(0)
        if there:
            value = ld_global_f32(uint64(source))
        st_shared_f32(to, value)

    copy_number = number_ahead if ahead else number_now

    @device
    def copy_statistics(to, delta, origin, bias, first, rows):
        for i in range(rounds):
            row = int32(cuda.threadIdx.x) + int32(i * threads)
            if row < other:
                there = row < rows
                at = int64(4) * (first + (int64(row) if there else int64(0)))
                here = to + uint32(4) * uint32(row)
                copy_number(here, int64(global_address(delta)) + at, there)
                copy_number(here + uint32(4 * other), int64(global_address(origin)) + at, there)
                copy_number(here + uint32(8 * other), int64(global_address(bias)) + at, there)

    @device
    def weight(s, origin, factor, bias2):
        return ex2_approx(cuda.fma(s - origin, factor, -bias2))

    @device
    def pack(c, p, k):
        for f in range(frags):
            for i in range(2):
                for half in range(2):
                    at = (f * groups + 2 * k + i) * 4 + 2 * half
                    p[4 * frags * k + 4 * f + 2 * i + half] = pair(c[at], c[at + 1])

    @device
    def clear(acc):
        for i in range(acc_size):
            acc[i] = float32(0)

    @device
    def store(to, row_step, column_step, acc, factor, tile, warp_row, lane, rows, columns):
        nothing = cuda.local.array(rows_held, float32)
        for r in range(rows_held):
            nothing[r] = float32(0)  # an empty sum: acc is not divided
        for i in range(acc_size):
            acc[i] *= factor
        store_divided(to, row_step, column_step, acc, nothing, tile, warp_row, lane, rows, columns)

    return Parts(
        make_steps(tiles.steps, element, arch),
        make_copy_tile(tiles.own, d, threads, vector, arch, even=even),
        make_copy_tile(other, d, threads, vector, arch, even=even, on=swizzled),
        copy_statistics,
        *make_waiting(ahead, 0, waits=waits),
        weight, pack, clear, store,
    )  # fmt: skip
