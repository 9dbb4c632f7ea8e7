"""The arithmetic of online softmax on a row's state (m, d): its maximum, its sum of exponentials in units of exp(m).

Exponentials are powers of two, ``exp(x - m) = 2^((x - m) log2 e)``, one instruction of the special function unit. The
difference is taken before the product: it is exact where it matters, so that scores of any finite size are right, where
``x log2 e - m log2 e`` would overflow near the largest float32, and loses its fraction from 2^24 on.

A row of -inf has m = -inf, and -inf - -inf is NaN; so exponents are relative to ``anchor(m)``, which is 0 there.
NaN needs no care: ``max`` passes over it, the sum of exponentials does not.
"""

from __future__ import annotations

from flashnumba.machine.function import device
from flashnumba.machine.instructions import ex2_approx, rcp_approx
from flashnumba.machine.numba import float32

__all__ = ["LOG2_E", "NOTHING", "anchor", "exponential", "inverse", "rescale"]

NOTHING = float("-inf")
"""The maximum of no elements."""
LOG2_E = 1.4426950408889634


@device
def anchor(m):
    """What exponents are taken relative to in a row of maximum ``m``."""
    return float32(0) if m == float32(NOTHING) else m


@device
def exponential(x, origin):
    """exp(x - origin), ``origin`` from :func:`anchor`."""
    return ex2_approx((x - origin) * float32(LOG2_E))


@device
def rescale(m_from, m_to):
    """What a sum in units of exp(m_from) is multiplied by to be one in units of exp(m_to); 0 if it is empty."""
    return exponential(m_from, anchor(m_to))


@device
def inverse(d):
    """1 / d, and 1 for the empty sum of a row of -inf, whose quotients are then 0."""
    return rcp_approx(float32(1) if d == float32(0) else d)
