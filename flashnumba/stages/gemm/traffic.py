"""Bytes from device memory by count: what a kernel asks for, as if nothing were kept between its steps.

A product reads for each element of C and each step of k something of A and something of B. How much depends on how
many elements of C share it: the lanes of a warp that ask together, to which memory hands out whole sectors of 32 bytes;
or a tile, loaded once for all of its rows or columns. C itself is written once.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashnumba.stages.stage import Case

__all__ = ["LANES", "SECTOR", "Lanes", "Tiled"]

LANES, SECTOR = 32, 32


@dataclass(frozen=True)
class Tiled:
    """A tile of ``rows x cols`` of C is computed by one block: an element of A is read once for ``cols`` elements of C,
    an element of B once for ``rows``.

    >>> Tiled(128, 128).per_step(4)
    0.0625
    """

    rows: int
    cols: int

    def per_step(self, itemsize: int) -> float:
        """Bytes read for an element of C and a step of k."""
        return itemsize * (1 / self.rows + 1 / self.cols)

    def __call__(self, case: Case) -> float:
        """Bytes read and written for an element of C."""
        itemsize = case.lowprec.dtype.itemsize
        return self.per_step(itemsize) * case.inputs["a"].shape[1] + itemsize

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}"


@dataclass(frozen=True)
class Lanes(Tiled):
    """A thread has one element of C, and a warp ``rows x cols`` of them; both operands are row-major. Its lanes ask for
    ``rows`` elements of a column of A and ``cols`` of a row of B at once.

    >>> Lanes(32, 1).per_step(4), Lanes(1, 32).per_step(4)
    (33.0, 5.0)
    """

    def per_step(self, itemsize: int) -> float:
        sectors = self.rows + -(-self.cols * itemsize // SECTOR)
        return sectors * SECTOR / LANES
