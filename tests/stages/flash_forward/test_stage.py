"""The stage: its real cases, every rung on them, what it counts beside what the emulator counts, and its figure."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashnumba.ladder import find
from flashnumba.machine import emulator
from flashnumba.stages.flash_forward import count, plans, reference, simt, simt_tiles, split
from flashnumba.stages.flash_forward.count import FULL, MASKED, SKIPPED, tile_kinds
from flashnumba.tiles.forward import tiles_for
from flashnumba.tiles.sizes import AttentionTiles
from tests.stages.flash_forward.attention_cases import normal
from tests.stages.flash_forward.test_mma import with_tiles
from tests.stages.flash_forward.test_split import with_splits

STAGE = find("flash_forward")


def test_cases():
    cases = STAGE.cases("emulator", False)
    for case in cases:
        q, k, v, causal = (case.inputs[name] for name in ("q", "k", "v", "causal"))
        expected, _ = reference.dense(q, k, v, causal=bool(causal))
        np.testing.assert_allclose(case.reference, expected, rtol=1e-10, atol=1e-13)
        assert ("causal" in case.size) is bool(causal)
    assert {bool(case.inputs["causal"]) for case in cases} == {True, False}
    assert any(case.inputs["q"].shape[-2] != case.inputs["k"].shape[-2] for case in cases)
    assert {rung.name for rung in STAGE.kernels} == set(plans())


sizes = st.integers(1, 40)
tiles = st.integers(1, 12)


@given(sizes, sizes, tiles, tiles, st.booleans())
def test_tiles_are_of_the_kind_that_their_elements_make_them(m, n, bm, bn, causal):
    seen = reference.visible(m, n, causal)
    kinds = tile_kinds(m, n, bm, bn, causal)
    assert kinds.shape == (-(-m // bm), -(-n // bn))
    for (i, j), kind in np.ndenumerate(kinds):
        tile = seen[i * bm : (i + 1) * bm, j * bn : (j + 1) * bn]
        if not tile.any():
            assert kind == SKIPPED
        else:
            assert kind == (FULL if tile.all() and tile.shape[1] == bn else MASKED)


def counted(plan, case):
    """(read, written) in bytes by each launch of a plan, as the emulator counts them."""
    planned, reports = plan(case.shape), []
    known = {name: getattr(case, name) for name in "qkv"}
    known |= {"o": np.empty_like(case.q), "lse": np.empty(case.q.shape[:3], np.float32)}
    known |= {name: np.empty(size, np.float32) for name, size in planned.scratch.items()}
    known |= {"scale": np.float32(0.2), "causal": np.int32(case.causal)}
    for launch in planned.launches:
        args = [known[name] for name in launch.args]
        done = emulator.launch(launch.kernel, launch.grid, launch.threads, args, shared=launch.shared, checks=False)
        reports.append((done.loaded, done.stored))
    return reports


@pytest.mark.parametrize(
    ("m", "n", "causal"), [(45, 77, False), (77, 45, False), (45, 77, True), (40, 96, True), (90, 90, True)]
)
def test_bytes_of_mma_are_those_that_the_emulator_counts(m, n, causal):
    case = normal(m, n, 32, np.float16, heads=2, kv_heads=1, causal=causal)
    ((read, written),) = counted(with_tiles(AttentionTiles(32, 32, 32, warps=2)), case)
    moved = count.fused(case.shape, 32, 32)
    assert read + written == moved.total
    assert written == case.q.nbytes + 4 * case.q[..., 0].size
    assert moved.once == read + written - moved.again == count.floor(case.shape).total


def test_bytes_of_simt_are_those_that_the_emulator_counts():
    case = normal(70, 134, 32, np.float32, causal=True)
    plan = simt.plan_simt(case.shape)
    tiles = simt_tiles.tiles_for(case.shape)
    ((read, written),) = counted(lambda shape: plan, case)
    assert read + written == count.fused(case.shape, tiles.bm, tiles.bn).total


@pytest.mark.parametrize("splits", [1, 3])
def test_bytes_of_split_are_those_that_the_emulator_counts(splits):
    case = normal(3, 75, 32, np.float16, heads=4, kv_heads=2)
    (read, written), (merged, _) = counted(with_splits(splits), case)
    moved = count.split(case.shape, 16, 16, splits)
    assert written == moved.parts // 2
    assert merged >= written, "the merge reads every part"
    outputs = case.q.nbytes + 4 * case.q[..., 0].size
    assert read == moved.once + moved.again - outputs


def test_bytes_of_attention_that_is_not_fused():
    """By the numbers of one head: 8 queries, 16 keys, 4 columns, 2 bytes an element."""
    shape = replace(normal(8, 16, 32, np.float16).shape, d=4)
    products = (8 * 4 + 16 * 4 + 8 * 16) + (8 * 16 + 16 * 4 + 8 * 4)
    assert count.unfused(shape).total == 2 * (products + 2 * 8 * 16)


def test_a_rung_states_the_bytes_of_the_tiles_that_it_is_planned_with():
    by_name = {rung.name: rung for rung in STAGE.kernels}
    for case in STAGE.cases("emulator", False):
        shape = count.shape_of(case)
        tiles = tiles_for(shape.d, shape.arch)
        moved = {"mma": count.fused(shape, tiles.bm, tiles.bn)}
        parts = split.tiles_for(shape.d, shape.m)
        splits = split.plan_split(shape).scratch["m_parts"][0]
        moved["split"] = count.split(shape, parts.bm, parts.bn, splits)
        for name, expected in moved.items():
            assert by_name[name].traffic(case) == expected.total / case.reference.size
