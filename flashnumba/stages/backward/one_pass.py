"""What the pass that adds to dQ by atomics needs around it: zeros before, and dQ out of its sums after.

The sums lie as threads of that kernel hold them (:mod:`flashnumba.stages.backward.mma_dkdv`): a warp adds to 128 bytes
side by side, one transaction. :func:`make_finish` reads them in the same order, multiplies by scale and rounds.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import Kernel, kernel
from flashnumba.machine.instructions import global_address, st_global_b32, st_global_v4_f32
from flashnumba.machine.numba import cuda, float32, int64, uint64
from flashnumba.stages.backward.mma_tiles import Tiles
from flashnumba.tiles.elements import vectors

__all__ = ["FAULTS", "make_clear", "make_finish"]

FAULTS = ("clear", "rounding", "place")
"""What can be planted: sums that were never cleared; dQ without scale; the two halves of a fragment exchanged."""


@cache
def make_clear(what: str = "all") -> Kernel:
    """Zeros, four a thread, into a packed array whose size is a multiple of 4; nothing if ``what`` is not "all"."""
    every = what == "all"

    @kernel(threads=256, arch="75", name="backward.clear")
    def clear(sums):
        zeros = cuda.local.array(4, float32)
        for i in range(4):
            zeros[i] = float32(0)
        at = (int64(cuda.blockIdx.x) * 256 + int64(cuda.threadIdx.x)) * 4
        if at < sums.shape[0] and every:
            st_global_v4_f32(global_address(sums) + uint64(4 * at), zeros, 0)

    return clear


@cache
def make_finish(tiles: Tiles, element: str, arch: str = "80", *, broken: str = "") -> Kernel:
    """A block for each ``tiles.other`` rows of each head. dq is packed and its columns are even in number, so that two
    are written at once."""
    d, other, threads, registers = tiles.d, tiles.other, tiles.threads, tiles.dq_registers
    row_warps, halves, frags = tiles.dq_rows, tiles.halves, tiles.dq_frags
    pack = vectors(element, 4, arch=arch).pack
    unscaled, flip = broken == "rounding", int(broken == "place")

    @kernel(threads=threads, arch=arch, name="backward.finish")
    def finish(sums, dq, scale):
        row_tiles = (dq.shape[2] + (other - 1)) // other
        tile = int64(cuda.blockIdx.x)
        head, batch = tile // row_tiles % dq.shape[1], tile // row_tiles // dq.shape[1]
        lane, warp = int64(cuda.threadIdx.x & 31), int64(cuda.threadIdx.x >> 5)
        row0 = tile % row_tiles * other + warp % row_warps * (16 * frags) + (lane >> 2)
        column0 = 16 * (warp // row_warps) + 2 * (lane & 3)
        base = tile * (other * d) + int64(cuda.threadIdx.x)
        factor = float32(1) if unscaled else scale
        for i in range(0, registers, 2):
            fragment, at = i // (registers // frags), i % (registers // frags)
            row = row0 + int64(16 * fragment + 8 * ((i // 2 + flip) % 2))
            column = column0 + int64(16 * halves * (at // 8) + 8 * (i // 4 % 2))
            low = sums[base + int64(i * threads)] * factor
            high = sums[base + int64((i + 1) * threads)] * factor
            if row < dq.shape[2] and column < dq.shape[3]:
                to = int64(global_address(dq)) + batch * dq.strides[0] + head * dq.strides[1]
                st_global_b32(uint64(to + row * dq.strides[2] + 2 * column), pack(low, high))

    return finish
