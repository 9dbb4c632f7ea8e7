"""The command line's walkthrough and lessons. Stand-in kernels: the logic is under test here, not the mathematics."""

import re
import sys
from dataclasses import replace
from functools import partial
from importlib import import_module, metadata
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from matplotlib.image import imread
from typer.testing import CliRunner

from flashnumba import commands
from flashnumba.cli import app
from flashnumba.commands import walkthrough
from flashnumba.ladder import NAMES, STAGES, Passes, Rung, find
from flashnumba.machine import compiler, gpu
from flashnumba.stages import flash_forward, fp8_heads, heads
from flashnumba.stages.backward import problem
from flashnumba.stages.backward import reference as gradients
from flashnumba.stages.chained_gemm import fp8
from flashnumba.stages.flash_forward.reference import low_precision as attention
from flashnumba.stages.fp8 import reference as fp8_reference
from flashnumba.stages.gemm import matmul as product
from flashnumba.stages.gemm import reference as product_reference
from flashnumba.stages.softmax.reference import low_precision
from flashnumba.stages.stage import Stage


@pytest.fixture
def kernels(monkeypatch):
    """Stand-ins for the stages' host functions; ``kernels.calls`` are those made, ``kernels.spoil`` breaks some."""
    state = SimpleNamespace(calls=[], spoil=())

    def softmax(x, out=None, *, kernel, machine):
        return computed(low_precision(x), kernel, machine)

    def forward(q, k, v, kernel, *, causal, machine):
        return computed(attention(q, k, v, causal=causal)[0], kernel, machine), None

    def in_fp8(q, k, v, kernel, *, causal, machine):
        codes = (x.view(np.uint8) for x in (q, k, v))
        return computed(fp8_reference.attention(*codes, "e4m3", causal=causal)[0], kernel, machine), None

    def of_codes(q, k, v, kernel, *, fmt, causal, machine, **descales):
        return computed(fp8_reference.attention(q, k, v, fmt, **descales, causal=causal)[0], kernel, machine), None

    def backward(do, q, k, v, o, lse, kernel, *, causal, machine):
        state.calls.append((kernel, machine))
        return gradients.dense(q, k, v, do, causal=causal)

    def matmul(a, b, out=None, *, kernel, machine):
        return computed(product_reference.low_precision(a, b), kernel, machine)

    def given(kernel, case, machine):
        return computed(case.lowprec.copy(), kernel, machine)

    def computed(result, kernel, machine):
        state.calls.append((kernel, machine))
        if kernel in state.spoil:
            result[-1, -1] += result.dtype.type(0.01)
        return result

    monkeypatch.setattr(product, "matmul", matmul)
    for stage in ("softmax", "online_softmax"):
        name = f"flashnumba.stages.{stage}"
        module = ModuleType(f"{name}.simt")
        module.softmax = softmax
        monkeypatch.setitem(sys.modules, f"{name}.simt", module)
        monkeypatch.setattr(import_module(name), "simt", module, raising=False)
    monkeypatch.setattr(flash_forward, "plans", lambda: {rung.name: rung.name for rung in flash_forward.STAGE.kernels})
    monkeypatch.setattr(heads, "forward", forward)
    monkeypatch.setattr(fp8, "forward", in_fp8)
    monkeypatch.setattr(fp8_heads, "forward", of_codes)
    monkeypatch.setattr(problem, "backward", backward)
    # Stages with several host functions: what their kernels should give.
    monkeypatch.setattr(walkthrough, "STAGES", tuple(
        stage if stage.name not in ("sparsity", "flash_mla") else replace(stage, rungs=tuple(
            replace(rung, run=partial(given, rung.name)) if rung in stage.kernels else rung for rung in stage.rungs
        ))
        for stage in STAGES
    ))  # fmt: skip
    return state


def invoke(*arguments, columns=120):
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, [str(a) for a in arguments])


@pytest.fixture
def undrawn(monkeypatch):
    """Pictures without anything in them: drawing takes longest in a walk, and lessons draw what kernels really give."""
    monkeypatch.setattr(Stage, "figure", touch)


DRAWN = "softmax", "gemm", "flash_forward", "chained_gemm"
"""Stages that are drawn where pictures are the subject; the lessons of the others draw theirs."""


@pytest.fixture
def few_drawn(monkeypatch):
    drawn = Stage.figure
    monkeypatch.setattr(
        Stage, "figure", lambda stage, results, path: (drawn if stage.name in DRAWN else touch)(stage, results, path)
    )


def touch(stage, results, path):
    path.touch()


@pytest.fixture
def untouched(monkeypatch):
    """Fails the test if the walk begins."""
    monkeypatch.setattr(walkthrough, "run", lambda *args: pytest.fail("it ran before refusing"))


def test_all_is_well(kernels, few_drawn, tmp_path):
    result = invoke("walkthrough", "--machine", "emulator", "--out", tmp_path / "new" / "folder")
    assert result.exit_code == 0, result.output
    for stage in STAGES:
        assert stage.question in result.output
        for rung in stage.rungs:
            assert re.search(rf"^{stage.name} +{rung.name} ", result.output, re.MULTILINE)
        assert (tmp_path / "new" / "folder" / f"{stage.name}.png").exists()
    for name in DRAWN:
        picture = imread(tmp_path / "new" / "folder" / f"{name}.png")
        assert picture.shape[0] > 500
        assert picture[..., :3].std() > 0.05, "something is drawn"
    assert {machine for _, machine in kernels.calls} == {"emulator"}
    assert "float16 overflow in 64 of 64 rows" in result.output
    assert "1 failed as meant, 0 not run here, 0 failed" in result.output


def test_a_line_holds_what_it_should(kernels, undrawn, tmp_path):
    result = invoke("walkthrough", "--stage", "softmax", "--machine", "emulator", "--out", tmp_path)
    line = next(line for line in result.output.splitlines() if "block_per_row" in line and "float16" in line)
    number = r"\d\.\de-\d\d"
    pattern = rf"softmax +block_per_row +emulator +64 x 512 float16 +{number} +{number} +8 \(3R\+1W\) +[\d.]+ m?s ok *"
    assert re.fullmatch(pattern, line)
    assert "Online" not in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["softmax.png"]


def test_it_fits_a_terminal_of_80_columns(kernels, undrawn, tmp_path, monkeypatch):
    make = walkthrough.Console
    monkeypatch.setattr(walkthrough, "Console", lambda **options: make(width=80))
    result = invoke("walkthrough", "--stage", "online_softmax", "--machine", "emulator", "--out", tmp_path)
    rows = [line for line in result.output.splitlines() if ("float" in line and "numpy" in line) or "emulator" in line]
    assert len(rows) == 2 * len(find("online_softmax").rungs)
    assert all(len(row) <= 80 and row.rstrip().endswith(" ok") for row in rows)


def test_a_kernel_outside_its_budget_is_exit_1_and_the_walk_goes_on(kernels, undrawn, tmp_path):
    kernels.spoil = "block_per_row", "split", "coalesced"
    result = invoke("walkthrough", "--machine", "emulator", "--out", tmp_path)
    assert result.exit_code == 1
    assert "above the budget" in result.output
    taken = [rung.name for s in STAGES for case in s.cases("emulator", False) for rung in s.kernels if rung.takes(case)]
    assert len(kernels.calls) == len(taken)
    lines = [line.split() for line in result.output.splitlines() if "FAILED" in line]
    assert {line[1] for line in lines} == set(kernels.spoil)
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.png" for name in NAMES}


def test_a_naive_version_that_does_not_fail_is_exit_1(kernels, undrawn, tmp_path, monkeypatch):
    stage = STAGES[0]
    tame = replace(stage.rungs[0], run=lambda case, machine: low_precision(case.inputs["x"]))
    monkeypatch.setattr(walkthrough, "STAGES", (replace(stage, rungs=(tame, *stage.rungs[1:])),))
    result = invoke("walkthrough", "--machine", "emulator", "--out", tmp_path)
    assert result.exit_code == 1
    assert "float16 overflow was meant to show here and did not" in result.output


def test_a_kernel_that_raises_is_exit_1_and_still_drawn(tmp_path, monkeypatch):
    def run(case, machine):
        raise RuntimeError("deadlock [in block 0]")

    stage = replace(STAGES[0], rungs=(Rung("stuck", "simt", run, Passes(1, 1)),))
    monkeypatch.setattr(walkthrough, "STAGES", (stage,))
    result = invoke("walkthrough", "--machine", "emulator", "--out", tmp_path)
    assert result.exit_code == 1
    assert "RuntimeError: deadlock [in block 0]" in result.output
    assert (tmp_path / "softmax.png").exists()


def test_a_gpu_too_old_for_a_kernel_skips_it_and_says_why(kernels, undrawn, tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "why_no_cuda", lambda: "")
    monkeypatch.setattr(gpu, "device_arch", lambda: "86")
    newer, small = replace(STAGES[0].rungs[-1], arch="90a"), STAGES[0].cases("emulator", False)
    stage = replace(STAGES[0], rungs=(*STAGES[0].rungs[:-1], newer), cases=lambda machine, full: small)
    monkeypatch.setattr(walkthrough, "STAGES", (stage,))
    result = invoke("walkthrough", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "needs sm_90a, this GPU is sm_86; --machine emulator runs it" in result.output
    assert "3 not run here" in result.output
    assert {name for name, _ in kernels.calls} == {"warp_per_row", "block_per_row"}
    assert {machine for _, machine in kernels.calls} == {"cuda"}


@pytest.mark.parametrize(
    ("have", "needs", "able"),
    [("90a", "90a", True), ("90a", "80", True), ("100a", "90a", False), ("75", "80", False), ("75", "75", True)],
)
def test_which_gpu_runs_what(monkeypatch, have, needs, able):
    monkeypatch.setattr(gpu, "device_arch", lambda: have)
    rung = replace(STAGES[0].kernels[0], arch=needs)
    assert (walkthrough.unable(rung, "cuda") == "") is able
    assert walkthrough.unable(rung, "emulator") == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stage", "gemn"], f"--stage: there is no stage 'gemn'; the stages are {', '.join(NAMES)}"),
        (["--machine", "tpu"], "--machine is 'tpu'; it must be auto, cuda or emulator"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(untouched, tmp_path, arguments, message):
    result = invoke("walkthrough", *arguments, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert result.stderr == f"flashnumba: {message}\n"
    assert result.stdout == ""
    assert not (tmp_path / "out").exists()


def test_an_output_that_takes_no_files_is_exit_2(untouched, tmp_path):
    (tmp_path / "file").write_text("in the way")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        result = invoke("walkthrough", "--out", out)
        assert result.exit_code == 2
        assert len(result.stderr.splitlines()) == 1
        assert f"--out is '{out}', which takes no files" in result.stderr


@pytest.mark.parametrize(
    ("no_gpu", "no_compiler", "reason"), [("no GPU", "", "no GPU"), ("", "no NVVM", "no NVVM"), ("", "", "")]
)
def test_asking_for_a_gpu(monkeypatch, untouched, tmp_path, no_gpu, no_compiler, reason):
    monkeypatch.setattr(gpu, "unavailable", lambda: no_gpu)
    monkeypatch.setattr(compiler, "why_not", lambda: no_compiler)
    assert commands.choose_machine("auto") == ("emulator" if reason else "cuda")
    assert commands.choose_machine("emulator") == "emulator"
    if reason:
        result = invoke("walkthrough", "--machine", "cuda", "--out", tmp_path / "out")
        assert result.exit_code == 2
        assert result.stderr == f"flashnumba: --machine is 'cuda', but {reason}; emulator and auto run here\n"
    else:
        assert commands.choose_machine("cuda") == "cuda"


def test_full_reaches_the_cases(kernels, undrawn, tmp_path, monkeypatch):
    asked = []
    small = STAGES[0].cases("emulator", False)
    stage = replace(STAGES[0], cases=lambda machine, full: asked.append((machine, full)) or small)
    monkeypatch.setattr(walkthrough, "STAGES", (stage,))
    assert invoke("walkthrough", "--full", "--machine", "emulator", "--out", tmp_path).exit_code == 0
    assert asked == [("emulator", True)]


def test_lessons_in_a_checkout_and_without_one(tmp_path, monkeypatch):
    module = import_module("flashnumba.commands.lessons")
    (tmp_path / "lessons").mkdir()
    (tmp_path / "lessons" / "01_softmax.ipynb").write_text("{}")
    monkeypatch.setattr(module, "folder", lambda: tmp_path / "lessons")
    result = invoke("lessons", columns=200)
    assert result.exit_code == 0
    assert str(tmp_path / "lessons" / "01_softmax.ipynb") in result.stdout
    assert "02_online_softmax.ipynb (not in this folder)" in result.stdout
    assert f"-m jupyterlab {tmp_path / 'lessons'}" in result.stdout
    monkeypatch.setattr(module, "folder", lambda: tmp_path / "nowhere")
    result = invoke("lessons", columns=200)
    assert result.exit_code == 0
    assert "Get the source" in result.stdout
    for stage in STAGES:
        assert stage.question in result.stdout


def test_help_names_the_commands():
    result = invoke("--help")
    assert result.exit_code == 0
    assert "walkthrough" in result.stdout
    assert "lessons" in result.stdout


def test_the_version_is_that_of_the_installed_package(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: {"flashnumba": "1.2.3"}[name])
    result = invoke("--version")
    assert (result.exit_code, result.stdout) == (0, "flashnumba 1.2.3\n")

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    result = invoke("--version")
    assert (result.exit_code, result.stdout) == (0, "flashnumba, which runs from its source and is not installed\n")


def test_nan_is_never_printed_as_within_budget(kernels, undrawn, tmp_path, monkeypatch):
    spoilt = replace(STAGES[0].kernels[0], run=lambda case, machine: np.full_like(case.lowprec, np.nan))
    monkeypatch.setattr(walkthrough, "STAGES", (replace(STAGES[0], rungs=(spoilt,)),))
    result = invoke("walkthrough", "--machine", "emulator", "--out", tmp_path)
    assert result.exit_code == 1
    assert "0 within their error budget, 0 failed as meant, 0 not run here, 3 failed" in result.output
