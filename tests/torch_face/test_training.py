"""The script that trains a transformer: a few steps on the CPU, whose losses are torch's."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module("train_characters")


@pytest.mark.filterwarnings("ignore::flashnumba.NoGpuWarning")
def test_both_learn_the_same(script, tmp_path, capsys):
    out = tmp_path / "training.json"
    held = script.main(["--smoke", "--device", "cpu", "--out", str(out)])
    assert json.loads(out.read_text(encoding="utf-8")) == held
    losses = {run["name"]: run["loss"] for run in held["runs"]}
    assert list(losses) == [run.name for run in script.RUNS] and set(map(len, losses.values())) == {4}
    first = losses["flashnumba"]
    assert first[-1] < first[0], "it learns"
    assert losses["flashnumba, repeatable"] == losses["flashnumba, repeatable again"]
    near, far = (
        max(abs(a - b) for a, b in zip(losses[one], losses["torch"], strict=True))
        for one in ("flashnumba", "torch, other seed")
    )
    assert 0 < near < 1e-3 < far
    pairs = {(pair["one"], pair["other"]): pair for pair in held["distances"]}
    assert pairs["flashnumba, repeatable", "flashnumba, repeatable again"]["equal"] == 4
    assert pairs["flashnumba", "torch"]["largest"] == pytest.approx(near, abs=2e-5)
    assert "flashnumba and torch: at most" in capsys.readouterr().out


def test_a_later_character_changes_nothing_before_it(script):
    settings = script.Settings(layers=2, heads=2, head_dim=8, context=16)
    torch.manual_seed(0)
    model = script.Characters(settings, "flashnumba", 10)
    tokens = torch.randint(10, (1, 16))
    other = tokens.clone()
    other[0, 9] = (other[0, 9] + 1) % 10
    a, b = model(tokens), model(other)
    assert torch.equal(a[:, :9], b[:, :9]) and not torch.allclose(a[:, 9:], b[:, 9:])


def test_windows_are_of_the_text(script):
    settings = script.Settings(context=8, batch=5)
    text = torch.arange(100)
    given, following = script.windows(text, settings, torch.Generator().manual_seed(0))
    assert given.shape == (5, 8) and torch.equal(following, given + 1)
