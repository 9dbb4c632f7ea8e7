"""The log of a warp while it is written: events of lane 0 in program order, with sums over all lanes beside."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["EVENTS", "FP32", "OTHER", "SPECIAL", "Event", "WarpLog", "add"]

EVENTS: Mapping[str, str] = {
    "math": "instructions in float32 | other arithmetic | special functions",
    "mma": "multiply-adds of this warp",
    "use": "number of the mma whose result is touched",
    "shared": "bytes to or from shared memory",
    "load": "bytes from device memory",
    "store": "bytes to device memory",
    "copy": "bytes of cp.async",
    "commit": "of the copies since the last one",
    "wait": "until so many groups of copies are in flight",
    "barrier": "threads that come | number | whether it waits",
    "init": "arrivals of a phase | mbarrier",
    "expect": "bytes | mbarrier",
    "arrive": "arrivals | mbarrier",
    "phase": "parity to wait for | mbarrier",
    "bulk": "bytes into shared memory | mbarrier",
    "bulk_store": "bytes out of shared memory",
    "bulk_commit": "of the bulk stores since the last one",
    "bulk_wait": "until so many groups of bulk stores are in flight",
    "wgmma": "multiply-adds of this warp",
    "wgmma_commit": "of the wgmma since the last one",
    "wgmma_wait": "until so many groups of wgmma are in flight",
    "issue": "instructions that take a turn and nothing else",
    "clock": "the clock is read",
}
"""Names of events and what their numbers mean."""
FP32, OTHER, SPECIAL = range(3)
"""Kinds of arithmetic, in the order of a ``math`` event's numbers."""
AT_ONCE = 32
"""Arithmetic instructions that are logged as one event at most."""


class Event(NamedTuple):
    """``name`` and up to three numbers, see :data:`EVENTS`."""

    name: str
    a: int = 0
    b: int = 0
    c: int = 0


class WarpLog:
    """What :func:`flashnumba.machine.emulator.events.record_events` keeps of a warp."""

    def __init__(self) -> None:
        self.entries: list[tuple[Any, ...]] = []
        self.sums: dict[Any, list[int]] = defaultdict(list)
        self.math = [0, 0, 0]

    def append(self, name: str, *numbers: Any) -> int:
        """Add an event; returns its number in the log."""
        self._close_math()
        self.entries.append((name, *numbers))
        return len(self.entries) - 1

    def compute(self, kind: int) -> None:
        """One arithmetic instruction."""
        self.math[kind] += 1
        if sum(self.math) == AT_ONCE:
            self._close_math()

    def _close_math(self) -> None:
        if any(self.math):
            self.entries.append(("math", *self.math))
            self.math = [0, 0, 0]

    def events(self) -> list[Event]:
        """The whole log, sums in their places."""
        self._close_math()
        return [
            Event(name, *(n.of[n.n] if isinstance(n, _Sum) else n for n in numbers)) for name, *numbers in self.entries
        ]


class _Sum:
    """Stands for a sum over lanes of which there are several: ``of[n]``."""

    __slots__ = ("n", "of")

    def __init__(self, of: list[int], n: int):
        self.of, self.n = of, n


def add(thread: Any, name: str, amount: int, *more: int) -> None:
    """This lane's part of the warp's next event: what lanes do for the n-th time on one line is one instruction."""
    where = (name, thread.position())
    n = thread.counts[where]
    thread.counts[where] = n + 1
    sums = thread.log.sums[where]
    if n == len(sums):
        sums.append(0)
    sums[n] += amount
    if thread.lane == 0:
        thread.log.append(name, _Sum(sums, n), *more)
