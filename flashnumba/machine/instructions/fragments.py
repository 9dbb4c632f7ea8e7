"""Which lane holds what: the fragment layouts of mma.sync and wgmma as index arrays.

With ``g = lane // 4`` and ``q = lane % 4``, an accumulator tile of 16 x 8 lies over a warp as ::

              column  0  1   2  3   4  5   6  7
    row g     (c0 c1)  q=0     q=1     q=2     q=3
    row g+8   (c2 c3)  q=0     q=1     q=2     q=3

and the operands, with ``e`` elements in a 32-bit register (2 of 16 bits, 4 of 8 bits; the lowest bits come first)::

    A reg r, element i:  row g + 8 (r % 2),  k = 4e (r // 2) + e q + i
    B reg r, element i:  k = 4e r + e q + i, column g

A shape is named as PTX names it. ``m16n8k8``, ``m16n8k16`` (16-bit) and ``m16n8k32`` (8-bit) belong to a warp;
``m64nNk16`` and ``m64nNk32`` to a warpgroup, whose warp w holds rows 16w to 16w+15, tile after tile of 8 columns.

Source: PTX ISA, "Matrix fragments for mma.m16n8k16" and its neighbours; CUTLASS mma_traits_sm80, sm89, sm90_gmma.
"""

from __future__ import annotations

import re
from functools import cache

import numpy as np

__all__ = ["a_map", "b_map", "c_map", "from_fragments", "to_fragments"]


@cache
def _sizes(shape: str) -> tuple[int, int, int, int]:
    """(m, n, k, elements a register) of a shape's name."""
    match = re.fullmatch(r"m(16|64)n(\d+)k(8|16|32)", shape)
    if match is None:
        raise ValueError(f"shape is {shape!r}; it must be like m16n8k16 or m64n128k32")
    m, n, k = (int(x) for x in match.groups())
    if (n != 8 and m == 16) or (m == 64 and (n % 8 or not 8 <= n <= 256 or k == 8)):
        raise ValueError(f"there is no shape {shape}: m16 takes n8; m64 takes n8 to n256 in steps of 8, and k16 or k32")
    return m, n, k, 4 if k == 32 else 2


def _frozen(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    places = np.stack(np.broadcast_arrays(rows, columns), axis=-1)
    places.flags.writeable = False
    return places


@cache
def a_map(shape: str) -> np.ndarray:
    """``[lane, register, element] -> (row, k)`` of the A operand, an int array of ``[32 or 128, regs, e, 2]``.

    >>> a_map("m16n8k16")[5, 2].tolist()
    [[1, 10], [1, 11]]
    """
    m, _, k, e = _sizes(shape)
    lane, r, i = np.ogrid[: 2 * m, : 2 * k // (4 * e), :e]
    g, q = lane % 32 // 4, lane % 4
    return _frozen(16 * (lane // 32) + g + 8 * (r % 2), 4 * e * (r // 2) + e * q + i)


@cache
def b_map(shape: str) -> np.ndarray:
    """``[lane, register, element] -> (k, column)`` of the B operand of a warp's shape, ``[32, regs, e, 2]``."""
    m, _, k, e = _sizes(shape)
    if m == 64:
        raise ValueError(f"{shape}: a warpgroup's B operand comes from shared memory, not from registers")
    lane, r, i = np.ogrid[:32, : k // (4 * e), :e]
    return _frozen(4 * e * r + e * (lane % 4) + i, lane // 4)


@cache
def c_map(shape: str) -> np.ndarray:
    """``[lane, register] -> (row, column)`` of the accumulator, ``[32, 4, 2]`` or ``[128, n / 2, 2]``."""
    m, n, _, _ = _sizes(shape)
    lane, r = np.ogrid[: 2 * m, : n // 2]
    g, q = lane % 32 // 4, lane % 4
    return _frozen(16 * (lane // 32) + g + 8 * (r // 2 % 2), 8 * (r // 4) + 2 * q + r % 2)


_MAPS = {"a": a_map, "b": b_map, "c": c_map}


@cache
def _gather(operand: str, shape: str) -> np.ndarray:
    """Flat index into the fragments for each matrix element."""
    places = _MAPS[operand](shape)
    rows, columns = places[..., 0].ravel(), places[..., 1].ravel()
    index = np.empty((rows.max() + 1, columns.max() + 1), np.intp)
    index[rows, columns] = np.arange(rows.size)
    return index


@cache
def _scatter(operand: str, shape: str) -> np.ndarray:
    """Flat index into the matrix for each fragment element."""
    places = _MAPS[operand](shape)
    return np.ascontiguousarray(places[..., 0] * (places[..., 1].max() + 1) + places[..., 1])


def from_fragments(values: np.ndarray, operand: str, shape: str) -> np.ndarray:
    """The matrix that a group's registers hold.

    Args:
        values: ``[lanes, registers, elements]`` or any array of that size and order; ``[lanes, registers]`` for C.
        operand: "a", "b" or "c".
        shape: e.g. ``"m16n8k16"``.
    """
    return values.reshape(-1).take(_gather(operand, shape))


def to_fragments(matrix: np.ndarray, operand: str, shape: str) -> np.ndarray:
    """What each lane holds of a matrix: ``[lanes, registers, elements]``, or ``[lanes, registers]`` for C."""
    return matrix.reshape(-1).take(_scatter(operand, shape))
