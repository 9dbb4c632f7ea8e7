"""Judges of sparse attention: float64 over the tiles that a method's own map says were computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flashnumba.bench.heads import ROWS
from flashnumba.bench.runner import check_written, rounded, spread
from flashnumba.compare import Comparison, compare
from flashnumba.stages.heads import Heads
from flashnumba.stages.sparsity import reference as R
from flashnumba.tiles.sparse import COMPUTED
from flashnumba.tiles.sparse_split import TILE

__all__ = ["DecodeJudge", "SparseJudge"]


class SparseJudge:
    """Compares some rows of each of nine units with float64 over the tiles that a map says the unit computed."""

    def __init__(
        self, torch: Any, inputs: tuple[Any, Any, Any], heads: Heads, options: Mapping[str, Any], tile_map: Any,
        bn: int, rows: int,
    ) -> None:  # fmt: skip
        self.torch, self.known = torch, []
        shape, (q, k, v) = heads.shape, inputs
        for unit in spread(tile_map.shape[2], 3):
            for head in spread(shape.heads, 3):
                first = min(unit * rows + 3 * len(self.known) * ROWS % rows, shape.m - 1)  # in one warp or another
                last = min(first + ROWS, shape.m)
                end = last + shape.n - shape.m if shape.causal else shape.n
                some = _on_host(q[:1, head : head + 1, first:last], shape.element)
                keys, values = (_on_host(x[:1, head // shape.group, None, :end], shape.element) for x in (k, v))
                tiles = tile_map[:1, head : head + 1, unit : unit + 1].cpu().numpy()
                s = R.scores(some, keys, heads.scale, shape.causal)
                kept = R.expand(tiles == COMPUTED, rows, bn, s.shape[-2], -(-end // bn) * bn)[..., :end]
                summed = np.ones_like(kept) if options.get("keep_sum") else kept
                kept, summed = kept & ~np.isneginf(s), summed & ~np.isneginf(s)
                exact, lse = R.attend(s, values, kept, summed)
                low = R.low_precision(some, keys, values, kept, summed, heads.scale)
                self.known.append((head, slice(first, last), exact, lse, *low))

    def __call__(self, result: Any) -> Comparison:
        o, lse = result
        found = []
        for head, rows, exact, lse_exact, low, lse_low in self.known:
            found.append(compare(rounded(o[:1, head : head + 1, rows].float().cpu().numpy(), "float16"), exact, low))
            of_lse = lse[:1, head : head + 1, rows].cpu().numpy()
            found.append(compare(of_lse, lse_exact, lse_low))
        bad = next((verdict for verdict in found if not verdict.ok), None)
        if bad is None:
            check_written(self.torch, o, lse)
        return bad or max(found[::2], key=lambda verdict: verdict.error)


class DecodeJudge:
    """Compares all heads of one head of K with float64 over the tiles that a map says were computed."""

    def __init__(self, torch: Any, inputs: tuple[Any, Any, Any], tile_map: Any, shape: Any) -> None:
        self.torch, self.heads = torch, slice(0, shape.group)
        q, k, v = inputs
        some = _on_host(q[:1, self.heads], shape.element)
        keys, values = (_on_host(x[:1, :1], shape.element) for x in (k, v))
        s = R.scores(some, keys)
        tiles = tile_map[:1, :1, :1].cpu().numpy() == COMPUTED
        kept = np.broadcast_to(np.repeat(tiles, TILE, -1)[..., : shape.n], s.shape)
        self.exact, self.low = R.attend(s, values, kept)[0], R.low_precision(some, keys, values, kept)[0]

    def __call__(self, result: Any) -> Comparison:
        o, lse = result
        check_written(self.torch, o, lse)
        return compare(rounded(o[:1, self.heads].float().cpu().numpy(), "float16"), self.exact, self.low)


def _on_host(x: Any, element: str) -> np.ndarray:
    """A tensor as a NumPy array of its own 16-bit type."""
    return rounded(x.float().cpu().numpy(), element)
