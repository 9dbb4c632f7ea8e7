"""The kernels that write the cache: bytes as the codec has them, in the right places and nowhere else."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from flashnumba.machine.compiler import why_not
from flashnumba.machine.launcher import launch
from flashnumba.stages.flash_mla import cache, codec
from flashnumba.stages.flash_mla.sizes import token_bytes

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def rows_of(seed=0, batch=3, new=2, d=576, dtype=BFLOAT16):
    """Rows whose blocks differ in size by much; one of zeros, one with a NaN, one of numbers below the least scale."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(batch, new, d)) * np.exp2(rng.integers(-6, 7, (batch, new, 1)))
    rows[0, 0, :128] = 0
    rows[1, 0, 5] = np.nan
    rows[2, 1, :128] *= 1e-6
    return rows.astype(dtype)


def pages_of(lengths, new, width, dtype):
    """(cache of pages in another order, table); what nobody writes to is 0x5A."""
    counts = [-(-(n + new) // codec.PAGE) for n in lengths]
    order = iter(np.random.default_rng(1).permutation(sum(counts) + 2))
    table = np.full((len(lengths), max(counts)), -1, np.int32)
    for b, count in enumerate(counts):
        table[b, :count] = [next(order) for _ in range(count)]
    made = np.empty((sum(counts) + 2, codec.PAGE, width), dtype)
    made.view(np.uint8)[...] = 0x5A
    return made, table


def bits(array):
    return array.view(np.uint16) if array.dtype == BFLOAT16 else array


def run(rows, made, table, lengths, machine, **options):
    kernel = cache.make_append("bfloat16" if rows.dtype == BFLOAT16 else "float16", arch="89", **options)
    count = rows.shape[0] * rows.shape[1]
    lengths = np.asarray(lengths, np.int32)
    launch(kernel, -(-count // cache.WARPS), kernel.threads, (bits(rows), bits(made), table, lengths), machine=machine)


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16)], ids=str)
def test_append_as_it_is(machine, dtype):
    rows, lengths = rows_of(dtype=dtype), [0, 63, 130]
    made, table = pages_of(lengths, 2, 576, dtype)
    expected = made.copy()
    codec.append(expected, table, lengths, rows)
    run(rows, made, table, lengths, machine)
    np.testing.assert_array_equal(made.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_append_in_8_bits(machine, fmt, power_of_two):
    rows, lengths = rows_of(), [0, 63, 130]
    made, table = pages_of(lengths, 2, token_bytes(), np.uint8)
    expected = made.copy()
    with np.errstate(invalid="ignore"):
        codec.append(expected, table, lengths, codec.quantize(rows, fmt, power_of_two=power_of_two))
    run(rows, made, table, lengths, machine, code=cache.CODES[fmt], power_of_two=power_of_two)
    np.testing.assert_array_equal(made, expected)


def test_real_size_and_without_instructions(machine):
    """512 + 64 numbers, 656 bytes; sm_80 converts in integers, to the same bytes."""
    rows = rows_of(2, 3, 5)[0]
    with np.errstate(invalid="ignore"):
        expected = codec.quantize(rows)
    assert expected.shape == (5, 656)
    for arch in ("80", "90a"):
        tokens = np.full((5, 656), 0x5A, np.uint8)
        cache.quantize(rows, tokens, code=cache.CODES["e4m3"], machine=machine, arch=arch)
        np.testing.assert_array_equal(tokens, expected)


def test_codec_keeps_what_it_says():
    """A code is off by at most half a step of its format; a power of two makes codes times scales exact in bfloat16."""
    rows = np.random.default_rng(3).normal(size=(4, 576)).astype(BFLOAT16)
    for fmt, bound in (("e4m3", 2.0**-4), ("e5m2", 2.0**-3)):
        tokens = codec.quantize(rows, fmt, power_of_two=True)
        back = codec.dequantize(tokens, fmt)
        np.testing.assert_array_equal(back, back.astype(BFLOAT16).astype(np.float64))
        np.testing.assert_array_equal(back[:, 512:], rows[:, 512:].astype(np.float64))
        exact = rows[:, :512].astype(np.float64)
        large = np.abs(exact) > 0.05
        assert np.max(np.abs(back[:, :512] - exact)[large] / np.abs(exact[large])) <= bound
        assert 2 * 576 / tokens.shape[1] > 1.75


@pytest.mark.parametrize("fault", cache.FAULTS)
def test_planted_faults(fault):
    rows, lengths = rows_of(), [0, 63, 130]
    made, table = pages_of(lengths, 2, token_bytes(), np.uint8)
    expected = made.copy()
    with np.errstate(invalid="ignore", divide="ignore"):
        codec.append(expected, table, lengths, codec.quantize(rows))
        run(rows, made, table, lengths, "emulator", code=cache.CODES["e4m3"], broken=fault)
    assert (made != expected).any()


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "the compiler is installed")
def test_compiled():
    from flashnumba.machine.gate import problems

    for case in cache.compile_cases():
        if "90a" in case.architectures:
            assert problems(case, "90a") == []
