"""Products with codes of 8 bits where they lie: a tile of the cache is never converted as a whole.

For 16 rows conversions decide: 512 codes a token, each of which was read from shared memory, turned into float32,
multiplied by its scale, rounded and written back. Here a warp converts what ldmatrix brings, and scales go elsewhere:

S   the sum over the four blocks of 128 columns of ``scale[key, block] (q_block k_block)``: codes are multiplied as they
    are, and a block's sum once by the scale of its key.
O   a warp has the 128 columns of one block, so P may have that block's scales in it: the warps that make P write it
    four times, ``P[row, key] scale[key, block]``.

Codes become float16 by one instruction for two, exactly. So Q has to be float16 too, and is brought into its range by
a power of two for each row; its rotated part stays as it is, with a product of its own. P times a scale must not vanish
in float16 either: it is written in units of a power of two above all scales seen so far, and O is kept in these; where
a larger scale comes, O is multiplied, as for a new maximum.

A row of the tile is 656 bytes, an odd multiple of 16, so eight of them at one column meet no bank twice, as they are.
What a word of a row, or of a transposed one, becomes, and which product takes it: :mod:`flashnumba.tiles.fp8_halves`.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import (
    bits_to_f32,
    ex2_approx,
    f32_to_bits,
    ld_shared_v2,
    ld_shared_v4,
    ld_shared_v4_f32,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    pack_f16x2,
    st_shared_b32,
    st_shared_v4,
    vote_any,
)
from flashnumba.machine.numba import cuda, float32, uint32
from flashnumba.stages.flash_mla.sizes import BLOCK, MLATiles, token_bytes
from flashnumba.stages.flash_mla.steps import LatentSteps
from flashnumba.tiles.elements import vectors
from flashnumba.tiles.fp8_convert import ELEMENTS, make_halves
from flashnumba.tiles.online import anchor
from flashnumba.tiles.reduce import lanes_max
from flashnumba.tiles.swizzle import swizzle
from flashnumba.tiles.tensor import make_multiply

__all__ = ["NO_UNIT", "OfCodes", "with_codes"]

NO_UNIT = 0xFCFCFCFC
"""The exponents of 1 / unit of four blocks, a byte each, before any scale was seen."""
ROOM = 12
"""Q's largest number of a row is brought to 2^12 to 2^13."""


class OfCodes(NamedTuple):
    """Device functions beside :class:`flashnumba.stages.flash_mla.steps.LatentSteps`; ``q_held`` has two words more.

    Attributes:
        leave_rope: ``(q_lane, rope, warp, lane)``: Q's rotated part to shared memory, as A operands, 16 bytes a lane;
            from then on ``q_lane`` of ``multiply_qk`` is the lane's place there.
        raise_units: ``(acc, units, raw_tile, warp, lane)``: units of P, uint32 ``[1]``, exponents of 1 / unit a byte
            each, to what the tile's scales need, and acc in its new unit.
        weights: ``(s, m, l, p_tile, row, column, factor, lane, units, raw_tile)``: P in all its forms.
        settle: ``(acc, units, warp)``: acc in units of 1, and a lane's values in the order of their columns: values 2 n
            and 2 n + 1 of a row are columns ``16 (n / 2) + 4 (lane % 4) + 2 (n % 2)`` and the next.
    """

    leave_rope: DeviceFunction
    raise_units: DeviceFunction
    weights: DeviceFunction
    settle: DeviceFunction


@device
def power(exponent):
    """2^(exponent - 127), 0 for 0."""
    return bits_to_f32(uint32(exponent) << uint32(23))


@device
def unit_of(units, block):
    return (units[0] >> uint32(8 * block)) & uint32(0xFF)


@cache
def with_codes(steps: LatentSteps, tiles: MLATiles, element: str, code: str, arch: str, broken: str = "") -> tuple:
    """(:class:`LatentSteps` on tiles of codes, :class:`OfCodes`), for tiles that are ``direct``.

    Args:
        steps: of the same tiles; what is not replaced stays.
        broken: plants ``"scale"``: every block has the first one's.
    """
    nbytes, dv, blocks = token_bytes(tiles.d, tiles.dv), tiles.dv, tiles.dv // BLOCK
    latent_steps, rope_steps, p_bytes = tiles.dv // 16, (tiles.d - tiles.dv) // 16, tiles.p_bytes // blocks
    o_groups, pv_steps = tiles.columns // 8, tiles.bn // 16
    halves = make_halves(code, arch)
    along, across, log2 = halves.along, halves.across, halves.log2
    neighbours, own_scale = code == ELEMENTS[0] and log2 == 0, broken != "scale"
    multiply, multiply_rope = make_multiply("float16", arch), make_multiply(element, arch)
    wide = vectors(element, 4, arch=arch)
    low, high = wide.low, wide.high
    of_q, of_p = swizzle(tiles.d), swizzle(tiles.bn)
    q_at, q_step, p_place, p_step = of_q.at, of_q.step, of_p.at, of_p.step
    quad_max, warp_max = lanes_max(4), lanes_max(32)
    rope_at, back_at = dv + 4 * blocks, 4 * latent_steps

    @device
    def block_of(block):
        return block if own_scale else 0

    @device
    def k_lane(raw_tile, key, lane):
        return raw_tile + (uint32(key) + uint32(lane & 7)) * uint32(nbytes) + uint32(16) * (uint32(lane) >> uint32(3))

    @device
    def v_lane(raw_tile, warp, lane):
        own = uint32(BLOCK) * uint32(warp) + uint32(16) * (uint32(lane) >> uint32(4))
        return raw_tile + uint32(lane & 15) * uint32(nbytes) + own

    @device
    def p_lane(p_tile, lane):
        own = uint32(p_bytes) * (uint32(cuda.threadIdx.x) >> uint32(5))
        return p_place(p_tile + own, lane & 15, lane >> 4)

    @device
    def load_q(q_held, q_lane):
        """The latent columns, as float16 with a power of two for each row, whose inverse comes last."""
        lane = uint32(cuda.threadIdx.x & 31)
        c, words = lane & uint32(3), cuda.local.array(2, uint32)
        tile = q_lane - (q_at(uint32(0), lane & uint32(15), lane >> uint32(4)))
        for half in range(2):
            row, top = (lane >> uint32(2)) + uint32(8 * half), float32(0)
            for k in range(latent_steps):
                ld_shared_v2(words, 0, q_at(tile, row, uint32(2 * k) + (c >> uint32(1))) + uint32(8) * (c & uint32(1)))
                for i in range(2):
                    top = max(top, max(abs(low(words[i])), abs(high(words[i]))))
            exponent = f32_to_bits(quad_max(top)) >> uint32(23)
            shift = uint32(254 + ROOM - min(max(exponent, uint32(ROOM + 1)), uint32(254)))
            by = power(shift)
            q_held[back_at + half] = (uint32(254) - shift) << uint32(23)  # the bits of 1 / by
            for k in range(latent_steps):
                ld_shared_v2(words, 0, q_at(tile, row, uint32(2 * k) + (c >> uint32(1))) + uint32(8) * (c & uint32(1)))
                x, y, z, w = low(words[0]) * by, high(words[0]) * by, low(words[1]) * by, high(words[1]) * by
                if neighbours:
                    q_held[4 * k + half], q_held[4 * k + 2 + half] = pack_f16x2(x, y), pack_f16x2(z, w)
                else:
                    q_held[4 * k + half], q_held[4 * k + 2 + half] = pack_f16x2(x, z), pack_f16x2(y, w)

    @device
    def leave_rope(q_lane, rope, warp, lane):
        a = cuda.local.array(4, uint32)
        if warp == 0:
            for k in range(rope_steps):
                ldmatrix_x4(a, 0, q_step(q_lane, latent_steps + k))
                st_shared_v4(rope + uint32(512 * k) + uint32(16) * uint32(lane), a, 0)

    @device
    def scales_of(scales, raw_tile, key, lane):
        """Of all blocks of the lane's two keys."""
        at = raw_tile + (uint32(key) + uint32(2) * uint32(lane & 3)) * uint32(nbytes) + uint32(dv)
        ld_shared_v4_f32(scales, 0, at)
        ld_shared_v4_f32(scales, 4, at + uint32(nbytes))

    @device
    def multiply_qk(s, q_held, q_lane, k_lane):
        raw = cuda.local.array(4, uint32)
        a = cuda.local.array(4, uint32)
        b = cuda.local.array(2, uint32)
        t = cuda.local.array(8, float32)
        scales = cuda.local.array(8, float32)
        lane = uint32(cuda.threadIdx.x & 31)
        first = k_lane - (lane & uint32(7)) * uint32(nbytes) - uint32(16) * (lane >> uint32(3))
        scales_of(scales, first, uint32(0), lane)
        for i in range(4):
            s[i] = float32(0)
        for block in range(blocks):
            for i in range(8):
                t[i] = float32(0)
            for half in range(2):
                ldmatrix_x4(raw, 0, k_lane + uint32(128 * block + 64 * half))
                for i in range(4):
                    b[0], b[1] = along(raw[i])
                    multiply(t, i % 2 * 4, q_held, (8 * block + 4 * half + i) * 4, b, 0)
            for i in range(4):
                s[i] += (t[i] + t[4 + i]) * scales[i % 2 * 4 + block_of(block)]
        for i in range(4):
            s[i] *= bits_to_f32(q_held[back_at + i // 2]) * float32(2.0**log2)
        for i in range(8):
            t[i] = float32(0)
        for pair in range(rope_steps // 2):
            ldmatrix_x4(raw, 0, k_lane + uint32(rope_at + 64 * pair))
            for i in range(2):
                ld_shared_v4(a, 0, q_lane + uint32(512 * (2 * pair + i)))
                multiply_rope(t, 4 * i, a, 0, raw, 2 * i)
        for i in range(4):
            s[i] += t[i] + t[4 + i]

    @device
    def raise_units(acc, units, raw_tile, warp, lane):
        """A lane looks at one token. Most tiles have no scale above those before."""
        scales = cuda.local.array(4, float32)
        ld_shared_v4_f32(scales, 0, raw_tile + uint32(lane) * uint32(nbytes) + uint32(dv))
        above = False
        for block in range(blocks):
            above = above or scales[block_of(block)] * power(unit_of(units, block)) > float32(1)
        if vote_any(above):
            raise_by(acc, units, scales, warp)

    @device
    def raise_by(acc, units, scales, warp):
        ratio = uint32(127)
        for block in range(blocks):
            exponent = f32_to_bits(warp_max(scales[block_of(block)])) >> uint32(23)
            wanted = uint32(253) - min(max(exponent, uint32(1)), uint32(252))
            before = unit_of(units, block)
            if wanted < before:
                if uint32(warp) == uint32(block):
                    ratio = uint32(127) - min(before - wanted, uint32(127))
                units[0] -= (before - wanted) << uint32(8 * block)
        if ratio != uint32(127):
            by = power(ratio)
            for i in range(4 * o_groups):
                acc[i] *= by

    @device
    def weights(s, m, l, p_tile, row, column, factor, lane, units, raw_tile):
        scales = cuda.local.array(8, float32)
        scales_of(scales, raw_tile, column, lane)
        for half in range(2):
            origin = anchor(m[half])
            x = ex2_approx((s[2 * half] - origin) * factor)
            y = ex2_approx((s[2 * half + 1] - origin) * factor)
            l[half] += x + y
            to = p_place(p_tile, uint32(row) + uint32(8 * half), uint32(column) >> uint32(3))
            for block in range(blocks):
                unit = power(unit_of(units, block))
                word = pack_f16x2(x * (scales[block_of(block)] * unit), y * (scales[4 + block_of(block)] * unit))
                st_shared_b32(to + uint32(block * p_bytes) + uint32(4) * uint32(lane & 3), word)

    @device
    def multiply_pv(acc, p_lane, v_lane):
        a = cuda.local.array(4, uint32)
        raw = cuda.local.array(4, uint32)
        b = cuda.local.array(4, uint32)
        for k in range(pv_steps):
            ldmatrix_x4(a, 0, p_step(p_lane, k))
            for n in range(BLOCK // 32):
                ldmatrix_x4_trans(raw, 0, v_lane + uint32(16 * k * nbytes + 32 * n))
                for chunk in range(2):
                    b[0], b[2] = across(raw[2 * chunk])
                    b[1], b[3] = across(raw[2 * chunk + 1])
                    multiply(acc, (4 * n + 2 * chunk) * 4, a, 0, b, 0)
                    multiply(acc, (4 * n + 2 * chunk + 1) * 4, a, 0, b, 2)

    @device
    def settle(acc, units, warp):
        by = float32(1)
        for block in range(blocks):
            if uint32(warp) == uint32(block):
                by = power(uint32(254) - unit_of(units, block)) * float32(2.0**log2)
        for n in range(o_groups // 2):
            for half in range(2):
                at, other = 8 * n + 2 * half, 8 * n + 4 + 2 * half
                second, third = acc[other], acc[at + 1]
                acc[at], acc[at + 1] = acc[at] * by, second * by
                acc[other], acc[other + 1] = third * by, acc[other + 1] * by

    made = steps._replace(
        k_lane=k_lane, v_lane=v_lane, p_lane=p_lane, load_q=load_q, multiply_qk=multiply_qk, multiply_pv=multiply_pv
    )
    return made, OfCodes(leave_rope, raise_units, weights, settle)
