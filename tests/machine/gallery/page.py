"""Keeps the messages in docs/how-to/read-a-fault.md those that the emulator gives.

A line ``% gallery: NAME`` in the page is followed by a block that holds the message of that entry, launched broken.
``python -m tests.machine.gallery.page`` writes the blocks anew; a test compares them.
"""

from __future__ import annotations

import re
from pathlib import Path

from flashnumba.machine.emulator import Fault
from tests.machine.gallery import GALLERY, run

__all__ = ["PAGE", "refreshed", "shown"]

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "read-a-fault.md"
_BLOCK = re.compile(r"^% gallery: (\w+)\n(?:```text\n.*?^```\n)?", re.MULTILINE | re.DOTALL)


def shown(name: str) -> str:
    """The message of an entry, as a learner reads it.

    Raises:
        KeyError: there is no entry of that name.
    """
    entry = {e.name: e for e in GALLERY}[name]
    try:
        run(entry, broken=True)
    except Fault as fault:
        return str(fault)
    raise AssertionError(f"{name} raised no fault")


def refreshed(text: str) -> str:
    """The page with each block as it should be."""
    return _BLOCK.sub(lambda found: f"{found[0].splitlines()[0]}\n```text\n{shown(found[1])}\n```\n", text)


if __name__ == "__main__":
    PAGE.write_text(refreshed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
