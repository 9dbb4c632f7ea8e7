"""``flashnumba bench counters``: what is asked of Nsight Compute, what is read from its output, and how it ends.

``ncu_excerpt.csv`` is of an H200: two launches, and the columns that say something.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from flashnumba.bench import counters, ncu, profiled
from flashnumba.cli import app
from flashnumba.commands.bench import table
from tests.bench.fakes import ENVIRONMENT

EXCERPT = (Path(__file__).parent / "ncu_excerpt.csv").read_text()
HMMA = "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active"
TARGET = counters.Target("chained_gemm", 2048, 128, 16)


# -- reading -----------------------------------------------------------------------------------------------------------
def test_every_counter_of_a_stored_excerpt():
    shared, registers = ncu.parse(EXCERPT)
    assert (shared.stage, shared.kernel, registers.kernel) == ("chained_gemm", "shared", "registers")
    assert set(shared.values) == {*ncu.METRICS, *ncu.LAUNCH} and shared.arch == "90"
    assert shared.values["nanoseconds"] == 113760 and shared.values["instructions"] == 39517256
    found = counters.figures(shared)
    assert found["ldmatrix"] == 2883584 and found["wavefronts"] == 14537019 and found["shared"] == 106624
    assert found["load_conflicts_share"] == pytest.approx(117341 / 11717213)
    assert found["store_conflicts_share"] == pytest.approx(3454 / 2166142)
    assert (found["tensor"], found["issue"]) == (0.5122, 0.4027)
    assert found["warps"] == pytest.approx(64 * 0.1209)
    assert [found[f"stall_{why}"] for why in ncu.STALLS] == [1.52, 0.55, 0.25, 0.17, 0.4, 0.09]
    assert {name for name, value in found.items() if isinstance(value, int)} >= {"instructions", "blocks", "registers"}


def test_occupancy_is_predicted_as_the_profiler_has_it():
    for launch in ncu.parse(EXCERPT):
        found = counters.figures(launch)
        assert found["predicted_blocks"] == min(found["blocks_by_registers"], found["blocks_by_shared"]) == 2
        assert found["predicted_warps"] == 8


def test_no_share_of_no_wavefronts():
    launch = ncu.parse(EXCERPT)[0]
    launch.values["store_wavefronts"] = 0.0
    assert counters.figures(launch)["store_conflicts_share"] is None


@pytest.mark.parametrize(
    ("was", "becomes", "message"),
    [
        (HMMA, "sm__other", f"has no metric {HMMA}"),
        ("launch__barrier_count", "launch__other", "has no metric launch__barrier_count"),
        ('"51.22"', '"(!) n/a"', rf"metric {HMMA} has no value on this GPU, but '\(!\) n/a'"),
        ('"ns"', '"us"', "states gpu__time_duration.sum in 'us'; it must be ns"),
        ("ORDER chained_gemm registers\n", "", "table has 2 launches, and the target named 1"),
        ('"ID"', '"Id"', "table has 0 launches, and the target named 2"),
    ],
)
def test_a_table_that_is_not_what_was_asked_for(was, becomes, message):
    assert was in EXCERPT
    with pytest.raises(RuntimeError, match=message):
        ncu.parse(EXCERPT.replace(was, becomes))


# -- the command -------------------------------------------------------------------------------------------------------
FAKE = """#!{python}
import os, sys
with open({log!r}, "a") as log:
    log.write(" ".join(sys.argv[1:]) + chr(10))
if "--version" in sys.argv:
    print("NVIDIA (R) Nsight Compute", "Version 2025.3.1.0 (build 36398880) (public)", sep=chr(10))
elif not {probe} and "probe" in sys.argv:
    print(open({excerpt!r}).read())
else:
{body}
"""
ANSWER = "print(open(__file__ + '.csv').read())"


@pytest.fixture
def run(monkeypatch, tmp_path):
    """``run(*arguments, body=, probe=)`` with a GPU that is not there and an ``ncu`` that prints the excerpt, or does
    what the body says (with ``probe`` already when it is tried out); ``run.log()`` has what it was called with."""
    monkeypatch.setattr(table, "why_no_cuda", lambda: "")
    monkeypatch.setattr(counters, "base_environment", lambda name: dict(ENVIRONMENT))
    folder, out = tmp_path / "bin", tmp_path / "results" / "counters.json"
    folder.mkdir()
    log, fake, excerpt = folder / "log", folder / "ncu", folder / "ncu.csv"
    excerpt.write_text(EXCERPT)

    def said(*arguments, body=ANSWER, probe=False, installed=True):
        lines = "\n".join("    " + line for line in body.splitlines())
        held = {"python": sys.executable, "log": str(log), "excerpt": str(excerpt), "probe": probe, "body": lines}
        fake.write_text(FAKE.format(**held))
        fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(folder) if installed else str(tmp_path))
        return CliRunner().invoke(app, ["bench", "counters", "--out", str(out), *arguments])

    said.out, said.log = out, lambda: log.read_text().splitlines() if log.exists() else []
    return said


@pytest.mark.skipif(os.name == "nt", reason="the stand-in for ncu is a script with a first line that names Python")
class TestCommand:
    def test_tables_and_file(self, run):
        result = run("--stages", "chained_gemm", "--dims", "128", "--jobs", "1")
        assert result.exit_code == 0, result.output
        lines = result.output.splitlines()
        assert lines[0].startswith("device NVIDIA H200") and "ncu 2025.3.1.0" in lines[0]
        assert "chained_gemm, float16, H 16, N 2048, D 128" in lines
        shared = next(line.split() for line in lines if line.startswith("  shared"))
        assert shared[1:] == [
            "113.8", "39.52", "14.54", "1.00", "0.2", "51.2", "40.3", "7.74", "8", "1.52", "0.55", "0.25", "0.17",
            "0.40", "0.09",
        ]  # fmt: skip
        held = json.loads(run.out.read_text())
        assert held["environment"] == {**ENVIRONMENT, "ncu": "2025.3.1.0", "clocks": "as they are"}
        (size,) = held["sizes"]
        measured = size.pop("measured")
        assert size == {
            "stage": "chained_gemm", "element": "float16", "batch": 1, "heads": 16, "n": 2048, "d": 128,
            "causal": False,
        }  # fmt: skip
        assert [m["name"] for m in measured] == ["shared", "registers"]
        assert measured[1]["seconds"] == pytest.approx(101.536e-6) and measured[1]["instructions"] == 32236616

    def test_one_process_for_each_stage_and_d(self, run):
        result = run("--product", "512", "--length", "256", "--heads", "3")
        assert result.exit_code == 0, result.output
        version, *asked = run.log()
        assert version == "--version" and len(asked) == 8
        assert all(
            "--clock-control none --profile-from-start off --csv --page raw --metrics " in line for line in asked
        )
        assert all(name in asked[0] for name in ncu.METRICS.values())
        ends = [line.split("flashnumba.bench.profiled ")[1] for line in asked]
        assert ends[0] == "probe", "the counters are tried out before anything is compiled"
        assert sorted(ends[1:]) == sorted([
            "gemm --n 512", *(f"{stage} --d {d} --n 256 --heads 3" for d in (64, 128)
                              for stage in ("flash_forward", "chained_gemm", "staged_buffers")),
        ])  # fmt: skip
        sizes = json.loads(run.out.read_text())["sizes"]
        assert [(size["stage"], size.get("d", 0)) for size in sizes] == [
            ("gemm", 0), *((stage, d) for stage in ("flash_forward", "chained_gemm", "staged_buffers")
                           for d in (64, 128)),
        ]  # fmt: skip

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            ("print('==ERROR== ERR_NVGPUCTRPERM - The user does not have permission')",
             "NVreg_RestrictProfilingToAdminUsers=0"),
            (f"print('==ERROR== Failed to find metric {HMMA}'); sys.exit(1)",
             f"ncu ended with 1: ==ERROR== Failed to find metric {HMMA}"),
            (f"print(open(__file__ + '.csv').read().replace('{HMMA}', 'sm__other'))", f"has no metric {HMMA}"),
        ],
    )  # fmt: skip
    def test_what_stands_in_the_way_is_told_before_anything_runs(self, run, body, message):
        result = run(body=body, probe=True)
        assert result.exit_code == 2 and message in result.output
        assert len(run.log()) == 2 and not run.out.exists()

    def test_without_ncu(self, run):
        result = run(installed=False)
        assert result.exit_code == 2 and "there is no `ncu` in PATH" in result.output and not run.log()

    def test_without_a_gpu(self, run, monkeypatch):
        monkeypatch.setattr(table, "why_no_cuda", lambda: "no driver is installed")
        result = run()
        assert result.output == "flashnumba: the counters bench needs a GPU, but no driver is installed\n"

    def test_a_stage_that_fails_is_told_and_the_others_are_kept(self, run):
        fails = "if 'chained_gemm' in sys.argv:\n    sys.exit('ValueError: too large')\nelse:\n    " + ANSWER
        result = run("--stages", "chained_gemm,gemm", body=fails)
        assert result.exit_code == 1
        assert "  not measured: RuntimeError: ncu ended with 1: ValueError: too large" in result.output.splitlines()
        assert [size["stage"] for size in json.loads(run.out.read_text())["sizes"]] == ["gemm"]

    def test_what_takes_too_long_is_ended(self, run):
        start = time.monotonic()
        result = run("--stages", "gemm", "--seconds", "0.1", body="import time; time.sleep(60)")
        assert result.exit_code == 1 and "ncu was ended, as the time was over" in result.output
        assert time.monotonic() - start < 30

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--stages", "softmax"), "--stages has softmax; they must be of gemm, flash_forward"),
            (("--dims", "257"), "--dims is '257'; 257 is more than 256"),
        ],
    )
    def test_bad_input_is_refused(self, run, arguments, message):
        result = run(*arguments)
        assert result.exit_code == 2 and message in result.output and not run.log()


# -- the target --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("stage", "names"),
    [
        ("gemm", ["mma", profiled.IN_ORDER]),
        ("flash_forward", ["mma"]),
        ("chained_gemm", ["shared", "shuffles", "registers", "detour"]),
        ("staged_buffers", [f"{cut}_{n}" for cut in ("tile", "quarter") for n in (1, 2, 3, 4)]),
    ],
)
def test_the_target_has_every_kernel(stage, names):
    torch = pytest.importorskip("torch")
    found = dict(profiled.calls(stage, d=64, n=64, heads=1, machine="emulator"))
    assert list(found) == names
    result = found[names[-1]]()
    o = result[0] if isinstance(result, tuple) else result
    assert torch.isfinite(o).all()


def test_the_target_launches_each_kernel_once_between_the_marks(monkeypatch, capsys):
    done = []

    def noted(word):
        return lambda *args: done.append(word)

    runtime = SimpleNamespace(cudaProfilerStart=noted("start"), cudaProfilerStop=noted("stop"))
    cuda = SimpleNamespace(synchronize=noted("wait"), cudart=lambda: runtime)
    monkeypatch.setattr(profiled, "place", lambda *args: (SimpleNamespace(cuda=cuda), "cuda", "90a"))
    monkeypatch.setattr(profiled, "check_written", lambda torch, *arrays: done.append("judged"))
    monkeypatch.setattr(profiled, "calls", lambda stage, **sizes: iter([(profiled.IN_ORDER, noted(sizes["n"]))]))
    profiled.main(["gemm", "--n", "512"])
    assert done == [512, "judged", "wait", "start", 512, "wait", "stop"]
    assert capsys.readouterr().out == "ORDER gemm mma, chunks in order\n"
    launch = ncu.parse(EXCERPT.replace("chained_gemm registers", "gemm mma, chunks in order"))[1]
    assert (launch.stage, launch.kernel) == ("gemm", profiled.IN_ORDER)
