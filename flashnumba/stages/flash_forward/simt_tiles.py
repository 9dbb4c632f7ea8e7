"""Sizes of the kernel simt, and which a problem gets.

What decides them. A value loaded from shared memory should serve many multiply-adds: 8 rows and 4 keys a thread make
128 of 12 loads. The accumulators of 8 rows are d / 2 registers a thread, so above d = 128 a thread has 4 rows. Shared
memory holds Q, P and one piece, all float32; 64 KB, what sm_75 has, suffice for every d. ::

    d       rows x keys a block    shared memory    registers a thread (float32, 16-byte loads, sm_90)
    32      64 x 64                35 KB            168
    64      64 x 64                43 KB            167
    128     64 x 64                59 KB            168
    256     32 x 64                50 KB            160
"""

from __future__ import annotations

from dataclasses import dataclass

from flashnumba.stages.heads import Shape
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
        bm, bn: query rows a block; keys a tile.
        bd, bk: columns of a piece of K; keys of a piece of V.
        rows: query rows a thread.
        vector: bytes a load from q, k and v: 16 down to one element's, which allows any column stride.
        blocks: a multiprocessor, that the compiler leaves registers for.
        arch: the oldest that the kernel is for.

    Raises:
        ValueError: sizes that do not go together.
    """

    d: int
    bm: int = 64
    bn: int = 64
    bd: int = 32
    bk: int = 16
    rows: int = 8
    vector: int = 16
    blocks: int = 2
    arch: str = "75"

    def __post_init__(self) -> None:
        least = min(self.d, self.bm, self.bn, self.bd, self.bk, self.rows, self.vector)
        if least < 1:
            raise ValueError(f"{self}: a size is {least}; all must be positive")
        for wrong, why in (
            (self.d % 32 or not 32 <= self.d <= 256, f"d is {self.d}; it must be a multiple of 32 up to 256"),
            (self.bm % self.rows, f"bm is {self.bm} and rows {self.rows}; a thread's rows must divide the block's"),
            (self.threads % 32 or self.threads > 1024, f"{self.threads} threads; a block has whole warps, up to 1024"),
            (self.bn % LANES, f"bn is {self.bn}; it must be a multiple of the {LANES} threads that share a row"),
            (
                self.bd % 32 or self.d % self.bd,
                f"bd is {self.bd}; it must be a multiple of 32 that divides d = {self.d}",
            ),
            (
                self.bk % 4 or self.bn % self.bk,
                f"bk is {self.bk}; it must be a multiple of 4 that divides bn = {self.bn}",
            ),
            (self.shared > MOST_SHARED, f"{self.shared} bytes of shared memory; a block on sm_75 has {MOST_SHARED}"),
        ):
            if wrong:
                raise ValueError(f"{self}: {why}")

    @property
    def threads(self) -> int:
        return self.bm // self.rows * LANES

    @property
    def q_words(self) -> int:
        return self.bm * (self.d + PAD)

    @property
    def piece_words(self) -> int:
        return max(self.bn * (self.bd + PAD), self.bk * self.d)

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        return 4 * (self.q_words + self.piece_words + self.bm * (self.bn + PAD))


def tiles_for(shape: Shape) -> Tiles:
    """The tiles that a shape is planned with: 128 threads, pieces of 2048 words; fewer rows if there are few, as when
    decoding.

    From sm_90 on shared memory admits three blocks a multiprocessor, and so do registers where loads are of 16 bytes;
    narrower ones take more addresses. Between 8 bytes and one element no width pays for a kernel of its own.
    """
    d = -(-shape.d // 32) * 32
    bm = 16 if shape.m <= 16 else 64 if d <= 128 else 32
    bk = 1 << (2048 // d).bit_length() - 1
    vector = shape.vector if shape.vector >= 8 else ITEMSIZE[shape.element]
    blocks, arch = (3, "90") if vector == 16 and int(shape.arch.rstrip("a")) >= 90 else (2, "75")
    return Tiles(d, bm, bk=bk, rows=bm // 8, vector=vector, blocks=blocks, arch=arch)
