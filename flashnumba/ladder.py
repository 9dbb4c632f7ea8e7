"""THE list of stages, in the order in which they build on one another; the command line, docs and tests all read it.

To add a stage: a folder under ``flashnumba/stages`` that exposes ``STAGE``, and its name here.
"""

from __future__ import annotations

from importlib import import_module

from flashnumba.stages.stage import Case, Passes, Result, Rung, Stage, measure

__all__ = ["STAGES", "Case", "Passes", "Result", "Rung", "Stage", "find", "measure"]

NAMES = (
    "softmax",
    "online_softmax",
)

STAGES: tuple[Stage, ...] = tuple(import_module(f"flashnumba.stages.{name}").STAGE for name in NAMES)


def find(name: str) -> Stage:
    """The stage called ``name``.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    for stage in STAGES:
        if stage.name == name:
            return stage
    raise ValueError(f"there is no stage {name!r}; the stages are {', '.join(NAMES)}")
