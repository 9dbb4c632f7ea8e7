"""What each measure buys: the error of FP8 attention against float64, by format, scaling and what is done beforehand.

Whatever is measured is measured on the whole way: quantised, multiplied with every rounding in place, and compared with
attention of the numbers as they were. NumPy only.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from flashnumba.stages.flash_forward.blas import THREADS
from flashnumba.stages.fp8 import scales
from flashnumba.stages.fp8.codec import FORMATS, decode, encode
from flashnumba.stages.fp8.reference import attention, exact, rmse

__all__ = [
    "BEFOREHAND", "FA3_RMSE", "int8_scores", "number_line", "relative_errors", "rmse_of", "rmse_table", "score_errors",
    "scores_of", "twice_rounded",
]  # fmt: skip

FA3_RMSE = {("e4m3", "tensor", ""): 2.4e-2, ("e4m3", "block", "incoherent"): 9.1e-3, ("e4m3", "tensor", "incoherent"):
            9.3e-3, ("e4m3", "block", ""): 2.4e-2}  # fmt: skip
"""What FlashAttention-3's paper reports for its distribution (Table 3), whose sizes it does not say."""
BEFOREHAND = ("", "smooth", "incoherent")
"""What can be done to q and k before they are quantised; see :mod:`flashnumba.stages.fp8.scales`."""


def rmse_of(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, fmt: str, scaling: str, before: str = "", weights: str = "e4m3",
    expected: np.ndarray | None = None,
) -> float:  # fmt: skip
    """The root mean squared error of FP8 attention ``[heads, M, D]``.

    Args:
        q, k, v: ``[heads, rows, D]`` float32.
        fmt, scaling: as of :func:`.scales.quantize`; scaling ``tensor``, ``head`` or ``block``.
        before: one of :data:`BEFOREHAND`.
        weights: how P is rounded.
        expected: attention in float64, if it is known.
    """
    expected = exact(q, k, v) if expected is None else expected
    if before == "smooth":
        k, _ = scales.smooth(k)
    elif before == "incoherent":
        q, k = scales.incoherent(q, k)
    (q, qd), (k, kd), (v, vd) = (scales.quantize(x, fmt, scaling) for x in (q, k, v))
    with THREADS:  # products of a tile are too small to share out
        o, _ = attention(q, k, v, fmt, q_descale=qd, k_descale=kd, v_descale=vd, weights=weights)
    return rmse(o, expected)


def rmse_table(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, formats: Iterable[str] = FORMATS,
    scalings: Iterable[str] = ("tensor", "head", "block"), befores: Iterable[str] = BEFOREHAND,
) -> dict[tuple[str, str, str], float]:  # fmt: skip
    """:func:`rmse_of` by (format, scaling, beforehand)."""
    expected = exact(q, k, v)
    return {
        (fmt, scaling, before): rmse_of(q, k, v, fmt, scaling, before, expected=expected)
        for fmt in formats
        for scaling in scalings
        for before in befores
    }


def relative_errors(x: np.ndarray, fmt: str, scaling: str = "tensor") -> np.ndarray:
    """``|rounded - x| / |x|`` of what is not zero: ``[elements]``."""
    x = np.asarray(x, np.float32)
    kept = x != 0
    return (np.abs(scales.scaled(x, fmt, scaling) - x)[kept] / np.abs(x)[kept]).astype(np.float32)


def score_errors(q: np.ndarray, k: np.ndarray, fmt: str, scaling: str) -> float:
    """The root mean squared error of ``q k^T / sqrt(D)`` after rounding q and k; fmt may be ``"int8"``."""
    rounded = [scales.scaled(x, fmt, scaling) for x in (q, k)]
    d = np.sqrt(q.shape[-1])
    return rmse(rounded[0] @ rounded[1].swapaxes(-1, -2) / d, q @ k.swapaxes(-1, -2) / d)


def scores_of(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Scores less the greatest of their row: ``[heads, M, N]``."""
    s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])  # [heads, M, N]
    return s - s.max(-1, keepdims=True)


def int8_scores(q: np.ndarray, k: np.ndarray, scaling: str) -> float:
    """:func:`score_errors` of signed bytes."""
    return score_errors(q, k, scales.INT8, scaling)


def number_line(fmt: str) -> np.ndarray:
    """The finite numbers of a format from 0 on, ascending."""
    values = decode(np.arange(128, dtype=np.uint8), fmt)
    return values[np.isfinite(values)]


def twice_rounded(x: np.ndarray, fmt: str) -> float:
    """The share of float32 ``x`` to which float16 in between gives another code."""
    with np.errstate(over="ignore"):
        return float(np.mean(encode(x, fmt) != encode(x.astype(np.float16), fmt)))
