"""What the emulator's log has of a kernel: each kind of event, its numbers, and nothing where nobody asks for it."""

import numpy as np
import pytest

from flashnumba.machine.emulator import Race, launch
from flashnumba.machine.emulator.event_log import Event
from flashnumba.machine.emulator.events import record_events
from flashnumba.machine.emulator.launch import Launch
from flashnumba.machine.emulator.thread import Thread
from flashnumba.machine.function import device, kernel
from flashnumba.machine.instructions import (
    bar_arrive,
    bar_sync,
    bulk_load,
    cp_async_8_zfill,
    cp_async_16,
    cp_async_commit,
    cp_async_wait,
    cp_async_wait_all,
    ex2_approx,
    fence_mbarrier_init,
    global_address,
    ld_global_v4,
    ld_shared_v4,
    ldmatrix_x4,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_try_wait,
    mbarrier_wait,
    mma_m16n8k16_f16,
    pack_f16x2,
    read_clock,
    shared_address,
    shfl_xor,
)
from flashnumba.machine.numba import cuda, float32, int32, uint8, uint32, uint64
from flashnumba.machine.timeline.costs import costs_of
from flashnumba.machine.timeline.replay import replay

COUNTED = ("math", "issue")


def logged(kernel, args, *, grid=1, threads=32, shared=0, leave=COUNTED):
    """Events of each warp, without those of some kinds."""
    events = record_events(kernel, grid, threads, args, shared=shared)
    assert events.threads == threads
    return {place: [e for e in log if e.name not in leave] for place, log in events.warps.items()}


wait_1 = cp_async_wait(1)


@kernel(threads=64, arch="80")
def copied(x, out):
    """Two groups of copies; the second by half the lanes, the last of which has less to copy."""
    s = cuda.shared.array(2048, uint8)
    t = cuda.threadIdx.x
    cp_async_16(shared_address(s) + uint32(16 * t), global_address(x) + uint64(16 * t))
    cp_async_commit()
    if (t & 31) < 16:
        valid = uint32(8)
        if (t & 31) == 15:
            valid = uint32(4)
        cp_async_8_zfill(shared_address(s) + uint32(1024 + 8 * t), global_address(x) + uint64(8 * t), valid)
    cp_async_commit()
    wait_1()
    cuda.syncthreads()
    cp_async_wait_all()
    out[t] = s[16 * t]


def test_copies_have_the_bytes_of_all_lanes():
    x, out = np.arange(1024, dtype=np.uint8), np.zeros(64, np.uint8)
    log = logged(copied, (x, out), threads=64)
    for warp in range(2):
        assert log[0, warp] == [
            Event("copy", 512), Event("commit"), Event("copy", 15 * 8 + 4), Event("commit"), Event("wait", 1),
            Event("barrier", 64, 0, 1), Event("commit"), Event("wait", 0), Event("shared", 32), Event("store", 32),
        ]  # fmt: skip
    np.testing.assert_array_equal(out, x[::16])


@kernel(threads=32, arch="80")
def multiplied(out):
    """A product, and a touch of its result; then arithmetic of each kind."""
    acc = cuda.local.array(4, float32)
    a = cuda.local.array(4, uint32)
    b = cuda.local.array(4, uint32)
    s = cuda.shared.array(1024, uint8)
    lane = cuda.threadIdx.x
    for i in range(16):
        s[32 * i + lane] = uint8(0)
    cuda.syncwarp()
    for i in range(4):
        acc[i] = float32(i)
    ldmatrix_x4(a, 0, shared_address(s) + uint32(16 * (lane & 15)))
    ldmatrix_x4(b, 0, shared_address(s) + uint32(16 * (lane & 15)))
    mma_m16n8k16_f16(acc, 0, a, 0, b, 0)
    mma_m16n8k16_f16(acc, 0, a, 0, b, 2)
    top = max(acc[0], acc[1])
    top = max(top, shfl_xor(top, int32(1)))
    acc[0] = cuda.fma(ex2_approx(top), float32(2), float32(1))
    out[lane] = pack_f16x2(acc[0], acc[1])


def test_products_name_the_first_touch_of_their_result():
    out = np.zeros(32, np.uint32)
    log = record_events(multiplied, 1, 32, (out,)).warps[0, 0]
    names = [e.name for e in log]
    at = names.index("mma")
    assert log[at - 2 : at] == [Event("shared", 512)] * 2  # two ldmatrix of four matrices
    assert log[at : at + 3] == [Event("mma", 2048), Event("mma", 2048), Event("use", at + 1)]
    assert names.count("use") == 1
    rest = log[at + 3 :]
    assert [e for e in rest if e.name not in COUNTED] == [Event("shared", 128), Event("store", 128)]
    total = np.sum([e[1:] for e in rest if e.name == "math"], 0)
    # float32: the multiply-add and the register it is written to; other: two maxima and the packing; one exponential.
    assert total.tolist() == [2, 3, 1]
    filled = np.sum([e[1:] for e in log[:at] if e.name == "math"], 0)
    assert filled.tolist() == [4, 0, 0]


@kernel(threads=64)
def loaded(x, out):
    """128 bits a lane to shared memory and back."""
    raw = cuda.local.array(4, uint32)
    s = cuda.shared.array(512, uint32)
    t = cuda.threadIdx.x
    ld_global_v4(raw, 0, global_address(x) + uint64(16 * t))
    for i in range(4):
        s[4 * t + i] = raw[i]
    bar_sync(1, 64)
    ld_shared_v4(raw, 0, shared_address(s) + uint32(16 * (63 - t)))
    bar_arrive(2, 64)
    if t < 32:
        bar_sync(3, 32)
    out[t] = raw[0] + x[t]


def test_loads_stores_and_named_barriers():
    x, out = np.arange(256, dtype=np.uint32), np.zeros(64, np.uint32)
    log = logged(loaded, (x, out), threads=64)
    expected = [
        Event("load", 512), *[Event("shared", 128)] * 4, Event("barrier", 64, 1, 1), Event("shared", 512),
        Event("barrier", 64, 2, 0), Event("barrier", 32, 3, 1), Event("load", 128), Event("store", 128),
    ]  # fmt: skip
    assert log[0, 0] == expected
    assert log[0, 1] == [e for e in expected if e.b != 3]


@kernel(threads=64, arch="90")
def piped(x, out):
    """Warp 0 copies for both; both arrive at a second mbarrier, each by all lanes."""
    s = cuda.shared.array(128, uint8)
    bars = cuda.shared.array(2, uint64)
    t = cuda.threadIdx.x
    full = shared_address(bars)
    done = full + uint32(8)
    if t == 0:
        mbarrier_init(full, uint32(1))
        mbarrier_init(done, uint32(64))
        fence_mbarrier_init()
    cuda.syncthreads()
    if t == 0:
        mbarrier_arrive_expect_tx(full, uint32(128))
        bulk_load(shared_address(s), global_address(x), uint32(128), full)
    mbarrier_wait(full, uint32(0))
    mbarrier_arrive(done)
    while not mbarrier_try_wait(done, uint32(0)):
        pass
    out[t] = s[t]


def test_mbarriers_count_arrivals_and_bytes_and_polls_in_vain_have_no_length():
    x, out = np.arange(128, dtype=np.uint8), np.zeros(64, np.uint8)
    events = record_events(piped, 1, 64, (x, out))
    log = {place: [e for e in log if e.name not in COUNTED] for place, log in events.warps.items()}
    full = log[0, 0][0].b
    both = [
        Event("phase", 0, full), Event("arrive", 32, full + 8), Event("phase", 0, full + 8), Event("shared", 32),
        Event("store", 32),
    ]  # fmt: skip
    meet = Event("barrier", 64, 0, 1)
    assert log[0, 1] == [meet, *both]
    assert log[0, 0] == [
        Event("init", 1, full), Event("init", 64, full + 8), meet, Event("expect", 128, full), Event("arrive", 1, full),
        Event("bulk", 128, full), *both,
    ]  # fmt: skip
    assert replay(events.warps, costs_of("90")).landings[0].nbytes == 128


@kernel(threads=32)
def timed(out):
    """The clock twice, a barrier between."""
    begin = read_clock()
    cuda.syncthreads()
    end = read_clock()
    if cuda.threadIdx.x == 0:
        out[cuda.blockIdx.x, 0] = begin
        out[cuda.blockIdx.x, 1] = end


def test_a_clock_gives_the_number_of_its_event():
    out = np.zeros((2, 2), np.uint64)
    events = record_events(timed, 2, 32, (out,))
    assert out.tolist() == [[0, 2], [0, 2]]
    assert [e.name for e in events.warps[1, 0]][:3] == ["clock", "barrier", "clock"]
    times = replay(events.warps, costs_of("90")).times[1, 0]
    assert times[2] - times[0] == 1 + costs_of("90").barrier


def test_the_log_changes_no_result_and_faults_are_found_all_the_same():
    @device
    def read(s, t):
        return s[(t + 1) % 64]

    @kernel(threads=64)
    def racing(out):
        s = cuda.shared.array(64, int32)
        t = cuda.threadIdx.x
        s[t] = t
        out[t] = read(s, t)

    with pytest.raises(Race):
        record_events(racing, 1, 64, (np.zeros(64, np.int32),))
    for seed in range(3):
        out = np.zeros(32, np.uint32)
        first = record_events(multiplied, 1, 32, (out,))
        again = record_events(multiplied, 1, 32, (out.copy(),), seed=seed)
        assert first.warps == again.warps
        plain = np.zeros(32, np.uint32)
        report = launch(multiplied, 1, 32, (plain,))
        np.testing.assert_array_equal(out, plain)
        assert report == first.report


def test_a_launch_that_nobody_watches_has_nothing_of_it():
    """Neither its threads nor its translated kernel know of a log, also where the same kernel was logged before."""
    seen = []

    @kernel(threads=32)
    def noted(out):
        out[cuda.threadIdx.x] = max(float32(1), float32(2))

    class Watched(Launch):
        def body(self):
            from greenlet import getcurrent

            seen.append(vars(getcurrent()).keys())
            super().body()

    record_events(noted, 1, 32, (np.zeros(32, np.float32),))
    logged_function = noted.cache["emulator", "90a", "events"]
    Watched(noted, 1, 32, (np.zeros(32, np.float32),), 0, "90a", True, 0).run()
    plain_function = noted.cache["emulator", "90a", ""]
    assert len(seen) == 32
    assert not any({"log", "counts"} & set(keys) for keys in seen)
    assert not hasattr(Thread, "log")
    names = [f.__globals__["max"].__qualname__ for f in (plain_function, logged_function)]
    assert names[0] != names[1]
    assert not hasattr(plain_function.__globals__["cuda"], "log")
