"""Two products in a chain, executed lane by lane: each lane has its own registers, and P has to change hands.

The problem. ``S = Q K^T`` leaves S in the accumulators of a matrix instruction; ``O = P V`` wants P, made from S
element by element, in the operands of the same instruction; and the two lie differently over the lanes
(:mod:`.layouts`).

Three ways out, each a function from what lanes hold to what they want, with what it costs:

- :func:`through_shared`: every lane writes its elements of P to shared memory and reads those that it wants;
- :func:`by_shuffles`: lanes exchange registers. In a round each lane offers one register and reads that of one lane;
  elements that travel between the same two lanes share a register. An exchange is a graph with an edge for each such
  register from the lane that has it to the lane that wants it, and rounds are colours of its edges: as few are enough
  as the busiest lane sends or receives (König's theorem), and that many are used;
- :func:`by_registers`: nothing is moved, registers change names. That takes an order of K's rows under which every
  element falls into the lane that wants it. The notes' mmac has one over four instructions side by side, 16 x 64 x 16
  (:func:`.layouts.fused`); m16n8k32 has one within two.

:func:`attention` is the whole of ``softmax(Q K^T) V`` by any instruction, order and way, with the running maximum and
sum of the stage online_softmax. An instruction sees the registers of its warp's lanes and nothing else. ``kpack=2``
reads K and Q as the notes do, 16 x 64 x 32: one vector of twice the width feeds two instructions, since any order along
the sum is right that both operands share (:func:`depths`).

NumPy only, float64. Sources: the notes, section 4; König, Mathematische Annalen 77 (1916), for the rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import sqrt
from typing import NamedTuple

import numpy as np

from flashnumba.stages.chained_gemm.layouts import Sent, Unit, accumulators, operands, senders

__all__ = ["WAYS", "Cost", "attention", "by_registers", "by_shuffles", "depths", "in_rounds", "multiply", "read_widths",
           "through_shared"]  # fmt: skip

BANKS, WORD = 32, 4
"""Of shared memory: banks, and bytes that each gives in a cycle."""


class Cost(NamedTuple):
    """What a hand-over takes, for all lanes of a warp together.

    Attributes:
        stores, loads: instructions that write and read shared memory.
        shared: bytes of it.
        conflicts: further cycles because lanes meet in a bank.
        shuffles: rounds of exchange.
    """

    stores: int = 0
    loads: int = 0
    shared: int = 0
    conflicts: int = 0
    shuffles: int = 0


Handed = tuple[np.ndarray, Cost]
"""``[lane, register, element]`` of the operand, and what it cost."""


# -- the three ways ----------------------------------------------------------------------------------------------------
def by_registers(held: np.ndarray, from_map: np.ndarray, to_map: np.ndarray) -> Handed:
    """Each lane renames its own registers.

    Args:
        held: ``[lane, register, element]``, as ``from_map`` says.
        from_map, to_map: ``[lane, register, element, 2]`` (row, column).

    Raises:
        ValueError: an element is in another lane.
    """
    sent = senders(from_map, to_map)
    if sent.move:
        raise ValueError(f"{sent.move} of {sent.moves.size} elements are in another lane; another order is needed")
    return held[sent], Cost()


def by_shuffles(held: np.ndarray, from_map: np.ndarray, to_map: np.ndarray, together: int = 2) -> Handed:
    """Lanes exchange registers of ``together`` elements; what a lane has already stays."""
    sent = senders(from_map, to_map)
    lanes = np.arange(len(held))[:, None, None]
    got = np.where(sent.moves, np.nan, held[lanes, sent.register, sent.element])  # [lane, register, element]
    rounds = schedule(sent, together)
    for offered in rounds:
        for (source, target), places in offered.items():
            word = [held[source, sent.register[place], sent.element[place]] for place in places]
            for place, value in zip(places, word, strict=True):
                assert place[0] == target
                got[place] = value
    return got, Cost(shuffles=len(rounds))


def through_shared(
    held: np.ndarray, from_map: np.ndarray, to_map: np.ndarray, itemsize: int = 2, pitch: int = 0, swizzled: bool = True
) -> Handed:  # fmt: skip
    """Each lane writes what it holds, all wait, each lane reads what it wants.

    Args:
        itemsize: bytes of an element of P.
        pitch: bytes from row to row, a multiple of 16; packed rows if 0.
        swizzled: chunks of 16 bytes change places, by the row, where rows are a power of two.
    """
    rows, columns = (int(from_map[..., axis].max()) + 1 for axis in (0, 1))
    pitch = pitch or columns * itemsize
    memory = np.full(rows * pitch, np.nan)  # a place for each byte; an element is at its first

    def place(of: np.ndarray) -> np.ndarray:
        row, byte = of[..., 0], of[..., 1] * itemsize
        if swizzled and pitch & (pitch - 1) == 0:
            byte = byte ^ 16 * (row // max(1, 128 // pitch) % max(1, min(8, pitch // 16)))
        return row * pitch + byte

    at, wanted = place(from_map), place(to_map)  # [lane, register, element]
    memory[at] = held
    (stores, waits), (loads, more) = accesses(at, itemsize), accesses(wanted, itemsize)
    return memory[wanted], Cost(stores, loads, memory.size, waits + more)


WAYS: dict[str, Callable[..., Handed]] = {
    "shared": through_shared, "shuffles": by_shuffles, "registers": by_registers,
}  # fmt: skip


def accesses(at: np.ndarray, itemsize: int) -> tuple[int, int]:
    """(instructions, cycles lost to banks) for lanes that touch the bytes ``at [lane, register, element]``.

    Neighbours that lie together in every lane, aligned, are one access of up to 16 bytes. Shared memory serves as many
    lanes at once as fill 128 bytes; words of one bank come one after the other.
    """
    flat = at.reshape(len(at), -1)  # [lane, elements]
    instructions = conflicts = first = 0
    while first < flat.shape[1]:
        count = 1
        while _together(flat[:, first : first + 2 * count], count, itemsize):
            count *= 2
        width = count * itemsize
        for lanes in np.split(flat[:, first], range(32, len(flat), 32)):
            served = min(32, BANKS * WORD // max(width, WORD))
            for some in np.split(lanes, range(served, len(lanes), served)):
                words = {int(a) // WORD + i for a in some for i in range(-(-width // WORD))}
                conflicts += int(np.bincount([word % BANKS for word in words]).max()) - 1
        instructions, first = instructions + 1, first + count
    return instructions, conflicts


def _together(places: np.ndarray, count: int, itemsize: int) -> bool:
    """Whether twice ``count`` elements lie one after the other in every lane, aligned, within 16 bytes."""
    width = 2 * count * itemsize
    steps = itemsize * np.arange(places.shape[1])
    whole = places.shape[1] == 2 * count and width <= 16
    return whole and bool((places == places[:, :1] + steps).all() and (places[:, 0] % width == 0).all())


# -- rounds of exchange ------------------------------------------------------------------------------------------------
Word = tuple[tuple[int, int], list[tuple[int, int, int]]]


def schedule(sent: Sent, together: int) -> list[dict[tuple[int, int], list[tuple[int, int, int]]]]:
    """Rounds of exchange: in each, (from lane, to lane) -> the places of the wanted layout that the register fills."""
    by_pair: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for lane, register, element in np.argwhere(sent.moves):
        source = int(sent.lane[lane, register, element])
        by_pair.setdefault((source, int(lane)), []).append((int(lane), int(register), int(element)))
    words: list[Word] = [
        (pair, places[i : i + together]) for pair, places in by_pair.items() for i in range(0, len(places), together)
    ]
    colours = in_rounds([pair for pair, _ in words], len(sent.lane))
    rounds: list[dict] = [{} for _ in range(max(colours, default=-1) + 1)]
    for (pair, places), colour in zip(words, colours, strict=True):
        rounds[colour][pair] = places
    return rounds


def in_rounds(pairs: Sequence[tuple[int, int]], lanes: int) -> list[int]:
    """A round for each pair (from, to), so that in no round a lane sends or receives twice; as few as there can be.

    The colouring of a bipartite graph's edges: where the two ends of an edge have no free round in common, rounds a and
    b change places along the path of edges in them that starts at one end; it cannot reach the other.
    """
    most = max((np.bincount([pair[i] for pair in pairs]).max() for i in (0, 1) if pairs), default=0)
    used = np.full((2, lanes, most), -1)  # [sends or receives, lane, round] the pair
    for edge, (source, target) in enumerate(pairs):
        a, b = (int(np.flatnonzero(used[i, lane] < 0)[0]) for i, lane in ((0, source), (1, target)))
        path, side, lane, colour = [], 1, target, a
        while (next_edge := int(used[side, lane, colour])) >= 0 and a != b:
            path.append((next_edge, colour))
            side = 1 - side
            lane, colour = pairs[next_edge][side], a + b - colour
        for turned, colour in path:
            for i in (0, 1):
                used[i, pairs[turned][i], colour] = -1
        for turned, colour in path:
            for i in (0, 1):
                used[i, pairs[turned][i], a + b - colour] = turned
        used[0, source, a] = used[1, target, a] = edge
    found = np.zeros(len(pairs), int)
    sends = used[0]  # [lane, round]
    found[sends[sends >= 0]] = np.nonzero(sends >= 0)[1]
    return found.tolist()


# -- attention ---------------------------------------------------------------------------------------------------------
def multiply(one: Unit, acc: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """One matrix instruction: from the registers of its lanes to new accumulators.

    Args:
        acc: ``[lane, register]``.
        a, b: ``[lane, register, element]``.
    """
    left, right = np.empty((one.m, one.k)), np.empty((one.k, one.n))
    left[one.a[..., 0], one.a[..., 1]] = a
    right[one.b[..., 0], one.b[..., 1]] = b
    return acc + (left @ right)[one.c[..., 0, 0], one.c[..., 0, 1]]  # [lane, register]


def depths(one: Unit, kpack: int) -> np.ndarray:
    """Which columns of Q and K ``kpack`` instructions sum over, ``[kpack, k]``: each lane's lie together in memory.

    A lane's neighbouring elements of an operand are ``run`` long. Instruction p takes run after run of ``kpack`` as
    many columns its p-th part.
    """
    run = int((np.diff(one.a[0, :, :, 1].ravel()) == 1).argmin() or one.a.shape[1] * one.a.shape[2] - 1) + 1
    slot = np.arange(one.k)
    return np.stack([slot // run * run * kpack + run * p + slot % run for p in range(kpack)])


def read_widths(one: Unit, kpack: int, itemsize: int = 2) -> tuple[int, int]:
    """(reads, bytes of each) that bring a lane its A operands of ``kpack`` instructions, out of rows of Q."""
    columns = depths(one, kpack)[:, one.a[0, :, :, 1].ravel()]  # [kpack, elements]
    rows = np.broadcast_to(np.repeat(one.a[0, :, 0, 0], one.a.shape[2]), columns.shape)
    places = sorted(zip(rows.ravel().tolist(), columns.ravel().tolist(), strict=True))
    runs = 1 + sum(b != (a[0], a[1] + 1) for a, b in pairwise(places))
    return runs, len(places) * itemsize // runs


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, one: Unit, way: str = "registers", order: np.ndarray | None = None,
    *, scale: float | None = None, causal: bool = False, columns: int = 64, kpack: int = 1,
) -> np.ndarray:  # fmt: skip
    """``softmax(scale q k^T) v`` by matrix instructions on lanes' registers.

    Args:
        q: ``[M, D]``.
        k, v: ``[N, D]``.
        one: the matrix instruction.
        way: how P changes hands, of :data:`WAYS`.
        order: ``[columns]`` which key each column of S is; in order if None.
        causal: key j is visible to row i iff ``j <= i + N - M``.
        columns: keys at a time.

    Returns:
        ``[M, D]`` float64; rows that see no key are 0.
    """
    (m_rows, d), n_keys = q.shape, len(k)
    scale = 1 / sqrt(d) if scale is None else scale
    wide = -d % int(np.lcm(kpack * one.k, one.n))
    q, k, v = (
        np.pad(x.astype(np.float64), ((0, -len(x) % rows), (0, wide)))
        for x, rows in ((q, one.m), (k, columns), (v, columns))
    )
    held, wanted = accumulators(one, columns, order), operands(one, columns)  # [lane, register, element, 2]
    column = np.arange(columns) if order is None else np.asarray(order)
    along = depths(one, kpack)  # [kpack, k]
    out = np.zeros_like(q)  # [rows of whole tiles, D of whole steps]
    for row0 in range(0, len(q), one.m):
        rows, keys = held[..., 0, 0], held[..., 0, 1]  # [lane, register]
        top, total = np.full(one.m, -np.inf), np.zeros(one.m)  # [m], [m]  every lane of a row has them
        acc = np.zeros((one.lanes, q.shape[1] // one.n, one.c.shape[1]))  # [lane, D / n, register]
        for key0 in range(0, n_keys, columns):
            s = np.zeros((one.lanes, columns // one.n, one.c.shape[1]))  # [lane, columns / n, register]
            for at in range(0, q.shape[1], kpack * one.k):
                for part in along:
                    a = q[row0 + one.a[..., 0], at + part[one.a[..., 1]]]  # [lane, register, element]
                    for j in range(columns // one.n):
                        b = k[key0 + column[one.n * j + one.b[..., 1]], at + part[one.b[..., 0]]]
                        s[:, j] = multiply(one, s[:, j], a, b)
            s = s.reshape(one.lanes, -1) * scale  # [lane, registers]
            seen = key0 + keys < n_keys
            if causal:
                seen &= key0 + keys <= row0 + rows + n_keys - m_rows
            s = np.where(seen, s, -np.inf)  # [lane, registers]
            new = top.copy()  # [m]
            np.maximum.at(new, rows, s)
            anchor = np.where(new == -np.inf, 0, new)  # [m]
            alpha, top = np.exp(top - anchor), new  # [m]
            p = np.exp(s - anchor[rows])  # [lane, registers]
            total = total * alpha  # [m]
            np.add.at(total, rows, p)
            acc *= alpha[one.c[..., 0, 0]][:, None]
            a, _ = WAYS[way](p[..., None], held, wanted)  # [lane, registers, element]
            a = a.reshape(one.lanes, columns // one.k, *one.a.shape[1:3])
            for step in range(columns // one.k):
                for j in range(q.shape[1] // one.n):
                    b = v[key0 + one.k * step + one.b[..., 0], one.n * j + one.b[..., 1]]  # [lane, register, element]
                    acc[:, j] = multiply(one, acc[:, j], a[:, step], b)
        share = 1 / np.where(total == 0, 1, total)  # [m]
        for j in range(q.shape[1] // one.n):
            out[row0 + one.c[..., 0, 0], one.n * j + one.c[..., 0, 1]] = acc[:, j] * share[one.c[..., 0, 0]]
    return out[:m_rows, :d]
