"""The CUDA driver as far as launching needs it: is there a GPU, what can it do, and calls that fail with a sentence.

Everything goes through cuda.bindings, which numba-cuda brings; without it, or without a driver, every question still
has an answer and :func:`unavailable` says why there is no GPU.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

__all__ = [
    "GpuError",
    "available",
    "current_device",
    "device_arch",
    "device_count",
    "device_name",
    "max_shared",
    "multiprocessors",
    "unavailable",
]


class GpuError(RuntimeError):
    """The driver refused a call."""


@cache
def bindings() -> Any:
    """cuda.bindings.driver; ImportError without it."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ImportError("cuda.bindings is not installed (it comes with numba-cuda)") from error
    return driver


def call(function: Any, *args: Any) -> Any:
    """Call a driver function and return what it returns after its status.

    Raises:
        GpuError: names the function, the error and the driver's description of it.
    """
    status, *values = function(*args)
    if status:
        driver = bindings()
        _, text = driver.cuGetErrorString(status)
        said = text.decode() if isinstance(text, bytes) else str(text)
        raise GpuError(f"{function.__name__} failed: {getattr(status, 'name', status)} ({said})")
    return values[0] if len(values) == 1 else tuple(values)


@cache
def unavailable() -> str:
    """Why no kernel can run on a GPU here; empty when one can."""
    from flashnumba.machine.numba import CAN_COMPILE

    if not CAN_COMPILE:
        return "numba-cuda is not installed"
    try:
        driver = bindings()
        status, *_ = driver.cuInit(0)
    except ImportError as error:
        return str(error)
    except Exception as error:  # cuda.pathfinder has several ways to say that libcuda is missing
        if type(error).__name__ == "DynamicLibNotFoundError":
            return "no CUDA driver is installed"
        return f"the CUDA driver does not load ({type(error).__name__}: {error})"
    if status:
        return f"the CUDA driver does not start ({getattr(status, 'name', status)})"
    if not call(driver.cuDeviceGetCount):
        return "the CUDA driver finds no GPU"
    return ""


def available() -> bool:
    """Whether a kernel can run on a GPU here; :func:`unavailable` says why not."""
    return not unavailable()


def require() -> None:
    """Raise RuntimeError with the reason if there is no GPU."""
    if reason := unavailable():
        raise RuntimeError(f"no GPU to launch on: {reason}; use machine='emulator', and see `flashnumba doctor`")


def device_count() -> int:
    """CUDA devices that this process sees; 0 without a driver."""
    return 0 if unavailable() else call(bindings().cuDeviceGetCount)


def _attribute(name: str, device: int | None) -> int:
    require()
    return _cached_attribute(name, current_device() if device is None else device)


@cache
def _cached_attribute(name: str, device: int) -> int:
    driver = bindings()
    handle = call(driver.cuDeviceGet, device)
    return call(driver.cuDeviceGetAttribute, getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), handle)


def device_arch(device: int | None = None) -> str:
    """Compute capability that kernels are compiled for, e.g. ``"80"`` or, with the arch-specific set, ``"90a"``.

    ``NUMBA_FORCE_CUDA_CC=8.0`` makes Numba compile for an older one, and this function say so.
    """
    if forced := os.environ.get("NUMBA_FORCE_CUDA_CC"):
        return forced.replace(".", "")
    major, minor = (_attribute(f"COMPUTE_CAPABILITY_{part}", device) for part in ("MAJOR", "MINOR"))
    return f"{major}{minor}a" if major >= 9 else f"{major}{minor}"


def multiprocessors(device: int | None = None) -> int:
    """Streaming multiprocessors of a device."""
    return _attribute("MULTIPROCESSOR_COUNT", device)


def max_shared(device: int | None = None) -> int:
    """Bytes of dynamic and static shared memory that one block may ask for (227 KB on sm_90)."""
    return _attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", device)


def clock_rate(device: int | None = None) -> int:
    """The fastest clock of a device's multiprocessors, kHz; what it runs at under load is less."""
    return _attribute("CLOCK_RATE", device)


def device_name(device: int | None = None) -> str:
    """Marketing name of a device."""
    require()
    driver = bindings()
    handle = call(driver.cuDeviceGet, current_device() if device is None else device)
    return call(driver.cuDeviceGetName, 128, handle).split(b"\0")[0].decode()


def driver_version() -> str:
    """The CUDA version the driver supports, e.g. ``"13.0"``."""
    number = call(bindings().cuDriverGetVersion)
    return f"{number // 1000}.{number % 1000 // 10}"


def current_device() -> int:
    """Device of the calling thread's current context; 0 where it has none yet."""
    require()
    driver = bindings()
    status, device = driver.cuCtxGetDevice()
    return 0 if status else int(device)


def pointer_device(pointer: int) -> int:
    """Device on which a device address lies."""
    require()
    driver = bindings()
    ordinal = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return int(call(driver.cuPointerGetAttribute, ordinal, pointer))


_contexts: dict[int, Any] = {}
_contexts_lock = threading.Lock()


def primary_context(device: int) -> Any:
    """A device's primary context: the one that torch, CuPy, JAX and numba use too. It is kept to the end."""
    context = _contexts.get(device)
    if context is None:
        require()
        driver = bindings()
        with _contexts_lock:
            if device not in _contexts:
                _contexts[device] = call(driver.cuDevicePrimaryCtxRetain, call(driver.cuDeviceGet, device))
            context = _contexts[device]
    return context


@contextmanager
def on_device(device: int) -> Iterator[None]:
    """Make a device's primary context current for a while."""
    driver = bindings()
    call(driver.cuCtxPushCurrent, primary_context(device))
    try:
        yield
    finally:
        call(driver.cuCtxPopCurrent)


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Let this thread allocate and copy beside a graph capture that is under way, without becoming part of it."""
    driver = bindings()
    modes = driver.CUstreamCaptureMode
    previous = call(driver.cuThreadExchangeStreamCaptureMode, modes.CU_STREAM_CAPTURE_MODE_RELAXED)
    try:
        yield
    finally:
        call(driver.cuThreadExchangeStreamCaptureMode, previous)
