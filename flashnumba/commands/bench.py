"""``flashnumba bench``: times on a GPU beside others', and the emulator's beside numba's simulator."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashnumba.commands import output_folder, refuse, why_no_cuda

if TYPE_CHECKING:
    from flashnumba.bench.softmax import Measured, Size

__all__ = ["register"]

bench = typer.Typer(no_args_is_help=True, help="Time kernels on a GPU, beside what others offer.")


def register(app: typer.Typer) -> None:
    app.add_typer(bench, name="bench")


@bench.command()
def softmax(
    out: Annotated[Path, typer.Option(help="Where the figures go, as JSON.")] = Path("docs/results/softmax.json"),
    megabytes: Annotated[int, typer.Option(min=1, help="Size of each tensor.")] = 1024,
    cols: Annotated[str, typer.Option(help="Elements a row, separated by commas.")] = "128,1024,4096,32768,262144",
    elements: Annotated[str, typer.Option(help="float16, bfloat16, float32, separated by commas.")] = "float16,float32",
    runs: Annotated[int, typer.Option(min=1, help="Calls that count; the median is taken.")] = 20,
    seconds: Annotated[float, typer.Option(help="After so long no further variant is begun.")] = 220.0,
    only: Annotated[str, typer.Option(help="Kernels alone whose name has this in it.")] = "",
    wide: Annotated[
        bool, typer.Option("--wide", help="Other sizes of the kernels too, as they were chosen from.")
    ] = False,
) -> None:
    """Every softmax kernel beside torch.softmax and a device copy."""
    from flashnumba.bench import softmax as benchmark
    from flashnumba.tiles.elements import ITEMSIZE

    if reason := why_no_cuda():
        refuse(f"the softmax bench needs a GPU, but {reason}")
    unknown = [e for e in elements.split(",") if e not in ITEMSIZE]
    if unknown:
        refuse(f"--elements has {', '.join(unknown)}; they must be of {', '.join(ITEMSIZE)}")
    try:
        lengths = [int(c) for c in cols.split(",")]
    except ValueError:
        refuse(f"--cols is {cols!r}; it must be integers separated by commas")
    output_folder("--out", out.parent)
    try:
        found = benchmark.environment()
    except RuntimeError as error:
        refuse(str(error))
    typer.echo(", ".join(f"{name} {value}" for name, value in found.items()))
    start, sizes = time.monotonic(), []
    places = [(e, c) for c in lengths for e in elements.split(",")]
    for i, (element, length) in enumerate(places):
        # Each size gets its share of what time is left.
        until = time.monotonic() + (seconds - (time.monotonic() - start)) / (len(places) - i)
        typer.echo(
            f"\n{element}, rows of {length}\n  {'kernel':46} {'ms':>8} {'TB/s':>6} {'of copy':>8} {'x torch':>8}  error"
        )
        sizes.append(
            benchmark.measure(
                element, length, megabytes << 20, wide=wide, runs=runs, until=until, report=_line, only=only
            )
        )
        text = json.dumps({"environment": found, "sizes": [s.record() for s in sizes]}, indent=1)
        out.write_text(text + "\n", encoding="utf-8")
    typer.echo(f"\nbest of each size, {time.monotonic() - start:.0f} s in all; figures in {out}")
    for line in benchmark.summary(sizes):
        typer.echo(line)
    if any(m.note.startswith("WRONG") for s in sizes for m in s.measured):
        raise typer.Exit(1)


def _line(size: Size, m: Measured) -> None:
    if m.seconds is None or m.bytes_per_second is None:
        typer.echo(f"  {m.name:46} {m.note}")
        return

    def ratio(x: float | None) -> str:
        return "       -" if x is None else f"{x:8.3f}"

    error = "" if m.error is None else f"{m.error:.1e} of {m.budget:.1e}"
    typer.echo(
        f"  {m.name:46} {m.seconds * 1e3:8.3f} {m.bytes_per_second / 1e12:6.2f} "
        f"{ratio(m.of_copy)} {ratio(m.of_torch)}  {error}"
    )


@bench.command()
def simulator() -> None:
    """The emulator beside numba's own CUDA simulator: the same kernels, one run each."""
    from flashnumba.bench.simulator import KERNELS, race

    for raced in KERNELS:
        typer.echo(str(race(raced)))
