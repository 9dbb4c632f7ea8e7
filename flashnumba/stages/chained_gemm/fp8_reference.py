"""Attention of 8-bit elements as a GPU's precision has it: the error budget of the FP8 kernels.

Exact attention is that of the stage flash_forward, whatever the elements. In FP8 the weights are rounded to the inputs'
type, and as its smallest numbers are not small, they are multiplied by 2^8 first::

    p_j = 2^8 exp(s_j - m)    l = sum_j p_j    acc = sum_j round(p_j) v_j    o = acc / l    lse = m + ln(l / 2^8)

NumPy only; elements and their rounding are those of the arrays' own dtype.
"""

from __future__ import annotations

from math import sqrt

import numpy as np

__all__ = ["low_precision"]

WEIGHT = 2.0**8
AT_ONCE = 32
"""Products that a tensor core sums before they meet the accumulator."""


def low_precision(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float | None = None, causal: bool = False
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Attention with float32 inside, P rounded to q's dtype, O to float16.

    Args:
        q: ``[..., H, M, D]``.
        k, v: ``[..., Hkv, N, D]``.
        scale: 1/sqrt(D) if None.

    Returns:
        o ``[..., H, M, D]`` float16 and lse ``[..., H, M]`` float32.
    """
    m_rows, n, d = q.shape[-2], *k.shape[-2:]
    keys, values = (x.astype(np.float32) for x in (k, v))  # [..., Hkv, N, D]
    if q.ndim > 2:
        keys, values = (np.repeat(x, q.shape[-3] // k.shape[-3], axis=-3) for x in (keys, values))  # [..., H, N, D]
    seen = (np.arange(n) <= np.arange(m_rows)[:, None] + n - m_rows) if causal else np.ones((m_rows, n), bool)  # [M, N]
    factor = np.float32(1 / sqrt(d) if scale is None else scale)
    with np.errstate(invalid="ignore", over="ignore"):
        s = factor * _in_order(q.astype(np.float32), keys.swapaxes(-1, -2))  # [..., H, M, N]
        s = np.where(seen, s, np.float32(-np.inf))  # [..., H, M, N]
        m = s.max(-1, initial=-np.inf)  # [..., H, M]
        anchor = np.where(m == -np.inf, np.float32(0), m)[..., None]  # [..., H, M, 1]
        p = np.exp(s - anchor) * np.float32(WEIGHT)  # [..., H, M, N]
        l = np.add.accumulate(p, -1)[..., -1] if n else np.zeros_like(m)  # [..., H, M]
        acc = _in_order(p.astype(q.dtype).astype(np.float32), values)  # [..., H, M, D]
        some = np.where(l == 0, np.float32(1), l)  # [..., H, M]
        lse = m + np.log(some / np.float32(WEIGHT))  # [..., H, M]
        return (acc / some[..., None]).astype(np.float16), lse.astype(np.float32)


def _in_order(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """``a @ b``, some products at a time from the first to the last: ``[..., R, C]``."""
    total = np.zeros((*a.shape[:-1], b.shape[-1]), np.float32)  # [..., R, C]
    for i in range(0, a.shape[-1], AT_ONCE):
        total = total + a[..., i : i + AT_ONCE] @ b[..., i : i + AT_ONCE, :]  # [..., R, C]
    return total
