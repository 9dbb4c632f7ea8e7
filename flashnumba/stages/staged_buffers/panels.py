"""The pictures of this stage: a schedule as a table, shared memory against slots, and what a multiprocessor holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from flashnumba.machine.occupancy import budget, machine_of
from flashnumba.stages.figures import BLUE, GREEN, GREY, ORANGE, RED
from flashnumba.stages.staged_buffers.budget import ring_bytes
from flashnumba.stages.staged_buffers.reference import CUTS, STAGES, schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["MACHINES", "THREADS", "blocks_of", "draw_blocks", "draw_schedule", "draw_shared"]

COLORS = {"Q": GREEN, "K": BLUE, "V": ORANGE}
PALE = 0.25
MACHINES = ("notes", "80", "90")
"""Machines whose budgets are compared."""
THREADS = {"notes": 256, "80": 128, "90": 128}
"""Threads a block: the notes', and the kernels' of this stage."""


def draw_schedule(axes: Axes, stages: int, cut: str, tiles: int = 2, *, first: int = 0) -> None:
    """Which slice each slot holds at each step: pale while it is on its way, full where it is computed with.

    Args:
        first: how many steps of the table are left out.
    """
    rows = schedule(stages, cut, tiles)
    started = {row.copy: row.step for row in rows if row.copy is not None}
    for row in rows[first:]:
        if row.compute is None:
            continue
        name = str(row.compute) if cut == "quarter" else str(row.compute).split(".")[0]
        begin, color = max(started[row.compute], rows[first].step), COLORS[name[0]]
        for left, length, alpha in ((begin, row.step - begin, PALE), (row.step, 1, 1)):
            axes.barh(row.slot, length, left=left - 0.5, height=0.86, color=color, alpha=alpha, lw=0)
        axes.text(row.step, row.slot, name, ha="center", va="center", fontsize=6.5, color="white")
    axes.set_yticks(range(stages), [f"slot {slot}" for slot in range(stages)])
    axes.invert_yaxis()
    axes.set(xlabel="step", xlim=(rows[first].step - 0.6, rows[-1].step + 0.6))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_title(f"{cut}_{stages}: full where it is computed with, pale while it comes")


def draw_shared(axes: Axes, d: int = 128, bn: int = 64) -> None:
    """Bytes of all slots against their number, beside what three blocks of each machine may have."""
    for cut, color in zip(CUTS, (BLUE, RED), strict=True):
        sizes = [ring_bytes(stages, cut, d, bn) / 1024 for stages in STAGES]
        axes.plot(STAGES, sizes, "o-", color=color, label=f"a slot is a {cut}" + (" tile" if cut == "quarter" else ""))
    for name, style in zip(("notes", "89", "80", "90"), (":", "-.", "--", "-"), strict=True):
        machine = machine_of(name)
        within = machine.shared_within(3) / 1024
        axes.axhline(within, color=GREY, ls=style, lw=1)
        axes.text(4.1, within + 0.8, f"{machine.name}: {within:.0f} KB", fontsize=7, va="bottom", color=GREY)
    axes.set(xticks=STAGES, xlim=(0.8, 5.2), ylim=(0, 98), xlabel="slots", ylabel="KB of shared memory a block")
    axes.set_title(f"D = {d}, {bn} keys; lines: the most for three blocks", fontsize=10)
    axes.legend(fontsize=8, loc="upper left")


def blocks_of(name: str, machine: str, registers: int, d: int = 128, bn: int = 64) -> tuple[int, tuple[str, ...]]:
    """Blocks a multiprocessor of a kernel, e.g. ``"quarter_4"``, and what limits them."""
    cut, stages = name.rsplit("_", 1)
    found = budget(
        machine, threads=THREADS[machine], registers=registers, shared=ring_bytes(int(stages), cut, d, bn)
    )  # fmt: skip
    return found.blocks, found.limited_by


def draw_blocks(axes: Axes, names: Sequence[str], registers: Mapping[str, Mapping[str, int]], d: int = 128) -> None:
    """Blocks a multiprocessor of each kernel on three machines; hatched where shared memory limits them.

    Args:
        registers: a thread, by machine and kernel.
    """
    width = 0.8 / len(MACHINES)
    for i, (machine, color) in enumerate(zip(MACHINES, (GREEN, ORANGE, BLUE), strict=True)):
        for x, name in enumerate(names):
            blocks, limits = blocks_of(name, machine, registers[machine][name], d)
            short = "shared memory" in limits and "registers" not in limits
            axes.bar(
                x + (i - 1) * width, blocks, width * 0.92, color=color, hatch="///" if short else "", edgecolor="white"
            )
        axes.bar(0, 0, color=color, label=f"{machine_of(machine).name}, {THREADS[machine]} threads")
    axes.bar(0, 0, color="white", hatch="///", edgecolor="black", label="limited by shared memory")
    axes.set_xticks(range(len(names)), names, fontsize=8, rotation=30)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set(ylabel="blocks a multiprocessor", title=f"what fits, D = {d}", ylim=(0, 5.8))
    axes.legend(fontsize=7, loc="upper left", ncols=2)
