"""Panels that the stages' figures share. matplotlib without pyplot: no global state, no display needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from flashnumba.stages.stage import Passes, Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["BLUE", "GREEN", "GREY", "ORANGE", "RED", "errors", "four_panels", "traffic"]

# Okabe and Ito's palette: told apart by colour-blind readers too.
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#777777"


def four_panels(title: str) -> tuple[Figure, list[Axes]]:
    """A figure of two by two panels, read like a page."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    figure.suptitle(title, fontsize=14, fontweight="bold")
    panels = list(figure.subplots(2, 2).flat)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def _of_type(result: Result) -> str:
    return f"{result.rung.name}, {result.case.lowprec.dtype.name}"


def errors(axes: Axes, results: Sequence[Result], label: Callable[[Result], str] = _of_type) -> None:
    """Error and budget of every result, on a logarithmic scale; what did not run or is not finite in words."""
    shown = list(results)
    found = [r.comparison.error for r in shown if r.comparison and 0 < r.comparison.error < np.inf]
    floor = 10.0 ** np.floor(np.log10(min(found, default=1e-16)) - 0.5)
    top = max([*found, *(r.comparison.budget for r in shown if r.comparison), 10 * floor])
    for y, r in enumerate(shown):
        if r.comparison is None or np.isinf(r.comparison.error):
            axes.text(
                floor * 1.3, y, r.verdict if r.comparison is None else "not finite", va="center", fontsize=8, color=RED
            )
        elif r.comparison.error == 0:
            axes.text(floor * 1.3, y, "0", va="center", fontsize=8, color=GREY)
        else:
            color = RED if not r.comparison.ok else GREY if r.rung.tier == "reference" else BLUE
            axes.barh(y, max(r.comparison.error, floor), left=0, color=color, height=0.6)
        if r.comparison is not None:
            axes.plot([r.comparison.budget] * 2, [y - 0.4, y + 0.4], color=ORANGE, lw=2.5)
    axes.plot([], [], color=ORANGE, lw=2.5, label="budget")
    axes.set_xscale("log")
    axes.set_xlim(floor, top * (top / floor) ** 0.3)  # room for the legend
    axes.set_yticks(range(len(shown)), [label(r) for r in shown], fontsize=8)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set(title="error against float64", xlabel="max |out - reference|")
    axes.legend(fontsize=8, loc="upper right")


def traffic(axes: Axes, results: Sequence[Result]) -> None:
    """Elements read and written for each element of the result, by count, once for every rung."""
    rungs = list({r.rung.name: r.rung for r in results if isinstance(r.rung.traffic, Passes)}.values())
    reads, writes = [r.traffic.reads for r in rungs], [r.traffic.writes for r in rungs]
    axes.barh(range(len(rungs)), reads, color=BLUE, height=0.6, label="read")
    axes.barh(range(len(rungs)), writes, left=reads, color=GREEN, height=0.6, label="written")
    axes.set_yticks(range(len(rungs)), [r.name for r in rungs], fontsize=8)
    axes.invert_yaxis()
    title = "elements moved for each element, by count"
    axes.set(title=title, xlabel="times through memory", xlim=(0, max(np.add(reads, writes), default=1) + 1))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize=8, loc="upper right")
