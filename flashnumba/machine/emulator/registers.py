"""A thread's local arrays: registers, which an instruction of a warp or warpgroup may write too, now or later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flashnumba.machine.emulator import faults

if TYPE_CHECKING:
    from flashnumba.machine.emulator.thread import Thread

__all__ = ["LocalArray", "LocalStore", "wrapped"]

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
