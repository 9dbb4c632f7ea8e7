"""What a timeline amounts to: the time of each kind, and how much of the copies lies under computation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from flashnumba.machine.timeline.record import COMPUTE, Record
from flashnumba.machine.timeline.trace import KINDS

__all__ = ["Summary", "merged", "overlap", "summarise"]

Interval = tuple[float, float]


class Summary(NamedTuple):
    """``shares``: of the warps' time, by kind, ``other`` being what no span covers. ``copying``: cycles during which
    copies into slots were under way, each counted by itself; ``hidden``: the share of it during which some warp of
    the block computed, None without such copies. ``warps``: how many; ``cycles``: from the first span to the last."""

    shares: dict[str, float]
    copying: float
    hidden: float | None
    warps: int
    cycles: float


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals with the same union, in order.

    >>> merged([(4, 6), (0, 2), (1, 3)])
    [(0, 3), (4, 6)]
    """
    out: list[Interval] = []
    for lo, hi in sorted(intervals):
        if out and lo <= out[-1][1]:
            out[-1] = (out[-1][0], max(hi, out[-1][1]))
        else:
            out.append((lo, hi))
    return out


def overlap(interval: Interval, others: Iterable[Interval]) -> float:
    """Length of what an interval shares with some disjoint ones.

    >>> overlap((1, 5), [(0, 2), (4, 9)])
    2
    """
    return sum(max(0, min(interval[1], hi) - max(interval[0], lo)) for lo, hi in others)


def summarise(record: Record) -> Summary:
    """Sum up a record. A copy into a slot is under way from when the first warp starts its part of it to when the first
    warp has waited for it; when exactly the bytes came, marks cannot tell."""
    lives: dict[tuple[int, int], Interval] = {}
    spent = dict.fromkeys(KINDS, 0.0)
    for s in record.spans:
        lo, hi = lives.get((s.block, s.warp), (s.begin, s.end))
        lives[s.block, s.warp] = min(lo, s.begin), max(hi, s.end)
        spent[KINDS[s.kind]] += s.end - s.begin
    total = sum(hi - lo for lo, hi in lives.values())
    spent["other"] += max(0.0, total - sum(spent.values()))
    work = {
        block: merged(s[5:] for s in record.spans if s.block == block and s.kind in COMPUTE)
        for block in record.multiprocessors
    }
    copies = [(fill.block, (fill.begin, fill.ready)) for fill in record.fills() if fill.ready is not None]
    copying = sum(hi - lo for _, (lo, hi) in copies)
    under = sum(overlap(interval, work[block]) for block, interval in copies)
    shares = {kind: cycles / total if total else 0.0 for kind, cycles in spent.items()}
    return Summary(shares, copying, under / copying if copying else None, len(lives), record.cycles)
