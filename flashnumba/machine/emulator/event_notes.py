"""What each instruction leaves in an event log."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from greenlet import getcurrent

from flashnumba.machine.emulator.event_log import OTHER, SPECIAL, add
from flashnumba.machine.emulator.execution import bind
from flashnumba.machine.instruction import Instruction

__all__ = ["bind_logged"]

Note = Callable[[Any, tuple[Any, ...]], Any]
"""What to write down when a thread comes to an instruction with some arguments."""


def _by_lane_0(*event: Any) -> Note:
    def note(thread: Any, args: tuple[Any, ...]) -> int:
        return thread.log.append(*event) if thread.lane == 0 else 0

    return note


def _math(kind: int) -> Note:
    def note(thread: Any, args: tuple[Any, ...]) -> None:
        if thread.lane == 0:
            thread.log.compute(kind)

    return note


def _bytes(name: str, nbytes: int) -> Note:
    return lambda thread, args: add(thread, name, nbytes)


def _note_of(name: str, family: str) -> Note | None:
    """How an instruction is logged; None if it is not."""
    number = int(found[0]) if (found := re.search(r"\d+$", name)) else 0
    if family == "convert":
        special = name.removesuffix("_approx") != name
        return None if "bits" in name else _math(SPECIAL if special else OTHER)
    if family in ("mma", "wgmma") and (size := re.search(r"m(\d+)n(\d+)k(\d+)", name)):
        m, n, k = map(int, size.groups())
        return _by_lane_0(family, m * n * k // (4 if family == "wgmma" else 1))
    if family == "ldmatrix" and (count := re.search(r"matrix_x(\d)", name)):
        return _bytes("shared", 4 * int(count[1]))
    if family == "memory" and name[:3] in ("ld_", "st_"):
        wide = re.search(r"_v(\d)", name)
        nbytes = 2 if "b16" in name else 4 * int(wide[1]) if wide else 4
        return _bytes("shared" if "shared" in name else "load" if name.startswith("ld") else "store", nbytes)
    if family == "warp" and name.startswith("shfl"):
        return _bytes("shared", 4)
    if family == "ordered":
        return _bytes("load" if name.startswith(("ld", "atom")) else "store", 4)
    if family == "cp_async" and "wait" not in name and "commit" not in name:
        size_ = int(name.split("_")[2])
        return lambda thread, args: add(thread, "copy", int(args[2]) if len(args) > 2 else size_)
    if family == "tma" and re.search(r"_\d+d$", name):
        if "load" in name:
            return lambda thread, args: add(thread, "bulk", _box(args[1]), int(args[2]))
        return lambda thread, args: add(thread, "bulk_store", _box(args[0]))
    for start, note in _NOTES.items():
        if name.startswith(start):
            return note(number)
    return _by_lane_0("issue", 1) if family in ("barrier", "warp", "wgmma", "mbarrier") else None


def _box(tensor: Any) -> int:
    return int(np.prod(tensor.box)) * tensor.array.dtype.itemsize


def _wait_all(thread: Any, args: tuple[Any, ...]) -> None:
    if thread.lane == 0:
        thread.log.append("commit")
        thread.log.append("wait", 0)


def _barrier(waits: int) -> Note:
    def note(thread: Any, args: tuple[Any, ...]) -> None:
        if thread.lane == 0:
            thread.log.append("barrier", int(args[1]), int(args[0]), waits)

    return note


def _expect_and_arrive(thread: Any, args: tuple[Any, ...]) -> None:
    add(thread, "expect", int(args[1]), int(args[0]))
    add(thread, "arrive", 1, int(args[0]))


def _of_lane_0(name: str) -> Note:
    """An event of lane 0 with the instruction's second argument and its first, the mbarrier."""

    def note(thread: Any, args: tuple[Any, ...]) -> None:
        if thread.lane == 0:
            thread.log.append(name, int(args[1]), int(args[0]))

    return note


_NOTES: dict[str, Callable[[int], Note]] = {
    "cp_async_commit": lambda n: _by_lane_0("commit"),
    "cp_async_wait_all": lambda n: _wait_all,
    "cp_async_wait": lambda n: _by_lane_0("wait", n),
    "bar_sync": lambda n: _barrier(1),
    "bar_arrive": lambda n: _barrier(0),
    "mbarrier_init": lambda n: _of_lane_0("init"),
    "mbarrier_arrive_expect_tx": lambda n: _expect_and_arrive,
    "mbarrier_arrive": lambda n: lambda thread, args: add(thread, "arrive", 1, int(args[0])),
    "mbarrier_expect_tx": lambda n: lambda thread, args: add(thread, "expect", int(args[1]), int(args[0])),
    "mbarrier_wait": lambda n: _of_lane_0("phase"),
    "bulk_load": lambda n: lambda thread, args: add(thread, "bulk", int(args[2]), int(args[3])),
    "bulk_store": lambda n: lambda thread, args: add(thread, "bulk_store", int(args[2])),
    "bulk_commit": lambda n: _by_lane_0("bulk_commit"),
    "bulk_wait": lambda n: _by_lane_0("bulk_wait", n),
    "wgmma_commit": lambda n: _by_lane_0("wgmma_commit"),
    "wgmma_wait": lambda n: _by_lane_0("wgmma_wait", n),
}
"""By the beginning of an instruction's name; the number is that at its end. The first that fits counts."""


def bind_logged(declared: Instruction, arch: str) -> Callable[..., Any]:
    """What stands for an instruction in a logged launch: its note, then what it does."""
    plain = bind(declared, arch)
    if declared.name in ("read_clock", "read_globaltimer"):
        return lambda: _by_lane_0("clock")(getcurrent(), ())
    if declared.name == "mbarrier_try_wait":
        passed = _of_lane_0("phase")

        def tried(*args: Any) -> Any:
            answer = plain(*args)
            if answer:  # polls in vain have no length of their own
                passed(getcurrent(), args)
            return answer

        return tried
    note = _note_of(declared.name, declared.family)
    if note is None:
        return plain
    tensor = declared.family == "mma"

    def call(*args: Any) -> Any:
        thread: Any = getcurrent()
        number = note(thread, args)
        answer = plain(*args)
        if tensor and thread.lane == 0:
            args[0].event = number
        return answer

    return call
