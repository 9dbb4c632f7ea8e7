"""The codec against ml_dtypes, code by code and cast by cast, and against numbers that are easily seen to be right.

``FLASHNUMBA_CASTS`` is the number of random casts, 10^6 by default; 10^7 take a few seconds.
"""

from __future__ import annotations

import os

import ml_dtypes
import numpy as np
import pytest

from flashnumba import fp8
from flashnumba.stages.fp8 import codec

JUDGE = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
CASTS = int(float(os.environ.get("FLASHNUMBA_CASTS", "1e6")))
CODES = np.arange(256, dtype=np.uint8)


def judged(x, fmt):
    """ml_dtypes' codes, and which of them are NaN."""
    with np.errstate(all="ignore"):
        codes = x.astype(JUDGE[fmt])
    return codes.view(np.uint8), np.isnan(codes.astype(np.float32))


def floats(kind, count):
    """float32 of any bits, or of the sizes that 8 bits are used for, with what lies between two codes among them."""
    rng = np.random.default_rng(count)
    if kind == "any bits":
        return rng.integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32)
    x = rng.standard_normal(count).astype(np.float32) * np.exp2(rng.integers(-18, 17, count)).astype(np.float32)
    x[::4].view(np.uint32)[:] &= np.uint32(0xFFF00000 << 1 & 0xFFFFFFFF | 0x80000)  # some are ties
    return x


@pytest.mark.parametrize("fmt", JUDGE)
def test_all_codes(fmt):
    ours, theirs = fp8.decode(CODES, fmt), CODES.view(JUDGE[fmt]).astype(np.float32)
    np.testing.assert_array_equal(ours, theirs)
    numbers = ~np.isnan(ours)
    np.testing.assert_array_equal(np.signbit(ours[numbers]), np.signbit(theirs[numbers]))
    for saturate in (False, True):
        finite = np.isfinite(ours) if saturate else numbers
        np.testing.assert_array_equal(fp8.encode(ours[finite], fmt, saturate), CODES[finite])
    assert numbers.sum() == {"e4m3": 254, "e5m2": 250}[fmt]


@pytest.mark.parametrize("kind", ["any bits", "usual"])
@pytest.mark.parametrize("fmt", JUDGE)
def test_random_casts_rounded_once(fmt, kind):
    x = floats(kind, CASTS)
    codes, nan = judged(x, fmt)
    ours = fp8.encode(x, fmt, saturate=False)
    np.testing.assert_array_equal(ours[~nan], codes[~nan])
    assert (ours[nan] & 0x7F == codec.NAN).all()
    largest = codec.FORMATS[fmt].largest
    np.testing.assert_array_equal(
        fp8.encode(x, fmt)[~np.isnan(x)], judged(np.clip(x, -largest, largest), fmt)[0][~np.isnan(x)]
    )


@pytest.mark.parametrize("fmt", JUDGE)
def test_random_casts_rounded_twice(fmt):
    """By float16: what a GPU does that has no conversion from float32. It is another path, and gives other codes."""
    x = floats("usual", CASTS)
    with np.errstate(over="ignore"):
        codes, nan = judged(x.astype(np.float16), fmt)
    twice = codec.encode_by_float16(x, fmt, saturate=False)
    np.testing.assert_array_equal(twice[~nan], codes[~nan])
    differ = np.mean(twice != fp8.encode(x, fmt, saturate=False))
    assert 1e-4 < differ < 0.2


def test_one_number_that_two_roundings_change():
    x = np.float32(1 + 2**-4 + 2**-13)
    assert fp8.decode(fp8.encode(x, "e4m3"), "e4m3") == 1.125
    assert fp8.decode(codec.encode_by_float16(x, "e4m3"), "e4m3") == 1


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("fmt", JUDGE)
def test_every_16_bit_number(fmt, dtype):
    x = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(dtype)
    codes, nan = judged(x, fmt)
    np.testing.assert_array_equal(fp8.encode(x, fmt, saturate=False)[~nan], codes[~nan])


@pytest.mark.parametrize(
    ("fmt", "x", "saturated", "not_saturated"),
    [
        ("e4m3", 448, 448, 448), ("e4m3", 464, 448, 448), ("e4m3", 464.1, 448, np.nan), ("e4m3", np.inf, 448, np.nan),
        ("e4m3", -1e30, -448, np.nan), ("e4m3", 2.0**-10, 0, 0), ("e4m3", 1.01 * 2.0**-10, 2.0**-9, 2.0**-9),
        ("e4m3", 3 * 2.0**-10, 2.0**-8, 2.0**-8), ("e4m3", 17, 16, 16), ("e4m3", 19, 20, 20), ("e4m3", 1e-45, 0, 0),
        ("e4m3", 2.0**-6 - 2.0**-20, 2.0**-6, 2.0**-6), ("e5m2", 61439, 57344, 57344), ("e5m2", 61440, 57344, np.inf),
        ("e5m2", -np.inf, -57344, -np.inf), ("e5m2", 2.0**-17, 0, 0), ("e5m2", 9, 8, 8), ("e5m2", 11, 12, 12),
    ],
)  # fmt: skip
def test_ties_and_ends(fmt, x, saturated, not_saturated):
    for saturate, expected in ((True, saturated), (False, not_saturated)):
        np.testing.assert_array_equal(fp8.decode(fp8.encode(np.float32(x), fmt, saturate), fmt), np.float32(expected))


@pytest.mark.parametrize("fmt", JUDGE)
def test_zeros_and_numbers_that_are_none(fmt):
    x = np.array([0.0, -0.0, np.nan, -np.nan], np.float32)
    x = np.append(x, np.array([0x7F800001, 0xFFC00000], np.uint32).view(np.float32))
    for saturate in (False, True):
        assert fp8.encode(x, fmt, saturate).tolist() == [0, 0x80] + 4 * [0x7F]


def test_any_shape_and_stride():
    x = np.arange(48, dtype=np.float32).reshape(4, 6, 2)[:, ::-2]
    np.testing.assert_array_equal(fp8.encode(x, "e5m2"), judged(x, "e5m2")[0])
    assert fp8.encode(np.zeros((0, 3), np.float32), "e4m3").shape == (0, 3)
    assert fp8.encode(np.float32(1), "e4m3").shape == ()


def test_bad_arguments_are_named():
    with pytest.raises(TypeError, match="x has elements of type float64; it must be of float16, bfloat16, float32"):
        fp8.encode(np.zeros(3), "e4m3")
    with pytest.raises(ValueError, match="fmt is 'e4m3fn'; it must be 'e4m3' or 'e5m2'"):
        fp8.encode(np.zeros(3, np.float32), "e4m3fn")
    with pytest.raises(TypeError, match="saturate is 'no'; it must be True or False"):
        fp8.encode(np.zeros(3, np.float32), "e4m3", "no")
    with pytest.raises(TypeError, match="x is of type list; it must be a NumPy array"):
        fp8.encode([[1], [1, 2]], "e4m3")
    with pytest.raises(TypeError, match="codes have elements of type int8; they must be uint8"):
        fp8.decode(np.zeros(3, np.int8), "e5m2")
