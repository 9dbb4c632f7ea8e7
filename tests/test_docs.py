"""The documentation site: it builds without a warning, is whole, and says what the code says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))

import generators  # noqa: E402
from generators import api, instructions, results, tables  # noqa: E402

from flashnumba.attention import CHOICES  # noqa: E402

NOTEBOOK = {
    "cells": [{"cell_type": "markdown", "id": "a", "metadata": {}, "source": "# A lesson\n"}],
    "metadata": {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}},
    "nbformat": 4,
    "nbformat_minor": 5,
}


def pages() -> list[Path]:
    """Every Markdown file of the repository that somebody reads as it is."""
    written = [p for p in DOCS.rglob("*.md") if not {"_build", "generated"} & set(p.relative_to(DOCS).parts)]
    return [ROOT / "README.md", *(ROOT / "lessons").glob("*.md"), ROOT / "flashnumba" / "data" / "README.md", *written]


def lesson(folder: Path, name: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.ipynb").write_text(json.dumps(NOTEBOOK), encoding="utf-8")


class Page(HTMLParser):
    """What a page links to, what can be linked to in it, and its text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.ids: set[str] = set()
        self.words: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.targets.append(value)
            elif name == "id" and value:
                self.ids.add(value)

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return "".join(self.words)


def dead_links(site: Path) -> list[str]:
    """Links within the site that lead nowhere: no such file, or no such place in it."""
    read = {path: Page(path) for path in site.rglob("*.html")}
    dead = []
    for path, found in read.items():
        for target in found.targets:
            url = urlsplit(target)
            if url.scheme or url.netloc:
                continue
            there = (path.parent / unquote(url.path)).resolve() if url.path else path
            place = unquote(url.fragment)
            if not there.is_file() or (place and there in read and place not in read[there].ids):
                dead.append(f"{path.relative_to(site)}: {target}")
    return dead


@pytest.mark.skipif(find_spec("myst_nb") is None, reason='needs pip install -e ".[docs]"')
def test_the_site_builds_without_a_warning_and_is_whole(tmp_path: Path) -> None:
    """One build, from a copy, with the lessons there are and one more: -W, every page reachable, no dead link."""
    ignored = shutil.ignore_patterns("_build", "generated", "lessons")
    shutil.copytree(DOCS, tmp_path / "docs", ignore=ignored)
    recorded = Path("tests") / "machine" / "conformance"
    shutil.copytree(ROOT / recorded, tmp_path / recorded)
    if (ROOT / "lessons").is_dir():
        shutil.copytree(ROOT / "lessons", tmp_path / "lessons")
    lesson(tmp_path / "lessons", "99_example")

    (tmp_path / "docs" / "results").mkdir(exist_ok=True)
    (tmp_path / "docs" / "results" / "made_up.json").write_text(json.dumps(MEASURED), encoding="utf-8")
    options = ["-W", "--keep-going", "-q", "-D", "nb_execution_mode=off"]
    paths = [str(tmp_path / "docs"), str(tmp_path / "build" / "html")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "sphinx", *options, *paths]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    site = (tmp_path / "build" / "html").resolve()
    assert dead_links(site) == []
    # A page outside every table of contents is a warning, so what was built is reachable.
    assert (site / "lessons" / "99_example.html").is_file()
    assert "made up" in Page(site / "results.html").text.lower()
    text = Page(site / "instructions.html").text
    names = [declared.name for declared in instructions.DECLARED]
    names += [name for family in instructions.FAMILIES for name, _ in instructions.factories(family)]
    assert [name for name in names if f"{name}(" not in text] == []
    text = Page(site / "how-to" / "attention.html").text
    assert [choice for choice in CHOICES if choice.when not in text or choice.backend not in text] == []
    known = Page(site / "py-modindex.html").text
    missing = [
        m
        for m in (*api.modules_of("flashnumba.stages"), "flashnumba.machine.launcher", "flashnumba.attention")
        if m not in known
    ]
    assert missing == []
    api_text = Page(site / "api" / "machine.html").text
    for shown in ("class Kernel(", "blocks a multiprocessor the compiler must leave room for", "class Instruction("):
        assert shown in api_text


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a href="b.html#there"></a><p id="x"></p>', encoding="utf-8")
    (tmp_path / "b.html").write_text('<a href="a.html#x"></a><a href="https://c.org/d"></a>', encoding="utf-8")
    assert dead_links(tmp_path) == ["a.html: b.html#there"]
    (tmp_path / "b.html").unlink()
    assert dead_links(tmp_path) == ["a.html: b.html#there"]


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_relative_links_of_a_page_lead_to_files(path: Path) -> None:
    """Also as the files lie in the repository, where somebody reads them without building the site."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)]
    made_by_the_build = "generated/"
    dead = [
        target
        for target in targets
        if target
        and not urlsplit(target).scheme
        and made_by_the_build not in target
        and not (path.parent / target).exists()
    ]
    assert dead == []


def test_every_instruction_has_a_row() -> None:
    table = instructions.table()
    for declared in instructions.DECLARED:
        assert f"``{declared.signature}``" in table
        assert declared.ptx in table and f"sm_{declared.arch}" in table
    made = [name for family in instructions.FAMILIES for name, _ in instructions.factories(family)]
    assert sorted(made) == sorted(instructions.EXAMPLES)


@pytest.mark.parametrize("names", [[], ["01_softmax"], ["01_softmax", "02_online_softmax"]])
def test_any_number_of_lessons(names: list[str], tmp_path: Path) -> None:
    for name in names:
        lesson(tmp_path / "lessons", name)
    assert generators.copy_lessons(tmp_path / "lessons", tmp_path / "docs") == names
    assert sorted(path.stem for path in (tmp_path / "docs").iterdir()) == names
    page = tables.lessons(names, execute=False)
    assert ("toctree" in page) == bool(names)
    assert all(f"\n/lessons/{name}\n" in page for name in names)
    assert page.count("to come") == 2 - len(names)
    assert page.startswith(tables.NOT_EXECUTED)
    assert tables.lessons(names, execute=True) == page.replace(tables.NOT_EXECUTED, tables.EXECUTED)


def test_a_lesson_taken_away_leaves_the_site(tmp_path: Path) -> None:
    lesson(tmp_path / "lessons", "01_softmax")
    (tmp_path / "lessons" / "draft.ipynb").write_text("{}", encoding="utf-8")
    assert generators.copy_lessons(tmp_path / "lessons", tmp_path / "docs") == ["01_softmax"]
    (tmp_path / "lessons" / "01_softmax.ipynb").unlink()
    assert generators.copy_lessons(tmp_path / "lessons", tmp_path / "docs") == []
    assert list((tmp_path / "docs").iterdir()) == []


MEASURED = {
    "environment": {"device": "NVIDIA H200", "date": "2026-11-29", "torch": "2.11"},
    "sizes": [
        {
            "element": "float16",
            "cols": 128,
            "nbytes": 2**30,
            "measured": [
                {"name": "copy", "seconds": 5e-4, "bytes_per_second": 4.25e12, "note": ""},
                {"name": "slow", "seconds": 7e-4, "of_copy": 0.7142857, "note": ""},
                {"name": "quick", "seconds": 6e-4, "of_copy": 0.8333333, "note": ""},
                {"name": "unfit", "seconds": None, "of_copy": None, "note": ""},
            ],
        }
    ],
}


def test_results_are_shown_with_their_device_and_date(tmp_path: Path) -> None:
    (tmp_path / "some_bench.json").write_text(json.dumps(MEASURED), encoding="utf-8")
    page = results.page(tmp_path)
    assert page.startswith("## Some bench\n\n- device: NVIDIA H200\n- date: 2026-11-29\n- torch: 2.11\n")
    fastest, details = page.split("<details>")
    assert "| element | columns | MB | kernel | ms | of copy |" in fastest
    assert "| float16 | 128 | 1024 | quick | 0.6 | 0.8333 |" in fastest and "slow" not in fastest
    assert "<summary>element float16, columns 128, MB 1024</summary>" in details
    for row in ("| copy | 0.5 | 4.25 | - |", "| slow | 0.7 | - | 0.7143 |", "| unfit | - | - | - |"):
        assert row in details
    assert "note" not in page, "a column without a word in it"


def test_plain_tables_of_results(tmp_path: Path) -> None:
    measured = {"device": "a GPU", "rows": [{"columns": 128, "best": 0.98765}, {"columns": 4096, "exact": True}]}
    (tmp_path / "bench.json").write_text(json.dumps(measured), encoding="utf-8")
    page = results.page(tmp_path)
    assert "- date: not recorded" in page
    assert "| columns | best | exact |" in page and "| 128 | 0.9877 | - |" in page and "| 4096 | - | yes |" in page


def test_results_without_a_device_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text(json.dumps({"date": "2026-11-29", "rows": []}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"bench.json does not say the device"):
        results.page(tmp_path)


def test_the_notes_sum_is_in_the_table() -> None:
    line = next(line for line in tables.budgets().splitlines() if "the notes' machine" in line)
    assert line.split(" | ")[1:] == ["256", "256 of 768 KB", "3", "21.33 of 64 KB |"]
