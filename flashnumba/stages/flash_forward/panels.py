"""Pictures of the stage: which tiles of S are computed, how the state of a row grows, what is moved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from flashnumba.stages.figures import BLUE, GREEN, GREY, ORANGE, RED
from flashnumba.stages.flash_forward.count import FULL, MASKED, SKIPPED, Moved, tile_kinds
from flashnumba.stages.flash_forward.reference import blocked

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_bytes", "draw_running", "draw_tiles"]

KINDS = {
    FULL: ("computed whole", "#9ecae1"), MASKED: ("computed and masked", "#fdd49e"), SKIPPED: ("skipped", "#eceff1"),
}  # fmt: skip
PARTS = {
    "once": ("q, k, v, o once", GREEN), "again": ("k, v again, for every row tile", BLUE),
    "scores": ("S and P, written and read", ORANGE), "parts": ("unfinished states", GREY),
}  # fmt: skip


def draw_tiles(axes: Axes, m: int, n: int, bm: int, bn: int, causal: bool = True) -> None:
    """The tiles of S as a kernel with tiles of ``bm`` rows and ``bn`` keys treats them; the line is the last key that a
    row sees."""
    kinds = tile_kinds(m, n, bm, bn, causal)
    for row, key in np.ndindex(*kinds.shape):
        size = min(bn, n - key * bn), min(bm, m - row * bm)
        color = KINDS[int(kinds[row, key])][1]
        axes.add_patch(_rectangle((key * bn, row * bm), *size, fc=color, ec="white", lw=1.5))
    if causal:
        axes.plot([n - m, n], [0, m], color=RED, lw=1.6)
    for kind, (words, color) in KINDS.items():
        count = int((kinds == kind).sum())
        if count:
            axes.plot([], [], "s", ms=9, color=color, label=f"{words}: {count}")
    axes.set(xlim=(0, n), ylim=(m, 0), xlabel="key", ylabel="query", aspect="equal")
    axes.set_title(f"S of {m} queries and {n} keys in tiles of {bm} x {bn}{', causal' if causal else ''}")
    axes.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.16), handletextpad=0.2)


def _rectangle(*args, **options):
    from matplotlib.patches import Rectangle

    return Rectangle(*args, **options)


def draw_running(axes: Axes, q: np.ndarray, k: np.ndarray, v: np.ndarray, row: int, block: int = 32) -> None:
    """The state (m, l) of one row of one head, q ``[M, D]``, k and v ``[N, D]``, after each block of keys."""
    scores = q[row].astype(np.float64) @ k.astype(np.float64).T / np.sqrt(q.shape[-1])  # [N]
    states = [(m[0], l[0]) for m, l, _ in blocked(q[row : row + 1], k, v, block=block)]
    m, l = np.array(states).T
    ends = np.minimum(block * np.arange(1, len(m) + 1), len(scores))
    axes.plot(np.arange(len(scores)), scores, ".", ms=3, color=GREY, alpha=0.6, label="scaled score")
    axes.step([0, *ends], [m[0], *m], where="pre", color=BLUE, lw=1.8, label="maximum m")
    for end in ends[:-1]:
        axes.axvline(end, color="#dddddd", lw=0.7, zorder=0)
    axes.set(xlabel=f"key; a line after each block of {block}", ylabel="score, m", xlim=(0, len(scores)))
    axes.set_ylim(top=scores.max() + 0.2 * np.ptp(scores))  # room for the legend
    axes.set_title(f"query {row}: what is kept, after each block of keys")
    right = axes.twinx()
    right.plot(ends, l, "o-", color=ORANGE, ms=3.5, lw=1, label="sum l")
    right.set_ylabel("l, in units of exp(m)", color=ORANGE)
    right.set_ylim(0, 1.3 * l.max())
    right.spines["top"].set_visible(False)
    right.spines["right"].set_visible(True)
    handles = [*axes.get_legend_handles_labels()[0], *right.get_legend_handles_labels()[0]]
    right.legend(handles=handles, fontsize=8, loc="upper left", ncols=3)


def draw_bytes(axes: Axes, rows: Mapping[str, Moved]) -> None:
    """Megabytes of device memory by count, a bar each, by what they are for."""
    left = np.zeros(len(rows))
    for part, (words, color) in PARTS.items():
        width = np.array([getattr(moved, part) for moved in rows.values()]) / 2**20
        if width.any():
            axes.barh(range(len(rows)), width, left=left, color=color, height=0.6, label=words)
        left += width
    for y, total in enumerate(left):
        axes.text(total + 0.01 * left.max(), y, f"{total:.3g} MB", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), list(rows), fontsize=8)
    axes.set(xlim=(0, 1.15 * left.max()), ylim=(len(rows) - 0.4, -0.6), xlabel="MB (2^20 bytes) by count")
    axes.legend(fontsize=8, loc="lower right")
