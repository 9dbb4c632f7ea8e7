"""The copy engines: cp.async by a thread, bulk and tensor-map copies by the block's engine; all as late as allowed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flashnumba.machine.emulator import faults
from flashnumba.machine.emulator.barriers import mbarrier

if TYPE_CHECKING:
    from flashnumba.machine.emulator.thread import Thread

__all__ = [
    "bulk_commit", "bulk_load", "bulk_store", "bulk_wait", "commit", "copy_async", "swizzled", "tensor_load",
    "tensor_store", "wait_groups",
]  # fmt: skip


# -- cp.async ---------------------------------------------------------------------------------------------------------
class _Copy:
    """``data``: its ``valid`` bytes where they lie in global memory."""

    __slots__ = ("data", "dst", "epoch", "nbytes", "valid")

    def __init__(self, dst: int, data: np.ndarray | None, nbytes: int, valid: int, epoch: int):
        self.dst, self.data, self.nbytes, self.valid, self.epoch = dst, data, nbytes, valid, epoch


def copy_async(thread: Thread, dst: int, src: int, nbytes: int, valid: int) -> None:
    """Start ``cp.async``: ``valid`` bytes from global ``src``, zeros up to ``nbytes``; they arrive at the wait."""
    shared, memory = thread.block.shared, thread.launch.memory
    if not 0 <= valid <= nbytes:
        raise thread.fault(faults.OutOfBounds, f"cp.async of {nbytes} bytes with a source size of {valid}")
    if src & (nbytes - 1):
        raise thread.fault(
            faults.Misaligned, f"cp.async of {nbytes} bytes from global address {src:#x}, which is not a multiple of it"
        )
    data = memory.peek(src, valid, thread) if valid else None
    if thread.op is not None:
        thread.flush()
    epoch = thread.block.new_flight()
    shared.check_write(dst, dst + nbytes, thread, epoch, align=nbytes)
    shared.issued[epoch] = thread.epoch
    thread.copies.append(_Copy(dst, data, nbytes, valid, epoch))


def commit(thread: Thread) -> None:
    thread.copy_groups.append(thread.copies)
    thread.copies = []


def wait_groups(thread: Thread, pending: int) -> None:
    """At most ``pending`` of the newest groups stay in flight; the others arrive now."""
    shared, memory = thread.block.shared, thread.launch.memory
    while len(thread.copy_groups) > pending:
        group = thread.copy_groups.popleft()
        if group:
            thread.tick()  # the epoch of these bytes is that of no other access
        for c in group:
            if c.valid:
                shared.data[c.dst : c.dst + c.valid] = c.data
                memory.loaded += c.valid
            if c.valid != c.nbytes:
                shared.data[c.dst + c.valid : c.dst + c.nbytes] = 0
            if shared.checks:
                shared.restamp_writer(c.dst, c.dst + c.nbytes, c.epoch, thread.epoch)
        if group:
            thread.tick()


# -- bulk copies ------------------------------------------------------------------------------------------------------
def _check_bulk(thread: Thread, what: str, shared_address: int, nbytes: int, align: int) -> None:
    if shared_address % align:
        raise thread.fault(
            faults.Misaligned, f"{what} at shared address {shared_address}, which is not a multiple of {align}"
        )
    if nbytes % 16 or nbytes <= 0:
        raise thread.fault(faults.Misaligned, f"{what} of {nbytes} bytes; the size must be a positive multiple of 16")


def bulk_load(thread: Thread, dst: int, src: int, nbytes: int, bar: int) -> None:
    """``cp.async.bulk``, global to shared, reporting to an mbarrier."""
    barrier = mbarrier(thread, bar, by_copy=True)
    _check_bulk(thread, "a bulk copy", dst, nbytes, 16)
    if src % 16:
        raise thread.fault(
            faults.Misaligned, f"a bulk copy from global address {src:#x}, which is not a multiple of 16"
        )
    shared, memory = thread.block.shared, thread.launch.memory
    data = memory.peek(src, nbytes, thread)
    shared.check_write(dst, dst + nbytes, thread, barrier.epoch, proxy=True)

    def copy() -> None:
        shared.data[dst : dst + nbytes] = data
        memory.loaded += nbytes

    _issue(thread, barrier, nbytes, copy)


def _issue(thread: Thread, barrier: Any, nbytes: int, copy: Any) -> None:
    barrier.publish(thread)  # the copy starts from what its issuer knew
    barrier.copies.append((nbytes, copy, thread.tid, thread.position()))
    barrier.advance()


def swizzled(addresses: np.ndarray, swizzle: int) -> np.ndarray:
    """Where the 16-byte chunk meant for each shared address lies: address bits 4.. are exchanged with bits 7.. by
    xor."""
    mask = {0: 0, 32: 1, 64: 3, 128: 7}[swizzle]
    return addresses ^ (((addresses >> 7) & mask) << 4)


def _window(tensor: Any, coordinates: tuple[int, ...]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """The part of a box that lies inside its tensor: slices of the tensor and of the box (outermost first)."""
    inside, within = [], []
    for start, extent, size in zip(reversed(coordinates), tensor.box, tensor.array.shape, strict=True):
        lo, hi = max(start, 0), min(start + extent, size)
        hi = max(hi, lo)
        inside.append(slice(lo, hi))
        within.append(slice(lo - start, hi - start))
    return tuple(inside), tuple(within)


def _tensor_box(thread: Thread, tensor: Any, coordinates: tuple[int, ...], address: int) -> tuple[int, np.ndarray]:
    """Bytes of a box and the shared addresses of its 16-byte chunks in order."""
    if not hasattr(tensor, "swizzle"):
        raise thread.fault(
            faults.OutOfBounds, f"a tensor copy is given {type(tensor).__name__} where it needs a tensor map"
        )
    if len(coordinates) != tensor.array.ndim:
        raise thread.fault(
            faults.OutOfBounds,
            f"a tensor copy with {len(coordinates)} coordinates on a tensor map of rank {tensor.array.ndim}",
        )
    size = tensor.array.dtype.itemsize
    if coordinates[0] * size % 16:
        raise thread.fault(
            faults.Misaligned,
            f"a tensor copy from coordinate {coordinates[0]} of the innermost axis, {coordinates[0] * size} bytes "
            f"in; it must "
            f"be a multiple of 16 bytes ({16 // size} elements), or the hardware stops with an illegal instruction",
        )
    nbytes = int(np.prod(tensor.box)) * size
    _check_bulk(thread, "a tensor copy", address, nbytes, 128)
    return nbytes, swizzled(address + 16 * np.arange(nbytes // 16), tensor.swizzle)


def tensor_load(thread: Thread, dst: int, tensor: Any, bar: int, *coordinates: int) -> None:
    """``cp.async.bulk.tensor``, global to shared; what lies outside the tensor arrives as zeros."""
    barrier = mbarrier(thread, bar, by_copy=True)
    nbytes, chunks = _tensor_box(thread, tensor, coordinates, dst)
    shared, memory = thread.block.shared, thread.launch.memory
    span = _span(tensor.swizzle, dst, nbytes)
    shared.check_write(*span, thread, barrier.epoch, proxy=True)
    inside, within = _window(tensor, coordinates)

    def copy() -> None:
        tile = np.full(tensor.box, np.nan if getattr(tensor, "fill", "zero") == "nan" else 0, tensor.array.dtype)
        tile[within] = tensor.array[inside]
        memory.loaded += tile[within].nbytes
        shared.scatter(chunks, tile.reshape(-1).view(np.uint8).reshape(-1, 16))

    _issue(thread, barrier, nbytes, copy)


def _span(swizzle: int, address: int, nbytes: int) -> tuple[int, int]:
    """The shared bytes a box covers: a swizzle moves a chunk only inside its own ``swizzle`` bytes."""
    unit = swizzle or 16
    return address, address + -(-nbytes // unit) * unit


def bulk_store(thread: Thread, dst: int, src: int, nbytes: int) -> None:
    """``cp.async.bulk``, shared to global."""
    _check_bulk(thread, "a bulk copy", src, nbytes, 16)
    if dst % 16:
        raise thread.fault(faults.Misaligned, f"a bulk copy to global address {dst:#x}, which is not a multiple of 16")
    memory, shared = thread.launch.memory, thread.block.shared
    region = memory.find(dst, nbytes, thread, True)

    def copy() -> None:
        region.data[dst - region.lo : dst - region.lo + nbytes] = shared.data[src : src + nbytes]
        memory.stored += nbytes

    _start_store(thread, src, src + nbytes, copy)


def tensor_store(thread: Thread, tensor: Any, src: int, *coordinates: int) -> None:
    """``cp.async.bulk.tensor``, shared to global; what lies beyond the tensor's end is dropped, by whole 16 bytes."""
    if min(coordinates) < 0:
        raise thread.fault(
            faults.OutOfBounds,
            f"a tensor copy into coordinates {coordinates}; a store may not start before the tensor (a load may), "
            f"or the "
            f"hardware stops with an illegal instruction",
        )
    nbytes, chunks = _tensor_box(thread, tensor, coordinates, src)
    left = (tensor.array.shape[-1] - coordinates[0]) * tensor.array.itemsize
    if thread.block.shared.checks and 0 < left < tensor.box[-1] * tensor.array.itemsize and left % 16:
        raise thread.fault(
            faults.OutOfBounds,
            f"a tensor copy whose rows end {left} bytes on: the copy engine drops whole 16 bytes only, so the "
            f"{-left % 16} bytes that follow each row's end are overwritten",
        )
    if not tensor.array.flags.writeable:
        raise thread.fault(faults.ReadOnly, "a tensor copy into an array that is read-only")
    memory, shared = thread.launch.memory, thread.block.shared
    inside, within = _window(tensor, coordinates)

    def copy() -> None:
        tile = shared.gather(chunks, 16).reshape(-1).view(tensor.array.dtype).reshape(tensor.box)
        tensor.array[inside] = tile[within]
        memory.stored += tile[within].nbytes

    _start_store(thread, *_span(tensor.swizzle, src, nbytes), copy)


def _start_store(thread: Thread, lo: int, hi: int, copy: Any) -> None:
    epoch = thread.block.new_flight()
    thread.block.shared.check_read(lo, hi, thread, epoch, proxy=True)
    thread.block.shared.issued[epoch] = thread.epoch
    thread.bulk_copies.append((lo, hi, epoch, copy, thread.position()))


def bulk_commit(thread: Thread) -> None:
    thread.bulk_groups.append(thread.bulk_copies)
    thread.bulk_copies = []


def bulk_wait(thread: Thread, pending: int) -> None:
    """At most ``pending`` of the newest groups of copies out of shared memory stay in flight."""
    shared = thread.block.shared
    while len(thread.bulk_groups) > pending:
        group = thread.bulk_groups.popleft()
        if group:
            thread.tick()
        for lo, hi, epoch, copy, _ in group:
            copy()
            if shared.checks:
                shared.restamp_reader(lo, hi, epoch, thread.epoch, thread)
        if group:
            thread.tick()
