"""How Numba sees a kernel: the function it compiles, the types of its arguments, the instructions it needs.

The launcher and the offline compiler share this page, so that what is measured without a GPU is what a launch compiles.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from flashnumba.machine import install, ranges
from flashnumba.machine.function import DeviceFunction, Kernel, exchange, named_values
from flashnumba.machine.instruction import Instruction, runs_on
from flashnumba.machine.numba import CAN_COMPILE, cuda, types

__all__ = ["check_instructions", "instructions_of", "launch_bounds", "numba_target", "numba_type", "signature_of"]

_LOCK = threading.RLock()
_DISPATCHERS: dict[tuple[DeviceFunction, bool], Any] = {}


def numba_target(kernel: Kernel) -> Callable[..., None]:
    """The plain function that ``cuda.jit`` takes: the kernel, its instructions and device functions in Numba's terms.

    An instruction becomes its intrinsic, a device function a Numba device function that is always inlined and has the
    kernel's ``fastmath``. Everything else (modules, constants, tuples) stays as it is. One kernel has one target.

    Raises:
        RuntimeError: numba-cuda is not installed.
        ValueError: a device function calls itself, directly or through others.
    """
    if not CAN_COMPILE:
        raise RuntimeError(
            "numba-cuda is not installed, so kernels run on the emulator only; "
            f"on Linux and Windows: {install.extra('cu13')}"
        )
    ranges.install()
    with _LOCK:
        if "numba" not in kernel.cache:
            kernel.cache["numba"] = exchange(kernel.function, _substitute(kernel.fastmath, ()))
        return kernel.cache["numba"]


def _substitute(fastmath: bool, callers: tuple[DeviceFunction, ...]) -> Callable[[Any], Any]:
    def substitute(value: Any) -> Any:
        if isinstance(value, Instruction):
            return value.intrinsic
        return _dispatcher(value, fastmath, callers) if isinstance(value, DeviceFunction) else value

    return substitute


def _dispatcher(function: DeviceFunction, fastmath: bool, callers: tuple[DeviceFunction, ...]) -> Any:
    """Numba's own device function. Fast arithmetic is a property of each operation, so it is asked for here too."""
    if function in callers:
        raise ValueError(f"{function.__name__} calls itself; device functions are inlined and cannot recurse")
    key = (function, fastmath)
    if key not in _DISPATCHERS:
        clone = exchange(function.function, _substitute(fastmath, (*callers, function)))
        _DISPATCHERS[key] = cuda.jit(device=True, forceinline=True, fastmath=fastmath)(clone)
    return _DISPATCHERS[key]


def launch_bounds(kernel: Kernel) -> tuple[int, ...]:
    """What a kernel promises the register allocator: threads a block, and blocks a multiprocessor if it names them."""
    return (kernel.threads, kernel.min_blocks) if kernel.min_blocks else (kernel.threads,)


def instructions_of(kernel: Kernel) -> dict[Instruction, str]:
    """Every instruction that a kernel or a device function below it names, with the chain of names that leads there.

    The answer is about names, not about what is executed: an instruction in a branch that a constant rules out counts.
    A factory that chooses between two ways should therefore choose a device function and put that into the closure.
    """
    found: dict[Instruction, str] = {}
    seen: set[DeviceFunction] = set()

    def walk(function: Callable[..., Any], chain: str) -> None:
        for _, value in named_values(function):
            if isinstance(value, Instruction):
                found.setdefault(value, f"{chain} > {value.name}")
            elif isinstance(value, DeviceFunction) and value not in seen:
                seen.add(value)
                walk(value.function, f"{chain} > {value.__name__}")

    walk(kernel.function, kernel.__name__)
    return found


def check_instructions(kernel: Kernel) -> None:
    """Refuse a kernel that names an instruction which its declared architecture lacks.

    Raises:
        ValueError: names the instruction, what it needs and how the kernel comes to it.
    """
    for needed, chain in instructions_of(kernel).items():
        if not runs_on(kernel.arch, needed.arch):
            raise ValueError(
                f"{needed.name} needs sm_{needed.arch}, but {kernel.__name__} is declared for sm_{kernel.arch} "
                f'({chain}); declare the kernel with arch="{needed.arch}", or leave the instruction out'
            )


def numba_type(dtype: Any) -> Any:
    """The Numba type of an array's elements: bfloat16 is handed over as uint16, FP8 as uint8.

    Raises:
        TypeError: kernels have no such type, or the bytes are swapped.
    """
    dtype = np.dtype(dtype)
    if dtype.name == "bfloat16":
        return types.uint16
    if dtype.name.startswith("float8_"):
        return types.uint8
    if not dtype.isnative:
        raise TypeError(f"dtype {dtype.str} is not in this machine's byte order; use {dtype.newbyteorder('=').str}")
    if dtype.kind not in "biuf" or dtype.name not in _ELEMENTS:
        raise TypeError(f"kernels have no dtype {dtype}; they take {', '.join(_ELEMENTS)}, bfloat16 and float8_*")
    return types.boolean if dtype.name == "bool" else getattr(types, dtype.name)


_ELEMENTS = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
)  # fmt: skip


def signature_of(args: Iterable[Any]) -> tuple[Any, ...]:
    """The Numba types of a kernel's arguments, from examples.

    An array (NumPy, or anything with ``__cuda_array_interface__``) is C-ordered or arbitrarily strided, never
    read-only: two compiled forms an argument at most. C order is worth having: Numba then addresses global memory as
    such and needs no product for the last axis, where strided elements are reached by generic loads. A NumPy scalar is
    of its own type; a Python bool, int or float is boolean, int64 or float32; a tensor map is its address, uint64.

    Raises:
        TypeError: an argument is of another kind; it names the argument and its type.
        ValueError: a Python integer does not fit 64 bits, or an array's elements are not aligned.
    """
    return tuple(_type_of(i, arg) for i, arg in enumerate(args))


def _type_of(index: int, arg: Any) -> Any:
    if hasattr(arg, "device_address"):
        return types.uint64
    if isinstance(arg, np.ndarray):
        if not arg.flags.aligned:
            raise ValueError(
                f"argument {index}: its elements are not aligned to {arg.dtype.itemsize} bytes; pass a copy"
            )
        return types.Array(numba_type(arg.dtype), arg.ndim, "C" if arg.flags.c_contiguous else "A")
    if hasattr(arg, "__cuda_array_interface__"):
        seen = arg.__cuda_array_interface__
        dtype, shape = np.dtype(seen["typestr"]), tuple(seen["shape"])
        return types.Array(numba_type(dtype), len(shape), _layout(shape, seen.get("strides"), dtype.itemsize))
    if isinstance(arg, (bool, np.bool_)):
        return types.boolean
    if isinstance(arg, np.generic):
        if arg.dtype.name not in _ELEMENTS:
            raise TypeError(f"argument {index}: a scalar {arg.dtype} cannot be passed; pass a float32 or its bits")
        return numba_type(arg.dtype)
    if isinstance(arg, int):
        if not -(2**63) <= arg < 2**63:
            raise ValueError(f"argument {index}: {arg} does not fit in int64; pass a numpy.uint64")
        return types.int64
    if isinstance(arg, float):
        return types.float32
    raise TypeError(f"argument {index}: a kernel takes arrays, numbers and tensor maps, not {type(arg).__name__}")


def _layout(shape: tuple[int, ...], strides: tuple[int, ...] | None, itemsize: int) -> str:
    """``C`` if the elements lie one after another; an axis of one element may have any stride."""
    expected = itemsize
    if strides is None or 0 in shape:
        return "C"
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != expected:
            return "A"
        expected *= extent
    return "C"
