"""Named faults: what the emulator stops with, and where in the kernel it was found."""

from __future__ import annotations

import linecache
import types as pytypes
from collections.abc import Iterable
from pathlib import Path

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

    @property
    def name(self) -> str:
        return type(self).__name__

    def report(self) -> str:
        """The whole message: name, place, source line, explanation."""
        place = []
        if self.block is not None:
            place.append(f"block {self.block}")
        if self.threads:
            place.append(f"thread{'s' if len(self.threads) > 1 else ''} {ranges(self.threads)}")
        lines = [f"{self.name}: {self.message}"]
        if place:
            lines.append(f"  in {', '.join(place)}")
        lines += [f"  at {describe(p)}" for p in self.where[:4]]
        return "\n".join(lines)


class Race(Fault):
    meaning = "two threads touch the same shared memory, at least one writes, and no barrier orders them"


class UninitialisedRead(Fault):
    meaning = "shared or local memory is read before anything was written there"


class OutOfBounds(Fault):
    meaning = "an address or index lies outside its array"


class Misaligned(Fault):
    meaning = "an address is not a multiple of the access size"


class ReadOnly(Fault):
    meaning = "a store into an array that may only be read"


class DivergentBarrier(Fault):
    meaning = "not all threads of the block reach the same syncthreads()"


class BarrierMismatch(Fault):
    meaning = "a named barrier is used with different or impossible thread counts"


class Deadlock(Fault):
    meaning = "no thread can go on"


class DivergentCollective(Fault):
    meaning = "the lanes that must execute an instruction together do not"


class ReadInFlight(Fault):
    meaning = "shared memory is read while an asynchronous copy into it has not been waited for"


class OverwriteInFlight(Fault):
    meaning = "shared memory is overwritten while a copy or a wgmma that uses it is in flight"


class AccumulatorInFlight(Fault):
    meaning = "registers of a wgmma are touched before its wait"


class MissingFence(Fault):
    meaning = "registers changed before a wgmma without wgmma_fence()"


class MissingProxyFence(Fault):
    meaning = "the asynchronous proxy reads what ordinary stores wrote, without fence_proxy_async()"


class MbarrierMisuse(Fault):
    meaning = "an mbarrier is used uninitialised, over-arrived, or as ordinary memory"


class UnfinishedCopy(Fault):
    meaning = "a thread exits while its asynchronous copies are in flight"


class UnsupportedInstruction(Fault):
    meaning = "the architecture lacks the instruction"


class LaunchLimit(Fault):
    meaning = "threads or shared memory beyond the architecture's limits"


class RegisterPool(Fault):
    meaning = "setmaxnreg asks for what it must not"


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
