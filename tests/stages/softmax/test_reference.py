"""The softmax references, judged by 60-digit decimals, by torch and by what a softmax must satisfy."""

from decimal import Decimal, localcontext

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from flashnumba.compare import assert_close
from flashnumba.data import load_minilm
from flashnumba.stages.softmax import reference

INF, NAN = np.inf, np.nan
rows = arrays(np.float64, st.tuples(st.integers(1, 4), st.integers(1, 40)), elements=st.floats(-700, 700))


def by_decimals(row):
    """The formula as written, in 60 decimal digits, which hold exp(700) and exp(-700) with ease."""
    with localcontext() as context:
        context.prec = 60
        e = [Decimal(float(x)).exp() for x in row]
        return np.array([float(x / sum(e)) for x in e])


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 700.0])
@pytest.mark.parametrize("n", [1, 2, 7, 33])
def test_safe_is_right_to_the_last_digits(n, scale):
    x = np.random.default_rng(n).standard_normal((3, n)) * scale
    expected = np.stack([by_decimals(row) for row in x])
    np.testing.assert_allclose(reference.safe(x), expected, rtol=1e-12, atol=1e-300)


def test_naive_is_right_where_it_does_not_overflow():
    x = np.random.default_rng(0).standard_normal((5, 100)) * 3
    np.testing.assert_allclose(reference.naive(x), reference.safe(x), rtol=1e-13)


def test_naive_overflows_float16_on_real_scores_and_safe_does_not():
    x = load_minilm().scores(0, 2).astype(np.float16)
    naive = reference.naive(x, np.float16)
    over = x > 11.094  # 65519.99, the last number that rounds to a finite float16, is exp(11.0901)
    assert over.any(1).all()
    assert np.isnan(naive[over]).all()
    assert (naive[x < 11] == 0).all()
    assert np.isfinite(reference.naive(x)).all(), "float64 holds exp(79)"
    assert_close(reference.low_precision(x), reference.naive(x))


@pytest.mark.parametrize(("dtype", "limit"), [(np.float16, 11.1), (np.float32, 88.8), (np.float64, 709.8)])
def test_where_each_type_overflows(dtype, limit):
    assert np.isfinite(reference.naive(np.array([limit - 0.1, 0.0]), dtype)).all()
    assert np.isnan(reference.naive(np.array([limit, 0.0]), dtype)[0])
    assert reference.safe(np.array([limit, 0.0]))[0] == pytest.approx(1.0, abs=1e-4)


@given(rows)
def test_weights_are_positive_and_add_up_to_one(x):
    p = reference.safe(x)
    assert (p >= 0).all()
    np.testing.assert_allclose(p.sum(-1), 1, rtol=1e-13)


@given(rows, st.floats(-300, 300))
def test_a_shift_of_the_row_changes_nothing(x, shift):
    np.testing.assert_allclose(reference.safe(x + shift), reference.safe(x), rtol=1e-9, atol=1e-15)


def test_masked_rows_and_columns():
    x = np.array([[-INF, -INF, -INF], [-INF, 5.0, -INF], [1.0, -INF, 1.0]])
    np.testing.assert_array_equal(reference.safe(x), [[0, 0, 0], [0, 1, 0], [0.5, 0, 0.5]])
    np.testing.assert_array_equal(reference.low_precision(x.astype(np.float16)), reference.safe(x))


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("other", [0.0, -INF, INF, 1e308, -1e308])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_nan_and_plus_inf_spoil_their_row_and_no_other(bad, other, at):
    x = np.zeros((2, 3))
    x[0] = other
    x[0, at] = bad
    p = reference.safe(x)
    assert np.isnan(p[0]).all()
    np.testing.assert_allclose(p[1], 1 / 3)


def test_extreme_finite_scores():
    big = np.finfo(np.float64).max
    np.testing.assert_array_equal(reference.safe(np.array([big, 0.0, -big])), [1, 0, 0])
    np.testing.assert_array_equal(reference.safe(np.array([-big, -big])), [0.5, 0.5])


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 5)])
def test_empty(shape):
    assert reference.safe(np.zeros(shape)).shape == shape
    assert reference.low_precision(np.zeros(shape, np.float32)).shape == shape


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_low_precision_returns_the_type_it_got_and_its_error_is_that_types(dtype):
    x = load_minilm().scores(1, 8)[:64].astype(dtype)
    low = reference.low_precision(x)
    assert low.dtype == dtype
    assert reference.low_precision(x, np.float32).dtype == np.float32
    error = np.abs(low.astype(np.float64) - reference.safe(x)).max()
    half_step = float(ml_dtypes.finfo(dtype).eps) / 4  # of the numbers from 1/2 to 1
    assert 0 < error < half_step + 4 * np.finfo(np.float32).eps


def test_against_torch():
    torch = pytest.importorskip("torch")
    x = load_minilm().scores(0, 2)
    np.testing.assert_allclose(reference.safe(x), torch.from_numpy(x).softmax(-1).numpy(), rtol=1e-12, atol=1e-300)
    x[3, 4], x[5, 6] = INF, NAN
    np.testing.assert_allclose(reference.safe(x), torch.from_numpy(x).softmax(-1).numpy(), rtol=1e-12, atol=1e-300)
