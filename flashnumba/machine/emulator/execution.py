"""From an instruction's declaration to what a thread does when it meets it.

Three kinds of emulation, by the declared effect:

``none``     ``emulate(*inputs) -> outputs``, on arrays; for a warp or warpgroup with one row a lane.
``memory``   the same with a :class:`Memory` first, which checks and makes the accesses of the acting lanes.
``control``  ``emulate(thread, *args)``: per thread, with the arguments as the kernel gave them; it may wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from greenlet import getcurrent

from flashnumba.machine.emulator import faults
from flashnumba.machine.emulator.gang import Gang, Op
from flashnumba.machine.emulator.one_thread import for_thread, layout_of, plain, rows_of, scalar
from flashnumba.machine.emulator.registers import wrapped
from flashnumba.machine.instruction import Fragment, Instruction, runs_on

if TYPE_CHECKING:
    from flashnumba.machine.emulator.thread import Thread

__all__ = ["Memory", "bind"]

GROUP_SIZE = {"warp": 32, "warpgroup": 128}


class Memory:
    """Shared and global memory as some lanes see it, for instructions whose effect is ``memory``.

    Addresses are integers or arrays with one element a lane; data has one more axis, of bytes.
    """

    def __init__(self, threads: list[Thread]):
        self.threads = threads
        self.block = threads[0].block

    def _lanes(self, addresses: Any) -> list[tuple[Thread, int]]:
        flat = np.atleast_1d(np.asarray(addresses)).ravel()
        return list(zip(self.threads, flat.tolist(), strict=False))

    def read_shared(self, addresses: Any, nbytes: int) -> np.ndarray:
        shared = self.block.shared
        for thread, at in self._lanes(addresses):
            shared.check_read(at, at + nbytes, thread, align=nbytes)
        return shared.gather(np.asarray(addresses, np.int64), nbytes)

    def write_shared(self, addresses: Any, data: np.ndarray) -> None:
        shared, nbytes = self.block.shared, data.shape[-1]
        for thread, at in self._lanes(addresses):
            shared.check_write(at, at + nbytes, thread, align=nbytes)
        shared.scatter(np.asarray(addresses, np.int64), data)

    def read_global(self, addresses: Any, nbytes: int) -> np.ndarray:
        memory = self.block.launch.memory
        rows = [memory.load(at, nbytes, thread) for thread, at in self._lanes(addresses)]
        return np.array(rows, np.uint8).reshape(*np.shape(addresses), nbytes)

    def write_global(self, addresses: Any, data: np.ndarray) -> None:
        memory = self.block.launch.memory
        rows = np.asarray(data).reshape(-1, data.shape[-1])
        for (thread, at), row in zip(self._lanes(addresses), rows, strict=True):
            memory.store(at, row, thread)


def bind(declared: Instruction, arch: str) -> Callable[..., Any]:
    """The function that stands for an instruction in an emulated kernel."""
    if not runs_on(arch, declared.arch):
        return _lacking(declared, arch)
    if declared.effect == "control":
        return _for_control(declared)
    if declared.quick is not None:
        return declared.quick
    if declared.group == "thread":
        return for_thread(declared)
    return _for_group(declared)


def _for_control(declared: Instruction) -> Callable[..., Any]:
    """Arguments as the registers hold them: an integer of another width is cut to its operand's."""
    emulate = declared.emulate
    cut = [
        (at, dtype, np.iinfo(dtype).max)
        for at, dtype, f in layout_of(declared)
        if f is None and dtype is not None and dtype.kind in "iu"
    ]

    def call(*args: Any) -> Any:
        for at, dtype, last in cut:
            value = args[at]
            if isinstance(value, (int, np.integer)) and not 0 <= value <= last:
                args = (*args[:at], wrapped(int(value), dtype).item(), *args[at + 1 :])
        return emulate(getcurrent(), *args)

    return call


def _lacking(declared: Instruction, arch: str) -> Callable[..., Any]:
    def missing(*args: Any) -> Any:
        thread: Any = getcurrent()
        raise thread.fault(
            faults.UnsupportedInstruction, f"{declared.name} needs sm_{declared.arch}; this launch emulates sm_{arch}"
        )

    return missing


def _for_group(declared: Instruction) -> Callable[..., Any]:
    layout = layout_of(declared)
    size = GROUP_SIZE[declared.group]
    fragments = tuple(at for at, _, f in layout if f)
    counts = {at: f.count for at, _, f in layout if f}
    returns = declared.returns is not None

    def execute(op: Op, gang: Gang) -> None:
        threads = gang.block.threads[gang.first : gang.first + gang.size]
        inputs: list[Any] = [Memory(threads)] if declared.effect == "memory" else []
        outputs = []
        for at, dtype, fragment in layout:
            if fragment is None:
                inputs.append(np.array([scalar(a[at], dtype) for a in op.args], dtype))
                continue
            if fragment.role != "out":
                inputs.append(gathered(op, gang, at, fragment, threads))
            if fragment.role != "in":
                outputs.append((at, fragment))
        given = declared.emulate(*inputs)
        results = given if isinstance(given, tuple) else (given,)
        if returns:
            op.result, results = results[0], results[1:]
        for (at, fragment), result in zip(outputs, results, strict=False):
            scattered(op, gang, at, fragment, result, threads)

    def call(*args: Any) -> Any:
        thread: Any = getcurrent()
        op = thread.op
        gang = thread.gangs.get(size) if op is None or len(op.args) == size else None
        if gang is None:
            gang = join(thread, size)
        op = gang.post(thread, declared, args, fragments, execute)
        for at in fragments:
            array = args[at]
            if array.flights:
                array.settle(int(args[at + 1]), counts[at])
            array.op = op
        if returns:
            thread.flush()
            return plain(op.result[thread.tid - gang.first])
        return None

    return call


def join(thread: Thread, size: int) -> Gang:
    """The thread's warp or warpgroup; instructions posted to the other one are seen through first."""
    op = thread.op
    if op is not None and len(op.args) != size:
        thread.flush()
    gang = thread.gangs.get(size)
    if gang is None:
        gang = thread.gangs[size] = thread.block.gang(thread, size)
    return gang


def gathered(op: Op, gang: Gang, at: int, fragment: Fragment, threads: list[Thread]) -> np.ndarray:
    """A fragment of all lanes, [lanes, count]."""
    array, first = op.args[0][at], int(op.args[0][at + 1])
    count = fragment.count
    if op.uniform and array.row + gang.size <= len(array.store.data):
        rows_of(array, first, count, threads[0], "out")
        rows = slice(array.row, array.row + gang.size)
        if array.store.init[rows, first : first + count].all():
            return array.store.data[rows, first : first + count]
    return np.stack(
        [rows_of(a[at], int(a[at + 1]), count, t, fragment.role) for a, t in zip(op.args, threads, strict=True)]
    )


def scattered(op: Op, gang: Gang, at: int, fragment: Fragment, result: np.ndarray, threads: list[Thread]) -> None:
    """Write a fragment of all lanes."""
    array, first = op.args[0][at], int(op.args[0][at + 1])
    count = fragment.count
    if op.uniform and array.row + gang.size <= len(array.store.data):
        rows_of(array, first, count, threads[0], "out")
        rows = slice(array.row, array.row + gang.size)
        array.store.data[rows, first : first + count] = result
        array.store.init[rows, first : first + count] = True
        if threads[0].register_fences != 1:
            array.store.touched[rows, first : first + count] = threads[0].register_fences
        return
    for a, thread, row in zip(op.args, threads, result, strict=True):
        rows_of(a[at], int(a[at + 1]), count, thread, "out")[:] = row
        a[at].written(int(a[at + 1]), int(a[at + 1]) + count)
