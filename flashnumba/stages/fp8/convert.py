"""Kernels that only convert: float32 to codes and back, by every way that a GPU has. All give the codec's bits.

::

    encode   instructions   cvt.rn.satfinite of sm_89: float32 to four codes in two instructions
             integers       any GPU: compare, add and shift, as the codec does
             by_float16     sm_89: float32 to float16 to codes, two roundings
             upper_byte     any GPU, e5m2: float32 to float16, and its upper byte rounded in integers; two roundings too
    decode   instructions   cvt.rn of sm_89, four codes to four float16 in two
             integers       any GPU: masks, shifts, and for e4m3 a product with 2^8

A thread has four elements. What is stored behind the last element of an array is nothing. ``int8`` is there to be
counted beside the others: float32 to signed bytes, rounded by an addition, or by the conversion to integers.

Source: PTX ISA, cvt; ``tiles/fp8_convert.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from flashnumba.machine import launcher
from flashnumba.machine.arrays import describe, empty_like_kind, host_view
from flashnumba.machine.function import DeviceFunction, Kernel, device, kernel
from flashnumba.machine.instructions import (
    f16_to_f32,
    f16x2_to_e4m3x2,
    f16x2_to_e5m2x2,
    f32_to_bits,
    pack_f16x2,
)
from flashnumba.machine.numba import cuda, float32, int32, int64, types, uint8, uint16, uint32
from flashnumba.stages.fp8.codec import format_of
from flashnumba.tiles.fp8_convert import make_encode4, make_halves

if TYPE_CHECKING:
    from flashnumba.machine.compiler import CompileCase

__all__ = ["DECODERS", "ENCODERS", "compile_cases", "decode", "encode", "make_decode", "make_encode"]

THREADS = 256
ENCODERS = {"instructions": "89", "integers": "75", "by_float16": "89", "upper_byte": "75"}
"""Ways to encode, and from which architecture on; ``upper_byte`` is for e5m2."""
DECODERS = {"instructions": "89", "integers": "75"}
INT8 = {"added": "75", "converted": "75"}
LARGEST_INT8 = 127.0
ROUNDER = 12582912.0
"""1.5 * 2^23: added to a small float32, it leaves the nearest integer in the lowest bits."""


@cache
def make_encode(element: str, way: str, broken: str = "") -> Kernel:
    """``(x float32 [n], codes uint8 [n])``, in blocks of 256 threads of four elements each.

    Args:
        element: ``float8_e4m3fn`` or ``float8_e5m2``; ``int8`` with the ways of :data:`INT8`.
        way: of :data:`ENCODERS`.
        broken: ``"truncate"`` plants a fault in ``upper_byte``: what is below the byte is dropped.
    """
    arch = (INT8 if element == "int8" else ENCODERS)[way]
    encode4 = _encode4(element, way, broken)

    @kernel(threads=THREADS, arch=arch, name=f"fp8.encode {way}")
    def encode_all(x, codes):
        first = int64(4) * (int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x)
        values = cuda.local.array(4, float32)
        for i in range(4):
            values[i] = float32(0)
            if first + i < x.shape[0]:
                values[i] = x[first + i]
        word = encode4(values[0], values[1], values[2], values[3])
        for i in range(4):
            if first + i < x.shape[0]:
                codes[first + i] = uint8((word >> uint32(8 * i)) & uint32(0xFF))

    return encode_all


def _encode4(element: str, way: str, broken: str) -> DeviceFunction:
    if element == "int8":
        return _int8_added if way == "added" else _int8_converted
    if way in ("instructions", "integers"):
        return make_encode4(element, ENCODERS[way])
    narrow = f16x2_to_e4m3x2 if element == "float8_e4m3fn" else f16x2_to_e5m2x2
    rounded = broken != "truncate"

    @device
    def by_float16(a, b, c, d):
        return uint32(uint32(narrow(pack_f16x2(a, b))) | (uint32(narrow(pack_f16x2(c, d))) << uint32(16)))

    @device
    def upper_byte(pair):
        """The bytes of two float16, in bits 0 to 7 and 16 to 23."""
        size = uint32(pair & uint32(0x7FFF7FFF))
        odd = uint32((size >> uint32(8)) & uint32(0x00010001))
        code = uint32(size >> uint32(8)) & uint32(0x007F007F)
        if rounded:
            code = uint32((size + odd + uint32(0x007F007F)) >> uint32(8)) & uint32(0x00FF00FF)
        low, high = min(code & uint32(0xFF), uint32(0x7B)), min(code >> uint32(16), uint32(0x7B))
        if size & uint32(0xFFFF) > uint32(0x7C00):
            low = uint32(0x7F)
        elif (pair & uint32(0x8000)) != 0:
            low |= uint32(0x80)
        if size >> uint32(16) > uint32(0x7C00):
            high = uint32(0x7F)
        elif (pair >> uint32(31)) != 0:
            high |= uint32(0x80)
        return uint32(low | (high << uint32(8)))

    @device
    def by_upper_byte(a, b, c, d):
        return uint32(upper_byte(pack_f16x2(a, b)) | (upper_byte(pack_f16x2(c, d)) << uint32(16)))

    return by_float16 if way == "by_float16" else by_upper_byte


@device
def _byte_added(x):
    near = min(max(x, float32(-LARGEST_INT8)), float32(LARGEST_INT8))
    return uint32(f32_to_bits(near + float32(ROUNDER)) & uint32(0xFF))


@device
def _int8_added(a, b, c, d):
    low = uint32(_byte_added(a) | (_byte_added(b) << uint32(8)))
    return uint32(low | (_byte_added(c) << uint32(16)) | (_byte_added(d) << uint32(24)))


@device
def _byte_converted(x):
    near = min(max(x, float32(-LARGEST_INT8)), float32(LARGEST_INT8))
    return uint32(int32(near + (float32(0.5) if near > float32(0) else float32(-0.5)))) & uint32(0xFF)


@device
def _int8_converted(a, b, c, d):
    low = uint32(_byte_converted(a) | (_byte_converted(b) << uint32(8)))
    return uint32(low | (_byte_converted(c) << uint32(16)) | (_byte_converted(d) << uint32(24)))


@cache
def make_decode(element: str, way: str, broken: str = "") -> Kernel:
    """``(codes uint8 [n], x float32 [n])``, in blocks of 256 threads of four elements each.

    Args:
        way: of :data:`DECODERS`.
        broken: ``"factor"`` plants a fault: the integers' 2^8 is left out.
    """
    halves = make_halves(element, DECODERS[way])
    across, factor = halves.across, 1.0 if broken == "factor" else 2.0**halves.log2

    @kernel(threads=THREADS, arch=DECODERS[way], name=f"fp8.decode {way}")
    def decode_all(codes, x):
        first = int64(4) * (int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x)
        word = uint32(0)
        for i in range(4):
            if first + i < codes.shape[0]:
                word |= uint32(codes[first + i]) << uint32(8 * i)
        even, odd = across(word)
        for i in range(4):
            if first + i < codes.shape[0]:
                pair = odd if i % 2 else even
                x[first + i] = f16_to_f32(uint16((pair >> uint32(16 * (i // 2))) & uint32(0xFFFF))) * float32(factor)

    return decode_all


def encode(x: Any, fmt: str, way: str = "integers", machine: str = "auto") -> Any:
    """Codes of packed float32 ``x`` by a kernel, saturating: uint8 of its shape and kind.

    Raises:
        TypeError, ValueError: x is not packed float32, fmt or way do not fit.
    """
    if way == "upper_byte" and fmt != "e5m2":
        raise ValueError(f"way is 'upper_byte' and fmt {fmt!r}; only e5m2 is the upper byte of a float16")
    return _converted(x, "float32", "uint8", make_encode, fmt, way, ENCODERS, machine)


def decode(codes: Any, fmt: str, way: str = "integers", machine: str = "auto") -> Any:
    """float32 of packed uint8 ``codes`` by a kernel, of their shape and kind; errors as :func:`encode`."""
    return _converted(codes, "uint8", "float32", make_decode, fmt, way, DECODERS, machine)


def _converted(
    array: Any, element: str, to: str, make: Any, fmt: str, way: str, ways: dict[str, str], machine: str
) -> Any:  # fmt: skip
    form = format_of(fmt)
    if way not in ways:
        raise ValueError(f"way is {way!r}; it must be one of {', '.join(ways)}")
    found = describe(array, "x")
    if found.element != element or not found.contiguous:
        raise TypeError(f"x has elements of type {found.element}, strides {found.strides}; it must be packed {element}")
    made = empty_like_kind(array, found.shape, to)
    flat = [x.reshape(-1) if found.device is not None else host_view(x).reshape(-1) for x in (array, made)]
    size = int(np.prod(found.shape))
    launcher.launch(make(form.element, way), -(-size // (4 * THREADS)), THREADS, tuple(flat), machine=machine)
    return made


def compile_cases() -> Iterator[CompileCase]:
    """Kernels as they are launched, for the compiler's tables and gates."""
    from flashnumba.machine.compiler import CompileCase

    floats, bytes_ = types.Array(types.float32, 1, "C"), types.Array(types.uint8, 1, "C")
    for element in ("float8_e4m3fn", "float8_e5m2"):
        for way in ENCODERS:
            if way != "upper_byte" or element == "float8_e5m2":
                title = f"fp8.encode {way} {element}"
                yield CompileCase(title, make_encode(element, way), (floats, bytes_), THREADS)
        for way in DECODERS:
            yield CompileCase(f"fp8.decode {way} {element}", make_decode(element, way), (bytes_, floats), THREADS)
    for way in INT8:
        yield CompileCase(f"fp8.encode {way} int8", make_encode("int8", way), (floats, bytes_), THREADS)
