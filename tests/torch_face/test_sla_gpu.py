"""SLA for torch on a GPU: beside the definition, the same bits again, in a CUDA graph, and compiled."""

from __future__ import annotations

import pytest

from flashnumba.compare import assert_close
from flashnumba.machine.arrays import element_dtype, host_view
from flashnumba.stages.sparsity import sla_reference as reference
from flashnumba.stages.sparsity.sla_low_precision import low_precision

pytestmark = pytest.mark.gpu


@pytest.fixture
def torch():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch is a CPU build")
    torch.manual_seed(0)
    return torch


def made(torch, dtype, m=700, n=1000, d=128, heads=(2, 2)):
    """As a projection leaves them: views, the heads beside one another."""
    sizes = (m, heads[0]), (n, heads[1]), (n, heads[1])
    q, k, v = (torch.randn(2, rows, h, d, device="cuda", dtype=dtype).transpose(1, 2) for rows, h in sizes)
    return [*(x.requires_grad_() for x in (q, k, v)), torch.randn(d, d, device="cuda").div(8).requires_grad_()]


def host(x):
    return host_view(x.detach().cpu(), "x").view(element_dtype(str(x.dtype).removeprefix("torch.")))


def solve(torch, inputs, do, **options):
    """(o, dq, dk, dv, dproj, the map)."""
    from flashnumba.torch.sla import sla_attention

    q, k, v, proj = inputs
    options = {"critical": 0.2, "negligible": 0.2} | options
    o, classes = sla_attention(q, k, v, proj=proj, return_classes=True, **options)
    return (o.detach(), *torch.autograd.grad(o, inputs, do), classes)


@pytest.mark.parametrize("case", [
    ("float16", 128, (2, 2), {}),
    ("bfloat16", 64, (2, 2), {"causal": True, "feature_map": "elu", "form": "all"}),
    ("float16", 128, (6, 2), {"causal": True}),
    ("bfloat16", 96, (4, 2), {"form": "rest"}),
    ("float16", 40, (3, 1), {"causal": True, "feature_map": "relu"}),
    ("float16", 100, (2, 2), {"feature_map": "elu"}),  # rows of 200 bytes: copied
    ("bfloat16", 1, (4, 1), {"causal": True}),
], ids=str)  # fmt: skip
def test_beside_the_definition_and_the_same_bits_again(torch, case):
    dtype, d, heads, options = case
    inputs = made(torch, getattr(torch, dtype), d=d, heads=heads)
    do = torch.randn_like(inputs[0])
    *got, classes = solve(torch, inputs, do, **options)
    q, k, v, proj = (host(x) for x in (*inputs[:3], inputs[3].to(do.dtype)))
    seen = host(classes)
    assert (seen == 0).any() and (seen == -1).any()
    exact = reference.attend(q, k, v, seen, proj, **options).o, *reference.gradients(
        host(do), q, k, v, seen, proj, **options
    )  # fmt: skip
    low, low_gradients = low_precision(q, k, v, seen, proj, host(do), **options)
    for name, a, b, c in zip(("o", "dq", "dk", "dv", "dproj"), got, exact, (low.o, *low_gradients), strict=True):
        assert_close(host(a), b, c, what=name)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip((*got, classes), solve(torch, inputs, do, **options), strict=True))


@pytest.mark.parametrize(("d", "heads"), [(128, (2, 2)), (72, (4, 2)), (68, (2, 1))])
def test_a_graph_of_forward_and_backward(torch, d, heads):
    inputs = made(torch, torch.bfloat16, d=d, heads=heads)
    do = torch.randn_like(inputs[0])
    solve(torch, inputs, do)  # compiles
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # as torch asks: once on a side stream before the capture
        solve(torch, inputs, do)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = solve(torch, inputs, do)
    with torch.no_grad():
        for x in (*inputs, do):
            x.copy_(torch.randn_like(x))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, solve(torch, inputs, do), strict=True))


def test_a_module_learns_under_autocast(torch):
    """Its parameters stay float32; the linear part finds what few critical tiles leave out."""
    from flashnumba.torch.sla import SparseLinearAttention

    q, k, v = (torch.randn(1, 2, 512, 64, device="cuda") for _ in range(3))
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    module = SparseLinearAttention(64, critical=0.25, negligible=0.0, device="cuda")
    optimizer, losses = torch.optim.Adam(module.parameters(), 0.02), []
    for _ in range(25):
        with torch.autocast("cuda", torch.bfloat16):
            o = module(q, k, v)
        assert o.dtype == torch.bfloat16
        loss = (o.float() - dense).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(x.dtype == torch.float32 for x in module.parameters()) and losses[-1] < 0.8 * losses[0]
