"""The command line. Each command is a module of :mod:`flashnumba.commands` with ``register(app)``."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import typer

__all__ = ["app", "main"]

COMMANDS = ("walkthrough", "doctor", "resources", "bench", "lessons")

app = typer.Typer(
    name="flashnumba",
    help="Attention on a GPU, from softmax to FlashAttention, in Python; every kernel also runs without a GPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

for name in COMMANDS:
    if find_spec(f"flashnumba.commands.{name}"):
        import_module(f"flashnumba.commands.{name}").register(app)


def main() -> None:
    """The entry point ``flashnumba``."""
    app()
