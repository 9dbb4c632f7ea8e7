"""The command line. Each command is a module of :mod:`flashnumba.commands` with ``register(app)``."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer

from flashnumba.commands import bench, doctor, lessons, resources, timeline, walkthrough

__all__ = ["app", "main"]

app = typer.Typer(
    name="flashnumba",
    help="Attention on a GPU, from softmax to FlashAttention, in Python; every kernel also runs without a GPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def version(wanted: bool) -> None:
    """Print the version of the installed package and end the program, if that is wanted."""
    if not wanted:
        return
    try:
        typer.echo(f"flashnumba {metadata.version('flashnumba')}")
    except metadata.PackageNotFoundError:
        typer.echo("flashnumba, which runs from its source and is not installed")
    raise typer.Exit


@app.callback()
def options(
    show: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """What stands before a command's name."""


for command in (walkthrough, doctor, resources, timeline, bench, lessons):
    command.register(app)


def main() -> None:
    """The entry point ``flashnumba``."""
    app()
