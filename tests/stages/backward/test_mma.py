"""The kernels on tensor cores: every convention, every tail, every layout; and each planted fault is caught."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from flashnumba.stages.backward import mma, mma_dkdv, mma_dq, one_pass
from flashnumba.stages.backward.mma_tiles import Tiles, dkdv_tiles, dq_tiles, one_pass_tiles
from flashnumba.stages.backward.problem import Plan, Shape, rows_scratch
from flashnumba.stages.backward.rows import launch_rows
from tests.stages.backward.backward_cases import assert_gradients, caught, hard_cases, laid_out, made, normal, run
from tests.stages.flash_forward import attention_cases
from tests.stages.flash_forward.attention_cases import LAYOUTS, SIZES

HALVES = (np.float16, ml_dtypes.bfloat16)
ONE_SLOT = Tiles(32, 32, 32, warps=2, slots=1)
TWO_SLOTS = Tiles(32, 32, 32, warps=2, under=True)
BOTH = Tiles(32, 32, 32, warps=2, results=2)
BOTH_OF_ONE_SLOT = Tiles(32, 64, 32, warps=2, slots=1, results=2)
ONE_PASS = Tiles(32, 32, 32, warps=2, results=2, exchange=True)
SMALL = {
    "two slots": (TWO_SLOTS, BOTH),
    "one slot, two fragments": (Tiles(32, 64, 32, warps=2, slots=1), BOTH_OF_ONE_SLOT),
    "dK and dV apart": (ONE_SLOT, TWO_SLOTS),
}
"""Small tiles, so that small problems have several: of dQ, and of dK and dV."""


def with_tiles(of_rows: Tiles, of_keys: Tiles, arch="", broken="", broken_dq="", vector=0):
    """A planner for given tiles, which plants faults in one kernel or the other."""

    def plan(shape: Shape) -> Plan:
        shape = replace(shape, vector=vector or shape.vector)
        d = -(-shape.d // 32) * 32
        rows, keys = replace(of_rows, d=d), replace(of_keys, d=d)
        dq = mma.launch_dq(shape, rows, arch, broken_dq)
        return Plan(
            (launch_rows(shape, base2=True), dq, *mma.launch_dkdv(shape, keys, arch, broken)), rows_scratch(shape)
        )

    return plan


def in_one_pass(tiles: Tiles = ONE_PASS, arch="", broken=""):
    def plan(shape: Shape) -> Plan:
        return mma.plan_one_pass_with(shape, replace(tiles, d=-(-shape.d // 32) * 32), arch, broken)

    return plan


WAYS = {name: with_tiles(*tiles) for name, tiles in SMALL.items()} | {"one pass": in_one_pass()}


@pytest.mark.parametrize("case", hard_cases(np.float16), ids=str)
def test_hard_cases(machine, case):
    assert_gradients(run(WAYS["two slots"], case, machine), case)


@pytest.mark.parametrize("way", ["one slot, two fragments", "dK and dV apart"])
@pytest.mark.parametrize("case", hard_cases(np.float16)[1::4], ids=str)
def test_hard_cases_with_other_tiles(machine, way, case):
    assert_gradients(run(WAYS[way], case, machine), case)


@pytest.mark.parametrize("case", hard_cases(np.float16)[::2], ids=str)
def test_hard_cases_in_one_pass(machine, case):
    assert_gradients(run(WAYS["one pass"], case, machine), case)


@pytest.mark.parametrize("case", hard_cases(ml_dtypes.bfloat16)[::5], ids=str)
def test_hard_cases_in_bfloat16(machine, case):
    assert_gradients(run(WAYS["two slots"], case, machine), case)


@pytest.mark.parametrize("m", SIZES)
@pytest.mark.parametrize("further", [1, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_tails(machine, m, further, causal):
    n = SIZES[(SIZES.index(m) + further) % len(SIZES)]
    case = normal(m, n, 32, np.float16, heads=2, kv_heads=1, causal=causal, with_dlse=causal)
    way = list(WAYS)[(SIZES.index(m) + further) % 4]
    assert_gradients(run(WAYS[way], case, machine), case)


@pytest.mark.parametrize("d", [1, 2, 7, 33, 36, 72, 100, 128, 160, 255])
def test_head_dimensions(machine, d):
    case = normal(21, 40, d, HALVES[d % 2], heads=2, kv_heads=1, causal=True)
    way = with_tiles(TWO_SLOTS, ONE_SLOT) if d > 128 else WAYS["two slots"]
    assert_gradients(run(way, case, machine), case)


@pytest.mark.parametrize("d", [33, 100, 128])
def test_head_dimensions_in_one_pass(machine, d):
    case = normal(21, 40, d, HALVES[d % 2], heads=2, kv_heads=1, causal=True)
    assert_gradients(run(WAYS["one pass"], case, machine), case)


CASES = list(laid_out(normal(5, 21, 16, np.float16, batch=2, heads=2, causal=True, with_dlse=True)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layouts(machine, case):
    assert_gradients(run(WAYS["two slots"], case, machine), case)


@pytest.mark.parametrize("layout", ["heads inside rows", "longer rows"])
@pytest.mark.parametrize("way", WAYS)
def test_layouts_that_are_read_16_bytes_at_a_time(machine, layout, way):
    case = normal(19, 37, 32, np.float16, batch=2, heads=2)
    case = case.with_arrays(layout, LAYOUTS[layout], ("q", "v", "do"))
    assert case.shape.vector == 16
    assert_gradients(run(WAYS[way], case, machine), case)


@pytest.mark.parametrize("vector", [2, 4, 8])
def test_narrow_copies_give_the_bits_of_wide_ones(machine, vector):
    case = normal(37, 50, 32, np.float16, causal=True)
    wide = run(WAYS["two slots"], case, machine)
    narrow = run(with_tiles(*SMALL["two slots"], vector=vector), case, machine)
    for a, b in zip(wide, narrow, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["normal", "causal", "negative scale", "two heads share one of k"])
def test_as_sm_75_computes(machine, name):
    case = made(attention_cases.hard_case(name, np.float16))
    assert_gradients(run(with_tiles(ONE_SLOT, BOTH_OF_ONE_SLOT, arch="75"), case, machine, arch="75"), case)


@pytest.mark.parametrize(("m", "n"), [(0, 40), (40, 0)])
@pytest.mark.parametrize("way", WAYS)
def test_nothing(machine, m, n, way):
    for gradient in run(WAYS[way], normal(m, n, 32, np.float16, causal=True), machine):
        assert (gradient == 0).all()


@pytest.mark.parametrize("way", WAYS)
def test_heads_of_a_group_are_summed(machine, way):
    case = normal(20, 40, 32, np.float16, batch=2, heads=6, kv_heads=2, causal=True)
    assert_gradients(run(WAYS[way], case, machine), case)


def test_the_tiles_that_are_launched(machine):
    """Those of sm_90, on a size that takes several of each."""
    for d, m, n in ((64, 20, 130), (128, 70, 130), (256, 40, 70)):
        case = normal(m, n, d, np.float16, causal=True)
        assert_gradients(run(mma.plan_mma, case, machine), case)


def test_the_tiles_of_one_pass_that_are_launched(machine):
    for d, m, n in ((64, 40, 130), (128, 70, 130)):
        case = normal(m, n, d, np.float16, causal=True)
        assert_gradients(run(mma.plan_one_pass, case, machine), case)


@pytest.mark.parametrize("way", ["two slots", "one slot, two fragments"])
def test_repeatable_to_the_bit(machine, way):
    case = normal(40, 70, 32, np.float16, heads=2, kv_heads=1, causal=True)
    first, *others = (run(WAYS[way], case, machine, seed=seed) for seed in range(3))
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_offsets_beyond_32_bits():
    """Batches lie 2^31 elements apart in memory that is mostly never touched."""
    small = normal(3, 20, 32, np.float16, batch=2)

    def far(x):
        wide = np.lib.stride_tricks.as_strided(
            np.zeros(2**31 + 4096, x.dtype)[8:], x.shape, (2**32, *x.strides[1:]), writeable=True
        )
        wide[...] = x
        return wide

    for which in (("q", "do"), ("k", "v")):
        case = small.with_arrays("far apart", far, which)
        assert_gradients(run(WAYS["two slots"], case), case)


# -- sizes -------------------------------------------------------------------------------------------------------------
MOST = {"75": 64, "80": 163, "86": 99, "89": 99, "90a": 227, "100a": 227, "120a": 99}


@pytest.mark.parametrize("arch", MOST)
@pytest.mark.parametrize("vector", [16, 2])
def test_the_tiles_fit_every_architecture(arch, vector):
    for d in range(1, 257):
        of_rows, of_keys = dq_tiles(d, arch, vector), dkdv_tiles(d, arch, vector)
        assert d <= of_rows.d < d + 32 and of_keys.d == of_rows.d
        assert max(of_rows.shared, of_keys.shared) <= MOST[arch] * 1024
        if d <= {"75": 0, "100a": 64, "120a": 64}.get(arch, 128):
            assert one_pass_tiles(d, arch, max(4, vector)).shared <= MOST[arch] * 1024


@pytest.mark.parametrize(("sizes", "words"), [
    ({"d": 48}, "d is 48"),
    ({"own": 40}, "bm is 40"),
    ({"other": 24}, "bn are 64 and 24"),
    ({"slots": 3}, "slots is 3"),
    ({"d": 128, "own": 128, "results": 2}, "take 320 registers for S, dP and 2 results"),
    ({"exchange": True}, "other is 32 and d 64; to share out dQ"),
])  # fmt: skip
def test_tiles_that_do_not_fit_say_so(sizes, words):
    with pytest.raises(ValueError, match=words):
        Tiles(**{"d": 64, "own": 64, "other": 32} | sizes)


def test_what_tensor_cores_do_not_take():
    shape = Shape("float32", 1, 1, 1, 8, 8, 32)
    for plan in mma.PLANS.values():
        with pytest.raises(ValueError, match=r"q is float32.*backward\.simt"):
            plan(shape)
        with pytest.raises(ValueError, match=r"q is bfloat16.*sm_75.*backward\.simt"):
            plan(replace(shape, element="bfloat16", arch="75"))
    with pytest.raises(ValueError, match="d is 160 on sm_90a; one pass holds dK and dV together up to 128 there"):
        mma.plan_one_pass(replace(shape, element="float16", d=160))
    with pytest.raises(ValueError, match="lie at multiples of 2 bytes; one pass takes"):
        mma.plan_one_pass(replace(shape, element="float16", d=33, vector=2))


# -- planted faults ----------------------------------------------------------------------------------------------------
PLAIN = normal(45, 77, 32, np.float16, heads=2, kv_heads=1)
CAUSAL = normal(77, 77, 32, np.float16, causal=True)
TAIL = made(attention_cases.hard_case("scores of -1e5 that differ little", np.float16))
LONGER = PLAIN.with_arrays("longer rows", LAYOUTS["longer rows"], ("do",))
IN_BOTH = {
    "barrier": (PLAIN, "Race"),
    "free": (PLAIN, "Race"),
    "wait": (PLAIN, "ReadInFlight"),
    "swizzle": (PLAIN, "wrong"),
    "tail": (TAIL, "wrong"),
    "causal": (CAUSAL, "wrong"),
    "scale": (PLAIN, "wrong"),
    "delta": (PLAIN, "wrong"),
}
DQ_FAULTS = IN_BOTH | {"stride": (PLAIN, "OutOfBounds Misaligned wrong")}
DKDV_FAULTS = IN_BOTH | {
    "start": (CAUSAL, "wrong"),
    "group": (PLAIN, "wrong"),
    "stride": (LONGER, "OutOfBounds Misaligned wrong"),
    "exchange": (PLAIN, "Race UninitialisedRead"),
}


def named(found: list[str]) -> set[str]:
    return {"wrong" if what.startswith("d") else what for what in found}


@pytest.mark.parametrize("fault", DQ_FAULTS)
def test_planted_faults_in_dq(fault):
    case, allowed = DQ_FAULTS[fault]
    tiles = SMALL["one slot, two fragments" if fault == "free" else "two slots"]
    found = caught(lambda seed: run(with_tiles(*tiles, broken_dq=fault), case, seed=seed), case)
    assert named(found) <= set(allowed.split()), found
    assert all(what == "dq" for what in found if what.startswith("d")), found


@pytest.mark.parametrize("fault", DKDV_FAULTS)
def test_planted_faults_in_dk_and_dv(fault):
    case, allowed = DKDV_FAULTS[fault]
    plan = with_tiles(*SMALL["one slot, two fragments" if fault == "free" else "two slots"], broken=fault)
    if fault in ("exchange", "tail"):  # what is beyond the last key reaches nobody else but dQ
        plan = in_one_pass(broken=fault)
    found = caught(lambda seed: run(plan, case, seed=seed), case)
    assert named(found) <= set(allowed.split()), found
    assert fault in ("exchange", "tail") or all("dq" not in what for what in found), found
    if fault in ("scale", "delta"):
        assert set(found) == {"dk"}


@pytest.mark.parametrize("fault", one_pass.FAULTS)
def test_planted_faults_around_one_pass(fault):
    found = caught(lambda seed: run(in_one_pass(broken=fault), PLAIN, seed=seed), PLAIN)
    assert set(found) == {"dq"}


def test_every_fault_that_can_be_planted_is_tested():
    assert set(mma_dq.FAULTS) == set(DQ_FAULTS) and set(mma_dkdv.FAULTS) == set(DKDV_FAULTS)
