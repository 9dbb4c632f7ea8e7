"""Arrays of every kind as a kernel sees them: where they start, their element, shape and strides.

NumPy, torch (CPU and CUDA), CuPy, JAX and numba arrays, and whatever offers ``__cuda_array_interface__`` or DLPack, are
described without a copy. Elements that Numba has no type for travel as unsigned integers of their width: bfloat16 as
uint16, the 8-bit floats as uint8. No array library is imported here that the caller has not imported already.

Strides are in bytes and may have any value: zero (a broadcast axis) and negative (NumPy and CuPy; torch has none) too.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["Described", "describe", "element_dtype", "empty_like_kind", "host_view", "is_array", "is_contiguous"]

_PLAIN = (
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
)
_STORED = {
    "bfloat16": np.dtype(np.uint16),
    "float8_e4m3fn": np.dtype(np.uint8),
    "float8_e5m2": np.dtype(np.uint8),
    "float8_e8m0fnu": np.dtype(np.uint8),
}
KERNEL_DTYPE = {name: np.dtype(name) for name in _PLAIN} | _STORED
"""Element name -> the dtype a kernel sees."""


@dataclass(frozen=True, slots=True)
class Described:
    """An array as a kernel sees it.

    Attributes:
        pointer: address of element ``[0, ..., 0]``.
        dtype: the kernel's element type (uint16 for bfloat16, uint8 for 8-bit floats).
        shape, strides: in elements and in bytes.
        kind: numpy, torch-cpu, torch-cuda, cupy, jax, numba or dlpack.
        device: ordinal of the CUDA device it lies on; None in host memory.
        readonly: whether its owner forbids writing.
        element: the owner's element name, e.g. ``bfloat16``.
        stream: a stream its owner asks to be followed, or None.
        place: the device of a JAX array in host memory, as JAX names it.
    """

    pointer: int
    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    kind: str
    device: int | None
    readonly: bool
    element: str
    stream: int | None = None
    place: Any = None

    @property
    def contiguous(self) -> bool:
        """Whether it is packed in C order."""
        return is_contiguous(self.shape, self.strides, self.dtype.itemsize)

    @property
    def span(self) -> tuple[int, int]:
        """First address and one past the last that an element occupies; equal for an empty array."""
        if 0 in self.shape:
            return self.pointer, self.pointer
        reach = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
        low = self.pointer + sum(r for r in reach if r < 0)
        return low, self.pointer + sum(r for r in reach if r > 0) + self.dtype.itemsize


def is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Whether bytes ``strides`` are those of a packed C array; axes of length 1 and empty arrays do not matter."""
    if 0 in shape:
        return True
    expected = itemsize
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n != 1 and stride != expected:
            return False
        expected *= n
    return True


def packed(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Byte strides of a packed C array."""
    strides, step = [], itemsize
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def library_of(value: Any) -> str:
    """The array library that ``value``'s type belongs to (torch, cupy, jax, numba, numpy), or ``""``."""
    if isinstance(value, np.ndarray):
        return "numpy"
    for name, type_name in (("torch", "Tensor"), ("cupy", "ndarray"), ("jax", "Array")):
        known = getattr(sys.modules.get(name), type_name, None)
        if isinstance(known, type) and isinstance(value, known):
            return name
    return "numba" if type(value).__module__.startswith(("numba.cuda", "numba_cuda")) else ""


def is_array(value: Any) -> bool:
    """Whether ``value`` is something :func:`describe` knows; NumPy scalars are not."""
    if isinstance(value, np.generic | int | float | complex | str | bytes):
        return False
    known = isinstance(value, Described) or library_of(value)
    return bool(known) or exports(value, "__cuda_array_interface__") or exports(value, "__dlpack__")


def exports(value: Any, protocol: str) -> bool:
    """Whether ``value`` is an object that offers a protocol; the class of such objects offers none."""
    names = (protocol, "__dlpack_device__") if protocol == "__dlpack__" else (protocol,)
    return not isinstance(value, type) and all(getattr(value, name, None) is not None for name in names)


def kernel_dtype(element: str, name: str) -> np.dtype:
    try:
        return KERNEL_DTYPE[element]
    except KeyError:
        known = ", ".join(KERNEL_DTYPE)
        raise TypeError(f"{name} has elements of type {element}; a kernel takes {known}") from None


def element_dtype(element: str) -> np.dtype:
    """The NumPy dtype of an element name, ml_dtypes' included."""
    return np.dtype(getattr(ml_dtypes, element)) if element in _STORED else np.dtype(element)


def describe(array: Any, name: str = "array") -> Described:
    """Say where an array lies and how, without copying it and without waiting for it.

    Args:
        array: NumPy, torch, CuPy, JAX or numba array, any ``__cuda_array_interface__`` or DLPack exporter, or what
            this function returned.
        name: how error messages call it.

    Raises:
        TypeError: not an array, or of an element type that kernels do not take.
        ValueError: an array that no kernel could read: sparse, sharded, or on a device that is neither CPU nor CUDA.
    """
    if isinstance(array, Described):
        return array
    library = library_of(array)
    if library == "torch":
        return _describe_torch(array, name)
    if library == "numpy":
        return _describe_numpy(array, name, "numpy")
    if library == "cupy":
        element = array.dtype.name
        dtype = kernel_dtype(element, name)
        return Described(
            int(array.data.ptr),
            dtype,
            tuple(array.shape),
            tuple(array.strides),
            "cupy",
            int(array.device.id),
            False,
            element,
        )
    if library == "jax":
        return _describe_jax(array, name)
    if exports(array, "__cuda_array_interface__"):
        return _describe_interface(array, name, library or "dlpack")
    if exports(array, "__dlpack__"):
        return _describe_dlpack(array, name)
    what = f"the class {array.__name__}" if isinstance(array, type) else f"a {type(array).__name__}"
    raise TypeError(
        f"{name} is {what}; it must be a NumPy, torch, CuPy, JAX or numba array, "
        "or offer __cuda_array_interface__ or __dlpack__"
    )


def _describe_torch(array: Any, name: str) -> Described:
    element = str(array.dtype).removeprefix("torch.")
    dtype = kernel_dtype(element, name)
    if array.is_nested:
        raise ValueError(f"{name} is a nested tensor; it must be an ordinary one, e.g. {name}.to_padded_tensor(0.0)")
    if str(array.layout) != "torch.strided":
        raise ValueError(f"{name} has layout {array.layout}; it must be a strided tensor, e.g. {name}.to_dense()")
    where = array.device
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} is on {where}; it must be on cpu or cuda")
    if array.is_neg():  # what lies in memory has the other sign
        raise ValueError(f"{name} is a view that torch negates when it reads it; pass {name}.resolve_neg()")
    try:
        pointer = array.data_ptr()
    except RuntimeError:
        pointer = None
    if pointer is None or (pointer == 0 and array.numel()):
        raise TypeError(
            f"{name} is a tensor without memory, as torch.func (vmap, grad, jvp) and tracers make them; it must be one "
            "with values"
        )
    on_gpu = where.type == "cuda"
    size = dtype.itemsize
    return Described(
        pointer, dtype, tuple(array.shape), tuple(s * size for s in array.stride()),
        "torch-cuda" if on_gpu else "torch-cpu", array.get_device() if on_gpu else None, False, element,
    )  # fmt: skip


def _describe_numpy(array: np.ndarray, name: str, kind: str) -> Described:
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array; a kernel sees no masks, so fill it first, e.g. {name}.filled(...)")
    element = array.dtype.name
    dtype = kernel_dtype(element, name)
    if not array.dtype.isnative:
        raise TypeError(f"{name} is byte-swapped ({array.dtype.str}); it must be in the machine's byte order")
    if not array.flags.aligned:
        raise ValueError(f"{name} is not aligned to the {dtype.itemsize} bytes of {element}; copy it")
    return Described(
        array.ctypes.data, dtype, array.shape, array.strides, kind, None, not array.flags.writeable, element
    )


def _describe_jax(array: Any, name: str) -> Described:
    element = array.dtype.name
    dtype = kernel_dtype(element, name)
    if isinstance(array, sys.modules["jax"].core.Tracer):
        raise TypeError(f"{name} is traced by JAX; it must be an array with values, outside of jit, grad and vmap")
    if array.is_deleted():
        raise ValueError(f"{name} has been deleted, or donated to a function of JAX; it must still have its memory")
    devices = list(array.devices())
    if len(devices) != 1:
        raise ValueError(
            f"{name} is spread over {len(devices)} devices; it must lie on one, e.g. jax.device_put({name}, d)"
        )
    (device,) = devices
    if device.platform == "cpu":
        return replace(_describe_numpy(np.asarray(array), name, "jax"), place=device)
    if device.platform not in ("gpu", "cuda"):
        raise ValueError(f"{name} is on {device}; it must be on a CPU or a CUDA device")
    shape = tuple(array.shape)
    # JAX arrays are dense and in C order unless a custom layout was asked for.
    pointer = int(array.unsafe_buffer_pointer())
    return Described(
        pointer, dtype, shape, packed(shape, dtype.itemsize), "jax", int(device.local_hardware_id), True, element
    )


def _describe_interface(array: Any, name: str, kind: str) -> Described:
    from flashnumba.machine import gpu

    interface = array.__cuda_array_interface__
    element = np.dtype(interface["typestr"]).name
    dtype = kernel_dtype(element, name)
    if interface.get("mask") is not None:
        raise ValueError(f"{name} has a mask; it must be a plain array")
    pointer, readonly = interface["data"]
    shape = tuple(interface["shape"])
    strides = tuple(interface.get("strides") or packed(shape, dtype.itemsize))
    device = gpu.pointer_device(pointer) if pointer else gpu.current_device()
    return Described(
        int(pointer or 0), dtype, shape, strides, kind, device, bool(readonly), element, interface.get("stream")
    )


def _describe_dlpack(array: Any, name: str) -> Described:
    kind, ordinal = array.__dlpack_device__()
    if int(kind) in (1, 3):  # kDLCPU, kDLCUDAHost
        return _describe_numpy(_from_dlpack(array, name), name, "dlpack")
    if int(kind) not in (2, 13):  # kDLCUDA, kDLCUDAManaged
        raise ValueError(f"{name} is on DLPack device {int(kind)}; it must be on a CPU (1) or a CUDA device (2)")
    from cuda.core.utils import StridedMemoryView

    view = StridedMemoryView.from_dlpack(array, stream_ptr=-1)
    element = np.dtype(view.dtype).name
    dtype = kernel_dtype(element, name)
    shape = tuple(view.shape)
    strides = packed(shape, dtype.itemsize) if view.strides is None else tuple(s * dtype.itemsize for s in view.strides)
    return Described(int(view.ptr), dtype, shape, strides, "dlpack", int(ordinal), bool(view.readonly), element)


def _from_dlpack(array: Any, name: str) -> np.ndarray:
    try:
        return np.from_dlpack(array)
    except (RuntimeError, BufferError) as error:
        raise TypeError(
            f"{name} is a {type(array).__name__} that NumPy cannot take through DLPack ({error}); "
            "pass its library's own array"
        ) from None


def _stored(array: np.ndarray) -> np.ndarray:
    stored = _STORED.get(array.dtype.name)
    return array if stored is None else array.view(stored)


def host_view(array: Any, name: str = "array") -> np.ndarray:
    """A NumPy view of an array in host memory with the kernel's dtype; it shares the memory, so writes are seen.

    Raises:
        ValueError: the array is on a GPU.
        TypeError, ValueError: as :func:`describe`.
    """
    library = library_of(array)
    if library == "numpy":
        describe(array, name)
        return _stored(array.view(np.ndarray))
    found = describe(array, name)
    if found.device is not None:
        raise ValueError(f"{name} is on cuda:{found.device}; here it must be in host memory")
    if library == "torch":
        torch = sys.modules["torch"]
        plain = array.detach()
        if found.element in _STORED:
            plain = plain.view(torch.int16 if found.dtype.itemsize == 2 else torch.uint8)
        return plain.numpy().view(found.dtype)
    return _stored(np.asarray(array) if library == "jax" else _from_dlpack(array, name))


def empty_like_kind(like: Any, shape: tuple[int, ...], element: str | None = None) -> Any:
    """An uninitialised, packed array of the same library and device as ``like``, for a kernel to write.

    Args:
        like: an array :func:`describe` knows.
        shape: of the new array.
        element: name of its elements, e.g. ``"float32"`` or ``"bfloat16"``; as ``like``'s when None.

    Returns:
        An array of ``like``'s kind, except where its library lends no writable memory: for a JAX array or a plain
        DLPack exporter on a CPU a NumPy array, for an exporter on a GPU a numba array. A JAX array on a GPU is a fresh
        one that nothing else has seen yet, so a kernel may fill it.
    """
    found = describe(like, "like")
    element = element or found.element
    kernel_dtype(element, "the new array")
    shape = tuple(shape)
    if found.kind.startswith("torch"):
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, element), device=like.device)
    if found.kind == "cupy":
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(found.device):
            return cupy.empty(shape, element_dtype(element))
    if found.kind == "jax" and found.device is not None:
        jax = sys.modules["jax"]
        return jax.device_put(jax.numpy.empty(shape, element_dtype(element)), *like.devices()).block_until_ready()
    if found.device is None:
        return np.empty(shape, element_dtype(element))
    from flashnumba.machine.numba import cuda

    with cuda.gpus[found.device]:
        return cuda.device_array(shape, KERNEL_DTYPE[element])
