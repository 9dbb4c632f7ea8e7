"""attention() a second time on tensors of the same kind; on a stand-in for a GPU, and on a real one."""

from __future__ import annotations

import sys

import ml_dtypes
import numpy as np
import pytest

from flashnumba import attention
from tests.machine.fakes import Tensor
from tests.stages.flash_forward.attention_cases import Case, assert_attention

room = sys.modules["flashnumba.attention"]


@pytest.fixture
def once(monkeypatch, fake_gpu, fake_torch):
    """After ``once()`` a call that checks, chooses or plans anew fails."""
    monkeypatch.setattr(room, "RECIPES", type(room.RECIPES)())
    return lambda: monkeypatch.setattr(room, "_first", lambda *args: pytest.fail("looked a second time"))


def tensors(at, q=(2, 4, 256, 64), kv=(2, 2, 512, 64), dtype="torch.float16"):
    return [Tensor(at + 0x1000 * i, dtype, size) for i, size in enumerate((q, kv, kv))]


@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("strided", [False, True])
def test_a_second_call_differs_in_addresses_alone(rank, return_lse, strided, once, fake_gpu, fake_torch):
    launched, options = [], {"causal": True, "scale": -0.25, "return_lse": return_lse}
    for at in (0x10000, 0x20000):
        q, k, v = tensors(at, *((2, 4, 256, 64)[-rank:], (2, 2, 512, 64)[-rank:]))
        if strided:
            q = q.as_strided(q.shape, (999_999, 8, 16 * 64, 1)[-rank:])
        got = attention(q, k, v, backend="flash_forward.mma", **options)
        o, lse = got if return_lse else (got, fake_torch.made[-1])
        assert (o.shape, o.dtype, lse.dtype) == (q.shape, "torch.float16", "torch.float32")
        assert lse.shape == q.shape[:-1] if return_lse else lse.numel() >= np.prod(q.shape[:-1])
        ((function, *how, values),) = fake_gpu.launches
        fake_gpu.launches.clear()
        words = [4 + 13 * i for i in range(5)]
        assert [values[word] for word in words] == [x.data_ptr() for x in (q, k, v, o, lse)]
        assert values[-2:] == (-0.25, 1)
        assert how[-1] == 1000, "the current stream"
        launched.append((function, how, [word for i, word in enumerate(values) if i not in words]))
        once()
    assert launched[0] == launched[1]
    assert launched[0][2][:4] == [0, 0, int(np.prod(q.shape)), 2]


def test_a_second_call_with_scratch_between_two_kernels(once, fake_gpu, fake_torch):
    launched = []
    for at in (0x10000, 0x20000):
        before = len(fake_torch.made)
        q, k, v = tensors(at, (2, 4, 1, 64), (2, 2, 2048, 64))
        o, lse = attention(q, k, v, return_lse=True)
        part, merge = fake_gpu.launches
        fake_gpu.launches.clear()
        made = fake_torch.made[before:]
        acc, m, l = (part[-1][at] for at in (3 * 13 + 4, 3 * 13 + 15 + 4, 3 * 13 + 15 + 13 + 4))
        assert [part[-1][13 * i + 4] for i in range(3)] == [x.data_ptr() for x in (q, k, v)]
        assert [merge[-1][at] for at in (4, 19, 32, 45, 58)] == [acc, m, l, o.data_ptr(), lse.data_ptr()]
        splits, *rows = (part[-1][3 * 13 + 15 + i] for i in range(5, 9))
        assert splits > 1 and rows == [2, 4, 1]
        states = splits * 2 * 4
        wanted = {o.data_ptr(): 2 * 8 * 64, lse.data_ptr(): 4 * 8, acc: 4 * states * 64, m: 4 * states, l: 4 * states}
        for at, nbytes in wanted.items():
            ends = at + nbytes
            (inside,) = [x for x in made if x.data_ptr() <= at and ends <= x.data_ptr() + x.numel() * x.element_size()]
            assert not [b for b in wanted if at < b < ends] and at % 16 == 0
            assert (inside in (o, lse)) == (at in (o.data_ptr(), lse.data_ptr()))
        assert len(wanted) == 5
        launched.append([(launch[0], launch[1:4]) for launch in (part, merge)])
        once()
    assert launched[0] == launched[1]


def test_a_second_call_with_tensor_maps(once, fake_gpu, fake_torch, encoded):
    """Maps are of the new arrays, also of the result; what a map was made for before is found again."""
    launched, options = [], {"causal": True, "return_lse": True, "backend": "flash_forward.wgmma"}
    for at in (0x10000, 0x20000, 0x30000, 0x20000):
        q, k, v = tensors(at)
        o, lse = attention(q, k, v, **options)
        ((function, *how, values),) = fake_gpu.launches
        fake_gpu.launches.clear()
        assert [values[word] for word in (4, 17, 30)] == [x.data_ptr() for x in (q, k, lse)]
        assert [encoded[address] for address in values[-4:]] == [x.data_ptr() for x in (q, k, v, o)]
        rest = [word for i, word in enumerate(values[:-4]) if i not in (4, 17, 30)]
        launched.append(((function, how, rest), values[-4:-1]))
        once()
    first, second, third, fourth = launched
    assert first[0] == second[0] == third[0] == fourth[0]
    assert second[1] == fourth[1] and not set(second[1]) & set(third[1])


def test_what_is_another_kind(once, fake_gpu, fake_torch):
    base = {"causal": False, "scale": None, "return_lse": False, "backend": "auto"}
    attention(*tensors(0x10000), **base)
    once()
    attention(*tensors(0x20000), **base)
    q, k, v = tensors(0x10000)
    others = [
        {"causal": True}, {"scale": 0.125}, {"return_lse": True}, {"backend": "flash_forward.split"},
        {"q": Tensor(0x10002, q.dtype, q.shape)}, {"k": k.as_strided(k.shape, (1 << 20, 1 << 16, 64, 1))},
        {"v": Tensor(0x3000, v.dtype, v.shape, device=1)}, {"q": Tensor(0x1000, "torch.bfloat16", q.shape)},
        {"q": Tensor(0x1000, q.dtype, (2, 4, 255, 64))}, {"causal": 0}, {"return_lse": 0}, {"scale": np.float32(1)},
        {"k": np.ones(k.shape, np.float16)},
    ]  # fmt: skip
    for change in others:
        with pytest.raises(pytest.fail.Exception, match="looked a second time"):
            attention(**{"q": q, "k": k, "v": v, **base, **change})
    for name, value in (("requires_grad", True), ("negated", True), ("pointer", 0), ("pointer", None)):
        other = Tensor(0x10000, q.dtype, q.shape)
        setattr(other, name, value)
        with pytest.raises(pytest.fail.Exception, match="looked a second time"):
            attention(other, k, v, **base)


def test_numbers_that_are_equal_are_not_taken_for_one_another(once, fake_gpu, fake_torch):
    given = tensors(0x10000)
    attention(*given, causal=True, scale=1)
    with pytest.raises(TypeError, match="causal is 1; it must be True or False"):
        attention(*given, causal=1, scale=1)
    with pytest.raises(TypeError, match="scale is True; it must be a real number"):
        attention(*given, causal=True, scale=True)


def test_what_fails_is_not_remembered(once, fake_gpu, fake_torch):
    q = tensors(0x10000, dtype="torch.float32")
    for _ in range(2):
        with pytest.raises(ValueError, match="q is float32"):
            attention(*q, backend="flash_forward.mma")
    q, k, v = tensors(0x10000)
    q.requires_grad = True
    for _ in range(2):
        with pytest.raises(ValueError, match="q requires a gradient"):
            attention(q, k, v)
    fake_torch.grad = False
    attention(q, k, v)
    assert not room.RECIPES._known


# -- on a GPU ----------------------------------------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("m", "n"), [(700, 1500), (1, 4000), (1500, 700)])
def test_torch_on_a_gpu(cuda_torch, m, n, dtype):
    torch = cuda_torch
    for seed in range(2):
        torch.manual_seed(seed)
        shapes = (2, 8, m, 80), (2, 2, n, 80), (2, 2, n, 80)
        q, k, v = (torch.randn(*size, device="cuda", dtype=getattr(torch, dtype)) for size in shapes)
        results = attention(q, k, v, causal=True, return_lse=True)
        case = Case("gpu", *(x.float().cpu().numpy() for x in (q, k, v)), causal=True)
        element = {"bfloat16": ml_dtypes.bfloat16}.get(dtype, dtype)
        case = case.with_arrays("gpu", lambda x, element=element: x.astype(element))
        got = [results[0].float().cpu().numpy().astype(element), results[1].cpu().numpy()]
        assert_attention(got, case)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(1, 4, 200, 64), (1, 4, 1, 64)])
def test_graph_capture(cuda_torch, size):
    torch = cuda_torch
    q = torch.randn(*size, device="cuda", dtype=torch.float16)
    k, v = (torch.randn(1, 2, 2000, 64, device="cuda", dtype=torch.float16) for _ in range(2))
    for _ in range(2):
        attention(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = attention(q, k, v)
    for seed in range(2):
        torch.manual_seed(seed)
        q.normal_()
        graph.replay()
        assert torch.equal(o, attention(q, k, v))


@pytest.mark.gpu
@pytest.mark.parametrize("ahead", ["a copy", "two kernels", "a kernel and a copy", "decoding"])
def test_decoding_in_a_graph(cuda_torch, ahead):
    """Its kernels start before the one ahead has ended, which a graph notes at the edge between two kernels. Here the
    one ahead is no kernel, or there are two on streams that meet, or it is one that starts early too."""
    torch = cuda_torch
    sizes = (1, 32, 1, 128), (1, 4, 16384, 128), (1, 4, 16384, 128)
    given, (q, k, v) = ([torch.randn(size, device="cuda", dtype=torch.float16) for size in sizes] for _ in range(2))

    def decode():
        side, here = torch.cuda.Stream(), torch.cuda.current_stream()
        if ahead == "a copy":
            for to, x in zip((v, q, k), (given[2], *given), strict=False):
                to.copy_(x)
        elif ahead == "decoding":
            return attention(attention(given[0], *given[1:]), *given[1:])
        else:
            side.wait_stream(here)
            torch.mul(given[0], 1, out=q)
            torch.mul(given[1], 1, out=k)
            with torch.cuda.stream(side):
                v.copy_(given[2]) if ahead == "a kernel and a copy" else torch.mul(given[2], 1, out=v)
            here.wait_stream(side)
        return attention(q, k, v)

    decode()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = decode()
    for _ in range(3):
        for x in given:
            x.normal_()
        graph.replay()
        got = o.clone()
        expected = attention(*given)
        assert torch.equal(got, attention(expected, *given[1:]) if ahead == "decoding" else expected)


@pytest.mark.gpu
def test_the_callers_stream_is_used(cuda_torch):
    torch = cuda_torch
    q = torch.randn(2, 4, 300, 64, device="cuda", dtype=torch.float16)
    expected = attention(q * 1, q, q)  # the product's kernel is loaded now: loading one waits for the whole GPU
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        late = q * 1
        o = attention(late, late, late)
        assert not side.query(), "the call returned while the GPU was busy"
    torch.cuda.synchronize()
    assert torch.equal(o, expected)


@pytest.mark.gpu
def test_host_time_of_a_second_call(cuda_torch, capsys):
    from flashnumba.bench.timing import host_time

    torch = cuda_torch
    took = {}
    for size in ((2, 4, 128, 64), (128, 64)):
        q = torch.randn(*size, device="cuda", dtype=torch.float16)
        took[len(size)] = host_time(lambda q=q: attention(q, q, q))
    theirs = host_time(lambda: torch.nn.functional.scaled_dot_product_attention(q[None], q[None], q[None]))
    with capsys.disabled():
        said = ", ".join(f"{axes} axes {seconds * 1e6:.1f} us" for axes, seconds in took.items())
        print(f"\nhost time of attention(), launch included: {said}; torch's SDPA {theirs * 1e6:.1f} us")
    assert max(took.values()) <= 25e-6


@pytest.mark.gpu
def test_what_was_written_just_before_is_read(cuda_torch):
    """Kernels for few queries start before the one ahead has ended. Nobody waits between these calls."""
    torch = cuda_torch
    q, k, v = (torch.randn(1, h, n, 128, device="cuda", dtype=torch.float16) for h, n in ((8, 1), (1, 8192), (1, 8192)))
    results = []
    for i in range(200):
        v.fill_(float(i))
        results += [attention(q, k, v), attention(q, k, v)]
    expected = torch.arange(200, device="cuda").repeat_interleave(2)
    assert (torch.stack(results).float().amax((1, 2, 3, 4)) - expected).abs().max() < 0.2
    assert (torch.stack(results).float().amin((1, 2, 3, 4)) - expected).abs().max() < 0.2
