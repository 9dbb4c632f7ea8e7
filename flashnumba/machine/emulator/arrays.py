"""Arrays inside a kernel: registers (local), shared and global, with the checks of each access."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from greenlet import getcurrent

from flashnumba.machine.emulator import faults

if TYPE_CHECKING:
    from flashnumba.machine.emulator.shared_memory import SharedMemory
    from flashnumba.machine.emulator.thread import Thread

__all__ = ["GlobalArray", "LocalArray", "LocalStore", "SharedArray"]


class LocalStore:
    """The same local array of up to 128 threads, one row each, so that a collective works on all rows at once."""

    __slots__ = ("data", "init")

    def __init__(self, rows: int, shape: tuple[int, ...], dtype: Any):
        self.data = np.zeros((rows, *shape), dtype)
        self.init = np.zeros((rows, *shape), bool)


class LocalArray:
    """One thread's local array. An element must be written before it is read."""

    __slots__ = ("data", "flight", "init", "integer", "op", "row", "stamp", "store", "thread")

    def __init__(self, thread: Thread, store: LocalStore, row: int):
        self.thread, self.store, self.row = thread, store, row
        self.data, self.init = store.data[row], store.init[row]
        self.integer = self.data.dtype.kind in "iu"
        self.op: Any = None  # the last posted collective that uses it
        self.flight: Any = None  # (commit group, place) of a wgmma in flight that does
        self.stamp = 0  # number of wgmma fences before its last ordinary write

    @property
    def size(self) -> int:
        return self.data.size

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def __len__(self) -> int:
        return len(self.data)

    def settle(self) -> None:
        """See to it that every posted instruction on this array has been executed and that none is in flight."""
        op = self.op
        if op is not None:
            if not op.done:
                self.thread.flush()
            self.op = None
        if self.flight is not None:
            raise self.thread.fault(
                faults.AccumulatorInFlight,
                f"registers that a wgmma uses are touched before wgmma_wait(); issued at {faults.describe(self.flight[1])}",
            )

    def _bounds(self, i: Any) -> None:
        shape = self.data.shape
        index = i if isinstance(i, tuple) else (i,)
        if len(index) != len(shape) or any(not 0 <= k < n for k, n in zip(index, shape, strict=True)):
            raise self.thread.fault(faults.OutOfBounds, f"index {i} of a local array of shape {shape}")

    def __getitem__(self, i: Any) -> Any:
        if self.op is not None or self.flight is not None:
            self.settle()
        try:
            ok = self.init[i]
            if not ok:
                raise self.thread.fault(faults.UninitialisedRead, f"element {i} of a local array was never written")
            if i.__class__ is int and i < 0:
                self._bounds(i)
            return self.data.item(i) if self.integer else self.data[i]
        except IndexError:
            self._bounds(i)
            raise

    def __setitem__(self, i: Any, value: Any) -> None:
        if self.op is not None or self.flight is not None:
            self.settle()
        if i.__class__ is int and not 0 <= i < len(self.data):
            self._bounds(i)
        self.stamp = self.thread.register_fences
        try:
            self.data[i] = value
        except OverflowError:
            self.data[i] = wrapped(value, self.data.dtype)
        except IndexError:
            self._bounds(i)
            raise
        self.init[i] = True


def wrapped(value: int, dtype: np.dtype) -> Any:
    """An integer cut to a type's width, as a store cuts it."""
    bits = dtype.itemsize * 8
    value = int(value) & ((1 << bits) - 1)
    if dtype.kind == "i" and value >> (bits - 1):
        value -= 1 << bits
    return dtype.type(value)


class _Strided:
    """What shared and global arrays have in common: shape, strides, views."""

    __slots__ = ("address", "data", "integer", "itemsize", "name", "shape", "strides")

    def __init__(self, data: np.ndarray, address: int, name: str):
        self.data, self.address, self.name = data, address, name
        self.shape, self.strides = data.shape, data.strides
        self.itemsize = data.dtype.itemsize
        self.integer = data.dtype.kind in "iu"

    @property
    def size(self) -> int:
        return self.data.size

    @property
    def ndim(self) -> int:
        return self.data.ndim

    @property
    def dtype(self) -> Any:
        return self.data.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def offset(self, i: Any) -> int:
        """Byte offset of an element, after the bounds check."""
        if i.__class__ is not tuple:
            i = (i,)
        shape = self.shape
        if len(i) != len(shape):
            raise self._outside(i)
        at = 0
        for k, n, stride in zip(i, shape, self.strides, strict=True):
            if not 0 <= k < n:
                raise self._outside(i)
            at += int(k) * stride
        return at

    def _outside(self, i: tuple[Any, ...]) -> faults.Fault:
        thread: Any = getcurrent()
        index = ", ".join(str(int(k)) for k in i)
        return thread.fault(faults.OutOfBounds, f"index [{index}] of {self.name}, whose shape is {self.shape}")

    def _view(self, data: np.ndarray) -> Any:
        moved = data.__array_interface__["data"][0] - self.data.__array_interface__["data"][0]
        return self._like(data, self.address + (moved if data.size else 0))

    def _like(self, data: np.ndarray, address: int) -> Any:
        raise NotImplementedError

    def view(self, dtype: Any) -> Any:
        return self._view(self.data.view(getattr(dtype, "dtype", dtype)))

    def reshape(self, *shape: Any) -> Any:
        return self._view(self.data.reshape(*shape))


def _is_view(i: Any) -> bool:
    return i.__class__ is slice or (i.__class__ is tuple and any(k.__class__ is slice for k in i))


class SharedArray(_Strided):
    """An array in shared memory: an element access is an access to the block's bytes, with its race check."""

    __slots__ = ("memory",)

    def __init__(self, memory: SharedMemory, data: np.ndarray, address: int, name: str = "a shared array"):
        super().__init__(data, address, name)
        self.memory = memory

    def _like(self, data: np.ndarray, address: int) -> SharedArray:
        return SharedArray(self.memory, data, address, self.name)

    def __getitem__(self, i: Any) -> Any:
        if _is_view(i):
            return self._view(self.data[i])
        at = self.address + self.offset(i)
        if self.memory.checks:
            self.memory.check_read(at, at + self.itemsize, getcurrent(), align=self.itemsize)
        return self.data.item(i) if self.integer else self.data[i]

    def __setitem__(self, i: Any, value: Any) -> None:
        at = self.address + self.offset(i)
        if self.memory.checks:
            self.memory.check_write(at, at + self.itemsize, getcurrent(), align=self.itemsize)
        try:
            self.data[i] = value
        except OverflowError:
            self.data[i] = wrapped(value, self.data.dtype)


class GlobalArray(_Strided):
    """An array argument of a kernel."""

    __slots__ = ("memory",)

    def __init__(self, memory: Any, data: np.ndarray, address: int, name: str):
        super().__init__(data, address, name)
        self.memory = memory

    def _like(self, data: np.ndarray, address: int) -> GlobalArray:
        return GlobalArray(self.memory, data, address, self.name)

    def __getitem__(self, i: Any) -> Any:
        if _is_view(i):
            return self._view(self.data[i])
        self.offset(i)
        self.memory.loaded += self.itemsize
        return self.data.item(i) if self.integer else self.data[i]

    def __setitem__(self, i: Any, value: Any) -> None:
        self.offset(i)
        if not self.data.flags.writeable:
            thread: Any = getcurrent()
            raise thread.fault(faults.ReadOnly, f"a store into {self.name}, which is read-only")
        self.memory.stored += self.itemsize
        try:
            self.data[i] = value
        except OverflowError:
            self.data[i] = wrapped(value, self.data.dtype)
