"""Calls in a CUDA graph, with a stand-in for torch; on a GPU beside calls one by one."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from flashnumba.bench import attention, decode, gemm, softmax, timing


@pytest.fixture
def torch_with_graphs(monkeypatch):
    """As much of torch as a capture needs; ``captured`` holds what a graph recorded."""
    fake = SimpleNamespace(captured=[], stream="mine", capturing=False, replays=0)

    @contextmanager
    def graph(_):
        fake.stream, fake.capturing = "the capture's", True
        yield  # a failed capture leaves its stream behind
        fake.stream, fake.capturing = "mine", False

    def replay():
        fake.replays += 1

    def set_stream(stream):
        fake.stream = stream

    fake.cuda = SimpleNamespace(
        CUDAGraph=lambda: SimpleNamespace(replay=replay), graph=graph, current_stream=lambda: fake.stream,
        set_stream=set_stream,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch", fake)

    def time_gpu(f, *, warmup, runs):
        f()
        return 0.6

    monkeypatch.setattr(timing, "time_gpu", time_gpu)
    return fake


@pytest.mark.parametrize(("took", "repeats"), [(1e-3, 5), (2e-2, 1)])
def test_a_graph_holds_all_calls_as_often_as_it_takes(monkeypatch, torch_with_graphs, took, repeats):
    fake = torch_with_graphs
    monkeypatch.setattr(timing, "once", lambda f: (f(), took))
    calls = [lambda i=i: fake.captured.append(i) if fake.capturing else None for i in range(3)]
    assert timing.time_graph(calls) == pytest.approx(0.6 / (3 * repeats))
    assert fake.captured == [0, 1, 2] * repeats and fake.replays == 1 and fake.stream == "mine"


def test_a_call_that_cannot_be_captured_leaves_the_stream_as_it_was(monkeypatch, torch_with_graphs):
    fake = torch_with_graphs
    monkeypatch.setattr(timing, "once", lambda f: (f(), 1.0))

    def call():
        if fake.capturing:
            raise RuntimeError("not permitted")

    with pytest.raises(RuntimeError, match="not permitted"):
        timing.time_graph([call])
    assert fake.stream == "mine"


# -- on a GPU ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def torch():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return torch


@pytest.mark.gpu
def test_a_graph_takes_as_long_as_its_calls(torch):
    x, y = torch.zeros(1 << 26, device="cuda"), torch.empty(1 << 26, device="cuda")
    alone = timing.time_gpu(lambda: y.copy_(x))
    assert timing.time_graph([lambda: y.copy_(x)] * 3) == pytest.approx(alone, rel=0.15)
    assert timing.once(lambda: y.copy_(x) is y)[0] is True
    assert 0.5 * alone < timing.once(lambda: y.copy_(x))[1] < 20 * alone


@pytest.mark.gpu
def test_every_bench_measures_every_kernel(torch):
    sizes = [gemm.measure(element, 256, 384, 512) for element in ("float32", "float16", "bfloat16")]
    sizes += [attention.measure(attention.Problem("float16", 2, 3, 300, 64, causal)) for causal in (False, True)]
    sizes.append(attention.measure(attention.Problem("float32", 1, 2, 200, 64)))
    sizes.append(decode.measure(decode.Problem("float16", 2, 2000), 4e12, in_turn=1 << 25))
    sizes.append(softmax.measure("float16", 1024, 1 << 24))
    for size in sizes:
        ours = [m for m in size.measured if m.ours]
        assert ours and all(m.seconds and m.error <= m.budget and not m.note for m in ours), size
    rows = decode.host_times()
    assert len(rows) == 8 and all(row["seconds"] is not None for row in rows)
