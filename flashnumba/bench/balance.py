"""The schedules of the stage causal_balance on a GPU, beside what is simulated and beside torch's attention.

Causal, q, k and v alike in shape; operations are counted as :mod:`flashnumba.bench.attention` does. A problem has few
heads, whose blocks hardly fill a GPU, or many.

A simulation needs to know what a tile of keys costs, what a tile of rows costs besides, and what a multiprocessor does
with one block alone. All three come from four times of the kernel without a mask, where every block has equally much: a
block on each multiprocessor or as many as it holds, with many keys or with few::

    unit      seconds a tile of keys takes of a full multiprocessor: the slope of its time
    overhead  units that a tile of rows costs besides: where that line meets zero
    alone     speed of a multiprocessor with one block: the slopes' ratio

The predicted time is the simulated makespan times the unit; nothing in it is fitted to what it predicts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from flashnumba.bench.attention import Problem
from flashnumba.bench.environment import environment as base_environment
from flashnumba.bench.environment import place, torch_on_gpu
from flashnumba.bench.heads import CUDNN, FA2, Judge, launches, peer, places, settings, shape_of
from flashnumba.bench.runner import Candidate, Clock, Measured, Runner, Size
from flashnumba.machine.emulator import as_python
from flashnumba.stages.causal_balance.mma import PLANS, at_once, balanced_tiles, plan_balanced, stack_for
from flashnumba.stages.causal_balance.reference import block_work, dispatch, row_work
from flashnumba.stages.heads import Plan, Shape, prepared
from flashnumba.tiles.schedule import SCHEDULES, heads_near
from flashnumba.tiles.sizes import AttentionTiles

__all__ = ["Model", "calibrate", "environment", "kernels", "measure", "predicted", "problems", "records",
           "schedule_of", "tiles_of"]  # fmt: skip

PLAIN = "plain"
KEYS = 1024, 4096
"""Keys of the blocks that the model is calibrated with."""


@dataclass(frozen=True)
class Model:
    """What a simulation needs to know of kernels with certain tiles on a GPU; see the module."""

    multiprocessors: int
    at_once: int
    unit: float
    overhead: float
    alone: float


def kernels() -> tuple[str, ...]:
    """Names of the kernels, the plain one first."""
    return tuple(PLANS)


def schedule_of(name: str) -> str:
    """The schedule of a kernel."""
    return "longest_first" if name.startswith("stack_") else name


def tiles_of(name: str, shape: Shape) -> AttentionTiles:
    """The tiles of a kernel."""
    return stack_for(int(name[6:]), shape.d, shape.arch) if name.startswith("stack_") else balanced_tiles(shape)


def problems(
    element: str, dims: Sequence[int], lengths: Sequence[int], few: Sequence[int], *, tokens: int = 16384,
    width: int = 2048,
) -> Iterator[Problem]:  # fmt: skip
    """Each length with few heads of one sequence, and with as many heads as ``tokens`` and ``width`` make."""
    for d in dims:
        for n in lengths:
            for heads in few:
                yield Problem(element, 1, heads, n, d, True)
            many = max(1, tokens // n), max(1, width // d)
            if many not in [(1, heads) for heads in few]:
                yield Problem(element, *many, n, d, True)


def environment() -> dict[str, Any]:
    """What the figures depend on."""
    return base_environment("balance") | settings(torch_on_gpu("balance"))


# -- what is predicted -------------------------------------------------------------------------------------------------
def predicted(name: str, shape: Shape, model: Model, tiles: AttentionTiles | None = None) -> float:
    """Seconds that the simulation gives a kernel."""
    schedule, tiles = SCHEDULES[schedule_of(name)], tiles or tiles_of(name, shape)
    work = row_work(shape.m, shape.n, tiles.bm, tiles.bn, shape.causal)  # [row tiles]
    heads, causal = shape.batch * shape.heads, int(shape.causal)
    near = as_python(heads_near)(heads, shape.group, shape.n, 2 * shape.d)
    piece, blocks = as_python(schedule.piece), schedule.blocks(len(work), heads)
    grid = []
    for block in range(blocks):
        pieces = [piece(b, len(work), heads, near, causal) for b in range(block, schedule.turns * blocks, blocks)]
        grid.append([(head, tile) for head, tile in pieces if tile < len(work)])
    costs = block_work(grid, work) + [model.overhead * len(block) for block in grid]  # [blocks]
    return model.unit * dispatch(costs, model.multiprocessors, model.at_once, model.alone).makespan


def calibrate(
    torch: Any, tiles: AttentionTiles, like: Shape, device: Any, clock: Clock, machine: str = "cuda"
) -> Model:  # fmt: skip
    """The model of kernels with these tiles, from four times; all heads read one head of keys, which caches hold."""
    room, taken = _room(tiles, like, machine), {}
    for each in sorted({1, room}):
        for n in KEYS:
            heads = each * like.multiprocessors
            q = torch.randn((1, heads, tiles.bm, like.d), device=device, dtype=getattr(torch, like.element))
            k, v = (torch.randn((1, 1, n, like.d), device=device, dtype=q.dtype) for _ in range(2))
            shape = shape_of(q, k, v, machine=machine)
            calls = launches(partial(plan_balanced, PLAIN, shape, tiles), [(q, k, v)], machine=machine)
            taken[each, n] = clock.time(calls, clock.once(calls[0])[1])[0]
    return model_of(like.multiprocessors, room, taken, tiles.bn)


def model_of(multiprocessors: int, room: int, taken: dict[tuple[int, int], float], bn: int) -> Model:
    """The model from seconds by (blocks a multiprocessor, keys)."""
    few, many = (-(-n // bn) for n in KEYS)
    slope = {each: (taken[each, KEYS[1]] - taken[each, KEYS[0]]) / (each * (many - few)) for each in {1, room}}
    unit = slope[room] if slope[room] > 0 else taken[room, KEYS[1]] / (room * many)
    overhead = max(0.0, taken[room, KEYS[1]] / (room * unit) - many)
    alone = min(1.0, max(1 / room, unit / slope[1])) if slope[1] > 0 else 1.0
    return Model(multiprocessors, room, unit, overhead, alone)


def _room(tiles: AttentionTiles, shape: Shape, machine: str) -> int:
    """Blocks that a multiprocessor holds at a time."""
    if machine != "cuda":
        return at_once(tiles)
    (launch,) = plan_balanced(PLAIN, shape, tiles).launches
    ready = prepared(launch, shape.element, machine, None)
    return max(1, ready.resident_blocks(launch.threads) // shape.multiprocessors)


# -- what is measured --------------------------------------------------------------------------------------------------
def measure(
    problem: Problem, *, names: Collection[str] = (), models: dict[Any, Model] | None = None,
    clock: Clock | None = None, until: float = float("inf"), machine: str = "cuda",
    report: Callable[[Size, Measured], None] = lambda size, measured: None,
) -> Size:  # fmt: skip
    """Measure torch's attention and the kernels on one problem.

    Args:
        names: these kernels alone.
        models: what was calibrated before, by tiles; it is added to.
        clock, until, machine, report: as :func:`flashnumba.bench.attention.measure`.

    Raises:
        RuntimeError: no GPU, or no torch that uses it.
    """
    torch, device, _ = place("balance", machine)
    clock, models = clock or Clock(), {} if models is None else models
    random = torch.Generator(device=device).manual_seed(0)
    sizes, dtype = (problem.batch, problem.heads, problem.n, problem.d), getattr(torch, problem.element)
    q, k, v = (torch.randn(sizes, generator=random, device=device, dtype=dtype) for _ in range(3))
    size, shape = Size(asdict(problem)), shape_of(q, k, v, causal=True, machine=machine)
    judge = Judge(torch, q, k, v, problem.element, places(problem.batch, problem.heads, problem.n), causal=True)
    ratios = {"of_plain": PLAIN, "of_fa2": FA2, "of_cudnn": CUDNN}

    def run(candidate: Candidate, foretold: float | None = None) -> None:
        def rates(seconds: float) -> dict[str, float | None]:
            return {
                "flops_per_second": problem.flops / seconds, "predicted": foretold,
                "predicted_of_plain": _of(plain, foretold),
            }  # fmt: skip

        Runner(size, rates, ratios, clock=clock, until=until, report=report).run(candidate, judge)

    plain: float | None = None
    for name in (FA2, CUDNN):
        run(peer(torch, name, [(q, k, v)], causal=True))
    for name in kernels():
        if names and name not in names:
            continue
        foretold = _foretold(torch, name, shape, device, clock, machine, models)
        plain = foretold if name == PLAIN else plain
        plan: Callable[[], Plan] = partial(PLANS[name], shape)
        run(Candidate(name, partial(launches, plan, [(q, k, v)], causal=True, machine=machine)), foretold)
    return size


def records(models: dict[Any, Model]) -> list[dict[str, Any]]:
    """The models as rows of a table."""
    return [
        {"d": tiles.d, "bm": tiles.bm, "bn": tiles.bn, "warps": tiles.warps, "element": element, **asdict(model)}
        for (tiles, element), model in models.items()
    ]


def _of(plain: float | None, foretold: float | None) -> float | None:
    return plain / foretold if plain and foretold else None


def _foretold(
    torch: Any, name: str, shape: Shape, device: Any, clock: Clock, machine: str, models: dict[Any, Model]
) -> float | None:  # fmt: skip
    """Seconds that are predicted; None for tiles that do not fit the GPU, which the measurement then tells."""
    try:
        tiles = tiles_of(name, shape)
        key = tiles, shape.element
        if key not in models:
            models[key] = calibrate(torch, tiles, replace(shape, causal=False), device, clock, machine)
    except (ValueError, RuntimeError):
        return None
    return predicted(name, shape, models[key], tiles)
