"""Asynchronous copies and mbarriers on the emulator: late, complete, and where the layout says."""

from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest

from flashnumba.machine.emulator import Deadlock, Misaligned, OutOfBounds, launch
from flashnumba.machine.function import kernel
from flashnumba.machine.instructions import (
    bulk_commit,
    bulk_load,
    bulk_prefetch,
    bulk_store,
    bulk_wait,
    cp_async_4,
    cp_async_4_zfill,
    cp_async_8,
    cp_async_8_zfill,
    cp_async_16,
    cp_async_16_zfill,
    cp_async_commit,
    cp_async_wait,
    cp_async_wait_all,
    fence_mbarrier_init,
    fence_proxy_async,
    global_address,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_expect_tx,
    mbarrier_init,
    mbarrier_inval,
    mbarrier_try_wait,
    mbarrier_wait,
    shared_address,
    tma_load_1d,
    tma_load_2d,
    tma_load_3d,
    tma_load_4d,
    tma_store_1d,
    tma_store_2d,
    tma_store_3d,
    tma_store_4d,
)
from flashnumba.machine.numba import cuda, float32, int32, uint8, uint32, uint64

SEEDS = [0, 1, 2]
COPY = {4: (cp_async_4, cp_async_4_zfill), 8: (cp_async_8, cp_async_8_zfill), 16: (cp_async_16, cp_async_16_zfill)}
LOAD = [tma_load_1d, tma_load_2d, tma_load_3d, tma_load_4d]
STORE = [tma_store_1d, tma_store_2d, tma_store_3d, tma_store_4d]


@dataclass
class Box:
    """What the emulator asks of a tensor map, without the rules that a map for the hardware must keep."""

    array: np.ndarray
    box: tuple[int, ...]
    swizzle: int


# -- cp.async ---------------------------------------------------------------------------------------------------------
def make_copy(nbytes, zfill):
    copy, fill = COPY[nbytes]

    @kernel(threads=32, arch="80")
    def copied(x, out, valid):
        smem = cuda.shared.array(32 * nbytes, uint8, alignment=16)
        t = cuda.threadIdx.x
        at, source = shared_address(smem) + uint32(nbytes * t), global_address(x) + uint64(nbytes * t)
        if zfill:
            fill(at, source, uint32(valid))
        else:
            copy(at, source)
        cp_async_wait_all()
        cuda.syncthreads()
        for i in range(nbytes):
            out[32 * i + t] = smem[32 * i + t]

    return copied


@pytest.mark.parametrize("nbytes", [4, 8, 16])
@pytest.mark.parametrize("seed", SEEDS)
def test_cp_async_of_every_size(nbytes, seed):
    x = np.random.default_rng(0).integers(0, 256, 32 * nbytes).astype(np.uint8)
    out = np.full_like(x, 99)
    report = launch(make_copy(nbytes, False), 1, 32, [x, out, 0], seed=seed, arch="80")
    np.testing.assert_array_equal(out, x)
    assert report.loaded == x.size
    for valid in range(nbytes + 1):
        report = launch(make_copy(nbytes, True), 1, 32, [x, out, valid], seed=seed, arch="80")
        np.testing.assert_array_equal(out.reshape(32, -1)[:, :valid], x.reshape(32, -1)[:, :valid])
        assert not out.reshape(32, -1)[:, valid:].any() and report.loaded == 32 * valid


@kernel(threads=1, arch="80")
def groups(x, out):
    s = cuda.shared.array(4, float32)
    for i in range(4):
        cp_async_4(shared_address(s) + uint32(4 * i), global_address(x) + uint64(4 * i))
        cp_async_commit()
    wait2()
    x[1] = float32(-1)
    x[2] = float32(-2)
    out[0], out[1] = s[0], s[1]
    wait1()
    out[2] = s[2]
    x[3] = float32(-3)
    wait0()
    out[3] = s[3]


wait0, wait1, wait2 = cp_async_wait(0), cp_async_wait(1), cp_async_wait(2)


def test_groups_arrive_at_their_wait_and_not_before():
    x, out = np.arange(4, dtype=np.float32) + 10, np.zeros(4, np.float32)
    launch(groups, 1, 1, [x, out], arch="80")
    # What changes in global memory between the start and the wait shows which groups had arrived by then.
    assert list(out) == [10, 11, -2, -3]


# -- mbarriers --------------------------------------------------------------------------------------------------------
def make_ring(slots, threads, polling):
    @kernel(threads=32 + threads, arch="90a")
    def ring(x, out, rounds):
        s = cuda.shared.array((slots, 32), float32, alignment=16)
        bars = cuda.shared.array(2 * slots, uint64)
        t = cuda.threadIdx.x
        if t == 0:
            for i in range(slots):
                mbarrier_init(shared_address(bars) + uint32(8 * i), uint32(1))
                mbarrier_init(shared_address(bars) + uint32(8 * (slots + i)), uint32(threads))
            fence_mbarrier_init()
        cuda.syncthreads()
        if t == 0:
            for i in range(rounds):
                full = shared_address(bars) + uint32(8 * (i % slots))
                mbarrier_wait(full + uint32(8 * slots), uint32(i // slots % 2 ^ 1))
                mbarrier_expect_tx(full, uint32(64))
                mbarrier_arrive_expect_tx(full, uint32(64))
                bulk_load(
                    shared_address(s) + uint32(128 * (i % slots)),
                    global_address(x) + uint64(128 * i),
                    uint32(128),
                    full,
                )
        elif t >= 32:
            total = float32(0)
            for i in range(rounds):
                full = shared_address(bars) + uint32(8 * (i % slots))
                if polling:
                    while not mbarrier_try_wait(full, uint32(i // slots % 2)):
                        pass
                else:
                    mbarrier_wait(full, uint32(i // slots % 2))
                total += s[i % slots, t % 32]
                mbarrier_arrive(full + uint32(8 * slots))
            out[t - 32] = total

    return ring


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("polling", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_ring_of_slots_over_many_wraps(slots, polling, seed):
    x, out = np.random.default_rng(1).integers(0, 99, (21, 32)).astype(np.float32), np.zeros(64, np.float32)
    launch(make_ring(slots, 64, polling), 1, 96, [x, out, 21], seed=seed)
    np.testing.assert_array_equal(out, np.tile(x.sum(0), 2))


@kernel(threads=64, arch="90a")
def two_polls(out):
    bars = cuda.shared.array(2, uint64)
    t = cuda.threadIdx.x
    if t == 0:
        mbarrier_init(shared_address(bars), uint32(32))
        mbarrier_init(shared_address(bars) + uint32(8), uint32(32))
    cuda.syncthreads()
    if t >= 32:
        mbarrier_arrive(shared_address(bars) + uint32(8 * (t % 2)))
        mbarrier_arrive(shared_address(bars) + uint32(8 * (t % 2)))
    else:
        first = False
        second = False
        while not (first and second):
            first = first or mbarrier_try_wait(shared_address(bars), uint32(0))
            second = second or mbarrier_try_wait(shared_address(bars) + uint32(8), uint32(0))
        out[t] = 1


@pytest.mark.parametrize("seed", SEEDS)
def test_two_mbarriers_polled_in_turn(seed):
    out = np.zeros(32, np.int64)
    launch(two_polls, 1, 64, [out], seed=seed)
    assert out.all()


@kernel(threads=32, arch="90a")
def reused(out):
    bars = cuda.shared.array(1, uint64)
    t = cuda.threadIdx.x
    for i in range(3):
        if t == 0:
            mbarrier_init(shared_address(bars), uint32(32 + i))
        cuda.syncthreads()
        if t < i:
            mbarrier_arrive(shared_address(bars))
        mbarrier_arrive(shared_address(bars))
        mbarrier_wait(shared_address(bars), uint32(0))
        cuda.syncthreads()
        if t == 0:
            mbarrier_inval(shared_address(bars))
            bars[0] = 7
    if t == 0:
        out[0] = bars[0]


def test_an_mbarrier_is_given_back_and_made_again():
    out = np.zeros(1, np.int64)
    launch(reused, 1, 32, [out], seed=1)
    assert out[0] == 7


@kernel(threads=32, arch="90a")
def more_than_expected(x):
    s = cuda.shared.array(32, float32, alignment=16)
    bars = cuda.shared.array(1, uint64)
    if cuda.threadIdx.x == 0:
        mbarrier_init(shared_address(bars), uint32(1))
        fence_mbarrier_init()
        mbarrier_arrive_expect_tx(shared_address(bars), uint32(64))
        bulk_load(shared_address(s), global_address(x), uint32(128), shared_address(bars))
        mbarrier_wait(shared_address(bars), uint32(0))


def test_more_bytes_than_expected():
    with pytest.raises(Deadlock, match="64 bytes came that no thread expected"):
        launch(more_than_expected, 1, 32, [np.zeros(32, np.float32)])


# -- tensor copies ----------------------------------------------------------------------------------------------------
def make_tensor(rank, nbytes):
    load, store = LOAD[rank - 1], STORE[rank - 1]

    @kernel(threads=32, arch="90a")
    def there_and_back(source, target, image, at0, at1, at2, at3):
        smem = cuda.shared.array(nbytes, uint8, alignment=1024)
        bars = cuda.shared.array(1, uint64)
        t = cuda.threadIdx.x
        at = (int32(at0), int32(at1), int32(at2), int32(at3))[:rank]
        if t == 0:
            mbarrier_init(shared_address(bars), uint32(1))
            fence_mbarrier_init()
            mbarrier_arrive_expect_tx(shared_address(bars), uint32(nbytes))
            load(shared_address(smem), source, shared_address(bars), *at)
        cuda.syncthreads()
        mbarrier_wait(shared_address(bars), uint32(0))
        for i in range(t, nbytes, 32):
            image[i] = smem[i]
        if t == 0 and min(at0, at1, at2, at3) >= 0:  # a store may not start before the tensor
            store(target, shared_address(smem), *at)
            bulk_commit()
            bulk_wait_all()

    return there_and_back


bulk_wait_all = bulk_wait(0)
SHAPES = [(100,), (9, 40), (3, 9, 40), (2, 3, 9, 40)]
BOXES = [(64,), (8, 16), (2, 8, 16), (2, 2, 4, 16)]


def box_of(array, box, at):
    """The box of ``array`` at coordinates (innermost first), element by element."""
    tile = np.zeros(box, array.dtype)
    for within in product(*map(range, box)):
        index = [i + start for i, start in zip(within, reversed(at), strict=True)]
        if all(0 <= i < n for i, n in zip(index, array.shape, strict=True)):
            tile[within] = array[tuple(index)]
    return tile


def swizzled_image(tile, swizzle):
    """Bytes of a box in shared memory: the 16-byte chunk in row r (128 bytes a row) goes to column c ^ (r mod ...)."""
    chunks = np.ascontiguousarray(tile).view(np.uint8).reshape(-1, 16)
    image = np.zeros_like(chunks)
    for i, chunk in enumerate(chunks):
        row, column = divmod(i, 8)
        image[8 * row + (column ^ row % {0: 1, 32: 2, 64: 4, 128: 8}[swizzle])] = chunk
    return image.reshape(-1)


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("place", ["inside", "before", "beyond", "outside"])
def test_tensor_copies(rank, swizzle, place):
    box = (*BOXES[rank - 1][:-1], (swizzle or 128) // 4) if rank > 1 else BOXES[0]
    array = np.random.default_rng(rank).integers(1, 1000, SHAPES[rank - 1]).astype(np.int32)
    at = {"inside": (4, 1, 1, 0), "before": (-4, -2, -1, -1), "beyond": (28, 5, 2, 1), "outside": (200, 0, 0, 0)}[
        place
    ][:rank]
    expected = box_of(array, box, at)
    target, image = np.full_like(array, -1), np.zeros(expected.nbytes, np.uint8)
    arguments = [Box(array, box, swizzle), Box(target, box, swizzle), image, *at, *[0] * (4 - rank)]
    launch(make_tensor(rank, expected.nbytes), 1, 32, arguments, seed=rank)
    np.testing.assert_array_equal(image, swizzled_image(expected, swizzle))
    mask = np.zeros_like(array)
    if min(at) >= 0:
        mask[tuple(slice(max(s, 0), max(s + b, 0)) for s, b in zip(reversed(at), box, strict=True))] = 1
    np.testing.assert_array_equal(target, np.where(mask, array, -1))


@kernel(threads=32, arch="90a")
def bulk_there_and_back(x, out):
    s = cuda.shared.array(32, float32, alignment=16)
    bars = cuda.shared.array(1, uint64)
    t = cuda.threadIdx.x
    if t == 0:
        mbarrier_init(shared_address(bars), uint32(1))
        fence_mbarrier_init()
        mbarrier_arrive_expect_tx(shared_address(bars), uint32(128))
        bulk_load(shared_address(s), global_address(x), uint32(128), shared_address(bars))
    cuda.syncthreads()
    mbarrier_wait(shared_address(bars), uint32(0))
    s[t] = s[t] + float32(1)
    fence_proxy_async()
    cuda.syncthreads()
    if t == 0:
        bulk_store(global_address(out), shared_address(s), uint32(128))
        bulk_commit()
        bulk_wait_all()


@pytest.mark.parametrize("seed", SEEDS)
def test_bulk_copies_and_their_bytes(seed):
    x, out = np.arange(32, dtype=np.float32), np.zeros(32, np.float32)
    report = launch(bulk_there_and_back, 1, 32, [x, out], seed=seed)
    np.testing.assert_array_equal(out, x + 1)
    assert (report.loaded, report.stored) == (128, 128)


@kernel(threads=1, arch="90a")
def late(x, out):
    s = cuda.shared.array(4, float32, alignment=16)
    bars = cuda.shared.array(1, uint64)
    mbarrier_init(shared_address(bars), uint32(1))
    fence_mbarrier_init()
    bulk_load(shared_address(s), global_address(x), uint32(16), shared_address(bars))
    mbarrier_arrive_expect_tx(shared_address(bars), uint32(16))
    x[1] = float32(-1)
    mbarrier_wait(shared_address(bars), uint32(0))
    x[2] = float32(-2)
    for i in range(4):
        out[i] = s[i]


def test_a_bulk_copy_moves_its_bytes_at_the_wait():
    x, out = np.arange(4, dtype=np.float32) + 10, np.zeros(4, np.float32)
    launch(late, 1, 1, [x, out])
    assert list(out) == [10, -1, 12, 13]


def prefetching(start, nbytes):
    @kernel(threads=32, arch="90", early=True)
    def prefetching(x):
        if cuda.threadIdx.x == 0:
            bulk_prefetch(global_address(x) + uint64(start), uint32(nbytes))

    return prefetching


def test_prefetch():
    """It reads nothing, so an early kernel need not have waited; but it has to be of what is there."""
    x = np.zeros(64, np.float32)
    assert launch(prefetching(16, 240), 1, 32, (x,), arch="90a").loaded == 0
    for start, nbytes, fault in ((0, 272, OutOfBounds), (8, 16, Misaligned), (0, 24, Misaligned)):
        with pytest.raises(fault):
            launch(prefetching(start, nbytes), 1, 32, (x,), arch="90a")
