"""One GPU thread as a greenlet: where it is, what it knows, what it waits for."""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
from greenlet import greenlet

from flashnumba.machine.emulator import faults
from flashnumba.machine.emulator.clock import SHIFT, Clock

if TYPE_CHECKING:
    from flashnumba.machine.emulator.block import Block

__all__ = ["Dim3", "Thread"]

SPIN = 10_000  # plain loads of one address in a row that are taken for waiting


class Dim3:
    """Three integers, named as CUDA names them."""

    __slots__ = ("x", "y", "z")

    def __init__(self, x: int, y: int = 1, z: int = 1):
        self.x, self.y, self.z = x, y, z

    def __iter__(self) -> Any:
        return iter((self.x, self.y, self.z))


class Thread(greenlet):
    """A thread of a block.

    Attributes:
        tid, lane, warp: linear index in the block, index in the warp, index of the warp.
        clock, time, epoch: what it knows of others; its own time; both of its own packed (``tid << 32 | time``).
        waiting: what it waits for while parked, with details for a report.
    """

    def __init__(self, block: Block, tid: int, index: Dim3, clock: Clock):
        super().__init__(block.body)
        self.block, self.launch = block, block.launch
        self.tid, self.lane, self.warp = tid, tid & 31, tid >> 5
        self.thread_idx = index
        self.clock, self.time, self.epoch = clock, 1, tid << SHIFT | 1
        self.waiting: Any = None
        self.waited = False  # for the kernel ahead of an early one
        self.op: Any = None  # the last collective it posted and has not seen executed
        self.gangs: dict[int, Any] = {}  # its warp and its warpgroup, by size
        self.locals: dict[Any, Any] = {}
        self.register_fences = 1  # counts wgmma_fence()
        self.copies: list[Any] = []  # cp.async not yet committed
        self.copy_groups: deque[list[Any]] = deque()
        self.bulk_copies: list[Any] = []  # bulk copies out of shared memory, likewise
        self.bulk_groups: deque[list[Any]] = deque()
        self.wgmma_commits = 0
        self.flying: dict[Any, Any] = {}  # registers that a wgmma in flight uses: (array, first) -> see matrix_engine
        self.last_read, self.rereads = -1, 0  # address of the last plain load of an array element; how often in a row
        self.seen: dict[int, int] = {}  # words that ordered loads have read last, by address
        self.polls, self.progress = 0, -1  # polls in vain, and the launch's progress at the first of them
        self.released: np.ndarray | None = None  # what it had published at its last threadfence()
        self.acquired: np.ndarray | None = None  # what atomics have shown it, effective from its next threadfence()

    # -- time ---------------------------------------------------------------------------------------------------------
    def tick(self) -> None:
        """What was done so far has been published; what follows is later."""
        self.time += 1
        self.epoch += 1

    def published(self) -> np.ndarray:
        """Its vector with its own time in it: what a release hands on."""
        vector = self.clock.vector.copy()
        vector[self.tid] = self.time
        return vector

    def learn(self, clock: Clock) -> None:
        """An acquire: from now on it knows what ``clock`` knows."""
        self.clock = self.clock.joined(clock)

    def fence_proxy(self) -> None:
        """All that it did or knows of so far is fenced from the ordinary to the asynchronous proxy."""
        vector = self.published()
        vector[self.block.fences :] = vector[: self.block.size]
        self.clock = Clock(vector)
        self.tick()

    def fence_memory(self) -> None:
        """``threadfence``: later atomics publish what came before it, and what earlier atomics showed is now
        ordered."""
        if self.acquired is not None:
            self.learn(Clock(self.acquired))
            self.acquired = None
        self.released = self.published()
        self.tick()

    # -- waiting ------------------------------------------------------------------------------------------------------
    def wait(self, what: Any) -> None:
        """Give way until somebody puts this thread back into the launch's queue."""
        self.waiting = what
        ready = self.launch.ready
        if ready:
            ready.popleft().switch()
        else:
            self.launch.hub.switch()
        self.waiting = None

    def give_way(self) -> bool:
        """Let all others that can go on have a turn; False if there is none."""
        ready = self.launch.ready
        if self.launch.fresh:
            ready.append(self)
            self.launch.hub.switch()
        elif ready:
            ready.append(self)
            ready.popleft().switch()
        else:
            return False
        return True

    def poll(self, what: Any, patience: int) -> None:
        """A poll in vain: let the others go on. Raises Deadlock after ``patience`` polls during which nothing
        happened."""
        launch = self.launch
        if self.progress != launch.progress:
            self.progress, self.polls = launch.progress, 0
        self.polls += 1
        if self.polls > patience:
            self.waiting = what
            raise self.block.stuck()
        self.waiting = what
        self.give_way()
        self.waiting = None

    def reread(self, address: int, name: str) -> None:
        """A plain load of the address just loaded: many in a row are a spin, which lets the others go on."""
        self.rereads += 1
        if self.rereads >= SPIN:
            self.poll(f"a change of {name}, which it loads again and again", SPIN)

    def flush(self) -> None:
        """Wait until every collective this thread has posted is executed."""
        op = self.op
        if op is not None:
            if not op.done:
                op.waiters.append(self)
                self.wait(op.name)
            self.op = None

    # -- addresses ----------------------------------------------------------------------------------------------------
    def address_of(self, array: Any) -> int:
        """Address of an array's first element: in shared memory, or in the launch's global address space."""
        return array.address

    # -- reports ------------------------------------------------------------------------------------------------------
    def position(self) -> faults.Position | None:
        """Where in the kernel's source it is."""
        frame: Any = sys._getframe(2)  # its caller belongs to the machine
        machine = _MACHINE_CODE
        while frame is not None:
            code = frame.f_code
            try:
                inside = machine[code]
            except KeyError:
                inside = machine[code] = code.co_filename.startswith(faults._MACHINE)
            if not inside:
                return (code, frame.f_lineno)
            frame = frame.f_back
        return None

    def fault(self, kind: type[faults.Fault], message: str, threads: tuple[int, ...] | None = None) -> faults.Fault:
        """Make (not raise) a fault at this place."""
        # The frames of the greenlet that runs: it executes a collective instruction for the others.
        return kind(
            message, self.block.index, threads if threads is not None else (self.tid,), faults.stack(sys._getframe(1))
        )


_MACHINE_CODE: dict[Any, bool] = {}
