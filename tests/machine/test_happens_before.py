"""What orders two accesses and what does not: legal programs that must pass, and next to each what it takes to
break it.

Every program runs in several orders of threads. A program is a factory with a plant: "" is legal.
"""

import numpy as np
import pytest

from flashnumba.machine import emulator
from flashnumba.machine.emulator import launch
from flashnumba.machine.function import device, kernel
from flashnumba.machine.instructions import bar_arrive, bar_sync, ldmatrix_x1, shared_address, stmatrix_x1
from flashnumba.machine.numba import cuda, float32, int32, uint16, uint32

SEEDS = range(5)


def holds(make, block, inputs, expected, **options):
    """The legal program gives the expected array, in every order and with checks off too."""
    for seed in SEEDS:
        for checks in (True, False) if seed == 1 else (True,):
            arguments = [np.array(a) if isinstance(a, np.ndarray) else a for a in inputs]
            launch(make(""), options.get("grid", 1), block, arguments, seed=seed, checks=checks, arch="90a")
            np.testing.assert_array_equal(arguments[-1], expected)


def breaks(make, plant, fault, block, inputs, **options):
    """The broken one is told, as the same fault in every order."""
    for seed in SEEDS:
        with pytest.raises(getattr(emulator, fault)):
            launch(make(plant), options.get("grid", 1), block, inputs, seed=seed, arch="90a")


X = np.random.default_rng(0).integers(0, 100, (4, 64)).astype(np.float32)


# -- two buffers, one barrier a tile ----------------------------------------------------------------------------------
def two_buffers(plant):
    buffers = 1 if plant == "one buffer" else 2

    @kernel(threads=64)
    def two_buffers(x, out):
        s = cuda.shared.array((buffers, 64), float32)
        t = cuda.threadIdx.x
        total = float32(0)
        for tile in range(4):
            s[tile % buffers, t] = x[tile, t]
            cuda.syncthreads()
            total += s[tile % buffers, 63 - t]
        out[t] = total

    return two_buffers


def test_two_buffers_need_one_barrier_a_tile():
    holds(two_buffers, 64, [X, np.zeros(64, np.float32)], X[:, ::-1].sum(0))
    breaks(two_buffers, "one buffer", "Race", 64, [X, np.zeros(64, np.float32)])


# -- order handed on through a third thread ---------------------------------------------------------------------------
def handed_on(plant):
    @kernel(threads=96)
    def handed_on(x, out):
        s = cuda.shared.array(32, float32)
        t = cuda.threadIdx.x
        if t < 32:
            s[t] = x[0, t]
            bar_arrive(1, 64)
        elif t < 64:
            if plant != "first":
                bar_sync(1, 64)
            else:
                bar_arrive(1, 64)
            bar_arrive(2, 64)
        else:
            bar_sync(2, 64)
            out[t - 64] = s[95 - t]

    return handed_on


def test_order_is_transitive():
    holds(handed_on, 96, [X, np.zeros(32, np.float32)], X[0, 31::-1])
    breaks(handed_on, "first", "Race", 96, [X, np.zeros(32, np.float32)])


# -- a warp and its neighbours ----------------------------------------------------------------------------------------
def warps(plant):
    @kernel(threads=64)
    def warps(x, out):
        s = cuda.shared.array(64, float32)
        t = cuda.threadIdx.x
        s[t] = x[0, t]
        if plant == "shuffle":
            cuda.shfl_xor_sync(0xFFFFFFFF, t, 1)  # orders no memory
        else:
            cuda.syncwarp()
        out[t] = s[t ^ (32 if plant == "other warp" else 7)]

    return warps


def test_syncwarp_orders_a_warp_only_and_a_shuffle_nothing():
    holds(warps, 64, [X, np.zeros(64, np.float32)], X[0, np.arange(64) ^ 7])
    breaks(warps, "other warp", "Race", 64, [X, np.zeros(64, np.float32)])
    breaks(warps, "shuffle", "Race", 64, [X, np.zeros(64, np.float32)])


def half_masks(plant):
    @kernel(threads=32)
    def half_masks(x, out):
        s = cuda.shared.array(32, float32)
        lane = cuda.threadIdx.x
        s[lane] = x[0, lane]
        if lane < 16:
            cuda.syncwarp(0x0000FFFF)
        else:
            cuda.syncwarp(0xFFFF0000)
        out[lane] = s[lane ^ (16 if plant else 15)]

    return half_masks


def test_syncwarp_orders_the_lanes_of_its_mask():
    holds(half_masks, 32, [X, np.zeros(32, np.float32)], X[0, np.arange(32) ^ 15])
    breaks(half_masks, "across", "Race", 32, [X, np.zeros(32, np.float32)])


# -- what needs no order ----------------------------------------------------------------------------------------------
def own_data(plant):
    @kernel(threads=64)
    def own_data(x, out):
        s = cuda.shared.array(65, float32)
        t = cuda.threadIdx.x
        s[t] = x[0, t]
        s[t] = s[t] * float32(2)
        if t == 0:
            s[64] = float32(5)
        cuda.syncthreads()
        constant = s[64] + s[64]  # all read one element
        s[t] = s[t] + constant
        out[t] = s[t ^ 1] if plant else s[t]

    return own_data


def test_own_data_and_data_that_all_only_read():
    holds(own_data, 64, [X, np.zeros(64, np.float32)], X[0] * 2 + 10)
    breaks(own_data, "neighbour", "Race", 64, [X, np.zeros(64, np.float32)])


# -- atomics ----------------------------------------------------------------------------------------------------------
def counters(plant):
    @kernel(threads=64)
    def counters(x, out):
        counts = cuda.shared.array(4, int32)
        t = cuda.threadIdx.x
        if t < 4:
            counts[t] = 0
        cuda.syncthreads()
        for _ in range(2):
            cuda.atomic.add(counts, int32(x[0, t]) % 4, 1)
            if plant != "no barrier after":
                cuda.syncthreads()
            if t < 4:
                counts[t] = counts[t] * 2
            if plant != "no barrier before":
                cuda.syncthreads()
        if t < 4:
            out[t] = counts[t]

    return counters


def test_atomics_meet_atomics_freely_and_plain_accesses_at_barriers():
    holds(counters, 64, [X, np.zeros(4, np.int32)], np.bincount(X[0].astype(int) % 4, minlength=4) * 6)
    breaks(counters, "no barrier after", "Race", 64, [X, np.zeros(4, np.int32)])
    breaks(counters, "no barrier before", "Race", 64, [X, np.zeros(4, np.int32)])


def lock(plant):
    @kernel(threads=64)
    def lock(out):
        taken = cuda.shared.array(1, int32)
        total = cuda.shared.array(1, int32)
        t = cuda.threadIdx.x
        if t == 0:
            taken[0] = 0
            total[0] = 0
        cuda.syncthreads()
        if t % 32 == 0:
            while cuda.atomic.cas(taken, 0, 0, 1) != 0:
                pass
            if plant != "no acquire":
                cuda.threadfence()
            total[0] = total[0] + t
            if plant != "no release":
                cuda.threadfence()
            cuda.atomic.exch(taken, 0, 0)
        cuda.syncthreads()
        if t == 0:
            out[0] = total[0]

    return lock


def test_a_lock_orders_if_it_is_fenced_on_both_sides():
    holds(lock, 64, [np.zeros(1, np.int32)], [32])
    breaks(lock, "no acquire", "Race", 64, [np.zeros(1, np.int32)])
    breaks(lock, "no release", "Race", 64, [np.zeros(1, np.int32)])


@kernel(threads=64)
def last_block(x, partial, count, out):
    s = cuda.shared.array(1, int32)
    t, b = cuda.threadIdx.x, cuda.blockIdx.x
    cuda.atomic.add(partial, b, x[b, t])
    cuda.threadfence()
    cuda.syncthreads()
    if t == 0:
        s[0] = cuda.atomic.add(count, 0, 1)
    cuda.syncthreads()
    if s[0] == cuda.gridDim.x - 1 and t == 0:
        for i in range(4):
            out[0] += partial[i]


def test_the_last_block_finishes_the_sum():
    for seed in SEEDS:
        out = np.zeros(1, np.float32)
        launch(last_block, 4, 64, [X, np.zeros(4, np.float32), np.zeros(1, np.int32), out], seed=seed)
        assert out[0] == X.sum()


@kernel(threads=32, concurrent=True)
def chain(flag, out):
    b = cuda.blockIdx.x
    if cuda.threadIdx.x == 0:
        while cuda.atomic.add(flag, 0, 0) != cuda.gridDim.x - 1 - b:
            pass
        out[b] = flag[0]
        cuda.threadfence()
        cuda.atomic.add(flag, 0, 1)
    cuda.syncthreads()


def test_concurrent_blocks_wait_for_one_another():
    for seed in SEEDS:
        out = np.zeros(3, np.int32)
        launch(chain, 3, 32, [np.zeros(1, np.int32), out], seed=seed)
        assert list(out) == [2, 1, 0]


# -- collectives and a lane's own accesses ----------------------------------------------------------------------------
def matrices(plant):
    @kernel(threads=32)
    def matrices(x, out):
        s = cuda.shared.array((8, 8), uint16, alignment=16)
        frag = cuda.local.array(1, uint32)
        lane = cuda.threadIdx.x
        row = shared_address(s) + uint32(16 * (lane % 8))
        frag[0] = x[lane]
        stmatrix_x1(row, frag, 0)
        if lane < 8:
            s[lane, 0] = s[lane, 0] + 1  # its own row: the lane gave its address
        if plant != "syncwarp":
            cuda.syncwarp()
        ldmatrix_x1(frag, 0, row)
        if lane < 8:
            s[lane, 1] = 0  # after the ldmatrix in program order
        out[lane] = frag[0]

    return matrices


def test_a_lane_sees_its_warps_instructions_in_program_order():
    x = np.arange(32, dtype=np.uint32) * 3 + (np.arange(32, dtype=np.uint32) << 16) + 5
    expected = x + (np.arange(32) % 4 == 0)
    for seed in SEEDS:
        out = np.zeros(32, np.uint32)
        launch(matrices(""), 1, 32, [x, out], seed=seed)
        np.testing.assert_array_equal(out, expected)


# -- barriers ---------------------------------------------------------------------------------------------------------
def places(plant):
    @device
    def meet():
        cuda.syncthreads()

    @kernel(threads=64)
    def places(out):
        t = cuda.threadIdx.x
        if plant == "twice" and t < 32:
            bar_arrive(1, 64)
            bar_arrive(1, 64)
        if plant == "sites" and t < 32:
            meet()
        else:
            meet()
        if plant == "exit" and t < 32:
            return
        if plant == "exit":
            bar_sync(1, 64)
        meet()
        out[t] = t

    return places


def test_barriers_that_do_not_fit():
    holds(places, 64, [np.zeros(64, np.int32)], np.arange(64))
    breaks(places, "sites", "DivergentBarrier", 64, [np.zeros(64, np.int32)])
    breaks(places, "twice", "BarrierMismatch", 64, [np.zeros(64, np.int32)])
    breaks(places, "exit", "Deadlock", 64, [np.zeros(64, np.int32)])


@kernel(threads=64)
def barrier_zero(out):
    if cuda.threadIdx.x < 32:
        bar_sync(0, 64)
    else:
        cuda.syncthreads()


def test_syncthreads_is_barrier_zero():
    breaks(lambda plant: barrier_zero, "", "BarrierMismatch", 64, [np.zeros(1)])
