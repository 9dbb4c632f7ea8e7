"""SpargeAttn's mean tokens: what is left of each block of q, and of k, for the prediction.

``pool`` reads q, or k, once, and leaves of each block its mean token and how alike its tokens are: the squared length
of the mean of the tokens over their lengths, which is the mean cosine of all pairs. Means of k lie with blocks in a
row, [D, blocks]: then neighbouring threads of :mod:`flashnumba.stages.sparsity.predict` read neighbouring scores'
terms.

Source: as there.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import Kernel, kernel
from flashnumba.machine.instructions import global_address, rcp_approx, rsqrt_approx
from flashnumba.machine.numba import cuda, float32, int64, uint32, uint64
from flashnumba.stages.sparsity.problem import Launch, Shape
from flashnumba.tiles.elements import ITEMSIZE, vectors
from flashnumba.tiles.reduce import lanes_sum, make_block_sum

__all__ = ["FAULTS", "make_pool", "pool_launches", "pooled_shapes"]

WARPS, AHEAD = 4, 4
"""Warps a block; rows that a warp loads before it uses the first."""
FAULTS = ("lengths",)
"""What can be planted: tokens that count as long as they are."""


@cache
def make_pool(element: str, nbytes: int, d: int, rows: int, of_keys: bool, broken: str = "") -> Kernel:
    """The kernel ``(x, means, same)``: x ``[B, H, N, D]`` read ``nbytes`` at a time; a block of threads for each block
    of ``rows`` tokens. ``means`` is ``[B, H, blocks, D]``, of keys ``[B, H, D, blocks]``; ``same`` ``[B, H, blocks]``.

    Args:
        d: the columns, or a few more.
    """
    wide = vectors(element, nbytes)
    elements, words, fetch, low, high = wide.elements, wide.words, wide.load, wide.low, wide.high
    per_word, single = 2 if wide.pairs else 1, nbytes == ITEMSIZE[element]
    groups = -(-d // (32 * elements))
    lane_columns, raw_words = groups * elements, AHEAD * groups * words
    width, over_lanes, over_block = (2, WARPS, 32 * groups * elements), lanes_sum(), make_block_sum(32 * WARPS)
    threads, unequal = 32 * WARPS, broken == "lengths"
    columns_each = -(-d // threads)

    @kernel(threads=threads, arch="75", name="sparsity.pool_k" if of_keys else "sparsity.pool_q")
    def pool(x, means, same):
        sums = cuda.shared.array(width, float32)
        partials = cuda.shared.array(32, float32)
        lane, warp = int64(cuda.threadIdx.x & 31), int64(cuda.threadIdx.x >> 5)
        blocks, heads, columns = same.shape[2], same.shape[1], x.shape[3]
        number = int64(cuda.blockIdx.x)
        block, head, batch = number % blocks, number // blocks % heads, number // blocks // heads
        first = block * rows
        count = min(int64(rows), x.shape[2] - first)
        source = int64(global_address(x)) + batch * x.strides[0] + head * x.strides[1] + first * x.strides[2]
        step = x.strides[3] if single else int64(nbytes // elements)
        raw = cuda.local.array(raw_words, uint32)
        token = cuda.local.array(lane_columns, float32)
        mean = cuda.local.array(lane_columns, float32)
        unit = cuda.local.array(lane_columns, float32)
        for c in range(lane_columns):
            mean[c] = float32(0)
            unit[c] = float32(0)
        for row in range(warp, count, WARPS * AHEAD):
            for a in range(AHEAD):
                for g in range(groups):
                    for w in range(words):
                        raw[(a * groups + g) * words + w] = uint32(0)
                    column = (lane + 32 * g) * elements
                    if row + a * WARPS < count and column < columns:
                        at = source + (row + a * WARPS) * x.strides[2] + column * step
                        fetch(raw, (a * groups + g) * words, uint64(at))
            for a in range(AHEAD):
                square = float32(0)
                for g in range(groups):
                    for w in range(words):
                        at = g * elements + per_word * w
                        token[at] = low(raw[(a * groups + g) * words + w])
                        square += token[at] * token[at]
                        if per_word == 2:
                            token[at + 1] = high(raw[(a * groups + g) * words + w])
                            square += token[at + 1] * token[at + 1]
                square = over_lanes(square)
                share = float32(0)
                if square != float32(0):  # a token of zeros is like no other
                    share = rsqrt_approx(square)
                if unequal:
                    share = float32(1)
                for c in range(lane_columns):
                    mean[c] += token[c]
                    unit[c] += token[c] * share
        for g in range(groups):
            for e in range(elements):
                sums[0, warp, (lane + 32 * g) * elements + e] = mean[g * elements + e]
                sums[1, warp, (lane + 32 * g) * elements + e] = unit[g * elements + e]
        cuda.syncthreads()  # every warp's sums are there
        total, part = float32(0), rcp_approx(float32(count))
        for i in range(columns_each):
            column = int64(cuda.threadIdx.x) + i * threads
            if column < columns:
                m, u = float32(0), float32(0)
                for w in range(WARPS):
                    m += sums[0, w, column]
                    u += sums[1, w, column]
                if of_keys:
                    means[batch, head, column, block] = m * part
                else:
                    means[batch, head, block, column] = m * part
                total += u * part * (u * part)
        total = over_block(partials, total)
        if cuda.threadIdx.x == 0:
            same[batch, head, block] = total

    return pool


def pooled_shapes(shape: Shape, block_m: int, block_n: int) -> dict[str, tuple[int, ...]]:
    """Of the arrays that the two launches of ``pool`` fill."""
    rows, keys = -(-shape.m // block_m), -(-shape.n // block_n)
    padded = -(-keys // 4) * 4  # vectors of four neighbours are aligned
    return {
        "pooled_q": (shape.batch, shape.heads, rows, shape.d), "same_q": (shape.batch, shape.heads, rows),
        "pooled_k": (shape.batch, shape.kv_heads, shape.d, padded), "same_k": (shape.batch, shape.kv_heads, keys),
    }  # fmt: skip


def pool_launches(shape: Shape, block_m: int, block_n: int, broken: str = "") -> tuple[Launch, Launch]:
    """Mean tokens of q, and of k."""
    nbytes, d = min(8, shape.vector if shape.vector >= 4 else ITEMSIZE[shape.element]), -(-shape.d // 32) * 32

    def launch(of_keys: bool, rows: int, blocks: int) -> Launch:
        pool = make_pool(shape.element, nbytes, d, rows, of_keys, broken)
        args = ("k", "pooled_k", "same_k") if of_keys else ("q", "pooled_q", "same_q")
        return Launch(pool, blocks, pool.threads, 0, args)

    q_blocks = shape.batch * shape.heads * -(-shape.m // block_m)
    k_blocks = shape.batch * shape.kv_heads * -(-shape.n // block_n)
    return launch(False, block_m, q_blocks), launch(True, block_n, k_blocks)
