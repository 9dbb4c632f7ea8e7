"""The stage: its real cases, every rung on them, its figure, and the budget that it draws."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from flashnumba.ladder import find
from flashnumba.machine.occupancy import machine_of
from flashnumba.machine.resources import read
from flashnumba.stages.flash_forward.reference import dense
from flashnumba.stages.staged_buffers import mma, panels, plans, registers_allowed

STAGE = find("staged_buffers")


def test_cases():
    cases = STAGE.cases("emulator", False)
    for case in cases:
        q, k, v, causal = (case.inputs[name] for name in ("q", "k", "v", "causal"))
        expected, _ = dense(q, k, v, causal=bool(causal))
        np.testing.assert_allclose(case.reference, expected, rtol=1e-10, atol=1e-13)
    assert [bool(case.inputs["causal"]) for case in cases] == [False, True]
    for rung in STAGE.kernels:
        assert sum(rung.takes(case) for case in cases) == 1, "one small case a kernel"
    assert [rung.name for rung in STAGE.kernels] == list(plans()) == list(mma.TRACED)


def test_what_fits():
    allowed = registers_allowed(128)
    assert {machine: set(of.values()) for machine, of in allowed.items()} == {"notes": {256}, "80": {168}, "90": {168}}
    fits = {m: {n: panels.blocks_of(n, m, allowed[m][n]) for n in plans()} for m in panels.MACHINES}
    assert [blocks for blocks, _ in fits["notes"].values()] == [3, 2, 1, 1, 3, 3, 3, 3]
    assert [blocks for blocks, _ in fits["90"].values()] == [3] * 8
    assert fits["80"]["tile_4"] == (2, ("shared memory",)) and fits["80"]["quarter_4"][0] == 3


def test_the_registers_that_are_drawn_are_those_that_the_compiler_keeps_to():
    """By the record, which has tests of its own."""
    case = next(case for case in mma.compile_cases() if case.name.startswith("staged_buffers.quarter_4 float16 d 128"))
    made = read(Path(__file__).parents[3] / "docs" / "results" / "resources.json")[1][case.name, "90a"]
    assert made.registers <= registers_allowed(128)["90"]["quarter_4"]
    assert made.budget.blocks == 3
    assert case.shared <= machine_of("notes").shared_within(3), "21 KB"


@pytest.mark.parametrize(("stages", "cut"), mma.KERNELS.values())
def test_a_schedule_is_drawn_step_by_step(stages, cut):
    axes = Figure().subplots()
    panels.draw_schedule(axes, stages, cut, 3)
    named = [text.get_text() for text in axes.texts]
    assert len(named) == len(set(named)) == (7 if cut == "tile" else 28), "each slice once"
