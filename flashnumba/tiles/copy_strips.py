"""A block copies a slice of a tile into shared memory that lies in strips of 16 columns, zeros where there is nothing.

A strip is as deep as one product on tensor cores: strip after strip, each with its rows 32 bytes apart. A lane's
address for ldmatrix is then one number for all strips of a slice. Eight neighbouring threads copy 32 bytes of four
rows, and up to four such groups 128 bytes of these.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.numba import cuda, int32, int64, uint32
from flashnumba.tiles.copy_tile import make_copy_chunk
from flashnumba.tiles.swizzle import make_place

__all__ = ["STRIP", "make_copy_strips"]

STRIP = 16
"""Columns of a strip: the k of one product on tensor cores."""


@cache
def make_copy_strips(
    rows: int, columns: int, threads: int, vector: int, arch: str = "80", *, even: bool = False, on: bool = True
) -> DeviceFunction:
    """``copy_strips(tile, source, row_step, column_step, rows_left, columns_left)`` for a whole block.

    Arguments and options are those of :func:`flashnumba.tiles.copy_tile.make_copy_tile`, but that columns are a
    multiple of 16, and ``rows_left`` and ``columns_left`` int32.

    Raises:
        ValueError: the threads do not share out the rows evenly.
    """
    together = _together(rows, columns, threads)
    rows_at_once = threads // together
    if columns % STRIP or rows % rows_at_once:
        raise ValueError(f"{threads} threads do not share out {rows} rows of {columns} elements")
    steps, groups = rows // rows_at_once, columns // (8 * together)
    place, pitch, strip_bytes = make_place(2, on), 2 * STRIP, 2 * STRIP * rows
    copy_chunk = make_copy_chunk(vector, arch)

    @device
    def mine():
        """Row and chunk of a thread: chunk 2 s + c is that of strip s; eight neighbours have four rows of a strip, all
        banks once."""
        thread = uint32(cuda.threadIdx.x)
        strip, four = (thread >> uint32(3)) % uint32(together // 2), (thread >> uint32(3)) // uint32(together // 2)
        return uint32(4) * four + ((thread >> uint32(1)) & uint32(3)), uint32(2) * strip + (thread & uint32(1))

    @device
    def chunk_at(tile, row, chunk, i, g):
        at = tile + place(row + uint32(i * rows_at_once % 8), chunk & uint32(1))
        at += (chunk >> uint32(1)) * uint32(strip_bytes)
        return at + uint32(i * rows_at_once // 8 * 8 * pitch + g * together // 2 * strip_bytes)

    @device
    def copy_strips(tile, source, row_step, column_step, rows_left, columns_left):
        row, chunk = mine()
        left = int32(rows_left - int32(row))
        origin = source + int64(uint32(row * uint32(row_step) + uint32(16) * chunk))
        for i in range(steps):
            for g in range(groups):
                there = int32(0)
                if left > int32(i * rows_at_once) and (even or columns_left > int32(8 * (chunk + together * g))):
                    there = int32(16)
                from_ = origin + int64(i * rows_at_once) * row_step + int64(16 * together * g)
                copy_chunk(chunk_at(tile, row, chunk, i, g), from_, column_step, there)

    @device
    def copy_strips_narrow(tile, source, row_step, column_step, rows_left, columns_left):
        """The same with a loop that is one to the compiler too, as there are many instructions to a chunk."""
        row, chunk = mine()
        once = int64(cuda.gridDim.z)  # 1, which the compiler does not know
        for i in range(once * steps):
            for g in range(once * groups):
                r, c = int64(row) + i * rows_at_once, int64(chunk) + g * together
                there = min(int32(16), max(int32(0), int32(2) * int32(columns_left - int32(8 * c))))
                if r >= int64(rows_left):
                    there = int32(0)
                to = tile + place(r, c & 1) + uint32(c >> 1) * uint32(strip_bytes)
                copy_chunk(to, source + r * row_step + 8 * c * column_step, column_step, there)

    return copy_strips if vector == 16 else copy_strips_narrow


def _together(rows: int, columns: int, threads: int) -> int:
    """Chunks of a row of strips that neighbouring threads copy at once: up to eight, more where rows are few."""
    most = columns // 8 & -(columns // 8)
    together = min(8, most)
    while threads // together > rows and together < most:
        together *= 2
    return together
