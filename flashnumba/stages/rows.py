"""Host side of kernels that work on the rows of an array: check it, see it as [rows, columns], launch, hand back.

The last axis is a row. Leading axes become one axis of rows where that needs no copy, that is where they lie at one
distance from each other; otherwise the array is copied first, and a result that is to go to such an array is copied
back.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Any

from flashnumba.machine import launcher
from flashnumba.machine.arrays import Described, describe, empty_like_kind, host_view, is_contiguous
from flashnumba.machine.function import Kernel
from flashnumba.machine.numba import types
from flashnumba.machine.streams import stream_handle
from flashnumba.stages.host import (
    EMULATED_ARCH,
    check_machine,
    finish,
    library_stream,
    machine_of,
    overlaps_itself,
    packed_copy,
    refuse_gradients,
    write_back,
    zeros,
)
from flashnumba.tiles.elements import ITEMSIZE

__all__ = ["Rows", "Shape", "prepare_rows", "signature", "widest"]


@dataclass(frozen=True)
class Shape:
    """What decides which kernel is best.

    Attributes:
        element: float16, bfloat16 or float32.
        rows, cols: of the array, all leading axes in one.
        vector: bytes of the widest load that is aligned in every row of input and output; one element's, where columns
            do not lie side by side.
        arch: compute capability it runs on.
        in_place: input and output are the same memory.
    """

    element: str
    rows: int
    cols: int
    vector: int
    arch: str = EMULATED_ARCH
    in_place: bool = False

    @property
    def size(self) -> int:
        return self.rows * self.cols


@dataclass
class Rows:
    """An input and an output as kernels get them: ``x`` and ``out`` are two-dimensional, of the same shape."""

    shape: Shape
    x: Any
    out: Any
    machine: str
    device: int | None
    stream: Any
    found: Described
    _result: Any = None
    _copied: Any = None
    packed: bool = False
    given: bool = False
    planned: tuple[Kernel, int, int, int, int] | None = None

    def launch(self, kernel: Kernel, grid: int, threads: int, *, shared: int = 0, scratch: int = 0) -> None:
        """Launch ``kernel(x, out)``, or ``kernel(x, out, words)`` with ``scratch`` uint64 zeros."""
        args = (self.x, self.out, self.zeros(scratch)) if scratch else (self.x, self.out)
        with self.ordered():
            launcher.launch(kernel, grid, threads, args, shared=shared, machine=self.machine, stream=self.stream)
        self.planned = (kernel, grid, threads, shared, scratch)

    @property
    def direct(self) -> bool:
        """Whether kernels work on the caller's torch tensors themselves, on a GPU."""
        return self.found.kind == "torch-cuda" and self.device is not None and not self.packed and self._copied is None

    def finish(self) -> Any:
        """What the caller gets."""
        if self._copied is not None:
            with self.ordered():
                write_back(self._result, self._copied)
        return finish(self._result, self.found, self.stream, given=self.given)

    def ordered(self) -> Any:
        """A context in which the array library's own work goes to the launch's stream too."""
        return library_stream(self.found, self.stream)

    def zeros(self, words: int) -> Any:
        """``words`` uint64 zeros beside the arrays, zeroed on the launch's stream."""
        with self.ordered():
            return zeros(words, self.found)


def signature(element: str, *more: Any) -> tuple[Any, ...]:
    """Numba types of ``(x, out, *more)`` for packed arrays."""
    plain = {"float32": types.float32, "float16": types.float16, "bfloat16": types.uint16}[element]
    return (types.Array(plain, 2, "C"), types.Array(plain, 2, "C"), *more)


def prepare_rows(
    x: Any, out: Any, kernel: str, kernels: Sequence[str], machine: str, stream: Any
) -> Rows:  # fmt: skip
    """Check the arguments of a function over rows, and see ``x`` and ``out`` as rows.

    Raises:
        TypeError: ``x`` or ``out`` is no array, or of other elements than float16, bfloat16, float32.
        ValueError: no axis; ``out`` does not match, is read-only or overlaps ``x`` in part; no such kernel or machine.
    """
    if not isinstance(kernel, str) or (kernel != "auto" and kernel not in kernels):
        raise ValueError(f"kernel is {kernel!r}; it must be 'auto' or one of {', '.join(kernels)}")
    check_machine(machine)
    given = out is not None
    refuse_gradients(x=x, out=out)
    found = describe(x, "x")
    if found.element not in ITEMSIZE:
        raise TypeError(f"x has elements of type {found.element}; softmax takes {', '.join(ITEMSIZE)}")
    if not found.shape:
        raise ValueError("x has no axes; softmax is over the last one, so x must have at least one, e.g. x.reshape(1)")
    if stream is not None:
        stream_handle(stream)
    device = found.device
    machine, arch = machine_of(machine, found, "x")
    if found.kind == "jax" and device is not None:
        x.block_until_ready()
    with library_stream(found, stream):
        if out is None:
            out = empty_like_kind(x, found.shape)
            target = replace(describe(out, "out"), readonly=False)
        else:
            target = describe(out, "out")
            _check_out(found, target)
        result, copied, packed = out, None, False
        if 0 in found.shape:
            shape = Shape(found.element, 0, 0, ITEMSIZE[found.element], arch)
            return Rows(shape, x, out, machine, device, stream, found, result, given=given)
        if _collapsed(found) is None:
            why = "its rows do not lie at one distance from each other"
            x, found = packed_copy(x, found, "x", why)
            packed = True
        if _collapsed(target) is None:
            out = copied = empty_like_kind(x, found.shape)
            target = describe(out, "out")
        source, sink = _collapsed(found), _collapsed(target)
        assert source is not None and sink is not None
        rows, cols = prod(found.shape[:-1]), found.shape[-1]
        in_place = target.pointer == found.pointer
        shape = Shape(found.element, rows, cols, widest(found, source, target, sink, rows, cols), arch, in_place)
        views = (_view(x, found, rows, cols, source), _view(out, target, rows, cols, sink))
    return Rows(shape, *views, machine, device, stream, found, result, copied, packed, given)


def _check_out(x: Described, out: Described) -> None:
    if out.element != x.element:
        raise TypeError(f"out has elements of type {out.element}; it must have those of x, {x.element}")
    if out.shape != x.shape:
        raise ValueError(f"out has shape {out.shape}; it must have that of x, {x.shape}")
    if out.device != x.device:
        places = ["in host memory" if d is None else f"on cuda:{d}" for d in (out.device, x.device)]
        raise ValueError(f"out is {places[0]} and x {places[1]}; they must be in one place")
    if out.readonly:
        raise ValueError("out is read-only; it must be writable")
    if overlaps_itself(out):
        raise ValueError(
            f"out has strides {out.strides}, so several elements lie in one place; it must be a full array"
        )
    same = out.pointer == x.pointer and out.strides == x.strides
    if not same and _overlap(x, out):
        raise ValueError("out overlaps x in part; it must be x itself or lie apart from it")


def _overlap(a: Described, b: Described) -> bool:
    """Whether two arrays of one shape may share bytes. Windows of one wider array, side by side, do not."""
    (a_low, a_high), (b_low, b_high) = a.span, b.span
    if a_high <= b_low or b_high <= a_low:
        return False
    if a.strides != b.strides:
        return True
    # Every element lies at a multiple of ``step`` from the first, within ``reach`` bytes of one row.
    step = 0
    for n, stride in zip(a.shape[:-1], a.strides[:-1], strict=True):
        step = gcd(step, stride) if n > 1 else step
    reach = (a.shape[-1] - 1) * abs(a.strides[-1]) + a.dtype.itemsize
    if step == 0 or reach > step:
        return True
    apart = (b_low - a_low) % step
    return not reach <= apart <= step - reach


def _collapsed(array: Described) -> tuple[int, int] | None:
    """(bytes between rows, bytes between columns) if all leading axes make up rows at one distance; None if not."""
    distance, length = 0, 1  # of the rows seen so far, from the last axis on
    for n, stride in reversed(list(zip(array.shape[:-1], array.strides[:-1], strict=True))):
        if n == 1:
            continue
        if length == 1:
            distance = stride
        elif stride != distance * length:
            return None
        length *= n
    return distance, array.strides[-1]


def widest(
    x: Described, x_steps: tuple[int, int], out: Described, out_steps: tuple[int, int], rows: int, cols: int
) -> int:
    """Bytes of the widest vector, 16 down to one element, that lies at multiples of its size in every row of both."""
    itemsize = x.dtype.itemsize
    if cols > 1 and (x_steps[1] != itemsize or out_steps[1] != itemsize):
        return itemsize
    odd = x.pointer | out.pointer | cols * itemsize
    if rows > 1:
        odd |= x_steps[0] | out_steps[0]
    return min(16, odd & -odd)


def _view(array: Any, found: Described, rows: int, cols: int, steps: tuple[int, int]) -> Any:
    """The array as ``[rows, cols]``, sharing its memory."""
    if found.device is None:
        return host_view(array).reshape(rows, cols)
    itemsize = found.dtype.itemsize
    if is_contiguous((rows, cols), steps, itemsize):
        steps = (cols * itemsize, itemsize)
    if found.kind == "torch-cuda":
        return array.as_strided((rows, cols), tuple(step // itemsize for step in steps))
    if found.kind == "cupy":
        return sys.modules["cupy"].lib.stride_tricks.as_strided(array, (rows, cols), steps)
    return replace(found, shape=(rows, cols), strides=steps, kind="numba")
