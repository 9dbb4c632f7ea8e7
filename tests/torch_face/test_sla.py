"""SLA for torch: gradients by finite differences, the kernels under autograd, tracers, and a module that learns."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from flashnumba.sparse import sla as face  # noqa: E402
from flashnumba.torch import sla  # noqa: E402
from flashnumba.torch import sla_operators as operators  # noqa: E402
from tests.stages.sparsity import sla_gather  # noqa: E402


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def made(m=130, n=200, d=4, heads=(2, 2), dtype=torch.float64, asks=True):
    sizes = (m, heads[0]), (n, heads[1]), (n, heads[1])
    q, k, v = (torch.randn(1, rows, h, d, dtype=dtype).transpose(1, 2).requires_grad_(asks) for rows, h in sizes)
    return q, k, v, torch.randn(d, d, dtype=dtype).div(8).requires_grad_(asks)


def attend(q, k, v, proj=None, **options):
    options = {"critical": 0.3, "negligible": 0.3, "backend": "numpy"} | options
    return sla.sla_attention(q, k, v, proj=proj, **options)


@pytest.mark.parametrize("case", [
    {}, {"feature_map": "elu", "form": "rest", "causal": True}, {"feature_map": "relu", "form": "all", "scale": 0.7},
], ids=str)  # fmt: skip
def test_gradients_by_finite_differences(case):
    """With the map held: differences do not see that a tile changes its class."""
    inputs = made(heads=(3, 1) if case.get("causal") else (2, 2))
    _, classes = attend(*inputs, return_classes=True, **case)
    assert torch.autograd.gradcheck(lambda *x: attend(*x, classes=classes, **case), inputs, fast_mode=True)


def test_without_a_projection_and_for_one_input_alone():
    q, k, v, _ = made()
    expected = torch.autograd.grad(attend(q, k, v).sin().sum(), (q, k, v))
    (alone,) = torch.autograd.grad(attend(q.detach(), k, v.detach()).sin().sum(), k)
    assert torch.equal(alone, expected[1])
    eye = torch.eye(4, dtype=q.dtype)
    for a, b in zip(torch.autograd.grad(attend(q, k, v, eye).sin().sum(), (q, k, v)), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_kernels_under_autograd_are_near_the_definition_and_leave_what_tracers_are_told(monkeypatch):
    """Two heads of queries have one of keys. Rows that are not aligned are copied, and so are results of 20 columns;
    the gradient that sum() gives is one number, expanded; dproj keeps its type."""
    sla_gather.use(monkeypatch)
    seen, plain = [], operators.FORWARD
    monkeypatch.setattr(operators, "FORWARD", lambda *args: seen.append((args, plain(*args))) or seen[-1][1])
    sizes = (2, 70), (1, 100), (1, 100)
    q, k, v = (torch.randn(1, heads, rows, 21).half()[..., 1:].requires_grad_() for heads, rows in sizes)
    proj = torch.randn(20, 20).div(8).requires_grad_()
    results = []
    for backend in ("emulator", "numpy"):
        o, classes = attend(q, k, v, proj, feature_map="relu", backend=backend, return_classes=True)
        results.append((o, *torch.autograd.grad(o.sum(), (q, k, v, proj)), classes))
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        torch.testing.assert_close(a, b, atol=6e-3, rtol=6e-3)
    assert set(results[0][-1].unique().tolist()) == {0, 1}
    for (args, found), names in zip(seen, (len(operators.LEFT), 0), strict=True):
        (told, told_kept), (o, kept) = operators.forward_fake(*args), found
        assert [(x.shape, x.dtype) for x in (told, *told_kept)] == [(x.shape, x.dtype) for x in (o, *kept)]
        assert len(kept) == 1 + names


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_numpy_arrays_and_tensors_get_the_same(dtype):
    q, k, v, proj = made(dtype=dtype, asks=False)
    o, info = face.sla_attention(q, k, v, proj=proj, critical=0.3, negligible=0.3, return_info=True, backend="numpy")
    inputs = [x.clone().requires_grad_() for x in (q, k, v, proj)]
    o_here, classes = attend(*inputs, return_classes=True)
    assert torch.equal(o, o_here) and torch.equal(info.tile_map, classes) and info.shares()["negligible"] > 0
    do = torch.randn_like(o)
    got = face.sla_attention_backward(do, info)
    for a, b in zip(got, torch.autograd.grad(o_here, inputs, do), strict=True):
        assert torch.equal(a.to(b.dtype), b)


def test_a_tensor_changed_in_place_is_noticed():
    q, k, v, _ = made()
    o = attend(q, k, v)
    with torch.no_grad():
        q.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_second_derivatives_are_refused():
    q, k, v, proj = made()
    (dq,) = torch.autograd.grad(attend(q, k, v, proj).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        dq.sum().backward()


def test_torch_func_has_gradients_and_vmap():
    """A projection that samples share has a gradient for each of them."""
    stacks = [torch.stack(x) for x in zip(*(made(70, 130, asks=False)[:3] for _ in range(3)), strict=True)]
    proj = torch.randn(4, 4, dtype=torch.float64)

    def loss(q, k, v, proj=None):
        return attend(q, k, v, proj).sin().sum()

    for shared, wanted in (((), (0, 2)), ((proj,), (0, 1, 3))):
        gradient, places = torch.func.grad(loss, wanted), (0, 0, 0, *(None for _ in shared))
        found = torch.vmap(gradient, places)(*stacks, *shared)
        outputs = torch.vmap(attend, places)(*stacks, *shared)
        for i in range(3):
            leaves = [x[i].clone().requires_grad_() for x in stacks] + [x.clone().requires_grad_() for x in shared]
            expected = torch.autograd.grad(loss(*leaves), [leaves[at] for at in wanted])
            assert all(torch.equal(a[i], b) for a, b in zip(found, expected, strict=True))
            assert torch.equal(outputs[i], attend(*leaves))
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q, *(x[0] for x in stacks[1:])).sum())(stacks[0][0])


def test_the_operators_pass_torchs_checks():
    q, k, v, proj = made(dtype=torch.float32, asks=False)
    how = 0.3, 0.3, "softmax", "paper", 0.0, False, None, "numpy"
    torch.library.opcheck(operators.FORWARD, (q, k, v, proj, None, *how))
    torch.library.opcheck(operators.FORWARD, (q, k, v, None, attend(q, k, v, return_classes=True)[1], *how))
    classes = attend(q, k, v, return_classes=True)[1]
    torch.library.opcheck(operators.BACKWARD, (torch.randn_like(q), q, k, v, proj, attend(q, k, v), classes, [], *how))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_as_one_graph(dynamic):
    module = sla.SparseLinearAttention(4, critical=0.3, backend="numpy")
    torch.nn.init.normal_(module.proj_l.weight)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for m in (100, 70)[: 1 + dynamic]:
        inputs = made(m=m, dtype=torch.float32)[:3]
        leaves = *inputs, *module.parameters()
        expected = torch.autograd.grad(module(*inputs).sin().sum(), leaves)
        for a, b in zip(torch.autograd.grad(compiled(*inputs).sin().sum(), leaves), expected, strict=True):
            torch.testing.assert_close(a, b)


def test_leading_axes_may_be_left_out_and_autocast_casts():
    q, k, v, proj = made(dtype=torch.float32, asks=False)
    whole = attend(q, k, v, proj)
    assert torch.equal(attend(q[0], k[0], v[0], proj), whole[0])
    assert torch.equal(attend(q[0, 1], k[0, 1], v[0, 1], proj), whole[0, 1])
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(q, k, v, proj).dtype == torch.bfloat16


def test_a_module_learns_what_its_sparse_part_leaves_out():
    """Untrained it is softmax attention over critical tiles; a few steps bring it nearer to dense attention."""
    q, k, v, _ = made(128, 256, 8, dtype=torch.float32, asks=False)
    v = v + 1  # a mean that softmax over few tiles sees as well, and a linear part has to add
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    module = sla.SparseLinearAttention(8, critical=0.25, negligible=0.0, backend="numpy")
    assert torch.equal(module(q, k, v), sla.sla_attention(q, k, v, proj=torch.zeros(8, 8), critical=0.25,
                                                          negligible=0.0, backend="numpy"))  # fmt: skip
    optimizer, losses = torch.optim.Adam(module.parameters(), 0.05), []
    for _ in range(30):
        loss = (module(q, k, v) - dense).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    again = sla.SparseLinearAttention(8)
    again.load_state_dict(module.state_dict())
    assert torch.equal(again.proj_l.weight, module.proj_l.weight) and "critical=0.05" in repr(again)


@pytest.mark.parametrize(("change", "error", "words"), [
    ({"q": np.zeros((4, 4))}, TypeError, "q is a ndarray"),
    ({"backend": "sparsity.sla"}, ValueError, "backend is 'sparsity.sla'"),
    ({"causal": 1}, TypeError, "causal is 1"),
    ({"v": torch.zeros(1, 2, 199, 4)}, ValueError, "k and v one shape"),
    ({"q": torch.zeros(1, 3, 130, 4)}, ValueError, "must divide that of q"),
    ({"q": torch.zeros(2, 2, 130, 4)}, ValueError, "batch and head dimension"),
    ({"q": torch.zeros(1, 2, 0, 4)}, ValueError, "at least one row"),
    ({"q": torch.zeros(1, 2, 130, 4).half()}, TypeError, "one floating-point type"),
    ({"proj": torch.zeros(4, 5)}, ValueError, r"proj has shape \(4, 5\)"),
    ({"classes": torch.zeros(1, 2, 3, 3, dtype=torch.int8)}, ValueError, r"int8 of shape \(1, 2, 3, 4\)"),
    ({"scale": -1.0}, ValueError, "scale is -1.0"), ({"critical": 1.5}, ValueError, "critical is 1.5"),
    ({"feature_map": "exp"}, ValueError, "feature_map is 'exp'"),
    ({"backend": "emulator"}, TypeError, "float32; SLA's kernels take float16"),
], ids=lambda x: x if isinstance(x, str) else "")  # fmt: skip
def test_what_does_not_fit_is_refused(change, error, words):
    q, k, v, proj = made(dtype=torch.float32, asks=False)
    with pytest.raises(error, match=words):
        attend(**({"q": q, "k": k, "v": v, "proj": proj} | change))


@pytest.mark.parametrize(("projected", "given"), [(True, False), (False, True)])
def test_a_second_call_launches_on_arrays_of_its_own(monkeypatch, projected, given):
    """Of a recipe, without a GPU: each launch gets the addresses of what this call was given and has made."""
    from flashnumba.machine import streams, tensor_map
    from flashnumba.machine.arrays import describe
    from flashnumba.stages.heads import Shape
    from flashnumba.stages.sparsity import sla as stage

    launched = {}

    class Prepared:
        def __init__(self, launch):
            self.launch = launch

        def fixed(self, grid, threads, args):
            of = [arg.name if isinstance(arg, tensor_map.TensorMap) else name
                  for name, arg in zip(self.launch.args, args, strict=True)]  # fmt: skip
            of = [name for name in of if name in stage.sizes(shape) or name in ("q", "k", "v", "o")]
            return lambda addresses, stream: launched.update({self.launch: dict(zip(of, addresses, strict=True))})

    monkeypatch.setattr(tensor_map, "encode", lambda *args: object())
    monkeypatch.setattr(streams, "current_stream", lambda *args: 0)
    monkeypatch.setattr(stage.Kept, "prepared", lambda self, launch: Prepared(launch))
    shape, options = Shape("float16", 1, 4, 2, 200, 200, 64, arch="90a"), stage.Options(projected=projected)
    q, k, v, proj = (torch.randn(1, heads, 200, 64).half() for heads in (4, 2, 2, 2))
    classes = torch.zeros(1, 4, 4, 4, dtype=torch.int8)
    extra = ({"proj": proj[0, 0, :64].clone()} if projected else {}) | ({"classes": classes} if given else {})
    first = {"q": q, "k": k, "v": v, "o": torch.empty_like(q)} | extra
    kept = stage.Kept(shape, options, 0.1, "cuda", None, describe(q, "q"), {"q": q})
    plan = stage.plan_forward(shape, options, given=given)
    kept.bind(plan, first)
    again = stage.remember(kept, plan, first, projected, given)
    q, k, v = (x.clone() for x in (q, k, v))
    o, found = again(q, k, v, extra.get("proj"), extra.get("classes"))
    assert found.arrays["o"] is o and found.arrays["q"] is q and o.shape == q.shape
    assert set(stage.KEPT) - set(found.arrays) == (set() if projected else {"proj"})
    assert list(launched) == list(plan.launches)
    for addresses in launched.values():
        for name, address in addresses.items():
            if name in found.arrays:
                assert address == found.arrays[name].data_ptr(), name
