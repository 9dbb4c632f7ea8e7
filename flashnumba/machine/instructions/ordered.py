"""Loads, stores and additions that order a block's memory accesses for other blocks.

A block that hands results to another writes them and *releases* a flag; the other *acquires* the flag and then reads::

    producer                                   consumer
    st_global_v4(data, ...)                    while ld_acquire_gpu_b32(flag) == 0: pass
    cuda.syncthreads()                         cuda.syncthreads()
    one thread: st_release_gpu_b32(flag, 1)    ld_global_v4(..., data)

Everything that happened before the release is seen after an acquire that reads its value. ``syncthreads`` carries that
from one thread to its block. Waiting for another block is sound only if all of them are resident at once: declare the
kernel with ``concurrent=True``.

A word that is itself all there is to hand over needs no order: the *relaxed* forms are single accesses that bypass L1.

On the emulator these are plain reads and writes of global memory, taken one lane after the other. A thread that loads
the same value from the same place again is taken to be waiting for it to change: it gives way to all other threads.

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
    "ld_relaxed_gpu_b64",
    "red_add_release_gpu_u32",
    "st_relaxed_gpu_b64",
    "st_release_gpu_b32",
    "st_release_gpu_b64",
]

PATIENCE = 100_000
"""Loads of one unchanged value, with every other thread having had its turn in between, that are called a deadlock."""


class _Word:
    """Says what a spinning thread waits for."""

    def __init__(self, address: int, nbytes: int, value: int):
        self.address, self.nbytes, self.value = address, nbytes, value

    def __str__(self) -> str:
        return f"a change of the {self.nbytes} bytes at global address {self.address:#x}, which stay {self.value:#x}"


def _polled(thread: Any, address: int, nbytes: int) -> int:
    """A load; the value, as an unsigned integer. Seen a second time in a row, it lets all others have a turn first."""
    address = int(address)
    memory = thread.launch.memory
    value = int.from_bytes(memory.load(address, nbytes, thread).tobytes(), "little")
    if value == thread.seen.get(address):
        thread.poll(_Word(address, nbytes, value), PATIENCE)
        value = int.from_bytes(memory.load(address, nbytes, thread).tobytes(), "little")
    thread.seen[address] = value
    return value


def _load(bits: int, order: str, doc: str) -> Instruction:
    def emulate(thread: Any, addr: int) -> int:
        return _polled(thread, addr, bits // 8)

    emulate.__module__ = __name__
    return instruction(
        f"ld_{order}_gpu_b{bits}",
        f"ld.{order}.gpu.global.b{bits} %result, [%addr];",
        (Scalar("addr", "u64"),),
        returns=f"u{bits}",
        effect="control",
        doc=doc,
    )(emulate)


def _store(bits: int, order: str, doc: str) -> Instruction:
    def emulate(memory: Any, addr: np.ndarray, value: np.ndarray) -> tuple[()]:
        memory.write_global(addr, np.ascontiguousarray(np.asarray(value)[..., None]).view(np.uint8))
        return ()

    emulate.__module__ = __name__
    return instruction(
        f"st_{order}_gpu_b{bits}",
        f"st.{order}.gpu.global.b{bits} [%addr], %value;",
        (Scalar("addr", "u64"), Scalar("value", f"u{bits}")),
        effect="memory",
        doc=doc,
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


_ACQUIRES = "what was released before that value was stored is seen by every later access."
_RELEASES = "whoever acquires that value sees every access made before this one."
ld_acquire_gpu_b32 = _load(32, "acquire", f"Load 32 bits; {_ACQUIRES}")
ld_acquire_gpu_b64 = _load(64, "acquire", f"Load 64 bits; {_ACQUIRES}")
ld_relaxed_gpu_b64 = _load(64, "relaxed", "Load 64 bits as other blocks left them; it orders no other access.")
st_release_gpu_b32 = _store(32, "release", f"Store 32 bits; {_RELEASES}")
st_release_gpu_b64 = _store(64, "release", f"Store 64 bits; {_RELEASES}")
st_relaxed_gpu_b64 = _store(64, "relaxed", "Store 64 bits, whole, for other blocks; it orders no other access.")


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
