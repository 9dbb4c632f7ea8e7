"""Planted faults of the launch: what an architecture lacks, what a block may not have."""

from __future__ import annotations

from flashnumba.machine.emulator import EarlyAccess, LaunchLimit, UnsupportedInstruction
from flashnumba.machine.function import Kernel, kernel
from flashnumba.machine.instructions import (
    cp_async_4,
    cp_async_commit,
    cp_async_wait,
    global_address,
    grid_dependency_wait,
    shared_address,
)
from flashnumba.machine.numba import cuda, float32, uint32, uint64
from tests.machine.gallery.entry import Entry, vector
from tests.machine.gallery.tensor import ENTRIES as TENSOR

wait_all = cp_async_wait(0)


def copied(broken: bool) -> Kernel:
    @kernel(threads=32)
    def copied(x, out):
        s = cuda.shared.array(32, float32)
        t = cuda.threadIdx.x
        cp_async_4(shared_address(s) + uint32(4 * t), global_address(x) + uint64(4 * t))
        cp_async_commit()
        wait_all()
        out[t] = s[t]

    return copied


def wgmma_for_any(broken: bool) -> Kernel:
    """The wgmma kernel, declared as if it ran on sm_80."""
    made = next(e for e in TENSOR if e.name == "proxy_fence_wgmma").make(False)
    return kernel(threads=128, arch="80")(made.function)


def plain(broken: bool) -> Kernel:
    @kernel(threads=128)
    def plain(x, out):
        i = cuda.threadIdx.x
        if i < x.shape[0]:
            out[i] = x[i]

    return plain


def early(broken: bool) -> Kernel:
    @kernel(threads=32, arch="90", early=True)
    def early(x, out):
        t = cuda.threadIdx.x
        if not broken:
            grid_dependency_wait()
        out[t] = x[t]

    return early


def static(broken: bool) -> Kernel:
    size = 12289 if broken else 12288

    @kernel(threads=32)
    def static(x, out):
        s = cuda.shared.array(size, float32)
        t = cuda.threadIdx.x
        s[size - 1 - t] = x[t]
        out[t] = s[size - 1 - t]

    return static


ENTRIES = (
    Entry("early_access", EarlyAccess, "an early kernel that does not wait for the one ahead", early,
          vector(32, lambda x: x), "out[t] = x[t]"),
    Entry("unsupported_cp_async", UnsupportedInstruction, "cp.async on sm_75", copied, vector(32, lambda x: x),
          "cp_async_4(", arch="80", broken_launch={"arch": "75"}),
    Entry("unsupported_wgmma", UnsupportedInstruction, "a wgmma kernel on sm_80", wgmma_for_any, TENSOR[0].inputs,
          "fence_proxy_async()", block=128, broken_launch={"arch": "80"}),
    Entry("too_many_threads", LaunchLimit, "more threads than the kernel is compiled for", plain,
          vector(100, lambda x: x), "129 threads a block", block=128, broken_launch={"block": 129}),
    Entry("static_shared_memory", LaunchLimit, "static shared memory over 48 KB", static, vector(32, lambda x: x),
          "cuda.shared.array(size"),
    Entry("dynamic_shared_memory", LaunchLimit, "more dynamic shared memory than the architecture has", plain,
          vector(100, lambda x: x), "232464 bytes", block=128, shared=232448, broken_launch={"shared": 232464}),
)  # fmt: skip
