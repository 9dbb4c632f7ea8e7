"""``flashnumba bench``: times on a GPU beside others', and the emulator's beside numba's simulator.

A command is a function here, in one of three modules by what it measures; :mod:`flashnumba.commands.bench.table` has
what they share.
"""

from __future__ import annotations

import typer

from flashnumba.commands.bench.beyond import backward, counters, fp8, mla, sparsity
from flashnumba.commands.bench.forward import attention, balance, chain, decode, staged
from flashnumba.commands.bench.products import gemm, simulator, softmax

__all__ = ["register"]

COMMANDS = (
    softmax, gemm, attention, chain, staged, balance, backward, fp8, sparsity, mla, decode, counters, simulator,
)  # fmt: skip


def register(app: typer.Typer) -> None:
    bench = typer.Typer(no_args_is_help=True, help="Time kernels on a GPU, beside what others offer.")
    for command in COMMANDS:
        bench.command()(command)
    app.add_typer(bench, name="bench")
