"""The eight kernels: every convention, every tail, every layout; and each planted fault is caught."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from flashnumba.machine import compiler
from flashnumba.machine.timeline.trace import HEADER, KINDS, empty_trace
from flashnumba.stages.heads import ARGUMENTS, Launch, Plan, Shape, signature
from flashnumba.stages.staged_buffers import mma, reference
from flashnumba.stages.staged_buffers.slices import StagedTiles
from flashnumba.tiles.copy_strips import make_copy_strips
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
ONE_WARP, TWO_WARPS, TWO_FRAGMENTS = StagedTiles(64, 16, 64, 1), StagedTiles(64, 32, 64, 2), StagedTiles(64, 32, 64, 1)
"""Few rows, so that small problems have several tiles of them; keys come by 64 at least."""
NAMES = tuple(mma.KERNELS)


def with_tiles(tiles: StagedTiles, name: str, arch: str = "", broken: str = "", vector: int = 0):
    """A planner for given tiles; the kernel is that of the shape's architecture unless ``arch`` says otherwise."""
    stages, cut = mma.KERNELS[name]

    def plan(shape: Shape) -> Plan:
        kernel = mma.make_staged(
            tiles, stages, cut, shape.element, vector or shape.vector, arch or mma.tier(shape.arch),
            even=shape.d == tiles.d, broken=broken,
        )  # fmt: skip
        blocks = -(-shape.m // tiles.bm) * shape.heads * shape.batch
        return Plan((Launch(kernel, blocks, tiles.threads, tiles.shared(stages, cut)),))

    return plan


@pytest.mark.parametrize("case", hard_cases(np.float16, m=7, n=70, d=64), ids=str)
def test_hard_cases(machine, case):
    assert_attention(run(with_tiles(ONE_WARP, "quarter_4"), case, machine), case)


@pytest.mark.parametrize(("at", "name"), list(enumerate(NAMES)))
def test_hard_cases_of_each_kernel(machine, at, name):
    for case in hard_cases(HALVES[at % 2], m=7, n=70, d=64)[at::12]:
        assert_attention(run(with_tiles(ONE_WARP, name), case, machine), case)


@pytest.mark.parametrize("name", NAMES)
def test_so_many_tiles_that_the_ring_turns(machine, name):
    """Three slots come round after three tiles, four whole ones after two."""
    case = normal(20, 260, 64, np.float16, heads=2, kv_heads=1)
    assert_attention(run(with_tiles(TWO_WARPS, name), case, machine), case)


@pytest.mark.parametrize("name", ["tile_2", "quarter_4"])
def test_two_fragments_a_warp(machine, name):
    case = normal(40, 100, 64, np.float16, causal=True, scale=-0.2)
    assert_attention(run(with_tiles(TWO_FRAGMENTS, name), case, machine), case)


def test_all_kernels_give_the_same_bits(machine):
    """They differ in when slices come, and in nothing that is computed."""
    case = normal(16, 140, 64, np.float16)
    first, *others = (run(with_tiles(ONE_WARP, name), case, machine) for name in NAMES)
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("at", "m"), list(enumerate(SIZES)))
@pytest.mark.parametrize("causal", [False, True])
def test_tails(machine, at, m, causal):
    n = SIZES[(at + 3) % len(SIZES)]
    case = normal(m, n, 64, np.float16, causal=causal)
    assert_attention(run(with_tiles(ONE_WARP, NAMES[at + causal]), case, machine), case)


@pytest.mark.parametrize(("at", "d"), list(enumerate([1, 2, 33, 72, 100, 160, 192, 255, 256])))
def test_head_dimensions(machine, at, d):
    case = normal(17, 40, d, HALVES[d % 2], causal=True)
    tiles = StagedTiles(-(-d // 64) * 64, 16, 64, 1)
    assert_attention(run(with_tiles(tiles, NAMES[(3 * at + 1) % 8]), case, machine), case)


@pytest.mark.parametrize("case", list(laid_out(normal(5, 21, 16, np.float16, batch=2, heads=2, causal=True))), ids=str)
def test_layouts(machine, case):
    assert_attention(run(with_tiles(ONE_WARP, "quarter_3"), case, machine), case)


@pytest.mark.parametrize("layout", ["heads inside rows", "longer rows"])
@pytest.mark.parametrize("name", ["tile_3", "quarter_2"])
def test_layouts_that_are_read_16_bytes_at_a_time(machine, layout, name):
    case = normal(19, 70, 64, np.float16, heads=2).with_arrays(layout, LAYOUTS[layout])
    assert case.shape.vector == 16
    assert_attention(run(with_tiles(ONE_WARP, name), case, machine), case)


@pytest.mark.parametrize("name", ["tile_2", "quarter_4"])
@pytest.mark.parametrize("which", ["k", "v"])
def test_keys_and_values_at_distances_of_their_own(machine, name, which):
    case = normal(5, 150, 64, np.float16).with_arrays("longer rows", LAYOUTS["longer rows"], which)
    assert_attention(run(with_tiles(ONE_WARP, name), case, machine), case)


@pytest.mark.parametrize("name", ["tile_4", "quarter_4"])
def test_a_step_that_only_the_last_row_of_a_block_sees(machine, name):
    case = normal(80, 81, 64, np.float16, causal=True)  # key 64 is the first of a tile
    assert_attention(run(with_tiles(ONE_WARP, name), case, machine), case)


@pytest.mark.parametrize("n", [0, 1])
def test_a_single_row_out_of_rows_that_are_not_aligned(machine, n):
    """Rows that are not there are not read, but their addresses must be aligned too."""
    case = one_odd_row(n, 64)
    assert case.shape.vector == 2
    assert_attention(run(with_tiles(ONE_WARP, "quarter_4"), case, machine), case)


@pytest.mark.parametrize("vector", [2, 4, 8])
@pytest.mark.parametrize("name", ["tile_1", "quarter_4"])
def test_narrow_copies_give_the_bits_of_wide_ones(machine, vector, name):
    case = normal(20, 70, 64, np.float16, causal=True)
    wide = run(with_tiles(ONE_WARP, name), case, machine)
    narrow = run(with_tiles(ONE_WARP, name, vector=vector), case, machine)
    for a, b in zip(wide, narrow, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("name", "of"), list(zip(NAMES[::2], ["normal", "causal", "negative scale", "one key"], strict=True))
)
def test_as_sm_75_computes(machine, name, of):
    case = hard_case(of, np.float16, m=7, n=70, d=64)
    assert_attention(run(with_tiles(TWO_WARPS, name, arch="75"), case, machine, arch="75"), case)


@pytest.mark.parametrize("name", ["tile_1", "quarter_4"])
def test_no_keys(machine, name):
    o, lse = run(with_tiles(ONE_WARP, name), normal(3, 0, 64, np.float16), machine)
    assert (o == 0).all() and (lse == -np.inf).all()


@pytest.mark.parametrize("name", NAMES)
def test_the_tiles_that_are_launched(machine, name):
    case = normal(20, 70, 64 if "tile" in name else 128, np.float16, causal=True)
    assert_attention(run(mma.PLANS[name], case, machine), case)


def test_repeatable_to_the_bit(machine):
    case = normal(40, 70, 64, np.float16, causal=True)
    first, *others = (run(with_tiles(TWO_WARPS, "quarter_4"), case, machine, seed=seed) for seed in range(3))
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_other_sizes():
    for d in (64, 128, 256):
        found = mma.variants(Shape("float16", 1, 1, 1, 64, 64, d))
        assert len(found) >= 10 and all(isinstance(plan, Plan) for plan in found.values())
        kernels = [plan.launches[0].kernel for plan in found.values()]
        assert len(set(map(id, kernels))) == len(kernels), "no two are the same"
    assert mma.variants(Shape("float16", 1, 1, 1, 64, 64, 64))["tile_2, 32 rows a warp, 5 blocks"]


# -- what is refused ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"d": 96}, "d is 96"),
        ({"d": 320}, "d is 320"),
        ({"bn": 32}, "bn is 32"),
        ({"bm": 24}, "bm is 24"),
        ({"bm": 128, "warps": 8}, "bm is 128.*at most bn, 64"),
        ({"d": 128, "warps": 2}, "take 256 registers"),
    ],
)
def test_tiles_that_do_not_fit_say_so(sizes, words):
    with pytest.raises(ValueError, match=words):
        StagedTiles(**{"d": 64, **sizes})


def test_rows_that_threads_do_not_share_out():
    with pytest.raises(ValueError, match="96 threads do not share out 64 rows of 16 elements"):
        make_copy_strips(64, 16, 96, 16)


def test_what_no_multiprocessor_has_room_for():
    shape = Shape("float16", 1, 1, 1, 8, 8, 256)
    with pytest.raises(ValueError, match=r"4 slots of 32768 bytes take 131200.*sm_89 has 101376 a block: take fewer"):
        mma.PLANS["tile_4"](replace(shape, arch="89"))
    for arch in ("80", "90a", "100a"):
        assert mma.PLANS["tile_4"](replace(shape, arch=arch)).launches[0].shared == 131200
    for arch in ("75", "86", "120a"):
        assert mma.PLANS["quarter_4"](replace(shape, arch=arch))


def test_what_tensor_cores_do_not_take():
    shape = Shape("float32", 1, 1, 1, 8, 8, 32)
    with pytest.raises(ValueError, match=r"q is float32.*flash_forward\.simt"):
        mma.PLANS["quarter_4"](shape)
    with pytest.raises(ValueError, match=r"q is bfloat16.*sm_75"):
        mma.PLANS["quarter_4"](replace(shape, element="bfloat16", arch="75"))


# -- planted faults ----------------------------------------------------------------------------------------------------
FAULTS = {
    "wait": {"ReadInFlight", "Uninitialised"},
    "barrier": {"Race", "ReadInFlight", "WriteInFlight", "Uninitialised"},
    "early": {"Race", "ReadInFlight", "WriteInFlight", "Uninitialised", "wrong result"},
    "slot": {"Race", "ReadInFlight", "WriteInFlight", "Uninitialised", "wrong result"},
    "store": {"Race"},
    "swizzle": {"wrong result"},
    "stride": {"OutOfBounds", "Misaligned", "wrong result"},
    "rescale": {"wrong result"},
    "tail": {"wrong result"},
    "causal": {"wrong result"},
    "sign": {"wrong result"},
}


TABLE = [(name, fault) for name in ("tile_1", "tile_3", "quarter_4") for fault in reference.FAULTS]
OTHERS = [(name, fault) for fault in mma.FAULTS if fault not in reference.FAULTS for name in ("tile_3", "quarter_4")]


@pytest.mark.parametrize(("name", "fault"), TABLE + OTHERS)
def test_planted_faults(name, fault):
    if name == "tile_1" and fault in ("early", "slot"):
        pytest.skip("one slot has no neighbour")
    if name == "quarter_4" and fault == "store":
        pytest.skip("the last slice lies in another slot than O leaves by")
    n, sign = 140 if fault == "store" else 100, -1 if fault == "sign" else 5
    case = normal(20, n, 64, np.float16, causal=fault == "causal", scale=0.2 * sign)
    plan = with_tiles(TWO_WARPS, name, broken=fault)
    found = caught(lambda seed: run(plan, case, seed=seed), case, seeds_for(FAULTS[fault]))
    assert set(found) <= FAULTS[fault], found


def test_every_fault_that_can_be_planted_is_tested():
    assert set(mma.FAULTS) == set(FAULTS) >= set(reference.FAULTS)


# -- marks -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["tile_1", "tile_3", "quarter_4"])
def test_marks_tell_the_steps_of_the_table(machine, name):
    """Of one warp: each step's copy, wait and product in the order of the table, and the slots of the products."""
    stages, cut = mma.KERNELS[name]
    case, trace = normal(16, 128, 64, np.float16), empty_trace(1, 1, 100)
    kernel = mma.make_staged(ONE_WARP, stages, cut, "float16", even=True, traced=True)
    plan = Plan((Launch(kernel, 1, 32, ONE_WARP.shared(stages, cut), (*ARGUMENTS, "trace")),))
    assert_attention(run_with(plan, case, machine, trace), case)
    marks = [(KINDS[w & 255], w >> 8 & 255, w >> 16) for w in trace[0, 0, HEADER::2].tolist()][: int(trace[0, 0, 0])]
    steps = [(kind, step) for kind, _, step in marks if kind in ("QK", "PV")]
    rows = [row for row in reference.schedule(stages, cut, 2) if row.compute]
    expected = [("QK" if row.compute.operand == "K" else "PV", row.step) for row in rows if row.compute.operand != "Q"]
    assert steps == expected
    slots = [slot for kind, slot, _ in marks if kind in ("QK", "PV")]
    assert slots == [row.slot for row in rows if row.compute.operand != "Q"]
    assert [step for kind, _, step in marks if kind == "wait"] == [row.step for row in rows]
    assert sum(kind == "softmax" for kind, *_ in marks) == 2
    copies = {step: slot for kind, slot, step in marks if kind == "copy" and step >= reference.CUTS[cut]}
    assert copies == {row.step: row.slot for row in rows if row.compute.operand != "Q"}


def run_with(plan, case, machine, trace):
    """As ``run``, with a trace."""
    from flashnumba.machine import launcher
    from flashnumba.machine.arrays import host_view

    (launch,) = plan.launches
    o, lse = np.full_like(case.q, np.nan), np.full(case.q.shape[:3], np.nan, np.float32)
    scale = np.float32(case.shape.d**-0.5)
    known = {"q": case.q, "k": case.k, "v": case.v, "o": o, "lse": lse, "scale": scale, "trace": trace}
    args = tuple(host_view(known[a]) if a in known and a != "scale" else known.get(a, np.int32(0)) for a in launch.args)
    launcher.launch(launch.kernel, launch.grid, launch.threads, args, shared=launch.shared, machine=machine)
    return o, lse


@pytest.mark.skipif(bool(compiler.why_not()), reason=compiler.why_not())
def test_nothing_of_the_marks_remains_where_none_are_asked_for():
    kernel = mma.make_staged(ONE_WARP, 2, "tile", "float16", even=True)
    ptx = compiler.compile_kernel(kernel, signature("float16"), "80").ptx
    assert not any(word in ptx for word in ("clock", "globaltimer", "smid"))
