"""A block's shared memory with a shadow: who wrote each word last, and who has read it since.

The shadow is two lists with one entry a granule (4 bytes, until a smaller access is seen). ``writer`` holds the epoch
of the last write, 0 for never. ``reader`` holds the number of an interned set of reading epochs, so that a tile read by
one agent is one list operation, and 128 threads reading the same words build 128 sets once, not once a word.

A copy or a wgmma in flight appears with an epoch that nobody has joined yet: any access before its wait is concurrent.
What such a conflict is called is decided in :mod:`flashnumba.machine.emulator.verdict`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from greenlet import getcurrent

from flashnumba.machine.emulator import faults, verdict
from flashnumba.machine.emulator.clock import MASK, SHIFT

if TYPE_CHECKING:
    from flashnumba.machine.emulator.block import Block
    from flashnumba.machine.emulator.thread import Thread

__all__ = ["MBARRIER", "SharedMemory"]

MBARRIER = -1
"""Stands in ``writer`` for the eight bytes of an mbarrier, which ordinary accesses must leave alone."""

SETS = 1 << 13  # reader sets that may pile up before those no longer in use are dropped
COPIES = 1 << 16  # starts of copies that may pile up, likewise


class SharedMemory:
    """``size`` bytes, addressed from 0; every access is checked before it is made.

    Attributes:
        end: the first address beyond what the block has been given so far (dynamic, then static arrays).
        issued: epoch of a copy that a thread started -> that thread's epoch then; see :mod:`verdict`.
    """

    def __init__(self, block: Block, size: int, checks: bool):
        self.block, self.size, self.checks, self.end = block, size, checks, 0
        self.data = np.zeros(size + 16, np.uint8)
        self.arrays: list[Any] = []  # static arrays, for messages
        self.shift = 2
        cells = (size + 19) >> 2
        self.writer: list[int] = [0] * cells if checks else []
        self.reader: list[int] = [0] * cells if checks else []
        self.lines: list[faults.Position | None] = [None] * len(self.writer)  # where each was last written
        self.sets: dict[int, frozenset[int]] = {0: frozenset()}
        self.set_lines: dict[int, faults.Position | None] = {0: None}
        self.numbers: dict[frozenset[int], int] = {frozenset(): 0}
        self.next_set, self.sets_limit = 1, SETS
        self.memo: dict[tuple[int, int], int] = {}
        self.atomics: dict[int, dict[int, int]] = {}
        self.released: dict[int, np.ndarray] = {}  # granule -> what atomics on it have published
        self.issued: dict[int, int] = {}
        self.parked: list[faults.Fault] = []

    # -- data ---------------------------------------------------------------------------------------------------------
    def gather(self, addresses: np.ndarray, nbytes: int) -> np.ndarray:
        """Unchecked: the bytes at some addresses, [..., nbytes]."""
        return self.data[np.asarray(addresses)[..., None] + np.arange(nbytes)]

    def scatter(self, addresses: np.ndarray, data: np.ndarray) -> None:
        """Unchecked: store bytes [..., nbytes] at some addresses."""
        self.data[np.asarray(addresses)[..., None] + np.arange(data.shape[-1])] = data

    def place(self, cell: int) -> str:
        """``shared byte 128 (s[32])``: a granule, and the element of a static array that lies there."""
        byte = cell << self.shift
        for array in self.arrays:
            if array.address <= byte < array.address + array.data.nbytes:
                at = np.unravel_index((byte - array.address) // array.itemsize, array.shape)
                return f"shared byte {byte} ({array.name}[{', '.join(map(str, at))}])"
        return f"shared byte {byte}"

    # -- checks -------------------------------------------------------------------------------------------------------
    def bounds(self, lo: int, hi: int, thread: Thread, align: int) -> None:
        """The bytes [lo, hi) belong to the block, and ``lo`` is a multiple of ``align``."""
        if lo < 0 or hi > self.end:
            raise thread.fault(
                faults.OutOfBounds, f"shared bytes {lo}..{hi - 1} of a block whose shared memory ends at {self.end}"
            )
        if lo & (align - 1):
            raise thread.fault(faults.Misaligned, f"shared address {lo} is not a multiple of {align}")

    def _span(self, lo: int, hi: int, thread: Thread, align: int) -> tuple[int, int]:
        if lo < 0 or hi > self.end or lo & (align - 1):
            self.bounds(lo, hi, thread, align)
        while (lo | hi) & ((1 << self.shift) - 1):
            self._refine()
        return lo >> self.shift, hi >> self.shift

    def _refine(self) -> None:
        """Halve the granule: something smaller than a word is addressed."""
        self.shift -= 1
        self.writer = [e for e in self.writer for _ in (0, 1)]
        self.reader = [e for e in self.reader for _ in (0, 1)]
        self.lines = [p for p in self.lines for _ in (0, 1)]
        self.atomics = {2 * k + i: dict(v) for k, v in self.atomics.items() for i in (0, 1)}
        self.released = {2 * k + i: v for k, v in self.released.items() for i in (0, 1)}

    def check_read(self, lo: int, hi: int, thread: Thread, epoch: int = 0, align: int = 1, proxy: bool = False) -> None:
        """A read of bytes [lo, hi) by ``thread``, remembered under ``epoch`` (its own if 0).

        ``proxy``: by the asynchronous proxy (a bulk copy, a wgmma), which sees ordinary stores only after a proxy
        fence.
        """
        if not self.checks:
            return self.bounds(lo, hi, thread, align)
        a, b = self._span(lo, hi, thread, align)
        clock, known, unwritten = thread.clock, thread.clock.known, False
        if b - a == 1:
            e = self.writer[a]
            if e == 0:
                unwritten = True
            elif (e not in known and e >> SHIFT != thread.tid) or proxy:
                self._verify_writer(e, a, b, thread, clock, epoch, proxy, reading=True)
        else:
            for e in set(self.writer[a:b]):
                if e == 0:
                    unwritten = True
                elif (e not in known and e >> SHIFT != thread.tid) or proxy:
                    self._verify_writer(e, a, b, thread, clock, epoch, proxy, reading=True)
        if self.atomics:
            self._verify_atomics(a, b, thread)
        # A thread that reads what nobody wrote stops for good; its read stands under its own name for later writers.
        epoch = thread.epoch if unwritten else epoch or thread.epoch
        memo = self.memo
        if b - a == 1:
            before = self.reader[a]
            after = memo.get((before, epoch))
            self.reader[a] = self._with_reader(before, epoch, thread) if after is None else after
        else:
            cells = self.reader[a:b]
            first = cells[0]
            if cells.count(first) == len(cells):
                after = memo.get((first, epoch))
                self.reader[a:b] = [self._with_reader(first, epoch, thread) if after is None else after] * (b - a)
            else:
                new = {c: memo.get((c, epoch)) or self._with_reader(c, epoch, thread) for c in set(cells)}
                self.reader[a:b] = [new[c] for c in cells]
        if unwritten:
            self._park(a + self.writer[a:b].index(0), thread)
        return None

    def check_write(
        self, lo: int, hi: int, thread: Thread, epoch: int = 0, align: int = 1, proxy: bool = False
    ) -> None:
        """A write of bytes [lo, hi) by ``thread``, remembered under ``epoch`` (its own if 0); ``proxy`` as for a
        read."""
        if not self.checks:
            return self.bounds(lo, hi, thread, align)
        a, b = self._span(lo, hi, thread, align)
        clock = thread.clock
        known, known_sets = clock.known, clock.known_sets
        if b - a == 1:
            writers, readers = (self.writer[a],), (self.reader[a],)
        else:
            writers, readers = set(self.writer[a:b]), set(self.reader[a:b])
        for e in writers:
            if e != 0 and ((e not in known and e >> SHIFT != thread.tid) or proxy):
                self._verify_writer(e, a, b, thread, clock, epoch, proxy, reading=False)
        for r in readers:
            if r and r not in known_sets:
                self._verify_readers(r, a, b, thread, epoch)
        if self.atomics:
            self._verify_atomics(a, b, thread)
            for w in range(a, b):
                self.atomics.pop(w, None)
                self.released.pop(w, None)
        epoch = epoch or thread.epoch
        where = thread.position()
        if b - a == 1:
            self.writer[a], self.reader[a], self.lines[a] = epoch, 0, where
        else:
            self.writer[a:b] = [epoch] * (b - a)
            self.reader[a:b] = [0] * (b - a)
            self.lines[a:b] = [where] * (b - a)
        return None

    def check_atomic(self, lo: int, hi: int, thread: Thread) -> None:
        """An atomic read-modify-write: it may meet other atomics, not plain accesses. With ``threadfence`` on both
        sides it orders threads (PTX ISA, "Memory consistency model: synchronizes")."""
        if not self.checks:
            return self.bounds(lo, hi, thread, hi - lo)
        a, b = self._span(lo, hi, thread, hi - lo)
        for w in range(a, b):
            e = self.writer[w]
            if e == 0:
                self.reader[w] = self._with_reader(self.reader[w], thread.epoch, thread)
                self._park(w, thread)
            if e >> SHIFT != thread.tid and not thread.clock.orders(e):
                self._verify_writer(e, w, b, thread, thread.clock, 0, False, reading=False)
            r = self.reader[w]
            if r and r not in thread.clock.known_sets:
                self._verify_readers(r, w, b, thread, 0)
            self.atomics.setdefault(w, {})[thread.tid] = thread.epoch
            seen, mine = self.released.get(w), thread.released
            if seen is not None:
                thread.acquired = seen if thread.acquired is None else np.maximum(thread.acquired, seen)
            if mine is not None:
                self.released[w] = mine if seen is None else np.maximum(mine, seen)
        return None

    # -- copies that a thread starts and waits for --------------------------------------------------------------------
    def restamp_writer(self, lo: int, hi: int, old: int, new: int) -> None:
        """A copy has been waited for: its bytes count as written by the one who waited."""
        a, b = lo >> self.shift, hi >> self.shift
        self.writer[a:b] = [new if e == old else e for e in self.writer[a:b]]
        self._landed(old, new)

    def restamp_reader(self, lo: int, hi: int, old: int, new: int, thread: Thread) -> None:
        """A copy out of shared memory has been waited for: its reads count as the waiter's."""
        a, b = lo >> self.shift, hi >> self.shift
        cells = self.reader[a:b]
        after = {
            c: self._number((self.sets[c] - {old}) | {new}, thread) if old in self.sets[c] else c for c in set(cells)
        }
        self.reader[a:b] = [after[c] for c in cells]
        self._landed(old, new)

    def _landed(self, old: int, new: int) -> None:
        self.issued[new] = self.issued.pop(old)
        if len(self.issued) > COPIES:  # of copies long past only the name of a fault depends on it
            self.issued = {e: start for e, start in self.issued.items() if e >> SHIFT == self.block.flight}

    # -- reader sets --------------------------------------------------------------------------------------------------
    def _with_reader(self, number: int, epoch: int, thread: Thread) -> int:
        """The reader set that also holds ``epoch``; what is ordered before it needs no place beside it. Copies in
        flight have one agent in common but no order, so none stands for another."""
        orders, own, agent = thread.clock.orders, thread.tid, epoch >> SHIFT
        same = -1 if agent == self.block.flight else agent
        kept = {e for e in self.sets[number] if e >> SHIFT != own and e >> SHIFT != same and not orders(e)}
        result = self.memo[number, epoch] = self._number(kept | {epoch}, thread)
        return result

    def _number(self, members: set[int] | frozenset[int], thread: Thread) -> int:
        members = frozenset(members)
        number = self.numbers.get(members)
        if number is None:
            if len(self.sets) > self.sets_limit:
                self._forget_sets()
            number = self.numbers[members] = self.next_set
            self.next_set += 1
            self.sets[number] = members
            self.set_lines[number] = thread.position()
        return number

    def _forget_sets(self) -> None:
        """Drop the reader sets that no granule has; numbers are never used again, so what clocks remember stays
        true."""
        used = {0, *self.reader}
        self.sets = {n: s for n, s in self.sets.items() if n in used}
        self.set_lines = {n: self.set_lines[n] for n in used}
        self.numbers = {s: n for n, s in self.sets.items()}
        self.memo.clear()
        self.sets_limit = 2 * len(used) + SETS

    # -- verdicts -----------------------------------------------------------------------------------------------------
    def _park(self, cell: int, thread: Thread) -> None:
        """A read of what nobody wrote. Whether it is that, or a race with a write still to come, must not depend on who
        runs first: the reader stops here for good, a writer that no barrier keeps behind it will find the read, and if
        none comes, :meth:`unwritten` speaks."""
        message = f"{self.place(cell)} is read, but nothing was written there"
        self.parked.append(thread.fault(faults.UninitialisedRead, message))
        current: Any = getcurrent()
        current.wait("(nothing: it has read what nobody wrote)")

    def unwritten(self) -> faults.Fault | None:
        """The fault of the threads that have read what nobody wrote."""
        if not self.parked:
            return None
        first = min(self.parked, key=lambda f: f.threads)
        threads = {t for f in self.parked if f.where == first.where for t in f.threads}
        return faults.UninitialisedRead(first.message, first.block, sorted(threads), first.where)

    def _verify_writer(
        self, e: int, a: int, b: int, thread: Thread, clock: Any, epoch: int, proxy: bool, reading: bool
    ) -> None:
        cell = a + self.writer[a:b].index(e)
        if e == MBARRIER:
            raise thread.fault(faults.MbarrierMisuse, f"{self.place(cell)} belongs to an mbarrier")
        agent = e >> SHIFT
        if agent != thread.tid and not clock.orders(e):
            raise verdict.conflict(self, cell, e, True, self.lines[cell], thread, epoch, not reading)
        block = self.block
        if proxy and agent < block.size and clock.vector[block.fences + agent] < e & MASK:
            line = self.lines[cell]
            raise thread.fault(
                faults.MissingProxyFence,
                f"{self.place(cell)} was written by an ordinary store of thread {agent}"
                f"{' at ' + faults.describe(line) if line else ''}; without fence_proxy_async() between, the "
                f"asynchronous proxy "
                f"{'may not see it' if reading else 'may be overtaken by it'}",
            )

    def _verify_readers(self, number: int, a: int, b: int, thread: Thread, epoch: int) -> None:
        own = False
        for e in self.sets[number]:
            if e >> SHIFT == thread.tid:
                own = True
            elif not thread.clock.orders(e):
                cell = a + self.reader[a:b].index(number)
                raise verdict.conflict(self, cell, e, False, self.set_lines[number], thread, epoch, True)
        if not own:
            thread.clock.known_sets.add(number)

    def _verify_atomics(self, a: int, b: int, thread: Thread) -> None:
        for w in range(a, b):
            for tid, e in self.atomics.get(w, {}).items():
                if tid != thread.tid and not thread.clock.orders(e):
                    raise thread.fault(
                        faults.Race,
                        f"thread {thread.tid} accesses {self.place(w)} with an ordinary instruction, thread {tid} "
                        f"with an atomic; no barrier lies between",
                        (thread.tid, tid),
                    )
