"""The one room that imports Numba's CUDA target; everything else takes its names from here.

Two packages provide ``numba.cuda``: numba-cuda (Linux and Windows; kernels compile and run) and the target that still
ships inside numba (everywhere, macOS included; enough for a kernel's source to import and run on the emulator).
A later compiler with the same kernel language would be exchanged here.
"""

from __future__ import annotations

from importlib.util import find_spec

from numba import cuda

__all__ = [
    "CAN_COMPILE",
    "boolean",
    "cuda",
    "float16",
    "float32",
    "float64",
    "int8",
    "int16",
    "int32",
    "int64",
    "intrinsic",
    "ir",
    "types",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
]

CAN_COMPILE = find_spec("numba_cuda") is not None
"""Whether numba-cuda is installed, so that kernels can be compiled (a GPU is not needed for that)."""

if CAN_COMPILE:
    from numba.cuda import types
    from numba.cuda.extending import intrinsic
else:
    from numba import types
    from numba.extending import intrinsic

from llvmlite import ir

boolean = types.boolean
float16, float32, float64 = types.float16, types.float32, types.float64
int8, int16, int32, int64 = types.int8, types.int16, types.int32, types.int64
uint8, uint16, uint32, uint64 = types.uint8, types.uint16, types.uint32, types.uint64
