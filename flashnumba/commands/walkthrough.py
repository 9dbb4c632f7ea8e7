"""``flashnumba walkthrough``: every reference and every kernel on real data, judged against float64."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from flashnumba.commands import choose_machine, output_folder, refuse
from flashnumba.ladder import STAGES, Case, Result, Rung, Stage, find, measure

__all__ = ["register", "unable"]

# Heading and width of each column, for a wide terminal and for one of 80 columns.
WIDE = {
    "stage": 14, "kernel": 13, "machine": 8, "size": 25,
    "error": 8, "budget": 8, "bytes/el": 18, "time": 8, "verdict": 8,
}  # fmt: skip
NARROW = {"kernel": 13, "machine": 8, "size": 18, "error": 7, "budget": 7, "B/el": 4, "time": 7, "verdict": 8}
RIGHT = ("error", "budget", "bytes/el", "B/el", "time")
STYLES = {"ok": "green", "as meant": "yellow", "skipped": "dim", "FAILED": "bold red"}
LEAST_WIDTH = 120  # where no terminal says how wide a line may be


def register(app: typer.Typer) -> None:
    app.command(name="walkthrough")(walkthrough)


def walkthrough(
    stage: Annotated[str, typer.Option(help="One stage alone, by name.")] = "",
    machine: Annotated[str, typer.Option(help="cuda, emulator, or auto: a GPU if there is one.")] = "auto",
    out: Annotated[Path, typer.Option(help="Folder for the figures, one a stage.")] = Path("walkthrough"),
    full: Annotated[bool, typer.Option("--full", help="Everything bigger; minutes on the emulator.")] = False,
) -> None:
    """Run every stage on real data and compare each kernel with float64.

    Exit code 1 if a kernel leaves its error budget, or if a naive version that is meant to fail does not.
    """
    try:
        stages = (find(stage),) if stage else STAGES
    except ValueError as error:
        refuse(f"--stage: {error}")
    chosen = choose_machine(machine)
    folder = output_folder("--out", out)
    raise typer.Exit(run(stages, chosen, folder, full))


def run(stages: Iterable[Stage], machine: str, folder: Path, full: bool) -> int:
    """Walk, print and draw; returns the exit code."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, LEAST_WIDTH))
    start, results, figures = time.perf_counter(), [], []
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console, transient=True,
    )  # fmt: skip
    with bar:
        task = bar.add_task("real data", total=None)
        plan = {stage: planned(stage, machine, full) for stage in stages}
        bar.update(task, total=sum(len(rows) for rows in plan.values()))
        for stage, rows in plan.items():
            bar.console.print(f"\n[bold]{stage.title}.[/bold] {stage.question}", highlight=False)
            heading(bar.console)
            done = []
            for case, rung, reason in rows:
                bar.update(task, description=f"{stage.name}: {rung.name}")
                done.append(measure(stage, rung, case, machine, reason))
                line(bar.console, done[-1])
                bar.advance(task)
            bar.update(task, description=f"{stage.name}: figure")
            stage.figure(done, folder / f"{stage.name}.png")
            figures.append(folder / f"{stage.name}.png")
            results += done
    summary(console, results, figures, time.perf_counter() - start)
    return 1 if any(result.bad for result in results) else 0


def planned(stage: Stage, machine: str, full: bool) -> list[tuple[Case, Rung, str]]:
    """What a stage's walk consists of: each case with each rung that takes it, and why it cannot run ('' if it can)."""
    cases = stage.cases(machine, full)
    return [(case, rung, unable(rung, machine)) for case in cases for rung in stage.rungs if rung.takes(case)]


def unable(rung: Rung, machine: str) -> str:
    """Why ``machine`` cannot run a kernel; empty if it can. The emulator runs all of them."""
    if rung.tier == "reference" or machine != "cuda":
        return ""
    from flashnumba.machine import gpu
    from flashnumba.machine.instruction import runs_on

    arch = gpu.device_arch()
    return (
        "" if runs_on(arch, rung.arch) else f"needs sm_{rung.arch}, this GPU is sm_{arch}; --machine emulator runs it"
    )


def columns(console: Console) -> dict[str, int]:
    return WIDE if console.width >= sum(WIDE.values()) + len(WIDE) else NARROW


def heading(console: Console) -> None:
    show(console, {name: f"[bold]{name}[/bold]" for name in columns(console)})


def line(console: Console, result: Result) -> None:
    """One line of the table, and a second one where there is something to explain."""
    found, moved, style = result.comparison, result.bytes_per_element, STYLES[result.verdict]
    cells = {
        "stage": result.stage.name,
        "kernel": result.rung.name,
        "machine": result.machine,
        "size": result.case.size,
        "error": f"{found.error:.1e}" if found else "-",
        "budget": f"{found.budget:.1e}" if found else "-",
        "bytes/el": "-" if moved is None else f"{moved:.4g} ({result.rung.traffic})",
        "B/el": "-" if moved is None else f"{moved:.4g}",
        "time": "-" if result.seconds is None else duration(result.seconds),
        "verdict": f"[{style}]{result.verdict}[/]",
    }
    show(console, cells)
    if result.note:
        console.print(Padding(Text(result.note, style), (0, 0, 0, 4)))


def show(console: Console, cells: dict[str, str]) -> None:
    """Print a line by itself: a whole table would only appear once its last row is known."""
    table = Table.grid(padding=(0, 1))
    for name, width in columns(console).items():
        table.add_column(width=width, justify="right" if name in RIGHT else "left", overflow="fold")
    table.add_row(*(cells[name] for name in columns(console)))
    console.print(table)


def duration(seconds: float) -> str:
    """
    >>> duration(0.00042), duration(0.25), duration(12.34)
    ('0.42 ms', '250 ms', '12.3 s')
    """
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds < 0.01 else f"{seconds * 1e3:.0f} ms"


def summary(console: Console, results: list[Result], figures: list[Path], seconds: float) -> None:
    """What the table amounts to."""
    count = {verdict: sum(result.verdict == verdict for result in results) for verdict in STYLES}
    console.print(
        f"\n{count['ok']} within their error budget, {count['as meant']} failed as meant, "
        f"{count['skipped']} not run here, {count['FAILED']} failed; {seconds:.0f} s.",
        highlight=False,
    )
    console.print(
        "error: max |out - float64|, inf where one is finite and the other is not. bytes/el: bytes of global memory "
        "for each element, counted from the algorithm (R reads, W writes; or the tile of the result that is computed "
        "at once). time: one call, compiled before, arrays in to array out.",
        style="dim", highlight=False,
    )  # fmt: skip
    for path in figures:
        console.print(f"figure: {path}", highlight=False, soft_wrap=True)
