"""What the lessons share: source as it stands, tables, exercises that are told and never raise."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from flashnumba import lesson
from flashnumba.machine import compiler
from flashnumba.machine.resources import Resources, write
from flashnumba.stages.softmax import reference, simt

KERNEL = simt.make_block_per_row("float16", 64)


def test_source_of_a_kernel_is_its_body_with_its_place():
    shown = lesson.show_source(KERNEL)
    lines = Path(simt.__file__).read_text().splitlines()
    place, first, *_, last = str(shown).splitlines()
    numbers = [int(word) for word in place.replace(",", "").split() if word.isdigit()]
    assert place.startswith("# flashnumba/stages/softmax/simt.py, lines ")
    assert first == lines[numbers[0] - 1].strip()
    assert last.strip() == lines[numbers[1] - 1].strip()
    assert shown._repr_markdown_() == f"```python\n{shown}\n```"


def test_source_of_a_part_and_of_some_lines():
    part = lesson.show_source(KERNEL, part="block_max")
    assert part.place.startswith("flashnumba/tiles/reduce.py")
    assert "cuda.syncthreads()" in part.text
    some = lesson.show_source(reference.safe, first="m = x.max", last="m = np.where")
    assert [line.split(" =")[0] for line in some.text.splitlines()] == ["m", "m"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"part": "block_min"}, "block_per_row calls no device function 'block_min'; it calls anchor, "),
        ({"first": "no such words"}, "no line has 'no such words'"),
        ({"first": "origin = anchor", "last": "m = float32"}, "no line has 'm = float32'"),
    ],
)
def test_what_is_not_in_the_source_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        lesson.show_source(KERNEL, **options)


def test_table():
    made = lesson.table(("a", "b<c"), [("x", 0.123456), ("long", 2)])
    assert str(made) == "a     b<c\nx     0.1235\nlong  2"
    html = re.sub(r' style="[^"]*"', "", made._repr_html_())
    assert html == (
        "<table><thead><tr><th>a</th><th>b&lt;c</th></tr></thead>"
        "<tbody><tr><td>x</td><td>0.1235</td></tr><tr><td>long</td><td>2</td></tr></tbody></table>"
    )
    noted = lesson.table(("a",), [("x",)], note="1 < 2")
    assert str(noted) == "a\nx\n1 < 2"
    assert noted._repr_html_().endswith("</table><p>1 &lt; 2</p>")


@pytest.mark.parametrize(
    ("ok", "text"),
    [
        (True, "solved: it\n"),
        (np.bool_(True), "solved: it\n"),
        (lambda: True, "solved: it\n"),
        (False, "not yet: it. try x\n"),
        (None, "not yet: it. try x\n"),
        (lambda: None, "not yet: it. try x\n"),
        (lambda: 1 / 0, "not yet: it. It stops with ZeroDivisionError: division by zero. try x\n"),
    ],
)
def test_an_exercise_is_told_and_never_raised(ok, text, capsys):
    assert lesson.check("it", ok, "try x") is None
    assert capsys.readouterr().out == text


def test_resources_without_a_compiler_are_the_recorded_ones(monkeypatch, tmp_path):
    ours = Resources("softmax.warp_per_row float16 1024", "90a", 128, 7)
    ladders = Resources("softmax.warp_per_row float16", "90a", 128, 9, spills=8)
    (tmp_path / "docs" / "results").mkdir(parents=True)
    (tmp_path / "lessons").mkdir()
    write(tmp_path / "lessons" / "resources.json", {}, [ours])
    monkeypatch.setattr(lesson, "folder", lambda: tmp_path / "lessons")
    monkeypatch.setattr(compiler, "why_not", lambda: "no compiler: pip install it")
    assert lesson.resources(ours.name) == (ours, False)
    with pytest.raises(ValueError, match=r"no record of 'softmax.warp_per_row float16' on sm_90a.* pip install it"):
        lesson.resources(ladders.name)
    write(tmp_path / "docs" / "results" / "resources.json", {}, [ladders])
    assert lesson.resources(ladders.name) == (ladders, False)
    with pytest.raises(ValueError, match=r"no record of .* on sm_80"):
        lesson.resources(ladders.name, arch="80")


@pytest.mark.skipif(bool(compiler.why_not()), reason="no compiler")
def test_resources_of_any_kernel_of_the_ladder():
    found, fresh = lesson.resources("softmax.warp_per_row float16", arch="80")
    assert fresh and (found.name, found.arch, found.threads) == ("softmax.warp_per_row float16", "80", 128)
    assert 0 < found.registers < 128 and found.spills == 0


@pytest.mark.skipif(bool(compiler.why_not()), reason="no compiler")
@pytest.mark.parametrize(
    "name", ["nothing", "softmax.nothing float16 8", "nothing.split float16 8", "softmax float16 8"]
)
def test_resources_of_no_kernel(name):
    with pytest.raises(ValueError, match=f"there is no kernel '{name}'"):
        lesson.resources(name)


def test_results_are_shown_as_they_were_written(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(lesson, "folder", lambda: tmp_path / "lessons")
    assert lesson.show_results(["a"]) is None
    assert "docs/results/softmax.json is not here" in capsys.readouterr().out
    (tmp_path / "docs" / "results").mkdir(parents=True)
    measured = [
        {"name": "copy", "of_copy": 1.0}, {"name": "torch.softmax", "of_copy": 0.8}, {"name": "a", "of_copy": 0.7},
        {"name": "a of 64 threads", "of_copy": 0.9}, {"name": "ab", "of_copy": 0.95}, {"name": "b", "of_copy": None},
    ]  # fmt: skip
    size = {"element": "float16", "rows": 8, "cols": 128, "nbytes": 2048, "measured": measured}
    written = {"environment": {"device": "H200", "date": "today"}, "sizes": [size]}
    (tmp_path / "docs" / "results" / "softmax.json").write_text(json.dumps(written))
    shown = lesson.show_results(["a", "b"])
    assert capsys.readouterr().out == "device H200, date today\n"
    assert shown.header == ("element", "rows", "columns", "a", "b", "torch.softmax")
    assert shown.rows == (("float16", "8", "128", "90%", "-", "80%"),)
    assert "Share of a device copy's speed" in shown.note


def test_results_of_any_bench_are_read_as_they_stand(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(lesson, "folder", lambda: tmp_path / "lessons")
    assert lesson.results("gemm") is None
    said = "docs/results/gemm.json is not here; `flashnumba bench gemm` writes it, on a GPU\n"
    assert capsys.readouterr().out == said
    (tmp_path / "docs" / "results").mkdir(parents=True)
    written = {"environment": {"device": "H200", "torch": "2"}, "sizes": [{"m": 8, "measured": []}]}
    (tmp_path / "docs" / "results" / "gemm.json").write_text(json.dumps(written))
    assert lesson.results("gemm") == written
    assert capsys.readouterr().out == "device H200, torch 2\n"
