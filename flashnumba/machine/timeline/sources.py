"""From a trace buffer to a record: by a replay of the emulator's log, or by a GPU's clocks."""

from __future__ import annotations

from dataclasses import asdict
from statistics import median

import numpy as np

from flashnumba.machine.timeline.costs import Costs
from flashnumba.machine.timeline.record import Record, Span
from flashnumba.machine.timeline.replay import Replayed
from flashnumba.machine.timeline.trace import Row, rows_of, spans_in, unwrapped

__all__ = ["record_of_clocks", "record_of_replay"]

LONG = 2000
"""Nanoseconds from which the global timer measures a clock's rate, at its resolution of 32."""


def record_of_replay(trace: np.ndarray, replayed: Replayed, costs: Costs, *, kernel: str, size: str) -> Record:
    """The record of a launch on the emulator, whose marks hold numbers of events where a GPU's hold clocks."""
    spans, rows = [], list(rows_of(trace))
    for row in rows:
        times = replayed.times[row.block, row.warp]
        of_marks = [times[number] for *_, number in row.marks]
        spans += [Span(row.block, row.warp, *span) for span in spans_in(row, of_marks, times[row.closed])]
    where = {row.block: replayed.multiprocessors[row.block] for row in rows}
    return _record(
        "emulator", f"model of sm_{costs.arch}", costs.arch, costs.ghz, kernel, size, where, spans, rows, asdict(costs)
    )


def record_of_clocks(trace: np.ndarray, *, device: str, arch: str, ghz: float, kernel: str, size: str) -> Record:
    """The record of a launch on a GPU.

    Args:
        ghz: the clock to assume where all rows are too short to measure it.

    Clocks of one multiprocessor are compared as they are. Those of two are brought together by the global timer, which
    is behind by up to its resolution; of a multiprocessor's rows that which says the least is the nearest.
    """
    rows = list(rows_of(trace))
    rates = [(r.closed - r.opened) / (r.timers[1] - r.timers[0]) for r in rows if r.timers[1] - r.timers[0] >= LONG]
    rate = median(rates) if rates else ghz
    first = min((row.timers[0] for row in rows), default=0)
    ahead: dict[int, float] = {}
    for row in rows:
        offset = row.opened - (row.timers[0] - first) * rate
        ahead[row.multiprocessor] = min(ahead.get(row.multiprocessor, offset), offset)
    spans = []
    for row in rows:
        base = ahead[row.multiprocessor]
        times = [time - base for time in unwrapped(row)]
        spans += [Span(row.block, row.warp, *span) for span in spans_in(row, times, row.closed - base)]
    where = {row.block: row.multiprocessor for row in rows}
    return _record("cuda", device, arch, rate, kernel, size, where, spans, rows, {})


def _record(
    machine: str, device: str, arch: str, ghz: float, kernel: str, size: str, where: dict[int, int], spans: list[Span],
    rows: list[Row], costs: dict[str, object],
) -> Record:  # fmt: skip
    first = min((span.begin for span in spans), default=0.0)
    moved = sorted(s._replace(begin=round(s.begin - first, 2), end=round(s.end - first, 2)) for s in spans)
    ordered = tuple(sorted(moved, key=lambda s: (s.block, s.warp, s.begin)))
    lost = sum(row.made - len(row.marks) for row in rows)
    return Record(machine, device, arch, float(f"{ghz:.5g}"), kernel, size, where, ordered, lost, costs)
