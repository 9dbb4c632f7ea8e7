"""Steps of a consumer of warp-specialised attention: 64 rows, 16 a warp, products by wgmma.

Accumulators of a warp are those of :mod:`flashnumba.tiles.attention` with one fragment of 16 rows: of eight columns a
lane has two, in row ``lane / 4`` and in the row eight below. So masks, maxima and votes are those of that module. New
here is what waits differently: while S_j becomes weights the product with V_j-1 still adds to O, so O is brought to the
units of the new maximum later, and weights stay where S was until P_j-1 is no operand any more.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import (
    ex2_approx,
    fence_proxy_async,
    ld_shared_v4,
    pack_bf16x2,
    pack_f16x2,
    st_shared_v4,
    wgmma,
)
from flashnumba.machine.numba import cuda, float32, int32, uint32, uint64
from flashnumba.tiles.specialised_tiles import PANEL, ROWS, SpecialisedTiles

__all__ = ["FAULTS", "ConsumerSteps", "make_consumer_steps"]

FAULTS = ("rescale", "sign_fence", "stride")
"""What can be planted: O keeps the units of the old maximum; Q, turned, is not fenced before wgmma reads it; V's lines
are taken to lie half as far apart."""


class ConsumerSteps(NamedTuple):
    """Device functions. ``acc`` is O, ``[d / 2]``; ``s`` is ``[bn / 2]``; ``m``, ``l`` and the like ``[2]``; float32.

    Attributes:
        negate_q: ``(q_mine, thread)``: turns the sign of the consumer's rows of Q.
        multiply_qk: ``(s, q_first, k_first)``: S = Q K^T, from descriptors; there after the next wait.
        multiply_pv: ``(acc, p, v_first)``: O += P V.
        tops: ``(tops, s)``: :attr:`flashnumba.tiles.attention.Steps.tops`, in four chains a row.
        weights: ``(s, l, alpha, bias, factor)``: S becomes weights, and l their sum.
        rescale: ``(acc, alpha)``.
        pack: ``(p, s)``: weights rounded; accumulators in their order are an operand.
    """

    negate_q: DeviceFunction
    multiply_qk: DeviceFunction
    multiply_pv: DeviceFunction
    tops: DeviceFunction
    weights: DeviceFunction
    rescale: DeviceFunction
    pack: DeviceFunction


@cache
def make_consumer_steps(tiles: SpecialisedTiles, element: str, broken: str = "") -> ConsumerSteps:
    """The steps for float16 or bfloat16."""
    d, bn, part = tiles.d, tiles.bn, tiles.part
    form = {"float16": "f16", "bfloat16": "bf16"}[element]
    product_s, product_o = wgmma(bn, form), wgmma(d, form, a="registers", b_major="mn")
    pack_two = {"float16": pack_f16x2, "bfloat16": pack_bf16x2}[element]
    q_panel, k_panel, line = 2 * ROWS * PANEL // 16, 2 * bn * PANEL // 16, 2 * PANEL // 16  # in units of a descriptor
    d_groups, n_groups, p_regs, chains, both = d // 8, bn // 8, bn // 4, 4, 8
    rescaled, fences = broken != "rescale", broken != "sign_fence"

    @device
    def negate_q(q_mine, thread):
        raw = cuda.local.array(4, uint32)
        for i in range(part // 2048):
            at = q_mine + uint32(16) * uint32(thread) + uint32(2048 * i)
            ld_shared_v4(raw, 0, at)
            for e in range(4):
                raw[e] ^= uint32(0x80008000)
            st_shared_v4(at, raw, 0)
        if fences:
            fence_proxy_async()

    @device
    def multiply_qk(s, q_first, k_first):
        for i in range(d // 16):
            within = 2 * (i % 4)
            a, b = q_first + uint64(i // 4 * q_panel + within), k_first + uint64(i // 4 * k_panel + within)
            product_s(s, 0, a, b, int32(1 if i > 0 else 0))

    @device
    def multiply_pv(acc, p, v_first):
        for i in range(bn // 16):
            product_o(acc, 0, p, 4 * i, v_first + uint64(16 * line * i), int32(1))

    @device
    def tops(best, s):
        chain = cuda.local.array(both, float32)
        for n in range(n_groups):
            for half in range(2):
                at, i = 4 * n + 2 * half, chains * half + n % chains
                top = max(s[at], s[at + 1])
                chain[i] = top if n < chains else max(chain[i], top)
        for half in range(2):
            i = chains * half
            best[half] = max(max(chain[i], chain[i + 1]), max(chain[i + 2], chain[i + 3]))

    @device
    def weights(s, l, alpha, bias, factor):
        for half in range(2):
            total = float32(0)
            for n in range(n_groups):
                at = 4 * n + 2 * half
                s[at] = ex2_approx(cuda.fma(s[at], factor, bias[half]))
                s[at + 1] = ex2_approx(cuda.fma(s[at + 1], factor, bias[half]))
                total += s[at] + s[at + 1]
            l[half] = cuda.fma(l[half], alpha[half], total)

    @device
    def rescale(acc, alpha):
        if rescaled:
            for n in range(d_groups):
                for half in range(2):
                    acc[4 * n + 2 * half] *= alpha[half]
                    acc[4 * n + 2 * half + 1] *= alpha[half]

    @device
    def pack(p, s):
        for i in range(p_regs):
            p[i] = pack_two(s[2 * i], s[2 * i + 1])

    return ConsumerSteps(negate_q, multiply_qk, multiply_pv, tops, weights, rescale, pack)
