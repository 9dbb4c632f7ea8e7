"""The everyday NumPy path: the reference's results whatever the tiles, layouts and threads; bounded memory."""

import threading
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashnumba.data import load_minilm
from flashnumba.stages.flash_forward import blas
from tests.stages.flash_forward.attention_cases import (
    DTYPES,
    INF,
    Case,
    assert_attention,
    hard_cases,
    laid_out,
    names,
    normal,
)


def attend(case):
    o, lse = blas.forward(case.q, case.k, case.v, case.scale, case.causal)
    assert (o.dtype, o.shape, lse.dtype, lse.shape) == (case.q.dtype, case.q.shape, np.float32, case.q.shape[:-1])
    return o, lse


def judged(case):
    results = attend(case)
    assert_attention(results, case)
    return results


@pytest.fixture
def small_tiles(monkeypatch):
    """Many tiles, chunks and tasks from small problems."""
    for name, value in (("TILE", 64), ("ROWS", 4), ("CHUNK", 8), ("KEYS", 5), ("TASKS", 2)):
        monkeypatch.setattr(blas, name, value)


@pytest.mark.parametrize("dtype", DTYPES, ids=names)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.0, -0.6])
@pytest.mark.parametrize(
    ("m", "n", "d"),
    [(1, 1, 1), (7, 15, 31), (15, 7, 33), (63, 100, 64), (300, 70, 8), (70, 300, 16), (257, 530, 5), (1, 5000, 32)],
)
def test_sizes(m, n, d, scale, causal, dtype):
    judged(normal(m, n, d, dtype, batch=2, heads=4, kv_heads=2, causal=causal, scale=scale))


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(1, 5)),
    batch=st.integers(1, 3), heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1), (9, 3)]),
    causal=st.booleans(), scale=st.sampled_from([None, 0.0, 1.0, -0.5]), dtype=st.sampled_from(DTYPES),
    tiles=st.tuples(*(st.integers(1, n) for n in (60, 9, 20, 7, 9))),
)  # fmt: skip
def test_any_tiles_give_the_same(sizes, batch, heads, causal, scale, dtype, tiles):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(("TILE", "ROWS", "CHUNK", "KEYS", "TASKS"), tiles, strict=True):
            patch.setattr(blas, name, value)
        judged(normal(*sizes, dtype, batch=batch, heads=heads[0], kv_heads=heads[1], causal=causal, scale=scale))


@pytest.mark.parametrize("dtype", DTYPES, ids=names)
def test_whatever_may_go_wrong(dtype, small_tiles):
    for case in hard_cases(dtype):
        judged(case)


@pytest.mark.parametrize("dtype", DTYPES, ids=names)
def test_layouts(dtype, small_tiles):
    for case in laid_out(normal(12, 18, 6, dtype, batch=2, heads=4, kv_heads=2, causal=True)):
        judged(case)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_real_data(dtype):
    data = load_minilm()
    q, k, v = (x[1].astype(dtype)[None] for x in (data.q, data.k, data.v))
    judged(Case("causal", q[:, ::4], k[:, ::4], v[:, ::4], True))
    judged(Case("groups of four", q, k[:, ::4], v[:, ::4]))


def test_leading_axes_may_be_left_out():
    case = normal(9, 11, 8, heads=2)
    whole = judged(case)
    for axes in ((0,), (0, 1)):
        for part, expected in zip(blas.forward(case.q[axes], case.k[axes], case.v[axes]), whole, strict=True):
            np.testing.assert_allclose(part, expected[axes], rtol=1e-5)


def test_read_only_inputs():
    case = normal(9, 11, 8)
    for x in (case.q, case.k, case.v):
        x.setflags(write=False)
    judged(case)


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4)])
def test_nothing_to_do(shape):
    q = np.zeros(shape, np.float16)
    o, lse = blas.forward(q, q, q)
    assert (o.shape, lse.shape) == (shape, shape[:-1])


@pytest.mark.parametrize("causal", [False, True])
def test_no_keys(causal):
    o, lse = attend(normal(5, 0, 4, causal=causal))
    assert (o == 0).all() and (lse == -INF).all()


# -- how it is done ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("causal", [False, True])
def test_results_repeat_bit_for_bit(causal, monkeypatch):
    case = normal(600, 900, 32, heads=4, kv_heads=2, causal=causal)
    first = attend(case)
    monkeypatch.setattr(blas, "SERIAL", 0)
    monkeypatch.setattr(blas.Threads, "count", lambda self: 3)
    for _ in range(3):
        for a, b in zip(attend(case), first, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("shape", [(1, 2, 4096, 16), (1, 1, 16, 64), (40_000, 1, 1, 8), (3, 5000, 2, 8)])
def test_memory_is_bounded(shape):
    """Scores are never all in memory: 134 MB of them for the first shape; nor are K and V converted as a whole."""
    q = np.ones(shape, np.float16)
    k = v = np.ones((*shape[:2], 50_000 if shape[2] == 16 else shape[2], shape[3]), np.float16)
    tracemalloc.start()
    try:
        blas.forward(q, k, v, 0.1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 24e6


def test_tiles_hold_whole_heads_where_heads_are_small():
    cut = blas.tiling(70_000, 2, 1, 4, 4, 8)
    assert (cut.heads, cut.queries, cut.keys) == (2, 4, 4)
    assert cut.batches * cut.heads * 16 <= blas.TILE
    assert 70_000 / cut.batches < 50
    assert blas.tiling(1, 8, 4, 1000, 1000, 64) == blas.Tiling(1, 1, 64, 64 * 8, 1000)
    assert blas.tiling(1, 1, 1, 1, 100_000, 64).keys == blas.KEYS


def test_an_error_in_a_thread_is_raised(monkeypatch):
    def broken(*args):
        raise MemoryError("no room for a tile")

    monkeypatch.setattr(blas, "_step", broken)
    monkeypatch.setattr(blas, "SERIAL", 0)
    monkeypatch.setattr(blas.Threads, "count", lambda self: 3)
    with pytest.raises(MemoryError, match="no room for a tile"):
        attend(normal(600, 600, 8))


class Blas:
    """Stands for threadpoolctl's controller of one library."""

    def __init__(self, threads):
        self.num_threads, self.before = threads, threads
        self.lib_controllers = [self]

    def limit(self, limits):
        self.num_threads = limits
        return self

    def restore_original_limits(self):
        self.num_threads = self.before


def test_blas_is_held_to_one_thread_until_the_last_call_is_done(monkeypatch):
    held = Blas(6)
    monkeypatch.setattr(blas, "_blas", lambda: held)
    threads = blas.Threads()
    assert threads.count() == 6
    with threads:
        assert (held.num_threads, threads.count()) == (1, 6)
        with threads:
            assert (held.num_threads, threads.count()) == (1, 6)
        assert held.num_threads == 1
    assert (held.num_threads, threads.count()) == (6, 6)
    with pytest.raises(KeyError), threads:
        raise KeyError
    assert held.num_threads == 6


def test_without_threadpoolctl_blas_has_its_own_threads(monkeypatch):
    monkeypatch.setattr(blas, "_blas", lambda: None)
    assert blas.Threads().count() == 1
    monkeypatch.setattr(blas, "SERIAL", 0)
    judged(normal(300, 300, 8))


def test_calls_from_several_threads(monkeypatch):
    pytest.importorskip("threadpoolctl")
    monkeypatch.setattr(blas, "SERIAL", 0)
    case, got = normal(300, 300, 8, heads=4), []
    expected, before = attend(case), blas.THREADS.count()
    calls = [threading.Thread(target=lambda: got.append(attend(case))) for _ in range(6)]
    for call in calls:
        call.start()
    for call in calls:
        call.join()
    assert len(got) == 6
    for o, lse in got:
        np.testing.assert_array_equal(o, expected[0])
        np.testing.assert_array_equal(lse, expected[1])
    assert blas.THREADS.count() == before
