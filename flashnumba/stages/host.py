"""What every stage's host function does first: refuse what it cannot serve, choose a machine, follow a stream."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from flashnumba.machine import gpu
from flashnumba.machine.arrays import Described, describe, host_view
from flashnumba.machine.streams import current_stream, stream_handle
from flashnumba.stages.again import has_tangent

__all__ = ["EMULATED_ARCH", "MACHINES", "check_machine", "finish", "library_stream", "machine_of", "overlaps_itself",
           "packed_copy", "real_numbers", "refuse_gradients", "write_back", "zeros"]  # fmt: skip

EMULATED_ARCH = "90a"
MACHINES = ("auto", "cuda", "emulator")


def check_machine(machine: str) -> None:
    """ValueError if there is no such machine."""
    if not isinstance(machine, str) or machine not in MACHINES:
        raise ValueError(f"machine is {machine!r}; it must be one of {', '.join(MACHINES)}")


def refuse_gradients(**arrays: Any) -> None:
    """ValueError for a torch tensor whose gradient, or tangent in forward mode, would be lost."""
    torch = sys.modules.get("torch")
    for name, array in arrays.items():
        if getattr(array, "requires_grad", False) and torch.is_grad_enabled():
            raise ValueError(f"{name} requires a gradient, and this function records none; pass {name}.detach()")
        if has_tangent(array):
            raise ValueError(
                f"{name} has a tangent, and this function has none to return; pass "
                f"torch.autograd.forward_ad.unpack_dual({name}).primal"
            )


def real_numbers(value: Any, name: str) -> np.ndarray:
    """A number in host memory, or an array or list of them, as float32: infinite or 0 where float32 has no such number.

    Raises:
        TypeError: no real numbers; bools are none.
    """
    try:
        given = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{name} is of type {type(value).__name__}; it must be a number or an array of them ({error})"
        ) from None
    if given.dtype.kind not in "fiu" and not _is_short_float(given.dtype):
        if given.ndim == 0:
            what = f"is of type {type(value).__name__}" if given.dtype.kind == "O" else f"is {value!r}"
        else:
            what = f"has elements of type {given.dtype.name}"
        raise TypeError(f"{name} {what}; it must be a number or an array of them")
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return given.astype(np.float32)


def _is_short_float(dtype: np.dtype) -> bool:
    """Whether a dtype is one of ml_dtypes' floats."""
    return dtype.type.__module__ == "ml_dtypes" and "float" in dtype.name


def machine_of(machine: str, found: Described, name: str) -> tuple[str, str]:
    """(machine, architecture) that ``machine`` means for an array.

    Raises:
        ValueError: the emulator, for an array on a GPU.
        RuntimeError: a GPU is asked for and there is none.
    """
    if machine == "emulator" and found.device is not None:
        raise ValueError(
            f"{name} is on cuda:{found.device} and machine is 'emulator', which takes arrays in host memory"
        )
    if machine == "auto":
        machine = "cuda" if found.device is not None or gpu.available() else "emulator"
    if machine == "emulator":
        return machine, EMULATED_ARCH
    gpu.require()
    return machine, gpu.device_arch(found.device)


@contextmanager
def library_stream(found: Described, stream: Any) -> Iterator[None]:
    """Send the array library's own work to ``stream`` too; None leaves its current stream."""
    if stream is None or found.kind not in ("torch-cuda", "cupy"):
        yield
        return
    handle = stream_handle(stream)
    if current_stream(found.kind, found.device or 0) == handle:
        yield
    elif found.kind == "torch-cuda":
        torch = sys.modules["torch"]
        with torch.cuda.stream(torch.cuda.ExternalStream(handle, f"cuda:{found.device}")):
            yield
    else:
        with sys.modules["cupy"].cuda.ExternalStream(handle, found.device):
            yield


def zeros(words: int, found: Described) -> Any:
    """``words`` uint64 zeros beside an array, zeroed on its library's current stream; a graph capture records that."""
    if found.device is None:
        return np.zeros(words, np.uint64)
    if found.kind == "torch-cuda":
        torch = sys.modules["torch"]
        return torch.zeros(words, dtype=torch.int64, device=f"cuda:{found.device}").view(torch.uint64)
    if found.kind == "cupy":
        return sys.modules["cupy"].zeros(words, np.uint64)
    from flashnumba.machine.numba import cuda

    with cuda.gpus[found.device]:
        return cuda.to_device(np.zeros(words, np.uint64))


def finish(result: Any, found: Described, stream: Any, *, given: bool = False) -> Any:
    """What the caller gets of a result made beside ``found``: JAX's own kind, on the same device, and nothing pending
    that JAX cannot see.

    Args:
        given: the caller brought the result's memory, and gets that.
    """
    if found.kind != "jax":
        return result
    if found.device is None:
        if given:
            return result
        jax = sys.modules["jax"]
        with jax.default_device(found.place):  # by itself JAX would take its default, a GPU if there is one
            return jax.numpy.asarray(result)
    # JAX's streams cannot be followed, so nothing may be pending when it gets the result.
    gpu.call(gpu.bindings().cuStreamSynchronize, 0 if stream is None else stream_handle(stream))
    return result


def overlaps_itself(array: Described) -> bool:
    """Whether two elements may share bytes: an axis steps by less than the smaller axes reach."""
    if 0 in array.shape:
        return False
    reach = array.dtype.itemsize
    axes = sorted((abs(step), n) for n, step in zip(array.shape, array.strides, strict=True) if n > 1)
    for step, n in axes:
        if step < reach:
            return True
        reach += step * (n - 1)
    return False


def packed_copy(array: Any, found: Described, name: str, why: str) -> tuple[Any, Described]:
    """A copy in C order by the array's own library, on its current stream, and where it lies.

    Args:
        why: the array is not used as it is, for the message.

    Raises:
        ValueError: the library lends no way to copy.
    """
    if found.device is None:
        host = host_view(array, name).copy(order="C")
        host = host.view(array.dtype) if isinstance(array, np.ndarray) else host
        return host, replace(describe(host, name), element=found.element, kind=found.kind, place=found.place)
    if found.kind == "torch-cuda":
        array = array.contiguous()
    elif found.kind == "cupy":
        array = sys.modules["cupy"].ascontiguousarray(array)
    else:
        raise ValueError(
            f"{name} has strides {found.strides} for shape {found.shape}: {why}, and its library lends no way to copy "
            "it; pass a contiguous array"
        )
    return array, describe(array, name)


def write_back(out: Any, result: Any) -> None:
    """Copy a packed result into ``out``, which is of its shape, by their library."""
    found = describe(out, "out")
    if found.device is None:
        host_view(out, "out")[...] = host_view(result, "out")
    elif found.kind == "torch-cuda":
        out.copy_(result)
    elif found.kind == "cupy":
        out[...] = result
    else:
        raise ValueError(f"out has strides {found.strides} for shape {found.shape}; pass a contiguous array")
