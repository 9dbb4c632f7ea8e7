"""The kernels of the schedules: alike in every bit, everything written once, and each planted fault caught."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import ml_dtypes
import numpy as np
import pytest

from flashnumba.machine.emulator import as_python
from flashnumba.stages import heads
from flashnumba.stages.causal_balance import mma
from flashnumba.stages.flash_forward.mma import plan_mma
from flashnumba.stages.heads import Shape
from flashnumba.tiles import scheduled
from flashnumba.tiles.forward import tiles_for
from flashnumba.tiles.schedule import SCHEDULES
from flashnumba.tiles.sizes import AttentionTiles
from tests.stages.faults import seeds_for
from tests.stages.flash_forward.attention_cases import (
    SIZES,
    assert_attention,
    caught,
    hard_case,
    hard_cases,
    laid_out,
    normal,
    right,
    run,
)

SMALL = AttentionTiles(32, 32, 32, warps=2, slots=2, lazy=True)
TINY = AttentionTiles(32, 16, 16, warps=1, slots=2)
"""Small tiles, so that small problems have several; two warps where barriers matter."""
EVERY = pytest.mark.parametrize("name", SCHEDULES)


def planner(name, tiles=TINY, broken=""):
    return partial(mma.plan_balanced, name, tiles=tiles, broken=broken)


@EVERY
@pytest.mark.parametrize("case", hard_cases(np.float16, m=35, n=37)[1:18:4], ids=str)
def test_hard_cases(machine, name, case):
    assert_attention(run(planner(name), case, machine), case)


@EVERY
@pytest.mark.parametrize("m", SIZES[::2])
def test_tails(machine, name, m):
    """From one tile to seven, of odd and even number, with rows that see nothing and without."""
    n = (m, 3 * m // 4, 5 * m // 4 + 1)[len(name) % 3]
    case = normal(m, n, 32, np.float16, heads=2, kv_heads=1, causal=True)
    assert_attention(run(planner(name), case, machine), case)


def test_all_schedules_give_the_same_bits(machine):
    case = normal(70, 60, 32, np.float16, batch=2, heads=1, causal=True)
    results = {name: run(planner(name), case, machine) for name in SCHEDULES}
    for name in SCHEDULES:
        for a, b in zip(results["plain"], results[name], strict=True):
            np.testing.assert_array_equal(a, b, err_msg=name)
    assert_attention(results["plain"], case)


@EVERY
@pytest.mark.parametrize("causal", [False, True])
def test_everything_is_written_once(name, causal):
    case = normal(3 * 16 - 5, 40, 32, np.float16, batch=2, heads=2, causal=causal)
    stored = []
    assert_attention(run(planner(name), case, stored=stored), case)
    *cleared, written = stored
    draws = 12 + 12  # one for each tile, and one in vain by each block
    assert cleared == [4] * (name == "persistent")
    assert written == case.q.nbytes + 4 * case.q[..., 0].size + 4 * draws * (name == "persistent")


@pytest.mark.parametrize("name", ["paired", "persistent"])
def test_layouts(machine, name):
    for case in list(laid_out(normal(35, 20, 16, np.float16, batch=2, causal=True)))[::4]:
        assert_attention(run(planner(name), case, machine), case)


@EVERY
def test_bfloat16_and_what_sm_75_has(machine, name):
    case = normal(35, 35, 32, ml_dtypes.bfloat16, causal=True)
    assert_attention(run(planner(name), case, machine), case)
    case = hard_case("causal", np.float16, m=35, n=37)
    assert_attention(run(planner(name, replace(TINY, slots=1)), case, machine, arch="75"), case)


@pytest.mark.parametrize("name", mma.PLANS)
def test_the_tiles_that_are_launched(machine, name):
    if machine == "emulator" and name in ("plain", "head_by_head", "paired", "longest_first"):
        pytest.skip("tiles of persistent; the lesson and small tiles run every schedule")
    case = normal(130, 65, 64, np.float16, causal=True)
    assert_attention(run(mma.PLANS[name], case, machine, checks=False), case)


def test_sections_of_heads(machine, monkeypatch):
    """Two heads at a time, as if the cache were small."""
    from flashnumba.tiles import schedule

    monkeypatch.setattr(schedule, "L2_BYTES", 2 << 10)
    case = normal(35, 16, 32, np.float16, heads=5, causal=True)
    kernel = scheduled.make_scheduled.__wrapped__(TINY, "float16", schedule="longest_first")
    plan = heads.Plan((heads.Launch(kernel, 15, TINY.threads, TINY.shared),))
    assert_attention(run(lambda shape: plan, case, machine), case)


def test_sections_are_of_heads_that_share_keys():
    """Keys and values of one head fill the cache; three heads have them in common."""
    q, k = (np.broadcast_to(np.float16(0), shape) for shape in ((2, 6, 40, 32), (2, 2, 1 << 18, 32)))
    place = as_python(scheduled.make_place(TINY, "float16", SCHEDULES["longest_first"].piece))
    found = [tuple(map(int, place(q, k, 1, number))) for number in range(36)]
    assert found == [
        (batch, head, tile, 3) for batch in (0, 1) for group in (0, 3) for tile in (2, 1, 0)
        for head in range(group, group + 3)
    ]  # fmt: skip


def test_the_flash_forward_takes_any_of_them(machine):
    case = normal(200, 150, 32, np.float16, causal=True)
    assert_attention(run(plan_mma, case, machine, checks=False), case)


def test_many_rounds_of_a_counter(machine):
    """Cleared by the plan itself each time: nothing is left over from the last."""
    case = normal(40, 40, 32, np.float16, heads=3, causal=True)
    first = run(planner("persistent"), case, machine)
    second = run(planner("persistent"), case, machine)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


@EVERY
def test_in_any_order_of_blocks_and_threads(name):
    case = normal(70, 40, 32, np.float16, causal=True)
    for seed in (1, 2):
        assert_attention(run(planner(name, SMALL), case, seed=seed), case)


# -- plans -------------------------------------------------------------------------------------------------------------
def test_grids():
    shape = Shape("float16", 2, 4, 2, 128 * 9 - 5, 2000, 64, True, multiprocessors=132)
    grid = {name: mma.PLANS[name](shape).launches[-1].grid for name in mma.PLANS}
    assert grid == {
        "plain": 72, "head_by_head": 72, "paired": 40, "longest_first": 72, "persistent": 72,
        "stack_4": 144, "stack_8": 72,
    }  # fmt: skip
    many = replace(shape, batch=100)
    assert mma.PLANS["persistent"](many).launches[-1].grid == 2 * 132
    assert mma.PLANS["persistent"](shape).launches[0].args == ("counter",)


def test_more_than_a_counter_counts():
    """2^32 tiles would come round to nothing, and no grid is too large to say so."""
    shape = Shape("float16", 1, 2**31 - 1, 1, 1, 1, 64, True, multiprocessors=132)
    assert mma.PLANS["persistent"](shape).launches[-1].grid == 2 * 132
    with pytest.raises(ValueError, match="q has 2 x 2147483647 heads of 1 rows, 4294967294 tiles to draw; a counter"):
        mma.PLANS["persistent"](replace(shape, batch=2))


def test_the_tiles_of_the_flash_forward_where_they_leave_registers():
    for arch, same in (("75", True), ("80", False), ("89", False), ("90a", True), ("120a", False)):
        shape = Shape("float16", 1, 1, 1, 512, 512, 128, True, arch=arch)
        assert (replace(mma.balanced_tiles(shape), min_blocks=0, q_held=0) == tiles_for(128, arch)) is same
        assert mma.balanced_tiles(shape).shared <= tiles_for(128, arch).shared
    for d in (32, 64, 128):
        for warps in (4, 8):
            stacked = mma.stack_for(warps, d, "90a")
            assert stacked.frags == 1 and stacked.bm == 16 * warps


def test_what_tensor_cores_do_not_take():
    shape = Shape("float32", 1, 1, 1, 8, 8, 32)
    for name, plan in mma.PLANS.items():
        with pytest.raises(ValueError, match=r"q is float32.*flash_forward\.simt"):
            plan(shape)
        if name == "stack_8":
            continue  # whose tiles sm_75 has no threads for
        with pytest.raises(ValueError, match=r"q is bfloat16.*sm_75"):
            plan(replace(shape, element="bfloat16", arch="75"))


# -- faults ------------------------------------------------------------------------------------------------------------
FAULTS = {
    "twice": (tuple(SCHEDULES), ("written twice",)),
    "left_out": (tuple(SCHEDULES), ("wrong result", "Race")),  # a ticket is kept apart from the next by attending
    "partner": (("paired",), ("wrong result",)),
    "turn_barrier": (("paired",), ("Race",)),
    "ticket_barrier": (("persistent",), ("Race", "UninitialisedRead")),
    "uncleared": (("persistent",), ("wrong result",)),
}


@pytest.mark.parametrize(("fault", "name"), [(fault, name) for fault in FAULTS for name in FAULTS[fault][0]])
def test_planted_faults(fault, name):
    """Three and four tiles a head. What is written twice is right, so bytes are counted."""
    tiles = SMALL if "barrier" in fault else TINY
    for m in (3 * tiles.bm, 4 * tiles.bm):
        case = normal(m, m, 32, np.float16, causal=True)
        plan, whole = planner(name, tiles, broken=fault), case.q.nbytes + 4 * case.q[..., 0].size
        if fault == "twice":
            stored = []
            assert right(run(plan, case, stored=stored), case)
            assert stored[-1] >= whole + tiles.bm * 2 * 32
            continue
        seeds = seeds_for(FAULTS[fault][1])
        found = caught(lambda seed, case=case, plan=plan: run(plan, case, seed=seed), case, seeds)
        assert set(found) <= set(FAULTS[fault][1]), found


def test_every_fault_that_can_be_planted_is_tested():
    assert set(scheduled.FAULTS) | {"uncleared"} == set(FAULTS)
