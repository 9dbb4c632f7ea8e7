"""The part of the page on training that is made from its record."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))

from generators import results, training  # noqa: E402

NAMES = ("flashnumba", "flashnumba, repeatable", "flashnumba, repeatable again", "torch", "torch again",
         "torch, other seed")  # fmt: skip


def record(tmp_path: Path) -> Path:
    """Losses that fall; torch's differ a little from ours, those of another seed more."""
    shift = dict(zip(NAMES, (0, 0, 0, 1e-4, 2e-4, 0.1), strict=True))
    runs = [
        {"name": name, "attention": name.split()[0], "seed": 0, "seconds": 12.34,
         "loss": [4 - 0.02 * step + by for step in range(100)]}
        for name, by in shift.items()
    ]  # fmt: skip
    pair = {"one": "flashnumba", "other": "torch", "steps": 100, "equal": 3, "mean": 1e-4, "largest": 2.34e-4}
    older = {"one": "torch", "other": "torch again", "mean": 0.1, "largest": 0.1}
    held = {
        "environment": {"device": "NVIDIA H200"},
        "settings": {"steps": 100},
        "distances": [pair, older],
        "runs": runs,
    }
    path = tmp_path / "training.json"
    path.write_text(json.dumps(held | {"runs": runs}), encoding="utf-8")
    return path


def test_a_record_is_shown(tmp_path: Path) -> None:
    path = record(tmp_path)
    page = training.page(path)
    assert page.startswith("- device: NVIDIA H200\n- steps: 100\n")
    assert "| flashnumba | 0 | 4.000 | 2.510 | 12.3 |" in page
    assert "| flashnumba | torch | 0.0001 | 0.00023 | 3 of 100 |" in page
    assert "| torch | torch again | 0.1 | 0.1 | not counted |" in page
    assert "](/generated/training.svg)" in page
    training.draw(path, tmp_path)
    drawn = (tmp_path / "training.svg").read_text(encoding="utf-8")
    training.draw(path, tmp_path)
    assert (tmp_path / "training.svg").read_text(encoding="utf-8") == drawn, "the same figures draw the same picture"
    assert "Training" not in results.page(tmp_path), "hundreds of losses are no table"


def test_distances_are_means_of_ten_steps(tmp_path: Path) -> None:
    held = json.loads(record(tmp_path).read_text(encoding="utf-8"))
    steps, mean = training.apart(held, "flashnumba", "torch")
    assert steps == list(range(5, 100, 10)) and mean == pytest.approx([1e-4] * 10)
    assert training.apart(held, "flashnumba, repeatable", "flashnumba, repeatable again")[1] == [0] * 10


def test_no_record_says_how_to_make_one(tmp_path: Path) -> None:
    assert "`python docs/examples/train_characters.py` writes it" in training.page(tmp_path / "training.json")
    training.draw(tmp_path / "training.json", tmp_path)
    assert list(tmp_path.iterdir()) == []
