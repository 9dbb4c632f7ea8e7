"""From a mask of blocks to packed lists: which tiles of keys each row tile looks at.

A mask says yes or no for ``block_m`` rows and ``block_n`` keys at a time; a kernel has tiles of its own, of which such
blocks consist. A warp packs the list of a row tile, 32 tiles of keys at once: a ballot says which of them are wanted,
and the bits below a lane's own how many come before. Tiles that the causal mask hides from all of the rows are on no
list. Lists are in ascending order. The counter from which the blocks of the next kernel may draw row tiles is cleared
on the way.
"""

from __future__ import annotations

import math
from functools import cache

from flashnumba.machine.function import Kernel, kernel
from flashnumba.machine.instructions import vote_ballot
from flashnumba.machine.numba import cuda, int32, int64, uint32
from flashnumba.stages.sparsity.problem import Launch, Shape
from flashnumba.tiles.schedule import seen_keys

__all__ = ["FAULTS", "make_pack", "mask_shape", "plan_lists"]

WARPS = 4
ARGS = ("mask", "q", "k", "indices", "counts", "counter", "causal")
FAULTS = ("place", "block", "counter")
"""What can be planted: a lane counts itself among those before it; a block is taken for a tile; the counter is left
as it is."""


@cache
def make_pack(bm: int, bn: int, block_m: int, block_n: int, broken: str = "") -> Kernel:
    """The kernel; ``block_m`` and ``block_n`` are multiples of ``bm`` and ``bn``. ``broken``: of :data:`FAULTS`."""
    upto, rows_each, keys_each = int(broken == "place"), block_m // bm, block_n // bn
    if broken == "block":
        keys_each = 1
    clears = broken != "counter"

    @kernel(threads=32 * WARPS, arch="75", name="sparsity.pack")
    def pack(mask, q, k, indices, counts, counter, causal):
        if clears and cuda.blockIdx.x == 0 and cuda.threadIdx.x == 0:
            counter[0] = int32(0)
        row_tiles, heads = counts.shape[2], counts.shape[1]
        number = int64(cuda.blockIdx.x) * WARPS + int64(cuda.threadIdx.x >> 5)
        if number >= counts.shape[0] * heads * row_tiles:
            return  # the whole warp, as all of its lanes vote below
        lane = int64(cuda.threadIdx.x & 31)
        tile, head, batch = number % row_tiles, number // row_tiles % heads, number // row_tiles // heads
        end, _ = seen_keys(tile * bm, int64(bm), k.shape[2], k.shape[2] - q.shape[2], causal, 1)
        last, row = (end + (bn - 1)) // bn, tile // rows_each
        below = uint32((uint32(1) << uint32(lane + upto)) - uint32(1))
        count = int32(0)
        for first in range(int64(0), last, int64(32)):
            j = first + lane
            wanted = False
            if j < last:
                wanted = mask[batch, head, row, min(j // keys_each, mask.shape[3] - 1)] != 0
            which = vote_ballot(wanted)
            if wanted:
                indices[batch, head, tile, count + int32(cuda.popc(which & below))] = int32(j)
            count += int32(cuda.popc(which))
        if lane == 0:
            counts[batch, head, tile] = count

    return pack


def mask_shape(shape: Shape, block_m: int, block_n: int) -> tuple[int, int, int, int]:
    """Of a mask of blocks: the last of each axis may have fewer rows, or keys."""
    return shape.batch, shape.heads, -(-shape.m // block_m), -(-shape.n // block_n)


def plan_lists(
    shape: Shape, bm: int, bn: int, block_m: int, block_n: int, broken: str = ""
) -> tuple[Launch, dict[str, tuple[int, ...]]]:
    """The launch that makes ``indices`` and ``counts`` of ``mask``, for row tiles of ``bm`` rows and tiles of ``bn``
    keys, and zero of ``counter``; and the shapes of the three. A list is as long as all keys are."""
    pack = make_pack(bm, bn, block_m, block_n, broken)
    counts = (shape.batch, shape.heads, -(-shape.m // bm))
    made = {"indices": (*counts, max(1, -(-shape.n // bn))), "counts": counts, "counter": (1,)}
    return Launch(pack, -(-math.prod(counts) // WARPS), pack.threads, 0, ARGS), made
