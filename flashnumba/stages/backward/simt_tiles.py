"""Sizes of the kernels in ``simt``, and which a problem gets.

A block keeps two tiles of rows, Q and dO for dQ, K and V for dK and dV, and the weights of one step, all float32 in
shared memory; 64 KB, what sm_75 has, suffice for every d. Accumulators are ``rows`` d / 16 registers each. ::

    d             rows a block    rows a thread    steps of
    up to 128     32              4                64 rows of the others; 32 where loads are narrow
    up to 256     16              2                64, 32
"""

from __future__ import annotations

from dataclasses import dataclass

from flashnumba.stages.backward.problem import Shape
from flashnumba.tiles.elements import ITEMSIZE
from flashnumba.tiles.products import LANES

__all__ = ["PAD", "Tiles", "tiles_for"]

PAD = 4
"""Words added to rows in shared memory: 16-byte loads from rows below one another then meet different banks."""
MOST_SHARED = 65536
"""Bytes of shared memory that a block may have on sm_75, the least of all."""


@dataclass(frozen=True)
class Tiles:
    """Sizes of a block's work.

    Attributes:
        d: head dimension, padded to a multiple of 32.
        own: rows that the block has, of Q for dQ, of K for dK and dV.
        other: rows a step, of K for dQ, of Q for dK and dV.
        bd, bk: columns of a piece of the others' rows; rows of a piece of all columns.
        rows: of its own that a thread has.
        vector: bytes a load from q, k, v and do: 16 down to one element's, which allows any column stride.

    Raises:
        ValueError: sizes that do not go together.
    """

    d: int
    own: int = 32
    other: int = 64
    bd: int = 32
    bk: int = 16
    rows: int = 4
    vector: int = 16

    def __post_init__(self) -> None:
        least = min(self.d, self.own, self.other, self.bd, self.bk, self.rows, self.vector)
        if least < 1:
            raise ValueError(f"{self}: a size is {least}; all must be positive")
        for wrong, why in (
            (self.d % 32 or self.d > 256, f"d is {self.d}; it must be a multiple of 32 up to 256"),
            (self.own % self.rows, f"own is {self.own} and rows {self.rows}; a thread's rows must divide the block's"),
            (self.threads % 32 or self.threads > 1024, f"{self.threads} threads; a block has whole warps, up to 1024"),
            (
                self.other % LANES,
                f"other is {self.other}; it must be a multiple of the {LANES} threads that share a row",
            ),
            (self.bd % 32 or self.d % self.bd, f"bd is {self.bd}; it must be a multiple of 32 that divides {self.d}"),
            (
                self.bk % 4 or self.other % self.bk,
                f"bk is {self.bk}; it must be a multiple of 4 that divides other = {self.other}",
            ),
            (self.shared > MOST_SHARED, f"{self.shared} bytes of shared memory; a block on sm_75 has {MOST_SHARED}"),
        ):
            if wrong:
                raise ValueError(f"{self}: {why}")

    @property
    def threads(self) -> int:
        return self.own // self.rows * LANES

    @property
    def own_words(self) -> int:
        """Words of each of the block's two tiles."""
        return self.own * (self.d + PAD)

    @property
    def piece_words(self) -> int:
        return max(self.other * (self.bd + PAD), self.bk * self.d)

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        return 4 * (2 * self.own_words + self.piece_words + self.own * (self.other + PAD))


def tiles_for(shape: Shape) -> Tiles:
    """The tiles that a shape is planned with: 128 threads, pieces of at most 2048 words.

    Loads narrower than 16 bytes take more addresses, so steps are shorter there.
    """
    d = -(-shape.d // 32) * 32
    own, other = 32 if d <= 128 else 16, 64 if shape.vector == 16 else 32
    vector = shape.vector if shape.vector >= 8 else ITEMSIZE[shape.element]
    return Tiles(d, own, other, bk=min(other, 1 << (2048 // d).bit_length() - 1), rows=own // 8, vector=vector)
