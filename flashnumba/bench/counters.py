"""Hardware counters of single launches, read by Nsight Compute and given names and units.

Nothing is averaged over launches. Counts of instructions, and of conflicts that addresses make, are exact; other
conflicts, times and shares of time differ a little from run to run. What is computed here: shares are of 1; conflicts
are also stated as a share of the wavefronts of their kind (a wavefront is one cycle of shared memory, a conflict one
more than the addresses of an instruction need, or one lost to somebody else); achieved warps are warps instead of a
share of the slots, and beside them stand those that :mod:`flashnumba.machine.occupancy` predicts.

Each stage and D has a process of its own (:mod:`flashnumba.bench.ncu` around :mod:`flashnumba.bench.profiled`), so that
several compile at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import Any

from flashnumba.bench.environment import environment as base_environment
from flashnumba.bench.ncu import COUNTS, LAUNCH, SHARES, STALLS, Launch, output, parse, version
from flashnumba.bench.profiled import PROBE
from flashnumba.bench.runner import Measured, Size
from flashnumba.machine.occupancy import budget, machine_of

__all__ = ["Target", "counted", "environment", "figures", "running", "targets"]

WHOLE = (*COUNTS, "registers", "shared", "blocks_by_registers", "blocks_by_shared", *LAUNCH)
"""Figures that are whole numbers."""


@dataclass(frozen=True)
class Target:
    """A stage at one size, for one process of ncu. Of gemm ``n`` alone counts."""

    stage: str
    n: int
    d: int = 0
    heads: int = 0

    @property
    def title(self) -> str:
        sizes = f"{self.n} x {self.n} x {self.n}" if self.stage == "gemm" else f"H {self.heads}, N {self.n}, D {self.d}"
        return f"{self.stage}, float16, {sizes}"

    @property
    def about(self) -> dict[str, Any]:
        """What the results say of the size."""
        if self.stage == "gemm":
            return {"stage": "gemm", "element": "float16", "m": self.n, "n": self.n, "k": self.n}
        sizes = {"batch": 1, "heads": self.heads, "n": self.n, "d": self.d, "causal": False}
        return {"stage": self.stage, "element": "float16", **sizes}

    @property
    def arguments(self) -> list[str]:
        """Of :mod:`flashnumba.bench.profiled`."""
        sizes = {"d": self.d, "n": self.n, "heads": self.heads}
        return [self.stage, *(part for name, size in sizes.items() if size for part in (f"--{name}", str(size)))]


def targets(stages: Sequence[str], dims: Sequence[int], n: int, heads: int, product: int) -> list[Target]:
    """Each stage at each D; gemm once, with ``product`` rows and columns."""
    found = [Target("gemm", product)] if "gemm" in stages else []
    return found + [Target(stage, n, d, heads) for stage in stages if stage != "gemm" for d in dims]


Report = Callable[[Size, Measured], None]


def ignored(size: Size, measured: Measured) -> None:
    """Nobody wants to know of a result as it is there."""


# -- the figures -------------------------------------------------------------------------------------------------------
def figures(launch: Launch) -> dict[str, float | None]:
    """What is recorded of a launch besides its time.

    Raises:
        ValueError: :mod:`flashnumba.machine.occupancy` does not know the GPU.
    """
    values = launch.values
    whole = {name: int(values[name]) for name in WHOLE}
    shared = whole["shared"] + whole.pop("shared_static")
    machine = machine_of(launch.arch)
    predicted = budget(
        machine, threads=whole["threads"], registers=whole["registers"], shared=shared, barriers=whole["barriers"]
    )
    slots = (machine.threads or 0) // machine.warp
    found: dict[str, float | None] = {**whole, "shared": shared}
    for kind in ("load", "store"):
        cycles = whole[f"{kind}_wavefronts"]
        found[f"{kind}_conflicts_share"] = whole[f"{kind}_conflicts"] / cycles if cycles else None
    found |= {name: round(values[name] / 100, 6) for name in SHARES}
    found |= {"warps": round(values["warps"] / 100 * slots, 4), "predicted_warps": predicted.warps}
    found |= {"predicted_blocks": predicted.blocks}
    return found | {f"stall_{why}": values[f"stall_{why}"] for why in STALLS}


def counted(target: Target, text: str, report: Report = ignored) -> Size:
    """The rows of one target from ncu's output, each reported.

    Raises:
        RuntimeError: as :func:`parse`.
    """
    size = Size(target.about)
    for launch in parse(text):
        measured = Measured(launch.kernel, launch.values["nanoseconds"] * 1e-9, figures(launch))
        size.measured.append(measured)
        report(size, measured)
    return size


# -- the runs ----------------------------------------------------------------------------------------------------------
@contextmanager
def running(targets: Sequence[Target], jobs: int, seconds: float) -> Iterator[list[Callable[..., Size]]]:
    """ncu on all targets, at most ``jobs`` of them at the same time, for so many seconds in all: each compiles its
    kernels alone, and ncu lets one process after the other have the counters. What still runs at the end is ended.

    Yields:
        for each target what waits for it and gives its :class:`~flashnumba.bench.runner.Size`; ``report`` as of
        :func:`counted`, ``until`` is for others.
    """
    end, stop = time.monotonic() + seconds, Event()

    def size(target: Target, future: Future[str], *, report: Report = ignored, until: float = 0.0) -> Size:
        return counted(target, future.result(), report)

    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(output, target.arguments, end, stop) for target in targets]
        try:
            yield [partial(size, target, future) for target, future in zip(targets, futures, strict=True)]
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)


def environment(seconds: float = 120.0) -> dict[str, Any]:
    """What the figures depend on. All metrics are read once from a kernel of torch's, which takes some seconds.

    Raises:
        RuntimeError: no GPU, torch or ncu; the counters may not be read; a metric is missing.
    """
    told = version()
    found = base_environment("counters")
    parse(output([PROBE], time.monotonic() + seconds))
    return found | {"ncu": told, "clocks": "as they are"}
