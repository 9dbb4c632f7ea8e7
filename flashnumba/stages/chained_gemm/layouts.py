"""Which lane holds what, as index arrays: the layouts of three matrix instructions, and who must send what to whom.

A matrix instruction computes ``C[m, n] += A[m, k] B[k, n]`` by all lanes of a warp together. Each lane holds a few
registers of each matrix, and which elements these are is wired. With ``g = lane // 4`` and ``q = lane % 4`` on NVIDIA::

    m16n8k16   A reg r, element i   row g + 8 (r % 2),  k = 8 (r // 2) + 2q + i       16 bits an element, 2 a register
    m16n8k32   A reg r, element i   row g + 8 (r % 2),  k = 16 (r // 2) + 4q + i      8 bits an element, 4 a register
               B                    the same k of registers 0 and 2, column g
    both       C reg r              row g + 8 (r // 2), column 2q + r % 2             float32

and on the notes' machine, whose warps have 64 lanes, with ``c = lane % 16`` and ``h = lane // 16``::

    mmac 16x16x16   A element i     row c,  k = 4h + i                                16 bits an element, 2 a register
                    B element i     column c, k = 4h + i
                    C reg r         row c,  column h + 4r                             float32

Two products in a chain, ``S = Q K^T`` and ``O = P V`` with P made from S element by element, ask that what lies in C's
registers be brought into A's. :func:`senders` says for every element of A which lane has it. On the notes' machine
three of four elements are elsewhere; with m16n8k16 none are; with m16n8k32 three of four again.

An *order* changes that. A row of K may go to any column of the result, as long as everybody knows which: ``order[j]``
is the key in column j (:data:`ORDERS`).

NumPy only. Sources: PTX ISA, "Matrix fragments for mma.m16n8k16" and its neighbours; CUTLASS, ``mma_traits_sm80.hpp``
and ``mma_traits_sm89.hpp``; for mmac a CUTLASS fork for Hygon's DCU, ``mma_gfx928.hpp``.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

__all__ = ["NAMES", "ORDERS", "Sent", "Unit", "accumulators", "fused", "operands", "order_of", "senders", "unit"]


class Unit(NamedTuple):
    """A matrix instruction.

    Attributes:
        name: as the makers call it.
        lanes: of a warp.
        m, n, k: C is m x n, and k products go into each element.
        a, b: ``[lane, register, element, 2]``: (row, k) and (k, column) of each element of the operands.
        c: ``[lane, register, 1, 2]``: (row, column) of each accumulator.
    """

    name: str
    lanes: int
    m: int
    n: int
    k: int
    a: np.ndarray
    b: np.ndarray
    c: np.ndarray


def _map(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    places = np.stack(np.broadcast_arrays(rows, columns), axis=-1)
    places.flags.writeable = False
    return places


def _mma(k: int) -> Unit:
    e = k // 8  # elements a register
    lane, r, i = np.ogrid[:32, :4, :e]
    g, q = lane // 4, lane % 4
    depth = 4 * e * (r // 2) + e * q + i  # [32, 4, e]
    a = _map(g + 8 * (r % 2), depth)  # [32, 4, e, 2]
    b = _map(depth[:, ::2], g)  # [32, 2, e, 2]
    c = _map(g + 8 * (r // 2), 2 * q + r % 2)  # [32, 4, 1, 2]
    return Unit(f"m16n8k{k}", 32, 16, 8, k, a, b, c)


def _mmac() -> Unit:
    lane, r, i = np.ogrid[:64, :2, :2]
    column, h = lane % 16, lane // 16
    depth = 4 * h + 2 * r + i  # [64, 2, 2]
    r = np.arange(4)[None, :, None]
    return Unit("mmac16x16x16", 64, 16, 16, 16, _map(column, depth), _map(depth, column), _map(column, h + 4 * r))


_UNITS = {"m16n8k16": lambda: _mma(16), "m16n8k32": lambda: _mma(32), "mmac16x16x16": _mmac}
NAMES = tuple(_UNITS)
"""What :func:`unit` knows."""


@cache
def unit(name: str) -> Unit:
    """One of ``m16n8k16``, ``m16n8k32`` and ``mmac16x16x16``.

    Raises:
        ValueError: another name.
    """
    if name not in _UNITS:
        raise ValueError(f"there is no matrix instruction {name!r}; there are {', '.join(_UNITS)}")
    return _UNITS[name]()


# -- several instructions side by side ---------------------------------------------------------------------------------
def accumulators(one: Unit, columns: int, order: np.ndarray | None = None) -> np.ndarray:
    """(row, key) of the accumulators of ``columns / n`` products side by side: ``[lane, register, 1, 2]``.

    Args:
        order: ``[columns]`` the key in each column; in order if None.

    Raises:
        ValueError: columns are no multiple of n, or the order does not name each key once.
    """
    if columns % one.n:
        raise ValueError(f"columns is {columns}; {one.name} makes {one.n} at a time")
    if order is not None and sorted(order) != list(range(columns)):
        raise ValueError(f"order has {len(order)} keys; it must name each of {columns} once")
    made = np.concatenate([one.c + (0, one.n * j) for j in range(columns // one.n)], axis=1)
    if order is not None:
        made[..., 1] = np.asarray(order)[made[..., 1]]
    return made


def operands(one: Unit, columns: int) -> np.ndarray:
    """(row, k) of the A operands of ``columns / k`` products one after the other: ``[lane, register, element, 2]``.

    Raises:
        ValueError: columns are no multiple of k.
    """
    if columns % one.k:
        raise ValueError(f"columns is {columns}; {one.name} takes {one.k} at a time")
    return np.concatenate([one.a + (0, one.k * j) for j in range(columns // one.k)], axis=1)


def fused(columns: int = 64) -> np.ndarray:
    """The notes' order of K's rows for mmac: product j of four takes keys ``4c + j``, c being its column.

    Then register v of product j is key ``16 v + 4h + j``: the four products' registers v are operand v.
    """
    j, c = np.divmod(np.arange(columns), 16)
    return columns // 16 * c + j


def order_of(lane: int, tile: int, pair: int, columns: int = 16) -> np.ndarray:
    """An order for m16n8: key ``lane q + tile t + pair i`` in column ``2q + i`` of tile t; again for each 16 keys."""
    t, inside = np.divmod(np.arange(16), 8)
    one = lane * (inside // 2) + tile * t + pair * (inside % 2)
    return np.concatenate([one + 16 * j for j in range(columns // 16)])


ORDERS = {"natural": (2, 8, 1), "strided": (1, 8, 4), "quads": (4, 2, 1)}
"""Orders for m16n8, by the arguments of :func:`order_of`.

``natural``: key j in column j. ``strided``: lane q's four values of 16 keys are q, q + 4, q + 8 and q + 12, as mmac
leaves them: the notes' problem on NVIDIA. ``quads``: they are 4q to 4q + 3, which m16n8k32 wants of each 16."""


# -- who sends what to whom --------------------------------------------------------------------------------------------
class Sent(NamedTuple):
    """Where each element of a wanted layout comes from.

    Attributes:
        lane, register, element: ``[lane, register, element]`` of the layout that there is, for each of the wanted.
    """

    lane: np.ndarray
    register: np.ndarray
    element: np.ndarray

    @property
    def moves(self) -> np.ndarray:
        """Which elements come from another lane: ``[lane, register, element]`` bool."""
        return self.lane != np.arange(len(self.lane))[:, None, None]

    @property
    def stay(self) -> int:
        """Elements that are in the lane that wants them."""
        return int((~self.moves).sum())

    @property
    def move(self) -> int:
        """Elements that another lane has to send."""
        return int(self.moves.sum())

    def between(self) -> np.ndarray:
        """Elements that lane i has for lane j: int ``[lanes, lanes]``."""
        lanes = len(self.lane)
        to = np.broadcast_to(np.arange(lanes)[:, None, None], self.lane.shape)
        return np.bincount((self.lane * lanes + to).ravel(), minlength=lanes * lanes).reshape(lanes, lanes)


def senders(from_map: np.ndarray, to_map: np.ndarray) -> Sent:
    """Which lane must send which register's which element, for each element that ``to_map`` wants.

    Args:
        from_map, to_map: ``[lane, register, element, 2]``, as :func:`accumulators` and :func:`operands` make them.

    Raises:
        ValueError: the two do not hold the same elements, each once.
    """
    flat = [x.reshape(-1, 2) for x in (from_map, to_map)]
    width = 1 + max(int(x[:, 1].max()) for x in flat)
    held, wanted = (x[:, 0] * width + x[:, 1] for x in flat)
    by_place = np.argsort(held)
    if not np.array_equal(held[by_place], np.sort(wanted)) or len(np.unique(held)) != len(held):
        raise ValueError("the two layouts do not hold the same elements, each once")
    found = by_place[np.searchsorted(held[by_place], wanted)].reshape(to_map.shape[:3])
    return Sent(*np.unravel_index(found, from_map.shape[:3]))
