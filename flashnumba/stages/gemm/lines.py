"""An operand as kernels take it: two axes, and packed lines along one of them.

Kernels read operands of either major where they lie. What they do not take is put right here: an operand neither of
whose axes is packed is copied; a column-major C is computed as ``C^T = B^T A^T``; for any other C there is a packed one
in its place, to be copied into it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flashnumba.machine.arrays import Described, describe, empty_like_kind, host_view, is_contiguous
from flashnumba.stages.gemm.problem import A_MAJORS, B_MAJORS, Shape
from flashnumba.stages.host import packed_copy

__all__ = ["Operand", "Problem", "prepare"]

DOWN, ALONG = 0, 1
"""Axes along which lines may run: down the columns, along the rows."""


@dataclass(frozen=True)
class Operand:
    """An array with two axes and where it lies; ``found`` may be turned, which is only another way to see it."""

    array: Any
    found: Described

    @property
    def turned(self) -> Operand:
        """The transpose."""
        return Operand(self.array, replace(self.found, shape=self.found.shape[::-1], strides=self.found.strides[::-1]))

    def lead(self, axis: int) -> int:
        """Bytes from line to line if lines along ``axis`` are packed and follow one another upwards, else 0. Where
        there is one line, its length up to a multiple of 16 bytes."""
        itemsize = self.found.dtype.itemsize
        length, lines = self.found.shape[axis], self.found.shape[1 - axis]
        if length > 1 and self.found.strides[axis] != itemsize:
            return 0
        return max(0, self.found.strides[1 - axis]) if lines > 1 else -(-length * itemsize // 16) * 16

    @property
    def axis(self) -> int | None:
        """Along which axis its lines run; where both would do, the longer. None if there are no lines."""
        fit = [axis for axis in (ALONG, DOWN) if self.lead(axis)]
        return max(fit, key=lambda axis: self.found.shape[axis]) if fit else None

    def aligned(self, axis: int) -> int:
        """Bytes of the widest vector, 16 at most, that is aligned at the start of every line."""
        odd = 16 | self.found.pointer | self.lead(axis)
        return odd & -odd

    def packed(self, name: str) -> Operand:
        """Itself, or a copy if it has no lines.

        Raises:
            ValueError: it has none, and its library lends no way to copy.
        """
        if self.axis is not None:
            return self
        return Operand(*packed_copy(self.array, self.found, name, "neither its rows nor its columns are packed"))

    def view(self, axis: int) -> Any:
        """The array as ``found`` sees it, with strides that say lines along ``axis``; it shares the memory."""
        found, itemsize = self.found, self.found.dtype.itemsize
        strides = tuple(itemsize if at == axis else self.lead(axis) for at in (0, 1))
        if is_contiguous(found.shape, strides, itemsize):
            strides = (found.shape[1] * itemsize, itemsize)
        given = describe(self.array)
        if (found.shape, strides) == (given.shape, given.strides):
            return host_view(self.array) if found.device is None else self.array
        if found.device is None:
            plain = host_view(self.array)
            return np.lib.stride_tricks.as_strided(plain, found.shape, strides, writeable=plain.flags.writeable)
        if found.kind == "torch-cuda":
            return self.array.as_strided(found.shape, tuple(step // itemsize for step in strides))
        if found.kind == "cupy":
            return sys.modules["cupy"].lib.stride_tricks.as_strided(self.array, found.shape, strides)
        return replace(found, strides=strides, kind="numba")


@dataclass(frozen=True)
class Problem:
    """A product as kernels get it.

    Attributes:
        shape: what to plan for.
        arrays: a, b and c.
        copied: a C that is still to be written back, or None.
    """

    shape: Shape
    arrays: tuple[Any, Any, Any]
    copied: Any


def prepare(a: Operand, b: Operand, c: Operand, arch: str) -> Problem:
    """See a product as :class:`Shape` says, copying what must be; no axis has length 0.

    Raises:
        ValueError: an array has to be copied and its library lends no way.
    """
    a, b, copied = a.packed("a"), b.packed("b"), None
    if not c.lead(ALONG) and c.lead(DOWN):
        a, b, c = b.turned, a.turned, c.turned
    elif not c.lead(ALONG):
        copied = empty_like_kind(c.array, c.found.shape)
        c = Operand(copied, describe(copied, "out"))
    along_a, along_b = a.axis, b.axis
    assert along_a is not None and along_b is not None
    known = ((a, along_a), (b, along_b), (c, ALONG))
    itemsize = a.found.dtype.itemsize
    shape = Shape(
        a.found.element, *c.found.shape, a.found.shape[1], A_MAJORS[1 - along_a], B_MAJORS[1 - along_b],
        *(x.aligned(axis) for x, axis in known), *(x.lead(axis) // itemsize for x, axis in known), arch,
    )  # fmt: skip
    return Problem(shape, tuple(x.view(axis) for x, axis in known), copied)  # type: ignore[arg-type]
