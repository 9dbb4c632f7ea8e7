"""Conversions from and to the 8-bit formats in registers: by the instructions of sm_89, or in integers on any GPU.

**Decoding**, a word of four codes to four float16. e5m2 is the upper byte of a float16, so two masks and a shift give
two words of two. Of e4m3 the seven bits below the sign are moved to where float16 has the end of its exponent and the
beginning of its mantissa, which makes each number 2^8 times smaller than it is, subnormal ones too, as float16 has five
bits of exponent and they fit; whoever uses them multiplies what comes of it, once::

    e4m3    s eeee mmm           float16   s 0eeee mmm0000000    value 2^-8

The code of NaN, seven ones, would be 480: adding one in the last place carries out of it and out of nothing else, and
the carry fills the exponent up. Codes are taken in pairs (0, 2) and (1, 3) of a word: bytes 1 and 3 already are where
the upper bytes of two float16 belong. For sums, whose order is free, that is as good as neighbours. The instruction
takes neighbours: where it must be other pairs, the bytes of a word change places first, one permutation for two
conversions.

**Encoding**, float32 to a code, as :mod:`flashnumba.stages.fp8.codec` does it. Below the smallest normal number, one
addition rounds.

Source: the layouts; for the carry, nothing but arithmetic.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import (
    e4m3x4_even_to_f16x2,
    e4m3x4_high_to_f16x2,
    e4m3x4_low_to_f16x2,
    e4m3x4_odd_to_f16x2,
    f32_to_bits,
    pack_e4m3x4,
    pack_e5m2x4,
)
from flashnumba.machine.numba import float32, uint32

__all__ = ["ELEMENTS", "Halves", "make_encode4", "make_halves", "native"]

ELEMENTS = ("float8_e4m3fn", "float8_e5m2")
MANTISSA = {"float8_e4m3fn": 3, "float8_e5m2": 2}
BIAS = {"float8_e4m3fn": 7, "float8_e5m2": 15}
TOP = {"float8_e4m3fn": 0x7E, "float8_e5m2": 0x7B}


def native(arch: str) -> bool:
    """Whether a GPU has instructions that convert these formats."""
    return int(arch.rstrip("a")) >= 89


class Halves(NamedTuple):
    """How a word of four codes becomes two words of two float16 each, ``word -> (word, word)``.

    Attributes:
        along: some two of the four, and the other two, always the same: for sums over them.
        across: codes 0 and 2, and codes 1 and 3.
        log2: the float16 are ``2^-log2`` times the numbers.
    """

    along: DeviceFunction
    across: DeviceFunction
    log2: int


@cache
def make_halves(element: str, arch: str) -> Halves:
    """Decoding for one of :data:`ELEMENTS`; by instructions where there are some and they are fewer."""

    @device
    def e5m2(word):
        return uint32((word << uint32(8)) & uint32(0xFF00FF00)), uint32(word & uint32(0xFF00FF00))

    @device
    def e4m3_pair(word):
        """Two codes in the upper bytes of two halves; what is in the lower ones does not matter."""
        size = uint32((word >> uint32(1)) & uint32(0x3F803F80))
        carry = uint32((size + uint32(0x00800080)) & uint32(0x40004000))  # of a NaN alone
        return uint32(size | carry | (word & uint32(0x80008000)))

    @device
    def e4m3(word):
        return e4m3_pair(uint32(word << uint32(8))), e4m3_pair(word)

    @device
    def e4m3_along(word):
        return e4m3x4_low_to_f16x2(word), e4m3x4_high_to_f16x2(word)

    @device
    def e4m3_across(word):
        return e4m3x4_even_to_f16x2(word), e4m3x4_odd_to_f16x2(word)

    if element == "float8_e5m2":
        return Halves(e5m2, e5m2, 0)
    if native(arch):
        return Halves(e4m3_along, e4m3_across, 0)
    return Halves(e4m3, e4m3, 8)


@cache
def make_encode4(element: str, arch: str) -> DeviceFunction:
    """``encode4(a, b, c, d) -> word``: four float32 rounded to codes, saturating, ``a`` in the lowest byte."""
    mantissa, bias, top = MANTISSA[element], BIAS[element], TOP[element]
    drop, half = 23 - mantissa, (1 << (22 - mantissa)) - 1
    shifted = (127 - bias) << mantissa
    anchor, smallest = 2.0 ** (24 - bias - mantissa), 2.0 ** (1 - bias)
    is_e4m3 = element == "float8_e4m3fn"

    @device
    def by_instruction(a, b, c, d):
        return pack_e4m3x4(a, b, c, d) if is_e4m3 else pack_e5m2x4(a, b, c, d)

    @device
    def encode(x):
        bits = f32_to_bits(x)
        size = uint32(bits & uint32(0x7FFFFFFF))
        odd = uint32((size >> uint32(drop)) & uint32(1))
        code = uint32(((size + odd + uint32(half)) >> uint32(drop)) - uint32(shifted))
        if abs(x) < float32(smallest):
            # The last place of the sum is worth one step.
            code = uint32(f32_to_bits(abs(x) + float32(anchor)) - f32_to_bits(float32(anchor)))
        code = min(code, uint32(top))
        if x != x:
            return uint32(0x7F)
        return uint32(code | ((bits >> uint32(24)) & uint32(0x80)))

    @device
    def by_integers(a, b, c, d):
        low = uint32(encode(a) | (encode(b) << uint32(8)))
        return uint32(low | (encode(c) << uint32(16)) | (encode(d) << uint32(24)))

    return by_instruction if native(arch) else by_integers
