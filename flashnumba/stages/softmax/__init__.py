"""The stage softmax: overflow, three passes, and who reads what. ``reference.py`` tells the mathematics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from flashnumba.data import load_minilm
from flashnumba.stages import figures
from flashnumba.stages.softmax import reference
from flashnumba.stages.stage import Case, Passes, Result, Rung, Stage

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["STAGE"]


def case(name: str, scores: np.ndarray, dtype: DTypeLike) -> Case:
    """A case of this stage: float64 ``scores [rows, columns]``, rounded to ``dtype`` as a kernel is given them.

    The judge is the formula as written: in float64 these scores do not overflow, so it stands apart from the safe form.
    """
    x = scores.astype(dtype)
    size = f"{x.shape[0]} x {x.shape[1]} {x.dtype.name}"
    return Case(name, {"x": x}, reference.naive(x), reference.low_precision(x), size)


def cases(machine: str, full: bool) -> Sequence[Case]:
    """Rows of real scores: one head in float16 that reaches 79, one in bfloat16 with a tail, one in float32.

    On a GPU every head of the layer; on the emulator some rows of one, or all 512 if ``full``.
    """
    data = load_minilm()
    if machine == "cuda":
        every = [np.concatenate([data.scores(layer, head) for head in range(12)]) for layer in range(3)]
        names = [f"layer {data.layers[layer]}, 12 heads" for layer in range(3)]
    else:
        every = [data.scores(0, 2), data.scores(1, 8), data.scores(2, 0)]
        names = [f"layer {data.layers[layer]}, head {head}" for layer, head in ((0, 2), (1, 8), (2, 0))]
        if not full:
            # Every 8th query and the one with the greatest score.
            peak = int(every[0].max(1).argmax())
            every = [every[0][peak % 8 :: 8], every[1][::32], every[2][::32]]
    return (
        case(names[0], every[0], np.float16),
        case(names[1], every[1][:, :500], ml_dtypes.bfloat16),
        case(names[2], every[2], np.float32),
    )


def kernel(name: str, summary: str) -> Rung:
    def run(case: Case, machine: str) -> np.ndarray:
        from flashnumba.stages.softmax import simt

        return simt.softmax(case.inputs["x"], kernel=name, machine=machine)

    return Rung(name, "simt", run, Passes(3, 1), summary=summary)


def by(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[Case, str], np.ndarray]:
    return lambda case, machine: function(case.inputs["x"])


def draw(results: Sequence[Result]) -> Figure:
    """One real row and what float16 makes of it; then the error and the traffic of each rung."""
    figure, (scores, weights, errors, traffic) = figures.four_panels("softmax: real scores overflow float16")
    x = results[0].case.inputs["x"]
    row = x[int(x.max(1).argmax())]
    limit = float(np.log(np.finfo(np.float16).max))
    over = row.astype(np.float64) > limit
    keys = np.arange(len(row))
    scores.plot(keys[~over], row[~over], ".", color=figures.GREY, label="exp fits float16")
    scores.plot(keys[over], row[over], ".", color=figures.RED, label=f"exp overflows ({over.sum()} of {len(row)} keys)")
    scores.axhline(limit, color=figures.RED, lw=1, ls="--")
    scores.text(
        1.01, limit, f"{limit:.2f}", color=figures.RED, fontsize=8, va="center", transform=scores.get_yaxis_transform()
    )
    scores.set(title=f"scaled scores of one query ({results[0].case.name})", xlabel="key", ylabel="score")
    scores.legend(fontsize=8)

    naive, safe = reference.naive(row, np.float16), reference.safe(row)
    bad = np.isnan(naive)
    weights.semilogy(keys, safe, ".", color=figures.BLUE, label="safe softmax, float64")
    weights.plot(keys[bad], np.full(bad.sum(), 1e5), "|", color=figures.RED, label="naive softmax, float16: NaN")
    weights.set(title=f"its weights: naive gives {bad.sum()} NaN, 0 elsewhere", xlabel="key", ylabel="weight")
    weights.set_ylim(safe.min() * 1e-15)
    weights.legend(fontsize=8, loc="lower right", ncols=2)
    figures.errors(errors, results)
    figures.traffic(traffic, results)
    return figure


STAGE = Stage(
    name="softmax",
    title="Softmax",
    question="How does a row of scores become weights without overflow, and who reads what?",
    teaches="overflow, three passes, who reads what",
    lesson="01_softmax",
    rungs=(
        Rung(
            "naive", "reference", by(lambda x: reference.naive(x, np.float16)), Passes(2, 1),
            summary="the formula as written, in float16",
            takes=lambda case: case.inputs["x"].dtype == np.float16, must_fail="float16 overflow",
        ),
        Rung("safe", "reference", by(reference.safe), Passes(3, 1), summary="maximum, sum, quotient, in float64"),
        kernel("warp_per_row", "one warp a row, shuffles, no shared memory"),
        kernel("block_per_row", "one block a row, warps meet in shared memory"),
        kernel("vectorized", "16-byte loads and stores"),
    ),
    cases=cases,
    draw=draw,
)  # fmt: skip
