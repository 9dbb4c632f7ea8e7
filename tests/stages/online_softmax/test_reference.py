"""The (m, d) recurrence and its merge: the algebra that lets a row be cut anywhere."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from flashnumba.data import load_minilm
from flashnumba.stages.online_softmax import reference
from flashnumba.stages.softmax.reference import safe

INF, NAN = np.inf, np.nan

scores = st.one_of(st.floats(-1e4, 1e4), st.just(-INF), st.floats(allow_nan=False, allow_infinity=False))
row = arrays(np.float64, st.integers(0, 12), elements=scores)
states = row.map(reference.scan)


def same(a, b):
    np.testing.assert_array_equal(a[0], b[0])
    np.testing.assert_allclose(a[1], b[1], rtol=1e-12)


@given(states, states, states)
def test_merge_is_associative(a, b, c):
    same(reference.merge(reference.merge(a, b), c), reference.merge(a, reference.merge(b, c)))


@given(states, states)
def test_merge_is_commutative(a, b):
    left, right = reference.merge(a, b), reference.merge(b, a)
    assert (left[0], left[1]) == (right[0], right[1])


@given(states)
def test_empty_is_the_identity(a):
    for merged in (reference.merge(a, reference.empty(())), reference.merge(reference.empty(()), a)):
        assert (merged[0], merged[1]) == (a[0], a[1])


def test_empty_and_empty_is_empty():
    m, d = reference.merge(reference.empty((2, 3)), reference.empty((2, 3)))
    assert (m == -INF).all()
    assert (d == 0).all()


@given(arrays(np.float64, st.tuples(st.integers(1, 3), st.integers(1, 30)), elements=scores), st.data())
def test_any_cuts_give_the_state_of_the_whole(x, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, x.shape[1]), max_size=5)))
    parts = [reference.scan(part) for part in np.split(x, cuts, axis=1)]
    whole = reference.scan(x)
    same(reference.tree(parts), whole)
    order = data.draw(st.permutations(parts))
    same(reference.tree(order), whole)


@given(row)
def test_the_state_is_the_maximum_and_the_sum(x):
    m, d = reference.scan(x)
    assert m == x.max(initial=-INF)
    with np.errstate(over="ignore"):
        expected = np.exp(x - m).sum() if m > -INF else 0.0
    np.testing.assert_allclose(d, expected, rtol=1e-12)


def test_the_recurrence_by_hand():
    m, d = np.array(list(reference.steps(np.array([1.0, 3.0, 2.0])))).T
    np.testing.assert_array_equal(m, [1, 3, 3])
    np.testing.assert_allclose(d, [1, np.exp(-2) + 1, np.exp(-2) + 1 + np.exp(-1)], rtol=1e-15)


@pytest.mark.parametrize("parts", [1, 2, 3, 8, 31, 600])
def test_softmax_from_parts_on_real_scores(parts):
    x = load_minilm().scores(0, 2)[:32]
    np.testing.assert_allclose(reference.online(x, parts), safe(x), rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize(
    "x",
    [[-INF, -INF, -INF], [NAN, 0, 1], [0, 1, NAN], [-INF, INF, 0], [INF, INF, INF], [INF, NAN, -INF], [-INF, 2, -INF]],
)
def test_limits_are_those_of_the_stage_softmax(x, parts):
    x = np.array([x, [0.0, 1.0, 2.0]])
    np.testing.assert_allclose(reference.online(x, parts), safe(x), rtol=1e-14)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3)])
def test_empty_rows(shape):
    assert reference.online(np.zeros(shape)).shape == shape


def test_tree_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one state"):
        reference.tree([])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_low_precision_stays_in_float32_until_the_end(dtype):
    x = load_minilm().scores(0, 2)[:16].astype(dtype)
    assert all(part.dtype == np.float32 for part in reference.split(x, 32, np.float32))
    low = reference.low_precision(x)
    assert low.dtype == dtype
    error = np.abs(low.astype(np.float64) - safe(x)).max()
    assert 0 < error < float(ml_dtypes.finfo(dtype).eps) / 4 + 8 * np.finfo(np.float32).eps
