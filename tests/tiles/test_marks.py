"""Marks: what a traced kernel writes on either machine, and that it is nothing where it is not traced."""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from flashnumba.machine import compiler, launcher
from flashnumba.machine.emulator.events import record_events
from flashnumba.machine.function import device, kernel
from flashnumba.machine.numba import cuda, float32, types, uint64
from flashnumba.machine.timeline.costs import costs_of
from flashnumba.machine.timeline.record import Span
from flashnumba.machine.timeline.replay import replay
from flashnumba.machine.timeline.sources import record_of_clocks, record_of_replay
from flashnumba.machine.timeline.trace import HEADER, empty_trace, rows_of
from flashnumba.tiles.marks import ANY, COPY, LOG, OTHER, PV, QK, WAIT, make_marks

needs_compiler = pytest.mark.skipif(bool(compiler.why_not()), reason=compiler.why_not())
STEPS = 3
SIGNATURE = (types.Array(types.float32, 1, "C"),)
TRACED_SIGNATURE = (*SIGNATURE, types.Array(types.uint32, 3, "C"))


@cache
def make_work(how: str):
    """A kernel of two warps and three steps: ``traced``, with ``empty`` marks, or ``without`` any."""
    start, mark, finish = make_marks(how == "traced")

    @device
    def step(x, j):
        x[cuda.threadIdx.x] += float32(j + 1)

    @device
    def marked(x, log):
        for j in range(STEPS):
            mark(log, COPY, j, j & 1)
            step(x, j)
            mark(log, COPY, j, j & 1)  # no other than before: no new span
            step(x, j)
            mark(log, WAIT, j, ANY)
            cuda.syncthreads()
            mark(log, QK, j, 254)
            step(x, j)
        mark(log, OTHER, 0, ANY)
        step(x, 0)
        mark(log, PV, 65535, 0)

    @kernel(threads=64, name="work")
    def traced(x, trace):
        log = cuda.local.array(LOG, uint64)
        start(log, trace)
        marked(x, log)
        finish(log, trace)

    @kernel(threads=64, name="work")
    def empty(x):
        marked(x, None)

    @kernel(threads=64, name="work")
    def without(x):
        for j in range(STEPS):
            step(x, j)
            step(x, j)
            cuda.syncthreads()
            step(x, j)
        step(x, 0)

    return {"traced": traced, "empty": empty, "without": without}[how]


EXPECTED = [(COPY, 0, 0), (WAIT, 0, ANY), (QK, 0, 254), (COPY, 1, 1), (WAIT, 1, ANY), (QK, 1, 254), (COPY, 2, 0),
            (WAIT, 2, ANY), (QK, 2, 254), (PV, 65535, 0)]  # fmt: skip
MADE = 4 * STEPS + 2


def traced(machine: str, most: int = 100, blocks: int = 2, grid: int = 3) -> tuple[np.ndarray, np.ndarray]:
    x, trace = np.zeros(64, np.float32), empty_trace(blocks, 2, most)
    launcher.launch(make_work("traced"), grid, 64, (x, trace), machine=machine)
    return x, trace


def test_marks_are_in_order_on_both_machines(machine):
    x, trace = traced(machine, grid=1)
    np.testing.assert_array_equal(x, np.full(64, 3 * (1 + 2 + 3) + 1, np.float32))
    rows = list(rows_of(trace))
    assert [(row.block, row.warp) for row in rows] == [(0, 0), (0, 1)]
    for row in rows:
        assert row.made == len(row.marks) == MADE
        assert row.timers[0] <= row.timers[1] and row.opened < row.closed
    record = record_of_clocks(trace, device="d", arch="90a", ghz=1.0, kernel="work", size="s")
    for warp in range(2):
        spans = [s for s in record.spans if s.warp == warp]
        assert [s[2:5] for s in spans] == EXPECTED
        assert all(a.begin <= a.end <= b.begin <= b.end for a, b in pairwise(spans))
    assert record.lost == 0 and record.spans[0].begin == 0


def test_marks_of_a_replay_have_the_times_of_the_model():
    x, trace = np.zeros(64, np.float32), empty_trace(2, 2, 100)
    costs = costs_of("90")
    events = record_events(make_work("traced"), 2, 64, (x, trace))
    record = record_of_replay(trace, replay(events.warps, costs), costs, kernel="work", size="s")
    assert record.multiprocessors == {0: 0, 1: 1} and record.machine == "emulator" and record.costs["barrier"] == 25
    assert {s[:2] for s in record.spans} == {(b, w) for b in range(2) for w in range(2)}
    for block, warp in ((0, 0), (1, 1)):
        spans = [s for s in record.spans if (s.block, s.warp) == (block, warp)]
        assert [s[2:5] for s in spans] == EXPECTED
        # A turn for the clock, then the barrier; the model knows no other cost of meeting.
        assert all(25 <= s.end - s.begin < 40 for s in spans if s.kind == WAIT)
        assert all(s.end - s.begin >= 2 * costs.copy_latency for s in spans if s.kind == COPY)


def test_what_finds_no_room_is_counted(machine):
    _, trace = traced(machine, most=7)
    rows = list(rows_of(trace))
    assert {(row.made, len(row.marks)) for row in rows} == {(MADE, 7)}
    record = record_of_clocks(trace, device="d", arch="90a", ghz=1.0, kernel="work", size="s")
    assert record.lost == 4 * (MADE - 7)
    # The seventh mark began a wait; where that ended nobody knows.
    assert [s[2:5] for s in record.spans if s[:2] == (0, 0)] == EXPECTED[:4]


def test_blocks_and_words_beyond_the_trace_are_left_alone(machine):
    whole = np.zeros((3, 2, HEADER + 200), np.uint32)
    x = np.zeros(64, np.float32)
    launcher.launch(make_work("traced"), 3, 64, (x, whole[:1]), machine=machine)
    assert whole[0].any(1).all() and not whole[1:].any()
    assert not whole[0, :, HEADER + 2 * MADE :].any()


@needs_compiler
def test_a_kernel_that_is_not_traced_is_the_kernel_without_marks():
    def code(how: str, arch: str) -> list[str]:
        made = compiler.compile_kernel(make_work(how), SIGNATURE, arch).ptx
        lines = [re.sub(r"_Z\w+|__\w+__", "name", line) for line in made.splitlines()]
        return [line for line in lines if line.strip() and not line.startswith("//")]

    for arch in ("80", "90a"):
        assert code("empty", arch) == code("without", arch)


@needs_compiler
@pytest.mark.parametrize("arch", ["75", "80", "90a"])
def test_a_mark_is_a_clock_and_a_store(arch: str):
    made = compiler.compile_kernel(make_work("traced"), TRACED_SIGNATURE, arch)
    assert not made.local_memory and not made.uses_f64 and made.spill_stores == 0
    assert made.ptx.count("%clock64") == MADE + 2
    assert made.ptx.count("st.global.v2") == MADE + 5
    assert made.registers <= compiler.compile_kernel(make_work("empty"), SIGNATURE, arch).registers + 10


@needs_compiler
def test_products_stay_between_their_marks():
    """In the machine code no product, exponential or matrix load is found across a mark."""
    pytest.importorskip("cuda.pathfinder")
    from flashnumba.stages.flash_forward.mma import make_mma
    from flashnumba.stages.heads import ARGUMENTS, signature
    from flashnumba.tiles.sizes import AttentionTiles

    tiles = AttentionTiles(32, 64, 32, slots=2)
    code = compiler.sass(make_mma(tiles, "float16", traced=True), signature("float16", (*ARGUMENTS, "trace")), "90a")
    found, between = [], []
    for line in code.splitlines():
        if "CLOCK" in line:
            found.append(set(between))
            between = []
        for unit in ("HMMA", "LDSM", "MUFU.EX2", "LDGSTS", "BAR.SYNC"):
            if unit in line:
                between.append(unit)
    assert [units for units in found if "MUFU.EX2" in units and "HMMA" in units] == []
    assert [units for units in found if "HMMA" in units] == [{"HMMA", "LDSM"}] * 3  # QK, and PV of twice 16 keys
    assert all("HMMA" not in units for units in found if "BAR.SYNC" in units)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((0, 1, 1), "blocks is 0"),
        ((1, 0, 1), "warps is 0"),
        ((1, 1, 0), "most is 0"),
        ((1 << 20, 8, 100), "trace fewer blocks"),
    ],
)
def test_sizes_of_a_trace_are_checked(sizes, said):
    with pytest.raises(ValueError, match=said):
        empty_trace(*sizes)


def test_a_damaged_trace_is_told():
    trace = empty_trace(1, 1, 2)
    trace[0, 0, [0, HEADER]] = 1, 99
    with pytest.raises(ValueError, match="warp 0 of block 0 has a mark of kind 99"):
        list(rows_of(trace))


def header(made: int, sm: int, opened: int, closed: int, timer: int, timer_then: int) -> list[int]:
    long = [word for value in (opened, timer, closed, timer_then) for word in (value & 0xFFFFFFFF, value >> 32)]
    return [made, sm, *long]


def test_clocks_of_multiprocessors_are_brought_together_by_the_timer():
    """Two multiprocessors at 2 GHz whose clocks differ by 10^12; block 1 opens 500 ns after block 0, block 2 later on
    the first one. The low words wrap round in block 0."""
    trace = empty_trace(3, 1, 2)
    wrap = (1 << 32) - 100
    trace[0, 0] = [*header(2, 7, wrap, wrap + 20000, 5000, 15000), COPY | ANY << 8, wrap + 50, QK | ANY << 8, 100]
    late = 10**12 + 1000
    trace[1, 0] = [*header(2, 3, late, late + 20000, 5500, 15500), COPY | ANY << 8, (late + 50) & 0xFFFFFFFF,
                   QK | ANY << 8, (late + 200) & 0xFFFFFFFF]  # fmt: skip
    trace[2, 0] = [
        *header(1, 7, wrap + 3000, wrap + 23000, 6500, 16500),
        WAIT | ANY << 8,
        wrap + 3000 & 0xFFFFFFFF,
        0,
        0,
    ]
    record = record_of_clocks(trace, device="two", arch="90a", ghz=9.9, kernel="k", size="s")
    assert record.ghz == 2.0 and record.multiprocessors == {0: 7, 1: 3, 2: 7}
    assert record.spans == (
        Span(0, 0, COPY, 0, ANY, 0, 150), Span(0, 0, QK, 0, ANY, 150, 19950),
        Span(1, 0, COPY, 0, ANY, 1000, 1150), Span(1, 0, QK, 0, ANY, 1150, 20950),
        Span(2, 0, WAIT, 0, ANY, 2950, 22950),
    )  # fmt: skip


def test_where_rows_are_short_the_clock_is_that_of_the_device():
    trace = empty_trace(1, 1, 1)
    trace[0, 0] = [*header(1, 0, 100, 300, 1000, 1032), COPY, 150]
    record = record_of_clocks(trace, device="d", arch="90a", ghz=1.5, kernel="k", size="s")
    assert record.ghz == 1.5 and record.spans == (Span(0, 0, COPY, 0, 0, 0, 150),)
    nothing = record_of_clocks(empty_trace(1, 1, 1), device="d", arch="90a", ghz=1.5, kernel="k", size="s")
    assert nothing.spans == () and nothing.cycles == 0
