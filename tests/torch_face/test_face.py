"""flashnumba.torch without a GPU: its gradients, what torch asks of operators, and torch's own attention beside it."""

from __future__ import annotations

import importlib
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from flashnumba import torch as face  # noqa: E402
from flashnumba.stages.backward import reference  # noqa: E402
from flashnumba.torch import kernels, operators  # noqa: E402

SDPA = torch.nn.functional.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def made(m=5, n=7, d=3, heads=4, kv_heads=2, batch=2, dtype=torch.float64, asks=True):
    """q, k and v, views with the heads beside one another."""
    sizes = ((m, heads), (n, kv_heads), (n, kv_heads))
    return [torch.randn(batch, rows, h, d, dtype=dtype).transpose(1, 2).requires_grad_(asks) for rows, h in sizes]


def attend(q, k, v, **options):
    return face.attention(q, k, v, **{"backend": "numpy", "return_lse": True, **options})


def loss_of(q, k, v):
    o, lse = attend(q, k, v, causal=True)
    return o.square().sum() + lse.sin().sum()


# -- gradients ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", [
    {}, {"causal": True}, {"causal": True, "m": 7, "n": 5}, {"scale": -0.3, "kv_heads": 4}, {"n": 0}, {"m": 0},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("way", ["short", "dispatcher"])
def test_gradients_of_o_and_lse_by_finite_differences(case, way):
    """M < N, M > N with rows that see nothing, groups, a scale of one's own, no keys; dO and dLSE."""
    causal, scale = case.get("causal", False), case.get("scale")
    inputs = made(**{name: value for name, value in case.items() if name not in ("causal", "scale")})
    unseen = 0 if inputs[1].shape[2] else inputs[0].shape[2]
    unseen = max(unseen, inputs[0].shape[2] - inputs[1].shape[2] if causal else 0)

    def function(q, k, v):
        if way == "short":
            o, lse = attend(q, k, v, causal=causal, scale=scale)
        else:
            o, lse = operators.FORWARD(q, k, v, causal, scale, "numpy")
        return o, lse[:, :, unseen:]  # -inf has no difference

    assert torch.autograd.gradcheck(function, inputs)


def test_finite_differences_notice_a_gradient_that_is_dropped(monkeypatch):
    right = kernels._backward64
    monkeypatch.setattr(kernels, "_backward64", lambda do, dlse, *rest: right(do, None, *rest))
    with pytest.raises(torch.autograd.gradcheck.__globals__["GradcheckError"]):
        torch.autograd.gradcheck(attend, made())


@pytest.mark.filterwarnings("ignore:Input #")
def test_float32_by_finite_differences():
    inputs = made(dtype=torch.float32)
    assert torch.autograd.gradcheck(lambda *x: attend(*x, causal=True), inputs, eps=1e-2, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gradients_beside_the_definition(dtype):
    inputs = made(20, 30, 16, dtype=dtype)
    do, dlse = torch.randn_like(inputs[0]), torch.randn(2, 4, 20)
    o, lse = attend(*inputs, causal=True)
    assert (o.dtype, lse.dtype) == (dtype, torch.float32) and o.is_contiguous()
    got = torch.autograd.grad((o, lse), inputs, (do, dlse))
    expected = reference.dense(*(x.detach().double().numpy() for x in (*inputs, do)), None, True, dlse.numpy())
    near = 16 * torch.finfo(dtype).eps
    for a, b, x in zip(got, expected, inputs, strict=True):
        assert a.dtype == dtype and a.shape == x.shape
        torch.testing.assert_close(a.double(), torch.from_numpy(b), atol=near, rtol=near)


def test_a_scale_of_numpy_is_a_number():
    q, k, v = made(asks=False)
    assert torch.equal(attend(q, k, v, scale=np.float32(0.5))[0], attend(q, k, v, scale=0.5)[0])


def test_through_lse_alone_and_through_one_input_alone():
    q, k, v = made()
    dq, dk, dv = torch.autograd.grad(attend(q, k, v)[1].sum(), (q, k, v))
    assert dq.abs().min() > 0 and dk.abs().min() > 0 and (dv == 0).all()
    fixed = k.detach(), v.detach()
    (alone,) = torch.autograd.grad(attend(q, *fixed)[1].sum(), q)
    assert torch.equal(alone, dq)


def test_rows_that_see_nothing_give_nothing():
    q, k, v = made(6, 4, dtype=torch.float32)
    o, lse = attend(q, k, v, causal=True)
    dq, dk, dv = torch.autograd.grad(o.sum(), (q, k, v))
    assert (o[:, :, :2] == 0).all() and (lse[:, :, :2] == -torch.inf).all() and (dq[:, :, :2] == 0).all()
    assert all(x.isfinite().all() for x in (dq, dk, dv))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_gradient_of_any_strides(dtype):
    """What sum() hands back is one number for all; a transposed one has its columns apart; of an imaginary part it is
    negated when it is read."""
    inputs = made(d=8, dtype=dtype)
    o = attend(*inputs)[0]
    views = torch.ones((), dtype=dtype).expand(o.shape), torch.randn(8, 5, 4, 2, dtype=dtype).permute(3, 2, 1, 0)
    for do in (*views, torch._neg_view(torch.randn(2, 4, 5, 8, dtype=dtype))):
        got = torch.autograd.grad(o, inputs, do, retain_graph=True)
        expected = torch.autograd.grad(o, inputs, do.resolve_neg().contiguous(), retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("axes", [2, 3])
def test_leading_axes_may_be_left_out(axes):
    inputs = [x.detach()[(0,) * (4 - axes)] for x in made()]
    short = [x.clone().requires_grad_() for x in inputs]
    long = [x[(None,) * (4 - axes)].clone().requires_grad_() for x in inputs]
    o, lse = attend(*short)
    assert o.shape == short[0].shape and lse.shape == o.shape[:-1]
    (o.sum() + lse.sum()).backward()
    loss = attend(*long)
    (loss[0].sum() + loss[1].sum()).backward()
    for a, b in zip(short, long, strict=True):
        assert torch.equal(a.grad, b.grad[(0,) * (4 - axes)])


@pytest.mark.parametrize("backend", ["emulator", "backward.one_pass"])
def test_a_backend_reaches_both_directions(backend, monkeypatch):
    """By kernels: on the emulator, or on a GPU if there is one."""
    called = []
    for name in ("attention", "attention_backward"):
        plain = getattr(kernels.flashnumba, name)
        monkeypatch.setattr(
            kernels.flashnumba,
            name,
            lambda *args, plain=plain, **options: called.append(options) or plain(*args, **options),
        )
    inputs = made(16, 16, 16, 2, 1, 1, torch.float16)
    got = torch.autograd.grad(face.attention(*inputs, backend=backend).float().sum(), inputs)
    expected = torch.autograd.grad(attend(*inputs)[0].float().sum(), inputs)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-2, rtol=1e-2)
    assert [options["backend"] for options in called[:2]] == list(face.BACKENDS[backend])


def test_what_is_kept():
    kept = []
    inputs = made(m=50, n=60, d=8, kv_heads=4, dtype=torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        o, lse = attend(*inputs)
    assert sorted(x.numel() for x in kept) == sorted(x.numel() for x in (*inputs, o, lse))


@pytest.mark.parametrize("way", ["short", "dispatcher", "torch.func"])
def test_second_derivatives_are_refused(way):
    q, k, v = made()
    with pytest.raises(RuntimeError, match="has no second derivatives"):
        if way == "torch.func":
            first = torch.func.grad(loss_of)
            torch.func.grad(lambda x: first(x, k.detach(), v.detach()).sum())(q.detach())
        first = operators.FORWARD(q, k, v, True, None, "numpy")[0].sum() if way == "dispatcher" else loss_of(q, k, v)
        (dq,) = torch.autograd.grad(first, q, create_graph=True)
        assert dq.requires_grad
        dq.sum().backward()


# -- what torch asks of operators --------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_the_operators_pass_torchs_checks(dtype):
    torch.library.opcheck(operators.FORWARD, (*made(dtype=dtype), True, None, "numpy"))
    q, k, v = made(dtype=dtype, asks=False)
    o, lse = attend(q, k, v)
    torch.library.opcheck(
        operators.BACKWARD, (torch.randn_like(o), torch.randn_like(lse), q, k, v, o, lse, False, 0.5, "numpy")
    )
    torch.library.opcheck(operators.BACKWARD, (torch.randn_like(o), None, q, k, v, o, lse, False, 0.5, "numpy"),
                          test_utils=("test_schema", "test_faketensor"))  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_as_one_graph(dynamic):
    compiled = torch.compile(loss_of, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for m in (5, 9):
        inputs = made(m=m, dtype=torch.float32)
        expected = torch.autograd.grad(loss_of(*inputs), inputs)
        for a, b in zip(torch.autograd.grad(compiled(*inputs), inputs), expected, strict=True):
            torch.testing.assert_close(a, b)
        if not dynamic:
            break


def test_compiled_with_a_scale_that_is_no_constant():
    """Of a dynamic number of columns, or a number that differs from call to call."""
    by_columns = torch.compile(lambda *x: attend(*x, scale=x[0].shape[-1] ** -0.5)[0], fullgraph=True,
                               backend="aot_eager", dynamic=True)  # fmt: skip
    given = torch.compile(lambda scale, *x: attend(*x, scale=scale)[0], fullgraph=True, backend="aot_eager")
    for d in (3, 5):
        inputs = made(d=d, dtype=torch.float32, asks=False)
        torch.testing.assert_close(by_columns(*inputs), attend(*inputs)[0])
        torch.testing.assert_close(given(0.1 * d, *inputs), attend(*inputs, scale=0.1 * d)[0])


def test_tensors_without_values():
    inputs = [x.detach().to("meta").requires_grad_() for x in made(dtype=torch.bfloat16)]
    o, lse = face.attention(*inputs, return_lse=True)
    (o.sum() + lse.sum()).backward()
    assert (o.device.type, o.dtype, lse.dtype) == ("meta", torch.bfloat16, torch.float32)
    assert all(x.grad.shape == x.shape for x in inputs)


@pytest.mark.parametrize("name", ["do", "dlse", "lse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_operator_of_the_gradients_checks_what_it_is_given(name, dtype):
    q, k, v = made(dtype=dtype, asks=False)
    o, lse = attend(q, k, v)
    right = {"do": o, "dlse": lse, "q": q, "k": k, "v": v, "o": o, "lse": lse}
    for wrong, error, words in ((right[name][:, :1], ValueError, "shape"), (right[name].half(), TypeError, "elements")):
        with pytest.raises(error, match=f"{name} has {words}"):
            operators.BACKWARD(*(right | {name: wrong}).values(), False, None, "numpy")


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_tracers_see_an_operator_and_no_constant():
    first, second = (made(asks=False) for _ in range(2))
    with torch.no_grad():
        traced = torch.jit.trace(lambda *x: attend(*x)[0], first)
    assert "flashnumba::attention_forward" in str(traced.graph)
    assert torch.equal(traced(*second), attend(*second)[0])

    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return attend(q, k, v)[0]

    exported = torch.export.export(Module(), tuple(first))
    assert "flashnumba.attention_forward.default" in str(exported.graph)
    assert torch.equal(exported.module()(*second), attend(*second)[0])


def test_torch_func():
    inputs = made(asks=False)
    expected = torch.autograd.grad(loss_of(*(asks := [x.clone().requires_grad_() for x in inputs])), asks)
    for a, b in zip(torch.func.grad(loss_of, argnums=(0, 1, 2))(*inputs), expected, strict=True):
        assert torch.equal(a, b)
    value, pull = torch.func.vjp(loss_of, *inputs)
    assert all(torch.equal(a, b) for a, b in zip(pull(torch.ones_like(value)), expected, strict=True))


@pytest.mark.parametrize("in_dims", [(0, None, None), (1, 0, 2)])
def test_vmap(in_dims):
    """Of the function and of its gradient, for axes anywhere, or for q alone."""
    samples = [made(asks=False) for _ in range(3)]
    if in_dims[1] is None:
        samples = [(q, *samples[0][1:]) for q, _, _ in samples]
    columns = list(zip(*samples, strict=True))
    given = [x[0] if dim is None else torch.stack(x, dim) for x, dim in zip(columns, in_dims, strict=True)]
    got = torch.vmap(lambda *x: attend(*x, causal=True), in_dims)(*given)
    for at, sample in enumerate(samples):
        for a, b in zip(got, attend(*sample, causal=True), strict=True):
            torch.testing.assert_close(a[at], b)
    each = torch.vmap(torch.func.grad(loss_of), in_dims)(*given)
    for at, sample in enumerate(samples):
        torch.testing.assert_close(each[at], torch.func.grad(loss_of)(*sample))


def test_forward_mode_is_refused():
    q, k, v = made(asks=False)
    with pytest.raises(RuntimeError, match="jvp"):
        torch.func.jvp(lambda x: attend(x, k, v)[0], (q,), (q,))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="jvp"):
        attend(q, torch.autograd.forward_ad.make_dual(k, k), v)


def test_many_gradients_at_once():
    q, k, v = made()
    o = attend(q, k, v)[0]
    many = torch.randn(3, *o.shape, dtype=o.dtype)
    got = torch.autograd.grad(o, (q, k, v), many, is_grads_batched=True, retain_graph=True)
    for at, do in enumerate(many):
        for a, b in zip(got, torch.autograd.grad(o, (q, k, v), do, retain_graph=True), strict=True):
            torch.testing.assert_close(a[at], b)


def test_checkpoints():
    inputs = made()
    expected = torch.autograd.grad(loss_of(*inputs), inputs)
    again = torch.utils.checkpoint.checkpoint(loss_of, *inputs, use_reentrant=False)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(again, inputs), expected, strict=True))


def test_autocast_casts_as_torch_does():
    inputs = made(5, 5, 16, kv_heads=4, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        o = attend(*inputs)[0]
        assert o.dtype == SDPA(*inputs).dtype == torch.bfloat16
        assert attend(*(x.double() for x in inputs))[0].dtype == torch.float64
    assert all(x.dtype == torch.float32 for x in torch.autograd.grad(o.sum(), inputs))


# -- torch's own attention ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("leading", [(), (4,), (2, 4), (2, 3, 4)], ids=str)
@pytest.mark.parametrize(("m", "n", "causal"), [(6, 6, True), (4, 7, True), (7, 4, True), (7, 4, False)])
def test_in_the_place_of_torchs(leading, m, n, causal):
    """Causal is top-left there, whatever M and N; gradients too."""
    inputs = [torch.randn(*leading, rows, 5, dtype=torch.float64, requires_grad=True) for rows in (m, n, n)]
    results = []
    for function in (face.scaled_dot_product_attention, SDPA):
        o = function(*inputs, is_causal=causal, scale=0.7)
        results.append((o, *torch.autograd.grad(o.sin().sum(), inputs)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)
    if m != n and causal and len(leading) < 3:
        assert not torch.allclose(face.attention(*inputs, causal=True, scale=0.7), results[1][0]), "bottom-right"


def test_groups_need_to_be_asked_for():
    inputs = made(asks=False)
    torch.testing.assert_close(
        face.scaled_dot_product_attention(*inputs, enable_gqa=True), SDPA(*inputs, enable_gqa=True)
    )
    with pytest.raises(ValueError, match="enable_gqa=True"):
        face.scaled_dot_product_attention(*inputs)


def test_in_the_place_of_torchs_compiled():
    inputs = made(5, 7, kv_heads=4, asks=False)
    compiled = torch.compile(face.scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs, is_causal=True), SDPA(*inputs, is_causal=True))


# -- what is refused ---------------------------------------------------------------------------------------------------
WRONG = {
    "a mask": ("drop-in", {"attn_mask": torch.ones(5, 7)}, ValueError, "attn_mask is given; here it must be None"),
    "dropout": ("drop-in", {"dropout_p": 0.1}, ValueError, "dropout_p is 0.1; it must be 0"),
    "another batch": ("drop-in", {"key": torch.ones(1, 4, 7, 3)}, ValueError, "the same leading axes"),
    "values of other leading axes": (
        "drop-in",
        {"query": torch.ones(2, 3, 4, 5, 3), "key": torch.ones(2, 3, 4, 7, 3), "value": torch.ones(3, 2, 4, 7, 3)},
        ValueError, "key and value must have the same shape",
    ),
    "values fewer than keys": (
        "drop-in", {"value": torch.ones(2, 4, 6, 3), "is_causal": True}, ValueError, r"value \(2, 4, 6, 3\)",
    ),
    "no query": ("drop-in", {"query": [1.0]}, TypeError, "query is a list; it must be a torch tensor"),
    "causal": ("ours", {"causal": 1}, TypeError, "causal is 1"),
    "return_lse": ("ours", {"return_lse": None}, TypeError, "return_lse is None"),
    "backend": ("ours", {"backend": "cuda"}, ValueError, "backend is 'cuda'; it must be one of auto"),
    "no name of a backend": ("ours", {"backend": ["numpy"]}, ValueError, "backend is .'numpy'.; it must be"),
    "scale": ("ours", {"scale": "1"}, TypeError, "scale is '1'"),
    "scale that is no number": ("ours", {"scale": float("nan")}, ValueError, "scale is nan"),
    "no tensor": ("ours", {"q": [1.0]}, TypeError, "q is a list; it must be a torch tensor"),
    "axes": ("ours", {"q": torch.ones(5, 3)}, ValueError, "the same number of axes"),
    "elements": ("ours", {"k": torch.ones(2, 4, 7, 3)}, TypeError, "k has elements of type"),
    "integers": ("ours", {"q": torch.ones(2, 4, 5, 3, dtype=torch.int32)}, TypeError, "q has elements of type int32"),
    "columns": ("ours", {"k": torch.ones(2, 4, 7, 4).double()}, ValueError, "has shape"),
    "float64 for a kernel": ("ours", {"backend": "flash_forward.mma"}, TypeError, "q has elements of type float64"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_it_refuses(what):
    which, change, error, words = WRONG[what]
    names = ("query", "key", "value") if which == "drop-in" else ("q", "k", "v")
    function = face.scaled_dot_product_attention if which == "drop-in" else face.attention
    given = dict(zip(names, made(kv_heads=4), strict=True))
    with pytest.raises(error, match=words):
        function(**{**given, **change})


def test_atomics_where_repeatable_operators_are_asked_for():
    inputs = made(dtype=torch.float16)
    o = face.attention(*inputs, backend="backward.one_pass")
    try:
        torch.use_deterministic_algorithms(True)
        with pytest.raises(RuntimeError, match=r"backward.one_pass.* is not deterministic"):
            o.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)


def test_torch_stays_optional(monkeypatch):
    code = "import sys, flashnumba; sys.exit('torch' in sys.modules or 'flashnumba.torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "flashnumba.torch")
    with pytest.raises(ImportError, match=r"pip install 'flashnumba\[torch\]'"):
        importlib.import_module("flashnumba.torch")
