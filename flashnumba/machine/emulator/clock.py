"""Happens-before, by vector clocks (the idea of FastTrack, Flanagan and Freund, PLDI 2009).

An *agent* is a thread or an asynchronous engine (an mbarrier's copies, a warpgroup's wgmma). An *epoch* is one
moment of one agent, packed in an integer: ``agent << 32 | time``. A thread knows, for each agent, up to which time
that agent's work is ordered before its own: its vector. What is not known so is concurrent.

After a barrier all threads know the same, so they share one :class:`Clock`; a thread's own time is kept beside it.

A vector has a second part, one entry a thread: up to which time that thread's ordinary stores are behind a proxy
fence. A fence copies what is known into it; joins carry both parts along, so a fence counts wherever it lies on the
way from the store to the asynchronous read (PTX ISA, "Memory consistency model: causality order", proxy-preserved
base causality).
"""

from __future__ import annotations

import numpy as np

__all__ = ["MASK", "SHIFT", "Clock", "merge"]

SHIFT = 32
MASK = (1 << SHIFT) - 1


class Clock:
    """What one or several threads know of all agents. Immutable but for the memory of past answers."""

    __slots__ = ("known", "known_sets", "merged", "vector")

    def __init__(self, vector: np.ndarray):
        self.vector = vector  # [agents + threads] int64
        self.known: set[int] = set()  # epochs found to be ordered before
        self.known_sets: set[int] = set()  # reader sets of shared memory, likewise
        self.merged: dict[int, tuple[Clock, Clock]] = {}

    def orders(self, epoch: int) -> bool:
        """Whether the work at this epoch happened before whatever holds this clock does next."""
        if epoch in self.known:
            return True
        if self.vector[epoch >> SHIFT] >= epoch & MASK:
            self.known.add(epoch)
            return True
        return False

    def joined(self, other: Clock) -> Clock:
        """The union of both; the same object again for the same pair, so that threads in step keep sharing one."""
        if other is self:
            return self
        hit = self.merged.get(id(other))
        if hit is not None:
            return hit[1]
        result = Clock(np.maximum(self.vector, other.vector))
        self.merged[id(other)] = (other, result)
        return result


def merge(clocks: list[Clock]) -> np.ndarray:
    """A fresh vector: the union of some clocks."""
    distinct = {id(c): c for c in clocks}
    vectors = [c.vector for c in distinct.values()]
    return vectors[0].copy() if len(vectors) == 1 else np.maximum.reduce(vectors)
