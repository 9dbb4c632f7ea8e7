"""SpargeAttn's prediction: which blocks of keys a block of rows should look at, from one mean token for each block.

:mod:`flashnumba.stages.sparsity.pool` has left of each block its mean token, and how alike its tokens are. Then
``choose`` has a block of 4, 8 or 16 warps for as many blocks of rows::

    s_j = scale <mean of q, mean of k_j>        -inf if none of the rows sees it; apart if k_j's tokens are not alike
    p = exp(s - max s)                          by count 1 / (1 + max s - s): none of them is 0
    keep the largest p while their sum stays within ``kept`` of all (TopCdf), or the ``kept`` largest (top-k); one at
    least
    keep all if q's tokens are not alike, k_j for all rows if k_j's are not, and the first block if it is a sink

A thread has four neighbouring blocks of keys for four blocks of rows, with the loads of sixteen columns under way:
what one row costs is a read of all mean tokens from L2, so as many rows as there is room for share it.

Nothing is sorted. The k largest of numbers in [0, 1] are those whose bits, read as an integer, are at least some t, and
at most 30 halvings find a t for which those kept are not too many, and would be with one more; a bracket that holds one
number is narrow enough. Equal numbers are kept in the order of their blocks as far as the rest of the budget goes. Then
a warp has a row to itself, so none of this takes a barrier.

Sources: SpargeAttn, arXiv 2502.18137, section 3.3, and thu-ml/SpargeAttn, ``utils.py``, which this follows where they
differ: cosines instead of products over the greatest product, a prefix whose sum does not exceed ``kept``.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import Kernel, device, kernel
from flashnumba.machine.instructions import (
    bits_to_f32,
    ex2_approx,
    f32_to_bits,
    global_address,
    ld_global_nc_v4_f32,
    ld_shared_f32,
    ld_shared_v4_f32,
    shared_address,
    st_shared_v4_f32,
    syncwarp,
    vote_ballot,
)
from flashnumba.machine.numba import cuda, float32, int32, int64, uint32, uint64
from flashnumba.stages.sparsity import lists, pool
from flashnumba.stages.sparsity.problem import Launch, Plan, Shape
from flashnumba.tiles.online import LOG2_E, NOTHING
from flashnumba.tiles.reduce import lanes_max, lanes_sum
from flashnumba.tiles.schedule import seen_keys

__all__ = ["ALL", "FAULTS", "MOST_BLOCKS", "choose_launch", "make_choose", "plan_predicted"]

ROWS = (16, 8, 4)
"""Blocks of rows that a block may have."""
QUAD, AHEAD = 4, 16
"""Blocks of rows, and of keys, that a thread multiplies at once; columns that it loads before it uses the first. Unless
a block is promised a multiprocessor, the compiler saves registers by loading one column after the other."""
MOST_BLOCKS = 6144
"""Blocks of keys that there may be; fewer where shared memory has no room for four rows of so many scores."""
SHARED = {"80": 163, "90": 227, "100": 227, "103": 227}
"""KB of shared memory that a block may have; 99, or on sm_75 64, elsewhere."""
ALL = 1.0e30
"""A budget that nothing exceeds."""
APART = float("inf")
"""The score of a block that is kept whatever its score, and -2 its weight: both beyond those of candidates."""
CHOOSE_ARGS = ("pooled_q", "pooled_k", "same_q", "same_k", "q", "k", "mask", "scale", "causal", "kept", "alike", "sink")
FAULTS = ("barrier", "column", "strict")
"""What can be planted: the barrier between scores and choice; the columns of blocks that are not alike are not kept;
the budget is exceeded by one."""


@cache
def make_choose(d: int, rows: int, block_m: int, block_n: int, by_count: bool, broken: str = "") -> Kernel:
    """The kernel; its arguments are :data:`CHOOSE_ARGS`. ``kept`` is a sum, or by count a number. Dynamic
    shared memory has, for each of ``rows``, ``d`` floats and one for each block of keys, up to a multiple of four.

    Args:
        d: the columns, or a few more: a multiple of 32.
        rows: of :data:`ROWS`.
    """
    most, over_sum, columns_each, teams = lanes_max(), lanes_sum(), d // 32, rows // QUAD
    loaded, products = AHEAD * QUAD, QUAD * QUAD
    barrier, more = broken != "barrier", int(broken == "strict")
    apart = NOTHING if broken == "column" else APART

    @device
    def multiply(sums, tokens, means, step, columns):
        """Sums of products of four mean tokens at ``tokens``, in shared memory, and four at ``means``."""
        of_q = cuda.local.array(QUAD, float32)
        of_k = cuda.local.array(loaded, float32)
        for i in range(products):
            sums[i] = float32(0)
        for first in range(int32(0), int32(columns), int32(AHEAD)):
            for a in range(AHEAD):  # those beyond the last meet a token's zeros
                column = min(int32(first + a), int32(columns - 1))
                ld_global_nc_v4_f32(of_k, QUAD * a, means + uint64(uint32(column) * uint32(step)))
            for a in range(AHEAD):
                ld_shared_v4_f32(of_q, 0, tokens + uint32(16) * uint32(first + a))
                for w in range(QUAD):
                    for e in range(QUAD):
                        sums[QUAD * w + e] += of_q[w] * of_k[QUAD * a + e]

    @device
    def weigh(at, count, lane, found):
        """Scores become weights, 1 the largest; those that are no candidates -1, or -2 if they are kept. ``found[0]``:
        the smallest. Returns their sum."""
        four = cuda.local.array(4, float32)
        top, total = float32(NOTHING), float32(0)
        for j in range(int32(4) * lane, count, int32(128)):
            ld_shared_v4_f32(four, 0, at + uint32(4) * uint32(j))
            for e in range(4):
                if four[e] < float32(APART):
                    top = max(top, four[e])
        top, smallest = most(top), float32(1)
        for j in range(int32(4) * lane, count, int32(128)):
            ld_shared_v4_f32(four, 0, at + uint32(4) * uint32(j))
            for e in range(4):
                candidate = four[e] > float32(NOTHING) and four[e] < float32(APART)
                if by_count:  # the order alone matters, and exponentials of what is far away would all be 0
                    p = float32(1) / (float32(1) + (top - four[e] if candidate else float32(0)))
                else:
                    p = ex2_approx((four[e] - top) * float32(LOG2_E) if candidate else float32(0))
                total += p if candidate else float32(0)
                smallest = min(smallest, p)
                four[e] = p if candidate else float32(-2) if four[e] == float32(APART) else float32(-1)
            st_shared_v4_f32(at + uint32(4) * uint32(j), four, 0)
        found[0] = -most(-smallest)
        return over_sum(total)

    @device
    def within(at, count, lane, bits, taken):
        """What those whose bits are at least ``bits`` take of the budget, and how many they are."""
        four = cuda.local.array(4, float32)
        least, total, many = bits_to_f32(uint32(bits)), float32(0), float32(0)
        for j in range(int32(4) * lane, count, int32(128)):
            ld_shared_v4_f32(four, 0, at + uint32(4) * uint32(j))
            for e in range(4):
                if four[e] >= least:
                    many += float32(1)
                    total += four[e]
        taken[1] = over_sum(many)
        taken[0] = taken[1] if by_count else over_sum(total)

    @device
    def select(at, count, lane, budget, found):
        """From the smallest weight in ``found[0]`` to the one from which on all are kept there, and in ``found[1]`` the
        next one: of those that have it the first are kept, as many as are returned."""
        four = cuda.local.array(4, float32)
        taken = cuda.local.array(2, float32)
        below, above = int32(f32_to_bits(found[0])), int32(0x3F800001)
        kept, kept_many = float32(0), float32(0)
        within(at, count, lane, below, taken)
        many = taken[1]
        if taken[0] <= budget:
            above, kept = below, taken[0]
        while above > below + int32(1) and many > kept_many + float32(1):
            middle = int32((below + above) >> int32(1))
            within(at, count, lane, middle, taken)
            if taken[0] <= budget:
                above, kept, kept_many = middle, taken[0], taken[1]
            else:
                below, many = middle, taken[1]
        least, after = bits_to_f32(uint32(above)), float32(-1)
        for j in range(int32(4) * lane, count, int32(128)):
            ld_shared_v4_f32(four, 0, at + uint32(4) * uint32(j))
            for e in range(4):
                if four[e] < least:
                    after = max(after, four[e])
        after = most(after)
        room = float32(0)
        if after > float32(0):
            room = budget - kept if by_count else (budget - kept) / after
        fit = int32(min(room, float32(1e9))) + int32(more)
        if kept == float32(0):
            fit = max(fit, int32(1))
        found[0], found[1] = least, after
        return fit

    @kernel(threads=32 * rows, min_blocks=1, arch="75", name="sparsity.choose")
    def choose(pooled_q, pooled_k, same_q, same_k, q, k, mask, scale, causal, kept, alike, sink):
        shared = cuda.shared.array(0, float32)
        sums = cuda.local.array(products, float32)
        same = cuda.local.array(QUAD, float32)
        four = cuda.local.array(QUAD, float32)
        found = cuda.local.array(2, float32)
        heads, row_blocks, blocks, columns = mask.shape[1], mask.shape[2], mask.shape[3], q.shape[3]
        groups, number = uint32(uint32(row_blocks + (rows - 1)) // uint32(rows)), uint32(cuda.blockIdx.x)
        first_row, pair = int64(number % groups) * rows, uint32(number // groups)
        head, batch = int64(pair % uint32(heads)), int64(pair // uint32(heads))
        head_kv = int64(uint32(head) // (uint32(heads) // uint32(same_k.shape[1])))
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        row, count = first_row + warp, int32((blocks + 3) // 4 * 4)
        for i in range(columns_each):  # four rows' mean tokens are side by side
            column, x = lane + int32(32 * i), float32(0)
            if row < row_blocks and column < columns:
                x = pooled_q[batch, head, row, column]
            shared[((warp // QUAD) * d + column) * QUAD + warp % QUAD] = x
        cuda.syncthreads()  # the mean tokens are there
        tokens = shared_address(shared)
        scores = uint32(tokens + uint32(4 * d * rows))
        means = int64(global_address(pooled_k)) + batch * pooled_k.strides[0] + head_kv * pooled_k.strides[1]
        for piece in range(warp, (count + 127) // 128 * teams, rows):
            team, j = piece % teams, piece // teams * 128 + 4 * lane
            if j < count:
                for e in range(QUAD):
                    same[e] = same_k[batch, head_kv, min(int64(j + e), blocks - 1)]
                multiply(sums, tokens + uint32(16 * d * team), uint64(means + 4 * j), pooled_k.strides[2], columns)
                for w in range(QUAD):
                    last_row = min((first_row + QUAD * team + w + 1) * block_m, q.shape[2]) - 1
                    end, _ = seen_keys(last_row, int64(1), k.shape[2], k.shape[2] - q.shape[2], causal, 1)
                    seen = int32(min(blocks, (end + (block_n - 1)) // block_n))
                    for e in range(QUAD):
                        s = sums[QUAD * w + e] * scale
                        s = s if abs(s) < float32(APART) else float32(NOTHING)
                        s = s if same[e] > alike else float32(apart)
                        four[e] = s if j + e < seen else float32(NOTHING)
                    st_shared_v4_f32(scores + uint32(4) * uint32((QUAD * team + w) * count + j), four, 0)
        if barrier:
            cuda.syncthreads()  # the scores of all rows are there
        if row >= row_blocks:
            return
        own = uint32(scores + uint32(4) * uint32(warp * count))
        total = weigh(own, count, lane, found)
        fit = select(own, count, lane, kept if by_count else kept * total, found)
        syncwarp()  # from here on each lane reads what others wrote
        last_row = min((row + 1) * block_m, q.shape[2]) - 1
        end, _ = seen_keys(last_row, int64(1), k.shape[2], k.shape[2] - q.shape[2], causal, 1)
        seen, whole_row = int32(min(blocks, (end + (block_n - 1)) // block_n)), not same_q[batch, head, row] > alike
        below, before = uint32((uint32(1) << uint32(lane)) - uint32(1)), int32(0)
        for first in range(int32(0), int32(blocks), int32(32)):
            j, p = int32(first + lane), float32(-1)
            if j < seen:
                p = ld_shared_f32(own + uint32(4) * uint32(j))
            equal = p == found[1] and p >= float32(0)
            which = vote_ballot(equal)
            wanted = whole_row or p >= found[0] or p == float32(-2) or (sink != 0 and j == 0)
            if equal and int32(before + int32(cuda.popc(which & below))) < fit:
                wanted = True
            before = int32(before + int32(cuda.popc(which)))
            if j < blocks:
                mask[batch, head, row, uint32(j)] = 1 if wanted and j < seen else 0

    return choose


def rows_for(d: int, row_blocks: int, room: int, floats: int) -> int:
    """Rows of a block: as many as there is shared memory for, with no more than three to spare in a head's last."""
    fit = [rows for rows in ROWS if rows * (d + room) <= floats and rows < row_blocks + QUAD]
    return fit[0] if fit else ROWS[-1]


def choose_launch(shape: Shape, block_m: int, block_n: int, by_count: bool, broken: str = "") -> Launch:
    """The mask of blocks.

    Raises:
        ValueError: more than :data:`MOST_BLOCKS` blocks of keys, or than shared memory has room for.
    """
    row_blocks, blocks = -(-shape.m // block_m), -(-shape.n // block_n)
    d, number = -(-shape.d // 32) * 32, shape.arch.rstrip("a")
    floats = 256 * SHARED.get(number, 64 if number == "75" else 99)  # of shared memory
    most = min(MOST_BLOCKS, floats // ROWS[-1] - d)
    if blocks > most:
        raise ValueError(
            f"k has {shape.n} rows, {blocks} blocks of {block_n}; the prediction takes {most} on sm_{shape.arch}: use "
            "larger blocks"
        )
    room = min(most, max(512, 1 << max(0, blocks - 1).bit_length()))  # few sizes, as each is prepared once
    rows = rows_for(d, row_blocks, room, floats)
    choose = make_choose(d, rows, block_m, block_n, by_count, broken)
    grid = shape.batch * shape.heads * -(-row_blocks // rows)
    return Launch(choose, grid, choose.threads, 4 * rows * (d + room), CHOOSE_ARGS)


def plan_predicted(
    shape: Shape, attend: Plan, block_m: int, block_n: int, by_count: bool, broken: str = ""
) -> Plan:  # fmt: skip
    """``attend``, a plan over the blocks of a mask, with the launches before it that make the mask.

    Raises:
        ValueError: as :func:`choose_launch`.
    """
    means = pool.pool_launch(shape, block_m, block_n, broken)
    choose = choose_launch(shape, block_m, block_n, by_count, broken)
    made = pool.pooled_shapes(shape, block_m, block_n) | {"mask": lists.mask_shape(shape, block_m, block_n)}
    return Plan((means, choose, *attend.launches), attend.scratch | made)
