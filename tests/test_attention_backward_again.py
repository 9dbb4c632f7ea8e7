"""attention_backward() a second time on tensors of the same kind; on a stand-in for a GPU, and on a real one."""

from __future__ import annotations

import pytest

from flashnumba import attention, attention_backward, gradients
from flashnumba.stages.again import Recipes
from tests.machine.fakes import Tensor

NAMES = ("do", "q", "k", "v", "o", "lse", "dlse")


@pytest.fixture
def once(monkeypatch, fake_gpu, fake_torch):
    """After ``once()`` a call that checks, chooses or plans anew fails."""
    monkeypatch.setattr(gradients, "RECIPES", Recipes())
    return lambda: monkeypatch.setattr(gradients, "_first", lambda *args: pytest.fail("looked a second time"))


def tensors(at, q=(2, 4, 256, 64), kv=(2, 2, 512, 64), dtype="torch.float16", dlse=False):
    sizes = {"do": q, "q": q, "k": kv, "v": kv, "o": q} | dict.fromkeys(("lse", "dlse") if dlse else ("lse",), q[:-1])
    return {
        name: Tensor(at + 0x1000 * i, "torch.float32" if "lse" in name else dtype, size)
        for i, (name, size) in enumerate(sizes.items())
    }


def within(address, arrays):
    """Whether an address lies in one of some arrays."""
    return any(x.data_ptr() <= address < x.data_ptr() + x.numel() * x.element_size() for x in arrays)


@pytest.mark.parametrize("backend", ["backward.mma", "backward.one_pass", "backward.simt"])
@pytest.mark.parametrize("dlse", [False, True])
def test_a_second_call_differs_in_addresses_alone(backend, dlse, once, fake_gpu, fake_torch):
    launched = []
    for at in (1 << 40, 1 << 41):  # as no size is
        before = len(fake_torch.made)
        given = tensors(at, dlse=dlse)
        dq, dk, dv = attention_backward(**given, causal=True, scale=-0.25, backend=backend)
        assert [x.shape for x in (dq, dk, dv)] == [given[x].shape for x in "qkv"]
        assert all(x.dtype == "torch.float16" for x in (dq, dk, dv))
        names = {x.data_ptr(): name for name, x in {**given, "dq": dq, "dk": dk, "dv": dv}.items()}
        made = fake_torch.made[before:]
        seen = [
            (function, how, [names.get(word, word) for word in values if word in names or not within(word, made)])
            for function, *how, values in fake_gpu.launches
        ]
        assert {"dq", "dk", "dv", *given} <= {word for _, _, words in seen for word in words if isinstance(word, str)}
        assert all(how[-1] == 1000 for _, how, _ in seen), "the current stream"
        fake_gpu.launches.clear()
        launched.append(seen)
        once()
    assert launched[0] == launched[1]


def test_what_is_another_kind(once, fake_gpu, fake_torch):
    attention_backward(**tensors(0x10000))
    once()
    attention_backward(**tensors(0x20000))
    base = tensors(0x10000)
    for more in ({"causal": True}, {"scale": 0.125}, {"backend": "backward.one_pass"}, tensors(0x10000, dlse=True),
                 {"do": Tensor(0x10002, "torch.float16", base["do"].shape)},
                 {"lse": Tensor(0x50000, "torch.float32", (2, 4, 256), (2048, 512, 2))},
                 {"scale": "1"}, {"causal": 1}):  # fmt: skip
        with pytest.raises(pytest.fail.Exception, match="looked a second time"):
            attention_backward(**base | more)


@pytest.mark.gpu
def test_again_and_again_on_a_gpu():
    torch = pytest.importorskip("torch")
    for seed in range(3):
        torch.manual_seed(seed)
        q, k, v, do = (torch.randn(2, 4, 100, 64, device="cuda", dtype=torch.float16) for _ in range(4))
        o, lse = attention(q, k, v, causal=True, return_lse=True)
        for backend in ("auto", "backward.one_pass"):
            leaves = [x.double().requires_grad_() for x in (q, k, v)]
            theirs = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
            expected = torch.autograd.grad(theirs, leaves, do.double())
            for got, exact in zip(attention_backward(do, q, k, v, o, lse, causal=True, backend=backend), expected,
                                  strict=True):  # fmt: skip
                torch.testing.assert_close(got.double(), exact, atol=1e-2, rtol=1e-2)
