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


_WRITTEN = memoryview(np.ones(256, bool))


class LocalStore:
    """The same local array of up to 128 threads, one row each, so that a collective works on all rows at once.

    ``init``: whether an element was ever written; ``marks`` are the same bytes, which one thread looks at faster.
    ``touched``: the number of wgmma fences before it was last written, or, where a wgmma wrote it, last looked at; 0
    in kernels without such fences.
    """

    __slots__ = ("data", "init", "marks", "touched")

    def __init__(self, rows: int, shape: tuple[int, ...], dtype: Any):
        self.data = np.zeros((rows, *shape), dtype)
        self.init = np.zeros((rows, *shape), bool)
        self.marks = memoryview(self.init.reshape(-1))
        self.touched = np.zeros((rows, *shape), np.int32)


class Flight:
    """Registers [lo, hi) of a local array that a wgmma of commit group ``group`` uses, and where it was issued.

    ``landed``: the wait has come, the registers may be touched, and nobody has done so yet.
    """

    __slots__ = ("group", "hi", "landed", "lo", "position")

    def __init__(self, lo: int, hi: int, group: int, position: Any):
        self.lo, self.hi, self.group, self.position, self.landed = lo, hi, group, position, False


class LocalArray:
    """One thread's local array. An element must be written before it is read.

    ``values``: for each element the number that it holds, or None where ``data`` has to be asked. To make a number of
    one in ``data`` is what takes longest in an access, and most are read more than once.
    """

    __slots__ = (
        "data", "flights", "init", "integer", "kind", "length", "marks", "op", "row", "store", "thread", "touched",
        "values",
    )  # fmt: skip

    def __init__(self, thread: Thread, store: LocalStore, row: int):
        self.thread, self.store, self.row = thread, store, row
        self.data, self.init, self.touched = store.data[row], store.init[row], store.touched[row]
        self.length = n = len(self.data) if self.data.ndim == 1 else 0  # what a plain integer may index
        self.marks: Any = store.marks[row * n : (row + 1) * n] if n else self.init
        self.values: list[Any] = [None] * n
        self.integer = self.data.dtype.kind in "iu"
        self.kind = None if self.integer else self.data.dtype.type  # of numbers that are stored as they are
        self.op: Any = None  # the last posted collective that uses it
        self.flights: tuple[Flight, ...] = ()

    @property
    def size(self) -> int:
        return self.data.size

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def __len__(self) -> int:
        return len(self.data)

    def start_flight(self, lo: int, hi: int, group: int, position: Any) -> Flight:
        """A wgmma of this group uses registers [lo, hi)."""
        started = Flight(lo, hi, group, position)
        self.flights = (
            *(f for f in self.flights if f.lo != lo and not (f.landed and f.lo < hi and lo < f.hi)),
            started,
        )
        return started

    def settle(self, i: Any = None, count: int = 1) -> None:
        """See to it that every posted instruction on this array has been executed and that ``count`` elements from
        ``i`` (all, if None) are in nobody's flight."""
        op = self.op
        if op is not None:
            if not op.done:
                self.thread.flush()
            self.op = None
            self.values = [None] * self.length
        if not self.flights:
            return
        if i is None:
            lo, hi = 0, self.data.size
        else:
            lo = int(np.ravel_multi_index(i, self.data.shape, mode="wrap")) if i.__class__ is tuple else int(i)
            hi = lo + count
        for f in self.flights:
            if f.lo < hi and lo < f.hi and not f.landed:
                at = f"; it was issued at {faults.describe(f.position)}" if f.position else ""
                raise self.thread.fault(
                    faults.AccumulatorInFlight, f"registers that a wgmma uses are touched before wgmma_wait(){at}"
                )
        for f in self.flights:
            if f.lo < hi and lo < f.hi:
                self.touched[f.lo : f.hi] = self.thread.register_fences
                self.flights = tuple(g for g in self.flights if g is not f)

    def as_new(self) -> None:
        """The declaration is reached again: whatever the array held is gone."""
        if self.op is not None or self.flights:
            self.settle()
        self.init.fill(False)
        self.values = [None] * self.length
        if self.thread.register_fences != 1:
            self.touched.fill(0)

    def written(self, lo: int, hi: int) -> None:
        """An instruction has written elements [lo, hi)."""
        self.marks[lo:hi] = _WRITTEN[: hi - lo]
        self.values[lo:hi] = [None] * (hi - lo)
        if self.thread.register_fences != 1:
            self.touched[lo:hi] = self.thread.register_fences

    def known(self, lo: int, hi: int) -> bool:
        """Whether elements [lo, hi), which exist, have all been written."""
        return 0 not in self.marks[lo:hi].tobytes()

    def _bounds(self, i: Any) -> None:
        shape = self.data.shape
        index = i if isinstance(i, tuple) else (i,)
        if any(isinstance(k, slice) for k in index) or len(index) < len(shape):
            raise TypeError(
                f"index {i} of a local array of shape {shape}: the emulator gives out single registers, no views"
            )
        if len(index) != len(shape) or any(not 0 <= k < n for k, n in zip(index, shape, strict=True)):
            raise self.thread.fault(faults.OutOfBounds, f"index {i} of a local array of shape {shape}")

    def __getitem__(self, i: Any) -> Any:
        if self.op is not None or self.flights:
            self.settle(i)
        if i.__class__ is int and 0 <= i < self.length:
            value = self.values[i]
            if value is not None:
                return value
            if self.marks[i]:
                value = self.values[i] = self.data.item(i) if self.integer else self.data[i]
                return value
        try:
            self._bounds(i)
            if self.marks[i]:
                return self.data.item(i) if self.integer else self.data[i]
            raise self.thread.fault(faults.UninitialisedRead, f"element {i} of a local array was never written")
        except IndexError:
            self._bounds(i)
            raise

    def __setitem__(self, i: Any, value: Any) -> None:
        if self.op is not None or self.flights:
            self.settle(i)
        if i.__class__ is int and 0 <= i < self.length:
            self.values[i] = value if value.__class__ is self.kind else None
        else:
            self._bounds(i)
            self.values = [None] * self.length
        try:
            self.data[i] = value
        except OverflowError:
            self.data[i] = wrapped(value, self.data.dtype)
        except IndexError:
            self._bounds(i)
            raise
        self.marks[i] = True
        fences = self.thread.register_fences
        if fences != 1:
            self.touched[i] = fences


def wrapped(value: int, dtype: np.dtype) -> Any:
    """An integer cut to a type's width, as a store cuts it."""
    bits = dtype.itemsize * 8
    value = int(value) & ((1 << bits) - 1)
    if dtype.kind == "i" and value >> (bits - 1):
        value -= 1 << bits
    return dtype.type(value)


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
