"""Where encoded tensor maps live: device memory written once a map, and the maps last used."""

from __future__ import annotations

import struct
import threading
import weakref
from collections import OrderedDict
from typing import Any

from flashnumba.machine import gpu
from flashnumba.machine.arrays import Described

__all__ = ["CODE", "MAPS", "Slot", "encode", "pin"]

CODE = {
    "uint8": "UINT8", "int8": "UINT8", "bool": "UINT8", "float8_e4m3fn": "UINT8", "float8_e5m2": "UINT8",
    "float8_e8m0fnu": "UINT8", "uint16": "UINT16", "int16": "UINT16", "uint32": "UINT32", "int32": "INT32",
    "uint64": "UINT64", "int64": "INT64", "float16": "FLOAT16", "bfloat16": "BFLOAT16", "float32": "FLOAT32",
    "float64": "FLOAT64",
}  # fmt: skip
"""Element name -> what the driver calls it."""

_MAP_BYTES = 128


def _legal_strides(found: Described) -> list[int]:
    """Byte strides of all axes but the last, innermost first. An axis of length 1 is never stepped along: any legal
    number does, and what its owner wrote there need not be one."""
    step = -(-found.shape[-1] * found.dtype.itemsize // 16) * 16
    strides = []
    for n, stride in zip(found.shape[-2::-1], found.strides[-2::-1], strict=True):
        strides.append(stride if n > 1 else min(step, (1 << 40) - 16))
        step = max(step, strides[-1] * n)
    return strides or [16]  # with one axis nothing is stepped along, but the driver wants a number there


def encode(found: Described, element: str, box: tuple[int, ...], swizzle: int, l2: int, fill: str) -> Slot:
    gpu.require()
    driver = gpu.bindings()

    def named(enum: str, value: str) -> Any:
        words = {
            "DataType": "DATA_TYPE",
            "Swizzle": "SWIZZLE",
            "L2promotion": "L2_PROMOTION",
            "FloatOOBfill": "FLOAT_OOB_FILL",
        }
        return getattr(getattr(driver, f"CUtensorMap{enum}"), f"CU_TENSOR_MAP_{words[enum]}_{value}")

    wide, narrow = driver.cuuint64_t, driver.cuuint32_t
    rank = len(found.shape)
    encoded = gpu.call(
        driver.cuTensorMapEncodeTiled,
        named("DataType", CODE[element]),
        rank,
        found.pointer,
        [wide(n) for n in reversed(found.shape)],
        [wide(s) for s in _legal_strides(found)],
        [narrow(int(n)) for n in reversed(box)],
        [narrow(1)] * rank,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        named("Swizzle", f"{swizzle}B" if swizzle else "NONE"),
        named("L2promotion", f"L2_{l2}B" if l2 else "NONE"),
        named("FloatOOBfill", "NAN_REQUEST_ZERO_FMA" if fill == "nan" else "NONE"),
    )
    data = struct.pack("<16Q", *(int(word) for word in encoded.opaque))
    return _memory.store(data, found.device or 0)


class _Slab:
    """Device memory for many maps; freed when no map in it is held any more. cuMemFree waits for kernels under way."""

    maps = 512

    def __init__(self, device: int) -> None:
        driver = gpu.bindings()
        self.device, self.used = device, 0
        with gpu.on_device(device), gpu.relaxed_capture():
            self.address = int(gpu.call(driver.cuMemAlloc, self.maps * _MAP_BYTES))
            self.stream = gpu.call(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        weakref.finalize(self, _release, device, self.address, self.stream).atexit = False


def _release(device: int, address: int, stream: Any) -> None:
    driver = gpu.bindings()
    with gpu.on_device(device), gpu.relaxed_capture():
        driver.cuMemFree(address)
        driver.cuStreamDestroy(stream)


class Slot:
    """128 bytes of a slab, which it keeps alive."""

    __slots__ = ("address", "slab")

    def __init__(self, slab: _Slab, address: int) -> None:
        self.slab, self.address = slab, address


class _Memory:
    """Places encoded maps in device memory. A place is written once and never again, so a kernel under way, or a
    captured graph whose maps are pinned, cannot see another map there."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finaliser that runs inside may launch on an array of its own
        self._slabs: dict[int, _Slab] = {}

    def store(self, data: bytes, device: int) -> Slot:
        driver = gpu.bindings()
        with self._lock:
            slab = self._slabs.get(device)
            if slab is None or slab.used == slab.maps:
                slab = self._slabs[device] = _Slab(device)
            place, slab.used = slab.used, slab.used + 1  # before anything that might run a finaliser
            slot = Slot(slab, slab.address + place * _MAP_BYTES)
            # A stream of its own: the wait is for these 128 bytes alone, never for the caller's work.
            with gpu.on_device(device), gpu.relaxed_capture():
                gpu.call(driver.cuMemcpyHtoDAsync, slot.address, data, _MAP_BYTES, slab.stream)
                gpu.call(driver.cuStreamSynchronize, slab.stream)
        return slot


_Known = tuple[Described, str, "Slot | None"]


class _Maps:
    """The encoded maps last used, by what they describe: a launch on the same tensors finds its maps here."""

    capacity = 16384

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._entries: OrderedDict[Any, _Known] = OrderedDict()

    def get(self, key: Any) -> _Known | None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
            return entry

    def put(self, key: Any, entry: _Known) -> None:
        with self._lock:
            self._entries[key] = entry
            while len(self._entries) > self.capacity:
                self._entries.popitem(last=False)


_memory, MAPS = _Memory(), _Maps()
_pinned: set[Slot] = set()


def pin(slot: Slot) -> None:
    """Keep a map's bytes until the process ends."""
    _pinned.add(slot)
