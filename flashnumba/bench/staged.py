"""The eight kernels of the stage staged_buffers on a GPU, beside torch's FlashAttention-2, in one run.

They differ in slots alone, so what is asked is what a slot more, or a slot a quarter as large, costs or brings. Beside
the time stand a block's shared memory, the blocks a multiprocessor that :mod:`flashnumba.machine.occupancy` predicts
from the registers that the driver reports, and those that the driver itself says it keeps. ``tile_2`` comes first, as
the others' speed is stated beside it. Problems and operations are those of the attention bench, and so is the judge.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import asdict
from functools import partial
from typing import Any

from flashnumba.bench.attention import Problem
from flashnumba.bench.environment import environment as base_environment
from flashnumba.bench.environment import place, torch_on_gpu
from flashnumba.bench.heads import FA2, Judge, launches, peer, places, settings, shape_of
from flashnumba.bench.planned import kernels_of
from flashnumba.bench.runner import Candidate, Clock, Measured, Runner, Size
from flashnumba.machine import gpu
from flashnumba.machine.occupancy import budget
from flashnumba.stages import heads
from flashnumba.stages.heads import Plan, Shape

__all__ = ["BASE", "environment", "held", "kernels", "measure"]

BASE = "tile_2"
"""Two whole tiles: what four quarters are to be no slower than."""
FIGURES = ("shared", "registers", "predicted_blocks", "blocks")
"""What is told of a kernel besides its times: bytes, registers a thread, and blocks a multiprocessor."""


def kernels() -> tuple[str, ...]:
    """Names of the kernels, :data:`BASE` first."""
    names = kernels_of("staged_buffers")
    return (BASE, *(name for name in names if name != BASE))


def environment() -> dict[str, Any]:
    """What the figures depend on."""
    return base_environment("staged") | settings(torch_on_gpu("staged"))


def held(plan: Plan, shape: Shape, machine: str, device: int | None) -> dict[str, float | None]:
    """:data:`FIGURES` of a plan's kernel; what only a driver knows is None on the emulator."""
    (launch,) = plan.launches
    found: dict[str, float | None] = dict.fromkeys(FIGURES) | {"shared": launch.shared}
    if machine == "emulator":
        return found
    ready = heads.prepared(launch, shape.element, machine, device)
    driver = gpu.bindings()
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS
    with gpu.on_device(ready.device):
        registers = int(gpu.call(driver.cuFuncGetAttribute, attribute, ready.function))
    predicted = budget(shape.arch, threads=launch.threads, registers=registers, shared=launch.shared, barriers=1)
    each = ready.resident_blocks(launch.threads) // gpu.multiprocessors(ready.device)
    return found | {"registers": registers, "predicted_blocks": predicted.blocks, "blocks": each}


def measure(
    problem: Problem, *, names: Collection[str] = (), wide: bool = False, clock: Clock | None = None,
    until: float = float("inf"), machine: str = "cuda",
    report: Callable[[Size, Measured], None] = lambda size, measured: None,
) -> Size:  # fmt: skip
    """Measure FlashAttention-2 and the kernels on one problem; arguments as of
    :func:`flashnumba.bench.attention.measure`.

    Raises:
        RuntimeError: no GPU, or no torch that uses it.
    """
    from flashnumba.stages.staged_buffers import mma

    torch, device, _ = place("staged", machine)
    random = torch.Generator(device=device).manual_seed(0)
    sizes = (problem.batch, problem.heads, problem.n, problem.d)
    dtype = getattr(torch, problem.element)
    q, k, v = (torch.randn(sizes, generator=random, device=device, dtype=dtype) for _ in range(3))
    size = Size(asdict(problem))
    runner = Runner(
        size, lambda seconds: {"flops_per_second": problem.flops / seconds}, {"of_fa2": FA2, "of_base": BASE},
        clock=clock or Clock(), until=until,
    )  # fmt: skip
    rows = places(problem.batch, problem.heads, problem.n)
    judge = Judge(torch, q, k, v, problem.element, rows, causal=problem.causal)
    shape = shape_of(q, k, v, causal=problem.causal, machine=machine)

    def told(measured: Measured, plan: Callable[[], Plan] | None) -> None:
        """Add what does not depend on time, and report."""
        measured.figures |= dict.fromkeys(FIGURES)
        if plan is not None and measured.seconds is not None:
            measured.figures |= held(plan(), shape, machine, q.device.index)
        report(size, measured)

    told(runner.run(peer(torch, FA2, [(q, k, v)], causal=problem.causal), judge), None)
    plans = {name: partial(mma.PLANS[name], shape) for name in kernels() if not names or name in names}
    if wide:
        plans |= {name: partial(_as_it_is, plan) for name, plan in mma.variants(shape).items()}
    for name, plan in plans.items():
        prepare = partial(launches, plan, [(q, k, v)], causal=problem.causal, machine=machine)
        told(runner.run(Candidate(name, prepare), judge), plan)
    return size


def _as_it_is(plan: Plan) -> Plan:
    return plan
