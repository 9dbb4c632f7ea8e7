"""mbarriers: barriers that live in shared memory and count arrivals of threads and bytes of copies.

A phase is over when the expected arrivals and all expected bytes have come; then the next begins. Who waits names the
parity of the phase: 0 for the first, 1 for the second, in turn. A wait for the parity of a phase that is over passes,
so a producer's first wait for an empty slot uses parity 1.

An address is a 32-bit shared address, a multiple of 8. One thread initialises and fences, and a block barrier lets the
others in.
"""

from __future__ import annotations

from typing import Any

from flashnumba.machine.emulator.barriers import init_mbarrier
from flashnumba.machine.emulator.barriers import mbarrier as find
from flashnumba.machine.instruction import Scalar, instruction

__all__ = [
    "mbarrier_arrive", "mbarrier_arrive_expect_tx", "mbarrier_expect_tx", "mbarrier_init", "mbarrier_inval",
    "mbarrier_try_wait", "mbarrier_wait",
]  # fmt: skip

_BAR = Scalar("bar", "u32")


@instruction(
    "mbarrier_init",
    "mbarrier.init.shared::cta.b64 [%bar], %count;",
    (_BAR, Scalar("count", "u32")),
    arch="80",
    effect="control",
)
def mbarrier_init(thread: Any, bar: int, count: int) -> None:
    """Make the 8 bytes at ``bar`` an mbarrier whose phases take ``count`` arrivals."""
    thread.flush()
    init_mbarrier(thread, int(bar), int(count))


@instruction("mbarrier_inval", "mbarrier.inval.shared::cta.b64 [%bar];", (_BAR,), arch="80", effect="control")
def mbarrier_inval(thread: Any, bar: int) -> None:
    """Give the 8 bytes back to ordinary use."""
    barrier = find(thread, int(bar))
    shared = thread.block.shared
    del thread.block.mbarriers[barrier.address]
    if shared.checks:
        a, b = barrier.address >> shared.shift, (barrier.address + 8) >> shared.shift
        shared.writer[a:b] = [0] * (b - a)


@instruction(
    "mbarrier_arrive",
    "{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%bar]; }",
    (_BAR,),
    arch="80",
    effect="control",
)
def mbarrier_arrive(thread: Any, bar: int) -> None:
    """One arrival; what this thread did before is ordered before the end of the phase."""
    find(thread, int(bar)).arrive(thread)


@instruction(
    "mbarrier_arrive_expect_tx",
    "{ .reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%bar], %bytes; }",
    (_BAR, Scalar("bytes", "u32")),
    arch="90",
    effect="control",
)
def mbarrier_arrive_expect_tx(thread: Any, bar: int, nbytes: int) -> None:
    """One arrival that also tells the phase to wait for ``bytes`` more bytes from copies."""
    find(thread, int(bar)).arrive(thread, int(nbytes))


@instruction(
    "mbarrier_expect_tx",
    "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%bar], %bytes;",
    (_BAR, Scalar("bytes", "u32")),
    arch="90",
    effect="control",
)
def mbarrier_expect_tx(thread: Any, bar: int, nbytes: int) -> None:
    """Tell the phase to wait for ``bytes`` more bytes, without arriving."""
    find(thread, int(bar)).bytes += int(nbytes)


@instruction(
    "mbarrier_wait",
    "{ .reg .pred p; WAIT_${:uid}: mbarrier.try_wait.parity.shared::cta.b64 p, [%bar], %parity; "
    "@p bra DONE_${:uid}; bra WAIT_${:uid}; DONE_${:uid}: }",
    (_BAR, Scalar("parity", "u32")),
    arch="90",
    effect="control",
)
def mbarrier_wait(thread: Any, bar: int, parity: int) -> None:
    """Wait until the phase of this parity is over; what its arrivals and copies did is then seen."""
    find(thread, int(bar)).wait(thread, int(parity) & 1)


@instruction(
    "mbarrier_try_wait",
    "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%bar], %parity; selp.b32 %result, 1, 0, p; }",
    (_BAR, Scalar("parity", "u32")),
    returns="pred",
    arch="90",
    effect="control",
)
def mbarrier_try_wait(thread: Any, bar: int, parity: int) -> bool:
    """Whether the phase of this parity is over, after waiting a moment at most; true counts as a wait."""
    return find(thread, int(bar)).test(thread, int(parity) & 1)
