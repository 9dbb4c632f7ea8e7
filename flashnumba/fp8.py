"""The 8-bit floating-point formats: numbers to codes and back, and scales.

>>> import numpy as np
>>> from flashnumba import fp8
>>> x = np.array([[1.0, -0.3, 1000.0]], np.float32)
>>> fp8.decode(fp8.encode(x, "e4m3"), "e4m3").tolist()
[[1.0, -0.3125, 448.0]]
>>> codes, scale = fp8.quantize(x, "e4m3")
>>> [f"{y:.4f}" for y in fp8.dequantize(codes, scale, "e4m3")[0]]
['0.9766', '-0.3139', '1000.0000']

Codes and scales are what :func:`flashnumba.attention.attention` takes. NumPy arrays; torch casts to ``float8_e4m3fn``
and ``float8_e5m2`` itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flashnumba.stages.fp8 import codec, scales
from flashnumba.stages.fp8.codec import decode, encode
from flashnumba.stages.fp8.scales import BLOCK

__all__ = ["BLOCK", "decode", "dequantize", "encode", "quantize"]


def quantize(x: Any, fmt: str, scaling: str = "tensor") -> tuple[np.ndarray, np.ndarray]:
    """Codes of ``x / scale``, and the scale, ``max|x|`` of what shares one over the largest number; 1 for zeros.

    Args:
        x: ``[..., rows, D]`` float32, float16 or bfloat16. A NaN stays one and has no say in the scale.
        fmt: ``"e4m3"`` or ``"e5m2"``.
        scaling: what shares a scale: ``"tensor"``, ``"head"`` (the last two axes), ``"block"`` (:data:`BLOCK` rows of a
            head; the last may have fewer) or ``"token"`` (a row). Attention takes the first three. A block's scale is
            at least 2^-40 of the largest of its head; that of zeros is within 2^40 of it.

    Returns:
        uint8 codes of x's shape, and float32 scales: ``[]``, ``x.shape[:-2]``, ``[..., blocks]`` or ``[..., rows]``.

    Raises:
        TypeError: x is of another type.
        ValueError: an unknown fmt or scaling, fewer than two axes, or an infinity in x.
    """
    codec.format_of(fmt)
    return scales.quantize(x, fmt, scaling)


def dequantize(codes: Any, scale: Any, fmt: str) -> np.ndarray:
    """``scale * decode(codes)``, float32.

    Args:
        codes: ``[..., rows, D]`` uint8.
        scale: as of :func:`quantize`; its shape says what shares one.
        fmt: ``"e4m3"`` or ``"e5m2"``.

    Raises:
        TypeError: codes are not uint8, or the scale is no real number or array of them.
        ValueError: an unknown fmt, fewer than two axes, or a scale of another shape.
    """
    codec.format_of(fmt)
    return scales.dequantize(codes, scale, fmt)
