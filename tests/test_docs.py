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

from flashnumba.ladder import STAGES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))

import generators  # noqa: E402
from generators import api, instructions, resources, results, tables  # noqa: E402

from flashnumba.attention import CHOICES  # noqa: E402
from flashnumba.machine.resources import Resources, write  # noqa: E402
from tests.bench import fakes  # noqa: E402

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
    measured = {"made_up": MEASURED, "gemm": fakes.gemm_file(), "attention": fakes.attention_file()}
    for name, held in measured.items():
        (tmp_path / "docs" / "results" / f"{name}.json").write_text(json.dumps(held), encoding="utf-8")
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
    assert list((site / "_images").glob("attention*.svg"))
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
    assert page.count("to come") == len(STAGES) - len(names)
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


def put(folder: Path, **files: dict) -> Path:
    for name, held in files.items():
        (folder / f"{name}.json").write_text(json.dumps(held), encoding="utf-8")
    return folder


def test_what_was_not_measured_says_how(tmp_path: Path) -> None:
    page = results.page(tmp_path)
    heads = re.findall(r"^## (.*)$", page, re.MULTILINE)
    assert heads == [name.capitalize() for name in results.BENCHES]
    for name in results.BENCHES:
        assert f"`flashnumba bench {name}`, on a GPU, writes it." in page
    page = results.page(put(tmp_path, decode=fakes.decode_file(), zebra=MEASURED))
    heads = re.findall(r"^## (.*)$", page, re.MULTILINE)
    others = [name.capitalize() for name in results.BENCHES if name != "decode"]
    assert heads == ["Decode", "Zebra", *others]
    assert "flashnumba bench decode" not in page


def test_the_table_of_products(tmp_path: Path) -> None:
    page = results.page(put(tmp_path, gemm=fakes.gemm_file()))
    assert page.startswith("## Gemm\n\n- device: NVIDIA H200\n")
    table, details = page.split("<details>", 1)
    assert "| element | M x N x K | majors | torch.matmul | register_tile | wgmma | mma |\n" in table
    assert "| float32 | 4096 x 2048 x 8192 | kn | 700 | 350 (0.50) | - | - |\n" in table
    assert "| float16 | 4096 x 2048 x 8192 | kn | 700 | - | 350 (0.50) | 350 (0.50) |\n" in table
    assert "naive" not in table and "WRONG: error 3" in details
    assert "| kernel | ms | TFLOP/s | of cuBLAS | error | budget | note |" in details


@pytest.mark.parametrize("cudnn", [True, False])
def test_the_table_and_the_picture_of_attention(tmp_path: Path, cudnn: bool) -> None:
    page = results.page(put(tmp_path, attention=fakes.attention_file(cudnn)))
    table, details = page.split("<details>", 1)
    heads = "| element | D | mask | B x H x N | torch, FlashAttention-2 | " + ("torch, cuDNN | " if cudnn else "")
    assert heads + "mma |\n" in table
    assert "| element | D | mask | B x H x N | simt |\n" in table, "float32 has a table of its own"
    row = "| float16 | 64 | causal | 4 x 32 x 4096 | 300 | " + ("400 | " if cudnn else "") + "330 (1.10) |\n"
    assert row in table and ("refused: too old" in details) is not cudnn
    assert "](generated/attention.svg)" in table
    results.draw_attention(tmp_path, tmp_path)
    drawn = (tmp_path / "attention.svg").read_text(encoding="utf-8")
    results.draw_attention(tmp_path, tmp_path)
    assert (tmp_path / "attention.svg").read_text(encoding="utf-8") == drawn, "the same figures draw the same picture"
    found = results.lines(fakes.attention_file(cudnn))
    assert set(found) == {(64, False), (64, True)}
    assert found[64, True]["mma"] == [(1024, pytest.approx(330)), (4096, pytest.approx(330))]
    assert ("torch, cuDNN" in found[64, True]) is cudnn


def test_no_picture_without_figures(tmp_path: Path) -> None:
    results.draw_attention(tmp_path, tmp_path)
    held = fakes.attention_file()
    held["sizes"] = held["sizes"][-1:]
    assert "attention.svg" not in results.page(put(tmp_path, attention=held))
    results.draw_attention(tmp_path, tmp_path)
    assert not (tmp_path / "attention.svg").exists()


def test_the_table_of_the_chain(tmp_path: Path) -> None:
    page = results.page(put(tmp_path, chain=fakes.chain_file()))
    table, details = page.split("<details>", 1)
    assert "| element | D | mask | B x H x N | torch, FlashAttention-2 | shared | registers |\n" in table
    assert "| float16 | 64 | none | 4 x 32 x 4096 | 300 | 250 | 330 (1.32) |\n" in table
    assert "| kernel | ms | TFLOP/s |" in details


def test_the_tables_of_the_ring(tmp_path: Path) -> None:
    page = results.page(put(tmp_path, staged=fakes.staged_file())).split("<details>")[0]
    assert "| element | D | mask | B x H x N | torch, FlashAttention-2 | tile_2 | quarter_4 |\n" in page
    assert "| float16 | 128 | none | 4 x 16 x 4096 | 300 | 290 | 290 (1.02) |\n" in page
    assert "| 128 | quarter_4 | 16.1 | 168 | 3 | 3 |" in page


def test_the_tables_of_counters(tmp_path: Path) -> None:
    page = results.page(put(tmp_path, counters=fakes.counters_file())).split("<details>")[0]
    assert page.startswith("## Counters\n\n- device: NVIDIA H200\n") and "**gemm**" in page
    assert "| D 128, N 2048 | shared | 113.8 | 39.5 | 2884 | 14.54 | 1.00% | 0.2% | 51% | 40% | 7.7 | 8 |\n" in page
    assert "| D 128, N 2048 | registers | 101.5 | 32.2 | 2621 | 11.29 | 0.84% | 0.0% | 57% | 37% | 7.5 | 8 |\n" in page
    assert "| size | kernel | wait | short scoreboard |" in page
    assert "| 2048 cubed | shared | 1.52 | 0.55 | 0.25 | 0.17 | 0.40 | 0.09 |\n" in page


def test_the_tables_of_the_gradients(tmp_path: Path) -> None:
    page = results.page(put(tmp_path, backward=fakes.backward_file())).split("<details>")[0]
    assert "| element | D | mask | B x H x N | torch, FlashAttention-2 | mma | one_pass |\n" in page
    assert "| float16 | 64 | causal | 4 x 32 x 4096 | 250 | 200 (0.80) | 260 (1.04) |\n" in page
    assert "| float16 | 64 | causal | 4 x 32 x 4096 | 130 | 6 | - |" in page


def test_the_tables_of_decoding(tmp_path: Path) -> None:
    page = results.page(put(tmp_path, decode=fakes.decode_file()))
    times, speeds, host = page.split("<details>")[0].split("\n\n|")[1:]
    assert times.startswith(" B | N | MB of K and V | copy of as many bytes | torch, FlashAttention-2 | split |\n")
    assert "| 4 | 8192 | 134.2 | 40 | 50 | 43 |" in times
    assert speeds.startswith(" B | N | MB of K and V | kernel | TB/s | of copy | of equal copy | of FA2 |\n")
    assert "| 4 | 8192 | 134.2 | split | 3.1 | 0.74 | 0.91 | 1.2 |" in speeds
    assert "| [1, 4, 64, 64] | flashnumba.attention | 12 |" in host and "| torch | - |" in host


def test_the_tables_of_latent_attention(tmp_path: Path) -> None:
    page = results.page(put(tmp_path, mla=fakes.mla_file())).split("<details>")[0]
    assert "| B | N | H | flash_mla.decode | flash_mla.decode, e4m3 |\n" in page
    assert "| 128 | 4096 | 16 | 160 (0.90) | 125 (0.65, x 1.28) |" in page
    assert "| 128 | 4096 | 16 | 120 | 140 |" in page and "| 1 | 4096 | 16 | 290 |" in page
    gemm = {"sizes": [{"element": "float16", "m": n, "n": n, "k": n, "majors": "kn", "measured": [
        {"name": "mma", "ours": True, "seconds": 1.0, "flops_per_second": rate, "of_cublas": 0.6}
    ]} for n, rate in ((4096, 4.8e14), (8192, 4e14))]}  # fmt: skip
    (tmp_path / "gemm.json").write_text(json.dumps(gemm), encoding="utf-8")
    page = results.mla(tmp_path / "mla.json")
    assert "matrices, 400:" in page and "| 128 | 4096 | 16 | 120 (0.30) | 140 (0.35) |" in page


RESOURCES = [
    Resources("gemm.mma float16", "80", 128, 168, shared=98304, barriers=1),
    Resources("gemm.mma float16", "90a", 128, 168, spills=8, shared=98304, barriers=1),
    Resources("softmax.block float32", "75", 256, 40, stack=16, local_memory=16, f64=True),
]


def test_the_table_of_resources(tmp_path: Path) -> None:
    assert "`flashnumba resources --json docs/results/resources.json` writes it" in resources.page(tmp_path)
    write(tmp_path / "resources.json", {"numba": "0.1", "nvJitLink": "13.5"}, RESOURCES)
    page = resources.page(tmp_path)
    assert page.startswith("Compiled with numba 0.1, nvJitLink 13.5: 2 kernels, 3 times.\n")
    assert "- spill: `gemm.mma float16` on sm_90a 8 bytes\n" in page
    assert "- keep arrays in local memory: `softmax.block float32` on sm_75 16 bytes\n" in page
    assert "- compute in double precision: `softmax.block float32` on sm_75\n" in page
    assert "| kernel | threads | sm_80 | sm_90a |\n" in page and "| mma float16 | 128 | 168, 6% | 168, 12% |\n" in page
    assert "| block float32 | sm_75 | 40 | 0 | 16 | 16 | yes | 0 | 4 | 100% | threads |" in page
    assert "Softmax" in results.page(tmp_path), "a record of resources is no measurement on a device"
    write(tmp_path / "resources.json", {"numba": "0.1"}, RESOURCES[:1])
    assert resources.page(tmp_path).count(": none\n") == 3


def test_the_notes_sum_is_in_the_table() -> None:
    line = next(line for line in tables.budgets().splitlines() if "the notes' machine" in line)
    assert line.split(" | ")[1:] == ["256", "256 of 768 KB", "3", "21.33 of 64 KB |"]
