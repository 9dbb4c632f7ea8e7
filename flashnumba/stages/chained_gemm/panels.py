"""Pictures of the stage: the two layouts lane by lane, who sends to whom, and what each way costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from flashnumba.stages.chained_gemm.count import BY_COUNT
from flashnumba.stages.chained_gemm.layouts import Sent
from flashnumba.stages.figures import BLUE, GREEN, GREY, ORANGE, RED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_costs", "draw_layouts", "draw_senders", "owners"]

KINDS = {
    "store": RED, "load": ORANGE, "barrier": GREY, "take a half": "#f2c9a1", "shuffle": BLUE, "select": "#7fb7d9",
    "join halves": "#c7dff0",
}  # fmt: skip


def owners(of: np.ndarray) -> np.ndarray:
    """The lane that holds each element of a layout ``[lane, register, element, 2]``: int ``[rows, columns]``."""
    found = np.full(of.reshape(-1, 2).max(0) + 1, -1)
    found[of[..., 0], of[..., 1]] = np.arange(len(of))[:, None, None]
    return found


def draw_layouts(axes: Axes, held: np.ndarray, wanted: np.ndarray, sharing: np.ndarray, title: str) -> None:
    """Two layouts beside one another; the number is the lane that holds an element.

    Args:
        held, wanted: ``[lane, register, element, 2]``, of 16 rows and 16 columns.
        sharing: ``[lanes]`` which of the lanes that share a row each is; it gives the colour.
    """
    pair = [owners(held), owners(wanted)]
    gap = np.full((16, 1), -1)
    lanes = np.concatenate([pair[0], gap, pair[1]], 1)  # [16, 33]
    shade = np.where(lanes < 0, np.nan, sharing[lanes])
    axes.imshow(shade, cmap="viridis", vmin=-1.2, vmax=sharing.max() + 0.6, alpha=0.75, aspect="auto")
    for (row, column), lane in np.ndenumerate(lanes):
        if lane >= 0:
            axes.text(column, row, lane, ha="center", va="center", fontsize=6)
    for row, column in np.argwhere(pair[0] != pair[1]):
        axes.plot(17 + column + 0.38, row - 0.34, ".", color=RED, ms=3)
    axes.plot([], [], ".", color=RED, ms=6, label="another lane has it")
    axes.set_xticks([*range(0, 16, 4), *range(17, 33, 4)], [0, 4, 8, 12, 0, 4, 8, 12])
    axes.set_yticks(range(0, 16, 4))
    axes.spines[:].set_visible(False)
    axes.set(title=title, ylabel="query")
    axes.set_xlabel("key: as the first product leaves it | as the second wants it", fontsize=9, loc="left")
    axes.legend(fontsize=8, loc="upper right", bbox_to_anchor=(1, -0.15), handletextpad=0.1, frameon=False)


def draw_senders(axes: Axes, sent: Mapping[str, tuple[Sent, np.ndarray]]) -> None:
    """How many elements each lane has for each other of those that share a row.

    Args:
        sent: by name, the exchange and ``[4]`` the lanes that share the first row.
    """
    width = 0
    for name, (one, lanes) in sent.items():
        count = len(lanes)
        between = one.between()[np.ix_(lanes, lanes)]
        for (source, target), number in np.ndenumerate(between):
            x, y = width + target, source
            color = "#dddddd" if number == 0 else GREEN if source == target else ORANGE
            axes.add_patch(_rectangle((x, y), 1, 1, fc=color, ec="white", lw=2))
            if number:
                axes.text(x + 0.5, y + 0.5, number, ha="center", va="center", fontsize=9)
        total = one.stay + one.move
        words = f"{name}\n{one.move} of {total} move"
        axes.text(width + count / 2, -0.15, words, ha="center", va="bottom", fontsize=8)
        width += count + 1
    axes.plot([], [], "s", color=GREEN, label="stay")
    axes.plot([], [], "s", color=ORANGE, label="sent")
    axes.set(xlim=(-0.6, width - 0.6), ylim=(4.1, -1.2))
    axes.set_xlabel("to lane, of the four that share a row", loc="left")
    axes.set_ylabel("from lane")
    axes.set_title("elements that one lane has for another", pad=14)
    axes.set_xticks([])
    axes.set_yticks([0.5, 1.5, 2.5, 3.5], [0, 1, 2, 3])
    axes.legend(fontsize=8, loc="upper right", ncols=2, bbox_to_anchor=(1, -0.02), frameon=False)


def _rectangle(*args, **options):
    from matplotlib.patches import Rectangle

    return Rectangle(*args, **options)


def draw_costs(axes: Axes) -> None:
    """Instructions of a warp for one operand of P, by count."""
    left = np.zeros(len(BY_COUNT))
    for kind, color in KINDS.items():
        width = np.array([counts.get(kind, 0) for counts in BY_COUNT.values()])
        axes.barh(range(len(BY_COUNT)), width, left=left, color=color, height=0.6, label=kind)
        for y, (start, number) in enumerate(zip(left, width, strict=True)):
            if number:
                axes.text(start + number / 2, y, number, ha="center", va="center", fontsize=8)
        left += width
    for y, total in enumerate(left):
        if not total:
            axes.text(0.2, y, "nothing", va="center", fontsize=9, color=GREY)
    axes.set_yticks(range(len(BY_COUNT)), list(BY_COUNT), fontsize=9)
    axes.invert_yaxis()
    axes.set(title="instructions for 16 queries x 16 keys of P, by count", xlim=(0, 1.5 * left.max()))
    axes.legend(fontsize=8, loc="lower right")
