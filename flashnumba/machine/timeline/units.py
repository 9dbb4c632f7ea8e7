"""The state of a replay: multiprocessors and their units, blocks and their barriers, warps and what they wait for."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from flashnumba.machine.emulator.event_log import Event

__all__ = ["PARTITIONS", "Block", "Groups", "Mbarrier", "Multiprocessor", "Warp"]

PARTITIONS = 4
"""Of a multiprocessor; a warp lives in one."""


@dataclass
class Multiprocessor:
    """When each unit is free: issue, tensor core and three kinds of arithmetic of each partition; what all share."""

    number: int
    issue: list[float] = field(default_factory=lambda: [0.0] * PARTITIONS)
    tensor: list[float] = field(default_factory=lambda: [0.0] * PARTITIONS)
    math: list[list[float]] = field(default_factory=lambda: [[0.0] * 3 for _ in range(PARTITIONS)])
    shared: float = 0.0
    memory: float = 0.0


@dataclass
class Mbarrier:
    """Arrivals of a phase; arrivals and bytes that the present one lacks; who waits, and for which parity."""

    arrivals: int
    pending: int = 0
    nbytes: int = 0
    phase: int = 0
    parked: list[tuple[Warp, int]] = field(default_factory=list)

    def passed(self, parity: int) -> bool:
        return self.phase & 1 != parity & 1


@dataclass
class Block:
    """A block in its place; ``warps`` still run. Warps at named barriers and how many have come; mbarriers."""

    number: int
    slot: int
    on: Multiprocessor
    warps: int
    barriers: dict[int, list[Warp]] = field(default_factory=dict)
    arrived: dict[int, int] = field(default_factory=dict)
    mbarriers: dict[int, Mbarrier] = field(default_factory=dict)


@dataclass
class Groups:
    """Asynchronous work of a warp that is committed in groups: when the open one and each closed one will be done."""

    open: float = 0.0
    closed: deque[float] = field(default_factory=deque)

    def add(self, done: float) -> None:
        self.open = max(self.open, done)

    def commit(self) -> None:
        self.closed.append(self.open)
        self.open = 0.0

    def wait(self, pending: int) -> float:
        done = 0.0
        while len(self.closed) > pending:
            done = max(done, self.closed.popleft())
        return done


@dataclass
class Warp:
    """A warp in its partition: ``times`` of the events so far, and when its loads, mma and groups will be done."""

    place: tuple[int, int]
    block: Block
    part: int
    events: Sequence[Event]
    times: list[float] = field(default_factory=list)
    loaded: float = 0.0
    results: dict[int, float] = field(default_factory=dict)
    copies: Groups = field(default_factory=Groups)
    stores: Groups = field(default_factory=Groups)
    products: Groups = field(default_factory=Groups)
