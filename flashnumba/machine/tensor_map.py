"""Tensor maps: what the Hopper copy engine must know of an array to move boxes of it by coordinates.

A :class:`TensorMap` is a host description that both machines take as a kernel argument. On a GPU it is encoded into the
128 opaque bytes of ``cuTensorMapEncodeTiled``, which live in device memory; the kernel gets their address as a uint64.
The emulator reads :attr:`TensorMap.array`, :attr:`~TensorMap.box`, :attr:`~TensorMap.swizzle` and
:attr:`~TensorMap.fill` instead. The rules are checked on the host for both, so what the emulator accepts, the hardware
accepts. Source: CUDA Driver API, "Tensor Map Object Management".
"""

from __future__ import annotations

import struct
import sys
import threading
import weakref
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import numpy as np

from flashnumba.machine import gpu
from flashnumba.machine.arrays import Described, describe, host_view, kernel_dtype

__all__ = ["TensorMap"]

_CODE = {
    "uint8": "UINT8", "int8": "UINT8", "bool": "UINT8", "float8_e4m3fn": "UINT8", "float8_e5m2": "UINT8",
    "float8_e8m0fnu": "UINT8", "uint16": "UINT16", "int16": "UINT16", "uint32": "UINT32", "int32": "INT32",
    "uint64": "UINT64", "int64": "INT64", "float16": "FLOAT16", "bfloat16": "BFLOAT16", "float32": "FLOAT32",
    "float64": "FLOAT64",
}  # fmt: skip
_FLOATS = ("FLOAT16", "BFLOAT16", "FLOAT32", "FLOAT64")
_MAP_BYTES = 128


class TensorMap:
    """A strided array of 2 to 5 axes seen by the copy engine, and the box one copy moves.

    Args:
        array: any array :func:`~flashnumba.machine.arrays.describe` knows; its last axis must be packed.
        box: shape of one copy, outermost axis first, as long as ``array.shape``.
        swizzle: bytes of the shared-memory swizzle, 128, 64, 32, or 0 for none.
        element: element name where it is not the array's own, e.g. ``"bfloat16"`` for a uint16 array.
        l2_promotion: bytes an L2 miss fetches: 0, 64, 128 or 256.
        fill: what lies outside the array: ``"zero"`` or (float elements) ``"nan"``.
        name: how error messages call the array.

    Attributes:
        shape, strides: of the array, elements and bytes.
        box, swizzle, element, fill: as given, or found.

    Raises:
        ValueError: what the hardware would refuse; the message says what would be right.
        TypeError: not an array, or of an element type that the copy engine does not know.
    """

    __slots__ = ("_held", "_slot", "box", "element", "fill", "found", "l2_promotion", "name", "swizzle")

    def __init__(
        self, array: Any, box: tuple[int, ...], *, swizzle: int = 128, element: str | None = None,
        l2_promotion: int = 256, fill: str = "zero", name: str = "array",
    ) -> None:  # fmt: skip
        self.box, self.swizzle, self.l2_promotion, self.fill, self.name = tuple(box), swizzle, l2_promotion, fill, name
        self._held = array
        options = (self.box, swizzle, l2_promotion, fill)
        key = _key(array, (element, *options))
        known = _maps.get(key) if key else None
        if known is None:
            found = describe(array, name)
            element = element or found.element
            key = key or (found, element, options)
            known = _maps.get(key)
        if known is None:
            _check(found, element, *options, name)
            known = (found, element, _encode(found, element, *options) if found.device is not None else None)
            if found.device is not None:
                _maps.put(key, known)
        self.found, self.element, self._slot = known

    def __repr__(self) -> str:
        return f"TensorMap({self.element}{list(self.shape)}, box={self.box}, swizzle={self.swizzle})"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.found.shape

    @property
    def strides(self) -> tuple[int, ...]:
        return self.found.strides

    @property
    def device(self) -> int | None:
        """CUDA device of the array; None in host memory."""
        return self.found.device

    @property
    def array(self) -> np.ndarray:
        """The array as NumPy sees it, sharing its memory; ValueError if it is on a GPU."""
        return host_view(self._held, self.name)

    @property
    def device_address(self) -> int:
        """Where the 128 encoded bytes lie in device memory; ValueError if the array is in host memory."""
        if self._slot is None:
            raise ValueError(f"{self.name} is in host memory; a tensor map for the GPU needs a CUDA array")
        return self._slot.address

    def pin(self) -> None:
        """Keep the encoded bytes until the process ends: a captured graph refers to them by address."""
        if self._slot is not None:
            _pinned.add(self._slot)

    def encoded_at(self, pointer: int, device: int) -> _Slot:
        """The bytes for a copy of the array at another address; the launcher's way to take host arrays to a GPU."""
        found = replace(self.found, pointer=pointer, device=device)
        return _encode(found, self.element, self.box, self.swizzle, self.l2_promotion, self.fill)


def _check(
    found: Described, element: str, box: tuple[int, ...], swizzle: int, l2_promotion: int, fill: str, name: str
) -> None:
    rank, size = len(found.shape), found.dtype.itemsize
    if element not in _CODE:
        raise TypeError(f"{name} has elements of type {element}; a tensor map takes {', '.join(_CODE)}")
    if kernel_dtype(element, name).itemsize != size:
        raise ValueError(f"element {element} does not have the {size} bytes of {name}'s {found.element}")
    if not 2 <= rank <= 5:
        raise ValueError(f"{name} has shape {found.shape}; a tensor map takes 2 to 5 axes")
    if len(box) != rank or not all(isinstance(b, int | np.integer) and 1 <= b <= 256 for b in box):
        raise ValueError(
            f"box is {box}; it must be {rank} integers from 1 to 256, outermost axis first, for shape {found.shape}"
        )
    if swizzle not in (0, 32, 64, 128):
        raise ValueError(f"swizzle is {swizzle!r}; it must be 0, 32, 64 or 128 bytes")
    if l2_promotion not in (0, 64, 128, 256):
        raise ValueError(f"l2_promotion is {l2_promotion!r}; it must be 0, 64, 128 or 256 bytes")
    if fill not in ("zero", "nan") or (fill == "nan" and _CODE[element] not in _FLOATS):
        raise ValueError(
            f"fill is {fill!r} for {element}; it must be 'zero', or for float16, bfloat16 or float32 'nan'"
        )
    if any(not 1 <= n <= 1 << 32 for n in found.shape):
        raise ValueError(f"{name} has shape {found.shape}; every axis must have 1 to 2^32 elements")
    if found.pointer % 16:
        raise ValueError(
            f"{name} starts at address {found.pointer:#x}, {found.pointer % 16} bytes past a multiple of 16; "
            "it must start at a multiple of 16, so slice it elsewhere or copy it"
        )
    if found.shape[-1] > 1 and found.strides[-1] != size:
        raise ValueError(
            f"{name} has a stride of {found.strides[-1]} bytes in its last axis; it must be packed there "
            f"({size} bytes), so make it contiguous"
        )
    for axis, (n, stride) in enumerate(zip(found.shape[:-1], found.strides[:-1], strict=True)):
        if n > 1 and (stride <= 0 or stride % 16 or stride >= 1 << 40):
            raise ValueError(
                f"{name} has a stride of {stride} bytes in axis {axis}; it must be a positive multiple of 16 "
                f"below 2^40, so pad the rows to a multiple of {16 // size if size < 16 else 1} elements or copy it"
            )
    inner = box[-1] * size
    if inner % 16:
        raise ValueError(
            f"box {box} is {inner} bytes wide; it must be a multiple of 16, "
            f"e.g. {-(-inner // 16) * 16 // size} elements"
        )
    if swizzle and inner > swizzle:
        raise ValueError(
            f"box {box} is {inner} bytes wide; a swizzle of {swizzle} bytes takes at most {swizzle // size} elements "
            f"of {element}, so move it as {-(-inner // swizzle)} boxes"
        )


def _legal_strides(found: Described) -> list[int]:
    """Byte strides of all axes but the last, innermost first. An axis of length 1 is never stepped along: any legal
    number does, and what its owner wrote there need not be one."""
    step = -(-found.shape[-1] * found.dtype.itemsize // 16) * 16
    strides = []
    for n, stride in zip(found.shape[-2::-1], found.strides[-2::-1], strict=True):
        strides.append(stride if n > 1 else min(step, (1 << 40) - 16))
        step = max(step, strides[-1] * n)
    return strides


def _encode(found: Described, element: str, box: tuple[int, ...], swizzle: int, l2: int, fill: str) -> _Slot:
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
        named("DataType", _CODE[element]),
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


class _Slot:
    """128 bytes of a slab, which it keeps alive."""

    __slots__ = ("address", "slab")

    def __init__(self, slab: _Slab, address: int) -> None:
        self.slab, self.address = slab, address


class _Memory:
    """Places encoded maps in device memory. A place is written once and never again, so a kernel under way, or a
    captured graph whose maps are pinned, cannot see another map there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slabs: dict[int, _Slab] = {}

    def store(self, data: bytes, device: int) -> _Slot:
        driver = gpu.bindings()
        with self._lock:
            slab = self._slabs.get(device)
            if slab is None or slab.used == slab.maps:
                slab = self._slabs[device] = _Slab(device)
            slot = _Slot(slab, slab.address + slab.used * _MAP_BYTES)
            slab.used += 1
            # A stream of its own: the wait is for these 128 bytes alone, never for the caller's work.
            with gpu.on_device(device), gpu.relaxed_capture():
                gpu.call(driver.cuMemcpyHtoDAsync, slot.address, data, _MAP_BYTES, slab.stream)
                gpu.call(driver.cuStreamSynchronize, slab.stream)
        return slot


_Known = tuple[Described, str, "_Slot | None"]


class _Maps:
    """The encoded maps last used, by what they describe: a launch on the same tensors finds its maps here."""

    capacity = 16384

    def __init__(self) -> None:
        self._lock = threading.Lock()
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


_memory, _maps = _Memory(), _Maps()
_pinned: set[_Slot] = set()


def _key(array: Any, options: tuple[Any, ...]) -> Any:
    """What identifies a map; cheap for torch tensors, whose address, shape and strides say it all."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return (array.get_device(), array.data_ptr(), array.dtype, array.shape, array.stride(), options)
    return None
