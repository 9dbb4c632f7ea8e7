"""From a mask of blocks to packed lists: which tiles of keys each row tile looks at.

A mask says yes or no for ``block_m`` rows and ``block_n`` keys at a time; a kernel has tiles of its own, of which such
blocks consist. A warp packs the list of a row tile, 32 tiles of keys at a time: a ballot says which of them are wanted,
and the bits below a lane's own how many come before. Tiles that the causal mask hides from all of the rows are on no
list. Lists are in ascending order. The counter from which the blocks of the next kernel may draw row tiles is cleared
on the way.
"""

from __future__ import annotations

import math
from functools import cache

from flashnumba.machine.function import Kernel, kernel
from flashnumba.machine.instructions import global_address, st_global_b32, vote_ballot
from flashnumba.machine.numba import cuda, int32, int64, uint32, uint64
from flashnumba.stages.sparsity.problem import Launch, Shape
from flashnumba.tiles.schedule import seen_keys

__all__ = ["FAULTS", "make_pack", "mask_shape", "plan_lists"]

WARPS, AHEAD = 4, 8
"""Warps a block; times 32 tiles whose blocks are loaded before the first are listed."""
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
        number = uint32(cuda.blockIdx.x * WARPS + (cuda.threadIdx.x >> 5))
        if number >= counts.shape[0] * heads * row_tiles:
            return  # the whole warp, as all of its lanes vote below
        pair = uint32(number // uint32(row_tiles))
        batch, lane = int64(pair // uint32(heads)), int32(cuda.threadIdx.x & 31)
        tile, head = int64(number - pair * uint32(row_tiles)), int64(pair - batch * heads)
        end, _ = seen_keys(tile * bm, int64(bm), k.shape[2], k.shape[2] - q.shape[2], causal, 1)
        last, row, most = int32((end + (bn - 1)) // bn), tile // rows_each, int32(mask.shape[3] - 1)
        below = uint32((uint32(1) << uint32(lane + upto)) - uint32(1))
        out = int64(global_address(indices)) + 4 * (int64(number) * indices.shape[3])
        wanted = cuda.local.array(AHEAD, uint32)
        count = int32(0)
        for first in range(int32(0), last, int32(32 * AHEAD)):
            for a in range(AHEAD):
                j = min(int32(first + lane + 32 * a), int32(last - 1))
                wanted[a] = mask[batch, head, row, uint32(min(int32(uint32(j) // uint32(keys_each)), most))]
            for a in range(AHEAD):
                j = int32(first + lane + 32 * a)
                listed = wanted[a] != 0 and j < last
                which = vote_ballot(listed)
                if listed:
                    place = uint32(count + int32(cuda.popc(which & below)))
                    st_global_b32(uint64(out + 4 * int64(place)), uint32(j))
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
