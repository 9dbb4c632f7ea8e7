"""The steps of a kernel that attends to latent rows; see :mod:`flashnumba.stages.flash_mla.sizes` for who does what.

Fragments lie as in :mod:`flashnumba.tiles.attention`: lane (g, c) = (lane / 4, lane % 4) has of a fragment of 16 rows
the rows g and g + 8, and of eight columns the columns 2 c and 2 c + 1. A row's state is kept twice: by the warps that
have part of its S, and by all, which have part of its O.

The maximum is subtracted before the product with the factor, which is exact where it matters: S has so few elements
beside d products each that the instruction more is nothing.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import (
    ex2_approx,
    ld_shared_f32,
    ld_shared_v4_f32,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    st_shared_b32,
    st_shared_f32,
    st_shared_v4_f32,
    vote_any,
)
from flashnumba.machine.numba import cuda, float32, uint32
from flashnumba.stages.flash_mla.leave import make_total
from flashnumba.stages.flash_mla.sizes import MLATiles
from flashnumba.tiles.elements import vectors
from flashnumba.tiles.online import NOTHING, anchor
from flashnumba.tiles.reduce import lanes_max, lanes_sum
from flashnumba.tiles.swizzle import swizzle
from flashnumba.tiles.tensor import make_multiply

__all__ = ["LatentSteps", "make_steps"]


class LatentSteps(NamedTuple):
    """Device functions on a warp's registers and on addresses in shared memory.

    ``s`` is ``[2 or 1 x frags * bk / 2]`` float32, ``acc`` ``[bm / 16 * columns / 2]``; ``m_s``, ``l`` are of S's rows,
    ``[2 frags]``, ``m`` of O's, ``[bm / 8]``.

    Attributes:
        q_lane: ``(q_tile, row, lane) -> address``: where a lane's ldmatrix begins; ``row`` is the part's first.
        k_lane: ``(k_tile, key, lane)``; ``p_lane``: ``(p_tile, lane)``; ``v_lane``: ``(k_tile, warp, lane)``.
        clear: ``(acc, m, m_s, l)``: nothing seen yet.
        load_q: ``(q_held, q_lane)``: Q into registers.
        multiply_qk: ``(s, q_held, q_lane, k_lane)``: the warp's part of S = Q K^T.
        exchange: ``(s, p_tile, lane)``: where tiles are ``deep``, after ``multiply_qk``; s is then twice as large.
        leave_maximum: ``(s, stats, row, part, lane)``: the maxima of the warp's part.
        raise_maximum: ``(m_s, l, stats, row, factor)``: m_s to the maximum of all parts, l in its units.
        weights: ``(s, m_s, l, p_tile, row, column, factor, lane)``: P, rounded, to shared memory; l grows.
        rescale: ``(acc, m, l, stats, factor, lane)``: m to the new maximum and acc in its units; l too, where a warp
            has all rows of S.
        multiply_pv: ``(acc, p_lane, v_lane)``: O += P V, of the warp's columns.
        leave_sum: ``(l, stats, row, part, lane)``; ``total``: ``(stats, row) -> float32``: the sum over all parts.
    """

    q_lane: DeviceFunction
    k_lane: DeviceFunction
    p_lane: DeviceFunction
    v_lane: DeviceFunction
    clear: DeviceFunction
    load_q: DeviceFunction
    multiply_qk: DeviceFunction
    exchange: DeviceFunction
    leave_maximum: DeviceFunction
    raise_maximum: DeviceFunction
    weights: DeviceFunction
    rescale: DeviceFunction
    multiply_pv: DeviceFunction
    leave_sum: DeviceFunction
    total: DeviceFunction


@cache
def make_steps(tiles: MLATiles, element: str, arch: str = "80", broken: str = "") -> LatentSteps:
    """The steps for float16 or bfloat16. ``broken="rescale"`` plants a fault."""
    bm, bk, frags, parts, columns, held = tiles.bm, tiles.bk, tiles.frags, tiles.key_parts, tiles.columns, tiles.held
    of_k, of_p = swizzle(tiles.d), swizzle(tiles.bn)
    q_at, pitch, step = of_k.at, of_k.pitch, of_k.step
    p_place, p_pitch, p_step = of_p.at, of_p.pitch, of_p.step
    multiply, pack = make_multiply(element, arch), vectors(element, 4, arch=arch).pack
    quad_max, quad_sum = lanes_max(4), lanes_sum(4)
    depth, groups, o_frags, o_groups, rows = tiles.d // 16, bk // 8, bm // 16, columns // 8, 2 * frags
    s_regs, o_regs, a_regs, pv_steps = frags * groups * 4, bm // 16 * columns // 2, 4 * frags, tiles.bn // 16
    p_regs = 4 * o_frags
    sums = 2
    t_regs = sums * s_regs
    deep, q_rows, exchanged = tiles.deep, 16 * frags * (2 if tiles.deep else 1), broken != "exchange"
    same_rows = tiles.row_parts == 1
    rescaled, narrow = broken != "rescale", groups == 1

    @device
    def q_lane(q_tile, row, lane):
        return q_at(q_tile, uint32(row) // uint32(q_rows) * uint32(q_rows) + uint32(lane & 15), lane >> 4)

    @device
    def k_lane(k_tile, key, lane):
        if narrow:
            return q_at(k_tile, uint32(key) + uint32(lane & 7), lane >> 3)
        return q_at(k_tile, uint32(key) + uint32((lane & 7) + 8 * (lane >> 4)), (lane >> 3) & 1)

    @device
    def p_lane(p_tile, lane):
        return p_place(p_tile, lane & 15, lane >> 4)

    @device
    def v_lane(k_tile, warp, lane):
        return q_at(k_tile, lane & 15, lane >> 4) + uint32(warp) * uint32(2 * columns)

    @device
    def clear(acc, m, m_s, l):
        for i in range(o_regs):
            acc[i] = float32(0)
        for r in range(2 * o_frags):
            m[r] = float32(NOTHING)
        for r in range(rows):
            m_s[r] = float32(NOTHING)
            l[r] = float32(0)

    @device
    def load_q(q_held, q_lane):
        if held:
            for k in range(depth):
                for f in range(frags):
                    ldmatrix_x4(q_held, (k * frags + f) * 4, step(q_lane, k) + uint32(f * 16 * pitch))

    @device
    def multiply_qk(s, q_held, q_lane, k_lane):
        """Few sums are kept twice, for even and odd steps: a product need not wait for the result of the last one."""
        a = cuda.local.array(a_regs, uint32)
        b = cuda.local.array(4, uint32)
        t = cuda.local.array(t_regs, float32)
        for i in range(t_regs):
            t[i] = float32(0)
        for k in range(depth):
            if not held:
                for f in range(frags):
                    ldmatrix_x4(a, 4 * f, step(q_lane, k) + uint32(f * 16 * pitch))
            if narrow:
                if k % 2 == 0:
                    ldmatrix_x4(b, 0, step(k_lane, k))  # of eight keys, for this step and the next
                for f in range(frags):
                    if held:
                        multiply(t, (k % sums) * s_regs + 4 * f, q_held, (k * frags + f) * 4, b, k % 2 * 2)
                    else:
                        multiply(t, (k % sums) * s_regs + 4 * f, a, 4 * f, b, k % 2 * 2)
            else:
                for n in range(groups // 2):
                    ldmatrix_x4(b, 0, step(k_lane, k) + uint32(n * 16 * pitch))
                    for f in range(frags):
                        for i in range(2):
                            at = (k % sums) * s_regs + (f * groups + 2 * n + i) * 4
                            if held:
                                multiply(t, at, q_held, (k * frags + f) * 4, b, 2 * i)
                            else:
                                multiply(t, at, a, 4 * f, b, 2 * i)
        for i in range(s_regs):
            s[i] = t[i] + t[s_regs + i] if sums == 2 else t[i]

    @device
    def half_of():
        """Which columns of 32 a warp takes where two share their rows."""
        return uint32(uint32(cuda.threadIdx.x) // uint32(32 * parts) & uint32(1))

    @device
    def multiply_half(s, q_held, q_lane, k_lane):
        """Twice the rows along every other 16 columns; the swizzle exclusive-ors these very bits of an address."""
        a = cuda.local.array(8, uint32)
        b = cuda.local.array(4, uint32)
        q_half, k_half = q_lane ^ (uint32(32) * half_of()), k_lane ^ (uint32(32) * half_of())
        for i in range(2 * s_regs):
            s[i] = float32(0)
        for k in range(0, depth, 2):
            for f in range(2):
                ldmatrix_x4(a, 4 * f, step(q_half, k) + uint32(f * 16 * pitch))
            for n in range(groups // 2):
                ldmatrix_x4(b, 0, step(k_half, k) + uint32(n * 16 * pitch))
                for f in range(2):
                    for i in range(2):
                        multiply(s, f * s_regs + (2 * n + i) * 4, a, 4 * f, b, 2 * i)

    @device
    def exchange(s, p_tile, lane):
        """In two turns, for which P's place has room: the first warp lends its second 16 rows, then gets its first."""
        warp = uint32(cuda.threadIdx.x) >> uint32(5)
        pair = warp // uint32(2 * parts) * uint32(parts) + warp % uint32(parts)
        place = p_tile + pair * uint32(128 * s_regs) + uint32(16) * uint32(lane)
        other = cuda.local.array(s_regs, float32)
        if half_of() == uint32(0):
            for i in range(s_regs // 4):
                st_shared_v4_f32(place + uint32(512 * i), s, s_regs + 4 * i)
        if exchanged:
            cuda.syncthreads()  # what the first warps lend is there
        if half_of() == uint32(1):
            for i in range(s_regs // 4):
                ld_shared_v4_f32(other, 4 * i, place + uint32(512 * i))
                st_shared_v4_f32(place + uint32(512 * i), s, 4 * i)
            for i in range(s_regs):
                s[i] = s[s_regs + i] + other[i]
        cuda.syncthreads()  # what the second warps lend is there
        if half_of() == uint32(0):
            for i in range(s_regs // 4):
                ld_shared_v4_f32(other, 4 * i, place + uint32(512 * i))
            for i in range(s_regs):
                s[i] += other[i]

    @device
    def leave_maximum(s, stats, row, part, lane):
        for f in range(frags):
            for half in range(2):
                top = s[f * groups * 4 + 2 * half]
                for n in range(groups):
                    at = (f * groups + n) * 4 + 2 * half
                    top = max(top, max(s[at], s[at + 1]))
                top = quad_max(top)
                if (lane & 3) == 0:
                    at_row = uint32(row) + uint32(16 * f + 8 * half)
                    st_shared_f32(stats + uint32(4) * (uint32(part) * uint32(bm) + at_row), top)

    @device
    def over_parts(stats, row):
        """The maximum that the parts left for a row."""
        top = float32(NOTHING)
        for p in range(parts):
            top = max(top, ld_shared_f32(stats + uint32(4 * p * bm) + uint32(4) * row))
        return top

    @device
    def raise_maximum(m_s, l, stats, row, factor):
        for f in range(frags):
            for half in range(2):
                r = 2 * f + half
                top = max(m_s[r], over_parts(stats, uint32(row) + uint32(16 * f + 8 * half)))
                l[r] *= ex2_approx((m_s[r] - anchor(top)) * factor)
                m_s[r] = top

    @device
    def weights(s, m_s, l, p_tile, row, column, factor, lane):
        for f in range(frags):
            for half in range(2):
                r = 2 * f + half
                origin = anchor(m_s[r])
                at_row = uint32(row) + uint32(16 * f + 8 * half)
                for n in range(groups):
                    at = (f * groups + n) * 4 + 2 * half
                    x = ex2_approx((s[at] - origin) * factor)
                    y = ex2_approx((s[at + 1] - origin) * factor)
                    l[r] += x + y
                    to = p_place(p_tile, at_row, (uint32(column) >> uint32(3)) + uint32(n))
                    st_shared_b32(to + uint32(4) * uint32(lane & 3), pack(x, y))

    @device
    def rescale(acc, m, l, stats, factor, lane):
        alpha = cuda.local.array(2, float32)
        for f in range(o_frags):
            risen = False
            for half in range(2):
                r = 2 * f + half
                top = max(m[r], over_parts(stats, (uint32(lane) >> uint32(2)) + uint32(16 * f + 8 * half)))
                alpha[half] = ex2_approx((m[r] - anchor(top)) * factor)
                risen = risen or top > m[r]
                m[r] = top
                if same_rows:
                    l[r] *= alpha[half]
            if rescaled and vote_any(risen):
                for n in range(o_groups):
                    for i in range(4):
                        acc[(f * o_groups + n) * 4 + i] *= alpha[i // 2]

    @device
    def multiply_pv(acc, p_lane, v_lane):
        a = cuda.local.array(p_regs, uint32)
        b = cuda.local.array(4, uint32)
        for k in range(pv_steps):
            for f in range(o_frags):
                ldmatrix_x4(a, 4 * f, p_step(p_lane, k) + uint32(f * 16 * p_pitch))
            for n in range(columns // 16):
                ldmatrix_x4_trans(b, 0, step(v_lane, n) + uint32(k * 16 * pitch))
                for f in range(o_frags):
                    multiply(acc, (f * o_groups + 2 * n) * 4, a, 4 * f, b, 0)
                    multiply(acc, (f * o_groups + 2 * n + 1) * 4, a, 4 * f, b, 2)

    @device
    def leave_sum(l, stats, row, part, lane):
        for f in range(frags):
            for half in range(2):
                mine = quad_sum(l[2 * f + half])
                if (lane & 3) == 0:
                    at_row = uint32(row) + uint32(16 * f + 8 * half)
                    st_shared_f32(stats + uint32(4) * (uint32(part) * uint32(bm) + at_row), mine)

    multiply_s = multiply_half if deep else multiply_qk
    return LatentSteps(q_lane, k_lane, p_lane, v_lane, clear, load_q, multiply_s, exchange, leave_maximum,
                       raise_maximum, weights, rescale, multiply_pv, leave_sum, make_total(bm, parts))  # fmt: skip
