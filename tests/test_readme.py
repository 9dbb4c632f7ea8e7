"""The README promises what the package has."""

from pathlib import Path

import pytest

from flashnumba.ladder import STAGES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def rows():
    """The ladder's table: stage -> (cells)."""
    table = README.split("## The ladder")[1].split("##")[0]
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return {cells[0]: cells[1:] for cells in lines if cells[0] not in ("stage", "---")}


def test_the_table_says_here_of_the_stages_that_are():
    here = [name for name, cells in rows().items() if cells[-1] == "here"]
    assert here == [stage.name for stage in STAGES]
    assert {cells[-1] for cells in rows().values()} == {"here"}


def test_the_table_agrees_with_the_ladder_on_what_a_stage_teaches():
    for stage in STAGES:
        assert rows()[stage.name][0] == stage.teaches


def test_the_picture_is_there():
    picture = ROOT / "docs" / "_static" / "ladder.svg"
    assert f"({picture.relative_to(ROOT).as_posix()})" in README
    assert picture.read_text(encoding="utf-8").startswith("<?xml")


@pytest.mark.parametrize("name", ["LICENSE", "flashnumba/data/README.md"])
def test_named_files_exist(name):
    assert (ROOT / name).is_file()
