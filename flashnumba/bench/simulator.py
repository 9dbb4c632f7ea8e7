"""The emulator against numba's own CUDA simulator: the same kernels, one run each, 128 threads and 200 barriers.

Two kernels: one that does little but wait, which compares the machinery, and one that hands a number on through shared
memory between its barriers, where the emulator looks for races at every access and numba's simulator does not look.

Numba's simulator is chosen by an environment variable before numba is imported, so it runs in a process of its own; its
time there is that of the launch alone, without the imports. It runs a thread of the operating system for each GPU
thread. Of the emulator's milliseconds the least of five launches counts: whatever else the computer does only adds.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass

import numpy as np

from flashnumba.machine.emulator import launch
from flashnumba.machine.function import Kernel, kernel
from flashnumba.machine.numba import cuda, float32

__all__ = ["BARRIERS", "KERNELS", "THREADS", "Race", "race"]

THREADS, BARRIERS = 128, 200


@kernel(threads=THREADS)
def wait(out):
    """A barrier, two hundred times; one exchange with the neighbour around them."""
    tile = cuda.shared.array(THREADS, float32)
    t = cuda.threadIdx.x
    tile[t] = float32(t)
    for _ in range(BARRIERS):
        cuda.syncthreads()  # all have written
    out[t] = tile[(t + 1) % THREADS]


@kernel(threads=THREADS)
def hand_on(out):
    """Each thread hands its number to its neighbour, a hundred times: two barriers a step."""
    tile = cuda.shared.array(THREADS, float32)
    t = cuda.threadIdx.x
    tile[t] = float32(t)
    for _ in range(BARRIERS // 2):
        cuda.syncthreads()  # all have written
        x = tile[(t + 1) % THREADS]
        cuda.syncthreads()  # all have read
        tile[t] = x
    out[t] = tile[t]


KERNELS: tuple[Kernel, ...] = (wait, hand_on)


@dataclass(frozen=True)
class Race:
    """Seconds of one launch: the emulator with all checks, without them, and numba's simulator."""

    kernel: str
    checked: float
    unchecked: float
    simulator: float

    @property
    def ratio(self) -> float:
        """How many times faster the emulator is, with its checks on."""
        return self.simulator / self.checked

    def __str__(self) -> str:
        return (
            f"{self.kernel}, {THREADS} threads, {BARRIERS} barriers: emulator {self.checked * 1e3:.1f} ms "
            f"({self.unchecked * 1e3:.1f} ms unchecked), numba's simulator {self.simulator:.2f} s: "
            f"{self.ratio:.0f} times as long"
        )


def simulated(raced: Kernel) -> str:
    """A program that runs a kernel's source on numba's simulator and prints its seconds and its result."""
    source = textwrap.dedent(inspect.getsource(raced.function)).split("\n", 1)[1]
    return f"""
import json, time, warnings
warnings.simplefilter("ignore")
import numpy as np
from numba import cuda, float32
THREADS, BARRIERS = {THREADS}, {BARRIERS}
{source}
out = np.zeros(THREADS, np.float32)
start = time.perf_counter()
cuda.jit({raced.__name__})[1, THREADS](out)
print(json.dumps([time.perf_counter() - start, out.tolist()]))
"""


def race(raced: Kernel) -> Race:
    """Run one of :data:`KERNELS` on both and compare what they computed.

    Raises:
        RuntimeError: numba's simulator failed, or the results differ.
    """
    ours = []
    for checks in (True, False):
        times = []
        for _ in range(5):
            out = np.zeros(THREADS, np.float32)
            start = time.perf_counter()
            launch(raced, 1, THREADS, (out,), checks=checks)
            times.append(time.perf_counter() - start)
        ours.append(min(times))
    done = subprocess.run(
        [sys.executable, "-c", simulated(raced)], env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"numba's simulator failed: {' '.join(done.stderr.strip().splitlines()[-1:])}")
    seconds, theirs = json.loads(done.stdout.splitlines()[-1])
    if theirs != out.tolist():
        raise RuntimeError("numba's simulator and the emulator computed different things")
    return Race(raced.__name__, *ours, seconds)
