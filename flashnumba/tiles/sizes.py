"""Sizes of an attention kernel on tensor cores: tiles, who has which rows, what lies in shared memory and in registers.

A kernel is made for sizes. They check themselves, and say of what does not fit why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from flashnumba.tiles.swizzle import swizzle

__all__ = ["ALIGNMENT", "NATURAL", "AttentionTiles", "Order"]

ALIGNMENT = 128
"""Bytes that tiles in shared memory are aligned to."""


class Order(NamedTuple):
    """Which of 16 keys each column of S is: key ``lane q + tile t + pair i`` is column ``8 t + 2 q + i``, so that of
    column group t it is value i of the q-th lane of four."""

    lane: int
    tile: int
    pair: int


NATURAL = Order(2, 8, 1)
"""Key j in column j."""


@dataclass(frozen=True)
class AttentionTiles:
    """Sizes of an attention kernel on tensor cores.

    Attributes:
        d: head dimension that is computed, a multiple of 32; the user's may be smaller.
        bm, bn: rows of Q a block, keys a step.
        warps: a block; each owns ``bm / warps`` rows, a multiple of 16.
        slots: tiles of K, and of V, that shared memory holds: 1 to 4. With one, the copy of each travels under the
            other's product; with more, both travel whole steps ahead.
        lazy: rescale O only where some row of the warp has a new maximum. Exact: the others are multiplied by 1.
        subtract: subtract the maximum from S at every step, not only where exponents are large: an instruction more
            an element, and a branch less.
        q_held: of the ``d / 16`` steps along the head dimension, how many keep Q in registers.
        min_blocks: blocks a multiprocessor that the compiler leaves registers for; 0 promises none.
        nbytes: of an element of Q, K and V in shared memory: 2, or 1 for FP8, whose V lies there by columns.
        kv_bytes: of K and V, where it is not the same: 1 for FP8 that is multiplied as float16, whose V lies by rows.
        teams: of ``warps`` warps each, that share the rows of a block; each has keys, and slots for them, of its own.

    Raises:
        ValueError: sizes that do not fit one another; the message says which.
    """

    d: int
    bm: int
    bn: int
    warps: int = 4
    slots: int = 1
    lazy: bool = False
    subtract: bool = False
    q_held: int = 0
    min_blocks: int = 0
    nbytes: int = 2
    kv_bytes: int = 0
    teams: int = 1

    def __post_init__(self) -> None:
        if self.d % 32 or not 32 <= self.d <= 256:
            raise ValueError(f"d is {self.d}; it must be a multiple of 32 from 32 to 256")
        if self.nbytes not in (1, 2) or (self.nbytes == 1 and (self.d % 64 or self.bn % 64)):
            raise ValueError(f"nbytes is {self.nbytes}; it must be 2, or 1 with multiples of 64 for d and bn")
        if self.kv_bytes not in (0, 1) or (self.kv_bytes and (self.d % 64 or self.nbytes != 2)):
            raise ValueError(
                f"kv_bytes is {self.kv_bytes}; it must be 0, or 1 with nbytes 2 and a multiple of 64 for d"
            )
        if self.bm % (16 * self.warps) or self.bm <= 0:
            raise ValueError(f"bm is {self.bm}; it must be a multiple of 16 rows for each of {self.warps} warps")
        at_once = self.threads // (8 if min(self.units, self.kv_units) % 64 == 0 else 4)
        if self.bn % 16 or self.bn <= 0 or self.bn % at_once or self.bm % at_once:
            raise ValueError(
                f"bm and bn are {self.bm} and {self.bn}; they must be multiples of 16 and of {at_once}, the rows that "
                f"{self.threads} threads copy at once"
            )
        if self.slots not in (1, 2, 3, 4) or not 0 <= self.q_held <= self.units // 16:
            raise ValueError(
                f"slots is {self.slots} and q_held {self.q_held}; they must be 1 to 4, 0 to {self.units // 16}"
            )
        if self.teams not in (1, 2, 4, 8) or (self.teams > 1 and self.warps > 1):
            raise ValueError(
                f"teams is {self.teams} of {self.warps} warps; it must be 1, or 2, 4 or 8 of one warp each"
            )
        if self.accumulators > 200:
            raise ValueError(
                f"{self.bm} x {self.bn} tiles by {self.warps} warps take {self.accumulators} registers for O, S and Q; "
                "200 leave room for the rest"
            )

    @property
    def threads(self) -> int:
        """Of a team."""
        return 32 * self.warps

    @property
    def block(self) -> int:
        """Threads a block."""
        return self.threads * self.teams

    @property
    def frags(self) -> int:
        """Fragments of 16 rows a warp."""
        return self.bm // (16 * self.warps)

    @property
    def accumulators(self) -> int:
        """Registers a thread for O and S, and for the part of Q that is held."""
        return self.frags * (self.d + self.bn + 8 * self.q_held) // 2

    @property
    def units(self) -> int:
        """Pairs of bytes in a row of Q: what tiles are laid out in."""
        return self.d * self.nbytes // 2

    @property
    def pitch(self) -> int:
        """Bytes from row to row of Q in shared memory."""
        return swizzle(self.units).pitch

    @property
    def kv_units(self) -> int:
        """:attr:`units` of K, and of V where it lies by rows."""
        return self.d * (self.kv_bytes or self.nbytes) // 2

    @property
    def kv_pitch(self) -> int:
        """:attr:`pitch` of K, and of V where it lies by rows."""
        return swizzle(self.kv_units).pitch

    @property
    def slot(self) -> int:
        """Bytes of a tile of K, or of V."""
        by_columns = self.d * swizzle(self.bn // 2).pitch if self.nbytes == 1 else 0
        return max(self.bn * self.kv_pitch, by_columns)

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        return ALIGNMENT + self.pitch * self.bm + self.teams * 2 * self.slots * self.slot
