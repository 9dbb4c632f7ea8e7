"""Shared and global arrays inside a kernel, with the checks of each access."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from greenlet import getcurrent

from flashnumba.machine.emulator import faults
from flashnumba.machine.emulator.registers import wrapped

if TYPE_CHECKING:
    from flashnumba.machine.emulator.shared_memory import SharedMemory

__all__ = ["GlobalArray", "SharedArray"]


class _Strided:
    """What shared and global arrays have in common: shape, strides, views."""

    __slots__ = ("address", "data", "integer", "itemsize", "memory", "name", "ndim", "shape", "strides")

    def __init__(self, memory: Any, data: np.ndarray, address: int, name: str = "a shared array"):
        self.memory, self.data, self.address, self.name = memory, data, address, name
        self.shape, self.strides = data.shape, data.strides
        self.itemsize, self.ndim = data.dtype.itemsize, data.ndim
        self.integer = data.dtype.kind in "iu"

    @property
    def size(self) -> int:
        return self.data.size

    @property
    def dtype(self) -> Any:
        return self.data.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def offset(self, i: Any) -> int:
        """Byte offset of an element, after the bounds check."""
        shape = self.shape
        if i.__class__ is not tuple:
            if i.__class__ is int and len(shape) == 1 and 0 <= i < shape[0]:
                return i * self.strides[0]
            i = (i,)
        if len(i) != len(shape):
            raise self._outside(i)
        at = 0
        for k, n, stride in zip(i, shape, self.strides):  # noqa: B905, many times a thread
            if not 0 <= k < n:
                raise self._outside(i)
            at += int(k) * stride
        return at

    def _outside(self, i: tuple[Any, ...]) -> faults.Fault:
        thread: Any = getcurrent()
        index = ", ".join(str(k) for k in i)
        return thread.fault(faults.OutOfBounds, f"index [{index}] of {self.name}, whose shape is {self.shape}")

    def _view(self, data: np.ndarray) -> Any:
        moved = data.__array_interface__["data"][0] - self.data.__array_interface__["data"][0]
        return self._like(data, self.address + (moved if data.size else 0))

    def _like(self, data: np.ndarray, address: int) -> Any:
        return type(self)(self.memory, data, address, self.name)

    def part(self, i: Any) -> Any:
        """The view that an index names which does not name one element: fewer indices than axes, or a slice among
        them."""
        i = i if i.__class__ is tuple else (i,)
        if len(i) > len(self.shape) or not all(
            k.__class__ is slice or 0 <= k < n for k, n in zip(i, self.shape, strict=False)
        ):
            raise self._outside(i)
        return self._view(self.data[i])

    def view(self, dtype: Any) -> Any:
        own = getattr(dtype, "dtype", None)  # of a cast; a NumPy type's is no dtype
        return self._view(self.data.view(own if isinstance(own, np.dtype) else dtype))

    def reshape(self, *shape: Any) -> Any:
        return self._view(self.data.reshape(*shape))


class SharedArray(_Strided):
    """An array in shared memory: an element access is an access to the block's bytes, with its race check."""

    __slots__ = ()
    memory: SharedMemory

    def __getitem__(self, i: Any) -> Any:
        if i.__class__ is slice or (
            self.ndim > 1 and (i.__class__ is not tuple or len(i) < self.ndim or slice in map(type, i))
        ):
            return self.part(i)
        at = self.address + self.offset(i)
        thread: Any = getcurrent()
        if thread.op is not None:
            thread.flush()  # a posted stmatrix writes before this reads
        if self.memory.checks:
            self.memory.check_read(at, at + self.itemsize, thread, 0, self.itemsize)
        if thread.last_read == at:
            thread.reread(at, self.name)
        else:
            thread.last_read, thread.rereads = at, 0
        return self.data.item(i) if self.integer else self.data[i]

    def __setitem__(self, i: Any, value: Any) -> None:
        at = self.address + self.offset(i)
        thread: Any = getcurrent()
        if thread.op is not None:
            thread.flush()  # a posted ldmatrix reads before this writes
        if self.memory.checks:
            self.memory.check_write(at, at + self.itemsize, thread, 0, self.itemsize)
        try:
            self.data[i] = value
        except OverflowError:
            self.data[i] = wrapped(value, self.data.dtype)


class GlobalArray(_Strided):
    """An array argument of a kernel."""

    __slots__ = ()

    def __getitem__(self, i: Any) -> Any:
        if i.__class__ is slice or (
            self.ndim > 1 and (i.__class__ is not tuple or len(i) < self.ndim or slice in map(type, i))
        ):
            return self.part(i)
        at = self.address + self.offset(i)
        self.memory.loaded += self.itemsize
        thread: Any = getcurrent()
        if self.memory.early:
            self.memory.check_waited(thread)
        if thread.last_read == at:
            thread.reread(at, self.name)
        else:
            thread.last_read, thread.rereads = at, 0
        return self.data.item(i) if self.integer else self.data[i]

    def __setitem__(self, i: Any, value: Any) -> None:
        self.offset(i)
        if self.memory.early:
            self.memory.check_waited(getcurrent())
        if not self.data.flags.writeable:
            thread: Any = getcurrent()
            raise thread.fault(faults.ReadOnly, f"a store into {self.name}, which is read-only")
        self.memory.stored += self.itemsize
        try:
            self.data[i] = value
        except OverflowError:
            self.data[i] = wrapped(value, self.data.dtype)
