"""Sizes of a kernel that attends to latent rows: how its warps share S, and how they share O.

A tile of K has ``bn`` rows of ``d`` columns, of which the first ``dv`` are V as well: it is copied once and read twice.
O has ``bm x dv`` float32, 512 columns and not 128: too many for a warp to own whole rows. So S and O are shared out
differently, and P and the rows' maxima go through shared memory between the two::

    S  [bm, bn]   row_parts x key_parts warps, each 16 frags x bk        sums of d products, in registers
    P  [bm, bn]   rounded, in shared memory                              every warp reads all of it
    O  [bm, dv]   each warp all rows of dv / warps columns               bm dv / (32 warps) registers a thread

Bytes that a warp reads from shared memory for one product of 16 x 8 x 16, of which there are ``bm bn d / 2048`` for S::

    bm  S, a warp      S, bytes a product     O, a warp     O, bytes a product
    16  16 x  8        256, Q in registers    16 x 128      288
    32  16 x 16        512                    32 x  64      192
        32 x 16, deep  384
    64  16 x 32        384                    64 x  64      128
        32 x 32, deep  256

With 128 bytes a cycle and 64 rows a tile of 64 keys takes 3456 + 1024 cycles of reading and 576 of writing, and its
2176 products 3500 at the rate mma.sync reaches on sm_90: shared memory decides there. **Deep**, two warps share twice
the rows, each along half of the columns, and exchange what they have: 2304 and 256 instead of 3456. On an H200 that was
1.06 to 1.08 times as fast with 64 rows, and 1.04 times with 32. With 16 rows it is 576 + 576 + 576 cycles, and memory
needs 3900 for the tile's 73.7 KB: memory decides, and what counts is bytes in flight: two blocks of 4 warps a
multiprocessor, each with two tiles of 32 keys on their way while it multiplies a third.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashnumba.tiles.sizes import ALIGNMENT
from flashnumba.tiles.swizzle import swizzle

__all__ = ["BLOCK", "DV", "PAGE", "D", "MLATiles", "token_bytes"]

PAGE = 64
"""Tokens a page of the cache."""
D, DV = 576, 512
"""Columns of K, and how many of them are V: 512 latent ones and 64 of the rotated part."""
BLOCK = 128
"""Codes of a token that share a scale."""


def token_bytes(d: int = D, dv: int = DV) -> int:
    """Bytes of a token in 8 bits: codes, a float32 scale for each 128, and the rotated part in 16 bits."""
    return dv + 4 * (dv // BLOCK) + 2 * (d - dv)


@dataclass(frozen=True)
class MLATiles:
    """Sizes of a kernel.

    Attributes:
        bm: rows of Q a block, each a head of a query token.
        bn: keys a step, which divide a page.
        warps: a block.
        row_parts: into which S's rows are cut; its keys are cut into ``warps / row_parts``.
        slots: tiles of K in shared memory, or with ``eight`` of codes, beside one tile that they are converted into.
        held: Q is in registers, and in shared memory only until it is there.
        deep: two warps multiply twice the rows along half the columns each, and exchange what they have.
        min_blocks: blocks a multiprocessor that the compiler leaves registers for.
        eight: the cache is in 8 bits.
        d, dv: columns of K and of V.

    Raises:
        ValueError: sizes that do not fit one another; the message says which.
    """

    bm: int
    bn: int
    warps: int
    row_parts: int = 1
    slots: int = 2
    held: bool = False
    deep: bool = False
    min_blocks: int = 1
    eight: bool = False
    d: int = D
    dv: int = DV

    def __post_init__(self) -> None:
        if self.bn not in (16, 32, 64):
            raise ValueError(f"bn is {self.bn}; it must be 16, 32 or 64, which divide a page of {PAGE}")
        if self.warps % self.row_parts or self.bm % (16 * self.row_parts):
            raise ValueError(
                f"bm is {self.bm}, warps {self.warps} and row_parts {self.row_parts}; parts must divide the warps, and "
                "have multiples of 16 rows"
            )
        if self.bk not in (8, 16, 32):
            raise ValueError(f"{self.key_parts} warps share {self.bn} keys, {self.bk} each; it must be 8, 16 or 32")
        if self.d % 64 or self.dv % (64 * self.warps):
            raise ValueError(f"d is {self.d} and dv {self.dv}; they must be multiples of 64 and of {64 * self.warps}")
        if not self.d >= self.dv > 0:
            raise ValueError(f"dv is {self.dv}; V is the first columns of K, 1 to d = {self.d}")
        if self.bn % self.rows_at_once or self.bm % self.rows_at_once:
            raise ValueError(
                f"bm and bn are {self.bm} and {self.bn}; {self.threads} threads copy {self.rows_at_once} rows at once"
            )
        if not 1 + (not self.eight) <= self.slots <= 4:
            raise ValueError(f"slots is {self.slots}; a tile is copied while another is read, so there are two to four")
        if self.deep and (self.held or self.row_parts % 2 or self.frags != 1 or self.bk < 16):
            raise ValueError(
                f"bm is {self.bm}, row_parts {self.row_parts}, a part {self.bk} keys and held {self.held}; deep is for "
                "an even number of parts of 16 rows and at least 16 keys, and Q in shared memory"
            )
        if self.held and self.bm > self.bn:
            raise ValueError(f"bm is {self.bm} and bn {self.bn}; with held Q lies in the place of a tile of K at first")
        if self.eight and (self.dv % BLOCK or self.d - self.dv != 64 or token_bytes(self.d, self.dv) % 16):
            raise ValueError(
                f"d is {self.d} and dv {self.dv}; with 8 bits dv must be a multiple of {BLOCK}, d 64 more, and a token "
                "a multiple of 16 bytes"
            )

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def rows_at_once(self) -> int:
        """That eight threads each copy."""
        return self.threads // 8

    @property
    def key_parts(self) -> int:
        return self.warps // self.row_parts

    @property
    def bk(self) -> int:
        """Keys of a warp's part of S."""
        return self.bn // self.key_parts

    @property
    def frags(self) -> int:
        """Fragments of 16 rows of a warp's part of S."""
        return self.bm // (16 * self.row_parts)

    @property
    def columns(self) -> int:
        """Of O, a warp."""
        return self.dv // self.warps

    @property
    def direct(self) -> bool:
        """Whether codes are converted between ldmatrix and the products, and not a tile at a time: a warp has the
        columns of one block of 128, of K as of V."""
        return self.eight and self.held and self.bm == 16 and self.columns == BLOCK

    @property
    def pitch(self) -> int:
        """Bytes from row to row of Q and K in shared memory."""
        return swizzle(self.d).pitch

    @property
    def tile(self) -> int:
        """Bytes of a tile of K."""
        return self.bn * self.pitch

    @property
    def raw(self) -> int:
        """Bytes of a tile of codes."""
        return self.bn * token_bytes(self.d, self.dv) if self.eight else 0

    @property
    def p_bytes(self) -> int:
        """Of P, where it is exchanged."""
        return 0 if self.direct else self.bm * swizzle(self.bn).pitch

    @property
    def s_bytes(self) -> int:
        """Of the summands of S that warps leave to one another, with codes that are multiplied where they lie."""
        return 4 * self.warps * self.bm * self.bn if self.direct else 0

    @property
    def stats(self) -> int:
        """Bytes for one number a row and part of the keys."""
        return 4 * self.key_parts * self.bm

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        q = 0 if self.held else self.bm * self.pitch
        kv = self.slots * (self.raw if self.eight else self.tile)
        kv += self.tile if self.eight and not self.direct else 0
        return ALIGNMENT + q + kv + self.p_bytes + self.s_bytes + self.stats + 16
