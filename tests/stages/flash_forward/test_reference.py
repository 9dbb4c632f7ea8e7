"""The attention references, judged by torch in float64 and by what attention must satisfy."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashnumba.compare import assert_close
from flashnumba.data import load_minilm
from flashnumba.stages.flash_forward import reference
from flashnumba.stages.softmax.reference import safe

INF, NAN = np.inf, np.nan
DTYPES = (np.float16, ml_dtypes.bfloat16, np.float32)


def made(m, n, d=8, heads=4, kv_heads=2, batch=(2,), seed=0, dtype=np.float64, spread=1.0):
    """q, k, v whose rows differ in size, so that no two are alike."""
    rng = np.random.default_rng([seed, m, n, d])
    shapes = ((heads, m, d), (kv_heads, n, d), (kv_heads, n, d))
    q, k, v = (rng.standard_normal((*batch, *shape)) for shape in shapes)
    q *= spread * np.geomspace(0.5, 2, max(m, 1))[:m, None]
    return q.astype(dtype), k.astype(dtype), (v + 0.5).astype(dtype)


sizes = st.integers(0, 9)
problems = st.builds(
    made, sizes, sizes, st.integers(1, 5), st.just(4), st.sampled_from([1, 2, 4]), st.sampled_from([(), (2,), (0,)]),
    st.integers(0, 99), spread=st.sampled_from([0.1, 1.0, 30.0, 1e5]),
)  # fmt: skip
scales = st.one_of(st.none(), st.sampled_from([0.0, -0.7, 1.0, 2.5]))


def same(got, expected, rtol=1e-11, atol=1e-13):
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


# -- judged by torch ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.0, -0.3, 2.0])
@pytest.mark.parametrize(("m", "n"), [(5, 5), (3, 7), (1, 9), (7, 7), (64, 33), (33, 64)])
def test_against_torch(m, n, scale, causal):
    torch = pytest.importorskip("torch")
    q, k, v = made(m, n)
    mask = reference.visible(m, n, causal)
    o, lse = reference.dense(q, k, v, scale, causal)
    each = (torch.from_numpy(x) for x in (q, k.repeat(2, axis=-3), v.repeat(2, axis=-3)))
    sees = mask.any(1)  # torch's softmax gives NaN in the other rows
    expected = torch.nn.functional.scaled_dot_product_attention(*each, attn_mask=torch.from_numpy(mask), scale=scale)
    np.testing.assert_allclose(o[..., sees, :], expected.numpy()[..., sees, :], rtol=1e-12, atol=1e-14)
    assert (o[..., ~sees, :] == 0).all()
    s = scale if scale is not None else q.shape[-1] ** -0.5
    logits = torch.from_numpy(s * (q @ k.repeat(2, axis=-3).swapaxes(-1, -2)))
    expected = logits.masked_fill(torch.from_numpy(~mask), -INF).logsumexp(-1)
    np.testing.assert_allclose(lse, expected.numpy(), rtol=1e-12, atol=1e-14)


def test_causal_of_a_square_is_torchs():
    torch = pytest.importorskip("torch")
    q, k, v = made(17, 17, kv_heads=4)
    each = (torch.from_numpy(x) for x in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(*each, is_causal=True)
    np.testing.assert_allclose(reference.dense(q, k, v, None, True)[0], expected.numpy(), rtol=1e-12, atol=1e-14)


def test_grouped_heads_are_torchs():
    torch = pytest.importorskip("torch")
    q, k, v = made(9, 13, heads=6, kv_heads=3)
    each = (torch.from_numpy(x) for x in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(*each, enable_gqa=True)
    np.testing.assert_allclose(reference.dense(q, k, v)[0], expected.numpy(), rtol=1e-12, atol=1e-14)


# -- what is visible ---------------------------------------------------------------------------------------------------
def test_visible_by_hand():
    expected = [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    np.testing.assert_array_equal(reference.visible(3, 5, True), np.array(expected, bool))
    expected = [[0, 0, 0], [0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]]
    np.testing.assert_array_equal(reference.visible(5, 3, True), np.array(expected, bool))
    assert reference.visible(3, 5, False).all()


@given(sizes, sizes)
def test_visible_is_the_definition(m, n):
    mask = reference.visible(m, n, True)
    assert mask.shape == (m, n)
    assert all(mask[i, j] == (j <= i + n - m) for i in range(m) for j in range(n))


@pytest.mark.parametrize("scale", [None, 0.0, -1.0])
def test_rows_that_see_nothing(scale):
    q, k, v = made(5, 3)
    q[..., 0, :] = NAN  # a row that sees nothing is empty whatever it holds
    for o, lse in (
        reference.dense(q, k, v, scale, True),
        reference.online(q, k, v, scale, True, 2),
        reference.merge(*reference.split(q, k, v, scale, True, 2)),
        reference.low_precision(q.astype(np.float16), k.astype(np.float16), v.astype(np.float16), scale, True),
    ):
        assert (o[..., :2, :] == 0).all()
        assert (lse[..., :2] == -INF).all()
        assert np.isfinite(o[..., 2:, :]).all()
        np.testing.assert_allclose(o[..., 2, :], v[..., [0, 0, 1, 1], 0, :], rtol=1e-3)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("m", "n"), [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_ask_or_to_see(m, n, causal):
    q, k, v = made(m, n)
    for o, lse in (
        reference.dense(q, k, v, None, causal),
        reference.online(q, k, v, None, causal),
        reference.merge(*reference.split(q, k, v, None, causal, 3)),
        reference.low_precision(q.astype(np.float16), k.astype(np.float16), v.astype(np.float16), None, causal),
    ):
        assert o.shape == q.shape
        assert lse.shape == q.shape[:-1]
        assert (o == 0).all()
        assert (lse == -INF).all()


# -- properties --------------------------------------------------------------------------------------------------------
@given(problems, scales, st.booleans(), st.integers(1, 10))
def test_any_block_gives_the_dense_result(problem, scale, causal, block):
    same(reference.online(*problem, scale, causal, block), reference.dense(*problem, scale, causal))


@given(problems, scales, st.booleans(), st.integers(1, 6))
def test_any_parts_merge_to_the_dense_result(problem, scale, causal, parts):
    same(reference.merge(*reference.split(*problem, scale, causal, parts)), reference.dense(*problem, scale, causal))


@given(st.integers(0, 99), st.lists(st.booleans(), min_size=3, max_size=6), st.data())
def test_merge_is_associative_and_commutative_with_empty_parts(seed, full, data):
    rng = np.random.default_rng(seed)
    o, lse = rng.standard_normal((len(full), 3, 5)), rng.standard_normal((len(full), 3)) * 50
    o[~np.array(full)], lse[~np.array(full)] = 0, -INF
    whole = reference.merge(o, lse)
    cut = data.draw(st.integers(0, len(full)))
    parts = [reference.merge(o[i], lse[i]) for i in (slice(cut), slice(cut, None))]
    same(reference.merge(*(np.stack(x) for x in zip(*parts, strict=True))), whole)
    order = data.draw(st.permutations(range(len(full))))
    same(reference.merge(o[order], lse[order]), whole)


def test_empty_parts_are_the_identity_of_merge():
    o, lse = reference.merge(np.zeros((3, 2, 4)), np.full((3, 2), -INF))
    assert (o == 0).all() and (lse == -INF).all()
    o, lse = np.array([[[1.0, 2.0]], [[0, 0]]]), np.array([[5.0], [-INF]])
    same(reference.merge(o, lse), (o[0], lse[0]), rtol=0, atol=0)
    o, lse = reference.merge(np.zeros((0, 2, 4)), np.zeros((0, 2)))
    assert (o == 0).all() and (lse == -INF).all()


def test_the_weights_are_the_softmax_of_scaled_scores():
    q, k, v = made(6, 9, d=9, kv_heads=4)
    identity = np.broadcast_to(np.eye(9), v.shape)
    p = reference.dense(q, k, identity, 0.7)[0]
    np.testing.assert_allclose(p, safe(0.7 * q @ k.swapaxes(-1, -2)), rtol=1e-13)


@pytest.mark.parametrize("causal", [False, True])
def test_scale_zero_is_the_mean_of_what_is_visible(causal):
    q, k, v = made(4, 6, kv_heads=4)
    o, lse = reference.dense(q, k, v, 0, causal)
    for i in range(4):
        seen = 3 + i if causal else 6
        np.testing.assert_allclose(o[..., i, :], v[..., :seen, :].mean(-2), rtol=1e-13)
        np.testing.assert_allclose(lse[..., i], np.log(seen), rtol=1e-14)


@given(problems, st.sampled_from([0.3, 2.0]), st.booleans())
def test_a_negative_scale_is_a_negative_query(problem, scale, causal):
    q, k, v = problem
    same(reference.dense(q, k, v, -scale, causal), reference.dense(-q, k, v, scale, causal), rtol=0, atol=0)


@given(problems, scales, st.booleans())
def test_output_lies_among_the_values_it_sees(problem, scale, causal):
    q, k, v = problem
    o, _ = reference.dense(q, k, v, scale, causal)
    mask = reference.visible(q.shape[-2], k.shape[-2], causal)
    values = np.repeat(v, q.shape[-3] // k.shape[-3], -3)[..., None, :, :]
    high = np.where(mask[:, :, None], values, -INF).max(-2, initial=-INF)
    low = np.where(mask[:, :, None], values, INF).min(-2, initial=INF)
    sees = mask.any(1)
    assert (o <= high + 1e-12)[..., sees, :].all()
    assert (o >= low - 1e-12)[..., sees, :].all()


def test_leading_axes_may_be_left_out():
    q, k, v = made(3, 5, heads=2, kv_heads=2, batch=())
    whole = reference.dense(q, k, v, None, True)
    for h in range(2):
        same(reference.dense(q[h], k[h], v[h], None, True), [x[h] for x in whole])
    same([x[0] for x in reference.dense(q[None], k[None], v[None], None, True)], whole)


def test_the_recurrence_by_hand():
    q, k, v = np.array([[1.0]]), np.array([[1.0], [3.0], [2.0]]), np.array([[10.0], [20.0], [30.0]])
    states = list(reference.blocked(q, k, v, 1.0, False, 1))
    m, l, acc = (np.array([float(state[part].squeeze()) for state in states]) for part in range(3))
    e = np.exp
    np.testing.assert_array_equal(m, [1, 3, 3])
    np.testing.assert_allclose(l, [1, e(-2) + 1, e(-2) + 1 + e(-1)], rtol=1e-15)
    np.testing.assert_allclose(acc, [10, 10 * e(-2) + 20, 10 * e(-2) + 20 + 30 * e(-1)], rtol=1e-15)
    assert len(list(reference.blocked(q, k, v, 1.0, False, 2))) == 2


# -- the limits --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("causal", [False, True])
def test_a_nan_in_a_query_spoils_its_row_and_no_other(causal):
    q, k, v = made(6, 6)
    clean = reference.dense(q, k, v, None, causal)
    q[0, 1, 4, 2] = NAN
    spoilt = np.zeros(q.shape[:-1], bool)
    spoilt[0, 1, 4] = True
    for o, lse in (reference.dense(q, k, v, None, causal), reference.online(q, k, v, None, causal, 4)):
        assert np.isnan(o[spoilt]).all() and np.isnan(lse[spoilt]).all()
        same((o[~spoilt], lse[~spoilt]), [x[~spoilt] for x in clean])


def test_a_nan_in_a_key_spoils_the_rows_that_see_it():
    q, k, v = made(6, 6, kv_heads=4)
    k[0, 1, 4, 2] = NAN
    for o, lse in (reference.dense(q, k, v, None, True), reference.online(q, k, v, None, True, 2)):
        spoilt = np.isnan(lse)
        assert spoilt[0, 1, 4:].all() and spoilt.sum() == 2
        np.testing.assert_array_equal(np.isnan(o).all(-1), spoilt)
        np.testing.assert_array_equal(np.isnan(o).any(-1), spoilt)


def test_infinite_scores():
    q, k, v = np.ones((4, 1)), np.array([[1.0], [-INF], [2.0]]), np.array([[1.0], [2.0], [3.0]])
    o, lse = reference.dense(q, k, v, 1.0)
    np.testing.assert_allclose(o[:, 0], (np.e + 3 * np.e**2) / (np.e + np.e**2), rtol=1e-14)
    for got in (reference.dense(q, k, v, -1.0), reference.online(q, k, v, -1.0, block=1)):
        assert all(np.isnan(x).all() for x in got), "a score of +inf"
    o, lse = reference.dense(q, np.full((3, 1), -INF), v, 1.0)
    assert (o == 0).all() and (lse == -INF).all()


def test_huge_scores():
    q, k, v = made(8, 20, kv_heads=4, spread=1e5)
    s = q @ k.swapaxes(-1, -2)
    assert np.abs(s).max() > 1e5
    o, lse = reference.dense(q, k, v, 1.0)
    best = s.argmax(-1)
    np.testing.assert_allclose(o, np.take_along_axis(v, best[..., None], -2), rtol=1e-9)
    np.testing.assert_allclose(lse, s.max(-1), rtol=1e-12)


# -- low precision -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_low_precision_is_near_and_its_error_is_that_of_its_type(dtype, causal):
    data = load_minilm()
    q, k, v = (x[1, :4, :128].astype(dtype) for x in (data.q, data.k, data.v))
    o, lse = reference.dense(q, k, v, None, causal)
    low_o, low_lse = reference.low_precision(q, k, v, None, causal)
    assert (low_o.dtype, low_lse.dtype) == (np.dtype(dtype), np.float32)
    step = float(ml_dtypes.finfo(dtype).eps)
    error = np.abs(low_o.astype(np.float64) - o).max()
    assert 0 < error <= step * np.abs(v.astype(np.float64)).max() + 1e-5 * (step < 1e-6)
    assert np.abs(low_lse - lse).max() < 1e-5


@settings(max_examples=40)
@given(problems, scales, st.booleans(), st.sampled_from(DTYPES), st.integers(1, 10))
def test_a_blocked_float32_result_is_within_the_budget(problem, scale, causal, dtype, block):
    q, k, v = (np.clip(x, -3e4, 3e4).astype(dtype) for x in problem)
    expected, low = reference.dense(q, k, v, scale, causal), reference.low_precision(q, k, v, scale, causal)
    got = reference.online(q, k, v, scale, causal, block, np.float32)
    assert got[0].dtype == got[1].dtype == np.float32
    assert_close(got[1], expected[1], low[1], what="lse")
    assert_close(got[0].astype(dtype), expected[0], low[0], what="o")
