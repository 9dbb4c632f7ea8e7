"""The walkthrough as it runs, for its page: what it prints, and its figures."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from flashnumba.ladder import STAGES

__all__ = ["write"]

NOT_RUN = "This build ran no kernels, so the table and the figures are left out.\n"
WAS_RUN = "On the emulator, when this page was built:\n\n"
RUN = "from flashnumba.cli import main; main()"


def write(folder: Path, *, execute: bool) -> None:
    """Write ``walkthrough.md`` and the figures into ``folder``.

    Raises:
        RuntimeError: a kernel left its error budget.
    """
    page = folder / "walkthrough.md"
    if not execute:
        page.write_text(NOT_RUN, encoding="utf-8")
        return
    command = [sys.executable, "-c", RUN, "walkthrough", "--machine", "emulator", "--out", str(folder)]
    environment = {**os.environ, "COLUMNS": "120", "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"flashnumba walkthrough ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    printed = "\n".join(line.rstrip() for line in done.stdout.splitlines() if not line.startswith("figure: "))
    text = f"{WAS_RUN}```{{code-block}} text\n:class: terminal\n\n{printed.strip()}\n```\n"
    for stage in STAGES:
        alt = f"What the walkthrough draws of the stage {stage.name}"
        text += f"\n## The figure of {stage.name}\n\n![{alt}](/generated/{stage.name}.png)\n"
    page.write_text(text, encoding="utf-8")
