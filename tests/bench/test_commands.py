"""The commands ``flashnumba bench``: options, what is printed, what is written, and how they end."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from flashnumba.bench import attention, backward, balance, chain, decode, gemm, softmax, staged
from flashnumba.bench.runner import Measured, Size
from flashnumba.cli import app
from flashnumba.commands.bench import forward, products, table
from tests.bench.fakes import ENVIRONMENT

MODULES = {
    "softmax": softmax, "gemm": gemm, "attention": attention, "chain": chain, "staged": staged,
    "balance": balance, "decode": decode, "backward": backward,
}  # fmt: skip
FIGURES = {
    "softmax": {"bytes_per_second": 4.1e12, "of_copy": 0.97, "of_torch": 1.5},
    "gemm": {"flops_per_second": 7.1e14, "of_cublas": 0.951},
    "attention": {"flops_per_second": 3.3e14, "of_fa2": 1.02, "of_cudnn": None},
    "chain": {"flops_per_second": 3.3e14, "of_shared": 1.18, "of_fa2": None},
    "staged": {
        "flops_per_second": 2.9e14,
        "of_fa2": 0.9,
        "of_base": 1.01,
        "shared": 16512,
        "registers": 168,
        "predicted_blocks": 3,
        "blocks": 3,
    },
    "decode": {"bytes_per_second": 3.9e12, "of_copy": 0.92, "of_equal_copy": 0.98, "of_fa2": 1.1, "of_cudnn": 1.3},
    "backward": {"flops_per_second": 2.7e14, "extra_bytes": 3 << 20, "of_fa2": 1.01, "of_cudnn": None},
    "balance": {
        "flops_per_second": 3e14, "predicted": 2.1e-3, "predicted_of_plain": 1.25, "of_plain": 1.2, "of_fa2": 1.1,
    },
}  # fmt: skip
FEW = {
    "softmax": ["--cols", "128,256", "--elements", "float16"],
    "gemm": ["--sizes", "64,128x32x16", "--elements", "float16"],
    "attention": ["--dims", "64", "--lengths", "1024,4096", "--causal", "no", "--no-simt"],
    "chain": ["--dims", "64", "--lengths", "1024,4096", "--causal", "no"],
    "staged": ["--dims", "64", "--lengths", "1024,4096", "--causal", "no"],
    "backward": ["--dims", "64", "--lengths", "1024,4096", "--causal", "no"],
    "decode": ["--batches", "1,2", "--lengths", "64"],
    "balance": ["--dims", "64", "--lengths", "1024", "--few", "8"],
}
PARAMS = pytest.mark.parametrize("name", MODULES)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """``run(name, *arguments)`` with a GPU that is not there; ``run.asked`` has what was measured. A bench's ``notes``
    end up in the lines of its kernels, one size after the other; an exception among them is raised instead."""
    monkeypatch.setattr(table, "why_no_cuda", lambda: "")
    monkeypatch.setattr("flashnumba.bench.environment.environment", lambda name: dict(ENVIRONMENT))
    asked, written = [], []

    def said(name, *arguments, notes=()):
        notes = iter(notes)

        def measure(*sizes, report, until, clock, **options):
            note = next(notes, "")
            asked.append((sizes, options, clock.runs))
            written.append(out.exists() and len(json.loads(out.read_text())["sizes"]))
            if isinstance(note, Exception):
                raise note
            size = Size({"element": "float16", "n": len(asked)})
            peer = Measured("peer", 4e-3, dict.fromkeys(FIGURES[name], 0.5), 1e-4, 2e-4, ours=False)
            ours = Measured("ours", 2e-3, FIGURES[name], 1e-4, 2e-4)
            if note:
                ours = Measured("ours", None, dict.fromkeys(FIGURES[name]), note=note)
            for m in (peer, ours):
                size.measured.append(m)
                report(size, m)
            return size

        monkeypatch.setattr(MODULES[name], "measure", measure)
        if name == "decode":
            monkeypatch.setattr(decode, "environment", lambda: {**ENVIRONMENT, decode.BANDWIDTH: 4.25e12})
            row = {"q": "[1, 4, 64, 64]", "name": "flashnumba.attention", "seconds": 12.3e-6, "note": ""}
            monkeypatch.setattr(decode, "host_times", lambda: [row, {**row, "seconds": None, "note": "no"}])
        elif name != "softmax":
            monkeypatch.setattr(MODULES[name], "environment", lambda: dict(ENVIRONMENT))
        return CliRunner().invoke(app, ["bench", name, "--out", str(out), *arguments])

    out = tmp_path / "results" / "bench.json"
    said.asked, said.written, said.out = asked, written, out
    return said


@PARAMS
def test_every_size_is_printed_and_written(run, name):
    result = run(name, *FEW[name], "--runs", "7")
    assert result.exit_code == 0, result.output
    assert result.output.startswith("device NVIDIA H200, arch 90a, date 2026-11-29")
    held = json.loads(run.out.read_text())
    assert held["environment"]["device"] == "NVIDIA H200"
    assert [size["n"] for size in held["sizes"]] == [1, 2]
    ours = held["sizes"][1]["measured"][1]
    assert ours == {
        "name": "ours", "seconds": 2e-3, **FIGURES[name], "error": 1e-4, "budget": 2e-4, "note": "", "ours": True,
    }  # fmt: skip
    assert run.written == [False, 1], "the file is written anew after every size"
    assert {runs for _, _, runs in run.asked} == {7}
    lines = [line.split() for line in result.output.splitlines() if line.strip().startswith("ours")]
    assert len(lines) == 2 and lines[0][-3:] == ["1.0e-04", "of", "2.0e-04"]
    assert result.output.splitlines()[-1].split()[:3] == ["float16", "2:", "ours"]
    assert ("host" in held) is (name == "decode")


def test_columns_of_gemm(run):
    lines = run("gemm", *FEW["gemm"]).output.splitlines()
    at = next(i for i, line in enumerate(lines) if line.lstrip().startswith("kernel"))
    assert lines[at - 1] == "float16, 64 x 64 times 64 x 64, majors kn"
    assert lines[at].split() == ["kernel", "ms", "TFLOP/s", "of", "cuBLAS", "error"]
    assert lines[at + 2].split()[:4] == ["ours", "2.000", "710.0", "0.951"]
    assert "float16, 128 x 16 times 16 x 32, majors kn" in lines


def test_columns_of_chain(run):
    lines = run("chain", *FEW["chain"]).output.splitlines()
    assert "float16, B 16, H 32, N 1024, D 64" in lines
    at = next(i for i, line in enumerate(lines) if line.lstrip().startswith("kernel"))
    assert lines[at].split() == ["kernel", "ms", "TFLOP/s", "of", "shared", "of", "FA2", "error"]
    assert lines[at + 2].split()[:5] == ["ours", "2.000", "330.0", "1.180", "-"]


def test_columns_of_backward(run):
    lines = run("backward", *FEW["backward"]).output.splitlines()
    assert "float16, B 16, H 32, N 1024, D 64" in lines
    ours = next(line for line in lines if line.startswith("  ours"))
    assert ours.split()[:6] == ["ours", "2.000", "270.0", "3.0", "1.010", "-"]


def test_columns_of_attention_and_decode(run):
    lines = run("attention", *FEW["attention"]).output.splitlines()
    assert "float16, B 16, H 32, N 1024, D 64" in lines
    ours = next(line for line in lines if line.startswith("  ours"))
    assert ours.split()[:5] == ["ours", "2.000", "330.0", "1.020", "-"]
    lines = run("decode", *FEW["decode"]).output.splitlines()
    assert "float16, B 2, H 64, Hkv 8, M 1, N 64, D 128, 0.5243 MB" in lines
    ours = next(line for line in lines if line.startswith("  ours"))
    assert ours.split()[:7] == ["ours", "2000.0", "3.90", "0.920", "0.980", "1.100", "1.300"]
    assert any(line.split()[-2:] == ["flashnumba.attention", "12.3"] for line in lines)
    assert any(line.split()[-3:] == ["flashnumba.attention", "-", "no"] for line in lines)


def test_columns_of_balance(run):
    lines = run("balance", *FEW["balance"]).output.splitlines()
    assert "float16, B 1, H 8, N 1024, D 64, causal" in lines and "float16, B 16, H 32, N 1024, D 64, causal" in lines
    ours = next(line for line in lines if line.startswith("  ours"))
    assert ours.split()[:8] == ["ours", "2.000", "2.100", "1.20", "1.25", "300.0", "1.100", "-"]


@PARAMS
@pytest.mark.parametrize(
    ("note", "code"),
    [("WRONG: error 3", 1), ("FAILED: GpuError: lost", 1), ("mma takes no float32", 0), ("out of time", 0)],
)
def test_a_kernel_without_a_time_says_why(run, name, note, code):
    result = run(name, *FEW[name], notes=[note])
    assert result.exit_code == code
    assert any(line.split("ours")[-1].strip() == note for line in result.output.splitlines())
    assert [size["measured"][1]["note"] for size in json.loads(run.out.read_text())["sizes"]] == [note, ""]


@PARAMS
def test_a_size_that_cannot_be_set_up_is_told_and_the_next_is_tried(run, name):
    result = run(name, *FEW[name], notes=[RuntimeError("out of\nmemory")])
    assert result.exit_code == 1
    assert "  not measured: RuntimeError: out of memory" in result.output.splitlines()
    assert [size["n"] for size in json.loads(run.out.read_text())["sizes"]] == [2]


def test_what_is_measured_by_default(run):
    run("gemm")
    assert [sizes for sizes, _, _ in run.asked] == [
        (element, n, n, n, "kn") for n in (4096, 8192) for element in ("float32", "float16")
    ]
    run.asked.clear()
    run("attention")
    problems = [sizes[0] for sizes, _, _ in run.asked]
    assert len(problems) == 19 and problems[-1] == attention.SMALL
    assert {(p.element, p.batch * p.n, p.heads * p.d) for p in problems[:-1]} == {("float16", 16384, 2048)}
    run.asked.clear()
    run("chain")
    found = [sizes[0] for sizes, _, _ in run.asked]
    assert [(p.d, p.causal, p.n) for p in found] == [
        (d, causal, n) for d in (64, 128) for causal in (False, True) for n in (4096, 16384)
    ]
    run.asked.clear()
    run("decode")
    assert [(sizes[0].n, sizes[0].batch) for sizes, _, _ in run.asked] == [
        (n, batch) for n in (8192, 32768, 131072) for batch in (1, 4, 16)
    ]
    assert {sizes[1] for sizes, _, _ in run.asked} == {4.25e12}


def test_kernels_majors_and_variants_reach_the_bench(run):
    run("gemm", "--sizes", "64", "--elements", "bfloat16", "--majors", "kk, mn", "--kernels", "mma,wgmma", "--wide")
    assert [sizes[-1] for sizes, _, _ in run.asked] == ["kk", "mn"]
    assert run.asked[0][1] == {"names": ["mma", "wgmma"], "wide": True}
    run.asked.clear()
    run("attention", "--causal", "yes", "--kernels", "mma", "--elements", "bfloat16", "--dims", "96")
    assert {(sizes[0].element, sizes[0].d, sizes[0].causal) for sizes, _, _ in run.asked} == {("bfloat16", 96, True)}
    run("decode", "--no-host", "--kernels", "mma", *FEW["decode"])
    assert "host" not in json.loads(run.out.read_text())


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("softmax", ["--cols", "128,x"], "--cols is '128,x'; it must be positive integers separated by commas"),
        ("softmax", ["--elements", "float64"], "--elements has float64; they must be of "),
        ("gemm", ["--sizes", "0"], "--sizes is '0'; it must be positive integers"),
        ("gemm", ["--sizes", "64,32x32"], "--sizes is '64,32x32'; each must be one number, or three"),
        ("gemm", ["--majors", "nk"], "--majors has nk; they must be of kn, kk, mn, mk"),
        ("gemm", ["--elements", ","], "--elements has no name in it; they must be of "),
        ("gemm", ["--kernels", "mma,wmma"], "--kernels has wmma; they must be of naive, coalesced, shared_tile, "),
        ("attention", ["--dims", "257"], "--dims is '257'; 257 is more than 256"),
        ("attention", ["--causal", "maybe"], "--causal has maybe; they must be of no, yes"),
        ("attention", ["--lengths", "-1"], "--lengths is '-1'; it must be positive integers"),
        ("attention", ["--kernels", "split"], "--kernels has split; they must be of simt, mma"),
        ("chain", ["--elements", "float32"], "--elements has float32; they must be of float16, bfloat16"),
        ("decode", ["--heads", "6", "--kv-heads", "4"], "--heads is 6 and --kv-heads 4; the second must divide"),
        ("decode", ["--batches", "1,,2"], "--batches is '1,,2'; it must be positive integers"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(run, name, arguments, message):
    result = run(name, *arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert not run.asked and not run.out.exists()


@PARAMS
def test_without_a_gpu(monkeypatch, tmp_path, name):
    monkeypatch.setattr(table, "why_no_cuda", lambda: "no driver is installed")
    result = CliRunner().invoke(app, ["bench", name, "--out", str(tmp_path / "a.json")])
    assert result.exit_code == 2
    assert result.output == f"flashnumba: the {name} bench needs a GPU, but no driver is installed\n"


@pytest.mark.parametrize("name", ["gemm", "attention", "decode"])
def test_without_torch_or_a_place_to_write(run, monkeypatch, tmp_path, name):
    (tmp_path / "file").write_text("")
    result = run(name, "--out", str(tmp_path / "file" / "a.json"))
    assert result.exit_code == 2 and "--out is" in result.output and "takes no files" in result.output

    def environment():
        raise RuntimeError("the bench compares with torch, which is not installed")

    run(name, *FEW[name])
    run.asked.clear()
    for module in (forward, products):
        monkeypatch.setattr(module, "conditions", lambda name, found, out: table.conditions(name, environment, out))
    result = run(name)
    assert result.exit_code == 2 and "torch, which is not installed" in result.output and not run.asked
