"""The states that the parts of split-KV attention leave, (m, l, acc) each, become one row of O and its LSE.

The merge of two states is associative, so each warp takes every eighth part in one pass, as a running maximum takes
keys, and the warps' states are merged at the end. :mod:`.split` tells the mathematics.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import Kernel, device, kernel
from flashnumba.machine.instructions import ex2_approx, f32_to_bf16, global_address, ld_global_f32
from flashnumba.machine.numba import cuda, float16, float32, int64, uint64
from flashnumba.tiles.attention import log_sum, share_of
from flashnumba.tiles.online import NOTHING

__all__ = ["MERGE_ARGS", "MERGE_FAULTS", "make_merge"]

MERGE_ARGS = ("acc_parts", "m_parts", "l_parts", "o", "lse")
MERGE_WARPS, AT_ONCE = 8, 8
MERGE_FAULTS = ("barrier", "weight")
"""What can be planted."""


@cache
def make_merge(d: int, element: str, arch: str = "80", *, broken: str = "") -> Kernel:
    """The kernel that merges parts: a block a row; its threads are ``MERGE_WARPS`` warps.

    Args:
        d: columns there are at most, a multiple of 32.
        broken: plants one of :data:`MERGE_FAULTS`.
    """
    threads, per_lane, warps, held = 32 * MERGE_WARPS, d // 32, MERGE_WARPS, AT_ONCE * d // 32
    partial, states = (MERGE_WARPS, d), (MERGE_WARPS, 2)
    no_barrier, unweighted = broken == "barrier", broken == "weight"
    is_half = element == "float16"

    @device
    def weight(m, top):
        """2^(m - top); nothing for an empty part."""
        if unweighted:
            return float32(1)
        return ex2_approx(m - (float32(0) if top == float32(NOTHING) else top))

    @kernel(threads=threads, arch=arch, name="flash_forward.merge")
    def merge(acc_parts, m_parts, l_parts, o, lse):
        sums = cuda.shared.array(partial, float32)
        state = cuda.shared.array(states, float32)
        lane = int64(cuda.threadIdx.x & 31)
        warp = int64(cuda.threadIdx.x >> 5)
        splits, heads, rows, columns = m_parts.shape[0], m_parts.shape[2], m_parts.shape[3], acc_parts.shape[4]
        index = int64(cuda.blockIdx.x)
        row, head, batch = index % rows, index // rows % heads, index // rows // heads
        apart = m_parts.shape[1] * heads * rows  # rows from a part to the next
        m_from = global_address(m_parts) + uint64(4 * index)
        l_from = global_address(l_parts) + uint64(4 * index)
        acc_from = global_address(acc_parts) + uint64(4 * index * columns)
        acc = cuda.local.array(per_lane, float32)
        loaded = cuda.local.array(held, float32)
        m = cuda.local.array(AT_ONCE, float32)
        l = cuda.local.array(AT_ONCE, float32)
        top, total = float32(NOTHING), float32(0)
        for i in range(per_lane):
            acc[i] = float32(0)
        for s0 in range(warp, splits, warps * AT_ONCE):
            # Several parts are loaded before the first is used: their latencies overlap.
            for a in range(AT_ONCE):
                s = s0 + a * warps
                m[a], l[a] = float32(NOTHING), float32(0)
                if s < splits:
                    m[a], l[a] = (
                        ld_global_f32(m_from + uint64(4 * s * apart)),
                        ld_global_f32(l_from + uint64(4 * s * apart)),
                    )
                for i in range(per_lane):
                    loaded[a * per_lane + i] = float32(0)
                    if s < splits and lane + 32 * i < columns:
                        at = s * apart * columns + lane + 32 * i
                        loaded[a * per_lane + i] = ld_global_f32(acc_from + uint64(4 * at))
            before = top
            for a in range(AT_ONCE):
                top = max(top, m[a])
            total *= weight(before, top)
            for i in range(per_lane):
                acc[i] *= weight(before, top)
            for a in range(AT_ONCE):
                share = weight(m[a], top)
                total += share * l[a]
                for i in range(per_lane):
                    acc[i] += share * loaded[a * per_lane + i]
        for i in range(per_lane):
            sums[warp, lane + 32 * i] = acc[i]
        if lane == 0:
            state[warp, 0] = top
            state[warp, 1] = total
        if not no_barrier:
            cuda.syncthreads()  # every warp's state is there
        top, total = float32(NOTHING), float32(0)
        for w in range(warps):
            top = max(top, state[w, 0])
        for w in range(warps):
            total += weight(state[w, 0], top) * state[w, 1]
        column = int64(cuda.threadIdx.x)
        if column < columns:
            x = float32(0)
            for w in range(warps):
                x += weight(state[w, 0], top) * sums[w, column]
            x *= share_of(total)
            if is_half:
                o[batch, head, row, column] = float16(x)
            else:
                o[batch, head, row, column] = f32_to_bf16(x)
        if column == 0:
            lse[batch, head, row] = log_sum(top, total)

    return merge
