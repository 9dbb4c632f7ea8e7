"""Named faults: what the emulator stops with, and where in the kernel it was found."""

from __future__ import annotations

import linecache
import types as pytypes
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = [
    "AccumulatorInFlight", "BarrierMismatch", "Deadlock", "DivergentBarrier", "DivergentCollective", "Fault",
    "LaunchLimit", "MbarrierMisuse", "Misaligned", "MissingFence", "MissingProxyFence", "OutOfBounds",
    "OverwriteInFlight", "Position", "Race", "ReadInFlight", "ReadOnly", "RegisterPool", "UnfinishedCopy",
    "UninitialisedRead", "UnsupportedInstruction", "ranges", "stack",
]  # fmt: skip

Position = tuple[pytypes.CodeType, int]
_MACHINE = str(Path(__file__).resolve().parent.parent)


class Fault(RuntimeError):
    """A kernel did what a GPU would not have shown, or would have hung on.

    Attributes:
        block: index of the block, or None.
        threads: linear thread ids that are involved.
        where: call chain in the kernel's source, innermost first.
    """

    meaning = "a fault in a kernel"
    mend = ""

    def __init__(
        self,
        message: str,
        block: tuple[int, int, int] | None = None,
        threads: Iterable[int] = (),
        where: list[Position] | None = None,
    ):
        self.message, self.block, self.threads = message, block, tuple(threads)
        self.where = where or []
        super().__init__(self.report())

    def __reduce__(self) -> Any:
        return _rebuilt, (type(self), self.message, self.block, self.threads, str(self))

    @property
    def name(self) -> str:
        return type(self).__name__

    def report(self) -> str:
        """The whole message: name, explanation, place, source line, and what usually mends it."""
        place = []
        if self.block is not None:
            place.append(f"block {self.block}")
        if self.threads:
            place.append(f"thread{'s' if len(self.threads) > 1 else ''} {ranges(self.threads)}")
        lines = [f"{self.name}: {self.message}"]
        if place:
            lines.append(f"  in {', '.join(place)}")
        lines += [f"  at {describe(p)}" for p in self.where[:4]]
        if self.mend:
            lines.append(f"  to mend it: {self.mend}")
        return "\n".join(lines)


def _rebuilt(kind: type[Fault], message: str, block: Any, threads: tuple[int, ...], report: str) -> Fault:
    """A fault that was pickled: places in the source are kept as text only."""
    fault = kind(message, block, threads)
    fault.args = (report,)
    return fault


class Race(Fault):
    meaning = "two threads touch the same shared memory, at least one writes, and no barrier orders them"
    mend = (
        "put the barrier that all of these threads pass between the two accesses: syncthreads(), or "
        "syncwarp() within one warp"
    )


class UninitialisedRead(Fault):
    meaning = "shared or local memory is read before anything was written there"
    mend = (
        "write every element that is read, tails and padding included, or put the missing store or copy before the read"
    )


class OutOfBounds(Fault):
    meaning = "an address or index lies outside its array"
    mend = "compare the index with the shape named here; mask the tail, or make the array as large as the tile"


class Misaligned(Fault):
    meaning = "an address is not a multiple of the access size"
    mend = (
        "a 16-byte access needs an address that is a multiple of 16: align the array, pad the row, or move "
        "fewer bytes at once"
    )


class ReadOnly(Fault):
    meaning = "a store into an array that may only be read"
    mend = "pass an array that may be written, or write the result elsewhere"


class DivergentBarrier(Fault):
    meaning = "not all threads of the block reach the same syncthreads()"
    mend = (
        "let every thread of the block reach the same syncthreads(): no return before it, no condition "
        "around it that differs among threads"
    )


class BarrierMismatch(Fault):
    meaning = "a named barrier is used with different or impossible thread counts"
    mend = (
        "give every bar_sync and bar_arrive on one barrier the same count: all threads that come to it, waiting or not"
    )


class Deadlock(Fault):
    meaning = "no thread can go on"
    mend = (
        "look at each group above: who was to let it go on, and why does that thread wait or return without doing so?"
    )


class DivergentCollective(Fault):
    meaning = "the lanes that must execute an instruction together do not"
    mend = (
        "let all lanes of the warp (or warpgroup) execute the instruction: no condition around it that "
        "differs among them"
    )


class ReadInFlight(Fault):
    meaning = "shared memory is read while an asynchronous copy into it has not been waited for"
    mend = (
        "wait for the copy before the read (cp_async_wait and a barrier, or mbarrier_wait); in a ring, "
        "release a slot only after its last read"
    )


class OverwriteInFlight(Fault):
    meaning = "shared memory is overwritten while a copy or a wgmma that uses it is in flight"
    mend = (
        "wait until the copy or the wgmma is done with the bytes, and let the next writer know by a barrier, "
        "before they are written again"
    )


class AccumulatorInFlight(Fault):
    meaning = "registers of a wgmma are touched before its wait"
    mend = "wgmma_commit(), then wgmma_wait(0), before the registers are read, written or reused"


class MissingFence(Fault):
    meaning = "registers changed before a wgmma without wgmma_fence()"
    mend = (
        "call wgmma_fence() after the last ordinary access to the registers and before the first wgmma that uses them"
    )


class MissingProxyFence(Fault):
    meaning = "the asynchronous proxy reads what ordinary stores wrote, without fence_proxy_async()"
    mend = (
        "call fence_proxy_async() (after mbarrier_init: fence_mbarrier_init()) after the stores and before the barrier"
    )


class MbarrierMisuse(Fault):
    meaning = "an mbarrier is used uninitialised, over-arrived, or as ordinary memory"
    mend = (
        "one thread initialises the mbarrier once, for the number of arrivals a phase really gets, fences, "
        "and a barrier lets the others in; nothing else touches its 8 bytes"
    )


class UnfinishedCopy(Fault):
    meaning = "a thread exits while its asynchronous copies are in flight"
    mend = "wait for every copy before the kernel returns"


class EarlyAccess(Fault):
    meaning = "an early kernel touches global memory while the kernel ahead of it may still write"
    mend = "every thread calls grid_dependency_wait before its first access to global memory"


class UnsupportedInstruction(Fault):
    meaning = "the architecture lacks the instruction"
    mend = "launch on an architecture that has the instruction, or write a path for the older one"


class LaunchLimit(Fault, ValueError):
    meaning = "threads or shared memory beyond the architecture's limits"
    mend = (
        "launch fewer threads a block, make the tiles smaller, or use dynamic shared memory where more than "
        "48 KB are needed"
    )


class RegisterPool(Fault):
    meaning = "setmaxnreg asks for what it must not"
    mend = "setmaxnreg_dec only lowers and setmaxnreg_inc only raises what the launch gave each thread"


def stack(frame: pytypes.FrameType | None) -> list[Position]:
    """Source positions of a frame and its callers that lie in kernel code, innermost first."""
    found: list[Position] = []
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_MACHINE):
            found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return found


def describe(position: Position) -> str:
    """``file.py:12 in step: x = s[i]``"""
    code, line = position
    text = linecache.getline(code.co_filename, line).strip()
    return f"{Path(code.co_filename).name}:{line} in {code.co_name}" + (f": {text}" if text else "")


def ranges(numbers: Iterable[int]) -> str:
    """``0-31, 64`` for the numbers 0..31 and 64."""
    out: list[list[int]] = []
    for n in sorted(set(numbers)):
        if out and n == out[-1][1] + 1:
            out[-1][1] = n
        else:
            out.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in out)
