"""The 64-bit descriptor by which wgmma finds a matrix in shared memory.

Bits 0-13 hold the address, 16-29 the leading and 32-45 the stride byte offset, all divided by 16; bits 62-63 the
swizzle. Strides by layout (CUTLASS, ``include/cute/arch/mma_sm90_desc.hpp`` and ``atom/mma_traits_sm90_gmma.hpp``):

=====================  ==========================================  =================================================
operand                leading                                     stride
=====================  ==========================================  =================================================
K-major, swizzle S     unused                                      from 8 rows to the next 8: 8 S bytes
MN-major, swizzle S    from S bytes of M or N to the next S        from 8 k to the next 8: 8 S bytes
K-major, no swizzle    between core matrices (8 rows x 16 bytes)   between core matrices along the rows
                       along k
=====================  ==========================================  =================================================
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.numba import uint32, uint64

__all__ = ["descriptor", "make_descriptor"]

_MODES = {0: 0, 128: 1, 64: 2, 32: 3}


@cache
def make_descriptor(swizzle: int) -> DeviceFunction:
    """``descriptor(address, leading, stride) -> uint64`` for a swizzle of 0, 32, 64 or 128 bytes.

    Raises:
        ValueError: another swizzle.
    """
    if swizzle not in _MODES:
        raise ValueError(f"swizzle of {swizzle} bytes; wgmma knows 0, 32, 64 and 128")
    mode = _MODES[swizzle]

    @device
    def descriptor(address, leading, stride):
        low = uint64((address & uint32(0x3FFFF)) >> uint32(4))
        return (
            low
            | (uint64(leading >> 4) << uint64(16))
            | (uint64(stride >> 4) << uint64(32))
            | (uint64(mode) << uint64(62))
        )

    return descriptor


descriptor = make_descriptor(128)
