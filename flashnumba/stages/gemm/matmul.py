"""Host side of the product: check A, B and C, choose a kernel, launch it, hand C back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from flashnumba.machine import launcher
from flashnumba.machine.arrays import Described, describe, empty_like_kind, host_view
from flashnumba.machine.streams import stream_handle
from flashnumba.stages.again import kind
from flashnumba.stages.gemm import mma, simt, wgmma
from flashnumba.stages.gemm.lines import Operand, prepare
from flashnumba.stages.gemm.problem import Plan, Shape
from flashnumba.stages.host import (
    check_machine,
    finish,
    library_stream,
    machine_of,
    overlaps_itself,
    refuse_gradients,
    write_back,
)
from flashnumba.tiles.elements import ITEMSIZE

__all__ = ["KERNELS", "PLANS", "choose", "matmul"]

PLANS: dict[str, Callable[[Shape], Plan]] = {**simt.PLANS, **mma.PLANS, **wgmma.PLANS}
KERNELS = tuple(PLANS)
LONGEST = 2**31 - 1024
"""Rows, columns or steps of k: kernels count them in 32 bits."""


def choose(shape: Shape) -> str:
    """What ``kernel="auto"`` means: the first that takes the shape of wgmma, mma, and the register tile."""
    return next(name for name in ("wgmma", "mma", "register_tile") if takes(name, shape))


def takes(name: str, shape: Shape) -> bool:
    """Whether a kernel takes a shape."""
    try:
        PLANS[name](shape)
    except ValueError:
        return False
    return True


def matmul(
    a: Any, b: Any, out: Any = None, *, kernel: str = "auto", machine: str = "auto", stream: Any = None
) -> Any:  # fmt: skip
    """The product ``A B``.

    Args:
        a, b: ``[M, K]`` and ``[K, N]``, both float16, bfloat16 or float32, of any size and any strides: NumPy, torch,
            CuPy, JAX, numba, or what offers ``__cuda_array_interface__`` or DLPack. Rows or columns may be packed; an
            operand of which neither are, or whose lines do not follow one another upwards, is copied first.
        out: where to write, ``[M, N]`` of the same element and device, apart from ``a`` and ``b``. By default a new
            packed array of ``a``'s kind.
        kernel: one of :data:`KERNELS`, or ``"auto"``: see :func:`choose`.
        machine: ``"cuda"``, ``"emulator"``, or ``"auto"``: where the arrays are, else a GPU if there is one.
        stream: for a GPU; None follows the current stream of ``a``'s library.

    Returns:
        ``out``: summed in float32 and rounded once. With K = 0 it is zero.

    Raises:
        TypeError, ValueError: an argument does not fit, or the kernel asked for does not take it; before anything is
            launched.
    """
    key = RECIPES.key(a, b, out, kernel, machine, stream)
    known = RECIPES.known.get(key)
    if known is not None:
        return known(a, b)
    if not isinstance(kernel, str) or (kernel != "auto" and kernel not in KERNELS):
        raise ValueError(f"kernel is {kernel!r}; it must be 'auto' or one of {', '.join(KERNELS)}")
    check_machine(machine)
    refuse_gradients(a=a, b=b, out=out)
    found_a, found_b = describe(a, "a"), describe(b, "b")
    check_operands(found_a, found_b)
    if stream is not None:
        stream_handle(stream)
    machine, arch = machine_of(machine, found_a, "a")
    for array, found in ((a, found_a), (b, found_b)):
        if found.kind == "jax" and found.device is not None:
            array.block_until_ready()
    size = (found_a.shape[0], found_b.shape[1])
    with library_stream(found_a, stream):
        result = empty_like_kind(a, size) if out is None else out
        target = describe(result, "out")
        if out is None:
            target = replace(target, readonly=False)
        else:
            check_out(target, size, found_a, found_b)
        if 0 not in size and found_a.shape[1] == 0:
            plan = simt.plan_naive(Shape.packed(found_a.element, *size, 1, arch=arch))  # it adds up no steps
            arrays = tuple(host_view(x) if found_a.device is None else x for x in (a, b, result))
            run(plan, arrays, machine, stream)
        elif 0 not in size:
            problem = prepare(Operand(a, found_a), Operand(b, found_b), Operand(result, target), arch)
            plan = PLANS[choose(problem.shape) if kernel == "auto" else kernel](problem.shape)
            run(plan, problem.arrays, machine, stream)
            if problem.copied is not None:
                write_back(result, problem.copied)
            RECIPES.add(key, plan, problem.arrays, (a, b, result))
    return finish(result, found_a, stream, given=out is not None)


def check_operands(a: Described, b: Described) -> None:
    """
    Raises:
        TypeError: elements that no kernel takes, or not the same in both.
        ValueError: shapes that do not fit together, or arrays that lie apart.
    """
    for name, array in (("a", a), ("b", b)):
        if array.element not in ITEMSIZE:
            raise TypeError(f"{name} has elements of type {array.element}; matmul takes {', '.join(ITEMSIZE)}")
        if len(array.shape) != 2:
            raise ValueError(f"{name} has shape {array.shape}; it must have two axes: a [M, K], b [K, N]")
        if max(array.shape) > LONGEST:
            raise ValueError(f"{name} has shape {array.shape}; each axis must be at most {LONGEST} long")
    if b.element != a.element:
        raise TypeError(f"b has elements of type {b.element} and a of {a.element}; they must be the same")
    if b.shape[0] != a.shape[1]:
        raise ValueError(f"b has shape {b.shape} and a {a.shape}; b must have as many rows as a has columns")
    if b.device != a.device:
        raise ValueError(f"b is {place(b)} and a {place(a)}; they must be in one place")


def check_out(out: Described, size: tuple[int, int], a: Described, b: Described) -> None:
    """
    Raises:
        TypeError: ``out`` has other elements.
        ValueError: it is of another shape, elsewhere, read-only, or not apart from the operands and itself.
    """
    if out.element != a.element:
        raise TypeError(f"out has elements of type {out.element}; it must have those of a, {a.element}")
    if out.shape != size:
        raise ValueError(f"out has shape {out.shape}; the product of {a.shape} and {b.shape} is {size}")
    if out.device != a.device:
        raise ValueError(f"out is {place(out)} and a {place(a)}; they must be in one place")
    if out.readonly:
        raise ValueError("out is read-only; it must be writable")
    if overlaps_itself(out):
        raise ValueError(
            f"out has strides {out.strides}, so several elements lie in one place; it must be a full array"
        )
    for name, other in (("a", a), ("b", b)):
        if out.span[0] < other.span[1] and other.span[0] < out.span[1]:
            raise ValueError(f"out and {name} share memory; the product cannot be computed in place")


def place(array: Described) -> str:
    return "in host memory" if array.device is None else f"on cuda:{array.device}"


def run(plan: Plan, arrays: tuple[Any, Any, Any], machine: str, stream: Any) -> None:
    """Launch a plan on (a, b, c)."""
    args = plan.arguments(*arrays)
    launcher.launch(plan.kernel, plan.grid, plan.threads, args, shared=plan.shared, machine=machine, stream=stream)


@dataclass(frozen=True)
class Recipe:
    """A prepared launch for torch tensors like those of an earlier call, with a new result."""

    ready: Any
    plan: Plan
    size: tuple[int, int]

    def __call__(self, a: Any, b: Any) -> Any:
        c = a.new_empty(self.size)
        self.ready(self.plan.grid, self.plan.threads, self.plan.arguments(a, b, c))
        return c


class Recipes:
    """What was found and planned depends on shapes, strides, types and alignment only: a second call looks it up."""

    capacity = 1024

    def __init__(self) -> None:
        self.known: dict[Any, Recipe] = {}

    @staticmethod
    def key(a: Any, b: Any, out: Any, kernel: str, machine: str, stream: Any) -> Any:
        """What a recipe depends on; None for arguments that are looked at each time."""
        if out is not None or stream is not None or machine == "emulator":
            return None
        if not (isinstance(kernel, str) and isinstance(machine, str)):
            return None
        of_a, of_b = kind(a), kind(b)
        return None if of_a is None or of_b is None else (kernel, machine, of_a, of_b)

    def add(self, key: Any, plan: Plan, seen: tuple[Any, Any, Any], given: tuple[Any, Any, Any]) -> None:
        """Keep a plan that worked on the caller's tensors themselves."""
        if key is None or any(x is not y for x, y in zip(seen, given, strict=True)):
            return
        a, _, c = given
        args = plan.arguments(*given)
        ready = launcher.prepare(plan.kernel, args, shared=plan.shared, machine="cuda", device=a.get_device())
        if len(self.known) >= self.capacity:
            self.known.clear()
        self.known[key] = Recipe(ready, plan, tuple(c.shape))


RECIPES = Recipes()
