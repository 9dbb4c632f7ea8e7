"""What the site shows of the code is made from the code: each module here writes Markdown that a page includes."""

from __future__ import annotations

import shutil
from pathlib import Path

from generators import api, instructions, resources, results, tables, timeline, training, walkthrough

__all__ = ["copy_lessons", "put", "write"]


def put(path: Path, text: str) -> None:
    """Write a file if that changes it, so that Sphinx reads no page anew without a reason."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def copy_lessons(source: Path, target: Path) -> list[str]:
    """Make ``target`` hold the notebooks of ``source`` and nothing else. Either may be missing.

    Returns:
        Their names without the ending, in order.
    """
    found = {path.name: path for path in sorted(source.glob("[0-9][0-9]_*.ipynb"))}
    target.mkdir(parents=True, exist_ok=True)
    for stale in target.iterdir():
        if stale.name not in found:
            shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
    for name, path in found.items():
        put(target / name, path.read_text(encoding="utf-8"))
    return [path.stem for path in found.values()]


def write(docs: Path, *, execute: bool, root: Path | None = None) -> None:
    """Write everything under ``docs/generated`` and ``docs/lessons``.

    Args:
        docs: the folder of conf.py.
        execute: run the walkthrough on the emulator for its page.
        root: where ``lessons`` and ``tests`` lie; the folder above ``docs`` if None.
    """
    root = root or docs.parent
    lessons = copy_lessons(root / "lessons", docs / "lessons")
    pages = {
        "instructions": instructions.table(),
        "ladder": tables.ladder(lessons),
        "lessons": tables.lessons(lessons, execute=execute),
        "attention": tables.attention(),
        "faults": tables.faults(),
        "conformance": tables.conformance(root / "tests" / "machine" / "conformance"),
        "tensor_core": tables.tensor_core(),
        "budget": tables.budgets(),
        "results": results.page(docs / "results"),
        "resources": resources.page(docs / "results"),
        "training": training.page(docs / "results" / training.RECORD),
        **{f"api_{name}": text for name, text in api.pages().items()},
    }
    for name, text in pages.items():
        put(docs / "generated" / f"{name}.md", text)
    tables.draw_budgets(docs / "generated" / "budget.svg")
    results.draw_attention(docs / "results", docs / "generated")
    training.draw(docs / "results" / training.RECORD, docs / "generated")
    walkthrough.write(docs / "generated", execute=execute)
    timeline.write(docs / "generated", docs / "results" / timeline.RECORD, execute=execute)
