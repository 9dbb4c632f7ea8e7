"""SpargeAttn's prediction on the device: the reference's mask, whatever the tokens; and each planted fault shows."""

from __future__ import annotations

import ml_dtypes  # noqa: F401  names bfloat16
import numpy as np
import pytest

from flashnumba.machine.emulator import Fault
from flashnumba.stages.heads import Shape
from flashnumba.stages.sparsity import mma, pool, predict
from flashnumba.stages.sparsity import reference as R
from tests.stages.sparsity.sparse_cases import right, run
from tests.stages.sparsity.test_mma import TWO

ROWS, KEYS = 64, 32


def tokens(m=150, n=300, *, heads=2, d=32, seed=0):
    """q and k of runs of tokens that are alike, except for a block of each."""
    rng = np.random.default_rng(seed)

    def runs(length, each, count, size):
        mean = np.repeat(rng.standard_normal((1, count, -(-length // each), d)), each, 2)[:, :, :length]
        return size * mean + 0.3 * rng.standard_normal((1, count, length, d))

    q, k, v = runs(m, 30, heads, 2.0), runs(n, 20, 1, 1.0), rng.standard_normal((1, 1, n, d))
    k[:, :, 64:96] = rng.standard_normal((1, 1, min(n, 96) - min(n, 64), d))
    q[:, :1, 64:128] = rng.standard_normal(q[:, :1, 64:128].shape)
    return tuple(x.astype(np.float16) for x in (q, k, v))


def predicted(qkv, *, alike=0.3, cdf=0.9, topk=None, sink=False, causal=False, broken="", attend=False, **more):
    """The mask, and attention over its blocks if ``attend``."""

    def plan(shape):
        whole = mma.plan_sparge(
            shape, by_count=topk is not None, block_m=ROWS, block_n=KEYS, noted=True, tiles=TWO, broken=broken
        )
        return whole if attend else mma.Plan(whole.launches[:-1], whole.scratch)

    blocks = -(-qkv[1].shape[2] // KEYS)
    kept = max(1, int(topk * blocks)) if topk is not None else 1e30 if cdf >= 1 else cdf
    given = {"limit": -np.inf, "alike": alike, "kept": kept, "sink": sink}
    return run(plan, qkv, given, causal=causal, **more)


def wanted(qkv, *, alike=0.3, cdf=0.9, topk=None, sink=False, causal=False):
    return R.predict(
        *qkv[:2], rows=ROWS, keys=KEYS, alike=alike, cdf=cdf, topk=topk, sink=sink, causal=causal
    )  # fmt: skip


SUMMED = ({}, {"topk": 0.3, "causal": True})
"""Options under which attention follows; of any mask ``test_mma.py`` has it."""


@pytest.mark.parametrize(
    "options",
    [*SUMMED, {"alike": 2.0, "cdf": 0.1}, {"alike": -1.0, "cdf": 0.0, "sink": True},
     {"cdf": 1.0, "alike": -1.0, "causal": True}],
    ids=["sum", "count, causal", "nothing is alike", "one block, and the sink", "all"],
)  # fmt: skip
def test_the_mask_is_the_references(machine, options):
    qkv = tokens()
    attend = options in SUMMED
    o, lse, made = predicted(qkv, **options, machine=machine, attend=attend)
    mask = wanted(qkv, **options)
    np.testing.assert_array_equal(made["mask"], mask)
    causal = options.get("causal", False)
    assert mask.any(-1).all(), "every row keeps a block"
    assert not attend or right((o, lse), qkv, R.expand(mask, ROWS, KEYS, *(x.shape[2] for x in qkv[:2])), causal=causal)
    np.testing.assert_allclose(made["same_k"], R.alikeness(qkv[1], KEYS), atol=1e-5)


def test_many_blocks_and_heads_that_share_keys(machine):
    """The choice alone, from mean tokens of zeros: of 80 equal blocks the first 70, which a warp looks at in three
    turns, for the heads of the first head of keys; all for those of the second, none of whose blocks is alike."""
    q, k = np.zeros((1, 4, 5, 32), np.float16), np.zeros((1, 2, 80 * KEYS, 32), np.float16)
    means = {"pooled_q": np.zeros((1, 4, 1, 32), np.float32), "pooled_k": np.zeros((1, 2, 32, 80), np.float32)}
    alike = {"same_q": np.ones((1, 4, 1), np.float32), "same_k": np.ones((1, 2, 80), np.float32)}
    alike["same_k"][0, 1] = 0

    def choice(shape):
        return mma.Plan((predict.choose_launch(shape, ROWS, KEYS, True),), {"mask": (1, 4, 1, 80)})

    given = means | alike | {"alike": 0.5, "kept": 70, "sink": False}
    mask = run(choice, (q, k, k), given, machine=machine)[2]["mask"]
    np.testing.assert_array_equal(mask[0, :, 0], [[1] * 70 + [0] * 10] * 2 + [[1] * 80] * 2)


@pytest.mark.parametrize("dtype, d", [("float16", 27), ("float16", 72), ("bfloat16", 36), ("float32", 200)])
def test_means_whatever_the_rows(machine, dtype, d):
    """One element at a time; vectors that fill their lanes or do not; more than one for a lane."""
    qkv = tuple(x.astype(dtype) for x in tokens(70, 100, d=d))
    qkv[1][:, :, :32] = 0

    def means(shape):
        return mma.Plan((pool.pool_launch(shape, ROWS, KEYS),), pool.pooled_shapes(shape, ROWS, KEYS))

    made = run(means, qkv, {}, machine=machine)[2]
    made["pooled_k"] = made["pooled_k"].swapaxes(2, 3)
    for x, rows, name in ((qkv[0], ROWS, "q"), (qkv[1], KEYS, "k")):
        same, mean = made[f"same_{name}"], made[f"pooled_{name}"]
        np.testing.assert_allclose(same, R.alikeness(x, rows), atol=1e-5)
        wanted = np.stack([block.mean(-2) for block in R.blocks_of(x, rows)], -2)
        np.testing.assert_allclose(mean[:, :, : wanted.shape[2]], wanted, atol=1e-5)


@pytest.mark.parametrize("m, rows", [(3, 4), (7, 8), (21, 16)])
@pytest.mark.parametrize("options", [{"cdf": 0.8}, {"topk": 0.4, "causal": True, "sink": True}], ids=["sum", "count"])
def test_the_choice_whatever_a_block_has_of_rows(machine, m, rows, options):
    """The choice alone, of blocks that are single tokens, so that these are their means: of two pieces of keys, the
    second short, and columns that end within a vector of those loaded at once."""
    n, d = 150, 27
    q, k, _ = tokens(m, n, d=d)
    group = {"pooled_q": q.astype(np.float32), "same_q": np.ones((1, 2, m), np.float32)}
    group |= {"pooled_k": np.full((1, 1, d, 152), np.nan, np.float32), "same_k": np.ones((1, 1, n), np.float32)}
    group["pooled_k"][..., :n] = k.swapaxes(-1, -2)
    topk = options.get("topk")

    def choice(shape):
        launch = predict.choose_launch(shape, 1, 1, topk is not None)
        assert launch.threads == 32 * rows
        return mma.Plan((launch,), {"mask": (1, 2, m, n)})

    kept = {"kept": int(topk * n) if topk else options["cdf"], "alike": 0.3, "sink": options.get("sink", False)}
    mask = run(choice, (q, k, k), group | kept, causal=options.get("causal", False), machine=machine)[2]["mask"]
    np.testing.assert_array_equal(mask, R.predict(q, k, rows=1, keys=1, alike=0.3, **options))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_blocks_with_a_token_that_is_no_number_are_kept(machine, bad):
    """For all rows if it is a key, with all keys if it is a row; the other choices are as they would be."""
    qkv = tokens()
    qkv[0][0, 0, 3], qkv[1][0, 0, 200] = bad, bad
    _, _, made = predicted(qkv, cdf=0.3, machine=machine)
    with np.errstate(invalid="ignore"):
        mask = wanted(qkv, cdf=0.3)
    np.testing.assert_array_equal(made["mask"], mask)
    assert mask[0, 0, 0].all() and mask[..., 200 // KEYS].all() and not mask.all(-1).all()


def test_a_count_of_blocks_whose_weights_vanish(machine):
    """Scores 100 apart: beside the largest weight all others are 0 in float32, and have an order all the same."""
    q, k, v = tokens(64, 8 * KEYS, heads=1)
    q[...], k[...] = 1, (np.arange(8.0) * 5 % 8).repeat(KEYS)[:, None]
    options = {"alike": -1.0, "topk": 0.5}
    mask = predicted((q, k, v), scale=100 / 32, machine=machine, **options)[2]["mask"]
    np.testing.assert_array_equal(mask, R.predict(q, k, rows=ROWS, keys=KEYS, scale=100 / 32, **options))
    assert mask.sum() == 4


@pytest.mark.parametrize("arch, kilobytes", [("75", 64), ("80", 163), ("86", 99), ("90a", 227), ("120a", 99)])
def test_no_launch_wants_more_shared_memory_than_there_is(arch, kilobytes):
    for d in (64, 192, 200, 256):
        for blocks in (1, 2049, 3800, 4097, 6000, 6144, 6145):
            shape = Shape("float16", 1, 1, 1, 4096, 64 * blocks, d, arch=arch)
            most = min(predict.MOST_BLOCKS, 64 * kilobytes - -(-d // 32) * 32)
            if blocks <= most:
                launch = predict.choose_launch(shape, 128, 64, False)
                assert 4 * launch.threads // 32 * (d + blocks) <= launch.shared <= 1024 * kilobytes
            else:
                with pytest.raises(ValueError, match=f"the prediction takes {most} on sm_{arch}: use larger blocks"):
                    predict.choose_launch(shape, 128, 64, False)


@pytest.mark.parametrize("m, n", [(7, 1), (1, 33), (65, 31)])
def test_short_sequences_and_tokens_of_zeros(machine, m, n):
    qkv = tokens(m, n)
    qkv[1][:, :, : n // 2] = 0
    _, _, made = predicted(qkv, causal=True, machine=machine)
    np.testing.assert_array_equal(made["mask"], wanted(qkv, causal=True))


def test_equal_weights_are_kept_in_order(machine):
    """All keys one: a budget of 0.5 of eight equal blocks keeps the first four; so does half of them by count."""
    q, k, v = tokens(64, 8 * KEYS, heads=1)
    k[...] = k[:, :, :1]
    for options in ({"cdf": 0.5}, {"topk": 0.5}):
        _, _, made = predicted((q, k, v), alike=-1.0, **options, machine=machine)
        assert made["mask"].ravel().tolist() == [1, 1, 1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("broken", [*pool.FAULTS, *predict.FAULTS])
def test_planted_faults(broken):
    qkv = tokens()
    qkv[1][:, :, ::20] *= 8  # a few long tokens, which lengths would give the say
    sound = wanted(qkv)
    try:
        _, _, made = predicted(qkv, broken=broken)
    except Fault:
        return
    assert not np.array_equal(made["mask"], sound)
