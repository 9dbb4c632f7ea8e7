"""The buffer that a traced kernel writes: its layout, and how it becomes spans.

One row of uint32 words for each warp of each block that is traced: a header, then the warp's marks in the order in
which it made them::

    word 0      marks made, those that found no room included
    word 1      multiprocessor (%smid)
    words 2-3   clock when the row was opened, low word first        words 4-5   global timer then, in ns
    words 6-7   clock when it was closed                             words 8-9   global timer then
    words 10-   two a mark: kind | slot << 8 | step << 16, and the low word of the clock

A warp does one thing at a time, so a mark says what it does from then on, until its next mark. The low word of a clock
of 2 GHz wraps round every two seconds; since marks of a warp are in order, differences put that right.

The clocks of two multiprocessors have nothing to do with one another. The global timer that stands beside them in the
header brings them together, to its own resolution (32 ns on an H200, up to 1 us elsewhere).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

__all__ = [
    "ANY", "COPY", "HEADER", "KINDS", "OTHER", "PV", "QK", "SOFTMAX", "STORE", "WAIT", "Row", "empty_trace", "rows_of",
    "spans_in", "unwrapped",
]  # fmt: skip

KINDS = ("other", "copy", "wait", "QK", "softmax", "PV", "store")
"""What a warp can be doing. ``other`` is neither drawn nor counted as work."""
OTHER, COPY, WAIT, QK, SOFTMAX, PV, STORE = range(len(KINDS))
ANY = 255
"""The slot of a mark that concerns all slots filled for its step, or none."""
HEADER = 10
"""Words before a row's marks."""


def empty_trace(blocks: int, warps: int, most: int) -> np.ndarray:
    """A buffer for the first ``blocks`` blocks of a launch, ``warps`` warps each, ``most`` marks a warp.

    Raises:
        ValueError: a size that is not positive, or a buffer of 2 GiB or more.
    """
    for name, value in (("blocks", blocks), ("warps", warps), ("most", most)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    words = blocks * warps * (HEADER + 2 * most)
    if words * 4 >= 1 << 31:
        raise ValueError(
            f"{most} marks of {warps} warps of {blocks} blocks take {words * 4} bytes; trace fewer blocks, so that "
            "they are less than 2 GiB"
        )
    return np.zeros((blocks, warps, HEADER + 2 * most), np.uint32)


class Row(NamedTuple):
    """A warp's row. ``opened`` and ``closed`` are clocks, ``timers`` the global timer at the two, ``marks`` have (kind,
    slot, step, low word of the clock); ``made`` counts also those that found no room."""

    block: int
    warp: int
    made: int
    multiprocessor: int
    opened: int
    closed: int
    timers: tuple[int, int]
    marks: list[tuple[int, int, int, int]]


def rows_of(trace: np.ndarray) -> Iterator[Row]:
    """The rows that were written: ``trace [blocks, warps, words]`` uint32.

    Raises:
        ValueError: what was written is no trace.
    """
    for block in range(trace.shape[0]):
        for warp in range(trace.shape[1]):
            words = trace[block, warp].tolist()
            made, multiprocessor = words[:2]
            if not any(words[:HEADER]):
                continue
            opened, timer, closed, timer_then = (words[i] | words[i + 1] << 32 for i in (2, 4, 6, 8))
            kept = words[HEADER : HEADER + 2 * made]
            marks = [(t & 255, t >> 8 & 255, t >> 16, c) for t, c in zip(kept[::2], kept[1::2], strict=True)]
            strange = [kind for kind, *_ in marks if kind >= len(KINDS)]
            if strange:
                raise ValueError(
                    f"warp {warp} of block {block} has a mark of kind {strange[0]}; they end at {len(KINDS) - 1}"
                )
            yield Row(block, warp, made, multiprocessor, opened, closed, (timer, timer_then), marks)


def unwrapped(row: Row) -> list[int]:
    """Clocks of the row's marks, by the differences of their low words from the clock at which the row was opened."""
    times, now = [], row.opened
    for *_, low in row.marks:
        now += (low - now) & 0xFFFFFFFF
        times.append(now)
    return times


def spans_in(row: Row, times: list[float], end: float) -> Iterator[tuple[int, int, int, float, float]]:
    """(kind, step, slot, begin, end) of what the warp did, from the times of its marks and that of its end.

    Marks that repeat what the warp is doing are no new span. The end of the last mark that found room is known only if
    none was lost.
    """
    marks = [(kind, step, slot) for kind, slot, step, _ in row.marks]
    ends = [*times[1:], end]
    if row.made > len(marks):
        marks, ends = marks[:-1], ends[:-1]
    running: tuple[int, int, int] | None = None
    begin = last = 0.0
    for what, start, stop in zip(marks, times, ends, strict=False):
        if what != running:
            if running is not None and running[0] != OTHER:
                yield (*running, begin, last)
            running, begin = what, start
        last = stop
    if running is not None and running[0] != OTHER:
        yield (*running, begin, last)
