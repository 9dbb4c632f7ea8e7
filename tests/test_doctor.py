"""The doctor: what it finds on good and on broken machines."""

from __future__ import annotations

import platform
import re
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from flashnumba.attention import CHOICES
from flashnumba.commands import doctor as room
from flashnumba.machine import compiler, gpu, install

PIP = f"{install.python()} -m pip install "


def found() -> dict[str, room.Check]:
    return {check.name: check for check in room.checks()}


def without(monkeypatch, *missing, **versions):
    known = room.installed
    monkeypatch.setattr(
        room, "installed", lambda *names: "" if names[0] in missing else versions.get(names[0]) or known(*names)
    )


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(gpu, "unavailable", lambda: "no CUDA driver")


@pytest.fixture
def a_gpu(monkeypatch):
    """An A100 that answers, with a compiler and a kernel that runs."""
    monkeypatch.setattr(gpu, "unavailable", lambda: "")
    monkeypatch.setattr(compiler, "why_not", lambda: "")
    monkeypatch.setattr(gpu, "driver_version", lambda: "13.0")
    monkeypatch.setattr(gpu, "device_count", lambda: 1)
    monkeypatch.setattr(gpu, "device_name", lambda device: "A100")
    monkeypatch.setattr(gpu, "device_arch", lambda device=None: "80")
    monkeypatch.setattr(gpu, "multiprocessors", lambda device: 108)
    monkeypatch.setattr(gpu, "max_shared", lambda device: 166912)
    tried = room._try
    monkeypatch.setattr(room, "_try", lambda machine: "" if machine == "cuda" else tried(machine))
    without(monkeypatch, **{"cuda-bindings": "13.1.0", "numba-cuda": room.NUMBA_CUDA})


def test_this_machine_runs_the_emulator():
    assert [c for c in room.checks() if c.state == "broken"] == []
    assert found()["emulator"].found == "ran a kernel, result right"


def test_without_a_gpu_every_rung_is_emulated(no_gpu):
    seen = found()
    for rung in ("simt", "mma", "wgmma"):
        assert seen[f"{rung} kernels"].found.startswith("emulator")
    if "GPU" in seen:
        assert seen["GPU"].found == "no CUDA driver"
        assert "driver" in seen["GPU"].mend


def test_rungs_by_architecture(a_gpu):
    seen = found()
    assert seen["GPU 0"].found == "A100, sm_80, 108 multiprocessors, 163 KB of shared memory a block"
    assert seen["launch"].state == "ok"
    assert seen["simt kernels"].found.startswith("GPU;")
    assert seen["mma kernels"].found.startswith("GPU;")
    assert seen["wgmma kernels"].found.startswith("emulator (the GPU is sm_80);")


def test_a_driver_older_than_the_wheels(a_gpu, monkeypatch):
    monkeypatch.setattr(gpu, "driver_version", lambda: "12.4")
    check = found()["driver"]
    assert check.state == "missing"
    assert check.found == "supports CUDA 12.4; cuda-bindings is 13.1.0"
    assert check.mend == f"{install.extra('cu12')}  # or a newer driver"


def test_a_gpu_that_does_not_answer(a_gpu, monkeypatch):
    def lost():
        raise gpu.GpuError("device lost")

    monkeypatch.setattr(gpu, "device_count", lost)
    assert found()["GPU"].found == "does not answer: device lost"


def test_a_gpu_that_computes_wrongly(a_gpu, monkeypatch):
    monkeypatch.setattr(room, "_try", lambda machine: "a wrong result: [1]")
    assert found()["launch"] == room.Check("launch", "missing", "a wrong result: [1]")


def test_without_numba_cuda(no_gpu, monkeypatch):
    without(monkeypatch, "numba-cuda")
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    assert found()["numba-cuda"] == room.Check(
        "numba-cuda", "missing", "not installed", install.pip(f"numba-cuda=={room.NUMBA_CUDA}")
    )
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    check = found()["numba-cuda"]
    assert (check.state, check.mend) == ("missing", "")
    assert "no macOS wheels" in check.found
    assert "compiler" not in found()


def test_another_numba_cuda(no_gpu, monkeypatch):
    without(monkeypatch, **{"numba-cuda": "0.99.0"})
    assert found()["numba-cuda"].found == f"0.99.0; tested with {room.NUMBA_CUDA}"


@pytest.mark.parametrize(
    ("name", "version", "said"),
    [
        ("NumPy", "2.5.0", "2.5.0; numba-cuda"),
        ("NumPy", "1.24.0", "1.24.0; numba-cuda"),
        ("numba", "0.60.0", "0.60.0; tested"),
    ],
)
def test_versions_that_do_not_serve(no_gpu, monkeypatch, name, version, said):
    without(monkeypatch, **{name.lower(): version})
    check = found()[name]
    assert check.state == "broken"
    assert check.found.startswith(said)
    assert check.mend.startswith(PIP)


@pytest.mark.parametrize("name", ["greenlet", "ml_dtypes", "numba"])
def test_what_the_emulator_needs(no_gpu, monkeypatch, name):
    without(monkeypatch, name)
    assert found()[name].state == "broken"
    assert found()[name].mend.startswith(f"{PIP}{name}")


def test_missing_numpy_is_said(no_gpu, monkeypatch):
    without(monkeypatch, "numpy")
    assert found()["NumPy"].found == "not installed"


def test_an_old_python(no_gpu, monkeypatch):
    version = namedtuple("version", "major minor micro")(3, 9, 1)
    monkeypatch.setattr(room.sys, "version_info", version)
    assert next(room._emulator_needs()).state == "broken"


def test_a_compiler_that_is_not_there(no_gpu, monkeypatch):
    said = "the compiler libraries nvvm are not installed"
    monkeypatch.setattr(compiler, "why_not", lambda: f"{said}: {install.extra('cu13')}")
    without(monkeypatch, **{"numba-cuda": room.NUMBA_CUDA})
    check = found()["compiler"]
    assert (check.state, check.found) == ("missing", said)
    assert check.mend.startswith(install.extra("cu13"))


def test_a_question_that_fails_is_an_answer(monkeypatch):
    def broken():
        raise OSError("libfoo.so: no such file")

    monkeypatch.setattr(compiler, "why_not", broken)
    assert room._ask("flashnumba.machine.compiler", "why_not") == "OSError: libfoo.so: no such file"


def test_optional_packages(no_gpu, monkeypatch):
    without(monkeypatch, "torch", "jax")
    monkeypatch.setattr(room, "find_spec", lambda name: None)
    assert found()["torch"] == room.Check("torch", "optional", "for torch tensors in and out", install.pip("torch"))


@pytest.mark.parametrize(("broken", "code"), [("", 0), ("DeadlockError: stuck", 1)])
def test_exit_code_is_that_of_the_emulator(no_gpu, monkeypatch, broken, code):
    monkeypatch.setattr(room, "_try", lambda machine: broken)
    app = typer.Typer()
    room.register(app)
    result = CliRunner().invoke(app, [], env={"COLUMNS": "200"})
    assert result.exit_code == code
    assert ("Kernels do not run here until this is mended: emulator." in result.output) is bool(code)
    assert "numba-cuda" in result.output


@pytest.mark.parametrize("root", [None, Path("/somewhere/else")])
def test_every_command_is_for_the_python_that_runs(no_gpu, monkeypatch, root):
    monkeypatch.setattr(install, "checkout", lambda: root)
    monkeypatch.setattr(compiler, "why_not", lambda: "not there")
    monkeypatch.setattr(room, "_try", lambda machine: "a wrong result")
    monkeypatch.setattr(room, "find_spec", lambda name: None)
    without(monkeypatch, "numpy", "numba", "greenlet", "ml_dtypes", "torch", "cupy-cuda13x", "jax")
    mends = {check.name: check.mend for check in room.checks() if check.mend and check.name != "GPU"}
    assert {"NumPy", "numba", "greenlet", "ml_dtypes", "emulator", "torch", "cupy", "jax"} <= set(mends)
    assert [mend for mend in mends.values() if not mend.startswith(PIP)] == []
    assert [mend for mend in mends.values() if "flashnumba" in mend.removeprefix(PIP)] == []


def test_a_command_stands_on_a_line_of_its_own(no_gpu, monkeypatch):
    monkeypatch.setattr(compiler, "why_not", lambda: "not there")
    without(monkeypatch, **{"numba-cuda": room.NUMBA_CUDA})
    app = typer.Typer()
    room.register(app)
    lines = CliRunner().invoke(app, [], env={"COLUMNS": "60"}).output.splitlines()
    assert any(line.strip().startswith(install.extra("cu13")) for line in lines)


def test_what_is_printed_shows_extras_in_brackets(no_gpu, monkeypatch):
    monkeypatch.setattr(compiler, "why_not", lambda: "not there")
    without(monkeypatch, **{"numba-cuda": room.NUMBA_CUDA})
    app = typer.Typer()
    room.register(app)
    result = CliRunner().invoke(app, [], env={"COLUMNS": "200"})
    assert install.extra("cu13") in result.output
    assert "A GPU cannot be used for want of: compiler, GPU." in result.output


# -- which kernel attention() takes ------------------------------------------------------------------------------------
def here():
    return [backend for _, backend, holds in room.choices() if holds]


def test_what_attention_runs_on_each_machine(a_gpu, monkeypatch):
    assert [(when, backend) for when, backend, _ in room.choices()] == [(c.when, c.backend) for c in CHOICES]
    assert here() == ["flash_forward.split", "flash_forward.mma", "flash_forward.simt"]
    monkeypatch.setattr(gpu, "device_arch", lambda device=None: "75")
    assert here() == ["flash_forward.mma", "flash_forward.simt"]
    monkeypatch.setattr(gpu, "device_arch", lambda device=None: "61")
    assert here() == ["numpy"]


def test_what_attention_runs_is_printed(no_gpu, monkeypatch):
    assert here() == ["numpy"]
    app = typer.Typer()
    room.register(app)
    lines = CliRunner().invoke(app, [], env={"COLUMNS": "300"}).output.splitlines()
    (title,) = [i for i, line in enumerate(lines) if "what attention() runs" in line]
    for choice in CHOICES:
        (line,) = [line for line in lines[title:] if choice.when in line]
        assert choice.backend in line
        assert ("here" in line) is (choice.backend == "numpy")


def test_a_package_that_does_not_import_has_no_table(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashnumba.stages.heads", None)
    assert room.choices() == []


def test_version_numbers():
    assert room.numbers("2.13.0+cpu") == (2, 13, 0)
    assert room.numbers("2.5.0rc1") == (2, 5, 0)
    assert room.numbers("dev") == ()


def test_the_versions_the_doctor_wants_are_those_the_package_asks_for():
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert f'"numba=={room.NUMBA}"' in text
    assert set(re.findall(r"numba-cuda(?:\[\w+\])?==([\d.]+)", text)) == {room.NUMBA_CUDA}
