"""Products with codes of 8 bits where they lie: a tile of the cache is never converted as a whole.

For 16 rows conversions decide: 512 codes a token, each of which was read from shared memory, turned into float32,
multiplied by its scale, rounded and written back. Here a warp converts what ldmatrix brings, and scales go elsewhere.
A warp has one block of 128 columns, of K as of V, and all keys of the tile, so for all that it multiplies a key has one
scale::

    S   the sum over warps of  scale[key, block] (q_block k_block)  and a part of the rotated columns, which every warp
        leaves in shared memory and then adds up for itself, all in the same order
    P   every warp has all of it, in the registers that S came in; it multiplies it by its own block's scales
    O   (P scale) times the codes of the warp's columns

Of Q a warp keeps 36 registers and not 144, so three blocks fit a multiprocessor; maxima and P, which the kernel for 16
bits passes through shared memory behind two more barriers, are not exchanged at all.

Codes become float16 by one instruction for two, exactly. So Q has to be float16 too, and is brought into its range by
a power of two for each row and block; its rotated part stays as it is. P times a scale must not vanish in float16
either: it is written in units of a power of two above all scales seen so far, and O is kept in these; where a larger
scale comes, O is multiplied, as for a new maximum. That unit is one for all keys: a key whose scale is 2^-14 of the
largest loses bits of P, and one of 2^-24 its weight, which tokens of a normalised latent do not come near.

A row of the tile is 656 bytes, an odd multiple of 16, so eight of them at one column meet no bank twice, as they are.
What a word of a row, or of a transposed one, becomes, and which product takes it: :mod:`flashnumba.tiles.fp8_halves`.
Where e4m3 is converted by instructions, which take neighbours, two words of V are merged first, byte by byte, and give
pairs of keys eight apart; P's operands are packed in the same order, which costs nothing.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import (
    bits_to_f32,
    ex2_approx,
    f32_to_bits,
    ld_shared_f32,
    ld_shared_v2,
    ld_shared_v4_f32,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    pack_f16x2,
    st_shared_v4_f32,
    vote_any,
)
from flashnumba.machine.numba import cuda, float32, uint32
from flashnumba.stages.flash_mla.sizes import BLOCK, MLATiles, token_bytes
from flashnumba.tiles.elements import vectors
from flashnumba.tiles.fp8_convert import ELEMENTS, make_halves
from flashnumba.tiles.online import NOTHING, anchor
from flashnumba.tiles.reduce import lanes_max
from flashnumba.tiles.swizzle import swizzle
from flashnumba.tiles.tensor import make_multiply

__all__ = ["CodeSteps", "make_code_steps"]

NO_UNIT = 2.0**125
"""1 / unit before any scale was seen."""
ROOM = 12
"""Q's largest number of a row and block is brought to 2^12 to 2^13."""


class CodeSteps(NamedTuple):
    """Device functions on a warp's registers and on addresses in shared memory.

    ``q`` uint32 ``[dv / 16 / warps * 4 + rope]`` and ``q_unit`` ``[2]``; ``s`` float32 ``[bn / 2]``, ``scales``
    ``[bn / 4]`` of the lane's keys, ``p`` uint32 ``[bn / 4]``; ``acc`` ``[64]``, ``m``, ``l`` ``[2]``; ``inverse``
    ``[1]``, 1 / unit.

    Attributes:
        clear: ``(acc, m, l, inverse)``: nothing seen yet.
        load_q: ``(q, q_unit, q_tile, warp, lane)``: the block's columns as float16 in units of ``q_unit`` a row, and
            the warp's share of the rotated ones.
        multiply_qk: ``(s, scales, q, q_unit, raw_tile, warp, lane)``: the warp's summand of S.
        exchange: ``(s, s_tile, warp, lane)`` leaves it; ``add``: ``(s, s_tile, lane)``, after a barrier: the sum.
        weights: ``(p, s, scales, acc, m, l, inverse, factor)``: P times scales, as A operands; acc, m and l go along.
        multiply_pv: ``(acc, p, raw_tile, warp, lane)``.
        settle: ``(acc, inverse)``: acc in units of 1, and a lane's values in the order of their columns: values 2 n and
            2 n + 1 of a row are columns ``16 (n / 2) + 4 (lane % 4) + 2 (n % 2)`` and the next.
    """

    clear: DeviceFunction
    load_q: DeviceFunction
    multiply_qk: DeviceFunction
    exchange: DeviceFunction
    add: DeviceFunction
    weights: DeviceFunction
    multiply_pv: DeviceFunction
    settle: DeviceFunction


@device
def power(exponent):
    """2^(exponent - 127), 0 for 0."""
    return bits_to_f32(uint32(exponent) << uint32(23))


@cache
def make_code_steps(tiles: MLATiles, element: str, code: str, arch: str, broken: str = "") -> CodeSteps:
    """The steps for tiles that are ``direct``.

    Args:
        element: of Q and of the rotated columns.
        broken: plants ``"scale"``: every block has the first one's; or ``"rescale"``: O stays in the old units.
    """
    nbytes, dv, blocks, groups = token_bytes(tiles.d, tiles.dv), tiles.dv, tiles.warps, tiles.bn // 8
    steps, rope_steps, o_groups = BLOCK // 16, (tiles.d - tiles.dv) // 16 // blocks, BLOCK // 8
    halves = make_halves(code, arch)
    along, across, log2 = halves.along, halves.across, halves.log2
    neighbours, own_scale, rescaled = code == ELEMENTS[0] and log2 == 0, broken != "scale", broken != "rescale"
    multiply, multiply_rope = make_multiply("float16", arch), make_multiply(element, arch)
    wide = vectors(element, 4, arch=arch)
    low, high, q_at, quad_max = wide.low, wide.high, swizzle(tiles.d).at, lanes_max(4)
    rope_at = dv + 4 * blocks

    @device
    def clear(acc, m, l, inverse):
        for i in range(4 * o_groups):
            acc[i] = float32(0)
        for r in range(2):
            m[r], l[r] = float32(NOTHING), float32(0)
        inverse[0] = float32(NO_UNIT)

    @device
    def load_q(q, q_unit, q_tile, warp, lane):
        c, words = uint32(lane) & uint32(3), cuda.local.array(2, uint32)
        first = uint32(2 * steps) * uint32(warp) + (c >> uint32(1))
        for half in range(2):
            row, top = (uint32(lane) >> uint32(2)) + uint32(8 * half), float32(0)
            for k in range(steps):
                ld_shared_v2(words, 0, q_at(q_tile, row, first + uint32(2 * k)) + uint32(8) * (c & uint32(1)))
                for i in range(2):
                    top = max(top, max(abs(low(words[i])), abs(high(words[i]))))
            exponent = f32_to_bits(quad_max(top)) >> uint32(23)
            shift = uint32(254 + ROOM - min(max(exponent, uint32(ROOM + 1)), uint32(254)))
            by = power(shift)
            q_unit[half] = power(uint32(254) - shift) * float32(2.0**log2)
            for k in range(steps):
                ld_shared_v2(words, 0, q_at(q_tile, row, first + uint32(2 * k)) + uint32(8) * (c & uint32(1)))
                x, y, z, w = low(words[0]) * by, high(words[0]) * by, low(words[1]) * by, high(words[1]) * by
                if neighbours:
                    q[4 * k + half], q[4 * k + 2 + half] = pack_f16x2(x, y), pack_f16x2(z, w)
                else:
                    q[4 * k + half], q[4 * k + 2 + half] = pack_f16x2(x, z), pack_f16x2(y, w)
        for k in range(rope_steps):
            chunk = uint32(dv // 8) + uint32(2) * (uint32(rope_steps) * uint32(warp) + uint32(k))
            ldmatrix_x4(q, 4 * (steps + k), q_at(q_tile, lane & 15, chunk + (uint32(lane) >> uint32(4))))

    @device
    def multiply_qk(s, scales, q, q_unit, raw_tile, warp, lane):
        raw = cuda.local.array(4, uint32)
        b = cuda.local.array(2, uint32)
        lane, warp = uint32(lane), uint32(warp)
        own = uint32(4) * warp if own_scale else uint32(0)
        of_scales = raw_tile + uint32(2 * nbytes) * (lane & uint32(3)) + uint32(dv) + own
        key = raw_tile + (lane & uint32(7)) * uint32(nbytes)
        latent = key + uint32(BLOCK) * warp + uint32(16) * (lane >> uint32(3))
        rope = key + uint32(8 * nbytes) * (lane >> uint32(4)) + uint32(16) * ((lane >> uint32(3)) & uint32(1))
        rope += uint32(rope_at) + uint32(32 * rope_steps) * warp
        for i in range(4 * groups):
            s[i] = float32(0)
        for half in range(2):
            for n in range(groups):
                ldmatrix_x4(raw, 0, latent + uint32(8 * n * nbytes + 64 * half))
                for i in range(4):
                    b[0], b[1] = along(raw[i])
                    multiply(s, 4 * n, q, (4 * half + i) * 4, b, 0)
        for n in range(groups):
            for i in range(2):
                scale = ld_shared_f32(of_scales + uint32((8 * n + i) * nbytes))
                scales[2 * n + i] = scale
                s[4 * n + i] *= scale * q_unit[0]
                s[4 * n + 2 + i] *= scale * q_unit[1]
        for k in range(rope_steps):
            for n in range(0, groups, 2):
                ldmatrix_x4(raw, 0, rope + uint32(8 * n * nbytes + 32 * k))
                multiply_rope(s, 4 * n, q, 4 * (steps + k), raw, 0)
                multiply_rope(s, 4 * n + 4, q, 4 * (steps + k), raw, 2)

    @device
    def exchange(s, s_tile, warp, lane):
        to = s_tile + uint32(512 * groups) * uint32(warp) + uint32(16) * uint32(lane)
        for n in range(groups):
            st_shared_v4_f32(to + uint32(512 * n), s, 4 * n)

    @device
    def add(s, s_tile, lane):
        other = cuda.local.array(4, float32)
        at = s_tile + uint32(16) * uint32(lane)
        for n in range(groups):
            ld_shared_v4_f32(s, 4 * n, at + uint32(512 * n))
            for p in range(1, blocks):
                ld_shared_v4_f32(other, 0, at + uint32(512 * (groups * p + n)))
                for i in range(4):
                    s[4 * n + i] += other[i]

    @device
    def raise_unit(acc, inverse, largest):
        """To a power of two above the largest scale of a tile, if it is not there yet. Most tiles have none above."""
        if vote_any(largest * inverse[0] > float32(1)):
            exponent, before = f32_to_bits(quad_max(largest)) >> uint32(23), f32_to_bits(inverse[0]) >> uint32(23)
            wanted = uint32(253) - min(max(exponent, uint32(1)), uint32(252))
            by = power(uint32(127) - min(before - wanted, uint32(127)))
            inverse[0] = power(wanted)
            for i in range(4 * o_groups):
                acc[i] *= by

    @device
    def weights(p, s, scales, acc, m, l, inverse, factor):
        largest, risen = float32(0), False
        alpha = cuda.local.array(2, float32)
        kept = cuda.local.array(4, float32)
        for i in range(2 * groups):
            largest = max(largest, scales[i])
        raise_unit(acc, inverse, largest)
        for half in range(2):
            top = s[2 * half]
            for n in range(groups):
                top = max(top, max(s[4 * n + 2 * half], s[4 * n + 2 * half + 1]))
            top = max(m[half], quad_max(top))
            alpha[half] = ex2_approx((m[half] - anchor(top)) * factor)
            risen = risen or top > m[half]
            m[half] = top
            l[half] *= alpha[half]
        if rescaled and vote_any(risen):
            for n in range(o_groups):
                for i in range(4):
                    acc[4 * n + i] *= alpha[i // 2]
        for n in range(groups):
            first, second = scales[2 * n] * inverse[0], scales[2 * n + 1] * inverse[0]
            for half in range(2):
                origin = anchor(m[half])
                x = ex2_approx((s[4 * n + 2 * half] - origin) * factor)
                y = ex2_approx((s[4 * n + 2 * half + 1] - origin) * factor)
                l[half] += x + y
                x, y = x * first, y * second
                if not neighbours:
                    p[2 * n + half] = pack_f16x2(x, y)
                elif n % 2 == 0:
                    kept[2 * half], kept[2 * half + 1] = x, y
                else:
                    p[2 * n - 2 + half] = pack_f16x2(kept[2 * half], x)
                    p[2 * n + half] = pack_f16x2(kept[2 * half + 1], y)

    @device
    def of_keys(b, first, second):
        """B operands of the even and the odd columns from two columns of keys 2 c, 2 c + 1 and eight further."""
        if neighbours:
            # The instructions convert neighbours, so a code of the first word is put beside one of the second.
            even = (first & uint32(0x00FF00FF)) | ((second << uint32(8)) & uint32(0xFF00FF00))
            odd = ((first >> uint32(8)) & uint32(0x00FF00FF)) | (second & uint32(0xFF00FF00))
            b[0], b[1] = along(uint32(even))
            b[2], b[3] = along(uint32(odd))
        else:
            b[0], b[2] = across(first)
            b[1], b[3] = across(second)

    @device
    def multiply_pv(acc, p, raw_tile, warp, lane):
        raw = cuda.local.array(4, uint32)
        b = cuda.local.array(4, uint32)
        at = raw_tile + uint32(lane & 15) * uint32(nbytes) + uint32(BLOCK) * uint32(warp)
        at += uint32(16) * (uint32(lane) >> uint32(4))
        for n in range(BLOCK // 32):
            for k in range(groups // 2):
                ldmatrix_x4_trans(raw, 0, at + uint32(16 * k * nbytes + 32 * n))
                for chunk in range(2):
                    of_keys(b, raw[2 * chunk], raw[2 * chunk + 1])
                    multiply(acc, (4 * n + 2 * chunk) * 4, p, 4 * k, b, 0)
                    multiply(acc, (4 * n + 2 * chunk + 1) * 4, p, 4 * k, b, 2)

    @device
    def settle(acc, inverse):
        by = power(uint32(254) - (f32_to_bits(inverse[0]) >> uint32(23))) * float32(2.0**log2)
        for n in range(o_groups // 2):
            for half in range(2):
                at, other = 8 * n + 2 * half, 8 * n + 4 + 2 * half
                second, third = acc[other], acc[at + 1]
                acc[at], acc[at + 1] = acc[at] * by, second * by
                acc[other], acc[other + 1] = third * by, acc[other + 1] * by

    return CodeSteps(clear, load_q, multiply_qk, exchange, add, weights, multiply_pv, settle)
