"""Pictures of the stage: weights of a head, the tiles that are computed of it, and error against what is left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from flashnumba.stages.figures import BLUE, GREEN, ORANGE, RED
from flashnumba.stages.sparsity import reference
from flashnumba.stages.sparsity.every_head import TILE, outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["THRESHOLDS", "curve", "draw_curves", "draw_map", "draw_weights"]

THRESHOLDS = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 1e-3, 1e-4)


def draw_weights(axes: Axes, q: np.ndarray, k: np.ndarray) -> None:
    """The weights of one head, ``q`` and ``k`` ``[1, 1, N, D]``, as logarithms."""
    s = reference.scores(q, k)[0, 0]  # [M, N]
    log = (s - s.max(-1, keepdims=True)) / np.log(10)  # [M, N]
    axes.imshow(np.maximum(log, -8), cmap="viridis", aspect="auto")
    axes.set_title("weights of a head, from 1e-8 of the row's greatest (dark) to it")
    axes.set_xlabel("key")
    axes.set_ylabel("row")


def draw_map(axes: Axes, q: np.ndarray, k: np.ndarray, options: Mapping[str, float]) -> None:
    """Tiles that the threshold of 0.05 computes, that the prediction does, that both do, and neither."""
    by_skip = reference.skip(reference.scores(q, k)[:, :1], *TILE, 0.05)[0, 0]  # [R, C]
    predicted = reference.predict(q, k, rows=TILE[0], keys=TILE[1], **options)[0, 0]  # [R, C]
    colours = np.ones((*by_skip.shape, 3))  # [R, C, 3]
    for which, colour in ((by_skip & ~predicted, BLUE), (predicted & ~by_skip, ORANGE), (by_skip & predicted, GREEN)):
        from matplotlib.colors import to_rgb

        colours[which] = to_rgb(colour)
    axes.imshow(colours, aspect="auto")
    axes.set_title("tiles: threshold blue, prediction orange, both green")
    axes.set_xlabel(f"tile of {TILE[1]} keys")
    axes.set_ylabel(f"tile of {TILE[0]} rows")


def curve(q: np.ndarray, k: np.ndarray, v: np.ndarray, method: str) -> Iterator[tuple[float, float]]:
    """(share of tiles left out, error of o over the size of o), for several thresholds or budgets."""
    for i, threshold in enumerate(THRESHOLDS):
        yield outcome(q, k, v, method, (i + 1) / len(THRESHOLDS) if method == "predicted" else threshold)


def draw_curves(axes: Axes, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
    """Error against what is left out, of one head."""
    for method, colour in (("block", BLUE), ("warp", GREEN), ("warp, sum kept", RED), ("predicted", ORANGE)):
        points = sorted(curve(q, k, v, method))
        axes.plot([x for x, _ in points], [max(y, 1e-8) for _, y in points], marker="o", color=colour, label=method)
    axes.set_yscale("log")
    axes.set_title("what is left out, and what it costs")
    axes.set_xlabel("share of tiles left out")
    axes.set_ylabel("relative error of o")
    axes.legend(fontsize=8)
