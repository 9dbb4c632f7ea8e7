"""What the lessons in ``lessons/`` share: show real source, tabulate, time, check an exercise.

Nothing here computes attention. Objects that a lesson shows render in a notebook and print as plain text.
"""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np

from flashnumba.commands.lessons import folder
from flashnumba.machine import gpu
from flashnumba.machine.function import DeviceFunction, Kernel, named_values

__all__ = [
    "Resources", "Source", "Table", "check", "machine", "record_resources", "resources", "results", "show_results",
    "show_source", "speeds", "style", "table", "timed",
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
        part: show a device function that ``what`` calls, by its name there.
        first, last: words in the first and the last line to show; all lines by default.

    Raises:
        ValueError: ``what`` calls nothing of that name, or no line has these words.
    """
    if part:
        found = {name: value for name, value in named_values(_plain(what)) if isinstance(value, DeviceFunction)}
        if part not in found:
            raise ValueError(f"{_plain(what).__name__} calls no device function {part!r}; it calls {', '.join(found)}")
        what = found[part]
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
    """Rows under a header, all as text."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        lines = [self.header, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.header))]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def line(cells: Sequence[str], tag: str) -> str:
            style = "text-align: left; padding: 0.15em 0.9em 0.15em 0"
            return "<tr>" + "".join(f'<{tag} style="{style}">{escape(c)}</{tag}>' for c in cells) + "</tr>"

        body = "".join(line(row, "td") for row in self.rows)
        return f"<table><thead>{line(self.header, 'th')}</thead><tbody>{body}</tbody></table>"


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """A table; floats are given four significant digits."""
    shown = tuple(tuple(f"{c:.4g}" if isinstance(c, float) else str(c) for c in row) for row in rows)
    return Table(tuple(header), shown)


# -- measuring --------------------------------------------------------------------------------------------------------
@contextmanager
def timed(what: str) -> Iterator[None]:
    """Say how long the block took, by the wall clock."""
    start = time.perf_counter()
    yield
    print(f"{what}: {time.perf_counter() - start:.2f} s")


@dataclass(frozen=True)
class Resources:
    """What the compiler gave a kernel on one architecture.

    Attributes:
        threads: a block.
        registers: 32-bit registers a thread.
        shared: bytes of shared memory a block.
        spills: bytes a thread moved to memory for want of registers.
    """

    arch: str
    threads: int
    registers: int
    shared: int
    spills: int


def resources(name: str, *, arch: str = "90a") -> tuple[Resources, bool]:
    """Resources of a kernel, by its name in ``flashnumba resources``; and whether they were measured just now.

    They are measured where the compiler is installed, and read from ``lessons/resources.json`` elsewhere.

    Raises:
        ValueError: there is no such kernel, or no compiler and no record of it.
    """
    from flashnumba.machine.compiler import why_not

    if not why_not():
        return _measured(name, arch), True
    recorded = json.loads(_record().read_text()) if _record().is_file() else {}
    key = f"{name}, sm_{arch}"
    if key not in recorded:
        raise ValueError(f"no record of {key!r} in {_record().name}, and no compiler here: {why_not()}")
    return Resources(**recorded[key]), False


def _measured(name: str, arch: str) -> Resources:
    from flashnumba.ladder import compile_cases
    from flashnumba.machine.compiler import compile_kernel

    case = next((case for case in compile_cases() if case.name == name), None)
    if case is None:
        raise ValueError(f"there is no kernel {name!r}; `flashnumba resources` lists them")
    made = compile_kernel(case.kernel, case.signature, arch)
    spills = made.spill_stores + made.spill_loads
    return Resources(arch, case.threads, made.registers, made.shared + case.shared, spills)


def _record() -> Path:
    return folder() / "resources.json"


def record_resources(names: Sequence[str], arch: str = "90a") -> None:
    """Measure kernels and write ``lessons/resources.json`` anew, for computers without the compiler."""
    found = {f"{name}, sm_{arch}": asdict(_measured(name, arch)) for name in names}
    _record().write_text(json.dumps(found, indent=2) + "\n")


def results(stage: str) -> dict[str, Any] | None:
    """What ``flashnumba bench`` wrote about a stage on a GPU, from ``docs/results``; None if it is not there."""
    path = folder().parent / "docs" / "results" / f"{stage}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def show_results(stage: str) -> None:
    """Print what was measured and where, then show each table of the result file of a stage."""
    held = results(stage)
    if held is None:
        print(f"docs/results/{stage}.json is not here: `flashnumba bench` writes it, on a GPU")
        return
    tables: list[Table] = []

    def walk(part: dict[str, Any], before: str) -> None:
        for key, value in part.items():
            name = f"{before}{key.replace('_', ' ')}"
            if isinstance(value, dict):
                walk(value, f"{name} ")
            elif isinstance(value, list) and value and isinstance(value[0], dict):
                heads = list(dict.fromkeys(head for row in value for head in row))
                words = [head.replace("_", " ") for head in heads]
                tables.append(table(words, [[row.get(head, "-") for head in heads] for row in value]))
            else:
                print(f"{name}: {value}")

    walk(held, "")
    _display(tables)


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


def _display(shown: Sequence[Any]) -> None:
    """Show in a notebook, print elsewhere."""
    try:
        from IPython.display import display
    except ImportError:
        display = print
    for one in shown:
        display(one)


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
    record_resources([key.rsplit(", ", 1)[0] for key in json.loads(_record().read_text())])
