"""A warp's operands of ``mma.sync``, from swizzled tiles in shared memory: ``ldmatrix`` for either major.

Registers hold an operand by pairs of neighbouring k (:mod:`flashnumba.machine.instructions.fragments`). A tile whose
lines run along k is read as it lies. One whose lines run along m or n is read by ``ldmatrix.trans``, which exchanges
rows and columns of each 8x8 matrix on the way. Four matrices make 16 rows (or columns) by 16 k::

    lines along k                      lines along m or n
    A: lane l gives row  l % 16        line (k)  l % 8 + 8 (l / 16)
                   chunk l / 16        chunk     l / 8 % 2            registers a0 a1 a2 a3 of m16n8k16
    B: lane l gives row  l % 8 + 8 (l / 16)      l % 16
                   chunk l / 8 % 2               l / 16               b0 b1 of 8 columns, b0 b1 of the next 8

A lane's address is a sum: the tile, an offset of its own, and a constant. The offset differs along the swizzled axis
only (per step of k, or per 16 rows), so it is computed once, outside all loops.

Source: PTX ISA, ldmatrix; CUTLASS, ``include/cutlass/gemm/warp/mma_tensor_op_tile_iterator.h``.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import ldmatrix_x4, ldmatrix_x4_trans
from flashnumba.machine.numba import cuda, uint32
from flashnumba.tiles.swizzle import make_place

__all__ = ["Operand", "make_operand"]


class Operand(NamedTuple):
    """A warp's part of a tile.

    Attributes:
        registers: uint32 a step of 16 k: four for each 16 rows or columns.
        offsets: length of the local uint32 array that ``locate`` fills.
        locate: ``locate(offset, first)``: offsets of this lane, where ``first`` is the warp's first row or column.
        load: ``load(fragment, at, tile, offset, step)``: 16 k from ``16 * step`` on, of the tile at a shared address.
    """

    registers: int
    offsets: int
    locate: DeviceFunction
    load: DeviceFunction


@cache
def make_operand(which: str, along_k: bool, extent: int, tile: int, depth: int, swizzled: bool = True) -> Operand:
    """Functions for ``extent`` rows (``which="a"``) or columns (``"b"``) of a tile of ``tile`` of them by ``depth`` k.

    Args:
        along_k: the tile's lines run along k; its other axis otherwise.
        swizzled: False plants a fault.

    Raises:
        ValueError: an extent or a depth that is no multiple of 16.
    """
    if extent % 16 or depth % 16 or tile % extent:
        raise ValueError(
            f"{extent} of {tile} by {depth}: fragments take multiples of 16, and warps equal parts of the tile"
        )
    chunks = (depth if along_k else tile) // 8
    place = make_place(chunks, swizzled)
    parts, steps, sixteen_lines = extent // 16, depth // 16, 16 * 16 * chunks
    # Lanes 0-15 go along lines and 16-31 to the next chunk, or 8-15 go to the next chunk and 16-31 along lines.
    lines_first = (which == "a") == along_k

    @device
    def mine():
        """(line, chunk) of this lane within 16 lines by two chunks."""
        lane = uint32(cuda.threadIdx.x & 31)
        if lines_first:
            return lane & uint32(15), lane >> uint32(4)
        return (lane & uint32(7)) + ((lane >> uint32(4)) << uint32(3)), (lane >> uint32(3)) & uint32(1)

    @device
    def locate_along_k(offset, first):
        line, chunk = mine()
        for s in range(steps):
            offset[s] = place(uint32(first) + line, chunk + uint32(2 * s))

    @device
    def load_along_k(fragment, at, tile, offset, step):
        for i in range(parts):
            ldmatrix_x4(fragment, at + 4 * i, tile + offset[step] + uint32(i * sixteen_lines))

    @device
    def locate_across(offset, first):
        line, chunk = mine()
        for i in range(parts):
            offset[i] = place(line, (uint32(first) >> uint32(3)) + chunk + uint32(2 * i))

    @device
    def load_across(fragment, at, tile, offset, step):
        for i in range(parts):
            ldmatrix_x4_trans(fragment, at + 4 * i, tile + offset[i] + uint32(step * sixteen_lines))

    if along_k:
        return Operand(4 * parts, steps, locate_along_k, load_along_k)
    return Operand(4 * parts, parts, locate_across, load_across)
