"""Loads, stores and additions that order a block's memory accesses for other blocks.

A block that hands results to another writes them and *releases* a flag; the other *acquires* the flag and then reads::

    producer                                   consumer
    st_global_v4(data, ...)                    while ld_acquire_gpu_b32(flag) == 0: pass
    cuda.syncthreads()                         cuda.syncthreads()
    one thread: st_release_gpu_b32(flag, 1)    ld_global_v4(..., data)

Everything that happened before the release is seen after an acquire that reads its value. ``syncthreads`` carries that
from one thread to its block. Waiting for another block is sound only if all of them are resident at once: declare the
kernel with ``concurrent=True``.

On the emulator these are plain reads and writes of global memory, taken one lane after the other.

Source: PTX ISA, "Memory Consistency Model"; ld.acquire, st.release, red, atom.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flashnumba.machine.instruction import Instruction, Scalar, instruction

__all__ = [
    "atom_add_acq_rel_gpu_u32",
    "ld_acquire_gpu_b32",
    "ld_acquire_gpu_b64",
    "red_add_release_gpu_u32",
    "st_release_gpu_b32",
    "st_release_gpu_b64",
]


def _acquire(bits: int) -> Instruction:
    dtype = np.dtype(f"u{bits // 8}")

    def emulate(memory: Any, addr: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(memory.read_global(addr, dtype.itemsize)).view(dtype)[..., 0]

    emulate.__module__ = __name__
    return instruction(
        f"ld_acquire_gpu_b{bits}",
        f"ld.acquire.gpu.global.b{bits} %result, [%addr];",
        (Scalar("addr", "u64"),),
        returns=f"u{bits}",
        effect="memory",
        doc=f"Load {bits} bits; what was released before that value was stored is seen by every later access.",
    )(emulate)


def _release(bits: int) -> Instruction:
    def emulate(memory: Any, addr: np.ndarray, value: np.ndarray) -> tuple[()]:
        memory.write_global(addr, np.ascontiguousarray(np.asarray(value)[..., None]).view(np.uint8))
        return ()

    emulate.__module__ = __name__
    return instruction(
        f"st_release_gpu_b{bits}",
        f"st.release.gpu.global.b{bits} [%addr], %value;",
        (Scalar("addr", "u64"), Scalar("value", f"u{bits}")),
        effect="memory",
        doc=f"Store {bits} bits; whoever acquires that value sees every access made before this one.",
    )(emulate)


def _add(memory: Any, addr: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Add lane after lane, as lanes may name one address; returns the values before."""
    addr, value = np.broadcast_arrays(addr, value)
    before = np.empty(addr.shape, np.uint32)
    for i in np.ndindex(addr.shape):
        before[i] = np.ascontiguousarray(memory.read_global(addr[i], 4)).view(np.uint32)[0]
        after = (int(before[i]) + int(value[i])) & 0xFFFFFFFF
        memory.write_global(addr[i], np.array([after], np.uint32).view(np.uint8))
    return before[()]


ld_acquire_gpu_b32 = _acquire(32)
ld_acquire_gpu_b64 = _acquire(64)
st_release_gpu_b32 = _release(32)
st_release_gpu_b64 = _release(64)


@instruction(
    "red_add_release_gpu_u32",
    "red.release.gpu.global.add.u32 [%addr], %value;",
    (Scalar("addr", "u64"), Scalar("value", "u32")),
    effect="memory",
)
def red_add_release_gpu_u32(memory: Any, addr: np.ndarray, value: np.ndarray) -> tuple[()]:
    """Add to a uint32 in global memory and release: a counter of blocks that have finished."""
    _add(memory, addr, value)
    return ()


@instruction(
    "atom_add_acq_rel_gpu_u32",
    "atom.acq_rel.gpu.global.add.u32 %result, [%addr], %value;",
    (Scalar("addr", "u64"), Scalar("value", "u32")),
    returns="u32",
    effect="memory",
)
def atom_add_acq_rel_gpu_u32(memory: Any, addr: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Add to a uint32 in global memory; returns what was there, so the last block knows it. Acquires and releases."""
    return _add(memory, addr, value)
