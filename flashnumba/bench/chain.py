"""The kernels of the stage chained_gemm on a GPU, beside one another and torch's FlashAttention-2, in one run.

What is asked is what the hand-over of P costs, so all else is equal: tiles, schedule, shared memory a block, inputs.
``shared`` comes first, as the others' speed is stated beside it; then ``shuffles``, ``registers``, and ``detour``,
which is shared memory at its best (:mod:`flashnumba.tiles.chain`). Problems and operations are those of the attention
bench, and so is the judge.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from flashnumba.bench.attention import Problem
from flashnumba.bench.environment import environment as base_environment
from flashnumba.bench.environment import place, torch_on_gpu
from flashnumba.bench.heads import FA2, Judge, launches, peer, places, settings, shape_of
from flashnumba.bench.runner import Candidate, Clock, Measured, Runner, Size

__all__ = ["environment", "measure"]


def environment() -> dict[str, Any]:
    """What the figures depend on."""
    return base_environment("chain") | settings(torch_on_gpu("chain"))


def measure(
    problem: Problem, *, clock: Clock | None = None, until: float = float("inf"), machine: str = "cuda",
    report: Callable[[Size, Measured], None] = lambda size, measured: None,
) -> Size:  # fmt: skip
    """Measure FlashAttention-2 and the ways on one problem; arguments as of :func:`flashnumba.bench.attention.measure`.

    Raises:
        RuntimeError: no GPU, or no torch that uses it.
    """
    from flashnumba.stages.chained_gemm import mma
    from flashnumba.tiles.chain import DETOUR, WAYS

    torch, device, _ = place("chain", machine)
    random = torch.Generator(device=device).manual_seed(0)
    sizes = (problem.batch, problem.heads, problem.n, problem.d)
    dtype = getattr(torch, problem.element)
    q, k, v = (torch.randn(sizes, generator=random, device=device, dtype=dtype) for _ in range(3))
    size = Size(asdict(problem))
    runner = Runner(
        size, lambda seconds: {"flops_per_second": problem.flops / seconds}, {"of_fa2": FA2, "of_shared": WAYS[0]},
        clock=clock or Clock(), until=until, report=report,
    )  # fmt: skip
    rows = places(problem.batch, problem.heads, problem.n)
    judge = Judge(torch, q, k, v, problem.element, rows, causal=problem.causal)
    runner.run(peer(torch, FA2, [(q, k, v)], causal=problem.causal), judge)
    shape = shape_of(q, k, v, causal=problem.causal, machine=machine)
    for way in (*WAYS, DETOUR):
        plan = partial(mma.plan_chained, way, shape)
        runner.run(Candidate(way, partial(launches, plan, [(q, k, v)], causal=problem.causal, machine=machine)), judge)
    return size
