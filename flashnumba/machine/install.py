"""The commands that install what is missing, for the Python that runs, whether or not its environment is activated."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["NUMBA", "NUMBA_CUDA", "checkout", "extra", "pip", "python"]

NUMBA, NUMBA_CUDA = "0.68.1", "0.30.4"

_WHAT_EXTRAS_BRING = {
    "cu12": (f"numba-cuda[cu12]=={NUMBA_CUDA}",),
    "cu13": (f"numba-cuda[cu13]=={NUMBA_CUDA}",),
    "lessons": ("jupyterlab>=4", "jupytext>=1.16"),
}
"""The extras of ``pyproject.toml`` that commands name, for a package whose source is not at hand."""


def checkout() -> Path | None:
    """The folder of the source that runs; None for an installed wheel."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "pyproject.toml").is_file() else None


def python() -> str:
    """The Python that runs, as a shell takes it."""
    return _quoted(sys.executable or "python")


def pip(*arguments: str) -> str:
    """The command that installs something for the Python that runs, e.g. ``pip("torch")``."""
    return " ".join([f"{python()} -m pip install", *map(_quoted, arguments)])


def extra(name: str, root: Path | None = None) -> str:
    """The command that adds an extra of this package, e.g. ``"cu13"``.

    The package is published under no name, so an extra comes from the source where that is what runs, and otherwise
    what the extra asks for is named.

    Args:
        name: the extra.
        root: folder of the source; as :func:`checkout` finds it.
    """
    root = root or checkout()
    return pip(*_WHAT_EXTRAS_BRING[name]) if root is None else pip("-e", f"{root}[{name}]")


def _quoted(argument: str) -> str:
    """In double quotes, which every shell knows, if it holds more than letters, digits and what paths are made of."""
    plain = all(c.isalnum() or c in "/\\:._-=+" for c in argument)
    return argument if plain else f'"{argument}"'
