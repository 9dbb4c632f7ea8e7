"""``flashnumba resources``: registers, spills, shared memory and occupancy of every kernel, with no GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flashnumba.commands import output_folder, refuse
from flashnumba.machine.compiler import TARGETS, CompileCase, Compiled, compile_kernel, why_not
from flashnumba.machine.gate import budget_of, problems
from flashnumba.machine.occupancy import NOTES, budget
from flashnumba.machine.resources import Resources, compiler, read, resources_of, write

__all__ = ["notes_sums", "register", "resources"]

KNOWN = ", ".join(target.removesuffix("a") for target in TARGETS)
COLUMNS = (
    ("arch", "left", len("sm_100a")), ("regs", "right", 4), ("spill", "right", 5), ("stack", "right", 5),
    ("shared", "right", 6), ("blocks", "right", 6), ("occ.", "right", 4), ("limit", "left", len("shared memory")),
    ("notes", "right", 5),
)  # fmt: skip
"""Heading, justification and least width; the least widths align the tables of all kernels. Only ``limit`` wraps."""

LEGEND = (
    "regs: registers a thread. spill (stores and loads), stack: bytes a thread.\n"
    "shared: KB a block. blocks: how many a multiprocessor holds. occ.: its warps\n"
    "over its warp slots.\n"
    "limit: what admits no more blocks. notes: blocks on the notes' machine, below.\n"
)


def register(app: typer.Typer) -> None:
    app.command(name="resources")(resources)


def resources(
    kernel: Annotated[str, typer.Option(help="Kernels whose name contains this.", show_default="all")] = "",
    arch: Annotated[
        str,
        typer.Option(help=f"Compute capabilities, with commas: any of {KNOWN}.", show_default="all a kernel claims"),
    ] = "",
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if there is any remark.")] = False,
    json: Annotated[Path | None, typer.Option(help="Also write the numbers to this file.", show_default=False)] = None,
) -> None:
    """What each kernel takes of a multiprocessor, on every architecture it claims.
    No GPU and no driver is needed.

    Registers, spills and stack are those of NVIDIA's assembler; blocks follow
    from them and from what a multiprocessor has. The last column asks the same
    of the machine of the notes that this project grew out of, a Hygon DCU.

    A remark below a kernel's rows says what no kernel should do: spill, keep
    arrays in local memory, compute in double precision, not fit, and so on.
    Remarks do not change the exit code unless --check is given.

    docs/results/resources.json is written with --json. Lines that the file
    has of other kernels and architectures stay, so that after a change to one
    kernel --kernel is enough; lines of kernels that are no more go.
    """
    from flashnumba.ladder import compile_cases

    if why_not():
        refuse(why_not())
    known = tuple(compile_cases())
    cases = [case for case in known if kernel in case.name]
    if not cases:
        stems = dict.fromkeys(case.name.split()[0] for case in known)
        refuse("\n    ".join([f"--kernel is {kernel!r}, which is in no kernel's name; they begin with", *stems]))
    wanted = _architectures(arch)
    plan = [(case, [target for target in case.architectures if target in wanted]) for case in cases]
    plan = [(case, targets) for case, targets in plan if targets]
    if not plan:
        refuse(f"--arch is {arch!r}; these kernels need sm_{' or sm_'.join(sorted({c.kernel.arch for c in cases}))}")

    versions, kept = _held(json)

    console, count = Console(), 0
    bar = Progress(
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console, transient=True,
    )  # fmt: skip
    console.print(LEGEND, highlight=False)
    with bar:
        task = bar.add_task("compile", total=sum(len(targets) for _, targets in plan))
        for case, targets in plan:
            rows, remarks = [], []
            for target in targets:
                bar.update(task, description=f"sm_{target}")
                rows.append(compile_kernel(case.kernel, case.signature, target))
                remarks += [f"{case.name}, sm_{target}: {said}" for said in problems(case, target)]
                bar.advance(task)
            _show(console, case, rows, remarks)
            count += len(remarks)
            kept |= {(case.name, made.arch): resources_of(case, made) for made in rows}
    console.print(notes_sums(), highlight=False, soft_wrap=True)
    if json is not None:
        claimed = [(case.name, target) for case in known for target in case.architectures]
        write(json, versions, [kept[one] for one in claimed if one in kept])
        missing = sum(one not in kept for one in claimed)
        console.print(f"{json}: {len(claimed) - missing} lines" + (f"; {missing} are missing" if missing else ""))
    if count:
        console.print(f"{count} remark{'s' if count > 1 else ''} above.", style="yellow", highlight=False)
    if count and check:
        raise typer.Exit(1)


def _held(path: Path | None) -> tuple[Mapping[str, str], dict[tuple[str, str], Resources]]:
    """The compiler's versions, and what a record has that was made with them; ends the program if it is no record."""
    if path is None:
        return {}, {}
    output_folder("--json", path.parent)
    if not path.exists():
        return compiler(), {}
    try:
        versions, kept = read(path)
    except (OSError, ValueError) as error:
        refuse(f"--json is '{path}', which cannot be added to ({error}); name another file")
    return compiler(), kept if versions == compiler() else {}


def notes_sums() -> str:
    """The sums of the notes' section 5, computed like every row."""
    one = budget(NOTES, threads=256, registers=256)
    kb, all_kb = 4 * one.takes["registers"] // 1024, 4 * one.holds["registers"] // 1024
    lds = NOTES.shared // 1024
    return (
        f"{NOTES.name}: 256 threads of 256 registers take {kb} KB, {all_kb} / {kb} = {one.blocks} blocks; "
        f"{lds} / {one.blocks} = {NOTES.shared_within(one.blocks) // 1024} KB of LDS a block"
    )


def _architectures(text: str) -> set[str]:
    """The targets that ``75,80,90`` names; an architecture is compiled with its own features, as a launch does."""
    names = [name.strip().removesuffix("a") for name in text.split(",") if name.strip()]
    known = {target.removesuffix("a"): target for target in TARGETS}
    for name in names:
        if name not in known:
            refuse(f"--arch is {text!r}; {name!r} is not one of {', '.join(known)}")
    return {known[name] for name in names} or set(TARGETS)


def _show(console: Console, case: CompileCase, rows: Sequence[Compiled], remarks: Sequence[str]) -> None:
    """A kernel's name on a line of its own, its table, and its remarks."""
    console.print(case.name, style="bold", markup=False, highlight=False, soft_wrap=True)
    console.print(f"{case.threads} threads a block", style="dim", highlight=False)
    table = Table(box=None, pad_edge=False)
    for heading, justify, width in COLUMNS:
        table.add_column(heading, justify=justify, min_width=width, no_wrap=heading != "limit", overflow="fold")
    for made in rows:
        table.add_row(*_cells(case, made))
    console.print(table)
    for line in remarks:
        console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)
    console.print()


def _cells(case: CompileCase, made: Compiled) -> Sequence[str]:
    shared = made.shared + case.shared
    here = budget_of(case, made)
    notes = budget(NOTES, threads=case.threads, registers=made.registers, shared=shared)
    spills = made.spill_stores + made.spill_loads
    return (
        f"sm_{made.arch}",
        str(made.registers),
        f"[bold red]{spills}[/]" if spills else "0",
        f"[bold red]{made.stack}[/]" if made.stack else "0",
        f"{shared / 1024:.4g}",
        f"[bold red]{here.blocks}[/]" if not here.blocks else str(here.blocks),
        f"{here.occupancy:.0%}",
        ", ".join(here.limited_by),
        str(notes.blocks),
    )
