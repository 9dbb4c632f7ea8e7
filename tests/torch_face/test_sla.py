"""SLA in torch: its gradients are the reference's, and a module with it learns."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from flashnumba.stages.sparsity import sla_reference as reference  # noqa: E402
from flashnumba.torch.sla import SparseLinearAttention, sla  # noqa: E402


def made(n=192, d=16, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(1, 2, n, d, dtype=dtype, requires_grad=True) for _ in range(3)]


def test_gradients_are_those_of_the_reference():
    q, k, v = made()
    proj = torch.randn(16, 16, requires_grad=True)
    o = sla(q, k, v, proj, critical=0.3, negligible=0.34, backend="numpy")
    do = torch.randn_like(o)
    o.backward(do)
    arrays = [x.detach().numpy() for x in (do, q, k, v)]
    classes = reference.classify(*arrays[1:3], 0.3, 0.34)
    assert {1, 0, -1} == set(classes.flat)
    exact = reference.gradients(*arrays, classes, proj.detach().numpy())
    for x, gradient in zip((q, k, v, proj), exact, strict=True):
        np.testing.assert_allclose(x.grad.numpy(), gradient, rtol=1e-5, atol=1e-6)


def test_an_untrained_module_is_its_softmax_part_and_then_learns_what_dense_attention_is():
    q, k, v = (x.detach() for x in made(256))
    attend = SparseLinearAttention(16, critical=0.25, negligible=0.0, backend="numpy")
    classes = reference.classify(q.numpy(), k.numpy(), 0.25, 0.0)
    parts = reference.attend(q.numpy(), k.numpy(), v.numpy(), classes)
    np.testing.assert_allclose(attend(q, k, v).detach().numpy(), parts.o_s, rtol=1e-5, atol=1e-6)
    target = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    optimizer = torch.optim.Adam(attend.parameters(), lr=0.05)
    losses = []
    for _ in range(12):
        loss = (attend(q, k, v) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert attend.proj_l.weight.abs().max() > 0


def test_a_tensor_changed_in_place_is_noticed():
    q, k, v = made()
    o = sla(q, k, v, backend="numpy")
    with torch.no_grad():
        q.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_what_is_no_tensor_is_refused():
    q, k, v = made()
    with pytest.raises(TypeError, match="k is a ndarray; it must be a torch tensor"):
        sla(q, k.detach().numpy(), v)
    with pytest.raises(ValueError, match="critical is 2"):
        SparseLinearAttention(16, critical=2)
