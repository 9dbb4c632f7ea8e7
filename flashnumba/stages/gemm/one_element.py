"""One thread an element of C: the product as the formula says it, and the same with its lanes the other way round.

A block has 256 threads. In ``naive`` the lanes of a warp take 32 neighbours of a *column* of C, in ``coalesced`` 32
neighbours of a *row*. That is all that differs, and this is what one load of a warp asks memory for, both operands
being row-major::

                    A[row, k]                           B[k, col]
    naive           32 rows: 32 sectors of 32 bytes     one element
    coalesced       one element                         32 neighbours: 4 sectors of float32, 2 of 16 bits

Memory hands out sectors of 32 bytes. ``naive`` uses one element of each, so for a step of k and an element of C it
moves 33 bytes where ``coalesced`` moves 5 (3 with 16 bits). What a cache keeps of that until the next step, this count
leaves out.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import Kernel, device, kernel
from flashnumba.machine.numba import cuda, float32
from flashnumba.tiles.elements import arch_of, scalar

__all__ = ["BROKEN", "LANES", "THREADS", "WARPS", "make_coalesced", "make_naive"]

BROKEN = ("stride", "edge", "short")
LANES, WARPS = 32, 8
THREADS = LANES * WARPS


@cache
def _steps(element: str, arch: str, broken: str):
    """Device functions ``product(a, b, row, col) -> float32`` and ``inside(c, row, col)``, and the store."""
    load, store = scalar(element, arch)
    swapped, unmasked, short = broken == "stride", broken == "edge", 1 if broken == "short" else 0

    @device
    def product(a, b, row, col):
        total = float32(0)
        for k in range(a.shape[1] - short):
            total += load(a, row, k) * (load(b, col, k) if swapped else load(b, k, col))
        return total

    @device
    def inside(c, row, col):
        return unmasked or (row < c.shape[0] and col < c.shape[1])

    return product, inside, store


@cache
def make_naive(element: str, arch: str = "80", broken: str = "") -> Kernel:
    """``naive(a, b, c)``: a block has 32 rows and 8 columns of C, a warp 32 rows of one column.

    The first rung: K multiplications, 2 K loads, and nothing is used twice. Any strides.

    Args:
        element: float16, bfloat16 or float32.
        arch: below 80 bfloat16 is rounded in integers.
        broken: plants a fault: ``"stride"`` swaps the axes of B, ``"edge"`` computes elements that C does not have,
            ``"short"`` leaves out the last step of k.
    """
    product, inside, store = _steps(element, arch, broken)

    @kernel(threads=THREADS, arch=arch_of(element, arch))
    def naive(a, b, c):
        lane, warp = cuda.threadIdx.x % LANES, cuda.threadIdx.x // LANES
        across = (c.shape[1] + WARPS - 1) // WARPS
        row = cuda.blockIdx.x // across * LANES + lane
        col = cuda.blockIdx.x % across * WARPS + warp
        if inside(c, row, col):
            store(c, row, col, product(a, b, row, col))

    return naive


@cache
def make_coalesced(element: str, arch: str = "80", broken: str = "") -> Kernel:
    """``coalesced(a, b, c)``: a block has 8 rows and 32 columns of C, a warp 32 columns of one row.

    Since ``naive``: rows and columns have changed places among the threads. Each thread does the same; but the lanes of
    a warp now read one element of A together, and 32 of B that lie side by side.

    Args:
        element, arch, broken: as :func:`make_naive`.
    """
    product, inside, store = _steps(element, arch, broken)

    @kernel(threads=THREADS, arch=arch_of(element, arch))
    def coalesced(a, b, c):
        lane, warp = cuda.threadIdx.x % LANES, cuda.threadIdx.x // LANES
        across = (c.shape[1] + LANES - 1) // LANES
        row = cuda.blockIdx.x // across * WARPS + warp
        col = cuda.blockIdx.x % across * LANES + lane
        if inside(c, row, col):
            store(c, row, col, product(a, b, row, col))

    return coalesced
