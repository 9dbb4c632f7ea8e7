"""The steps of an attention kernel on tensor cores: a block owns rows of Q, K and V pass by tile by tile.

A warp owns ``frags`` fragments of 16 rows. It holds S and O as accumulators of mma.sync: lane (g, c) = (lane / 4, lane
% 4) has of fragment f the rows ``16 f + g`` (half 0) and ``16 f + g + 8`` (half 1), and of eight columns 8 n .. 8 n + 7
the columns ``8 n + 2 c`` and the next::

    acc[(f * columns / 8 + n) * 4 + 2 * half + i]           row state: m[2 f + half], l[2 f + half]

Two such column groups of S are, rounded and packed, one A operand of the product with V, so no lane gives anything
away. Rows of K may go to other columns of S than their own (:class:`flashnumba.tiles.sizes.Order`); then something has
to be given away, and :mod:`flashnumba.tiles.chain` does it. FP8 rows are read as rows of half as many 16-bit elements:
what ldmatrix brings for one product is what the other takes.

Exponents are of base 2: with ``factor = |scale| log2 e`` the weight of a key is ``2^((s - m) factor)``, where m is the
running maximum of s. As one fused multiply-add, ``s factor - (m factor)``, it is off by the rounding of the product in
brackets: by less than 2^-16 where that is below :data:`NEAR`, and by 0.5 % of the weight at scores of 1e5, where the
greatest weight would not be 1 any more and P's rounding would show it. So beyond :data:`NEAR` a warp first subtracts m
from its S, which is exact where it matters, near the maximum. A scale below zero is turned into a sign of Q; one of
zero, and others so small that the factor would vanish, become 2^-126, because 0 times -inf is no number.

l is summed in each lane and over the four lanes of a row at the end; O is divided by it once, at the end.

Source: Dao, FlashAttention-2, arXiv 2307.08691, section 3.1; Milakov and Gimelshein, arXiv 1805.02867.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import (
    ex2_approx,
    ld_shared_v4,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    lg2_approx,
    rcp_approx,
    st_shared_v4,
    syncwarp,
    vote_any,
)
from flashnumba.machine.numba import cuda, float32, int32, uint32
from flashnumba.tiles.elements import vectors
from flashnumba.tiles.online import LOG2_E, NOTHING
from flashnumba.tiles.reduce import lanes_max, lanes_sum
from flashnumba.tiles.sizes import NATURAL, AttentionTiles, Order
from flashnumba.tiles.swizzle import swizzle
from flashnumba.tiles.tensor import make_multiply

__all__ = ["Steps", "factor_of", "log_sum", "make_softmax_pv", "make_steps", "share_of"]

LN_2 = 0.6931471805599453
SMALLEST = 2.0**-126
NEAR = 256.0
"""Base-2 exponents up to which the maximum may be rounded when it is subtracted."""


class Steps(NamedTuple):
    """Device functions on a warp's registers and on lane addresses in shared memory.

    ``acc`` is O, ``[frags * d / 2]``; ``s`` is ``[frags * bn / 2]``; ``m`` and ``l`` are ``[2 frags]``; float32.

    Attributes:
        q_lane, k_lane, v_lane: ``(tile, warp_row or nothing, lane) -> address``: where a lane's ldmatrix begins.
        clear: ``(acc, m, l)``: nothing seen yet.
        negate_q: ``(q_tile, warp_row, lane)``: turns the sign of the warp's rows.
        load_q: ``(held, q_lane)``: the part of Q that is held.
        multiply_qk: ``(s, held, q_lane, k_lane)``: S = Q K^T.
        flatten: ``(s)``: zero times S: what is finite becomes zero, the rest no number.
        mask: ``(s, visible, lane)``: -inf from column ``visible[2 f + half]`` of the tile on, int32.
        raise_maximum: ``(s, acc, m, l, bias, factor)``: m to the new maximum of S; acc and l in its units. Exponents
            are then ``s factor + bias``, where nothing visible counts as a maximum of 0.
        tops: ``(tops, s)``: the maximum of the lane's own columns of each row, ``[2 frags]``.
        raise_to: ``(s, acc, m, l, bias, factor, tops)``: :attr:`raise_maximum` for who has those already.
        new_maximum: ``(s, m, bias, alpha, factor, tops) -> risen``: the same, but that acc and l are left as they are:
            they want ``alpha``, ``[2 frags]``, which is 1 in all rows of the lane unless ``risen``.
        exponentials: ``(p, s, l, bias, factor, k)``: the weights of keys 16 k .. 16 k + 15 into ``p[frags * 4 k
            ...]``, packed as an A operand; l grows.
        multiply_pv: ``(acc, p, v_lane, k)``: O += P V for these keys.
        softmax_pv: ``(s, acc, m, l, factor, v_lane)``: the last three for a whole tile.
        total: ``l -> float32``: the sum over the row, in all its lanes.
    """

    q_lane: DeviceFunction
    k_lane: DeviceFunction
    v_lane: DeviceFunction
    clear: DeviceFunction
    negate_q: DeviceFunction
    load_q: DeviceFunction
    multiply_qk: DeviceFunction
    flatten: DeviceFunction
    mask: DeviceFunction
    raise_maximum: DeviceFunction
    exponentials: DeviceFunction
    multiply_pv: DeviceFunction
    softmax_pv: DeviceFunction
    total: DeviceFunction
    tops: DeviceFunction
    raise_to: DeviceFunction
    new_maximum: DeviceFunction


@device
def factor_of(scale):
    """What scores are multiplied with to be exponents of 2; the sign is Q's, and a scale of zero the scores'."""
    return float32(1) if scale == float32(0) else max(abs(scale) * float32(LOG2_E), float32(SMALLEST))


@device
def seen(m):
    """m, and 0 for a row that saw nothing, as -inf - -inf is no number."""
    return float32(0) if m == float32(NOTHING) else m


@device
def share_of(total):
    """1 / total, and 1 for the empty sum of a row that saw nothing: its O is then 0."""
    return rcp_approx(float32(1) if total == float32(0) else total)


@device
def log_sum(m, total, factor):
    """The natural logarithm of the sum of exponentials, from the maximum of S and the sum in units of its weight."""
    return cuda.fma(m, factor, lg2_approx(total)) * float32(LN_2)


@cache
def make_steps(
    tiles: AttentionTiles, element: str, arch: str = "80", *, order: Order = NATURAL, rescaled: bool = True,
    stale: bool = False,
) -> Steps:  # fmt: skip
    """The steps for float16 or bfloat16; and for 8-bit elements those that do not concern P or V.

    Args:
        order: in which K's rows were copied, which the mask must know.
        rescaled: False plants a fault.
        stale: plants a fault: the maximum stays that of the first tile in which a row sees something.
    """
    d, bn, frags, q_held = tiles.d, tiles.bn, tiles.frags, tiles.q_held
    lazy, subtract, units = tiles.lazy, tiles.subtract, tiles.units
    layout = swizzle(units)
    pitch, place, step = layout.pitch, layout.at, layout.step
    multiply = make_multiply(element, arch)
    pack = vectors(element, 4, arch=arch).pack if tiles.nbytes == 2 else None
    signs = 0x80008000 if tiles.nbytes == 2 else 0x80808080
    quad_max, quad_sum = lanes_max(4), lanes_sum(4)
    d_groups, n_groups, chunks = d // 8, bn // 8, units // 8
    s_regs, a_regs, rows = frags * n_groups * 4, frags * 4, frags * 2
    by_lane, by_tile, by_pair = order

    @device
    def q_lane(q_tile, warp_row, lane):
        return place(q_tile, warp_row + (lane & 15), lane >> 4)

    @device
    def k_lane(k_tile, lane):
        return place(k_tile, (lane & 7) + 8 * (lane >> 4), (lane >> 3) & 1)

    @device
    def v_lane(v_tile, lane):
        return place(v_tile, lane & 15, lane >> 4)

    @device
    def clear(acc, m, l):
        for i in range(frags * d_groups * 4):
            acc[i] = float32(0)
        for r in range(rows):
            m[r] = float32(NOTHING)
            l[r] = float32(0)

    @device
    def negate_q(q_tile, warp_row, lane):
        raw = cuda.local.array(4, uint32)
        for i in range(a_regs * chunks // 8):
            index = uint32(lane) + uint32(32 * i)
            at = place(q_tile, warp_row + int32(index // uint32(chunks)), index % uint32(chunks))
            ld_shared_v4(raw, 0, at)
            for j in range(4):
                raw[j] ^= uint32(signs)
            st_shared_v4(at, raw, 0)
        syncwarp()  # all of the warp's rows are turned before any lane reads another's

    @device
    def load_q(held, q_lane):
        for k in range(q_held):
            for f in range(frags):
                ldmatrix_x4(held, (k * frags + f) * 4, step(q_lane, k) + uint32(f * 16 * pitch))

    @device
    def multiply_qk(s, held, q_lane, k_lane):
        a = cuda.local.array(a_regs, uint32)
        b = cuda.local.array(4, uint32)
        for i in range(s_regs):
            s[i] = float32(0)
        for k in range(units // 16):
            if k >= q_held:
                for f in range(frags):
                    ldmatrix_x4(a, 4 * f, step(q_lane, k) + uint32(f * 16 * pitch))
            for n in range(bn // 16):
                ldmatrix_x4(b, 0, step(k_lane, k) + uint32(n * 16 * pitch))
                for f in range(frags):
                    at = (f * n_groups + 2 * n) * 4
                    if k < q_held:
                        multiply(s, at, held, (k * frags + f) * 4, b, 0)
                        multiply(s, at + 4, held, (k * frags + f) * 4, b, 2)
                    else:
                        multiply(s, at, a, 4 * f, b, 0)
                        multiply(s, at + 4, a, 4 * f, b, 2)

    @device
    def flatten(s):
        for i in range(s_regs):
            s[i] *= float32(0)

    @device
    def mask(s, visible, lane):
        for f in range(frags):
            for half in range(2):
                for n in range(n_groups):
                    for i in range(2):
                        key = 16 * (n // 2) + by_tile * (n % 2) + by_pair * i
                        if by_lane * (lane & 3) + int32(key) >= visible[2 * f + half]:
                            s[(f * n_groups + n) * 4 + 2 * half + i] = float32(NOTHING)

    @device
    def rescale(acc, l, alpha):
        for f in range(frags):
            for half in range(2):
                l[2 * f + half] *= alpha[2 * f + half]
                if rescaled:
                    for n in range(d_groups):
                        acc[(f * d_groups + n) * 4 + 2 * half] *= alpha[2 * f + half]
                        acc[(f * d_groups + n) * 4 + 2 * half + 1] *= alpha[2 * f + half]

    @device
    def lane_top(s, f, half):
        top = s[f * n_groups * 4 + 2 * half]
        for n in range(n_groups):
            at = (f * n_groups + n) * 4 + 2 * half
            top = max(top, max(s[at], s[at + 1]))
        return top

    @device
    def find_tops(tops, s):
        for f in range(frags):
            for half in range(2):
                tops[2 * f + half] = lane_top(s, f, half)

    @device
    def raise_maximum(s, acc, m, l, bias, factor):
        raise_to(s, acc, m, l, bias, factor, None)

    @device
    def new_maximum(s, m, bias, alpha, factor, tops):
        risen, far = False, False
        for f in range(frags):
            for half in range(2):
                r = 2 * f + half
                top = lane_top(s, f, half) if tops is None else tops[r]
                top = max(m[r], quad_max(top))
                if stale and m[r] != float32(NOTHING):
                    top = m[r]
                risen = risen or top > m[r]
                origin = seen(top)
                bias[r] = -(origin * factor)
                far = far or not (abs(bias[r]) < float32(NEAR))
                alpha[r] = ex2_approx((m[r] - origin) * factor)
                m[r] = top
        if subtract or vote_any(far):
            for i in range(s_regs):
                s[i] -= seen(m[2 * (i // (4 * n_groups)) + i // 2 % 2])
            for r in range(rows):
                bias[r] = float32(0)
        return risen

    @device
    def raise_to(s, acc, m, l, bias, factor, tops):
        alpha = cuda.local.array(rows, float32)
        risen = new_maximum(s, m, bias, alpha, factor, tops)
        if lazy:
            if vote_any(risen):
                rescale(acc, l, alpha)
        else:
            rescale(acc, l, alpha)

    @device
    def exponentials(p, s, l, bias, factor, k):
        for f in range(frags):
            for i in range(2):
                for half in range(2):
                    at = (f * n_groups + 2 * k + i) * 4 + 2 * half
                    r = 2 * f + half
                    x = ex2_approx(cuda.fma(s[at], factor, bias[r]))
                    y = ex2_approx(cuda.fma(s[at + 1], factor, bias[r]))
                    l[r] += x + y
                    p[k * a_regs + 4 * f + 2 * i + half] = pack(x, y)

    @device
    def multiply_pv(acc, p, v_lane, k):
        b = cuda.local.array(4, uint32)
        for n in range(d // 16):
            ldmatrix_x4_trans(b, 0, step(v_lane, n) + uint32(k * 16 * pitch))
            for f in range(frags):
                multiply(acc, (f * d_groups + 2 * n) * 4, p, k * a_regs + 4 * f, b, 0)
                multiply(acc, (f * d_groups + 2 * n + 1) * 4, p, k * a_regs + 4 * f, b, 2)

    softmax_pv = make_softmax_pv(tiles, raise_maximum, exponentials, multiply_pv)
    return Steps(
        q_lane, k_lane, v_lane, clear, negate_q, load_q, multiply_qk, flatten, mask, raise_maximum, exponentials,
        multiply_pv, softmax_pv, quad_sum, find_tops, raise_to, new_maximum,
    )  # fmt: skip


@cache
def make_softmax_pv(
    tiles: AttentionTiles, raise_maximum: DeviceFunction, exponentials: DeviceFunction, multiply_pv: DeviceFunction
) -> DeviceFunction:
    """:attr:`Steps.softmax_pv` from the three steps that it is made of."""
    rows, p_regs, each = 2 * tiles.frags, tiles.frags * tiles.bn // 4, tiles.bn // 16

    @device
    def softmax_pv(s, acc, m, l, factor, v_lane):
        p = cuda.local.array(p_regs, uint32)
        bias = cuda.local.array(rows, float32)
        raise_maximum(s, acc, m, l, bias, factor)
        for k in range(each):
            exponentials(p, s, l, bias, factor, k)
            multiply_pv(acc, p, v_lane, k)

    return softmax_pv
