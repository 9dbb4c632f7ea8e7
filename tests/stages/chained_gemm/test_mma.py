"""The three kernels: conventions and tails; `registers` is the flash forward; and each planted fault is caught."""

from __future__ import annotations

import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from flashnumba.machine.compiler import compile_kernel, why_not
from flashnumba.stages.chained_gemm import count, mma
from flashnumba.stages.flash_forward import mma as flash
from flashnumba.stages.heads import Launch, Plan, Shape, signature
from flashnumba.tiles import chain
from flashnumba.tiles.forward import make_attend
from flashnumba.tiles.sizes import NATURAL, AttentionTiles
from tests.stages.faults import seeds_for
from tests.stages.flash_forward.attention_cases import (
    LAYOUTS,
    SIZES,
    assert_attention,
    caught,
    hard_cases,
    normal,
    run,
)

CHANGED = ("shared", "shuffles")
"""The ways that are not the flash forward's, whose own tests are many."""
SMALL = {
    "two slots": AttentionTiles(32, 32, 32, warps=2, slots=2, lazy=True),
    "two fragments, Q held": AttentionTiles(32, 64, 48, warps=2, q_held=1),
}
"""Small tiles, so that small problems have several; the second has an odd number of steps in a tile."""


def with_tiles(way: str, tiles: AttentionTiles, broken: str = ""):
    """A planner for given tiles."""

    def plan(shape: Shape) -> Plan:
        even = shape.d == tiles.d
        kernel = mma.make_chained(way, tiles, shape.element, shape.vector, even=even, broken=broken)
        blocks = -(-shape.m // tiles.bm) * shape.heads * shape.batch
        return Plan((Launch(kernel, blocks, tiles.threads, tiles.shared + chain.shared_of(way, tiles)),))

    return plan


@pytest.mark.parametrize("case", hard_cases(np.float16)[::4], ids=str)
@pytest.mark.parametrize("way", CHANGED)
def test_hard_cases(machine, way, case):
    assert_attention(run(with_tiles(way, SMALL["two slots"]), case, machine), case)


@pytest.mark.parametrize("case", hard_cases(np.float16)[1::12], ids=str)
@pytest.mark.parametrize("way", CHANGED)
def test_hard_cases_with_other_tiles(machine, way, case):
    assert_attention(run(with_tiles(way, SMALL["two fragments, Q held"]), case, machine), case)


@pytest.mark.parametrize("case", hard_cases(ml_dtypes.bfloat16)[3::16], ids=str)
@pytest.mark.parametrize("way", CHANGED)
def test_hard_cases_in_bfloat16(machine, way, case):
    assert_attention(run(with_tiles(way, SMALL["two slots"]), case, machine), case)


@pytest.mark.parametrize("m", SIZES)
@pytest.mark.parametrize("causal", [False, True])
def test_tails(machine, m, causal):
    """The mask must know which column is which key."""
    at = SIZES.index(m)
    n = SIZES[(at + 3) % len(SIZES)]
    several = {"heads": 2, "kv_heads": 1} if m < 33 else {}
    case = normal(m, n, 32, np.float16, causal=causal, **several)
    tiles = SMALL["two slots" if at % 2 else "two fragments, Q held"]
    assert_attention(run(with_tiles(CHANGED[(at + causal) % 2], tiles), case, machine), case)


@pytest.mark.parametrize("n", (1, 2, 5, 8, 11, 17))
def test_every_number_of_keys_of_a_step(machine, n):
    for way in CHANGED:
        case = normal(3, n, 32, np.float16)
        assert_attention(run(with_tiles(way, SMALL["two slots"]), case, machine), case)


@pytest.mark.parametrize("d", [1, 100, 256])
def test_head_dimensions(machine, d):
    """Rows of 128 bytes and more are copied sixteen at once by four warps."""
    tiles = AttentionTiles(-(-d // 32) * 32, 64, 32)
    for way in CHANGED:
        case = normal(11, 40, d, np.float16, causal=True)
        assert_attention(run(with_tiles(way, tiles), case, machine), case)


@pytest.mark.parametrize("layout", ["rows reversed", "one element off"])
def test_layouts(machine, layout):
    for way in CHANGED:
        case = normal(19, 37, 32, np.float16, heads=2).with_arrays(layout, LAYOUTS[layout])
        assert_attention(run(with_tiles(way, SMALL["two slots"]), case, machine), case)


def test_the_tiles_that_are_launched(machine):
    """Those of sm_90, on a size that takes several of each."""
    case = normal(20, 70, 128, np.float16, causal=True)
    for way in CHANGED:
        assert_attention(run(mma.PLANS[way], case, machine, checks=False), case)


def test_the_detour_gives_the_bits_of_registers(machine):
    case = normal(37, 50, 32, np.float16, causal=True)
    for tiles in SMALL.values():
        ways = (run(with_tiles(way, tiles), case, machine) for way in ("registers", chain.DETOUR))
        for a, b in zip(*ways, strict=True):
            np.testing.assert_array_equal(a, b)
    (plan,) = mma.variants(case.shape).values()
    assert plan.launches[0].shared == mma.PLANS["registers"](case.shape).launches[0].shared


def test_registers_is_the_flash_forward(machine):
    case = normal(33, 50, 32, np.float16, causal=True)
    for a, b in zip(run(mma.PLANS["registers"], case, machine), run(flash.plan_mma, case, machine), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "the compiler is installed")
def test_registers_is_the_flash_forward_to_the_instruction():
    tiles, texts = SMALL["two slots"], []
    for kernel in (
        mma.make_chained("registers", tiles, "float16"),
        flash.make_mma(tiles, "float16", schedule="head_by_head"),
    ):
        made = compile_kernel(kernel, signature("float16"), "90a")
        texts.append(re.sub(r"_Z\w+|\$L\w+|flash_forward|chained_gemm|\d+", "", made.ptx))
    assert texts[0] == texts[1]


def test_all_are_launched_with_as_much():
    for d in (32, 64, 128, 256):
        for arch in ("80", "90a"):
            found = {plan(Shape("float16", 1, 2, 1, 300, 500, d, arch=arch)).launches[0] for plan in mma.PLANS.values()}
            assert len({(launch.grid, launch.threads, launch.shared) for launch in found}) == 1
            tiles = mma.tiles_for(d, arch)
            assert next(iter(found)).shared == tiles.shared + 64 * tiles.bm


def test_repeatable_to_the_bit(machine):
    case = normal(20, 70, 32, np.float16, causal=True)
    for way in CHANGED:
        first, *others = (run(with_tiles(way, SMALL["two slots"]), case, machine, seed=seed) for seed in range(2))
        for other in others:
            for a, b in zip(first, other, strict=True):
                np.testing.assert_array_equal(a, b)


FAULTS = {
    "sync": {"Race"},
    "overwrite": {"Race"},
    "pitch": {"wrong result", "UninitialisedRead"},
    "unit": {"Race", "wrong result", "UninitialisedRead"},
    "round": {"wrong result"},
    "halves": {"wrong result"},
    "order": {"wrong result"},
    "tail": {"wrong result"},
    "causal": {"wrong result"},
}
PLANTED = [(way, fault) for way in chain.WAYS for fault in (*chain.FAULTS[way], "order")]
PLANTED += [(way, fault) for way in CHANGED for fault in ("tail", "causal")]


@pytest.mark.parametrize(("way", "fault"), PLANTED)
@pytest.mark.parametrize("tiles", SMALL)
def test_planted_faults(way, fault, tiles):
    if tiles != "two slots" and fault not in chain.FAULTS["shared"]:
        pytest.skip("the same with any tiles")
    case = normal(33, 77, 32, np.float16, causal=fault == "causal", scale=1.0)
    plan = with_tiles(way, SMALL[tiles], fault)
    found = caught(lambda seed: run(plan, case, seed=seed), case, seeds_for(FAULTS[fault]))
    assert set(found) <= FAULTS[fault], found


# -- what does not fit -------------------------------------------------------------------------------------------------
def test_what_the_kernels_do_not_take():
    shape = Shape("float32", 1, 1, 1, 8, 8, 32)
    with pytest.raises(ValueError, match=r"q is float32.*flash_forward\.simt"):
        mma.PLANS["shared"](shape)
    with pytest.raises(ValueError, match=r"chained_gemm\.shuffles needs sm_80; this is sm_75"):
        mma.PLANS["shuffles"](replace(shape, element="float16", arch="75"))
    with pytest.raises(ValueError, match="chain is 'mail'; it must be one of shared, shuffles, registers"):
        mma.make_chained("mail", SMALL["two slots"], "float16")
    with pytest.raises(ValueError, match="64 threads copy 8 rows at once; an order takes a multiple of 16"):
        mma.make_chained("shared", AttentionTiles(64, 32, 32, warps=2), "float16")
    with pytest.raises(ValueError, match="a chain by shuffles of float16 leaves no marks"):
        make_attend(SMALL["two slots"], "float16", chain="shuffles", traced=True)


def test_orders():
    assert chain.order_for("registers", 2) == chain.order_for("shuffles", 1) == NATURAL
    assert chain.order_for("shared", 2) == chain.STRIDED and chain.order_for("registers", 1) == chain.QUADS


# -- counts ------------------------------------------------------------------------------------------------------------
def test_machine_code_is_counted_by_name():
    text = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 SHFL.IDX PT, R1, R2, R3, 0x1f ;
        /*0020*/             @UP1 USEL UR4, UR5, UR6, UP0 ;
                                                             /* 0x000fe400 */
        /*1234a0*/                 SEL R1, R2, R3, P0 ;
    """
    assert count.machine_code(text) == {"LDC": 1, "SHFL": 1, "USEL": 1, "SEL": 1}


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "the compiler is installed")
def test_the_compiler_makes_what_was_counted():
    """Beside ``registers``: so many shuffles, selects, stores and loads for each fragment and operand of P."""
    tiles = AttentionTiles(32, 128, 32)
    try:
        by_way = {found.way: found for found in count.in_code(32, tiles=tiles)}
    except RuntimeError as error:
        pytest.skip(str(error))
    steps = tiles.frags * tiles.bn // 16
    base = by_way["registers"].opcodes

    def more(way, name):
        return by_way[way].opcodes.get(name, 0) - base.get(name, 0)

    assert more("shared", "STS") == steps * count.BY_COUNT["shared"]["store"]
    assert more("shared", "LDSM") == steps * count.BY_COUNT["shared"]["load"]
    assert more("shared", "SHFL") == more("shuffles", "STS") == more("shuffles", "LDSM") == 0
    assert more("shuffles", "SHFL") == steps * count.BY_COUNT["shuffles"]["shuffle"]
    assert more("shuffles", "SEL") >= steps * count.BY_COUNT["shuffles"]["select"]
    for way in ("shared", "shuffles"):
        assert more(way, "HMMA") == more(way, "MUFU") == 0
        assert by_way[way].shared == (64 * tiles.bm if way == "shared" else 0)
