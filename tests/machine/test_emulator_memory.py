"""Shared and global memory on the emulator: arrays, views, alignment, atomics with plain accesses, and the shadow's
books."""

import numpy as np
import pytest

from flashnumba.machine.emulator import Misaligned, OutOfBounds, Race, ReadOnly, launch
from flashnumba.machine.function import kernel
from flashnumba.machine.instructions import (
    global_address,
    ld_global_v4_f32,
    ld_shared_f32,
    shared_address,
    st_shared_v4_f32,
)
from flashnumba.machine.numba import cuda, float32, int16, uint8, uint32, uint64

SEEDS = [0, 1, 2]


# -- shared memory ----------------------------------------------------------------------------------------------------
@kernel(threads=32)
def static_and_dynamic(x, out):
    dynamic = cuda.shared.array(0, float32)
    small = cuda.shared.array(3, uint8)
    table = cuda.shared.array((2, 4, 4), float32)
    t = cuda.threadIdx.x
    dynamic[t] = x[t]
    table[t // 16, t // 4 % 4, t % 4] = x[t]
    if t < 3:
        small[t] = t + 254
    cuda.syncthreads()
    row = table[1, 2]
    part = dynamic[8:16]
    out[t] = row[t % 4] + part[t % 8] + small[t % 3]


def test_static_dynamic_views_and_slices():
    x, out = np.arange(32, dtype=np.float32), np.empty(32, np.float32)
    launch(static_and_dynamic, 1, 32, [x, out], shared=128, seed=2)
    t = np.arange(32)
    np.testing.assert_array_equal(out, x[24 + t % 4] + x[8 + t % 8] + np.array([254, 255, 0])[t % 3])


@kernel(threads=32)
def reinterpreted(out):
    smem = cuda.shared.array(0, uint8)
    words = cuda.shared.array(0, uint32)
    halves = smem[64:].view(np.uint16)
    t = cuda.threadIdx.x
    words[16 + t] = t * 65537
    cuda.syncthreads()
    out[t] = halves[2 * t + 1] + smem[64 + 4 * t]


def test_dynamic_memory_is_one_whatever_it_is_seen_as():
    out = np.empty(32, np.int64)
    launch(reinterpreted, 1, 32, [out], shared=192)
    np.testing.assert_array_equal(out, 2 * np.arange(32))


@kernel(threads=1)
def alignments(out):
    a = cuda.shared.array(3, uint8)
    b = cuda.shared.array(3, float32)
    c = cuda.shared.array(4, uint8, alignment=128)
    out[0], out[1], out[2] = shared_address(a), shared_address(b), shared_address(c)


def test_alignment_of_shared_arrays():
    out = np.zeros(3, np.int64)
    launch(alignments, 1, 1, [out])
    a, b, c = out
    assert b % 4 == 0 and c % 128 == 0 and b >= a + 3 and c >= b + 12


@kernel(threads=32)
def whole_block(out):
    smem = cuda.shared.array(0, uint8)
    t = cuda.threadIdx.x
    last = smem.shape[0] - 32
    smem[last + t] = t
    cuda.syncthreads()
    out[t] = smem[last + 31 - t]


def test_the_last_byte_of_the_largest_block():
    out = np.zeros(32, np.int64)
    launch(whole_block, 1, 32, [out], shared=232448)
    assert list(out) == list(range(31, -1, -1))


@kernel(threads=32)
def too_far(x, out, offset):
    s = cuda.shared.array(32, float32)
    t = cuda.threadIdx.x
    s[t] = x[t]
    out[t] = ld_shared_f32(shared_address(s) + uint32(4 * t + offset))


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize(("offset", "fault"), [(0, None), (128, OutOfBounds), (2, Misaligned), (1 << 31, OutOfBounds)])
def test_shared_addresses(offset, fault, checks):
    arguments = [np.arange(32, dtype=np.float32), np.zeros(32, np.float32), offset]
    if fault is None:
        launch(too_far, 1, 32, arguments, checks=checks)
        assert list(arguments[1]) == list(range(32))
    else:
        with pytest.raises(fault):
            launch(too_far, 1, 32, arguments, checks=checks)


def make_bytes(step):
    @kernel(threads=32)
    def neighbours(out):
        s = cuda.shared.array(96, uint8)
        wide = cuda.shared.array(8, float32)
        t = cuda.threadIdx.x
        if t < 8:
            wide[t] = float32(t)
        s[step * t] = t
        s[step * t] = s[step * t] + 1
        cuda.syncthreads()
        out[t] = s[step * (31 - t)] + wide[t % 8]

    return neighbours


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_threads_on_neighbouring_bytes_do_not_race(step, seed):
    out = np.zeros(32, np.float32)
    launch(make_bytes(step), 1, 32, [out], seed=seed)
    np.testing.assert_array_equal(out, 32 - np.arange(32) + np.arange(32) % 8)


@kernel(threads=2)
def overlapping(out):
    smem = cuda.shared.array(8, uint8, alignment=8)
    halves = smem.view(np.int16)
    if cuda.threadIdx.x == 0:
        smem[1] = 3
    else:
        halves[0] = 5


def test_a_byte_and_the_half_around_it_race():
    for seed in range(4):
        with pytest.raises(Race):
            launch(overlapping, 1, 2, [np.zeros(1)], seed=seed)


@kernel(threads=64)
def many_readers(x, out, rounds):
    s = cuda.shared.array(4, float32)
    t = cuda.threadIdx.x
    total = float32(0)
    for i in range(rounds):
        if t < 4:
            s[t] = x[i % 8, t]
        cuda.syncthreads()
        for k in range(4):
            total += s[k]
        cuda.syncthreads()
    out[t] = total


def test_the_books_stay_small_over_many_barriers(monkeypatch):
    from flashnumba.machine.emulator import shared_memory

    monkeypatch.setattr(shared_memory, "SETS", 64)
    sizes = []
    forget = shared_memory.SharedMemory._forget_sets

    def recording(self):
        forget(self)
        sizes.append(len(self.sets))

    monkeypatch.setattr(shared_memory.SharedMemory, "_forget_sets", recording)
    x, out = np.arange(32, dtype=np.float32).reshape(8, 4), np.zeros(64, np.float32)
    launch(many_readers, 1, 64, [x, out, 40])
    assert (out == x.sum() * 5).all()
    assert len(sizes) > 5 and max(sizes) < 200  # 40 rounds make 2500 sets


# -- global memory ----------------------------------------------------------------------------------------------------
@kernel(threads=32)
def doubled(x, out):
    i = cuda.threadIdx.x
    if i < x.shape[0]:
        for j in range(x.shape[1]):
            out[i, j] = x[i, j] * 2


LAYOUTS = {
    "contiguous": lambda a: a,
    "transposed": lambda a: a.reshape(6, 5).T,
    "every other column": lambda a: np.repeat(a, 2, axis=1)[:, ::2],
    "negative strides": lambda a: a[::-1, ::-1],
    "broadcast": lambda a: np.broadcast_to(a[:1], a.shape),
    "no rows": lambda a: a[:0],
    "no columns": lambda a: a[:, :0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int8, np.uint32, np.int64])
def test_strided_arrays(layout, dtype):
    x = LAYOUTS[layout](np.arange(30).astype(dtype).reshape(5, 6))
    out = np.full(x.shape[::-1], 99, dtype).T
    report = launch(doubled, 1, 32, [x, out])
    np.testing.assert_array_equal(out, x * 2)
    assert report.loaded == report.stored == x.size * x.itemsize


@kernel(threads=1)
def scalar(x, out):
    out[()] = x[()] + x[()]


def test_arrays_without_axes():
    out = np.array(0.0)
    launch(scalar, 1, 1, [np.array(2.5), out])
    assert out == 5


@kernel(threads=8)
def by_address(x, out):
    frag = cuda.local.array(4, float32)
    t = cuda.threadIdx.x
    ld_global_v4_f32(frag, 0, global_address(x) + uint64(16 * t))
    for i in range(4):
        out[4 * t + i] = frag[i]


def test_an_address_starts_at_a_views_first_element_and_ends_at_its_last():
    root, out = np.arange(64, dtype=np.float32), np.zeros(32, np.float32)
    launch(by_address, 1, 8, [root[16:48], out])
    np.testing.assert_array_equal(out, root[16:48])
    with pytest.raises(OutOfBounds, match="hits no array; the nearest array is x"):
        launch(by_address, 1, 8, [root[16:44], out])
    with pytest.raises(Misaligned):
        launch(by_address, 1, 8, [root[1:33], out])


@kernel(threads=1)
def outside(x, i, j):
    x[i, j] = 1


@pytest.mark.parametrize(("i", "j"), [(2, 0), (-1, 0), (0, 3), (0, -1)])
def test_no_index_wraps_around(i, j):
    x = np.zeros((2, 3), np.float32)
    with pytest.raises(OutOfBounds, match=rf"index \[{i}, {j}\] of x, whose shape is \(2, 3\)"):
        launch(outside, 1, 1, [x, i, j])


@kernel(threads=1)
def counts(x):
    cuda.atomic.add(x, 0, 1)


def test_no_atomic_into_a_read_only_array():
    x = np.zeros(1, np.int32)
    x.flags.writeable = False
    with pytest.raises(ReadOnly):
        launch(counts, 1, 1, [x])


@kernel(threads=4)
def spilled(x, out):
    s = cuda.shared.array((4, 4), float32, alignment=16)
    frag = cuda.local.array(4, float32)
    t = cuda.threadIdx.x
    for i in range(4):
        frag[i] = x[t, i]
    st_shared_v4_f32(shared_address(s) + uint32(16 * t), frag, 0)
    cuda.syncthreads()
    for i in range(4):
        out[i, t] = s[t, i]


def test_vectors_and_elements_of_shared_memory_are_the_same_bytes():
    x, out = np.arange(16, dtype=np.float32).reshape(4, 4), np.zeros((4, 4), np.float32)
    for checks in (True, False):
        launch(spilled, 1, 4, [x, out], checks=checks, seed=1)
        np.testing.assert_array_equal(out, x.T)


@kernel(threads=1)
def shared_integers(out):
    s = cuda.shared.array(2, int16)
    s[0] = 40000
    s[1] = -1
    out[0], out[1] = s[0], s[1]
    out[2] = 1 << 40


def test_shared_and_global_integers_wrap():
    out = np.zeros(3, np.int32)
    launch(shared_integers, 1, 1, [out])
    assert list(out) == [40000 - 65536, -1, 0]
