"""The triangle's work, who gets it, and when the last one is done. Integers only; nothing runs on a GPU.

A row tile of a head computes the tiles of keys that some row of it sees. With a causal mask, M = N and square tiles,
tile i of n computes i + 1 of them: the first almost nothing, the last all n. ::

    work of a head           1 + 2 + ... + n = n (n + 1) / 2
    a pair (i, n - 1 - i)    (i + 1) + (n - i) = n + 1, for every i

A grid is a list of blocks, and a block a list of row tiles. A GPU starts blocks in the order of their numbers, each on
the first multiprocessor with room: list scheduling. For P equal machines, whatever the order (Graham)::

    max(longest block, total / P)  <=  least possible  <=  makespan  <=  total / P + (1 - 1 / P) longest block

and with the longest first the makespan is at most ``4/3 - 1/(3P)`` of the least possible.

Blocks that share a multiprocessor share its speed. With k of ``at_once`` there it does ``speed(k)`` units of work in a
unit of time, evenly shared: 1 if all are there, ``alone`` if one is. ``alone = 1 / at_once`` means that blocks do not
disturb each other, 1 that one could use all by itself.

Source: Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17, 1969.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["Run", "block_work", "dispatch", "longest_first", "lower_bound", "makespan", "paired", "plain", "row_work"]

Grid = list[list[tuple[int, int]]]
"""A block is a list of row tiles, (head, tile) each; head counts all heads of the batch."""


# -- how much ----------------------------------------------------------------------------------------------------------
def row_work(m: int, n: int, bm: int, bn: int, causal: bool = True) -> np.ndarray:
    """Tiles of keys that each row tile computes: int ``[ceil(m / bm)]``.

    Row i sees keys 0 .. i + n - m; rows that fill up the last tile are computed as if they were there, but keys beyond
    the last are not.
    """
    row = np.arange(-(-m // bm) * bm)  # [rows of whole tiles]
    seen = np.clip(row + n - m + 1, 0, n) if causal else np.full(row.shape, n)  # [rows of whole tiles]
    most = seen.reshape(-1, bm).max(1)  # [row tiles]
    return -(-most // bn)  # [row tiles]


# -- who ---------------------------------------------------------------------------------------------------------------
def plain(work: np.ndarray, heads: int) -> Grid:
    """A block a tile, head after head, in the order of the rows. ``work`` is ``[row tiles]``, alike for all heads."""
    return [[(head, tile)] for head in range(heads) for tile in range(len(work))]


def paired(work: np.ndarray, heads: int) -> Grid:
    """A block the i-th and the i-th but last tile of a head; of an odd number the middle one alone, after all pairs."""
    n = len(work)
    pairs = [sorted({n - 1 - i, i}, reverse=True) for i in range(-(-n // 2))]
    return [[(head, tile) for tile in pair] for pair in pairs for head in range(heads)]


def longest_first(work: np.ndarray, heads: int) -> Grid:
    """A block a tile, those with most work before all others, whichever head they are of."""
    tiles = sorted(range(len(work)), key=lambda tile: (work[tile], tile), reverse=True)
    return [[(head, tile)] for tile in tiles for head in range(heads)]


def block_work(grid: Grid, work: np.ndarray) -> np.ndarray:
    """Tiles of keys that each block computes: int ``[blocks]``."""
    return np.array([sum(int(work[tile]) for _, tile in block) for block in grid], int)  # [blocks]


# -- when --------------------------------------------------------------------------------------------------------------
class Run(NamedTuple):
    """What became of each block: arrays ``[blocks]``.

    Attributes:
        multiprocessor: where it ran.
        start, end: when, in units of work at full speed.
    """

    multiprocessor: np.ndarray
    start: np.ndarray
    end: np.ndarray

    @property
    def makespan(self) -> float:
        return float(self.end.max(initial=0.0))


def dispatch(
    costs: Sequence[float] | np.ndarray, multiprocessors: int, at_once: int = 1, alone: float | None = None
) -> Run:  # fmt: skip
    """Run blocks in their order, each on the multiprocessor with most room, as soon as one has room.

    That is also what blocks do that stay and draw their work from a counter.

    Args:
        costs: ``[blocks]``, work of each, not negative.
        multiprocessors: how many there are.
        at_once: blocks that one holds at a time.
        alone: speed of a multiprocessor with one block, where 1 is that of a full one; ``1 / at_once`` if None. In
            between the speed grows by equal steps.
    """
    blocks = len(costs)
    alone = 1 / at_once if alone is None else alone
    speed = [0.0, *(alone + (1 - alone) * k / max(1, at_once - 1) for k in range(at_once))]  # [at_once + 1]
    speed[at_once] = 1.0
    where, start, end = np.zeros(blocks, int), np.zeros(blocks), np.zeros(blocks)  # [blocks] each
    held: list[list[tuple[float, int]]] = [[] for _ in range(multiprocessors)]  # of each: heap of (share at end, block)
    share = [0.0] * multiprocessors  # work that every block which was there all along has done
    since = [0.0] * multiprocessors  # when share was last brought up to date
    version = [0] * multiprocessors  # of what is planned; an older plan does not count any more
    plans: list[tuple[float, int, int]] = []  # heap of (time at which one of its blocks ends, multiprocessor, version)

    def catch_up(mp: int, now: float) -> None:
        if held[mp]:
            share[mp] += (now - since[mp]) * speed[len(held[mp])] / len(held[mp])
        since[mp] = now

    def plan(mp: int) -> None:
        version[mp] += 1
        if held[mp]:
            left = max(0.0, held[mp][0][0] - share[mp])
            heapq.heappush(plans, (since[mp] + left * len(held[mp]) / speed[len(held[mp])], mp, version[mp]))

    def begin(block: int, mp: int, now: float) -> None:
        catch_up(mp, now)
        heapq.heappush(held[mp], (share[mp] + float(costs[block]), block))
        where[block], start[block] = mp, now

    first = min(blocks, multiprocessors * at_once)
    for block in range(first):  # one for each multiprocessor, then a second for each, ...
        begin(block, block % multiprocessors, 0.0)
    for mp in range(multiprocessors):
        plan(mp)
    waiting = first
    while plans:
        now, mp, planned = heapq.heappop(plans)
        if planned != version[mp]:
            continue
        catch_up(mp, now)
        _, done = heapq.heappop(held[mp])
        end[done] = now
        if waiting < blocks:
            begin(waiting, mp, now)
            waiting += 1
        plan(mp)
    return Run(where, start, end)


def makespan(
    costs: Sequence[float] | np.ndarray, multiprocessors: int, at_once: int = 1, alone: float | None = None
) -> float:  # fmt: skip
    """When the last block of :func:`dispatch` is done."""
    return dispatch(costs, multiprocessors, at_once, alone).makespan


def lower_bound(costs: Sequence[float] | np.ndarray, multiprocessors: int, alone: float = 1.0) -> float:
    """Sooner no schedule of these blocks is done: all multiprocessors at full speed throughout, or the longest block by
    itself, at speed ``alone``."""
    costs = np.asarray(costs, float)
    return max(float(costs.sum()) / multiprocessors, float(costs.max(initial=0.0)) / alone)
