"""Markdown of one file of measured results.

A file holds one object. Plain values, in it or in objects in it, say what was measured, where and when; ``device`` must
be among them, ``date`` ought to be. Each list of objects is a table. Where the objects of a list hold a list of objects
themselves (a size, and what was measured on it), each gets a table of its own, folded away, and the fastest kernel of
each goes into one table in front of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from generators.tables import markdown

__all__ = ["Row", "cell", "facts_of", "folded", "section", "shown", "table"]

PEERS = ("copy", "torch.softmax")
"""Names under which something is measured that is no kernel of ours, where a file does not say so itself."""
UNITS = {
    "seconds": ("ms", 1e3), "bytes_per_second": ("TB/s", 1e-12), "flops_per_second": ("TFLOP/s", 1e-12),
    "nbytes": ("MB", 2.0**-20), "predicted": ("predicted ms", 1e3),
}  # fmt: skip
HEADS = {
    "name": "kernel", "cols": "columns", "of_torch": "x torch", "of_cublas": "of cuBLAS", "of_fa2": "of FA2",
    "of_cudnn": "of cuDNN", "of_plain": "x plain", "predicted_of_plain": "x plain, predicted",
    "batch": "B", "heads": "H", "kv_heads": "Hkv", "n": "N", "m": "M", "k": "K", "d": "D",
}  # fmt: skip
HIDDEN = ("ours",)
Row = Mapping[str, Any]


def facts_of(path: Path) -> tuple[dict[str, Any], str, str]:
    """What a file holds, its title, and a list of what it says of where and when.

    Raises:
        ValueError: it holds something else than an object, or does not say on which device it was measured.
    """
    held = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(held, dict):
        raise ValueError(f"{path.name} holds a {type(held).__name__}; it must be one object")
    facts = dict(plain(held))
    if "device" not in facts:
        raise ValueError(f"{path.name} does not say the device on which it was measured; it must have the key 'device'")
    facts.setdefault("date", "not recorded")
    title = str(facts.pop("title", path.stem.replace("_", " ").capitalize()))
    return held, title, "".join(f"- {name}: {cell(value)}\n" for name, value in facts.items())


def section(path: Path) -> str:
    """A section with all tables of a file.

    Raises:
        ValueError: as :func:`facts_of`.
    """
    held, title, facts = facts_of(path)
    text = f"## {title}\n\n{facts}"
    for name, rows in tables(held):
        heading = name.replace("_", " ").capitalize()
        inner = next((key for key, value in rows[0].items() if is_table(value)), None)
        text += f"\n**{heading}**\n\n{table(rows)}" if inner is None else nested(rows, inner)
    return text


def nested(rows: Sequence[Row], inner: str) -> str:
    """The fastest of each row's inner table, then the inner tables."""
    outer = [{key: value for key, value in row.items() if key != inner} for row in rows]
    fastest = [{**about, **best} for about, row in zip(outer, rows, strict=True) if (best := fastest_of(row[inner]))]
    text = f"\n**The fastest kernel of each size**\n\n{table(fastest)}" if fastest else ""
    return text + folded(rows, inner)


def folded(rows: Sequence[Row], inner: str) -> str:
    """The inner table of each row, folded away."""
    text = ""
    for row in rows:
        about = {key: value for key, value in row.items() if key != inner}
        said = ", ".join(f"{head} {value}" for head, value in shown(about).items())
        text += f"\n<details><summary>{said}</summary>\n\n{table(row[inner])}\n</details>\n"
    return text


def fastest_of(measured: Sequence[Row]) -> Row | None:
    ours = [one for one in measured if one.get("seconds") and one.get("ours", one.get("name") not in PEERS)]
    return min(ours, key=lambda one: one["seconds"], default=None)


def table(rows: Sequence[Row]) -> str:
    """A table with a column for each key; columns that are empty throughout are left out."""
    lines = [shown(row) for row in rows]
    heads = [
        head
        for head in dict.fromkeys(h for line in lines for h in line)
        if any(x.get(head, "-") not in ("", "-") for x in lines)
    ]
    return markdown(heads, [[line.get(head, "-") for head in heads] for line in lines])


def shown(row: Row) -> dict[str, str]:
    """Headings and cells of a row, in units that people read."""
    found = {}
    for key, value in row.items():
        if key in HIDDEN:
            continue
        unit, factor = UNITS.get(key, (HEADS.get(key, key.replace("_", " ")), 1))
        found[unit] = cell(value * factor if key in UNITS and value is not None else value)
    return found


def plain(held: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every plain value, by its own name."""
    for key, value in held.items():
        if isinstance(value, dict):
            yield from plain(value)
        elif not is_table(value):
            yield key.replace("_", " "), value


def tables(held: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, list[Row]]]:
    for key, value in held.items():
        if isinstance(value, dict):
            yield from tables(value, f"{before}{key} ")
        elif is_table(value):
            yield f"{before}{key}", value


def is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def cell(value: Any) -> str:
    """A value as a table shows it: four digits of a fraction.

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
    return str(value)
