"""``flashnumba timeline``: what it runs, prints and writes, and what it says to bad input."""

import json
import re
from itertools import pairwise

import numpy as np
import pytest
from matplotlib.image import imread
from typer.testing import CliRunner

from flashnumba import ladder
from flashnumba.cli import app
from flashnumba.commands import timeline as command
from flashnumba.machine import compiler, gpu
from flashnumba.machine.launcher import launch, prepare
from flashnumba.machine.timeline.costs import COSTS, costs_of
from flashnumba.machine.timeline.record import COMPUTE, from_json, to_json
from flashnumba.machine.timeline.summary import summarise
from flashnumba.machine.timeline.trace import ANY, COPY, KINDS, QK, WAIT, empty_trace
from flashnumba.stages import heads, traced
from flashnumba.stages.flash_forward.mma import PLANS, TRACED
from flashnumba.stages.heads import prepare_heads, signature


def run(*args: str, code: int = 0):
    result = CliRunner().invoke(app, ["timeline", *args], env={"COLUMNS": "120"})
    assert result.exit_code == code, result.output
    return result


def read(path):
    return from_json(json.loads(path.read_text()))


@pytest.fixture(scope="module")
def small():
    """The record of a small problem: 2 blocks of 128 rows, 3 steps of 128 keys."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, rows, 32)).astype(np.float16) for rows in (130, 300, 300))
    return traced.record("flash_forward.mma", TRACED["mma"], q, k, v, machine="emulator")


@pytest.fixture
def recorded(small, monkeypatch):
    """The command with a record at hand; the calls that it makes."""
    calls = []

    def record(name, planner, q, k, v, **options):
        calls.append({"name": name, "planner": planner, "q": q, "k": k, "v": v, **options})
        return small

    monkeypatch.setattr(traced, "record", record)
    return calls


def test_marks_of_the_flash_forward_are_those_of_its_schedule(small):
    assert small.machine == "emulator" and small.size == "130x300x32 float16" and small.lost == 0
    assert small.multiprocessors == {0: 0, 1: 1}
    for block in range(2):
        for warp in range(4):
            spans = [s for s in small.spans if (s.block, s.warp) == (block, warp)]
            assert all(a.end <= b.begin for a, b in pairwise(spans))
            kinds = [(KINDS[s.kind], s.step, s.slot) for s in spans if s.kind in (COPY, WAIT, QK)]
            assert kinds == [
                ("copy", 0, ANY), ("copy", 0, 0), ("copy", 0, 2), ("wait", 0, ANY), ("wait", 0, ANY),
                ("copy", 1, 1), ("copy", 1, 3), ("QK", 0, 0), ("wait", 1, ANY),
                ("copy", 2, 0), ("copy", 2, 2), ("QK", 1, 1), ("wait", 2, ANY), ("QK", 2, 0),
            ]  # fmt: skip
    fills = [f for f in small.fills() if f.block == 0]
    assert [(f.step, f.slot) for f in fills] == [(0, 0), (0, 2), (1, 1), (1, 3), (2, 0), (2, 2)]
    assert all(f.begin < f.ready <= f.used < f.end for f in fills)
    # A slot is filled again only when its last use is over.
    for slot in range(4):
        uses = [f for f in fills if f.slot == slot]
        assert all(a.end <= b.begin for a, b in pairwise(uses))
    assert 0.5 < summarise(small).hidden < 1
    assert {s.kind for s in small.spans} > set(COMPUTE)


def test_tracing_changes_no_result():
    """The same bits in o and lse, with marks and without."""
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((1, rows, 32)).astype(np.float16) for rows in (40, 150, 150))
    results = []
    for planner in (PLANS["mma"], TRACED["mma"]):
        problem = prepare_heads(q, k, v, causal=True, scale=None, machine="emulator", stream=None)
        (one,) = planner(problem.shape).launches
        known = {**problem.arrays, "scale": np.float32(problem.scale), "causal": np.int32(1)}
        known["trace"] = empty_trace(one.grid, one.threads // 32, 200)
        launch(one.kernel, one.grid, one.threads, tuple(known[name] for name in one.args), shared=one.shared,
               machine="emulator")  # fmt: skip
        results.append(problem.finish())
    for plain, marked in zip(*results, strict=True):
        np.testing.assert_array_equal(plain, marked)
    assert np.isfinite(results[0][0]).all()


def test_the_model_plans_for_its_own_architecture(monkeypatch):
    seen = []

    def emulate(launch, known, arch):
        seen.append((launch.kernel.arch, arch, known["trace"].shape))
        return {}

    monkeypatch.setattr(traced, "_emulate", emulate)
    q = np.zeros((3, 200, 64), np.float16)
    for arch in COSTS:
        record = traced.record("k", TRACED["mma"], q, q, q, machine="emulator", costs=costs_of(arch))
        assert record.arch == arch and record.size == "3x200x200x64 float16"
    assert [arch for _, arch, _ in seen] == ["80", "90a"]
    assert {shape for *_, shape in seen} == {(6, 4, 10 + 2 * traced.MARKS)}


def test_what_cannot_be_traced_is_refused():
    q = np.zeros((8, 64), np.float16)
    with pytest.raises(ValueError, match="k cannot be traced; its plan must be one launch with an argument trace"):
        traced.record("k", PLANS["mma"], q, q, q, machine="emulator")
    with pytest.raises(ValueError, match=r"q has shape \(0, 64\); a timeline needs at least one row"):
        traced.record("k", TRACED["mma"], q[:0], q, q, machine="emulator")


def test_the_command_prints_a_table_and_writes_picture_and_trace(tmp_path, recorded, small):
    picture, trace = tmp_path / "new" / "a.png", tmp_path / "a.json"
    result = run(
        "--machine", "emulator", "--out", str(picture), "--json", str(trace), "--m", "130", "--n", "300", "--d", "32",
        "--heads", "2", "--causal", "--element", "bfloat16", "--arch", "80", "--multiprocessors", "1", "--resident",
        "2", "--cost", "copy_latency=900", "--cost", "ghz=1.2",
    )  # fmt: skip
    (call,) = recorded
    assert call["q"].shape == (1, 2, 130, 32) and call["k"].shape == call["v"].shape == (1, 2, 300, 32)
    assert str(call["q"].dtype) == "bfloat16" and call["causal"] is True and call["machine"] == "emulator"
    assert call["name"] == "flash_forward.mma" and call["planner"] is TRACED["mma"]
    assert (call["multiprocessors"], call["resident"]) == (1, 2)
    assert (call["costs"].arch, call["costs"].copy_latency, call["costs"].ghz) == ("80", 900, 1.2)
    assert read(trace) == small
    assert imread(picture).ndim == 3
    found = summarise(small.of([0]))
    lines = dict(re.findall(r"^(\w+(?: \w+)*) +([\d.]+%?)$", result.output, re.MULTILINE))
    assert lines["QK"] == f"{found.shares['QK']:.1%}" and lines["cycles"] == f"{found.cycles:.0f}"
    assert lines["copying under computation"] == f"{found.hidden:.1%}"
    assert set(KINDS) < set(lines)
    assert f"picture: {picture}" in result.output and f"trace: {trace}" in result.output


def test_two_traces_side_by_side_without_a_run(tmp_path, recorded):
    one, two, picture = tmp_path / "one.json", tmp_path / "two.json", tmp_path / "both.svg"
    run("--machine", "emulator", "--json", str(one), "--out", str(tmp_path / "one.png"))
    other = json.loads(one.read_text())
    other["otherData"] |= {"machine": "cuda", "device": "NVIDIA H200", "kernel": "flash_forward.other", "lost": 7}
    two.write_text(json.dumps(other))
    result = run("--load", str(one), "--beside", str(two), "--out", str(picture))
    assert len(recorded) == 1
    assert "flash_forward.mma, emulator" in result.output and "flash_forward.other, cuda" in result.output
    assert "7 marks of flash_forward.other found no room" in result.output
    assert "<svg" in picture.read_text() and picture.read_text().count("NVIDIA H200, measured") <= 1
    run("--load", str(one), "--blocks", "1", "--window", "0:900", "--out", str(picture))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--kernel", "dance"], "--kernel is 'dance'; the traced kernels are flash_forward.mma"),
        (["--element", "float32"], "--element is 'float32'; it must be float16 or bfloat16"),
        (["--arch", "75"], "--arch is '75'; there are costs for 80, 90"),
        (["--cost", "copy_latency"], "--cost is 'copy_latency'; it must be a positive number for one of ghz, mma_rate"),
        (["--cost", "magic=1"], "--cost is 'magic=1'"),
        (["--cost", "barrier=-1"], "--cost is 'barrier=-1'"),
        (["--out", "picture.docx"], "--out is 'picture.docx'; its suffix must be one of"),
        (["--window", "8000:2000"], "--window is '8000:2000'; it must be two cycles, the smaller first"),
        (["--window", "all"], "--window is 'all'"),
        (["--window", "0:" + 5000 * "9"], "it must be two cycles"),
        (["--json", "timeline.png"], "--out and --json are both 'timeline.png'; name a file for each"),
        (["--out", 300 * "a" + ".png"], "which cannot be written (File name too long)"),
        (["--m", str(10**14)], "flash_forward.mma was not traced, as there is too little memory; fewer rows"),
        (["--heads", str(10**20)], "flash_forward.mma was not traced"),
        (["--out", "picture"], "--out is 'picture'; its suffix"),
        (["--load", "nowhere.json"], "--load is 'nowhere.json', which cannot be read (No such file or directory)"),
        (["--beside", "nowhere.json"], "--beside is 'nowhere.json', which cannot be read"),
        (["--machine", "abacus"], "--machine is 'abacus'; it must be auto, cuda or emulator"),
    ],
)
def test_bad_input_is_refused_before_anything_is_done(args, said, tmp_path, monkeypatch, recorded):
    monkeypatch.chdir(tmp_path)
    result = run(*(["--machine", "emulator"] if "--machine" not in args else []), *args, code=2)
    assert said in " ".join(result.output.split())
    assert not recorded and not list(tmp_path.iterdir())


def test_a_machine_that_is_not_there(monkeypatch, tmp_path, recorded):
    monkeypatch.setattr(gpu, "unavailable", lambda: "no CUDA driver is installed")
    monkeypatch.setattr(compiler, "why_not", lambda: "")
    result = run("--machine", "cuda", "--out", str(tmp_path / "a.png"), code=2)
    assert "no CUDA driver is installed" in result.output and not recorded


def test_no_trace_is_taken_for_one(tmp_path):
    path = tmp_path / "a.json"
    for text, said in (
        ("{", "cannot be used"), ("[]", "no trace that flashnumba wrote"), ("[" * 200000, "cannot be used"),
    ):  # fmt: skip
        path.write_text(text)
        assert said in run("--load", str(path), "--out", str(tmp_path / "a.png"), code=2).output


@pytest.mark.parametrize(
    "change",
    [
        {"ghz": 0}, {"ghz": "fast"}, {"device": None}, {"lost": "many"}, {"multiprocessors": []},
        {"multiprocessors": [["a", 1]]}, {"costs": None}, {"begin": "x"}, {"begin": float("nan")}, {"end": -1},
        {"step": [1]}, {"slot": "s"}, {"pid": 99}, {"pid": [0]}, {"tid": "w"}, {"args": None},
    ],
    ids=str,
)  # fmt: skip
def test_a_damaged_trace_is_told(tmp_path, small, change):
    path, picture, trace = tmp_path / "a.json", tmp_path / "a.png", to_json(small)
    event = next(event for event in trace["traceEvents"] if event["ph"] == "X")
    ((name, _),) = change.items()
    of = dict.fromkeys(event, event) | dict.fromkeys(event["args"], event["args"])
    (of[name] if name in of else trace["otherData"]).update(change)
    path.write_text(json.dumps(trace))
    result = run("--load", str(path), "--out", str(picture), code=2)
    assert "which cannot be used: it is a damaged trace" in " ".join(result.output.split())
    assert not picture.exists()


def test_names_are_drawn_and_told_as_they_are(tmp_path, small):
    path = tmp_path / "a.json"
    trace = to_json(small)
    trace["otherData"] |= {"kernel": "a$b_{$[bold]c[/d]", "lost": 2}
    path.write_text(json.dumps(trace))
    result = run("--load", str(path), "--out", str(tmp_path / "a.png"))
    assert "2 marks of a$b_{$[bold]c[/d] found no room" in result.output


def test_the_numbers_of_steps_stand_in_the_window(small):
    from flashnumba.machine.timeline.picture import draw

    fills = [fill for fill in small.of([0]).fills() if fill.slot == 0]
    window = (fills[0].used, fills[1].ready)  # the end of step 0's use and the beginning of step 2's
    panel = draw([small.of([0])], window).axes[1]
    found = {text.get_text(): text.get_position()[0] for text in panel.texts if text.get_position()[1] == 0}
    assert set(found) == {"0", "2"} and all(window[0] < x < window[1] for x in found.values())


def test_a_window_in_which_nothing_happens_is_refused(tmp_path, recorded):
    result = run("--machine", "emulator", "--window", "900000:900001", "--out", str(tmp_path / "a.png"), code=2)
    assert "nothing happens from cycle 900000 to 900001" in result.output and not list(tmp_path.iterdir())


def test_a_slow_clock_and_a_picture_that_cannot_be_made(tmp_path, monkeypatch):
    picture, trace = tmp_path / "a.png", tmp_path / "a.json"
    run("--machine", "emulator", "--m", "1", "--n", "1", "--d", "32", "--cost", "ghz=0.00001", "--resident",
        str(10**12), "--out", str(picture), "--json", str(trace))  # fmt: skip
    assert read(trace).ghz == 1e-5

    def fail(*args, **options):
        raise RuntimeError("no TeX")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fail)
    result = run("--load", str(trace), "--out", str(tmp_path / "b.pgf"), code=2)
    assert "b.pgf', which cannot be drawn here: no TeX" in " ".join(result.output.split())


def test_files_are_written_whole_or_not_at_all(tmp_path, recorded, monkeypatch):
    folder = tmp_path / "taken.png"
    folder.mkdir()
    result = run("--machine", "emulator", "--out", str(folder), code=2)
    assert "which is a folder; name a file in it" in " ".join(result.output.split())
    assert not recorded
    kept = tmp_path / "kept.png"
    kept.write_bytes(b"before")

    def fail(data, path):
        raise OSError("full")

    monkeypatch.setattr(type(kept), "replace", fail)
    with pytest.raises(OSError, match="full"):
        command._write(kept, b"after")
    assert kept.read_bytes() == b"before" and {p.name for p in tmp_path.iterdir()} == {"kept.png", "taken.png"}


def test_a_kernel_that_refuses_its_arguments_is_told(tmp_path, monkeypatch):
    def planner(shape):
        raise ValueError("q is too wide")

    monkeypatch.setattr(ladder, "traced", lambda: {"a.b": planner})
    result = run("--machine", "emulator", "--kernel", "a.b", "--out", str(tmp_path / "a.png"), code=2)
    assert "a.b was not traced: q is too wide" in result.output
    assert not list(tmp_path.iterdir())


def test_every_traced_kernel_is_known_by_its_stage():
    known = ladder.traced()
    assert known["flash_forward.mma"] is TRACED["mma"]
    assert all(name.split(".")[0] in ladder.NAMES for name in known)


def test_the_way_over_a_gpu(small, monkeypatch):
    """A stand-in for the GPU runs kernels on the emulator, whose clocks are then the host's: what is launched how
    often, and what becomes of clocks."""
    launches = []

    def prepared(one, element, machine, device):
        assert (element, machine, device) == ("float16", "cuda", None)
        ready = prepare(one.kernel, signature(element, one.args), shared=one.shared, machine="emulator")

        def call(grid, threads, args, stream):
            assert not args[-1].any()
            launches.append((grid, threads, args[-1].shape, stream))
            ready(grid, threads, args)

        return call

    monkeypatch.setattr(heads, "machine_of", lambda machine, *_: (machine, "90a"))
    monkeypatch.setattr(heads, "prepared", prepared)
    for name, value in (("multiprocessors", 132), ("device_name", "a stand-in"), ("clock_rate", 1980000)):
        monkeypatch.setattr(gpu, name, lambda *_, value=value: value)
    monkeypatch.setattr(traced, "LAUNCHES", 2)
    monkeypatch.setattr(traced, "MOST_BLOCKS", 1)
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, rows, 32)).astype(np.float16) for rows in (130, 300, 300))
    record = traced.record("flash_forward.mma", TRACED["mma"], q, k, v, machine="cuda")
    assert launches == [(2, 128, (1, 4, 10 + 2 * traced.MARKS), None)] * 2
    assert (record.machine, record.device, record.arch, record.costs) == ("cuda", "a stand-in", "90a", {})
    assert record.ghz == pytest.approx(1, rel=0.05)  # both clocks are in nanoseconds
    assert [s[:5] for s in record.spans] == [s[:5] for s in small.spans if s.block == 0]
    assert record.multiprocessors == {0: 0} and record.lost == 0


@pytest.mark.gpu
def test_a_gpu_leaves_the_same_marks():
    """Kinds, steps and slots in the order in which the emulator has them, at times that a clock gave."""
    if gpu.device_arch().rstrip("a") not in COSTS:
        pytest.skip(f"no model of sm_{gpu.device_arch()} to compare with")
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, rows, 32)).astype(np.float16) for rows in (130, 300, 300))
    both = [traced.record("flash_forward.mma", TRACED["mma"], q, k, v, machine=machine,
                          costs=costs_of(gpu.device_arch()))
            for machine in ("cuda", "emulator")]  # fmt: skip
    orders = [[s[:5] for s in record.spans] for record in both]
    assert orders[0] == orders[1]
    assert 0.3 < both[0].ghz < 4 and 1000 < both[0].cycles < 1e6 and both[0].lost == 0
    assert from_json(json.loads(json.dumps(to_json(both[0])))) == both[0]
