"""The emulator's threads: indices, barriers, warps, memories, and what Python may expect of a kernel that runs here."""

import gc
import linecache
import sys
import threading
import time
import weakref

import numpy as np
import pytest


from flashnumba.machine.emulator import Deadlock, OutOfBounds, UninitialisedRead, launch
from flashnumba.machine.emulator.tensor_core import settings
from flashnumba.machine.emulator.thread import Thread
from flashnumba.machine.function import device, kernel
from flashnumba.machine.instructions import bar_arrive, bar_sync, vote_ballot
from flashnumba.machine.numba import cuda, float16, float32, float64, int8, int16, int32, int64, uint8, uint16, uint32, uint64

SEEDS = [0, 1, 2]
ALL = 0xFFFFFFFF


# -- threads ----------------------------------------------------------------------------------------------------------
@kernel(threads=64)
def where(out):
    x, y, z = cuda.grid(3)
    nx, ny, nz = cuda.gridsize(3)
    out[z, y, x] = x + 100 * y + 10000 * z + cuda.blockIdx.x + nx * ny * nz


def test_indices_in_three_dimensions():
    out = np.zeros((4, 4, 6), np.int64)
    report = launch(where, (2, 2, 2), (3, 2, 2), [out])
    z, y, x = np.indices(out.shape)
    np.testing.assert_array_equal(out, x + 100 * y + 10000 * z + x // 3 + 96)
    assert (report.blocks, report.threads, report.stored, report.loaded) == (8, 96, 96 * 8, 0)


@kernel(threads=64)
def warp_places(out):
    t = cuda.threadIdx.x + 4 * cuda.threadIdx.y
    out[t, 0] = cuda.laneid
    out[t, 1] = vote_ballot(cuda.threadIdx.y == 3)


def test_warps_are_cut_from_the_linear_index():
    out = np.zeros((64, 2), np.int64)
    launch(warp_places, 1, (4, 16), [out])
    np.testing.assert_array_equal(out[:, 0], np.arange(64) % 32)
    np.testing.assert_array_equal(out[:, 1], np.repeat([0xF000, 0], 32))


@kernel(threads=128)
def order(out, count):
    out[cuda.atomic.add(count, 0, 1)] = cuda.threadIdx.x


def test_seed_changes_the_order_and_nothing_else():
    def run(seed):
        out, count = np.zeros(128, np.int64), np.zeros(1, np.int64)
        launch(order, 1, 128, [out, count], seed=seed)
        return out

    assert list(run(0)) == list(range(128))
    assert sorted(run(3)) == list(range(128)) and list(run(3)) != list(range(128))
    assert list(run(3)) == list(run(3)) != list(run(4))


# -- barriers ---------------------------------------------------------------------------------------------------------
@kernel(threads=128)
def rotate(x, out, rounds):
    s = cuda.shared.array(128, float32)
    t = cuda.threadIdx.x
    s[t] = x[t]
    for _ in range(rounds):
        cuda.syncthreads()  # the last round is complete
        value = s[(t + 1) % 128]
        cuda.syncthreads()  # all have read
        s[t] = value
    out[t] = s[t]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("checks", [True, False])
def test_syncthreads(seed, checks):
    x, out = np.arange(128, dtype=np.float32), np.empty(128, np.float32)
    launch(rotate, 1, 128, [x, out, 5], seed=seed, checks=checks)
    np.testing.assert_array_equal(out, np.roll(x, -5))


def test_two_hundred_barriers_of_128_threads_are_fast():
    x, out = np.arange(128, dtype=np.float32), np.empty(128, np.float32)
    launch(rotate, 1, 128, [x, out, 1])
    start = time.perf_counter()
    launch(rotate, 1, 128, [x, out, 100])
    assert time.perf_counter() - start < 1.0  # it takes 0.1 s
    np.testing.assert_array_equal(out, np.roll(x, -100))


@kernel(threads=96)
def handed_over(x, out, rounds):
    s = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    if t < 64:
        for i in range(rounds):
            if i > 0:
                bar_sync(2, 96)  # the consumer is done with the buffer
            s[t] = x[i, t]
            bar_arrive(1, 96)  # the buffer is full
    else:
        for i in range(rounds):
            bar_sync(1, 96)
            out[i, t - 64] = s[t - 64] + s[t - 32]
            if i + 1 < rounds:
                bar_arrive(2, 96)


@pytest.mark.parametrize("seed", SEEDS)
def test_named_barriers_between_producer_and_consumer(seed):
    x, out = np.arange(512, dtype=np.float32).reshape(8, 64), np.empty((8, 32), np.float32)
    launch(handed_over, 1, 96, [x, out, 8], seed=seed)
    np.testing.assert_array_equal(out, x[:, :32] + x[:, 32:])


# -- warps ------------------------------------------------------------------------------------------------------------
@kernel(threads=32)
def shuffles(x, out, by):
    lane = cuda.threadIdx.x
    out[0, lane] = cuda.shfl_sync(ALL, x[lane], by)
    out[1, lane] = cuda.shfl_up_sync(ALL, x[lane], by)
    out[2, lane] = cuda.shfl_down_sync(ALL, x[lane], by)
    out[3, lane] = cuda.shfl_xor_sync(ALL, x[lane], by)


@pytest.mark.parametrize("by", [0, 1, 5, 16, 31])
@pytest.mark.parametrize("seed", SEEDS)
def test_shuffles_and_lanes_out_of_range(by, seed):
    x, out, lane = np.arange(32, dtype=np.float32) + 7, np.empty((4, 32), np.float32), np.arange(32)
    launch(shuffles, 1, 32, [x, out, by], seed=seed)
    np.testing.assert_array_equal(out[0], x[by])
    np.testing.assert_array_equal(out[1], np.where(lane >= by, x[lane - by], x))
    np.testing.assert_array_equal(out[2], np.where(lane + by < 32, x[(lane + by) % 32], x))
    np.testing.assert_array_equal(out[3], x[lane ^ by])


@kernel(threads=32)
def halves(x, out):
    lane = cuda.threadIdx.x
    if lane < 16:
        out[lane] = cuda.shfl_xor_sync(0xFFFF, x[lane], 8)
    else:
        out[lane] = cuda.shfl_down_sync(0xFFFF0000, x[lane], 1)


def test_two_halves_of_a_warp_go_their_own_ways():
    x, out = np.arange(32, dtype=np.float32), np.empty(32, np.float32)
    launch(halves, 1, 32, [x, out], seed=2)
    np.testing.assert_array_equal(out, [*(np.arange(16) ^ 8), *range(17, 32), 31])


@kernel(threads=32)
def votes(x, out):
    lane = cuda.threadIdx.x
    out[0, lane] = cuda.all_sync(ALL, x[lane] > 0)
    out[1, lane] = cuda.any_sync(ALL, x[lane] > 30)
    out[2, lane] = cuda.ballot_sync(ALL, x[lane] % 2 == 0)


def test_votes():
    out = np.empty((3, 32), np.int64)
    launch(votes, 1, 32, [np.arange(32), out], seed=1)
    assert out[0].any() == 0 and out[1].all() and set(out[2]) == {0x55555555}


# -- atomics ----------------------------------------------------------------------------------------------------------
ATOMICS = {
    "add": (5, lambda x: 5 + x.sum()),
    "sub": (5, lambda x: 5 - x.sum()),
    "max": (5, lambda x: max(5, x.max())),
    "min": (5, lambda x: min(5, x.min())),
    "and_": (0xFF, lambda x: np.bitwise_and.reduce(x)),
    "or_": (0, lambda x: np.bitwise_or.reduce(x)),
    "xor": (3, lambda x: 3 ^ np.bitwise_xor.reduce(x)),
}


def make_atomic(name, shared):
    @kernel(threads=64)
    def everyone(x, cell):
        s = cuda.shared.array(1, int32)
        t = cuda.threadIdx.x
        if t == 0:
            s[0] = cell[0]
        cuda.syncthreads()
        target = s if shared else cell
        getattr(cuda.atomic, name)(target, 0, x[t])
        cuda.syncthreads()
        if shared and t == 0:
            cell[0] = s[0]

    return everyone


@pytest.mark.parametrize("name", ATOMICS)
@pytest.mark.parametrize("shared", [True, False])
def test_atomics(name, shared):
    start, expected = ATOMICS[name]
    x, cell = np.random.default_rng(0).integers(0, 200, 64).astype(np.int32), np.array([start], np.int32)
    launch(make_atomic(name, shared), 1, 64, [x, cell], seed=3)
    assert cell[0] == expected(x)


@kernel(threads=1)
def atomic_answers(cell, out):
    out[0] = cuda.atomic.exch(cell, 0, 9)
    out[1] = cuda.atomic.cas(cell, 0, 9, 4)
    out[2] = cuda.atomic.cas(cell, 0, 9, 5)
    out[3] = cuda.atomic.inc(cell, 0, 4)
    out[4] = cuda.atomic.dec(cell, 0, 7)
    out[5] = cuda.atomic.add(cell, 0, 2**32 - 1)
    out[6] = cell[0]


def test_atomics_return_the_old_value_and_wrap():
    cell, out = np.array([3], np.uint32), np.zeros(7, np.int64)
    launch(atomic_answers, 1, 1, [cell, out])
    assert list(out) == [3, 9, 4, 4, 0, 7, 6]


# -- local arrays -----------------------------------------------------------------------------------------------------
@kernel(threads=1)
def wraps(out):
    a = cuda.local.array(1, uint8)
    b = cuda.local.array(1, int32)
    c = cuda.local.array((2, 3), int16)
    a[0] = 300
    b[0] = 2**31
    c[1, 2] = -40000
    out[0], out[1], out[2] = a[0], b[0], c[1, 2]


def test_local_integers_wrap():
    out = np.zeros(3, np.int64)
    launch(wraps, 1, 1, [out])
    assert list(out) == [44, -(2**31), 25536]


def make_local(plant):
    @kernel(threads=32)
    def again(out):
        for i in range(2):
            a = cuda.local.array(2, float32)
            if i == 0 or plant != "kept":
                a[0] = float32(i)
            out[cuda.threadIdx.x] = a[0]
        b = cuda.local.array((2, 2), float32)
        if plant == "negative":
            b[0, -1] = float32(1)
        if plant == "view":
            b[0] = float32(1)

    return again


@pytest.mark.parametrize(
    ("plant", "fault"), [("kept", UninitialisedRead), ("negative", OutOfBounds), ("view", TypeError)]
)
def test_local_arrays_forget_and_have_bounds(plant, fault):
    out = np.zeros(32, np.float32)
    launch(make_local(""), 1, 32, [out])
    assert (out == 1).all()
    with pytest.raises(fault):
        launch(make_local(plant), 1, 32, [out])


def make_step(n):
    @device
    def step(x):
        a = cuda.local.array(n, float32)
        s = cuda.shared.array(n, float32)
        for i in range(n):
            a[i] = x + float32(i)
        if cuda.threadIdx.x == 0:
            s[n - 1] = a[n - 1]
        cuda.syncthreads()
        return s[n - 1]

    return step


def test_copies_of_a_device_function_have_arrays_of_their_own():
    short, long = make_step(2), make_step(5)

    @kernel(threads=32)
    def both(out):
        a = short(float32(10))
        b = long(float32(20))
        out[cuda.threadIdx.x] = a * float32(100) + b

    out = np.zeros(32, np.float32)
    launch(both, 1, 32, [out])
    assert (out == 1124).all()


# -- Python -----------------------------------------------------------------------------------------------------------
def test_recursive_device_function_with_a_closure():
    base = 2

    @device
    def power(n):
        return base * power(n - 1) if n else 1

    @kernel(threads=32)
    def powers(out):
        out[cuda.threadIdx.x] = power(cuda.threadIdx.x)

    out = np.zeros(32, np.int64)
    launch(powers, 1, 32, [out])
    np.testing.assert_array_equal(out, 2 ** np.arange(32))


@kernel(threads=4)
def talks(x):
    t = cuda.threadIdx.x
    print("thread", t, x[t])


def test_print(capsys):
    launch(talks, 1, 4, [np.arange(4) * 10])
    assert capsys.readouterr().out == "thread 0 0\nthread 1 10\nthread 2 20\nthread 3 30\n"


def test_an_exception_keeps_its_type_and_its_line():
    @device
    def inner(x):
        raise KeyError(x)

    @kernel(threads=32)
    def outer(out):
        cuda.syncthreads()
        inner(out[0])

    with pytest.raises(KeyError) as caught:
        launch(outer, 1, 32, [np.zeros(1, np.int64)])
    names = [entry.name for entry in caught.traceback]
    assert names[-2:] == ["outer", "inner"]


def test_a_debugger_sees_the_kernel():
    seen = []

    def look():
        frame = sys._getframe(1)
        seen.append((frame.f_code.co_name, frame.f_locals["value"], frame.f_locals["x"].shape))

    @kernel(threads=2)
    def looked_at(x):
        value = x[cuda.threadIdx.x] + 1
        look()
        value += 1

    launch(looked_at, 1, 2, [np.array([5, 6])])
    assert seen == [("looked_at", 6, (2,)), ("looked_at", 7, (2,))]


def test_a_kernel_from_a_notebook_cell():
    source = "@kernel(threads=32)\ndef cell(x):\n    s = cuda.shared.array(4, float32)\n    x[0] = s[7]\n"
    name = "<ipython-input-3-cell>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    scope = {"kernel": kernel, "cuda": cuda, "float32": float32}
    exec(compile(source, name, "exec"), scope)
    with pytest.raises(OutOfBounds, match=r"index \[7\] of s, whose shape is \(4,\)") as caught:
        launch(scope["cell"], 1, 32, [np.zeros(1, np.float32)])
    assert "<ipython-input-3-cell>:4 in cell: x[0] = s[7]" in str(caught.value)


def test_a_kernel_cannot_launch():
    @kernel(threads=1)
    def nested(out):
        launch(talks, 1, 1, [out])

    with pytest.raises(TypeError, match="cannot launch a kernel"):
        launch(nested, 1, 1, [np.zeros(1)])


def test_launches_leave_no_threads_behind(monkeypatch):
    born = []
    made = Thread.__init__

    def recording(self, *args):
        made(self, *args)
        born.append(weakref.ref(self))

    monkeypatch.setattr(Thread, "__init__", recording)
    x, out = np.arange(128, dtype=np.float32), np.empty(128, np.float32)

    @kernel(threads=32)
    def stuck(out):
        bar_sync(1 + cuda.threadIdx.x // 16, 32)

    for _ in range(5):
        launch(rotate, 2, 128, [x, out, 2])
        with pytest.raises(Deadlock):
            launch(stuck, 1, 32, [out])
    gc.collect()
    assert len(born) == 5 * (256 + 32) and not any(ref() for ref in born)


def test_python_threads_launch_at_once():
    x, failures = np.arange(128, dtype=np.float32), []

    def work(arch):
        for seed in range(4):
            out = np.empty(128, np.float32)
            launch(rotate, 1, 128, [x, out, 3], seed=seed, arch=arch)
            if not (out == np.roll(x, -3)).all() or settings.arch != "90a":
                failures.append(arch)

    workers = [threading.Thread(target=work, args=(arch,)) for arch in ("75", "80", "90a", "120")]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert failures == []


SCALARS = [
    (True, bool), (7, int64), (np.int8(-3), int8), (np.uint16(60000), uint16), (np.uint32(2**32 - 1), uint32),
    (np.uint64(2**63), uint64), (1.5, float32), (np.float16(0.25), float16), (np.float32(2.5), float32), (np.float64(0.1), float64),
]  # fmt: skip


@pytest.mark.parametrize(("value", "kind"), SCALARS, ids=lambda p: str(p))
def test_scalars_of_every_type(value, kind):
    @kernel(threads=1)
    def keep(value, out):
        out[0] = value

    out = np.zeros(1, kind if kind is bool else str(kind))
    launch(keep, 1, 1, [value, out])
    assert out[0] == value


@pytest.mark.parametrize("value", [1j, "x", None, [1.0]])
def test_other_arguments_are_refused(value):
    with pytest.raises(TypeError, match="argument x is"):
        launch(talks, 1, 1, [value])


def test_a_wrong_launch_says_what_is_wrong():
    with pytest.raises(ValueError, match="takes 1 arguments"):
        launch(talks, 1, 4, [])
    with pytest.raises(ValueError, match="grid is 0"):
        launch(talks, 0, 4, [np.zeros(1)])
