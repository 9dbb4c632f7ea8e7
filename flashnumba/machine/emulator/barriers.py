"""Named barriers, mbarriers, and the pool that setmaxnreg draws registers from."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from flashnumba.machine.emulator import faults
from flashnumba.machine.emulator.clock import MASK, SHIFT, Clock
from flashnumba.machine.emulator.shared_memory import MBARRIER

if TYPE_CHECKING:
    from flashnumba.machine.emulator.block import Block
    from flashnumba.machine.emulator.thread import Thread

__all__ = ["Mbarrier", "change_registers", "init_mbarrier", "mbarrier", "named_barrier"]

POLLS = 1000  # polls in vain, while nothing else in the launch happens, after which nothing ever will


# -- bar.sync, bar.arrive ---------------------------------------------------------------------------------------------
class _Named:
    __slots__ = ("any", "arrived", "came", "count", "parked", "votes")

    def __init__(self, count: int, votes: bool):
        self.count, self.votes, self.any = count, votes, False
        self.arrived: list[tuple[Thread, np.ndarray]] = []  # with what each had published
        self.came: set[int] = set()  # their numbers
        self.parked: list[Thread] = []

    def who(self) -> str:
        return f"threads {faults.ranges(t.tid for t, _ in self.arrived)}"


def named_barrier(thread: Thread, number: int, count: int, wait: bool, vote: bool | None = None) -> bool:
    """``bar.sync`` (wait) or ``bar.arrive``: complete when ``count`` threads have come, whichever of the two they
    used. Or ``bar.red``, if all have a vote: whether one of them is true."""
    thread.flush()
    block = thread.block
    if not 0 <= number < 16:
        raise thread.fault(faults.BarrierMismatch, f"named barrier {number}; there are 16, 0 to 15")
    if count <= 0 or count % 32:
        raise thread.fault(
            faults.BarrierMismatch,
            f"named barrier {number} with {count} threads; the count must be a positive multiple of 32",
        )
    if count > block.size:
        raise thread.fault(
            faults.BarrierMismatch, f"named barrier {number} waits for {count} threads in a block of {block.size}"
        )
    barrier = block.named.get(number)
    if barrier is None:
        barrier = block.named[number] = _Named(count, vote is not None)
    elif barrier.count != count:
        raise thread.fault(
            faults.BarrierMismatch,
            f"named barrier {number} with {count} threads here, with {barrier.count} where {barrier.who()} came to it",
        )
    if barrier.votes != (vote is not None):
        raise thread.fault(
            faults.BarrierMismatch,
            f"named barrier {number} {'without' if barrier.votes else 'with'} a vote here, and "
            f"{'with' if barrier.votes else 'without'} one where {barrier.who()} came to it",
        )
    if number == 0 and block.arrived:
        raise thread.fault(
            faults.BarrierMismatch,
            f"named barrier 0 is that of syncthreads(), where threads {faults.ranges(t.tid for t in block.arrived)} "
            f"wait",
        )
    if thread.tid in barrier.came:
        raise thread.fault(
            faults.BarrierMismatch,
            f"thread {thread.tid} comes to named barrier {number} a second time before all {count} threads have "
            f"come once",
        )
    barrier.arrived.append((thread, thread.published()))
    barrier.came.add(thread.tid)
    barrier.any = barrier.any or bool(vote)
    thread.tick()
    if wait:
        barrier.parked.append(thread)
    if len(barrier.arrived) == count:
        del block.named[number]
        clock = Clock(np.maximum.reduce([v for _, v in barrier.arrived]))
        for t in barrier.parked:
            t.learn(clock)
        if wait:
            barrier.parked.remove(thread)
        block.release(barrier.parked)
    elif wait:
        thread.wait(_NamedWait(number, barrier))
    return barrier.any


class _NamedWait:
    """Says how many have come to a named barrier, at the time of the report."""

    def __init__(self, number: int, barrier: _Named):
        self.number, self.barrier = number, barrier

    def __str__(self) -> str:
        return f"named barrier {self.number} ({len(self.barrier.arrived)} of {self.barrier.count} threads have come)"


# -- mbarrier ---------------------------------------------------------------------------------------------------------
class Mbarrier:
    """An mbarrier object: arrivals and bytes still expected in the current phase, and the copies that report to it.

    A copy happens when somebody waits for the phase and all arrivals have come: as late as the program allows.
    """

    def __init__(self, block: Block, address: int, count: int, maker: Thread):
        self.block, self.address, self.count = block, address, count
        self.init_thread, self.init_epoch = maker.tid, maker.epoch
        self.slot = block.first_mbarrier + block.mbarrier_slots
        self.pending, self.bytes, self.phase = count, 0, 0
        self.vector: np.ndarray | None = None  # what the arrivals of this phase have published
        self.done: Clock | None = None  # what the last complete phase hands on
        self.copies: list[tuple[int, Callable[[], None], int, Any]] = []  # bytes, what to do, thread, place
        self.parked: list[tuple[Thread, int]] = []

    @property
    def epoch(self) -> int:
        """When the copies of the current phase write: known to whoever waits for it."""
        return self.slot << SHIFT | (self.phase + 1)

    def publish(self, thread: Thread) -> None:
        """What the thread has done so far is ordered before the end of the phase."""
        vector = thread.published()
        self.vector = vector if self.vector is None else np.maximum(self.vector, vector)
        thread.tick()
        self.block.launch.progress += 1

    def arrive(self, thread: Thread, expected: int = 0) -> None:
        if self.pending == 0:
            raise thread.fault(
                faults.MbarrierMisuse,
                f"an arrival too many on the mbarrier at shared address {self.address}: its phase {self.phase} has "
                f"had all {self.count}",
            )
        self.bytes += expected
        self.publish(thread)
        self.pending -= 1
        self.advance()

    def passed(self, parity: int) -> bool:
        """Whether the phase of this parity is over (the current phase has the other one)."""
        return self.phase & 1 != parity

    def advance(self) -> None:
        """Go on to the next phase if nothing is missing; make the copies now if somebody waits for them."""
        if self.pending == 0 and self.copies and any(not self.passed(p) for _, p in self.parked):
            copies, self.copies = self.copies, []
            for nbytes, copy, *_ in copies:
                copy()
                self.bytes -= nbytes
        if self.pending or self.bytes or self.copies:
            return
        vector = self.vector if self.vector is not None else self.block.nothing()
        vector[self.slot] = self.phase + 1
        self.done, self.vector = Clock(vector), vector.copy()
        self.phase += 1
        self.pending = self.count
        free = [t for t, p in self.parked if self.passed(p)]
        self.parked = [(t, p) for t, p in self.parked if not self.passed(p)]
        for t in free:
            t.learn(self.done)
        self.block.release(free)

    def wait(self, thread: Thread, parity: int) -> None:
        if not self.passed(parity):
            self.parked.append((thread, parity))
            self.advance()
            if not self.passed(parity):
                thread.wait(_MbarrierWait(self, parity))
            elif thread in self.block.launch.ready:
                self.block.launch.ready.remove(thread)
        elif self.done is not None:
            thread.learn(self.done)

    def test(self, thread: Thread, parity: int) -> bool:
        """``try_wait`` once: whether the phase is over; it may suspend the thread for a while."""
        if not self.passed(parity):
            self.parked.append((thread, parity))
            self.advance()
            self.parked = [(t, p) for t, p in self.parked if t is not thread]
            if thread in self.block.launch.ready:
                self.block.launch.ready.remove(thread)
            if not self.passed(parity):
                thread.poll(_MbarrierWait(self, parity), POLLS)
        if self.passed(parity):
            if self.done is not None:
                thread.learn(self.done)
            return True
        return False


class _MbarrierWait:
    """Says what an mbarrier lacks, at the time of the report."""

    def __init__(self, barrier: Mbarrier, parity: int):
        self.barrier, self.parity = barrier, parity

    def __str__(self) -> str:
        b = self.barrier
        lacks = [f"{b.pending} of {b.count} arrivals"] if b.pending else []
        if b.bytes > 0:
            lacks.append(f"{b.bytes} expected bytes that no copy brings")
        if b.bytes < 0:
            lacks.append(f"nothing: {-b.bytes} bytes came that no thread expected")
        missing = " and ".join(lacks) or "nothing"
        return f"parity {self.parity} of the mbarrier at shared address {b.address} (phase {b.phase} lacks {missing})"


def init_mbarrier(thread: Thread, address: int, count: int) -> None:
    block, shared = thread.block, thread.block.shared
    if not 1 <= count < 1 << 20:
        raise thread.fault(faults.MbarrierMisuse, f"an mbarrier for {count} arrivals; the count must be 1 to 2^20 - 1")
    if address in block.mbarriers:
        maker = block.mbarriers[address].init_thread
        raise thread.fault(
            faults.MbarrierMisuse,
            f"the mbarrier at shared address {address}, initialised by thread {maker}, is initialised again without "
            f"mbarrier_inval()",
            tuple({thread.tid, maker}),
        )
    shared.check_write(address, address + 8, thread, align=8)
    made = block.mbarriers[address] = Mbarrier(block, address, count, thread)
    block.mbarrier_slots += 1
    if made.slot >= block.flight:
        raise thread.fault(
            faults.MbarrierMisuse, f"more than {block.flight - block.first_mbarrier} mbarriers in a block"
        )
    if shared.checks:
        a, b = address >> shared.shift, (address + 8) >> shared.shift
        shared.writer[a:b] = [MBARRIER] * (b - a)


def mbarrier(thread: Thread, address: int, by_copy: bool = False) -> Mbarrier:
    """The mbarrier at an address, as this thread may use it: initialised, and the initialisation ordered before.

    ``by_copy``: a copy engine will report to it, which sees the initialisation only after a fence.
    """
    thread.flush()
    found = thread.block.mbarriers.get(address)
    if found is None:
        raise thread.fault(faults.MbarrierMisuse, f"there is no initialised mbarrier at shared address {address}")
    if thread.block.shared.checks:
        if found.init_thread != thread.tid and not thread.clock.orders(found.init_epoch):
            raise thread.fault(
                faults.MbarrierMisuse,
                f"thread {thread.tid} uses the mbarrier at shared address {address}, which thread {found.init_thread} "
                f"initialises; no barrier lies between",
                (thread.tid, found.init_thread),
            )
        if by_copy and thread.clock.vector[thread.block.fences + found.init_thread] < found.init_epoch & MASK:
            raise thread.fault(
                faults.MissingProxyFence,
                f"a copy engine is to report to the mbarrier at shared address {address}, but thread "
                f"{found.init_thread} has "
                f"not fenced its initialisation (fence_mbarrier_init() or fence_proxy_async())",
            )
    return found


# -- setmaxnreg -------------------------------------------------------------------------------------------------------
def change_registers(thread: Thread, wanted: int, grow: bool) -> None:
    """``setmaxnreg``: a warp takes registers from the block's pool, or gives some back.

    At launch each thread holds the register file's share, rounded down to 8 (one block a multiprocessor).
    """
    thread.flush()
    block = thread.block
    share = min(65536 // block.size // 8 * 8, 256)
    if block.registers is None:
        block.registers = {"free": 0, "held": {}, "parked": []}
    pool = block.registers
    held = pool["held"].get(thread.tid, share)
    if not grow:
        if wanted > held:
            raise thread.fault(
                faults.RegisterPool, f"setmaxnreg.dec to {wanted} registers by a thread that holds {held}"
            )
        pool["held"][thread.tid] = wanted
        pool["free"] += held - wanted
        waiting, pool["parked"] = pool["parked"], []
        block.release(waiting)
        return
    if wanted < held:
        raise thread.fault(faults.RegisterPool, f"setmaxnreg.inc to {wanted} registers by a thread that holds {held}")
    while pool["free"] < wanted - held:
        pool["parked"].append(thread)
        thread.wait(
            f"setmaxnreg.inc to {wanted} registers (the pool has {pool['free']} left for {wanted - held} a thread)"
        )
    pool["free"] -= wanted - held
    pool["held"][thread.tid] = wanted
