"""``flashnumba resources``: registers, spills, shared memory and occupancy of every kernel, with no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flashnumba.commands import refuse
from flashnumba.machine.compiler import TARGETS, CompileCase, Compiled, architectures, compile_kernel, why_not
from flashnumba.machine.gate import budget_of, problems
from flashnumba.machine.occupancy import NOTES, budget

__all__ = ["notes_sums", "register", "resources"]

LEAST_WIDTH = 120  # where no terminal says how wide a line may be


def register(app: typer.Typer) -> None:
    app.command(name="resources")(resources)


def resources(
    kernel: Annotated[str, typer.Option(help="Kernels whose name contains this.")] = "",
    arch: Annotated[str, typer.Option(help="Compute capabilities, e.g. 75,80,90; all that a kernel claims.")] = "",
) -> None:
    """What each kernel takes of a multiprocessor, on every architecture it claims. No GPU and no driver is needed.

    Registers, spills and stack are those of NVIDIA's assembler; blocks follow from them and from what a multiprocessor
    has. The last column asks the same of the machine of the technical notes.
    """
    from flashnumba.ladder import compile_cases

    if why_not():
        refuse(why_not())
    cases = [case for case in compile_cases() if kernel in case.name]
    if not cases:
        refuse(f"--kernel is {kernel!r}; the kernels are {', '.join(sorted({case.name for case in compile_cases()}))}")
    wanted = _architectures(arch)
    plan = [(case, target) for case in cases for target in architectures(case.kernel) if target in wanted]
    if not plan:
        refuse(f"--arch is {arch!r}; these kernels need sm_{' or sm_'.join(sorted({c.kernel.arch for c in cases}))}")

    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, LEAST_WIDTH))
    table, remarks = _table(), []
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console, transient=True,
    )  # fmt: skip
    with bar:
        task = bar.add_task("compile", total=len(plan))
        before = None
        for case, target in plan:
            bar.update(task, description=f"{case.name} for sm_{target}")
            if before not in (None, case):
                table.add_section()
            table.add_row(*_cells(case, compile_kernel(case.kernel, case.signature, target), first=case is not before))
            remarks += [f"{case.name}, sm_{target}: {said}" for said in problems(case, target)]
            before = case
            bar.advance(task)
    console.print(table)
    for line in remarks:
        console.print(line, style="yellow", highlight=False, soft_wrap=True)
    console.print(notes_sums(), highlight=False, soft_wrap=True)


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


def _table() -> Table:
    table = Table(title="Resources of each kernel, as compiled", title_justify="left", box=None, pad_edge=False)
    for name, justify in (
        ("kernel", "left"), ("arch", "left"), ("threads", "right"), ("registers", "right"), ("spills B", "right"),
        ("stack B", "right"), ("shared KB", "right"), ("blocks", "right"), ("occupancy", "right"), ("limit", "left"),
        ("notes' blocks", "right"),
    ):  # fmt: skip
        table.add_column(name, justify=justify, no_wrap=name != "kernel", overflow="fold")
    return table


def _cells(case: CompileCase, made: Compiled, first: bool) -> Sequence[str]:
    shared = made.shared + case.shared
    here = budget_of(case, made)
    notes = budget(NOTES, threads=case.threads, registers=made.registers, shared=shared)
    spills = made.spill_stores + made.spill_loads
    return (
        case.name if first else "",
        f"sm_{made.arch}",
        str(case.threads),
        str(made.registers),
        f"[bold red]{spills}[/]" if spills else "0",
        f"[bold red]{made.stack}[/]" if made.stack else "0",
        f"{shared / 1024:.4g}",
        f"[bold red]{here.blocks}[/]" if not here.blocks else str(here.blocks),
        f"{here.occupancy:.0%}",
        ", ".join(here.limited_by),
        str(notes.blocks),
    )
