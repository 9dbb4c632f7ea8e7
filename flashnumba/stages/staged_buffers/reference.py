"""A ring of slots that both products share, as a table; and what it leaves room for, as formulas.

The idea. Attention multiplies twice, ``S = Q K^T`` along the head dimension and ``O += P V`` along the keys. Cut each
along the axis it sums over, and what a step needs is small: a slice of K is some columns of all keys of its tile, a
slice of V some keys with all their columns. The slices of both, in the order in which they are needed, pass through one
ring of slots in shared memory::

    Q_0 .. Q_c-1, K_00 .. K_0,c-1, V_00 .. V_0,c-1, K_10 ..            c = 1 ("tile") or 4 ("quarter") slices a tile

Q comes first, by the same slots, and stays in registers. Step i computes with slice i, which lies in slot ``i % stages``.
While it does, the next slices are on their way::

    2 stages and more   wait until slice i is here, barrier | start slice i + stages - 1 | compute with slice i
    1 stage             start slice i | wait for it, barrier | compute with slice i | barrier

One wait and one barrier a step do two things at once. The barrier of step i lets all warps see slice i; and it says that
all warps are done with slice i - 1, so that its slot, ``(i - 1) % stages == (i + stages - 1) % stages``, may be filled
again. With a single slot these are two moments, and two barriers.

A wait counts groups of copies, one for each step, filled or not: before step i starts a new one, ``i + stages - 1`` have
been started, and all but the newest ``stages - 2`` must be here.

Bytes. A slice of K is ``bn x d/c``, one of V ``bn/c x d``: the same number of elements for any bn and d, and where bn
rows of Q are as many as bm, a slice of Q as well. So a slot is ``bn d / c`` elements.

Four quarter-size slots take as much as one tile, and half of what two whole tiles take, one of K and one of V.

Sources: the schedule is the multistage ring of CUTLASS (``mma_multistage.h``) laid through two products, as technical
notes on attention for another machine describe it; the budget's numbers are those notes'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

__all__ = [
    "CUTS", "FAULTS", "Broken", "Budget", "Period", "Row", "Slice", "budget", "check", "damaged", "period",
    "registers_held", "ring_bytes", "schedule", "slices", "slot_bytes", "table",
]  # fmt: skip

CUTS = {"tile": 1, "quarter": 4}
"""Slices of a tile of K, and of V."""
STAGES = (1, 2, 3, 4)
BEFORE, ALONE = ("wait", "barrier", "copy", "compute"), ("copy", "wait", "barrier", "compute", "barrier")
"""What a step does, in order: with slots to spare, and with a single one."""


class Slice(NamedTuple):
    """Part ``part`` of tile ``tile`` of an operand: Q, K or V. Q has one tile."""

    operand: str
    tile: int
    part: int

    def __str__(self) -> str:
        return f"{self.operand}{'' if self.operand == 'Q' else self.tile}.{self.part}"


@dataclass(frozen=True)
class Row:
    """A step of the schedule.

    Attributes:
        step: from ``1 - stages`` on; below 0 nothing is computed yet.
        slot, compute: with which slice the step computes, and where it lies; None before step 0.
        into, copy: which slice it starts to copy, and where to; None at the end. A group of copies it is all the same.
        wait: groups of copies that may be in flight after its wait; None if it does not wait.
        order: its actions, of "copy", "wait", "barrier" and "compute".
    """

    step: int
    slot: int
    compute: Slice | None
    into: int
    copy: Slice | None
    wait: int | None
    order: tuple[str, ...]


class Broken(ValueError):
    """A table that lets a slice be overwritten, or computed with before it is there."""


# -- the schedule ------------------------------------------------------------------------------------------------------
def slices(cut: str, tiles: int) -> list[Slice]:
    """All slices in the order in which they are needed: Q, then K and V of each of ``tiles`` tiles."""
    parts = range(_parts(cut))
    of_tiles = [Slice(x, j, part) for j in range(tiles) for x in "KV" for part in parts]
    return [Slice("Q", 0, part) for part in parts] + of_tiles


def schedule(stages: int, cut: str, tiles: int) -> list[Row]:
    """The table for ``tiles`` tiles of keys, ``stages`` slots (1 to 4) and a cut, "tile" or "quarter".

    Raises:
        ValueError: stages or cut are not among these.
    """
    if stages not in STAGES:
        raise ValueError(f"stages is {stages}; it must be 1, 2, 3 or 4")
    order, ahead, found = slices(cut, tiles), stages - 1, []
    for i in range(-ahead, len(order)):
        coming = i + ahead
        begun = order[coming] if coming < len(order) else None
        if i < 0:
            found.append(Row(i, i % stages, None, coming % stages, begun, None, ("copy",)))
        else:
            wait, actions = max(0, stages - 2), BEFORE if ahead else ALONE
            found.append(Row(i, i % stages, order[i], coming % stages, begun, wait, actions))
    return found


def _parts(cut: str) -> int:
    if cut not in CUTS:
        raise ValueError(f"cut is {cut!r}; it must be 'tile' or 'quarter'")
    return CUTS[cut]


def check(rows: Sequence[Row]) -> None:
    """Prove from the table alone that it is right, for any number of warps and any speed of copies.

    A copy may end as late as the wait for it, and a warp may be as late as the last barrier lets it.

    Raises:
        Broken: a slice is overwritten before all warps have computed with it; a step computes with what has not come,
            or with something else than it says; a slice that was copied is not computed with.
    """
    holds: dict[int, tuple[Slice, int]] = {}  # slot -> slice, number of its group
    unread, reading = set(), set()  # slots nobody has computed with; slots some warp may still be computing with
    begun = here = seen = 0  # groups that were started, that this warp has waited for, that all warps have
    for row in rows:
        for action in row.order:
            if action == "wait":
                here = max(here, begun - (row.wait or 0))
            elif action == "barrier":
                seen = here
                reading.clear()
            elif action == "copy":
                if row.copy is not None:
                    if row.into in reading:
                        raise Broken(
                            f"step {row.step} fills slot {row.into} with {row.copy} while a warp may still compute with "
                            f"{holds[row.into][0]} there: no barrier lies between"
                        )
                    if row.into in unread:
                        raise Broken(
                            f"step {row.step} fills slot {row.into} with {row.copy}, and nobody has computed with "
                            f"{holds[row.into][0]} yet"
                        )
                    holds[row.into] = row.copy, begun
                    unread.add(row.into)
                begun += 1
            else:
                found, group = holds.get(row.slot, (None, -1))
                if found != row.compute:
                    raise Broken(f"step {row.step} wants {row.compute} from slot {row.slot}, which has {found}")
                if group >= seen:
                    raise Broken(
                        f"step {row.step} computes with {found}, which "
                        + (
                            "is not waited for"
                            if group >= here
                            else "other threads have copied: no barrier lies between"
                        )
                    )
                unread.discard(row.slot)
                reading.add(row.slot)
    if unread:
        raise Broken(f"nobody computes with {', '.join(str(holds[slot][0]) for slot in sorted(unread))}")


class Period(NamedTuple):
    """What of a schedule repeats from tile to tile.

    Attributes:
        first: the rows before the first tile: copies alone, then Q.
        tile: the rows of tile 0; their copies say by their tile how many tiles ahead they are.
        turn: slot s of a tile is slot ``(s + turn) % stages`` of the next.
    """

    first: tuple[Row, ...]
    tile: tuple[Row, ...]
    turn: int


def period(rows: Sequence[Row], stages: int) -> Period:
    """The part that repeats, of a schedule of at least four tiles, so that no copy of tile 0 is left out."""
    first = tuple(row for row in rows if row.compute is None or row.compute.operand == "Q")
    tile = tuple(row for row in rows if row.compute is not None and row.compute[:2] in (("K", 0), ("V", 0)))
    return Period(first, tile, len(tile) % stages)


FAULTS = ("wait", "barrier", "early", "slot")
"""What :func:`damaged` does to a table."""


def damaged(rows: Sequence[Row], fault: str, stages: int) -> list[Row]:
    """The table with a fault in every step: what the check, and the emulator, must find.

    Args:
        fault: "wait": one group more may be in flight. "barrier": the barrier before the copy is missing, or with one
            slot that at the end. "early": a slot is filled one step before it is free; one slot knows no such step.
            "slot": computed with the slot next to the right one; with one slot, likewise, none.
    """
    found = []
    for row in rows:
        if row.compute is None:
            found.append(row)
        elif fault == "wait":
            found.append(replace(row, wait=row.wait + 1))
        elif fault == "barrier":
            at = len(row.order) - 1 - row.order[::-1].index("barrier")
            found.append(replace(row, order=row.order[:at] + row.order[at + 1 :]))
        elif fault == "early":
            found.append(replace(row, into=(row.into + 1) % stages))
        else:
            found.append(replace(row, slot=(row.slot + 1) % stages))
    return found


def table(rows: Sequence[Row], stages: int) -> np.ndarray:
    """What each slot holds during each step, for a picture: ``[stages, steps]`` int.

    0 is nothing that is needed any more, 1 a slice that is on its way or has come, 2 the one that is computed with. When
    it comes the table cannot say: only that it is here by then.
    """
    state = np.zeros((stages, len(rows)), int)  # [stages, steps]
    started = {row.copy: (at, row.into) for at, row in enumerate(rows) if row.copy is not None}
    for at, row in enumerate(rows):
        if row.compute is not None:
            begin, slot = started[row.compute]
            state[slot, begin:at] = 1
            state[slot, at] = 2
    return state


# -- the budget --------------------------------------------------------------------------------------------------------
def slot_bytes(cut: str, d: int, bn: int, itemsize: int = 2) -> int:
    """Bytes of a slot: the larger of a slice of K, ``bn x d/c``, and one of V, ``bn/c x d``, which are equal."""
    parts = _parts(cut)
    return max(bn * (d // parts), (bn // parts) * d) * itemsize


def ring_bytes(stages: int, cut: str, d: int, bn: int, itemsize: int = 2) -> int:
    """Bytes of shared memory for all slots."""
    return stages * slot_bytes(cut, d, bn, itemsize)


def registers_held(d: int, bn: int, rows: int = 16, threads: int = 32) -> int:
    """Registers a thread for what is kept: O ``[rows, d]`` and S ``[rows, bn]`` in float32, Q ``[rows, d]`` in 16 bits.

    A warp of ``threads`` threads owns ``rows`` rows. Addresses, the state of the rows and operands come on top.
    """
    return rows * (d + bn) // threads + rows * d // (2 * threads)


class Budget(NamedTuple):
    """What a block takes, and how many blocks fit.

    Attributes:
        block_bytes: of registers a block takes.
        by_registers, by_shared: blocks that the register file, and the shared memory, have room for.
        blocks: the smaller of these.
        shared_within: bytes of shared memory a block may take without being the scarcer.
    """

    block_bytes: int
    by_registers: int
    by_shared: int
    blocks: int
    shared_within: int


def budget(registers: int, threads: int, ring: int, register_file: int, shared: int) -> Budget:
    """Blocks a multiprocessor, without units of allocation and other limits.

    Args:
        registers: 32-bit registers a thread.
        threads: a block.
        ring: bytes of shared memory a block.
        register_file, shared: bytes of both that a multiprocessor has.

    >>> budget(256, 256, 16 * 1024, 768 * 1024, 64 * 1024)
    Budget(block_bytes=262144, by_registers=3, by_shared=4, blocks=3, shared_within=21845)
    """
    block = 4 * registers * threads
    by_registers, by_shared = register_file // block, shared // ring
    within = shared // by_registers if by_registers else shared
    return Budget(block, by_registers, by_shared, min(by_registers, by_shared), within)
