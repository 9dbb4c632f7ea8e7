"""Rows of 16-bit elements in shared memory, laid out so that ldmatrix meets no bank conflict.

A row is cut into chunks of 16 bytes, and chunk c of row r lies at chunk ``c ^ (r & 7)``: the eight rows that ldmatrix
reads at one chunk then fall into eight different groups of four banks. Rows are multiples of 128 bytes long; rows of up
to 32 elements are 64 bytes long and lie two to a line of the 32 banks, so there it is ``c ^ (r >> 1 & 3)``. A tile
starts at a multiple of 128 bytes.

::

    row 0   c0 c1 c2 c3 c4 c5 c6 c7        bank groups 0 .. 7 read by
    row 1   c1 c0 c3 c2 c5 c4 c7 c6        ldmatrix at chunk 2:  row 0 -> 2, row 1 -> 3, row 2 -> 0, row 3 -> 1, ...
    row 2   c2 c3 c0 c1 c6 c7 c4 c5

Along a row two chunks, 16 elements, are one step of mma: a lane's address moves by an exclusive or, as the row's part
of it does not change.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.numba import uint32

__all__ = ["Swizzle", "swizzle"]


class Swizzle(NamedTuple):
    """How a tile of rows lies.

    Attributes:
        pitch: bytes from row to row.
        at: ``at(tile, row, chunk) -> address``.
        step: ``step(address, k) -> address``: ``k`` times 16 elements along the row, for an address that :attr:`at`
            gave for chunk 0 or 1; ``k`` is a constant.
    """

    pitch: int
    at: DeviceFunction
    step: DeviceFunction


@cache
def swizzle(columns: int, on: bool = True) -> Swizzle:
    """The layout of rows of ``columns`` 16-bit elements; ``on=False`` lays chunks out straight, which plants a fault
    where only one side does it."""
    narrow = columns <= 32
    pitch = 64 if narrow else -(-columns // 64) * 128

    @device
    def straight(tile, row, chunk):
        return tile + uint32(row) * uint32(pitch) + (uint32(chunk) << uint32(4))

    @device
    def at(tile, row, chunk):
        return tile + uint32(row) * uint32(pitch) + ((uint32(chunk) ^ (uint32(row) & uint32(7))) << uint32(4))

    @device
    def at_narrow(tile, row, chunk):
        turned = uint32(chunk) ^ ((uint32(row) >> uint32(1)) & uint32(3))
        return tile + uint32(row) * uint32(pitch) + (turned << uint32(4))

    @device
    def step(address, k):
        return (address ^ uint32(32 * (k % 4))) + uint32(128 * (k // 4))

    return Swizzle(pitch, straight if not on else at_narrow if narrow else at, step)
