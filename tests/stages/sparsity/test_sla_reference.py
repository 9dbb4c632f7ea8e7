"""SLA by definition: classes that partition, gradients by finite differences, and what it becomes at its ends."""

from __future__ import annotations

import numpy as np
import pytest

from flashnumba.compare import assert_close
from flashnumba.stages.flash_forward import reference as dense
from flashnumba.stages.sparsity import sla_reference as sla
from flashnumba.stages.sparsity.sla_low_precision import low_precision


def made(seed=0, m=22, n=30, d=6, dtype=np.float64, heads=(2, 2)):
    rng, sizes = np.random.default_rng(seed), ((0, m), (1, n), (1, n), (0, m))
    q, k, v, do = (rng.standard_normal((heads[i], rows, d)).astype(dtype) for i, rows in sizes)
    return q, k, v, do, rng.standard_normal((d, d)).astype(dtype)


@pytest.mark.parametrize("causal", [False, True])
def test_every_tile_has_one_class_and_the_counts_are_those_asked_for(causal):
    q, k, *_ = made(m=30)
    classes = sla.classify(q, k, 0.3, 0.4, causal, block=4)
    for head in classes:
        for row in head:
            seen = row[row != sla.UNSEEN]
            most, least = sla.counts(seen.size, 0.3, 0.4)
            assert (seen > 0).sum() == max(most, (seen == sla.CUT).sum())
            assert (seen == -1).sum() == min(least, seen.size - (seen > 0).sum())
            assert (seen == sla.CUT).any() == causal
    if not causal:
        means = sla.pooled(q, 4) @ sla.pooled(k, 4).swapaxes(-1, -2)
        for guess, row in zip(means.reshape(-1, 8), classes.reshape(-1, 8), strict=True):
            assert guess[row == 1].min() > guess[row == 0].max() > guess[row == 0].min() > guess[row == -1].max()


def test_of_equal_guesses_the_earlier_is_the_greater():
    ones = np.ones((16, 4))
    assert sla.classify(ones, ones, 0.25, 0.25, block=4).tolist() == [[1, 0, 0, -1]] * 4


def test_counts_are_exact_where_binary_fractions_are_not():
    assert sla.counts(100, 0.07, 0.29) == (7, 29)  # 0.07 * 100 is above 7 and 0.29 * 100 below 29
    assert sla.counts(3, 0.05, 0.10) == (1, 0)
    assert sla.counts(8, 1.0, 0.5) == (8, 0)


@pytest.mark.parametrize("causal", [False, True])
def test_all_critical_is_dense_attention(causal):
    q, k, v, *_ = made()
    found = sla.attend(q, k, v, sla.classify(q, k, 1.0, 0.0, causal, block=4), causal=causal, block=4)
    o, lse = dense.dense(q, k, v, causal=causal)
    np.testing.assert_allclose(found.o, o, atol=1e-14)
    np.testing.assert_allclose(found.lse, lse, atol=1e-13)
    assert not found.o_l.any()


@pytest.mark.parametrize("feature_map", sla.FEATURES)
def test_linear_attention_by_sums_of_states_is_that_by_weights(feature_map):
    q, k, v, _, proj = made(1)
    classes = sla.classify(q, k, 0.2, 0.3, block=4)
    by_weights = sla.attend(q, k, v, classes, proj, feature_map=feature_map, block=4)
    by_states, _ = low_precision(q.astype(np.float32), k.astype(np.float32), v.astype(np.float32), classes,
                                     proj.astype(np.float32), feature_map=feature_map, block=4)  # fmt: skip
    np.testing.assert_allclose(by_states.o, by_weights.o, atol=1e-4)


def test_heads_of_a_group_share_a_head_of_keys():
    q, k, v, do, proj = made(6, heads=(6, 2))
    classes = sla.classify(q, k, 0.3, 0.3, block=4)
    found = sla.gradients(do, q, k, v, classes, proj, block=4)
    sums = [np.zeros_like(k), np.zeros_like(v)]
    for h in range(6):
        one = q[h], k[h // 3], v[h // 3]
        assert np.array_equal(classes[h], sla.classify(*one[:2], 0.3, 0.3, block=4))
        o = sla.attend(q, k, v, classes, proj, block=4).o[h]
        np.testing.assert_allclose(o, sla.attend(*one, classes[h], proj, block=4).o, atol=1e-12)
        dq, *of_keys, _ = sla.gradients(do[h], *one, classes[h], proj, block=4)
        np.testing.assert_allclose(found[0][h], dq, atol=1e-12)
        for total, x in zip(sums, of_keys, strict=True):
            total[h // 3] += x
    for total, x in zip(sums, found[1:3], strict=True):
        np.testing.assert_allclose(x, total, atol=1e-12)


@pytest.mark.parametrize("feature_map", sla.FEATURES)
@pytest.mark.parametrize(("form", "causal", "kv_heads"), [("paper", False, 1), ("rest", True, 3), ("all", True, 1)])
def test_gradients_are_finite_differences(feature_map, form, causal, kv_heads):
    q, k, v, do, proj = made(2, heads=(3, kv_heads))
    how = {"feature_map": feature_map, "form": form, "causal": causal, "block": 4}
    classes = sla.classify(q, k, 0.2, 0.3, causal, block=4)
    found = sla.gradients(do, q, k, v, classes, proj, **how)
    rng, step = np.random.default_rng(3), 1e-6
    inputs = [q, k, v, proj]
    for i, gradient in enumerate(found):
        way = rng.standard_normal(gradient.shape)
        values = []
        for sign in (1, -1):
            moved = list(inputs)
            moved[i] = moved[i] + sign * step * way
            values.append((sla.attend(*moved[:3], classes, moved[3], **how).o * do).sum())
        slope = (values[0] - values[1]) / (2 * step)
        assert slope == pytest.approx((gradient * way).sum(), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_low_precision_has_the_gradients(kv_heads):
    q, k, v, do, proj = made(4, dtype=np.float16, heads=(4, kv_heads))
    how = {"feature_map": "softmax", "block": 4}
    classes = sla.classify(q, k, 0.2, 0.3, block=4)
    _, low = low_precision(q, k, v, classes, proj, do, **how)
    for got, expected in zip(low, sla.gradients(do, q, k, v, classes, proj, **how), strict=True):
        assert_close(got, expected, eps=0.02 * np.abs(expected).max())


def test_a_row_of_no_marginal_tile_has_no_linear_part_and_no_gradient_by_it():
    q, k, v, do, proj = made(5)
    classes = sla.classify(q, k, 0.5, 0.5, block=4)
    assert not (classes == 0).any()
    found = sla.attend(q, k, v, classes, proj, block=4)
    assert not found.o_l.any()
    assert np.array_equal(found.o, found.o_s)
    assert not sla.gradients(do, q, k, v, classes, proj, block=4)[3].any()
