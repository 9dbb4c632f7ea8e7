"""The benches of gemm, attention, decode and softmax with their kernels on the emulator and torch on a CPU."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from flashnumba.bench import (
    attention,
    backward,
    chain,
    decode,
    environment,
    gemm,
    heads,
    planned,
    softmax,
    staged,
    timing,
)
from flashnumba.bench.runner import Candidate, Runner, Size, Wrong
from flashnumba.stages.gemm import simt
from flashnumba.stages.gemm.problem import Plan, Shape
from tests.bench.fakes import CUDNN, FA2, HostClock

torch = pytest.importorskip("torch")


def times(size):
    return {m.name: m.seconds for m in size.measured}


def right(m):
    return m.seconds and m.error <= m.budget and not m.note


# -- gemm --------------------------------------------------------------------------------------------------------------
def multiply(element="float16", majors="kn", **more):
    return gemm.measure(element, 40, 72, 24, majors, clock=HostClock(), machine="emulator", **more)


@pytest.mark.parametrize(
    ("element", "majors", "names"),
    [("float16", "mk", ("mma", "wgmma")), ("float32", "kk", ("coalesced",)), ("bfloat16", "kn", ("wgmma",))],
)
def test_products(element, majors, names):
    told = []
    size = multiply(element, majors, names=names, report=lambda size, m: told.append(m.name))
    assert told == [m.name for m in size.measured] == [gemm.PEER, *sorted(names, reverse=True)]
    assert all(map(right, size.measured))
    peer, ours = size.measured[0], size.measured[1]
    assert ours.figures["flops_per_second"] == pytest.approx(2 * 40 * 72 * 24 / ours.seconds)
    assert ours.figures["of_cublas"] == peer.seconds / ours.seconds and peer.figures["of_cublas"] is None
    assert size.about == {"element": element, "m": 40, "n": 72, "k": 24, "majors": majors}


@pytest.mark.parametrize("broken", ["mask", "store"])
def test_a_kernel_that_is_wrong_has_no_time(monkeypatch, broken):
    """Not to add all of K, or not to write all of C: the second where no row is looked at that is compared."""

    def plan(shape):
        good = simt.plan_coalesced(shape)
        halve = broken == "mask"

        def arguments(a, b, c):
            return (a[:, :12], b[:12], c) if halve else (a, b, c)

        return Plan(good.kernel, good.grid if halve else good.grid - 1, good.threads, good.shared, arguments)

    monkeypatch.setitem(simt.PLANS, "coalesced", plan)
    monkeypatch.setattr(gemm, "ROWS", 2 if broken == "mask" else 1)
    (_, m) = multiply(names=("coalesced",)).measured
    assert m.bad and m.seconds is None
    assert "above the budget" in m.note if broken == "mask" else "elements are not finite" in m.note


def test_what_was_asked_for_and_does_not_fit_is_named():
    size = multiply("float32", names=("mma", "coalesced"))
    assert [m.name for m in size.measured] == [gemm.PEER, "mma", "coalesced"]
    assert size.measured[1].note.startswith("mma of float32 on sm_90a") and not size.measured[1].bad


def test_float32_is_multiplied_as_float32_and_the_setting_put_back():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        with gemm.full_float32(torch):
            assert not torch.backends.cuda.matmul.allow_tf32
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


# -- which kernels there are -------------------------------------------------------------------------------------------
def test_kernels_from_the_first_rung_to_the_last():
    assert gemm.kernels() == ("naive", "coalesced", "shared_tile", "register_tile", "mma", "wgmma")
    assert {"simt", "mma"} <= set(attention.kernels()) and "split" not in attention.kernels()
    assert {"simt", "mma", "split"} <= set(decode.kernels())


def test_the_fastest_come_first_and_what_does_not_fit_is_left_out():
    shape = Shape.packed("float16", 64, 64, 64)
    assert [name for name, _ in planned.planned("gemm", shape, gemm.kernels())] == list(reversed(gemm.kernels()))
    shape = Shape.packed("float32", 64, 64, 64)
    assert next(planned.planned("gemm", shape, gemm.kernels()))[0] == "register_tile"


def test_other_sizes():
    shape = Shape.packed("float16", 256, 256, 256)
    found = dict(planned.planned("gemm", shape, ("mma",), wide=True))
    assert len(found) > 5 and all(name.startswith("mma") for name in found)
    assert all(isinstance(plan(), Plan) for plan in found.values())


def test_a_plan_that_breaks_is_told_where_it_is_used(monkeypatch):
    def breaks(shape):
        raise KeyError("tile")

    monkeypatch.setitem(simt.PLANS, "naive", breaks)
    found = dict(planned.planned("gemm", Shape.packed("float32", 8, 8, 8), ("naive", "coalesced")))
    assert list(found) == ["coalesced", "naive"]
    m = Runner(Size({}), lambda s: {}, {}, clock=HostClock()).run(Candidate("naive", found["naive"]))
    assert m.note == "FAILED: KeyError: 'tile'"


# -- attention ---------------------------------------------------------------------------------------------------------
def attend(element, n=40, causal=False, **more):
    problem = attention.Problem(element, 2, 2, n, 32, causal)
    return attention.measure(problem, clock=HostClock(), machine="emulator", **more)


@pytest.mark.parametrize(("element", "causal"), [("float16", True), ("bfloat16", False)])
def test_attention_beside_torch(element, causal):
    size = attend(element, causal=causal, names=("mma",))
    assert [m.name for m in size.measured] == [FA2, CUDNN, "mma"]
    fa2, cudnn, ours = size.measured
    assert right(fa2) and right(ours), (fa2, ours)
    assert cudnn.note.startswith("refused: ") and not cudnn.bad
    operations = 4 * 2 * 2 * 40 * 40 * 32 / (2 if causal else 1)
    assert ours.figures["flops_per_second"] == pytest.approx(operations / ours.seconds)
    assert ours.figures["of_fa2"] == fa2.seconds / ours.seconds and ours.figures["of_cudnn"] is None
    assert size.about["causal"] is causal


def test_gradients_beside_torch():
    problem, told = attention.Problem("float16", 1, 2, 40, 32, True), []
    size = backward.measure(
        problem, clock=HostClock(), machine="emulator", report=lambda size, m: told.append(m.name)
    )  # fmt: skip
    assert told == [m.name for m in size.measured] == [FA2, CUDNN, "one_pass", "mma"]
    fa2, cudnn, *ours = size.measured
    assert right(fa2) and all(map(right, ours)), size.measured
    assert cudnn.note.startswith("refused: ") and not cudnn.bad
    for m in ours:
        assert m.figures["flops_per_second"] == pytest.approx(10 * 2 * 40 * 40 * 32 / 2 / m.seconds)
        assert m.figures["of_fa2"] == fa2.seconds / m.seconds and m.figures["extra_bytes"] is None


def test_gradients_that_are_wrong_have_no_time(monkeypatch):
    from flashnumba.stages.backward import mma

    good = mma.PLANS["mma"]
    monkeypatch.setitem(mma.PLANS, "mma", lambda shape: replace(good(shape), launches=good(shape).launches[:-1]))
    problem = attention.Problem("float16", 1, 1, 20, 32, False)
    *_, m = backward.measure(problem, names=("mma",), clock=HostClock(), machine="emulator").measured
    assert m.bad and m.seconds is None and "non-finite" in m.note


def test_the_ways_of_a_chain():
    problem, told = attention.Problem("float16", 1, 2, 40, 32, True), []
    size = chain.measure(
        problem, clock=HostClock(), machine="emulator", report=lambda size, m: told.append(m.name)
    )  # fmt: skip
    assert told == [m.name for m in size.measured] == [FA2, "shared", "shuffles", "registers", "detour"]
    assert all(map(right, size.measured)), size.measured
    shared, registers = size.measured[1], size.measured[3]
    assert registers.figures["of_shared"] == shared.seconds / registers.seconds and shared.figures["of_shared"] is None
    assert shared.figures["of_fa2"] == size.measured[0].seconds / shared.seconds
    assert size.about["d"] == 32 and size.about["causal"]


def test_simt_is_measured_on_float32_and_nothing_else_is():
    size = attend("float32", n=20)
    assert [m.name for m in size.measured if m.seconds] == ["torch, plain", "simt"]
    assert size.measured[-1].figures["of_math"] == times(size)["torch, plain"] / times(size)["simt"]
    assert attention.SMALL.element == "float32" and attention.READABLE == "simt"


@pytest.mark.parametrize("wrong", ["o", "lse", "unwritten"])
def test_attention_that_is_wrong_is_found(wrong):
    q, k, v = (torch.randn(1, 2, 50, 32, dtype=torch.float16) for _ in range(3))
    places = [heads.Place(0, 1, slice(1, 2), slice(20, 28))]
    judge = heads.Judge(torch, q, k, v, "float16", places, causal=True)
    scores = torch.einsum("bhmd,bhnd->bhmn", q.double(), k.double()) / math.sqrt(32)
    scores = scores.masked_fill(~torch.ones(50, 50, dtype=torch.bool).tril(), float("-inf"))
    o, lse = (scores.softmax(-1) @ v.double()).half(), scores.logsumexp(-1).float()
    assert judge((o, lse)).ok and judge(o).ok
    if wrong == "o":
        o[0, 1, 27, 3] += 0.1
        assert not judge((o, lse)).ok and not judge(o).ok
    elif wrong == "lse":
        lse[0, 1, 20] += 0.01
        assert not judge((o, lse)).ok and judge(o).ok
    else:
        o[0, 0, 49, 31] = float("nan")
        with pytest.raises(Wrong, match=r"first at \[0, 0, 49, 31\]"):
            judge((o, lse))


def test_problems_hold_as_many_tokens_and_columns():
    found = list(attention.problems(("float16",), (64, 128, 256), (1024, 16384), (False, True)))
    assert len(found) == 12
    assert {(p.batch * p.n, p.heads * p.d) for p in found} == {(16384, 2048)}
    assert attention.Problem("float16", 16, 32, 1024, 64) in found
    assert [p.batch for p in attention.problems(("float16",), (300,), (50000,), (True,))] == [1]


# -- one ring of slots -------------------------------------------------------------------------------------------------
def test_staged_beside_torch():
    problem, told = attention.Problem("float16", 1, 2, 40, 32, True), []
    names = ("quarter_4", "tile_2", "tile_1")
    size = staged.measure(
        problem, names=names, clock=HostClock(), machine="emulator", report=lambda size, m: told.append(m.name)
    )  # fmt: skip
    assert told == [m.name for m in size.measured] == [FA2, "tile_2", "tile_1", "quarter_4"]
    assert all(map(right, size.measured)), size.measured
    fa2, base, _, quarter = size.measured
    assert quarter.figures["of_base"] == base.seconds / quarter.seconds and base.figures["of_base"] is None
    assert quarter.figures["of_fa2"] == fa2.seconds / quarter.seconds
    assert (base.figures["shared"], quarter.figures["shared"]) == (128 + 2 * 8192, 128 + 4 * 2048)
    assert quarter.figures["blocks"] is None and fa2.figures["shared"] is None
    assert staged.kernels()[0] == staged.BASE and len(staged.kernels()) == 8


# -- decode ------------------------------------------------------------------------------------------------------------
def test_decode_beside_copies_and_torch():
    problem = decode.Problem("float16", 2, 100, heads=4, kv_heads=2, d=32)
    assert problem.nbytes == 2 * 2 * 2 * 100 * 32 * 2
    size = decode.measure(problem, 1e6, clock=HostClock(), machine="emulator", in_turn=2 * problem.nbytes)
    copy, fa2, cudnn, ours = size.measured
    assert [m.name for m in size.measured] == [decode.COPY, FA2, CUDNN, "split"]
    assert right(fa2) and right(ours), (fa2, ours)
    assert cudnn.note.startswith("refused: ")
    rate = problem.nbytes / ours.seconds
    assert ours.figures == {
        "bytes_per_second": rate, "of_copy": rate / 1e6, "of_equal_copy": copy.seconds / ours.seconds,
        "of_fa2": fa2.seconds / ours.seconds, "of_cudnn": None,
    }  # fmt: skip
    assert size.about["nbytes"] == problem.nbytes


def test_inputs_in_turn_are_apart():
    seen = []

    class Clock(HostClock):
        def time(self, calls, once):
            seen.append(len(calls))
            return super().time(calls, once)

    problem = decode.Problem("float16", 1, 64, heads=2, kv_heads=1, d=32)
    decode.measure(problem, 1.0, names=("mma",), clock=Clock(), machine="emulator", in_turn=3 * problem.nbytes - 1)
    assert seen == [3, 3, 3], "the copy, one backend of torch, and mma"
    sources = [torch.arange(4.0), torch.arange(4.0) + 1]
    copies = decode.copies(torch, sources)
    assert [copy().tolist() for copy in copies] == [[0, 1, 2, 3], [1, 2, 3, 4]]
    assert copies[0]().data_ptr() == copies[0]().data_ptr() != sources[0].data_ptr()


def test_calls_that_no_graph_takes_are_timed_one_by_one(monkeypatch):
    def refuse(calls, runs):
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    monkeypatch.setattr(timing, "time_graph", refuse)
    monkeypatch.setattr(timing, "time_gpu", lambda f, inputs, **how: 3e-5)
    called = []
    calls = [lambda: called.append(0), lambda: called.append(1)]
    seconds, note = decode.GraphClock(runs=20, warm_up=3e-5).time(calls, 1e-5)
    assert seconds == 3e-5 and "operation not permitted when stream is capturing" in note
    assert called == [0, 1, 0], "three warm it up"
    monkeypatch.setattr(timing, "time_graph", lambda calls, runs: 2e-5)
    assert decode.GraphClock(runs=20).time(calls, 1e-5) == (2e-5, "")


@pytest.mark.filterwarnings("ignore::flashnumba.NoGpuWarning")
def test_host_time_is_stated_with_what_the_launches_take(monkeypatch):
    q, k, v = (torch.randn(1, 4, 8, 32, dtype=torch.float16) for _ in range(3))
    monkeypatch.setattr(timing, "host_time", lambda call: 3e-6 if isinstance(call(), torch.Tensor) else 1e-6)
    rows = decode._host_times(torch, "q", q, k, v, "emulator")
    assert [row["seconds"] for row in rows] == [3e-6, 3e-6, 1e-6, 3e-6 - 1e-6]
    assert [row["note"] for row in rows] == [""] * 4 and rows[1]["name"] == "flashnumba.attention"
    monkeypatch.setattr(timing, "host_time", lambda call: 1 / 0)
    rows = decode.host_times("emulator")
    assert len(rows) == 6 and {row["note"] for row in rows} == {"not measured: ZeroDivisionError: division by zero"}
    assert {row["q"] for row in rows} == {"[1, 4, 64, 64], 64 keys", "[1, 8, 1, 128], 2048 keys"}


# -- softmax and what all need -----------------------------------------------------------------------------------------
def test_softmax_beside_torch_and_a_copy():
    size = softmax.measure("float16", 128, 8192, only="one_pass", clock=HostClock(), machine="emulator")
    copy, peer, ours = size.measured
    assert [copy.name, peer.name] == [softmax.COPY, softmax.PEER] and ours.name.startswith("one_pass")
    assert right(ours) and peer.error <= peer.budget
    assert size.about == {"element": "float16", "rows": 32, "cols": 128, "nbytes": 8192}
    assert ours.figures == {
        "bytes_per_second": 2 * 8192 / ours.seconds, "of_copy": copy.seconds / ours.seconds,
        "of_torch": peer.seconds / ours.seconds,
    }  # fmt: skip


def test_without_a_gpu_no_bench_begins(monkeypatch):
    monkeypatch.setattr(environment.gpu, "require", lambda: None)
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(is_available=lambda: False))
    with pytest.raises(RuntimeError, match="sees no GPU; it must be a CUDA build"):
        gemm.measure("float16", 8, 8, 8)
