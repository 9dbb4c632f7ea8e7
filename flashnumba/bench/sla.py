"""SLA on a GPU beside dense attention of the same tier, forward and gradients, in one run.

``of_dense`` is the time of ``flash_forward.mma`` or ``backward.mma`` over SLA's; ``critical`` is the share of tiles in
the softmax part. A forward is everything from q, k and v to o and what the gradients need, the map included; the
gradients are everything from there. ``attend`` is the attention over lists with the linear part at its end: what it
takes longer than its share of the dense time is what these and tiles of 64 rows cost. Data are normal numbers: which
tiles are critical is then chance, how many is given.

Results are first compared with float64 in some row tiles: o, and of the gradients dq; that all of dk and dv was written
is checked too. What they are is for the tests to say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from flashnumba.bench.attention import Problem
from flashnumba.bench.backward import inputs_of
from flashnumba.bench.backward import launches as launches_backward
from flashnumba.bench.environment import place
from flashnumba.bench.heads import Judge, launches, places
from flashnumba.bench.runner import Candidate, Clock, Measured, Runner, Size, check_written, rounded, spread
from flashnumba.compare import Comparison, compare
from flashnumba.stages.backward.mma import plan_mma as plan_backward
from flashnumba.stages.flash_forward.mma import plan_mma as plan_forward
from flashnumba.stages.heads import Plan, Shape
from flashnumba.stages.sparsity import sla
from flashnumba.stages.sparsity import sla_reference as reference
from flashnumba.stages.sparsity.sla_low_precision import low_precision

__all__ = ["CRITICAL", "DENSE", "DENSE_BACKWARD", "SlaJudge", "measure"]

DENSE, DENSE_BACKWARD = "flash_forward.mma", "backward.mma"
CRITICAL = (0.05, 0.10)
"""Shares of tiles for the softmax part; 0.05 is the authors'."""
ATTEND = "sparsity.sla attend"


class SlaJudge:
    """Compares o, or dq, with float64 in some row tiles, and asks whether all was written."""

    def __init__(self, torch: Any, inputs: dict[str, Any], classes: Any, element: str, *, backward: bool) -> None:
        self.torch, self.element, self.known = torch, element, []
        for head, tile in zip(spread(classes.shape[1], 2), spread(classes.shape[2], 2), strict=False):
            k, v = (rounded(inputs[name][0, head].float().cpu().numpy(), element) for name in "kv")
            proj = rounded(inputs["proj"].float().cpu().numpy(), element)
            rows = slice(tile * reference.BLOCK, (tile + 1) * reference.BLOCK)
            q, do = (rounded(inputs[x][0, head, rows].float().cpu().numpy(), element) for x in ("q", "do"))
            of = classes[0, head, tile : tile + 1].cpu().numpy()
            low, low_gradients = low_precision(q, k, v, of, proj, do if backward else None)
            if backward:
                exact, low_one = reference.gradients(do, q, k, v, of, proj)[0], low_gradients[0]
            else:
                exact, low_one = reference.attend(q, k, v, of, proj).o, low.o
            self.known.append((head, rows, exact, low_one))

    def __call__(self, results: Sequence[Any]) -> Comparison:
        found = [
            compare(rounded(results[0][0, head, rows].float().cpu().numpy(), self.element), exact, low)
            for head, rows, exact, low in self.known
        ]
        bad = next((verdict for verdict in found if not verdict.ok), None)
        if bad is None:
            check_written(self.torch, *results)
        return bad or max(found, key=lambda verdict: verdict.error)


def measure(
    problem: Problem, *, shares: Sequence[float] = CRITICAL, clock: Clock | None = None, until: float = float("inf"),
    machine: str = "cuda", report: Callable[[Size, Measured], None] = lambda size, measured: None,
) -> Size:  # fmt: skip
    """Measure dense attention and SLA on one problem, forward and gradients; arguments as
    :func:`flashnumba.bench.attention.measure`, ``shares`` as :data:`CRITICAL`. Causal problems are refused by
    ValueError: SLA's authors have none."""
    if problem.causal:
        raise ValueError("causal is True; SLA is measured without a mask")
    torch, device, _ = place("sparsity", machine)
    p = problem
    inputs = inputs_of(torch, device, p, machine)
    random = torch.Generator(device=device).manual_seed(1)
    inputs["proj"] = (torch.randn(p.d, p.d, generator=random, device=device) / p.d**0.5).to(getattr(torch, p.element))
    q, k, v, do = (inputs[x] for x in ("q", "k", "v", "do"))
    shape = Shape(p.element, p.batch, p.heads, p.heads, p.n, p.n, p.d, arch=_arch(machine))
    size = Size({**asdict(p), "method": "sla"})
    clock = clock or Clock()
    no_rates: Callable[[float], dict[str, float | None]] = lambda seconds: {}  # noqa: E731
    forward = Runner(size, no_rates, {"of_dense": DENSE}, clock=clock, until=until)
    backward = Runner(size, no_rates, {"of_dense": DENSE_BACKWARD}, clock=clock, until=until)

    def run(runner: Runner, candidate: Candidate, judge: Any, share: float | None = None) -> None:
        measured = runner.run(candidate, judge)
        measured.figures["critical"] = share
        report(size, measured)

    dense = {name: x for name, x in inputs.items() if name != "proj"}
    calls = partial(launches, partial(plan_forward, shape), [(q, k, v)], machine=machine)
    run(forward, Candidate(DENSE, calls), Judge(torch, q, k, v, p.element, places(p.batch, p.heads, p.n)))
    run(backward, Candidate(DENSE_BACKWARD, partial(launches_backward, partial(plan_backward, shape), dense,
                                                     machine=machine)), None)  # fmt: skip
    for share in shares:
        options = sla.check_options(share, 0.10, "softmax", "paper", None, True)
        _, kept = sla.forward(q, k, v, inputs["proj"], options, machine=machine)
        counted = float(kept.arrays["counts"].float().mean()) / sla.tiles_of(kept.shape)[1]
        judged = partial(SlaJudge, torch, inputs, kept.arrays["classes"], p.element)
        plan = sla.plan_forward(kept.shape, options)
        part = Plan(tuple(x for x in plan.launches if x.kernel.name == ATTEND), plan.scratch)
        results, gradients = _results(torch, q, 1), _results(torch, q, 3)
        known = {**kept.arrays, "o": results[0]}
        run(forward, Candidate(f"sla, {share:.0%}", partial(_calls, kept, plan, known, results)),
            judged(backward=False), counted)  # fmt: skip
        run(forward, Candidate(f"sla, {share:.0%}, attend", partial(_calls, kept, part, known, results)), None,
            counted)  # fmt: skip
        known = {**kept.arrays, "do": do, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}
        plan = sla.plan_backward(kept.shape, options)
        run(backward, Candidate(f"sla gradients, {share:.0%}", partial(_calls, kept, plan, known, gradients)),
            judged(backward=True), counted)  # fmt: skip
    return size


def _results(torch: Any, q: Any, count: int) -> tuple[Any, ...]:
    return tuple(torch.full_like(q, float("nan")) for _ in range(count))


def _calls(kept: sla.Kept, plan: Plan, known: dict[str, Any], results: tuple[Any, ...]) -> list[Callable[[], Any]]:
    """A call that launches everything and returns the results."""
    launched = kept.bind(plan, known)

    def call() -> tuple[Any, ...]:
        launched()
        return results

    return [call]


def _arch(machine: str) -> str:
    from flashnumba.machine import gpu
    from flashnumba.stages.host import EMULATED_ARCH

    return gpu.device_arch() if machine == "cuda" else EMULATED_ARCH
