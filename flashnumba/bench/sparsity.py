"""Sparse attention on a GPU beside the dense kernel of the same tier, in one run, on structured data.

``of_dense`` is the dense kernel's time over the candidate's; ``skipped`` the share of what is visible that was left
out, by count of tiles; ``of_ideal`` is ``of_dense (1 - skipped)``, 1 if only what is left cost anything. For each share
that is asked for, the threshold is searched that leaves it out, on the very data.

Each result is first compared with float64 over the tiles that its own map says were computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from flashnumba.bench.attention import Problem
from flashnumba.bench.attention import problems as problems_of_attention
from flashnumba.bench.decode import GraphClock
from flashnumba.bench.decode import Problem as Decode
from flashnumba.bench.environment import environment as base_environment
from flashnumba.bench.environment import place, torch_on_gpu
from flashnumba.bench.heads import ROWS, Judge, launches, places, settings
from flashnumba.bench.heads import Place as PlaceOf
from flashnumba.bench.runner import Candidate, Clock, Measured, Runner, Size, check_written, rounded, spread
from flashnumba.compare import Comparison, compare
from flashnumba.data.structured import structured
from flashnumba.stages.flash_forward.mma import plan_mma
from flashnumba.stages.flash_forward.split import plan_split
from flashnumba.stages.heads import Heads, Plan, prepare_heads
from flashnumba.stages.sparsity import mma, problem
from flashnumba.stages.sparsity import reference as R
from flashnumba.stages.sparsity.decode import plan_decode
from flashnumba.tiles.sparse import COMPUTED, SKIPPED, unit_rows
from flashnumba.tiles.sparse_split import TILE

__all__ = ["DENSE", "KERNELS", "SPLIT", "DecodeJudge", "DecodeProblem", "Method", "SparseJudge", "environment",
           "measure", "measure_decode", "names_for", "problems", "shares"]  # fmt: skip

DENSE, SPLIT = "flash_forward.mma", "flash_forward.split"
KERNELS = ("blasst", "warp_skip", "warp_skip_sum", "sparge", "prediction", "sla")
"""What can be asked for by name; the last is measured by :mod:`flashnumba.bench.sla`."""
TARGETS = (0.0, 0.5, 0.7, 0.9)
"""Shares of tiles to leave out."""
ROWS_IN_ALL = 1 << 18
"""Rows of all heads up to which a problem has sixteen; so longer ones have as many rows, and data as quickly drawn."""
ALL_AT, DRAWN = 16384, 4
"""Tokens at which everything is measured; sequences of decoding that are drawn."""
HALVINGS = 12
"""Of the interval in which a threshold is searched, in powers of two."""


@dataclass(frozen=True)
class DecodeProblem(Decode):
    """Sizes of one step, float16."""

    element: str = "float16"
    batch: int = 16
    n: int = 16384


@dataclass(frozen=True)
class Method:
    """A way to leave out tiles, as a planner's options and scalars have it."""

    name: str
    plan: Callable[..., Plan]
    options: dict[str, Any]
    given: dict[str, float]

    @property
    def vote(self) -> str:
        return self.options.get("vote", "")


def environment() -> dict[str, Any]:
    """What the figures depend on."""
    return base_environment("sparsity") | settings(torch_on_gpu("sparsity"))


def problems(dims: Sequence[int], lengths: Sequence[int], masks: Sequence[bool], **sizes: int) -> Iterator[Problem]:
    """As :func:`flashnumba.bench.attention.problems`, of no more than :data:`ROWS_IN_ALL`."""
    for p in problems_of_attention(("float16",), dims, lengths, masks, **sizes):
        yield replace(p, heads=max(1, min(p.heads, ROWS_IN_ALL // (p.n * p.batch))))


def names_for(p: Problem) -> Collection[str]:
    """What is measured on a problem if nobody asks for anything else: all at 16384 tokens; of the prediction what it
    takes of 8192 and 131072 tokens, unmasked; at other lengths thresholds and lists."""
    if p.n == ALL_AT:
        return [name for name in KERNELS if not (p.causal and name == "sla")]
    if p.causal:
        return ()
    return ("prediction",) if p.n in (ALL_AT // 2, 8 * ALL_AT) else ("blasst", "warp_skip", "sparge", "sla")


def shares(tile_map: Any) -> float:
    """The share of visible tiles that were left out while going."""
    computed, skipped = (int((tile_map == value).sum()) for value in (COMPUTED, SKIPPED))
    return skipped / max(1, computed + skipped)


class SparseJudge:
    """Compares some rows of each of nine units with float64 over the tiles that a map says the unit computed."""

    def __init__(
        self, torch: Any, inputs: tuple[Any, Any, Any], heads: Heads, method: Method, tile_map: Any, bn: int, rows: int
    ) -> None:  # fmt: skip
        self.torch, self.known = torch, []
        shape, (q, k, v) = heads.shape, inputs
        for unit in spread(tile_map.shape[2], 3):
            for head in spread(shape.heads, 3):
                first = min(unit * rows + 3 * len(self.known) * ROWS % rows, shape.m - 1)  # in one warp or another
                last = min(first + ROWS, shape.m)
                end = last + shape.n - shape.m if shape.causal else shape.n
                some = _on_host(q[:1, head : head + 1, first:last], shape.element)
                keys, values = (_on_host(x[:1, head // shape.group, None, :end], shape.element) for x in (k, v))
                tiles = tile_map[:1, head : head + 1, unit : unit + 1].cpu().numpy()
                s = R.scores(some, keys, heads.scale, shape.causal)
                kept = R.expand(tiles == COMPUTED, rows, bn, s.shape[-2], -(-end // bn) * bn)[..., :end]
                summed = np.ones_like(kept) if method.options.get("keep_sum") else kept
                kept, summed = kept & ~np.isneginf(s), summed & ~np.isneginf(s)
                exact, lse = R.attend(s, values, kept, summed)
                low = R.low_precision(some, keys, values, kept, summed, heads.scale)
                self.known.append((head, slice(first, last), exact, lse, *low))

    def __call__(self, result: Any) -> Comparison:
        o, lse = result
        found = []
        for head, rows, exact, lse_exact, low, lse_low in self.known:
            found.append(compare(rounded(o[:1, head : head + 1, rows].float().cpu().numpy(), "float16"), exact, low))
            of_lse = lse[:1, head : head + 1, rows].cpu().numpy()
            found.append(compare(of_lse, lse_exact, lse_low))
        bad = next((verdict for verdict in found if not verdict.ok), None)
        if bad is None:
            check_written(self.torch, o, lse)
        return bad or max(found[::2], key=lambda verdict: verdict.error)


def measure(
    problem_: Problem, *, names: Collection[str] = KERNELS, targets: Sequence[float] = TARGETS,
    clock: Clock | None = None, until: float = float("inf"), machine: str = "cuda",
    report: Callable[[Size, Measured], None] = lambda size, measured: None,
) -> Size:  # fmt: skip
    """Measure the dense kernel and the sparse ones on one problem.

    Args:
        names: of :data:`KERNELS`.
        targets: shares to leave out; a threshold is searched for each.
        clock, until, machine, report: as :func:`flashnumba.bench.attention.measure`.
    """
    torch, device, _ = place("sparsity", machine)
    p = problem_
    q, k, v = (torch.from_numpy(x).to(device) for x in structured(p.n, p.d, heads=p.heads, batch=p.batch))
    size = Size(asdict(p))
    runner = Runner(
        size, lambda seconds: {"flops_per_second": p.flops / seconds}, {"of_dense": DENSE}, clock=clock or Clock(),
        until=until, report=lambda size, measured: None,
    )  # fmt: skip
    make = partial(prepare_heads, q, k, v, causal=p.causal, scale=None, machine=machine, stream=None)
    shape = make().shape

    def run(method: Method, only: slice = slice(None)) -> Measured:
        """Measure a method; ``only`` some of its launches, which are then not judged."""
        heads = make()
        plan = method.plan(shape, **method.options)
        tiles, left, judge = mma.sparse_tiles(shape), None, None
        if only == slice(None):
            noted = method.plan(shape, **method.options, noted=True)
            tile_map = problem.run(heads, noted, method.given)["tile_map"]
            judge = SparseJudge(torch, (q, k, v), heads, method, tile_map, tiles.bn, unit_rows(tiles, method.vote))
            left = _left_out(tile_map, shape, tiles, method.vote)

        def prepare() -> Sequence[Callable[[], Any]]:
            fresh = make()
            for result in fresh.results:
                result.fill_(float("nan"))
            call, _ = problem.bind(fresh, plan, method.given)
            if only != slice(None):
                call()
                call, _ = problem.bind(fresh, Plan(plan.launches[only], plan.scratch), method.given)

            def timed() -> Any:
                call()
                return fresh.results

            return [timed]

        measured = runner.run(Candidate(method.name, prepare), judge)
        measured.figures["skipped"] = left
        gain = measured.figures.get("of_dense")
        measured.figures["of_ideal"] = gain * (1 - left) if gain and left is not None else None
        report(size, measured)
        return measured

    dense = runner.run(
        Candidate(DENSE, partial(launches, partial(plan_mma, shape), [(q, k, v)], causal=p.causal, machine=machine)),
        Judge(torch, q, k, v, p.element, places(p.batch, p.heads, p.n), causal=p.causal),
    )  # fmt: skip
    report(size, dense)
    search = partial(_search, make, shape)
    for target in targets if "blasst" in names else ():
        given = {"limit": search(partial(mma.plan_skip, vote="block"), target)}
        run(Method(f"blasst, {target:.0%}", mma.plan_skip, {"vote": "block"}, given))
    for name, options in (("warp_skip", {}), ("warp_skip_sum", {"keep_sum": True})):
        for target in (targets[0], targets[len(targets) // 2]) if name in names else ():
            given = {"limit": search(partial(mma.plan_skip, vote="warp"), target)}
            run(Method(f"{name}, {target:.0%}", mma.plan_skip, {"vote": "warp", **options}, given))
    blocks = -(-p.n // mma.BLOCK_N)
    for share in targets if "sparge" in names else ():
        given = {"limit": -math.inf, "kept": max(1, int((1 - share) * blocks)), "alike": -1.0, "sink": 0}
        run(Method(f"sparge, top-k, {share:.0%}", mma.plan_sparge, {"by_count": True}, given))
    given = {"limit": -50.0, "kept": 0.98, "alike": 0.3, "sink": 1}
    if "sparge" in names:
        run(Method("sparge, cdf 0.98", mma.plan_sparge, {"vote": "warp"}, given))
    if "prediction" in names:
        run(Method("sparge, prediction alone", mma.plan_sparge, {"by_count": False}, given), slice(0, 4))
    return size


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
    judge = Judge(torch, q, k, v, step.element, [PlaceOf(0, 0, heads, slice(0, 1))])
    report(size, runner.run(dense, judge))
    for target in targets:
        limit = _search(make, shape, plan_decode, target)
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


class DecodeJudge:
    """Compares all heads of one head of K with float64 over the tiles that a map says were computed."""

    def __init__(self, torch: Any, inputs: tuple[Any, Any, Any], tile_map: Any, shape: Any) -> None:
        self.torch, self.heads = torch, slice(0, shape.group)
        q, k, v = inputs
        some = _on_host(q[:1, self.heads], shape.element)
        keys, values = (_on_host(x[:1, :1], shape.element) for x in (k, v))
        s = R.scores(some, keys)
        tiles = tile_map[:1, :1, :1].cpu().numpy() == COMPUTED
        kept = np.broadcast_to(np.repeat(tiles, TILE, -1)[..., : shape.n], s.shape)
        self.exact, self.low = R.attend(s, values, kept)[0], R.low_precision(some, keys, values, kept)[0]

    def __call__(self, result: Any) -> Comparison:
        o, lse = result
        check_written(self.torch, o, lse)
        return compare(rounded(o[:1, self.heads].float().cpu().numpy(), "float16"), self.exact, self.low)


def _on_host(x: Any, element: str) -> np.ndarray:
    """A tensor as a NumPy array of its own 16-bit type."""
    return rounded(x.float().cpu().numpy(), element)


def _left_out(tile_map: Any, shape: Any, tiles: Any, vote: str) -> float:
    """The share of visible tiles whose products with V were not made."""
    rows = unit_rows(tiles, vote)
    visible = np.repeat(
        R.visible_blocks(shape.m, shape.n, tiles.bm, tiles.bn, shape.causal), tiles.bm // rows, 0
    )[: tile_map.shape[2]].sum() * shape.batch * shape.heads  # fmt: skip
    return float(1 - int((tile_map == COMPUTED).sum()) / max(1, visible))


def _search(make: Callable[[], Heads], shape: Any, plan: Callable[..., Plan], target: float) -> float:
    """The limit at which about ``target`` of the visible tiles are left out."""
    if target == 0:
        return -math.inf
    low, high = -40.0, -1e-3
    noted = plan(shape, noted=True)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        made = problem.run(make(), noted, {"limit": middle})
        low, high = (middle, high) if shares(made["tile_map"]) < target else (low, middle)
    return (low + high) / 2
