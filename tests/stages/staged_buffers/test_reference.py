"""The schedule: right by its own proof, and by an account that knows nothing of it; and the budget's numbers."""

from __future__ import annotations

import ast
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashnumba.machine.occupancy import MACHINES, NOTES
from flashnumba.machine.occupancy import budget as full_budget
from flashnumba.stages.flash_forward.reference import dense
from flashnumba.stages.staged_buffers import reference
from flashnumba.stages.staged_buffers.budget import budget, registers_held, ring_bytes, slot_bytes
from flashnumba.stages.staged_buffers.reference import (
    CUTS,
    FAULTS,
    STAGES,
    Broken,
    Slice,
    attention,
    check,
    damaged,
    period,
    schedule,
    slices,
    table,
)

BOTH = [pytest.param(stages, cut, id=f"{cut}_{stages}") for cut in CUTS for stages in STAGES]


def test_the_reference_imports_numpy_and_nothing_of_ours():
    tree = ast.parse(Path(reference.__file__).read_text())
    found = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    found |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in found} - set(sys.stdlib_module_names) == {"numpy"}


def test_slices_in_the_order_in_which_they_are_needed():
    assert [str(piece) for piece in slices("tile", 2)] == ["Q.0", "K0.0", "V0.0", "K1.0", "V1.0"]
    found = [str(piece) for piece in slices("quarter", 1)]
    assert found == [f"{x}.{part}" for x in ("Q", "K0", "V0") for part in range(4)]


@pytest.mark.parametrize(("stages", "cut"), BOTH)
@pytest.mark.parametrize("tiles", [0, 1, 2, 5])
def test_every_slice_is_copied_once_and_computed_with_once_in_order(stages, cut, tiles):
    rows = schedule(stages, cut, tiles)
    check(rows)
    assert [row.compute for row in rows if row.compute] == [row.copy for row in rows if row.copy] == slices(cut, tiles)
    assert [row.step for row in rows] == list(range(1 - stages, len(slices(cut, tiles))))
    assert all(row.slot == row.step % stages for row in rows)


@pytest.mark.parametrize(("stages", "cut"), BOTH)
def test_one_wait_and_one_barrier_a_step(stages, cut):
    for row in schedule(stages, cut, 3):
        if row.step >= 0:
            assert row.order.count("wait") == row.order.count("compute") == row.order.count("copy") == 1
            assert row.order.count("barrier") == (1 if stages > 1 else 2)


@pytest.mark.parametrize(("stages", "cut"), BOTH)
def test_no_slot_is_written_while_it_is_needed(stages, cut):
    """Event by event, without the check's rules: a slot is busy from its copy to the barrier after its step."""
    rows = schedule(stages, cut, 3)
    free_from = dict.fromkeys(range(stages), -1)
    clock, pending = 0, {}
    for row in rows:
        for action in row.order:
            clock += 1
            if action == "barrier":
                free_from |= dict.fromkeys(pending, clock)
                pending = {}
            elif action == "copy" and row.copy:
                assert free_from[row.into] is not None and free_from[row.into] < clock
                free_from[row.into] = None
            elif action == "compute":
                pending[row.slot] = row.compute
    assert clock > len(rows)


@pytest.mark.parametrize(("stages", "cut"), BOTH)
def test_a_wait_leaves_in_flight_what_later_steps_want_and_no_more(stages, cut):
    rows = schedule(stages, cut, 3)
    begun = 0
    for row in rows:
        for action in row.order:
            if action == "copy":
                begun += 1
            elif action == "wait":
                assert begun - row.wait == row.step + 1, "groups that are here: those to this step's slice"


FOUND = {
    "wait": "is not waited for",
    "barrier": "no barrier lies between",
    "early": "nobody has computed with|a warp may still compute with",
    "slot": "from slot",
}


@pytest.mark.parametrize(("stages", "cut"), BOTH)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_table_is_refused(stages, cut, fault):
    if stages == 1 and fault in ("early", "slot"):
        pytest.skip("one slot has no neighbour")
    with pytest.raises(Broken, match=FOUND[fault]):
        check(damaged(schedule(stages, cut, 2), fault, stages))


@given(st.sampled_from(STAGES), st.sampled_from(list(CUTS)), st.data())
def test_a_fault_in_any_single_step_is_found(stages, cut, data):
    rows = schedule(stages, cut, 3)
    at = data.draw(st.sampled_from([i for i, row in enumerate(rows[:-1]) if row.compute and row.copy]))
    row = rows[at]
    changes = ["wait", "arrival", "lost"]
    if stages > 1:
        changes += ["slot", "into"]
    if stages == 1:
        changes += ["freed"]
    change = data.draw(st.sampled_from(changes))
    if change == "wait":
        rows[at] = replace(row, wait=row.wait + 1)
    elif change == "arrival":
        where = row.order.index("barrier")
        rows[at] = replace(row, order=row.order[:where] + row.order[where + 1 :])
    elif change == "freed":
        rows[at] = replace(row, order=row.order[:-1])
    elif change == "lost":
        rows[at] = replace(row, copy=None)
    elif change == "slot":
        rows[at] = replace(row, slot=(row.slot + data.draw(st.integers(1, stages - 1))) % stages)
    else:
        rows[at] = replace(row, into=(row.into + data.draw(st.integers(1, stages - 1))) % stages)
    with pytest.raises(Broken):
        check(rows)


def test_a_slice_that_nobody_wants_is_found():
    rows = schedule(2, "tile", 1)
    rows[-1] = replace(rows[-1], order=("wait", "barrier"))
    with pytest.raises(Broken, match=r"nobody computes with V0\.0"):
        check(rows)


@pytest.mark.parametrize(("stages", "cut"), BOTH)
def test_the_period_unrolled_is_the_table(stages, cut):
    tiles = 6
    rows = schedule(stages, cut, tiles)
    first, tile, turn = period(schedule(stages, cut, 4), stages)
    again = list(first)
    for j in range(tiles):
        for row in tile:
            compute, copy = (x and x._replace(tile=x.tile + j) for x in (row.compute, row.copy))
            if copy.tile >= tiles:
                copy = None
            slot, into = ((s + j * turn) % stages for s in (row.slot, row.into))
            step = row.step + j * len(tile)
            again.append(replace(row, step=step, slot=slot, into=into, compute=compute, copy=copy))
    assert again == rows


def test_what_a_slot_holds():
    state = table(schedule(2, "tile", 1), 2)
    assert state.tolist() == [[1, 2, 1, 2], [0, 1, 2, 0]]
    deep = table(schedule(4, "quarter", 2), 4)
    assert ((deep == 2).sum(0) == [0, 0, 0] + [1] * 20).all()
    assert (deep[:, 5:-5] > 0).all(), "every slot is in use all the time"


@pytest.mark.parametrize(
    ("stages", "cut", "words"), [(0, "tile", "stages is 0"), (5, "tile", "stages is 5"), (2, "half", "cut is 'half'")]
)
def test_what_there_is_no_table_for(stages, cut, words):
    with pytest.raises(ValueError, match=words):
        schedule(stages, cut, 1)


# -- attention by the table --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("stages", "cut"), BOTH)
def test_attention_by_the_table_is_attention(stages, cut):
    rng = np.random.default_rng(stages)
    for m, n, d, causal in ((20, 45, 7, False), (20, 45, 32, True), (30, 12, 5, True), (3, 0, 4, False)):
        q, k, v = (rng.standard_normal((rows, d)) for rows in (m, n, n))
        found = attention(q, k, v, stages, cut, bm=8, bn=16, causal=causal)
        for got, expected in zip(found, dense(q, k, v, causal=causal), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fault", ["slot", "early"])
def test_attention_by_a_damaged_table_is_wrong(monkeypatch, fault):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((8, 8)) for _ in range(3))
    whole = reference.schedule
    monkeypatch.setattr(reference, "schedule", lambda *sizes: damaged(whole(*sizes), fault, sizes[0]))
    try:
        o, _ = attention(q, k, v, 3, "tile", bm=8, bn=8)
    except ValueError:  # the slot is empty
        return
    assert not np.allclose(o, dense(q, k, v)[0], rtol=1e-3)


# -- the budget --------------------------------------------------------------------------------------------------------
def test_slices_of_k_and_v_take_the_same():
    for d in (64, 128, 192, 256):
        for bn in (64, 128):
            assert slot_bytes("quarter", d, bn) == bn * d // 4 * 2 == slot_bytes("tile", d, bn) // 4
    assert ring_bytes(4, "quarter", 128, 64) * 2 == ring_bytes(2, "tile", 128, 64) == 32 * 1024


def test_the_budget_of_the_notes():
    """256 threads of 256 registers: 256 KB of 768; three blocks share 64 KB, so a block may have 21 KB."""
    found = budget(256, 256, ring_bytes(4, "quarter", 128, 64), 768 * 1024, 64 * 1024)
    assert (found.block_bytes, found.by_registers, found.blocks) == (256 * 1024, 3, 3)
    assert found.shared_within // 1024 == 21 and ring_bytes(4, "quarter", 128, 64) <= found.shared_within
    whole = budget(256, 256, ring_bytes(2, "tile", 128, 64), 768 * 1024, 64 * 1024)
    assert whole.blocks == 2, "two whole tiles leave room for two blocks"


@given(st.integers(1, 4), st.sampled_from(list(CUTS)), st.sampled_from([64, 128]))
def test_the_formulas_are_those_of_the_machine_that_has_no_units(stages, cut, d):
    ring = ring_bytes(stages, cut, d, 64)
    short = budget(256, 256, ring, 4 * NOTES.registers, NOTES.shared)
    full = full_budget(NOTES, threads=256, registers=256, shared=ring)
    assert short.blocks == full.blocks
    assert short.shared_within == NOTES.shared_within(3)


@given(st.sampled_from(["80", "90"]), st.sampled_from([96, 128, 168, 255]), st.sampled_from([128, 256]))
def test_units_of_allocation_cost_a_block_at_most(arch, registers, threads):
    machine = MACHINES[arch]
    short = budget(registers, threads, 16 * 1024, 4 * machine.registers, machine.shared)
    full = full_budget(machine, threads=threads, registers=registers, shared=16 * 1024)
    assert full.blocks in (short.blocks, short.blocks - 1)


def test_registers_that_are_held():
    assert registers_held(128, 64) == 64 + 32 + 32
    assert registers_held(64, 64, 32) == 64 + 64 + 32


def test_a_slice_is_named_by_operand_tile_and_part():
    assert str(Slice("V", 2, 1)) == "V2.1" and str(Slice("Q", 0, 3)) == "Q.3"
