"""Launching a kernel: prepared once, then many times, on a GPU or on the emulator.

::

    launch(scale, grid=128, block=256, args=(x, y, np.float32(2)))          # on what there is

    ready = prepare(scale, (x, y, np.float32(2)), machine="cuda")           # compile and lay out now
    for _ in range(1000):
        ready(128, 256, (x, y, np.float32(2)))                              # a few microseconds each

A launch on a GPU returns at once, goes to the caller's current torch or CuPy stream, allocates nothing and can be
captured in a CUDA graph. It waits in two cases only: arrays in host memory are copied in and out, and with JAX
arrays the stream is synchronised, because JAX's own streams cannot be followed.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from flashnumba.machine import gpu
from flashnumba.machine.arrays import describe, host_view, is_array, library_of
from flashnumba.machine.function import Kernel
from flashnumba.machine.instruction import runs_on
from flashnumba.machine.layout import dimensions
from flashnumba.machine.numba import cuda, types
from flashnumba.machine.prepared import Prepared
from flashnumba.machine.tensor_map import TensorMap

__all__ = ["Emulated", "Prepared", "TensorMap", "launch", "machine_for", "prepare"]

MACHINES = ("auto", "cuda", "emulator")
_LOCK = threading.RLock()
_FREE_SHARED = 48 * 1024
"""Bytes of shared memory a block gets without asking."""


class Emulated:
    """A kernel on the emulator, with the call of :class:`Prepared`. It has finished when the call returns."""

    machine = "emulator"

    def __init__(self, kernel: Kernel, shared: int, emulate: Mapping[str, Any] | None) -> None:
        self.kernel, self.shared, self.emulate = kernel, shared, dict(emulate or {})

    def __call__(self, grid: Any, block: Any, args: tuple[Any, ...], stream: Any = None) -> Any:
        """Run and return the emulator's report (None for an empty grid). Arrays lie in host memory; ``stream`` has no
        meaning here."""
        from flashnumba.machine.emulator import launch as run

        empty = 0 in dimensions(grid, "grid")
        dimensions(block, "block")
        code = self.kernel.function.__code__
        names = code.co_varnames[: code.co_argcount]
        if len(args) != len(names):
            raise TypeError(
                f"{self.kernel.__name__} takes {len(names)} arguments ({', '.join(names)}), not {len(args)}"
            )
        if empty:
            return None
        return run(self.kernel, grid, block, tuple(map(_emulated, args, names)), shared=self.shared, **self.emulate)


def _emulated(arg: Any, name: str) -> Any:
    """What the emulator's kernel gets: NumPy views, and a float rounded as the GPU's parameter is."""
    if is_array(arg):
        return host_view(arg, name)
    if isinstance(arg, TensorMap) and arg.device is not None:
        raise ValueError(f"{name} maps an array on cuda:{arg.device}; the emulator takes arrays in host memory")
    return np.float32(arg) if isinstance(arg, float) and not isinstance(arg, np.generic) else arg


def machine_for(kernel: Kernel, args: tuple[Any, ...] = ()) -> str:
    """What ``machine="auto"`` means: the GPU for arrays that are there, and for others if it can run the kernel."""
    for arg in args:
        if arg.__class__ is TensorMap:
            if arg.device is not None:
                return "cuda"
        elif library_of(arg) == "torch":
            if arg.is_cuda:
                return "cuda"
        elif is_array(arg) and describe(arg).device is not None:
            return "cuda"
    return "cuda" if gpu.available() and runs_on(gpu.device_arch(), kernel.arch) else "emulator"


def launch(
    kernel: Kernel, grid: Any, block: Any, args: tuple[Any, ...], *, shared: int = 0, machine: str = "auto",
    stream: Any = None, emulate: Mapping[str, Any] | None = None,
) -> Any:  # fmt: skip
    """Run a kernel.

    Args:
        kernel: declared with :func:`flashnumba.machine.function.kernel`.
        grid, block: blocks a grid and threads a block, an int or up to three. A grid with a zero runs nothing.
        args: arrays of any kind (:mod:`~flashnumba.machine.arrays`), numbers, :class:`TensorMap`. A Python float is a
            float32, a Python int an int64; a NumPy scalar is of its own type.
        shared: bytes of dynamic shared memory.
        machine: ``"cuda"``, ``"emulator"``, or ``"auto"``: see :func:`machine_for`.
        stream: handle or stream object; None follows the current stream of the arguments' library.
        emulate: options for the emulator alone: ``arch``, ``checks``, ``seed``.

    Returns:
        On the emulator its report of what was moved; on a GPU None.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it and what would be right.
        RuntimeError: no GPU, the driver refused (``GpuError``), or the emulator found a ``Fault``.
    """
    if _chosen(kernel, args, machine) == "emulator":
        return Emulated(kernel, shared, emulate)(grid, block, args, stream)
    key = ("launch", shared, *map(_key, args))
    ready = kernel.cache.get(key)
    if ready is None:
        ready = kernel.cache[key] = prepare(kernel, args, shared=shared, machine="cuda")
    return ready(grid, block, args, stream)


def _chosen(kernel: Kernel, args: tuple[Any, ...], machine: str) -> str:
    if not isinstance(kernel, Kernel):
        raise TypeError(
            f"kernel is a {type(kernel).__name__}; it must be declared with flashnumba.machine.function.kernel"
        )
    if machine not in MACHINES:
        raise ValueError(f"machine is {machine!r}; it must be one of {', '.join(MACHINES)}")
    return machine_for(kernel, args) if machine == "auto" else machine


def _key(arg: Any) -> Any:
    """What of an argument decides the compiled form and the device."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(arg, torch.Tensor):
        return (arg.dtype, arg.dim(), arg.is_contiguous(), arg.get_device())
    if arg.__class__ is TensorMap:
        return ("map", arg.device)
    if is_array(arg):
        found = describe(arg)
        return (found.dtype, len(found.shape), found.contiguous, found.device)
    return arg.__class__


def prepare(
    kernel: Kernel, args_or_signature: tuple[Any, ...], *, shared: int = 0, machine: str = "auto",
    device: int | None = None, emulate: Mapping[str, Any] | None = None,
) -> Prepared | Emulated:  # fmt: skip
    """Compile a kernel for the types of some arguments and get it ready for cheap launches.

    Args:
        kernel, shared, machine, emulate: as :func:`launch`.
        args_or_signature: example arguments, or their Numba types (``float32[::1]`` for packed, ``float32[:]`` for any
            strides).
        device: CUDA device; by default that of the arrays, or the current one.

    Returns:
        A callable ``(grid, block, args, stream=None)``.

    Raises:
        ValueError: the GPU lacks what the kernel needs, ``shared`` is more than a block can have, or arrays lie apart.
        TypeError: an argument that no kernel takes.
        RuntimeError: no GPU.
    """
    typed = all(isinstance(a, types.Type) for a in args_or_signature) and len(args_or_signature) > 0
    args = () if typed else tuple(args_or_signature)
    if _chosen(kernel, args, machine) == "emulator":
        return Emulated(kernel, shared, emulate)
    gpu.require()
    found = _device_of(kernel, args)
    device = device if device is not None else gpu.current_device() if found is None else found
    arch = gpu.device_arch(device)
    if not runs_on(arch, kernel.arch):
        raise ValueError(
            f"{kernel.__name__} needs sm_{kernel.arch}; cuda:{device} ({gpu.device_name(device)}) is sm_{arch}. "
            "It runs with machine='emulator'"
        )
    if not 0 <= shared <= gpu.max_shared(device):
        raise ValueError(f"shared is {shared} bytes; a block on cuda:{device} can have 0 to {gpu.max_shared(device)}")
    signature = tuple(args_or_signature) if typed else signature_for(kernel, args)
    return Prepared(kernel, signature, device, shared, _function(kernel, signature, device, shared))


def signature_for(kernel: Kernel, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Numba types of example arguments: packed arrays as C, others as strided, scalars as ``launch`` says."""
    from flashnumba.machine.target import numba_type, signature_of

    names = kernel.function.__code__.co_varnames
    arrays = {i: describe(arg, names[i]) for i, arg in enumerate(args) if is_array(arg)}
    plain = [np.uint64(0) if i in arrays or isinstance(arg, TensorMap) else arg for i, arg in enumerate(args)]
    wanted = list(signature_of(plain))
    for i, found in arrays.items():
        wanted[i] = types.Array(numba_type(found.dtype), len(found.shape), "C" if found.contiguous else "A")
    return tuple(wanted)


def _device_of(kernel: Kernel, args: tuple[Any, ...]) -> int | None:
    names = kernel.function.__code__.co_varnames
    places: dict[int | None, str] = {}
    for name, arg in zip(names, args, strict=False):
        if isinstance(arg, TensorMap) or is_array(arg):
            places.setdefault(arg.device if isinstance(arg, TensorMap) else describe(arg, name).device, name)
    if len(places) > 1:
        said = ", ".join(f"{name} {'in host memory' if d is None else f'on cuda:{d}'}" for d, name in places.items())
        raise ValueError(f"{kernel.__name__} takes all its arrays in one place; here {said}")
    return next(iter(places), None)


def _function(kernel: Kernel, signature: tuple[Any, ...], device: int, shared: int) -> Any:
    """The driver's function handle: compiled by Numba at the first request, with ``shared`` bytes granted."""
    from flashnumba.machine.target import check_instructions, launch_bounds, numba_target

    driver = gpu.bindings()
    key = ("function", signature, device)
    with _LOCK:
        if key not in kernel.cache:
            check_instructions(kernel)
            with cuda.gpus[device]:
                jitted = cuda.jit(numba_target(kernel), fastmath=kernel.fastmath, launch_bounds=launch_bounds(kernel))
                compiled = jitted.compile(signature)
                compiled.bind()
                handle = compiled._codelibrary.get_cufunc().handle
            # Numba's typing leaves exceptions in cycles, whose frames hold what all callers had in hand: arrays on the
            # device, and nodes of PyTorch's graph that remember their stream and spoil a later capture.
            gc.collect()
            with gpu.on_device(device):
                loaded = driver.CUkernel(int(handle))
                function = gpu.call(driver.cuKernelGetFunction, loaded)
            kernel.cache[key] = [function, _FREE_SHARED, compiled]
        function, granted, _ = entry = kernel.cache[key]
        # The limit belongs to the function, which several preparations share: it only ever grows.
        if shared > granted:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            with gpu.on_device(device):
                gpu.call(driver.cuFuncSetAttribute, function, attribute, shared)
            entry[1] = shared
        return function
