"""Pictures of the stage: work a block, blocks on multiprocessors in time, makespans by number of multiprocessors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from flashnumba.stages.causal_balance.reference import (
    Grid,
    Run,
    block_work,
    dispatch,
    longest_first,
    lower_bound,
    makespan,
    paired,
    plain,
)
from flashnumba.stages.figures import BLUE, GREEN, GREY, ORANGE, RED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["COLOURS", "GRIDS", "draw_makespans", "draw_runs", "draw_work", "simulated"]

GRIDS: Mapping[str, Callable[[np.ndarray, int], Grid]] = {
    "plain": plain, "paired": paired, "longest first": longest_first,
}  # fmt: skip
COLOURS = {"plain": RED, "paired": GREEN, "longest first": BLUE}


def draw_work(axes: Axes, work: np.ndarray, names: Sequence[str] = ("plain", "paired")) -> None:
    """Tiles of keys of each block of one head, ``work`` of each row tile; a pair's two parts lie on one another."""
    at = 0
    for name in names:
        for block in GRIDS[name](work, 1):
            below = 0
            for turn, (_, tile) in enumerate(block):
                color = COLOURS[name] if turn == 0 else ORANGE
                axes.bar(at, work[tile], bottom=below, color=color, width=0.85)
                below += work[tile]
            at += 1
        axes.text(at - 1 - len(GRIDS[name](work, 1)) / 2, work.max() * 1.12 + 1, name, ha="center", fontsize=9)
        at += 1
    axes.set(xlabel="block", ylabel="tiles of keys", title="work a block, one head", ylim=(0, work.max() * 1.25 + 2))
    axes.set_xticks([])


def draw_runs(axes: Axes, runs: Mapping[str, Run], costs: Mapping[str, np.ndarray], bound: float) -> None:
    """Which block is where and when: a lane a multiprocessor, one schedule below the other, darker for more work."""
    from matplotlib import colormaps

    top, longest, lane = max(run.makespan for run in runs.values()), max(c.max() for c in costs.values()), 0
    shades = colormaps["Blues"]
    for name, run in runs.items():
        lanes = int(run.multiprocessor.max(initial=0)) + 1
        for mp, start, end, cost in zip(run.multiprocessor, run.start, run.end, costs[name], strict=True):
            color = shades(0.2 + 0.7 * cost / longest)
            axes.barh(lane + mp, end - start, left=start, color=color, ec="white", lw=0.6, height=0.9)
        axes.plot([run.makespan] * 2, [lane - 0.5, lane + lanes - 0.5], color=RED, lw=1.6)
        axes.text(top * 1.02, lane + lanes / 2 - 0.5, f"{name}:\n{run.makespan:.0f}", va="center", fontsize=9)
        lane += lanes + 1
    axes.axvline(bound, color=GREY, ls=":", lw=1.2)
    axes.set(xlabel="time, tiles of keys; dotted: total / multiprocessors", ylim=(lane - 1.5, -0.8))
    axes.set(xlim=(0, top * 1.28), title="blocks on multiprocessors")
    axes.set_yticks([])


def draw_makespans(axes: Axes, work: np.ndarray, heads: Sequence[int], most: int = 132) -> None:
    """Makespan over the lower bound, for 1 to ``most`` multiprocessors with one block at a time each; few heads dashed,
    many drawn through."""
    numbers = np.unique(np.geomspace(1, most, 45).astype(int))
    for count, style in zip(heads, ("--", "-"), strict=True):
        pieces = block_work(plain(work, count), work)
        for name, grid in GRIDS.items():
            costs = block_work(grid(work, count), work)
            ratio = [makespan(costs, int(p)) / lower_bound(pieces, int(p)) for p in numbers]
            axes.plot(numbers, ratio, style, color=COLOURS[name], lw=1.5, label=f"{name}, {count} heads")
    axes.set(xlabel="multiprocessors", ylabel="makespan / lower bound", xscale="log")
    axes.set_xticks((1, 4, 16, 64, most), (1, 4, 16, 64, most))
    axes.minorticks_off()
    axes.set_title(f"simulated, {len(work)} row tiles a head")
    axes.legend(fontsize=8)


def simulated(work: np.ndarray, heads: int, multiprocessors: int, names: Sequence[str]) -> tuple[dict, dict]:
    """(runs, costs) of grids by name, one block at a time on each multiprocessor."""
    costs = {name: block_work(GRIDS[name](work, heads), work) for name in names}
    return {name: dispatch(costs[name], multiprocessors) for name in names}, costs
