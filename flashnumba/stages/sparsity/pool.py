"""SpargeAttn's mean tokens: what is left of each block of q, and of k, for the prediction.

``pool`` reads q and k once, and leaves of each block its mean token and how alike its tokens are: the squared length of
the mean of the tokens over their lengths, which is the mean cosine of all pairs. Means of k lie with blocks in a row,
[D, blocks], up to a multiple of four: then threads of :mod:`flashnumba.stages.sparsity.predict` read four neighbouring
scores' terms at once, and neighbouring threads neighbouring ones.

Memory decides, so vectors are wide and a warp takes as many rows at once as they leave lanes for: a row of 128 float16
is 16 lanes' of 16 bytes, and one exchange adds up the squares of two rows.

Source: as there.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import Kernel, kernel
from flashnumba.machine.instructions import global_address, rcp_approx, rsqrt_approx
from flashnumba.machine.numba import cuda, float32, int32, int64, uint32, uint64
from flashnumba.stages.sparsity.problem import Launch, Shape
from flashnumba.tiles.elements import ITEMSIZE, vectors
from flashnumba.tiles.reduce import lanes_sum, make_block_sum

__all__ = ["FAULTS", "make_pool", "pool_launch", "pooled_shapes"]

WARPS, AHEAD = 2, 4
"""Warps a block; vectors of a column that a lane loads before it uses the first."""
BLOCKS = 14
"""Of a multiprocessor. Left to itself, the compiler saves registers by loading one vector after the other."""
FAULTS = ("lengths",)
"""What can be planted: tokens that count as long as they are."""
ARGS = ("q", "k", "pooled_q", "pooled_k", "same_q", "same_k")


@cache
def make_pool(element: str, nbytes: int, d: int, block_m: int, block_n: int, broken: str = "") -> Kernel:
    """The kernel; its arguments are :data:`ARGS`. A block of threads for each block of ``block_m`` rows of q, ``[B, H,
    M, D]``, and then for each of ``block_n`` of k, ``[B, Hkv, N, D]``. ``pooled_q`` is ``[B, H, blocks, D]``,
    ``pooled_k`` ``[B, Hkv, D, blocks or more]``, ``same_q`` and ``same_k`` are ``[B, H, blocks]``.

    Args:
        nbytes: of a vector.
        d: the columns, or a few more.
    """
    wide = vectors(element, nbytes)
    elements, words, fetch, low, high = wide.elements, wide.words, wide.load, wide.low, wide.high
    per_word, single, unequal = 2 if wide.pairs else 1, nbytes == ITEMSIZE[element], broken == "lengths"
    lanes = min(32, 1 << (-(-d // elements) - 1).bit_length())
    groups, beside, shift = -(-d // (lanes * elements)), 32 // lanes, lanes.bit_length() - 1
    lane_columns, raw_words, parts, threads = groups * elements, AHEAD * groups * words, WARPS * beside, 32 * WARPS
    width, columns_each = (2, parts, lanes * lane_columns), -(-lanes * lane_columns // threads)
    over_row, over_block = lanes_sum(lanes), make_block_sum(threads)

    @kernel(threads=threads, min_blocks=BLOCKS, arch="75", name="sparsity.pool")
    def pool(q, k, pooled_q, pooled_k, same_q, same_k):
        sums = cuda.shared.array(width, float32)
        partials = cuda.shared.array(32, float32)
        number = uint32(cuda.blockIdx.x)
        of_q = uint32(same_q.shape[0] * same_q.shape[1] * same_q.shape[2])
        base, batch_step, head_step = int64(global_address(q)), q.strides[0], q.strides[1]
        row_step, column_step, columns = q.strides[2], q.strides[3], int32(q.shape[3])
        blocks, heads, rows, each = uint32(same_q.shape[2]), uint32(same_q.shape[1]), q.shape[2], int64(block_m)
        of_keys = number >= of_q
        if of_keys:
            number = uint32(number - of_q)
            base, batch_step, head_step = int64(global_address(k)), k.strides[0], k.strides[1]
            row_step, column_step = k.strides[2], k.strides[3]
            blocks, heads, rows, each = uint32(same_k.shape[2]), uint32(same_k.shape[1]), k.shape[2], int64(block_n)
        pair = uint32(number // blocks)
        batch = uint32(pair // heads)
        block, head, batch = int64(number - pair * blocks), int64(pair - batch * heads), int64(batch)
        count = int32(min(each, rows - block * each))
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        own, place = int32(warp * beside + (lane >> shift)), int32(lane & (lanes - 1))  # among rows, and in the row
        step = column_step if single else int64(nbytes // elements)
        at_row = (
            base + batch * batch_step + head * head_step + (block * each + own) * row_step + place * elements * step
        )
        jump, after, left = parts * row_step, lanes * elements * step, int32(count - own)
        raw = cuda.local.array(raw_words, uint32)
        token = cuda.local.array(lane_columns, float32)
        mean = cuda.local.array(lane_columns, float32)
        unit = cuda.local.array(lane_columns, float32)
        for c in range(lane_columns):
            mean[c] = float32(0)
            unit[c] = float32(0)
        for first in range(int32(0), count, int32(parts * AHEAD)):
            for a in range(AHEAD):
                for g in range(groups):
                    for w in range(words):
                        raw[(a * groups + g) * words + w] = uint32(0)
                    column = int32((place + lanes * g) * elements)
                    if int32(first + int32(a * parts)) < left and column < columns:
                        fetch(raw, (a * groups + g) * words, uint64(at_row + g * after))
                at_row += jump
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
                square = over_row(square)
                share = float32(0)
                if square != float32(0):  # a token of zeros is like no other
                    share = rsqrt_approx(square)
                if unequal:
                    share = float32(1)
                for c in range(lane_columns):
                    mean[c] += token[c]
                    unit[c] += token[c] * share
        for c in range(lane_columns):  # lane by lane, for no conflicts: a thread's column is then not its number
            sums[0, own, int32(c * lanes) + place] = mean[c]
            sums[1, own, int32(c * lanes) + place] = unit[c]
        cuda.syncthreads()  # every lane's sums are there
        total, part = float32(0), rcp_approx(float32(count))
        for i in range(columns_each):
            at = uint32(cuda.threadIdx.x + i * threads)
            c = at >> shift
            column = int32(((at & (lanes - 1)) + lanes * (c // elements)) * elements + c % elements)
            if column < columns:
                m, u = float32(0), float32(0)
                for w in range(parts):
                    m += sums[0, w, at]
                    u += sums[1, w, at]
                if of_keys:
                    pooled_k[batch, head, column, block] = m * part
                else:
                    pooled_q[batch, head, block, column] = m * part
                total += u * part * (u * part)
        total = over_block(partials, total)
        if cuda.threadIdx.x == 0:
            if of_keys:
                same_k[batch, head, block] = total
            else:
                same_q[batch, head, block] = total

    return pool


def pooled_shapes(shape: Shape, block_m: int, block_n: int) -> dict[str, tuple[int, ...]]:
    """Of the arrays that ``pool`` fills."""
    rows, keys = -(-shape.m // block_m), -(-shape.n // block_n)
    padded = -(-keys // 4) * 4  # vectors of four neighbours are aligned
    return {
        "pooled_q": (shape.batch, shape.heads, rows, shape.d), "same_q": (shape.batch, shape.heads, rows),
        "pooled_k": (shape.batch, shape.kv_heads, shape.d, padded), "same_k": (shape.batch, shape.kv_heads, keys),
    }  # fmt: skip


def pool_launch(shape: Shape, block_m: int, block_n: int, broken: str = "") -> Launch:
    """Mean tokens of q and of k."""
    nbytes, d = shape.vector if shape.vector >= 4 else ITEMSIZE[shape.element], -(-shape.d // 32) * 32
    pool = make_pool(shape.element, nbytes, d, block_m, block_n, broken)
    q_blocks = shape.batch * shape.heads * -(-shape.m // block_m)
    k_blocks = shape.batch * shape.kv_heads * -(-shape.n // block_n)
    return Launch(pool, q_blocks + k_blocks, pool.threads, 0, ARGS)
