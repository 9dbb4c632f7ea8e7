"""BLASST by wgmma: what is left out and what comes of it, a slow thread anywhere, and each planted fault caught."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import ml_dtypes
import numpy as np
import pytest

from flashnumba.machine.emulator import Fault
from flashnumba.stages.flash_forward.wgmma import plan_of
from flashnumba.stages.heads import Shape
from flashnumba.stages.sparsity import reference as R
from flashnumba.stages.sparsity import wgmma
from flashnumba.stages.sparsity.problem import limit_of
from flashnumba.tiles import specialised
from flashnumba.tiles.sparse import COMPUTED, SKIPPED
from flashnumba.tiles.specialised_tiles import DECISIONS, SpecialisedTiles, takes
from tests.stages.slow import make_slow
from tests.stages.sparsity.sparse_cases import data, dense_bits, right, run

pytestmark = pytest.mark.usefixtures("hopper")
SMALL = SpecialisedTiles(64, 64)
UNIT, THRESHOLD = 64, 0.02
LIMIT = {"limit": limit_of(THRESHOLD)}
PRODUCER, FIRST, SECOND = 0, 128, 256
"""Threads that speak for their warpgroups."""


def skipping(tiles=SMALL, broken=""):
    return partial(wgmma.plan_blasst, noted=True, tiles=tiles, broken=broken)


def wanted(qkv, tiles=SMALL, causal=False) -> np.ndarray:
    """Which tiles the reference computes."""
    return R.skip(R.scores(*qkv[:2], causal=causal), UNIT, tiles.bn, THRESHOLD)


def sound(qkv, tiles=SMALL, causal=False, broken="", **more) -> bool:
    """Whether the map is the reference's, and o and lse are attention over what it keeps."""
    o, lse, made = run(skipping(tiles, broken), qkv, LIMIT, causal=causal, **more)
    computed = wanted(qkv, tiles, causal)
    kept = R.expand(computed, UNIT, tiles.bn, qkv[0].shape[2], qkv[1].shape[2])
    same = np.array_equal(made["tile_map"] == COMPUTED, computed)
    return same and made["tile_map"].max() <= SKIPPED and right((o, lse), qkv, kept, causal=causal)


def uneven(m=100, n=450):
    """Data of which half of the rows fit keys less, so that rows of a lane do not need the same tiles."""
    q, k, v = data(m, n, 64, stretch=(64, 64))
    q[..., np.arange(m) % 16 >= 8, :] *= q.dtype.type(0.6)
    return q, k, v


def of_pattern(pattern, bn=64):
    """Data of which each unit of 64 rows needs the tiles of keys that the pattern, ``[units, tiles]``, says; the last
    unit and the last tile are not whole. The first tile is always needed."""
    pattern = np.asarray(pattern, bool)
    units, tiles = pattern.shape
    rng, about = np.random.default_rng(0), 12 * np.eye(units, 64)
    q = np.repeat(about, UNIT, 0)[: UNIT * units - 7]
    k = np.repeat(np.where(pattern, 1.0, 0.2).T @ about, bn, 0)[: bn * tiles - 5]
    q, k = (x + 0.1 * rng.standard_normal(x.shape) for x in (q, k))
    qkv = tuple(x[None, None].astype(np.float16) for x in (q, k, rng.standard_normal(k.shape)))
    np.testing.assert_array_equal(wanted(qkv)[0, 0], pattern)
    return qkv


# -- against the reference ---------------------------------------------------------------------------------------------
def test_what_is_left_out_and_what_comes_of_it(machine):
    """Heads that share keys and do not leave out the same, causal; rows beyond the last have no say."""
    q, k, v = data(130, 210, 64, stretch=(64, 64))
    qkv = np.concatenate((q[:, :, :75], q[:, :, 55:]), 1), k, v
    computed = wanted(qkv, causal=True)
    assert not computed[..., :3].all() and (computed[:, 0] != computed[:, 1]).any()
    assert sound(qkv, causal=True, machine=machine)


def test_without_a_map_in_bfloat16(machine):
    qkv = data(75, 210, 64, stretch=(64, 64), dtype=ml_dtypes.bfloat16)
    computed = wanted(qkv)
    assert not computed.all()
    results = run(partial(wgmma.plan_blasst, tiles=SMALL), qkv, LIMIT, machine=machine)[:2]
    assert right(results, qkv, R.expand(computed, UNIT, 64, 75, 210))


@pytest.mark.parametrize("d", [40, 128])
def test_the_tiles_that_are_launched(machine, d):
    qkv = data(100, 300, d, stretch=(64, 64))
    o, lse, made = run(partial(wgmma.plan_blasst, noted=True), qkv, LIMIT, machine=machine)
    unit, keys = wgmma.tile_of(Shape("float16", 1, 1, 1, 100, 300, d))
    computed = R.skip(R.scores(*qkv[:2]), unit, keys, THRESHOLD)
    np.testing.assert_array_equal(made["tile_map"] == COMPUTED, computed)
    assert not computed.all()
    assert right((o, lse), qkv, R.expand(computed, unit, keys, 100, 300))


@pytest.mark.parametrize(
    "m, n, causal", [(33, 20, True), (200, 150, True), (7, 1, False), (1, 63, True), (65, 65, False)]
)
def test_tails_and_rows_that_see_nothing(machine, m, n, causal):
    qkv = data(m, n, 64)
    o, lse, made = run(skipping(), qkv, LIMIT, causal=causal, machine=machine)
    kept = R.expand(made["tile_map"] == COMPUTED, UNIT, 64, m, n)
    assert right((o, lse), qkv, kept, causal=causal)
    computed = wanted(qkv, causal=causal)
    assert made["tile_map"].max() <= SKIPPED
    seen = R.visible_blocks(m, n, UNIT, 64, causal)
    np.testing.assert_array_equal((made["tile_map"] == COMPUTED)[..., seen], computed[..., seen])


def test_threshold_0_is_dense_bit_for_bit(machine):
    qkv = data(70, 150, 64, stretch=(64, 64))
    results = run(skipping(), qkv, {"limit": limit_of(0.0)}, causal=True, machine=machine)
    dense_bits(results, run(lambda shape: plan_of(shape, SMALL), qkv, {}, causal=True, machine=machine)[:2])
    assert not (results[2]["tile_map"] == SKIPPED).any()


def test_what_is_refused():
    shape = Shape("float16", 1, 1, 1, 8, 8, 64)
    assert takes(shape.element, shape.arch, shape.mapped)
    for wrong in ({"arch": "80"}, {"element": "float32"}, {"mapped": False}):
        other = Shape(**{**vars(shape), **wrong})
        assert not takes(other.element, other.arch, other.mapped)
        with pytest.raises(ValueError, match=r"wgmma of|do not lie as the copy engine takes them"):
            wgmma.plan_blasst(other)


# -- the producer, the consumers and who is late -----------------------------------------------------------------------
LONG, NOBODY = np.ones((2, DECISIONS + 5), int), np.ones((2, DECISIONS + 4), int)
LONG[0, 2:-2] = LONG[1, 3:-4] = LONG[1, -2] = 0
NOBODY[:, 1:-2] = 0
TURNS = [[1, 0, 0, 1, 0, 0, 1], [1, 1, 1, 1, 0, 1, 0]]
IN_VAIN = [[1, 1, 0, 0, 1], [1, 1, 0, 0, 0]]
LAST = [[1, 0, 0, 0, 1], [1, 0, 0, 0, 1]]


@pytest.mark.parametrize(
    ("pattern", "slow", "seed"),
    [
        (LONG, (SECOND,), 0), (NOBODY, (PRODUCER,), 0), (TURNS, (FIRST,), 0), (IN_VAIN, (SECOND,), 1),
        (IN_VAIN, (PRODUCER,), 2), (LAST, (PRODUCER,), 0),
    ],
    ids=["one of two for long, late", "nobody for long, ordered late", "in turns, one late", "in vain, a late vote",
         "in vain and late", "the last one"],
)  # fmt: skip
def test_any_pattern_in_any_order(pattern, slow, seed, monkeypatch):
    make_slow(monkeypatch, slow)
    assert sound(of_pattern(pattern), seed=seed)


@pytest.mark.parametrize("slow", [(PRODUCER,), (SECOND,)], ids=["the producer", "the second"])
def test_a_block_for_several_row_tiles(slow, monkeypatch):
    """Rings and votes are counted through; the first row tile ends with a tile that one consumer alone wants."""

    def plan(shape):
        (launch,) = (made := skipping()(shape)).launches
        return replace(made, launches=(replace(launch, grid=1),))

    make_slow(monkeypatch, slow)
    pattern = np.array([[1, 0, 1, 0, 0], [1, 1, 0, 0, 1], [1, 0, 0, 1, 0], [1, 0, 0, 0, 1], [1, 1, 1, 0, 0]], bool)
    qkv = of_pattern(pattern)
    o, lse, made = run(plan, qkv, LIMIT)
    np.testing.assert_array_equal(made["tile_map"][0, 0] == COMPUTED, pattern)
    assert right((o, lse), qkv, R.expand(pattern[None, None], UNIT, 64, *(x.shape[2] for x in qkv[:2])))


@pytest.mark.parametrize(("slots", "keys"), [(2, 1), (4, 3)])
@pytest.mark.parametrize("slow", [FIRST + 5, SECOND])
def test_a_thread_late_at_the_end_of_a_row_tile(slots, keys, slow, monkeypatch):
    """With fewer tiles of keys than slots the next row tile is all ordered, and its end said, before anyone starts it:
    who still waits for the end before must not miss it."""
    tiles = SpecialisedTiles(64, 64, slots=slots)

    def plan(shape):
        (launch,) = (made := skipping(tiles)(shape)).launches
        return replace(made, launches=(replace(launch, grid=1),))

    make_slow(monkeypatch, (slow,))
    qkv = of_pattern(np.ones((5, keys)))
    o, lse, _ = run(plan, qkv, LIMIT)
    assert right((o, lse), qkv, np.ones((1, 1, qkv[0].shape[2], qkv[1].shape[2]), bool))


@pytest.mark.parametrize("tiles", [SpecialisedTiles(64, 64, consumers=3), SpecialisedTiles(64, 64, slots=4)], ids=str)
def test_other_tiles(machine, tiles):
    assert sound(
        of_pattern([[1, 0, 0, 1, 0], [1, 1, 1, 0, 0], [1, 1, 0, 0, 1]][: tiles.consumers]), tiles, machine=machine
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tiles", [SMALL, SpecialisedTiles(64, 64, consumers=3), SpecialisedTiles(64, 64, slots=3)], ids=str
)
def test_many_patterns_on_a_gpu(tiles):
    rng = np.random.default_rng(1)
    for share in (0.1, 0.3, 0.6, 0.9):
        for _ in range(10):
            pattern = rng.random((tiles.consumers, 40)) < share
            pattern[:, 0] = True
            assert sound(of_pattern(pattern), tiles, machine="cuda")


@pytest.mark.gpu
def test_the_same_bits_every_time():
    qkv = data(1100, 1500, 128, heads=4, kv_heads=2, stretch=(128, 64))
    runs = [run(partial(wgmma.plan_blasst, noted=True), qkv, LIMIT, machine="cuda") for _ in range(20)]
    assert (runs[0][2]["tile_map"] == SKIPPED).any()
    for o, lse, made in runs[1:]:
        dense_bits((o, lse), runs[0][:2])
        np.testing.assert_array_equal(made["tile_map"], runs[0][2]["tile_map"])


# -- planted faults ----------------------------------------------------------------------------------------------------
def apart():
    return data(100, 300, 64, stretch=(64, 64))


FAULTS = {
    "tile_wide": (uneven, (), ""), "unscaled": (uneven, (), ""), "first": (apart, (), ""), "padding": (apart, (), ""),
    "moved": (apart, (), ""), "alone": (apart, (), "Deadlock"), "word": (TURNS, (), "UninitialisedRead"),
    "end": (LAST, (PRODUCER,), "Deadlock"),
    "unwanted": (LAST, (), "ReadInFlight"),
    "unread": (IN_VAIN, (SECOND,), "ReadInFlight"),
}  # fmt: skip
"""The data or the pattern that shows it, threads that are slow, the fault of the emulator; or a map or a result that is
wrong."""


@pytest.mark.parametrize("broken", FAULTS)
def test_planted_faults(broken, monkeypatch):
    shows, slow, fault = FAULTS[broken]
    qkv = shows() if callable(shows) else of_pattern(shows)
    make_slow(monkeypatch, slow)
    if not fault:
        assert not sound(qkv, broken=broken), f"nothing shows {broken}"
        return
    for seed in (0, 1):
        with pytest.raises(Fault) as caught:
            sound(qkv, broken=broken, seed=seed)
        assert caught.value.name == fault


def test_every_fault_that_can_be_planted_is_tested():
    assert set(specialised.VOTE_FAULTS) == set(FAULTS)
