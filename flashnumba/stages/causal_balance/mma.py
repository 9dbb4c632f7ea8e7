"""One flash forward by five schedules: kernels that differ in nothing but which block has which row tiles.

All attend alike (:mod:`flashnumba.tiles.forward`), on sm_90 with the tiles of ``flash_forward.mma``, or nearly; which
tiles of rows they take is in :mod:`flashnumba.tiles.schedule`. ``persistent`` has one launch more, which sets its
counter to zero. ``stack_4`` and ``stack_8`` are the longest first with four and eight warps along the rows, 16 rows
each.

Every row is computed in the same way whoever computes it, so all schedules give the same bits.

Source: as :mod:`flashnumba.tiles.schedule`; the pairs and the warps of 16 rows are the technical notes', section 6.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

from flashnumba.machine.function import Kernel
from flashnumba.stages.heads import ARGUMENTS, MOST_BLOCKS, Launch, Plan, Planner, Shape, signature
from flashnumba.tiles.forward import check_element, tier, tiles_for
from flashnumba.tiles.schedule import SCHEDULES
from flashnumba.tiles.scheduled import clear, make_scheduled
from flashnumba.tiles.sizes import AttentionTiles

if TYPE_CHECKING:
    from flashnumba.machine.compiler import CompileCase

__all__ = ["PLANS", "at_once", "balanced_tiles", "compile_cases", "make_balanced", "plan_balanced", "stack_for"]

REGISTERS = 65536
"""Registers of a multiprocessor."""
DRAWN_ARGS = (*ARGUMENTS, "counter")


@cache
def make_balanced(
    schedule: str, tiles: AttentionTiles, element: str, vector: int = 16, arch: str = "80", *, even: bool = True,
    early: bool = False, broken: str = "",
) -> Kernel:  # fmt: skip
    """The kernel of a schedule; arguments as :func:`flashnumba.tiles.scheduled.make_scheduled`."""
    name = f"causal_balance.{schedule}"
    return make_scheduled(
        tiles, element, vector, arch, schedule=schedule, even=even, early=early, name=name, broken=broken
    )  # fmt: skip


def at_once(tiles: AttentionTiles) -> int:
    """Blocks that a multiprocessor holds at a time, at most: those whose accumulators alone fit its registers."""
    return max(1, REGISTERS // (tiles.threads * tiles.accumulators))


def plan_balanced(schedule: str, shape: Shape, tiles: AttentionTiles | None = None, *, broken: str = "") -> Plan:
    """A block for each unit of the schedule's work; if it draws, as many as there may be room for.

    Args:
        tiles: :func:`balanced_tiles` if None.
        broken: plants a fault in the kernel; ``"uncleared"`` leaves out the launch that clears the counter.

    Raises:
        ValueError: float32, or bfloat16 below sm_80; more units of work than the numbers of a schedule count.
    """
    check_element(shape.element, shape.arch)
    tiles = tiles or balanced_tiles(shape)
    drawn = SCHEDULES[schedule].drawn
    kernel = make_balanced(
        schedule, tiles, shape.element, shape.vector, tier(shape.arch), even=shape.d == tiles.d,
        early=drawn and int(shape.arch.rstrip("a")) >= 90, broken="" if broken == "uncleared" else broken,
    )  # fmt: skip
    blocks = SCHEDULES[schedule].blocks(-(-shape.m // tiles.bm), shape.heads * shape.batch)
    if not drawn:
        return Plan((Launch(kernel, blocks, tiles.threads, tiles.shared),))
    if blocks > MOST_BLOCKS:  # the grid does not say so, and the counter would come round
        raise ValueError(
            f"q has {shape.batch} x {shape.heads} heads of {shape.m} rows, {blocks} tiles to draw; a counter takes "
            f"{MOST_BLOCKS}: split the batch"
        )
    blocks = min(blocks, shape.multiprocessors * at_once(tiles))
    draws = Launch(kernel, blocks, tiles.threads, tiles.shared, DRAWN_ARGS)
    clears = () if broken == "uncleared" else (Launch(clear, 1, clear.threads, 0, ("counter",)),)
    return Plan((*clears, draws), {"counter": (1,)})


def balanced_tiles(shape: Shape) -> AttentionTiles:
    """The same for all schedules. A loop around a piece takes registers that two fragments a warp do not always leave.
    On sm_90 they do, where D is 128 with a step of Q held; elsewhere a warp has 16 rows, and the promise of one block
    keeps the compiler from saving."""
    usual = tiles_for(shape.d, shape.arch, shape.vector)
    if shape.arch.startswith("90"):
        return replace(usual, q_held=1) if usual.d == 128 and usual.frags == 2 else usual
    return replace(usual if usual.frags == 1 else stack_for(4, shape.d, shape.arch), min_blocks=1)


def stack_for(warps: int, d: int, arch: str) -> AttentionTiles:
    """Tiles of ``warps`` warps along the rows, 16 rows each, and as many keys as in a usual block.

    Raises:
        ValueError: they do not fit one another.
    """
    usual = tiles_for(d, arch)
    return AttentionTiles(usual.d, 16 * warps, usual.bn, warps=warps, slots=usual.slots, lazy=usual.lazy)


def plan_stack(warps: int, shape: Shape) -> Plan:
    return plan_balanced("longest_first", shape, stack_for(warps, shape.d, shape.arch))


PLANS: dict[str, Planner] = {name: partial(plan_balanced, name) for name in SCHEDULES} | {
    f"stack_{warps}": partial(plan_stack, warps) for warps in (4, 8)
}


def compile_cases() -> Iterator[CompileCase]:
    """Kernels as they are launched, for the compiler's tables and gates."""
    from flashnumba.machine.compiler import CompileCase

    def case(name: str, element: str, d: int, chosen_for: tuple[str, ...]) -> CompileCase:
        launch = PLANS[name](Shape(element, 1, 1, 1, 4096, 4096, d, True, arch=chosen_for[0])).launches[-1]
        title = f"causal_balance.{name} {element} d {d}, tiles for sm_{chosen_for[0]}"
        wanted = signature(element, launch.args)
        return CompileCase(title, launch.kernel, wanted, launch.threads, launch.shared, chosen_for=chosen_for)

    for name in PLANS:
        for d in (64, 128):
            yield case(name, "float16", d, ("90a",))
    for name in ("paired", "persistent"):
        for chosen_for in (("80",), ("86", "89"), ("100a", "120a"), ("75",)):
            yield case(name, "float16", 64, chosen_for)
        yield case(name, "bfloat16", 128, ("90a",))
    yield CompileCase("causal_balance.clear", clear, signature("float16", ("counter",)), clear.threads)
