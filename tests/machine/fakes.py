"""Stand-ins for the driver and for CUDA tensors: what a launch does is seen without a GPU."""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace

from flashnumba.machine import arrays

__all__ = ["Driver", "Tensor"]


class Driver:
    """Stands for cuda.bindings.driver: remembers launches and reads the parameters through the pointers it is given."""

    def __init__(self, formats: str, count: int = 132, each: int = 2):
        self.formats, self.launches, self.context, self.pushed = formats, [], 7, []
        self.each, self.count, self.status = each, count, 0
        self.CUstreamCaptureStatus = SimpleNamespace(CU_STREAM_CAPTURE_STATUS_NONE=0)

    def _read(self, address):
        pointers = (ctypes.c_void_p * len(self.formats)).from_address(address)
        return tuple(
            struct.unpack("<" + f, ctypes.string_at(p, struct.calcsize("<" + f)))[0]
            for f, p in zip(self.formats, pointers, strict=True)
        )

    def cuLaunchKernel(self, function, *rest):
        *sizes, shared, stream, params, extra = rest
        assert extra == 0
        self.launches.append((function, tuple(sizes), shared, stream, self._read(params)))
        return (self.status,)

    def cuLaunchCooperativeKernel(self, function, *rest):
        return self.cuLaunchKernel(function, *rest, 0)

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

    def __init__(self, pointer, dtype, shape, stride, device=0):
        self.pointer, self.dtype, self.shape, self._stride, self.ordinal = pointer, dtype, shape, stride, device
        self.device = SimpleNamespace(type="cuda")
        self.is_cuda = True

    def data_ptr(self):
        return self.pointer

    def stride(self):
        return self._stride

    def get_device(self):
        return self.ordinal

    def dim(self):
        return len(self.shape)

    def is_contiguous(self):
        return arrays.is_contiguous(self.shape, self._stride, 1)
