"""Tables of measured results, from the JSON files in ``docs/results``.

A file holds one object. Plain values say what was measured, where and when, and ``device`` and ``date`` must be among
them; each list of objects is a table, each object in an object a further group of plain values.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from generators.tables import markdown

__all__ = ["cell", "page", "section"]

NONE = "No result file is in `docs/results`. `flashnumba bench`, on a GPU, writes them.\n"
SAID = {"device": ("device", "gpu", "machine"), "date": ("date", "when", "time", "measured")}


def page(folder: Path) -> str:
    """A section a file."""
    files = sorted(folder.glob("*.json"))
    return "\n".join(map(section, files)) if files else NONE


def section(path: Path) -> str:
    """Markdown of one file.

    Raises:
        ValueError: it does not say on which device or on which date it was measured.
    """
    held = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(held, dict):
        raise ValueError(f"{path.name} holds a {type(held).__name__}; it must be one object")
    facts = dict(plain(held))
    for what, names in SAID.items():
        if not any(key.rsplit(" ", 1)[-1] in names for key in facts):
            raise ValueError(f"{path.name} does not say the {what}; it must have one of the keys {', '.join(names)}")
    title = str(facts.pop("title", path.stem.replace("_", " ").capitalize()))
    text = f"## {title}\n\n" + "".join(f"- {name}: {cell(value)}\n" for name, value in facts.items())
    for name, rows in tables(held):
        heads = list(dict.fromkeys(key for row in rows for key in row))
        words = [head.replace("_", " ") for head in heads]
        text += f"\n**{name.replace('_', ' ').capitalize()}**\n\n"
        text += markdown(words, [[cell(row.get(head)) for head in heads] for row in rows])
    return text


def plain(held: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Every plain value, with the names that lead to it."""
    for key, value in held.items():
        name = f"{before}{key.replace('_', ' ')}"
        if isinstance(value, dict):
            yield from plain(value, f"{name} ")
        elif not is_table(value):
            yield name, value


def tables(held: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for key, value in held.items():
        if isinstance(value, dict):
            yield from tables(value, f"{before}{key} ")
        elif is_table(value):
            yield f"{before}{key}", value


def is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def cell(value: Any) -> str:
    """A value as a table shows it: four digits of a fraction, a tick for true.

    >>> cell(0.98765), cell(4.25e12), cell(262144), cell(None), cell([1, 2]), cell(True)
    ('0.9877', '4.25e+12', '262144', '-', '1, 2', 'yes')
    """
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(cell, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {cell(one)}" for key, one in value.items())
    return str(value)
