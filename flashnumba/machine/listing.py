"""nvdisasm's text, counted: how often each instruction stands in it, in a whole kernel or in its main loop."""

from __future__ import annotations

import re
from collections import Counter

__all__ = ["PRODUCTS", "machine_code", "main_loop"]

PRODUCTS = ("HMMA", "QMMA", "IMMA", "HGMMA", "QGMMA")
"""NVIDIA's names of what tensor cores do."""
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)")
LABEL = re.compile(r"^(\.L_x_\d+):")
BRANCH = re.compile(r"\bBRA(?:\.\w+)*\s+(?:!?U?P\w+,\s*)?`\((\.L_x_\d+)\)")


def machine_code(text: str) -> Counter[str]:
    """How often each instruction stands in nvdisasm's text, by its name without what follows a dot.

    >>> machine_code("        /*0010*/  @!P0 SHFL.IDX PT, R1, R2, R3, 0x1f ;")
    Counter({'SHFL': 1})
    """
    return Counter(found[1] for line in text.splitlines() if (found := INSTRUCTION.match(line)))


def main_loop(text: str) -> str:
    """The lines of the shortest loop that has most of the products of a kernel in it.

    A loop is what lies between a label and a branch back to it.

    Raises:
        ValueError: there is none.
    """
    lines = text.splitlines()
    labels = {found[1]: i for i, line in enumerate(lines) if (found := LABEL.match(line))}
    spans = [
        (labels[found[1]], i + 1)
        for i, line in enumerate(lines)
        if (found := BRANCH.search(line)) and labels.get(found[1], i) < i
    ]

    def products(first: int, last: int) -> int:
        counted = machine_code("\n".join(lines[first:last]))
        return sum(counted[name] for name in PRODUCTS)

    most = 0.75 * products(0, len(lines))
    loops = [span for span in spans if most and products(*span) >= most]
    if not loops:
        raise ValueError("no loop in the text has most of the products of its kernel")
    first, last = min(loops, key=lambda span: span[1] - span[0])
    return "\n".join(lines[first:last])
