"""``flashnumba doctor``: what this machine can run, why not the rest, and the command that would mend it."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flashnumba.machine import install
from flashnumba.machine.install import NUMBA, NUMBA_CUDA

__all__ = ["Check", "checks", "doctor", "register"]

NUMPY = "numpy>=1.26,<2.5"
RUNGS = (
    ("simt", "75", "CUDA cores"),
    ("mma", "80", "tensor cores through mma.sync, cp.async"),
    ("wgmma", "90a", "wgmma and tensor maps (Hopper)"),
)
OPTIONAL = (
    ("torch", ("torch",), "torch tensors in and out", install.pip("torch")),
    ("cupy", ("cupy-cuda13x", "cupy-cuda12x", "cupy"), "CuPy arrays in and out", install.pip("cupy-cuda13x")),
    ("jax", ("jax",), "JAX arrays in and out", install.pip("jax")),
    ("jupytext", ("jupytext",), "opening the lessons", install.extra("lessons")),
)


@dataclass(frozen=True)
class Check:
    """One thing looked at.

    Attributes:
        name: what.
        state: ``ok``; ``broken``: the emulator needs it and it is not right; ``missing``: a GPU needs it; ``optional``.
        found: what is there, or why it does not serve.
        mend: the command, or the deed, that would change that; empty if nothing is wrong or nothing can be done.
    """

    name: str
    state: str
    found: str
    mend: str = ""


def installed(*names: str) -> str:
    """Version of the first of some distributions that is installed; empty if none is."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version.

    >>> numbers("2.13.0+cpu"), numbers("2.5.0rc1")
    ((2, 13, 0), (2, 5, 0))
    """
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match.group().split("."))) if match else ()


def checks() -> list[Check]:
    """Everything that decides what runs here, in the order in which one thing needs another."""
    found = [*_emulator_needs(), *_gpu_needs()]
    found.append(_emulator_runs())
    found += _rungs()
    for module, names, use, mend in OPTIONAL:
        version = installed(*names) or ("present" if find_spec(module) else "")
        found.append(
            Check(module, "ok", f"{version} ({use})") if version else Check(module, "optional", f"for {use}", mend)
        )
    return found


def _emulator_needs() -> Iterator[Check]:
    version = sys.version_info[:3]
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    old = version < (3, 10)
    yield Check("Python", "broken" if old else "ok", text, "install Python 3.10 or newer" if old else "")

    numpy = installed("numpy")
    mend = install.pip(NUMPY)
    if not numpy:
        yield Check("NumPy", "broken", "not installed", mend)
    elif not (1, 26) <= numbers(numpy) < (2, 5):
        yield Check("NumPy", "broken", f"{numpy}; numba-cuda {NUMBA_CUDA} needs 1.26 to 2.4", mend)
    else:
        yield Check("NumPy", "ok", numpy)

    for name, wanted in (("numba", NUMBA), ("greenlet", ""), ("ml_dtypes", "")):
        there = installed(name)
        mend = install.pip(f"{name}=={wanted}" if wanted else name)
        if not there:
            yield Check(name, "broken", "not installed", mend)
        elif wanted and there != wanted:
            yield Check(name, "broken", f"{there}; tested with {wanted}", mend)
        else:
            yield Check(name, "ok", there)


def _gpu_needs() -> Iterator[Check]:
    there = installed("numba-cuda")
    if not there and platform.system() == "Darwin":
        yield Check("numba-cuda", "missing", "has no macOS wheels; kernels run on the emulator")
        return
    if not there:
        yield Check("numba-cuda", "missing", "not installed", install.pip(f"numba-cuda=={NUMBA_CUDA}"))
        return
    if there != NUMBA_CUDA:
        mend = install.pip(f"numba-cuda=={NUMBA_CUDA}")
        yield Check("numba-cuda", "missing", f"{there}; tested with {NUMBA_CUDA}", mend)
    else:
        yield Check("numba-cuda", "ok", there)
    reason = _ask("flashnumba.machine.compiler", "why_not")
    if reason:
        mend = install.extra("cu13")
        said = reason.removesuffix(f": {mend}")
        yield Check("compiler", "missing", said, f"{mend}  # cu12 with a driver for CUDA 12")
    else:
        yield Check(
            "compiler", "ok", f"NVVM, NVRTC and nvJitLink {installed('nvidia-nvjitlink', 'nvidia-nvjitlink-cu12')}"
        )
    reason = _ask("flashnumba.machine.gpu", "unavailable")
    if reason:
        mend = "install the NVIDIA driver, see nvidia.com/drivers; in a container: docker run --gpus all"
        yield Check("GPU", "missing", reason, mend)
        return
    try:
        from flashnumba.machine import gpu

        driver, bindings = gpu.driver_version(), installed("cuda-bindings")
        if numbers(driver)[:1] < numbers(bindings)[:1]:
            said = f"supports CUDA {driver}; cuda-bindings is {bindings}"
            mend = f"{install.extra(f'cu{numbers(driver)[0]}')}  # or a newer driver"
            yield Check("driver", "missing", said, mend)
        else:
            yield Check("driver", "ok", f"supports CUDA {driver}")
        for device in range(gpu.device_count()):
            said = f"{gpu.device_name(device)}, sm_{gpu.device_arch(device)}, {gpu.multiprocessors(device)} "
            said += f"multiprocessors, {gpu.max_shared(device) // 1024} KB of shared memory a block"
            yield Check(f"GPU {device}", "ok", said)
    except Exception as error:
        yield Check("GPU", "missing", f"does not answer: {error}", "nvidia-smi says more")
        return
    yield _runs_on_gpu()


def _ask(module: str, function: str) -> str:
    """What a question of the machine answers; that it cannot be asked is an answer too."""
    from importlib import import_module

    try:
        return str(getattr(import_module(module), function)())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _try(machine: str) -> str:
    """Run a small kernel; empty if its result is right."""
    try:
        import numpy as np

        from flashnumba.machine.function import kernel
        from flashnumba.machine.launcher import launch
        from flashnumba.machine.numba import cuda, float32

        @kernel(threads=32)
        def reverse(x):
            tile = cuda.shared.array(32, float32)
            i = cuda.threadIdx.x
            tile[i] = x[i]
            cuda.syncthreads()  # every element is in the tile before any is taken out
            x[i] = tile[31 - i]

        x = np.arange(32, dtype=np.float32)
        launch(reverse, 1, 32, (x,), machine=machine)
        return "" if np.array_equal(x, np.arange(31, -1, -1)) else f"a wrong result: {x}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def _emulator_runs() -> Check:
    wrong = _try("emulator")
    root = install.checkout()
    what = ("-e", str(root)) if root else (NUMPY, f"numba=={NUMBA}", "greenlet", "ml_dtypes")
    mend = install.pip("--force-reinstall", *what)
    return Check("emulator", "broken", wrong, mend) if wrong else Check("emulator", "ok", "ran a kernel, result right")


def _runs_on_gpu() -> Check:
    wrong = _try("cuda")
    return (
        Check("launch", "missing", wrong) if wrong else Check("launch", "ok", "compiled and ran a kernel, result right")
    )


def _rungs() -> Iterator[Check]:
    """Where each rung's kernels run."""
    arch = ""
    if not _ask("flashnumba.machine.gpu", "unavailable") and not _ask("flashnumba.machine.compiler", "why_not"):
        arch = _ask("flashnumba.machine.gpu", "device_arch")
    for name, needed, what in RUNGS:
        where = "emulator"
        if arch:
            from flashnumba.machine.instruction import runs_on

            where = "GPU" if runs_on(arch, needed) else f"emulator (the GPU is sm_{arch})"
        yield Check(f"{name} kernels", "ok", f"{where}; {what}, sm_{needed}")


def choices() -> list[tuple[str, str, bool]]:
    """The table by which ``attention(backend="auto")`` chooses: when, backend, and whether it can come to that here.

    Empty where the package itself does not import; the checks then say why.
    """
    try:
        from flashnumba.attention import CHOICES, choose
        from flashnumba.machine import gpu
        from flashnumba.machine.instruction import runs_on
        from flashnumba.stages.heads import Shape
        from flashnumba.tiles.elements import ITEMSIZE

        arch = gpu.device_arch() if gpu.available() else ""
        sizes = {"batch": 1, "heads": 1, "kv_heads": 1, "n": 1 << 16, "d": 64, "arch": arch or "75"}
        usable = bool(arch) and runs_on(arch, "75")
        here = [choose(Shape(e, m=m, **sizes), usable) for e in ITEMSIZE for m in (1, 1 << 16)]
    except Exception:
        return []
    return [(choice.when, choice.backend, choice in here) for choice in CHOICES]


MARKS = {"ok": "[green]yes[/]", "broken": "[bold red]no[/]", "missing": "[yellow]no[/]", "optional": "[dim]-[/]"}


def doctor() -> None:
    """Say what this machine can run, why not the rest, and what would mend it. Exit 0 if the emulator works."""
    found = checks()
    table = Table(title="flashnumba on this machine", title_justify="left")
    for heading, options in (("", {"no_wrap": True}), ("", {}), ("found", {})):
        table.add_column(heading, overflow="fold", **options)
    for check in found:
        table.add_row(check.name, MARKS[check.state], escape(check.found))
    console = Console()
    console.print(table)
    rows = choices()
    if rows:
        table = Table(title="\nwhat attention() runs: the first row that holds", title_justify="left")
        for heading in ("", "when", "backend"):
            table.add_column(heading, overflow="fold")
        for when, backend, here in rows:
            table.add_row("[green]here[/]" if here else "[dim]-[/]", escape(when), backend)
        console.print(table)
    mends = [check for check in found if check.mend]
    if mends:
        console.print("\nTo mend or add what is not there:")
    for check in mends:  # not in the table, whose folds would have to be taken out of a command that is copied
        console.print(f"{check.name}:\n    {check.mend}", markup=False, highlight=False, soft_wrap=True)
    if mends:
        console.print()
    broken = [check.name for check in found if check.state == "broken"]
    missing = [check.name for check in found if check.state == "missing"]
    if broken:
        console.print(f"Kernels do not run here until this is mended: {', '.join(broken)}.")
        raise typer.Exit(1)
    if missing:
        console.print(
            f"Every kernel runs here on the emulator. A GPU cannot be used for want of: {', '.join(missing)}."
        )
    else:
        console.print("Every kernel runs here on the emulator, and those marked GPU on the GPU.")


def register(app: typer.Typer) -> None:
    app.command(name="doctor")(doctor)
