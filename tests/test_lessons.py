"""The lessons: named, paired and stored as they should be; and each runs on the emulator and shows what it promises."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest

from flashnumba import lesson
from flashnumba.ladder import STAGES
from flashnumba.machine import compiler, resources
from flashnumba.machine.occupancy import budget

jupytext = pytest.importorskip("jupytext")
nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "lessons"
NAMES = [stage.lesson for stage in STAGES]
PARAMS = pytest.mark.parametrize("name", NAMES)
SECONDS = 120

SECTIONS = [
    "What you will be able to do", "The idea", "The reference", "The kernels", "On real data", "Who reads what",
    "Break it", "Exercises", "Two machines, side by side", "Limits", "What next",
]  # fmt: skip

SHOWN = {
    "01_softmax": [
        "Race: thread 32 writes shared byte 4", "partials[lane]", "rows that are wrong",
        "OutOfBounds: index [8, 0] of x",
    ],
    "02_online_softmax": [
        "Race: thread 0 writes shared byte 0", "which thread 32 read", "Race: thread 32 writes shared byte 4",
        "no fault", "above the budget", "within the budget", "without: -inf nan", "masked row: [0. 0. 0.]",
        "Deadlock: no thread of the block can go on", "which stay 0x0", "to mend it",
    ],
    "03_gemm": [
        "Race: thread 1 writes shared byte 4 (a_tile[0, 1])", "which thread 0 read", "ReadInFlight: shared byte 128",
        "before the wait for the asynchronous copy", "above the budget", "ReadInFlight: shared byte 1024",
        "before the wait for the bulk copy", "Deadlock: no thread of the block can go on",
        "16 bytes came that no thread expected", "no fault; error", "above the budget",
    ],
    "04_flash_forward": [
        "ReadInFlight: shared byte", "before the wait for the asynchronous copy", "Race: thread", "multiply_pv",
        "Race: thread", "put_k(raw, piece)", "mma: error", "above the budget", "simt: error", "above the budget",
        "head 2", "mma: error", "within the budget", "simt: error", "within the budget",
        "head 6", "mma: error", "above the budget", "simt: error", "above the budget",
        "whole: error", "within the budget", "product: error", "above the budget",
    ],
    "05_chained_gemm": [
        "Race: thread", "st_shared_b16", "ldmatrix_x4", "Race: thread", "ldmatrix_x4", "st_shared_b16",
        "real keys, halves: error", "above the budget", "real keys, round: error", "above the budget",
        "real keys, order: error", "above the budget", "keys of zeros, halves: error", "within the budget",
        "keys of zeros, round: error", "within the budget", "keys of zeros, order: error", "within the budget",
    ],
    "06_staged_buffers": [
        "table: step 0 computes with Q.0, which is not waited for", "ReadInFlight: shared byte", "load_q",
        "table: step 0 computes with Q.0, which other threads have copied", "Race: thread",
        "table: step 0 fills slot 0 with V0.0", "ReadInFlight: shared byte", "quarter_4: error", "above the budget",
    ],
    "07_causal_balance": [
        "whole: error", "13056 bytes stored", "left_out: non-finite", "twice: error",
        "15232 bytes stored", "off by one; rows unwritten: ['0 to 31', '0 to 31']", "Race: thread",
        "Race: thread", "ticket[0]", "uncleared; rows written of each head: ['0 to 31', '0 to 31']", "cleared: error",
        "within the budget",
    ],
    "08_backward": [
        "no delta by keys: dq within, dk ABOVE, dv within", "no delta by rows: dq ABOVE, dk within, dv within",
        "before it is there: dq ABOVE, dk ABOVE, dv ABOVE", "alone: dq within, dk ABOVE, dv ABOVE",
        "no scale by keys: dq within, dk ABOVE, dv within", "Race: thread", "scatter", "add_dq",
        "never cleared: dq ABOVE, dk within, dv within", "cleared: dq within, dk within, dv within",
    ],
    "09_fp8": [
        "twice: error", "above the budget", "order: error", "above the budget", "saturate: error", "above the budget",
        "stale: error", "above the budget", "Race: thread", "multiply_qk", "st_shared_b32",
    ],
    "10_sparsity": [
        "padding: 1 tiles left out, 4 should be; within the budget", "alone: 5 tiles left out, 4 should be",
        "vote_barrier: Race: thread", "flags[1]",
    ],
    "11_flash_mla": [
        "page: error", "above the budget", "twice: error", "above the budget", "ReadInFlight: shared byte",
    ],
}  # fmt: skip
"""What the cells tagged break-it must say, in this order."""


def test_every_lesson_is_numbered_paired_and_registered():
    notebooks = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    assert notebooks == sorted(path.stem for path in FOLDER.glob("*.py")) == NAMES
    for number, name in enumerate(NAMES, 1):
        assert re.fullmatch(rf"{number:02}_[a-z_0-9]+", name)
        assert f"({name}.ipynb)" in (FOLDER / "README.md").read_text()


def cells_of(path: Path) -> list[tuple]:
    kept = ("tags", "jupyter")
    return [
        (c.cell_type, c.source, {k: v for k, v in c.metadata.items() if k in kept}) for c in jupytext.read(path).cells
    ]


@PARAMS
def test_notebook_and_script_are_in_sync(name):
    notebook, script = cells_of(FOLDER / f"{name}.ipynb"), cells_of(FOLDER / f"{name}.py")
    for in_notebook, in_script in zip(notebook, script, strict=True):
        assert in_notebook == in_script


@PARAMS
def test_nothing_that_a_run_left_is_stored(name):
    held = json.loads((FOLDER / f"{name}.ipynb").read_text())
    assert held["metadata"]["jupytext"]["formats"] == "ipynb,py:percent"
    assert held["metadata"]["kernelspec"]["name"] == "python3"
    for cell in held["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None


@PARAMS
def test_it_has_the_sections_of_a_lesson(name):
    text = "\n".join(source for kind, source, _ in cells_of(FOLDER / f"{name}.ipynb") if kind == "markdown")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == SECTIONS
    assert text.count("**Predict") >= 5
    assert text.startswith(f"# {int(name[:2])}. ")


@PARAMS
def test_solutions_are_folded_in_the_docs_and_in_jupyter(name):
    metadata = [metadata for _, _, metadata in cells_of(FOLDER / f"{name}.ipynb")]
    exercises = [m for m in metadata if "exercise" in m.get("tags", ())]
    solutions = [m for m in metadata if "solution" in m.get("tags", ())]
    assert len(exercises) == len(solutions) >= 2
    for found in solutions:
        assert "hide-cell" in found["tags"]
        assert found["jupyter"] == {"source_hidden": True}


@PARAMS
def test_what_is_shown_is_never_a_copy(name):
    """No line of code of the stage's modules, long enough to mean something, is repeated in a lesson."""
    stage = next(stage for stage in STAGES if stage.lesson == name)
    folder = ROOT / "flashnumba" / "stages" / stage.name
    real = {line.strip() for path in folder.glob("*.py") for line in path.read_text().splitlines()}
    code = [source for kind, source, _ in cells_of(FOLDER / f"{name}.ipynb") if kind == "code"]
    here = {line.strip() for source in code for line in source.splitlines()}
    drawing = ("from ", "handles = ", "running.", "right.")
    assert not {line for line in real & here if len(line) > 50 and not line.startswith(drawing)}
    assert sum("lesson.show_source(reference." in source for source in code) >= 2
    assert sum("lesson.show_source(" in source for source in code) >= 7


def said(cell) -> str:
    """All text that a cell put out; a stream may have come in pieces, cut anywhere."""
    text = ""
    for output in cell.get("outputs", ()):
        stream = output.output_type == "stream"
        text += output.text if stream else "\n" + output.get("data", {}).get("text/plain", "") + "\n"
    return text


RECORDED = """\
import flashnumba.machine.compiler as c; c.why_not = lambda: 'not asked: tests read the record'
import gc; gc.set_threshold(50_000, 20, 50)
import flashnumba.machine.instructions.ordered as o; o.PATIENCE = 5000
%config InlineBackend.print_figure_kwargs = {'bbox_inches': None, 'dpi': 30}
"""
"""A cell before the first: compiling is what takes longest in a lesson, and the record has tests of its own. Figures
keep their margins, which to cut off is to draw once more, and are small. The garbage collector as in conftest.py, and a
deadlock of polling threads is found as early as in the tests of their kernels."""


def executed(name: str, machine: str):
    notebook = jupytext.read(FOLDER / f"{name}.ipynb")
    notebook.cells.insert(0, nbformat.v4.new_code_cell(RECORDED))
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, "MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    if machine == "emulator":
        env["CUDA_VISIBLE_DEVICES"] = ""
    client = nbclient.NotebookClient(
        notebook, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    )
    client.execute(env=env)
    return notebook


@PARAMS
def test_it_runs_and_shows_what_it_promises(name, machine):
    start = time.perf_counter()
    notebook = executed(name, machine)
    assert time.perf_counter() - start < SECONDS
    tagged = {
        tag: [cell for cell in notebook.cells if tag in cell.metadata.get("tags", ())]
        for tag in ("break-it", "exercise", "solution")
    }
    assert f"kernels run on: {machine}" in "\n".join(map(said, notebook.cells))

    broken = "\n".join(map(said, tagged["break-it"]))
    at = 0
    for words in SHOWN[name]:
        assert words in broken[at:], broken
        at = broken.index(words, at)

    for cell in tagged["exercise"]:
        assert said(cell).startswith("not yet: ")
        assert "solved" not in said(cell)
    for cell in tagged["solution"]:
        assert said(cell).strip().startswith("solved: ")

    figures = [o for cell in notebook.cells for o in cell.get("outputs", ()) if "image/png" in o.get("data", {})]
    assert len(figures) >= 6
    assert "FAILED" not in "\n".join(map(said, notebook.cells))
    assert "Traceback" not in "\n".join(map(said, notebook.cells))
    assert all(o.name == "stdout" for c in notebook.cells for o in c.get("outputs", ()) if o.output_type == "stream")


@PARAMS
def test_without_a_compiler_every_resource_asked_for_is_recorded(name, monkeypatch, capsys):
    monkeypatch.setattr(compiler, "why_not", lambda: "no compiler")
    asks = [source for _, source, _ in cells_of(FOLDER / f"{name}.ipynb") if "lesson.resources(" in source]
    assert len(asks) == 1
    exec(asks[0], {"lesson": lesson, "budget": budget})
    assert capsys.readouterr().out.startswith("no compiler here: from lessons/resources.json")


def test_recorded_resources_are_those_that_the_compiler_gives():
    """``python -m flashnumba.lesson`` writes them anew."""
    if compiler.why_not():
        pytest.skip(f"not measured: {compiler.why_not()}")
    versions, recorded = resources.read(FOLDER / "resources.json")
    if versions != resources.compiler():
        pytest.skip(f"recorded with {versions}, here is {resources.compiler()}")
    assert recorded
    # In CI one of a lesson's own cases: those of the ladder are compiled anew by the tests of its record.
    ladder = resources.read(ROOT / "docs" / "results" / "resources.json")[1] if "CI" in os.environ else {}
    assert all(held == ladder[case] for case, held in recorded.items() if case in ladder)
    own = [case for case in recorded if case not in ladder]
    for name, arch in own[:1] if ladder else own:
        assert lesson.resources(name, arch=arch) == (recorded[name, arch], True)
