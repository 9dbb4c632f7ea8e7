"""Latent attention by its definition, absorbed, from pages, in parts and by the seesaw: the same numbers in float64."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from flashnumba.stages.flash_mla import reference
from flashnumba.stages.flash_mla.schedule import FIXED, schedule

SCALE = 192**-0.5


def model(s, n, heads, seed=0):
    """Random weights and rows of a small model: latent 24, rotated 8, heads of 12."""
    rng = np.random.default_rng(seed)
    shapes = (s, heads, 12), (s, heads, 8), (n, 24), (n, 8), (heads, 24, 12), (heads, 24, 12)
    return [rng.standard_normal(shape) for shape in shapes]


@pytest.mark.parametrize("causal", [False, True])
def test_absorbed_is_the_definition(causal):
    given = model(3, 17, 5)
    o, lse = reference.definition(*given, SCALE, causal)
    absorbed = reference.absorbed(*given, SCALE, causal)
    np.testing.assert_allclose(absorbed[0], o, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(absorbed[1], lse, rtol=1e-12)
    q_nope, q_rope, c, r, w_uk, _ = given  # and the definition is what one head says by itself
    k = np.concatenate([c @ w_uk[2], r], -1)
    scores = (np.concatenate([q_nope[1, 2], q_rope[1, 2]]) @ k.T * SCALE)[: 17 - 1 if causal else 17]
    np.testing.assert_allclose(lse[2, 1], np.log(np.exp(scores).sum()), rtol=1e-12)


def test_pages_are_the_rows_that_they_hold():
    rng = np.random.default_rng(1)
    lengths, rows = [70, 0, 128, 1], rng.standard_normal((4, 192, 32))
    order = rng.permutation(20)[:12].reshape(4, 3)
    cache = np.full((20, 64, 32), np.nan)
    for b, length in enumerate(lengths):
        rows[b, length:] = np.nan  # nobody may read it
        cache[order[b]] = rows[b].reshape(3, 64, 32)
    q = rng.standard_normal((4, 2, 3, 32))
    o, lse = reference.paged(q, cache, order, lengths, SCALE, True, dv=24)
    for b, length in enumerate(lengths):
        if length == 0:
            assert (o[b] == 0).all() and (lse[b] == -np.inf).all()
            continue
        k = rows[b, :length]
        expected = reference.attend(q[b], k, k[:, :24], SCALE, reference.seen(2, length, True))
        np.testing.assert_array_equal(o[b], expected[0])
        np.testing.assert_array_equal(lse[b], expected[1])
    assert (o[3, 0] == 0).all() and (lse[3, :, 0] == -np.inf).all()  # one key, and the second of two tokens sees it


@pytest.mark.parametrize("cuts", [[0, 40], [0, 0, 7, 7, 40, 40], [0, 1, 2, 39, 40]])
def test_merged_parts_are_the_whole(cuts):
    rng = np.random.default_rng(2)
    q, k = rng.standard_normal((2, 3, 32)), rng.standard_normal((40, 32))
    seen = reference.seen(2, 40, False)
    parts = [reference.attend(q, k[a:b], k[a:b, :24], SCALE, seen[:, a:b]) for a, b in pairwise(cuts)]
    o, lse = reference.merge(list(zip(*parts, strict=True)))
    whole = reference.attend(q, k, k[:, :24], SCALE, seen)
    np.testing.assert_allclose(o, whole[0], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(lse, whole[1], rtol=1e-12)


def test_nothing_merged_is_nothing():
    nothing = np.zeros((2, 1, 3, 24)), np.full((2, 3, 1), -np.inf)
    o, lse = reference.merge(nothing)
    assert (o == 0).all() and (lse == -np.inf).all()


@pytest.mark.parametrize("n", [0, 1, 8, 9, 16, 31])
def test_the_seesaw_is_attention(n):
    """One block alone, two, and an odd number of them; scores large enough that the maximum moves."""
    rng = np.random.default_rng(n)
    q, k = 5 * rng.standard_normal((6, 32)), rng.standard_normal((n, 32))
    o, lse = reference.seesaw(q, k, 24, SCALE, block=8)
    expected = reference.attend(q[:, None], k, k[:, :24], SCALE, reference.seen(6, n, False))
    np.testing.assert_allclose(o, expected[0][:, 0], rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(lse, expected[1][0], rtol=1e-12)


@pytest.mark.parametrize("parts", [1, 2, 7, 132])
@pytest.mark.parametrize(
    "lengths", [[], [0], [0, 0, 0], [1], [64], [4096], [0, 5000, 64, 65, 0, 1, 0], [100] * 40], ids=str
)
def test_parts_cover_each_page_once(lengths, parts):
    made = schedule(np.array(lengths, np.int32), parts)
    assert made.parts.shape == (parts, 8) and made.num_splits.shape == (len(lengths) + 1,)
    pages = [-(-n // 64) for n in lengths]
    at, splits = [(b, 0) for b in range(len(lengths))], {b: [] for b in range(len(lengths))}
    expected = dict(at)
    work = np.zeros(parts)
    for part, request, first, end, split in made.pieces(np.array(lengths)):
        assert first == expected[request] and (end > first or pages[request] == 0)
        expected[request] = end
        splits[request].append(split)
        work[part] += end - first + FIXED
    for b, count in enumerate(pages):
        assert expected[b] == count
        assert splits[b] == list(range(made.num_splits[b], made.num_splits[b + 1])) and splits[b]
    total = sum(pages) + FIXED * len(pages)
    assert work.max(initial=0) <= -(-total // parts) + FIXED  # nobody has more than a fixed cost above the mean


def test_what_has_no_schedule():
    with pytest.raises(ValueError, match="parts is 0; it must be at least 1"):
        schedule(np.array([1]), 0)
    with pytest.raises(ValueError, match=r"lengths are \[1, -2\]; they must be a row of numbers of at least 0"):
        schedule(np.array([1, -2]), 1)
