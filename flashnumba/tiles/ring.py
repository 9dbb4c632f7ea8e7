"""Which slot of a ring follows, and which phase of its mbarriers that is."""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.numba import uint32

__all__ = ["make_after"]


@cache
def make_after(slots: int) -> DeviceFunction:
    """``after(slot, parity) -> (slot, parity)``, uint32: the slot after one of ``slots``, and the parity of its phase,
    which changes where the ring begins anew."""

    @device
    def after(slot, parity):
        following = uint32(slot + uint32(1))
        if following == uint32(slots):
            return uint32(0), uint32(parity ^ uint32(1))
        return following, parity

    return after
