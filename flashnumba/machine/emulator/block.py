"""A block: its threads, its shared memory, its barriers, and who may go on."""

from __future__ import annotations

import sys
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from flashnumba.machine.emulator import faults
from flashnumba.machine.emulator.clock import SHIFT, Clock, merge
from flashnumba.machine.emulator.gang import Exchange, Gang
from flashnumba.machine.emulator.shared_memory import SharedMemory
from flashnumba.machine.emulator.thread import Dim3, Thread

if TYPE_CHECKING:
    from flashnumba.machine.emulator.launch import Launch

__all__ = ["Block"]

MBARRIERS = 128  # a block may hold this many at a time


class Block:
    """One block of a launch, alive until its last thread has returned."""

    def __init__(self, launch: Launch, index: tuple[int, int, int]):
        self.launch, self.index = launch, index
        self.block_idx = Dim3(*index)
        nx, ny, nz = launch.block
        self.size = nx * ny * nz
        self.body = launch.body
        groups = (self.size + 127) // 128
        # Agents: the threads, the wgmma queue of each warpgroup, the mbarriers, and all copies in flight together,
        # whom nobody ever knows.
        self.first_group, self.first_mbarrier = self.size, self.size + groups
        self.flight = self.first_mbarrier + MBARRIERS
        self.fences = self.flight + 1  # where the second part of a vector begins, see clock.py
        start = Clock(self.nothing())
        self.shared = SharedMemory(self, launch.shared_limit, launch.checks)
        self.dynamic_bytes = launch.shared
        # Dynamic shared memory is promised 16-byte alignment, no more; a kernel that needs more must see to it.
        self.dynamic_address = 16 if launch.shared else 0
        self.static_end = self.shared.end = self.dynamic_address + launch.shared
        self.static: dict[Any, Any] = {}
        self.stores: dict[Any, Any] = {}
        self.threads = [
            Thread(self, t, Dim3(x, y, z), start)
            for t, (z, y, x) in enumerate(product(range(nz), range(ny), range(nx)))
        ]
        self.alive = self.size
        self.arrived: list[Thread] = []
        self.arrived_at: Any = None
        self.named: dict[int, Any] = {}
        self.exchanges: dict[int, list[Exchange]] = {}
        self.mbarriers: dict[int, Any] = {}
        self.mbarrier_slots = 0
        self.groups: dict[int, Any] = {}  # wgmma queues
        self.flights = 0
        self.registers: Any = None
        self._gangs: dict[tuple[int, int], Gang] = {}

    # -- who works together -------------------------------------------------------------------------------------------
    def gang(self, thread: Thread, size: int) -> Gang:
        """The warp (32) or warpgroup (128) of a thread."""
        first = thread.tid // size * size
        gang = self._gangs.get((first, size))
        if gang is None:
            if first + size > self.size:
                raise thread.fault(
                    faults.DivergentCollective,
                    f"an instruction for {size} threads in a block of {self.size}: threads {first}-{self.size - 1} "
                    f"are too few",
                )
            gang = self._gangs[first, size] = Gang(self, first, size)
        return gang

    @staticmethod
    @cache
    def lanes_of(mask: int) -> frozenset[int]:
        return frozenset(i for i in range(32) if mask >> i & 1)

    def release(self, threads: list[Thread]) -> None:
        """Parked threads may go on, in an order that the seed decides."""
        self.launch.progress += 1
        if self.launch.shuffle is not None:
            self.launch.shuffle(threads)
        self.launch.ready.extend(threads)

    def nothing(self) -> np.ndarray:
        """The vector of one who knows nothing."""
        return np.zeros(self.fences + self.size, np.int64)

    # -- barriers -----------------------------------------------------------------------------------------------------
    def syncthreads(self, thread: Thread, at: Any) -> None:
        """``at`` identifies the call: all threads must come to the same one."""
        if thread.op is not None:
            thread.flush()
        arrived = self.arrived
        if not arrived:
            self.arrived_at = at
        elif at != self.arrived_at:
            raise thread.fault(
                faults.DivergentBarrier,
                f"thread {thread.tid} waits at another syncthreads() than "
                f"{'threads' if len(arrived) > 1 else 'thread'} {faults.ranges(t.tid for t in arrived)}",
                (thread.tid, *(t.tid for t in arrived)),
            )
        if self.alive != self.size:
            self._exited_early(thread)
        if 0 in self.named:
            raise thread.fault(
                faults.BarrierMismatch,
                f"syncthreads() is barrier 0, which {self.named[0].who()} use as a named barrier",
            )
        arrived.append(thread)
        if len(arrived) < self.size:
            thread.wait("syncthreads()")
            return
        self.order(arrived)
        arrived.pop()
        self.arrived = []
        self.release(arrived)

    def _exited_early(self, thread: Thread) -> None:
        gone = [t.tid for t in self.threads if t.dead]
        raise thread.fault(
            faults.DivergentBarrier,
            f"syncthreads() can never be complete: {'threads' if len(gone) > 1 else 'thread'} {faults.ranges(gone)} "
            f"returned "
            f"before it",
            (thread.tid,),
        )

    def order(self, threads: list[Thread]) -> None:
        """A barrier among some threads: each knows what all have done."""
        vector = merge([t.clock for t in threads])
        if len(threads) == self.size:
            vector[: self.size] = [t.time for t in self.threads]
        else:
            tids = [t.tid for t in threads]
            vector[tids] = [t.time for t in threads]
        clock = Clock(vector)
        for t in threads:
            t.clock = clock
            t.time += 1
            t.epoch += 1

    def finished(self, thread: Thread) -> None:
        """A thread returns from the kernel."""
        thread.flush()
        self.alive -= 1
        self.launch.progress += 1
        if self.launch.checks and (thread.copies or thread.copy_groups):
            left = sum(map(len, thread.copy_groups)) + len(thread.copies)
            if left:
                first = next(c for g in (*thread.copy_groups, thread.copies) for c in g)
                raise faults.UnfinishedCopy(
                    f"thread {thread.tid} returns with {left} cp.async in flight, the first started below",
                    self.index,
                    (thread.tid,),
                    [p for p in [self.shared.lines[first.dst >> self.shared.shift]] if p],
                )
        if self.launch.checks and (any(thread.bulk_groups) or thread.bulk_copies):
            first = next(c for g in (*thread.bulk_groups, thread.bulk_copies) for c in g)
            raise faults.UnfinishedCopy(
                f"thread {thread.tid} returns before its bulk copies out of shared memory are done, the first "
                f"started below",
                self.index,
                (thread.tid,),
                [first[-1]],
            )
        if self.arrived and self.alive < self.size:
            waiting = [t.tid for t in self.arrived]
            raise faults.DivergentBarrier(
                f"thread {thread.tid} returned while {'threads' if len(waiting) > 1 else 'thread'} "
                f"{faults.ranges(waiting)} "
                f"wait at syncthreads()",
                self.index,
                (thread.tid, *waiting),
                faults.stack(self.arrived[0].gr_frame),
            )
        if self.alive == 0:
            for mbarrier in self.mbarriers.values():
                if mbarrier.copies and self.launch.checks:
                    raise faults.UnfinishedCopy(
                        f"the block ends, and nobody has waited for {len(mbarrier.copies)} bulk copies that report "
                        f"to the "
                        f"mbarrier at shared address {mbarrier.address}, the first started below",
                        self.index,
                        (mbarrier.copies[0][2],),
                        [mbarrier.copies[0][3]],
                    )

    # -- agents -------------------------------------------------------------------------------------------------------
    def new_flight(self) -> int:
        """An epoch for a copy in flight: no thread's clock ever covers it."""
        self.flights += 1
        return self.flight << SHIFT | self.flights

    def in_flight(self, epoch: int) -> str | None:
        """What kind of asynchronous work an epoch is, None for a thread's own."""
        agent = epoch >> SHIFT
        if agent < self.size:
            return None
        if agent < self.first_mbarrier:
            return "wgmma"
        return "asynchronous copy" if agent == self.flight else "bulk copy"

    # -- stuck --------------------------------------------------------------------------------------------------------
    def stuck(self) -> faults.Fault:
        """Who waits where, when nobody can go on."""
        unwritten = self.shared.unwritten()
        if unwritten is not None:
            return unwritten
        groups: dict[Any, list[Thread]] = {}
        for t in self.threads:
            if not t.dead and t.waiting is not None:
                where = faults.stack(t.gr_frame or sys._getframe(1))
                groups.setdefault((str(t.waiting), tuple(where[:3])), []).append(t)
        lines = ["no thread of the block can go on"]
        for (what, where), threads in groups.items():
            at = f" at {faults.describe(where[0])}" if where else ""
            many = len(threads) > 1
            lines.append(
                f"    {'threads' if many else 'thread'} {faults.ranges(t.tid for t in threads)} "
                f"wait{'' if many else 's'} for {what}{at}"
            )
        gone = [t.tid for t in self.threads if t.dead]
        if gone:
            lines.append(f"    {'threads' if len(gone) > 1 else 'thread'} {faults.ranges(gone)} returned")
        for gang in self._gangs.values():
            if gang.ops:
                lines.append(f"    {gang.ops[0].name} lacks threads {faults.ranges(gang.absent())}")
        waiting = [t.tid for ts in groups.values() for t in ts]
        first = next(iter(groups), (None, ()))[1]
        return faults.Deadlock("\n".join(lines), self.index, waiting, list(first))
