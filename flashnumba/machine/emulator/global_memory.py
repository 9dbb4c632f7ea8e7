"""Device memory as kernels see it: one address space in which each array argument lies apart from all others."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.array_utils import byte_bounds

from flashnumba.machine.emulator import faults

if TYPE_CHECKING:
    from flashnumba.machine.emulator.thread import Thread

__all__ = ["GlobalMemory", "Region"]

GUARD = 1 << 20  # bytes between allocations, so that a stray address meets nothing


class Region:
    """The bytes [lo, hi) that one argument spans, at a made-up address."""

    __slots__ = ("array", "data", "hi", "lo", "name", "writable")

    def __init__(self, name: str, array: np.ndarray, lo: int):
        start, end = byte_bounds(array)
        self.name, self.array, self.writable = name, array, array.flags.writeable
        self.lo, self.hi = lo, lo + end - start
        self.data = np.frombuffer((ctypes.c_uint8 * (end - start)).from_address(start), np.uint8)


class GlobalMemory:
    """Address space of a launch; counts the bytes that kernels load and store."""

    def __init__(self, early: bool = False) -> None:
        self.early = early  # of a kernel that has to wait for the one ahead
        self.regions: list[Region] = []
        self.roots: dict[int, int] = {}
        self.next = 1 << 32  # no global address fits in 32 bits: one cut short by mistake is found
        self.loaded = self.stored = 0

    def add(self, name: str, array: np.ndarray) -> int:
        """Register an argument; returns the address of its first element.

        An allocation lies at a multiple of 256, as cudaMalloc has it; a view keeps its distance from the start.
        """
        root = array
        while isinstance(root.base, np.ndarray):
            root = root.base
        first, end = byte_bounds(root)
        if first not in self.roots:
            self.roots[first] = self.next
            self.next += (end - first + GUARD + 255) // 256 * 256
        base = self.roots[first] - first
        if array.size:
            self.regions.append(Region(name, array, base + byte_bounds(array)[0]))
        return base + array.__array_interface__["data"][0]

    def check_waited(self, thread: Thread) -> None:
        if not thread.waited:
            raise thread.fault(
                faults.EarlyAccess, "global memory is touched before the kernel ahead is known to have ended"
            )

    def find(self, address: int, nbytes: int, thread: Thread, store: bool) -> Region:
        if self.early:
            self.check_waited(thread)
        return self._region(address, nbytes, thread, store)

    def check_prefetch(self, address: int, nbytes: int, thread: Thread) -> None:
        """A prefetch reads nothing, but of what is there: one that leaves its array is a wrong address."""
        for value, what in ((address, "address"), (nbytes, "number of bytes")):
            if value & 15:
                raise thread.fault(faults.Misaligned, f"a prefetch whose {what} {value:#x} is not a multiple of 16")
        self._region(address, nbytes, thread, False)

    def _region(self, address: int, nbytes: int, thread: Thread, store: bool) -> Region:
        readable = None
        for region in self.regions:
            if region.lo <= address and address + nbytes <= region.hi:
                if not store or region.writable:
                    return region
                readable = region
        if readable is not None:
            raise thread.fault(faults.ReadOnly, f"a store into {readable.name}, which is read-only")
        near = min(self.regions, key=lambda r: max(r.lo - address, address - r.hi), default=None)
        how = ""
        if near is not None:
            if address < near.lo:
                how = f"; the nearest array is {near.name}, {near.lo - address} bytes ahead"
            else:
                size = near.hi - near.lo
                how = f"; the nearest array is {near.name} of {size} bytes, {address - near.lo} bytes after its start"
        raise thread.fault(
            faults.OutOfBounds,
            f"a {nbytes}-byte {'store' if store else 'load'} at global address {address:#x} hits no array{how}",
        )

    def _align(self, address: int, nbytes: int, thread: Thread) -> None:
        if address & (nbytes - 1):
            raise thread.fault(
                faults.Misaligned, f"global address {address:#x} is not a multiple of {nbytes}, the size of the access"
            )

    def load(self, address: int, nbytes: int, thread: Thread) -> np.ndarray:
        """``nbytes`` (a power of two) from one address, as uint8."""
        self._align(address, nbytes, thread)
        region = self.find(address, nbytes, thread, False)
        self.loaded += nbytes
        at = address - region.lo
        return region.data[at : at + nbytes]

    def store(self, address: int, data: np.ndarray, thread: Thread) -> None:
        """Bytes to one address."""
        nbytes = data.shape[-1]
        self._align(address, nbytes, thread)
        region = self.find(address, nbytes, thread, True)
        self.stored += nbytes
        thread.launch.progress += 1  # somebody may poll for it
        at = address - region.lo
        region.data[at : at + nbytes] = data

    def peek(self, address: int, nbytes: int, thread: Thread) -> np.ndarray:
        """A load of any size and alignment, not counted: what a copy engine reads is counted when it reads."""
        region = self.find(address, nbytes, thread, False)
        return region.data[address - region.lo : address - region.lo + nbytes]
