"""A tile of the cache on its way to shared memory: as it is in 16 bits, or as codes that are converted there.

In 8 bits a token is ``dv`` codes, a float32 scale for each 128 of them, and the rotated columns in 16 bits, one after
the other: 656 bytes for 512 + 64 columns, 0.57 of what 16 bits take. Codes are copied as they lie, since cp.async
converts nothing; when they have come, eight threads a token turn them into a row of the tile that ldmatrix reads:

    codes  8 c .. 8 c + 7  of each 64, by thread c, times their scale        one chunk of 16 bytes, no bank twice

The products are then those of 16 bits, so what is won is bytes of memory alone.

Source: FlashMLA, README and ``tests/quant.py``, for the layout of a token.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import (
    cp_async_16,
    cp_async_16_zfill,
    f16x2_high,
    f16x2_low,
    ld_shared_f32,
    ld_shared_v2,
    ld_shared_v4,
    st_shared_v4,
)
from flashnumba.machine.numba import cuda, float32, int32, uint32, uint64
from flashnumba.stages.flash_mla.sizes import BLOCK, MLATiles, token_bytes
from flashnumba.tiles.elements import vectors
from flashnumba.tiles.fp8_convert import make_halves
from flashnumba.tiles.swizzle import swizzle

__all__ = ["make_convert", "make_copy_codes", "make_decode4"]


@cache
def make_copy_codes(tiles: MLATiles) -> DeviceFunction:
    """``copy_codes(raw_tile, source, tokens)``: start the copy of ``bn`` packed tokens from global address ``source``,
    int64; those from ``tokens``, int32, on become zeros."""
    nbytes, threads, bn = token_bytes(tiles.d, tiles.dv), tiles.threads, tiles.bn
    chunks = bn * nbytes // 16
    rounds, rest = chunks // threads, chunks % threads

    @device
    def copy_codes(raw_tile, source, tokens):
        thread = uint32(16) * uint32(cuda.threadIdx.x)
        to, origin = uint32(raw_tile + thread), uint64(source) + uint64(thread)
        if tokens >= bn:  # nearly always: addresses are one and a constant then
            for i in range(rounds):
                cp_async_16(to + uint32(16 * i * threads), origin + uint64(16 * i * threads))
            if rest and thread < uint32(16 * rest):
                cp_async_16(to + uint32(16 * rounds * threads), origin + uint64(16 * rounds * threads))
        else:
            present = uint32(max(tokens, int32(0))) * uint32(nbytes)
            for i in range(rounds + (rest > 0)):
                index = thread + uint32(16 * i * threads)
                if index < uint32(16 * chunks):
                    there = uint32(16) if index < present else uint32(0)
                    cp_async_16_zfill(raw_tile + index, uint64(source) + uint64(index), there)

    return copy_codes


@cache
def make_decode4(code: str, arch: str) -> DeviceFunction:
    """``decode4(values, at, word, factor)``: four codes times ``factor`` to ``values[at : at + 4]``, float32."""
    halves = make_halves(code, arch)
    neighbours, shift = code == "float8_e4m3fn" and halves.log2 == 0, 2.0**halves.log2
    along, across = halves.along, halves.across

    @device
    def decode4(values, at, word, factor):
        if neighbours:
            first, second = along(word)
            values[at], values[at + 1] = f16x2_low(first), f16x2_high(first)
            values[at + 2], values[at + 3] = f16x2_low(second), f16x2_high(second)
        else:
            first, second = across(word)
            values[at], values[at + 2] = f16x2_low(first), f16x2_high(first)
            values[at + 1], values[at + 3] = f16x2_low(second), f16x2_high(second)
        for i in range(4):
            values[at + i] *= factor * float32(shift)

    return decode4


@cache
def make_convert(tiles: MLATiles, element: str, code: str, arch: str, broken: str = "") -> DeviceFunction:
    """``convert(k_tile, raw_tile)``: codes of a tile times their scales, rounded to ``element``.

    Args:
        broken: ``"scale"`` plants a fault: every block has the first one's scale.
    """
    bn, dv, nbytes = tiles.bn, tiles.dv, token_bytes(tiles.d, tiles.dv)
    at_once, blocks = tiles.rows_at_once, dv // BLOCK
    place, pitch = swizzle(tiles.d).at, tiles.pitch
    pack, decode4 = vectors(element, 4, arch=arch).pack, make_decode4(code, arch)
    own_scale = int(broken != "scale")
    rounds = bn // at_once

    @device
    def convert(k_tile, raw_tile):
        raw = cuda.local.array(4, uint32)
        values = cuda.local.array(8, float32)
        row, c = uint32(cuda.threadIdx.x) >> uint32(3), uint32(cuda.threadIdx.x) & uint32(7)
        for i in range(rounds):
            token = raw_tile + (row + uint32(i * at_once)) * uint32(nbytes)
            to = place(k_tile, row, c) + uint32(i * at_once * pitch)
            for b in range(blocks):
                scale = ld_shared_f32(token + uint32(dv + 4 * b * own_scale))
                for half in range(2):
                    ld_shared_v2(raw, 0, token + uint32(BLOCK * b + 64 * half) + uint32(8) * c)
                    decode4(values, 0, raw[0], scale)
                    decode4(values, 4, raw[1], scale)
                    for w in range(4):
                        raw[w] = pack(values[2 * w], values[2 * w + 1])
                    st_shared_v4(to + uint32(128 * (2 * b + half)), raw, 0)
            ld_shared_v4(raw, 0, token + uint32(dv + 4 * blocks) + uint32(16) * c)
            st_shared_v4(to + uint32(2 * dv), raw, 0)

    return convert
