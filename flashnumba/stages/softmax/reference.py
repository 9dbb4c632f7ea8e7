"""Softmax, as the formula says it and as it must be computed.

The idea. A row of scores becomes a row of weights that are positive and add up to one::

    p_j = exp(x_j) / sum_i exp(x_i)

Computed as written, exp overflows: float16 ends at 65504 = exp(11.09), float32 at exp(88.7). Then inf / inf is NaN. The
way out divides numerator and denominator by the same exp(m)::

    m = max_i x_i        d = sum_i exp(x_i - m)        p_j = exp(x_j - m) / d

Every exponent is now 0 or less, so nothing overflows, and the greatest is exactly 0, so 1 <= d <= N. Three passes over
the row: the maximum, the sum, the quotient.

The limits, by definition here and in every kernel:

- a row of -inf alone, which is a row with every key masked, gives zeros (torch gives NaN); a row may be empty;
- a row that holds a NaN gives NaN throughout;
- a row that holds +inf gives NaN throughout, as torch does: inf - inf has no value, and no weight would be honest.

Source: "safe softmax" is algorithm 2 of Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv
1805.02867.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike

__all__ = ["low_precision", "naive", "safe"]


def naive(x: np.ndarray, dtype: DTypeLike = np.float64) -> np.ndarray:
    """Softmax over the last axis as the formula says it: it overflows, on purpose.

    Args:
        x: ``[..., N]`` scores, any floating-point dtype.
        dtype: what to compute in. In float16 one score above 11.09 spoils its row.

    Returns:
        ``[..., N]`` of ``dtype``: NaN at a score whose exp overflowed, 0 beside it.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        e = np.exp(x.astype(dtype))  # [..., N]
        d = e.sum(-1, keepdims=True, dtype=dtype)  # [..., 1]
        return e / d  # [..., N]


def safe(x: np.ndarray, inside: DTypeLike = np.float64) -> np.ndarray:
    """Softmax over the last axis with the maximum taken out first.

    Args:
        x: ``[..., N]`` scores, any floating-point dtype; N may be 0.
        inside: what to compute in; float64 makes it the reference.

    Returns:
        ``[..., N]`` of ``inside``; the module's docstring says what rows of -inf, NaN and +inf give.
    """
    x = x.astype(inside)  # [..., N]
    m = x.max(-1, keepdims=True, initial=-np.inf)  # [..., 1]
    m = np.where(m == -np.inf, 0, m).astype(inside)  # [..., 1]  -inf - -inf would be NaN
    with np.errstate(invalid="ignore", over="ignore"):  # inf - inf in a row that holds +inf; -big - big is -inf
        e = np.exp(x - m)  # [..., N]
    d = e.sum(-1, keepdims=True)  # [..., 1]
    return e / np.where(d == 0, 1, d).astype(inside)  # [..., N]  d is 0 only in a row of -inf


def low_precision(x: np.ndarray, dtype: DTypeLike | None = None) -> np.ndarray:
    """:func:`safe` as a GPU does it: float32 inside, the result rounded to ``dtype`` (of ``x`` if None).

    Its distance from the float64 result is the error that the mathematics excuses.
    """
    return safe(x, np.float32).astype(x.dtype if dtype is None else dtype)  # [..., N]
