"""The bench of latent attention: a small problem of each kind on the emulator."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from flashnumba.bench import mla  # noqa: E402
from flashnumba.bench.heads import CUDNN, FA2  # noqa: E402
from tests.bench.fakes import HostClock  # noqa: E402


def test_decoding():
    problem = mla.Problem(2, 40, heads=5)
    size = mla.measure(problem, 1e9, clock=HostClock(), in_turn=1, machine="emulator")
    assert [m.name for m in size.measured] == [FA2, CUDNN, mla.BASE, f"{mla.BASE}, e4m3", f"{mla.BASE}, e5m2"]
    base, eight = size.measured[2:4]
    for m in size.measured[2:]:
        assert m.error <= m.budget and not m.note, m
    assert base.figures["bytes_per_second"] == problem.nbytes / base.seconds
    assert eight.figures["bytes_per_second"] == 2 * 40 * 656 / eight.seconds
    assert eight.figures["of_bfloat16"] == base.seconds / eight.seconds


def test_prefill():
    problem = mla.Problem(1, 70, heads=4, tokens=8, prefill=True)
    size = mla.measure(problem, 1e9, clock=HostClock(), in_turn=1, machine="emulator")
    (ours,) = [m for m in size.measured if m.ours]
    assert ours.name == mla.PREFILL and ours.error <= ours.budget and not ours.note, ours
    assert problem.flops == 2 * 4 * (576 + 512) * sum(range(63, 71))
