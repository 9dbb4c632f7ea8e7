"""SpargeAttn's prediction: which blocks of keys a block of rows should look at, from one mean token for each block.

:mod:`flashnumba.stages.sparsity.pool` has left of each block its mean token, and how alike its tokens are. Then
``choose`` has a block of four warps for every four blocks of rows::

    s_j = scale <mean of q, mean of k_j>        -inf if k_j's tokens are not alike, or none of the rows sees it
    p = softmax(s)
    keep the largest p while their sum stays within ``kept`` (TopCdf), or the ``kept`` largest (top-k); one at least
    keep all if q's tokens are not alike, k_j for all rows if k_j's are not, and the first block if it is a sink

Nothing is sorted. The k largest of numbers in [0, 1] are those whose bits, read as an integer, are at least some t, and
30 halvings find the smallest t for which those kept are not too many. Equal numbers are kept in the order of their
blocks as far as the rest of the budget goes. A warp has a row to itself, so none of this takes a barrier.

Sources: SpargeAttn, arXiv 2502.18137, section 3.3, and thu-ml/SpargeAttn, ``utils.py``, which this follows where they
differ: cosines instead of products over the greatest product, a prefix whose sum does not exceed ``kept``.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import Kernel, device, kernel
from flashnumba.machine.instructions import (
    bits_to_f32,
    ex2_approx,
    rcp_approx,
    syncwarp,
    vote_ballot,
)
from flashnumba.machine.numba import cuda, float32, int32, int64, uint32
from flashnumba.stages.sparsity import lists, pool
from flashnumba.stages.sparsity.problem import Launch, Plan, Shape
from flashnumba.tiles.online import LOG2_E, NOTHING
from flashnumba.tiles.reduce import lanes_max, lanes_sum
from flashnumba.tiles.schedule import seen_keys

__all__ = ["ALL", "FAULTS", "MOST_BLOCKS", "choose_launch", "make_choose", "plan_predicted"]

WARPS = 4
"""A block, each with a block of rows."""
MOST_BLOCKS = 6144
"""Blocks of keys that four rows of scores leave room for in 99 KB of shared memory."""
ALL = 1.0e30
"""A budget that nothing exceeds."""
CHOOSE_ARGS = ("pooled_q", "pooled_k", "same_q", "same_k", "q", "k", "mask", "scale", "causal", "kept", "alike", "sink")
FAULTS = ("barrier", "column", "strict")
"""What can be planted: the barrier between scores and choice; the columns of blocks that are not alike are not kept;
the budget is exceeded by one."""


@cache
def make_choose(d: int, block_m: int, block_n: int, by_count: bool, broken: str = "") -> Kernel:
    """The kernel; its arguments are :data:`CHOOSE_ARGS`. ``kept`` is a sum, or by count a number; four floats of
    dynamic shared memory for each block of keys."""
    most, tokens = lanes_max(), (d, WARPS)
    over_sum, columns_each = lanes_sum(), -(-d // 32)
    barrier, columns_forced, more = broken != "barrier", broken != "column", int(broken == "strict")

    @device
    def within(scores, start, blocks, lane, bits):
        """What those whose bits are at least ``bits`` take of the budget."""
        least, taken = bits_to_f32(uint32(bits)), float32(0)
        for j in range(lane, blocks, int64(32)):
            p = scores[start + j]
            if p >= least:
                taken += float32(1) if by_count else p
        return over_sum(taken)

    @device
    def weigh(scores, start, blocks, lane):
        """Scores become weights, -1 for those of -inf, and for a NaN."""
        top = float32(NOTHING)
        for j in range(lane, blocks, int64(32)):
            top = max(top, scores[start + j])
        top, total = most(top), float32(0)
        for j in range(lane, blocks, int64(32)):
            p = float32(-1)
            if scores[start + j] > float32(NOTHING):
                p = ex2_approx((scores[start + j] - top) * float32(LOG2_E))
                total += p
            scores[start + j] = p
        total = over_sum(total)
        share = rcp_approx(total) if total > float32(0) else float32(1)
        for j in range(lane, blocks, int64(32)):
            if scores[start + j] > float32(0):
                scores[start + j] *= share

    @device
    def select(scores, start, blocks, lane, budget, found):
        """``found[0]``: bits from which on all are kept. ``found[1]``: of how many that are next, the first are."""
        below, above = int32(0), int32(0x3F800100)
        if within(scores, start, blocks, lane, below) <= budget:
            above = below
        while above > below + int32(1):
            middle = int32((below + above) >> int32(1))
            if within(scores, start, blocks, lane, middle) <= budget:
                above = middle
            else:
                below = middle
        taken = within(scores, start, blocks, lane, above)
        least, after = bits_to_f32(uint32(above)), float32(-1)
        for j in range(lane, blocks, int64(32)):
            if scores[start + j] < least:
                after = max(after, scores[start + j])
        after = most(after)
        each = float32(1) if by_count else after
        room = float32(0)
        if after > float32(0):
            room = (budget - taken) * rcp_approx(each) if by_count else (budget - taken) / each
        fit = int32(min(room, float32(1e9))) + int32(more)
        if taken == float32(0):
            fit = max(fit, int32(1))
        found[0], found[1] = least, after
        return fit

    @kernel(threads=32 * WARPS, arch="75", name="sparsity.choose")
    def choose(pooled_q, pooled_k, same_q, same_k, q, k, mask, scale, causal, kept, alike, sink):
        scores = cuda.shared.array(0, float32)
        rows = cuda.shared.array(tokens, float32)
        sums = cuda.local.array(WARPS, float32)
        found = cuda.local.array(2, float32)
        heads, row_blocks, blocks, columns = mask.shape[1], mask.shape[2], mask.shape[3], q.shape[3]
        groups = (row_blocks + (WARPS - 1)) // WARPS
        number = int64(cuda.blockIdx.x)
        head, batch = number // groups % heads, number // groups // heads
        head_kv = head // (heads // same_k.shape[1])
        lane, warp = int64(cuda.threadIdx.x & 31), int64(cuda.threadIdx.x >> 5)
        row = number % groups * WARPS + warp
        for i in range(columns_each):
            column = lane + 32 * i
            if column < d:
                x = float32(0)
                if row < row_blocks and column < columns:
                    x = pooled_q[batch, head, row, column]
                rows[column, warp] = x
        cuda.syncthreads()  # the four mean tokens are there
        for j in range(int64(cuda.threadIdx.x), blocks, int64(32 * WARPS)):
            for w in range(WARPS):
                sums[w] = float32(0)
            for column in range(columns):
                of_k = pooled_k[batch, head_kv, column, j]
                for w in range(WARPS):
                    sums[w] += rows[column, w] * of_k
            usable = same_k[batch, head_kv, j] > alike
            for w in range(WARPS):
                last_row = min((number % groups * WARPS + w + 1) * block_m, q.shape[2]) - 1
                end, _ = seen_keys(last_row, int64(1), k.shape[2], k.shape[2] - q.shape[2], causal, 1)
                scores[w * blocks + j] = sums[w] * scale if usable and j * block_n < end else float32(NOTHING)
        if barrier:
            cuda.syncthreads()  # the scores of all four rows are there
        if row >= row_blocks:
            return
        start = warp * blocks
        weigh(scores, start, blocks, lane)
        syncwarp()  # each lane reads what it wrote; the order of the two loops is the same
        fit = select(scores, start, blocks, lane, kept, found)
        last_row = min((row + 1) * block_m, q.shape[2]) - 1
        end, _ = seen_keys(last_row, int64(1), k.shape[2], k.shape[2] - q.shape[2], causal, 1)
        whole_row = not same_q[batch, head, row] > alike
        below = uint32((uint32(1) << uint32(lane)) - uint32(1))
        before = int32(0)
        for first in range(int64(0), blocks, int64(32)):
            j = first + lane
            p, wanted = float32(-1), False
            if j < blocks:
                p = scores[start + j]
                wanted = whole_row or p >= found[0] or (sink != 0 and j == 0)
                if columns_forced:
                    wanted = wanted or not same_k[batch, head_kv, j] > alike
            equal = p == found[1] and p >= float32(0)
            which = vote_ballot(equal)
            if equal and before + int32(cuda.popc(which & below)) < fit:
                wanted = True
            before += int32(cuda.popc(which))
            if j < blocks:
                mask[batch, head, row, j] = 1 if wanted and j * block_n < end else 0

    return choose


def choose_launch(shape: Shape, block_m: int, block_n: int, by_count: bool, broken: str = "") -> Launch:
    """The mask of blocks.

    Raises:
        ValueError: more than :data:`MOST_BLOCKS` blocks of keys.
    """
    rows, blocks = -(-shape.m // block_m), -(-shape.n // block_n)
    if blocks > MOST_BLOCKS:
        raise ValueError(
            f"k has {shape.n} rows, {blocks} blocks of {block_n}; the prediction takes {MOST_BLOCKS}: use larger blocks"
        )
    choose = make_choose(-(-shape.d // 32) * 32, block_m, block_n, by_count, broken)
    room = max(512, 1 << max(0, blocks - 1).bit_length())  # few sizes, as each is prepared once
    shared = 4 * WARPS * min(room, MOST_BLOCKS)
    return Launch(choose, shape.batch * shape.heads * -(-rows // WARPS), choose.threads, shared, CHOOSE_ARGS)


def plan_predicted(
    shape: Shape, attend: Plan, block_m: int, block_n: int, by_count: bool, broken: str = ""
) -> Plan:  # fmt: skip
    """``attend``, a plan over the blocks of a mask, with the launches before it that make the mask.

    Raises:
        ValueError: as :func:`choose_launch`.
    """
    pools = pool.pool_launches(shape, block_m, block_n, broken)
    choose = choose_launch(shape, block_m, block_n, by_count, broken)
    made = pool.pooled_shapes(shape, block_m, block_n) | {"mask": lists.mask_shape(shape, block_m, block_n)}
    return Plan((*pools, choose, *attend.launches), attend.scratch | made)
