"""What only a GPU shows: the tiles that are launched there on problems of many blocks, and the same bits every time."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from flashnumba.stages import heads
from flashnumba.stages.backward import mma, plans
from flashnumba.stages.backward.problem import backward
from flashnumba.stages.flash_forward.mma import PLANS
from tests.kernels.backward_target import CASES, checked
from tests.stages.backward.backward_cases import normal
from tests.stages.flash_forward.attention_cases import LAYOUTS, SIZES

pytestmark = pytest.mark.gpu
RUNS = 50


@pytest.mark.parametrize("name", ["simt", "mma", "one_pass"])
@pytest.mark.parametrize("sizes", CASES, ids=str)
def test_every_kernel(name, sizes):
    m, n, d, heads_of_q, kv_heads, causal, layout = sizes
    case = normal(m, n, d, np.float16, batch=2, heads=heads_of_q, kv_heads=kv_heads, causal=causal, with_dlse=causal)
    if layout:
        case = case.with_arrays(layout, LAYOUTS[layout], ("q", "v", "do"))
    said = checked(case, name)
    assert said == "ok" or (said.startswith("not taken") and name == "one_pass" and (d > 128 or layout)), said


@pytest.mark.parametrize("name", ["simt", "mma", "one_pass"])
@pytest.mark.parametrize("causal", [False, True])
def test_tails_of_launched_tiles(name, causal):
    for d in (64, 128):
        for m in SIZES:
            case = normal(m, 130 + m, d, np.float16, heads=8, kv_heads=4, causal=causal)
            assert checked(case, name) == "ok", (d, m)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_the_same_bits_fifty_times(d, causal):
    """``mma`` and nothing else promises it; 1000 queries of two heads share each key."""
    torch = pytest.importorskip("torch")
    random = torch.Generator(device="cuda").manual_seed(0)
    make = partial(torch.randn, generator=random, device="cuda", dtype=torch.float16)
    q, k, v, do = make(2, 8, 1000, d), make(2, 4, 1100, d), make(2, 4, 1100, d), make(2, 8, 1000, d)
    o, lse = heads.forward(q, k, v, PLANS["mma"], causal=causal)
    first = backward(do, q, k, v, o, lse, mma.plan_mma, causal=causal)
    for _ in range(RUNS - 1):
        again = backward(do, q, k, v, o, lse, mma.plan_mma, causal=causal)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_the_kernels_are_all_of_them():
    assert set(plans()) == {"simt", "mma", "one_pass"}
