"""16- and 8-bit floating-point formats as a GPU converts them, on NumPy arrays.

Conversions round to nearest, ties to even. Where the hardware and ml_dtypes differ the hardware is followed: every NaN
becomes the one NaN of the format (0x7fff, or 0x7f), and FP8 conversions saturate, so that infinity becomes the largest
finite number.

    form   layout      largest   smallest normal   subnormal step
    f16    1-5-10      65504     2^-14             2^-24
    bf16   1-8-7       3.39e38   2^-126            2^-133
    e4m3   1-4-3       448       2^-6              2^-9             no infinity
    e5m2   1-5-2       57344     2^-14             2^-16
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

__all__ = ["FORMS", "canonical", "decode", "encode"]

_CODES = np.arange(256, dtype=np.uint8)
FORMS = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
"""NumPy's type for each form."""

_LARGEST = {"e4m3": np.float32(448), "e5m2": np.float32(57344)}
_NAN = np.uint32(0x7FFFFFFF).view(np.float32)


def canonical(values: np.ndarray) -> np.ndarray:
    """float32 ``values`` with every NaN replaced by 0x7fffffff, the NaN that arithmetic gives on a GPU."""
    return np.where(np.isnan(values), _NAN, values)


with np.errstate(invalid="ignore"):  # NumPy warns of signalling NaNs
    _VALUES = {
        "f16": canonical(np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(np.float16).astype(np.float32)),
        "e4m3": canonical(_CODES.view(FORMS["e4m3"]).astype(np.float32)),
        "e5m2": canonical(_CODES.view(FORMS["e5m2"]).astype(np.float32)),
    }


def decode(registers: np.ndarray, form: str) -> np.ndarray:
    """float32 values of the elements packed in ``registers``, the lowest bits first; the last axis grows accordingly.

    NaNs become the one NaN, but for bfloat16, whose bits are kept.

    Args:
        registers: unsigned integers of 8 to 32 bits, as wide as an element or wider.
        form: "f16", "bf16", "e4m3" or "e5m2".
    """
    registers = np.ascontiguousarray(registers)
    if form == "bf16":
        return (registers.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return _VALUES[form].take(registers.view(np.uint16 if form == "f16" else np.uint8))


def encode(values: np.ndarray, form: str) -> np.ndarray:
    """Codes of float32 ``values`` rounded to ``form``: uint16, or uint8 for FP8, of the same shape."""
    if isinstance(values, np.float32):
        return _encoded(values, form)
    values = np.asarray(values, np.float32)
    target = FORMS[form]
    if target.itemsize == 1:
        values = np.clip(values, -_LARGEST[form], _LARGEST[form])
    with np.errstate(all="ignore"):
        codes = values.astype(target).view(np.uint8 if target.itemsize == 1 else np.uint16)
    return np.where(np.isnan(values), codes.dtype.type(0x7F if target.itemsize == 1 else 0x7FFF), codes)


def _encoded(x: np.float32, form: str) -> np.unsignedinteger:
    """:func:`encode` of one value, as single threads need it; array operations would take ten times as long."""
    if form == "bf16":
        bits = int(x.view(np.uint32))
        return np.uint16((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 if x == x else 0x7FFF)
    if form == "f16":
        if abs(x) < 65520:
            return x.astype(np.float16).view(np.uint16)
        return np.uint16(0x7FFF if x != x else 0x7C00 if x > 0 else 0xFC00)
    top = _LARGEST[form]
    return np.uint8(0x7F) if x != x else np.asarray(max(min(x, top), -top), FORMS[form]).view(np.uint8)[()]
