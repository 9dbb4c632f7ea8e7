"""The stage causal_balance: the triangle's work, dealt out. ``reference.py`` tells how much, who and when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from flashnumba.data import load_minilm
from flashnumba.stages import figures, heads
from flashnumba.stages.causal_balance import panels, reference
from flashnumba.stages.flash_forward import case, count
from flashnumba.stages.flash_forward import reference as attention
from flashnumba.stages.heads import Plan, Planner, Shape
from flashnumba.stages.stage import Case, Result, Rung, Stage

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from flashnumba.tiles.sizes import AttentionTiles

__all__ = ["STAGE", "plans"]

EMULATED_WARPS = 2
"""Warps of 16 rows a block on the emulator, so that a small problem has several tiles of rows."""


def plans() -> dict[str, Planner]:
    """The planner of each kernel of this stage, by name."""
    from flashnumba.stages.causal_balance.mma import PLANS

    return PLANS


def tiles_of(name: str, shape: Shape, machine: str) -> AttentionTiles:
    """The tiles of a kernel; on the emulator small ones."""
    from flashnumba.stages.causal_balance.mma import balanced_tiles, stack_for
    from flashnumba.tiles.sizes import AttentionTiles

    warps = int(name.removeprefix("stack_")) if name.startswith("stack_") else 0
    if machine == "emulator":
        warps = warps or EMULATED_WARPS
        return AttentionTiles(-(-shape.d // 32) * 32, 16 * warps, max(32, 8 * warps), warps)
    return stack_for(warps, shape.d, shape.arch) if warps else balanced_tiles(shape)


def cases(machine: str, full: bool) -> Sequence[Case]:
    """Rows and keys of one real head that are alike in number; and more rows than keys, where the first see nothing.

    On a GPU all 36 heads. On the emulator part of one that holds its greatest score, or more of it if ``full``.
    """
    data = load_minilm()
    if machine == "cuda":
        name, (q, k, v) = "36 heads of 3 layers", (data.q, data.k, data.v)
    else:
        name, (q, k, v) = f"layer {data.layers[0]}, head 2", (x[0, 2] for x in (data.q, data.k, data.v))
    if full or machine == "cuda":
        (rows, keys), (more, fewer) = (slice(None), slice(None)), (slice(None), slice(180, 480))
    else:
        (rows, keys), (more, fewer) = (slice(280, 375), slice(290, 385)), (slice(310, 390), slice(330, 385))
    return tuple(
        case(name, q[..., some, :], k[..., part, :], v[..., part, :], True)
        for some, part in ((rows, keys), (more, fewer))
    )


def kernel(name: str, summary: str, *, square: bool = False) -> Rung:
    """A rung; ``square``: it is tried only on cases with as many rows as keys."""

    def run(case: Case, machine: str) -> np.ndarray:
        from flashnumba.stages.causal_balance.mma import plan_balanced

        def plan(shape: Shape) -> Plan:
            schedule = "longest_first" if name.startswith("stack_") else name
            return plan_balanced(schedule, shape, tiles_of(name, shape, machine))

        o, _ = heads.forward(*(case.inputs[x] for x in "qkv"), plan, causal=True, machine=machine)
        return o

    def moved(shape: Shape) -> count.Moved:
        tiles = tiles_of(name, shape, "cuda")
        return count.fused(shape, tiles.bm, tiles.bn)

    def takes(case: Case) -> bool:
        return not square or case.inputs["q"].shape == case.inputs["k"].shape

    return Rung(name, "mma", run, count.Traffic("QO+KV/tile", moved), "80", summary, takes=takes)


def dense(case: Case, machine: str) -> np.ndarray:
    return attention.dense(*(case.inputs[x] for x in "qkv"), causal=True)[0]


def draw(results: Sequence[Result]) -> Figure:
    """Work a block, blocks on multiprocessors, makespans, and the errors."""
    figure, (work, runs, spans, errors) = figures.four_panels("triangular work, dealt out")
    panels.draw_work(work, reference.row_work(1024, 1024, 64, 64))
    steps = reference.row_work(512, 512, 64, 64)
    panels.draw_runs(
        runs, *panels.simulated(steps, 3, 5, ("plain", "paired", "longest first")), 3 * steps.sum() / 5,
    )  # fmt: skip
    panels.draw_makespans(spans, reference.row_work(4096, 4096, 128, 128), (8, 64))
    figures.errors(errors, results, label=lambda r: f"{r.rung.name}, {r.case.size.replace(' float16', '')}")
    return figure


STAGE = Stage(
    name="causal_balance",
    title="Causal load balance",
    question="Who gets which part of a triangle, and who begins?",
    teaches="triangular work",
    lesson="07_causal_balance",
    rungs=(
        Rung(
            "dense", "reference", dense, count.Traffic("QKVO+4S", count.unfused),
            summary="the formula as written, all scores at once; work, grids and clock are in reference.py",
        ),
        kernel("plain", "a block a tile of rows, head after head, from the first row on"),
        kernel("head_by_head", "the same from the last row on"),
        kernel("paired", "a block tiles i and n - 1 - i of a head, n + 1 tiles of keys for each"),
        kernel("longest_first", "a block a tile, the longest of several heads first"),
        kernel("persistent", "blocks that stay and draw the longest tile left from a counter"),
        kernel("stack_4", "longest first, four warps of 16 rows", square=True),
        kernel("stack_8", "longest first, eight warps of 16 rows", square=True),
    ),
    cases=cases,
    draw=draw,
)  # fmt: skip
