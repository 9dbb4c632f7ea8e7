"""Which tile size finishes first: large tiles reuse more, small ones leave fewer multiprocessors without work.

The multiprocessor with most tiles finishes last, and a tile costs its area::

    time  ~  ceil(tiles / multiprocessors) * bm * bn / speed

where ``speed`` is what the size reaches on a large product, relative to the best.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from flashnumba.machine import gpu
from flashnumba.stages.gemm.problem import Shape

__all__ = ["TileChoice", "cheapest", "multiprocessors", "tiles_of"]

WITHOUT_GPU = 132
"""Multiprocessors to plan for where there is no GPU: those of an H200."""


class TileChoice(NamedTuple):
    """A tile size (what has attributes ``bm`` and ``bn``) and its speed."""

    tiles: Any
    speed: float


def multiprocessors() -> int:
    """Of the current GPU; an H200's where there is none."""
    return gpu.multiprocessors() if gpu.available() else WITHOUT_GPU


def tiles_of(shape: Shape, tiles: Any) -> tuple[int, int]:
    """(rows, columns) of tiles that cover C."""
    return -(-shape.m // tiles.bm), -(-shape.n // tiles.bn)


def cheapest(shape: Shape, choices: Iterable[TileChoice], sms: int = 0) -> Any:
    """The tiles with the least time by the module's formula; of equals, the first. ``sms`` is by default the GPU's."""
    sms = sms or multiprocessors()

    def time(choice: TileChoice) -> float:
        rows, cols = tiles_of(shape, choice.tiles)
        return -(-rows * cols // sms) * choice.tiles.bm * choice.tiles.bn / choice.speed

    return min(choices, key=time).tiles
