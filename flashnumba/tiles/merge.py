"""The states that the parts of split-KV attention leave, (m, l, acc) each, become one row of O and its LSE.

The merge of two states is associative, so each warp takes its share of the parts in one pass, as a running maximum
takes keys, and the warps' states are merged at the end. A lane has four neighbouring columns, or one where rows are no
multiple of four. :mod:`flashnumba.tiles.split` tells the mathematics.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import DeviceFunction, Kernel, device, kernel
from flashnumba.machine.instructions import (
    ex2_approx,
    f32_to_bf16,
    global_address,
    ld_global_f32,
    ld_global_v4_f32,
)
from flashnumba.machine.numba import cuda, float16, float32, int64, uint64
from flashnumba.tiles.attention import factor_of, log_sum, seen, share_of
from flashnumba.tiles.dependency import can_start_early, make_trigger, make_wait
from flashnumba.tiles.online import NOTHING

__all__ = ["MERGE_ARGS", "MERGE_FAULTS", "make_merge", "make_weight", "warps_for"]

MERGE_ARGS = ("acc_parts", "m_parts", "l_parts", "o", "lse", "scale")
AT_ONCE, MOST_WARPS = 8, 8
MERGE_FAULTS = ("barrier", "weight", "wait")
"""What can be planted."""


def warps_for(splits: int) -> int:
    """Warps a row: each loads up to :data:`AT_ONCE` parts before it uses the first."""
    return min(MOST_WARPS, 1 << max(0, -(-splits // AT_ONCE) - 1).bit_length())


@cache
def make_weight(right: bool = True) -> DeviceFunction:
    """``weight(m, top, factor)``: 2^((m - top) factor), what a state of maximum m counts in one of maximum ``top``;
    nothing if it is empty. ``right=False`` plants a fault: all count 1."""

    @device
    def weight(m, top, factor):
        return ex2_approx((m - seen(top)) * factor)

    @device
    def one(m, top, factor):
        return float32(1)

    return weight if right else one


@cache
def make_merge(
    d: int, element: str, warps: int = MOST_WARPS, arch: str = "80", *, wide: bool = True, broken: str = ""
) -> Kernel:
    """The kernel that merges parts: a block of ``warps`` warps a row.

    Args:
        d: columns there are at most, a multiple of 32.
        arch: from "90" on it starts while the parts are still being computed, and waits.
        wide: the number of columns is a multiple of four.
        broken: plants one of :data:`MERGE_FAULTS`.
    """
    threads, width = 32 * warps, 4 if wide else 1
    groups = -(-d // (32 * width))  # of ``width`` columns, a lane
    per_lane = groups * width
    held, partial, states, columns_each = AT_ONCE * per_lane, (warps, d), (warps, 2), -(-d // threads)
    no_barrier, weight = broken == "barrier", make_weight(broken != "weight")
    trigger, wait = make_trigger(arch), make_wait(arch, broken != "wait")
    is_half = element == "float16"

    @device
    def load(loaded, at, address):
        if wide:
            ld_global_v4_f32(loaded, at, address)
        else:
            loaded[at] = ld_global_f32(address)

    @kernel(threads=threads, arch=arch, early=can_start_early(arch), name="flash_forward.merge")
    def merge(acc_parts, m_parts, l_parts, o, lse, scale):
        trigger()
        sums = cuda.shared.array(partial, float32)
        state = cuda.shared.array(states, float32)
        factor = factor_of(scale)
        lane = int64(cuda.threadIdx.x & 31)
        warp = int64(cuda.threadIdx.x >> 5)
        splits, heads, rows, columns = m_parts.shape[0], m_parts.shape[2], m_parts.shape[3], acc_parts.shape[4]
        index = int64(cuda.blockIdx.x)
        row, head, batch = index % rows, index // rows % heads, index // rows // heads
        apart = m_parts.shape[1] * heads * rows  # rows from a part to the next
        state_step, acc_step = uint64(4 * warps * apart), uint64(4 * warps * apart * columns)
        first = warp * apart + index
        m_from, l_from = global_address(m_parts) + uint64(4 * first), global_address(l_parts) + uint64(4 * first)
        acc_from = global_address(acc_parts) + uint64(4 * (first * columns + width * lane))
        acc = cuda.local.array(per_lane, float32)
        loaded = cuda.local.array(held, float32)
        m = cuda.local.array(AT_ONCE, float32)
        l = cuda.local.array(AT_ONCE, float32)
        top, total = float32(NOTHING), float32(0)
        wait()
        for i in range(per_lane):
            acc[i] = float32(0)
        for s in range(warp, splits, warps * AT_ONCE):
            # Several parts are loaded before the first is used: their latencies overlap.
            for a in range(AT_ONCE):
                m[a], l[a] = float32(NOTHING), float32(0)
                for i in range(per_lane):
                    loaded[a * per_lane + i] = float32(0)
                if s + a * warps < splits:
                    m[a], l[a] = ld_global_f32(m_from), ld_global_f32(l_from)
                    for g in range(groups):
                        if width * (lane + 32 * g) < columns:
                            load(loaded, a * per_lane + g * width, acc_from + uint64(128 * width * g))
                m_from, l_from, acc_from = m_from + state_step, l_from + state_step, acc_from + acc_step
            before = top
            for a in range(AT_ONCE):
                top = max(top, m[a])
            kept = weight(before, top, factor)
            total *= kept
            for i in range(per_lane):
                acc[i] *= kept
            for a in range(AT_ONCE):
                share = weight(m[a], top, factor)
                total += share * l[a]
                for i in range(per_lane):
                    acc[i] += share * loaded[a * per_lane + i]
        for g in range(groups):
            for i in range(width):
                column = width * (lane + 32 * g) + i
                if column < d:
                    sums[warp, column] = acc[g * width + i]
        if lane == 0:
            state[warp, 0] = top
            state[warp, 1] = total
        if not no_barrier:
            cuda.syncthreads()  # every warp's state is there
        top, total = float32(NOTHING), float32(0)
        for w in range(warps):
            top = max(top, state[w, 0])
        for w in range(warps):
            total += weight(state[w, 0], top, factor) * state[w, 1]
        share = share_of(total)
        for i in range(columns_each):
            column = int64(cuda.threadIdx.x) + i * threads
            if column < columns:
                x = float32(0)
                for w in range(warps):
                    x += weight(state[w, 0], top, factor) * sums[w, column]
                if is_half:
                    o[batch, head, row, column] = float16(x * share)
                else:
                    o[batch, head, row, column] = f32_to_bf16(x * share)
        if cuda.threadIdx.x == 0:
            lse[batch, head, row] = log_sum(top, total, factor)

    return merge
