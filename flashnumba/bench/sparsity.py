"""Sparse attention on a GPU beside the dense kernel of the same tier, in one run, on structured data.

``of_dense`` is the dense kernel's time over the candidate's, of prefill the two timed in turn; ``skipped`` the share of
what is visible that was left out, by count of tiles; ``of_ideal`` is ``of_dense (1 - skipped)``, 1 if only what is left
cost anything. For each share that is asked for, the threshold is searched that leaves it out, on the very data.

Each result is first compared with float64 over the tiles that its own map says were computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from flashnumba.bench.attention import Problem
from flashnumba.bench.attention import problems as problems_of_attention
from flashnumba.bench.environment import environment as base_environment
from flashnumba.bench.environment import place, torch_on_gpu
from flashnumba.bench.heads import CUDNN, Judge, launches, peer, places, settings
from flashnumba.bench.runner import Candidate, Clock, Measured, Runner, Size
from flashnumba.bench.sparse_judges import SparseJudge
from flashnumba.data.structured import structured
from flashnumba.stages.flash_forward.mma import plan_mma
from flashnumba.stages.flash_forward.wgmma import plan_wgmma
from flashnumba.stages.heads import Heads, Plan, prepare_heads
from flashnumba.stages.sparsity import mma, problem, wgmma
from flashnumba.stages.sparsity import reference as R
from flashnumba.tiles.sparse import COMPUTED, SKIPPED, unit_rows
from flashnumba.tiles.specialised_tiles import ROWS
from flashnumba.tiles.specialised_tiles import tiles_for as specialised_tiles

__all__ = ["BY_MMA", "BY_WGMMA", "DENSE", "KERNELS", "TARGETS", "WARPGROUPS", "Method", "environment", "measure",
           "measure_warpgroups", "names_for", "problems", "search", "shares"]  # fmt: skip

DENSE, WARPGROUPS = "flash_forward.mma", "flash_forward.wgmma"
BY_MMA = ("blasst", "warp_skip", "warp_skip_sum", "sparge", "prediction")
BY_WGMMA = ("blasst_wgmma", "sparge_wgmma", "prediction")
"""What :func:`measure` and :func:`measure_warpgroups` can be asked for."""
KERNELS = (*dict.fromkeys((*BY_MMA, *BY_WGMMA)), "sla")
"""All that can be asked for; the last is measured by :mod:`flashnumba.bench.sla`."""
TARGETS = (0.0, 0.5, 0.7, 0.9)
"""Shares of tiles to leave out."""
ROWS_IN_ALL = 1 << 18
"""Rows of all heads up to which a problem has sixteen; so longer ones have as many rows, and data as quickly drawn."""
ALL_AT = 16384
"""Tokens at which everything is measured."""
HALVINGS = 12
"""Of the interval in which a threshold is searched, in powers of two."""


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
    if p.n in (ALL_AT // 2, 8 * ALL_AT):
        return ("prediction",)
    return ("blasst", "blasst_wgmma", "warp_skip", "sparge", "sparge_wgmma", "sla")


def shares(tile_map: Any) -> float:
    """The share of visible tiles that were left out while going."""
    computed, skipped = (int((tile_map == value).sum()) for value in (COMPUTED, SKIPPED))
    return skipped / max(1, computed + skipped)


def measure(
    problem_: Problem, *, names: Collection[str] = BY_MMA, targets: Sequence[float] = TARGETS,
    clock: Clock | None = None, until: float = float("inf"), machine: str = "cuda",
    report: Callable[[Size, Measured], None] = lambda size, measured: None,
) -> Size:  # fmt: skip
    """Measure the dense kernel and the sparse ones on one problem.

    Args:
        names: of :data:`BY_MMA`.
        targets: shares to leave out; a threshold is searched for each.
        clock, until, machine, report: as :func:`flashnumba.bench.attention.measure`.
    """
    p = problem_
    bench = _Bench(p, DENSE, clock, until, machine, report)
    shape, run, find = bench.shape, bench.run, partial(search, bench.make, bench.shape)
    bench.run_dense(partial(plan_mma, shape))
    for target in targets if "blasst" in names else ():
        given = {"limit": find(partial(mma.plan_skip, vote="block"), target)}
        run(Method(f"blasst, {target:.0%}", mma.plan_skip, {"vote": "block"}, given))
    for name, options in (("warp_skip", {}), ("warp_skip_sum", {"keep_sum": True})):
        for target in (targets[0], targets[len(targets) // 2]) if name in names else ():
            given = {"limit": find(partial(mma.plan_skip, vote="warp"), target)}
            run(Method(f"{name}, {target:.0%}", mma.plan_skip, {"vote": "warp", **options}, given))
    _measure_sparge(bench, "sparge", mma.plan_sparge, {"vote": "warp"}, targets, names)
    return bench.size


def measure_warpgroups(
    problem_: Problem, *, names: Collection[str] = BY_WGMMA, targets: Sequence[float] = TARGETS,
    clock: Clock | None = None, until: float = float("inf"), machine: str = "cuda",
    report: Callable[[Size, Measured], None] = lambda size, measured: None,
) -> Size:  # fmt: skip
    """Measure the kernels of ``wgmma``, :data:`BY_WGMMA`, beside the dense one of their tier and cuDNN; arguments as
    :func:`measure`."""
    bench = _Bench(problem_, WARPGROUPS, clock, until, machine, report)
    bench.run_dense(partial(plan_wgmma, bench.shape), peers=(CUDNN,))
    for target in targets if "blasst_wgmma" in names else ():
        given = {"limit": search(bench.make, bench.shape, wgmma.plan_blasst, target)}
        bench.run(Method(f"blasst_wgmma, {target:.0%}", wgmma.plan_blasst, {}, given))
    _measure_sparge(bench, "sparge_wgmma", wgmma.plan_sparge, {}, targets, names)
    return bench.size


def _measure_sparge(
    bench: _Bench, name: str, plan: Callable[..., Plan], votes: dict[str, Any], targets: Sequence[float],
    names: Collection[str],
) -> None:  # fmt: skip
    """SpargeAttn by a planner: lists of a given length, lists by a sum, with ``votes``, and the prediction alone."""
    blocks = -(-bench.p.n // mma.BLOCK_N)
    for share in targets if name in names else ():
        given = {"limit": -math.inf, "kept": max(1, int((1 - share) * blocks)), "alike": -1.0, "sink": 0}
        bench.run(Method(f"{name}, top-k, {share:.0%}", plan, {"by_count": True}, given))
    given = {"limit": -50.0, "kept": 0.98, "alike": 0.3, "sink": 1}
    if name in names:
        bench.run(Method(f"{name}, cdf 0.98", plan, votes, given))
    if "prediction" in names:
        bench.run(Method(f"{name}, prediction alone", plan, {"by_count": False}, given), slice(0, -1))


class _Bench:
    """A problem on structured data, its dense kernel, and methods beside it."""

    def __init__(
        self, p: Problem, dense: str, clock: Clock | None, until: float, machine: str,
        report: Callable[[Size, Measured], None],
    ) -> None:  # fmt: skip
        self.torch, device, _ = place("sparsity", machine)
        self.p, self.dense, self.machine, self.report = p, dense, machine, report
        self.inputs = tuple(
            self.torch.from_numpy(x).to(device) for x in structured(p.n, p.d, heads=p.heads, batch=p.batch)
        )
        self.size = Size(asdict(p) | ({"tier": "wgmma"} if dense == WARPGROUPS else {}))
        beside = {"of_dense": dense} | ({"of_cudnn": CUDNN} if dense == WARPGROUPS else {})
        self.runner = Runner(
            self.size, lambda seconds: {"flops_per_second": p.flops / seconds}, beside, clock=clock or Clock(),
            until=until, report=lambda size, measured: None,
        )  # fmt: skip
        self.make = partial(
            prepare_heads, *self.inputs, causal=p.causal, scale=None, machine=machine, stream=None
        )  # fmt: skip
        self.shape = self.make().shape

    def run_dense(self, plan: Callable[[], Plan], peers: Sequence[str] = ()) -> None:
        p = self.p
        judge = Judge(self.torch, *self.inputs, p.element, places(p.batch, p.heads, p.n), causal=p.causal)
        for name in peers:
            self.report(self.size, self.runner.run(peer(self.torch, name, [self.inputs], causal=p.causal), judge))

        def prepare() -> Sequence[Callable[[], Any]]:
            self.dense_calls = launches(plan, [self.inputs], causal=p.causal, machine=self.machine)
            return self.dense_calls

        self.report(self.size, self.runner.run(Candidate(self.dense, prepare), judge))

    def run(self, method: Method, only: slice = slice(None)) -> Measured:
        """Measure a method; ``only`` some of its launches, which are then not judged."""
        heads, shape = self.make(), self.shape
        plan, left, judge = method.plan(shape, **method.options), None, None
        if only == slice(None):
            noted = method.plan(shape, **method.options, noted=True)
            tile_map = problem.run(heads, noted, method.given)["tile_map"]
            tile = _tile_of(self.dense, shape, method)
            judge = SparseJudge(self.torch, self.inputs, heads, method.options, tile_map, tile.keys, tile.unit)
            left = _left_out(tile_map, shape, tile)

        def prepare() -> Sequence[Callable[[], Any]]:
            fresh = self.make()
            for result in fresh.results:
                result.fill_(float("nan"))
            call, _ = problem.bind(fresh, plan, method.given)
            if only != slice(None):
                call()
                call, _ = problem.bind(fresh, Plan(plan.launches[only], plan.scratch), method.given)

            def timed() -> Any:
                call()
                return fresh.results

            calls.append(timed)
            return calls

        calls: list[Callable[[], Any]] = []
        measured = self.runner.run(Candidate(method.name, prepare), judge)
        both = measured.seconds and self.size.seconds_of(self.dense)
        gain = self.runner.clock.in_turn(calls, self.dense_calls) if both else None
        measured.figures |= {"of_dense": gain, "skipped": left}
        measured.figures["of_ideal"] = gain * (1 - left) if gain and left is not None else None
        self.report(self.size, measured)
        return measured


class _Tile(NamedTuple):
    """Rows of a block, keys of a tile, and rows that a decision is about."""

    rows: int
    keys: int
    unit: int


def _tile_of(dense: str, shape: Any, method: Method) -> _Tile:
    if dense == WARPGROUPS:
        of = wgmma.list_tiles(shape.d) if "kept" in method.given else specialised_tiles(shape.d, shape.n)
        return _Tile(of.bm, of.keys, ROWS)
    tiles = mma.sparse_tiles(shape)
    return _Tile(tiles.bm, tiles.bn, unit_rows(tiles, method.vote))


def _left_out(tile_map: Any, shape: Any, tile: _Tile) -> float:
    """The share of visible tiles whose products with V were not made."""
    visible = np.repeat(
        R.visible_blocks(shape.m, shape.n, tile.rows, tile.keys, shape.causal), tile.rows // tile.unit, 0
    )[: tile_map.shape[2]].sum() * shape.batch * shape.heads  # fmt: skip
    return float(1 - int((tile_map == COMPUTED).sum()) / max(1, visible))


def search(make: Callable[[], Heads], shape: Any, plan: Callable[..., Plan], target: float) -> float:
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
