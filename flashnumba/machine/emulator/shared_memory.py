"""A block's shared memory with a shadow: who wrote each word last, and who has read it since.

The shadow is two lists with one entry a granule (4 bytes, until a smaller access is seen). ``writer`` holds the epoch
of the last write, 0 for never. ``reader`` holds the number of an interned set of reading epochs, so that a tile read by
one agent is one list operation, and 128 threads reading the same words build 128 sets once, not once a word.

A copy or a wgmma in flight appears with an epoch that nobody has joined yet: any access before its wait is concurrent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flashnumba.machine.emulator import faults
from flashnumba.machine.emulator.clock import SHIFT

if TYPE_CHECKING:
    from flashnumba.machine.emulator.block import Block
    from flashnumba.machine.emulator.thread import Thread

__all__ = ["MBARRIER", "SharedMemory"]

MBARRIER = -1
"""Stands in ``writer`` for the eight bytes of an mbarrier, which ordinary accesses must leave alone."""


class SharedMemory:
    """``size`` bytes, addressed from 0; every access is checked before it is made."""

    def __init__(self, block: Block, size: int, checks: bool):
        self.block, self.size, self.checks = block, size, checks
        self.data = np.zeros(size + 16, np.uint8)
        self.views: dict[Any, np.ndarray] = {}
        self.shift = 2
        cells = (size + 3) >> 2
        self.writer: list[int] = [0] * cells if checks else []
        self.reader: list[int] = [0] * cells if checks else []
        self.lines: dict[int, faults.Position] = {}  # granule -> where it was last written
        self.sets: list[frozenset[int]] = [frozenset()]
        self.set_lines: list[faults.Position | None] = [None]
        self.numbers: dict[frozenset[int], int] = {frozenset(): 0}
        self.memo: dict[tuple[int, int], int] = {}
        self.atomics: dict[int, dict[int, int]] = {}

    # -- data ---------------------------------------------------------------------------------------------------------
    def gather(self, addresses: np.ndarray, nbytes: int) -> np.ndarray:
        """Unchecked: the bytes at some addresses, [..., nbytes]."""
        return self.data[np.asarray(addresses)[..., None] + np.arange(nbytes)]

    def scatter(self, addresses: np.ndarray, data: np.ndarray) -> None:
        """Unchecked: store bytes [..., nbytes] at some addresses."""
        self.data[np.asarray(addresses)[..., None] + np.arange(data.shape[-1])] = data

    # -- checks -------------------------------------------------------------------------------------------------------
    def _span(self, lo: int, hi: int, thread: Thread, align: int) -> tuple[int, int]:
        if lo < 0 or hi > self.size:
            raise thread.fault(
                faults.OutOfBounds,
                f"shared bytes {lo}..{hi - 1} of a block that has {self.size} bytes of shared memory",
            )
        if lo & (align - 1):
            raise thread.fault(faults.Misaligned, f"shared address {lo} is not a multiple of {align}")
        grain = (1 << self.shift) - 1
        while (lo & grain or hi & grain) and self.checks:
            self._refine()
            grain = (1 << self.shift) - 1
        return lo >> self.shift, hi >> self.shift

    def _refine(self) -> None:
        """Halve the granule: something smaller than a word is addressed."""
        self.shift -= 1
        self.writer = [e for e in self.writer for _ in (0, 1)]
        self.reader = [e for e in self.reader for _ in (0, 1)]
        self.lines = {2 * k + i: v for k, v in self.lines.items() for i in (0, 1)}
        self.atomics = {2 * k + i: v for k, v in self.atomics.items() for i in (0, 1)}

    def check_read(self, lo: int, hi: int, thread: Thread, epoch: int = 0, align: int = 1, proxy: bool = False) -> None:
        """A read of bytes [lo, hi) by ``thread``, remembered under ``epoch`` (its own if 0).

        ``proxy``: by the asynchronous proxy (a bulk copy, a wgmma), which sees ordinary stores only after a proxy fence.
        """
        a, b = self._span(lo, hi, thread, align)
        clock, known = thread.clock, thread.clock.known
        if b - a == 1:
            e = self.writer[a]
            if (e not in known and e >> SHIFT != thread.tid) or proxy or e == 0:
                self._verify_writer(e, a, a, b, thread, clock, proxy, reading=True)
        else:
            for e in set(self.writer[a:b]):
                if (e not in known and e >> SHIFT != thread.tid) or proxy or e == 0:
                    self._verify_writer(e, None, a, b, thread, clock, proxy, reading=True)
        if self.atomics:
            self._verify_atomics(a, b, thread)
        epoch = epoch or thread.epoch
        memo = self.memo
        if b - a == 1:
            before = self.reader[a]
            after = memo.get((before, epoch))
            self.reader[a] = self._with_reader(before, epoch, thread) if after is None else after
            return
        cells = self.reader[a:b]
        first = cells[0]
        if cells.count(first) == len(cells):
            after = memo.get((first, epoch))
            self.reader[a:b] = [self._with_reader(first, epoch, thread) if after is None else after] * (b - a)
        else:
            new = {c: memo.get((c, epoch)) or self._with_reader(c, epoch, thread) for c in set(cells)}
            self.reader[a:b] = [new[c] for c in cells]

    def check_write(self, lo: int, hi: int, thread: Thread, epoch: int = 0, align: int = 1) -> None:
        """A write of bytes [lo, hi) by ``thread``, remembered under ``epoch`` (its own if 0)."""
        a, b = self._span(lo, hi, thread, align)
        clock = thread.clock
        known, known_sets = clock.known, clock.known_sets
        if b - a == 1:
            writers, readers = (self.writer[a],), (self.reader[a],)
        else:
            writers, readers = set(self.writer[a:b]), set(self.reader[a:b])
        for e in writers:
            if e not in known and e >> SHIFT != thread.tid and e != 0:
                self._verify_writer(e, None, a, b, thread, clock, False, reading=False)
        for r in readers:
            if r and r not in known_sets:
                self._verify_readers(r, a, b, thread)
        if self.atomics:
            self._verify_atomics(a, b, thread)
            for w in range(a, b):
                self.atomics.pop(w, None)
        epoch = epoch or thread.epoch
        where = thread.position()
        if b - a == 1:
            self.writer[a], self.reader[a], self.lines[a] = epoch, 0, where
        else:
            self.writer[a:b] = [epoch] * (b - a)
            self.reader[a:b] = [0] * (b - a)
            self.lines.update(dict.fromkeys(range(a, b), where))

    def check_atomic(self, lo: int, hi: int, thread: Thread) -> None:
        """An atomic read-modify-write: it may meet other atomics, not plain accesses."""
        a, b = self._span(lo, hi, thread, hi - lo)
        for w in range(a, b):
            e = self.writer[w]
            if e == 0 or (e >> SHIFT != thread.tid and not thread.clock.orders(e)):
                self._verify_writer(e, w, a, b, thread, thread.clock, False, reading=True)
            r = self.reader[w]
            if r and r not in thread.clock.known_sets:
                self._verify_readers(r, a, b, thread)
            self.atomics.setdefault(w, {})[thread.tid] = thread.epoch

    def restamp_writer(self, lo: int, hi: int, old: int, new: int) -> None:
        """A copy has been waited for: its bytes count as written by the one who waited."""
        a, b = lo >> self.shift, hi >> self.shift
        self.writer[a:b] = [new if e == old else e for e in self.writer[a:b]]

    def restamp_reader(self, lo: int, hi: int, old: int, new: int, thread: Thread) -> None:
        """A copy out of shared memory has been waited for: its reads count as the waiter's."""
        a, b = lo >> self.shift, hi >> self.shift
        cells = self.reader[a:b]
        after = {
            c: self._number((self.sets[c] - {old}) | {new}, thread) if old in self.sets[c] else c for c in set(cells)
        }
        self.reader[a:b] = [after[c] for c in cells]

    # -- verdicts -----------------------------------------------------------------------------------------------------
    def _with_reader(self, number: int, epoch: int, thread: Thread) -> int:
        """The reader set that also holds ``epoch``; what is ordered before it needs no place beside it."""
        orders, own = thread.clock.orders, thread.tid
        kept = {e for e in self.sets[number] if e >> SHIFT != own and e >> SHIFT != epoch >> SHIFT and not orders(e)}
        result = self.memo[number, epoch] = self._number(frozenset(kept | {epoch}), thread)
        return result

    def _number(self, members: frozenset[int], thread: Thread) -> int:
        members = frozenset(members)
        number = self.numbers.get(members)
        if number is None:
            number = self.numbers[members] = len(self.sets)
            self.sets.append(members)
            self.set_lines.append(thread.position())
        return number

    def _verify_writer(
        self, e: int, cell: int | None, a: int, b: int, thread: Thread, clock: Any, proxy: bool, reading: bool
    ) -> None:
        if cell is None:
            cell = a + self.writer[a:b].index(e)
        byte = cell << self.shift
        if e == 0:
            raise thread.fault(faults.UninitialisedRead, f"shared byte {byte} is read, but nothing was written there")
        if e == MBARRIER:
            raise thread.fault(faults.MbarrierMisuse, f"shared byte {byte} belongs to an mbarrier")
        agent = e >> SHIFT
        if agent != thread.tid and not clock.orders(e):
            flight = self.block.in_flight(e)
            line = self.lines.get(cell)
            since = f", started at {faults.describe(line)}" if line else ""
            if flight:
                kind = faults.ReadInFlight if reading else faults.OverwriteInFlight
                act = "read" if reading else "overwritten"
                raise thread.fault(
                    kind, f"shared byte {byte} is {act} before the {flight} into it was waited for{since}"
                )
            wrote = f", written at {faults.describe(line)}" if line else ""
            act = "reads" if reading else "writes"
            raise thread.fault(
                faults.Race,
                f"thread {thread.tid} {act} shared byte {byte}, which {self.block.agent(agent)} wrote{wrote}; "
                f"no barrier lies between",
                (thread.tid, agent),
            )
        if (
            proxy
            and agent < self.block.size
            and self.block.threads[agent].fenced < e & 0xFFFFFFFF
            and not thread.fenced_since_barrier
        ):
            line = self.lines.get(cell)
            raise thread.fault(
                faults.MissingProxyFence,
                f"shared byte {byte} was written by an ordinary store of thread {agent}"
                f"{' at ' + faults.describe(line) if line else ''}; the asynchronous proxy may not see it without "
                f"fence_proxy_async() before the barrier",
            )

    def _verify_readers(self, number: int, a: int, b: int, thread: Thread) -> None:
        clock = thread.clock
        for e in self.sets[number]:
            agent = e >> SHIFT
            if agent == thread.tid or clock.orders(e):
                continue
            cell = a + self.reader[a:b].index(number)
            line = self.set_lines[number]
            where = f" at {faults.describe(line)}" if line else ""
            flight = self.block.in_flight(e)
            if flight:
                raise thread.fault(
                    faults.OverwriteInFlight,
                    f"shared byte {cell << self.shift} is overwritten while the {flight} that reads it is in flight{where}",
                )
            raise thread.fault(
                faults.Race,
                f"thread {thread.tid} writes shared byte {cell << self.shift}, which {self.block.agent(agent)} "
                f"read{where}; no barrier lies between",
                (thread.tid, agent),
            )
        if not any(e >> SHIFT == thread.tid for e in self.sets[number]):
            clock.known_sets.add(number)

    def _verify_atomics(self, a: int, b: int, thread: Thread) -> None:
        for w in range(a, b):
            for tid, e in self.atomics.get(w, {}).items():
                if tid != thread.tid and not thread.clock.orders(e):
                    raise thread.fault(
                        faults.Race,
                        f"thread {thread.tid} accesses shared byte {w << self.shift} with an ordinary instruction, thread {tid} "
                        f"with an atomic; no barrier lies between",
                        (thread.tid, tid),
                    )
