"""The kernels of a stage that has plans: which there are, and their launches for a shape."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

__all__ = ["kernels_of", "planned"]

TIERS = ("wgmma", "mma", "simt")
"""A stage's files, the fastest first: if time runs out, the slow kernels are those left out."""


def modules(stage: str) -> Iterator[tuple[str, ModuleType]]:
    for tier in TIERS:
        name = f"flashnumba.stages.{stage}.{tier}"
        if find_spec(name):
            yield tier, import_module(name)


def kernels_of(stage: str) -> tuple[str, ...]:
    """The names in the ``PLANS`` of a stage, from its first rung to its last."""
    names = [name for _, module in modules(stage) for name in reversed(module.PLANS)]
    return tuple(reversed(names))


def planned(
    stage: str, shape: Any, kernels: Collection[str], *, asked: bool = False, wide: bool = False
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Kernels by name, each with what makes its plan, which may raise.

    Args:
        shape: the stage's.
        kernels: names in the stage's ``PLANS``.
        asked: somebody asked for them, so one that does not take the shape is named too; its plan raises ValueError.
        wide: after each file's kernels those of its ``variants(shape)``: the same in other sizes.
    """
    for tier, module in modules(stage):
        names = [name for name in reversed(module.PLANS) if name in kernels]
        fits = [name for name in names if not _refused(partial(module.PLANS[name], shape))]
        for name in names if asked else fits:
            yield name, partial(module.PLANS[name], shape)
        if wide and fits and hasattr(module, "variants"):
            try:
                others = module.variants(shape)
            except ValueError:
                continue
            for label, plan in others.items():
                yield f"{tier} {label}", partial(_as_it_is, plan)


def _refused(plan: Callable[[], Any]) -> bool:
    """Whether the shape does not fit. Any other exception is a failure, to be told where the plan is used."""
    try:
        plan()
    except ValueError:
        return True
    except Exception:
        return False
    return False


def _as_it_is(plan: Any) -> Any:
    return plan
