"""Sizes of the kernels in ``mma``, and which a problem gets.

A warp owns ``frags`` fragments of 16 rows of its block's and holds for them S, dP and one or two accumulators. With two
fragments a warp reads each tile of the others half as often from shared memory, which is what these kernels wait for;
where the accumulators leave room for one only, a block has more warps, or pairs of warps that share keys. For d above
128 dK and dV do not fit together: each then has a kernel of its own, and S is made once more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashnumba.tiles.sizes import ALIGNMENT, AttentionTiles
from flashnumba.tiles.swizzle import swizzle

__all__ = ["MOST_SHARED", "Tiles", "dkdv_tiles", "dq_tiles", "one_pass_tiles"]

MOST_SHARED = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
"""KB of shared memory that a block may have, by architecture."""
STATISTICS = 3
"""Numbers that kernels keep of each row: delta, origin and bias."""


@dataclass(frozen=True)
class Tiles:
    """Sizes of a kernel of gradients on tensor cores.

    Attributes:
        d: head dimension that is computed, a multiple of 32; the user's may be smaller.
        own: rows a block, of Q for dQ, of K for dK and dV.
        other: rows a step, of K for dQ, of Q for dK and dV.
        warps: a block; each owns ``own / warps`` rows, a multiple of 16.
        slots: steps whose tiles shared memory holds: with two, copies travel under the products of the step before.
        results: accumulators, 2 for dK and dV in one kernel.
        min_blocks: blocks a multiprocessor that the compiler leaves registers for.
        under: copies of the next step begin under the first product and not before it, which hides what it takes to
            compute addresses, and may take more registers.
        pairs: two warps share ``own / warps`` keys: each has half of a step's queries of S and dP, and one of the two
            results, dV or dK (:mod:`flashnumba.stages.backward.mma_pairs`).
        exchange: dS goes through shared memory for all warps, for dQ in the same pass.

    Raises:
        ValueError: sizes that do not fit one another; the message says which.
    """

    d: int
    own: int
    other: int
    warps: int = 4
    slots: int = 2
    results: int = 1
    min_blocks: int = 1
    exchange: bool = False
    under: bool = False
    pairs: bool = False

    def __post_init__(self) -> None:
        if self.slots not in (1, 2) or self.results not in (1, 2) or (self.pairs and self.slots * self.results != 4):
            raise ValueError(
                f"slots is {self.slots} and results {self.results}; they must be 1 or 2, and both 2 with pairs of warps"
            )
        if self.pairs and (self.other % 32 or self.warps % 2):
            raise ValueError(
                f"other is {self.other} and warps {self.warps}; pairs take a multiple of 32, half for each, and "
                "an even number of pairs"
            )
        if self.accumulators > 200:
            raise ValueError(
                f"{self.own} x {self.other} tiles by {self.warps} warps take {self.accumulators} registers for S, dP "
                f"and {self.results} results; 200 leave room for the rest"
            )
        warps = self.threads // 32
        if self.exchange and (self.results != 2 or warps % self.dq_rows or self.d % (16 * self.halves)):
            raise ValueError(
                f"other is {self.other} and d {self.d}; to share out dQ beside two results, {warps} warps must be "
                f"a multiple of {self.dq_rows}, and d of 16 for each of the warps in a row"
            )
        _ = self.steps  # checks the rest

    @property
    def steps(self) -> AttentionTiles:
        """The sizes as those of the forward's steps, whose rows of Q are the block's own and whose keys the others."""
        return AttentionTiles(self.d, self.own, self.columns, self.warps, self.slots)

    @property
    def threads(self) -> int:
        return 32 * self.warps * (2 if self.pairs else 1)

    @property
    def columns(self) -> int:
        """Of the others' rows of a step, those that are columns of a warp's S and dP."""
        return self.other // 2 if self.pairs else self.other

    @property
    def frags(self) -> int:
        """Fragments of 16 rows a warp."""
        return self.own // (16 * self.warps)

    @property
    def accumulators(self) -> int:
        """Registers a thread for S, dP and the results, of which one of a pair has one."""
        results = 1 if self.pairs else self.results
        return self.frags * (2 * self.columns + results * self.d) // 2

    @property
    def dq_frags(self) -> int:
        """Fragments of 16 queries that a warp has of dQ, where it is made in the same pass: two if a warp then reads
        fewer bytes of dS and K together, its share of dQ being nearer to a square."""
        halves = max(1, self.threads // 2 // self.other)
        return 2 if self.other % 32 == 0 and self.d % (32 * halves) == 0 and self.d > 32 * halves else 1

    @property
    def dq_rows(self) -> int:
        """Warps below one another that share the queries of dQ."""
        return self.other // (16 * self.dq_frags)

    @property
    def halves(self) -> int:
        """Warps side by side that share the columns of dQ."""
        return max(1, self.threads // 32 // self.dq_rows)

    @property
    def dq_registers(self) -> int:
        """Registers a thread for dQ of a step, where it is made in the same pass."""
        return self.other * self.d // self.threads

    @property
    def own_bytes(self) -> int:
        """Bytes of each of the block's two tiles."""
        return self.own * swizzle(self.d).pitch

    @property
    def slot_bytes(self) -> int:
        """Bytes of each of the two tiles of a step."""
        return self.other * swizzle(self.d).pitch

    @property
    def statistics_bytes(self) -> int:
        return 4 * STATISTICS * self.other

    @property
    def handed_bytes(self) -> int:
        """Bytes of a tile of P or dS, keys x queries."""
        return self.own * swizzle(self.other).pitch if self.exchange or self.pairs else 0

    @property
    def buffer_bytes(self) -> int:
        """Bytes for what warps hand over in a step: dS, and of pairs half of P."""
        return self.handed_bytes * 3 // 2 if self.pairs else self.handed_bytes

    @property
    def exchange_bytes(self) -> int:
        """Bytes of the buffers: two if pairs of warps make dQ a step late."""
        return self.buffer_bytes * (2 if self.pairs and self.exchange else 1)

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        tiles = 2 * self.own_bytes + 2 * self.slots * self.slot_bytes + self.exchange_bytes
        return ALIGNMENT + tiles + self.slots * self.statistics_bytes


def most_shared(arch: str) -> int:
    """Bytes of shared memory a block of an architecture."""
    return 1024 * MOST_SHARED.get(int(arch.rstrip("a")), 99)


def dq_tiles(d: int, arch: str, vector: int = 16) -> Tiles:
    """Tiles of the kernel of dQ."""
    d, most, narrow = -(-d // 32) * 32, most_shared(arch), vector < 16
    if most < 99 * 1024:
        return Tiles(d, 64, 32, slots=1) if d <= 128 else Tiles(d, 32, 16, warps=2, slots=1)
    if d <= 64 and not narrow:
        return Tiles(d, 128, 64, min_blocks=2)
    if d <= 128:
        if int(arch.rstrip("a")) >= 100 and not narrow:
            return Tiles(d, 64, 64)
        return Tiles(d, 64 if narrow else 128, 32)
    return Tiles(d, 64, 32, slots=2 if most > 163 * 1024 else 1)


def one_pass_tiles(d: int, arch: str, vector: int = 16) -> Tiles:
    """Tiles of the kernel that makes all three.

    Pairs of warps are quicker on an H200 where d is 128, by 7 % with or without a mask, and by 12 % with dQ made at two
    times. Elsewhere they were chosen because registers suffice; they were not timed.

    Raises:
        ValueError: no tiles hold dK and dV together and dS beside them, or loads are of single elements.
    """
    padded, most, number = -(-d // 32) * 32, most_shared(arch), int(arch.rstrip("a"))
    largest = 0 if number < 80 else 128 if number < 100 else 64
    if d > largest:
        raise ValueError(
            f"d is {d} on sm_{arch}; one pass holds dK and dV together up to {largest} there: use backward.mma"
        )
    if vector < 4:  # registers for the addresses of single elements are not found everywhere
        raise ValueError(
            f"rows or columns of q, k, v, o or do lie at multiples of {vector} bytes; one pass takes packed columns "
            "and rows aligned to 4 bytes: use backward.mma"
        )
    if vector < 16:  # addresses take registers: threads enough that each has few
        return Tiles(64 if d <= 64 else 128, 128, 32, 8, 2 if most > 99 * 1024 else 1, results=2, exchange=True)
    by_pairs = Tiles(padded, 64, 32, warps=2, results=2, exchange=True, pairs=True)
    if padded <= 64:
        return by_pairs if number >= 100 else Tiles(padded, 128, 32, results=2, exchange=True)
    large = number == 90 and d == 128  # elsewhere registers do not suffice
    return replace(by_pairs, own=128, other=64, warps=4) if large else by_pairs


def dkdv_tiles(d: int, arch: str, vector: int = 16) -> Tiles:
    """Tiles of the kernel of dK and dV; where ``results`` is 1 each has its own."""
    d, most, narrow = -(-d // 32) * 32, most_shared(arch), vector < 16
    if most < 99 * 1024:
        if d <= 128:
            return Tiles(d, 64, 32, slots=1, results=2 if d <= 64 else 1)
        return Tiles(d, 32, 16, warps=2, slots=1)
    if d <= 64 and not narrow:
        if int(arch.rstrip("a")) >= 100:  # its compiler finds registers for one fragment a warp
            return Tiles(d, 128, 64, warps=8, results=2)
        return Tiles(d, 128, 32, results=2, min_blocks=2)
    if d <= 128:
        if narrow:
            return Tiles(d, 64, 32, results=2)
        if d == 128 and int(arch.rstrip("a")) == 90:
            return Tiles(d, 64, 64, warps=2, results=2, min_blocks=2, pairs=True)
        if int(arch.rstrip("a")) == 90:
            return Tiles(d, 128, 64, warps=8, results=2)
        if d == 96:  # 256 threads copy 64 of its rows at once
            return Tiles(d, 128, 64, warps=8, slots=1, results=2)
        return Tiles(d, 128, 32, warps=8, results=2)
    return Tiles(d, 64, 32, slots=2 if most > 163 * 1024 else 1)
