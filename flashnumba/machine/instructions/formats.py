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

__all__ = ["FORMS", "decode", "encode"]

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
_FP8 = {form: _CODES.view(FORMS[form]).astype(np.float32) for form in _LARGEST}


def decode(registers: np.ndarray, form: str) -> np.ndarray:
    """float32 values of the elements packed in ``registers``, the lowest bits first; the last axis grows accordingly.

    Args:
        registers: unsigned integers of 8 to 32 bits, as wide as an element or wider.
        form: "f16", "bf16", "e4m3" or "e5m2".
    """
    registers = np.ascontiguousarray(registers)
    if form == "f16":
        with np.errstate(invalid="ignore"):  # NumPy warns of signalling NaNs
            return registers.view(np.float16).astype(np.float32)
    if form == "bf16":
        return (registers.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return _FP8[form].take(registers.view(np.uint8))


def encode(values: np.ndarray, form: str) -> np.ndarray:
    """Codes of float32 ``values`` rounded to ``form``: uint16, or uint8 for FP8, of the same shape."""
    values = np.asarray(values, np.float32)
    target = FORMS[form]
    if target.itemsize == 1:
        values = np.clip(values, -_LARGEST[form], _LARGEST[form])
    with np.errstate(all="ignore"):
        codes = values.astype(target).view(np.uint8 if target.itemsize == 1 else np.uint16)
    return np.where(np.isnan(values), codes.dtype.type(0x7F if target.itemsize == 1 else 0x7FFF), codes)


def canonical(values: np.ndarray) -> np.ndarray:
    """float32 ``values`` with every NaN replaced by 0x7fffffff, the NaN that arithmetic gives on a GPU."""
    return np.where(np.isnan(values), _NAN, values)
