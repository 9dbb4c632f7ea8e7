"""The shared tile: a block loads tiles of A and B once, and all its threads read them from shared memory.

Since ``coalesced``: there each of the 32 x 32 threads that compute a tile of C read a row of A and a column of B for
itself. Here they are one block. Each thread loads one element of a 32 x 32 tile of A and one of B; then all threads use
them 32 times each::

    for each step of 32 along K:    load A[32 rows, 32 steps] and B[32 steps, 32 columns]
                                    wait until both are whole
                                    32 multiplications a thread, from shared memory
                                    wait until nobody reads them any more

An element is read from memory once for 32 elements of C instead of once for each: 2 / 32 elements for a step of k and
an element of C, a quarter byte of float32, where ``coalesced`` moves 5 bytes.

Now shared memory is the limit. Each multiplication needs two reads of it, and a multiprocessor reads 32 floats in the
time of 128 multiplications.

Source: CUDA C++ programming guide, "Shared memory", the example of the matrix multiplication.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import Kernel, device, kernel
from flashnumba.machine.numba import cuda, float32
from flashnumba.tiles.elements import arch_of, scalar

__all__ = ["BROKEN", "make_shared_tile"]

BROKEN = ("before", "after", "stride", "mask", "edge")


@cache
def make_shared_tile(
    element: str, tile: int = 32, *, a_major: str = "k", b_major: str = "n", arch: str = "80", broken: str = ""
) -> Kernel:
    """``shared_tile(a, b, c)``: a block of ``tile x tile`` threads computes as large a tile of C.

    Args:
        element: float16, bfloat16 or float32.
        tile: 16 or 32.
        a_major, b_major: along which axis neighbouring lanes load, see
            :class:`flashnumba.stages.gemm.problem.Shape`; any strides are right.
        arch: below 80 bfloat16 is rounded in integers.
        broken: plants a fault: ``"before"`` and ``"after"`` leave out the barrier before and after the products,
            ``"stride"`` reads B's tile with its axes swapped, ``"mask"`` fills up no tile, ``"edge"`` stores all of it.

    Raises:
        ValueError: another ``tile``.
    """
    if tile not in (16, 32):
        raise ValueError(f"tile is {tile}; it must be 16 or 32")
    load, store = scalar(element, arch)
    # One float more a row: lanes that walk down a column then meet 32 different banks.
    padded = (tile, tile + 1)
    down_a, down_b = a_major == "m", b_major == "k"
    before, after, swapped = broken != "before", broken != "after", broken == "stride"
    unmasked, everything = broken == "mask", broken == "edge"

    @device
    def fill(target, array, first_row, first_col, i, j):
        """Element (i, j) of a tile; zero beyond the array."""
        row, col = first_row + i, first_col + j
        value = float32(0)
        if unmasked or (row < array.shape[0] and col < array.shape[1]):
            value = load(array, row, col)
        target[i, j] = value

    @kernel(threads=tile * tile, arch=arch_of(element, arch))
    def shared_tile(a, b, c):
        a_tile = cuda.shared.array(padded, float32)
        b_tile = cuda.shared.array(padded, float32)
        slow, fast = cuda.threadIdx.x // tile, cuda.threadIdx.x % tile
        across = (c.shape[1] + tile - 1) // tile
        first_row = cuda.blockIdx.x // across * tile
        first_col = cuda.blockIdx.x % across * tile
        total = float32(0)
        for step in range(0, a.shape[1], tile):
            # Neighbouring lanes take neighbours in memory.
            fill(a_tile, a, first_row, step, fast if down_a else slow, slow if down_a else fast)
            fill(b_tile, b, step, first_col, fast if down_b else slow, slow if down_b else fast)
            if before:
                cuda.syncthreads()  # both tiles are whole before anyone reads them
            for k in range(tile):
                total += a_tile[slow, k] * (b_tile[fast, k] if swapped else b_tile[k, fast])
            if after:
                cuda.syncthreads()  # everyone is done with both tiles before they are overwritten
        row, col = first_row + slow, first_col + fast
        if everything or (row < c.shape[0] and col < c.shape[1]):
            store(c, row, col, total)

    return shared_tile
