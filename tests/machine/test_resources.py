"""The command ``flashnumba resources``, on kernels of its own."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import flashnumba.ladder
from flashnumba.cli import app
from flashnumba.commands import resources
from flashnumba.machine import install
from flashnumba.machine import resources as record
from flashnumba.machine.compiler import CompileCase, Compiled, signature_of, why_not
from flashnumba.machine.function import kernel
from flashnumba.machine.numba import cuda, float32, uint32
from flashnumba.machine.occupancy import Budget, machine_of

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
    rows = [line for line in result.output.splitlines() if line.startswith("sm_")]
    assert [word for line in rows for word in line.split() if word.startswith("sm_")] == [
        "sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a", "sm_90a",
    ]  # fmt: skip
    words = rows[1].split()
    assert words[4:7] == ["48", "3", "19%"]
    assert "128 threads a block" in result.output
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
    assert [line.split()[0] for line in result.output.splitlines() if line.startswith("sm_")] == ["sm_75", "sm_90a"]


@needs_compiler
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--kernel", "nothing"),
            "--kernel is 'nothing', which is in no kernel's name; they begin with\n    copy\n    memory\n",
        ),
        (("--arch", "80,70"), "--arch is '80,70'; '70' is not one of 75, 80, 86, 89, 90, 100, 120"),
        (("--kernel", "memory", "--arch", "80"), "--arch is '80'; these kernels need sm_90a"),
    ],
)
def test_what_is_not_there_is_refused(run, arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_without_the_compiler_the_command_that_mends_it_is_named(run, monkeypatch):
    monkeypatch.setattr(resources, "why_not", lambda: f"no compiler: {install.extra('cu13')}")
    result = run()
    assert result.exit_code == 2
    assert install.extra("cu13") in result.output


WIDEST = "online_softmax.split_ahead bfloat16 262144 by 16 bytes, sm_90 on, with a name wider than a terminal [is]"


@pytest.fixture
def run_widest(monkeypatch, run):
    """The command on made-up results in which every column is as wide as it gets; no compiler is needed."""
    made = Compiled(
        name="wide", arch="100a", registers=255, spill_stores=50000, spill_loads=40000, stack=65536, shared=227 * 1024,
        barriers=16, local_memory=0, uses_f64=False, census={}, warnings=(), ptx="", cubin=b"",
    )  # fmt: skip
    limits = dict.fromkeys(("registers", "shared memory", "threads", "block slots", "barriers"), 32)
    here = Budget(machine_of("100a"), threads=64, takes=limits, holds=limits, admits=limits)
    case = CompileCase(WIDEST, copies, (), threads=64, shared=512)
    monkeypatch.setattr(flashnumba.ladder, "compile_cases", lambda: (case,))
    monkeypatch.setattr(resources, "why_not", lambda: "")
    monkeypatch.setattr(resources, "compile_kernel", lambda kernel, signature, target: replace(made, arch=target))
    monkeypatch.setattr(resources, "budget_of", lambda case, made: here)

    def said(remarks, *arguments, columns=80):
        monkeypatch.setattr(resources, "problems", lambda case, target: list(remarks))
        app = typer.Typer()
        resources.register(app)
        return CliRunner().invoke(app, arguments, env={"COLUMNS": str(columns)})

    return said


@pytest.mark.parametrize("columns", [80, 120])
def test_the_widest_row_is_whole(run_widest, columns):
    lines = run_widest((), "--arch", "100", columns=columns).output.splitlines()
    assert WIDEST in lines
    heading = next(line for line in lines if line.startswith("arch "))
    assert heading.split() == ["arch", "regs", "spill", "stack", "shared", "blocks", "occ.", "limit", "notes"]
    at = next(i for i, line in enumerate(lines) if line.startswith("sm_100a "))
    assert lines[at].split()[:7] == ["sm_100a", "255", "90000", "65536", "227.5", "32", "100%"]
    below = " ".join(lines[at:-1])
    for word in ("registers,", "shared", "memory,", "threads,", "block", "slots,", "barriers"):  # the column wraps
        assert word in below.split()
    assert max(map(len, lines[at - 1 : at + 3])) <= columns


@pytest.mark.parametrize(
    ("remarks", "arguments", "code"),
    [((), (), 0), ((), ("--check",), 0), (("spills [%r1]",), (), 0), (("spills [%r1]",), ("--check",), 1)],
)
def test_remarks_count_only_where_they_are_checked(run_widest, remarks, arguments, code):
    result = run_widest(remarks, "--arch", "75,100", *arguments)
    assert result.exit_code == code
    assert (f"{WIDEST}, sm_75: spills [%r1]\n" in result.output) is bool(remarks)
    assert ("2 remarks above." in result.output) is bool(remarks)


def test_help_names_the_architectures_and_what_remarks_do(run):
    text = " ".join(CliRunner().invoke(app, ["resources", "--help"], env={"COLUMNS": "200"}).output.split())
    assert "75, 80, 86, 89, 90, 100, 120" in text
    assert "Remarks do not change the exit code unless --check is given." in text


def test_a_kernel_is_shown_before_the_next_is_compiled(run_widest, monkeypatch):
    order = []
    copy = CompileCase("second", copies, (), threads=64)
    first = flashnumba.ladder.compile_cases()
    monkeypatch.setattr(flashnumba.ladder, "compile_cases", lambda: (*first, copy))
    compiled, show = resources.compile_kernel, resources._show
    monkeypatch.setattr(resources, "compile_kernel", lambda *a: (order.append("compile"), compiled(*a))[1])
    monkeypatch.setattr(resources, "_show", lambda *a: (order.append("show"), show(*a))[1])
    assert run_widest((), "--arch", "80").exit_code == 0
    assert order == ["compile", "show"] * 2


# -- the record; test_offline_gate.py compares that of docs/results with the compiler ---------------------------------
ROW = record.Resources("gemm.mma float16", "90a", 128, 168, 8, 16, 4, True, 98304, 2)


def test_a_record_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "resources.json"
    rows = [ROW, replace(ROW, arch="80", f64=False)]
    record.write(path, {"numba": "1"}, rows)
    assert record.read(path) == ({"numba": "1"}, {(row.name, row.arch): row for row in rows})
    lines = path.read_text().splitlines()
    assert [json.loads(line.strip().rstrip(",")) for line in lines[3:5]] == [asdict(row) for row in rows]
    assert ROW.budget.blocks == 2 and ROW.budget.limited_by == ("shared memory",)
    record.write(path, {}, [])
    assert record.read(path) == ({}, {}) and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"compiler": {}, "kernels": [{"name": "a", "regs": 3}]}'])
def test_what_is_no_record_is_refused(tmp_path, run_widest, text):
    path = tmp_path / "resources.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"resources.json is no record of resources"):
        record.read(path)
    result = run_widest((), "--json", str(path))
    assert result.exit_code == 2 and "cannot be added to (resources.json is no record" in result.output
    assert path.read_text() == text


@pytest.fixture
def versions(monkeypatch):
    found = {"numba": "1", "nvJitLink": "13.5"}
    monkeypatch.setattr(resources, "compiler", lambda: dict(found))
    return found


def test_json_has_a_line_for_each_kernel_and_architecture(tmp_path, run_widest, versions):
    path = tmp_path / "new" / "resources.json"
    result = run_widest((), "--arch", "75,100", "--json", str(path))
    assert result.exit_code == 0
    assert f"{path}: 2 lines; 5 are missing" in result.output.replace("\n", "")
    written, rows = record.read(path)
    assert written == versions and list(rows) == [(WIDEST, "75"), (WIDEST, "100a")]
    row = rows[WIDEST, "100a"]
    assert (row.threads, row.registers, row.spills, row.stack) == (64, 255, 90000, 65536)
    assert (row.shared, row.barriers, row.f64) == (227 * 1024 + 512, 16, False)


def test_lines_of_others_stay_and_those_of_kernels_that_are_no_more_go(tmp_path, run_widest, versions):
    path = tmp_path / "resources.json"
    old = [replace(ROW, name=name, arch=arch) for name, arch in ((WIDEST, "80"), (WIDEST, "90a"), ("gone", "90a"))]
    record.write(path, versions, old)
    assert run_widest((), "--arch", "80,86", "--json", str(path)).exit_code == 0
    rows = record.read(path)[1]
    assert list(rows) == [(WIDEST, "80"), (WIDEST, "86"), (WIDEST, "90a")], "in the order of the ladder"
    assert [row.registers for row in rows.values()] == [255, 255, 168]
    record.write(path, {**versions, "numba": "0"}, old)
    run_widest((), "--arch", "80", "--json", str(path))
    assert list(record.read(path)[1]) == [(WIDEST, "80")], "nothing of another compiler's stays"
