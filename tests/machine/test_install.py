"""The commands that install what is missing."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from flashnumba.machine import install

ROOT = Path(__file__).parents[2]


def test_a_command_is_for_the_python_that_runs(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/home/me/.venv/bin/python")
    assert install.pip("torch") == "/home/me/.venv/bin/python -m pip install torch"
    assert install.pip("numpy>=1.26,<2.5") == '/home/me/.venv/bin/python -m pip install "numpy>=1.26,<2.5"'
    monkeypatch.setattr(sys, "executable", "/a folder/python")
    assert install.pip("torch") == '"/a folder/python" -m pip install torch'


def test_an_extra_comes_from_the_source_that_runs(monkeypatch):
    monkeypatch.setattr(sys, "executable", "python3")
    assert install.checkout() == ROOT
    assert install.extra("cu13") == f'python3 -m pip install -e "{ROOT}[cu13]"'
    assert install.extra("lessons", Path()) == 'python3 -m pip install -e ".[lessons]"'


def test_without_the_source_an_extra_is_what_it_asks_for(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", "python3")
    monkeypatch.setattr(install, "__file__", str(tmp_path / "flashnumba" / "machine" / "install.py"))
    assert install.checkout() is None
    assert install.extra("cu13") == f'python3 -m pip install "numba-cuda[cu13]=={install.NUMBA_CUDA}"'


@pytest.mark.parametrize("name", ["cu12", "cu13", "lessons"])
def test_extras_are_those_of_the_package(name):
    line = re.search(rf"^{name} = (.*)$", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert line
    asked = [text.split(";")[0] for text in re.findall(r'"([^"]*)"', line.group(1))]
    assert asked == list(install._WHAT_EXTRAS_BRING[name])
