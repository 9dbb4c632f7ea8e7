"""The stage online_softmax: the (m, d) recurrence and its merge. ``reference.py`` tells the mathematics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import DTypeLike

from flashnumba.data import load_minilm
from flashnumba.stages import figures
from flashnumba.stages.online_softmax import reference
from flashnumba.stages.softmax.reference import safe
from flashnumba.stages.stage import Case, Passes, Result, Rung, Stage

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["STAGE"]

PARTS = 8


def case(name: str, scores: np.ndarray, dtype: DTypeLike) -> Case:
    """A case of this stage: float64 ``scores [rows, columns]`` in ``dtype``, judged by the three-pass softmax."""
    x = scores.astype(dtype)
    size = f"{x.shape[0]} x {x.shape[1]} {x.dtype.name}"
    return Case(name, {"x": x}, safe(x), reference.low_precision(x), size)


def cases(machine: str, full: bool) -> Sequence[Case]:
    """Rows of one real head in float16; and long rows in float32: what one query scores in every head, end to end.

    The heads of a layer differ much in size, so the long rows' maximum moves late and the merge has real work to do.
    """
    data = load_minilm()
    layers = range(3) if full or machine == "cuda" else range(1)
    wide = np.concatenate([data.scores(layer, head) for layer in layers for head in range(12)], axis=1)
    short = data.scores(0, 2)
    name = f"layer {data.layers[0]}, head 2"
    peak = int(short.max(1).argmax())
    keep = 1 if full else 8
    if machine == "cuda":
        wide = wide[peak % keep :: keep]
    else:
        short, wide = short[peak % keep :: keep], wide[peak % (16 * keep) :: 16 * keep]
    return (
        case(name, short, np.float16),
        case(f"{len(layers)} layer{'s' if len(layers) > 1 else ''}, 12 heads in a row", wide, np.float32),
    )


def kernel(name: str, traffic: Passes, summary: str, arch: str = "75") -> Rung:
    def run(case: Case, machine: str) -> np.ndarray:
        from flashnumba.stages.online_softmax import simt

        return simt.softmax(case.inputs["x"], kernel=name, machine=machine)

    return Rung(name, "simt", run, traffic, arch=arch, summary=summary)


def draw(results: Sequence[Result]) -> Figure:
    """The recurrence along a real long row, the tree that merges its parts, the error and the traffic of each rung."""
    title = "online softmax: maximum and sum in one pass, merged from parts"
    figure, (running, merging, errors, traffic) = figures.four_panels(title)
    x = max((result.case.inputs["x"] for result in results), key=lambda x: x.shape[1])
    row = x[int(x.max(1).argmax())].astype(np.float64)
    m, d = np.array(list(reference.steps(row))).T
    at = np.arange(1, len(row) + 1)
    running.plot(at, row, ".", ms=2, color=figures.GREY, alpha=0.5, label="score x")
    running.step(at, m, where="post", color=figures.BLUE, lw=1.6, label="running maximum m")
    running.set(title=f"one row of {len(row)} real scores, read once", xlabel="elements read", ylabel="score")
    right = running.twinx()
    right.semilogy(at, d, color=figures.ORANGE, lw=1.0, label="running sum d")
    right.set_ylabel("d, in units of exp(m)", color=figures.ORANGE)
    handles = [*running.get_legend_handles_labels()[0], *right.get_legend_handles_labels()[0]]
    right.legend(handles=handles, fontsize=8, loc="upper right", bbox_to_anchor=(1, 0.92))
    draw_tree(merging, row)
    figures.errors(errors, results)
    figures.traffic(traffic, results)
    return figure


def draw_tree(axes: Axes, row: np.ndarray) -> None:
    """The merge of :data:`PARTS` parts of ``row``, a round a line, each state as (m, d)."""
    level = [reference.scan(part) for part in np.array_split(row, PARTS)]
    where = [float(i) for i in range(PARTS)]
    y = 0.0
    while True:
        for x, (m, d) in zip(where, level, strict=True):
            box = {"boxstyle": "round,pad=0.25", "fc": "white", "ec": figures.BLUE}
            axes.text(x, y, f"{m:.1f}\n{d:.3g}", ha="center", va="center", fontsize=8, bbox=box, zorder=3)
        if len(level) == 1:
            break
        above = [(a + b) / 2 for a, b in zip(where[::2], where[1::2], strict=True)]
        for i, x in enumerate(where):
            axes.plot([x, above[i // 2]], [y, y + 1], color=figures.GREY, lw=1, zorder=1)
        level = [reference.merge(a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
        where, y = above, y + 1
    axes.set(title=f"its {PARTS} parts, merged (m above, d below)", xlim=(-0.7, PARTS - 0.3), ylim=(-0.5, y + 0.5))
    axes.set_xticks(range(PARTS), [f"part {i}" for i in range(PARTS)], fontsize=8)
    axes.set_yticks([])
    axes.tick_params(length=0)


STAGE = Stage(
    name="online_softmax",
    title="Online softmax",
    question="Can one pass find the maximum and the sum, and may the row be cut into parts?",
    teaches="the (m, d) recurrence, the associative merge",
    lesson="02_online_softmax",
    rungs=(
        Rung(
            "scan", "reference", lambda case, machine: reference.online(case.inputs["x"]), Passes(2, 1),
            summary="the recurrence, element by element, then the quotient",
        ),
        Rung(
            "tree", "reference", lambda case, machine: reference.online(case.inputs["x"], PARTS), Passes(2, 1),
            summary=f"{PARTS} parts, each scanned alone, merged as a tree",
        ),
        kernel("two_pass", Passes(2, 1), "one pass for (m, d), one for the quotient"),
        kernel("one_pass", Passes(1, 1), "the row stays in registers between sum and quotient"),
        kernel("split", Passes(1, 1), "a row over several blocks, merged through global memory"),
        kernel("split_ahead", Passes(1, 1), "the same, with the copy engine loading chunks ahead", arch="90"),
    ),
    cases=cases,
    draw=draw,
)  # fmt: skip
