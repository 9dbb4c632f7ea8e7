"""Pictures of who reads what, drawn from recorded accesses: a map, a sweep through time, and one warp-wide access."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flashnumba.machine.emulator.accesses import SECTOR, Accesses

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_instruction", "draw_map", "draw_sweeps"]

READ, WRITE, PALE = "#0072B2", "#E69F00", "#eceff1"  # Okabe and Ito's blue and orange


def _elements(entries: np.ndarray, itemsize: int) -> tuple[np.ndarray, np.ndarray]:
    """(index into ``entries``, element of the array) of every element that the entries touch."""
    count = entries["nbytes"] // itemsize
    which = np.repeat(np.arange(len(entries)), count)
    within = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)
    return which, entries["offset"][which] // itemsize + within


def draw_map(axes: Axes, accesses: Accesses, array: str, shape: tuple[int, int], itemsize: int, block: int = 0) -> None:
    """Which thread of a block reads which column, and how often: a cell a thread and column, darker for oftener.

    Args:
        array: a packed array argument of ``shape`` (rows, columns) and ``itemsize`` bytes an element.
    """
    from matplotlib.colors import BoundaryNorm, ListedColormap

    entries = accesses.of(array, block=block)
    which, element = _elements(entries, itemsize)
    threads = int(accesses.table["thread"].max()) + 1
    often = np.zeros((threads, shape[1]), np.int64)
    np.add.at(often, (entries["thread"][which], element % shape[1]), 1)
    colors = ListedColormap([PALE, "#a6cee3", "#5aa0cf", "#08519c"])
    axes.imshow(
        np.minimum(often, 3), cmap=colors, norm=BoundaryNorm([-0.5, 0.5, 1.5, 2.5, 3.5], 4), aspect="auto",
        interpolation="nearest", extent=(0, shape[1], threads, 0),
    )  # fmt: skip
    for warp in range(32, threads, 32):
        axes.axhline(warp, color="white", lw=1.5)
    rows = sorted(set((element // shape[1]).tolist()))
    span = f"row {rows[0]}" if len(rows) == 1 else f"rows {rows[0]} to {rows[-1]}"
    axes.set(xlabel="column", ylabel="thread of block 0" if block == 0 else f"thread of block {block}")
    axes.set_title(f"{span}; read {int(often.max())} time{'s' if often.max() > 1 else ''}")
    axes.set_yticks(range(0, threads + 1, 32))


def draw_sweeps(
    axes: Axes, accesses: Accesses, source: str, target: str, cols: int, itemsize: int, *,
    block: int = 0, warp: int = 0, row: int | None = None,
) -> None:  # fmt: skip
    """One warp's accesses to two packed arrays of ``cols`` columns, in each lane's order: reads and writes by column.

    Args:
        source, target: the array that is read and the one that is written; accesses to others are not counted.
        row: leave out what is done to other rows.
    """
    done = [accesses.of(source, block=block), accesses.of(target, store=True, block=block)]
    done = [entries[entries["thread"] >> 5 == warp] for entries in done]
    lanes, numbers = (np.concatenate([entries[name] for entries in done]) for name in ("thread", "number"))
    order = np.lexsort((numbers, lanes))
    first = np.searchsorted(lanes[order], lanes[order])  # of each lane, where its accesses begin
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order)) - first
    ranks = np.split(rank, [len(done[0])])
    for entries, at, color, label in zip(done, ranks, (READ, WRITE), ("read", "written"), strict=True):
        which, element = _elements(entries, itemsize)
        keep = slice(None) if row is None else element // cols == row
        axes.plot(at[which][keep], element[keep] % cols, "s", ms=2.2, color=color, label=label)
    axes.set(xlabel="access of each lane, in its order", ylabel="column")


def draw_instruction(
    axes: Axes, accesses: Accesses, array: str, warp: int = 0, number: int = 0, block: int = 0
) -> tuple[int, int]:  # fmt: skip
    """The bytes that the lanes of a warp ask for with one load, over the sectors that memory hands out.

    Returns:
        (bytes asked for, bytes in the sectors touched).
    """
    entries = accesses.of(array, block=block)
    entries = entries[(entries["thread"] >> 5 == warp) & (entries["number"] == number)]
    start = int(entries["offset"].min())
    at, lane, nbytes = entries["offset"] - start, entries["thread"] & 31, entries["nbytes"]
    touched = sorted(set((at // SECTOR).tolist()))
    for i, sector in enumerate(touched):
        axes.axvspan(sector * SECTOR, (sector + 1) * SECTOR, color=("#dde6ee", "#c6d5e3")[i % 2], lw=0)
    end = (touched[-1] + 1) * SECTOR
    # A few bytes in a wide picture would be thinner than a pixel.
    axes.barh(lane, np.maximum(nbytes, end / 250), left=at, color=READ, height=0.8)
    used, fetched = int(nbytes.sum()), len(touched) * SECTOR
    axes.set(xlabel="bytes from the first", ylabel="lane", xlim=(0, end), ylim=(32, -1), yticks=(0, 8, 16, 24, 31))
    axes.set_title(f"{len(touched)} sectors, {used} of {fetched} bytes used")
    return used, fetched
