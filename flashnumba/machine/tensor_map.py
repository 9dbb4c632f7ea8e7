"""Tensor maps: what the Hopper copy engine must know of an array to move boxes of it by coordinates.

A :class:`TensorMap` is a host description that both machines take as a kernel argument. On a GPU it is encoded into the
128 opaque bytes of ``cuTensorMapEncodeTiled``, which live in device memory; the kernel gets their address as a uint64.
The emulator reads :attr:`TensorMap.array`, :attr:`~TensorMap.box`, :attr:`~TensorMap.swizzle` and
:attr:`~TensorMap.fill` instead. The rules are checked on the host for both, so what the emulator accepts, the hardware
accepts. Source: CUDA Driver API, "Tensor Map Object Management".
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np

from flashnumba.machine.arrays import Described, describe, host_view, kernel_dtype
from flashnumba.machine.tensor_encode import CODE, MAPS, Slot, encode, pin

__all__ = ["TensorMap"]

_FLOATS = ("FLOAT16", "BFLOAT16", "FLOAT32", "FLOAT64")


class TensorMap:
    """A strided array of 1 to 5 axes seen by the copy engine, and the box one copy moves.

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

    __slots__ = ("_held", "_slot", "_view", "box", "element", "fill", "found", "l2_promotion", "name", "swizzle")

    def __init__(
        self, array: Any, box: tuple[int, ...], *, swizzle: int = 128, element: str | None = None,
        l2_promotion: int = 256, fill: str = "zero", name: str = "array",
    ) -> None:  # fmt: skip
        self.box, self.swizzle, self.l2_promotion, self.fill, self.name = tuple(box), swizzle, l2_promotion, fill, name
        self._held, self._view = array, None
        options = (self.box, swizzle, l2_promotion, fill)
        key = _key(array, (element, *options))
        known = MAPS.get(key) if key else None
        if known is None:
            found = describe(array, name)
            element = element or found.element
            key = key or (found, element, options)
            known = MAPS.get(key)
        if known is None:
            _check(found, element, *options, name)
            known = (found, element, encode(found, element, *options) if found.device is not None else None)
            if found.device is not None:
                MAPS.put(key, known)
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
        if self._view is None:
            self._view = host_view(self._held, self.name)
        return self._view

    @property
    def device_address(self) -> int:
        """Where the 128 encoded bytes lie in device memory; ValueError if the array is in host memory."""
        if self._slot is None:
            raise ValueError(f"{self.name} is in host memory; a tensor map for the GPU needs a CUDA array")
        return self._slot.address

    def pin(self) -> None:
        """Keep the encoded bytes until the process ends: a captured graph refers to them by address."""
        if self._slot is not None:
            pin(self._slot)

    def moved(self, pointer: int) -> TensorMap:
        """The map of an array like this one that lies elsewhere on its device; who calls it keeps the array."""
        other = object.__new__(TensorMap)
        other.box, other.swizzle, other.l2_promotion, other.fill = self.box, self.swizzle, self.l2_promotion, self.fill
        other.name, other.element, other._held, other._view = self.name, self.element, None, None
        other.found = replace(self.found, pointer=pointer)
        key = (other.found, self.element, (self.box, self.swizzle, self.l2_promotion, self.fill))
        known = MAPS.get(key)
        if known is None:
            known = (other.found, self.element, encode(other.found, self.element, *key[2]))
            MAPS.put(key, known)
        other._slot = known[2]
        return other

    def encoded_at(self, pointer: int, device: int) -> Slot:
        """The bytes for a copy of the array at another address; the launcher's way to take host arrays to a GPU."""
        found = replace(self.found, pointer=pointer, device=device)
        return encode(found, self.element, self.box, self.swizzle, self.l2_promotion, self.fill)


def _check(
    found: Described, element: str, box: tuple[int, ...], swizzle: int, l2_promotion: int, fill: str, name: str
) -> None:
    rank, size = len(found.shape), found.dtype.itemsize
    if element not in CODE:
        raise TypeError(f"{name} has elements of type {element}; a tensor map takes {', '.join(CODE)}")
    if kernel_dtype(element, name).itemsize != size:
        raise ValueError(f"element {element} does not have the {size} bytes of {name}'s {found.element}")
    if not 1 <= rank <= 5:
        raise ValueError(f"{name} has shape {found.shape}; a tensor map takes 1 to 5 axes")
    if len(box) != rank or not all(isinstance(b, int | np.integer) and 1 <= b <= 256 for b in box):
        raise ValueError(
            f"box is {box}; it must be {rank} integers from 1 to 256, outermost axis first, for shape {found.shape}"
        )
    if swizzle not in (0, 32, 64, 128):
        raise ValueError(f"swizzle is {swizzle!r}; it must be 0, 32, 64 or 128 bytes")
    if l2_promotion not in (0, 64, 128, 256):
        raise ValueError(f"l2_promotion is {l2_promotion!r}; it must be 0, 64, 128 or 256 bytes")
    if fill not in ("zero", "nan") or (fill == "nan" and CODE[element] not in _FLOATS):
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


def _key(array: Any, options: tuple[Any, ...]) -> Any:
    """What identifies a map; cheap for torch tensors, whose address, shape and strides say it all."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return (array.get_device(), array.data_ptr(), array.dtype, array.shape, array.stride(), options)
    return None
