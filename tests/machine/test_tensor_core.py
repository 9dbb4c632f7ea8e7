"""The truncated fused dot product against a model in exact fractions, written from its definition."""

from __future__ import annotations

import math
import time
from fractions import Fraction

import numpy as np
import pytest

from flashnumba.machine.emulator.tensor_core import FORMATS, RULES, Rule, dot, fused_dot, rule_for, settings
from flashnumba.machine.instructions.formats import decode, encode

NAN = 0x7FFFFFFF


def exponent(x: float, lowest: int) -> int:
    return max(math.frexp(x)[1] - 1, lowest)


def toward_zero(x: Fraction) -> int:
    return abs(x.numerator) // x.denominator * (1 if x >= 0 else -1)


def float32_toward_zero(x: Fraction, bits: int = 23) -> float:
    if x == 0:
        return 0.0
    e = max(math.floor(math.log2(abs(x))) - 1, -127)
    while abs(x) >= Fraction(2) ** (e + 1):
        e += 1
    unit = Fraction(2) ** (max(e, -126) - bits)
    cut = toward_zero(x / unit) * unit
    return math.copysign(math.inf, x) if abs(cut) >= 2**128 else math.copysign(float(cut), x)


def one_step(a: list[float], b: list[float], c: float, rule: Rule, lowest: tuple[int, int]) -> float:
    terms, tops = [Fraction(c)], [exponent(c, -126) if c else -126]
    for x, y in zip(a, b, strict=True):
        if x and y:
            terms.append(Fraction(x) * Fraction(y))
            tops.append(exponent(x, lowest[0]) + exponent(y, lowest[1]))
    unit = Fraction(2) ** (max(tops) - rule.fraction_bits)
    return float32_toward_zero(sum(toward_zero(t / unit) for t in terms) * unit, rule.result_bits)


def model(a: np.ndarray, b: np.ndarray, c: np.ndarray, rule: Rule, lowest: tuple[int, int]) -> np.ndarray:
    out = np.empty(c.shape, np.float32)
    for i, j in np.ndindex(c.shape):
        value = float(c[i, j])
        for k in range(0, a.shape[1], rule.chunk):
            at = slice(k, k + rule.chunk)
            value = one_step(a[i, at].tolist(), b[at, j].tolist(), value, rule, lowest)
        out[i, j] = value
    return out


def operands(form: str, rng: np.random.Generator, spread: float, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    def values(shape: tuple[int, int]) -> np.ndarray:
        x = rng.normal(size=shape) * np.exp2(rng.integers(-spread, spread + 1, shape))
        x[rng.random(shape) < 0.1] = 0
        return decode(encode(x.astype(np.float32), form)[..., None], form)[..., 0]

    c = (rng.normal(size=(5, 3)) * np.exp2(rng.integers(-2 * spread, 2 * spread + 1, (5, 3)))).astype(np.float32)
    return values((5, k)), values((k, 3)), c


@pytest.mark.parametrize("spread", [0, 3, 9, 14])
@pytest.mark.parametrize(("unit", "arch", "form"), [(u, a, f) for (u, a), forms in RULES.items() for f in forms])
def test_every_rule_is_the_exact_model(unit: str, arch: int, form: str, spread: int) -> None:
    rule, rng = RULES[unit, arch][form], np.random.default_rng(spread)
    for operand in ("e4m3", "e5m2") if form == "fp8" else (form,):
        a, b, c = operands(operand, rng, spread, 40)
        lowest = (FORMATS[operand],) * 2
        got = fused_dot(a, b, c, fraction_bits=rule.fraction_bits, chunk=rule.chunk, result_bits=rule.result_bits,
                        lowest=lowest)  # fmt: skip
        np.testing.assert_array_equal(got.view(np.uint32), model(a, b, c, rule, lowest).view(np.uint32))


def test_subnormal_operands_and_results() -> None:
    rng, rule = np.random.default_rng(5), Rule(25, 16)
    tiny = decode(rng.integers(0, 128, (6, 16), dtype=np.uint16)[..., None], "bf16")[..., 0]  # bfloat16 subnormals
    b = decode(encode(rng.normal(size=(16, 4)).astype(np.float32), "bf16")[..., None], "bf16")[..., 0]
    c = (rng.integers(-3, 4, (6, 4)) * 2.0**-149).astype(np.float32)
    got = fused_dot(tiny, b, c, fraction_bits=25, chunk=16, lowest=(-126, -126))
    assert ((np.abs(got) < 2.0**-126) & (got != 0)).any()
    np.testing.assert_array_equal(got, model(tiny, b, c, rule, (-126, -126)))
    half = decode(rng.integers(0, 1024, (6, 16), dtype=np.uint16)[..., None], "f16")[..., 0]  # float16 subnormals
    got = fused_dot(half, b, c, fraction_bits=25, chunk=16, lowest=(-14, -126))
    np.testing.assert_array_equal(got, model(half, b, c, rule, (-14, -126)))


def test_truncation_is_seen_and_differs_from_rounding() -> None:
    one = np.ones((1, 1), np.float32)
    small = np.full((1, 1), 2.0**-13, np.float32)
    # Products of 2^-26 lie one bit below the 25 kept beside 1: each is lost, and three of them are.
    assert fused_dot(np.tile(small, 3), np.tile(small, (3, 1)), one, fraction_bits=25, chunk=16)[0, 0] == 1
    # 2^-25 is kept while adding: eight of them reach 2^-22.
    eight = np.full((1, 8), 2.0**-12, np.float32), np.full((8, 1), 2.0**-13, np.float32)
    assert fused_dot(*eight, one, fraction_bits=25, chunk=16)[0, 0] == 1 + 2.0**-22
    assert fused_dot(*eight, one, fraction_bits=24, chunk=16)[0, 0] == 1
    # Two steps: each ends with a cut to float32, and 2^-23 - 2^-25 is cut away twice.
    two = np.full((1, 6), 2.0**-12, np.float32), np.full((6, 1), 2.0**-13, np.float32)
    assert fused_dot(*two, one, fraction_bits=25, chunk=3)[0, 0] == 1
    assert fused_dot(*two, one, fraction_bits=25, chunk=6)[0, 0] == 1 + 2.0**-23


def test_infinity_nan_zero_and_overflow() -> None:
    inf, nan = np.float32(np.inf), np.float32(np.nan)

    def bits(a: list[float], b: list[float], c: float) -> int:
        value = dot(np.float32([a]), np.float32([b]).T, np.float32([[c]]), "bf16", arch="90a")
        return int(value.view(np.uint32)[0, 0])

    assert bits([inf, 1], [2, 3], 4) == 0x7F800000
    assert bits([inf, inf], [2, -2], 0) == NAN
    assert bits([inf, 0], [0, 1], 0) == NAN
    assert bits([1, 0], [1, 1], nan) == NAN
    assert bits([1, 1], [1, 1], -inf) == 0xFF800000
    assert bits([0, 0], [1, 1], 0.0) == bits([-0.0, 0], [1, -1], -0.0) == 0  # no negative zero
    assert bits([2.0**127, 0], [2, 0], 0) == 0x7F800000
    assert bits([-(2.0**120), 0], [2.0**100, 0], 0) == 0xFF800000
    largest = float(np.finfo(np.float32).max)
    assert bits([2.0**127, 2.0**127], [2.0**-40, 0], largest) == 0x7F7FFFFF  # cut, not rounded up to infinity


def test_fp8_in_hopper_mma_is_two_float16_steps_and_an_addition() -> None:
    rng = np.random.default_rng(7)
    a, b, c = operands("e4m3", rng, 5, 32)
    rule, low = Rule(25, 16), [k for k in range(32) if k % 4 < 2]
    order = low + [k for k in range(32) if k % 4 >= 2]
    product = model(a[:, order], b[order], np.zeros_like(c), rule, (-14, -14))
    np.testing.assert_array_equal(dot(a, b, c, "e4m3", arch="90a"), c + product)
    assert (dot(a, b, c, "e4m3", arch="90a") != dot(a, b, c, "e4m3", unit="wgmma", arch="90a")).any()


def test_the_architecture_chooses_the_rule() -> None:
    assert rule_for("mma", "f16", "75") == Rule(24, 8)
    assert rule_for("mma", "bf16", "86") == Rule(24, 8)
    assert rule_for("mma", "e4m3", "89") == Rule(13, 16, 13)
    assert rule_for("wgmma", "e5m2", "90a") == Rule(13, 32, 13)
    assert rule_for("mma", "f16", "100a") == rule_for("mma", "f16", "90") == Rule(25, 16)
    for unit, form, arch in (
        ("mma", "bf16", "75"),
        ("mma", "e4m3", "80"),
        ("wgmma", "f16", "80"),
        ("wgmma", "f16", "100a"),
    ):
        with pytest.raises(ValueError, match=f"{unit} with {form} operands does not exist on sm_{arch}"):
            rule_for(unit, form, arch)
    with settings.using(arch="80"):
        assert rule_for("mma", "f16") == Rule(24, 8)
    assert rule_for("mma", "f16") == Rule(25, 16)


def test_leading_axes_and_the_plain_product() -> None:
    rng = np.random.default_rng(9)
    a, b, c = (
        rng.normal(size=s).astype(np.float16).astype(np.float32) for s in ((2, 3, 16, 32), (2, 3, 32, 8), (2, 3, 16, 8))
    )
    whole = dot(a, b, c, "f16")
    for i, j in np.ndindex(2, 3):
        np.testing.assert_array_equal(whole[i, j], dot(a[i, j], b[i, j], c[i, j], "f16"))
    with settings.using(exact=False):
        plain = dot(a, b, c, "f16")
    assert (plain != whole).any()
    np.testing.assert_allclose(plain, whole, rtol=0, atol=2e-5)
    assert settings.exact


def test_it_is_fast_enough_to_emulate_with() -> None:
    """An instruction of mma.sync in at most 60 us and one of wgmma in 2 ms, with room for a busy machine."""
    rng = np.random.default_rng(1)
    for m, n, allowed in ((16, 8, 60e-6), (64, 128, 2e-3)):
        a, b = (rng.normal(size=s).astype(np.float16).astype(np.float32) for s in ((m, 16), (16, n)))
        c, best = np.zeros((m, n), np.float32), np.inf
        for _ in range(200):
            start = time.perf_counter()
            dot(a, b, c, "f16")
            best = min(best, time.perf_counter() - start)
        assert best < 3 * allowed
