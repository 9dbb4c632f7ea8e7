"""The reference: the triangle's work against a mask, grids against what they promise, the clock against arithmetic."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flashnumba.stages.causal_balance.reference import (
    block_work,
    dispatch,
    longest_first,
    lower_bound,
    makespan,
    paired,
    plain,
    row_work,
)

GRIDS = (plain, paired, longest_first)
lengths, tiles, heads = st.integers(0, 70), st.integers(1, 12), st.integers(1, 9)
machines = st.integers(1, 12)
costs = st.lists(st.integers(0, 30), max_size=40)


@given(lengths, lengths, tiles, tiles, st.booleans())
def test_a_row_tile_computes_the_tiles_in_which_it_sees_something(m, n, bm, bn, causal):
    row, key = np.arange(-(-m // bm) * bm)[:, None], np.arange(n)
    seen = (key <= row + n - m) if causal else np.ones((len(row), n), bool)
    expected = [
        sum(seen[i : i + bm, j : j + bn].any() for j in range(0, n, bn)) for i in range(0, len(row), bm)
    ]  # fmt: skip
    assert row_work(m, n, bm, bn, causal).tolist() == expected


def test_the_staircase():
    assert row_work(512, 512, 64, 64).tolist() == list(range(1, 9))
    assert row_work(512, 512, 64, 64, causal=False).tolist() == [8] * 8
    assert row_work(512, 256, 64, 64).tolist() == [0, 0, 0, 0, 1, 2, 3, 4]
    assert row_work(256, 512, 64, 64).tolist() == [5, 6, 7, 8]
    assert row_work(256, 256, 128, 64).tolist() == [2, 4]


@given(lengths, lengths, tiles, tiles, heads, st.booleans())
def test_every_grid_has_every_tile_of_every_head_once(m, n, bm, bn, heads, causal):
    work = row_work(m, n, bm, bn, causal)
    for grid in GRIDS:
        pieces = [piece for block in grid(work, heads) for piece in block]
        assert sorted(pieces) == [(head, tile) for head in range(heads) for tile in range(len(work))]
        assert block_work(grid(work, heads), work).sum() == heads * work.sum()


@given(st.integers(1, 40), st.integers(1, 8), heads)
def test_pairs_are_alike(n, tile, heads):
    """n + 1 tiles of keys each; the middle one of an odd number has half of that."""
    work = row_work(n * tile, n * tile, tile, tile)
    of_each = block_work(paired(work, heads), work).tolist()
    assert of_each == [n + 1] * (n // 2 * heads) + [(n + 1) // 2] * (n % 2 * heads)


@given(lengths, lengths, tiles, tiles, heads)
def test_longest_first_descends(m, n, bm, bn, heads):
    work = row_work(m, n, bm, bn)
    of_each = block_work(longest_first(work, heads), work)
    assert (np.diff(of_each) <= 0).all()


# -- the clock ---------------------------------------------------------------------------------------------------------
def test_by_hand():
    """Costs 1 2 3 4 on two: 1 and 2 begin, 3 after 1, 4 after 2; the longest first takes 5 = 10 / 2."""
    run = dispatch([1, 2, 3, 4], 2)
    assert run.multiprocessor.tolist() == [0, 1, 0, 1]
    assert run.start.tolist() == [0, 0, 1, 2] and run.end.tolist() == [1, 2, 4, 6]
    assert makespan([4, 3, 2, 1], 2) == 5 == lower_bound([4, 3, 2, 1], 2)
    assert makespan([], 3) == 0 and makespan([7], 3) == 7


def test_two_at_a_time_by_hand():
    """Costs 4 and 1 on one. Undisturbed, at half speed each: the first takes 8. If one alone had all: 2 for the second,
    with half the speed, then 3 for what is left of the first. With 3/4 alone: 4 for it."""
    assert dispatch([4, 1], 1, 2).end.tolist() == [8, 2]
    assert dispatch([4, 1], 1, 2, alone=1).end.tolist() == [5, 2]
    assert dispatch([4, 1], 1, 2, alone=0.75).end.tolist() == [6, 2]
    assert makespan([4], 1, 2, alone=0.75) == pytest.approx(4 / 0.75) == lower_bound([4], 1, alone=0.75)
    assert makespan([3, 3, 3], 1, 3) == 9 and makespan([3, 3], 1, 3, alone=0.5) == pytest.approx(6 / 0.75)


def test_blocks_are_spread_before_they_share():
    run = dispatch([1] * 6, 4, 2)
    assert run.multiprocessor.tolist() == [0, 1, 2, 3, 0, 1]


@given(costs, machines)
@example([2, 2, 1, 1, 1, 3], 3)
def test_grahams_bounds(costs, machines):
    total, longest = sum(costs), max(costs, default=0)
    bound = lower_bound(costs, machines)
    took = makespan(costs, machines)
    assert bound - 1e-9 <= took <= total / machines + (1 - 1 / machines) * longest + 1e-9
    best = makespan(sorted(costs, reverse=True), machines)
    assert best <= (4 / 3 - 1 / (3 * machines)) * took + 1e-9


@given(costs, machines, st.integers(1, 4), st.floats(0.3, 1))
def test_nothing_is_lost(costs, machines, at_once, alone):
    """No more blocks than there is room for, in order, and as much work done as there was."""
    alone = max(alone, 1 / at_once)
    run = dispatch(costs, machines, at_once, alone)
    assert (np.diff(run.start) >= 0).all() and (run.end >= run.start).all()
    assert run.makespan >= lower_bound(costs, machines, alone) - 1e-9
    for mp in range(machines):
        mine = run.multiprocessor == mp
        moments = np.unique(np.concatenate([run.start[mine], run.end[mine]]))
        done = 0.0
        for a, b in pairwise(moments):
            there = int(((run.start[mine] <= a) & (run.end[mine] >= b) & (run.end[mine] > run.start[mine])).sum())
            assert there <= at_once
            if there:
                share = (there - 1) / max(1, at_once - 1)
                done += (b - a) * (1 if there == at_once else alone + (1 - alone) * share)
        assert done == pytest.approx(float(np.asarray(costs, float)[mine].sum()), abs=1e-6)


@given(st.integers(1, 40), heads, machines)
def test_on_squares_in_whole_tiles_the_longest_first_is_never_later(n, heads, machines):
    """Graham's bound allows a third more than another order in general; a staircase of equal steps from one on is
    kinder."""
    work = row_work(4 * n, 4 * n, 4, 4)
    in_order, sorted_ = (makespan(block_work(grid(work, heads), work), machines) for grid in (plain, longest_first))
    assert sorted_ <= in_order


def test_on_other_shapes_it_may_be():
    work = row_work(25, 49, 5, 1)  # 29, 34, 39, 44 and 49 tiles of keys
    spans = [makespan(block_work(grid(work, 3), work), 2) for grid in (plain, longest_first)]
    assert spans == [302, 307]
