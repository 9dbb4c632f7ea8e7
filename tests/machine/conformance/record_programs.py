"""Record what a GPU (sm_90a) gives for the programs around asynchronous instructions.

python -m tests.machine.conformance.record_programs tests/machine/conformance/programs.npz
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from flashnumba.machine.launcher import launch
from flashnumba.machine.numba import cuda
from flashnumba.machine.tensor_map import TensorMap
from tests.machine.conformance.programs import PROGRAMS, Boxed, Program

__all__ = ["run"]


def run(program: Program, machine: str, **options: Any) -> list[np.ndarray]:
    """What the program leaves in its output, and in the tensor it copies to."""
    given = program.make()
    arrays = [a.array if isinstance(a, Boxed) else a for a in given]
    placed = [to_device(a) if machine == "cuda" and isinstance(a, np.ndarray) else a for a in arrays]
    args = [
        TensorMap(p, a.box, swizzle=a.swizzle) if isinstance(a, Boxed) else p
        for a, p in zip(given, placed, strict=True)
    ]
    launch(program.kernel(), 1, program.threads, tuple(args), shared=program.shared, machine=machine, **options)
    back = [p.copy_to_host() if hasattr(p, "copy_to_host") else p for p in placed]
    return [program.kept(back[-1]), *(b for a, b in zip(given[1:], back[1:], strict=True) if isinstance(a, Boxed))]


def to_device(array: np.ndarray) -> Any:
    """A copy in device memory."""
    return cuda.to_device(array)


def record(name: str, folder: Path) -> str:
    """Run one program in a process of its own, since a fault costs it the device; why it failed, or nothing."""
    module = "tests.machine.conformance.record_programs"
    command = [sys.executable, "-m", module, str(folder / f"{name}.npz"), "--one", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no message"])[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--one", metavar="NAME", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        arrays = {f"{options.one}.{i}": a for i, a in enumerate(run(PROGRAMS[options.one], "cuda"))}
        np.savez(options.path, **arrays)
        return 0
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(12) as pool:
        folder = Path(place)
        answers = pool.map(lambda n: record(n, folder), PROGRAMS)
        failed = {n: why for n, why in zip(PROGRAMS, answers, strict=True) if why}
        held: dict[str, np.ndarray] = {}
        for name in PROGRAMS.keys() - failed.keys():
            with np.load(folder / f"{name}.npz") as arrays:
                held.update(arrays)
    np.savez_compressed(options.path, **dict(sorted(held.items())))
    for name, why in failed.items():
        print(f"FAILED {name}: {why}", file=sys.stderr)
    print(f"{len(PROGRAMS) - len(failed)} of {len(PROGRAMS)} programs recorded, {options.path.stat().st_size} bytes")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
