"""The stage backward: the gradients of attention. ``reference.py`` tells the mathematics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from flashnumba.data import load_minilm
from flashnumba.stages import figures
from flashnumba.stages.backward import count, reference
from flashnumba.stages.flash_forward import reference as forward
from flashnumba.stages.heads import Planner, Shape
from flashnumba.stages.softmax.reference import safe
from flashnumba.stages.stage import Case, Result, Rung, Stage

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["STAGE", "case", "plans"]

PICTURED = Shape("float16", 1, 1, 1, 4096, 4096, 128)
"""The problem whose bytes are drawn."""


def plans() -> dict[str, Planner]:
    """The planner of each kernel of this stage, by name."""
    from flashnumba.stages.backward import mma, simt

    return {**simt.PLANS, **mma.PLANS}


def together(gradients: reference.Gradients) -> np.ndarray:
    """dQ, dK and dV, one below the other: ``[..., M + 2 N, D]``."""
    return np.concatenate(gradients, -2)


def case(name: str, q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> Case:
    """A case of this stage: q ``[..., M, D]``, k and v ``[..., N, D]`` of one dtype, and a gradient of o.

    The judge multiplies with the Jacobian of the three-pass softmax as it is written, P (dP - P . dP), in float64.
    """
    m, n, d = q.shape[-2], *k.shape[-2:]
    do = np.random.default_rng(0).standard_normal(q.shape).astype(q.dtype)  # [..., M, D]
    q64, k64, v64, do64 = (x.astype(np.float64) for x in (q, k, v, do))
    scores = q64 @ k64.swapaxes(-1, -2) / np.sqrt(d)  # [..., M, N]
    p = safe(np.where(reference.visible(m, n, causal), scores, -np.inf))  # [..., M, N]
    dp = np.einsum("...id,...jd->...ij", do64, v64)  # [..., M, N]
    ds = p * dp - p * np.einsum("...ij,...ij->...i", p, dp)[..., None]  # [..., M, N]
    expected = (ds @ k64 / np.sqrt(d), ds.swapaxes(-1, -2) @ q64 / np.sqrt(d), p.swapaxes(-1, -2) @ do64)
    o, lse = forward.low_precision(q, k, v, causal=causal)  # [..., M, D], [..., M]
    low = reference.low_precision(q, k, v, o, do, lse, causal=causal)
    several = q.size // (m * d)
    size = f"{f'{several}x' if several > 1 else ''}{m}x{n}x{d} {q.dtype.name}{' causal' if causal else ''}"
    inputs = {"q": q, "k": k, "v": v, "do": do, "causal": np.array(causal)}
    return Case(name, inputs, together(expected), together(low), size)


def cases(machine: str, full: bool) -> Sequence[Case]:
    """One real head: some queries before all keys near them, and the last ones that look back; dO is normal numbers.

    On a GPU all 36 heads. On the emulator part of one that holds its greatest score, or the whole of it if ``full``.
    """
    data = load_minilm()
    if machine == "cuda":
        name, (q, k, v) = "36 heads of 3 layers", (data.q, data.k, data.v)
    else:
        name, (q, k, v) = f"layer {data.layers[0]}, head 2", (x[0, 2] for x in (data.q, data.k, data.v))
    if full or machine == "cuda":
        (rows, keys), (last, before) = (slice(None), slice(None)), (slice(212, 512), slice(None))
    else:
        (rows, keys), (last, before) = (slice(350, 380), slice(340, 400)), (slice(356, 380), slice(300, 380))
    return (
        case(name, q[..., rows, :], k[..., keys, :], v[..., keys, :], False),
        case(name, q[..., last, :], k[..., before, :], v[..., before, :], True),
    )


def dense(case: Case, machine: str) -> np.ndarray:
    q, k, v, do, causal = (case.inputs[x] for x in ("q", "k", "v", "do", "causal"))
    return together(reference.dense(q, k, v, do, causal=bool(causal)))


def blocked(case: Case, machine: str) -> np.ndarray:
    q, k, v, do, causal = (case.inputs[x] for x in ("q", "k", "v", "do", "causal"))
    o, lse = forward.dense(q, k, v, causal=bool(causal))
    return together(reference.blocked(q, k, v, o, do, lse, causal=bool(causal)))


def kernel(name: str, tier: str, words: str, moved: Callable[[Shape], float], summary: str, arch: str = "75") -> Rung:
    def run(case: Case, machine: str) -> np.ndarray:
        from flashnumba.stages.backward.problem import backward

        q, k, v, do, causal = (case.inputs[x] for x in ("q", "k", "v", "do", "causal"))
        o, lse = forward.low_precision(q, k, v, causal=bool(causal))
        return together(backward(do, q, k, v, o, lse, plans()[name], causal=bool(causal), machine=machine))

    return Rung(name, tier, run, count.Traffic(words, moved), arch, summary)


def moved_by_simt(shape: Shape) -> float:
    from flashnumba.stages.backward.simt_tiles import tiles_for

    return count.by_rows_and_keys(shape, tiles_for(shape).own, tiles_for(shape).own)


def moved_by_mma(shape: Shape) -> float:
    from flashnumba.stages.backward.mma_tiles import dkdv_tiles, dq_tiles

    return count.by_rows_and_keys(shape, dq_tiles(shape.d, shape.arch).own, dkdv_tiles(shape.d, shape.arch).own)


def moved_by_one_pass(shape: Shape) -> float:
    from flashnumba.stages.backward.mma_tiles import one_pass_tiles

    return count.one_pass(shape, one_pass_tiles(shape.d, shape.arch).own)


def draw_bars(axes: Axes, values: dict[str, float], title: str, unit: str) -> None:
    axes.barh(range(len(values)), list(values.values()), color=figures.BLUE, height=0.6)
    axes.set_yticks(range(len(values)), list(values), fontsize=8)
    axes.invert_yaxis()
    axes.set(title=title, xlabel=unit)


def draw(results: Sequence[Result]) -> Figure:
    """dS of a real head, the products and the bytes of each way, and the errors."""
    figure, (gradient, products, moved, errors) = figures.four_panels("the gradients of attention")
    data = load_minilm()
    q, k, v = (x[0, 2, 340:404].astype(np.float64) for x in (data.q, data.k, data.v))
    do = np.random.default_rng(0).standard_normal(q.shape)
    p = safe(np.where(reference.visible(64, 64, True), q @ k.T / np.sqrt(q.shape[-1]), -np.inf))  # [M, N]
    ds = p * (do @ v.T - ((p @ v) * do).sum(-1)[:, None])  # [M, N]
    most = np.quantile(np.abs(ds[ds != 0]), 0.97)  # beside the pair with a score of 79 all else were white
    gradient.imshow(ds, cmap="RdBu", vmin=-most, vmax=most)
    title = f"dS of 64 tokens, causal, colours to {most:.2g}: each row's sum is 0"
    gradient.set(title=title, xlabel="key", ylabel="query")
    draw_bars(products, dict(count.PRODUCTS), "products of M x N x D", "products")
    ways = {"not fused": count.unfused, "simt": moved_by_simt, "mma": moved_by_mma, "one_pass": moved_by_one_pass}
    size = f"{PICTURED.m} x {PICTURED.n} x {PICTURED.d} {PICTURED.element}"
    draw_bars(moved, {name: way(PICTURED) / 2**20 for name, way in ways.items()}, f"device memory: {size}", "MB")
    figures.errors(errors, results, label=lambda r: f"{r.rung.name}, {r.case.size.replace(' float16', '')}")
    return figure


STAGE = Stage(
    name="backward",
    title="The gradients of attention",
    question="How do gradients flow back through scores that were never stored?",
    teaches="recomputation, five GEMMs",
    lesson="08_backward",
    rungs=(
        Rung(
            "dense", "reference", dense, count.Traffic("2QKVO+8S", count.unfused),
            summary="the chain rule as written, all scores at once",
        ),
        Rung(
            "blocked", "reference", blocked, None,
            summary="weights again from lse, key block by key block",
        ),
        kernel(
            "simt", "simt", "2(QO+KV/tile)", moved_by_simt,
            "float32 on CUDA cores: dQ by rows, then dK and dV by keys",
        ),
        kernel(
            "mma", "mma", "2(QO+KV/tile)", moved_by_mma,
            "tensor cores, weights in registers, no atomics", "80",
        ),
        kernel(
            "one_pass", "mma", "QO/tile+dQ/tile", moved_by_one_pass,
            "five products, dQ by atomics: not the same bits every time", "80",
        ),
    ),
    cases=cases,
    draw=draw,
)  # fmt: skip
