"""What each warp did, in its order: a launch on the emulator that writes down events for a cost model.

The emulator knows no time. This log has what a model of time needs (:mod:`flashnumba.machine.timeline.replay`): for
each warp the instructions that occupy a unit or wait for something, with bytes and multiply-adds, in program order.

It follows lane 0 of each warp. Bytes and arrivals are those of all lanes: what they do for the n-th time on one line
of the source is taken for one instruction. Arithmetic is counted, not listed: fused multiply-adds, maxima, conversions
and exponentials where they are called, other float32 arithmetic by the registers that it writes. Integer arithmetic,
addresses and branches are not seen.

A kernel that reads a clock gets the number of the event at which it did, so that whatever it writes down can be turned
into a time once the log has been replayed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from greenlet import getcurrent

from flashnumba.machine.emulator.arrays import GlobalArray, SharedArray
from flashnumba.machine.emulator.block import Block
from flashnumba.machine.emulator.event_log import EVENTS, FP32, OTHER, SPECIAL, Event, WarpLog, add
from flashnumba.machine.emulator.event_notes import bind_logged
from flashnumba.machine.emulator.launch import Launch, Names, Report
from flashnumba.machine.emulator.names import BUILTINS, CUDA, MATH
from flashnumba.machine.emulator.registers import LocalArray, LocalStore
from flashnumba.machine.emulator.tensor_core import settings
from flashnumba.machine.function import Kernel

__all__ = ["EVENTS", "Event", "Events", "record_events"]


@dataclass(frozen=True)
class Events:
    """The log of a launch.

    Attributes:
        warps: events in order, by (block, warp); blocks are numbered x first.
        threads: a block.
        report: what the launch moved.
    """

    warps: dict[tuple[int, int], list[Event]]
    threads: int
    report: Report


def record_events(
    kernel: Kernel, grid: int | Sequence[int], block: int | Sequence[int], args: Sequence[Any], *, shared: int = 0,
    arch: str = "90a", checks: bool = True, seed: int = 0,
) -> Events:  # fmt: skip
    """Run a kernel as :func:`flashnumba.machine.emulator.launch` does, and log what its warps do.

    Raises:
        Fault, ValueError: as ``launch``.
    """
    with settings.using(arch=arch):
        launch = _Logged(kernel, grid, block, args, shared, arch, checks, seed)
        report = launch.run()
    warps = {place: warp.events() for place, warp in sorted(launch.warps.items())}
    return Events(warps, int(np.prod(launch.block)), report)


def _counted(function: Callable[..., Any], *kinds: int) -> Callable[..., Any]:
    """A function of one thread that costs an instruction of each kind."""

    def call(*args: Any) -> Any:
        thread: Any = getcurrent()
        if thread.lane == 0:
            for kind in kinds:
                thread.log.compute(kind)
        return function(*args)

    return call


class _Math:
    """``math``, each function a special one with a multiplication beside it."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(MATH, name)
        return _counted(found, FP32, SPECIAL) if callable(found) else found


class _Cuda(type(CUDA)):  # type: ignore[misc]
    fma = staticmethod(_counted(CUDA.fma, FP32))
    popc = staticmethod(_counted(CUDA.popc, OTHER))


class _LoggedBlock(Block):
    def __init__(self, launch: _Logged, index: tuple[int, int, int]):
        super().__init__(launch, index)
        x, y, z = index
        number = x + launch.grid[0] * (y + launch.grid[1] * z)
        for thread in self.threads:
            thread.log = launch.warps.setdefault((number, thread.warp), WarpLog())  # type: ignore[attr-defined]
            thread.counts = defaultdict(int)  # type: ignore[attr-defined]

    def syncthreads(self, thread: Any, at: Any) -> None:
        if thread.lane == 0:
            thread.log.append("barrier", self.size, 0, 1)
        super().syncthreads(thread, at)


class _LoggedLocal(LocalArray):
    """Registers: what is written counts as arithmetic, and the first touch of an mma's result as its use."""

    __slots__ = ("event", "first", "float")

    def __init__(self, thread: Any, store: LocalStore, row: int):
        super().__init__(thread, store, row)
        self.event, self.first, self.float = -1, thread.lane == 0, self.data.dtype.kind == "f"

    def _touched(self) -> None:
        self.thread.log.append("use", self.event)
        self.event = -1

    def __getitem__(self, i: Any) -> Any:
        if self.event >= 0:
            self._touched()
        return super().__getitem__(i)

    def __setitem__(self, i: Any, value: Any) -> None:
        if self.event >= 0:
            self._touched()
        super().__setitem__(i, value)
        if self.float and self.first:
            self.thread.log.compute(FP32)


class _LoggedShared(SharedArray):
    __slots__ = ()

    def __getitem__(self, i: Any) -> Any:
        value = super().__getitem__(i)
        if not isinstance(value, SharedArray):
            add(getcurrent(), "shared", self.itemsize)
        return value

    def __setitem__(self, i: Any, value: Any) -> None:
        super().__setitem__(i, value)
        add(getcurrent(), "shared", self.itemsize)


class _LoggedGlobal(GlobalArray):
    __slots__ = ()

    def __getitem__(self, i: Any) -> Any:
        value = super().__getitem__(i)
        if not isinstance(value, GlobalArray):
            add(getcurrent(), "load", self.itemsize)
        return value

    def __setitem__(self, i: Any, value: Any) -> None:
        super().__setitem__(i, value)
        add(getcurrent(), "store", self.itemsize)


class _Logged(Launch):
    block_type, local_type, shared_type, global_type = _LoggedBlock, _LoggedLocal, _LoggedShared, _LoggedGlobal
    names = Names(
        "events",
        _Cuda(),
        _Math(),
        {name: _counted(function, OTHER) for name, function in BUILTINS.items()},
        bind_logged,
    )

    def __init__(self, *args: Any):
        self.warps: dict[tuple[int, int], WarpLog] = {}
        super().__init__(*args)
