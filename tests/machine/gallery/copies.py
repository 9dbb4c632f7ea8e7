"""Planted faults of asynchronous copies: cp.async, bulk copies, and the mbarriers they report to."""

from __future__ import annotations

import numpy as np

from flashnumba.machine.emulator import (
    MbarrierMisuse,
    MissingProxyFence,
    OverwriteInFlight,
    Race,
    ReadInFlight,
    UnfinishedCopy,
)
from flashnumba.machine.function import Kernel, kernel
from flashnumba.machine.instructions import (
    bulk_commit,
    bulk_load,
    bulk_store,
    bulk_wait,
    bulk_wait_read,
    cp_async_4,
    cp_async_commit,
    cp_async_wait,
    fence_mbarrier_init,
    fence_proxy_async,
    global_address,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    shared_address,
)
from flashnumba.machine.numba import cuda, float32, uint32, uint64
from tests.machine.gallery.entry import Entry, vector

wait_all, wait_but_one = cp_async_wait(0), cp_async_wait(1)
stored, read_out = bulk_wait(0), bulk_wait_read(0)


def cp_async(plant: str) -> Kernel:
    """Each thread copies one element with cp.async and reads another thread's."""

    @kernel(threads=64, arch="80")
    def cp_async(x, out):
        s = cuda.shared.array(64, float32)
        t = cuda.threadIdx.x
        cp_async_4(shared_address(s) + uint32(4 * t), global_address(x) + uint64(4 * t))
        cp_async_commit()
        if plant != "wait":
            wait_all()
        if plant != "barrier":
            cuda.syncthreads()  # the copies that other threads waited for
        out[t] = s[63 - t]
        if plant == "wait":
            wait_all()

    return cp_async


def ring(broken: bool) -> Kernel:
    """Four tiles through two slots; a copy runs one tile ahead."""
    ahead = 2 if broken else 1

    @kernel(threads=32, arch="80")
    def ring(x, out):
        s = cuda.shared.array((2, 32), float32)
        t = cuda.threadIdx.x
        total = float32(0)
        for tile in range(ahead):
            cp_async_4(shared_address(s) + uint32(128 * tile + 4 * t), global_address(x) + uint64(128 * tile + 4 * t))
            cp_async_commit()
        for tile in range(4):
            nxt = tile + ahead
            if nxt < 4:
                cp_async_4(
                    shared_address(s) + uint32(128 * (nxt % 2) + 4 * t), global_address(x) + uint64(128 * nxt + 4 * t)
                )
            cp_async_commit()
            wait_but_one()
            cuda.syncthreads()  # this tile is there for all
            total += s[tile % 2, 31 - t]
            cuda.syncthreads()  # all have read it: its slot may be filled again
        wait_all()
        out[t] = total

    return ring


def loaded(plant: str) -> Kernel:
    """Thread 0 has the copy engine bring a row; an mbarrier tells the others."""

    @kernel(threads=32, arch="90a")
    def loaded(x, out):
        s = cuda.shared.array(32, float32, alignment=16)
        bars = cuda.shared.array(1, uint64)
        bar = shared_address(bars)
        t = cuda.threadIdx.x
        if t == 0 and plant != "uninitialised":
            mbarrier_init(bar, uint32(1))
            if plant != "fence":
                fence_mbarrier_init()
        if plant != "order":
            cuda.syncthreads()  # the mbarrier exists
        if plant == "ordinary" and t == 1:
            bars[0] = uint64(0)
        if t == 0:
            if plant == "twice":
                mbarrier_init(bar, uint32(1))
            mbarrier_arrive_expect_tx(bar, uint32(128))
            if plant == "arrives":
                mbarrier_arrive(bar)
            bulk_load(shared_address(s), global_address(x), uint32(128), bar)
        if plant not in ("wait", "nobody"):
            mbarrier_wait(bar, uint32(0))
        if plant != "nobody":
            out[t] = s[31 - t]

    return loaded


def stored_tiles(plant: str) -> Kernel:
    """Two tiles leave through one staging buffer, which thread 0 hands to the copy engine."""

    @kernel(threads=32, arch="90a")
    def stored_tiles(x, out):
        s = cuda.shared.array(32, float32, alignment=16)
        t = cuda.threadIdx.x
        for tile in range(2):
            s[t] = x[32 * tile + t] + float32(1)
            if plant != "fence":
                fence_proxy_async()
            cuda.syncthreads()  # the tile is complete
            if t == 0:
                bulk_store(global_address(out) + uint64(128 * tile), shared_address(s), uint32(128))
                bulk_commit()
                if plant != "read" and (plant != "wait" or tile == 0):
                    read_out()
            cuda.syncthreads()  # the copy has read the buffer
        if t == 0 and plant != "wait":
            stored()

    return stored_tiles


def unwaited(broken: bool) -> Kernel:
    @kernel(threads=32, arch="80")
    def unwaited(x, out):
        s = cuda.shared.array(64, float32)
        t = cuda.threadIdx.x
        cp_async_4(shared_address(s) + uint32(4 * t), global_address(x) + uint64(4 * t))
        cp_async_commit()
        cp_async_4(shared_address(s) + uint32(128 + 4 * t), global_address(x))
        cp_async_commit()
        wait_but_one()
        out[t] = s[t]
        if not broken:
            wait_all()

    return unwaited


def _entry(name, fault, planted, make, plant, expected, line, size=32, **more):
    return Entry(
        name, fault, planted, lambda broken: make(plant if broken else ""), vector(size, expected), line, **more
    )


def _turned(x: np.ndarray) -> np.ndarray:
    return x[::-1]


ENTRIES = (
    _entry("read_in_flight", ReadInFlight, "no cp_async_wait before the barrier and the read", cp_async, "wait",
           _turned, "out[t] = s[63 - t]", 64, block=64, arch="80"),
    _entry("race_after_cp_async", Race, "each thread waits for its own copies, no barrier for the others'", cp_async,
           "barrier", _turned, "cp_async_4(", 64, block=64, arch="80"),
    Entry("overwrite_in_flight", OverwriteInFlight, "a ring of two slots is filled two tiles ahead: one too many", ring,
          vector(128, lambda x: x.reshape(4, 32)[:, ::-1].sum(0), 32), "cp_async_4(", arch="80"),
    _entry("read_in_flight_bulk", ReadInFlight, "no mbarrier_wait before a bulk copy's bytes are read", loaded, "wait",
           _turned, "bulk_load("),
    _entry("overwrite_bulk_store", OverwriteInFlight, "no bulk_wait_read before the staging buffer is written again",
           stored_tiles, "read", lambda x: x + 1, "s[t] = x[", 64),
    _entry("proxy_fence_bulk_store", MissingProxyFence, "no fence_proxy_async() between stores and a bulk store",
           stored_tiles, "fence", lambda x: x + 1, "bulk_store(", 64, threads=(0,)),
    _entry("proxy_fence_mbarrier", MissingProxyFence, "no fence between mbarrier_init and the copy engine", loaded,
           "fence", _turned, "bulk_load(", threads=(0,)),
    _entry("mbarrier_uninitialised", MbarrierMisuse, "nobody initialises the mbarrier", loaded, "uninitialised",
           _turned, "mbarrier_"),
    _entry("mbarrier_not_ordered", MbarrierMisuse, "no barrier between mbarrier_init and its users", loaded,
           "order", _turned, "mbarrier_wait"),
    _entry("mbarrier_as_memory", MbarrierMisuse, "an ordinary store into an mbarrier's bytes", loaded, "ordinary",
           _turned, "bars[0] = ", threads=(1,)),
    _entry("mbarrier_overrun", MbarrierMisuse, "one arrival more than the mbarrier was initialised for", loaded,
           "arrives", _turned, "mbarrier_arrive(bar)", threads=(0,)),
    _entry("mbarrier_twice", MbarrierMisuse, "an mbarrier in use is initialised again", loaded, "twice", _turned,
           "mbarrier_init(", threads=(0,)),
    Entry("unfinished_cp_async", UnfinishedCopy, "the kernel returns with a cp.async in flight", unwaited,
          vector(32, lambda x: x), "cp_async_4(", arch="80"),
    _entry("unfinished_bulk_store", UnfinishedCopy, "the kernel returns without bulk_wait", stored_tiles, "wait",
           lambda x: x + 1, "bulk_store(", 64, threads=(0,)),
    _entry("unfinished_bulk_load", UnfinishedCopy, "nobody waits for a bulk copy", loaded, "nobody", _turned,
           "bulk_load(", threads=(0,)),
)  # fmt: skip
