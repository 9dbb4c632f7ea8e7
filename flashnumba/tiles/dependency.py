"""A kernel and the one that follows it: from sm_90 on the second may start while the first still runs.

See :mod:`flashnumba.machine.instructions.dependency`. On older GPUs the steps are empty, and the second kernel starts
when the first has ended.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import grid_dependency_trigger, grid_dependency_wait

__all__ = ["can_start_early", "make_trigger", "make_wait"]


def can_start_early(arch: str) -> bool:
    """Whether a kernel for ``arch`` may be declared ``early``."""
    return int(arch.rstrip("a")) >= 90


@device
def nothing():
    pass


@cache
def make_trigger(arch: str) -> DeviceFunction:
    """``trigger()``: all blocks have started, so the next kernel may take the room they leave, and wait there."""

    @device
    def trigger():
        grid_dependency_trigger()

    return trigger if can_start_early(arch) else nothing


@cache
def make_wait(arch: str, waits: bool = True) -> DeviceFunction:
    """``wait()``: what the kernel ahead wrote is there. ``waits=False`` plants a fault."""

    @device
    def wait():
        grid_dependency_wait()

    return wait if can_start_early(arch) and waits else nothing
