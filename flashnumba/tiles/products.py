"""Products of two float32 tiles in shared memory, on CUDA cores, summed in registers.

Sixteen neighbouring threads share the rows of the result, and a thread holds ``rows`` of them. Its columns depend on
how the right tile lies, so that sixteen threads read side by side, or from sixteen rows, with no bank asked twice::

    A B^T    both tiles have in a row what is summed over       columns x, x + 16, x + 32, ...     four terms a load
    A B      the right tile has columns of the result in a row  columns 2x, 2x + 1, 2x + 32, ...   two columns a load

where x is the thread's place among the sixteen. A loaded value is used as often as the thread has rows or columns: with
8 rows and 4 columns 12 loads of 16 bytes serve 128 multiply-adds. The left tile's value is the same for all sixteen.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import ld_shared_v2_f32, ld_shared_v4_f32
from flashnumba.machine.numba import cuda, float32, uint32

__all__ = ["LANES", "column_pair", "lane_and_row", "make_multiply", "make_multiply_transposed"]

LANES = 16
"""Threads that share a row."""


@cache
def lane_and_row(rows: int) -> DeviceFunction:
    """``lane_and_row() -> (x, y)``: the thread's place among those that share a row, and the first of its rows."""

    @device
    def lane_and_row():
        return cuda.threadIdx.x & (LANES - 1), cuda.threadIdx.x // LANES * rows

    return lane_and_row


@device
def column_pair(x, c):
    """The column of the result that is number ``c`` of those that a thread has after :func:`make_multiply`."""
    return 2 * x + LANES * (c - c % 2) + c % 2


@cache
def make_multiply_transposed(rows: int, cols: int, depth: int, a_pitch: int, b_pitch: int) -> DeviceFunction:
    """``multiply(c, a_tile, b_tile)``: C += A B^T; column j of a thread's ``cols`` is ``x + 16 j``.

    Args:
        rows, cols: of the result, a thread; ``c`` is a local float32 array of ``rows * cols``.
        depth: terms, a multiple of 4.
        a_pitch, b_pitch: words from row to row, multiples of 4; ``b_pitch`` 4 more than a multiple of 32.
    """
    where, b_size = lane_and_row(rows), 4 * cols

    @device
    def multiply(c, a_tile, b_tile):
        a = cuda.local.array(4, float32)
        b = cuda.local.array(b_size, float32)
        x, y = where()
        a_row = a_tile + uint32(4 * y * a_pitch)
        b_row = b_tile + uint32(4 * x * b_pitch)
        for d in range(0, depth, 4):
            for j in range(cols):
                ld_shared_v4_f32(b, 4 * j, b_row + uint32(4 * (LANES * j * b_pitch + d)))
            for i in range(rows):
                ld_shared_v4_f32(a, 0, a_row + uint32(4 * (i * a_pitch + d)))
                for e in range(4):
                    left = a[e]
                    for j in range(cols):
                        c[i * cols + j] += left * b[4 * j + e]

    return multiply


@cache
def make_multiply(rows: int, cols: int, depth: int, a_pitch: int, b_pitch: int) -> DeviceFunction:
    """``multiply(c, a_tile, b_tile)``: C += A B; a thread's columns are those of :func:`column_pair`.

    Args:
        rows, cols: as :func:`make_multiply_transposed`, but ``cols`` even.
        depth: terms, a multiple of 4.
        a_pitch, b_pitch: words from row to row, a multiple of 4 and an even number.
    """
    where, a_size = lane_and_row(rows), 4 * rows

    @device
    def multiply(c, a_tile, b_tile):
        a = cuda.local.array(a_size, float32)
        b = cuda.local.array(cols, float32)
        x, y = where()
        a_row = a_tile + uint32(4 * y * a_pitch)
        b_col = b_tile + uint32(8 * x)
        for d in range(0, depth, 4):
            for i in range(rows):
                ld_shared_v4_f32(a, 4 * i, a_row + uint32(4 * (i * a_pitch + d)))
            for e in range(4):
                for j in range(0, cols, 2):
                    ld_shared_v2_f32(b, j, b_col + uint32(4 * ((d + e) * b_pitch + LANES * j)))
                for i in range(rows):
                    left = a[4 * i + e]
                    for j in range(cols):
                        c[i * cols + j] += left * b[j]

    return multiply
