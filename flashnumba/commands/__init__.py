"""The commands of ``flashnumba``, a module each; each has ``register(app)``. What they share is here."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import NoReturn

import typer

__all__ = ["MACHINES", "choose_machine", "output_folder", "refuse", "why_no_cuda"]

MACHINES = ("auto", "cuda", "emulator")


def refuse(message: str) -> NoReturn:
    """End the program because of bad input: a message on standard error, exit code 2."""
    typer.echo(f"flashnumba: {message}", err=True)
    raise typer.Exit(2)


def why_no_cuda() -> str:
    """Why kernels cannot run on a GPU here, in words; empty if they can."""
    from flashnumba.machine import compiler, gpu

    # A GPU without the compiler is common: the base install brings neither NVVM nor nvJitLink.
    return gpu.unavailable() or compiler.why_not()


def choose_machine(name: str) -> str:
    """``cuda`` or ``emulator`` for a ``--machine``; ends the program if there is no such machine here."""
    if name not in MACHINES:
        refuse(f"--machine is {name!r}; it must be {', '.join(MACHINES[:-1])} or {MACHINES[-1]}")
    if name == "emulator":
        return name
    reason = why_no_cuda()
    if name == "cuda" and reason:
        refuse(f"--machine is 'cuda', but {reason}; emulator and auto run here")
    return "emulator" if reason else "cuda"


def output_folder(option: str, folder: Path) -> Path:
    """Make ``folder`` and prove that it takes files; ends the program if it does not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, probe = tempfile.mkstemp(dir=folder, prefix=".flashnumba-")
        os.close(handle)
        Path(probe).unlink()
    except OSError as error:
        refuse(f"{option} is '{folder}', which takes no files ({error.strerror}); name a folder that can be written")
    return folder
