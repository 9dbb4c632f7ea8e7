"""Schedules alone: the code that kernels run, asked from Python where each piece of the work goes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashnumba.machine.emulator import as_python
from flashnumba.stages.causal_balance import reference
from flashnumba.tiles import schedule
from flashnumba.tiles.schedule import L2_BYTES, SCHEDULES

lengths, sizes = st.integers(0, 90), st.integers(1, 12)
EVERY = pytest.mark.parametrize("name", SCHEDULES)
heads_near, tiles_of_keys = as_python(schedule.heads_near), as_python(schedule.tiles_of_keys)


def grid_of(name, tiles, heads, near, causal=1, multiprocessors=3):
    """[blocks] of lists of (head, tile), as the kernel does them; of a schedule that draws, a block a piece."""
    chosen = SCHEDULES[name]
    piece, blocks = as_python(chosen.piece), chosen.blocks(tiles, heads)
    numbers = [range(block, chosen.turns * blocks, blocks) for block in range(blocks)]
    found = [[piece(number, tiles, heads, near, causal) for number in mine] for mine in numbers]
    return [[(head, tile) for head, tile in block if tile < tiles] for block in found]


@given(lengths, lengths, sizes, sizes, st.booleans())
def test_tiles_of_keys_are_those_of_the_reference(m, n, bm, bn, causal):
    found = [tiles_of_keys(tile, m, n, bm, bn, int(causal)) for tile in range(-(-m // bm))]
    assert found == reference.row_work(m, n, bm, bn, causal).tolist()


@EVERY
@given(tiles=st.integers(1, 20), heads=sizes, near=sizes, causal=st.booleans())
def test_every_tile_of_every_head_exactly_once(name, tiles, heads, near, causal):
    pieces = [piece for block in grid_of(name, tiles, heads, min(near, heads), int(causal)) for piece in block]
    assert len(pieces) == tiles * heads
    assert set(pieces) == {(head, tile) for head in range(heads) for tile in range(tiles)}


@given(tiles=st.integers(1, 20), heads=sizes)
def test_grids_are_those_of_the_reference(tiles, heads):
    work = np.arange(1, tiles + 1)
    for name, near in (("plain", 1), ("plain", heads), ("paired", heads), ("longest_first", heads)):
        assert grid_of(name, tiles, heads, near) == getattr(reference, name)(work, heads)


@given(st.integers(1, 90), lengths, sizes, sizes, st.integers(1, 6), st.integers(1, 6))
def test_within_a_section_the_longest_come_first_whatever_the_shape(m, n, bm, bn, heads, near):
    work, near = reference.row_work(m, n, bm, bn), min(near, heads)
    of_each = reference.block_work(grid_of("longest_first", len(work), heads, near), work)
    for at in range(0, len(of_each), near * len(work)):
        assert (np.diff(of_each[at : at + near * len(work)]) <= 0).all()


@given(st.integers(1, 90), st.integers(0, 90), sizes, sizes)
def test_pairs_are_alike_but_for_a_step(m, longer, bm, bn):
    """Where all rows see something: steps of whole tiles are uneven by one, and a last tile may have fewer rows."""
    work = reference.row_work(m, m + longer, bm, bn)
    of_each = reference.block_work(grid_of("paired", len(work), 1, 1), work)[: len(work) // 2]
    assert np.ptp(of_each, axis=0) <= -(-bm // bn) + 1 if len(of_each) else True


@given(tiles=st.integers(1, 20), heads=sizes)
def test_head_by_head_is_longest_first_in_sections_of_one(tiles, heads):
    assert grid_of("head_by_head", tiles, heads, heads) == grid_of("longest_first", tiles, heads, 1)
    assert grid_of("head_by_head", tiles, heads, heads, causal=0) == grid_of("plain", tiles, heads, 1)


@given(st.integers(1, 30), sizes, sizes)
def test_a_section_is_finished_before_the_next_begins(tiles, heads, near):
    near = min(near, heads)
    for name in ("paired", "longest_first", "persistent"):
        seen = [block[0][0] // near for block in grid_of(name, tiles, heads, near)]
        assert seen == sorted(seen)


@EVERY
def test_without_a_mask_one_tile_a_block_is_head_after_head(name):
    if name != "paired":
        assert grid_of(name, 3, 2, 2, causal=0) == [[(0, 0)], [(0, 1)], [(0, 2)], [(1, 0)], [(1, 1)], [(1, 2)]]


@given(st.integers(1, 600), st.sampled_from([1, 2, 4, 8]), st.integers(0, 1 << 20), st.sampled_from([2, 64, 256, 512]))
def test_sections_fit_the_cache_and_are_alike(groups, group, n, row_bytes):
    heads = groups * group
    near = heads_near(heads, group, n, row_bytes)
    assert group <= near <= heads and near % group == 0
    kv = 2 * n * row_bytes
    assert near == group or near // group * (kv - 1023) <= L2_BYTES
    sections = -(-heads // near)
    assert heads - (sections - 1) * near > 0
    if near < heads:  # one section fewer would not fit
        assert -(-groups // (sections - 1)) * (kv + 1024) > L2_BYTES or groups % near


def test_sections_by_hand():
    """1024 keys of 64 float16 numbers are 256 KB with their values: 128 heads to 32 MB."""
    assert heads_near(512, 1, 1024, 128) == 128
    assert heads_near(130, 1, 1024, 128) == 65, "two alike, not 128 and 2"
    assert heads_near(32, 1, 16384, 128) == 8
    assert heads_near(32, 8, 16384, 128) == 32, "four heads of keys"
    assert heads_near(6, 3, 1 << 20, 512) == 3, "no group is torn apart"
    assert heads_near(7, 1, 0, 2) == 7


@pytest.mark.parametrize(("tiles", "heads"), [(1, 2**31 - 1), (2**16, 2**15 - 1), (2**31 - 1, 1), (3, 715827882)])
def test_numbers_up_to_the_largest_grid(tiles, heads):
    for name in ("plain", "paired", "longest_first"):
        chosen = SCHEDULES[name]
        piece, blocks = as_python(chosen.piece), chosen.blocks(tiles, heads)
        assert piece(0, tiles, heads, heads, 1) == (0, 0 if name == "plain" else tiles - 1)
        head, tile = piece(blocks - 1, tiles, heads, heads, 1)
        assert head == heads - 1
        assert tile == {"plain": tiles - 1, "longest_first": 0, "paired": tiles // 2}[name]
