"""Codes that are multiplied where they lie: against float64 of what they stand for, by every way of converting."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from flashnumba.compare import assert_close, compare
from flashnumba.machine.emulator import Fault
from flashnumba.machine.launcher import launch
from flashnumba.stages.flash_mla import cache, codec, combine, mma, reference
from flashnumba.stages.flash_mla.attend_codes import CODE_FAULTS
from flashnumba.stages.flash_mla.schedule import schedule

TILES = mma.tiles_for(16, "90a", True)
SCALE = 192**-0.5
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def problem(fmt, dtype, lengths, heads, parts, *, spread=0, seed=0):
    """Arguments by name, pages in any order, NaN codes behind each request's tokens; scales differ by 2^spread."""
    rng = np.random.default_rng(seed)
    most = max(1, max(-(-n // codec.PAGE) for n in lengths))
    table = rng.permutation(len(lengths) * most + 3)[: len(lengths) * most].reshape(-1, most).astype(np.int32)
    rows = rng.standard_normal((table.size + 3, codec.PAGE, 576))
    rows *= np.exp2(rng.integers(-spread, spread + 1, rows.shape[:2] + (1,)))
    tokens = codec.quantize(rows.astype(dtype), fmt)
    for b, n in enumerate(lengths):
        for i in range(most):
            tokens[table[b, i], max(0, min(codec.PAGE, n - codec.PAGE * i)) :] = 0xFF
    lengths, planned = np.array(lengths, np.int32), schedule(np.array(lengths), parts)
    splits, batch = int(planned.num_splits[-1]), len(lengths)

    def empty(*shape, dtype=np.float32):
        return np.full(shape, np.nan, dtype)

    return {
        "q": rng.standard_normal((batch, 1, heads, 576)).astype(dtype), "cache": tokens, "block_table": table,
        "lengths": lengths, "parts": planned.parts, "num_splits": planned.num_splits,
        "acc_parts": empty(splits, heads, 512), "m_parts": empty(splits, heads), "l_parts": empty(splits, heads),
        "o": empty(batch, 1, heads, 512, dtype=dtype), "lse": empty(batch, heads, 1), "scale": np.float32(SCALE),
        "causal": np.int32(0),
    }  # fmt: skip


def bits(x):
    return x.view(np.uint16) if getattr(x, "dtype", None) == BFLOAT16 else x


def run(given, fmt, machine, arch="90", broken=""):
    element = "bfloat16" if given["q"].dtype == BFLOAT16 else "float16"
    kernel = mma.make_decode(TILES, element, arch, code=cache.CODES[fmt], broken=broken)
    args = tuple(bits(given[name]) for name in mma.DECODE_ARGS)
    launch(kernel, len(given["parts"]), TILES.threads, args, shared=TILES.shared, machine=machine)
    merge = combine.make_combine(element, 512, arch)
    args = tuple(bits(given[name]) for name in combine.COMBINE_ARGS)
    launch(merge, given["q"].shape[0] * given["q"].shape[2], merge.threads, args, machine=machine)


def exact(given, fmt):
    """((o, lse) in float64, (o, lse) with rows rounded to q's type)."""
    values = codec.dequantize(given["cache"], fmt, rotated=given["q"].dtype)
    about = (given["block_table"], given["lengths"], SCALE)
    with np.errstate(invalid="ignore"):
        return (
            reference.paged(given["q"], values, *about),
            reference.rounded(given["q"], values.astype(given["q"].dtype), *about),
        )


@pytest.mark.parametrize(
    ("fmt", "dtype", "lengths", "heads", "parts", "arch"),
    [
        ("e4m3", BFLOAT16, [300, 0, 3], 16, 3, "90"),  # in parts, without tokens, less than a tile
        ("e5m2", BFLOAT16, [100], 7, 1, "90"),
        ("e4m3", np.dtype(np.float16), [33], 5, 1, "80"),  # converted in integers
    ],
    ids=["e4m3", "e5m2", "sm_80"],
)
def test_decode(machine, fmt, dtype, lengths, heads, parts, arch):
    given = problem(fmt, dtype, lengths, heads, parts)
    run(given, fmt, machine, arch)
    (o, lse), (o_low, lse_low) = exact(given, fmt)
    assert_close(given["o"], o, o_low)
    assert_close(given["lse"], lse, lse_low)


def test_scales_that_grow(machine):
    """From page to page, in two parts: units of P rise after O has something in the old ones. Q is as much smaller, or
    the largest tokens would be all of O."""
    given = problem("e4m3", BFLOAT16, [200], 16, 3, spread=3)
    for i, page in enumerate(given["block_table"][0]):
        given["cache"][page, :, 512:528].view(np.float32)[...] *= 4.0**i
    given["q"][..., :512] *= BFLOAT16.type(2.0**-9)
    assert given["num_splits"].tolist() == [0, 2]
    run(given, "e4m3", machine)
    (o, lse), (o_low, lse_low) = exact(given, "e4m3")
    assert_close(given["o"], o, o_low)
    assert_close(given["lse"], lse, lse_low)


@pytest.mark.parametrize("broken", CODE_FAULTS)
def test_planted_faults(broken):
    """A missing barrier is a race, whatever came of it; the rest is wrong."""
    given = problem("e4m3", BFLOAT16, [70], 2, 1)
    try:
        run(given, "e4m3", "emulator", broken=broken)
        (o, _), (o_low, _) = exact(given, "e4m3")
        said = "" if compare(given["o"], o, o_low).ok else "wrong"
    except Fault as fault:
        said = type(fault).__name__
    assert said == {"wait": "ReadInFlight", "barrier": "Race", "exchange": "Race"}.get(broken, "wrong")


def test_tiles():
    assert TILES.direct and 3 * (TILES.shared + 1024) <= 228 * 1024, "three blocks a multiprocessor"
    assert mma.tiles_for(32, "90a", True).direct and not mma.tiles_for(64, "90a", True).direct
