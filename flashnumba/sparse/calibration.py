"""From a share of tiles to leave out to a threshold, as BLASST does it: an exponential, fitted to samples.

A threshold leaves out more of a longer sequence, as each weight is a smaller part of the sum. For a threshold t and N
keys, the share s that is left out follows ::

    t N = alpha exp(beta s)

with two numbers for a model (and others for decoding), which :func:`calibrate` fits to data.

Source: BLASST, arXiv 2512.12087v3, section on calibration.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["PUBLISHED", "TRIALS", "Calibration", "calibrate"]

TRIALS = (1e-6, 1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 0.5, 0.7)
"""Thresholds that are tried on each sample."""
TRUSTED = (0.1, 0.9)
"""Shares that count: near 0 and 1 a threshold says little."""
CLOSEST = 1e-3
"""Shares that differ by less are one point of a line."""
LARGEST = 1 - 2.0**-20


@dataclass(frozen=True)
class Calibration:
    """``threshold = alpha exp(beta share) / keys``.

    Raises:
        ValueError: alpha is not above 0, beta is below 0, or one is not finite: more to leave out takes a greater
            threshold.
    """

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        if not (0 < self.alpha < math.inf and 0 <= self.beta < math.inf):
            raise ValueError(f"alpha is {self.alpha!r} and beta {self.beta!r}; they must be above 0, and at least 0")

    def threshold(self, share: float, keys: int) -> float:
        """The threshold that leaves out about ``share`` of the tiles of ``keys`` keys; 0 for a share of 0."""
        if not 0 <= share < 1:
            raise ValueError(f"share is {share!r}; it must be at least 0 and below 1")
        if share == 0 or keys == 0:
            return 0.0
        power = math.log(self.alpha) + self.beta * share - math.log(keys)
        return LARGEST if power >= 0 else min(LARGEST, math.exp(power))  # exp of what is far above 0 overflows


PUBLISHED = {"prefill": Calibration(7.92, 8.615), "decode": Calibration(0.1196, 9.857)}
"""Fits to the factors that TensorRT-LLM publishes for one model, Qwen3-30B-A3B: a place to begin, no more."""


def calibrate(
    samples: Iterable[tuple[Any, Any, Any]], *, trials: Sequence[float] = TRIALS, causal: bool = True,
    scale: float | None = None, backend: str = "auto",
) -> Calibration:  # fmt: skip
    """Fit a :class:`Calibration` to data: measure the share left out at some thresholds, then least squares of
    ``ln(threshold N)`` over the share.

    Args:
        samples: (q, k, v) as :func:`flashnumba.sparse.blasst_attention` takes them, of several lengths.
        trials: thresholds.
        causal, scale, backend: as of the function that will use it.

    Raises:
        ValueError: fewer than two different shares between 0.1 and 0.9 were seen, which make no line; or less was left
            out at a greater threshold.
    """
    from flashnumba.sparse.methods import blasst_attention

    points: list[tuple[float, float]] = []
    for q, k, v in samples:
        for threshold in trials:
            _, info = blasst_attention(
                q, k, v, threshold=threshold, causal=causal, scale=scale, return_info=True, backend=backend
            )
            share = info.skipped()
            if TRUSTED[0] <= share <= TRUSTED[1]:
                points.append((share, math.log(threshold * k.shape[-2])))
    shares = [share for share, _ in points]
    if max(shares, default=0) - min(shares, default=0) < CLOSEST:
        raise ValueError(
            f"{len(points)} of the trials left out between {TRUSTED[0]:.0%} and {TRUSTED[1]:.0%}; a line takes two "
            "that differ: give longer samples, or other trials"
        )
    mean_x, mean_y = (sum(p[i] for p in points) / len(points) for i in (0, 1))
    beta = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    if not 0 < beta < 600:  # exp(600) is about what float64 has
        raise ValueError(f"the line through {len(points)} trials rises by {beta:.3g}; it must rise: give more samples")
    return Calibration(math.exp(mean_y - beta * mean_x), beta)
