"""Which tile of the output a block computes: the order in which a grid walks over it.

Blocks start about in the order of their number, so those at work at one time have neighbouring numbers. Row by row they
would share one strip of A and need all of B. Walked in bands of a few rows of tiles, column by column within a band, a
set of w blocks covers a patch of about ``height x w / height`` tiles and reads ``height + w / height`` strips instead
of ``1 + w``: what the L2 cache then holds is read from memory once.

Source: Triton's matrix multiplication tutorial, "L2 Cache Optimizations"; CUTLASS's threadblock swizzle.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.numba import uint32

__all__ = ["in_bands", "make_raster"]


@device
def in_bands(block, rows, cols, height):
    """(row, col), uint32 each: the tile of block number ``block`` in bands of ``height`` rows; the last band has what
    is left."""
    band = uint32(block) // uint32(uint32(height) * uint32(cols))
    first = uint32(band * uint32(height))
    here = min(uint32(height), uint32(uint32(rows) - first))
    within = uint32(uint32(block) - uint32(first * uint32(cols)))
    return uint32(first + within % here), uint32(within // here)


@cache
def make_raster(height: int) -> DeviceFunction:
    """``raster(block, rows, cols) -> (row, col)``, uint32 each: the tile of block number ``block``.

    Args:
        height: rows of tiles a band; the last band has what is left.
    """

    @device
    def raster(block, rows, cols):
        return in_bands(block, rows, cols, height)

    return raster
