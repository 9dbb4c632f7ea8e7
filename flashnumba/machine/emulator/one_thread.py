"""What one thread does by itself: instructions on its own registers, and its loads and stores.

The commonest have a form of their own, as there are many of them and few things that they have to see to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from greenlet import getcurrent

from flashnumba.machine.emulator import faults
from flashnumba.machine.emulator.registers import LocalArray, wrapped
from flashnumba.machine.instruction import Fragment, Instruction, register_dtype

if TYPE_CHECKING:
    from flashnumba.machine.emulator.thread import Thread

__all__ = ["ThreadMemory", "for_thread", "layout_of", "plain", "rows_of", "scalar"]


class ThreadMemory:
    """Shared and global memory as one thread sees it: an address is one integer, data one row of bytes. What is read
    is a view of memory, to be looked at before the thread goes on."""

    __slots__ = ("block", "thread")

    def __init__(self, thread: Thread):
        self.thread, self.block = thread, thread.block

    def read_shared(self, address: Any, nbytes: int) -> np.ndarray:
        shared, at = self.block.shared, int(address)
        shared.check_read(at, at + nbytes, self.thread, 0, nbytes)
        return shared.data[at : at + nbytes]

    def write_shared(self, address: Any, data: np.ndarray) -> None:
        shared, at, nbytes = self.block.shared, int(address), data.shape[-1]
        shared.check_write(at, at + nbytes, self.thread, 0, nbytes)
        shared.data[at : at + nbytes] = data

    def read_global(self, address: Any, nbytes: int) -> np.ndarray:
        return self.block.launch.memory.load(int(address), nbytes, self.thread)

    def write_global(self, address: Any, data: np.ndarray) -> None:
        self.block.launch.memory.store(int(address), data, self.thread)


def layout_of(declared: Instruction) -> list[tuple[int, Any, Fragment | None]]:
    """(position among the call's arguments, NumPy dtype, the fragment if it is one) of each operand."""
    found, at = [], 0
    for operand in declared.operands:
        fragment = operand if isinstance(operand, Fragment) else None
        found.append((at, register_dtype(operand.type), fragment))
        at += 2 if fragment else 1
    return found


def _kept(value: Any) -> Any:
    return value


def scalar(value: Any, dtype: Any) -> Any:
    """A value as an operand's register holds it; where the caller's own type is kept, the value itself."""
    if dtype is None:
        return value
    try:
        return dtype.type(value)
    except OverflowError:
        return wrapped(value, dtype)


def plain(value: Any) -> Any:
    """A value as kernels hold it: integers as Python's, floats as NumPy's."""
    return value.item() if getattr(value, "dtype", None) is not None and value.dtype.kind in "iub" else value


def rows_of(array: LocalArray, at: int, count: int, thread: Thread, role: str) -> np.ndarray:
    """Registers [at, at + count) of a thread, after the checks that an operand of this role asks for."""
    if at < 0 or at + count > array.size:
        raise thread.fault(
            faults.OutOfBounds, f"registers {at}..{at + count - 1} of a local array of {array.size} elements"
        )
    if role != "out" and not array.known(at, at + count):
        raise thread.fault(
            faults.UninitialisedRead,
            f"registers {at}..{at + count - 1} of a local array are used before they are all written",
        )
    return array.data[at : at + count]


def for_thread(declared: Instruction) -> Callable[..., Any]:
    """The function that stands for an instruction of one thread in an emulated kernel."""
    layout, emulate = layout_of(declared), declared.emulate
    memory = declared.effect == "memory"
    if not any(f for _, _, f in layout):
        if not memory and len(layout) == 1 and layout[0][1] is not None:
            kind = layout[0][1].type

            def single(x: Any) -> Any:
                return plain(emulate(kind(x)))

            return single

        if memory and declared.returns and len(layout) == 1 and layout[0][1] is not None:
            return _for_load_of_one(declared)
        kinds = [_kept if dtype is None else dtype.type for _, dtype, _ in layout]

        def scalars(*args: Any) -> Any:
            try:
                values = [kind(arg) for kind, arg in zip(kinds, args)]  # noqa: B905, many times a thread
            except OverflowError:
                values = [scalar(args[at], dtype) for at, dtype, _ in layout]
            if memory:
                thread: Any = getcurrent()
                if thread.op is not None:
                    thread.flush()
                values.insert(0, ThreadMemory(thread))
            return plain(emulate(*values))

        return scalars

    if memory and declared.returns is None and len(layout) == 2:
        kinds = [fragment.role if fragment else "address" for _, _, fragment in layout]
        if kinds == ["out", "address"]:
            return _for_load(declared)
        if kinds == ["address", "in"]:
            return _for_store(declared)

    def call(*args: Any) -> Any:
        thread: Any = getcurrent()
        if memory and thread.op is not None:
            thread.flush()
        inputs: list[Any] = [ThreadMemory(thread)] if memory else []
        outputs = []
        for at, dtype, fragment in layout:
            if fragment is None:
                inputs.append(scalar(args[at], dtype))
                continue
            array, first = args[at], int(args[at + 1])
            array.settle(first, fragment.count)
            row = rows_of(array, first, fragment.count, thread, fragment.role)
            if fragment.role != "out":
                inputs.append(row)
            if fragment.role != "in":
                outputs.append((array, first, fragment.count))
        given = emulate(*inputs)
        results = given if isinstance(given, tuple) else (given,)
        value = None
        if declared.returns:
            value, results = plain(results[0]), results[1:]
        for (array, first, count), result in zip(outputs, results, strict=False):
            array.data[first : first + count] = result
            array.written(first, first + count)
        return value

    return call


def _for_load(declared: Instruction) -> Callable[..., Any]:
    """``(fragment, first, address)``: what one thread does most often, without the overhead of the general case."""
    (_, _, fragment), (_, kind, _) = layout_of(declared)
    emulate, count, last = declared.emulate, fragment.count, np.iinfo(kind).max

    def load(array: Any, first: Any, address: Any) -> None:
        thread: Any = getcurrent()
        if thread.op is not None:
            thread.flush()
        if array.op is not None or array.flights:
            array.settle(first, count)
        if not 0 <= address <= last:
            address = scalar(address, kind)
        end = first + count
        if first < 0 or end > array.size:
            rows_of(array, first, count, thread, "out")
        array.data[first:end] = emulate(ThreadMemory(thread), address)
        array.written(first, end)

    return load


def _for_load_of_one(declared: Instruction) -> Callable[..., Any]:
    """``(address)``, which returns what is there, likewise."""
    ((_, kind, _),) = layout_of(declared)
    emulate, last = declared.emulate, np.iinfo(kind).max

    def load(address: Any) -> Any:
        thread: Any = getcurrent()
        if thread.op is not None:
            thread.flush()
        if not 0 <= address <= last:
            address = scalar(address, kind)
        return plain(emulate(ThreadMemory(thread), address))

    return load


def _for_store(declared: Instruction) -> Callable[..., Any]:
    """``(address, fragment, first)``, likewise."""
    (_, kind, _), (_, _, fragment) = layout_of(declared)
    emulate, count, last = declared.emulate, fragment.count, np.iinfo(kind).max

    def store(address: Any, array: Any, first: Any) -> None:
        thread: Any = getcurrent()
        if thread.op is not None:
            thread.flush()
        if array.op is not None or array.flights:
            array.settle(first, count)
        if not 0 <= address <= last:
            address = scalar(address, kind)
        emulate(ThreadMemory(thread), address, rows_of(array, first, count, thread, "in"))

    return store
