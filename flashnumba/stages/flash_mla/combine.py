"""The states that the parts of a request left become its O and LSE.

A block for each row of each request. A request in one part has been written already; its rows have nothing to do. The
mathematics is that of :mod:`flashnumba.tiles.merge`, which takes as many parts of every request; here they are ragged::

    M = max_s m_s        O = sum_s 2^((m_s - M) f) acc_s / sum_s 2^((m_s - M) f) l_s

A thread has four columns, and takes the parts in their order, so sums are always the same. A part in
which a row saw nothing has m = -inf and weight 0.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import Kernel, device, kernel
from flashnumba.machine.instructions import ex2_approx, global_address, ld_global_f32, ld_global_v4_f32, st_global_v2
from flashnumba.machine.numba import cuda, float32, int64, uint32, uint64
from flashnumba.tiles.attention import factor_of, log_sum, share_of
from flashnumba.tiles.dependency import can_start_early, make_wait
from flashnumba.tiles.elements import vectors
from flashnumba.tiles.online import NOTHING, anchor

__all__ = ["COMBINE_ARGS", "COMBINE_FAULTS", "make_combine"]

COMBINE_ARGS = ("num_splits", "acc_parts", "m_parts", "l_parts", "o", "lse", "scale")
AT_ONCE = 8
COMBINE_FAULTS = ("twice", "weight", "wait")
"""What can be planted."""


@cache
def make_combine(element: str, dv: int = 512, arch: str = "80", *, broken: str = "") -> Kernel:
    """``(num_splits, acc_parts, m_parts, l_parts, o, lse, scale)``, in blocks of ``dv / 4`` threads.

    ``num_splits`` int32 ``[B + 1]``, ``acc_parts`` float32 ``[splits, rows, dv]``, ``m_parts`` and ``l_parts``
    ``[splits, rows]``, ``o`` ``[B, S, H, dv]`` packed, ``lse`` ``[B, H, S]``.

    Args:
        arch: from "90" on it starts while the parts are still being computed, and waits.
        broken: plants one of :data:`COMBINE_FAULTS`.
    """
    threads, held = dv // 4, 4 * AT_ONCE
    pack, again, weighted = vectors(element, 8, arch=arch).pack, int(broken == "twice"), broken != "weight"
    wait = make_wait(arch, broken != "wait")

    @device
    def weight(m, top, factor):
        """2^((m - top) factor); nothing for an empty part."""
        if not weighted:
            return float32(1)
        return ex2_approx((m - anchor(top)) * factor)

    @kernel(threads=threads, arch=arch, early=can_start_early(arch), name="flash_mla.combine")
    def combine(num_splits, acc_parts, m_parts, l_parts, o, lse, scale):
        acc = cuda.local.array(4, float32)
        loaded = cuda.local.array(held, float32)
        m = cuda.local.array(AT_ONCE, float32)
        l = cuda.local.array(AT_ONCE, float32)
        words = cuda.local.array(2, uint32)
        rows, heads = int64(acc_parts.shape[1]), int64(lse.shape[1])
        row, request = int64(cuda.blockIdx.x) % rows, int64(cuda.blockIdx.x) // rows
        wait()
        begin, end = int64(num_splits[request]), int64(num_splits[request + 1])
        if end - begin > 1:
            factor = factor_of(scale)
            top, total = float32(NOTHING), float32(0)
            for i in range(4):
                acc[i] = float32(0)
            column = uint64(16) * uint64(cuda.threadIdx.x)
            for first in range(begin - again, end, AT_ONCE):
                # Several parts are loaded before the first is used: their latencies overlap.
                for a in range(AT_ONCE):
                    m[a], l[a] = float32(NOTHING), float32(0)
                    for i in range(4):
                        loaded[4 * a + i] = float32(0)
                    if first + a < end:
                        at = uint64(max(first + a, begin) * rows + row)
                        m[a] = ld_global_f32(global_address(m_parts) + uint64(4) * at)
                        l[a] = ld_global_f32(global_address(l_parts) + uint64(4) * at)
                        ld_global_v4_f32(loaded, 4 * a, global_address(acc_parts) + uint64(4 * dv) * at + column)
                before = top
                for a in range(AT_ONCE):
                    top = max(top, m[a])
                kept = weight(before, top, factor)
                total *= kept
                for i in range(4):
                    acc[i] *= kept
                for a in range(AT_ONCE):
                    share = weight(m[a], top, factor)
                    total += share * l[a]
                    for i in range(4):
                        acc[i] += share * loaded[4 * a + i]
            part_of = share_of(total)
            for w in range(2):
                words[w] = pack(acc[2 * w] * part_of, acc[2 * w + 1] * part_of)
            to = global_address(o) + uint64(2 * (request * rows + row) * dv)
            st_global_v2(to + uint64(8) * uint64(cuda.threadIdx.x), words, 0)
            if cuda.threadIdx.x == 0:
                lse[request, row % heads, row // heads] = log_sum(top, total, factor)

    return combine
