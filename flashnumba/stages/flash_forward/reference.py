"""Attention as the formula says it, and block by block, with no matrix of scores.

The idea. Each query asks every key it may see how well it fits, and gets the values' average under those weights::

    S = scale * Q K^T        P = softmax(S), row by row        O = P V        lse_i = ln sum_j exp(S_ij)

:func:`dense` does so with the whole of S in memory: M * N numbers for M * D that are wanted. FlashAttention walks over
blocks of keys instead and keeps three things a row: the maximum so far, the sum of exponentials and the weighted sum of
values, both in units of exp(m) and put into new units whenever m grows (the recurrence of the stage online_softmax with
a third component)::

    m' = max(m, max_j S_j)    P_j = exp(S_j - m')    alpha = exp(m - m')
    l' = alpha * l + sum_j P_j                acc' = alpha * acc + P_j V_j             m_0 = -inf, l_0 = 0, acc_0 = 0

At the end O = acc / l and lse = m + ln l. From O and lse alone, results for parts of the keys can be merged (flash
decoding, :func:`merge`): each part weighs exp(lse_s - lse).

Conventions. q is ``[..., H, M, D]``, k and v ``[..., Hkv, N, D]``; leading axes may be left out. Query head h reads
head ``h // (H // Hkv)`` of k and v. Scale first, then mask: causal is bottom-right aligned, key j is visible to row i
if ``j <= i + N - M``, so the last query sees all keys.

The limits, by definition here and in every kernel:

- a row that sees no key (causal with M > N, or N = 0) gives O = 0 and lse = -inf, whatever it holds;
- a NaN in a row of q gives NaN in that row of O and lse; in a row of k, in every row that sees that key;
- a score of +inf gives NaN in its row; scores of -inf weigh 0, and a row of nothing else is as one that sees no key;
- a NaN or an infinity in a row of v spoils its column in every row that sees that key. Whether it spoils rows that do
  not (0 * NaN) depends on the tiles of a kernel, and is left open.

Sources: Dao et al., FlashAttention, arXiv 2205.14135, algorithm 1; Dao, FlashAttention-2, arXiv 2307.08691, section
3.1; Dao et al., Flash-Decoding for long-context inference (2023), for the merge.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt

import numpy as np
from numpy.typing import DTypeLike

__all__ = ["State", "attend", "blocked", "dense", "empty", "low_precision", "merge", "normalise", "online", "split",
           "visible"]  # fmt: skip

State = tuple[np.ndarray, np.ndarray, np.ndarray]
"""``(m, l, acc)``: ``[..., M]`` the maximum, ``[..., M]`` the sum and ``[..., M, D]`` the weighted sum of values."""


def visible(m: int, n: int, causal: bool) -> np.ndarray:
    """Which of N keys each of M rows may see: ``[M, N]`` bool, bottom-right aligned if causal."""
    rows, keys = np.arange(m)[:, None], np.arange(n)  # [M, 1], [N]
    return (keys <= rows + n - m) if causal else np.ones((m, n), bool)  # [M, N]


def scores(
    q: np.ndarray, k: np.ndarray, scale: float | None, mask: np.ndarray, inside: DTypeLike
) -> np.ndarray:  # fmt: skip
    """``scale * Q K^T`` where the mask lets it be seen, -inf elsewhere: ``[..., H, M, N]`` of ``inside``."""
    s = q.astype(inside) @ _of_query_heads(k, q).astype(inside).swapaxes(-1, -2)  # [..., H, M, N]
    return masked(s, scale, mask, q.shape[-1])  # [..., H, M, N]


def masked(s: np.ndarray, scale: float | None, mask: np.ndarray, d: int) -> np.ndarray:
    """Scale first, then mask: ``[..., H, M, N]`` of S's dtype."""
    s = s * s.dtype.type(1 / sqrt(d) if scale is None else scale)  # [..., H, M, N]
    return np.where(mask, s, -np.inf).astype(s.dtype)  # [..., H, M, N]


def _of_query_heads(k: np.ndarray, q: np.ndarray) -> np.ndarray:
    """K or V with each head repeated for the query heads that read it: ``[..., H, N, D]``."""
    if q.ndim < 3 or k.shape[-3] == q.shape[-3]:
        return k  # [..., H, N, D]
    return np.repeat(k, q.shape[-3] // k.shape[-3], axis=-3)  # [..., H, N, D]


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float | None, mask: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Attention in float64 with any mask, all scores at once.

    Args:
        q, k, v: see the module's conventions.
        scale: any finite number; 1/sqrt(D) if None.
        mask: ``[M, N]`` bool (or what broadcasts to ``[..., H, M, N]``), True where row i may see key j.

    Returns:
        o ``[..., H, M, D]`` and lse ``[..., H, M]``, float64.
    """
    with np.errstate(invalid="ignore", over="ignore"):  # inf - inf and 0 * inf are NaN, as the limits say
        s = scores(q, k, scale, mask, np.float64)  # [..., H, M, N]
        m = s.max(-1, initial=-np.inf)  # [..., H, M]
        p = np.exp(s - _anchor(m)[..., None])  # [..., H, M, N]
        return normalise((m, p.sum(-1), p @ _of_query_heads(v, q).astype(np.float64)))


def dense(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float | None = None, causal: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Attention in float64 with all scores in memory: what every other result is judged by.

    Returns:
        o ``[..., H, M, D]`` and lse ``[..., H, M]``, float64.
    """
    return attend(q, k, v, scale, visible(q.shape[-2], k.shape[-2], causal))


def low_precision(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float | None = None, causal: bool = False
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """:func:`dense` as a GPU does it: float32 inside, P rounded to the inputs' type before P V, O rounded to it too.

    Its distance from the float64 result is the error that the mathematics excuses, see :mod:`flashnumba.compare`. So
    sums run in their order, as in a kernel, not in NumPy's pairs or BLAS's lanes, whose results are more exact:
    float32 one after the other, 16-bit elements by the sixteens of a tensor core.

    Returns:
        o ``[..., H, M, D]`` of q's dtype and lse ``[..., H, M]`` float32.
    """
    n, at_once = k.shape[-2], 1 if q.dtype == np.float32 else 16
    mask = visible(q.shape[-2], n, causal)  # [M, N]
    k, v = (_of_query_heads(x, q).astype(np.float32) for x in (k, v))  # [..., H, N, D], [..., H, N, D]
    with np.errstate(invalid="ignore", over="ignore"):  # as in attend; and O near 65504 may round to float16's inf
        s = in_order(q.astype(np.float32), k.swapaxes(-1, -2), at_once)  # [..., H, M, N]
        s = masked(s, scale, mask, q.shape[-1])  # [..., H, M, N]
        m = s.max(-1, initial=-np.inf)  # [..., H, M]
        p = np.exp(s - _anchor(m)[..., None])  # [..., H, M, N]
        l = np.add.accumulate(p, -1)[..., -1] if n else np.zeros_like(m)  # [..., H, M]
        acc = in_order(p.astype(q.dtype).astype(np.float32), v, at_once)  # [..., H, M, D]
        o, lse = normalise((m, l, acc))  # [..., H, M, D], [..., H, M]
        return o.astype(q.dtype), lse  # [..., H, M, D], [..., H, M]


def in_order(a: np.ndarray, b: np.ndarray, at_once: int) -> np.ndarray:
    """``a @ b``, ``at_once`` products at a time from the first to the last: ``[..., R, C]``."""
    total = np.zeros((*a.shape[:-1], b.shape[-1]), a.dtype)  # [..., R, C]
    for i in range(0, a.shape[-1], at_once):
        total = total + a[..., i : i + at_once] @ b[..., i : i + at_once, :]  # [..., R, C]
    return total


# -- block by block ----------------------------------------------------------------------------------------------------
def empty(shape: tuple[int, ...], inside: DTypeLike = np.float64) -> State:
    """The state of rows that have seen nothing. ``shape`` is that of O, ``[..., M, D]``."""
    return np.full(shape[:-1], -np.inf, inside), np.zeros(shape[:-1], inside), np.zeros(shape, inside)


def blocked(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float | None = None, causal: bool = False, block: int = 64,
    inside: DTypeLike = np.float64,
) -> Iterator[State]:  # fmt: skip
    """The recurrence: the state after each block of ``block`` keys. Nothing is yielded for N = 0."""
    n = k.shape[-2]
    mask = visible(q.shape[-2], n, causal)  # [M, N]
    v = _of_query_heads(v, q).astype(inside)  # [..., H, N, D]
    m, l, acc = empty(q.shape, inside)  # [..., H, M], [..., H, M], [..., H, M, D]
    for start in range(0, n, block):
        keys = slice(start, start + block)
        with np.errstate(invalid="ignore", over="ignore"):  # as in attend
            s = scores(q, k[..., keys, :], scale, mask[:, keys], inside)  # [..., H, M, block]
            m_next = np.maximum(m, s.max(-1))  # [..., H, M]
            alpha = np.exp(m - _anchor(m_next))  # [..., H, M]  0 where nothing was seen before
            p = np.exp(s - _anchor(m_next)[..., None])  # [..., H, M, block]
            l = alpha * l + p.sum(-1)  # [..., H, M]
            acc = alpha[..., None] * acc + p @ v[..., keys, :]  # [..., H, M, D]
        m = m_next
        yield m, l, acc


def _anchor(m: np.ndarray) -> np.ndarray:
    """What exponents are measured from: m, or 0 where nothing was seen, as -inf - -inf would be NaN. ``[..., M]``"""
    return np.where(m == -np.inf, 0, m).astype(m.dtype)  # [..., M]


def normalise(state: State) -> tuple[np.ndarray, np.ndarray]:
    """O = acc / l and lse = m + ln l; 0 and -inf where nothing was seen. ``[..., M, D]``, ``[..., M]``."""
    m, l, acc = state
    l_or_one = np.where(l == 0, 1, l).astype(l.dtype)  # [..., M]
    with np.errstate(invalid="ignore", over="ignore"):  # acc may be inf or NaN
        return acc / l_or_one[..., None], m + np.log(l_or_one)  # [..., M, D], [..., M]


def online(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float | None = None, causal: bool = False, block: int = 64,
    inside: DTypeLike = np.float64,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Attention by :func:`blocked`: o ``[..., H, M, D]`` and lse ``[..., H, M]``, of ``inside``."""
    state = empty(q.shape, inside)
    for state in blocked(q, k, v, scale, causal, block, inside):  # noqa: B007  the last one is wanted
        pass
    return normalise(state)


# -- parts of the keys -------------------------------------------------------------------------------------------------
def split(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float | None = None, causal: bool = False, parts: int = 2
) -> tuple[np.ndarray, np.ndarray]:
    """What each of ``parts`` pieces of the keys gives alone: ``[parts, ..., H, M, D]``, ``[parts, ..., H, M]``."""
    n = k.shape[-2]
    mask = visible(q.shape[-2], n, causal)  # [M, N]
    cuts = np.array_split(np.arange(n), parts)
    each = [attend(q, k[..., j, :], v[..., j, :], scale, mask[:, j]) for j in cuts]
    return np.stack([o for o, _ in each]), np.stack([lse for _, lse in each])


def merge(o: np.ndarray, lse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One result from those of parts of the keys: each part weighs exp(lse_s - lse).

    The operation is associative and commutative, so parts may be merged in any order; a part that saw nothing
    (lse = -inf) has no weight, and nothing but such parts gives O = 0 and lse = -inf again.

    Args:
        o: ``[S, ..., M, D]``, normalised results of S parts.
        lse: ``[S, ..., M]``.

    Returns:
        o ``[..., M, D]`` and lse ``[..., M]``.
    """
    with np.errstate(invalid="ignore", over="ignore"):  # NaN in a part is NaN in the result
        m = lse.max(0, initial=-np.inf)  # [..., M]
        weight = np.exp(lse - _anchor(m))  # [S, ..., M]
        acc = (weight[..., None] * o).sum(0)  # [..., M, D]
        return normalise((m, weight.sum(0), acc))  # [..., M, D], [..., M]
