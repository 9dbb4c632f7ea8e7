"""The references of sparse attention against definitions written another way, and by numbers that anyone can check."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from flashnumba.data import load_minilm
from flashnumba.data.structured import KINDS, structured
from flashnumba.stages.flash_forward.reference import dense
from flashnumba.stages.sparsity import every_head, panels
from flashnumba.stages.sparsity import reference as R


def inputs(m=40, n=60, d=16):
    rng = np.random.default_rng(0)
    return rng.standard_normal((1, 4, m, d)), 2 * rng.standard_normal((1, 2, n, d)), rng.standard_normal((1, 2, n, d))


@pytest.mark.parametrize("causal", [False, True])
def test_nothing_left_out_is_dense(causal):
    q, k, v = inputs()
    o, lse = dense(q, k, v, causal=causal)
    s = R.scores(q, k, causal=causal)
    blocks = R.skip(s, 16, 8, 0.0)
    for got in (R.attend(s, v, R.expand(blocks, 16, 8, 40, 60) & ~np.isneginf(s)),
                R.by_blocks(q, k, v, np.ones((1, 4, 3, 8), bool), 16, 8, causal=causal)):  # fmt: skip
        np.testing.assert_allclose(got[0], o, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(got[1], lse, rtol=1e-12)
    np.testing.assert_array_equal(blocks, R.visible_blocks(40, 60, 16, 8, causal)[None, None].repeat(4, 1))


def test_skip_row_by_row():
    """As BLASST's algorithm reads, in loops."""
    q, k, _ = inputs()
    s, threshold = R.scores(q, k, causal=True)[0, 1], 0.05
    for tile in range(3):
        rows = s[16 * tile : 16 * tile + 16]
        m = np.full(len(rows), -np.inf)
        for j in range(8):
            local = rows[:, 8 * j : 8 * j + 8].max(1)
            new = np.maximum(m, local)
            needed = any(x > -np.inf and x - y >= np.log(threshold) for x, y in zip(local, new, strict=True))
            assert R.skip(s[None, None], 16, 8, threshold)[0, 0, tile, j] == needed
            m = new if needed else m


def test_what_is_left_out_is_bounded():
    q, k, _ = structured(512, 32, heads=4)
    s = R.scores(q, k, causal=True)
    for threshold in (0.1, 0.01, 1e-3):
        kept = R.expand(R.skip(s, 64, 32, threshold), 64, 32, 512, 512)
        assert kept.any() and not kept.all()
        p = np.exp(s - s.max(-1, keepdims=True))
        assert (np.where(kept, 0, p).sum(-1) <= threshold * (~kept).sum(-1)).all()
    assert R.skip(s, 64, 32, 0.5).sum() < R.skip(s, 64, 32, 1e-6).sum()


def test_top_blocks_by_hand():
    p = np.array([0.1, 0.4, 0.2, 0.3, -1.0])
    assert R.top_blocks(p, cdf=0.75).tolist() == [False, True, False, True, False]
    assert R.top_blocks(p, cdf=0.0).tolist() == [False, True, False, False, False]
    assert R.top_blocks(p, cdf=1.0).tolist() == [True, True, True, True, False]
    assert R.top_blocks(p, topk=0.6).tolist() == [False, True, True, True, False]


def test_alikeness_by_hand():
    x = np.array([[3.0, 0], [5, 0], [0, 2], [0, 0], [1, 1]])
    np.testing.assert_allclose(R.alikeness(x, 2), [1, 0.25, 1], err_msg="parallel; one is zeros; a short block")
    q, k, _ = inputs()
    assert R.predict(q, k, rows=16, keys=8, alike=1.1).all(), "what is not alike is computed"


def test_structured_heads_have_structure():
    q, k, v = structured(1024, 64, heads=8, kv_heads=4, m=128, batch=2)
    assert q.shape == (2, 8, 128, 64) and k.shape == v.shape == (2, 4, 1024, 64) and q.dtype == np.float16
    s = R.scores(q[:1], k[:1], causal=True)
    share = 1 - R.skip(s, 64, 32, 0.01).mean((-1, -2))[0]
    assert share.max() > 0.4 and len(KINDS) == 4
    np.testing.assert_array_equal(structured(64, 32, seed=3)[0], structured(64, 32, seed=3)[0])
    for wrong in ({"d": 24}, {"m": 100}, {"kv_heads": 3}):
        with pytest.raises(ValueError, match="must"):
            structured(64, **{"d": 32, **wrong})


def test_curves_go_up():
    q, k, v = (x[:, :1].astype(np.float64) for x in structured(256, 32, heads=4))
    points = sorted(panels.curve(q, k, v, "block"))
    assert points[0][1] <= points[-1][1] and points[-1][0] > points[0][0]


def test_the_table_of_every_head_is_what_the_command_makes():
    """One head of the stored ones, which are all."""
    held = json.loads((Path(__file__).parents[3] / "docs" / "results" / "every_head.json").read_text())
    data = load_minilm()
    assert len(held["heads"]) == data.q.shape[0] * data.q.shape[1] * len(every_head.SHARES)
    made = every_head.table([(1, 5)], (0.5,))[0]
    kept = next(row for row in held["heads"] if all(row[x] == made[x] for x in ("layer", "head", "share")))
    for name in every_head.METHODS:
        np.testing.assert_allclose(kept["methods"][name], made["methods"][name], rtol=0.02, err_msg=name)
