"""``flashnumba lessons``: which lessons there are, where they lie and how to open them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

import flashnumba
from flashnumba.ladder import STAGES
from flashnumba.machine import install

__all__ = ["folder", "register"]


def register(app: typer.Typer) -> None:
    app.command(name="lessons")(lessons)


def folder() -> Path:
    """Where the notebooks lie in a source checkout: ``lessons/`` beside the package. It need not exist."""
    return Path(flashnumba.__file__).resolve().parents[1] / "lessons"


def lessons() -> None:
    """List the lessons, where they are and how to open them."""
    console, place = Console(), folder()
    if not place.is_dir():
        console.print("The lessons are notebooks in the folder lessons/ of flashnumba's source; this is an installed")
        console.print("package without it. Get the source, then, in its folder:")
    for stage in STAGES:
        notebook = place / f"{stage.lesson}.ipynb"
        where = str(notebook) if notebook.is_file() else f"lessons/{notebook.name} (not in this folder)"
        console.print(f"[bold]{stage.lesson}[/bold]  {stage.question}", highlight=False, soft_wrap=True)
        console.print(f"    {escape(where)}", highlight=False, soft_wrap=True)
    console.print("\nTo open them:", highlight=False)
    if find_spec("jupyterlab") is None:
        what = install.extra("lessons", place.parent if place.is_dir() else Path())
        console.print(f"    {escape(what)}", highlight=False, soft_wrap=True)
    target = str(place) if place.is_dir() else "lessons"
    console.print(f"    {install.python()} -m jupyterlab {escape(target)}", highlight=False, soft_wrap=True)
