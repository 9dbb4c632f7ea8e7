"""Who reads what: a launch on the emulator that writes down every access to global memory.

A :class:`Report` counts bytes. Here each access is kept: block, thread, its number in the thread's own order, array,
place and width. Lanes of a warp that run the same path make their n-th accesses with one instruction, so accesses that
share warp and number are what the memory system sees at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from greenlet import getcurrent

from flashnumba.machine.emulator.arrays import GlobalArray
from flashnumba.machine.emulator.global_memory import GlobalMemory
from flashnumba.machine.emulator.launch import Launch, Report
from flashnumba.machine.emulator.tensor_core import settings
from flashnumba.machine.function import Kernel

__all__ = ["SECTOR", "Accesses", "record"]

SECTOR = 32
"""Bytes that device memory hands out at least (CUDA programming guide, "Device memory accesses")."""

FIELDS = [
    ("block", np.int32), ("thread", np.int32), ("number", np.int32), ("array", np.int16), ("store", bool),
    ("offset", np.int64), ("nbytes", np.int16),
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Accesses:
    """Every load and store of a launch.

    Attributes:
        report: what the launch counted.
        arrays: names of the array arguments.
        table: a structured array, one entry an access in the order in which they were made: ``block`` and ``thread``
            (linear), ``number`` (0, 1, ... in each thread), ``array`` (index into ``arrays``), ``store``, ``offset``
            (bytes from the array's lowest byte), ``nbytes``. Atomics and the copies of engines are not in it.
    """

    report: Report
    arrays: tuple[str, ...]
    table: np.ndarray

    def of(self, array: str, *, store: bool = False, block: int | None = None) -> np.ndarray:
        """The entries that load from (or store into) one array, those of one block if it is given.

        Raises:
            ValueError: there is no such array argument.
        """
        if array not in self.arrays:
            raise ValueError(f"array is {array!r}; the arrays are {', '.join(self.arrays)}")
        t = self.table
        chosen = (t["array"] == self.arrays.index(array)) & (t["store"] == store)
        return t[chosen if block is None else chosen & (t["block"] == block)]

    def times(self, array: str, nbytes: int, *, store: bool = False) -> np.ndarray:
        """How often each of the first ``nbytes`` bytes of an array is loaded (or stored): int64 ``[nbytes]``."""
        chosen = self.of(array, store=store)
        change = np.zeros(nbytes + 1, np.int64)
        np.add.at(change, chosen["offset"], 1)
        np.add.at(change, chosen["offset"] + chosen["nbytes"], -1)
        return change.cumsum()[:-1]

    def sectors(self, array: str, *, store: bool = False) -> np.ndarray:
        """Sectors of 32 bytes that each warp-wide load (or store) touches: int64, one for each warp and number."""
        chosen = self.of(array, store=store)
        warp = chosen["block"].astype(np.int64) << 32 | chosen["thread"] >> 5
        key = np.stack([warp, chosen["number"], chosen["offset"] // SECTOR], 1)
        return np.unique(np.unique(key, axis=0)[:, :2], axis=0, return_counts=True)[1]


def record(
    kernel: Kernel, grid: int | Sequence[int], block: int | Sequence[int], args: Sequence[Any], *, shared: int = 0,
    arch: str = "90a", checks: bool = True, seed: int = 0,
) -> Accesses:  # fmt: skip
    """Run a kernel as :func:`flashnumba.machine.emulator.launch` does, and keep every access to its array arguments.

    Raises:
        Fault, ValueError: as ``launch``.
    """
    with settings.using(arch=arch):
        launch = _Recorded(kernel, grid, block, args, shared, arch, checks, seed)
        report = launch.run()
    names = tuple(dict.fromkeys(region.name for region in launch.memory.regions))
    lowest = {region.name: region.lo for region in launch.memory.regions}
    rows = [(b, t, n, names.index(a), s, at - lowest[a], size) for b, t, n, a, s, at, size in launch.entries]
    return Accesses(report, names, np.array(rows, FIELDS))


class _Recorded(Launch):
    def _place(self, args: Sequence[Any]) -> tuple[Any, ...]:
        self.entries: list[tuple[Any, ...]] = []
        self.numbers: dict[tuple[int, int], int] = {}
        self.memory = _RecordedMemory(self)
        return super()._place(args)

    def _argument(self, name: str, value: Any) -> Any:
        placed = super()._argument(name, value)
        if isinstance(placed, GlobalArray):
            return _RecordedArray(self, placed.data, placed.address, placed.name)
        return placed

    def note(self, thread: Any, array: str, store: bool, address: int, nbytes: int) -> None:
        x, y, z = thread.block.index
        block = x + self.grid[0] * (y + self.grid[1] * z)
        number = self.numbers.get((block, thread.tid), 0)
        self.numbers[block, thread.tid] = number + 1
        self.entries.append((block, thread.tid, number, array, store, address, nbytes))


class _RecordedMemory(GlobalMemory):
    def __init__(self, launch: _Recorded):
        super().__init__()
        self.launch = launch

    def load(self, address: int, nbytes: int, thread: Any) -> np.ndarray:
        data = super().load(address, nbytes, thread)
        self.launch.note(thread, self.find(address, nbytes, thread, False).name, False, address, nbytes)
        return data

    def store(self, address: int, data: np.ndarray, thread: Any) -> None:
        super().store(address, data, thread)
        nbytes = data.shape[-1]
        self.launch.note(thread, self.find(address, nbytes, thread, True).name, True, address, nbytes)


class _RecordedArray(GlobalArray):
    __slots__ = ("launch",)

    def __init__(self, launch: _Recorded, data: np.ndarray, address: int, name: str):
        super().__init__(launch.memory, data, address, name)
        self.launch = launch

    def _like(self, data: np.ndarray, address: int) -> _RecordedArray:
        return _RecordedArray(self.launch, data, address, self.name)

    def __getitem__(self, i: Any) -> Any:
        value = super().__getitem__(i)
        if not isinstance(value, GlobalArray):
            self.launch.note(getcurrent(), self.name, False, self.address + self.offset(i), self.itemsize)
        return value

    def __setitem__(self, i: Any, value: Any) -> None:
        super().__setitem__(i, value)
        self.launch.note(getcurrent(), self.name, True, self.address + self.offset(i), self.itemsize)
