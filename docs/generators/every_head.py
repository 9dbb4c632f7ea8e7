"""What each sparse method costs on every real head, from ``docs/results/every_head.json``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flashnumba.stages.sparsity.every_head import METHODS
from generators.measured import Row, facts_of
from generators.tables import markdown

__all__ = ["section"]

ALL_HEADS = (0.5, 0.7)
"""Shares for which there is a row a head."""


def section(path: Path) -> str:
    """Medians and worst heads by share; and of two shares all heads, folded away."""
    held, title, facts = facts_of(path)
    rows: Sequence[Row] = held["heads"]
    shares = sorted({row["share"] for row in rows})
    text = (
        "Error of o, the sum of what it is off by over the sum of its sizes, where a share of the tiles is left out. "
        "`python -m flashnumba.stages.sparsity.every_head` writes it. Where no threshold below 1 leaves out so much, "
        "the share that one does is in brackets. SLA's projection is fitted to half of a head's rows, and the others "
        "are asked.\n\n"
    )
    summary = []
    for share in shares:
        of = [row["methods"] for row in rows if row["share"] == share]
        cells = []
        for name in METHODS:
            errors = [methods[name][1] for methods in of]
            cells.append(f"{np.median(errors):.1%}, {max(errors):.0%}")
        summary.append((f"{share:.0%}", *cells))
    text += f"Median and worst of {len(rows) // len(shares)} heads:\n\n" + markdown(("left out", *METHODS), summary)
    for share in ALL_HEADS:
        of_heads = [
            (row["layer"], row["head"], *(_cell(*row["methods"][name], share) for name in METHODS))
            for row in rows
            if row["share"] == share
        ]
        text += f"\n<details><summary>every head, {share:.0%} left out</summary>\n\n"
        text += markdown(("layer", "head", *METHODS), of_heads) + "\n</details>\n"
    return f"## {title}\n\n{facts}\n{text}"


def _cell(left: float, error: float, share: float) -> str:
    return f"{error:.2%}" if left > share - 0.05 else f"{error:.2%} ({left:.0%})"
