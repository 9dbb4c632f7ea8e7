"""What tests of the product's kernels share: operands with NaN between their lines, a guarded C, the judgement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flashnumba.compare import assert_close, compare
from flashnumba.machine import gpu, launcher
from flashnumba.machine.emulator import Fault
from flashnumba.stages.gemm.problem import Plan, Shape
from flashnumba.stages.gemm.reference import low_precision, naive
from tests.stages.rowwise import Guarded

DTYPES = (np.float16, ml_dtypes.bfloat16)
"""What tensor cores take; CUDA cores take float32 too."""
MAJORS = [(a, b) for a in "km" for b in "nk"]
TAILS = [(1, 7, 15), (7, 15, 31), (15, 31, 33), (31, 33, 63), (33, 63, 100), (63, 100, 1), (100, 1, 7)]
"""(m, n, k): every length that is awkward, each on every axis."""


def matrix(rows, cols, dtype, packed, gap=0, at=0, seed=0):
    """Normal numbers, each row and each column of another size, in lines along axis ``packed``.

    Lines are ``gap`` elements apart, with NaN between, and the first is ``at`` elements past a multiple of 16 bytes.
    """
    rng = np.random.default_rng([seed, rows, cols])
    lines, length = (rows, cols) if packed else (cols, rows)
    itemsize = np.dtype(dtype).itemsize
    words = np.full(16 + at + lines * (length + gap), np.nan, np.float32).astype(dtype)
    start = -words.ctypes.data // itemsize % (16 // itemsize) + at
    strides = ((length + gap) * itemsize, itemsize)
    view = np.lib.stride_tricks.as_strided(words[start:], (lines, length), strides)
    view = view if packed else view.T
    view[...] = rng.standard_normal((rows, cols)) * np.geomspace(0.5, 2, rows)[:, None] * np.geomspace(1, 2, cols)
    return view


def widest(pointer: int, lead: int, lines: int) -> int:
    """Bytes to which every line is aligned, at most 16."""
    odd = pointer | (lead if lines > 1 else 0) | 16
    return odd & -odd


@dataclass
class Product:
    """Two operands, what they are planned as, and what their product must be."""

    a: Any
    b: Any
    shape: Shape
    expected: np.ndarray
    low: np.ndarray
    gap_c: int
    at_c: int

    def judge_anew(self) -> None:
        """Operands have changed: a product that is infinite or NaN in low precision must be that."""
        with np.errstate(all="ignore"):
            self.low, exact = low_precision(self.a, self.b), naive(self.a, self.b)
        self.expected = np.where(np.isfinite(self.low), exact, self.low.astype(np.float64))

    def guarded(self) -> Guarded:
        """A C full of NaN between bands."""
        dtype = self.a.dtype
        return Guarded(self.expected.shape, dtype, (self.shape.n + self.gap_c, 1), self.at_c)

    def launch(self, plan: Plan, out: Guarded, machine: str = "emulator", seed: int = 0, arch: str = "90a") -> None:
        emulate = {"seed": seed, "arch": arch}
        arguments = plan.arguments(self.a, self.b, out.array)
        launcher.launch(
            plan.kernel, plan.grid, plan.threads, arguments, shared=plan.shared, machine=machine, emulate=emulate
        )

    def check(self, plan: Plan, machine: str = "emulator", seed: int = 0, arch: str = "90a", what: str = "") -> Any:
        """Launch, and compare C and the bands around it; returns C."""
        out = self.guarded()
        self.launch(plan, out, machine, seed, arch)
        assert_close(out.array, self.expected, self.low, what=what)
        out.check(what)
        return out.array


def product(
    m, n, k, dtype=np.float16, a_major="k", b_major="n", *, gaps=(0, 0, 0), at=(0, 0, 0), seed=0, arch="90a"
) -> Product:  # fmt: skip
    """Operands of the given majors; ``gaps`` and ``at`` of A, B and C as :func:`matrix` has them."""
    a = matrix(m, k, dtype, a_major == "k", gaps[0], at[0], 2 * seed)
    b = matrix(k, n, dtype, b_major == "n", gaps[1], at[1], 2 * seed + 1)
    itemsize = np.dtype(dtype).itemsize
    lead_a = a.strides[0 if a_major == "k" else 1]
    lead_b = b.strides[0 if b_major == "n" else 1]
    lines_a, lines_b = (m if a_major == "k" else k), (k if b_major == "n" else n)
    vectors = (
        widest(a.ctypes.data, lead_a, lines_a), widest(b.ctypes.data, lead_b, lines_b),
        widest(itemsize * at[2], itemsize * (n + gaps[2]), m),
    )  # fmt: skip
    leads = (lead_a // itemsize, lead_b // itemsize, n + gaps[2])
    shape = Shape(np.dtype(dtype).name, m, n, k, a_major, b_major, *vectors, *leads, arch)
    return Product(a, b, shape, naive(a, b), low_precision(a, b), gaps[2], at[2])


def arch_on(machine: str) -> str:
    return gpu.device_arch() if machine == "cuda" else "90a"


def caught(made: Product, plan: Plan, seed: int, arch: str = "90a") -> str:
    """What a planted fault is caught by: the fault's name, or ``"wrong result"``; the test fails if it is not."""
    out = made.guarded()
    try:
        made.launch(plan, out, seed=seed, arch=arch)
    except Fault as fault:
        return fault.name
    if not compare(out.array, made.expected, made.low).ok:
        return "wrong result"
    return pytest.fail("the planted fault was not caught")
