"""The stage flash_forward: attention without S in memory. ``reference.py`` tells the mathematics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from flashnumba.data import load_minilm
from flashnumba.stages import figures, heads
from flashnumba.stages.flash_forward import count, panels, reference
from flashnumba.stages.heads import Planner, Shape
from flashnumba.stages.softmax.reference import safe
from flashnumba.stages.stage import Case, Result, Rung, Stage

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["STAGE", "plans"]

FEW = 16
"""Queries that split-KV is for: one tile of rows."""
PICTURED = Shape("float16", 1, 1, 1, 4096, 4096, 64)
"""The problem whose bytes are drawn."""


def plans() -> dict[str, Planner]:
    """The planner of each kernel of this stage, by name."""
    from flashnumba.stages.flash_forward import mma, simt, wgmma

    return {**simt.PLANS, **mma.PLANS, **wgmma.PLANS}


def case(name: str, q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> Case:
    """A case of this stage: q ``[..., M, D]``, k and v ``[..., N, D]`` of one dtype.

    The judge is the three-pass softmax of all scores, normalised before it meets V, in float64.
    """
    m, n, d = q.shape[-2], *k.shape[-2:]
    scores = q.astype(np.float64) @ k.astype(np.float64).swapaxes(-1, -2) / np.sqrt(d)  # [..., M, N]
    weights = safe(np.where(reference.visible(m, n, causal), scores, -np.inf))  # [..., M, N]
    low, _ = reference.low_precision(q, k, v, causal=causal)  # [..., M, D]
    several = q.size // (m * d)
    size = f"{f'{several}x' if several > 1 else ''}{m}x{n}x{d} {q.dtype.name}{' causal' if causal else ''}"
    inputs = {"q": q, "k": k, "v": v, "causal": np.array(causal)}
    return Case(name, inputs, weights @ v.astype(np.float64), low, size)


def cases(machine: str, full: bool) -> Sequence[Case]:
    """One real head, all queries and the last ones that look back; and a few queries before many keys, as in decoding.

    On a GPU all 36 heads. On the emulator part of one that holds its greatest score, or the whole of it if ``full``.
    """
    data = load_minilm()
    if machine == "cuda":
        name, (q, k, v) = "36 heads of 3 layers", (data.q, data.k, data.v)
    else:
        name, (q, k, v) = f"layer {data.layers[0]}, head 2", (x[0, 2] for x in (data.q, data.k, data.v))
    if full or machine == "cuda":
        (rows, keys), (last, before), few = (slice(None), slice(None)), (slice(212, 512), slice(None)), FEW
    else:
        (rows, keys), (last, before), few = (slice(256, 384), slice(300, 460)), (slice(300, 400), slice(180, 400)), 4
    middle = slice(365 - few, 365)  # query 364 has the score of 79

    def of(rows: slice, keys: slice, causal: bool) -> Case:
        return case(name, q[..., rows, :], k[..., keys, :], v[..., keys, :], causal)

    whole = slice(None)
    return (
        of(rows, keys, False), of(last, before, True), of(middle, whole, False), of(slice(512 - few, 512), whole, True),
    )  # fmt: skip


def kernel(
    name: str, tier: str, traffic: count.Traffic, summary: str, arch: str = "75",
    takes: Callable[[Shape], bool] = lambda shape: True,
) -> Rung:  # fmt: skip
    def run(case: Case, machine: str) -> np.ndarray:
        q, k, v, causal = (case.inputs[x] for x in ("q", "k", "v", "causal"))
        o, _ = heads.forward(q, k, v, plans()[name], causal=bool(causal), machine=machine)
        return o

    return Rung(name, tier, run, traffic, arch, summary, takes=lambda case: takes(count.shape_of(case)))


def by(function: Callable[..., tuple[np.ndarray, np.ndarray]]) -> Callable[[Case, str], np.ndarray]:
    return lambda case, machine: function(*(case.inputs[x] for x in "qkv"), causal=bool(case.inputs["causal"]))[0]


def moved_by_simt(shape: Shape) -> count.Moved:
    from flashnumba.stages.flash_forward.simt_tiles import tiles_for

    tiles = tiles_for(shape)
    return count.fused(shape, tiles.bm, tiles.bn)


def moved_by_mma(shape: Shape) -> count.Moved:
    from flashnumba.tiles.forward import tiles_for

    tiles = tiles_for(shape.d, shape.arch)
    return count.fused(shape, tiles.bm, tiles.bn)


def moved_by_wgmma(shape: Shape) -> count.Moved:
    from flashnumba.tiles.specialised_tiles import tiles_for

    tiles = tiles_for(shape.d, shape.n)
    return count.fused(shape, tiles.bm, tiles.bn)


def moved_by_split(shape: Shape) -> count.Moved:
    from flashnumba.stages.flash_forward.split import plan_split, tiles_for

    tiles, splits = tiles_for(shape.d, shape.m * shape.group), plan_split(shape).scratch["m_parts"][0]
    return count.split(shape, tiles.bm, tiles.bn, splits)


def draw(results: Sequence[Result]) -> Figure:
    """The tiles of a causal problem, the state of a real row, the bytes of each kernel, and the errors."""
    from flashnumba.tiles.forward import tiles_for

    figure, (tiles, running, moved, errors) = figures.four_panels("attention without S in memory")
    mma = tiles_for(PICTURED.d, PICTURED.arch)
    panels.draw_tiles(tiles, 1000, 1500, mma.bm, mma.bn)
    data = load_minilm()
    panels.draw_running(running, data.q[0, 2], data.k[0, 2], data.v[0, 2], 300)
    of_each = {"not fused": count.unfused, "simt": moved_by_simt, "mma": moved_by_mma, "wgmma": moved_by_wgmma}
    panels.draw_bytes(moved, {name: function(PICTURED) for name, function in of_each.items()})
    moved.set_title(f"device memory: one head of {PICTURED.m} x {PICTURED.n} x {PICTURED.d} {PICTURED.element}")
    figures.errors(errors, results, label=lambda r: f"{r.rung.name}, {r.case.size.replace(' float16', '')}")
    return figure


STAGE = Stage(
    name="flash_forward",
    title="FlashAttention, forward",
    question="Can attention do without the matrix of scores in memory?",
    teaches="attention without S in memory",
    lesson="04_flash_forward",
    rungs=(
        Rung(
            "dense", "reference", by(reference.dense), count.Traffic("QKVO+4S", count.unfused),
            summary="the formula as written, all scores at once",
        ),
        Rung(
            "blocked", "reference", by(reference.online), count.Traffic("QKVO", count.floor),
            summary="(m, l, acc) key block by key block, all rows at once",
        ),
        kernel(
            "simt", "simt", count.Traffic("QO+KV/tile", moved_by_simt),
            "float32 on CUDA cores, 16 threads a row, P through shared memory", takes=lambda shape: shape.m > FEW,
        ),
        kernel(
            "mma", "mma", count.Traffic("QO+KV/tile", moved_by_mma),
            "tensor cores, softmax in registers, cp.async into swizzled tiles", "80", lambda shape: shape.m > FEW,
        ),
        kernel(
            "wgmma", "wgmma", count.Traffic("QO+KV/tile", moved_by_wgmma),
            "TMA, products of warpgroups, one warpgroup's softmax beside another's products", "90a",
            lambda shape: shape.m > FEW,
        ),
        kernel(
            "split", "mma", count.Traffic("QKVO+parts", moved_by_split),
            "the keys of few queries over many blocks, merged by a second kernel", "80", lambda shape: shape.m <= FEW,
        ),
    ),
    cases=cases,
    draw=draw,
)  # fmt: skip
