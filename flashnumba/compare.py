"""The one comparator: is an array right, to the precision that its mathematics allows?

Non-finite positions must agree first: a NaN, +inf or -inf in one array must stand at the same place in the other. Then
the error budget comes from doing the same mathematics in low precision, not from a tolerance somebody liked::

    max|out - reference|  <=  2 * max|lowprec - reference| + eps

``reference`` is float64. ``lowprec`` is a plain implementation with the precision of the kernel: float32 inside, the
output rounded to the kernel's dtype. The factor 2 allows for another order of summation. ``eps``, four float32 steps at
the largest reference value, allows for the hardware's ``ex2.approx`` and ``rcp.approx``, whose relative errors (about
2**-22 and 2**-23, PTX ISA) a NumPy float32 result does not have. The shape follows FlashMLA's
tests/kernelkit/compare.py; the budget is the one of FlashAttention's tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["Comparison", "assert_close", "budget", "compare"]

FACTOR = 2.0
STEPS = 4 * float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class Comparison:
    """What :func:`compare` found.

    Attributes:
        ok: the non-finite positions agree and the error is within the budget.
        error: ``max|out - reference|`` over the finite positions; inf where the non-finite positions disagree.
        budget: the most ``error`` may be.
        worst_index: where the error is greatest, or where finiteness first disagrees; None for an empty array.
        got, expected: the two values there.
    """

    ok: bool
    error: float
    budget: float
    worst_index: tuple[int, ...] | None
    got: float
    expected: float

    def __str__(self) -> str:
        if self.worst_index is None:
            return "empty arrays"
        at = f"at {list(self.worst_index)} got {self.got:.9g}, expected {self.expected:.9g}"
        if np.isinf(self.error):
            return f"non-finite positions disagree: {at}"
        return f"error {self.error:.3g} {'within' if self.ok else 'above'} the budget {self.budget:.3g}: {at}"


def _float64(name: str, array: ArrayLike) -> np.ndarray:
    given = np.asarray(array)
    if given.dtype.kind in "biucOSU":  # raw bits of a bfloat16 or FP8 array would compare as integers
        raise TypeError(
            f"{name} has dtype {given.dtype}; it must be a floating-point array (view raw bits as ml_dtypes)"
        )
    return given.astype(np.float64)


def budget(reference: ArrayLike, lowprec: ArrayLike, eps: float | None = None) -> float:
    """The largest error that low precision excuses: ``2 * max|lowprec - reference| + eps``.

    Args:
        reference: float64 result.
        lowprec: the same mathematics in low precision, of the same shape.
        eps: absolute allowance; ``2**-21 * max|reference|`` (four float32 steps) if None.

    Raises:
        ValueError: the shapes differ, or ``lowprec`` is non-finite elsewhere than ``reference``: such a low-precision
            result would excuse everything.
    """
    expected, low = _float64("reference", reference), _float64("lowprec", lowprec)
    if expected.shape != low.shape:
        raise ValueError(f"lowprec has shape {low.shape}, the reference {expected.shape}; they must be equal")
    where = _disagreement(low, expected)
    if where is not None:
        raise ValueError(
            f"lowprec is no measure: at {list(where)} it is {low[where]:g} where the reference is {expected[where]:g}"
        )
    finite = np.isfinite(expected)
    if eps is None:
        eps = STEPS * float(np.abs(expected[finite]).max(initial=0.0))
    return FACTOR * float(np.abs(low[finite] - expected[finite]).max(initial=0.0)) + eps


def compare(
    out: ArrayLike, reference: ArrayLike, lowprec: ArrayLike | None = None, *, eps: float | None = None
) -> Comparison:
    """Compare a result with its float64 reference.

    Args:
        out: the result, any floating-point dtype (bfloat16 and FP8 as ml_dtypes).
        reference: float64, the same shape.
        lowprec: the same mathematics in low precision; the reference rounded to ``out``'s dtype if None.
        eps: see :func:`budget`.

    Raises:
        ValueError: the shapes differ (nothing is broadcast), or ``lowprec`` is unfit (see :func:`budget`).
        TypeError: an array is not floating-point.
    """
    got, expected = _float64("out", out), _float64("reference", reference)
    if got.shape != expected.shape:
        raise ValueError(f"out has shape {got.shape}, the reference {expected.shape}; they must be equal")
    if lowprec is None:
        lowprec = expected.astype(np.asarray(out).dtype)
    allowed = budget(expected, lowprec, eps)
    if got.size == 0:
        return Comparison(True, 0.0, allowed, None, np.nan, np.nan)
    where = _disagreement(got, expected)
    if where is not None:
        return Comparison(False, np.inf, allowed, where, float(got[where]), float(expected[where]))
    finite = np.isfinite(expected)
    distance = np.abs(np.subtract(got, expected, where=finite, out=np.zeros_like(expected)))
    where = tuple(int(i) for i in np.unravel_index(np.argmax(distance), distance.shape))
    error = float(distance[where])
    return Comparison(error <= allowed, error, allowed, where, float(got[where]), float(expected[where]))


def assert_close(
    out: ArrayLike, reference: ArrayLike, lowprec: ArrayLike | None = None, *, eps: float | None = None, what: str = ""
) -> Comparison:
    """:func:`compare`, and an AssertionError that names the worst position, both values and the budget if it is not ok.

    Args:
        what: what was compared; it opens the message.
    """
    result = compare(out, reference, lowprec, eps=eps)
    if not result.ok:
        raise AssertionError(f"{what}: {result}" if what else str(result))
    return result


def _disagreement(a: np.ndarray, b: np.ndarray) -> tuple[int, ...] | None:
    """The first position where one is NaN, +inf or -inf and the other is not the same; None if there is none."""
    differs = (np.isnan(a) != np.isnan(b)) | (np.isposinf(a) != np.isposinf(b)) | (np.isneginf(a) != np.isneginf(b))
    if not differs.any():
        return None
    return tuple(int(i) for i in np.unravel_index(np.argmax(differs), differs.shape))
