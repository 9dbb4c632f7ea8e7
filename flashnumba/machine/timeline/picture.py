"""The picture of a timeline: what each warp does, and below it what each slot of shared memory holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flashnumba.machine.timeline.record import Fill, Record, Span
from flashnumba.machine.timeline.trace import COPY, KINDS, PV, QK, SOFTMAX, STORE, WAIT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLORS", "MOST_ROWS", "draw", "draw_slots", "draw_warps", "neighbours"]

COLORS = {
    COPY: "#0072B2", WAIT: "#D8D8D8", QK: "#E69F00", SOFTMAX: "#009E73", PV: "#D55E00", STORE: "#CC79A7",
}  # fmt: skip
"""Okabe and Ito's palette, told apart by colour-blind readers too; waiting is grey."""
PHASES = {"filled, until the wait": "#0072B2", "ready": "#D8D8D8", "multiplied": "#E69F00"}
NARROW = 0.015
"""Share of a panel's width from which a bar has room for a number."""
MOST_ROWS = 48
"""Warps in one panel."""


def neighbours(record: Record, most: int) -> list[int]:
    """The first block and those that ran on its multiprocessor, ``most`` in all."""
    blocks = sorted(record.multiprocessors)
    return [b for b in blocks if record.multiprocessors[b] == record.multiprocessors[blocks[0]]][:most]


def draw(records: Sequence[Record], window: tuple[float, float] | None = None) -> Figure:
    """A column for each record, all on one scale of cycles; ``window``: from one cycle to another, all of it if None.

    Raises:
        ValueError: a record without spans, or with more than :data:`MOST_ROWS` warps; a window with nothing in it.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    slots = [sorted({(f.block, f.slot) for f in record.fills()}) for record in records]
    rows = [len({s[:2] for s in record.spans}) for record in records]
    for record, count in zip(records, rows, strict=True):
        if not 1 <= count <= MOST_ROWS:
            raise ValueError(f"{record.kernel} has {count} warps to draw; a panel takes 1 to {MOST_ROWS}: fewer blocks")
    if window and not any(s.begin < window[1] and s.end > window[0] for record in records for s in record.spans):
        last = max(record.cycles for record in records)
        raise ValueError(f"nothing happens from cycle {window[0]:.0f} to {window[1]:.0f}; the last one is {last:.0f}")
    below = max(map(len, slots))
    heights = [max(rows) + 1, max(below, 1) + 1] if below else [1]
    figure = Figure(figsize=(10 * len(records), 1.6 + 0.34 * sum(heights if below else [max(rows) + 1])))
    panels = figure.subplots(
        len(heights), len(records), squeeze=False, sharex=True, gridspec_kw={"height_ratios": heights}
    )
    figure.set_layout_engine("constrained")
    lo, hi = window or (0, max(record.cycles for record in records))
    panels[0, 0].set_xlim(lo - 0.01 * (hi - lo), hi + 0.01 * (hi - lo))  # of all panels
    for record, column, held in zip(records, panels.T, slots, strict=True):
        draw_warps(column[0], record)
        device = record.device if record.machine == "emulator" else f"{record.device}, measured"
        title = f"{record.kernel}, {record.size}\n{device}, {record.ghz:.2f} GHz"
        column[0].set_title(title, fontsize=10, parse_math=False)
        if below:
            draw_slots(column[1], record)
            column[1].set_visible(bool(held))
        for axes in column:
            axes.spines[["top", "right"]].set_visible(False)
        column[-1].set_xlabel("cycles")
    kinds = [Patch(color=color, label=KINDS[kind]) for kind, color in COLORS.items()]
    phases = [Patch(color=color, label=f"slot: {name}", alpha=0.55) for name, color in PHASES.items()] if below else []
    figure.legend(handles=[*kinds, *phases], loc="outside lower center", ncols=len(kinds) + len(phases), fontsize=8)
    return figure


def draw_warps(axes: Axes, record: Record) -> None:
    """A row for each warp, blocks apart, coloured by kind."""
    by_warp: dict[tuple[int, int], list[Span]] = {}
    for span in record.spans:
        by_warp.setdefault(span[:2], []).append(span)
    at, ticks, last = 0.0, [], None
    for (block, warp), spans in sorted(by_warp.items()):
        if last is not None and block != last:
            at += 0.6
        for kind, color in COLORS.items():
            bars = [(s.begin, s.end - s.begin) for s in spans if s.kind == kind and s.end > s.begin]
            if bars:
                axes.broken_barh(bars, (at - 0.42, 0.84), color=color, lw=0)
        ticks.append(
            (at, f"block {block}, warp {warp}" if warp == min(w for b, w in by_warp if b == block) else f"{warp}")
        )
        at += 1
    axes.set_yticks([y for y, _ in ticks], [name for _, name in ticks], fontsize=8)
    axes.set_ylim(at - 0.4, -0.6)


def draw_slots(axes: Axes, record: Record) -> None:
    """A row for each slot of each block: filled, ready, multiplied; the numbers are steps."""
    fills: dict[tuple[int, int], list[Fill]] = {}
    for fill in record.fills():
        fills.setdefault((fill.block, fill.slot), []).append(fill)
    several = len({block for block, _ in fills}) > 1
    left, right = axes.get_xlim()
    ticks = []
    for at, ((block, slot), uses) in enumerate(sorted(fills.items())):
        ticks.append(f"block {block}, slot {slot}" if several else f"slot {slot}")
        for f in uses:
            ready = f.begin if f.ready is None else f.ready
            edges = [f.begin, ready, ready if f.used is None else f.used, ready if f.end is None else f.end]
            for color, lo, hi in zip(PHASES.values(), edges, edges[1:], strict=False):
                if hi > lo:
                    axes.broken_barh([(lo, hi - lo)], (at - 0.36, 0.72), color=color, alpha=0.55, lw=0)
            lo, hi = max(edges[0], left), min(max(edges), right)  # what is seen of it
            if hi - lo > NARROW * (right - left):
                axes.text((lo + hi) / 2, at, str(f.step), ha="center", va="center", fontsize=7, clip_on=True)
    axes.set_yticks(range(len(ticks)), ticks, fontsize=8)
    axes.set_ylim(len(ticks) - 0.4, -0.6)
