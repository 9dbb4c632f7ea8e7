"""The k-th greatest of a warp's numbers, for two k at once, bit by bit: what SLA's map is sorted by.

Of 32 bits that order as the float does, a limit is the greatest prefix that at least k numbers reach. Bits are tried
from the top, each in one pass over the numbers, until exactly k reach it.

Source: the radix select of Alabi et al., "Fast k-selection algorithms for graphics processing units", 2012.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import f32_to_bits, shfl_xor
from flashnumba.machine.numba import cuda, int32, uint32

__all__ = ["MOST", "below", "in_order", "make_limits"]

MOST = 0xFFFFFFFF


@device
def in_order(x):
    """Bits that order as the float does."""
    bits = f32_to_bits(x)
    return uint32(bits ^ uint32(MOST)) if bits >= uint32(0x80000000) else uint32(bits | uint32(0x80000000))


@device
def below(ballot, lane):
    """How many of the lanes before this one voted."""
    return int32(cuda.popc(uint32(ballot & uint32((uint32(1) << uint32(lane)) - uint32(1)))))


@device
def over_lanes(x):
    """The sum over the warp, uint32."""
    for i in range(5):
        x = uint32(x + shfl_xor(x, int32(1 << i)))
    return x


@cache
def make_limits(held: int) -> tuple[DeviceFunction, DeviceFunction, DeviceFunction]:
    """``(hold, reaching, limits)`` over the keys of a row tile, of which there are ``seen``, fewer than 2^16.

    ``hold(mine, keys, seen, lane)`` loads a lane's keys; ``reaching(mine, keys, seen, first, other, lane)`` counts
    those that are at least ``first`` (upper half) and at least ``other`` (lower half); ``limits(mine, keys, seen, high,
    low, lane)`` gives two limits, which ``high`` and ``low`` of the keys reach: of those that do, all greater ones
    count and as many equal ones as are missing. 2^32 - 1 for none.

    Args:
        held: keys of a lane that ``mine``, registers, has; 0: they are read from ``keys``, shared memory, each time.
    """

    @device
    def hold(mine, keys, seen, lane):
        for i in range(held):
            mine[i] = keys[lane + int32(32 * i)] if lane + int32(32 * i) < seen else uint32(0)

    @device
    def in_registers(mine, keys, seen, first, other, lane):
        found = uint32(0)
        for i in range(held):  # what is not there is 0, and less than any limit
            if mine[i] >= first:
                found = uint32(found + uint32(65536))
            if mine[i] >= other:
                found = uint32(found + uint32(1))
        return over_lanes(found)

    @device
    def in_shared(mine, keys, seen, first, other, lane):
        found = uint32(0)
        for j in range(int32(lane), int32(seen), int32(32)):
            key = keys[j]
            if key >= first:
                found = uint32(found + uint32(65536))
            if key >= other:
                found = uint32(found + uint32(1))
        return over_lanes(found)

    reaching = in_registers if held else in_shared

    @device
    def limits(mine, keys, seen, high, low, lane):
        first = uint32(0) if high > int32(0) else uint32(MOST)
        other = uint32(0) if low > int32(0) else uint32(MOST)
        first_open, other_open = high > int32(0), low > int32(0)
        bit = uint32(0x80000000)
        while bit != uint32(0) and (first_open or other_open):
            found = reaching(mine, keys, seen, uint32(first | bit), uint32(other | bit), lane)
            reach, reach_other = int32(found >> uint32(16)), int32(found & uint32(0xFFFF))
            if first_open and reach >= high:
                first = uint32(first | bit)
                first_open = reach > high
            if other_open and reach_other >= low:
                other = uint32(other | bit)
                other_open = reach_other > low
            bit = uint32(bit >> uint32(1))
        return first, other

    return hold, reaching, limits
