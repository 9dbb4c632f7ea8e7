"""Conversions on one thread's plain numbers: the same bits as the array forms, without the cost of an array.

A kernel on the emulator converts numbers one by one, where NumPy's overhead would be most of the time. Each function
here covers the common values and leaves the rest (NaN, overflow, subnormals) to the array form.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from struct import Struct
from typing import Any

import numpy as np

__all__ = [
    "bits_of",
    "ex2",
    "float_of",
    "greater_pair",
    "half_of",
    "pack_bf16",
    "pack_f16",
    "reciprocal",
    "widened_bf16",
]

_FLOAT, _WORD, _HALVES = Struct("<f"), Struct("<I"), Struct("<ee")
_SMALLEST, _LARGEST = 2.0**-126, 2.0**126

Slow = Callable[..., Any]


def _answer(value: Any) -> Any:
    return value.item() if value.dtype.kind == "u" else value


def ex2(slow: Slow) -> Slow:
    def quick(x: Any) -> Any:
        if -126 <= x < 128:
            return np.float32(2.0 ** float(x))
        if x <= -127:  # below half the smallest normal number: flushed, as of every masked score
            return np.float32(0)
        return slow(np.float32(x))

    return quick


def reciprocal(slow: Slow) -> Slow:
    def quick(x: Any) -> Any:
        if _SMALLEST <= x <= _LARGEST:
            return np.float32(1.0 / float(x))
        return slow(np.float32(x))

    return quick


def pack_f16(slow: Slow) -> Slow:
    def quick(low: Any, high: Any) -> int:
        if -65504 <= low <= 65504 and -65504 <= high <= 65504:
            return _WORD.unpack(_HALVES.pack(low, high))[0]
        return _answer(slow(np.float32(low), np.float32(high)))

    return quick


def _bf16(x: Any) -> int:
    bits = _WORD.unpack(_FLOAT.pack(x))[0]
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16  # round to nearest, ties to even


def pack_bf16(slow: Slow) -> Slow:
    def quick(low: Any, high: Any) -> int:
        if low == low and high == high:
            return _bf16(low) | _bf16(high) << 16
        return _answer(slow(np.float32(low), np.float32(high)))

    return quick


@cache
def _halves() -> list[Any]:
    """All 65536 float16 as float32, NaNs in the one form that arithmetic gives."""
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    values[np.isnan(values)] = np.uint32(0x7FFFFFFF).view(np.float32)
    return list(values)


def greater_pair(infinity: int) -> Callable[[Slow], Slow]:
    """For a 16-bit format: ordered as its bits are, once those of negative numbers are turned round."""

    def greater(x: int, y: int) -> int:
        if x & 0x7FFF > infinity:
            return 0x7FFF if y & 0x7FFF > infinity else y
        if y & 0x7FFF > infinity:
            return x
        return x if (x ^ 0xFFFF if x & 0x8000 else x | 0x8000) > (y ^ 0xFFFF if y & 0x8000 else y | 0x8000) else y

    def make(slow: Slow) -> Slow:
        def quick(x: Any, y: Any) -> int:
            x, y = int(x), int(y)
            return greater(x & 0xFFFF, y & 0xFFFF) | greater(x >> 16, y >> 16) << 16

        return quick

    return make


def half_of(shift: int) -> Callable[[Any], Any]:
    """The float16 at bit ``shift`` of an integer, as float32."""
    return lambda x: _halves()[int(x) >> shift & 0xFFFF]


def _float(bits: int, slow: Callable[[], Any]) -> Any:
    if bits & 0x7F800000 == 0x7F800000:  # a detour through a Python float would change a NaN's bits
        return slow()
    return np.float32(_FLOAT.unpack(_WORD.pack(bits))[0])


def widened_bf16(shift: int, dtype: Any) -> Callable[[Slow], Slow]:
    """The bfloat16 at bit ``shift`` of an integer, as float32."""

    def make(slow: Slow) -> Slow:
        return lambda x: _float((int(x) >> shift & 0xFFFF) << 16, lambda: slow(dtype(x)))

    return make


def bits_of(slow: Slow) -> Slow:
    def quick(x: Any) -> int:
        if x == x:
            return _WORD.unpack(_FLOAT.pack(x))[0]
        return int(slow(np.float32(x)))

    return quick


def float_of(slow: Slow) -> Slow:
    return lambda x: _float(int(x) & 0xFFFFFFFF, lambda: slow(np.uint32(int(x) & 0xFFFFFFFF)))
