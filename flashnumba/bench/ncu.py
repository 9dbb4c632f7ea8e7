"""Nsight Compute (``ncu``): which metrics are asked of it, how it runs around a target, and what its table says.

``ncu`` launches each kernel of :mod:`flashnumba.bench.profiled` several times over, as few counters can be read at
once. Clocks are left as they are, and caches are emptied before each launch.

Names of metrics: NVIDIA, "Nsight Compute, Kernel Profiling Guide", sections "Metrics Guide" and "Metrics Reference".
"""

from __future__ import annotations

import csv
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Event

from flashnumba.bench.profiled import ORDER

__all__ = ["COUNTS", "LAUNCH", "METRICS", "SHARES", "STALLS", "Launch", "output", "parse", "version"]

_LSU = "l1tex__data_{}_mem_shared{}.sum"
_SHARE = "{}.avg.pct_of_peak_sustained_active"
_WAVEFRONTS, _CONFLICTS = "pipe_lsu_wavefronts", "bank_conflicts_pipe_lsu"
STALLS = (
    "wait", "short_scoreboard", "long_scoreboard", "barrier", "math_pipe_throttle", "mio_throttle",
)  # fmt: skip
"""Reasons for which a warp waits: a fixed latency; shared memory and special functions; global memory, and the wait for
copies; a barrier; the tensor or arithmetic unit is busy; the queue to shared memory is full."""
COUNTS = {
    "instructions": "smsp__inst_executed.sum",
    "ldmatrix": "smsp__inst_executed_op_ldsm.sum",
    "shared_stores": "smsp__inst_executed_op_shared_st.sum",
    "wavefronts": _LSU.format(_WAVEFRONTS, ""),
    "load_wavefronts": _LSU.format(_WAVEFRONTS, "_op_ld"),
    "store_wavefronts": _LSU.format(_WAVEFRONTS, "_op_st"),
    "conflicts": _LSU.format(_CONFLICTS, ""),
    "load_conflicts": _LSU.format(_CONFLICTS, "_op_ld"),
    "store_conflicts": _LSU.format(_CONFLICTS, "_op_st"),
}
SHARES = {
    "tensor": _SHARE.format("sm__pipe_tensor_op_hmma_cycles_active"),
    "issue": _SHARE.format("smsp__issue_active"),
    "warps": _SHARE.format("sm__warps_active"),
}
"""Per cent of what could be."""
METRICS = {
    "nanoseconds": "gpu__time_duration.sum",
    **COUNTS,
    **SHARES,
    **{f"stall_{why}": f"smsp__average_warps_issue_stalled_{why}_per_issue_active.ratio" for why in STALLS},
    "registers": "launch__registers_per_thread",
    "shared": "launch__shared_mem_per_block_dynamic",
    "blocks_by_registers": "launch__occupancy_limit_registers",
    "blocks_by_shared": "launch__occupancy_limit_shared_mem",
}
"""Name here: ncu's name. A stall is in warps that wait for this reason, on average, whenever one issues."""
LAUNCH = {
    "blocks": "launch__grid_size",
    "threads": "launch__block_size",
    "multiprocessors": "launch__sm_count",
    "shared_static": "launch__shared_mem_per_block_static",
    "barriers": "launch__barrier_count",
}
"""What ncu tells of a launch besides, without being asked."""
UNITS = {"nanoseconds": ("ns", "nsecond"), "shared": ("byte/block",), "shared_static": ("byte/block",)}
ARCH = "CC"
"""ncu's column for the compute capability."""
FORBIDDEN = "ERR_NVGPUCTRPERM"
ADVICE = (
    f"the driver lets nobody but an administrator read the GPU's counters ({FORBIDDEN}): run as root, or have the "
    "administrator set the option NVreg_RestrictProfilingToAdminUsers=0 of the kernel module nvidia (a line 'options "
    "nvidia NVreg_RestrictProfilingToAdminUsers=0' in a file of /etc/modprobe.d, then reboot); a container needs "
    "--cap-add=SYS_ADMIN besides"
)


# -- running it --------------------------------------------------------------------------------------------------------
def version() -> str:
    """Of the ncu in PATH.

    Raises:
        RuntimeError: there is none.
    """
    if shutil.which("ncu") is None:
        raise RuntimeError(
            "the counters bench needs Nsight Compute, but there is no `ncu` in PATH; it comes with the CUDA toolkit, "
            "as bin/ncu, and alone as NVIDIA Nsight Compute"
        )
    told = subprocess.run(["ncu", "--version"], capture_output=True, text=True, check=False).stdout
    line = next((line for line in told.splitlines() if line.startswith("Version")), "unknown")
    return line.removeprefix("Version ").split(" (")[0]


def command(arguments: Sequence[str]) -> list[str]:
    """ncu around the target."""
    how = ["--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw"]
    metrics = ["--metrics", ",".join(METRICS.values())]
    return ["ncu", *how, *metrics, sys.executable, "-m", "flashnumba.bench.profiled", *arguments]


def output(arguments: Sequence[str], end: float, stop: Event | None = None) -> str:
    """What ncu prints on standard output for a target.

    Args:
        arguments: the target's.
        end: ``time.monotonic()`` at which it is ended if it still runs.
        stop: set by somebody else for the same.

    Raises:
        RuntimeError: it takes too long, may not read counters, does not know a metric, or ends with an error.
    """
    process = subprocess.Popen(
        command(arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while True:
        try:
            out, err = process.communicate(timeout=0.2)
            break
        except subprocess.TimeoutExpired:
            if time.monotonic() > end or (stop and stop.is_set()):
                _end(process)
                raise RuntimeError("ncu was ended, as the time was over") from None
    if FORBIDDEN in out + err:
        raise RuntimeError(ADVICE)
    if process.returncode or "==ERROR==" in out + err:
        lines = [line for line in (out + "\n" + err).splitlines() if line.strip()]
        said = [line for line in lines if line.startswith("==ERROR==")] + lines[-3:]
        raise RuntimeError(f"ncu ended with {process.returncode}: {' '.join(dict.fromkeys(said))}")
    return out


def _end(process: subprocess.Popen[str]) -> None:
    """End ncu and what it runs, which are a process group of their own where there are such."""
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.communicate()


# -- what it prints ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Launch:
    """What ncu says of one launch: ``values`` by the names of :data:`METRICS` and :data:`LAUNCH`."""

    stage: str
    kernel: str
    arch: str
    values: dict[str, float]


def parse(text: str) -> list[Launch]:
    """The launches in ncu's output.

    Raises:
        RuntimeError: a metric is missing, has no number or another unit, or launches and names do not match.
    """
    lines = text.splitlines()
    order = [line.split(maxsplit=2)[1:] for line in lines if line.startswith(f"{ORDER} ")]
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    table = list(csv.reader(line for line in lines[start:] if line.startswith('"')))
    heads, units, *rows = table if len(table) > 2 else ([], [])
    if not order or len(rows) != len(order):
        raise RuntimeError(f"ncu's table has {len(rows)} launches, and the target named {len(order)}")
    wanted = METRICS | LAUNCH
    if missing := [name for name in (*wanted.values(), ARCH) if name not in heads]:
        raise RuntimeError(f"this ncu, or this GPU, has no metric {', '.join(missing)}")
    columns = {ours: heads.index(name) for ours, name in wanted.items()}
    for ours, right in UNITS.items():
        if units[columns[ours]] not in right:
            raise RuntimeError(f"ncu states {wanted[ours]} in {units[columns[ours]]!r}; it must be {right[0]}")
    found = []
    for (stage, kernel), row in zip(order, rows, strict=True):
        values = {ours: _number(wanted[ours], row[at]) for ours, at in columns.items()}
        arch = row[heads.index(ARCH)].replace(".", "")
        found.append(Launch(stage, kernel, arch, values))
    return found


def _number(metric: str, cell: str) -> float:
    try:
        return float(cell.replace(",", ""))
    except ValueError:
        raise RuntimeError(f"metric {metric} has no value on this GPU, but {cell!r}") from None
