"""Conversions on every code there is, and the approximations' special cases."""

from __future__ import annotations

import math
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from flashnumba.machine import instructions as ptx
from flashnumba.machine.instructions.formats import FORMS, decode, encode

F16 = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
FP8 = np.arange(256, dtype=np.uint8)


def same(got: np.ndarray, want: np.ndarray) -> None:
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got.view(f"u{got.itemsize}"), want.view(f"u{want.itemsize}"))


def spread(count: int) -> np.ndarray:
    """float32 of every exponent, with many near the halves of 16-bit formats."""
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 1 << 32, count, dtype=np.uint32)
    bits[::3] &= np.uint32(0xFFFF8000)
    bits[1::3] &= np.uint32(0xFFFFE000)
    bits[2::7] = bits[2::7] & np.uint32(0xFFFF0000) | np.uint32(0x8001)
    return bits.view(np.float32)


def test_float16_and_bfloat16_on_all_codes() -> None:
    with np.errstate(invalid="ignore"):
        expected = F16.view(np.float16).astype(np.float32)
    expected.view(np.uint32)[np.isnan(expected)] = 0x7FFFFFFF
    same(ptx.f16_to_f32.emulate(F16), expected)
    pairs = F16.astype(np.uint32) << 16 | np.uint32(0x1234)
    same(ptx.f16x2_high.emulate(pairs), expected)
    same(ptx.f16x2_low.emulate(F16 | np.uint32(0xABCD0000)), expected)
    as_bf16 = (F16.astype(np.uint32) << 16).view(np.float32)
    same(ptx.bf16_to_f32.emulate(F16), as_bf16)
    same(ptx.bf16x2_high.emulate(pairs), as_bf16)
    same(ptx.bf16x2_low.emulate(F16 | np.uint32(0xABCD0000)), as_bf16)
    # There and back: NaNs all become the one NaN.
    same(ptx.f32_to_f16.emulate(expected), np.where(np.isnan(expected), np.uint16(0x7FFF), F16))
    same(ptx.f32_to_bf16.emulate(as_bf16), np.where(np.isnan(as_bf16), np.uint16(0x7FFF), F16))


def test_rounding_to_bfloat16_by_integers() -> None:
    x = spread(200_000)
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    same(ptx.f32_to_bf16.emulate(x), np.where(np.isnan(x), np.uint16(0x7FFF), rounded))


def test_rounding_to_float16_by_neighbours() -> None:
    """The result is no further away than either neighbour, and even in a tie."""
    x = spread(300_000)
    x = x[np.isfinite(x) & (np.abs(x) < 65519)]
    codes = ptx.f32_to_f16.emulate(x)
    value = codes.view(np.float16).astype(np.float64)
    for step in (-1, 1):
        other = (codes.astype(np.int32) + step & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float64)
        near, far = np.abs(value - x), np.abs(other - x)
        comparable = np.isfinite(other)
        assert (near <= far)[comparable].all()
        tied = (near == far) & comparable & (value != other)
        assert (codes[tied] % 2 == 0).all() and tied.sum() > 100
    assert [int(ptx.f32_to_f16.emulate(np.float32(v))) for v in (65519.9, 65520, -1e9)] == [0x7BFF, 0x7C00, 0xFC00]


@pytest.mark.parametrize(
    ("form", "dtype", "largest"), [("e4m3", ml_dtypes.float8_e4m3fn, 448), ("e5m2", ml_dtypes.float8_e5m2, 57344)]
)
def test_fp8(form: str, dtype: type, largest: float) -> None:
    pack, widen = getattr(ptx, f"pack_{form}x2"), getattr(ptx, f"{form}x2_to_f16x2")
    narrow = getattr(ptx, f"f16x2_to_{form}x2")
    values = FP8.view(dtype).astype(np.float32)
    halves = values.astype(np.float16).view(np.uint16)
    halves[np.isnan(values)] = 0x7FFF
    other = FP8[::-1].copy()
    got = widen.emulate(FP8.astype(np.uint16) | other.astype(np.uint16) << 8)
    same(got, halves.astype(np.uint32) | halves[::-1].astype(np.uint32) << 16)
    # All 65536 float16 codes, against ml_dtypes with saturation by hand.
    with np.errstate(invalid="ignore"):
        x = F16.view(np.float16).astype(np.float32)
        expected = np.clip(x, -largest, largest).astype(dtype).view(np.uint8)
    expected[np.isnan(x)] = 0x7F
    zero = np.zeros_like(F16, np.uint32)
    same(narrow.emulate(F16 | zero << 16), expected.astype(np.uint16))
    same(narrow.emulate(zero | F16.astype(np.uint32) << 16), expected.astype(np.uint16) << 8)
    same(pack.emulate(x, np.zeros_like(x)), expected.astype(np.uint16))
    pack4 = getattr(ptx, f"pack_{form}x4")
    four = pack4.emulate(x, x[::-1], np.roll(x, 7), np.roll(x, 9))
    parts = [expected, expected[::-1], np.roll(expected, 7), np.roll(expected, 9)]
    same(four, sum((p.astype(np.uint32) << np.uint32(8 * i) for i, p in enumerate(parts)), np.zeros(1, np.uint32)))
    for part, shift in (("low", 0), ("high", 16)):
        halved = getattr(ptx, f"{form}x4_{part}_to_f16x2").emulate(four)
        same(halved, widen.emulate((four >> np.uint32(shift)).astype(np.uint16)))


def test_e5m2_is_the_upper_byte_of_float16() -> None:
    wide = ptx.e5m2x2_to_f16x2.emulate(FP8.astype(np.uint16))
    ordinary = (FP8 & 0x7F) <= 0x7C
    same(wide[ordinary], FP8[ordinary].astype(np.uint32) << 8)


def test_pairs_lie_low_half_first() -> None:
    assert int(ptx.pack_f16x2.emulate(np.float32(1), np.float32(-2))) == 0xC0003C00
    assert int(ptx.pack_bf16x2.emulate(np.float32(1), np.float32(-2))) == 0xC0003F80
    assert int(ptx.pack_e4m3x2.emulate(np.float32(1), np.float32(-2))) == 0xC038
    assert int(ptx.pack_e5m2x2.emulate(np.float32(1), np.float32(-2))) == 0xC03C


def test_bit_casts() -> None:
    x = spread(1000)
    same(ptx.f32_to_bits.emulate(x), x.view(np.uint32))
    same(ptx.bits_to_f32.emulate(x.view(np.uint32)), x)


def test_encode_and_decode_agree_with_their_types() -> None:
    for form, dtype in FORMS.items():
        codes = FP8 if dtype.itemsize == 1 else F16
        values = decode(codes[:, None], form)[:, 0]
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(values, codes.view(dtype).astype(np.float32))
        finite = np.isfinite(values)
        same(encode(values[finite], form), codes[finite])


INF, NAN = math.inf, math.nan
APPROXIMATED = [
    ("ex2_approx", lambda x: 2.0**x, [(-INF, 0.0), (INF, INF), (1e-41, 1.0), (-126.5, 0.0), (128.0, INF), (-0.0, 1.0)]),
    ("lg2_approx", math.log2, [(0.0, -INF), (-0.0, -INF), (1e-41, -INF), (INF, INF), (-1.0, NAN), (1.0, 0.0)]),
    ("rcp_approx", lambda x: 1 / x, [(0.0, INF), (-1e-41, -INF), (INF, 0.0), (-INF, -0.0), (3e38, 0.0)]),
    ("sqrt_approx", math.sqrt, [(0.0, 0.0), (-0.0, -0.0), (-1e-41, -0.0), (INF, INF), (-1.0, NAN)]),
    ("rsqrt_approx", lambda x: 1 / math.sqrt(x), [(0.0, INF), (-0.0, -INF), (INF, 0.0), (-1.0, NAN)]),
]


@pytest.mark.parametrize(("name", "exact", "special"), APPROXIMATED)
def test_approximations(name: str, exact: Callable[[float], float], special: list[tuple[float, float]]) -> None:
    emulate = getattr(ptx, name).emulate
    for x, want in [*special, (NAN, NAN)]:
        got = emulate(np.float32(x))
        assert isinstance(got, np.float32)
        assert got.view(np.uint32) == (0x7FFFFFFF if math.isnan(want) else np.float32(want).view(np.uint32)), (x, got)
    x = np.exp2(np.random.default_rng(4).uniform(-6, 6, 500)).astype(np.float32)
    want = np.array([exact(float(v)) for v in x])
    assert (np.abs(emulate(x) - want) <= 0.5001 * np.spacing(np.abs(want).astype(np.float32))).all()
    assert name in ptx.APPROXIMATIONS and "ulp" in getattr(ptx, name).doc


def test_one_thread_and_many_agree() -> None:
    """Single values take a shorter way than arrays, to the same bits."""
    x = np.concatenate([spread(3000), np.float32([0, -0.0, 65519.99, 65520, -65520, 1e-41, -1e-41, INF, -INF, NAN])])
    for form in FORMS:
        one = np.array([encode(v, form) for v in x])
        same(one, encode(x, form))
    for name, _, _ in APPROXIMATED:
        emulate = getattr(ptx, name).emulate
        same(np.array([emulate(v) for v in x]), emulate(x))
    codes = F16[::23]
    for name in ("f16_to_f32", "bf16_to_f32", "e4m3x2_to_f16x2"):
        emulate = getattr(ptx, name).emulate
        same(np.array([emulate(c) for c in codes]), emulate(codes))
