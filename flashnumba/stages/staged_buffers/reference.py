"""A ring of slots that both products share, as a table; and attention that goes by the table.

The idea. Attention multiplies twice, ``S = Q K^T`` along the head dimension and ``O += P V`` along the keys. Cut each
along the axis it sums over, and what a step needs is small: a slice of K is some columns of all keys of its tile, a
slice of V some keys with all their columns. The slices of both, in the order in which they are needed, pass through one
ring of slots in shared memory::

    Q_0 .. Q_c-1, K_00 .. K_0,c-1, V_00 .. V_0,c-1, K_10 ..            c = 1 ("tile") or 4 ("quarter") slices a tile

Q comes first, by the same slots, and stays in registers. Step i computes with slice i, which lies in slot
``i % stages``. While it does, the next slices are on their way::

    2 stages and more   wait until slice i is here, barrier | start slice i + stages - 1 | compute with slice i
    1 stage             start slice i | wait for it, barrier | compute with slice i | barrier

One wait and one barrier a step do two things at once. The barrier of step i lets all warps see slice i; and it says
that all warps are done with slice i - 1, so that its slot, ``(i - 1) % stages == (i + stages - 1) % stages``, may be
filled again. With a single slot these are two moments, and two barriers.

A wait counts groups of copies, one for each step, filled or not: before step i starts a new one, ``i + stages - 1``
have been started, and all but the newest ``stages - 2`` must be here.

Bytes. A slice of K is ``bn x d/c``, one of V ``bn/c x d``: the same number of elements for any bn and d, and where bn
rows of Q are as many as bm, a slice of Q as well. So a slot is ``bn d / c`` elements.

Four quarter-size slots take as much as one tile, and half of what two whole tiles take, one of K and one of V. What
that leaves room for is in :mod:`flashnumba.stages.staged_buffers.budget`.

Source: the multistage ring of CUTLASS (``mma_multistage.h``), laid through two products as technical notes on attention
for another machine describe it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

__all__ = [
    "CUTS", "FAULTS", "STAGES", "Broken", "Period", "Row", "Slice", "attention", "check", "damaged", "parts_of",
    "period", "schedule", "slices", "table",
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
    parts = range(parts_of(cut))
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


def parts_of(cut: str) -> int:
    """Slices of a tile of K, or of V."""
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
                            f"step {row.step} fills slot {row.into} with {row.copy} while a warp may still compute "
                            f"with {holds[row.into][0]} there: no barrier lies between"
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


# -- attention by the table --------------------------------------------------------------------------------------------
def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, stages: int, cut: str, *, bm: int = 64, bn: int = 64,
    scale: float | None = None, causal: bool = False,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Attention of one head in float64, with nothing of K and V at hand but what lies in the slots.

    Args:
        q, k, v: ``[M, D]``, ``[N, D]``, ``[N, D]``.
        scale: 1/sqrt(D) if None.
        causal: key j is visible to row i if ``j <= i + N - M``.

    Returns:
        o ``[M, D]`` and lse ``[M]``; 0 and -inf for a row that sees no key.
    """
    (m, d), n, parts = q.shape, len(k), parts_of(cut)
    scale = 1 / np.sqrt(d) if scale is None else scale
    columns = np.array_split(np.arange(d), parts)  # of a slice of K, and of Q
    o, lse = np.zeros((m, d)), np.full(m, -np.inf)  # [M, D], [M]
    for row0 in range(0, m, bm):
        rows = np.arange(row0, min(row0 + bm, m))  # [rows]
        held = np.zeros((len(rows), d))  # [rows, D]  Q
        acc, total, top = np.zeros((len(rows), d)), np.zeros(len(rows)), np.full(len(rows), -np.inf)
        s = p = np.zeros((len(rows), 0))  # [rows, keys]
        slots: list[np.ndarray | None] = [None] * stages
        for step in schedule(stages, cut, -(-n // bn)):
            for action in step.order:
                if action == "copy" and step.copy is not None:
                    operand, tile, part = step.copy
                    keys = np.arange(tile * bn, min((tile + 1) * bn, n))  # [keys]
                    if operand == "V":
                        slots[step.into] = v[np.array_split(keys, parts)[part]].astype(np.float64)
                    else:
                        whole = q[rows] if operand == "Q" else k[keys]  # [rows, D] or [keys, D]
                        slots[step.into] = whole[:, columns[part]].astype(np.float64)
                elif action == "compute" and step.compute is not None:
                    (operand, tile, part), slot = step.compute, slots[step.slot]
                    if operand == "Q":
                        held[:, columns[part]] = slot
                    elif operand == "K":
                        s = (s if part else 0.0) + held[:, columns[part]] @ slot.T  # [rows, keys]
                        if part == parts - 1:
                            keys = np.arange(tile * bn, tile * bn + s.shape[1])  # [keys]
                            s = s * scale
                            if causal:
                                s = np.where(keys <= rows[:, None] + n - m, s, -np.inf)  # [rows, keys]
                            larger = np.maximum(top, s.max(1))  # [rows]
                            origin = np.where(larger == -np.inf, 0, larger)  # [rows]
                            p, alpha = np.exp(s - origin[:, None]), np.exp(top - origin)  # [rows, keys], [rows]
                            top, total, acc = larger, total * alpha + p.sum(1), acc * alpha[:, None]
                    else:
                        acc = acc + np.array_split(p, parts, axis=1)[part] @ slot  # [rows, D]
        seen = np.where(total == 0, 1, total)  # [rows]
        o[rows], lse[rows] = acc / seen[:, None], top + np.log(seen)
    return o, lse


# -- faults, and a picture ---------------------------------------------------------------------------------------------
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

    0 is nothing that is needed any more, 1 a slice that is on its way or has come, 2 the one that is computed with.
    When it comes the table cannot say: only that it is here by then.
    """
    state = np.zeros((stages, len(rows)), int)  # [stages, steps]
    started = {row.copy: (at, row.into) for at, row in enumerate(rows) if row.copy is not None}
    for at, row in enumerate(rows):
        if row.compute is not None:
            begin, slot = started[row.compute]
            state[slot, begin:at] = 1
            state[slot, at] = 2
    return state
