"""The bench of the stage sparsity: one small problem of each kind on the emulator."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from flashnumba.bench import sparse_decode, sparsity  # noqa: E402
from flashnumba.bench.attention import Problem  # noqa: E402
from tests.bench.fakes import HostClock  # noqa: E402


def test_prefill_beside_the_dense_kernel(monkeypatch):
    monkeypatch.setattr(sparsity, "HALVINGS", 2)
    problem = Problem("float16", 1, 1, 100, 64)
    size = sparsity.measure(
        problem, names=("warp_skip", "prediction"), targets=(0.0, 0.5), clock=HostClock(), machine="emulator"
    )  # fmt: skip
    _, nothing, skipping, prediction = size.measured
    names = [sparsity.DENSE, "warp_skip, 0%", "warp_skip, 50%", "sparge, prediction alone"]
    assert [m.name for m in size.measured] == names and nothing.figures["skipped"] == 0
    assert all(not m.note for m in size.measured) and skipping.error <= skipping.budget
    assert skipping.figures["of_dense"] == 1.25, "by the clock, in turn"
    assert 0 < skipping.figures["skipped"] < 1 and prediction.figures["skipped"] is None


def test_decoding_beside_the_dense_kernel(monkeypatch):
    monkeypatch.setattr(sparsity, "HALVINGS", 3)
    step = sparse_decode.DecodeProblem(batch=1, n=200, heads=4, kv_heads=2, d=64)
    size = sparse_decode.measure_decode(step, targets=(0.0, 0.5), clock=HostClock(), machine="emulator")
    assert [m.name for m in size.measured] == [sparse_decode.SPLIT, "blasst, 0%", "blasst, 50%"]
    for m in size.measured:
        assert m.error <= m.budget and not m.note, m
    assert size.measured[1].figures["skipped"] == 0 < size.measured[2].figures["skipped"]


def test_warpgroups_beside_their_dense_kernel(monkeypatch):
    monkeypatch.setattr(sparsity, "HALVINGS", 2)
    problem = Problem("float16", 1, 1, 300, 64)
    size = sparsity.measure_warpgroups(
        problem, names=("blasst_wgmma",), targets=(0.0, 0.5), clock=HostClock(), machine="emulator"
    )
    cudnn, dense, nothing, skipping = size.measured
    assert [m.name for m in (dense, nothing, skipping)] == [
        sparsity.WARPGROUPS, "blasst_wgmma, 0%", "blasst_wgmma, 50%",
    ]  # fmt: skip
    assert cudnn.note and size.about["tier"] == "wgmma" and nothing.figures["skipped"] == 0
    assert all(not m.note and m.error <= m.budget for m in (dense, nothing, skipping))
    assert skipping.figures["of_dense"] == 1.25, "by the clock, in turn"


def test_lists_by_warpgroups():
    problem = Problem("float16", 1, 1, 130, 64)
    size = sparsity.measure_warpgroups(
        problem, names=("sparge_wgmma", "prediction"), targets=(0.5,), clock=HostClock(), machine="emulator"
    )
    half, by_sum, prediction = size.measured[2:]
    names = [f"sparge_wgmma, {what}" for what in ("top-k, 50%", "cdf 0.98", "prediction alone")]
    assert [m.name for m in (half, by_sum, prediction)] == names and not half.note
    assert half.error <= half.budget and by_sum.error <= by_sum.budget
    assert half.figures["skipped"] == pytest.approx(2 / 3), "of three blocks one is kept"
    assert half.figures["of_ideal"] == pytest.approx(1.25 / 3) and prediction.figures["skipped"] is None
