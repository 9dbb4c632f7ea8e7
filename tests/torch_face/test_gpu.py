"""flashnumba.torch on a GPU: beside torch's own gradients, in graphs, compiled, on streams, and the same bits again."""

from __future__ import annotations

import shutil

import pytest

from flashnumba.compare import assert_close
from flashnumba.machine.arrays import element_dtype, host_view
from flashnumba.stages.backward import reference

pytestmark = pytest.mark.gpu


@pytest.fixture
def torch():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch is a CPU build")
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    return torch


@pytest.fixture
def ours(torch):
    from flashnumba import torch as face

    return face


def made(torch, dtype, m=200, n=200, heads=4, kv_heads=4, d=64, batch=2):
    """q, k and v as a projection leaves them: views, the heads beside one another."""
    sizes = ((m, heads), (n, kv_heads), (n, kv_heads))
    packed = [torch.randn(batch, rows, h, d, device="cuda", dtype=dtype) for rows, h in sizes]
    return [x.transpose(1, 2).requires_grad_() for x in packed]


def host(x):
    """As NumPy has it, bfloat16 as ml_dtypes'."""
    return host_view(x.detach().cpu(), "x").view(element_dtype(str(x.dtype).removeprefix("torch.")))


def gradients(torch, function, inputs, do, **options):
    """(o, dq, dk, dv)."""
    o = function(*inputs, **options)
    return (o.detach(), *torch.autograd.grad(o, inputs, do))


def plain(torch, q, k, v, do, causal):
    """(o, dq, dk, dv) by torch from the definition, in float64."""
    q, k, v, do = (x.detach().double() for x in (q, k, v, do))
    for x in (q, k, v):
        x.requires_grad_()
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool, device=q.device).tril(), -torch.inf)
    o = s.softmax(-1) @ v
    return (o.detach(), *torch.autograd.grad(o, (q, k, v), do))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_groups_lengths_and_lse(torch, ours, dtype):
    """GQA, M < N and M > N with rows that see nothing, and a gradient through LSE."""
    for m, n in ((70, 130), (130, 70)):
        inputs = made(torch, getattr(torch, dtype), m=m, n=n, heads=6, kv_heads=2)
        do = torch.randn_like(inputs[0])
        dlse = torch.randn(inputs[0].shape[:-1], device="cuda")
        o, lse = ours.attention(*inputs, causal=True, return_lse=True)
        got = torch.autograd.grad((o, lse), inputs, (do, dlse))
        unseen = max(0, m - n)
        assert (o[:, :, :unseen] == 0).all() and (lse[:, :, :unseen] == -torch.inf).all()
        q, k, v, do, o, lse, dlse = (host(x) for x in (*inputs, do, o, lse, dlse))
        exact = reference.dense(q, k, v, do, None, True, dlse)
        low = reference.low_precision(q, k, v, o, do, lse, None, True, dlse)
        for name, a, b, c in zip(("dq", "dk", "dv"), got, exact, low, strict=True):
            assert_close(host(a), b, c, what=f"{m} rows, {n} keys, {name}")


def test_the_same_bits_again(torch, ours):
    inputs = made(torch, torch.bfloat16, m=900, n=900, kv_heads=2)
    do = torch.randn_like(inputs[0])
    first = gradients(torch, ours.attention, inputs, do, causal=True)
    for _ in range(20):
        for a, b in zip(first, gradients(torch, ours.attention, inputs, do, causal=True), strict=True):
            assert torch.equal(a, b)


def test_a_gradient_that_is_one_number(torch, ours):
    """What sum() hands back has no strides; it is as good as the same numbers in memory."""
    inputs = made(torch, torch.bfloat16)
    got = torch.autograd.grad(ours.attention(*inputs).sum(), inputs)
    same = torch.autograd.grad(ours.attention(*inputs), inputs, torch.ones_like(inputs[0]).contiguous())
    assert all(torch.equal(a, b) for a, b in zip(got, same, strict=True))


def test_a_graph_of_forward_and_backward(torch, ours):
    inputs = made(torch, torch.bfloat16)
    do = torch.randn_like(inputs[0])
    gradients(torch, ours.attention, inputs, do, causal=True)  # compiles
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # as torch asks: once on a side stream before the capture
        gradients(torch, ours.attention, inputs, do, causal=True)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(torch, ours.attention, inputs, do, causal=True)
    for _ in range(2):
        with torch.no_grad():
            for x in (*inputs, do):
                x.copy_(torch.randn_like(x))
        graph.replay()
        for a, b in zip(captured, gradients(torch, ours.attention, inputs, do, causal=True), strict=True):
            assert torch.equal(a, b)


def test_on_the_current_stream(torch, ours):
    """The inputs are ready late on the caller's stream: another stream would read what was there before."""
    inputs = made(torch, torch.bfloat16, m=512, n=512)
    do = torch.randn_like(inputs[0])
    expected = gradients(torch, ours.attention, [x * 2 for x in inputs], do)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        late = [x.detach().clone().requires_grad_() for x in inputs]
        torch.cuda._sleep(100_000_000)
        with torch.no_grad():
            for x in late:
                x.mul_(2)
        got = gradients(torch, ours.attention, late, do)
    side.synchronize()
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


def test_compiled(torch, ours):
    if not (shutil.which("cc") or shutil.which("gcc")):
        pytest.skip("torch.compile needs a C compiler")
    pytest.importorskip("triton")
    inputs = made(torch, torch.bfloat16)

    def loss(q, k, v):
        o, lse = ours.attention(q, k, v, causal=True, return_lse=True)
        return o.float().square().sum() + lse.sum()

    expected = torch.autograd.grad(loss(*inputs), inputs)
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*inputs), inputs)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_autocast(torch, ours):
    inputs = made(torch, torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        o = ours.attention(*inputs)
    assert o.dtype == torch.bfloat16
    assert all(x.dtype == torch.float32 for x in torch.autograd.grad(o.float().sum(), inputs))


def test_the_operators_pass_torchs_checks(torch, ours):
    from flashnumba.torch import operators

    inputs = made(torch, torch.bfloat16, m=33, n=40)
    torch.library.opcheck(operators.FORWARD, (*inputs, True, None, "auto"))
    q, k, v = (x.detach() for x in inputs)
    o, lse = ours.attention(q, k, v, causal=True, return_lse=True)
    for dlse in (None, torch.randn_like(lse)):
        torch.library.opcheck(operators.BACKWARD, (torch.randn_like(o), dlse, q, k, v, o, lse, True, None, "auto"))


def test_float64_has_no_kernel(torch, ours):
    with pytest.raises(TypeError, match="q has elements of type float64"):
        ours.attention(*made(torch, torch.float64))


# Last, since each case compiles its kernels: those above share theirs.
@pytest.mark.parametrize("backend", ["auto", "backward.one_pass"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_beside_torch(torch, ours, dtype, d, causal, backend):
    """Our error is at most twice that of torch's own attention, in the same precision."""
    inputs = made(torch, getattr(torch, dtype), d=d)
    do = torch.randn_like(inputs[0])
    got = gradients(torch, ours.attention, inputs, do, causal=causal, backend=backend)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        theirs = gradients(torch, sdpa, inputs, do, is_causal=causal)
    exact = plain(torch, *inputs, do, causal)
    for name, a, b, c in zip(("o", "dq", "dk", "dv"), got, exact, theirs, strict=True):
        assert_close(*map(host, (a, b, c)), what=name)
    assert got[0].dtype == inputs[0].dtype and all(a.dtype == b.dtype for a, b in zip(got[1:], inputs, strict=True))
