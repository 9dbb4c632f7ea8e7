"""What the lessons in ``lessons/`` share: show real source, tabulate, time, check an exercise.

Nothing here computes attention. Objects that a lesson shows render in a notebook and print as plain text.
"""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from importlib import import_module
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import numpy as np

from flashnumba.commands.lessons import folder
from flashnumba.machine import gpu
from flashnumba.machine.function import DeviceFunction, Kernel, named_values
from flashnumba.machine.resources import Resources, compiler, read, resources_of, write

if TYPE_CHECKING:
    from flashnumba.machine.compiler import CompileCase

__all__ = [
    "Resources", "Source", "Table", "check", "machine", "record_resources", "resources", "results",
    "show_results", "show_source", "speeds", "style", "table", "timed",
]  # fmt: skip


def machine() -> str:
    """Where this computer runs a lesson's kernels: ``"cuda"`` if there is a GPU, else ``"emulator"``."""
    return "cuda" if gpu.available() else "emulator"


# -- source -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Source:
    """Lines of a file: ``place`` says which, ``text`` is what stands there."""

    place: str
    text: str

    def __str__(self) -> str:
        return f"# {self.place}\n{self.text}"

    __repr__ = __str__

    def _repr_markdown_(self) -> str:
        return f"```python\n{self}\n```"


def show_source(
    what: Kernel | DeviceFunction | Callable[..., Any], *, part: str = "", first: str = "", last: str = ""
) -> Source:  # fmt: skip
    """The source of a kernel, a device function or a plain function, as it stands in the package.

    Args:
        what: a kernel that a factory made shows the kernel's body; the factory itself shows everything.
        part: show a device function that ``what`` calls, by its name there; with dots, one that that one calls.
        first, last: words in the first and the last line to show; all lines by default.

    Raises:
        ValueError: ``what`` calls nothing of that name, or no line has these words.
    """
    for name in part.split(".") if part else ():
        found = {name: value for name, value in named_values(_plain(what)) if isinstance(value, DeviceFunction)}
        if name not in found:
            raise ValueError(f"{_plain(what).__name__} calls no device function {name!r}; it calls {', '.join(found)}")
        what = found[name]
    function = inspect.unwrap(_plain(what))
    lines, start = inspect.getsourcelines(function)
    a = _line_with(first, lines, 0) if first else 0
    b = _line_with(last, lines, a) if last else len(lines) - 1
    file = Path(inspect.getsourcefile(function) or "?")
    root = Path(__file__).resolve().parents[1]
    name = file.relative_to(root).as_posix() if file.is_relative_to(root) else "this notebook"
    return Source(f"{name}, lines {start + a} to {start + b}", dedent("".join(lines[a : b + 1])).rstrip())


def _plain(what: Any) -> Any:
    return what.function if isinstance(what, (Kernel, DeviceFunction)) else what


def _line_with(words: str, lines: Sequence[str], start: int) -> int:
    for i in range(start, len(lines)):
        if words in lines[i]:
            return i
    raise ValueError(f"no line has {words!r}")


# -- tables -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Table:
    """Rows under a header, all as text, and a note below."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def __str__(self) -> str:
        lines = [self.header, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.header))]
        text = "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)
        return f"{text}\n{self.note}" if self.note else text

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def line(cells: Sequence[str], tag: str) -> str:
            style = "text-align: left; padding: 0.15em 0.9em 0.15em 0"
            return "<tr>" + "".join(f'<{tag} style="{style}">{escape(c)}</{tag}>' for c in cells) + "</tr>"

        body = "".join(line(row, "td") for row in self.rows)
        below = f"<p>{escape(self.note)}</p>" if self.note else ""
        return f"<table><thead>{line(self.header, 'th')}</thead><tbody>{body}</tbody></table>{below}"


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], note: str = "") -> Table:
    """A table; floats are given four significant digits. ``note``: text below it."""
    shown = tuple(tuple(f"{c:.4g}" if isinstance(c, float) else str(c) for c in row) for row in rows)
    return Table(tuple(header), shown, note)


# -- measuring --------------------------------------------------------------------------------------------------------
@contextmanager
def timed(what: str) -> Iterator[None]:
    """Say how long the block took, by the wall clock."""
    start = time.perf_counter()
    yield
    print(f"{what}: {time.perf_counter() - start:.2f} s")


def resources(name: str, *, arch: str = "90a") -> tuple[Resources, bool]:
    """Resources of a stage's kernel, and whether they were measured just now.

    They are measured where the compiler is installed, and read from ``docs/results/resources.json`` or
    ``lessons/resources.json`` elsewhere.

    Args:
        name: as ``flashnumba resources`` shows it, e.g. ``"flash_forward.mma float16 d 64, tiles for sm_90a"``; or, of
            a kernel over packed rows, stage, kernel, element and columns: ``"online_softmax.one_pass float16 1024"``.

    Raises:
        ValueError: there is no such kernel, or no compiler and no record of it.
    """
    from flashnumba.machine.compiler import why_not

    if not why_not():
        return _measured(name, arch), True
    for path in (folder().parent / "docs" / "results" / "resources.json", _record()):
        found = read(path)[1].get((name, arch)) if path.is_file() else None
        if found is not None:
            return found, False
    raise ValueError(f"no record of {name!r} on sm_{arch}, and no compiler here: {why_not()}")


def _measured(name: str, arch: str) -> Resources:
    from flashnumba.machine.compiler import compile_kernel

    case = _case(name, arch)
    return resources_of(case, compile_kernel(case.kernel, case.signature, arch))


def _case(name: str, arch: str) -> CompileCase:
    """The case of the ladder with this name, or one of a kernel over packed rows."""
    from flashnumba.ladder import compile_cases
    from flashnumba.machine.compiler import CompileCase
    from flashnumba.machine.numba import types
    from flashnumba.stages.rows import Shape, signature

    for case in compile_cases():
        if case.name == name:
            return case
    try:
        path, element, cols = name.split()
        stage, kernel = path.split(".")
        module = import_module(f"flashnumba.stages.{stage}.simt")
        shape = Shape(element, 1 << 20, int(cols), 16, arch)
        known = kernel in module.KERNELS
    except (AttributeError, ImportError, ValueError):
        known = False
    if not known:
        raise ValueError(f"there is no kernel {name!r}; a name is like 'online_softmax.one_pass float16 1024'")
    if hasattr(module, "PLANS"):
        plan = module.PLANS[kernel](shape)
        made, threads, dynamic = plan.kernel, plan.threads, plan.shared
    else:
        made, _, threads = module.make(kernel, shape)
        dynamic = 0
    more = [types.uint64[::1]] * (made.function.__code__.co_argcount - 2)
    return CompileCase(name, made, signature(element, *more), threads, dynamic)


def _record() -> Path:
    return folder() / "resources.json"


def record_resources(names: Sequence[str], arch: str = "90a") -> None:
    """Measure kernels and write ``lessons/resources.json`` anew, for computers without the compiler."""
    write(_record(), compiler(), [_measured(name, arch) for name in names])


def results(bench: str) -> dict[str, Any] | None:
    """What ``flashnumba bench <bench>`` wrote on a GPU, from ``docs/results``; where and when it did is printed.

    Returns:
        the file as it stands, with ``environment`` and ``sizes``; None, and a word on it, where there is none.
    """
    path = folder().parent / "docs" / "results" / f"{bench}.json"
    if not path.is_file():
        print(f"docs/results/{bench}.json is not here; `flashnumba bench {bench}` writes it, on a GPU")
        return None
    held = json.loads(path.read_text())
    print(", ".join(f"{key} {value}" for key, value in held["environment"].items()))
    return held


def show_results(kernels: Sequence[str]) -> Table | None:
    """What ``flashnumba bench softmax`` measured, from ``docs/results/softmax.json``.

    Where and when is printed. The table has the speed of each kernel and of torch as a share of a device copy's, one
    read and one write of the tensor counted for all; a note below it says so.

    Args:
        kernels: names of kernels; the best of a kernel's variants is shown.
    """
    held = results("softmax")
    if held is None:
        return None

    def best(size: dict[str, Any], name: str) -> str:
        found = [m["of_copy"] for m in size["measured"] if m["name"].split()[0] == name and m.get("of_copy")]
        return f"{max(found):.0%}" if found else "-"

    columns = [*kernels, "torch.softmax"]
    rows = [(s["element"], s["rows"], s["cols"], *(best(s, name) for name in columns)) for s in held["sizes"]]
    note = (
        "Share of a device copy's speed; one read + one write counted for all. "
        '"-": does not take this size or was not run. A few percent are noise.'
    )
    return table(("element", "rows", "columns", *columns), rows, note)


def speeds(softmax: Callable[..., Any], kernels: Sequence[str], x: np.ndarray) -> Table:
    """Time each kernel on this computer's GPU, on a copy of ``x`` there, beside a device copy.

    Args:
        softmax: a stage's host function, ``softmax(x, out, kernel=...)``.
        x: ``[rows, columns]``, larger than the L2 cache.
    """
    from flashnumba.bench.timing import copy_bandwidth, time_gpu
    from flashnumba.machine.numba import cuda

    there, out = cuda.to_device(x), cuda.device_array(x.shape, x.dtype)
    copy, rows = copy_bandwidth(x.nbytes), []
    for name in kernels:
        seconds = time_gpu(lambda name=name: softmax(there, out, kernel=name))
        rows.append((name, round(seconds * 1e6), f"{2 * x.nbytes / seconds / copy:.0%}"))
    rows.append((f"copy, {copy / 1e12:.2f} TB/s", round(2 * x.nbytes / copy * 1e6), "100%"))
    return table((f"{x.shape[0]} x {x.shape[1]} {x.dtype.name}", "us", "of copy speed, one read + one write"), rows)


# -- exercises --------------------------------------------------------------------------------------------------------
def check(name: str, ok: bool | Callable[[], bool | None] | None, hint: str = "") -> None:
    """Say whether an exercise is solved. A wrong or missing solution is told, never raised.

    Args:
        ok: the verdict, or a function that finds it; an exception in it counts as not solved.
        hint: what to try while it is not.
    """
    reason = ""
    try:
        solved = bool(ok() if callable(ok) else ok)
    except Exception as error:
        solved, reason = False, f" It stops with {type(error).__name__}: {error}."
    print(f"solved: {name}" if solved else f"not yet: {name}.{reason}{' ' + hint if hint else ''}")


def style() -> None:
    """Type and lines that can be read in a notebook and in the docs; figures made without pyplot are shown too."""
    import matplotlib.pyplot as plt

    plt.switch_backend(plt.get_backend())  # a notebook's backend learns to show figures when it is loaded
    plt.rcParams.update({
        "font.size": 10, "axes.titlesize": 11, "axes.titlelocation": "left", "axes.spines.top": False,
        "axes.spines.right": False, "figure.dpi": 110, "figure.constrained_layout.use": True, "legend.frameon": False,
    })  # fmt: skip


if __name__ == "__main__":
    record_resources([name for name, _ in read(_record())[1]])
