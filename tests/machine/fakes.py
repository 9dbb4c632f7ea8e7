"""Stand-ins for the driver, for torch and for its CUDA tensors: what a launch does is seen without a GPU."""

from __future__ import annotations

import ctypes
import math
import struct
from types import SimpleNamespace

from flashnumba.machine import arrays

__all__ = ["Driver", "Tensor", "Torch"]


class Driver:
    """Stands for cuda.bindings.driver: remembers launches and reads the parameters through the pointers it is given.

    ``formats`` are those of the parameters' words, or a function from a kernel's handle to them.
    """

    def __init__(self, formats, count: int = 132, each: int = 2):
        self.formats, self.launches, self.context, self.pushed = formats, [], 7, []
        self.each, self.count, self.status = each, count, 0
        self.CUstreamCaptureStatus = SimpleNamespace(CU_STREAM_CAPTURE_STATUS_NONE=0)

    def _read(self, function, address):
        formats = self.formats if isinstance(self.formats, str) else self.formats(function)
        pointers = (ctypes.c_void_p * len(formats)).from_address(address)
        return tuple(
            struct.unpack("<" + f, ctypes.string_at(p, struct.calcsize("<" + f)))[0]
            for f, p in zip(formats, pointers, strict=True)
        )

    def cuLaunchKernel(self, function, *rest):
        *sizes, shared, stream, params, extra = rest
        assert extra == 0
        self.launches.append((function, tuple(sizes), shared, stream, self._read(function, params)))
        return (self.status,)

    def cuLaunchCooperativeKernel(self, function, *rest):
        return self.cuLaunchKernel(function, *rest, 0)

    # An early launch: the same, by way of a structure that names its fields.
    CUlaunchAttributeID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=6)

    @staticmethod
    def CUlaunchAttribute():
        return SimpleNamespace(id=0, value=SimpleNamespace(programmaticStreamSerializationAllowed=0))

    @staticmethod
    def CUlaunchConfig():
        return SimpleNamespace()

    @staticmethod
    def CUstream(handle):
        return handle

    def cuLaunchKernelEx(self, config, function, params, extra):
        assert config.numAttrs == 1 and config.attrs[0].value.programmaticStreamSerializationAllowed == 1
        grid, block = (tuple(getattr(config, f"{what}Dim{axis}") for axis in "XYZ") for what in ("grid", "block"))
        return self.cuLaunchKernel(function, *grid, *block, config.sharedMemBytes, config.hStream, params, extra)

    def cuCtxGetCurrent(self):
        return 0, self.context

    def cuCtxSetCurrent(self, context):
        self.context = context
        return (0,)

    def cuCtxPushCurrent(self, context):
        self.pushed.append(self.context)
        self.context = context
        return (0,)

    def cuCtxPopCurrent(self):
        self.context = self.pushed.pop()
        return (0, self.context)

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, function, threads, shared):
        return 0, self.each

    def cuStreamIsCapturing(self, stream):
        return 0, 1 if stream == 99 else 0, 0


class Tensor:
    """As much of a CUDA torch tensor as a launch looks at."""

    layout = "torch.strided"
    is_cuda, requires_grad, is_nested, negated = True, False, False, False

    def __init__(self, pointer, dtype, shape, stride=None, device=0):
        self.pointer, self.dtype, self.shape, self.ordinal = pointer, dtype, tuple(shape), device
        self._stride = arrays.packed(self.shape, 1) if stride is None else tuple(stride)
        self.device = SimpleNamespace(type="cuda", index=device)

    def data_ptr(self):
        if self.pointer is None:
            raise RuntimeError("Cannot access data pointer of Tensor that doesn't have storage")
        return self.pointer

    def is_neg(self):
        return self.negated

    def stride(self):
        return self._stride

    def get_device(self):
        return self.ordinal

    def dim(self):
        return len(self.shape)

    def numel(self):
        return math.prod(self.shape)

    def element_size(self):
        return arrays.kernel_dtype(str(self.dtype).removeprefix("torch."), "dtype").itemsize

    def is_contiguous(self):
        return arrays.is_contiguous(self.shape, self._stride, 1)

    def as_strided(self, shape, stride):
        return Tensor(self.pointer, self.dtype, shape, stride, self.ordinal)

    def view(self, dtype):
        return Tensor(self.pointer, dtype, self.shape, self._stride, self.ordinal)

    def __getitem__(self, axes):
        """``x[None, None]``: axes of length 1 in front."""
        assert all(axis is None for axis in axes)
        return self.as_strided((1,) * len(axes) + self.shape, (0,) * len(axes) + self._stride)


class Torch(SimpleNamespace):
    """Stands for the module torch: it hands out addresses, and its current stream on device d is 1000 + d."""

    def __init__(self):
        names = ("float16", "bfloat16", "float32", "int32", "int64", "uint64")
        super().__init__(Tensor=Tensor, **{name: f"torch.{name}" for name in names})
        self._C = SimpleNamespace(_cuda_getCurrentRawStream=lambda device: 1000 + device)
        self.made, self.zeroed, self.grad = [], [], True

    def is_grad_enabled(self):
        return self.grad

    def empty(self, shape, dtype, device):
        index = int(device[5:]) if isinstance(device, str) else device.index
        self.made.append(Tensor(0x100000 + 0x10000 * len(self.made), dtype, shape, device=index))
        return self.made[-1]

    def zeros(self, count, dtype, device):
        self.zeroed.append(self.empty((count,), dtype, device))
        return self.zeroed[-1]
