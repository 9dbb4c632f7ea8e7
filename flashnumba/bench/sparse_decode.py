"""Decoding that leaves out tiles beside the dense kernel ``split``, in one run: as :mod:`flashnumba.bench.sparsity`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from flashnumba.bench.decode import GraphClock
from flashnumba.bench.decode import Problem as Decode
from flashnumba.bench.environment import place
from flashnumba.bench.heads import Judge, Place, launches
from flashnumba.bench.runner import Candidate, Clock, Measured, Runner, Size
from flashnumba.bench.sparse_judges import DecodeJudge
from flashnumba.bench.sparsity import TARGETS, search, shares
from flashnumba.data.structured import structured
from flashnumba.stages.flash_forward.split import plan_split
from flashnumba.stages.heads import prepare_heads
from flashnumba.stages.sparsity import problem
from flashnumba.stages.sparsity.decode import plan_decode

__all__ = ["SPLIT", "DecodeProblem", "measure_decode"]

SPLIT = "flash_forward.split"
DRAWN = 4
"""Sequences that are drawn."""


@dataclass(frozen=True)
class DecodeProblem(Decode):
    """Sizes of one step, float16."""

    element: str = "float16"
    batch: int = 16
    n: int = 16384


def measure_decode(
    step: DecodeProblem, *, targets: Sequence[float] = TARGETS, clock: Clock | None = None, until: float = float("inf"),
    machine: str = "cuda", report: Callable[[Size, Measured], None] = lambda size, measured: None,
) -> Size:  # fmt: skip
    """Measure decoding: the dense kernel ``split`` and the one that loads V only where it is needed.

    Of more than four sequences each fifth is a copy of the first and so on, as to draw them takes long.
    """
    torch, device, _ = place("sparsity", machine)
    data = structured(step.n, step.d, heads=step.heads, kv_heads=step.kv_heads, batch=min(DRAWN, step.batch), m=1)
    q, k, v = (
        torch.from_numpy(x).to(device)[torch.arange(step.batch, device=device) % len(x)].contiguous() for x in data
    )
    make = partial(prepare_heads, q, k, v, causal=False, scale=None, machine=machine, stream=None)
    shape = make().shape
    size = Size({**asdict(step), "nbytes": step.nbytes})
    runner = Runner(
        size, lambda seconds: {"bytes_per_second": step.nbytes / seconds}, {"of_dense": SPLIT},
        clock=clock or GraphClock(), until=until,
    )  # fmt: skip
    dense = Candidate(SPLIT, partial(launches, partial(plan_split, shape), [(q, k, v)], machine=machine))
    heads = slice(0, shape.group)
    judge = Judge(torch, q, k, v, step.element, [Place(0, 0, heads, slice(0, 1))])
    report(size, runner.run(dense, judge))
    for target in targets:
        limit = search(make, shape, plan_decode, target)
        tile_map = problem.run(make(), plan_decode(shape, noted=True), {"limit": limit})["tile_map"]
        fresh = make()
        call, _ = problem.bind(fresh, plan_decode(shape), {"limit": limit})

        def timed(call: Callable[[], None] = call, results: Any = fresh.results) -> Any:
            call()
            return results

        checked = DecodeJudge(torch, (q, k, v), tile_map, shape)
        measured = runner.run(Candidate(f"blasst, {target:.0%}", lambda timed=timed: [timed]), checked)
        measured.figures["skipped"] = shares(tile_map)
        report(size, measured)
    return size
