"""Named barriers, fences between proxies, and the exchange of registers among warpgroups."""

from __future__ import annotations

from functools import cache
from typing import Any

from flashnumba.machine.emulator.barriers import change_registers, named_barrier
from flashnumba.machine.instruction import Instruction, Scalar, instruction

__all__ = [
    "bar_arrive",
    "bar_red_or",
    "bar_sync",
    "fence_mbarrier_init",
    "fence_proxy_async",
    "setmaxnreg_dec",
    "setmaxnreg_inc",
]

_BARRIER = (Scalar("barrier", "i32"), Scalar("count", "i32"))


@instruction("bar_sync", "bar.sync %barrier, %count;", _BARRIER, group="warp", effect="control")
def bar_sync(thread: Any, barrier: int, count: int) -> None:
    """Wait at named barrier 0..15 until ``count`` threads (a multiple of 32) have come, by this or by ``bar_arrive``.

    What those threads did before is ordered before what the waiting ones do after. Barrier 0 is ``syncthreads``.
    """
    named_barrier(thread, int(barrier), int(count), wait=True)


@instruction("bar_arrive", "bar.arrive %barrier, %count;", _BARRIER, group="warp", effect="control")
def bar_arrive(thread: Any, barrier: int, count: int) -> None:
    """Count as come to a named barrier without waiting: the signalling half of a producer and consumer pair."""
    named_barrier(thread, int(barrier), int(count), wait=False)


@instruction(
    "bar_red_or",
    "{ .reg .pred p, q; setp.ne.b32 p, %predicate, 0; bar.red.or.pred q, %barrier, %count, p; "
    "selp.b32 %result, 1, 0, q; }",
    (*_BARRIER, Scalar("predicate", "pred")),
    returns="pred",
    group="warp",
    effect="control",
)
def bar_red_or(thread: Any, barrier: int, count: int, predicate: Any) -> bool:
    """``bar_sync`` of ``count`` threads that each bring a predicate; returns whether it is true of one of them. All of
    them have to come by this instruction."""
    return named_barrier(thread, int(barrier), int(count), wait=True, vote=bool(predicate))


@instruction("fence_proxy_async", "fence.proxy.async.shared::cta;", arch="90", effect="control")
def fence_proxy_async(thread: Any) -> None:
    """Make this thread's ordinary shared-memory stores visible to the asynchronous proxy (wgmma, bulk copies).

    Each writing thread executes it after its stores and before the barrier that the asynchronous work follows; or
    the thread that starts the asynchronous work executes it after the barrier.
    """
    thread.flush()
    thread.fence_proxy()


@instruction("fence_mbarrier_init", "fence.mbarrier_init.release.cluster;", arch="90", effect="control")
def fence_mbarrier_init(thread: Any) -> None:
    """Make initialised mbarriers visible to the copy engine; the thread that initialised them executes it."""
    fence_proxy_async.emulate(thread)


def _setmaxnreg(registers: int, grow: bool) -> Instruction:
    if registers % 8 or not 24 <= registers <= 256:
        raise ValueError(f"setmaxnreg to {registers} registers; it must be a multiple of 8 from 24 to 256")
    how = "inc" if grow else "dec"
    declare = instruction(
        f"setmaxnreg_{how}_{registers}",
        f"setmaxnreg.{how}.sync.aligned.u32 {registers};",
        arch="90a",
        group="warp",
        effect="control",
        doc=f"{'Take' if grow else 'Give'} registers {'from' if grow else 'to'} the block's pool until each thread has "
        f"{registers}. Every warp of a warpgroup executes it; the kernel needs ``min_blocks=1``.",
    )

    def emulate(thread: Any) -> None:
        change_registers(thread, registers, grow)

    emulate.__module__ = __name__
    return declare(emulate)


@cache
def setmaxnreg_inc(registers: int) -> Instruction:
    """The instruction that raises a warpgroup to ``registers`` a thread: 24 to 256, a multiple of 8."""
    return _setmaxnreg(registers, True)


@cache
def setmaxnreg_dec(registers: int) -> Instruction:
    """The instruction that lowers a warpgroup to ``registers`` a thread: 24 to 256, a multiple of 8."""
    return _setmaxnreg(registers, False)
