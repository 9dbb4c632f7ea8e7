"""The everyday NumPy path: the reference's results whatever the tiles, layouts and threads; bounded memory."""

import threading
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashnumba.compare import assert_close
from flashnumba.data import load_minilm
from flashnumba.stages.flash_forward import blas, reference

INF, NAN = np.inf, np.nan
DTYPES = (np.float16, ml_dtypes.bfloat16, np.float32)


def made(m, n, d=8, heads=4, kv_heads=2, batch=2, dtype=np.float32, seed=0):
    rng = np.random.default_rng([seed, m, n, d])
    shapes = ((batch, heads, m, d), (batch, kv_heads, n, d), (batch, kv_heads, n, d))
    q, k, v = (rng.standard_normal(shape) for shape in shapes)
    return q.astype(dtype), k.astype(dtype), (v + 0.5).astype(dtype)


def assert_attention(q, k, v, scale=None, causal=False, what=""):
    o, lse = blas.forward(q, k, v, scale, causal)
    assert (o.dtype, o.shape, lse.dtype, lse.shape) == (q.dtype, q.shape, np.float32, q.shape[:-1])
    expected, low = reference.dense(q, k, v, scale, causal), reference.low_precision(q, k, v, scale, causal)
    assert_close(lse, expected[1], low[1], what=f"{what} lse")
    assert_close(o, expected[0], low[0], what=f"{what} o")
    return o, lse


@pytest.fixture
def small_tiles(monkeypatch):
    """Many tiles, chunks and tasks from small problems."""
    for name, value in (("TILE", 64), ("ROWS", 4), ("CHUNK", 8), ("KEYS", 5), ("TASKS", 2)):
        monkeypatch.setattr(blas, name, value)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.0, -0.6])
@pytest.mark.parametrize(
    ("m", "n", "d"),
    [(1, 1, 1), (7, 15, 31), (15, 7, 33), (63, 100, 64), (300, 70, 8), (70, 300, 16), (257, 530, 5), (1, 5000, 32)],
)
def test_sizes(m, n, d, scale, causal, dtype):
    assert_attention(*made(m, n, d, dtype=dtype), scale, causal)


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 3), st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1), (9, 3)]), st.integers(0, 20),
                    st.integers(0, 20), st.integers(1, 5)),
    causal=st.booleans(), scale=st.sampled_from([None, 0.0, 1.0, -0.5]), dtype=st.sampled_from(DTYPES),
    tiles=st.tuples(*(st.integers(1, n) for n in (60, 9, 20, 7, 9))),
)  # fmt: skip
def test_any_tiles_give_the_same(sizes, causal, scale, dtype, tiles):
    batch, (heads, kv_heads), m, n, d = sizes
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(("TILE", "ROWS", "CHUNK", "KEYS", "TASKS"), tiles, strict=True):
            patch.setattr(blas, name, value)
        assert_attention(*made(m, n, d, heads, kv_heads, batch, dtype), scale, causal)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_real_data(dtype):
    data = load_minilm()
    q, k, v = (x[1].astype(dtype) for x in (data.q, data.k, data.v))
    assert_attention(q[::4], k[::4], v[::4], None, True)
    assert_attention(q, k[::4], v[::4], None, False)


def test_leading_axes_may_be_left_out():
    q, k, v = (x[0] for x in made(9, 11, heads=2))
    whole = assert_attention(q, k, v)
    for part, expected in zip(blas.forward(q[1], k[1], v[1]), whole, strict=True):
        np.testing.assert_allclose(part, expected[1], rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_layouts(causal, dtype, small_tiles):
    q, k, v = made(12, 18, 6, dtype=dtype)
    expected = blas.forward(q, k, v, None, causal)

    def same(*given):
        for a, b in zip(blas.forward(*given, None, causal), expected, strict=True):
            np.testing.assert_allclose(
                a.astype(np.float64), b.astype(np.float64), rtol=2e-2 if a.itemsize == 2 else 1e-5
            )

    tokens_first = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for x in (q, k, v)]
    assert not tokens_first[0].flags.c_contiguous
    same(*tokens_first)
    same(*(np.asfortranarray(x) for x in (q, k, v)))
    same(*(np.ascontiguousarray(x[:, :, ::-1, ::-1])[:, :, ::-1, ::-1] for x in (q, k, v)))
    same(*(np.repeat(np.repeat(x, 2, -1), 3, -2)[..., ::3, ::2] for x in (q, k, v)))
    for x in (q, k, v):
        x.setflags(write=False)
    same(q, k, v)


def test_broadcast_keys_and_values(small_tiles):
    q, k, v = made(6, 10, heads=4, kv_heads=1)
    wide = [np.broadcast_to(x, (2, 4, 10, 8)) for x in (k, v)]
    for a, b in zip(blas.forward(q, *wide), blas.forward(q, k, v), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    one = np.broadcast_to(k[:, :, :1], k.shape)
    assert_attention(q, one, v)


# -- the limits --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_see_nothing(dtype, small_tiles):
    q, k, v = made(20, 7, dtype=dtype)
    q[..., 3, :] = NAN
    o, lse = assert_attention(q, k, v, None, True)
    assert (o[..., :13, :] == 0).all() and (lse[..., :13] == -INF).all()
    for causal in (False, True):
        o, lse = assert_attention(q, k[..., :0, :], v[..., :0, :], None, causal)
        assert (o == 0).all() and (lse == -INF).all()


@pytest.mark.parametrize("causal", [False, True])
def test_nan_and_infinities(causal, small_tiles):
    q, k, v = made(16, 16, kv_heads=4)
    q[0, 1, 9, 3] = NAN
    k[1, 2, 11, 0] = NAN
    q[1, 0, 14] = 1
    k[1, 0, 13] = INF
    k[0, 3, 10] = -np.sign(q[0, 3, 15]) * INF
    assert_attention(q, k, v, 1.0, causal)


def test_a_nan_or_an_infinity_in_v_spoils_its_column(small_tiles):
    q, k, v = made(6, 16, kv_heads=4)
    v[0, 1, 9, 3], v[1, 2, 4, 5], v[1, 2, 5, 6] = NAN, INF, -INF
    assert_attention(q, k, v)


@pytest.mark.parametrize("causal", [False, True])
def test_huge_scores(causal, small_tiles):
    rng = np.random.default_rng(0)
    # Whole numbers, so that scores of 1e5 and more are exact in float32 too.
    q, k = (rng.integers(-300, 300, (2, 4, 20, 8)).astype(np.float32) for _ in range(2))
    v = rng.standard_normal(k.shape, dtype=np.float32)
    assert np.abs(q @ k.swapaxes(-1, -2)).max() > 1e5
    assert_attention(q, k, v, 1.0, causal)
    assert_attention(q, k, v, -2.0, causal)


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4)])
def test_nothing_to_do(shape):
    q = np.zeros(shape, np.float16)
    o, lse = blas.forward(q, q, q)
    assert (o.shape, lse.shape) == (shape, shape[:-1])


# -- how it is done ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("causal", [False, True])
def test_results_repeat_bit_for_bit(causal, monkeypatch):
    q, k, v = made(600, 900, 32)
    first = blas.forward(q, k, v, None, causal)
    monkeypatch.setattr(blas, "SERIAL", 0)
    for _ in range(3):
        for a, b in zip(blas.forward(q, k, v, None, causal), first, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("shape", [(1, 2, 4096, 16), (1, 1, 16, 64), (40_000, 1, 1, 8), (3, 5000, 2, 8)])
def test_memory_is_bounded(shape):
    """Scores are never all in memory: 134 MB of them for the first shape; nor are K and V converted as a whole."""
    q = np.ones(shape, np.float16)
    k = v = np.ones((*shape[:2], 100_000 if shape[2] == 16 else shape[2], shape[3]), np.float16)
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
        blas.forward(*made(600, 600))


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
    assert_attention(*made(300, 300))


def test_calls_from_several_threads(monkeypatch):
    pytest.importorskip("threadpoolctl")
    monkeypatch.setattr(blas, "SERIAL", 0)
    q, k, v = made(300, 300)
    expected, before, got = blas.forward(q, k, v), blas.THREADS.count(), []
    calls = [threading.Thread(target=lambda: got.append(blas.forward(q, k, v))) for _ in range(6)]
    for call in calls:
        call.start()
    for call in calls:
        call.join()
    assert len(got) == 6
    for o, lse in got:
        np.testing.assert_array_equal(o, expected[0])
        np.testing.assert_array_equal(lse, expected[1])
    assert blas.THREADS.count() == before
