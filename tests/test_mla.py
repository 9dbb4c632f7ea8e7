"""flashnumba.mla: what its functions and its cache give, beside float64; what they refuse, and with which words."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from flashnumba import mla
from flashnumba.compare import assert_close
from flashnumba.stages.flash_mla import codec, reference
from flashnumba.stages.flash_mla.mma import DECODE_ARGS

SCALE = 192**-0.5


def arrays(b=2, s=1, h=4, lengths=(70, 5), dtype=np.float16, seed=0):
    """(q, k_cache, block_table, cache_seqlens) with pages in no order, and no number behind a request's last token."""
    rng = np.random.default_rng(seed)
    most = 1 + max(lengths) // 64
    q = rng.standard_normal((b, s, h, 576)).astype(dtype)
    table = rng.permutation(b * most + 1)[: b * most].reshape(b, most).astype(np.int32)
    cache = np.full((b * most + 1, 64, 1, 576), np.nan, dtype)
    for i, length in enumerate(lengths):
        for page in range(-(-length // 64)):
            count = min(64, length - 64 * page)
            cache[table[i, page], :count] = rng.standard_normal((count, 1, 576))
    return q, cache, table, np.array(lengths, np.int32)


def assert_right(got, q, cache, table, lengths, scale, causal, exact=None):
    """``exact``: pages in float64, where the cache that is given to the judge is rounded from them."""
    o, lse = reference.paged(q, cache if exact is None else exact, table, lengths, scale, causal)
    low, low_lse = reference.rounded(q, cache, table, lengths, scale, causal)
    assert got[0].dtype == q.dtype and got[1].dtype == np.float32
    assert_close(got[0], o, low)
    assert_close(got[1], lse, low_lse)


@pytest.mark.parametrize(("dtype", "s", "h", "lengths"), [(np.float16, 2, 3, (70, 0)),
                                                          (ml_dtypes.bfloat16, 1, 17, (129, 64))])  # fmt: skip
def test_decoding(machine, dtype, s, h, lengths):
    q, cache, table, seqlens = arrays(2, s, h, lengths, dtype)
    made = mla.plan(seqlens, s * h, machine=machine)
    args = (q, cache, table, seqlens, 512, *made, SCALE, True)
    assert_right(mla.mla_decode(*args, machine=machine), q, cache[:, :, 0], table, lengths, SCALE, True)


def test_planned_by_itself_from_strided_rows(machine):
    """No plan; q is a view whose rows lie apart, or are not packed; the scale that None stands for."""
    q, cache, table, seqlens = arrays()
    expected = mla.mla_decode(q, cache, table, seqlens, machine=machine)
    assert_right(expected, q, cache[:, :, 0], table, seqlens, 576**-0.5, False)
    for other in (np.repeat(q, 2, axis=2)[:, :, ::2], np.repeat(q, 2, axis=3)[..., ::2]):
        got = mla.mla_decode(other, cache, table, seqlens, machine=machine)
        assert all(map(np.array_equal, got, expected))
    odd = np.pad(q, ((0, 0), (0, 0), (0, 0), (0, 1)))[..., :-1]
    taken = mla.host.q_view(odd, mla.describe(odd))
    assert np.array_equal(taken, q) and not any(stride % 16 for stride in taken.strides[:3])


def test_there_is_room_for_every_state(monkeypatch):
    """Of more requests than parts, the last of them cut: a state's number counts those of all requests before."""
    told = []
    monkeypatch.setattr(mla.host, "prepared", lambda *_: lambda *given: told.append(given[2]))
    q, cache, table, seqlens = arrays(12, 1, 1, (*[1] * 11, 900))
    made = mla.plan(seqlens, 1, machine="emulator")
    mla.mla_decode(q, cache, table, seqlens, 512, *made, machine="emulator")
    states = told[0][DECODE_ARGS.index("acc_parts")]
    assert len(made.tile_scheduler_metadata) < 13 <= made.num_splits[-1] <= len(states)


def test_the_place_of_pages_changes_no_bit(machine):
    q, cache, table, seqlens = arrays(lengths=(200, 64))
    moved, order = np.empty_like(cache), np.random.default_rng(5).permutation(len(cache))
    moved[order] = cache
    first = mla.mla_decode(q, cache, table, seqlens, causal=True, machine=machine)
    second = mla.mla_decode(q, moved, order[table].astype(np.int32), seqlens, causal=True, machine=machine)
    assert all(map(np.array_equal, first, second))


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "fmt"), [(16, None), (16, "e4m3"), (128, None), (128, "e4m3")])
def test_the_same_bits_every_time(heads, fmt):
    """Twenty runs with requests in one part, in several and without a token, and then with all pages elsewhere."""
    q, cache, table, seqlens = arrays(4, 1, heads, (900, 0, 64, 5000), ml_dtypes.bfloat16)
    if fmt:
        cache = codec.quantize(cache[:, :, 0], fmt)[:, :, None]
    given = {"is_fp8_kvcache": fmt is not None, "machine": "cuda"}
    first = mla.mla_decode(q, cache, table, seqlens, **given)
    for _ in range(19):
        assert all(map(np.array_equal, first, mla.mla_decode(q, cache, table, seqlens, **given)))
    moved, order = np.empty_like(cache), np.random.default_rng(5).permutation(len(cache))
    moved[order] = cache
    assert all(map(np.array_equal, first, mla.mla_decode(q, moved, order[table].astype(np.int32), seqlens, **given)))


@pytest.mark.gpu
def test_decoding_in_a_graph(cuda_torch):
    """Twice in turn behind a copy into the cache; lengths, and with them the plan, stay as they are."""
    torch = cuda_torch
    q, cache, table, seqlens = (torch.from_numpy(x).cuda() for x in arrays(2, 1, 16, (900, 64)))
    cache.nan_to_num_()
    made, other = mla.plan(seqlens, 16), cache.clone()

    def decode(cache):
        first, _ = mla.mla_decode(q, cache, table, seqlens, 512, *made)
        return mla.mla_decode(torch.nn.functional.pad(first, (0, 64)), cache, table, seqlens, 512, *made)

    decode(other)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        other.copy_(cache)
        got = decode(other)
    for _ in range(3):
        q.normal_()
        cache.normal_()
        graph.replay()
        assert all(map(torch.equal, got, decode(cache)))


@pytest.mark.gpu
def test_on_another_stream(cuda_torch):
    """The caller is ahead of it: lengths that are not there yet are waited for, to plan by them; and tables that a
    cache has replaced, of which the current stream would be given the memory, stay until they were read."""
    torch = cuda_torch
    side = torch.cuda.Stream()

    def busy():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(400_000_000)

    q, pages, table, seqlens = (torch.from_numpy(x).cuda() for x in arrays(2, 1, 16, (900, 64)))
    expected = mla.mla_decode(q, pages, table, seqlens)
    late = torch.zeros_like(seqlens)
    busy()
    with torch.cuda.stream(side):
        late.copy_(seqlens)
    got = mla.mla_decode(q, pages, table, late, stream=side)
    side.synchronize()
    assert all(map(torch.equal, got, expected))

    rows = torch.randn(2, 900, 576, device="cuda", dtype=torch.float16)
    first, cache = (mla.MLACache(32, 2, 1024, like=rows) for _ in range(2))
    first.append(rows)
    expected = first.decode(q)
    side.wait_stream(torch.cuda.current_stream())
    cache.append(rows, stream=side)
    busy()
    got = cache.decode(q, stream=side)
    assert not side.query(), "decoding is to come"
    sizes = [x.shape for x in (cache.block_table, cache.cache_seqlens, *cache.plan(16))]
    cache.free(0)
    spoilt = [torch.zeros(size, dtype=torch.int32, device="cuda") for size in 8 * sizes]
    side.synchronize()
    assert len(spoilt) == 32 and all(map(torch.equal, got, expected))


@pytest.mark.parametrize("causal", [True, False])
def test_prefill(machine, causal):
    """Two tiles of rows, the second not full; with the mask the first rows see no key at all."""
    rng = np.random.default_rng(3)
    q = rng.standard_normal((1, 24, 3, 576)).astype(np.float16)
    kv = rng.standard_normal((1, 20, 1, 576)).astype(np.float16)
    got = mla.mla_prefill(q, kv, 512, SCALE, causal, machine=machine)
    pages = np.zeros((1, 64, 576), np.float16)
    pages[0, :20] = kv[0, :, 0]
    assert_right(got, q, pages, np.zeros((1, 1), np.int32), [20], SCALE, causal)


def test_nothing_is_nothing(machine):
    q = np.zeros((1, 2, 3, 576), np.float16)
    out, lse = mla.mla_prefill(q, np.zeros((1, 0, 1, 576), np.float16), machine=machine)
    assert (out == 0).all() and (lse == -np.inf).all()
    out, lse = mla.mla_prefill(q[:, :0], np.zeros((1, 5, 1, 576), np.float16), machine=machine)
    assert out.shape == (1, 0, 3, 512) and lse.shape == (1, 3, 0)


@pytest.mark.parametrize("fmt", [None, "e4m3"])
def test_a_cache_that_grows(machine, fmt):
    """Prompts, some steps, a request that ends; the mask cuts a tile whose last key the last token sees, and a scale
    below zero asks for the smallest scores."""
    rng = np.random.default_rng(4)
    rows = rng.standard_normal((2, 96, 576)).astype(ml_dtypes.bfloat16)
    cache = mla.MLACache(4, 2, 128, like=rows, fmt=fmt, machine=machine)
    cache.append(rows[:, :63].copy())
    assert cache.pages_in_use == 2 and cache.lengths.tolist() == [63, 63]
    cache.append(rows[:, 63:].copy())
    assert cache.pages_in_use == 4
    q = rng.standard_normal((2, 2, 2, 576)).astype(ml_dtypes.bfloat16)
    got = cache.decode(q, -SCALE, causal=True)
    pages = np.zeros((4, 64, 576))
    stored = codec.dequantize(codec.quantize(rows, fmt), fmt) if fmt else rows.astype(np.float64)
    for b in range(2):
        pages[2 * b : 2 * b + 2].reshape(128, 576)[:96] = stored[b]
    table = np.arange(4).reshape(2, 2)
    assert_right(got, q, pages.astype(q.dtype), table, [96, 96], -SCALE, True, exact=pages)
    assert cache.plan(4) is cache.plan(4)
    cache.free(0)
    assert cache.lengths.tolist() == [0, 96] and cache.pages_in_use == 2
    out, lse = cache.decode(q, -SCALE, causal=True)
    assert (out[0] == 0).all() and (lse[0] == -np.inf).all() and np.array_equal(out[1], got[0][1])


def refused(match, error=ValueError, change=None, **more):
    """mla_decode of good arrays but for what ``change`` does to them."""
    names = ("q", "k_cache", "block_table", "cache_seqlens")
    given = dict(zip(names, arrays(), strict=True)) | more
    for name, function in (change or {}).items():
        given[name] = function(given[name])
    with pytest.raises(error, match=match):
        mla.mla_decode(**given, machine="emulator")


def test_bad_arguments_are_named():
    refused("q has elements of type float32", TypeError, {"q": lambda x: x.astype(np.float32)})
    refused(r"q has shape \(2, 1, 4, 512\); it must be", change={"q": lambda x: x[..., :512]})
    refused("k_cache has elements of type bfloat16 and q of float16", TypeError,
            {"k_cache": lambda x: x.astype(ml_dtypes.bfloat16)})  # fmt: skip
    refused(r"k_cache has shape .*; it must be \[pages, 64, 1, 576\]", change={"k_cache": lambda x: x[:, :32]})
    refused("k_cache has strides .*; rows must be packed", change={"k_cache": lambda x: np.repeat(x, 2, 3)[..., ::2]})
    refused(r"k_cache has shape .*; it must be \[pages, 64, 1, 656\]", is_fp8_kvcache=True)
    refused("block_table has elements of type int64; it must be int32", TypeError,
            {"block_table": lambda x: x.astype(np.int64)})  # fmt: skip
    refused(r"block_table\[0, 1\] is 99; the cache has pages 0 to 4", block_table=np.array([[0, 99], [1, 2]], np.int32))
    refused(r"cache_seqlens\[1\] is 500; it must be 0 to 128", cache_seqlens=np.array([1, 500], np.int32))
    refused(r"cache_seqlens has shape \(3,\)", cache_seqlens=np.zeros(3, np.int32))
    refused("head_dim_v is 576; V is the first 512", head_dim_v=576)
    refused("softmax_scale is inf", softmax_scale=float("inf"))
    refused("causal is 1; it must be True or False", TypeError, causal=1)
    for fmt in ("e3m4", "", ["e4m3"]):
        refused("fmt is .*; it must be one of e4m3, e5m2", fmt=fmt)
    refused("num_splits belong together", num_splits=np.zeros(3, np.int32))
    stale = mla.plan(np.array([7, 300], np.int32), 4, machine="emulator")
    refused("not for these cache_seqlens; plan anew", tile_scheduler_metadata=stale[0], num_splits=stale[1])
    refused(r"tile_scheduler_metadata is float32 of shape \(8, 8\)", num_splits=stale[1],
            tile_scheduler_metadata=stale[0].astype(np.float32))  # fmt: skip
    with pytest.raises(ValueError, match=r"cache_seqlens\[1\] is -3; it must be at least 0"):
        mla.plan(np.array([1, -3], np.int32), 4, machine="emulator")
    with pytest.raises(ValueError, match="num_heads_k is 2; latent attention has one head of keys"):
        mla.plan(np.zeros(1, np.int32), 16, 2)
    with pytest.raises(ValueError, match=r"kv has shape .*; it must be \[1, rows, 1, 576\]"):
        mla.mla_prefill(np.zeros((1, 2, 3, 576), np.float16), np.zeros((1, 5, 2, 576), np.float16))


def test_a_cache_refuses_and_stays_as_it_was(monkeypatch):
    rows = np.zeros((1, 65, 576), np.float16)
    with pytest.raises(ValueError, match="pages is 0"):
        mla.MLACache(0, 1, 64, like=rows)
    cache = mla.MLACache(1, 1, 100, like=rows, machine="emulator")
    with pytest.raises(ValueError, match="rows need 2 new pages; 1 are free"):
        cache.append(rows)
    cache.append(rows[:, :60].copy())
    with pytest.raises(ValueError, match="rows bring 65 tokens to 60; a request may have 100"):
        cache.append(rows)
    with pytest.raises(TypeError, match="rows have elements of type float32; this cache holds float16"):
        cache.append(rows.astype(np.float32))
    with pytest.raises(ValueError, match="request is 1; it must be 0 to 0"):
        cache.free(1)
    with pytest.raises(TypeError, match=r"request is 0\.5; it must be a whole number"):
        cache.free(0.5)
    cache.plan(1)
    with pytest.raises(ValueError, match="num_q_tokens_per_head_k is True"):
        cache.plan(True)
    for fmt in ("", False):
        with pytest.raises(ValueError, match=r"fmt is .*; it must be one of e4m3, e5m2"):
            mla.MLACache(1, 1, 64, like=rows, fmt=fmt)
    grown = mla.MLACache(2, 1, 128, like=rows, machine="emulator")
    with pytest.raises(TypeError, match="stream is a str"):
        grown.append(rows, stream="first")
    monkeypatch.setattr(mla.writing, "append", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # whatever a launch may say
        grown.append(rows)
    monkeypatch.undo()
    grown.append(rows)
    assert grown.lengths.tolist() == [65] and grown.pages_in_use == 2
    assert cache.lengths.tolist() == [60] and cache.pages_in_use == 1


def test_tables_that_a_stream_may_still_read(monkeypatch):
    """Each that is replaced later is reported to torch's allocator as in use on the caller's stream."""
    cache = mla.MLACache(2, 1, 64, like=np.empty(0, np.float16), machine="emulator")
    told = []
    tables = [SimpleNamespace(record_stream=lambda stream, at=at: told.append((at, stream))) for at in range(4)]
    cache.block_table, cache.cache_seqlens = tables[:2]
    cache._in_use("side", *tables[2:])
    assert told == [], "in host memory nothing is freed before it was read"
    cache._like = SimpleNamespace(kind="torch-cuda", device=0)
    monkeypatch.setattr("flashnumba.mla.library_stream", lambda found, stream: nullcontext())
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(current_stream=lambda device: "it")))
    cache._in_use(None, *tables[2:])
    assert told == [], "the current stream is the allocator's own"
    cache._in_use("side", *tables[2:])
    assert told == [(at, "it") for at in range(4)]
