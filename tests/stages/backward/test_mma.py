"""The kernels on tensor cores: every convention, every tail, every layout; and each planted fault is caught."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from flashnumba.stages.backward import mma, mma_dkdv, mma_dq, mma_pairs, one_pass
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
PAIRS = Tiles(32, 64, 32, warps=2, results=2, pairs=True)
ONE_PASS = Tiles(32, 32, 32, warps=2, results=2, exchange=True)
PAIRS_ONE_PASS = Tiles(32, 64, 64, warps=2, results=2, pairs=True, exchange=True)
SMALL = {
    "two slots": (TWO_SLOTS, BOTH),
    "one slot, two fragments": (Tiles(32, 64, 32, warps=2, slots=1), BOTH_OF_ONE_SLOT),
    "dK and dV apart": (ONE_SLOT, TWO_SLOTS),
    "pairs": (TWO_SLOTS, PAIRS),
}
"""Small tiles, so that small problems have several: of dQ, and of dK and dV."""


def with_tiles(of_rows: Tiles, of_keys: Tiles, arch="", broken="", broken_dq="", vector=0, which="dq dk dv"):
    """A planner for given tiles, which plants faults in one kernel or the other; of ``which`` results."""

    def plan(shape: Shape) -> Plan:
        shape = replace(shape, vector=vector or shape.vector)
        d = -(-shape.d // 32) * 32
        rows, keys = replace(of_rows, d=d), replace(of_keys, d=d)
        launches = (launch_rows(shape, base2=True),)
        if "dq" in which:
            launches += (mma.launch_dq(shape, rows, arch, broken_dq),)
        if "dk" in which:
            launches += mma.launch_dkdv(shape, keys, arch, broken)
        return Plan(launches, rows_scratch(shape))

    return plan


def in_one_pass(tiles: Tiles = ONE_PASS, arch="", broken=""):
    def plan(shape: Shape) -> Plan:
        return mma.plan_one_pass_with(shape, replace(tiles, d=-(-shape.d // 32) * 32), arch, broken)

    return plan


WAYS = {name: with_tiles(*tiles) for name, tiles in SMALL.items()}
WAYS |= {"one pass": in_one_pass(), "one pass by pairs": in_one_pass(PAIRS_ONE_PASS)}
HARD = hard_cases(np.float16, m=5, n=33)
"""Each is run in one way; so is every tail. What a way does to a row does not depend on what is hard about it."""


def in_turn(cases):
    """(way, case): the ways in turn."""
    return [(list(WAYS)[i % len(WAYS)], case) for i, case in enumerate(cases)]


@pytest.mark.parametrize(("way", "case"), in_turn(HARD), ids=str)
def test_hard_cases(machine, way, case):
    assert_gradients(run(WAYS[way], case, machine), case)


@pytest.mark.parametrize(("way", "case"), in_turn(hard_cases(ml_dtypes.bfloat16, m=5, n=33)[2::9]), ids=str)
def test_hard_cases_in_bfloat16(machine, way, case):
    assert_gradients(run(WAYS[way], case, machine), case)


TAILS = [(m, SIZES[(i + 1 + 2 * (i % 2)) % len(SIZES)], i % 2 == 0) for i, m in enumerate(SIZES)]
TAILS += [(n, m, not causal) for m, n, causal in TAILS[::2]]


@pytest.mark.parametrize(("way", "sizes"), in_turn(TAILS), ids=str)
def test_tails(machine, way, sizes):
    m, n, causal = sizes
    case = normal(m, n, 32, np.float16, causal=causal, with_dlse=causal)
    assert_gradients(run(WAYS[way], case, machine), case)


@pytest.mark.parametrize(("way", "d"), in_turn([128, 1, 7, 100, 36, 72]), ids=str)
def test_head_dimensions(machine, way, d):
    case = normal(9, 20, d, HALVES[d % 2], causal=True)
    assert_gradients(run(with_tiles(*SMALL["two slots"]) if d % 2 else WAYS[way], case, machine), case)


@pytest.mark.parametrize("d", [160, 255])
def test_head_dimensions_beyond_128(machine, d):
    case = normal(9, 20, d, HALVES[d % 2], causal=True)
    assert_gradients(run(with_tiles(TWO_SLOTS, ONE_SLOT), case, machine), case)


CASES = list(laid_out(normal(5, 21, 16, np.float16, batch=2, heads=2, kv_heads=1, causal=True, with_dlse=True)))[::2]
"""In each every array has another layout; ``test_simt.py`` has the other half."""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layouts(machine, case):
    assert_gradients(run(WAYS["two slots"], case, machine), case)


@pytest.mark.parametrize(("layout", "way"), [("heads inside rows", "pairs"), ("longer rows", "one pass")])
def test_layouts_that_are_read_16_bytes_at_a_time(machine, layout, way):
    case = normal(9, 20, 32, np.float16, batch=2, heads=2)
    case = case.with_arrays(layout, LAYOUTS[layout], ("q", "v", "do"))
    assert case.shape.vector == 16
    assert_gradients(run(WAYS[way], case, machine), case)


def test_narrow_copies_give_the_bits_of_wide_ones(machine):
    case = normal(17, 20, 32, np.float16, causal=True)
    wide = run(WAYS["two slots"], case, machine)
    for vector in (2, 4, 8):
        narrow = run(with_tiles(*SMALL["two slots"], vector=vector), case, machine)
        for a, b in zip(wide, narrow, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["causal", "two heads share one of k"])
def test_as_sm_75_computes(machine, name):
    case = made(attention_cases.hard_case(name, np.float16))
    assert_gradients(run(with_tiles(ONE_SLOT, BOTH_OF_ONE_SLOT, arch="75"), case, machine, arch="75"), case)


@pytest.mark.parametrize("way", WAYS)
def test_nothing(machine, way):
    for m, n in ((0, 40), (40, 0)):
        for gradient in run(WAYS[way], normal(m, n, 32, np.float16, causal=True), machine):
            assert (gradient == 0).all()


@pytest.mark.parametrize("way", ["two slots", "one pass by pairs"])
def test_a_gradient_of_lse_where_it_is_infinite(machine, way):
    """Of a row that sees nothing: whatever it is, no other row's gradient and no key's may know of it."""
    case = normal(7, 3, 32, np.float16, causal=True, with_dlse=True)
    case.dlse[..., :3] = np.nan, np.inf, -np.inf
    assert_gradients(run(WAYS[way], case, machine), case)


@pytest.mark.parametrize(("way", "m", "n"), [("pairs", 9, 20), ("one pass", 40, 40), ("one pass by pairs", 70, 70)])
def test_heads_of_a_group_are_summed(machine, way, m, n):
    """In one pass by a second block too, whose walk over the rows of each head begins late."""
    case = normal(m, n, 32, np.float16, heads=4, kv_heads=2 if m < 50 else 1, causal=True)
    assert_gradients(run(WAYS[way], case, machine), case)


@pytest.mark.parametrize("way", ["one pass", "one pass by pairs"])
def test_keys_after_the_last_in_one_pass(machine, way):
    """Their rows of K are zeros, but times a weight of e^1e5 no zeros in dQ."""
    case = next(case for case in HARD if case.name.startswith("scores of -1e5"))
    assert_gradients(run(WAYS[way], case, machine), case)


def test_the_tiles_that_are_launched(machine):
    """Those of sm_90; ``test_gpu.py`` has all of them, in more sizes."""
    case = normal(20, 130, 64, np.float16, causal=True)
    assert_gradients(run(mma.plan_mma, case, machine), case)
    case = normal(70, 20, 128, np.float16)
    assert_gradients(run(mma.plan_one_pass, case, machine), case)


@pytest.mark.parametrize("way", ["two slots", "pairs"])
def test_repeatable_to_the_bit(machine, way):
    case = normal(20, 40, 32, np.float16, heads=2, kv_heads=1, causal=True)
    for a, b in zip(*(run(WAYS[way], case, machine, seed=seed) for seed in range(2)), strict=True):
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
    ({"slots": 1, "pairs": True}, "both 2 with pairs of warps"),
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
PLAIN = normal(40, 20, 32, np.float16, heads=2, kv_heads=1)
LONG = normal(20, 40, 32, np.float16, heads=2, kv_heads=1)
CAUSAL = normal(70, 70, 32, np.float16, causal=True)
TAIL = made(attention_cases.hard_case("scores of -1e5 that differ little", np.float16))
LONGER = PLAIN.with_arrays("longer rows", LAYOUTS["longer rows"], ("do",))
IN_ALL = {
    "barrier": (PLAIN, "Race"),
    "wait": (PLAIN, "ReadInFlight"),
    "swizzle": (PLAIN, "wrong"),
    "tail": (TAIL, "wrong"),
    "causal": (CAUSAL, "wrong"),
    "scale": (PLAIN, "wrong"),
    "delta": (PLAIN, "wrong"),
}
FREE = {"free": (PLAIN, "Race")}
BY_KEYS = {
    "start": (CAUSAL, "wrong"),
    "group": (PLAIN, "wrong"),
    "stride": (LONGER, "OutOfBounds Misaligned wrong"),
    "exchange": (PLAIN, "Race UninitialisedRead"),
}
DQ_FAULTS = IN_ALL | FREE | {"stride": (LONG, "OutOfBounds Misaligned wrong")}
DKDV_FAULTS = IN_ALL | FREE | BY_KEYS
SHARED = ("swizzle", "tail", "causal", "stride")
"""Steps of both kernels by keys, tested in one of them."""
PAIRS_FAULTS = {name: what for name, what in (IN_ALL | BY_KEYS).items() if name not in SHARED} | {
    "ready": (PLAIN, "Race UninitialisedRead"),
    "half": (PLAIN, "UninitialisedRead Race wrong"),
}
RACES = ("barrier", "free", "exchange", "ready")
"""What a thread finds depends on who was first; of these two orders are tried."""


def named(found: list[str]) -> set[str]:
    return {"wrong" if what.startswith("d") else what for what in found}


def seeds_for(fault: str) -> range:
    return range(2 if fault in RACES else 1)


@pytest.mark.parametrize("fault", DQ_FAULTS)
def test_planted_faults_in_dq(fault):
    case, allowed = DQ_FAULTS[fault]
    case = LONG if case is PLAIN else case
    tiles = SMALL["one slot, two fragments" if fault == "free" else "two slots"]
    plan = with_tiles(*tiles, broken_dq=fault, which="dq")
    found = caught(lambda seed: run(plan, case, seed=seed), case, seeds_for(fault), ("dq",))
    assert named(found) <= set(allowed.split()), found


@pytest.mark.parametrize(("kernel", "fault"), [("dkdv", x) for x in DKDV_FAULTS] + [("pairs", x) for x in PAIRS_FAULTS])
def test_planted_faults_in_dk_and_dv(kernel, fault):
    case, allowed = (DKDV_FAULTS if kernel == "dkdv" else PAIRS_FAULTS)[fault]
    way = "pairs" if kernel == "pairs" else "one slot, two fragments" if fault == "free" else "two slots"
    plan, which = with_tiles(*SMALL[way], broken=fault, which="dk dv"), ("dk", "dv")
    if fault in ("exchange", "tail"):  # what is beyond the last key reaches nobody else but dQ
        plan, which = in_one_pass(PAIRS_ONE_PASS if kernel == "pairs" else ONE_PASS, broken=fault), ("dq", "dk", "dv")
    found = caught(lambda seed: run(plan, case, seed=seed), case, seeds_for(fault), which)
    assert named(found) <= set(allowed.split()), found
    if fault in ("scale", "delta"):
        assert set(found) == {"dk"}


@pytest.mark.parametrize("fault", one_pass.FAULTS)
def test_planted_faults_around_one_pass(fault):
    case = normal(20, 20, 32, np.float16)
    found = caught(lambda seed: run(in_one_pass(broken=fault), case, seed=seed), case, (0,))
    assert set(found) == {"dq"}


def test_every_fault_that_can_be_planted_is_tested():
    assert set(mma_dq.FAULTS) == set(DQ_FAULTS)
    assert set(mma_dkdv.FAULTS) == set(DKDV_FAULTS) and set(mma_pairs.FAULTS) == set(PAIRS_FAULTS)
