"""Special registers: the clocks, a thread's place in its warp and its block's on the GPU.

On the emulator the clocks count nanoseconds of the host, so differences are positive but say nothing of a GPU.

Source: PTX ISA, "Special registers: %clock64, %globaltimer, %laneid, %smid".
"""

from __future__ import annotations

import time
from typing import Any

from flashnumba.machine.instruction import instruction

__all__ = ["lane_id", "read_clock", "read_globaltimer", "read_smid"]


@instruction("lane_id", "mov.u32 %result, %laneid;", returns="u32", effect="control")
def lane_id(thread: Any) -> int:
    """This thread's place in its warp, 0 to 31."""
    return thread.lane


@instruction("read_clock", "mov.u64 %result, %clock64;", returns="u64", effect="control")
def read_clock(thread: Any) -> int:
    """Cycles of this multiprocessor's clock; compare values of one block only."""
    return time.perf_counter_ns()


@instruction("read_globaltimer", "mov.u64 %result, %globaltimer;", returns="u64", effect="control")
def read_globaltimer(thread: Any) -> int:
    """Nanoseconds of the GPU's common clock; its resolution is 32 ns on recent ones, up to 1 us on others."""
    return time.perf_counter_ns()


@instruction("read_smid", "mov.u32 %result, %smid;", returns="u32", effect="control")
def read_smid(thread: Any) -> int:
    """Number of the multiprocessor that this block runs on; 0 on the emulator."""
    return 0
