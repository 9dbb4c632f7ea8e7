"""What things cost in a replay: a stated model of a multiprocessor, in cycles.

The model is coarse on purpose: a handful of queues whose rates are on data sheets, and a few latencies. It shows what
can overlap with what and which unit is the busiest; it does not predict a kernel's time.

Rates. A multiprocessor has four partitions, each with a tensor core and one instruction a cycle. FP16 peak by NVIDIA's
data sheets: A100 312 TFLOP/s = 108 multiprocessors x 1.41 GHz x 4 x 256 multiply-adds, so that an m16n8k16 (2048) takes
8 cycles; H100 SXM 989 TFLOP/s = 132 x 1.83 GHz x 4 x 512. On Hopper only wgmma reaches that; of mma.sync 62 % of it is
taken, 6.5 cycles an m16n8k16 (microbenchmarks such as Luo et al., arXiv 2402.13499). Arithmetic by the CUDA programming
guide's table of throughputs: float32 64 a cycle and multiprocessor on sm_80, 128 on sm_90; comparisons, conversions and
integers 64; special functions (ex2) 16; a warp has 32 of each in one of four partitions. Shared memory: 32 banks of 4
bytes a cycle.

Latencies. About 33 cycles from an mma to its result (as above, and Sun et al., arXiv 2206.02874). Of memory, copies and
barriers there is no one number: what stands here is of the size of published microbenchmarks without load (some 200 to
300 cycles for the second-level cache, 450 to 650 for device memory), and is an assumption. So is the rate at which one
multiprocessor copies: between its share of device memory (13 bytes a cycle on an A100, 20 on an H200) and the 64 of its
port.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

__all__ = ["COSTS", "Costs", "costs_of"]


@dataclass(frozen=True)
class Costs:
    """Cycles and rates of one multiprocessor.

    Attributes:
        arch: compute capability.
        ghz: clock, to turn cycles into microseconds.
        multiprocessors: of the GPU.
        mma_rate, wgmma_rate: multiply-adds a cycle and partition, by mma.sync and by wgmma.
        mma_latency: from the issue of an mma to its result, at least.
        fp32, other, special: cycles for which a warp's instruction occupies its unit in a partition: float32
            arithmetic; comparisons and conversions; exponentials and the like.
        shared_rate: bytes a cycle of shared memory.
        copy_rate: bytes a cycle between a multiprocessor and the memory beyond it.
        copy_latency: from when a copy has had its turn to when it has landed, also of plain loads.
        barrier: from the last arrival at a barrier or mbarrier to when those that wait go on.
    """

    arch: str
    ghz: float
    multiprocessors: int
    mma_rate: float
    wgmma_rate: float
    mma_latency: float
    fp32: float
    other: float
    special: float
    shared_rate: float
    copy_rate: float
    copy_latency: float
    barrier: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "arch" and not 0 < value < 1e9:
                raise ValueError(f"{field.name} is {value!r}; a cost must be a positive number")


COSTS: Mapping[str, Costs] = {
    "80": Costs(
        "80", ghz=1.41, multiprocessors=108, mma_rate=256, wgmma_rate=256, mma_latency=33, fp32=2, other=2, special=8,
        shared_rate=128, copy_rate=32, copy_latency=600, barrier=25,
    ),
    "90": Costs(
        "90", ghz=1.83, multiprocessors=132, mma_rate=0.62 * 512, wgmma_rate=512, mma_latency=33, fp32=1, other=2,
        special=8, shared_rate=128, copy_rate=32, copy_latency=600, barrier=25,
    ),
}  # fmt: skip
"""By compute capability."""


def costs_of(arch: str) -> Costs:
    """The costs of an architecture, e.g. ``"80"`` or ``"90a"``.

    Raises:
        ValueError: there are none for it.
    """
    found = COSTS.get(arch.rstrip("a"))
    if found is None:
        raise ValueError(f"arch is {arch!r}; there are costs for {', '.join(COSTS)}")
    return found
