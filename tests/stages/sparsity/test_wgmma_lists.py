"""Lists of blocks by wgmma: tiles gathered from them, blocks that draw row tiles, and each planted fault caught."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import ml_dtypes
import numpy as np
import pytest

from flashnumba.machine.emulator import Fault
from flashnumba.stages.flash_forward.wgmma import plan_of
from flashnumba.stages.heads import Shape
from flashnumba.stages.sparsity import lists, wgmma
from flashnumba.stages.sparsity import reference as R
from flashnumba.stages.sparsity.problem import limit_of
from flashnumba.tiles import specialised_lists
from flashnumba.tiles.sparse import COMPUTED, SKIPPED
from flashnumba.tiles.specialised_tiles import SpecialisedTiles
from tests.stages.slow import make_slow
from tests.stages.sparsity.sparse_cases import data, dense_bits, right, run

pytestmark = pytest.mark.usefixtures("hopper")
PAIRS, SINGLE = SpecialisedTiles(64, 128, block=64), SpecialisedTiles(64, 64, slots=3, block=64)
TRIPLES = SpecialisedTiles(64, 192, block=64)
ROWS, KEYS, UNIT, THRESHOLD = 128, 64, 64, 0.02
PRODUCER, FIRST, SECOND = 0, 128, 256
"""Threads that speak for their warpgroups."""


def listed(tiles=PAIRS, grid=None, **options):
    """The plan over a mask's blocks, with a map, of ``grid`` blocks if it is said how many."""

    def plan(shape):
        made = wgmma.plan_blocks(shape, noted=True, tiles=tiles, **options)
        *before, attend = made.launches
        return replace(made, launches=(*before, replace(attend, grid=grid or attend.grid)))

    return plan


def some(m, n, heads=1, seed=3, share=0.5):
    """A mask; the first row tile of the first head has no block."""
    mask = np.random.default_rng(seed).random((1, heads, -(-m // ROWS), -(-n // KEYS))) < share
    mask[0, 0, 0] = False
    return mask


def sound(qkv, mask, plan, *, causal=False, threshold=0.0, **more) -> bool:
    """Whether what is computed is the mask's, less what rows can do without, and o and lse are attention over it."""
    m, n = qkv[0].shape[2], qkv[1].shape[2]
    given = {"limit": limit_of(threshold), "mask": mask.astype(np.uint8)}
    o, lse, made = run(plan, qkv, given, causal=causal, **more)
    chosen = mask.repeat(ROWS // UNIT, 2)[:, :, : -(-m // UNIT)] & R.visible_blocks(m, n, UNIT, KEYS, causal)
    found = made["tile_map"]
    seen = np.broadcast_to(R.visible_blocks(m, n, UNIT, KEYS, causal), found.shape)
    assert found.max() <= SKIPPED
    same = np.array_equal(found[seen] != 0, chosen[seen]) and (threshold > 0 or not (found == SKIPPED).any())
    return same and right((o, lse), qkv, R.expand(found == COMPUTED, UNIT, KEYS, m, n), causal=causal)


# -- against the reference ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("tiles", "n", "causal"), [(PAIRS, 450, False), (PAIRS, 333, True), (SINGLE, 200, True), (SINGLE, 192, False)]
)
def test_any_mask(machine, tiles, n, causal):
    """Lists of any length, odd ones too; rows that look at nothing; a last block that is not whole."""
    qkv, mask = data(150, n, 64, heads=2, stretch=(64, 64)), some(150, n, 2)
    mask[0, 1, 0] = np.arange(mask.shape[-1]) == 1
    assert sound(qkv, mask, listed(tiles), causal=causal, machine=machine)


@pytest.mark.parametrize("d", [40, 128])
def test_the_tiles_that_are_launched(machine, d):
    """In bfloat16, with a scale that turns Q around for a part; blocks of several tiles, and no map."""
    qkv = data(70, 400, d, dtype=ml_dtypes.bfloat16)
    mask = np.array([[[[True, False, True, False]]]])
    plan = partial(wgmma.plan_blocks, block_m=256, block_n=128)
    results = run(plan, qkv, {"limit": -np.inf, "mask": mask.astype(np.uint8)}, scale=-0.1, machine=machine)[:2]
    assert right(results, qkv, R.expand(mask, 256, 128, 70, 400), scale=-0.1)


def test_a_scale_of_zero(machine):
    """All that is listed weighs the same, and no column that is none does."""
    qkv, mask = data(70, 300, 64), np.array([[[[True, False, True, False, True]]]])
    results = run(listed(), qkv, {"limit": -np.inf, "mask": mask.astype(np.uint8)}, scale=0.0, machine=machine)[:2]
    assert right(results, qkv, R.expand(mask, ROWS, KEYS, 70, 300), scale=0.0)


def test_batches_and_heads_that_share_keys(machine):
    """More blocks than a warp packs at once, and a mask of its own for each head of two batches."""
    m, n = 20, 2200
    qkv = tuple(
        map(np.concatenate, zip(*(data(m, n, 64, heads=4, kv_heads=2, seed=seed) for seed in (0, 1)), strict=True))
    )
    mask = np.random.default_rng(4).random((2, 4, 1, -(-n // KEYS))) < 0.1
    assert (mask[..., :32].any(-1) & mask[..., 32:].any(-1)).any()
    assert sound(qkv, mask, listed(), machine=machine)


@pytest.mark.parametrize("causal", [False, True])
def test_a_mask_of_ones_is_dense_bit_for_bit(machine, causal):
    qkv, whole = data(150, 256, 64), SpecialisedTiles(64, 128)
    given = {"limit": -np.inf, "mask": np.ones((1, 1, 2, 4), np.uint8)}
    dense = run(lambda shape: plan_of(shape, whole), qkv, {}, causal=causal, machine=machine)[:2]
    dense_bits(run(listed(), qkv, given, causal=causal, machine=machine), dense)


@pytest.mark.parametrize("causal", [False, True])
def test_votes_among_listed_blocks(machine, causal):
    """By tile as it is gathered, in the order of the list."""
    m, n = 150, 700
    qkv, mask = data(m, n, 64, stretch=(64, 64)), some(m, n, share=0.7)
    s = R.scores(*qkv[:2], causal=causal)
    row_tiles = mask & R.visible_blocks(m, n, ROWS, KEYS, causal)
    s_kept = np.where(R.expand(mask, ROWS, KEYS, m, n), s, -np.inf)
    wanted = R.skip_gathered(s_kept, row_tiles, UNIT, ROWS, KEYS, 2, THRESHOLD)
    given = {"limit": limit_of(THRESHOLD), "mask": mask.astype(np.uint8)}
    o, lse, made = run(listed(vote=True), qkv, given, causal=causal, machine=machine)
    seen = np.broadcast_to(R.visible_blocks(m, n, UNIT, KEYS, causal), wanted.shape)
    np.testing.assert_array_equal((made["tile_map"] == COMPUTED)[seen], wanted[seen])
    assert (made["tile_map"] == SKIPPED).any()
    assert right((o, lse), qkv, R.expand(wanted, UNIT, KEYS, m, n), causal=causal)


@pytest.mark.parametrize("tiles", [SINGLE, TRIPLES], ids=str)
def test_as_many_blocks_as_a_row_tile_can_cut(machine, tiles):
    """The last three of four, of which the last is alone in its tile, or each is."""
    qkv, mask = data(128, 212, 64, stretch=(64, 64)), np.ones((1, 1, 1, 4), bool)
    assert sound(qkv, mask, listed(tiles), causal=True, machine=machine)


def test_v_that_is_wanted_after_one_that_is_not(machine):
    """It is not ordered beforehand, so the list is looked up for it."""
    qkv, mask = data(128, 1280, 64, stretch=(128, 128)), np.ones((1, 1, 1, 20), bool)
    mask[..., [5, 7]] = False
    s_kept = np.where(R.expand(mask, ROWS, KEYS, 128, 1280), R.scores(*qkv[:2]), -np.inf)
    wanted = R.skip_gathered(s_kept, mask, UNIT, ROWS, KEYS, 2, THRESHOLD)
    assert not wanted[..., 4:10].any() and wanted[..., 10:12].all()
    assert sound(qkv, mask, listed(vote=True), threshold=THRESHOLD, machine=machine)


def test_the_mask_that_is_predicted(machine):
    """The prediction's launches come before, and their mask is what is attended to."""
    qkv = data(300, 500, 64, stretch=(64, 64))
    given = {"limit": -np.inf, "alike": 0.3, "kept": 0.7, "sink": 1}
    o, lse, made = run(partial(wgmma.plan_sparge, noted=True), qkv, given, machine=machine)
    mask = R.predict(*qkv[:2], rows=ROWS, keys=KEYS, alike=0.3, cdf=0.7, sink=True)
    np.testing.assert_array_equal(made["mask"], mask)
    assert not mask.all()
    assert right((o, lse), qkv, R.expand(mask, ROWS, KEYS, 300, 500))


def test_what_is_refused():
    shape = Shape("float16", 1, 1, 1, 8, 8, 64)
    assert wgmma.takes_blocks(shape, 128) and wgmma.takes_blocks(shape, 256) and not wgmma.takes_blocks(shape, 64)
    assert not wgmma.takes_blocks(replace(shape, arch="80"), 128)
    for sizes in ({"block_m": 64}, {"block_n": 32}, {"block_m": 0}):
        with pytest.raises(ValueError, match="they must be multiples of 128 and 64"):
            wgmma.plan_blocks(shape, **sizes)
    with pytest.raises(ValueError, match="wgmma of float32"):
        wgmma.plan_blocks(replace(shape, element="float32"))
    with pytest.raises(ValueError, match="blocks of 48 keys"):
        SpecialisedTiles(64, 128, block=48)


# -- blocks that stay, and who is late ---------------------------------------------------------------------------------
@pytest.mark.parametrize("vote", [False, True])
@pytest.mark.parametrize("slow", [PRODUCER, FIRST + 5, SECOND])
def test_two_blocks_for_many_row_tiles(slow, vote, monkeypatch):
    """Row tiles without a block, with one and with several follow one another in rings that are counted through."""
    make_slow(monkeypatch, (slow,))
    m, n = 5 * ROWS - 9, 330
    qkv, mask = data(m, n, 64, stretch=(64, 64)), some(m, n)
    mask[0, 0, 1], mask[0, 0, 3] = np.arange(6) == 4, False
    assert sound(qkv, mask, listed(grid=2, vote=vote), threshold=THRESHOLD * vote, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("vote", [False, True])
@pytest.mark.parametrize("tiles", [PAIRS, SINGLE, SpecialisedTiles(64, 192, block=64)], ids=str)
def test_many_masks_on_a_gpu(tiles, vote):
    for seed in range(20):
        m, n, causal = 900 + 37 * seed, 1500 + 61 * seed, seed % 2 == 1
        qkv, mask = data(m, n, 64, heads=2, stretch=(64, 64), seed=seed), some(m, n, 2, seed, 0.05 + 0.05 * seed)
        plan = listed(tiles, grid=3 if seed % 3 else None, vote=vote)
        assert sound(qkv, mask, plan, causal=causal, threshold=THRESHOLD * vote, machine="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize("vote", [False, True])
def test_the_same_bits_every_time(d, vote):
    qkv = data(1100, 1500, d, heads=4, kv_heads=2, stretch=(128, 64))
    given = {"limit": limit_of(THRESHOLD), "alike": 0.3, "kept": 0.7, "sink": 1}
    runs = [run(partial(wgmma.plan_sparge, noted=True, vote=vote), qkv, given, machine="cuda") for _ in range(20)]
    kept = R.expand(runs[0][2]["tile_map"] == COMPUTED, UNIT, KEYS, 1100, 1500)
    assert not kept.all() and right(runs[0][:2], qkv, kept)
    for o, lse, made in runs[1:]:
        dense_bits((o, lse), runs[0][:2])
        np.testing.assert_array_equal(made["tile_map"], runs[0][2]["tile_map"])


# -- planted faults ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("broken", ["", *specialised_lists.FAULTS, *lists.FAULTS])
def test_planted_faults(broken):
    """And none at all, which is right."""
    m, n, keys, causal = 200, 330, 128 if broken == "block" else KEYS, broken == "loose"
    qkv, mask = data(m, n, 64, heads=2, stretch=(64, 64)), some(m, n, 2)[..., :: keys // KEYS]
    plan, given = listed(grid=1, block_n=keys, broken=broken), {"limit": -np.inf, "mask": mask.astype(np.uint8)}
    try:
        o, lse, _ = run(plan, qkv, given, causal=causal)
    except Fault:
        assert broken
        return
    assert right((o, lse), qkv, R.expand(mask, ROWS, keys, m, n), causal=causal) == (not broken)
