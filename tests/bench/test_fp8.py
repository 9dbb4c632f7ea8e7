"""The bench of the stage fp8: one small problem of each kind on the emulator, and its instruction counts."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from flashnumba.bench import fp8  # noqa: E402
from flashnumba.bench.attention import Problem  # noqa: E402
from flashnumba.bench.heads import FA2  # noqa: E402
from flashnumba.machine.compiler import why_not  # noqa: E402
from tests.bench.fakes import HostClock  # noqa: E402


def test_prefill_beside_float16():
    size = fp8.measure(Problem("float16", 1, 1, 33, 64, True), clock=HostClock(), machine="emulator")
    names = [f"fp8.{name}, {fmt}" for fmt in ("e4m3", "e5m2") for name in ("emulated", "k32")]
    assert [m.name for m in size.measured] == [FA2, fp8.BASE, *names, "v turned by columns, once"]
    for m in size.measured[1:-1]:
        assert m.error <= m.budget and not m.note, m
    base = size.measured[1]
    assert size.measured[2].figures["of_float16"] == base.seconds / size.measured[2].seconds


def test_decoding_beside_float16():
    problem = fp8.DecodeProblem(1, 130, heads=4, kv_heads=2, d=64)
    size = fp8.measure_decode(problem, clock=HostClock(), in_turn=1, machine="emulator")
    assert [m.name for m in size.measured] == [FA2, fp8.DECODE_BASE, "fp8.split, e4m3", "fp8.split, e5m2"]
    for m in size.measured[1:]:
        assert m.error <= m.budget and not m.note, m
        assert m.figures["elements_per_second"] == problem.elements / m.seconds


def test_conversions():
    rows = fp8.conversions(2000, HostClock(), "emulator")
    assert {(row["to"], row["way"]) for row in rows} >= {("float8_e4m3fn", "instructions"), ("int8", "added")}
    assert all(row["bytes_per_second"] == 5 * 2000 / row["seconds"] for row in rows)


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "the compiler is installed")
def test_instructions(monkeypatch):
    """A loop is found, and is counted; on sm_89 k32 has products of 32 alone, and converts nothing but P."""
    from flashnumba.stages.fp8 import count

    found = count.in_loop("k32", arch="89")
    assert found.opcodes["QMMA"] == 128 + 2 * 2, "and one for the sum of each of two fragments and operands"
    assert "HMMA" not in found.opcodes and found.opcodes["F2FP"] == found.rows * found.keys // 32 // 2
