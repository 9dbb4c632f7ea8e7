"""Sizes of warp-specialised attention on Hopper, and what its block has in shared memory.

    Q                  a part for each consumer: 64 rows, in panels of 64 columns
    O                  a few panels of 16 rows for each warp of a consumer, or none: then O goes out by Q's place
    K, V               rings of slots, each a tile of keys in panels of 64 columns
    mbarriers          full and empty for Q and each slot of K and of V; the end; one for each tile whose votes are kept
    words              what consumers say of a tile: one each; and which rows of which head are whose turn

Panels have rows of 128 bytes with the 128-byte swizzle, so that the copy engine fills them and wgmma reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashnumba.tiles.panels import COLUMNS as PANEL
from flashnumba.tiles.panels import PANEL_BYTES
from flashnumba.tiles.sizes import AttentionTiles

__all__ = ["ALIGNMENT", "DECISIONS", "PANEL", "PLACE_WORDS", "PRODUCER_REGISTERS", "ROWS", "SpecialisedTiles",
           "check_specialised", "takes", "tiles_for"]  # fmt: skip

ALIGNMENT = 1024
"""Of tiles with the 128-byte swizzle."""
ROWS = 64
"""Of a consumer: what a wgmma multiplies."""
DECISIONS = 8
"""Tiles whose votes are kept: more than consumers can be ahead of the producer."""
PRODUCER_REGISTERS = 32
PLACE_WORDS = 4
"""That say which rows of which head it is, and how long their list is."""
BLOCK_SHARED = 227 * 1024
LONG = 8192
"""Keys from which tiles with more of them pay, though the last one may hold few."""


@dataclass(frozen=True)
class SpecialisedTiles:
    """Sizes of the kernel.

    Attributes:
        d: head dimension of the tiles, a multiple of 64 up to 256.
        bn: keys of a tile, a multiple of 16.
        consumers: warpgroups that multiply, 64 rows each.
        slots: tiles of K, and as many of V, in shared memory.
        block: a tile is gathered from blocks of so many keys, a divisor of ``bn``, which need not be neighbours; 0: it
            is one.

    Raises:
        ValueError: sizes that do not go together; the message says which.
    """

    d: int
    bn: int = 128
    consumers: int = 2
    slots: int = 2
    block: int = 0

    def __post_init__(self) -> None:
        if self.d % PANEL or not PANEL <= self.d <= 256:
            raise ValueError(f"d is {self.d}; it must be a multiple of {PANEL} up to 256")
        if self.bn % 16 or not 64 <= self.bn <= 256:
            raise ValueError(f"bn is {self.bn}; it must be a multiple of 16 from 64 to 256")
        if self.consumers not in (2, 3) or not 2 <= self.slots <= DECISIONS // 2:
            raise ValueError(
                f"{self.consumers} consumers and {self.slots} slots; they must be 2 or 3, and 2 to {DECISIONS // 2}"
            )
        if self.block and (self.block % 8 or self.bn % self.block):
            raise ValueError(f"blocks of {self.block} keys; they must be multiples of 8 that make up {self.bn}")
        if self.operands + 24 > self.registers:
            raise ValueError(
                f"d {self.d} and bn {self.bn} take {self.operands} registers for O, S and P, and 24 the rest; a thread "
                f"of {self.consumers} consumers has {self.registers}"
            )
        if self.shared > BLOCK_SHARED:
            raise ValueError(f"{self} takes {self.shared} bytes of shared memory; a block has {BLOCK_SHARED}")

    @property
    def bm(self) -> int:
        """Rows of a block."""
        return ROWS * self.consumers

    @property
    def threads(self) -> int:
        return 128 * (1 + self.consumers)

    @property
    def operands(self) -> int:
        """Registers a thread for O, S and P."""
        return self.d // 2 + self.bn // 2 + self.bn // 4

    @property
    def registers(self) -> int:
        """What a consumer's thread gets of what the launch and the producer leave."""
        launched = 65536 // self.threads // 8 * 8
        return min(240, (launched * (1 + self.consumers) - PRODUCER_REGISTERS) // self.consumers // 8 * 8)

    @property
    def keys(self) -> int:
        """That lie together: of a block, or of a tile."""
        return self.block or self.bn

    @property
    def part(self) -> int:
        """Bytes of a consumer's rows of Q."""
        return 2 * ROWS * self.d

    @property
    def slot(self) -> int:
        """Bytes of a tile of K, or of V."""
        return 2 * self.bn * self.d

    @property
    def bars(self) -> int:
        """Mbarriers."""
        return 3 + 4 * self.slots + DECISIONS

    @property
    def words(self) -> int:
        """What consumers say of tiles: as many words."""
        return DECISIONS * self.consumers

    @property
    def out_panels(self) -> int:
        """Panels of O that each warp has of its own: as many as fit, up to all columns."""
        panel = 4 * self.consumers * PANEL_BYTES
        return max(0, min(self.d // PANEL, (BLOCK_SHARED - self._without_o) // panel))

    @property
    def out(self) -> int:
        """Bytes of them, of all warps."""
        return 4 * self.consumers * self.out_panels * PANEL_BYTES

    @property
    def _without_o(self) -> int:
        rings = 2 * self.slots * self.slot
        return ALIGNMENT + self.consumers * self.part + rings + 8 * self.bars + 4 * (self.words + PLACE_WORDS)

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory, with room to align."""
        return self._without_o + self.out

    @property
    def boxes(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """What the copy engine moves at once, by array."""
        rows = {"q": ROWS, "k": self.keys, "v": self.keys, "o": 16}
        return tuple((name, (1, 1, n, PANEL)) for name, n in rows.items())

    @property
    def of_consumer(self) -> AttentionTiles:
        """A consumer's as :mod:`flashnumba.tiles.attention` has them: one fragment of 16 rows a warp."""
        return AttentionTiles(self.d, ROWS, self.bn, warps=4, lazy=True)


def tiles_for(d: int, n: int) -> SpecialisedTiles:
    """Tiles for a head dimension and so many keys: those that were fastest on an H200.

    Up to 64, where the softmax takes longer than the products, a third consumer has its softmax beside the others.
    """
    if d <= 64:
        return SpecialisedTiles(64, 128, consumers=3)
    if d <= 128:
        return SpecialisedTiles(128, 176 if n >= LONG else 128)
    return SpecialisedTiles(192, 112) if d <= 192 else SpecialisedTiles(256, 80)


def takes(element: str, arch: str, mapped: bool) -> bool:
    """Whether wgmma and the copy engine take a problem; ``mapped`` as
    :attr:`flashnumba.stages.heads.Shape.mapped`."""
    return arch == "90a" and element in ("float16", "bfloat16") and mapped


def check_specialised(element: str, arch: str, mapped: bool) -> None:
    """ValueError if not :func:`takes`; the message says why."""
    if not takes(element, arch, True):
        raise ValueError(
            f"wgmma of {element} on sm_{arch}: attention by it is for float16 and bfloat16 on sm_90a; use "
            f"{'simt' if element == 'float32' else 'mma'}"
        )
    if not mapped:
        raise ValueError(
            "q, k or v do not lie as the copy engine takes them: rows at multiples of 16 bytes, packed, other axes "
            "walked upwards, nothing empty; use mma, or make them contiguous with head dimensions of multiples of 8"
        )
