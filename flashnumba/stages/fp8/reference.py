"""Attention in FP8 with every rounding where the kernels have it, and how far from exact that is.

With codes c and scales d (:mod:`flashnumba.stages.fp8.scales`), the scores are ``d_q d_k (c_q c_k)``: products of codes
are exact in float32, sums nearly, and the scales come afterwards, once. The weights are between 0 and 1 and are rounded
to e4m3 as well, whose smallest numbers are not small; so they are multiplied by 2^8 first::

    p_j = round(2^8 2^((s_j - m) f))        f = scale d_q d_k log2 e
    l = sum_j p_j        acc = sum_j p_j c_v        o = d_v acc / l        lse = (m f + log2(l / 2^8)) ln 2

256 is less than 448, the largest number, so nothing saturates. The sum is taken of what is multiplied, after rounding:
the weights of a row then are parts of one whole, whatever was lost. And because m is the maximum *so far*, what is
rounded depends on the tiles of keys; :func:`attention` goes through them as the kernels do.

Scales of blocks change from tile to tile. Those of q and k multiply S. That of v is treated as the maximum is: acc is
kept in units of the last block's, and is rescaled where the next one's differs.

``weights="float16"`` is for the kernels that store codes and multiply float16: P is rounded to 11 bits, l is summed
before that.

Source: Shah et al., FlashAttention-3, arXiv 2407.08608, section 3.3; for the factor, its ``hopper/softmax.h``.
"""

from __future__ import annotations

from math import log2, sqrt
from typing import Any

import ml_dtypes
import numpy as np

from flashnumba.stages.fp8.codec import decode, encode
from flashnumba.stages.fp8.scales import BLOCK, per_row

__all__ = ["AT_ONCE", "P_LOG2", "attention", "exact", "fa3_inputs", "per_block", "rmse", "rounded", "scaled_after"]

P_LOG2 = 8
AT_ONCE = 32
"""Products that a tensor core sums before they meet the accumulator."""
LOG2_E = np.float32(log2(np.e))
NEAR = 256.0


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, fmt: str, *, q_descale: Any = 1.0, k_descale: Any = 1.0,
    v_descale: Any = 1.0, scale: float | None = None, causal: bool = False, weights: str = "e4m3", step: int = BLOCK,
    p_log2: int = P_LOG2,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """o and lse as the kernels compute them, but for the order within a sum of 32 products and for 2^x.

    Args:
        q: codes ``[..., H, M, D]``, uint8, or ``[M, D]``; k, v: ``[..., Hkv, N, D]``.
        fmt: ``"e4m3"`` or ``"e5m2"``.
        q_descale, k_descale, v_descale: one number, ``[..., H]`` (k and v: ``[..., Hkv]``) or ``[..., blocks]`` more.
        weights: how P is rounded: ``"e4m3"``, ``"e5m2"``, ``"float16"``, or ``"float32"`` for not at all.
        step: keys of a tile.
        p_log2: P is multiplied by two to this power, where it is rounded to 8 bits.

    Returns:
        o ``[..., H, M, D]`` bfloat16 and lse ``[..., H, M]`` float32.
    """
    if q.ndim == 2:
        of_one = [np.asarray(x)[None] if np.ndim(x) else x for x in (q_descale, k_descale, v_descale)]
        o, lse = attention(
            q[None], k[None], v[None], fmt, q_descale=of_one[0], k_descale=of_one[1], v_descale=of_one[2], scale=scale,
            causal=causal, weights=weights, step=step, p_log2=p_log2,
        )  # fmt: skip
        return o[0], lse[0]
    (heads, m_rows, d), n, kv_heads = q.shape[-3:], k.shape[-2], k.shape[-3]
    group = heads // kv_heads
    keys, values = (np.repeat(decode(x, fmt), group, -3) for x in (k, v))  # [..., H, N, D]
    queries = decode(q, fmt)  # [..., H, M, D]
    by_head = [np.repeat(x, group, -2) for x in (per_block(k_descale, k.shape), per_block(v_descale, v.shape))]
    (kd, vd), qd = by_head, per_block(q_descale, q.shape)  # [..., H, blocks]
    scale = np.float32(1 / sqrt(d) if scale is None else scale)
    queries, size = (-queries, -scale) if scale < 0 else (queries, scale)
    factor = np.float32(1) if scale == 0 else np.maximum(size * LOG2_E, np.float32(2.0**-126))
    blocks = max(qd.shape[-1], kd.shape[-1]) > 1
    if not blocks and scale != 0:
        factor = np.maximum((factor * qd * kd), np.float32(2.0**-126))[..., None]  # [..., H, 1, 1]
    shift = p_log2 if weights in ("e4m3", "e5m2") else 0

    m = np.full(q.shape[:-1], -np.inf, np.float32)[..., None]  # [..., H, M, 1]
    l, acc = np.zeros_like(m), np.zeros((*m.shape[:-1], d), np.float32)  # [..., H, M, 1], [..., H, M, D]
    unit = np.ones((*m.shape[:-2], 1, 1), np.float32)  # [..., H, 1, 1]
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        for first in range(0, n, step):
            here, block = slice(first, min(first + step, n)), first // BLOCK
            s = in_order(queries, keys[..., here, :].swapaxes(-1, -2))  # [..., H, M, step]
            if blocks:
                rows = np.repeat(qd, BLOCK if qd.shape[-1] > 1 else m_rows, -1)[..., :m_rows, None]  # [..., H, M, 1]
                s = s * (rows * kd[..., min(block, kd.shape[-1] - 1), None, None])  # [..., H, M, step]
            s = s * np.float32(0) if scale == 0 else s
            seen = np.arange(n)[here] <= np.arange(m_rows)[:, None] + n - m_rows  # [M, step]
            s = np.where(seen if causal else True, s, np.float32(-np.inf))  # [..., H, M, step]
            top = np.maximum(m, s.max(-1, keepdims=True))  # [..., H, M, 1]
            origin = np.where(top == -np.inf, np.float32(0), top)  # [..., H, M, 1]
            bias = -(origin * factor)  # [..., H, M, 1]
            s, bias = (s - origin, 0 * bias) if (np.abs(bias) >= NEAR).any() else (s, bias)
            alpha = np.exp2((m - origin) * factor)  # [..., H, M, 1]
            exponent = s.astype(np.float64) * factor + (bias + np.float32(shift))  # [..., H, M, step]
            p = np.exp2(exponent.astype(np.float32))  # [..., H, M, step]
            kept = rounded(p, weights)  # [..., H, M, step]
            l = l * alpha + (p if weights == "float16" else kept).sum(-1, keepdims=True)  # [..., H, M, 1]
            now = vd[..., min(block, vd.shape[-1] - 1), None, None]  # [..., H, 1, 1]
            acc = acc * alpha * (unit / now if first and blocks else 1)  # [..., H, M, D]
            acc = in_order(kept, values[..., here, :], acc)  # [..., H, M, D]
            m, unit = top, np.broadcast_to(now, unit.shape)
        if not n:
            unit = np.ones_like(unit)
        some = np.where(l == 0, np.float32(1), l)  # [..., H, M, 1]
        lse = (np.float32(1) * m * factor + np.log2(l * np.float32(2.0**-shift))) * np.float32(np.log(2))  # as m
        o = acc * unit * (np.float32(1) / some)  # [..., H, M, D]
        return o.astype(ml_dtypes.bfloat16), lse[..., 0].astype(np.float32)


def per_block(descale: Any, shape: tuple[int, ...]) -> np.ndarray:
    """A descale as ``[..., heads, blocks or 1]`` for codes of ``shape [..., heads, rows, D]``."""
    descale, outer = np.asarray(descale, np.float32), shape[:-2]
    if descale.ndim == len(outer) + 1:
        return descale
    return np.broadcast_to(descale, outer)[..., None]


def rounded(p: np.ndarray, weights: str) -> np.ndarray:
    """P as it is multiplied."""
    if weights == "float32":
        return p
    if weights == "float16":
        return p.astype(np.float16).astype(np.float32)
    return decode(encode(p, weights), weights)


def in_order(a: np.ndarray, b: np.ndarray, total: np.ndarray | None = None) -> np.ndarray:
    """``total + a @ b``, some products at a time from the first to the last: ``[..., R, C]``."""
    if total is None:
        total = np.zeros((*a.shape[:-1], b.shape[-1]), np.float32)  # [..., R, C]
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)  # else NumPy would not ask BLAS
    for i in range(0, a.shape[-1], AT_ONCE):
        total = total + a[..., i : i + AT_ONCE] @ b[..., i : i + AT_ONCE, :]  # [..., R, C]
    return total


# -- how far from exact ------------------------------------------------------------------------------------------------
def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool = False) -> np.ndarray:
    """Attention of one head or several in float64: ``[..., M, D]``; k and v have as many heads as q."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    s = q @ k.swapaxes(-1, -2) / sqrt(q.shape[-1])  # [..., M, N]
    if causal:
        s = np.where(np.arange(s.shape[-1]) <= np.arange(s.shape[-2])[:, None] + s.shape[-1] - s.shape[-2], s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))  # [..., M, N]
    return p / p.sum(-1, keepdims=True) @ v  # [..., M, D]


def scaled_after(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, fmt: str, q_descale: Any, k_descale: Any, v_descale: Any,
    causal: bool = False,
) -> np.ndarray:  # fmt: skip
    """Attention of codes in float64, scores first and scales afterwards: ``[..., M, D]``; heads of k as of q.

    Where blocks have scales, those of v differ along the sum; they go with the weights.
    """
    queries, keys, values = (decode(x, fmt).astype(np.float64) for x in (q, k, v))  # [..., rows, D]
    of_q, of_k, of_v = (
        np.broadcast_to(per_row(d, x.shape), (*x.shape[:-1], 1)).astype(np.float64)
        for d, x in ((q_descale, q), (k_descale, k), (v_descale, v))
    )  # [..., rows, 1]
    s = queries @ keys.swapaxes(-1, -2) * (of_q * of_k.swapaxes(-1, -2)) / sqrt(q.shape[-1])  # [..., M, N]
    if causal:
        s = np.where(np.arange(s.shape[-1]) <= np.arange(s.shape[-2])[:, None] + s.shape[-1] - s.shape[-2], s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))  # [..., M, N]
    return (p * of_v.swapaxes(-1, -2)) @ values / p.sum(-1, keepdims=True)  # [..., M, D]


def fa3_inputs(n: int, d: int, heads: int = 1, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k and v ``[heads, n, d]`` float32 with the outliers of FlashAttention-3's experiment: entries of N(0, 1), and
    N(0, 100) on top of one in a thousand."""
    rng = np.random.default_rng(seed)

    def one() -> np.ndarray:
        rare = rng.random((heads, n, d)) < 0.001  # [heads, n, d]
        return (rng.standard_normal(rare.shape) + 10 * rng.standard_normal(rare.shape) * rare).astype(np.float32)

    return one(), one(), one()


def rmse(a: np.ndarray, b: np.ndarray) -> float:
    """The root of the mean squared difference."""
    return float(np.sqrt(np.mean((a.astype(np.float64) - b.astype(np.float64)) ** 2)))
