"""THE list of stages, in the order in which they build on one another; the command line, docs and tests all read it.

To add a stage: a folder under ``flashnumba/stages`` that exposes ``STAGE``, and its name here.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from flashnumba.stages.stage import Case, Passes, Result, Rung, Stage, measure

if TYPE_CHECKING:
    from flashnumba.machine.compiler import CompileCase
    from flashnumba.stages.heads import Planner

__all__ = ["STAGES", "Case", "Passes", "Result", "Rung", "Stage", "compile_cases", "find", "measure", "traced"]

NAMES = (
    "softmax",
    "online_softmax",
    "gemm",
    "flash_forward",
    "chained_gemm",
    "staged_buffers",
    "causal_balance",
    "backward",
    "fp8",
    "sparsity",
    "flash_mla",
)

STAGES: tuple[Stage, ...] = tuple(import_module(f"flashnumba.stages.{name}").STAGE for name in NAMES)


TIERS = ("simt", "mma", "wgmma")


def compile_cases() -> Iterator[CompileCase]:
    """Every kernel of every stage as it is launched, for the compiler's tables and gates.

    A stage's ``simt.py``, ``mma.py`` and ``wgmma.py``, as it has them, each name theirs in ``compile_cases()``.
    """
    for name in NAMES:
        for module in (f"flashnumba.stages.{name}.{tier}" for tier in TIERS):
            if find_spec(module):
                yield from import_module(module).compile_cases()


def traced() -> dict[str, Planner]:
    """Planners of the kernels that leave marks for a timeline, by ``stage.kernel``: what stages name in ``TRACED``."""
    found = {}
    for name in NAMES:
        for module in (f"flashnumba.stages.{name}.{tier}" for tier in TIERS):
            if find_spec(module):
                planners = getattr(import_module(module), "TRACED", {})
                found |= {f"{name}.{kernel}": planner for kernel, planner in planners.items()}
    return found


def find(name: str) -> Stage:
    """The stage called ``name``.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    for stage in STAGES:
        if stage.name == name:
            return stage
    raise ValueError(f"there is no stage {name!r}; the stages are {', '.join(NAMES)}")
