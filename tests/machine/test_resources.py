"""The command ``flashnumba resources``, on kernels of its own."""

from __future__ import annotations

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import flashnumba.ladder
from flashnumba.commands import resources
from flashnumba.machine.compiler import CompileCase, signature_of, why_not
from flashnumba.machine.function import kernel
from flashnumba.machine.numba import cuda, float32, uint32

needs_compiler = pytest.mark.skipif(bool(why_not()), reason=why_not() or "the compiler is installed")
FLOATS = np.zeros(1024, np.float32)
COUNT = 64


@kernel(threads=128)
def copies(x, out):
    i = uint32(cuda.threadIdx.x)
    out[i] = x[i]


@kernel(threads=256, arch="90a")
def in_memory(x, out, k):
    a = cuda.local.array(COUNT, float32)
    for j in range(COUNT):
        a[j] = x[uint32(j)]
    for step in range(k):
        a[(step * k) % COUNT] += x[uint32(step)] * 2.5
    out[uint32(0)] = a[k]


CASES = (
    CompileCase("copy", copies, signature_of((FLOATS, FLOATS)), threads=128, shared=48 * 1024),
    CompileCase("memory", in_memory, signature_of((FLOATS, FLOATS, 3)), threads=256),
)


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(flashnumba.ladder, "compile_cases", lambda: CASES, raising=False)
    app = typer.Typer()
    resources.register(app)
    return lambda *arguments: CliRunner().invoke(app, arguments)


@needs_compiler
def test_a_row_for_each_kernel_and_architecture_it_claims(run):
    result = run()
    assert result.exit_code == 0
    rows = [line for line in result.output.splitlines() if " sm_" in line and ":" not in line]
    assert [word for line in rows for word in line.split() if word.startswith("sm_")] == [
        "sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a", "sm_90a",
    ]  # fmt: skip
    words = rows[1].split()
    assert words[1] == "128"
    assert words[5:8] == ["48", "3", "19%"]
    assert "shared memory" in rows[1]
    assert "memory, sm_90a: 256 bytes of arrays are in local memory, not in registers" in result.output
    assert "memory, sm_90a: double precision: cvt.f64.f32" in result.output


@needs_compiler
def test_the_notes_sums_stand_below(run):
    output = run("--kernel", "copy", "--arch", "80").output
    assert "256 threads of 256 registers take 256 KB, 768 / 256 = 3 blocks" in output
    assert "64 / 3 = 21 KB of LDS a block" in output


@needs_compiler
def test_kernels_and_architectures_are_chosen(run):
    result = run("--kernel", "cop", "--arch", "75, 90")
    assert result.exit_code == 0
    assert [line.split("sm_")[1].split()[0] for line in result.output.splitlines() if " sm_" in line] == ["75", "90a"]


@needs_compiler
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--kernel", "nothing"), "--kernel is 'nothing'; the kernels are copy, memory"),
        (("--arch", "80,70"), "--arch is '80,70'; '70' is not one of 75, 80, 86, 89, 90, 100, 120"),
        (("--kernel", "memory", "--arch", "80"), "--arch is '80'; these kernels need sm_90a"),
    ],
)
def test_what_is_not_there_is_refused(run, arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_without_the_compiler_the_command_that_mends_it_is_named(run, monkeypatch):
    monkeypatch.setattr(resources, "why_not", lambda: 'no compiler: pip install "flashnumba[cu13]"')
    result = run()
    assert result.exit_code == 2
    assert 'pip install "flashnumba[cu13]"' in result.output
