"""The stage: its real cases, every rung on them, its figure, and what is simulated against what blocks do."""

from __future__ import annotations

import numpy as np

from flashnumba.ladder import find
from flashnumba.stages.causal_balance import panels, plans, reference, tiles_of
from flashnumba.stages.causal_balance.mma import balanced_tiles
from flashnumba.stages.flash_forward.reference import dense
from flashnumba.stages.heads import Shape
from flashnumba.tiles.schedule import SCHEDULES

STAGE = find("causal_balance")


def test_cases():
    cases = STAGE.cases("emulator", False)
    for case in cases:
        q, k, v = (case.inputs[name] for name in "qkv")
        expected, _ = dense(q, k, v, causal=True)
        np.testing.assert_allclose(case.reference, expected, rtol=1e-10, atol=1e-13)
        assert case.inputs["causal"] and "causal" in case.size
    square, wide = (case.inputs for case in cases)
    assert square["q"].shape == square["k"].shape and wide["q"].shape[-2] > wide["k"].shape[-2]
    assert {rung.name for rung in STAGE.kernels} == set(plans())


def test_several_tiles_on_the_emulator_and_those_that_are_fast_on_a_gpu():
    shape = Shape("float16", 1, 1, 1, 95, 95, 32, True)
    for name in SCHEDULES:
        assert -(-95 // tiles_of(name, shape, "emulator").bm) >= 3
        assert tiles_of(name, shape, "cuda") == balanced_tiles(shape)
    for warps in (4, 8):
        for machine in ("emulator", "cuda"):
            stacked = tiles_of(f"stack_{warps}", shape, machine)
            assert stacked.warps == warps and stacked.bm == 16 * warps


def test_schedules_move_as_many_bytes_and_more_rows_move_fewer():
    case = STAGE.cases("cuda", False)[0]
    moved = {rung.name: rung.traffic(case) for rung in STAGE.kernels}
    assert len({moved[name] for name in SCHEDULES}) == 1
    assert moved["stack_4"] > moved["stack_8"] == moved["plain"]


def test_pictures_of_the_simulation():
    """What the panels are drawn from, by numbers."""
    steps = reference.row_work(512, 512, 64, 64)
    runs, costs = panels.simulated(steps, 3, 5, ("plain", "paired", "longest first"))
    assert {name: run.makespan for name, run in runs.items()} == {"plain": 26, "paired": 27, "longest first": 22}
    assert all(cost.sum() == 3 * 36 for cost in costs.values())
