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
from tests.machine.conformance.programs import PROGRAMS, Program

__all__ = ["run"]


def run(program: Program, machine: str, **options: Any) -> list[np.ndarray]:
    """What the program leaves in its output, and in the tensor it copies to."""
    args = program.make()
    launch(program.kernel(), 1, program.threads, args, shared=program.shared, machine=machine, **options)
    maps = [a.array for a in args if hasattr(a, "swizzle")]
    return [program.kept(args[-1]), *maps[1:]]


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
