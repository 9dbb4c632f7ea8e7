"""Which piece of SLA's arrays a block has, where it lies, and how wide its rows are in a tile.

A tile has the columns of :data:`DIMENSIONS`; where a head dimension is less, the tile is filled up with zeros.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import global_address
from flashnumba.machine.numba import int64, uint32
from flashnumba.tiles.copy_tile import make_copy_tile

__all__ = ["DIMENSIONS", "address_of", "head_of_keys", "is_even", "make_copy_rows", "piece_of", "width_of"]

DIMENSIONS = (64, 128)
"""Columns of a tile. With 256 a state alone would be 128 KB of shared memory, and a warp's share of one 512 registers a
lane."""


def width_of(d: int) -> int:
    """Columns of the tiles for a head dimension: the first of :data:`DIMENSIONS` that has room for it, or ``d`` where
    none has and no kernel takes it."""
    return next((width for width in DIMENSIONS if d <= width), d)


@device
def address_of(x, batch, head, row):
    """The address of a row of a 4-D array, int64."""
    return int64(global_address(x)) + batch * x.strides[0] + head * x.strides[1] + row * x.strides[2]


@device
def head_of_keys(head, q, k):
    """The head of k ``[B, Hkv, ...]`` that head ``head`` of q ``[B, H, ...]`` shares with its group, int64."""
    return int64(uint32(head) // (uint32(q.shape[1]) // uint32(k.shape[1])))


@device
def piece_of(number, tiles, heads):
    """(batch, head, tile) of block ``number``: tile by tile, head by head. int64."""
    index, tile = uint32(number) // uint32(tiles), uint32(number) % uint32(tiles)
    return int64(index // uint32(heads)), int64(index % uint32(heads)), int64(tile)


def is_even(d: int, columns: int) -> bool:
    """Whether rows of ``columns`` (0 for ``d``), and zeros up to a multiple of 8, fill those of a tile of ``d``."""
    return not columns or -(-columns // 8) * 8 == d


@cache
def make_copy_rows(
    rows: int, d: int, threads: int, arch: str = "80", *, columns: int = 0, on: bool = True
) -> DeviceFunction:
    """:func:`flashnumba.tiles.copy_tile.make_copy_tile` for rows of ``columns``, 0 for ``d``, and zeros up to a
    multiple of 8: what is said of columns in a call does not count, as a constant takes no register."""
    copy = make_copy_tile(rows, d, threads, 16, arch, even=is_even(d, columns), on=on)
    width = -(-(columns or d) // 8) * 8

    @device
    def copy_rows(tile, source, row_step, column_step, rows_left, columns_left):
        copy(tile, source, row_step, column_step, rows_left, int64(width))

    return copy if width == d else copy_rows
