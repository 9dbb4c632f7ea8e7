"""The gradients of attention as the chain rule says them, and block by block, with no matrix of scores kept.

The idea. With ``S = scale Q K^T``, ``P = softmax(S)``, ``O = P V`` and ``lse = ln sum exp(S)`` by row, and with the
gradients dO and dlse of some loss given::

    dV = P^T dO        dP = dO V^T        dS = P o (dP - delta + dlse)        dQ = scale dS K        dK = scale dS^T Q

``delta_i = sum_j P_ij dP_ij`` is what normalising a row costs: moving one score moves all weights of its row. dlse
comes in beside it, since the gradient of lse by a score is its weight. :func:`dense` has all of S and P in memory.

FlashAttention keeps neither. Two identities let it do so: ``P = exp(S - lse)`` needs one number a row to make any tile
of P again, and ::

    delta_i = sum_j P_ij (dO_i . V_j) = dO_i . (sum_j P_ij V_j) = dO_i . O_i

needs no P at all (:func:`delta_of`). So :func:`blocked` has five products where the forward has two, and walks over
blocks of keys: of each block it has dK and dV whole, and adds to dQ.

Conventions. q, o and do ``[..., H, M, D]``, k and v ``[..., Hkv, N, D]``, lse and dlse ``[..., H, M]``; leading axes
may be left out. Query head h reads head ``h // (H // Hkv)`` of k and v, whose dK and dV are sums over these heads.
Causal is bottom-right aligned: key j is visible to row i if ``j <= i + N - M``.

The limits.

- A row that sees no key has lse = -inf; its dQ is 0, and it adds nothing to dK and dV.
- lse in float32 says where the scores of its row lie to 2^-24 of its size. Up to :data:`NEAR` that is less than the
  rounding of 16-bit weights; at scores of 1e5 it is 0.4 % of each weight of the row. So beyond it the row's
  maximum and sum are taken from Q and K anew, here and in kernels.
- What a row may not see does not count, but 0 * NaN is NaN: where a row of do, or a key that some rows do not see,
  holds no number, it depends on the tiles of a kernel which other gradients are none.

Sources: Dao et al., FlashAttention, arXiv 2205.14135, appendix B.2 and algorithm 4; Dao, FlashAttention-2, arXiv
2307.08691, section 3.1.2.
"""

from __future__ import annotations

from math import sqrt

import numpy as np
from numpy.typing import DTypeLike

__all__ = ["NEAR", "Gradients", "blocked", "delta_of", "dense", "low_precision", "visible", "weights"]

Gradients = tuple[np.ndarray, np.ndarray, np.ndarray]
"""``(dq, dk, dv)``, of the shapes of q, k and v."""

NEAR = 177.0
"""abs(lse) up to which exponents are taken from it: 256 in base 2."""


def visible(m: int, n: int, causal: bool) -> np.ndarray:
    """Which of N keys each of M rows may see: ``[M, N]`` bool, bottom-right aligned if causal."""
    rows, keys = np.arange(m)[:, None], np.arange(n)  # [M, 1], [N]
    return (keys <= rows + n - m) if causal else np.ones((m, n), bool)  # [M, N]


def dense(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, do: np.ndarray, scale: float | None = None, causal: bool = False,
    dlse: np.ndarray | None = None,
) -> Gradients:  # fmt: skip
    """The gradients in float64 from the definition: what every other result is judged by.

    Args:
        q, k, v, do: see the module's conventions.
        scale: any finite number; 1/sqrt(D) if None.
        dlse: the gradient of lse; None is zero.

    Returns:
        dq, dk and dv, float64.
    """
    q64, do64 = q.astype(np.float64), do.astype(np.float64)  # [..., H, M, D], [..., H, M, D]
    k64, v64 = (_of_query_heads(x, q).astype(np.float64) for x in (k, v))  # [..., H, N, D], [..., H, N, D]
    mask, scale = visible(q.shape[-2], k.shape[-2], causal), _scale(scale, q)  # [M, N]
    with np.errstate(invalid="ignore", over="ignore"):  # inf - inf and 0 * inf are NaN, as they are in kernels
        s = np.where(mask, scale * (q64 @ k64.swapaxes(-1, -2)), -np.inf)  # [..., H, M, N]
        p = weights(s)  # [..., H, M, N]
        dp = do64 @ v64.swapaxes(-1, -2)  # [..., H, M, N]
        delta = np.where(mask, p * dp, 0).sum(-1)  # [..., H, M]
        shift = delta if dlse is None else delta - dlse  # [..., H, M]
        ds = np.where(mask, p * (dp - shift[..., None]), 0)  # [..., H, M, N]
        dq = scale * (ds @ k64)  # [..., H, M, D]
        dk = scale * (ds.swapaxes(-1, -2) @ q64)  # [..., H, N, D]
        return dq, _over_group(dk, k), _over_group(p.swapaxes(-1, -2) @ do64, v)


def weights(s: np.ndarray) -> np.ndarray:
    """softmax of each row, and 0 in a row of -inf: ``[..., M, N]``, of the dtype of ``s``."""
    m = s.max(-1, keepdims=True, initial=-np.inf)  # [..., M, 1]
    p = np.exp(s - np.where(m == -np.inf, 0, m).astype(s.dtype))  # [..., M, N]
    total = np.add.accumulate(p, -1)[..., -1:] if s.shape[-1] else m  # [..., M, 1]
    return p / np.where(total == 0, 1, total).astype(s.dtype)  # [..., M, N]


def delta_of(o: np.ndarray, do: np.ndarray, inside: DTypeLike = np.float64) -> np.ndarray:
    """``rowsum(dO o O)``: what kernels compute before anything else. ``[..., M]`` of ``inside``.

    One after the other from the last column to the first: kernels too sum it in another order than dP, whose rounding
    errors do not cancel against it.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        return np.add.accumulate((o.astype(inside) * do.astype(inside))[..., ::-1], -1)[..., -1]  # [..., M]


def blocked(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, o: np.ndarray, do: np.ndarray, lse: np.ndarray,
    scale: float | None = None, causal: bool = False, dlse: np.ndarray | None = None, block: int = 64,
    inside: DTypeLike = np.float64,
) -> Gradients:  # fmt: skip
    """The gradients block of keys by block of keys, from what the forward has left: o and lse.

    Args:
        o, lse: the forward's results.
        block: keys at a time; each makes its part of P again.

    Returns:
        dq, dk and dv, of ``inside``.
    """
    (m, n), scale = (q.shape[-2], k.shape[-2]), _scale(scale, q)
    mask = visible(m, n, causal)  # [M, N]
    q, do = q.astype(inside), do.astype(inside)  # [..., H, M, D], [..., H, M, D]
    k_of, v_of = (_of_query_heads(x, q).astype(inside) for x in (k, v))  # [..., H, N, D], [..., H, N, D]
    shift = delta_of(o, do, inside) - (0 if dlse is None else dlse)  # [..., H, M]
    lse = _lse_anew(q, k_of, scale, mask, lse, block)  # [..., H, M]
    origin = np.where(lse == -np.inf, np.inf, lse).astype(inside)  # [..., H, M]  weights of an empty row are 0
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k_of), np.zeros_like(v_of)
    for start in range(0, n, block):
        keys = slice(start, start + block)
        with np.errstate(invalid="ignore", over="ignore"):
            s = scale * (q @ k_of[..., keys, :].swapaxes(-1, -2))  # [..., H, M, block]
            p = np.where(mask[:, keys], np.exp(s - origin[..., None]), 0)  # [..., H, M, block]
            dp = do @ v_of[..., keys, :].swapaxes(-1, -2)  # [..., H, M, block]
            ds = np.where(mask[:, keys], p * (dp - shift[..., None]), 0)  # [..., H, M, block]
            dv[..., keys, :] = p.swapaxes(-1, -2) @ do  # [..., H, block, D]
            dk[..., keys, :] = scale * (ds.swapaxes(-1, -2) @ q)  # [..., H, block, D]
            dq += scale * (ds @ k_of[..., keys, :])  # [..., H, M, D]
    return dq, _over_group(dk, k), _over_group(dv, v)


def _lse_anew(
    q: np.ndarray, k: np.ndarray, scale: float, mask: np.ndarray, lse: np.ndarray, block: int
) -> np.ndarray:  # fmt: skip
    """lse, and beyond :data:`NEAR` what the scores say of it in the precision of q: ``[..., H, M]``."""
    far = np.isfinite(lse) & (np.abs(np.where(np.isfinite(lse), lse, 0)) > NEAR)  # [..., H, M]
    if not far.any():
        return lse  # [..., H, M]
    anew = np.full(lse.shape, -np.inf, q.dtype)  # [..., H, M]
    for start in range(0, k.shape[-2], block):
        keys = slice(start, start + block)
        with np.errstate(invalid="ignore", over="ignore"):
            s = scale * (q @ k[..., keys, :].swapaxes(-1, -2))  # [..., H, M, block]
            s = np.where(mask[:, keys], s, -np.inf)  # [..., H, M, block]
            anew = np.logaddexp(anew, np.logaddexp.reduce(s, -1))  # [..., H, M]
    return np.where(far, anew, lse)  # [..., H, M]


def low_precision(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, o: np.ndarray, do: np.ndarray, lse: np.ndarray,
    scale: float | None = None, causal: bool = False, dlse: np.ndarray | None = None,
) -> Gradients:  # fmt: skip
    """:func:`blocked` as a GPU does it: float32 inside, P and dS rounded to the inputs' type before their products.

    Its distance from the float64 result is the error that the mathematics excuses, see :mod:`flashnumba.compare`. Sums
    run in a kernel's order, float32 one after the other and 16-bit elements by the sixteens of a tensor core; heads of
    a group are added one after the other. The weights of rows beyond :data:`NEAR` come from the scores alone.

    Args:
        o: as the forward leaves it, of q's dtype.
        lse: float32, as the forward leaves it.

    Returns:
        dq, dk and dv, of q's dtype.
    """
    dtype, one = q.dtype, np.float32
    at_once = 1 if dtype == one else 16
    mask = visible(q.shape[-2], k.shape[-2], causal)  # [M, N]
    scale, q32, do32 = one(_scale(scale, q)), q.astype(one), do.astype(one)
    k32, v32 = (_of_query_heads(x, q).astype(one) for x in (k, v))  # [..., H, N, D], [..., H, N, D]
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        s = scale * _in_order(q32, k32.swapaxes(-1, -2), at_once)  # [..., H, M, N]
        s = np.where(mask, s, -np.inf).astype(one)  # [..., H, M, N]
        origin = np.where(lse == -np.inf, np.inf, lse).astype(one)[..., None]  # [..., H, M, 1]
        p = np.where(np.abs(lse)[..., None] <= NEAR, np.exp(s - origin), weights(s))  # [..., H, M, N]
        p = np.where(mask, p, 0).astype(one)  # [..., H, M, N]
        dp = _in_order(do32, v32.swapaxes(-1, -2), at_once)  # [..., H, M, N]
        shift = delta_of(o, do, one) - (one(0) if dlse is None else dlse.astype(one))  # [..., H, M]
        ds = np.where(mask, p * (dp - shift[..., None]), 0).astype(dtype).astype(one)  # [..., H, M, N]
        p = p.astype(dtype).astype(one)  # [..., H, M, N]
        dq = scale * _in_order(ds, k32, at_once)  # [..., H, M, D]
        dk = scale * _in_order(ds.swapaxes(-1, -2), q32, at_once)  # [..., H, N, D]
        dv = _in_order(p.swapaxes(-1, -2), do32, at_once)  # [..., H, N, D]
        return dq.astype(dtype), _over_group(dk, k).astype(dtype), _over_group(dv, v).astype(dtype)


def _scale(scale: float | None, q: np.ndarray) -> float:
    return 1 / sqrt(q.shape[-1]) if scale is None else scale


def _of_query_heads(k: np.ndarray, q: np.ndarray) -> np.ndarray:
    """K or V with each head repeated for the query heads that read it: ``[..., H, N, D]``."""
    if q.ndim < 3 or k.shape[-3] == q.shape[-3]:
        return k  # [..., H, N, D]
    return np.repeat(k, q.shape[-3] // k.shape[-3], axis=-3)  # [..., H, N, D]


def _over_group(dk: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Gradients of query heads, ``[..., H, N, D]``, summed over those that share a head of k: ``[..., Hkv, N, D]``."""
    if dk.ndim < 3 or k.shape[-3] in (dk.shape[-3], 0):
        return dk  # [..., Hkv, N, D]
    *batch, heads, n, d = dk.shape
    grouped = dk.reshape(*batch, k.shape[-3], heads // k.shape[-3], n, d)  # [..., Hkv, group, N, D]
    return np.add.reduce(grouped, -3)  # [..., Hkv, N, D]


def _in_order(a: np.ndarray, b: np.ndarray, at_once: int) -> np.ndarray:
    """``a @ b``, ``at_once`` products at a time from the first to the last: ``[..., R, C]``."""
    total = np.zeros((*a.shape[:-1], b.shape[-1]), a.dtype)  # [..., R, C]
    for i in range(0, a.shape[-1], at_once):
        total = total + a[..., i : i + at_once] @ b[..., i : i + at_once, :]  # [..., R, C]
    return total
