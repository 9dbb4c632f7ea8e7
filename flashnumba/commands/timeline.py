"""``flashnumba timeline``: who loads, waits and computes when, by warp and slot, on a GPU or on the emulator."""

from __future__ import annotations

import io
import json as codec
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flashnumba.commands import choose_machine, output_folder, refuse

if TYPE_CHECKING:
    from flashnumba.machine.timeline.costs import Costs
    from flashnumba.machine.timeline.record import Record
    from flashnumba.machine.timeline.summary import Summary

__all__ = ["register", "timeline"]

LEAST_WIDTH = 100  # where no terminal says how wide a line may be


def register(app: typer.Typer) -> None:
    app.command(name="timeline")(timeline)


def timeline(
    kernel: Annotated[str, typer.Option(help="A traced kernel, by name.")] = "flash_forward.mma",
    machine: Annotated[str, typer.Option(help="cuda, emulator, or auto: a GPU if there is one.")] = "auto",
    m: Annotated[int, typer.Option(min=1, help="Rows of Q.")] = 128,
    n: Annotated[int, typer.Option(min=1, help="Keys.")] = 768,
    d: Annotated[int, typer.Option(min=1, max=256, help="Columns of a head.")] = 64,
    heads: Annotated[int, typer.Option(min=1, help="Heads.")] = 1,
    element: Annotated[str, typer.Option(help="float16 or bfloat16.")] = "float16",
    causal: Annotated[bool, typer.Option("--causal", help="Keys after a query are hidden.")] = False,
    out: Annotated[Path, typer.Option(help="The picture; the suffix says of what kind.")] = Path("timeline.png"),
    json: Annotated[
        Path | None, typer.Option(help="Also a Chrome trace, for ui.perfetto.dev and --beside.", show_default=False)
    ] = None,
    load: Annotated[
        Path | None, typer.Option(help="Draw this trace, written by --json; run nothing.", show_default=False)
    ] = None,
    beside: Annotated[
        Path | None, typer.Option(help="Draw this trace, written by --json, to the right.", show_default=False)
    ] = None,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks to draw: those that shared a multiprocessor.")] = 3,
    window: Annotated[str, typer.Option(help="Cycles to draw, e.g. 2000:8000.", show_default="all")] = "",
    arch: Annotated[str, typer.Option(help="The emulator's model: 80 or 90.")] = "90",
    multiprocessors: Annotated[int, typer.Option(min=0, help="The model's; 0: as many as the GPU has.")] = 0,
    resident: Annotated[int, typer.Option(min=1, help="Blocks that one of the model's holds at once.")] = 1,
    cost: Annotated[
        list[str] | None, typer.Option(help="Change the model, e.g. copy_latency=900; repeat it.", show_default=False)
    ] = None,
) -> None:
    """Draw who loads, waits and computes when, by warp and by slot.

    On a GPU the kernel reads its multiprocessor's clock; on the emulator a
    stated cost model gives times to what each warp did. The emulator's picture
    shows what can overlap with what; its times are no prediction.

    The picture and the trace are written whole or not at all.
    """
    from flashnumba.machine.timeline.picture import draw, neighbours
    from flashnumba.machine.timeline.record import to_json
    from flashnumba.machine.timeline.summary import summarise

    records = [] if beside is None else [_read("--beside", beside)]
    _check_picture(out)
    span = _window(window)
    for option, path in (("--out", out), ("--json", json)):
        if path is not None:
            output_folder(option, path.parent)
            _check_file(option, path)
    if json is not None and json.resolve() == out.resolve():
        refuse(f"--out and --json are both '{out}'; name a file for each")
    if load is not None:
        first = _read("--load", load)
    else:
        first = _run(
            kernel, choose_machine(machine), (m, n, d, heads, element, causal), _model(arch, cost or []),
            multiprocessors or None, resident,
        )  # fmt: skip
    records = [first, *records]
    shown = [record.of(neighbours(record, blocks)) for record in records]
    try:
        figure = draw(shown, span)
    except ValueError as error:
        refuse(str(error))
    picture = io.BytesIO()
    try:
        figure.savefig(picture, format=out.suffix[1:], dpi=150)
    except RuntimeError as error:  # pgf needs TeX
        refuse(f"--out is '{out}', which cannot be drawn here: {error}")
    trace = None if json is None else _encoded(to_json(first))
    _tell(shown, [summarise(record) for record in shown])
    _write(out, picture.getvalue())
    typer.echo(f"picture: {out}")
    if json is not None and trace is not None:
        _write(json, trace)
        typer.echo(f"trace: {json}")


def _run(
    kernel: str, machine: str, size: tuple[int, int, int, int, str, bool], costs: Costs, multiprocessors: int | None,
    resident: int,
) -> Record:  # fmt: skip
    import ml_dtypes

    from flashnumba.ladder import traced
    from flashnumba.stages.traced import record

    known = traced()
    if kernel not in known:
        refuse(f"--kernel is {kernel!r}; the traced kernels are {', '.join(known)}")
    m, n, d, heads, element, causal = size
    dtypes = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
    if element not in dtypes:
        refuse(f"--element is {element!r}; it must be {' or '.join(dtypes)}")
    rng = np.random.default_rng(0)
    try:
        q, k, v = (rng.standard_normal((1, heads, rows, d)).astype(dtypes[element]) for rows in (m, n, n))
        return record(
            kernel, known[kernel], q, k, v, causal=causal, machine=machine, costs=costs,
            multiprocessors=multiprocessors, resident=resident,
        )  # fmt: skip
    except (ValueError, RuntimeError) as error:
        refuse(f"{kernel} was not traced: {error}")
    except MemoryError as error:
        refuse(f"{kernel} was not traced, as there is too little memory; fewer rows, keys or heads: {error}")


def _model(arch: str, changes: Sequence[str]) -> Costs:
    """The costs of an architecture, with the changes that ``name=value`` make."""
    from flashnumba.machine.timeline.costs import costs_of

    try:
        costs = costs_of(arch)
    except ValueError as error:
        refuse(f"--{error}")
    names = [name for name in vars(costs) if name not in ("arch", "multiprocessors")]
    for change in changes:
        name, _, value = change.partition("=")
        try:
            if name not in names:
                raise ValueError
            costs = replace(costs, **{name: float(value)})
        except ValueError:
            refuse(f"--cost is {change!r}; it must be a positive number for one of {', '.join(names)}")
    return costs


def _read(option: str, path: Path) -> Record:
    from flashnumba.machine.timeline.record import from_json

    try:
        return from_json(codec.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        refuse(f"{option} is '{path}', which cannot be read ({error.strerror})")
    except (ValueError, RecursionError) as error:
        refuse(f"{option} is '{path}', which cannot be used: {error}")


def _window(text: str) -> tuple[float, float] | None:
    if not text:
        return None
    lo, _, hi = text.partition(":")
    if not (lo.strip().isdecimal() and hi.strip().isdecimal() and float(lo) < float(hi) < inf):
        refuse(f"--window is {text!r}; it must be two cycles, the smaller first, as in 2000:8000")
    return float(lo), float(hi)


def _check_picture(path: Path) -> None:
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        refuse(f"--out is '{path}'; its suffix must be one of {', '.join(sorted(kinds))}")


def _check_file(option: str, path: Path) -> None:
    """That the path can be a file's."""
    try:
        path.lstat()
        folder = path.is_dir()
    except FileNotFoundError:
        return
    except OSError as error:
        refuse(f"{option} is '{path}', which cannot be written ({error.strerror})")
    if folder:
        refuse(f"{option} is '{path}', which is a folder; name a file in it")


def _encoded(trace: object) -> bytes:
    return codec.dumps(trace, separators=(",", ":")).encode()


def _write(path: Path, data: bytes) -> None:
    """The whole file, or the one that was there before."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _tell(records: Sequence[Record], summaries: Sequence[Summary]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, LEAST_WIDTH))
    table = Table(box=None, pad_edge=False)
    table.add_column("share of the warps' time")
    for record in records:
        table.add_column(Text(f"{record.kernel}, {record.machine}"), justify="right", overflow="fold")
    for kind in summaries[0].shares:
        table.add_row(kind, *(f"{s.shares[kind]:.1%}" for s in summaries))
    table.add_row("cycles", *(f"{s.cycles:.0f}" for s in summaries))
    table.add_row("copying under computation", *("-" if s.hidden is None else f"{s.hidden:.1%}" for s in summaries))
    console.print(table, highlight=False)
    for record in records:
        if record.lost:
            console.print(Text(f"{record.lost} marks of {record.kernel} found no room", style="yellow"))
