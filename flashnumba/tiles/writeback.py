"""A warp's accumulators, rounded to 16 bits, to a matrix in global memory with wide stores.

The accumulators of ``mma.sync`` lie two neighbours a lane: stores straight from registers would write 16 bytes of each
of eight rows, half of the 32 bytes that memory moves. So a warp writes its tile to shared memory first, swizzled, reads
it back row by row, and stores up to 16 bytes a lane. Only the warp itself takes part.

Source: CUTLASS, ``include/cutlass/epilogue/threadblock/epilogue.h``.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import global_address, ld_shared_v4, st_shared_b32, syncwarp
from flashnumba.machine.numba import cuda, int64, uint32, uint64
from flashnumba.tiles.elements import vectors
from flashnumba.tiles.swizzle import make_place

__all__ = ["make_writeback"]


@cache
def make_writeback(
    element: str, rows: int, cols: int, width: int, arch: str = "80", *, ordered: bool = True
) -> DeviceFunction:
    """``write(region, acc, out, row, col)``: the warp's tile to ``out[row : row + rows, col : col + cols]``.

    ``region`` is the shared address of ``2 * rows * cols`` bytes of the warp's own, a multiple of 16. ``acc`` holds
    fragments of 16 x 8, row after row of them. ``row`` and ``col`` are int64. What lies beyond ``out`` is left out.

    Args:
        element: float16 or bfloat16.
        rows, cols: multiples of 16; ``cols`` is a power of two.
        width: bytes a store, 16, 8, 4 or 2: rows of ``out`` are packed, start at its multiples and consist of whole
            ones.
        ordered: False plants a fault.
    """
    wide = vectors(element, width, arch=arch)
    pack, store, words = vectors(element, 4, arch=arch).pack, wide.store, wide.words
    chunks, across, down = cols // 8, cols // 8, rows // 16
    place = make_place(chunks)
    rounds, at_once = rows * chunks // 32, 32 // chunks
    pieces, elements = 16 // width, wide.elements

    @device
    def put(region, acc):
        """Round, and lay the tile out in rows."""
        lane = uint32(cuda.threadIdx.x & 31)
        mine = uint32(region + (lane & uint32(3)) * uint32(4))
        for i in range(down):
            for j in range(across):
                for half in range(2):
                    at = 4 * (i * across + j) + 2 * half
                    row = (lane >> uint32(2)) + uint32(16 * i + 8 * half)
                    st_shared_b32(mine + place(row, uint32(j)), pack(acc[at], acc[at + 1]))

    @device
    def store_two_bytes(address, raw, inside):
        """A chunk element by element: the upper half of a word moves down for its store."""
        half = cuda.local.array(1, uint32)
        for i in range(8):
            if i < inside:
                half[0] = raw[i // 2] >> uint32(16 * (i % 2))
                store(address + uint64(2 * i), half, 0)

    @device
    def store_pieces(address, raw, inside):
        for p in range(pieces):
            if p * elements < inside:
                store(address + uint64(p * width), raw, p * words)

    store_chunk = store_two_bytes if width == 2 else store_pieces

    @device
    def write(region, acc, out, row, col):
        put(region, acc)
        if ordered:
            syncwarp()  # all lanes have written before any reads
        raw = cuda.local.array(4, uint32)
        lane = uint32(cuda.threadIdx.x & 31)
        line, chunk = lane // uint32(chunks), lane % uint32(chunks)
        first = int64(col + 8 * int64(chunk))
        inside = out.shape[1] - first
        for i in range(rounds):
            r = uint32(line + uint32(i * at_once))
            if row + int64(r) < out.shape[0] and inside > 0:
                ld_shared_v4(raw, 0, region + place(r, chunk))
                store_chunk(global_address(out) + uint64((row + int64(r)) * out.strides[0] + 2 * first), raw, inside)

    return write
