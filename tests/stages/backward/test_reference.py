"""The gradients' references, judged by finite differences, by torch in float64 and by one another."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from flashnumba.data import load_minilm
from flashnumba.stages.backward import count, reference
from flashnumba.stages.backward.problem import Shape
from flashnumba.stages.flash_forward import reference as forward

CASES = [(5, 5), (3, 7), (7, 3), (1, 9), (9, 1), (33, 20)]
SCALES = [None, 0.0, -0.7, 2.0]
NAMES = ("dq", "dk", "dv")


def made(m, n, d=4, heads=4, kv_heads=2, batch=(2,), seed=0):
    """q, k, v, do and dlse of which no two rows are alike."""
    rng = np.random.default_rng([seed, m, n, d])
    q, do = (rng.standard_normal((*batch, heads, m, d)) for _ in range(2))
    k, v = (rng.standard_normal((*batch, kv_heads, n, d)) for _ in range(2))
    return q * np.geomspace(0.5, 2, m)[:, None], k, v + 0.5, do, rng.standard_normal((*batch, heads, m))


def same(got, expected, rtol=1e-10, atol=1e-12):
    for name, a, b in zip(NAMES, got, expected, strict=True):
        assert a.shape == b.shape, name
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, err_msg=name)


def loss(q, k, v, do, dlse, scale, causal):
    """A number whose gradients by o and lse are do and dlse; rows that see nothing have no lse to speak of."""
    o, lse = forward.dense(q, k, v, scale, causal)
    return (o * do).sum() + (np.where(np.isfinite(lse), lse, 0) * dlse).sum()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("m", "n"), [(3, 3), (2, 5), (5, 2)])
def test_by_finite_differences(m, n, scale, causal):
    q, k, v, do, dlse = made(m, n, 3, batch=())
    step = 1e-6
    for which, gradient in enumerate(reference.dense(q, k, v, do, scale, causal, dlse)):
        for index in np.ndindex(gradient.shape):
            ends = []
            for sign in (1, -1):
                moved = [x.copy() for x in (q, k, v)]
                moved[which][index] += sign * step
                ends.append(loss(*moved, do, dlse, scale, causal))
            assert gradient[index] == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("m", "n"), CASES)
def test_against_torch(m, n, scale, causal):
    torch = pytest.importorskip("torch")
    q, k, v, do, dlse = made(m, n)
    each = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    mask = torch.from_numpy(forward.visible(m, n, causal))
    sees = mask.any(1)  # the other rows have no softmax in torch
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    heads = (each[0][..., sees, :], *(x.repeat_interleave(2, -3) for x in each[1:]))
    s = (factor * heads[0] @ heads[1].transpose(-1, -2)).masked_fill(~mask[sees], -np.inf)
    total = (s.softmax(-1) @ heads[2] * torch.from_numpy(do)[..., sees, :]).sum()
    (total + (s.logsumexp(-1) * torch.from_numpy(dlse)[..., sees]).sum()).backward()
    got = reference.dense(q, k, v, do, scale, causal, dlse)
    same(got, [x.grad.numpy() for x in each])
    assert (got[0][..., ~sees.numpy(), :] == 0).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("block", [1, 4, 64])
@pytest.mark.parametrize(("m", "n"), CASES)
def test_block_by_block(m, n, block, scale, causal):
    q, k, v, do, dlse = made(m, n)
    o, lse = forward.dense(q, k, v, scale, causal)
    for given in (None, dlse):
        expected = reference.dense(q, k, v, do, scale, causal, given)
        same(reference.blocked(q, k, v, o, do, lse, scale, causal, given, block), expected)


@pytest.mark.parametrize("causal", [False, True])
def test_delta_is_the_weighted_mean_of_dp(causal):
    q, k, v, do, _ = made(7, 12, kv_heads=4)
    o, _ = forward.dense(q, k, v, None, causal)
    s = np.where(forward.visible(7, 12, causal), q @ k.swapaxes(-1, -2) / 2, -np.inf)
    expected = (reference.weights(s) * (do @ v.swapaxes(-1, -2))).sum(-1)
    np.testing.assert_allclose(reference.delta_of(o, do), expected, rtol=1e-12, atol=1e-14)


def test_a_gradient_of_lse_alone():
    """Its dQ is the mean key under the weights, and V does not matter."""
    q, k, v, do, dlse = made(6, 9, kv_heads=4)
    dq, _, dv = reference.dense(q, k, v, 0 * do, 1.0, False, dlse)
    mean, _ = forward.dense(q, k, k, 1.0)
    np.testing.assert_allclose(dq, dlse[..., None] * mean, rtol=1e-12, atol=1e-14)
    assert (dv == 0).all()


def test_a_group_is_summed():
    q, k, v, do, dlse = made(5, 8, heads=6, kv_heads=2)
    one = reference.dense(q, k, v, do, None, True, dlse)
    many = reference.dense(q, k.repeat(3, -3), v.repeat(3, -3), do, None, True, dlse)
    same(one, (many[0], *(x.reshape(2, 2, 3, 8, 4).sum(2) for x in many[1:])))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("m", "n"), [(0, 5), (5, 0), (0, 0)])
def test_nothing(m, n, causal):
    q, k, v, do, dlse = (np.zeros((2, 2, *size)) for size in ((m, 3), (n, 3), (n, 3), (m, 3), (m,)))
    o, lse = forward.dense(q, k, v, None, causal)
    half = [x.astype(np.float16) for x in (q, k, v, o, do)]
    for got in (
        reference.dense(q, k, v, do, None, causal, dlse),
        reference.blocked(q, k, v, o, do, lse, None, causal, dlse),
        reference.low_precision(*half, lse.astype(np.float32), None, causal),
    ):
        for x, like in zip(got, (q, k, v), strict=True):
            assert x.shape == like.shape and (x == 0).all()


def test_rows_that_see_nothing():
    q, k, v, do, dlse = made(7, 4)
    q[..., 0, :] = 1e300
    o, lse = forward.dense(q, k, v, None, True)
    dq, dk, dv = reference.blocked(q, k, v, o, do, lse, None, True, dlse)
    assert (dq[..., :3, :] == 0).all() and np.isfinite(dq).all() and np.isfinite(dk).all() and np.isfinite(dv).all()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("causal", [False, True])
def test_low_precision_is_as_near_as_its_type(dtype, causal):
    data = load_minilm()
    q, k, v = (x[0, 1, :96].astype(dtype) for x in (data.q, data.k, data.v))
    do = np.random.default_rng(0).standard_normal(q.shape).astype(dtype)
    o, lse = forward.low_precision(q, k, v, None, causal)
    step = float(ml_dtypes.finfo(dtype).eps)
    got = reference.low_precision(q, k, v, o, do, lse, None, causal)
    for name, x, expected in zip(NAMES, got, reference.dense(q, k, v, do, None, causal), strict=True):
        assert x.dtype == dtype
        error = np.abs(x.astype(np.float64) - expected).max()
        assert 0 < error < 16 * step * np.abs(expected).max(), name


def test_scores_of_1e5_have_weights_as_exact_as_others():
    """lse in float32 has lost their fraction; taken anew from the scores, the weights have not."""
    q = np.float32([[320, 1]])
    k = np.stack([np.full(9, 320), np.arange(9) % 4], 1).astype(np.float32)
    v, do = np.random.default_rng(0).standard_normal((2, 9, 2)).astype(np.float32)
    do = do[:1]
    o, lse = forward.low_precision(q, k, v, 1.0)
    expected = reference.dense(q, k, v, do, 1.0)
    for x, y in zip(reference.low_precision(q, k, v, o, do, lse, 1.0), expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-3)


def test_bytes_of_gradients_that_are_not_fused():
    """By the numbers of two heads that share K and V: 8 queries, 16 keys, 4 columns, 2 bytes an element."""
    rows, keys, scores = 2 * 8 * 4, 16 * 4, 2 * 8 * 16
    products = {
        "dV = P^T dO": scores + rows + keys, "dP = dO V^T": rows + keys + scores,
        "dQ = dS K": scores + keys + rows, "dK = dS^T Q": scores + rows + keys,
    }  # fmt: skip
    elementwise = {"P, which the forward wrote": scores, "dS of P and dP": 3 * scores}
    moved = count.unfused(Shape("float16", 1, 2, 1, 8, 16, 4, True))
    assert moved == 2 * (sum(products.values()) + sum(elementwise.values()))
