"""Every real head: what each method's output is off by, for a share of tiles left out. NumPy in float64 alone.

::

    python -m flashnumba.stages.sparsity.every_head        # writes docs/results/every_head.json in some minutes

Tiles are small, :data:`TILE`, as the sequences are of 512 tokens. For each share that is asked for, the threshold is
searched that comes nearest to it from below, head by head; a prediction keeps so many of all tiles, SLA takes so few
for critical ones. The error is the sum of what o is off by, over the sum of its sizes.

SLA's linear part takes a projection that is learned together with a model. Here it is fitted, for each head alone, to
the rows with even numbers, and the error is that of the others.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from flashnumba.data import load_minilm
from flashnumba.stages.sparsity import reference, sla_reference

__all__ = ["METHODS", "SHARES", "TILE", "main", "outcome", "table"]

METHODS = ("block", "warp", "warp, sum kept", "predicted", "sla")
"""BLASST by rows of a block; by half as many, of a warp, as released and as in the paper; SpargeAttn's pooled guess
without its test of likeness; and SLA."""
SHARES = (0.3, 0.5, 0.7, 0.9)
TILE = (32, 16)
"""Rows and keys of a tile; a warp has half the rows. SLA's tiles are of as many rows as keys."""
HALVINGS = 14
"""Of the interval of a threshold's logarithm."""


def outcome(q: np.ndarray, k: np.ndarray, v: np.ndarray, method: str, knob: float) -> tuple[float, float]:
    """(share of tiles left out, error of o) of one head, ``[1, 1, N, D]`` each.

    Args:
        method: of :data:`METHODS`.
        knob: a threshold; or the part of all tiles that is kept, of the last two methods.
    """
    s = reference.scores(q, k)  # [1, 1, M, N]
    whole = np.ones_like(s, bool)  # [1, 1, M, N]
    exact = reference.attend(s, v, whole)[0]  # [1, 1, M, D]
    if method == "sla":
        return _of_sla(q[0, 0], k[0, 0], v[0, 0], exact[0, 0], knob)
    blocks, rows = _blocks(q, k, s, method, knob)  # [1, 1, R, C]
    chosen = reference.expand(blocks, rows, TILE[1], *s.shape[-2:])  # [1, 1, M, N]
    o = reference.attend(s, v, chosen, whole if method == "warp, sum kept" else None)[0]  # [1, 1, M, D]
    return 1 - float(blocks.mean()), _distance(o, exact)


def _blocks(q: np.ndarray, k: np.ndarray, s: np.ndarray, method: str, knob: float) -> tuple[np.ndarray, int]:
    """The tiles that are computed, and the rows of one."""
    if method == "predicted":
        return reference.predict(q, k, rows=TILE[0], keys=TILE[1], alike=-1.0, topk=knob), TILE[0]
    rows = TILE[0] if method == "block" else TILE[0] // 2
    return reference.skip(s, rows, TILE[1], knob), rows


def _of_sla(q: np.ndarray, k: np.ndarray, v: np.ndarray, exact: np.ndarray, critical: float) -> tuple[float, float]:
    block = TILE[1]
    classes = sla_reference.classify(q, k, critical, 0.0, block=block)  # [R, C]
    found = sla_reference.attend(q, k, v, classes, block=block)
    fitted = np.arange(len(q)) % 2 == 0  # [M]
    proj = np.linalg.lstsq(found.o_l[fitted], (exact - found.o_s)[fitted], rcond=None)[0]  # [D, D]
    o = found.o_s + found.o_l @ proj  # [M, D]
    return 1 - float((classes == 1).mean()), _distance(o[~fitted], exact[~fitted])


def _distance(o: np.ndarray, exact: np.ndarray) -> float:
    return float(np.abs(o - exact).sum() / np.abs(exact).sum())


def knob_for(q: np.ndarray, k: np.ndarray, method: str, share: float) -> float:
    """What leaves out ``share`` of the tiles, or a little less: of the threshold methods a threshold."""
    if method == "predicted":
        return 1 - share
    s = reference.scores(q, k)  # [1, 1, M, N]
    low, high = np.log(1e-8), np.log(0.999)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        blocks, _ = _blocks(q, k, s, method, float(np.exp(middle)))  # [1, 1, R, C]
        low, high = (low, middle) if 1 - blocks.mean() > share else (middle, high)
    return float(np.exp(low))


def table(heads: Sequence[tuple[int, int]] | None = None, shares: Sequence[float] = SHARES) -> list[dict[str, Any]]:
    """A row a head and share: ``layer, head, share``, and by method ``[share left out, error]``.

    Args:
        heads: (place of a layer in the data, head); all of them if None.
    """
    data = load_minilm()
    rows = []
    for layer, head in heads or np.ndindex(data.q.shape[:2]):
        q, k, v = (x[layer, head][None, None].astype(np.float64) for x in (data.q, data.k, data.v))  # [1, 1, N, D]
        for share in shares:
            knobs = {name: knob_for(q, k, name, share) for name in ("block", "warp", "predicted")}
            knobs |= {"warp, sum kept": knobs["warp"], "sla": knobs["predicted"]}
            found = {name: outcome(q, k, v, name, knobs[name]) for name in METHODS}
            rounded = {name: [round(left, 3), float(f"{error:.3g}")] for name, (left, error) in found.items()}
            rows.append({"layer": int(data.layers[layer]), "head": int(head), "share": share, "methods": rounded})
    return rows


def main(target: str = "docs/results/every_head.json") -> None:
    """Write the table of all heads."""
    facts = {"device": "none, NumPy in float64", "date": str(date.today()), "tile": f"{TILE[0]} x {TILE[1]}"}
    held = {"title": "Sparsity, every real head", "environment": facts}
    rows = ",\n  ".join(json.dumps(row) for row in table())
    head = json.dumps(held, indent=1)[:-2]
    Path(target).write_text(f'{head},\n "heads": [\n  {rows}\n ]\n}}\n', encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
