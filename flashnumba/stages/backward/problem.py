"""Host side of the backward kernels: check the arguments, launch a plan, hand back the gradients.

As :mod:`flashnumba.stages.heads`, whose shapes, checks and plans these are; what comes in addition is o, do, lse and
dlse, and three results. Kernels read all of them where they lie, whatever the strides; dq, dk and dv are new, packed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flashnumba.machine import gpu, launcher
from flashnumba.machine.arrays import Described, describe, empty_like_kind
from flashnumba.machine.numba import types
from flashnumba.machine.streams import stream_handle
from flashnumba.stages import heads
from flashnumba.stages.heads import EMULATED_MULTIPROCESSORS, MOST_BLOCKS, Launch, Plan, Planner, Shape
from flashnumba.stages.host import check_machine, finish, library_stream, machine_of, refuse_gradients
from flashnumba.tiles.elements import ITEMSIZE

__all__ = ["ROWS", "Backward", "Launch", "Plan", "Planner", "Shape", "backward", "check", "prepare_backward",
           "prepared", "rows_scratch", "signature"]  # fmt: skip

ROWS = ("delta", "origin", "bias")
"""What kernels leave for one another of each row, ``[B, H, M]`` float32: :mod:`flashnumba.stages.backward.rows`."""
INPUTS = ("do", "q", "k", "v", "o", "lse", "dlse")
RESULTS = ("dq", "dk", "dv")


@dataclass
class Backward:
    """The problem as kernels get it, ``arrays`` and scalars by name."""

    shape: Shape
    arrays: dict[str, Any]
    scale: float
    has_dlse: bool
    machine: str
    device: int | None
    stream: Any
    found: Described
    results: tuple[Any, Any, Any]

    def run(self, plan: Plan) -> tuple[Any, Any, Any]:
        """Launch a plan; returns (dq, dk, dv) as the caller gets them.

        Raises:
            ValueError: more blocks than a grid has.
        """
        known: dict[str, Any] = {
            **self.arrays, "scale": np.float32(self.scale), "causal": np.int32(self.shape.causal),
            "has_dlse": np.int32(self.has_dlse),
        }  # fmt: skip
        with library_stream(self.found, self.stream):
            for name, shape in plan.scratch.items():
                known[name] = empty_like_kind(self.results[0], shape, "float32")
            for launch in plan.launches:
                if launch.grid > MOST_BLOCKS:
                    raise ValueError(
                        f"q has shape {self.found.shape}, {launch.grid} blocks of work; a launch takes {MOST_BLOCKS}: "
                        "split the batch"
                    )
                ready = prepared(launch, self.shape.element, self.machine, self.device)
                ready(launch.grid, launch.threads, tuple(known[name] for name in launch.args), self.stream)
        return self.finish()

    def finish(self) -> tuple[Any, Any, Any]:
        """The results as the caller gets them."""
        dq, dk, dv = (finish(result, self.found, self.stream) for result in self.results)
        return dq, dk, dv


def rows_scratch(shape: Shape) -> dict[str, tuple[int, ...]]:
    """The scratch that every plan has."""
    return dict.fromkeys(ROWS, (shape.batch, shape.heads, shape.m))


def signature(element: str, args: tuple[str, ...]) -> tuple[Any, ...]:
    """Numba types of a kernel's arguments: arrays of any strides, scratch packed."""
    plain = {"float32": types.float32, "float16": types.float16, "bfloat16": types.uint16}[element]
    known = {name: types.Array(plain, 4, "A") for name in ("q", "k", "v", "o", "do", *RESULTS)}
    known |= {name: types.Array(types.float32, 3, "A") for name in ("lse", "dlse")}
    known |= {name: types.Array(types.float32, 3, "C") for name in ROWS}
    known |= {"sums": types.Array(types.float32, 1, "C"), "scale": types.float32}
    known |= {"causal": types.int32, "has_dlse": types.int32}
    return tuple(known[a] for a in args)


def prepared(launch: Launch, element: str, machine: str, device: int | None) -> Any:
    """A launch, compiled once for each kernel and device."""
    key = ("backward", launch.args, element, launch.shared, machine, device)
    cache = launch.kernel.cache
    if key not in cache:
        wanted = signature(element, launch.args)
        cache[key] = launcher.prepare(launch.kernel, wanted, shared=launch.shared, machine=machine, device=device)
    return cache[key]


def backward(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, plan: Planner, *, causal: bool = False,
    scale: float | None = None, dlse: Any = None, machine: str = "auto", stream: Any = None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """The gradients of attention by the kernels of one plan.

    Args:
        do: the gradient of o, ``[B, H, M, D]``, ``[H, M, D]`` or ``[M, D]`` as q, any strides.
        q, k, v, causal, scale, machine, stream: as :func:`flashnumba.stages.heads.forward`.
        o, lse: what the forward gave for them: of q's shape, and ``[B, H, M]`` float32.
        plan: of the stage's ``PLANS``.
        dlse: the gradient of lse, ``[B, H, M]`` float32; None is zero.

    Returns:
        (dq, dk, dv): new packed arrays of q's kind, in the shapes of q, k and v. A row that sees no key has dq = 0.

    Raises:
        TypeError, ValueError: an argument does not fit, before anything is launched.
    """
    made = prepare_backward(
        do, q, k, v, o, lse, causal=causal, scale=scale, dlse=dlse, machine=machine, stream=stream
    )  # fmt: skip
    return made.run(plan(made.shape))


def prepare_backward(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, *, causal: bool, scale: float | None, dlse: Any, machine: str,
    stream: Any,
) -> Backward:  # fmt: skip
    """Check the arguments of :func:`backward` and allocate its results."""
    check_machine(machine)
    given = {"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse} | ({} if dlse is None else {"dlse": dlse})
    refuse_gradients(**given)
    found = {name: describe(array, name) for name, array in given.items()}
    shape = check(found, causal=causal)
    scale = heads.check_scale(scale, shape.d)
    if stream is not None:
        stream_handle(stream)
    of_q = found["q"]
    machine, arch = machine_of(machine, of_q, "q")
    for name, array in given.items():
        if found[name].kind == "jax" and of_q.device is not None:
            array.block_until_ready()
    with library_stream(of_q, stream):
        results = tuple(empty_like_kind(q, found[name].shape) for name in "qkv")
    for name, result in zip(RESULTS, results, strict=True):
        given[name], found[name] = result, replace(describe(result, name), readonly=False)
    arrays = {n: heads._view(given[n], found[n], 3 if n in ("lse", "dlse") else 4) for n in given}
    arrays.setdefault("dlse", arrays["lse"])  # a kernel takes some array, and is told not to look
    multiprocessors = EMULATED_MULTIPROCESSORS if machine == "emulator" else gpu.multiprocessors(of_q.device)
    shape = replace(shape, arch=arch, multiprocessors=multiprocessors)
    return Backward(shape, arrays, scale, dlse is not None, machine, of_q.device, stream, of_q, results)


def check(found: dict[str, Described], *, causal: bool) -> Shape:
    """The shape of a problem; its architecture and multiprocessors are the emulator's.

    Args:
        found: do, q, k, v, o, lse, and dlse if there is one.

    Raises:
        TypeError: elements that no kernel takes, or that do not go with q's; causal is no bool.
        ValueError: shapes that do not fit together, or arrays that lie apart.
    """
    q, k, v = (found[name] for name in "qkv")
    shape = heads.check(q, k, v, causal=causal)
    for name, array in found.items():
        if name in ("q", "k", "v"):
            continue
        element, wanted = (q.element, q.shape) if name in ("o", "do") else ("float32", q.shape[:-1])
        why = "q's" if name in ("o", "do") else "of lse"
        if array.element != element:
            raise TypeError(f"{name} has elements of type {array.element}; they must be {why}, {element}")
        if array.shape != wanted:
            of_rows = "" if name in ("o", "do") else " without its last axis"
            raise ValueError(f"{name} has shape {array.shape} and q {q.shape}; it must be as q{of_rows}: {wanted}")
        if array.device != q.device:
            places = ["in host memory" if d is None else f"on cuda:{d}" for d in (array.device, q.device)]
            raise ValueError(f"{name} is {places[0]} and q {places[1]}; they must be in one place")
    return replace(shape, vector=vector_of(found))


def vector_of(found: dict[str, Described]) -> int:
    """As :attr:`flashnumba.stages.heads.Shape.vector`, for o and do as well; dq, dk and dv are packed."""
    q = found["q"]
    row = q.shape[-1] * ITEMSIZE[q.element]
    return min(heads.widest(*(found[name] for name in ("q", "k", "v", "o", "do"))), row & -row)
