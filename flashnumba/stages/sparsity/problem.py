"""Host side of the sparse kernels: what they take beside q, k and v, and how a plan of them is launched.

Arguments are checked and seen as :mod:`flashnumba.stages.heads` does it. A plan may name arrays of :data:`ARRAYS`:
what one kernel leaves for the next, maps that are handed back, and masks that somebody gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from flashnumba.machine import launcher
from flashnumba.machine.arrays import empty_like_kind
from flashnumba.machine.numba import types
from flashnumba.stages import heads
from flashnumba.stages.heads import ARGUMENTS, MOST_BLOCKS, Heads, Launch, Plan, Shape
from flashnumba.stages.host import library_stream
from flashnumba.tiles.skip import FEWEST

__all__ = ["ARRAYS", "Launch", "Plan", "Shape", "bind", "limit_of", "prepared", "run", "signature"]

ARRAYS: dict[str, tuple[str, int]] = {
    **heads.SCRATCH,
    "indices": ("int32", 4), "counts": ("int32", 3), "tile_map": ("uint8", 4), "mask": ("uint8", 4),
    "pooled_q": ("float32", 4), "pooled_k": ("float32", 4), "same_q": ("float32", 3), "same_k": ("float32", 3),
}  # fmt: skip
"""Elements and rank by name; all packed."""
SCALARS = {"limit": np.float32, "kept": np.float32, "alike": np.float32, "sink": np.int32}


def limit_of(threshold: float) -> float:
    """The limit of :mod:`flashnumba.tiles.skip`: log2 of a threshold; -inf for 0, and for what no float32 tells from 0.

    Raises:
        ValueError: not in [0, 1).
    """
    if not 0 <= threshold < 1:
        raise ValueError(f"threshold is {threshold!r}; it must be at least 0 and below 1")
    limit = math.log2(threshold) if threshold > 0 else -math.inf
    return limit if limit > FEWEST else -math.inf


def signature(element: str, args: tuple[str, ...]) -> tuple[Any, ...]:
    """Numba types of a kernel's arguments, as :func:`flashnumba.stages.heads.signature`."""
    names = (*ARGUMENTS, *(heads.map_of(name) for name in "qkvo"))
    known = dict(zip(names, heads.signature(element, names), strict=True))
    known |= {name: types.Array(getattr(types, kind), rank, "C") for name, (kind, rank) in ARRAYS.items()}
    known |= {name: types.int32 if kind is np.int32 else types.float32 for name, kind in SCALARS.items()}
    return tuple(known[name] for name in args)


def prepared(launch: Launch, element: str, machine: str, device: int | None) -> Any:
    """A launch, compiled once for each kernel and device."""
    key = ("sparsity", launch.args, element, launch.shared, machine, device)
    cache = launch.kernel.cache
    if key not in cache:
        wanted = signature(element, launch.args)
        cache[key] = launcher.prepare(launch.kernel, wanted, shared=launch.shared, machine=machine, device=device)
    return cache[key]


def bind(problem: Heads, plan: Plan, given: Mapping[str, Any]) -> tuple[Callable[[], None], dict[str, Any]]:
    """A plan's launches on a problem of :func:`flashnumba.stages.heads.prepare_heads`, prepared.

    Args:
        given: scalars and arrays of :data:`ARRAYS` that the plan does not make.

    Returns:
        What launches them, any number of times; and the arrays that the plan made, by name. The results are the
        problem's, as ``problem.finish()`` hands them back.

    Raises:
        ValueError: more blocks than a grid has.
    """
    scalars = {"scale": np.float32(problem.scale), "causal": np.int32(problem.shape.causal)}
    known = {**problem.arrays, **scalars}
    known |= {name: SCALARS[name](value) if name in SCALARS else value for name, value in given.items()}
    for launch in plan.launches:
        if launch.grid > MOST_BLOCKS:
            raise ValueError(
                f"q has shape {problem.found.shape}, {launch.grid} blocks of work; a launch takes {MOST_BLOCKS}: "
                "split the batch"
            )
    made: dict[str, Any] = {}
    with library_stream(problem.found, problem.stream):
        for name, shape in plan.scratch.items():
            made[name] = empty_like_kind(problem.results[0], shape, ARRAYS[name][0])
    known |= made
    steps = [
        (
            prepared(launch, problem.shape.element, problem.machine, problem.device), launch.grid, launch.threads,
            tuple((known | maps)[name] for name in launch.args),
        )
        for launch in plan.launches
        for maps in (heads.maps_for(launch, known, problem.shape.element),)
    ]  # fmt: skip

    def call() -> None:
        for ready, grid, threads, args in steps:
            ready(grid, threads, args, problem.stream)

    return call, made


def run(problem: Heads, plan: Plan, given: Mapping[str, Any]) -> dict[str, Any]:
    """:func:`bind`, and launch once; returns the arrays that the plan made."""
    call, made = bind(problem, plan, given)
    with library_stream(problem.found, problem.stream):
        call()
    return made
