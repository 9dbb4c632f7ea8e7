"""The training runs of ``docs/examples/train_characters.py``: a picture of their losses, and how far apart they are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from flashnumba.stages.figures import BLUE, GREEN, GREY, ORANGE
from generators.measured import facts_of
from generators.tables import markdown

__all__ = ["RECORD", "draw", "page"]

RECORD = "training.json"
"""In ``docs/results``; the script writes it."""
PICTURE = "training.svg"


def page(path: Path) -> str:
    """What was measured, with the picture; or how to measure it."""
    if not path.is_file():
        return (
            f"Not measured here: no file `docs/results/{path.name}`. On a GPU, "
            "`python docs/examples/train_characters.py` writes it.\n"
        )
    held, _, facts = facts_of(path)
    runs = [
        (run["name"], run["seed"], f"{run['loss'][0]:.3f}", f"{_end(run['loss']):.3f}", f"{run['seconds']:.1f}")
        for run in held["runs"]
    ]
    apart = [
        (pair["one"], pair["other"], _small(pair["mean"]), _small(pair["largest"]), _equal(pair))
        for pair in held["distances"]
    ]
    return (
        f"{facts}\n![Losses by step, and distances between runs by step](generated/{PICTURE})\n\n"
        + markdown(("run", "seed", "first loss", "mean of the last 50", "seconds"), runs)
        + "\nLosses in nats a character. How far apart two runs are at one step:\n\n"
        + markdown(("run", "and", "mean distance", "largest", "steps with the same bits"), apart)
    ).replace("](generated/", "](/generated/")


def _end(losses: Sequence[float]) -> float:
    last = losses[-50:]
    return sum(last) / len(last)


def _small(value: float) -> str:
    return f"{value:.2g}"


def _equal(pair: Mapping[str, Any]) -> str:
    return f"{pair['equal']} of {pair['steps']}" if "equal" in pair else "not counted"


def apart(held: Mapping[str, Any], one: str, other: str, over: int = 10) -> tuple[list[int], list[float]]:
    """(steps, mean distance of two runs' losses over ``over`` steps)."""
    by_name = {run["name"]: run["loss"] for run in held["runs"]}
    each = [abs(a - b) for a, b in zip(by_name[one], by_name[other], strict=True)]
    starts = range(0, len(each), over)
    return [s + over // 2 for s in starts], [sum(each[s : s + over]) / len(each[s : s + over]) for s in starts]


def draw(path: Path, target: Path) -> None:
    """Draw the record, if it is there, to ``training.svg`` in a folder: losses, and distances on a log scale."""
    if not path.is_file():
        return
    held = json.loads(path.read_text(encoding="utf-8"))
    matplotlib.rcParams["svg.hashsalt"] = "flashnumba"
    figure = Figure(figsize=(9, 3.6), layout="constrained", facecolor="white")
    losses, distances = figure.subplots(1, 2)
    by_name = {run["name"]: run["loss"] for run in held["runs"]}
    for name, color, style, width in (
        ("torch, other seed", GREY, "-", 0.8), ("torch", ORANGE, "-", 2.6), ("flashnumba", BLUE, "-", 0.9),
    ):  # fmt: skip
        losses.plot(range(1, len(by_name[name]) + 1), by_name[name], style, color=color, lw=width, label=name)
    losses.set_ylabel("loss, nats a character")
    for pair in held["distances"]:
        one, other = pair["one"], pair["other"]
        color = GREY if "seed" in other else ORANGE if one == "torch" else GREEN if "again" in other else BLUE
        steps, mean = apart(held, one, other)
        if any(mean):
            distances.plot(steps, mean, color=color, lw=1.4, label=f"{one} - {other}")
        else:
            distances.plot([], [], color=color, lw=1.4, label=f"{one} - {other}: 0 throughout")
    distances.set_yscale("log")
    distances.set_ylabel("distance of losses, mean of 10 steps")
    for axes in (losses, distances):
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", lw=0.6)
        axes.legend(fontsize=8, frameon=False)
    figure.savefig(target / PICTURE, metadata={"Date": None})
