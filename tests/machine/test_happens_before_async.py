"""The same for copy engines and wgmma: which wait, fence and arrival orders what, legal programs beside broken ones."""

import numpy as np
import pytest

from flashnumba.machine.emulator import launch
from flashnumba.machine.function import kernel
from flashnumba.machine.instructions import (
    bulk_commit,
    bulk_load,
    bulk_store,
    bulk_wait,
    bulk_wait_read,
    cp_async_16,
    cp_async_commit,
    cp_async_wait_all,
    fence_mbarrier_init,
    fence_proxy_async,
    global_address,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    shared_address,
    wgmma,
    wgmma_commit,
    wgmma_fence,
    wgmma_wait,
)
from flashnumba.machine.numba import cuda, float16, float32, int32, uint32, uint64
from flashnumba.tiles.descriptor import make_descriptor
from tests.machine.gallery.tensor import cores
from tests.machine.test_happens_before import SEEDS, X, breaks, holds

stored, read_out, done, one_flying = bulk_wait(0), bulk_wait_read(0), wgmma_wait(0), wgmma_wait(1)


# -- where a proxy fence may stand ------------------------------------------------------------------------------------
def fences(plant):
    @kernel(threads=64, arch="90a")
    def fences(x, out):
        s = cuda.shared.array(64, float32, alignment=16)
        t = cuda.threadIdx.x
        if plant == "before the store":
            fence_proxy_async()
        s[t] = x[0, t]
        if plant in ("writers", "not ordered"):
            fence_proxy_async()
        cuda.syncthreads()
        if plant == "third" and t == 40:
            fence_proxy_async()  # of a thread that knows of all the stores
        if plant == "unordered third" and t == 40:
            fence_proxy_async()
        if plant == "not ordered" and t == 33:
            s[t] = x[0, t]
        if plant != "unordered third":
            cuda.syncthreads()
        if t == 0:
            if plant == "":
                fence_proxy_async()  # of the thread that starts the copy
            bulk_store(global_address(out), shared_address(s), uint32(256))
            bulk_commit()
            stored()

    return fences


@pytest.mark.parametrize("where", ["", "writers", "third"])
def test_a_proxy_fence_may_stand_anywhere_between(where):
    holds(lambda _: fences(where), 64, [X, np.zeros(64, np.float32)], X[0])


@pytest.mark.parametrize("where", ["before the store", "unordered third", "not ordered"])
def test_a_proxy_fence_elsewhere_does_not_help(where):
    breaks(fences, where, "MissingProxyFence", 64, [X, np.zeros(64, np.float32)])


def cleared(plant):
    @kernel(threads=32, arch="90a")
    def cleared(x, out):
        s = cuda.shared.array(32, float32, alignment=16)
        bars = cuda.shared.array(1, uint64)
        t = cuda.threadIdx.x
        s[t] = float32(0)
        if plant != "no fence":
            fence_proxy_async()
        if t == 0:
            mbarrier_init(shared_address(bars), uint32(1))
            fence_mbarrier_init()
        if plant != "no barrier":
            cuda.syncthreads()
        if t == 0:
            mbarrier_arrive_expect_tx(shared_address(bars), uint32(128))
            bulk_load(shared_address(s), global_address(x), uint32(128), shared_address(bars))
        if plant == "no barrier":
            cuda.syncthreads()
        mbarrier_wait(shared_address(bars), uint32(0))
        out[t] = s[31 - t]

    return cleared


def test_a_copy_over_ordinary_stores_is_fenced_and_ordered_too():
    holds(cleared, 32, [X, np.zeros(32, np.float32)], X[0, 31::-1])
    breaks(cleared, "no fence", "MissingProxyFence", 32, [X, np.zeros(32, np.float32)])
    breaks(cleared, "no barrier", "OverwriteInFlight", 32, [X, np.zeros(32, np.float32)])


# -- who may release a slot -------------------------------------------------------------------------------------------
def released(plant):
    """Warp 1 brings rows through one slot; warp 0 reads them, and its lane 0 alone says that all lanes have."""

    @kernel(threads=64, arch="90a")
    def released(x, out):
        s = cuda.shared.array(64, float32, alignment=16)
        bars = cuda.shared.array(2, uint64)
        full, empty, t = shared_address(bars), shared_address(bars) + uint32(8), cuda.threadIdx.x
        if t == 0:
            mbarrier_init(full, uint32(1))
            mbarrier_init(empty, uint32(1))
            fence_mbarrier_init()
        cuda.syncthreads()
        if t == 32:
            for row in range(4):
                mbarrier_wait(empty, uint32(row % 2 ^ 1))
                mbarrier_arrive_expect_tx(full, uint32(256))
                bulk_load(shared_address(s), global_address(x) + uint64(256 * row), uint32(256), full)
        elif t < 32:
            total = float32(0)
            for row in range(4):
                mbarrier_wait(full, uint32(row % 2))
                total += s[t] + s[t + 32]
                if plant != "no syncwarp":
                    cuda.syncwarp()
                if t == 0:
                    mbarrier_arrive(empty)
            out[t] = total

    return released


def test_a_leader_releases_for_its_warp_after_syncwarp():
    holds(released, 64, [X, np.zeros(32, np.float32)], X[:, :32].sum(0) + X[:, 32:].sum(0))
    breaks(released, "no syncwarp", "ReadInFlight", 64, [X, np.zeros(32, np.float32)])


def two_stores(plant):
    """Two threads store the same tile to two places; both must be done before it is written again."""

    @kernel(threads=64, arch="90a")
    def two_stores(x, out):
        s = cuda.shared.array(64, float32, alignment=16)
        t = cuda.threadIdx.x
        for row in range(2):
            s[t] = x[row, t]
            fence_proxy_async()
            cuda.syncthreads()
            if t % 32 == 0:
                bulk_store(global_address(out) + uint64(256 * (2 * row + t // 32)), shared_address(s), uint32(256))
                bulk_commit()
                if plant != ("first" if t == 0 else "second"):
                    read_out()
            cuda.syncthreads()
        if t % 32 == 0:
            stored()

    return two_stores


def test_each_of_two_copies_out_of_a_tile_is_waited_for():
    holds(two_stores, 64, [X, np.zeros((4, 64), np.float32)], X[[0, 0, 1, 1]])
    for plant in ("first", "second"):
        breaks(two_stores, plant, "OverwriteInFlight", 64, [X, np.zeros((4, 64), np.float32)])


# -- wgmma ------------------------------------------------------------------------------------------------------------
A = np.random.default_rng(1).integers(-8, 9, (64, 16)).astype(np.float16)
B = np.random.default_rng(2).integers(-8, 9, (2, 8, 16)).astype(np.float16)
INPUTS = [cores(A), cores(B)]
multiply, multiply_registers, descriptor = wgmma(8), wgmma(8, a="registers"), make_descriptor(0)


def by_threads(product: np.ndarray) -> np.ndarray:
    """[64, 8] -> [128, 4], as the accumulators lie."""
    t, i = np.arange(128)[:, None], np.arange(4)
    return product[t // 32 * 16 + t % 32 // 4 + i // 2 * 8, t % 4 * 2 + i % 2]


PRODUCTS = [by_threads(A.astype(np.float32) @ b.astype(np.float32).T) for b in B]


def copied(plant):
    """Operands that cp.async brings: an ordinary write, as far as the tensor core is concerned."""

    @kernel(threads=160, arch="90a")
    def copied(a, b, out):
        smem = cuda.shared.array(1024 + 128, float16, alignment=128)
        acc = cuda.local.array(4, float32)
        t = cuda.threadIdx.x
        if t < 128:
            cp_async_16(shared_address(smem) + uint32(16 * t), global_address(a) + uint64(16 * t))
        elif t < 144:
            cp_async_16(shared_address(smem) + uint32(16 * t), global_address(b) + uint64(16 * (t - 128)))
        cp_async_commit()
        cp_async_wait_all()
        if plant != "no proxy fence":
            fence_proxy_async()
        cuda.syncthreads()
        if t < 128:
            wgmma_fence()
            at = shared_address(smem)
            multiply(acc, 0, descriptor(at, 128, 256), descriptor(at + uint32(2048), 128, 256), int32(0))
            wgmma_commit()
            done()
            for i in range(4):
                out[t, i] = acc[i]

    return copied


def test_cp_async_before_a_wgmma():
    holds(copied, 160, [*INPUTS, np.zeros((128, 4), np.float32)], PRODUCTS[0])
    breaks(copied, "no proxy fence", "MissingProxyFence", 160, [*INPUTS, np.zeros((128, 4), np.float32)])


def waits(plant):
    """Two products in flight; one thread overwrites the first operand, which only that wait allows."""
    victim = 1 if plant == "the second operand" else 0

    @kernel(threads=128, arch="90a")
    def waits(a, b, out):
        smem = cuda.shared.array(1024 + 256, float16, alignment=128)
        acc = cuda.local.array(8, float32)
        t = cuda.threadIdx.x
        for i in range(8):
            smem[128 * i + t] = a[128 * i + t]
        for i in range(2):
            smem[1024 + 128 * i + t] = b[i, t]
        fence_proxy_async()
        cuda.syncthreads()
        at = shared_address(smem)
        wgmma_fence()
        for i in range(2):
            b_at = at + uint32(2048 + 256 * i)
            multiply(acc, 4 * i, descriptor(at, 128, 256), descriptor(b_at, 128, 256), int32(0))
            wgmma_commit()
        if t < 64:
            done()
        else:
            one_flying()
            smem[1024 + 128 * victim + t] = float16(0)
            done()
        for i in range(8):
            out[t, i] = acc[i]
        if plant == "again":
            multiply(acc, 0, descriptor(at, 128, 256), descriptor(at + uint32(2048), 128, 256), int32(0))
            wgmma_commit()
            done()

    return waits


def test_a_wait_covers_its_own_groups_whoever_waits_for_more():
    out = np.zeros((128, 8), np.float32)
    holds(waits, 128, [*INPUTS, out], np.concatenate(PRODUCTS, axis=1))
    breaks(waits, "the second operand", "OverwriteInFlight", 128, [*INPUTS, out])
    breaks(waits, "again", "MissingFence", 128, [*INPUTS, out])  # the accumulators were read since the last fence


def from_registers(plant):
    @kernel(threads=128, arch="90a")
    def from_registers(words, b, out):
        smem = cuda.shared.array(256, float16, alignment=128)
        frag = cuda.local.array(8, uint32)
        acc = cuda.local.array(4, float32)
        t = cuda.threadIdx.x
        for i in range(2):
            smem[128 * i + t] = b[i, t]
        for i in range(4):
            frag[i] = words[t, i]
        fence_proxy_async()
        cuda.syncthreads()
        wgmma_fence()
        for i in range(2):
            b_at = shared_address(smem) + uint32(256 * i)
            multiply_registers(acc, 0, frag, 0, descriptor(b_at, 128, 256), int32(i))
        wgmma_commit()
        frag[0 if plant == "same registers" else 4] = uint32(0)
        done()
        for i in range(4):
            out[t, i] = acc[i]

    return from_registers


def test_registers_of_a_stay_until_the_wait_and_others_are_free():
    t, r = np.arange(128)[:, None], np.arange(4)[None]
    words = A.view(np.uint32)[t // 32 * 16 + t % 32 // 4 + 8 * (r % 2), t % 4 + 4 * (r // 2)]
    inputs = [words, INPUTS[1], np.zeros((128, 4), np.float32)]
    holds(from_registers, 128, inputs, PRODUCTS[0] + PRODUCTS[1])
    breaks(from_registers, "same registers", "AccumulatorInFlight", 128, inputs)


@kernel(threads=32, arch="90a")
def polls_forever(x):
    bars = cuda.shared.array(1, uint64)
    t = cuda.threadIdx.x
    if t == 0:
        mbarrier_init(shared_address(bars), uint32(2))
        fence_mbarrier_init()
        mbarrier_arrive(shared_address(bars))
        cuda.atomic.add(x, 0, 1)
        while cuda.atomic.add(x, 0, 0) < 2:
            pass


def test_an_endless_spin_on_an_atomic_ends(monkeypatch):
    from flashnumba.machine.emulator import Deadlock, names

    monkeypatch.setattr(names, "POLLS", 500)
    for seed in SEEDS:
        with pytest.raises(Deadlock, match="a change of x by an atomic"):
            launch(polls_forever, 1, 32, [np.zeros(1, np.int32)], seed=seed, arch="90a")
