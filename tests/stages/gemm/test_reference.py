"""The product all at once and in tiles: the same, for every size; and in low precision as far off as it may be."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashnumba.data import load_minilm
from flashnumba.stages.gemm import reference
from tests.stages.gemm.products import TAILS, matrix

SIZES = st.integers(0, 9)


def whole(m, n, k, seed=0):
    """Matrices of small integers, whose products any order of summation gives exactly."""
    rng = np.random.default_rng([m, n, k, seed])
    return rng.integers(-9, 9, (m, k)).astype(float), rng.integers(-9, 9, (k, n)).astype(float)


@given(SIZES, SIZES, SIZES)
def test_the_formula_as_it_stands(m, n, k):
    a, b = whole(m, n, k)
    by_hand = [[sum(a[i, s] * b[s, j] for s in range(k)) for j in range(n)] for i in range(m)]
    np.testing.assert_array_equal(reference.naive(a, b), np.reshape(by_hand, (m, n)))


@given(SIZES, SIZES, SIZES, st.integers(1, 12))
def test_tiles_of_any_size_add_up_to_the_product(m, n, k, tile):
    a, b = whole(m, n, k)
    np.testing.assert_array_equal(reference.blocked(a, b, tile), reference.naive(a, b))


@given(SIZES, SIZES, SIZES, st.integers(1, 12))
def test_tiles_take_every_multiplication_once(m, n, k, tile):
    often = np.zeros((m, n, k), int)
    for rows, cols, steps in reference.tiles(m, n, k, tile):
        often[rows, cols, steps] += 1
        assert max(s.stop - s.start for s in (rows, cols, steps)) <= tile
    assert (often == 1).all()


def test_steps_of_k_come_last_so_that_a_tile_of_c_is_finished_before_the_next():
    order = [(rows.start, cols.start, steps.start) for rows, cols, steps in reference.tiles(4, 4, 4, 2)]
    assert order == sorted(order)


@pytest.mark.parametrize("inside", [np.float32, np.float64])
def test_a_blocked_product_computes_in_what_it_is_told(inside):
    a, b = whole(5, 6, 7)
    assert reference.blocked(a, b, 4, inside).dtype == inside


@pytest.mark.parametrize("size", TAILS, ids=str)
def test_blocked_in_float64_is_close_on_real_numbers(size):
    m, n, k = size
    a, b = matrix(m, k, np.float64, True), matrix(k, n, np.float64, True, seed=1)
    np.testing.assert_allclose(reference.blocked(a, b, 16), a @ b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_low_precision_is_off_by_rounding_alone(dtype):
    data = load_minilm()
    q, k = data.q[0, 2, ::8].astype(dtype), data.k[0, 2, ::4].T.astype(dtype)
    low = reference.low_precision(q, k)
    exact = reference.naive(q, k)
    assert low.dtype == dtype
    step = float(ml_dtypes.finfo(dtype).eps) / 2 + 32 * float(np.finfo(np.float32).eps)
    error = np.abs(low.astype(np.float64) - exact)
    assert 0 < error.max() < step * (np.abs(q).astype(np.float64) @ np.abs(k).astype(np.float64)).max()


def test_low_precision_adds_one_step_after_the_other():
    a = np.array([[1, 2.0**-24, 2.0**-24]], np.float32)
    assert reference.low_precision(a, np.ones((3, 1), np.float32)) == 1, "each step is lost on its own"
    assert reference.naive(a, np.ones((3, 1), np.float32)) > 1


def test_infinities_go_where_the_formula_sends_them():
    a = np.array([[np.inf, 0], [1, 2], [1e5, 1]], np.float32)
    b = np.array([[1, 0], [1, 1]], np.float32)
    with np.errstate(invalid="ignore"):
        low, exact = reference.low_precision(a, b), reference.naive(a, b)
    for c in (low, exact):
        assert np.isposinf(c[0, 0]) and np.isnan(c[0, 1])
        np.testing.assert_array_equal(c[1:], [[3, 2], [100001, 1]])
    assert np.isinf(reference.low_precision(np.full((1, 2), 6e4, np.float16), np.ones((2, 1), np.float16)))
