"""Bulk copies: one thread hands a whole run of bytes, or a box of a tensor, to the copy engine.

Loads report their bytes to an mbarrier. Stores are committed in groups and waited for, like ``cp.async``. A tensor map,
made on the host, holds the tensor's address, shape, strides, the box and the swizzle; a kernel gets its address as a
uint64. Coordinates name the box's first element, innermost axis first; what lies outside the tensor is read as zero and
not written. The innermost coordinate is a multiple of 16 bytes, and a store's coordinates are not negative: an H200
stops with an illegal instruction otherwise. A load's rows end where the tensor's do, to the byte; a store drops whole
16 bytes only, so the rows of a tensor that is stored to are multiples of 16 bytes long, or what follows them is
overwritten.

With a swizzle of S bytes (32, 64, 128) the innermost axis of a box is at most S bytes wide, and the 16-byte chunk meant
for address ``a`` lies at ``a ^ ((a >> 7 & m) << 4)``, m = 1, 3, 7: eight rows at one column fall into different banks.
Base addresses that are multiples of 1024 make this ``chunk ^ (row % 8)`` for 128 bytes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from flashnumba.machine.emulator import copies
from flashnumba.machine.instruction import Instruction, Scalar, instruction

__all__ = [
    "bulk_commit", "bulk_load", "bulk_prefetch", "bulk_store", "bulk_wait", "bulk_wait_read", "tma_load_1d",
    "tma_load_2d", "tma_load_3d", "tma_load_4d", "tma_prefetch", "tma_store_1d", "tma_store_2d", "tma_store_3d",
    "tma_store_4d",
]  # fmt: skip


@instruction(
    "bulk_load",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%dst], [%src], %bytes, [%bar];",
    (Scalar("dst", "u32"), Scalar("src", "u64"), Scalar("bytes", "u32"), Scalar("bar", "u32")),
    arch="90",
    effect="control",
)
def bulk_load(thread: Any, dst: int, src: int, nbytes: int, bar: int) -> None:
    """Copy ``bytes`` contiguous bytes from global to shared memory; addresses and size are multiples of 16."""
    copies.bulk_load(thread, int(dst), int(src), int(nbytes), int(bar))


@instruction(
    "bulk_store",
    "cp.async.bulk.global.shared::cta.bulk_group [%dst], [%src], %bytes;",
    (Scalar("dst", "u64"), Scalar("src", "u32"), Scalar("bytes", "u32")),
    arch="90",
    effect="control",
)
def bulk_store(thread: Any, dst: int, src: int, nbytes: int) -> None:
    """Copy ``bytes`` contiguous bytes from shared to global memory; addresses and size are multiples of 16."""
    copies.bulk_store(thread, int(dst), int(src), int(nbytes))


def _load(rank: int) -> Instruction:
    axes = [f"c{i}" for i in range(rank)]
    declare = instruction(
        f"tma_load_{rank}d",
        f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes "
        f"[%dst], [%map, {{{', '.join('%' + a for a in axes)}}}], [%bar];",
        (Scalar("dst", "u32"), Scalar("map", "u64"), Scalar("bar", "u32"), *(Scalar(a, "i32") for a in axes)),
        arch="90",
        effect="control",
        doc=f"Copy a box of a rank-{rank} tensor map to shared ``dst`` (a multiple of 128); mbarrier ``bar`` counts "
        "all its bytes.",
    )

    def emulate(thread: Any, dst: int, tensor: Any, bar: int, *at: int) -> None:
        copies.tensor_load(thread, int(dst), tensor, int(bar), *map(int, at))

    emulate.__module__ = __name__
    return declare(emulate)


def _store(rank: int) -> Instruction:
    axes = [f"c{i}" for i in range(rank)]
    declare = instruction(
        f"tma_store_{rank}d",
        f"cp.async.bulk.tensor.{rank}d.global.shared::cta.bulk_group "
        f"[%map, {{{', '.join('%' + a for a in axes)}}}], [%src];",
        (Scalar("map", "u64"), Scalar("src", "u32"), *(Scalar(a, "i32") for a in axes)),
        arch="90",
        effect="control",
        doc=f"Copy a box from shared ``src`` (a multiple of 128) into a rank-{rank} tensor map's tensor.",
    )

    def emulate(thread: Any, tensor: Any, src: int, *at: int) -> None:
        copies.tensor_store(thread, tensor, int(src), *map(int, at))

    emulate.__module__ = __name__
    return declare(emulate)


tma_load_1d, tma_load_2d, tma_load_3d, tma_load_4d = (_load(rank) for rank in (1, 2, 3, 4))
tma_store_1d, tma_store_2d, tma_store_3d, tma_store_4d = (_store(rank) for rank in (1, 2, 3, 4))


@instruction("tma_prefetch", "prefetch.tensormap [%map];", (Scalar("map", "u64"),), arch="90", effect="control")
def tma_prefetch(thread: Any, tensor: Any) -> None:
    """Fetch a tensor map ahead of its first use."""


@instruction(
    "bulk_prefetch",
    "cp.async.bulk.prefetch.L2.global [%src], %nbytes;",
    (Scalar("src", "u64"), Scalar("nbytes", "u32")),
    arch="90",
    effect="control",
)
def bulk_prefetch(thread: Any, src: int, nbytes: int) -> None:
    """Fetch bytes of global memory into the L2 cache, address and number multiples of 16, and go on. No thread has read
    anything yet, so it may come before the wait for the kernel ahead: what that still writes, it writes into L2."""
    thread.launch.memory.check_prefetch(int(src), int(nbytes), thread)


@instruction("bulk_commit", "cp.async.bulk.commit_group;", arch="90", effect="control")
def bulk_commit(thread: Any) -> None:
    """Close the group of bulk stores started since the last commit."""
    copies.bulk_commit(thread)


def _bulk_wait(pending: int, read: bool) -> Instruction:
    if not 0 <= pending <= 31:
        raise ValueError(f"a wait for {pending} bulk groups; the number must be 0 to 31")
    declare = instruction(
        f"bulk_wait{'_read' if read else ''}_{pending}",
        f"cp.async.bulk.wait_group{'.read' if read else ''} {pending};",
        arch="90",
        effect="control",
        doc=f"Wait until at most {pending} of this thread's newest groups of bulk stores "
        + ("still read shared memory, which may then be used again." if read else "are in flight."),
    )

    def emulate(thread: Any) -> None:
        copies.bulk_wait(thread, pending)

    emulate.__module__ = __name__
    return declare(emulate)


@cache
def bulk_wait(pending: int) -> Instruction:
    """The instruction that waits until at most ``pending`` groups of bulk stores are in flight."""
    return _bulk_wait(pending, False)


@cache
def bulk_wait_read(pending: int) -> Instruction:
    """The instruction that waits until at most ``pending`` groups of bulk stores still read shared memory."""
    return _bulk_wait(pending, True)
