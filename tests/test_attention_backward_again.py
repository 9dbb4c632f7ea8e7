"""attention_backward() a second time on tensors of the same kind, on a stand-in for a GPU."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from flashnumba import attention_backward
from tests.machine.fakes import Tensor

room = sys.modules["flashnumba.gradients"]
ARRAY = 13
"""Words of a kernel's parameter that is an array of four axes; its address is word 4."""


@pytest.fixture
def once(monkeypatch, fake_gpu, fake_torch):
    """After ``once()`` a call that checks, chooses or plans anew fails."""
    monkeypatch.setattr(room, "RECIPES", type(room.RECIPES)())
    return lambda: monkeypatch.setattr(room, "_first", lambda *args: pytest.fail("looked a second time"))


def tensors(at, dtype="torch.float16"):
    q, kv = (2, 4, 256, 64), (2, 2, 512, 64)
    shapes = {"do": q, "q": q, "k": kv, "v": kv, "o": q, "lse": q[:3], "dlse": q[:3]}
    return {
        name: Tensor(at + 0x1000 * i, "torch.float32" if "lse" in name else dtype, shape)
        for i, (name, shape) in enumerate(shapes.items())
    }


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("backend", ["auto", "backward.simt", "backward.one_pass"])
def test_a_second_call_differs_in_addresses_alone(backend, with_dlse, once, fake_gpu, fake_torch):
    launched = []
    for at in (1 << 40, 1 << 41):
        before = len(fake_torch.made)
        given = tensors(at)
        if not with_dlse:
            del given["dlse"]
        gradients = attention_backward(**given, causal=True, scale=-0.25, backend=backend)
        for gradient, name in zip(gradients, ("q", "k", "v"), strict=True):
            assert (gradient.shape, gradient.dtype) == (given[name].shape, "torch.float16")
        names = {x.data_ptr(): name for name, x in given.items()}
        names |= {x.data_ptr(): f"new {i}" for i, x in enumerate(fake_torch.made[before:])}
        names |= {x.data_ptr(): name for x, name in zip(gradients, ("dq", "dk", "dv"), strict=True)}
        # An address is told by whose it is; the rest must be equal.
        launched.append(
            [(kernel, how, [names.get(value, value) for value in values]) for kernel, *how, values in fake_gpu.launches]
        )
        seen = {value for *_, values in launched[-1] for value in values if isinstance(value, str)}
        assert seen >= {*given, "dq", "dk", "dv"}
        fake_gpu.launches.clear()
        once()
    assert len(launched[0]) >= 3 and launched[0] == launched[1]


def test_what_is_another_kind(once, fake_gpu, fake_torch):
    base = tensors(1 << 40)
    attention_backward(**base)
    once()
    attention_backward(**tensors(1 << 41))
    do, lse = base["do"], base["lse"]
    others = [
        {"causal": True}, {"scale": 0.125}, {"backend": "backward.simt"}, {"dlse": None}, {"causal": 0},
        {"scale": np.float32(1)}, {"do": do.as_strided(do.shape, (0, 0, 0, 1))},
        {"o": Tensor(0x10002, do.dtype, do.shape)}, {"lse": Tensor(0x1000, lse.dtype, lse.shape, device=1)},
        {"q": np.ones(do.shape, np.float16)},
    ]  # fmt: skip
    for change in others:
        with pytest.raises(pytest.fail.Exception, match="looked a second time"):
            attention_backward(**{**base, **change})
