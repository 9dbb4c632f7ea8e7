"""The stage sparsity: which tiles of scores can be left out, and who says so. ``reference.py`` tells the methods."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from flashnumba.data import load_minilm
from flashnumba.stages import figures
from flashnumba.stages.softmax.reference import safe
from flashnumba.stages.sparsity import reference, sla_stage
from flashnumba.stages.stage import Case, Result, Rung, Stage

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from flashnumba.stages import heads
    from flashnumba.tiles.sizes import AttentionTiles
    from flashnumba.tiles.specialised_tiles import SpecialisedTiles

__all__ = ["STAGE", "case", "kept", "tiles_of"]

MASKED = ("block_sparse", "blocks_wgmma")
"""Kernels that are given a mask."""
SPARGE = {"alike": 0.3, "cdf": 0.7}
"""Tokens of the real heads are not much alike; with the defaults for long sequences nothing would be left out."""


def tiles_of(shape: heads.Shape, machine: str) -> AttentionTiles:
    """Those that are launched; on the emulator small ones, so that a small problem has several."""
    from flashnumba.stages.sparsity.mma import sparse_tiles
    from flashnumba.tiles.sizes import AttentionTiles

    return (
        AttentionTiles(shape.d, 32, 16, warps=2, slots=2, lazy=True) if machine == "emulator" else sparse_tiles(shape)
    )


def specialised_tiles_of(shape: heads.Shape, machine: str, listed: bool) -> SpecialisedTiles:
    """The same of ``wgmma``."""
    from flashnumba.stages.sparsity.wgmma import BLOCK, list_tiles
    from flashnumba.tiles.specialised_tiles import SpecialisedTiles, tiles_for

    if listed:
        return SpecialisedTiles(64, 2 * BLOCK, block=BLOCK) if machine == "emulator" else list_tiles(shape.d)
    return SpecialisedTiles(64, 64) if machine == "emulator" else tiles_for(shape.d, shape.n)


def kept(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Which scores a case's method computes, and which count in the sum: bool ``[B, H, M, N]``."""
    q, k, causal = (case.inputs[x] for x in ("q", "k", "causal"))
    method, rows, keys = str(case.inputs["method"]), int(case.inputs["rows"]), int(case.inputs["keys"])
    q, k = (x.reshape((1,) * (4 - x.ndim) + x.shape) for x in (q, k))  # [B, H, M or N, D]
    s = reference.scores(q, k, causal=bool(causal))  # [B, H, M, N]
    seen = ~np.isneginf(s)  # [B, H, M, N]
    if method == "sparge":
        blocks = reference.predict(q, k, rows=rows, keys=keys, causal=bool(causal), **SPARGE)  # [B, H, R, C]
    elif method in MASKED:
        blocks = mask_of(s.shape, rows, keys)  # [B, H, R, C]
    else:
        blocks = reference.skip(s, rows, keys, float(case.inputs["threshold"]))  # [B, H, R, C]
    chosen = reference.expand(blocks, rows, keys, *s.shape[-2:]) & seen  # [B, H, M, N]
    return chosen, seen if method == "warp_skip_sum" else chosen


def mask_of(shape: tuple[int, ...], rows: int, keys: int) -> np.ndarray:
    """A mask of blocks that somebody might give: the first block, a band, and every third block."""
    batch, heads, m, n = shape
    row, key = np.arange(-(-m // rows))[:, None] * rows + n - m, np.arange(-(-n // keys)) * keys  # [R, 1], [C]
    near = np.abs(row - key) < 2 * max(rows, keys)  # [R, C]
    mask = near | (key == 0) | (key // keys % 3 == 2)  # [R, C]
    return np.broadcast_to(mask, (batch, heads, *mask.shape))  # [B, H, R, C]


def case(
    name: str, q: np.ndarray, k: np.ndarray, v: np.ndarray, method: str, *, rows: int, keys: int,
    threshold: float = 0.0, causal: bool = False,
) -> Case:  # fmt: skip
    """A case of this stage: q ``[..., M, D]``, k and v ``[..., N, D]`` of one dtype; ``rows`` and ``keys`` of a tile,
    or of a block. The judge knows what is left out, and is else attention in float64."""
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "method": np.array(method), "rows": np.array(rows)}
    given |= {"keys": np.array(keys), "threshold": np.array(threshold), "causal": np.array(causal)}
    several = q.size // (q.shape[-2] * q.shape[-1])
    lengths = f"{f'{several}x' if several > 1 else ''}{q.shape[-2]}x{k.shape[-2]}x{q.shape[-1]}"
    size = f"{lengths} {q.dtype.name}{' causal' if causal else ''}"
    made = Case(f"{name}, {method}", given, np.empty(0), np.empty(0), size)
    chosen, summed = kept(made)
    q, k, v = (x.reshape((1,) * (4 - x.ndim) + x.shape) for x in (q, k, v))
    s = reference.scores(q, k, causal=causal)  # [B, H, M, N]
    weights = np.where(chosen, safe(np.where(summed, s, -np.inf)), 0)  # [B, H, M, N]
    exact = weights @ np.repeat(v, s.shape[1] // v.shape[1], axis=1).astype(np.float64)  # [B, H, M, D]
    low, _ = reference.low_precision(q, k, v, chosen, summed)  # [B, H, M, D]
    shape = given["q"].shape
    return Case(made.name, given, exact.reshape(shape), low.reshape(shape), size)


def cases(machine: str, full: bool) -> Sequence[Case]:
    """Real heads, for each method one of which it leaves out something.

    On a GPU all 36 heads. On the emulator part of one, or more of it if ``full``.
    """
    data = load_minilm()
    if machine == "cuda":
        name, (q, k, v), rows, keys = "36 heads of 3 layers", (data.q, data.k, data.v), 128, 64
        some, part = slice(None), slice(None)
    else:
        name, (q, k, v), rows, keys = (
            f"layer {data.layers[0]}, head 2",
            (x[0, 2] for x in (data.q, data.k, data.v)),
            32,
            16,
        )
        some, part = (slice(None), slice(None)) if full else (slice(320, 400), slice(280, 400))
    of = partial(case, name, q[..., some, :], k[..., part, :], v[..., part, :])
    by_warpgroups = partial(case, name, q[..., some, :], k, v)
    unit = rows // (4 if machine == "cuda" else 2)
    return (
        of("blasst", rows=rows, keys=keys, threshold=0.05),
        of("warp_skip", rows=unit, keys=keys, threshold=0.05, causal=True),
        of("warp_skip_sum", rows=unit, keys=keys, threshold=0.05),
        of("block_sparse", rows=rows, keys=keys, causal=True),
        of("sparge", rows=rows, keys=keys),
        by_warpgroups("blasst_wgmma", rows=64, keys=128 if machine == "cuda" else 64, threshold=0.05),
        by_warpgroups("blocks_wgmma", rows=128, keys=64),
        *sla_stage.cases(machine, full),
    )


def run_kernel(case: Case, machine: str, name: str) -> np.ndarray:
    from flashnumba.stages import heads
    from flashnumba.stages.sparsity import mma, problem, wgmma

    q, k, v = (case.inputs[x] for x in "qkv")
    prepared = heads.prepare_heads(
        q, k, v, causal=bool(case.inputs["causal"]), scale=None, machine=machine, stream=None
    )  # fmt: skip
    shape, threshold = prepared.shape, float(case.inputs["threshold"])
    tiles, rows, keys = tiles_of(shape, machine), int(case.inputs["rows"]), int(case.inputs["keys"])
    given: dict[str, Any] = {"limit": problem.limit_of(threshold)}
    if name == "blasst_wgmma":
        plan = wgmma.plan_blasst(shape, tiles=specialised_tiles_of(shape, machine, False))
    elif name in MASKED:
        if name == "block_sparse":
            plan = mma.plan_blocks(shape, block_m=rows, block_n=keys, tiles=tiles)
        else:
            listed = specialised_tiles_of(shape, machine, True)
            plan = wgmma.plan_blocks(shape, block_m=rows, block_n=keys, tiles=listed)
        mask = mask_of((shape.batch, shape.heads, shape.m, shape.n), rows, keys)
        given["mask"] = np.ascontiguousarray(mask, np.uint8)
    elif name == "sparge":
        plan = mma.plan_sparge(shape, block_m=rows, block_n=keys, tiles=tiles)
        given |= {"limit": -math.inf, "alike": SPARGE["alike"], "kept": SPARGE["cdf"], "sink": 0}
    else:
        vote = "block" if name == "blasst" else "warp"
        plan = mma.plan_skip(shape, vote=vote, keep_sum=name == "warp_skip_sum", tiles=tiles)
    problem.run(prepared, plan, given)
    return prepared.finish()[0]


def by_definition(case: Case, machine: str) -> np.ndarray:
    if sla_stage.is_sla(case):
        return sla_stage.exact(case)
    q, k, v = (x.reshape((1,) * (4 - x.ndim) + x.shape) for x in (case.inputs[x] for x in "qkv"))
    s = reference.scores(q, k, causal=bool(case.inputs["causal"]))  # [B, H, M, N]
    return reference.attend(s, v, *kept(case))[0].reshape(case.inputs["q"].shape)


def kernel(name: str, summary: str, tier: str = "mma", arch: str = "80") -> Rung:
    def takes(case: Case) -> bool:
        return str(case.inputs["method"]) == name

    run: Callable[[Case, str], np.ndarray] = partial(run_kernel, name=name)
    return Rung(name, tier, run, None, arch, summary, takes)


def draw(results: Sequence[Result]) -> Figure:
    """Weights of a real head, the tiles that methods compute of it, error against what is left out, and the errors."""
    from flashnumba.stages.sparsity import panels

    figure, (weights, maps, curves, errors) = figures.four_panels("tiles of scores that are left out")
    data = load_minilm()
    q, k, v = (x[:1, 2:3].astype(np.float64) for x in (data.q, data.k, data.v))
    panels.draw_weights(weights, q, k)
    panels.draw_map(maps, q, k, SPARGE)
    panels.draw_curves(curves, q, k, v)
    figures.errors(errors, results, label=lambda r: f"{r.rung.name}, {r.case.size.replace(' float16', '')}")
    return figure


STAGE = Stage(
    name="sparsity",
    title="Sparsity",
    question="Which tiles of scores can be left out, and who says so?",
    teaches="three schools of leaving out",
    lesson="10_sparsity",
    rungs=(
        Rung(
            "by definition", "reference", by_definition, None, summary="all scores, and a mask of what a method keeps"
        ),
        kernel("blasst", "tiles below a threshold of the rows' maxima, if all rows of a block agree"),
        kernel("warp_skip", "the same, each warp for itself"),
        kernel("warp_skip_sum", "the same, what is left out still in the sum"),
        kernel("block_sparse", "the blocks of a mask, as packed lists"),
        kernel("sparge", "a mask predicted from one mean token a block, then its lists"),
        kernel("blasst_wgmma", "warpgroups that agree, each for its 64 rows, on what V is read for", "wgmma", "90a"),
        kernel("blocks_wgmma", "tiles gathered from the blocks of a list", "wgmma", "90a"),
        sla_stage.KERNEL,
    ),
    cases=cases,
    draw=draw,
)
