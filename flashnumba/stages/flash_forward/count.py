"""What attention costs by count: tiles of S that are computed, masked or skipped; bytes of device memory.

Nothing here runs a kernel. Caches are not considered: what a block reads again counts again, though K and V of a head,
read anew by every tile of rows, mostly come from the L2 cache.

Attention that is not fused has four kernels' traffic on an M x N matrix: the first product writes S, the softmax reads
S and writes P, the second product reads P. A flash kernel has none; it reads K and V once for each tile of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from flashnumba.stages.flash_forward.reference import visible
from flashnumba.stages.heads import Shape
from flashnumba.stages.stage import Case
from flashnumba.tiles.elements import ITEMSIZE

__all__ = ["FULL", "MASKED", "SKIPPED", "Moved", "Traffic", "floor", "fused", "shape_of", "split", "tile_kinds",
           "unfused"]  # fmt: skip

SKIPPED, MASKED, FULL = range(3)
"""What a kernel does with a tile of S: leave it out, compute and mask it, compute it."""


def tile_kinds(m: int, n: int, bm: int, bn: int, causal: bool) -> np.ndarray:
    """The kind of each tile of S: int ``[ceil(m / bm), ceil(n / bn)]`` of SKIPPED, MASKED and FULL.

    A tile of which no row sees anything is skipped, one that every row sees throughout needs no mask. What lies beyond
    the last key has to be masked; a row beyond the last is computed like the last one and dropped.
    """
    below, beyond = -m % bm, -n % bn
    seen = np.pad(visible(m, n, causal), ((0, below), (0, 0)), "edge")  # [rows of whole tiles, N]
    seen = np.pad(seen, ((0, 0), (0, beyond)))  # [rows of whole tiles, keys of whole tiles]
    tiles = seen.reshape(len(seen) // bm, bm, -1, bn)  # [row tiles, BM, key tiles, BN]
    return tiles.any((1, 3)).astype(int) + tiles.all((1, 3))  # [row tiles, key tiles]


@dataclass(frozen=True)
class Moved:
    """Bytes of device memory, read and written, by what they are for.

    Attributes:
        once: q, k and v read once, o and lse written once: no kernel moves less.
        again: k and v, and q by parts of the keys, read again.
        scores: S and P.
        parts: unfinished states (m, l, acc), written and read.
    """

    once: int
    again: int = 0
    scores: int = 0
    parts: int = 0

    @property
    def total(self) -> int:
        return self.once + self.again + self.scores + self.parts


def _keys(shape: Shape) -> int:
    """Bytes of K and V."""
    return ITEMSIZE[shape.element] * shape.batch * shape.kv_heads * 2 * shape.n * shape.d


def _rows(shape: Shape) -> int:
    """Bytes of Q and O."""
    return ITEMSIZE[shape.element] * shape.batch * shape.heads * 2 * shape.m * shape.d


def _lse(shape: Shape) -> int:
    return 4 * shape.batch * shape.heads * shape.m


def floor(shape: Shape) -> Moved:
    """Everything once: what a kernel moves that keeps all rows' states on the chip."""
    return Moved(_rows(shape) + _keys(shape) + _lse(shape))


def unfused(shape: Shape) -> Moved:
    """A product, a softmax that reads and writes each element once, a product; masked scores are computed like others,
    and no lse is written."""
    scores = ITEMSIZE[shape.element] * shape.batch * shape.heads * shape.m * shape.n
    return Moved(_rows(shape) + _keys(shape), scores=4 * scores)


def fused(shape: Shape, bm: int, bn: int) -> Moved:
    """A flash kernel with tiles of ``bm`` rows and ``bn`` keys. Each row tile reads the tiles that it does not skip, as
    mma does; simt ends the last one at the diagonal. The last row sees all keys, so all are read at least once.

    Not counted: mma starts to copy the first keys before it knows that a row tile sees none (causal with M > N).
    """
    tiles = (tile_kinds(shape.m, shape.n, bm, bn, shape.causal) != SKIPPED).sum(1)  # [row tiles]
    keys = int(np.minimum(tiles * bn, shape.n).sum())
    read = ITEMSIZE[shape.element] * shape.batch * shape.heads * 2 * keys * shape.d
    return replace(floor(shape), again=read - _keys(shape))


def split(shape: Shape, bm: int, bn: int, splits: int) -> Moved:
    """Split-KV: the heads of a group are rows of one tile, each part reads q, and ``splits`` states a row go through
    memory in float32.

    Causal is counted as if every row tile saw all keys, which rows this few nearly do.
    """
    packed = replace(shape, heads=shape.kv_heads, m=shape.m * shape.group, causal=False)
    states = 4 * splits * shape.batch * shape.heads * shape.m * (shape.d + 2)
    again = fused(packed, bm, bn).again + (splits - 1) * _rows(shape) // 2
    return Moved(floor(shape).once, again, parts=2 * states)


# -- of a case ---------------------------------------------------------------------------------------------------------
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
    """Bytes of device memory for each element of O, by count; ``words`` is the formula in short."""

    words: str
    count: Callable[[Shape], Moved]

    def __call__(self, case: Case) -> float:
        return self.count(shape_of(case)).total / case.lowprec.size

    def __str__(self) -> str:
        return self.words
