"""What a tensor core computes, to the bit: a truncated fused dot product.

NVIDIA's units do not round each multiply and each add. For one output element they take ``chunk`` products and the
accumulator, and

1. form every product exactly (it is not normalised: its exponent is the sum of the operands' exponents);
2. align all terms to the largest exponent among them and cut each, toward zero, to ``fraction_bits`` below it;
3. add what is left exactly, normalise, and cut the sum, toward zero, to the result's precision.

A longer dot product is a chain of such steps, each taking the last one's result as its accumulator. Only
``fraction_bits``, ``chunk`` and the result's precision differ between generations; :data:`RULES` has them.

Everything here runs in float64, in which each step above is exact: a product has at most 22 significant bits, an
aligned term at most 28, and at most 33 terms are added.

Sources: Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores", PeerJ CS 2021 (the method; Volta,
Turing, Ampere); Xie et al., "MMA-Sim: bit-accurate reference model of tensor cores and matrix cores", arXiv 2511.10909
(the figures in the table, the treatment of subnormals, NaN and overflow); Khattak and Mikaitis, "Accurate models of
NVIDIA tensor cores", arXiv 2512.07004.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

__all__ = ["FORMATS", "RULES", "Rule", "Settings", "dot", "fused_dot", "rule_for", "settings"]


@dataclass
class Settings(threading.local):
    """How tensor-core instructions are emulated; each Python thread has its own.

    Attributes:
        exact: the hardware's result to the bit; False computes a plain float32 product, several times faster.
        arch: compute capability whose units are emulated, e.g. ``"90a"``.
    """

    exact: bool = True
    arch: str = "90a"

    @contextmanager
    def using(self, **changes: Any) -> Iterator[Settings]:
        """Change attributes within a ``with`` block."""
        before = {name: getattr(self, name) for name in changes}
        for name, value in changes.items():
            setattr(self, name, value)
        try:
            yield self
        finally:
            for name, value in before.items():
                setattr(self, name, value)


settings = Settings()
"""The settings that instructions read. The emulator's launch sets ``arch`` to the architecture it emulates."""

FORMATS = {"f16": -14, "bf16": -126, "e4m3": -6, "e5m2": -14}
"""Operand formats and their smallest exponent, which is also that of their subnormal numbers."""


@dataclass(frozen=True)
class Rule:
    """One generation's numbers for one operand format.

    Attributes:
        fraction_bits: bits kept below the largest exponent when terms are aligned.
        chunk: products added in one step.
        result_bits: fraction bits of a step's result (23: a full float32; 13: FP8 units, whose accumulator is shorter).
        as_f16: the unit lacks FP8: the assembler converts to float16 and issues two steps of 16. The first takes the
            two low bytes of every register (k mod 4 in 0, 1), the second the two high ones; they start from zero, and
            the accumulator is added last, by an ordinary float32 addition.
    """

    fraction_bits: int
    chunk: int
    result_bits: int = 23
    as_f16: bool = False


_TURING = {"f16": Rule(24, 8)}
_AMPERE = {"f16": Rule(24, 8), "bf16": Rule(24, 8)}
_ADA = {**_AMPERE, "fp8": Rule(13, 16, 13)}
_HOPPER = {"f16": Rule(25, 16), "bf16": Rule(25, 16), "fp8": Rule(25, 16, as_f16=True)}
_HOPPER_WGMMA = {"f16": Rule(25, 16), "bf16": Rule(25, 16), "fp8": Rule(13, 32, 13)}
_RTX_BLACKWELL = {"f16": Rule(25, 16), "bf16": Rule(25, 16), "fp8": Rule(25, 32)}

RULES: dict[tuple[str, int], dict[str, Rule]] = {
    ("mma", 75): _TURING,
    ("mma", 80): _AMPERE,
    ("mma", 89): _ADA,
    # Only wgmma computes in FP8 here.
    ("mma", 90): _HOPPER,
    ("wgmma", 90): _HOPPER_WGMMA,
    ("mma", 120): _RTX_BLACKWELL,
}
"""(unit, first compute capability that has it) -> operand format -> numbers. Data-centre Blackwell's mma.sync is taken
to be Hopper's. Source: MMA-Sim; for FP8 in Hopper's mma.sync, the machine code that ptxas 13.5 makes of it."""


def rule_for(unit: str, operand: str, arch: str | None = None) -> Rule:
    """The numbers of ``unit`` ("mma" or "wgmma") for operands in ``operand`` on ``arch`` (default: ``settings.arch``).

    Raises:
        ValueError: that architecture's unit does not take that format.
    """
    arch = settings.arch if arch is None else arch
    number, kind = int(arch.rstrip("af")), "fp8" if operand in ("e4m3", "e5m2") else operand
    known = [first for name, first in RULES if name == unit and first <= number and (unit == "mma" or first == number)]
    rule = RULES[unit, max(known)].get(kind) if known else None
    if rule is None:
        raise ValueError(f"{unit} with {operand} operands does not exist on sm_{arch}")
    return rule


def dot(
    a: np.ndarray, b: np.ndarray, c: np.ndarray, a_format: str, b_format: str | None = None,
    *, unit: str = "mma", arch: str | None = None,
) -> np.ndarray:  # fmt: skip
    """``a @ b + c`` as the tensor core gives it.

    Args:
        a: ``[..., M, K]`` float32, each value exactly one of ``a_format``.
        b: ``[..., K, N]`` float32, each value exactly one of ``b_format`` (default: as ``a``).
        c: ``[..., M, N]`` float32.
        unit: "mma" (mma.sync) or "wgmma".
        arch: compute capability; ``settings.arch`` by default.

    Returns:
        ``[..., M, N]`` float32.
    """
    if not settings.exact:
        with np.errstate(all="ignore"):
            return np.matmul(a, b) + c
    rule = rule_for(unit, a_format, arch)
    lowest = FORMATS[a_format], FORMATS[b_format or a_format]
    if rule.as_f16:
        k = np.arange(a.shape[-1])
        k = np.concatenate([k[k % 4 < 2], k[k % 4 >= 2]])
        total = fused_dot(
            a[..., k], b[..., k, :], np.zeros_like(c), fraction_bits=rule.fraction_bits, chunk=rule.chunk
        )  # float16's smallest exponent is fused_dot's default
        with np.errstate(all="ignore"):
            total += c
        return np.where(np.isnan(total), _NAN.view(np.float32), total)
    return fused_dot(
        a, b, c, fraction_bits=rule.fraction_bits, chunk=rule.chunk, result_bits=rule.result_bits, lowest=lowest
    )


_LOW = -4000  # exponent of a zero: below any product's, so that it never sets the alignment
_NAN = np.uint32(0x7FFFFFFF)  # the one NaN a tensor core gives
_FIELD = np.arange(512, dtype=np.int64) & 0xFF  # sign and exponent field of a float32 -> exponent field


@cache
def _exponent_table(lowest: int) -> np.ndarray:
    """Sign and exponent field of a float32 -> exponent, in a format whose smallest is ``lowest``."""
    table = np.maximum(_FIELD - 127, lowest).astype(np.int16)
    table[_FIELD == 0] = _LOW
    return table


_ACCUMULATOR = np.where(_FIELD, _FIELD - 127, -400)  # a zero accumulator never sets the alignment


def _exponents(values: np.ndarray, lowest: int) -> np.ndarray:
    """Exponents of float32 ``values`` as a format with smallest exponent ``lowest`` holds them (int16)."""
    exponents = _exponent_table(lowest).take(values.view(np.uint32) >> 23)
    if lowest == -126:  # only there can a nonzero value have exponent field 0
        exponents[(exponents == _LOW) & (values != 0)] = -126
    return exponents


def fused_dot(
    a: np.ndarray, b: np.ndarray, c: np.ndarray, *,
    fraction_bits: int, chunk: int, result_bits: int = 23, lowest: tuple[int, int] = (-14, -14),
) -> np.ndarray:  # fmt: skip
    """``a @ b + c`` by truncated fused steps of ``chunk`` products.

    Args:
        a: ``[..., M, K]``, exact in float32.
        b: ``[..., K, N]``, exact in float32.
        c: ``[..., M, N]`` float32.
        fraction_bits: bits kept of each aligned term below the largest exponent.
        chunk: products a step; the last step may be shorter.
        result_bits: fraction bits of each step's result.
        lowest: smallest exponents of the formats of ``a`` and ``b``: a subnormal number keeps that exponent.

    Returns:
        ``[..., M, N]`` float32. Zero sums are +0, NaN is 0x7fffffff, overflow is infinity.
    """
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    a = a.T if a.ndim == 2 else np.moveaxis(a, -1, 0)
    b = b if b.ndim == 2 else np.moveaxis(b, -2, 0)
    a = np.ascontiguousarray(a)[..., :, None]  # [K, ..., M, 1]
    b = np.ascontiguousarray(b)[..., None, :]  # [K, ..., 1, N]
    exponents = _exponents(a, lowest[0]), _exponents(b, lowest[1])
    a, b = a.astype(np.float64), b.astype(np.float64)
    c = np.ascontiguousarray(c, np.float32)
    with np.errstate(all="ignore"):
        for k in range(0, len(a), chunk):
            at = slice(k, k + chunk)
            c = _step(a[at], b[at], c, exponents[0][at], exponents[1][at], fraction_bits, min(lowest) == -126)
            if result_bits < 23:
                c.view(np.uint32)[...] &= np.uint32(0xFFFFFFFF << (23 - result_bits) & 0xFFFFFFFF)
                c[np.isnan(c)] = _NAN.view(np.float32)
    return c


def _step(
    a: np.ndarray, b: np.ndarray, c: np.ndarray, a_exponent: np.ndarray, b_exponent: np.ndarray, fraction_bits: int,
    tiny: bool,
) -> np.ndarray:  # fmt: skip
    """One step: ``a`` [k, ..., M, 1] and ``b`` [k, ..., 1, N] in float64, ``c`` [..., M, N] float32.

    ``tiny``: products may be smaller than any float32, so that subnormal accumulators and underflow matter.
    """
    top = np.maximum.reduce(a_exponent + b_exponent, axis=0)
    field = c.view(np.uint32) >> 23
    top = np.maximum(top, _ACCUMULATOR.take(field))
    if tiny:
        top = np.where((field & 0xFF == 0) & (c != 0), np.maximum(top, -126), top)
    # Powers of two by their bit patterns: the exponents are within float64's.
    scale = ((1023 + fraction_bits - top) << 52).view(np.float64)
    terms = a * b
    terms *= scale
    np.trunc(terms, out=terms)
    total = np.add.reduce(terms, axis=0, initial=0.0)
    total += np.trunc(c * scale)
    total *= ((1023 - fraction_bits + top) << 52).view(np.float64)
    # Toward zero: where rounding to nearest went up, the next float32 down has the bit pattern one lower.
    result = total.astype(np.float32)
    magnitude = np.abs(total)
    bits = result.view(np.uint32)
    bits -= np.abs(result) > magnitude
    if tiny:
        result[(result == 0) & (total != 0)] = 0.0  # what underflows loses its sign
    if not np.maximum.reduce(magnitude, axis=None, initial=0.0) < 2.0**128:
        result[magnitude >= 2.0**128] = np.copysign(np.float32(np.inf), total[magnitude >= 2.0**128])
        bits[np.isnan(total)] = _NAN
    return result
