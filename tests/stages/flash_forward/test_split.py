"""Split-KV attention: parts, their merge, a group of heads in one tile; and each planted fault is caught."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from flashnumba.stages.flash_forward import split
from flashnumba.stages.flash_forward.split import SPLIT_ARGS
from flashnumba.stages.heads import Launch, Plan, Shape
from flashnumba.tiles.merge import MERGE_ARGS, MERGE_FAULTS, make_merge, warps_for
from flashnumba.tiles.sizes import AttentionTiles
from tests.stages.faults import seeds_for
from tests.stages.flash_forward.attention_cases import (
    assert_attention,
    caught,
    hard_case,
    hard_cases,
    laid_out,
    normal,
    one_odd_row,
    run,
)

SMALL = AttentionTiles(32, 16, 16, warps=1, slots=2)
TEAMS = replace(SMALL, teams=2)


def with_splits(
    splits: int, tiles: AttentionTiles = SMALL, broken: str = "", merge_broken: str = "", warps: int = 0,
    early: bool = False,
):  # fmt: skip
    """A planner for given tiles and number of parts, merged by so many warps if not by those that are planned."""

    def plan(shape: Shape) -> Plan:
        arch = "90" if early else "80"
        kernel = split.make_split(tiles, shape.element, shape.vector, arch, even=shape.d == tiles.d, broken=broken)
        merge = make_merge(
            tiles.d,
            shape.element,
            warps or warps_for(splits),
            arch,
            wide=shape.d % 4 == 0,
            broken=merge_broken,
        )
        units = -(-shape.m * shape.group // tiles.bm) * shape.kv_heads * shape.batch
        sizes = (splits, shape.batch, shape.heads, shape.m)
        return Plan(
            (
                Launch(kernel, units * splits, tiles.block, tiles.shared, SPLIT_ARGS),
                Launch(merge, shape.batch * shape.heads * shape.m, merge.threads, 0, MERGE_ARGS),
            ),
            {"acc_parts": (*sizes, shape.d), "m_parts": sizes, "l_parts": sizes},
        )

    return plan


@pytest.mark.parametrize("case", hard_cases(np.float16)[::2], ids=str)
def test_hard_cases(machine, case):
    assert_attention(run(with_splits(3, TEAMS), case, machine), case)


@pytest.mark.parametrize("splits", [1, 6])
@pytest.mark.parametrize("m, group", [(1, 8), (3, 5), (17, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_parts_and_groups(machine, splits, m, group, causal):
    """More parts than there are steps of keys too: some are then empty."""
    case = normal(m, 70, 32, np.float16, heads=group, kv_heads=1, causal=causal)
    assert_attention(run(with_splits(splits), case, machine), case)


@pytest.mark.parametrize("d", [1, 7, 64, 100, 256])
def test_head_dimensions(machine, d):
    case = normal(2, 75, d, (np.float16, ml_dtypes.bfloat16)[d % 2], heads=4, kv_heads=2, causal=True)
    tiles = AttentionTiles(-(-d // 32) * 32, 16, 32, warps=1, teams=2)
    assert_attention(run(with_splits(2, tiles), case, machine), case)


@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 33, 63, 100])
@pytest.mark.parametrize("causal", [False, True])
def test_lengths(machine, n, causal):
    """At 17 and 33 the last row alone sees a step of one key. Some teams see nothing."""
    case = normal(2, n, 32, np.float16, heads=6, kv_heads=2, causal=causal)
    assert_attention(run(with_splits(2, TEAMS), case, machine), case)


@pytest.mark.parametrize("name", ["a maximum that grows", "a maximum that comes first", "normal"])
def test_more_parts_than_are_merged_at_once(machine, name):
    """What a warp has is rescaled by what its next parts bring."""
    case = hard_case(name, np.float16, n=300)
    assert_attention(run(with_splits(19, warps=1), case, machine), case)


@pytest.mark.parametrize("case", list(laid_out(normal(3, 37, 16, np.float16, heads=2, causal=True))), ids=str)
def test_layouts(machine, case):
    assert_attention(run(with_splits(2), case, machine), case)


@pytest.mark.parametrize("n", [0, 1])
def test_a_single_row_out_of_rows_that_are_not_aligned(machine, n):
    case = one_odd_row(n, 32)
    assert_attention(run(with_splits(2), case, machine), case)


def test_four_warps(machine):
    case = normal(5, 130, 64, np.float16, heads=8, kv_heads=1, causal=True)
    assert_attention(run(with_splits(2, AttentionTiles(64, 64, 64)), case, machine), case)


def test_as_planned(machine):
    for m, group, n, d in ((1, 8, 300, 64), (12, 4, 100, 64), (2, 8, 100, 256)):
        case = normal(m, n, d, np.float16, heads=group, kv_heads=1)
        assert_attention(run(split.plan_split, case, machine), case)


def test_how_many_parts():
    """As many as fill the GPU evenly; no more than there are steps; one where the blocks fill it anyway."""
    for units, tiles, expected in ((8, 256, 33), (8, 3, 3), (1, 0, 1), (10_000, 128, 1), (264, 128, 1), (128, 256, 4)):
        splits = split.splits_for(units, tiles, 132)
        assert splits == expected, (units, tiles, splits)
    for units in (1, 3, 8, 32, 128):
        for tiles in (64, 256, 1000, 4096):
            splits = split.splits_for(units, tiles, 132)
            assert min(2 * 132, units * tiles) <= units * splits or splits == split.MOST_SPLITS


def test_how_many_parts_where_a_block_fills_a_multiprocessor():
    """One wave of them; and where that does not come out, several that are nearly full, or fewer steps in the last."""
    for units, tiles, expected in ((8, 64, 16), (8, 3, 3), (1, 0, 1), (32, 64, 4), (128, 1024, 1), (256, 1024, 1)):
        assert split.splits_for(units, tiles, 132, 1) == expected, (units, tiles)
    assert split.splits_for(8, 64, 132, 2) == 32
    assert split.splits_for(133, 1024, 132, 1) > 3, "not twice as long for one block more"


def test_what_it_does_not_take():
    shape = Shape("float32", 1, 1, 1, 8, 8, 32)
    with pytest.raises(ValueError, match=r"q is float32.*flash_forward\.simt"):
        split.plan_split(shape)
    with pytest.raises(ValueError, match="needs sm_80, this is sm_75"):
        split.plan_split(replace(shape, element="float16", arch="75"))


FAULTS = {
    "barrier": ("Race", "ReadInFlight"),
    "free_barrier": ("Race",),
    "wait": ("ReadInFlight",),
    "tail": ("wrong result",),
    "causal": ("wrong result",),
    "head": ("wrong result",),
    "range": ("wrong result",),
    "early": ("EarlyAccess",),
    "teams": ("Race",),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_of_a_part(fault):
    case = normal(3, 75, 32, np.float16, heads=5, kv_heads=1, causal=fault == "causal", scale=1.0)
    found = caught(
        lambda seed: run(with_splits(2, TEAMS, fault, early=True), case, seed=seed), case, seeds_for(FAULTS[fault])
    )
    assert set(found) <= set(FAULTS[fault]), found


@pytest.mark.parametrize("fault", MERGE_FAULTS)
def test_planted_faults_of_the_merge(fault):
    case = normal(1, 330, 32, np.float16, scale=1.0)
    expected = {"barrier": {"Race", "Uninitialised"}, "weight": {"wrong result"}, "wait": {"EarlyAccess"}}[fault]
    plan = with_splits(20, merge_broken=fault, early=True)
    assert set(caught(lambda seed: run(plan, case, seed=seed), case, seeds_for(expected))) <= expected


def test_every_fault_that_can_be_planted_is_tested():
    assert set(split.FAULTS) == set(FAULTS)
