"""Threads that are slow: an order in which races show that a fair one hides.

The emulator lets threads take turns, so a thread is never late by more than a turn. On a GPU a warp may be late by any
time. Slow threads go on only when no other can, and stop to let the others by at every mbarrier.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import pytest

from flashnumba.machine.emulator.barriers import Mbarrier
from flashnumba.machine.emulator.launch import Launch

__all__ = ["make_slow"]

PATIENCE = 30
"""Turns in a row after which a thread that polls lets slow ones by."""


class _Ready(deque):
    def __init__(self, slow: frozenset[int]):
        super().__init__()
        self.slow, self.last, self.turns = slow, None, 0

    def popleft(self) -> Any:
        polls = self.last if self.turns > PATIENCE else None
        at = next((i for i, t in enumerate(self) if t.tid not in self.slow and t is not polls), 0)
        thread = self[at]
        del self[at]
        self.turns = self.turns + 1 if thread is self.last else 0
        self.last = thread
        return thread


def make_slow(monkeypatch: pytest.MonkeyPatch, threads: Iterable[int]) -> None:
    """In all launches on the emulator during this test the threads of these numbers are slow."""
    slow = frozenset(threads)
    start = Launch.__init__

    def init(self, *args, **options):
        start(self, *args, **options)
        self.ready = _Ready(slow)

    monkeypatch.setattr(Launch, "__init__", init)
    for name in ("wait", "test", "arrive"):
        method = getattr(Mbarrier, name)

        def late(self, thread, *rest, method=method):
            if thread.tid in slow:
                thread.give_way()
            return method(self, thread, *rest)

        monkeypatch.setattr(Mbarrier, name, late)
