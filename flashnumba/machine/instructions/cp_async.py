"""cp.async: each thread starts copies of 4, 8 or 16 bytes from global to shared memory and goes on.

Copies are committed in groups, and a group is waited for by its own thread; other threads see the data after a
barrier on top. ``_zfill`` forms read only ``valid`` bytes (0 to the size) and fill with zeros: tails without a branch.
"""

from __future__ import annotations

from functools import cache
from operator import index
from typing import Any

from flashnumba.machine.emulator import copies
from flashnumba.machine.instruction import Instruction, Scalar, instruction

__all__ = [
    "cp_async_4", "cp_async_4_zfill", "cp_async_8", "cp_async_8_zfill", "cp_async_16", "cp_async_16_zfill",
    "cp_async_commit", "cp_async_wait", "cp_async_wait_all",
]  # fmt: skip


def _copy(nbytes: int, zfill: bool) -> Instruction:
    operands: tuple[Scalar, ...] = (Scalar("dst", "u32"), Scalar("src", "u64"))
    level = "cg" if nbytes == 16 else "ca"  # .cg (past the first-level cache) exists for 16 bytes only
    extra = ", %valid" if zfill else ""
    declare = instruction(
        f"cp_async_{nbytes}{'_zfill' if zfill else ''}",
        f"cp.async.{level}.shared.global [%dst], [%src], {nbytes}{extra};",
        (*operands, Scalar("valid", "u32")) if zfill else operands,
        arch="80",
        effect="control",
        doc=f"Start the copy of {nbytes} bytes from global ``src`` to shared ``dst``, both multiples of {nbytes}"
        + ("; only ``valid`` bytes are read, the rest become zeros." if zfill else "."),
    )

    def emulate(thread: Any, dst: int, src: int, valid: int = nbytes) -> None:
        copies.copy_async(thread, int(dst), int(src), nbytes, int(valid))

    emulate.__module__ = __name__
    return declare(emulate)


cp_async_4, cp_async_4_zfill = _copy(4, False), _copy(4, True)
cp_async_8, cp_async_8_zfill = _copy(8, False), _copy(8, True)
cp_async_16, cp_async_16_zfill = _copy(16, False), _copy(16, True)


@instruction("cp_async_commit", "cp.async.commit_group;", arch="80", effect="control")
def cp_async_commit(thread: Any) -> None:
    """Close the group of copies started since the last commit; an empty group counts as one."""
    copies.commit(thread)


@cache
def cp_async_wait(pending: int) -> Instruction:
    """The instruction that waits until at most ``pending`` of the thread's newest groups are in flight."""
    pending = index(pending)
    if not 0 <= pending <= 31:
        raise ValueError(f"cp_async_wait({pending}); the number of groups must be 0 to 31")
    declare = instruction(
        f"cp_async_wait_{pending}",
        f"cp.async.wait_group {pending};",
        arch="80",
        effect="control",
        doc=f"Wait until at most {pending} of this thread's newest groups are in flight.",
    )

    def emulate(thread: Any) -> None:
        copies.wait_groups(thread, pending)

    emulate.__module__ = __name__
    return declare(emulate)


@instruction("cp_async_wait_all", "cp.async.wait_all;", arch="80", effect="control")
def cp_async_wait_all(thread: Any) -> None:
    """Wait for all copies this thread has started, committed or not."""
    copies.commit(thread)
    copies.wait_groups(thread, 0)
