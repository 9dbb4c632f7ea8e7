"""What the gradients cost by count: products of tiles, and bytes of device memory. Nothing here runs a kernel.

Caches are not considered: what a block reads again counts again. A product is one of M x N x D multiply-adds a head, of
which the forward has two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flashnumba.stages.backward.problem import Shape
from flashnumba.stages.stage import Case
from flashnumba.tiles.elements import ITEMSIZE

__all__ = ["PRODUCTS", "Traffic", "by_rows_and_keys", "one_pass", "shape_of", "unfused"]

PRODUCTS = {"forward": 2, "one pass": 5, "by rows, then by keys": 7, "the same, d > 128": 8}
"""S and dP are made once in one pass, twice where dQ has a kernel of its own, and S a third time where dV has."""
STATISTICS = 3


def _once(shape: Shape) -> tuple[float, float]:
    """Bytes of an array like q, and of one like k."""
    itemsize = ITEMSIZE[shape.element] * shape.batch * shape.d
    return itemsize * shape.heads * shape.m, itemsize * shape.kv_heads * shape.n


def _seen(shape: Shape) -> float:
    """The share of scores that is visible, to the nearest tile's fraction."""
    if not shape.causal or not shape.m or not shape.n:
        return 1.0
    rows, keys = min(shape.m, shape.n), shape.n
    return rows * (keys - (rows - 1) / 2) / (shape.m * shape.n)


def _rows(shape: Shape) -> float:
    """Bytes that the kernel of each row's numbers moves: o and do read, lse read, three numbers written."""
    return 2 * _once(shape)[0] + 4 * (1 + STATISTICS) * shape.batch * shape.heads * shape.m


def by_rows_and_keys(shape: Shape, of_rows: int, of_keys: int) -> float:
    """Kernels with tiles of ``of_rows`` rows for dQ and of ``of_keys`` keys for dK and dV."""
    like_q, like_k = _once(shape)
    row_tiles, key_tiles = -(-shape.m // of_rows), -(-shape.n // of_keys)
    statistics = 4 * STATISTICS * shape.batch * shape.heads * shape.m
    dq = 3 * like_q + 2 * like_k * shape.group * row_tiles * _seen(shape) + statistics
    dkdv = 4 * like_k + (2 * like_q + statistics) * key_tiles * _seen(shape)
    return _rows(shape) + dq + dkdv


def one_pass(shape: Shape, of_keys: int) -> float:
    """One kernel with tiles of ``of_keys`` keys: each adds to all rows it sees, a float32 read and written; the buffer
    is cleared before, read after, and dQ written."""
    like_q, like_k = _once(shape)
    sums, key_tiles = like_q * 4 / ITEMSIZE[shape.element], -(-shape.n // of_keys)
    statistics = 4 * STATISTICS * shape.batch * shape.heads * shape.m
    made = 4 * like_k + (2 * like_q + statistics + 2 * sums) * key_tiles * _seen(shape)
    return _rows(shape) + sums + made + sums + like_q


def unfused(shape: Shape) -> float:
    """P written by the forward and read twice, dP written and read, dS written and read twice, in the inputs' type;
    masked scores like others. Beside them Q, K and V are read once, dO twice, for dV and dP, and three results written.
    """
    like_q, like_k = _once(shape)
    scores = ITEMSIZE[shape.element] * shape.batch * shape.heads * shape.m * shape.n
    return 4 * like_q + 4 * like_k + 8 * scores


def shape_of(case: Case) -> Shape:
    """What a planner is told of a case of this stage; for an H200."""
    q, k = case.inputs["q"], case.inputs["k"]
    batch, heads, m, d = (1, 1, *q.shape)[-4:]
    return Shape(
        case.lowprec.dtype.name, batch, heads, (1, *k.shape)[-3], m, k.shape[-2], d, bool(case.inputs["causal"]),
        multiprocessors=132,
    )  # fmt: skip


@dataclass(frozen=True)
class Traffic:
    """Bytes of device memory for each element of the gradients, by count; ``words`` is the formula in short."""

    words: str
    count: Callable[[Shape], float]

    def __call__(self, case: Case) -> float:
        return self.count(shape_of(case)) / case.lowprec.size

    def __str__(self) -> str:
        return self.words
