"""Record what a GPU (sm_90a) gives for the programs around asynchronous instructions.

    python -m tests.machine.conformance.record_programs tests/machine/conformance/programs.npz
"""

from __future__ import annotations

import argparse
import sys
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
    args = [TensorMap(p, a.box, swizzle=a.swizzle) if isinstance(a, Boxed) else p for a, p in zip(given, placed, strict=True)]
    launch(program.kernel(), 1, program.threads, tuple(args), shared=program.shared, machine=machine, **options)
    back = [p.copy_to_host() if hasattr(p, "copy_to_host") else p for p in placed]
    return [program.kept(back[-1]), *(b for a, b in zip(given[1:], back[1:], strict=True) if isinstance(a, Boxed))]


def to_device(array: np.ndarray) -> Any:
    """A copy in device memory."""
    return cuda.to_device(array)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    options = parser.parse_args()
    held, failed = {}, 0
    for name, program in PROGRAMS.items():
        try:
            for i, array in enumerate(run(program, "cuda")):
                held[f"{name}.{i}"] = array
        except Exception as error:
            failed += 1
            print(f"FAILED {name}: {type(error).__name__}: {error}", file=sys.stderr)
    np.savez_compressed(options.path, **held)
    print(f"{len(PROGRAMS) - failed} of {len(PROGRAMS)} programs recorded, {options.path.stat().st_size} bytes")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
