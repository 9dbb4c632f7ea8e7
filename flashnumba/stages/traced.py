"""Run an attention kernel that leaves marks, for its timeline: by a GPU's clocks, or on the emulator and by a replay.

The same kernel source runs on both. Of a GPU the last of a few launches counts, when the code has been loaded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from flashnumba.machine import gpu
from flashnumba.machine.timeline.costs import Costs, costs_of
from flashnumba.machine.timeline.record import Record
from flashnumba.machine.timeline.replay import replay
from flashnumba.machine.timeline.sources import record_of_clocks, record_of_replay
from flashnumba.machine.timeline.trace import empty_trace
from flashnumba.stages import heads
from flashnumba.stages.heads import Launch, Planner

__all__ = ["record"]

MOST_BLOCKS = 512
"""Blocks that are traced; the others run without marks."""
MARKS = 4096
"""Marks a warp that find room."""
LAUNCHES = 3
"""On a GPU; the last one counts."""


def record(
    name: str, planner: Planner, q: Any, k: Any, v: Any, *, causal: bool = False, scale: float | None = None,
    machine: str = "auto", costs: Costs | None = None, multiprocessors: int | None = None, resident: int = 1,
) -> Record:  # fmt: skip
    """Attention by a traced kernel, for the sake of its timeline.

    Args:
        name: what the record calls the kernel.
        planner: of a stage's ``TRACED``.
        q, k, v, causal, scale: as :func:`flashnumba.stages.heads.forward`; NumPy arrays.
        machine: ``"cuda"``, ``"emulator"``, or ``"auto"``: a GPU if there is one.
        costs: of the emulator's replay, which also says for which architecture the kernel is planned; None: sm_90's.
        multiprocessors, resident: as :func:`flashnumba.machine.timeline.replay.replay`, for the emulator.

    Returns:
        Spans of the first 512 blocks.

    Raises:
        TypeError, ValueError: an argument does not fit, before anything is launched.
    """
    problem = heads.prepare_heads(q, k, v, causal=causal, scale=scale, machine=machine, stream=None)
    if problem.device is not None:
        raise ValueError(f"q is on cuda:{problem.device}; a timeline takes arrays in host memory")
    shape, emulated = problem.shape, problem.machine == "emulator"
    costs = costs or costs_of("90")
    if emulated:
        shape = replace(shape, arch="90a" if costs.arch == "90" else costs.arch)
    if 0 in (shape.batch, shape.heads, shape.m):
        raise ValueError(f"q has shape {np.shape(q)}; a timeline needs at least one row")
    plan = planner(shape)
    if len(plan.launches) != 1 or "trace" not in plan.launches[0].args or plan.scratch:
        raise ValueError(f"{name} cannot be traced; its plan must be one launch with an argument trace and no scratch")
    launch = plan.launches[0]
    known = {**problem.arrays, "scale": np.float32(problem.scale), "causal": np.int32(shape.causal)}
    blocks = min(launch.grid, MOST_BLOCKS)
    about = {"kernel": name, "size": _size(shape)}
    if emulated:
        trace = empty_trace(blocks, launch.threads // 32, MARKS)
        events = _emulate(launch, {**known, "trace": trace}, shape.arch)
        replayed = replay(events, costs, multiprocessors=multiprocessors, resident=resident)
        return record_of_replay(trace, replayed, costs, **about)
    ready = heads.prepared(launch, shape.element, "cuda", problem.device)
    for _ in range(LAUNCHES):
        trace = empty_trace(blocks, launch.threads // 32, MARKS)
        ready(launch.grid, launch.threads, tuple({**known, "trace": trace}[arg] for arg in launch.args), None)
    return record_of_clocks(
        trace, device=gpu.device_name(), arch=shape.arch, ghz=gpu.clock_rate() / 1e6, **about
    )  # fmt: skip


def _emulate(launch: Launch, known: dict[str, Any], arch: str) -> Any:
    from flashnumba.machine.emulator.events import record_events

    args = tuple(known[name] for name in launch.args)
    # Whether the kernel is right is for its tests to say, with checks.
    return record_events(
        launch.kernel, launch.grid, launch.threads, args, shared=launch.shared, arch=arch, checks=False
    ).warps


def _size(shape: heads.Shape) -> str:
    several = shape.batch * shape.heads
    causal = " causal" if shape.causal else ""
    return f"{f'{several}x' if several > 1 else ''}{shape.m}x{shape.n}x{shape.d} {shape.element}{causal}"
