"""The comparator: it must fail where it should, and say where."""

import ml_dtypes
import numpy as np
import pytest

from flashnumba.compare import assert_close, budget, compare

NAN, INF = np.nan, np.inf


def test_the_budget_is_twice_the_error_of_low_precision():
    reference, lowprec = np.array([1.0, -4.0, 0.5]), np.array([1.0, -4.003, 0.5])
    assert budget(reference, lowprec, eps=0.0) == pytest.approx(0.006)
    assert budget(reference, lowprec, eps=0.1) == pytest.approx(0.106)
    assert budget(reference, reference) == 4 * 2.0**-21


@pytest.mark.parametrize(("error", "ok"), [(0.0199, True), (0.0201, False), (-0.0199, True), (-0.0201, False)])
def test_the_budget_is_a_sharp_edge(error, ok):
    reference = np.linspace(-1, 1, 12).reshape(3, 4)
    lowprec, out = reference.copy(), reference.copy()
    lowprec[0, 0] += 0.01
    out[2, 1] += error
    found = compare(out, reference, lowprec, eps=0.0)
    assert found.ok is ok
    assert found.worst_index == (2, 1)
    assert (found.got, found.expected) == (out[2, 1], reference[2, 1])
    assert found.error == pytest.approx(abs(error))


@pytest.mark.parametrize("got", [NAN, INF, -INF, 0.0])
@pytest.mark.parametrize("expected", [NAN, INF, -INF, 0.0])
def test_non_finite_positions_must_agree_in_kind(got, expected):
    out, reference = np.array([1.0, got, 2.0]), np.array([1.0, expected, 2.0])
    found = compare(out, reference, reference, eps=1e30)
    assert found.ok is (repr(got) == repr(expected))
    if not found.ok:
        assert found.worst_index == (1,)
        assert found.error == INF
        assert "non-finite positions disagree: at [1]" in str(found)


def test_non_finite_comes_before_the_budget():
    found = compare([9.0, NAN], np.array([1.0, 2.0]))
    assert found.worst_index == (1,)


def test_agreeing_non_finite_positions_leave_the_rest_judged():
    reference = np.array([NAN, -INF, 1.0])
    assert compare(reference, reference, reference).ok
    assert not compare([NAN, -INF, 1.1], reference, reference).ok


def test_without_lowprec_rounding_to_the_output_type_is_the_measure():
    reference = np.array([1.0 / 3, 100.1])
    assert compare(reference.astype(np.float16), reference).ok
    assert compare(reference.astype(ml_dtypes.bfloat16), reference).ok
    # bfloat16 in float16's place: eight bits where eleven were promised.
    assert not compare(reference.astype(ml_dtypes.bfloat16).astype(np.float16), reference).ok


def test_a_low_precision_result_that_excuses_everything_is_refused():
    with pytest.raises(ValueError, match=r"no measure: at \[1\] it is inf where the reference is 70000"):
        budget([1.0, 70000.0], [1.0, INF])
    with pytest.raises(ValueError, match="no measure"):
        budget([1.0], [NAN])


@pytest.mark.parametrize("shape", [(3,), (2, 3), (3, 1), (1, 3, 1)])
def test_nothing_is_broadcast(shape):
    with pytest.raises(ValueError, match="must be equal"):
        compare(np.zeros(shape), np.zeros((1, 3)))
    with pytest.raises(ValueError, match="must be equal"):
        compare(np.zeros((1, 3)), np.zeros((1, 3)), np.zeros(shape))


@pytest.mark.parametrize("dtype", [np.uint16, np.uint8, np.int64, np.bool_, np.complex64])
def test_raw_bits_are_refused(dtype):
    with pytest.raises(TypeError, match="out has dtype"):
        compare(np.zeros(3, dtype), np.zeros(3))


def test_empty_and_scalar():
    assert compare(np.zeros((0, 4), np.float32), np.zeros((0, 4))).ok
    assert compare(np.float32(1), 1.0).worst_index == ()
    assert not compare(np.float32(2), 1.0).ok


def test_assert_close_names_place_values_and_budget():
    out = np.zeros((2, 3))
    out[1, 2] = 0.5
    with pytest.raises(
        AssertionError, match=r"kernel x: error 0\.5 above the budget 0: at \[1, 2\] got 0\.5, expected 0"
    ):
        assert_close(out, np.zeros((2, 3)), what="kernel x")
    assert assert_close(np.zeros(3), np.zeros(3)).error == 0
