"""What two accesses to one shared byte are called when nothing orders them.

The name depends on the two accesses alone, never on which the emulator happened to execute first. Accesses are
those of a thread, of a copy that a thread starts and waits for itself (``cp.async``, a bulk store), of a bulk load that
reports to an mbarrier, and of a wgmma. ::

    one access         the other               is
    thread             thread                  Race
    thread             copy by a thread        Race, but in flight if the thread comes after the copy's start
    thread writes      wgmma reads             the same
    thread reads       bulk load               ReadInFlight
    thread writes      bulk load               OverwriteInFlight
    wgmma reads        bulk load writes        OverwriteInFlight if the wgmma started first, ReadInFlight otherwise

    In flight is ReadInFlight where a thread or a wgmma reads what the copy writes, OverwriteInFlight otherwise
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flashnumba.machine.emulator import faults
from flashnumba.machine.emulator.clock import SHIFT

if TYPE_CHECKING:
    from flashnumba.machine.emulator.shared_memory import SharedMemory
    from flashnumba.machine.emulator.thread import Thread

__all__ = ["conflict"]


def conflict(
    shared: SharedMemory, cell: int, before: int, wrote: bool, line: Any, thread: Thread, epoch: int, writes: bool
) -> faults.Fault:
    """The fault of an access by ``thread`` (under ``epoch``, 0 for its own) that meets the access ``before``.

    Args:
        cell: the granule both touch.
        before: epoch of the access executed before; ``wrote`` says whether it was a write, ``line`` where it was made.
        writes: whether the present access is a write.
    """
    block, agent, place = shared.block, before >> SHIFT, shared.place(cell)
    where = f" at {faults.describe(line)}" if line else ""
    engine, now = block.in_flight(before), block.in_flight(epoch) if epoch else None
    if engine == "wgmma":
        first = (agent - block.first_group) * 128
        after, who = _after_wgmma(shared, before, thread), f"wgmma of threads {first}-{first + 127}"
        if not after and now != "bulk copy":
            # The first of its threads speaks for a wgmma which nobody has started as far as this thread knows.
            return _race(thread, place, writes, f"a {who}", first, False, where)
        return _in_flight(thread, place, not after, f"{who} that reads it, started{where}")
    if engine == "bulk copy":
        return _in_flight(thread, place, not writes, f"bulk copy into it, started{where}")
    if now == "bulk copy":
        # A thread's access, or one of its own copies, meets a bulk load that starts now.
        kind = faults.OverwriteInFlight if wrote else faults.ReadInFlight
        act = "wrote" if wrote else "may still read"
        owner = shared.issued.get(before, before) >> SHIFT
        return thread.fault(
            kind,
            f"a bulk copy into {place} starts, which thread {owner} {act}{where}; nothing orders the two",
            (thread.tid, owner),
        )
    start = shared.issued.get(before)
    if start is not None:
        owner = start >> SHIFT
        if owner == thread.tid or thread.clock.orders(start):
            act = "into it" if wrote else "that reads it"
            what = f"asynchronous copy of thread {owner} {act}, started{where}"
            return _in_flight(thread, place, wrote and not writes, what)
        return _race(thread, place, writes, f"an asynchronous copy of thread {owner}", owner, wrote, where)
    return _race(thread, place, writes, f"thread {agent}", agent, wrote, where)


def _race(thread: Thread, place: str, writes: bool, other: str, tid: int, wrote: bool, where: str) -> faults.Fault:
    return thread.fault(
        faults.Race,
        f"thread {thread.tid} {'writes' if writes else 'reads'} {place}, which {other} "
        f"{'wrote' if wrote else 'read'}{where}; no barrier lies between",
        (thread.tid, tid),
    )


def _in_flight(thread: Thread, place: str, reads: bool, what: str) -> faults.Fault:
    kind, act = (faults.ReadInFlight, "read") if reads else (faults.OverwriteInFlight, "overwritten")
    return thread.fault(kind, f"{place} is {act} before the wait for the {what}")


def _after_wgmma(shared: SharedMemory, epoch: int, thread: Thread) -> bool:
    """Whether a thread comes after the start of a wgmma: it is one of its 128, or knows that one of them issued it."""
    block = shared.block
    number = (epoch >> SHIFT) - block.first_group
    first = number * 128
    if first <= thread.tid < first + 128:
        return True
    issued: np.ndarray | None = block.groups[number].issued.get(epoch)
    return issued is None or bool((thread.clock.vector[first : first + 128] >= issued).any())
