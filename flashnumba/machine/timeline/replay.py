"""From a log of events to times: each warp does one thing after the other, and units serve those who come in turn.

A discrete-event simulation of :class:`~flashnumba.machine.timeline.costs.Costs`. An instruction takes a turn of its
partition (one a cycle) and then time on its unit: the partition's tensor core, its three kinds of arithmetic, the
multiprocessor's shared memory, its way to device memory. A warp waits where its program says so: at barriers and
mbarriers, for groups of copies and of wgmma, and before it touches the result of an mma.

Left out, so the real thing is slower: addresses, branches and other integers; the latency of arithmetic, of exchanges
between lanes and of shared memory, which compilers and other warps mostly hide; bank conflicts; caches, and other
multiprocessors' traffic. Plain loads in a row overlap, and what comes after them waits for all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple

from flashnumba.machine.emulator.event_log import Event
from flashnumba.machine.timeline.costs import Costs
from flashnumba.machine.timeline.units import PARTITIONS, Block, Groups, Mbarrier, Multiprocessor, Warp

__all__ = ["Landing", "Replayed", "replay"]

Log = dict[tuple[int, int], Sequence[Event]]


class Landing(NamedTuple):
    """An asynchronous copy: who started it and when, when it had landed, and its bytes."""

    block: int
    warp: int
    begin: float
    end: float
    nbytes: int


@dataclass(frozen=True)
class Replayed:
    """Times in cycles from the start of the launch.

    Attributes:
        times: by (block, warp), for each event of the log when the warp came to it.
        ends: by (block, warp), when the warp was done.
        multiprocessors: by block, where it ran.
        landings: copies in the order in which they were started.
    """

    times: dict[tuple[int, int], list[float]]
    ends: dict[tuple[int, int], float]
    multiprocessors: dict[int, int]
    landings: list[Landing]

    @property
    def cycles(self) -> float:
        """When the last warp was done."""
        return max(self.ends.values(), default=0.0)


def replay(log: Log, costs: Costs, *, multiprocessors: int | None = None, resident: int = 1) -> Replayed:
    """Give every event a time.

    Args:
        log: events by (block, warp), as :class:`flashnumba.machine.emulator.events.Events` has them.
        multiprocessors: how many there are; None: as ``costs`` says. Blocks go to each in turn.
        resident: blocks that a multiprocessor holds at once; the others start when one has ended.

    Raises:
        ValueError: a number that is not positive, an unknown event, or warps that wait for what no warp does.
    """
    total = costs.multiprocessors if multiprocessors is None else multiprocessors
    for name, value in (("multiprocessors", total), ("resident", resident)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    return _Simulation(log, costs, total, resident).run()


class _Simulation:
    def __init__(self, log: Log, costs: Costs, multiprocessors: int, resident: int):
        self.log, self.costs = log, costs
        blocks: dict[int, list[int]] = {}
        for block, warp in sorted(log):
            blocks.setdefault(block, []).append(warp)
        self.blocks = deque(blocks.items())
        machines = [Multiprocessor(i) for i in range(min(multiprocessors, max(1, len(blocks))))]
        self.places = [(machine, slot) for slot in range(min(resident, len(blocks))) for machine in machines]
        self.queue: list[tuple[float, int, Callable[[float], None]]] = []
        self.order = count()
        self.warps: list[Warp] = []
        self.ends: dict[tuple[int, int], float] = {}
        self.landings: list[Landing] = []

    def run(self) -> Replayed:
        for machine, slot in self.places:
            self._start(machine, slot, 0.0)
        while self.queue:
            now, _, act = heappop(self.queue)
            act(now)
        stuck = [w for w in self.warps if w.place not in self.ends]
        if stuck:
            (block, warp), at = stuck[0].place, len(stuck[0].times) - 1
            name, *numbers = stuck[0].events[at]
            raise ValueError(
                f"the log cannot be replayed: warp {warp} of block {block} waits at event {at}, {name} {numbers}, for "
                "what no warp does; a log follows lane 0 of each warp, and what another lane does alone is not in it"
            )
        return Replayed(
            {w.place: w.times for w in self.warps}, self.ends,
            {w.block.number: w.block.on.number for w in self.warps}, self.landings,
        )  # fmt: skip

    def _start(self, machine: Multiprocessor, slot: int, now: float) -> None:
        """The next block takes a place, if there is one."""
        if not self.blocks:
            return
        number, names = self.blocks.popleft()
        block = Block(number, slot, machine, len(names))
        for i, warp in enumerate(names):
            place = (number, warp)
            made = Warp(place, block, (slot * len(names) + i) % PARTITIONS, self.log[place])
            self.warps.append(made)
            self._at(now, made)

    def _at(self, when: float, warp: Warp) -> None:
        """The warp goes on at some time."""
        heappush(self.queue, (when, next(self.order), lambda now: self._step(warp, now)))

    def _step(self, warp: Warp, now: float) -> None:
        if len(warp.times) == len(warp.events):
            self.ends[warp.place] = now
            block = warp.block
            block.warps -= 1
            if block.warps == 0:
                self._start(block.on, block.slot, now)
            return
        event = warp.events[len(warp.times)]
        act: Any = getattr(self, f"_do_{event.name}", None)
        if act is None:
            raise ValueError(f"event {event.name!r} of warp {warp.place[1]}, block {warp.place[0]}, is not known")
        if warp.loaded > now and event.name not in ("load", "clock", "issue"):
            self._at(warp.loaded, warp)  # what it books must not stand in the way of who comes before
            return
        warp.times.append(now)
        then = act(warp, now, event)
        if then is not None:
            self._at(then, warp)

    def _turn(self, warp: Warp, now: float, instructions: int = 1) -> float:
        """When the warp's instruction is issued."""
        issue = warp.block.on.issue
        start = max(now, issue[warp.part])
        issue[warp.part] = start + instructions
        return start

    def _transfer(self, warp: Warp, start: float, nbytes: int) -> float:
        """Bytes to or from device memory; returns when they are through."""
        machine = warp.block.on
        machine.memory = max(machine.memory, start) + nbytes / self.costs.copy_rate
        return machine.memory

    def _copy(self, warp: Warp, start: float, nbytes: int) -> float:
        """An asynchronous copy; returns when it has landed."""
        end = self._transfer(warp, start, nbytes) + self.costs.copy_latency
        self.landings.append(Landing(*warp.place, start, end, nbytes))
        return end

    # -- events: when the warp goes on, None if somebody else will say so ---------------------------------------------
    def _do_math(self, warp: Warp, now: float, event: Event) -> float:
        numbers = (event.a, event.b, event.c)
        start = self._turn(warp, now, sum(numbers))
        done = start + sum(numbers)
        units = warp.block.on.math[warp.part]
        for i, (n, each) in enumerate(
            zip(numbers, (self.costs.fp32, self.costs.other, self.costs.special), strict=True)
        ):
            if n:
                units[i] = max(units[i], start) + n * each
                done = max(done, units[i])
        return done

    def _do_mma(self, warp: Warp, now: float, event: Event) -> float:
        tensor, took = warp.block.on.tensor, event.a / self.costs.mma_rate
        start = max(self._turn(warp, now), tensor[warp.part])
        tensor[warp.part] = start + took
        warp.results[len(warp.times) - 1] = start + max(took, self.costs.mma_latency)
        return start + 1

    def _do_use(self, warp: Warp, now: float, event: Event) -> float:
        return max(now, warp.results.pop(event.a, 0.0))

    def _do_shared(self, warp: Warp, now: float, event: Event) -> float:
        machine = warp.block.on
        start = max(self._turn(warp, now), machine.shared)
        machine.shared = start + event.a / self.costs.shared_rate
        return start + 1

    def _do_load(self, warp: Warp, now: float, event: Event) -> float:
        start = self._turn(warp, now)
        warp.loaded = self._transfer(warp, start, event.a) + self.costs.copy_latency
        return start + 1

    def _do_store(self, warp: Warp, now: float, event: Event) -> float:
        start = self._turn(warp, now)
        self._transfer(warp, start, event.a)
        return start + 1

    def _do_copy(self, warp: Warp, now: float, event: Event) -> float:
        start = self._turn(warp, now)
        warp.copies.add(self._copy(warp, start, event.a))
        return start + 1

    def _do_bulk_store(self, warp: Warp, now: float, event: Event) -> float:
        start = self._turn(warp, now)
        warp.stores.add(self._transfer(warp, start, event.a) + self.costs.copy_latency)
        return start + 1

    def _do_wgmma(self, warp: Warp, now: float, event: Event) -> float:
        start, tensor = self._turn(warp, now), warp.block.on.tensor
        tensor[warp.part] = max(tensor[warp.part], start) + event.a / self.costs.wgmma_rate
        warp.products.add(tensor[warp.part] + self.costs.mma_latency)
        return start + 1

    def _commit(self, warp: Warp, now: float, groups: Groups) -> float:
        groups.commit()
        return self._turn(warp, now) + 1

    def _wait(self, warp: Warp, now: float, groups: Groups, pending: int) -> float:
        return max(self._turn(warp, now) + 1, groups.wait(pending))

    def _do_commit(self, warp: Warp, now: float, event: Event) -> float:
        return self._commit(warp, now, warp.copies)

    def _do_wait(self, warp: Warp, now: float, event: Event) -> float:
        return self._wait(warp, now, warp.copies, event.a)

    def _do_bulk_commit(self, warp: Warp, now: float, event: Event) -> float:
        return self._commit(warp, now, warp.stores)

    def _do_bulk_wait(self, warp: Warp, now: float, event: Event) -> float:
        return self._wait(warp, now, warp.stores, event.a)

    def _do_wgmma_commit(self, warp: Warp, now: float, event: Event) -> float:
        return self._commit(warp, now, warp.products)

    def _do_wgmma_wait(self, warp: Warp, now: float, event: Event) -> float:
        return self._wait(warp, now, warp.products, event.a)

    def _do_issue(self, warp: Warp, now: float, event: Event) -> float:
        return self._turn(warp, now, event.a) + event.a

    def _do_clock(self, warp: Warp, now: float, event: Event) -> float:
        return self._turn(warp, now) + 1

    def _do_barrier(self, warp: Warp, now: float, event: Event) -> float | None:
        block, start = warp.block, self._turn(warp, now)
        parked = block.barriers.setdefault(event.b, [])
        block.arrived[event.b] = block.arrived.get(event.b, 0) + 1
        if event.c:
            parked.append(warp)
        if block.arrived[event.b] * 32 >= event.a:
            del block.barriers[event.b], block.arrived[event.b]
            for other in parked:
                self._at(start + self.costs.barrier, other)
        return None if event.c else start + 1

    def _do_init(self, warp: Warp, now: float, event: Event) -> float:
        warp.block.mbarriers[event.b] = Mbarrier(event.a, event.a)
        return self._turn(warp, now) + 1

    def _mbarrier(self, warp: Warp, address: int) -> Mbarrier:
        found = warp.block.mbarriers.get(address)
        if found is None:
            raise ValueError(f"warp {warp.place[1]} of block {warp.place[0]} uses mbarrier {address}, which none made")
        return found

    def _complete(self, barrier: Mbarrier, now: float) -> None:
        """Go on to the next phase if nothing is missing."""
        if barrier.pending or barrier.nbytes:
            return
        barrier.phase += 1
        barrier.pending = barrier.arrivals
        free = [warp for warp, parity in barrier.parked if barrier.passed(parity)]
        barrier.parked = [one for one in barrier.parked if not barrier.passed(one[1])]
        for warp in free:
            self._at(now + self.costs.barrier, warp)

    def _do_expect(self, warp: Warp, now: float, event: Event) -> float:
        self._mbarrier(warp, event.b).nbytes += event.a
        return self._turn(warp, now) + 1

    def _do_arrive(self, warp: Warp, now: float, event: Event) -> float:
        barrier, start = self._mbarrier(warp, event.b), self._turn(warp, now)
        barrier.pending -= event.a
        self._complete(barrier, start)
        return start + 1

    def _do_phase(self, warp: Warp, now: float, event: Event) -> float | None:
        barrier, start = self._mbarrier(warp, event.b), self._turn(warp, now)
        if barrier.passed(event.a):
            return start + 1
        barrier.parked.append((warp, event.a))
        return None

    def _do_bulk(self, warp: Warp, now: float, event: Event) -> float:
        barrier, start = self._mbarrier(warp, event.b), self._turn(warp, now)

        def landed(then: float) -> None:
            barrier.nbytes -= event.a
            self._complete(barrier, then)

        heappush(self.queue, (self._copy(warp, start, event.a), next(self.order), landed))
        return start + 1
