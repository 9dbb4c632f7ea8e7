"""The command line. Each command is a module of :mod:`flashnumba.commands` with ``register(app)``."""

from __future__ import annotations

import typer

from flashnumba.commands import bench, doctor, lessons, resources, walkthrough

__all__ = ["app", "main"]

app = typer.Typer(
    name="flashnumba",
    help="Attention on a GPU, from softmax to FlashAttention, in Python; every kernel also runs without a GPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

for command in (walkthrough, doctor, resources, bench, lessons):
    command.register(app)


def main() -> None:
    """The entry point ``flashnumba``."""
    app()
