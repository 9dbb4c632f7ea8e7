"""Planted faults of barriers and of instructions that threads execute together."""

from __future__ import annotations

import numpy as np

from flashnumba.machine.emulator import (
    BarrierMismatch,
    Deadlock,
    DivergentBarrier,
    DivergentCollective,
    RegisterPool,
)
from flashnumba.machine.function import Kernel, kernel
from flashnumba.machine.instructions import (
    bar_arrive,
    bar_sync,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_try_wait,
    mbarrier_wait,
    setmaxnreg_dec,
    setmaxnreg_inc,
    shared_address,
    shfl_down,
    shfl_xor,
)
from flashnumba.machine.numba import cuda, float32, int32, uint32, uint64
from tests.machine.gallery.entry import Entry, vector


def early_return(broken: bool) -> Kernel:
    @kernel(threads=64)
    def early_return(x, out):
        s = cuda.shared.array(64, float32)
        t = cuda.threadIdx.x
        if t >= x.shape[0]:
            if broken:
                return
            s[t] = float32(0)
        else:
            s[t] = x[t]
        cuda.syncthreads()  # the row is complete
        if t < x.shape[0]:
            out[t] = s[x.shape[0] - 1 - t]

    return early_return


def two_places(broken: bool) -> Kernel:
    @kernel(threads=64)
    def two_places(x, out):
        s = cuda.shared.array(64, float32)
        t = cuda.threadIdx.x
        s[t] = x[t]
        if broken and t < 32:
            cuda.syncthreads()  # not the one that the other half comes to
        else:
            cuda.syncthreads()
        out[t] = s[63 - t]

    return two_places


def producer(broken: bool) -> Kernel:
    """Warp 0 produces, warp 1 consumes; barrier 1 says that the row is there."""
    count = 32 if broken else 64

    @kernel(threads=64)
    def producer(x, out):
        s = cuda.shared.array(32, float32)
        t = cuda.threadIdx.x
        if t < 32:
            s[t] = x[t]
            bar_arrive(1, 64)
        else:
            bar_sync(1, count)
            out[t - 32] = s[63 - t]

    return producer


def another_number(broken: bool) -> Kernel:
    number = 2 if broken else 1

    @kernel(threads=64)
    def another_number(x, out):
        s = cuda.shared.array(32, float32)
        t = cuda.threadIdx.x
        if t < 32:
            s[t] = x[t]
            bar_arrive(number, 64)
        else:
            bar_sync(1, 64)
            out[t - 32] = s[63 - t]

    return another_number


def counted(plant: str) -> Kernel:
    """Thread 0 waits on an mbarrier until all 32 threads have arrived, then sums."""
    arrivals = 33 if plant == "missing" else 32
    extra = 16 if plant == "bytes" else 0

    @kernel(threads=32, arch="90a")
    def counted(x, out):
        s = cuda.shared.array(32, float32)
        bars = cuda.shared.array(1, uint64)
        bar = shared_address(bars)
        t = cuda.threadIdx.x
        if t == 0:
            mbarrier_init(bar, uint32(arrivals))
        cuda.syncthreads()  # the mbarrier exists
        s[t] = x[t]
        if t == 0:
            mbarrier_arrive_expect_tx(bar, uint32(extra))
        else:
            mbarrier_arrive(bar)
        if t == 0:
            mbarrier_wait(bar, uint32(0))
            total = float32(0)
            for i in range(32):
                total += s[i]
            out[0] = total

    return counted


def polled(broken: bool) -> Kernel:
    parity = 1 if broken else 0

    @kernel(threads=64, arch="90a")
    def polled(x, out):
        s = cuda.shared.array(32, float32)
        bars = cuda.shared.array(1, uint64)
        bar = shared_address(bars)
        t = cuda.threadIdx.x
        if t == 0:
            mbarrier_init(bar, uint32(32))
        cuda.syncthreads()  # the mbarrier exists
        if t < 32:
            s[t] = x[t]
            mbarrier_arrive(bar)
        else:
            done = False
            while not done:
                done = mbarrier_try_wait(bar, uint32(0))
            while broken and not mbarrier_try_wait(bar, uint32(parity)):
                pass
            out[t - 32] = s[63 - t]

    return polled


def absent_lane(broken: bool) -> Kernel:
    lanes = 31 if broken else 32

    @kernel(threads=32)
    def absent_lane(x, out):
        lane = cuda.threadIdx.x
        value = x[lane]
        if lane < lanes:
            value += shfl_xor(value, int32(16))
        out[lane] = value

    return absent_lane


def two_shuffles(broken: bool) -> Kernel:
    @kernel(threads=32)
    def two_shuffles(x, out):
        lane = cuda.threadIdx.x
        value = x[lane]
        if broken and lane >= 16:  # noqa: SIM108  written as the warp executes it
            other = shfl_down(value, int32(1))
        else:
            other = shfl_xor(value, int32(1))
        out[lane] = value + other

    return two_shuffles


def narrow_mask(broken: bool) -> Kernel:
    mask = 0x0000FFFF if broken else 0xFFFFFFFF

    @kernel(threads=32)
    def narrow_mask(x, out):
        lane = cuda.threadIdx.x
        out[lane] = cuda.shfl_xor_sync(mask, x[lane], 1)

    return narrow_mask


def register_pool(plant: str) -> Kernel:
    """Warpgroup 0 gives registers to the two others; each of the 384 threads starts with 168."""
    give, take = setmaxnreg_dec(176 if plant == "dec" else 24), setmaxnreg_inc(240)
    keeps = plant == "keeps"

    @kernel(threads=384, min_blocks=1, arch="90a")
    def register_pool(x, out):
        t = cuda.threadIdx.x
        if t < 128:
            if not keeps:
                give()
        else:
            take()
        out[t] = x[t]

    return register_pool


def _swapped(by: int):
    return lambda x: x[np.arange(32) ^ by]


ENTRIES = (
    Entry("barrier_after_return", DivergentBarrier, "threads beyond the row return before a syncthreads()",
          early_return, vector(50, lambda x: x[::-1]), "cuda.syncthreads()", block=64),
    Entry("barrier_in_two_places", DivergentBarrier, "half of the block comes to another syncthreads()", two_places,
          vector(64, lambda x: x[::-1]), "cuda.syncthreads()", block=64),
    Entry("barrier_counts", BarrierMismatch, "bar_sync with another count than bar_arrive", producer,
          vector(32, lambda x: x[::-1]), "bar_", block=64),
    Entry("deadlock_named_barrier", Deadlock, "arrive on one named barrier, wait at another", another_number,
          vector(32, lambda x: x[::-1]), "bar_sync(1, 64)", block=64, threads=tuple(range(32, 64))),
    Entry("deadlock_bytes", Deadlock, "an mbarrier is told to expect bytes that no copy brings",
          lambda broken: counted("bytes" if broken else ""), vector(32, lambda x: x.sum(), 1), "mbarrier_wait(bar",
          threads=(0,)),
    Entry("deadlock_arrivals", Deadlock, "an mbarrier expects one arrival more than there are threads",
          lambda broken: counted("missing" if broken else ""), vector(32, lambda x: x.sum(), 1),
          "mbarrier_wait(bar", threads=(0,)),
    Entry("deadlock_polling", Deadlock, "a loop polls for a phase that never ends", polled,
          vector(32, lambda x: x[::-1]), "mbarrier_try_wait(bar", block=64, threads=tuple(range(32, 64))),
    Entry("deadlock_shuffle", Deadlock, "one lane skips a shuffle that its warp executes", absent_lane,
          vector(32, lambda x: x + x[np.arange(32) ^ 16]), "shfl_xor", threads=tuple(range(31))),
    Entry("deadlock_register_pool", Deadlock, "a warpgroup asks for registers that no other gives up",
          lambda broken: register_pool("keeps" if broken else ""), vector(384, lambda x: x), "take()", block=384,
          threads=tuple(range(128, 384))),
    Entry("collective_of_two_kinds", DivergentCollective, "half of a warp executes another shuffle", two_shuffles,
          vector(32, lambda x: x + _swapped(1)(x)), "shfl_"),
    Entry("collective_mask", DivergentCollective, "lanes execute a shuffle whose mask does not name them", narrow_mask,
          vector(32, _swapped(1)), "cuda.shfl_xor_sync"),
    Entry("register_pool", RegisterPool, "setmaxnreg_dec to more registers than the thread holds",
          lambda broken: register_pool("dec" if broken else ""), vector(384, lambda x: x), "give()", block=384),
)  # fmt: skip
