"""The ladder: what it lists is whole, its cases are what they say, and a rung is judged as it should be."""

import os
import pkgutil
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import flashnumba.stages
from flashnumba import ladder
from flashnumba.ladder import STAGES, Case, Passes, Rung, find, measure
from flashnumba.machine import compiler
from flashnumba.stages.stage import save

PARAMS = pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)


def test_every_folder_is_listed_once():
    folders = {module.name for module in pkgutil.iter_modules(flashnumba.stages.__path__) if module.ispkg}
    assert sorted(stage.name for stage in STAGES) == sorted(folders)


def test_find():
    assert find("softmax") is STAGES[0]
    with pytest.raises(ValueError, match=f"no stage 'sofmax'; the stages are {', '.join(ladder.NAMES)}$"):
        find("sofmax")


@PARAMS
def test_a_stage_says_what_a_reader_needs(stage):
    assert stage.question.endswith("?")
    assert stage.references
    assert stage.kernels
    assert stage.rungs == stage.references + stage.kernels, "references come first"
    assert len({rung.name for rung in stage.rungs}) == len(stage.rungs)
    assert all(rung.summary for rung in stage.rungs)


@PARAMS
def test_cases_are_consistent(stage, machine):
    for case in stage.cases(machine, False):
        assert case.reference.dtype == np.float64
        assert case.reference.shape == case.lowprec.shape
        assert {x.dtype for x in case.inputs.values() if x.ndim} == {case.lowprec.dtype}
        assert np.isfinite(case.reference).all()
        lengths, element, *causal = case.size.replace(" x ", "x").split()
        assert re.fullmatch(r"\d+(x\d+)+", lengths)
        assert element == case.lowprec.dtype.name
        assert causal in ([], ["causal"])
        if "x" in case.inputs:
            x = case.inputs["x"]
            assert case.reference.shape == x.shape and case.lowprec.dtype == x.dtype
            assert case.size == f"{x.shape[0]} x {x.shape[1]} {x.dtype.name}"
        assert any(rung.takes(case) for rung in stage.kernels)


def greatest_score(*, x=None, q=None, k=None, **more):
    """Of a case that holds scores, or what they are made from."""
    return x.max() if x is not None else (q.astype(np.float64) @ k.astype(np.float64).T / q.shape[-1] ** 0.5).max()


@PARAMS
def test_the_emulator_gets_small_cases_and_full_ones_are_bigger(stage):
    small, full = stage.cases("emulator", False), stage.cases("emulator", True)
    assert sum(case.reference.size for case in small) < 60_000
    assert all(b.reference.size > a.reference.size for a, b in zip(small, full, strict=True))
    if stage.name != "gemm":
        assert max(greatest_score(**case.inputs) for case in small) > 78.9, "the score of 79 is among them"


@PARAMS
def test_references_stay_in_their_budget_or_fail_as_meant(stage):
    for case in stage.cases("emulator", False):
        for rung in (rung for rung in stage.references if rung.takes(case)):
            result = measure(stage, rung, case, "emulator")
            assert result.verdict == ("as meant" if rung.must_fail else "ok"), result.note
            assert result.machine == "numpy"
            if not rung.must_fail:
                assert result.comparison.error < 1e-12, "float64 beside float64 computed another way"
                # Products of float16 are exact in float64, and so may their sums be in gemm; elsewhere 0 would mean
                # that a reference is compared with itself.
                assert result.comparison.error > 0 or stage.name == "gemm"


@PARAMS
def test_every_kernel_is_within_its_budget(stage, machine):
    """On the emulator each on the first case that it takes; the stage's lesson runs them all."""
    if machine == "emulator" and "CI" in os.environ and not compiler.why_not():
        pytest.skip("the lesson runs it, and .ci/run without numba-cuda did")
    cases = stage.cases(machine, False)
    for rung in stage.kernels:
        taken = [case for case in cases if rung.takes(case)]
        for case in taken if machine == "cuda" else taken[:1]:
            result = measure(stage, rung, case, machine)
            assert result.verdict == "ok", f"{rung.name}: {result.note}"


def test_compile_cases_are_those_of_every_tier_there_is(monkeypatch):
    modules = {
        "flashnumba.stages.softmax.simt": SimpleNamespace(compile_cases=lambda: ["a", "b"]),
        "flashnumba.stages.online_softmax.wgmma": SimpleNamespace(compile_cases=lambda: ["c"]),
    }
    monkeypatch.setattr(ladder, "find_spec", modules.get)
    monkeypatch.setattr(ladder, "import_module", modules.__getitem__)
    assert list(ladder.compile_cases()) == ["a", "b", "c"]


STAGE = STAGES[0]
CASE = Case("", {}, np.array([[0.25, 0.75]]), np.array([[0.25, 0.75]], np.float16), "1 x 2 float16")
GOOD, WRONG, NAN = (np.array([row], np.float16) for row in ([0.25, 0.75], [0.25, 0.5], [0.25, np.nan]))


def rung(out, **changes):
    return replace(Rung("r", "simt", lambda case, machine: out, Passes(3, 1)), **changes)


@pytest.mark.parametrize(
    ("out", "must_fail", "verdict", "note"),
    [
        (GOOD, "", "ok", ""),
        (WRONG, "", "FAILED", "error 0.25 above the budget"),
        (NAN, "", "FAILED", "non-finite positions disagree: at [0, 1] got nan, expected 0.75"),
        (NAN, "overflow", "as meant", "overflow in 1 of 1 rows"),
        (GOOD, "overflow", "FAILED", "overflow was meant to show here and did not"),
        (WRONG, "overflow", "FAILED", "overflow was meant to show here and did not"),
    ],
)
def test_verdicts(out, must_fail, verdict, note):
    result = measure(STAGE, rung(out, must_fail=must_fail), CASE, "emulator")
    assert (result.verdict, result.bad) == (verdict, verdict == "FAILED")
    assert result.note.startswith(note)
    assert result.bytes_per_element == 8


@pytest.mark.parametrize("must_fail", ["", "overflow"])
def test_an_exception_is_a_failure_even_where_failing_is_meant(must_fail):
    def run(case, machine):
        raise RuntimeError("race on shared memory")

    result = measure(STAGE, rung(None, run=run, must_fail=must_fail), CASE, "emulator")
    assert (result.verdict, result.note) == ("FAILED", "RuntimeError: race on shared memory")
    assert result.comparison is None


def test_what_a_machine_cannot_run_is_skipped_and_says_why():
    def run(case, machine):
        raise AssertionError("it must not run")

    result = measure(STAGE, rung(None, run=run), CASE, "cuda", "needs sm_90a")
    assert (result.verdict, result.note, result.bad) == ("skipped", "needs sm_90a", False)


def test_a_gpu_compiles_before_the_clock_starts():
    calls = []
    result = measure(STAGE, rung(None, run=lambda case, machine: calls.append(machine) or GOOD), CASE, "cuda")
    assert calls == ["cuda", "cuda"]
    assert result.verdict == "ok"


def test_a_figure_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "figure.png"
    path.write_bytes(b"the old one")

    def half(target, **options):
        target.write_bytes(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save(SimpleNamespace(savefig=half), path)
    assert path.read_bytes() == b"the old one"
    assert list(tmp_path.iterdir()) == [path]
    save(SimpleNamespace(savefig=lambda target, **options: target.write_bytes(b"the new one")), path)
    assert path.read_bytes() == b"the new one"
    assert list(tmp_path.iterdir()) == [path]
