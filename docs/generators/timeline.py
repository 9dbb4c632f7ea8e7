"""The timeline of the H200 beside the emulator's, for the page that shows how to draw one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from generators.walkthrough import RUN

__all__ = ["RECORD", "write"]

RECORD = "timeline.json"
"""In ``docs/results``; ``flashnumba timeline --machine cuda --json docs/results/timeline.json`` writes it."""


def write(folder: Path, record: Path, *, execute: bool) -> None:
    """Write ``timeline.md`` and its picture into ``folder``; a line without a picture if no kernel is to run.

    Raises:
        subprocess.CalledProcessError: the command failed; it said why.
    """
    page = folder / "timeline.md"
    if not execute:
        page.write_text("This build ran no kernels, so the picture is left out.\n", encoding="utf-8")
        return
    command = [sys.executable, "-c", RUN, "timeline", "--machine", "emulator", "--beside", str(record)]
    subprocess.run([*command, "--out", str(folder / "timeline.png")], check=True, stdout=subprocess.DEVNULL)
    page.write_text(
        "![Warps and slots over cycles, twice: copies run under the products of the step before]"
        "(/generated/timeline.png)\n\nLeft the emulator's model, right an H200, on one scale.\n",
        encoding="utf-8",
    )
