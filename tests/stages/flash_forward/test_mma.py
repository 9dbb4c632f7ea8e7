"""The tensor-core kernel: every convention, every tail, every layout; and each planted fault is caught."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from flashnumba.stages.flash_forward import mma
from flashnumba.stages.heads import Launch, Plan, Shape
from flashnumba.tiles import forward
from flashnumba.tiles.forward import tier, tiles_for
from flashnumba.tiles.sizes import AttentionTiles
from tests.stages.faults import seeds_for
from tests.stages.flash_forward.attention_cases import (
    LAYOUTS,
    SIZES,
    assert_attention,
    caught,
    hard_case,
    hard_cases,
    laid_out,
    normal,
    one_odd_row,
    run,
)

HALVES = (np.float16, ml_dtypes.bfloat16)
SMALL = {
    "one slot": AttentionTiles(32, 32, 32, warps=2),
    "two slots": AttentionTiles(32, 32, 32, warps=2, slots=2, lazy=True),
    "two fragments, Q held": AttentionTiles(32, 64, 32, warps=2, q_held=1),
}
"""Small tiles, so that small problems have several."""


def with_tiles(tiles: AttentionTiles, arch: str = "", broken: str = "", vector: int = 0):
    """A planner for given tiles; the kernel is that of the shape's architecture unless ``arch`` says otherwise."""

    def plan(shape: Shape) -> Plan:
        kernel = mma.make_mma(
            tiles,
            shape.element,
            vector or shape.vector,
            arch or tier(shape.arch),
            even=shape.d == tiles.d,
            broken=broken,
        )
        blocks = -(-shape.m // tiles.bm) * shape.heads * shape.batch
        return Plan((Launch(kernel, blocks, tiles.threads, tiles.shared),))

    return plan


@pytest.mark.parametrize("case", hard_cases(np.float16), ids=str)
def test_hard_cases(machine, case):
    assert_attention(run(with_tiles(SMALL["two slots"]), case, machine), case)


@pytest.mark.parametrize("tiles", ["one slot", "two fragments, Q held"])
@pytest.mark.parametrize("case", hard_cases(np.float16)[3::6], ids=str)
def test_hard_cases_with_other_tiles(machine, tiles, case):
    assert_attention(run(with_tiles(SMALL[tiles]), case, machine), case)


@pytest.mark.parametrize("case", hard_cases(ml_dtypes.bfloat16)[::5], ids=str)
def test_hard_cases_in_bfloat16(machine, case):
    assert_attention(run(with_tiles(SMALL["two slots"]), case, machine), case)


@pytest.mark.parametrize("m", SIZES)
@pytest.mark.parametrize("further", [1, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_tails(machine, m, further, causal):
    n = SIZES[(SIZES.index(m) + further) % len(SIZES)]
    case = normal(m, n, 32, np.float16, heads=2, kv_heads=1, causal=causal)
    assert_attention(run(with_tiles(SMALL["one slot" if m % 2 else "two slots"]), case, machine), case)


@pytest.mark.parametrize("d", [1, 2, 7, 33, 36, 40, 72, 100, 128, 160, 255, 256])
def test_head_dimensions(machine, d):
    case = normal(21, 40, d, HALVES[d % 2], heads=2, kv_heads=1, causal=True)
    tiles = AttentionTiles(-(-d // 32) * 32, 32, 32, warps=2, slots=1 + d % 2)
    assert_attention(run(with_tiles(tiles), case, machine), case)


@pytest.mark.parametrize("case", list(laid_out(normal(5, 21, 16, np.float16, batch=2, heads=2, causal=True))), ids=str)
def test_layouts(machine, case):
    assert_attention(run(with_tiles(SMALL["one slot"]), case, machine), case)


@pytest.mark.parametrize("layout", ["heads inside rows", "longer rows"])
def test_layouts_that_are_read_16_bytes_at_a_time(machine, layout):
    case = normal(19, 37, 32, np.float16, batch=2, heads=2).with_arrays(layout, LAYOUTS[layout])
    assert case.shape.vector == 16
    assert_attention(run(with_tiles(SMALL["two slots"]), case, machine), case)


@pytest.mark.parametrize("tiles", ["one slot", "two slots"])
@pytest.mark.parametrize("which", ["k", "v"])
def test_keys_and_values_at_distances_of_their_own(machine, tiles, which):
    case = normal(5, 100, 32, np.float16).with_arrays("longer rows", LAYOUTS["longer rows"], which)
    assert_attention(run(with_tiles(SMALL[tiles]), case, machine), case)


@pytest.mark.parametrize("tiles", SMALL)
def test_a_step_that_only_the_last_row_of_a_block_sees(machine, tiles):
    for m in (40, 80):  # blocks of 32 rows, and of 64: key 32, or 64, is the first of a step
        case = normal(m, m + 1, 32, np.float16, causal=True)
        assert_attention(run(with_tiles(SMALL[tiles]), case, machine), case)


@pytest.mark.parametrize("n", [0, 1])
def test_a_single_row_out_of_rows_that_are_not_aligned(machine, n):
    """Rows that are not there are not read, but their addresses must be aligned too."""
    case = one_odd_row(n, 32)
    assert case.shape.vector == 2
    assert_attention(run(with_tiles(SMALL["two slots"]), case, machine), case)


@pytest.mark.parametrize("vector", [2, 4, 8, 16])
def test_narrow_copies_give_the_bits_of_wide_ones(machine, vector):
    case = normal(37, 50, 32, np.float16, causal=True)
    wide = run(with_tiles(SMALL["one slot"]), case, machine)
    narrow = run(with_tiles(SMALL["one slot"], vector=vector), case, machine)
    for a, b in zip(wide, narrow, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["normal", "causal", "negative scale", "two heads share one of k"])
def test_as_sm_75_computes(machine, name):
    case = hard_case(name, np.float16)
    assert_attention(run(with_tiles(SMALL["one slot"], arch="75"), case, machine, arch="75"), case)


@pytest.mark.parametrize("m, n", [(0, 5), (3, 0), (0, 0)])
def test_nothing(machine, m, n):
    case = normal(m, n, 32, np.float16)
    o, lse = run(with_tiles(SMALL["one slot"]), case, machine) if m else (case.expected[0], case.expected[1])
    assert (o == 0).all() and (lse == -np.inf).all()


@pytest.mark.parametrize("arch", ["75", "80", "86", "89", "90a", "100a", "120a"])
@pytest.mark.parametrize("d", [32, 64, 96, 128, 160, 192, 224, 256])
@pytest.mark.parametrize("vector", [16, 2])
def test_the_tiles_fit_every_architecture(arch, d, vector):
    tiles = tiles_for(d, arch, vector)
    most = {"75": 64, "80": 163, "86": 99, "89": 99, "90a": 227, "100a": 227, "120a": 99}[arch]
    assert tiles.shared <= most * 1024
    assert tiles.d >= d


def test_the_tiles_that_are_launched(machine):
    """Those of sm_90, on a size that takes several of each."""
    for d, m, n in ((64, 20, 130), (128, 130, 70), (256, 65, 70)):
        case = normal(m, n, d, np.float16, causal=True)
        assert_attention(run(mma.plan_mma, case, machine), case)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"d": 48}, "d is 48"),
        ({"d": 288}, "d is 288"),
        ({"bm": 48}, "bm is 48"),
        ({"bn": 24}, "bm and bn are 64 and 24"),
        ({"slots": 5}, "slots is 5"),
        ({"q_held": 9}, "q_held 9"),
        ({"d": 256, "bm": 128}, "take 320 registers"),
    ],
)
def test_tiles_that_do_not_fit_say_so(sizes, words):
    with pytest.raises(ValueError, match=words):
        AttentionTiles(**{"d": 64, "bm": 64, "bn": 64, "warps": 4, **sizes})


def test_a_schedule_of_three_slots_says_so():
    with pytest.raises(ValueError, match="slots is 3; this schedule has one or two"):
        mma.make_mma(AttentionTiles(32, 32, 32, warps=2, slots=3), "float16")


def test_what_tensor_cores_do_not_take():
    shape = Shape("float32", 1, 1, 1, 8, 8, 32)
    with pytest.raises(ValueError, match=r"q is float32.*flash_forward\.simt"):
        mma.plan_mma(shape)
    with pytest.raises(ValueError, match=r"q is bfloat16.*sm_75.*flash_forward\.simt"):
        mma.plan_mma(replace(shape, element="bfloat16", arch="75"))


def test_repeatable_to_the_bit(machine):
    case = normal(40, 70, 32, np.float16, heads=2, causal=True)
    first, *others = (run(with_tiles(SMALL["two slots"]), case, machine, seed=seed) for seed in range(3))
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(a, b)


FAULTS = {
    "barrier": ("Race",),
    "v_barrier": ("Race",),
    "wait": ("ReadInFlight",),
    "early_copy": ("Race",),
    "swizzle": ("wrong result",),
    "stride": ("OutOfBounds", "Misaligned", "wrong result"),
    "rescale": ("wrong result",),
    "tail": ("wrong result",),
    "causal": ("wrong result",),
    "sign": ("wrong result",),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("tiles", ["one slot", "two slots"])
def test_planted_faults(fault, tiles):
    if tiles == "two slots" and fault in ("v_barrier", "early_copy"):
        pytest.skip("this barrier is the one slot's")
    case = normal(45, 77, 32, np.float16, causal=fault == "causal", scale=-0.2 if fault == "sign" else 1.0)
    plan = with_tiles(SMALL[tiles], broken=fault)
    found = caught(lambda seed: run(plan, case, seed=seed), case, seeds_for(FAULTS[fault]))
    assert set(found) <= set(FAULTS[fault]), found


def test_every_fault_that_can_be_planted_is_tested():
    for fault in forward.FAULTS:
        assert fault in FAULTS


@pytest.mark.parametrize("name", ["mma", "split"])
def test_offsets_beyond_32_bits(name):
    """Batches lie 2^31 elements apart in memory that is mostly never touched."""
    small = normal(3, 20, 32, np.float16, batch=2)

    def far(x):
        wide = np.lib.stride_tricks.as_strided(
            np.zeros(2**31 + 4096, x.dtype)[8:], x.shape, (2**32, *x.strides[1:]), writeable=True
        )
        wide[...] = x
        return wide

    case = small.with_arrays("far apart", far)
    plan = with_tiles(SMALL["two slots"]) if name == "mma" else mma.PLANS["split"]
    assert_attention(run(plan, case), case)
