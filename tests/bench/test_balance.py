"""The bench of the schedules: its model by arithmetic, its predictions, and one small problem on the emulator."""

from __future__ import annotations

from itertools import pairwise

import pytest

torch = pytest.importorskip("torch")

from flashnumba.bench import balance  # noqa: E402
from flashnumba.bench.balance import Model, model_of, predicted  # noqa: E402
from flashnumba.bench.heads import CUDNN, FA2  # noqa: E402
from flashnumba.stages.causal_balance import mma  # noqa: E402
from flashnumba.stages.heads import Shape  # noqa: E402
from flashnumba.tiles.sizes import AttentionTiles  # noqa: E402
from tests.bench.fakes import HostClock  # noqa: E402

TINY = AttentionTiles(32, 32, 32, warps=2)


def test_a_model_from_four_times():
    """A full multiprocessor does 2 us a tile of keys, 3 tiles' worth a tile of rows; a lone block 3 us a tile."""
    few, many = 1024 // 64, 4096 // 64
    taken = {(2, 1024): 2 * 2e-6 * (few + 3), (2, 4096): 2 * 2e-6 * (many + 3)}
    taken |= {(1, 1024): 3e-6 * (few + 3), (1, 4096): 3e-6 * (many + 3)}
    model = model_of(132, 2, taken, 64)
    assert (model.multiprocessors, model.at_once) == (132, 2)
    assert (model.unit, model.overhead, model.alone) == pytest.approx((2e-6, 3, 2 / 3))
    alone = model_of(132, 1, {key: taken[key] for key in taken if key[0] == 1}, 64)
    assert (alone.unit, alone.overhead, alone.alone) == pytest.approx((3e-6, 3, 1))


def test_times_that_make_no_sense_give_a_model_all_the_same():
    model = model_of(4, 2, {(each, n): 1e-5 for each in (1, 2) for n in (1024, 4096)}, 64)
    assert model.unit > 0 and model.overhead >= 0 and 0.5 <= model.alone <= 1


def test_predictions_by_hand():
    """Four tiles of 1, 2, 3 and 4 steps, two multiprocessors with a block each: in order 1 + 3 and 2 + 4; pairs 5 and
    5; the longest first 4 + 1 and 3 + 2."""
    shape = Shape("float16", 1, 1, 1, 128, 128, 32, True)
    model = Model(2, 1, 1e-6, 0, 1.0)
    expected = {"plain": 6e-6, "paired": 5e-6, "longest_first": 5e-6, "persistent": 5e-6}
    assert {name: predicted(name, shape, model, TINY) for name in expected} == pytest.approx(expected)
    dear = Model(2, 1, 1e-6, 0.5, 1.0)
    assert predicted("paired", shape, dear, TINY) == pytest.approx(6e-6), "a pair is two tiles of rows"
    assert predicted("plain", shape, dear, TINY) == pytest.approx(7e-6)


def test_problems_have_few_heads_and_many():
    found = list(balance.problems("float16", (64, 128), (1024, 16384), (8, 16)))
    assert len(found) == 11 and all(p.causal for p in found)  # 16 heads of 128 columns are few and many
    assert [(p.batch, p.heads) for p in found[:3]] == [(1, 8), (1, 16), (16, 32)]
    assert found[-1].heads == 16 and found[-1].n == 16384


@pytest.mark.filterwarnings("ignore::flashnumba.NoGpuWarning")
def test_schedules_beside_torch(monkeypatch):
    monkeypatch.setattr(mma, "balanced_tiles", lambda shape: TINY)
    monkeypatch.setattr(balance, "balanced_tiles", lambda shape: TINY)
    monkeypatch.setattr(balance, "KEYS", (32, 64))
    monkeypatch.setattr(balance, "at_once", lambda tiles: 2)
    problem, models = balance.Problem("float16", 1, 2, 70, 32, True), {}
    names = ("plain", "paired", "persistent")
    size = balance.measure(problem, names=names, models=models, clock=HostClock(), machine="emulator")
    assert [m.name for m in size.measured] == [FA2, CUDNN, *names]
    fa2, cudnn, *ours = size.measured
    assert cudnn.note.startswith("refused: ") and fa2.seconds
    assert all(m.error <= m.budget and not m.note for m in ours)
    assert all(b.seconds < a.seconds for a, b in pairwise(ours))
    plain = ours[0]
    for m in ours:
        assert m.figures["of_plain"] == (None if m is plain else plain.seconds / m.seconds)
        assert m.figures["predicted_of_plain"] == pytest.approx(plain.figures["predicted"] / m.figures["predicted"])
        assert m.figures["flops_per_second"] == problem.flops / m.seconds
    assert len(models) == 1, "one model serves all that have these tiles"
    (row,) = balance.records(models)
    assert row["bm"] == 32 and row["multiprocessors"] == 4 and row["unit"] > 0


def test_tiles_that_do_not_fit_have_no_prediction_and_say_why(monkeypatch):
    def refuses(*args):
        raise ValueError("too large")

    monkeypatch.setattr(balance, "tiles_of", refuses)
    shape = Shape("float16", 1, 1, 1, 64, 64, 32, True)
    assert balance._foretold(torch, "plain", shape, "cpu", HostClock(), "emulator", {}) is None
