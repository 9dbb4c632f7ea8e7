"""The product of two matrices, all at once and tile by tile.

The idea. ``A [M, K]`` times ``B [K, N]``::

    C_ij = sum_k A_ik B_kj

M N K multiplications and additions of (M + N) K numbers: each element of A is used N times and each of B M times. Where
it comes from the second time decides how fast a GPU is, and nothing else in this stage does.

Blocked, C is cut into tiles of ``tile x tile`` and K into steps of ``tile``. A tile of C is a sum of products of small
matrices::

    C_IJ = sum_K A_IK B_KJ

which need only ``2 tile^2`` numbers in a fast memory and do ``tile^3`` multiplications with them. So each number is
fetched from the slow memory M / tile or N / tile times instead of M or N times. Every kernel from ``shared_tile`` on is
this sum, with a tile that fits into shared memory, one that fits into registers, or one that a tensor core takes.

The limits. Sizes may be 0: with K = 0 the sum is empty and C is 0. Infinities and NaN go where the formula sends them.
The order of the sum is not fixed, and neither are the last bits of C.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import DTypeLike

__all__ = ["blocked", "low_precision", "naive", "tiles"]


def naive(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """``A B`` in float64. ``a`` is ``[M, K]``, ``b`` is ``[K, N]``, the result ``[M, N]``."""
    return a.astype(np.float64) @ b.astype(np.float64)  # [M, N]


def tiles(m: int, n: int, k: int, tile: int) -> Iterator[tuple[slice, slice, slice]]:
    """Rows of C, columns of C and steps of k, in the order in which a blocked product takes them.

    Args:
        m, n, k: sizes.
        tile: of each of the three, at least 1; what is at the end is smaller.
    """
    for row in range(0, m, tile):
        for col in range(0, n, tile):
            for step in range(0, k, tile):
                yield (
                    slice(row, min(row + tile, m)),
                    slice(col, min(col + tile, n)),
                    slice(step, min(step + tile, k)),
                )


def blocked(a: np.ndarray, b: np.ndarray, tile: int = 32, inside: DTypeLike = np.float64) -> np.ndarray:
    """``A B`` as a sum over tiles.

    Args:
        a, b: ``[M, K]`` and ``[K, N]``.
        tile: see :func:`tiles`.
        inside: what to compute in.

    Returns:
        ``[M, N]`` of ``inside``.
    """
    (m, k), n = a.shape, b.shape[1]
    c = np.zeros((m, n), inside)  # [M, N]
    for rows, cols, steps in tiles(m, n, k, tile):
        c[rows, cols] += a[rows, steps].astype(inside) @ b[steps, cols].astype(inside)  # [tile, tile]
    return c


def low_precision(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """``A B`` as a GPU does it: one step of k after the other in float32, the result rounded to the dtype of ``a``.

    Its distance from the float64 result is the error that the mathematics excuses.
    """
    left, right = a.astype(np.float32), b.astype(np.float32)  # [M, K], [K, N]
    c = np.zeros((a.shape[0], b.shape[1]), np.float32)  # [M, N]
    with np.errstate(over="ignore", invalid="ignore"):  # infinities go where the formula sends them
        for step in range(a.shape[1]):
            c += left[:, step, None] * right[step]  # [M, N]
        return c.astype(a.dtype)  # [M, N]
