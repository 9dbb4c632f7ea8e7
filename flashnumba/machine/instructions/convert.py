"""Conversions between float32 and the 16- and 8-bit formats, fast approximations, and bit casts.

Packed operands hold their first element in the lowest bits, so ``pack_f16x2(x[2 * i], x[2 * i + 1])`` is what a 32-bit
load of two neighbours would give. (PTX names the upper half first; the wrappers turn that round.)

Conversions are exact to the bit on the emulator. The approximations are table look-ups in hardware; the emulator gives
the correctly rounded result, with subnormal inputs and results flushed to zero as the hardware flushes them, and
:data:`APPROXIMATIONS` says how far the hardware may be from it.

Source: PTX ISA, "cvt", "ex2", "lg2", "rcp", "sqrt", "rsqrt".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from flashnumba.machine.instruction import Instruction, Scalar, instruction
from flashnumba.machine.instructions import plain
from flashnumba.machine.instructions.formats import canonical, decode, encode

__all__ = [
    "APPROXIMATIONS",
    "Bound",
    "bf16_to_f32",
    "bf16x2_high",
    "bf16x2_low",
    "bits_to_f32",
    "e4m3x2_to_f16x2",
    "e4m3x4_even_to_f16x2",
    "e4m3x4_high_to_f16x2",
    "e4m3x4_low_to_f16x2",
    "e4m3x4_odd_to_f16x2",
    "e5m2x2_to_f16x2",
    "e5m2x4_high_to_f16x2",
    "e5m2x4_low_to_f16x2",
    "ex2_approx",
    "f16_to_f32",
    "f16x2_high",
    "f16x2_low",
    "f16x2_to_e4m3x2",
    "f16x2_to_e5m2x2",
    "f32_to_bf16",
    "f32_to_bits",
    "f32_to_f16",
    "lg2_approx",
    "max_bf16x2",
    "max_f16x2",
    "pack_bf16x2",
    "pack_e4m3x2",
    "pack_e4m3x4",
    "pack_e5m2x2",
    "pack_e5m2x4",
    "pack_f16x2",
    "rcp_approx",
    "rsqrt_approx",
    "sqrt_approx",
]


Quick = Callable[[Callable[..., Any]], Callable[..., Any]] | None


class Bound(NamedTuple):
    """How far hardware may be from the exact result: ``max(ulps units in the last place, absolute)``."""

    ulps: int
    absolute: float = 0.0


APPROXIMATIONS: dict[str, Bound] = {
    "ex2_approx": Bound(2),
    # The bound is absolute between 1/2 and 2, where the result passes through zero, and relative (2^-22) elsewhere.
    "lg2_approx": Bound(4, 2.0**-22),
    "rcp_approx": Bound(1),
    "rsqrt_approx": Bound(2),
    "sqrt_approx": Bound(2),
}
"""Instructions whose result in hardware is not the correctly rounded one, and the bounds that the PTX ISA gives."""

_SMALLEST = np.float32(2.0**-126)


def _flushed(x: np.ndarray) -> np.ndarray:
    """Subnormal numbers become zeros of their sign."""
    return x * (np.abs(x) >= _SMALLEST)


def _approximation(
    name: str, opcode: str, function: Callable[[np.ndarray], np.ndarray], doc: str, quick: Quick = None
) -> Instruction:
    def emulate(x: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            exact = function(np.float64(_flushed(x)))
            return canonical(_flushed(exact.astype(np.float32)))[()]

    emulate.__module__ = __name__
    bound = APPROXIMATIONS[name]
    within = f"{bound.ulps} ulp" + (f" or {bound.absolute:.2g}, whichever is more" if bound.absolute else "")
    return instruction(
        name,
        f"{opcode}.approx.ftz.f32 %result, %x;",
        (Scalar("x", "f32"),),
        returns="f32",
        doc=f"{doc} Subnormal inputs and results are flushed to zero. Hardware is within {within}.",
        quick=quick,
    )(emulate)


ex2_approx = _approximation("ex2_approx", "ex2", np.exp2, "2 to the power x.", plain.ex2)
lg2_approx = _approximation("lg2_approx", "lg2", np.log2, "Logarithm of x to base 2; NaN for negative x.")
rcp_approx = _approximation(
    "rcp_approx", "rcp", np.reciprocal, "1 / x; infinity of its sign for a zero.", plain.reciprocal
)
rsqrt_approx = _approximation("rsqrt_approx", "rsqrt", lambda x: 1.0 / np.sqrt(x), "1 / sqrt(x); NaN for negative x.")
sqrt_approx = _approximation("sqrt_approx", "sqrt", np.sqrt, "Square root; NaN for negative x.")


def _joined(low: np.ndarray, high: np.ndarray, bits: int) -> np.ndarray:
    kind = {8: np.uint16, 16: np.uint32}[bits]
    return (low.astype(kind) | high.astype(kind) << kind(bits))[()]


def _pack(name: str, form: str, ptx: str, returns: str, arch: str, doc: str, quick: Quick = None) -> Instruction:
    bits = 8 if returns == "u16" else 16

    def emulate(low: np.ndarray, high: np.ndarray) -> np.ndarray:
        return _joined(encode(low, form), encode(high, form), bits)

    emulate.__module__ = __name__
    operands = (Scalar("low", "f32"), Scalar("high", "f32"))
    return instruction(name, ptx, operands, returns=returns, arch=arch, doc=doc, quick=quick)(emulate)


# sm_75 has no packed conversion; on later GPUs the assembler joins the two into one.
pack_f16x2 = _pack(
    "pack_f16x2",
    "f16",
    "{ .reg .b16 l, h; cvt.rn.f16.f32 l, %low; cvt.rn.f16.f32 h, %high; mov.b32 %result, {l, h}; }",
    "u32",
    "75",
    "Two float32 to float16, ``low`` in the lower half. Overflow gives infinity.",
    plain.pack_f16,
)
pack_bf16x2 = _pack(
    "pack_bf16x2",
    "bf16",
    "cvt.rn.bf16x2.f32 %result, %high, %low;",
    "u32",
    "80",
    "Two float32 to bfloat16, ``low`` in the lower half.",
    plain.pack_bf16,
)
pack_e4m3x2 = _pack(
    "pack_e4m3x2",
    "e4m3",
    "cvt.rn.satfinite.e4m3x2.f32 %result, %high, %low;",
    "u16",
    "89",
    "Two float32 to e4m3, ``low`` in the lower byte. Beyond 448 the result is 448 of its sign; NaN stays NaN.",
)
pack_e5m2x2 = _pack(
    "pack_e5m2x2",
    "e5m2",
    "cvt.rn.satfinite.e5m2x2.f32 %result, %high, %low;",
    "u16",
    "89",
    "Two float32 to e5m2, ``low`` in the lower byte. Beyond 57344 the result is 57344 of its sign; NaN stays NaN.",
)


def _pack4(form: str) -> Instruction:
    def emulate(a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray) -> np.ndarray:
        low, high = (_joined(encode(x, form), encode(y, form), 8) for x, y in ((a, b), (c, d)))
        return _joined(low, high, 16)

    emulate.__module__ = __name__
    cvt = f"cvt.rn.satfinite.{form}x2.f32"
    return instruction(
        f"pack_{form}x4",
        f"{{ .reg .b16 l, h; {cvt} l, %b, %a; {cvt} h, %d, %c; mov.b32 %result, {{l, h}}; }}",
        tuple(Scalar(x, "f32") for x in "abcd"),
        returns="u32",
        arch="89",
        doc=f"Four float32 to {form}, ``a`` in the lowest byte; as pack_{form}x2 twice.",
    )(emulate)


pack_e4m3x4 = _pack4("e4m3")
pack_e5m2x4 = _pack4("e5m2")


def _to_f16x2(form: str, part: str) -> Instruction:
    """FP8 to two float16: from a 16-bit register, or from two bytes of a 32-bit one."""
    table = encode(decode(np.arange(256, dtype=np.uint8), form), "f16")
    first, second = {"": (0, 8), "low": (0, 8), "high": (16, 24), "even": (0, 16), "odd": (8, 24)}[part]

    def emulate(x: np.ndarray) -> np.ndarray:
        return _joined(*(table[x >> x.dtype.type(shift) & 0xFF] for shift in (first, second)), 16)

    emulate.__module__ = __name__
    cvt = f"cvt.rn.f16x2.{form}x2 %result"
    halves = "{ .reg .b16 l, h; mov.b32 {l, h}, %x; " + cvt
    # Both of a word want the same permuted one, which is made once.
    permuted = "{ .reg .b16 l, h; .reg .b32 t; prmt.b32 t, %x, 0, 0x3120; mov.b32 {l, h}, t; " + cvt
    ptx = {
        "": f"{cvt}, %x;", "low": f"{halves}, l; }}", "high": f"{halves}, h; }}", "even": f"{permuted}, l; }}",
        "odd": f"{permuted}, h; }}",
    }[part]  # fmt: skip
    where = {
        "": " those of", "low": " the lower two bytes of", "high": " the upper two bytes of",
        "even": " bytes 0 and 2 of", "odd": " bytes 1 and 3 of",
    }[part]  # fmt: skip
    return instruction(
        f"{form}x4_{part}_to_f16x2" if part else f"{form}x2_to_f16x2",
        ptx,
        (Scalar("x", "u32" if part else "u16"),),
        returns="u32",
        arch="89",
        doc=f"Two {form},{where} ``x``, to float16; exact.",
    )(emulate)


e4m3x2_to_f16x2 = _to_f16x2("e4m3", "")
e4m3x4_low_to_f16x2 = _to_f16x2("e4m3", "low")
e4m3x4_high_to_f16x2 = _to_f16x2("e4m3", "high")
e4m3x4_even_to_f16x2 = _to_f16x2("e4m3", "even")
e4m3x4_odd_to_f16x2 = _to_f16x2("e4m3", "odd")
e5m2x2_to_f16x2 = _to_f16x2("e5m2", "")
e5m2x4_low_to_f16x2 = _to_f16x2("e5m2", "low")
e5m2x4_high_to_f16x2 = _to_f16x2("e5m2", "high")


_ALL16 = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)


def _from_f16x2(form: str) -> Instruction:
    table = encode(decode(_ALL16, "f16"), form)

    def emulate(x: np.ndarray) -> np.ndarray:
        return _joined(table[x & 0xFFFF], table[x >> 16], 8)

    emulate.__module__ = __name__
    return instruction(
        f"f16x2_to_{form}x2",
        f"cvt.rn.satfinite.{form}x2.f16x2 %result, %x;",
        (Scalar("x", "u32"),),
        returns="u16",
        arch="89",
        doc=f"Two float16 to {form}, saturating as pack_{form}x2 does.",
    )(emulate)


f16x2_to_e4m3x2 = _from_f16x2("e4m3")
f16x2_to_e5m2x2 = _from_f16x2("e5m2")


def _half(name: str, form: str, shift: int, ptx: str, doc: str, operand: str = "u32", arch: str = "75") -> Instruction:
    table = decode(_ALL16, form)

    def emulate(x: np.ndarray) -> np.ndarray:
        return table[x >> shift & 0xFFFF]

    emulate.__module__ = __name__
    wide = np.uint16 if operand == "u16" else np.uint32
    quick = (lambda _: plain.half_of(shift)) if form == "f16" else plain.widened_bf16(shift, wide)
    return instruction(name, ptx, (Scalar("x", operand),), returns="f32", arch=arch, doc=doc, quick=quick)(emulate)


_SPLIT = "{ .reg .b16 l, h; mov.b32 {l, h}, %x; cvt.f32.f16 %result, "
f16x2_low = _half("f16x2_low", "f16", 0, _SPLIT + "l; }", "The lower float16 of ``x`` as float32.")
f16x2_high = _half("f16x2_high", "f16", 16, _SPLIT + "h; }", "The upper float16 of ``x`` as float32.")
f16_to_f32 = _half("f16_to_f32", "f16", 0, "cvt.f32.f16 %result, %x;", "The float16 of given bits as float32.", "u16")
bf16x2_low = _half(
    "bf16x2_low",
    "bf16",
    0,
    "{ .reg .b32 t; shl.b32 t, %x, 16; mov.b32 %result, t; }",
    "The lower bfloat16 of ``x`` as float32: a shift, so that NaNs keep their bits.",
)
bf16x2_high = _half(
    "bf16x2_high",
    "bf16",
    16,
    "{ .reg .b32 t; and.b32 t, %x, 0xffff0000; mov.b32 %result, t; }",
    "The upper bfloat16 of ``x`` as float32: a mask, so that NaNs keep their bits.",
)
bf16_to_f32 = _half(
    "bf16_to_f32",
    "bf16",
    0,
    "{ .reg .b16 z; mov.b16 z, 0; mov.b32 %result, {z, %x}; }",
    "The bfloat16 of given bits as float32; NaNs keep their bits.",
    "u16",
)


@instruction("f32_to_f16", "cvt.rn.f16.f32 %result, %x;", (Scalar("x", "f32"),), returns="u16")
def f32_to_f16(x: np.ndarray) -> np.ndarray:
    """The bits of ``x`` rounded to float16; overflow gives infinity."""
    return encode(x, "f16")[()]


@instruction("f32_to_bf16", "cvt.rn.bf16.f32 %result, %x;", (Scalar("x", "f32"),), returns="u16", arch="80")
def f32_to_bf16(x: np.ndarray) -> np.ndarray:
    """The bits of ``x`` rounded to bfloat16."""
    return encode(x, "bf16")[()]


@instruction("f32_to_bits", "mov.b32 %result, %x;", (Scalar("x", "f32"),), returns="u32", quick=plain.bits_of)
def f32_to_bits(x: np.ndarray) -> np.ndarray:
    """The bits of a float32."""
    return x.view(np.uint32)


@instruction("bits_to_f32", "mov.b32 %result, %x;", (Scalar("x", "u32"),), returns="f32", quick=plain.float_of)
def bits_to_f32(x: np.ndarray) -> np.ndarray:
    """The float32 of given bits."""
    return x.view(np.float32)


def _max_pair(form: str) -> Instruction:
    infinity = {"f16": 0x7C00, "bf16": 0x7F80}[form]

    def emulate(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        codes = np.stack([np.asarray(x), np.asarray(y)])
        codes = np.stack([codes & np.uint32(0xFFFF), codes >> np.uint32(16)], -1).astype(np.int32)  # [2, ..., halves]
        nan = codes & 0x7FFF > infinity
        order = np.where(nan, -1, np.where(codes & 0x8000, codes ^ 0xFFFF, codes | 0x8000))  # -0 before +0
        larger = np.where(nan.all(0), 0x7FFF, np.where(order[0] > order[1], codes[0], codes[1]))
        return _joined(larger[..., 0].astype(np.uint16), larger[..., 1].astype(np.uint16), 16)

    emulate.__module__ = __name__
    return instruction(
        f"max_{form}x2",
        f"max.{form}x2 %result, %x, %y;",
        (Scalar("x", "u32"), Scalar("y", "u32")),
        returns="u32",
        arch="80",
        quick=plain.greater_pair(infinity),
        doc=f"The greater of two {form} in either half; a NaN loses to a number, and -0 to +0.",
    )(emulate)


max_f16x2 = _max_pair("f16")
max_bf16x2 = _max_pair("bf16")
