"""What the commands of ``flashnumba bench`` share: options, what they refuse, and the printed table of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from flashnumba.commands import output_folder, refuse, why_no_cuda

if TYPE_CHECKING:
    from flashnumba.bench.attention import Problem
    from flashnumba.bench.runner import Measured, Size

__all__ = [
    "HALVES",
    "RATES",
    "RESULTS",
    "Column",
    "Dims",
    "Elements",
    "Halves",
    "Kernels",
    "Lengths",
    "Masks",
    "Out",
    "Place",
    "Runs",
    "Seconds",
    "Tokens",
    "Wide",
    "Width",
    "conditions",
    "measure_all",
    "names_of",
    "numbers_of",
    "swept",
    "title_of",
]

RESULTS = Path("docs/results")
NAME = 46
"""Characters of a candidate's name in a table."""

Out = Annotated[Path, typer.Option(help="Where the figures go, as JSON.")]
Elements = Annotated[str, typer.Option(help="Of float16, bfloat16 and float32, separated by commas.")]
Kernels = Annotated[str, typer.Option(help="Kernels by name, separated by commas.", show_default="all that fit")]
Runs = Annotated[int, typer.Option(min=1, help="Calls that count; the median is taken.")]
Seconds = Annotated[float, typer.Option(help="After so long no further kernel is begun.")]
Dims = Annotated[str, typer.Option(help="Columns of a head, 1 to 256, separated by commas.")]
Lengths = Annotated[str, typer.Option(help="Tokens of a sequence, separated by commas.")]
Tokens = Annotated[int, typer.Option(min=1, help="In all sequences together; the batch follows.")]
Width = Annotated[int, typer.Option(min=1, help="Columns of all heads together; their number follows.")]
Masks = Annotated[str, typer.Option(help="no, yes, or both with a comma.")]
Halves = Annotated[str, typer.Option(help="Of float16 and bfloat16, separated by commas.")]
Wide = Annotated[bool, typer.Option("--wide", help="Other sizes of the kernels too, as they were chosen from.")]


class Column(NamedTuple):
    """A column of the printed table: a figure's name, and what to multiply it with."""

    head: str
    figure: str
    factor: float = 1
    digits: int = 3


RATES = (Column("ms", "seconds", 1e3), Column("TFLOP/s", "flops_per_second", 1e-12, 1))
HALVES = ("float16", "bfloat16")


class Place(NamedTuple):
    """A size to measure: its title, and ``measure(until=, report=)``."""

    title: str
    measure: Callable[..., Size]


def names_of(option: str, text: str, allowed: Sequence[str], *, none: bool = False) -> list[str]:
    """What is named with commas between; ends the program for a name that is not among the allowed, and for nothing
    named unless ``none`` is right too."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    unknown = [word for word in words if word not in allowed]
    if unknown or not (words or none):
        refuse(f"{option} has {', '.join(unknown) or 'no name in it'}; they must be of {', '.join(allowed)}")
    return list(dict.fromkeys(words))


def numbers_of(option: str, text: str, most: int | None = None) -> list[int]:
    """Positive integers with commas between; ends the program for anything else."""
    numbers = [int(word) if word.strip().isdecimal() else 0 for word in text.split(",")]
    if min(numbers) < 1:
        refuse(f"{option} is {text!r}; it must be positive integers separated by commas")
    if most is not None and max(numbers) > most:
        refuse(f"{option} is {text!r}; {max(numbers)} is more than {most}")
    return numbers


def swept(
    dims: str, lengths: str, causal: str, tokens: int, width: int, elements: str = "float16",
    allowed: Sequence[str] = HALVES,
) -> list[Problem]:  # fmt: skip
    """Every problem of the sizes, masks and elements that a bench was asked for; ends the program for wrong ones."""
    from flashnumba.bench.attention import problems
    from flashnumba.stages.heads import MOST_D

    chosen = names_of("--elements", elements, allowed)
    masks = [mask == "yes" for mask in names_of("--causal", causal, ("no", "yes"))]
    sizes = numbers_of("--dims", dims, MOST_D), numbers_of("--lengths", lengths)
    return [*problems(chosen, *sizes, masks, tokens=tokens, width=width)]


def conditions(name: str, benchmark: Callable[[], dict[str, Any]], out: Path) -> dict[str, Any]:
    """What figures depend on; ends the program where nothing can be measured, or the file cannot be written."""
    if reason := why_no_cuda():
        refuse(f"the {name} bench needs a GPU, but {reason}")
    output_folder("--out", out.parent)
    try:
        found = benchmark()
    except RuntimeError as error:
        refuse(str(error))
    typer.echo(", ".join(f"{key} {_plain(value)}" for key, value in found.items()))
    return found


def _plain(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def measure_all(
    places: Sequence[Place], columns: Sequence[Column], out: Path, found: dict[str, Any], seconds: float,
    last: Callable[[], dict[str, Any]] = dict,
) -> None:  # fmt: skip
    """Measure one size after the other, print a line for each result and write the file anew after each size.

    Each size gets its share of what time is left. A size that cannot be set up is told, and the next one is tried.
    ``last`` measures what goes beside the sizes into the file. The exit code is 1 if a kernel was wrong or raised, or a
    size could not be measured.
    """
    from flashnumba.bench.runner import write

    start, sizes, failed = time.monotonic(), [], 0
    for i, place in enumerate(places):
        until = time.monotonic() + (seconds - (time.monotonic() - start)) / (len(places) - i)
        heads = " ".join(f"{c.head:>{_width(c)}}" for c in columns)
        typer.echo(f"\n{place.title}\n  {'kernel':{NAME}} {heads}  error")
        try:
            sizes.append(place.measure(until=until, report=lambda size, m: typer.echo(_line(m, columns))))
        except Exception as error:
            failed += 1
            typer.echo(f"  not measured: {type(error).__name__}: {' '.join(str(error).split())}")
        write(out, found, sizes)
    if more := last():
        write(out, found, sizes, **more)
    typer.echo(f"\nbest of each size, {time.monotonic() - start:.0f} s in all; figures in {out}")
    for size in sizes:
        if best := size.best():
            typer.echo(_line(best, columns, " ".join(map(str, size.about.values()))))
    if failed or any(m.bad for size in sizes for m in size.measured):
        raise typer.Exit(1)


def _width(column: Column) -> int:
    return max(8, len(column.head))


def _line(m: Measured, columns: Sequence[Column], about: str = "") -> str:
    name = f"{about}: {m.name}" if about else m.name
    if m.seconds is None:
        return f"  {name:{NAME}} {m.note}"
    values = {"seconds": m.seconds, **m.figures}

    def cell(column: Column) -> str:
        value = values.get(column.figure)
        return "-" if value is None else f"{value * column.factor:.{column.digits}f}"

    cells = [f"{cell(column):>{_width(column)}}" for column in columns]
    error = "" if m.error is None or m.budget is None else f"{m.error:.1e} of {m.budget:.1e}"
    return f"  {name:{NAME}} {' '.join(cells)}  {error}{'  ' if error and m.note else ''}{m.note}".rstrip()


def title_of(p: Any) -> str:
    """A problem of attention, as a heading."""
    return f"{p.element}, B {p.batch}, H {p.heads}, N {p.n}, D {p.d}{', causal' if p.causal else ''}"
