"""What the kernels of the stage gemm are planned for, and what a plan is.

C = A B with A ``[M, K]``, B ``[K, N]``, C ``[M, N]``. An operand's *lines* are packed: their elements lie side by side.
Along which axis they run is its *major*; from line to line is its *lead*, as BLAS calls it::

    a_major  "k"  rows of A are lines (row-major)        "m"  columns of A are lines (column-major)
    b_major  "n"  rows of B are lines (row-major)        "k"  columns of B are lines (column-major)
    C is row-major; the host turns a column-major C into C^T = B^T A^T, which is row-major
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flashnumba.machine.function import Kernel
from flashnumba.machine.numba import types
from flashnumba.stages.host import EMULATED_ARCH
from flashnumba.tiles.elements import ITEMSIZE

__all__ = ["A_MAJORS", "B_MAJORS", "Plan", "Shape", "signature"]

A_MAJORS = ("k", "m")
B_MAJORS = ("n", "k")


@dataclass(frozen=True)
class Shape:
    """What decides which kernel fits and which is best.

    Attributes:
        element: float16, bfloat16 or float32.
        m, n, k: C is ``[m, n]``, summed over k; all at least 1.
        a_major, b_major: along which axis the operand's lines run, see the module's docstring.
        vector_a, vector_b, vector_c: bytes of the widest vector, 16 down to one element, that is aligned at the start
            of every line. Nothing is said of a line's end: see :meth:`whole`.
        lead_a, lead_b, lead_c: elements from line to line, at least 1; a multiple of 16 bytes where there is one line.
        arch: compute capability it runs on.

    Raises:
        ValueError: a field has none of these values.
    """

    element: str
    m: int
    n: int
    k: int
    a_major: str
    b_major: str
    vector_a: int
    vector_b: int
    vector_c: int
    lead_a: int
    lead_b: int
    lead_c: int
    arch: str = EMULATED_ARCH

    def __post_init__(self) -> None:
        allowed = {"element": tuple(ITEMSIZE), "a_major": A_MAJORS, "b_major": B_MAJORS}
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(values)}")
        for name in ("m", "n", "k", "lead_a", "lead_b", "lead_c"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        widths = tuple(w for w in (16, 8, 4, 2) if w >= self.itemsize)
        for name in ("vector_a", "vector_b", "vector_c"):
            if getattr(self, name) not in widths:
                raise ValueError(f"{name} is {getattr(self, name)}; for {self.element} it must be one of {widths}")

    @classmethod
    def packed(
        cls, element: str, m: int, n: int, k: int, a_major: str = "k", b_major: str = "n", arch: str = EMULATED_ARCH
    ) -> Shape:
        """The shape of arrays without gaps that start at multiples of 16 bytes."""
        leads = (k if a_major == "k" else m, n if b_major == "n" else k, n)
        lines = (m if a_major == "k" else k, k if b_major == "n" else n, m)
        per_16 = 16 // ITEMSIZE[element]
        leads = tuple(
            lead if many > 1 else -(-lead // per_16) * per_16 for lead, many in zip(leads, lines, strict=True)
        )
        vectors = (min(16, _power(lead * ITEMSIZE[element])) for lead in leads)
        return cls(element, m, n, k, a_major, b_major, *vectors, *leads, arch)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return ITEMSIZE[self.element]

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.m * self.n * self.k

    @property
    def capability(self) -> int:
        """The architecture as a number: 90 for ``"90a"``."""
        return int(self.arch.rstrip("a"))

    def line(self, operand: str) -> int:
        """Elements of a line of ``"a"``, ``"b"`` or ``"c"``."""
        if operand == "a":
            return self.k if self.a_major == "k" else self.m
        if operand == "b":
            return self.n if self.b_major == "n" else self.k
        return self.n

    def whole(self, operand: str) -> int:
        """Bytes of the widest vector that is aligned in every line and of which lines consist, nothing left over."""
        return min(getattr(self, f"vector_{operand}"), _power(self.line(operand) * self.itemsize))


@dataclass(frozen=True)
class Plan:
    """A kernel and its launch.

    Attributes:
        kernel: what is launched.
        grid: blocks, a number or a tuple.
        threads: a block.
        shared: dynamic shared memory in bytes.
        arguments: makes the kernel's arguments from ``(a, b, c)``, which are arrays as the caller's library has them,
            two-dimensional, on one machine. Tensor maps are made here.
    """

    kernel: Kernel
    grid: int | tuple[int, ...]
    threads: int
    shared: int = 0
    arguments: Callable[[Any, Any, Any], tuple[Any, ...]] = lambda a, b, c: (a, b, c)


def signature(shape: Shape) -> tuple[Any, ...]:
    """Numba types of ``(a, b, c)`` as a launch would find them."""
    element = {"float32": types.float32, "float16": types.float16, "bfloat16": types.uint16}[shape.element]
    dense_a = shape.a_major == "k" and (shape.m == 1 or shape.lead_a == shape.k)
    dense_b = shape.b_major == "n" and (shape.k == 1 or shape.lead_b == shape.n)
    dense_c = shape.m == 1 or shape.lead_c == shape.n
    return tuple(types.Array(element, 2, "C" if dense else "A") for dense in (dense_a, dense_b, dense_c))


def _power(n: int) -> int:
    """The largest power of two that divides ``n``."""
    return n & -n
