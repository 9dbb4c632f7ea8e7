"""What each kernel takes of a multiprocessor, from ``docs/results/resources.json``, so that no build compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from flashnumba.machine.compiler import TARGETS
from flashnumba.machine.resources import Resources, read
from generators.tables import markdown

__all__ = ["page"]

HEADS = (
    "kernel", "arch", "registers", "spill", "stack", "local", "f64", "shared, KB", "blocks", "occupancy", "limit",
)  # fmt: skip
MISSING = (
    "No file `docs/results/resources.json` is here. `flashnumba resources --json docs/results/resources.json` writes "
    "it: it compiles every kernel for every architecture, which takes minutes and needs the compiler, but no GPU.\n"
)


def page(folder: Path) -> str:
    """A table a stage: registers and occupancy by architecture; below, folded away, all numbers."""
    path = folder / "resources.json"
    if not path.is_file():
        return MISSING
    versions, found = read(path)
    made_by = ", ".join(f"{name} {value}" for name, value in versions.items())
    text = f"Compiled with {made_by}: {len({name for name, _ in found})} kernels, {len(found)} times.\n\n"
    text += told("spill", (row for row in found.values() if row.spills), lambda row: f"{row.spills} bytes")
    text += told("keep arrays in local memory", (row for row in found.values() if row.local_memory),
                 lambda row: f"{row.local_memory} bytes")  # fmt: skip
    text += told("compute in double precision", (row for row in found.values() if row.f64), lambda row: "")
    for stage, rows in groupby(found.values(), key=lambda row: row.name.split(".")[0]):
        text += f"\n## {stage}\n\n{stage_section(list(rows))}"
    return text


def told(what: str, rows: Iterable[Resources], how_much: Callable[[Resources], str]) -> str:
    """Which kernels do what none should."""
    named = [f"`{row.name}` on sm_{row.arch} {how_much(row)}".rstrip() for row in rows]
    return f"- {what}: {'; '.join(named) or 'none'}\n"


def stage_section(rows: Sequence[Resources]) -> str:
    kernels: dict[str, dict[str, Resources]] = {}
    for row in rows:
        kernels.setdefault(row.name, {})[row.arch] = row
    archs = [arch for arch in TARGETS if any(arch in by_arch for by_arch in kernels.values())]
    text = markdown(
        ("kernel", "threads", *(f"sm_{arch}" for arch in archs)),
        [(short(name), threads_of(by), *(cell(by.get(arch)) for arch in archs)) for name, by in kernels.items()],
    )
    heads = (
        "kernel",
        "arch",
        "registers",
        "spill",
        "stack",
        "local",
        "f64",
        "shared, KB",
        "blocks",
        "occupancy",
        "limit",
    )
    return text + f"\n<details><summary>all numbers</summary>\n\n{markdown(heads, map(line, rows))}\n</details>\n"


def threads_of(by_arch: Mapping[str, Resources]) -> int:
    return next(iter(by_arch.values())).threads


def short(name: str) -> str:
    """A kernel's name without its stage, which the heading says."""
    return name.split(".", 1)[-1]


def cell(row: Resources | None) -> str:
    return "-" if row is None else f"{row.registers}, {row.budget.occupancy:.0%}"


def line(row: Resources) -> tuple[object, ...]:
    here = row.budget
    return (
        short(row.name), f"sm_{row.arch}", row.registers, row.spills, row.stack, row.local_memory,
        "yes" if row.f64 else "no", f"{row.shared / 1024:.4g}", here.blocks, f"{here.occupancy:.0%}",
        ", ".join(here.limited_by),
    )  # fmt: skip
