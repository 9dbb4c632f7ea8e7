"""Online softmax: maximum and sum in one pass, and an operator that merges partial results.

The idea. Safe softmax reads the row once for the maximum m and again for the sum d. One pass is enough if d is kept in
units of exp(m) and put into new units whenever m grows::

    m_j = max(m_{j-1}, x_j)
    d_j = d_{j-1} * exp(m_{j-1} - m_j) + exp(x_j - m_j)          m_0 = -inf, d_0 = 0

At the end p_j = exp(x_j - m) / d. What holds for one more element holds for a whole other part of the row::

    (m_a, d_a) + (m_b, d_b) = (m, d_a * exp(m_a - m) + d_b * exp(m_b - m)),   m = max(m_a, m_b)

This operator is associative and commutative and its identity is (-inf, 0), so a row may be cut anywhere and its parts
merged in any order: by the lanes of a warp, the warps of a block, the blocks of a grid. FlashAttention is this operator
with a third component, the output accumulated so far.

The limits. The factor of an empty part is 0 by definition, where the formula would give exp(-inf - -inf) = NaN: empty
merged with empty is empty. Rows of -inf, NaN and +inf give what the stage softmax says: zeros, NaN, NaN.

What changed since the stage softmax: two passes instead of three, and no pass needs the whole row in one place.

Source: Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv 1805.02867, algorithm 3, section 3.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import DTypeLike

__all__ = ["State", "empty", "low_precision", "merge", "normalise", "online", "scan", "split", "steps", "tree"]

State = tuple[np.ndarray, np.ndarray]
"""``(m, d)``, each ``[...]``: the running maximum, and the sum of exponentials in units of exp(m)."""


def empty(shape: tuple[int, ...], inside: DTypeLike = np.float64) -> State:
    """The identity of :func:`merge`: nothing seen yet."""
    return np.full(shape, -np.inf, inside), np.zeros(shape, inside)  # [...], [...]


def factor(m_from: np.ndarray, m_to: np.ndarray) -> np.ndarray:
    """exp(m_from - m_to), what d is multiplied by on its way into new units; 0 where nothing was seen."""
    with np.errstate(invalid="ignore", over="ignore"):  # inf - inf, as the limits say; -big - big is -inf
        return np.where(m_from == -np.inf, 0, np.exp(m_from - m_to)).astype(m_to.dtype)  # [...]


def merge(a: State, b: State) -> State:
    """The state of two parts of a row from the state of each, ``[...]`` and ``[...]``."""
    m = np.maximum(a[0], b[0])  # [...]
    d = a[1] * factor(a[0], m) + b[1] * factor(b[0], m)  # [...]
    return m, d


def steps(x: np.ndarray, inside: DTypeLike = np.float64) -> Iterator[State]:
    """The recurrence: the state of ``x[..., :j]`` for j = 1 to N, each ``[...]``. ``x`` is ``[..., N]``."""
    m, d = empty(x.shape[:-1], inside)  # [...], [...]
    for j in range(x.shape[-1]):
        x_j = x[..., j].astype(inside)  # [...]
        m_next = np.maximum(m, x_j)  # [...]
        d = d * factor(m, m_next) + factor(x_j, m_next)  # [...]
        m = m_next
        yield m, d


def scan(x: np.ndarray, inside: DTypeLike = np.float64) -> State:
    """The state of whole rows, in one pass. ``x`` is ``[..., N]``; N may be 0."""
    state = empty(x.shape[:-1], inside)  # [...], [...]
    for state in steps(x, inside):  # noqa: B007  the last one is wanted
        pass
    return state


def tree(states: Sequence[State]) -> State:
    """Merge neighbours, then their results, until one is left: log2(n) rounds, as a warp or a grid does it.

    Raises:
        ValueError: there is no state to merge.
    """
    if not states:
        raise ValueError("tree needs at least one state; empty(shape) is the state of nothing")
    states = list(states)
    while len(states) > 1:
        pairs = [merge(a, b) for a, b in zip(states[::2], states[1::2], strict=False)]
        states = pairs + states[2 * len(pairs) :]
    return states[0]


def split(x: np.ndarray, parts: int, inside: DTypeLike = np.float64) -> State:
    """The state of whole rows from ``parts`` pieces, each scanned alone, merged as a tree. ``x`` is ``[..., N]``."""
    return tree([scan(piece, inside) for piece in np.array_split(x, parts, axis=-1)])


def normalise(x: np.ndarray, state: State) -> np.ndarray:
    """Softmax from the state: ``exp(x - m) / d``, the second pass. ``[..., N]`` of the state's dtype."""
    m, d = (part[..., None] for part in state)  # [..., 1], [..., 1]
    d_or_one = np.where(d == 0, 1, d).astype(d.dtype)  # [..., 1]  d is 0 only in a row of -inf
    m_or_zero = np.where(m == -np.inf, 0, m).astype(m.dtype)  # [..., 1]
    with np.errstate(invalid="ignore", over="ignore"):  # inf - inf, as the limits say; -big - big is -inf
        return np.exp(x.astype(m.dtype) - m_or_zero) / d_or_one  # [..., N]


def online(x: np.ndarray, parts: int = 1) -> np.ndarray:
    """Softmax over the last axis in float64: scan (in ``parts`` pieces, merged as a tree), then normalise.

    Args:
        x: ``[..., N]`` scores, any floating-point dtype; N may be 0.
        parts: 1 is the plain recurrence.
    """
    return normalise(x, split(x, parts))  # [..., N]


def low_precision(x: np.ndarray, dtype: DTypeLike | None = None, parts: int = 32) -> np.ndarray:
    """:func:`online` as a GPU does it: float32 inside, 32 lanes merged as a tree, rounded to ``dtype`` (that of ``x``).

    Its distance from the float64 result is the error that the mathematics excuses.
    """
    return normalise(x, split(x, parts, np.float32)).astype(x.dtype if dtype is None else dtype)  # [..., N]
