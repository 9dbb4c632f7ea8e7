"""Where a 16-byte chunk of a tile's row lies in shared memory, so that eight rows at one column meet no bank twice.

Shared memory hands out 128 bytes a cycle, eight chunks of 16 bytes, one from each group of four banks. A tensor core's
operand is read as 8x8 matrices of 16-bit elements: eight rows, one chunk of each (``ldmatrix``). In rows of 128 bytes
all eight chunks of a column lie in one bank group, and the read takes eight cycles. So chunk c of row r is put at chunk
``c ^ (r & 7)``: a permutation within each row, another one for each of eight neighbouring rows. ::

    row 0   0 1 2 3 4 5 6 7        rows of 64 bytes: two rows fill the banks once, so the row's pair decides
    row 1   1 0 3 2 5 4 7 6            row 0   0 1 2 3    row 1   0 1 2 3
    row 2   2 3 0 1 6 7 4 5            row 2   1 0 3 2    row 3   1 0 3 2
    ...                            rows of 256 bytes and more: the same within each eight chunks of a row

For rows of 128 bytes that start at multiples of 1024 this is what the copy engine and wgmma call the 128-byte swizzle.

Since only the row's lowest bits matter, a thread that keeps them fixed may walk: rows by adding a multiple of eight
rows, columns by ``offset ^ (16 * step)``, where ``step`` has no bit in common with the chunk it started from.

Rows whose chunks are neither a power of two nor a multiple of eight are laid out longer than they are
(:func:`swizzle`).

Source: CUTLASS, ``include/cute/swizzle.hpp`` and ``swizzle_layout.hpp``; PTX ISA, "Swizzling modes".
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.numba import uint32

__all__ = ["Swizzle", "make_place", "place_of", "swizzle", "swizzle_of"]


def swizzle_of(chunks: int) -> tuple[int, int]:
    """(rows that fill the banks once, mask of the exchange) for rows of ``chunks`` chunks of 16 bytes.

    Chunk c of row r lies at chunk ``c ^ (r // rows & mask)``.

    Raises:
        ValueError: neither a power of two nor a multiple of eight.
    """
    if chunks < 1 or (chunks & (chunks - 1) and chunks % 8):
        raise ValueError(
            f"rows of {chunks} chunks of 16 bytes; it must be a power of two, or a multiple of 8, so that they pair off"
        )
    return max(1, 8 // chunks), min(8, chunks) - 1


def place_of(row, chunk, chunks: int, swizzled: bool = True):
    """Byte offset of a chunk within its tile, on the host: numbers or integer arrays. ``swizzled`` as in the other."""
    rows, mask = swizzle_of(chunks)
    return (row * chunks + (chunk ^ (row // rows & mask if swizzled else 0))) * 16


@cache
def make_place(chunks: int, swizzled: bool = True) -> DeviceFunction:
    """``place(row, chunk) -> uint32``: the byte offset of a chunk within a tile whose rows have ``chunks`` of them.

    Args:
        chunks: of 16 bytes in a row, a power of two or a multiple of eight.
        swizzled: False leaves chunks in order: right, as long as writers and readers agree, but slow.
    """
    rows, mask = swizzle_of(chunks)
    shift, mask = rows.bit_length() - 1, mask if swizzled else 0

    @device
    def place(row, chunk):
        row, chunk = uint32(row), uint32(chunk)
        exchanged = chunk ^ ((row >> uint32(shift)) & uint32(mask))
        return uint32((row * uint32(chunks) + exchanged) * uint32(16))

    return place


class Swizzle(NamedTuple):
    """How rows of so many 16-bit elements lie.

    Attributes:
        pitch: bytes from row to row: 64, or a multiple of 128.
        at: ``at(tile, row, chunk) -> address``, for a tile that starts at a multiple of 128.
        step: ``step(address, k) -> address``: ``k`` times 16 elements along the row, for an address that :attr:`at`
            gave for chunk 0 or 1; ``k`` is a constant.
    """

    pitch: int
    at: DeviceFunction
    step: DeviceFunction


@cache
def swizzle(columns: int, on: bool = True) -> Swizzle:
    """The layout of rows of ``columns`` 16-bit elements; ``on=False`` lays chunks in order, see :func:`make_place`."""
    pitch = 64 if columns <= 32 else -(-columns // 64) * 128
    rows, mask = swizzle_of(pitch // 16)
    shift, mask = rows.bit_length() - 1, mask if on else 0

    @device
    def at(tile, row, chunk):
        exchanged = uint32(chunk) ^ ((uint32(row) >> uint32(shift)) & uint32(mask))
        return tile + uint32(row) * uint32(pitch) + (exchanged << uint32(4))

    @device
    def step(address, k):
        return (address ^ uint32(32 * (k % 4))) + uint32(128 * (k // 4))

    return Swizzle(pitch, at, step)
