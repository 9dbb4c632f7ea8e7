"""The kernels that leave out tiles: what they leave out, what comes of it, and each planted fault caught."""

from __future__ import annotations

from functools import cache, partial

import ml_dtypes
import numpy as np
import pytest

from flashnumba.machine.emulator import Fault
from flashnumba.stages.flash_forward.mma import make_mma
from flashnumba.stages.flash_forward.split import make_split
from flashnumba.stages.heads import Launch, Plan, Shape
from flashnumba.stages.sparsity import decode, lists, mma
from flashnumba.stages.sparsity import reference as R
from flashnumba.stages.sparsity.problem import limit_of
from flashnumba.tiles.sizes import AttentionTiles
from flashnumba.tiles.sparse import COMPUTED, SKIPPED, unit_rows
from flashnumba.tiles.split import SPLIT_ARGS
from tests.stages.sparsity.sparse_cases import data, dense_bits, judge, kept_by, right, run

TWO = AttentionTiles(32, 32, 16, warps=2, slots=2, lazy=True)
ONE = AttentionTiles(32, 32, 16, warps=2)
LONG = AttentionTiles(64, 32, 16, warps=2, slots=2, lazy=True)
"""Whose copies go on from tile to tile."""
STEP = AttentionTiles(32, 16, 64, warps=1, q_held=2)
WIDE_STEP = AttentionTiles(32, 32, 64, warps=2)
THRESHOLD = 0.02
METHODS = {"block": ("block", False), "warp": ("warp", False), "warp, sum kept": ("warp", True)}


def dense(tiles, qkv, causal=False, machine="emulator"):
    def plan(shape: Shape) -> Plan:
        kernel = make_mma(tiles, shape.element, shape.vector, even=shape.d == tiles.d)
        return Plan((Launch(kernel, -(-shape.m // tiles.bm) * shape.heads * shape.batch, tiles.threads, tiles.shared),))

    return run(plan, qkv, {}, causal=causal, machine=machine)[:2]


def skipping(vote, keep_sum=False, tiles=TWO, broken=""):
    return partial(mma.plan_skip, vote=vote, keep_sum=keep_sum, noted=True, tiles=tiles, broken=broken)


@pytest.mark.parametrize(
    "tiles, method, causal",
    [(ONE, "block", False), (ONE, "warp", True), (ONE, "warp, sum kept", False), (LONG, "block", True),
     (TWO, "warp", False), (TWO, "warp, sum kept", True)],
)  # fmt: skip
def test_what_is_left_out_and_what_comes_of_it(machine, tiles, method, causal):
    """The map is the reference's, something is left out, and o is attention over the rest."""
    vote, keep_sum = METHODS[method]
    qkv = data(75, 110, tiles.d, heads=2)
    o, lse, made = run(
        skipping(vote, keep_sum, tiles), qkv, {"limit": limit_of(THRESHOLD)}, causal=causal, machine=machine
    )  # fmt: skip
    rows, s = unit_rows(tiles, vote), R.scores(*qkv[:2], causal=causal)
    wanted = R.skip(s, rows, tiles.bn, THRESHOLD)
    np.testing.assert_array_equal(made["tile_map"] == COMPUTED, wanted)
    assert (made["tile_map"] == SKIPPED).sum() >= 4
    assert made["tile_map"].max() <= SKIPPED, "and all of the map is written"
    kept = R.expand(wanted, rows, tiles.bn, *s.shape[-2:])
    for verdict in judge((o, lse), qkv, kept, summed=np.ones_like(kept) if keep_sum else None, causal=causal):
        assert verdict.ok, str(verdict)


@pytest.mark.parametrize("method", METHODS)
def test_threshold_0_is_dense_bit_for_bit(machine, method):
    for tiles, causal, dtype in ((ONE, False, np.float16), (TWO, True, ml_dtypes.bfloat16)):
        qkv = data(40, 50, heads=2, dtype=dtype)
        results = run(skipping(*METHODS[method], tiles), qkv, {"limit": limit_of(0.0)}, causal=causal, machine=machine)
        dense_bits(results, dense(tiles, qkv, causal, machine))
        assert not (results[2]["tile_map"] == SKIPPED).any()


@pytest.mark.parametrize("m, n, causal", [(33, 20, True), (7, 1, False), (1, 63, True), (31, 33, False)])
def test_tails_and_rows_that_see_nothing(machine, m, n, causal):
    qkv = data(m, n)
    o, lse, made = run(skipping("block"), qkv, {"limit": limit_of(THRESHOLD)}, causal=causal, machine=machine)
    kept = R.expand(made["tile_map"] == COMPUTED, TWO.bm, TWO.bn, m, n)
    assert right((o, lse), qkv, kept, causal=causal)
    np.testing.assert_array_equal(
        made["tile_map"] == COMPUTED, R.skip(R.scores(*qkv[:2], causal=causal), TWO.bm, TWO.bn, THRESHOLD)
    )


@pytest.mark.parametrize("scale", [-0.2, 0.0, 3.0])
def test_scales(machine, scale):
    qkv = data(40, 60)
    o, lse, made = run(skipping("warp"), qkv, {"limit": limit_of(THRESHOLD)}, scale=scale, machine=machine)
    kept = R.expand(made["tile_map"] == COMPUTED, 16, TWO.bn, 40, 60)
    assert right((o, lse), qkv, kept, scale=scale)
    assert (made["tile_map"] == SKIPPED).any() == (scale != 0)


@pytest.mark.parametrize(
    "broken, vote",
    [("tile_wide", "warp"), ("unscaled", "warp"), ("first", "block"), ("alone", "block"), ("vote_barrier", "block"),
     ("stale_flag", "block"), ("padding", "block"), ("moved", "warp"), ("barrier", "block"), ("wait", "warp"),
     ("tail", "block"), ("causal", "warp"), ("v_barrier", "block")],
)  # fmt: skip
def test_planted_faults(broken, vote):
    """Each is a fault of the emulator, a map that is not the reference's, or a wrong result, whatever the order of
    threads where that is something to the fault."""
    causal = broken == "causal"
    tiles = ONE if broken == "v_barrier" else TWO
    qkv = data(75, 110, heads=1)
    rows = unit_rows(tiles, vote)
    s = R.scores(*qkv[:2], causal=causal)
    wanted = R.skip(s, rows, tiles.bn, THRESHOLD)
    for seed in range(2 if broken in ("wait", "stale_flag") or "barrier" in broken else 1):
        try:
            o, lse, made = run(
                skipping(vote, tiles=tiles, broken=broken), qkv,
                {"limit": limit_of(THRESHOLD)}, causal=causal, seed=seed,
            )  # fmt: skip
        except Fault:
            continue
        kept = R.expand(wanted, rows, tiles.bn, *s.shape[-2:])
        same = np.array_equal(made["tile_map"] == COMPUTED, wanted)
        assert not same or not right((o, lse), qkv, kept, causal=causal), f"nothing shows {broken}, seed {seed}"


def of_mask(tiles=TWO, vote="", broken=""):
    return partial(mma.plan_blocks, block_m=64, block_n=32, vote=vote, noted=True, tiles=tiles, broken=broken)


def random_mask(m, n, seed=3):
    mask = np.random.default_rng(seed).random((1, 2, -(-m // 64), -(-n // 32))) < 0.5
    mask[0, 0, 0] = False  # rows that look at nothing
    return mask


@pytest.mark.parametrize("tiles, vote, causal", [(ONE, "", False), (TWO, "", True), (TWO, "warp", False)])
def test_any_mask(machine, tiles, vote, causal):
    m, n = 100, 130
    qkv, mask = data(m, n, heads=2), random_mask(m, n)
    given = {"limit": limit_of(THRESHOLD), "mask": mask.astype(np.uint8)}
    o, lse, made = run(of_mask(tiles, vote), qkv, given, causal=causal, machine=machine)
    chosen = R.expand(mask, 64, 32, m, n)
    if vote:
        computed = R.expand(made["tile_map"] == COMPUTED, 16, tiles.bn, m, n)
        assert not (computed & ~chosen).any() and (made["tile_map"] == SKIPPED).any()
        chosen = computed
    assert right((o, lse), qkv, chosen, causal=causal)
    assert vote or (o[0, 0, :64] == 0).all()


def test_long_lists_batches_and_heads_that_share_keys(machine):
    """More tiles than a warp packs at once, and a mask of its own for each head of two batches, two heads of keys."""
    m, n = 20, 600
    qkv = tuple(map(np.concatenate, zip(*(data(m, n, heads=4, kv_heads=2, seed=seed) for seed in (0, 1)), strict=True)))
    mask = np.random.default_rng(4).random((2, 4, 1, 19)) < 0.15
    o, lse, _ = run(of_mask(), qkv, {"limit": -np.inf, "mask": mask.astype(np.uint8)}, machine=machine)
    assert (mask[..., :16].sum(-1) > 0).any() and (mask[..., 16:].sum(-1) > 0).any(), "both sides of the 32nd tile"
    assert right((o, lse), qkv, R.expand(mask, 64, 32, m, n))


def test_a_mask_of_ones_is_dense_bit_for_bit(machine):
    for tiles, causal in ((ONE, True), (TWO, False)):
        qkv = data(70, 90, heads=2)
        given = {"limit": -np.inf, "mask": np.ones((1, 2, 2, 3), np.uint8)}
        dense_bits(run(of_mask(tiles), qkv, given, causal=causal, machine=machine), dense(tiles, qkv, causal, machine))


# Nobody here draws from the counter: "counter" shows in test_wgmma_lists.py.
@pytest.mark.parametrize("broken", [*(x for x in lists.FAULTS if x != "counter"), "next", "count", "barrier"])
def test_planted_faults_of_lists(broken):
    m, n = 100, 130
    qkv, mask = data(m, n, heads=2), random_mask(m, n)
    given = {"limit": -np.inf, "mask": mask.astype(np.uint8)}
    try:
        o, lse, _ = run(of_mask(broken=broken), qkv, given)
    except Fault:
        return
    assert not right((o, lse), qkv, R.expand(mask, 64, 32, m, n))


# -- decoding ----------------------------------------------------------------------------------------------------------
def decoding(tiles=STEP, splits=2, broken=""):
    return partial(decode.plan_decode, noted=True, tiles=tiles, splits=splits, broken=broken)


@pytest.mark.parametrize("tiles, heads, m, causal", [(STEP, 4, 1, False), (STEP, 2, 3, True), (WIDE_STEP, 8, 7, True)])
def test_decoding(machine, tiles, heads, m, causal):
    qkv = data(m, 300, heads=heads, kv_heads=2, stretch=(4, 32))
    o, lse, made = run(decoding(tiles), qkv, {"limit": limit_of(THRESHOLD)}, causal=causal, machine=machine)
    assert (made["tile_map"] == SKIPPED).sum() >= 3 and made["tile_map"].max() <= SKIPPED
    assert right((o, lse), qkv, kept_by(made["tile_map"], heads, m, 300, tiles.bm), causal=causal)
    exact, _ = R.attend(R.scores(*qkv[:2], causal=causal), qkv[2], ~np.isneginf(R.scores(*qkv[:2], causal=causal)))
    assert np.abs(o - exact).max() < 300 * THRESHOLD, "what is left out is below the threshold of the greatest, each"


def test_decoding_with_threshold_0_is_the_dense_split_bit_for_bit(machine):
    qkv = data(3, 200, heads=4, kv_heads=2)

    def plan(shape: Shape) -> Plan:
        made = decoding()(shape)
        first = Launch(make_split(STEP, shape.element), made.launches[0].grid, STEP.threads, STEP.shared, SPLIT_ARGS)
        return Plan((first, made.launches[1]), {name: x for name, x in made.scratch.items() if name != "tile_map"})

    results = run(decoding(), qkv, {"limit": -np.inf}, causal=True, machine=machine)
    dense_bits(results, run(plan, qkv, {}, causal=True, machine=machine)[:2])


@cache
def decoded(rows):
    """A step whose heads look at one thing for ``rows`` of them, and the map that a sound kernel makes."""
    qkv = data(7, 300, heads=8, kv_heads=2, stretch=(rows, 32))
    return qkv, run(decoding(WIDE_STEP), qkv, {"limit": limit_of(THRESHOLD)})[2]["tile_map"]


@pytest.mark.parametrize(
    "broken", ["barrier", "vote_barrier", "v_barrier", "wait", "v_wait", "alone", "padding", "tail"]
)
def test_planted_faults_of_decoding(broken):
    qkv, sound = decoded(2 if broken == "tail" else 4)  # with rows about nothing
    try:
        o, lse, made = run(decoding(WIDE_STEP, broken=broken), qkv, {"limit": limit_of(THRESHOLD)})
    except Fault:
        return
    same = np.array_equal(made["tile_map"], sound)
    assert not same or not right((o, lse), qkv, kept_by(made["tile_map"], 8, 7, 300, 32))


# -- on a GPU alone ----------------------------------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["blasst", "warp_skip", "warp_skip_sum", "block_sparse", "sparge", "decode"])
def test_the_same_bits_every_time(name):
    """Twenty runs with the tiles of real problems, each of which leaves something out."""
    m = 2 if name == "decode" else 1100
    qkv = data(m, 1500, 128, heads=4, kv_heads=2, stretch=(4, 32) if m == 2 else (128, 64))
    given = {"limit": limit_of(THRESHOLD), "mask": np.tril(np.ones((1, 4, 9, 24), np.uint8))}
    plan = {
        "blasst": partial(mma.plan_skip, vote="block"), "warp_skip": partial(mma.plan_skip, vote="warp"),
        "warp_skip_sum": partial(mma.plan_skip, vote="warp", keep_sum=True), "block_sparse": mma.plan_blocks,
        "sparge": partial(mma.plan_sparge, vote="warp"), "decode": decode.plan_decode,
    }[name]  # fmt: skip
    if name == "sparge":
        given = {"limit": limit_of(THRESHOLD), "alike": 0.3, "kept": 0.7, "sink": 1}
    runs = [run(partial(plan, noted=True), qkv, given, machine="cuda") for _ in range(20)]
    assert (runs[0][2]["tile_map"] != COMPUTED).any()
    for o, lse, made in runs[1:]:
        dense_bits((o, lse), runs[0][:2])
        np.testing.assert_array_equal(made["tile_map"], runs[0][2]["tile_map"])
