"""Pictures of the stage: the number lines, what rounding does to real numbers, what scales buy, and the permutation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from flashnumba.stages.figures import BLUE, GREEN, GREY, ORANGE, RED
from flashnumba.stages.fp8 import study
from flashnumba.stages.fp8.codec import FORMATS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_bars", "draw_columns", "draw_histogram", "draw_number_lines", "draw_permutation", "quads"]

COLOURS = {"e4m3": BLUE, "e5m2": ORANGE, "int8": GREEN}


def draw_number_lines(axes: Axes, near: float | None = None) -> None:
    """Every number of both formats from 0 on: by their logarithm, or those up to ``near`` as they are."""
    for y, fmt in enumerate(FORMATS):
        values = study.number_line(fmt)
        values = values[1:] if near is None else values[values <= near]
        axes.plot(values, np.full(len(values), y), "|", color=COLOURS[fmt], ms=22, mew=0.8)
        form = FORMATS[fmt]
        if near is None:
            axes.plot([form.smallest_normal] * 2, [y - 0.35, y + 0.35], color=RED, lw=1.2)
    if near is None:
        axes.set_xscale("log", base=2)
        axes.plot([], [], color=RED, lw=1.2, label="smallest normal number")
        axes.legend(fontsize=8, loc="upper left")
    axes.set_yticks(range(len(FORMATS)), list(FORMATS))
    axes.set_ylim(-0.7, len(FORMATS) - 0.1)
    axes.set(title="all numbers above 0" if near is None else f"numbers from 0 to {near:g}", xlabel="value")


def draw_histogram(axes: Axes, arrays: Mapping[str, np.ndarray], scaling: str = "tensor") -> None:
    """How often each relative error of rounding occurs, for each array and format."""
    bins = np.linspace(0, 0.14, 71)
    for fmt in FORMATS:
        for (name, x), style in zip(arrays.items(), ("-", "--", ":"), strict=False):
            errors = np.minimum(study.relative_errors(x, fmt, scaling), bins[-1])
            share = np.histogram(errors, bins)[0] / errors.size
            axes.step(
                bins[:-1], 100 * share, where="post", color=COLOURS[fmt], ls=style, lw=1.2, label=f"{name}, {fmt}"
            )
    for fmt in FORMATS:
        axes.axvline(2.0 ** -(1 + FORMATS[fmt].mantissa), color=COLOURS[fmt], lw=0.6)
    axes.legend(fontsize=8, ncols=2)
    axes.set(
        title=f"rounding the real q, k and v, scaled by {scaling}", xlabel="relative error", ylabel="% of elements"
    )


def draw_bars(axes: Axes, tables: Mapping[str, Mapping[tuple[str, str, str], float]], title: str) -> None:
    """Errors of FP8 attention: a group for each (scaling, beforehand), a bar for each format of each table."""
    first = next(iter(tables.values()))
    groups = list(dict.fromkeys((scaling, before) for _, scaling, before in first))
    kinds = [(name, fmt) for name in tables for fmt in dict.fromkeys(fmt for fmt, _, _ in first)]
    width = 0.8 / len(kinds)
    for i, (name, fmt) in enumerate(kinds):
        heights = [tables[name][(fmt, *group)] for group in groups]
        at = np.arange(len(groups)) + (i - (len(kinds) - 1) / 2) * width
        label = f"{name}, {fmt}" if len(tables) > 1 else fmt
        axes.bar(
            at, heights, width * 0.92, color=COLOURS[fmt], alpha=1 if name == next(iter(tables)) else 0.5, label=label
        )
    words = [f"{scaling}\n{before}" if before else scaling for scaling, before in groups]
    axes.set_xticks(range(len(groups)), words, fontsize=8)
    axes.set_ylim(0, 1.35 * axes.get_ylim()[1])  # room for the legend
    axes.legend(fontsize=8, ncols=2)
    axes.set(title=title, ylabel="RMSE of o")


def draw_columns(axes: Axes, before: np.ndarray, after: np.ndarray, title: str) -> None:
    """The largest number of each column, before and after it was spread: ``[rows, D]`` each."""
    for x, color, label in ((before, GREY, "as it is"), (after, BLUE, "times signs and Hadamard")):
        axes.step(range(x.shape[-1]), np.abs(x).max(0), where="mid", color=color, label=label)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    axes.set(title=title, xlabel="column", ylabel="largest |x|")


def quads() -> np.ndarray:
    """Which of 16 keys each column of S is where K is copied in the order QUADS: ``[16]``."""
    from flashnumba.tiles.chain import QUADS

    lane, tile, pair = QUADS
    return np.array([lane * (c % 8 // 2) + tile * (c // 8) + pair * (c % 2) for c in range(16)])


def draw_permutation(axes: Axes, orders: Mapping[str, Sequence[int]]) -> None:
    """Of 16 keys of a row: which lane of four has each after the first product, and which one wants it.

    Args:
        orders: by name, the key of each of 16 columns of S, in which K's rows were copied.
    """
    colours = np.array([BLUE, ORANGE, GREEN, RED])
    for row, (name, order) in enumerate(orders.items()):
        y = -3 * row
        for column, key in enumerate(order):
            has, wants = column % 8 // 2, key // 4
            for dy, lane, edge in ((0, has, "white"), (-1, wants, "white")):
                place = (column if dy == 0 else key, y + dy)
                axes.add_patch(_box(place, colours[lane], edge))
                axes.text(place[0] + 0.5, place[1] + 0.4, key, ha="center", va="center", fontsize=7, color="white")
            if has != wants:
                axes.plot([column + 0.5, key + 0.5], [y, y - 0.2], color=GREY, lw=0.6)
        axes.text(-0.3, y + 0.4, f"{name}: S has", ha="right", va="center", fontsize=8)
        axes.text(-0.3, y - 0.6, "P wants", ha="right", va="center", fontsize=8)
    for lane, color in enumerate(colours):
        axes.plot([], [], "s", color=color, label=f"lane {lane}")
    axes.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.02), frameon=False)
    axes.set(xlim=(-5.5, 16.2), ylim=(-3 * len(orders) + 1.7, 1.3), title="keys of a row, by the lane that holds them")
    axes.axis("off")


def _box(place: tuple[float, float], color: str, edge: str):
    from matplotlib.patches import Rectangle

    return Rectangle(place, 1, 0.8, fc=color, ec=edge, lw=1.2)
