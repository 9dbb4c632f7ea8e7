"""How a launch hands arguments over: one 8-byte place a parameter, written in place, and the pointers to these places.

Numba's kernel ABI: an array argument is flattened to ``(meminfo, parent, nitems, itemsize, data, *shape, *strides)``,
each 64 bits wide, with both owners null; a scalar is itself. ``cuLaunchKernel`` copies the values during the call, so a
buffer is free again when it returns.
"""

from __future__ import annotations

import ctypes
import math
import struct
from dataclasses import dataclass
from typing import Any

from flashnumba.machine.arrays import Described
from flashnumba.machine.function import Kernel
from flashnumba.machine.numba import types

__all__ = ["Frame", "Parameter", "dimensions", "parameters"]

_FORMAT = {
    "bool": "?", "int8": "b", "int16": "h", "int32": "i", "int64": "q", "uint8": "B", "uint16": "H", "uint32": "I",
    "uint64": "Q", "float16": "e", "float32": "f", "float64": "d",
}  # fmt: skip


@dataclass(frozen=True)
class Parameter:
    """One argument of a kernel and the place of its first 8-byte word.

    Attributes:
        index, name: as the kernel's source has it.
        at: index of its first word; an array's data pointer is word ``at + 4``.
        array: the Numba array type, or None for a scalar.
        element: name of the element or scalar type, e.g. ``float32``.
        packer: writes a scalar; None for an array.
    """

    index: int
    name: str
    at: int
    array: Any
    element: str
    packer: struct.Struct | None

    @property
    def words(self) -> int:
        return 1 if self.array is None else 5 + 2 * self.array.ndim


def parameters(kernel: Kernel, signature: tuple[Any, ...]) -> tuple[Parameter, ...]:
    """Lay out a kernel's arguments as Numba passes them.

    Raises:
        TypeError: the number of arguments is wrong, or one has a type that a launch cannot pass.
    """
    code = kernel.function.__code__
    names = code.co_varnames[: code.co_argcount]
    if len(names) != len(signature):
        raise TypeError(f"{kernel.__name__} takes {len(names)} arguments ({', '.join(names)}), not {len(signature)}")
    laid, at = [], 0
    for name, wanted in zip(names, signature, strict=True):
        array = wanted if isinstance(wanted, types.Array) else None
        element = str(array.dtype if array is not None else wanted)
        if element not in _FORMAT:
            raise TypeError(
                f"{kernel.__name__}: {name} has type {wanted}; a launch passes arrays and {', '.join(_FORMAT)}"
            )
        laid.append(
            Parameter(
                len(laid),
                name,
                at,
                array,
                element,
                None if array is not None else struct.Struct("<" + _FORMAT[element]),
            )
        )
        at += laid[-1].words
    return tuple(laid)


class Frame:
    """One thread's parameter buffer. ``seen[i]`` is the torch tensor layout that argument ``i``'s words hold."""

    __slots__ = ("address", "buffer", "pointers", "seen", "signed", "words")

    def __init__(self, laid: tuple[Parameter, ...]) -> None:
        count = sum(p.words for p in laid)
        self.buffer = ctypes.create_string_buffer(max(8 * count, 8))
        start = ctypes.addressof(self.buffer)
        self.pointers = (ctypes.c_void_p * max(count, 1))(*(start + 8 * i for i in range(count)))
        self.address = ctypes.addressof(self.pointers)
        raw = memoryview(self.buffer).cast("B")
        self.words, self.signed = raw.cast("Q"), raw.cast("q")
        self.seen: list[Any] = [None] * len(laid)

    def array(self, place: Parameter, found: Described) -> None:
        """Write all words of an array argument."""
        size = found.dtype.itemsize
        values = (0, 0, math.prod(found.shape), size)
        at = place.at
        for i, value in enumerate(values):
            self.signed[at + i] = value
        self.words[at + 4] = found.pointer
        for i, value in enumerate((*found.shape, *found.strides)):
            self.signed[at + 5 + i] = value


def dimensions(value: Any, name: str) -> tuple[int, int, int]:
    """Three sizes from an int or up to three of them.

    Raises:
        ValueError: too many, negative, or not integers.
    """
    given = tuple(value) if isinstance(value, tuple | list) else (value,)
    ok = 1 <= len(given) <= 3 and all(hasattr(n, "__index__") and not isinstance(n, bool) for n in given)
    if not ok or any(n < 0 for n in given):
        raise ValueError(f"{name} is {value!r}; it must be an integer or up to three, none negative")
    first, second, third = (*(int(n) for n in given), 1, 1)[:3]
    return first, second, third
