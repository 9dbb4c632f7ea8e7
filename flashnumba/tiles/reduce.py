"""Maxima, sums and (m, d) states over groups of lanes and over a block.

Within a warp the butterfly of ``shfl.xor`` leaves the result in every lane, the same bits in each: both partners of an
exchange add the same two numbers. Across warps one word a warp goes through shared memory, and every warp then reduces
all of them again, which saves the barrier that a broadcast would cost.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import shfl_xor
from flashnumba.machine.numba import cuda, float32, int32
from flashnumba.tiles.online import NOTHING, rescale

__all__ = ["lanes_max", "lanes_sum", "make_block_max", "make_block_merge", "make_block_sum", "steps_of"]


def steps_of(lanes: int) -> int:
    """Exchanges that a reduction over ``lanes`` lanes takes: its logarithm to base 2.

    Raises:
        ValueError: not a power of two from 1 to 32.
    """
    if lanes not in (1, 2, 4, 8, 16, 32):
        raise ValueError(f"a group of {lanes} lanes; it must be a power of two from 1 to 32")
    return lanes.bit_length() - 1


@cache
def lanes_max(lanes: int = 32) -> DeviceFunction:
    """``lanes_max(x) -> float32``: the maximum over each group of ``lanes`` neighbouring lanes, in all of them."""
    steps = steps_of(lanes)

    @device
    def lanes_max(x):
        for i in range(steps):
            x = max(x, shfl_xor(x, int32(1 << i)))
        return x

    return lanes_max


@cache
def lanes_sum(lanes: int = 32) -> DeviceFunction:
    """``lanes_sum(x) -> float32``: the sum over each group of ``lanes`` neighbouring lanes, in all of them."""
    steps = steps_of(lanes)

    @device
    def lanes_sum(x):
        for i in range(steps):
            x += shfl_xor(x, int32(1 << i))
        return x

    return lanes_sum


@cache
def make_block_max(threads: int, barrier: bool = True) -> DeviceFunction:
    """``block_max(partials, x) -> float32`` over a block of ``threads``; ``partials`` is float32[32] in shared memory.

    ``partials`` may be used again after the next barrier of the block.
    """
    return _make_block_reduction(threads, barrier, lanes_max(), NOTHING)


@cache
def make_block_sum(threads: int, barrier: bool = True) -> DeviceFunction:
    """``block_sum(partials, x) -> float32``, as :func:`make_block_max`."""
    return _make_block_reduction(threads, barrier, lanes_sum(), 0.0)


def _make_block_reduction(threads: int, barrier: bool, over_lanes: DeviceFunction, neutral: float) -> DeviceFunction:
    warps = threads // 32

    @device
    def block_reduction(partials, x):
        x = over_lanes(x)
        lane = cuda.threadIdx.x & 31
        if lane == 0:
            partials[cuda.threadIdx.x >> 5] = x
        if barrier:
            cuda.syncthreads()  # every warp's result is there before any warp reads them
        x = float32(neutral)
        if lane < warps:
            x = partials[lane]
        return over_lanes(x)

    return block_reduction


@cache
def make_block_merge(threads: int, barrier: bool = True, rescaled: bool = True) -> DeviceFunction:
    """``block_merge(maxima, sums, at, m, d, state)``: the state of a block from the state of each of its warps.

    ``m`` and ``d`` are those of the warp, the same in all its lanes. Of ``maxima`` and ``sums``, float32 arrays in
    shared memory, 32 elements from ``at`` on are used; they are free again after the next barrier. The result is
    ``state[0:2]``, a local float32 array, the same in every thread.

    Args:
        threads: of the block.
        barrier, rescaled: False plants a fault.
    """
    warps, over_max, over_sum = threads // 32, lanes_max(), lanes_sum()

    @device
    def block_merge(maxima, sums, at, m, d, state):
        lane = cuda.threadIdx.x & 31
        if lane == 0:
            maxima[at + (cuda.threadIdx.x >> 5)] = m
            sums[at + (cuda.threadIdx.x >> 5)] = d
        if barrier:
            cuda.syncthreads()  # every warp's state is there before any warp reads them
        m_part = float32(NOTHING)
        d_part = float32(0)
        if lane < warps:
            m_part = maxima[at + lane]
            d_part = sums[at + lane]
        top = over_max(m_part)
        if rescaled:
            d_part *= rescale(m_part, top)
        state[0] = top
        state[1] = over_sum(d_part)

    return block_merge
