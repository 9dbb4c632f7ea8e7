"""The stage fp8: eight bits an element, and what has to be done that attention survives it.

``codec.py`` has the formats, ``scales.py`` what is done beforehand, ``reference.py`` attention with every rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from flashnumba.data import load_minilm
from flashnumba.stages import figures
from flashnumba.stages.flash_forward import reference as float_reference
from flashnumba.stages.flash_forward.blas import THREADS
from flashnumba.stages.fp8 import reference, scales, study
from flashnumba.stages.stage import Case, Result, Rung, Stage

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from flashnumba.stages.heads import Planner

__all__ = ["STAGE", "case", "plans"]

FEW = 16
"""Queries that split-KV is for."""
DESCALES = ("q_descale", "k_descale", "v_descale")


def plans() -> dict[str, Planner]:
    """The planner of each kernel of this stage, by name."""
    from flashnumba.stages.fp8 import mma

    return mma.PLANS


def case(name: str, q: np.ndarray, k: np.ndarray, v: np.ndarray, fmt: str, scaling: str, causal: bool = False) -> Case:
    """A case of this stage: codes and scales of q ``[..., M, D]`` and of k and v ``[..., N, D]``.

    The judge is attention of what the codes stand for in float64: what quantising loses is not the kernel's fault.
    """
    quantised = [scales.quantize(x.astype(np.float32), fmt, scaling) for x in (q, k, v)]
    values = [scales.dequantize(*one, fmt) for one in quantised]
    o, _ = float_reference.dense(*values, causal=causal)  # [..., M, D]
    codes, factors = zip(*quantised, strict=True)
    descales = dict(zip(DESCALES, factors, strict=True))
    with THREADS:  # products of a tile are too small to share out
        low, _ = reference.attention(*codes, fmt, **descales, causal=causal)  # [..., M, D]
    several = q.size // (q.shape[-2] * q.shape[-1])
    words = f"{fmt} by {scaling}{' causal' if causal else ''}"
    size = f"{f'{several}x' if several > 1 else ''}{q.shape[-2]}x{k.shape[-2]}x{q.shape[-1]} {words}"
    inputs = dict(zip("qkv", codes, strict=True)) | descales
    return Case(name, {**inputs, "fmt": np.array(fmt), "causal": np.array(causal)}, o, low, size)


def cases(machine: str, full: bool) -> Sequence[Case]:
    """One real head: all queries with scales of blocks, the last ones that look back in e5m2, and a few as in decoding.

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
        (rows, keys), (last, before), few = (slice(330, 394), slice(300, 400)), (slice(340, 380), slice(260, 380)), 4

    def of(rows: slice, keys: slice, fmt: str, scaling: str, causal: bool) -> Case:
        return case(name, q[..., rows, :], k[..., keys, :], v[..., keys, :], fmt, scaling, causal)

    middle = slice(365 - few, 365)  # query 364 has the score of 79
    return (
        of(rows, keys, "e4m3", "block", False), of(last, before, "e5m2", "head", True),
        of(middle, slice(None), "e4m3", "head", False),
    )  # fmt: skip


def by_reference(case: Case, machine: str, weights: str) -> np.ndarray:
    descales = {name: case.inputs[name] for name in DESCALES}
    codes, fmt = (case.inputs[x] for x in "qkv"), str(case.inputs["fmt"])
    return reference.attention(*codes, fmt, **descales, causal=bool(case.inputs["causal"]), weights=weights)[0]


def by_kernel(case: Case, machine: str, name: str) -> np.ndarray:
    from flashnumba.stages import fp8_heads

    descales = {name: case.inputs[name] for name in DESCALES}
    return fp8_heads.forward(
        *(case.inputs[x] for x in "qkv"), plans()[name], fmt=str(case.inputs["fmt"]), **descales,
        causal=bool(case.inputs["causal"]), machine=machine,
    )[0]  # fmt: skip


def few(case: Case) -> bool:
    return case.inputs["q"].shape[-2] <= FEW


def draw(results: Sequence[Result]) -> Figure:
    """The two formats' numbers, rounding of real numbers, what scales buy, and the kernels' errors."""
    from flashnumba.stages.fp8 import panels

    figure, (lines, rounding, bought, errors) = figures.four_panels("attention in 8 bits")
    data = load_minilm()
    panels.draw_number_lines(lines)
    panels.draw_histogram(rounding, {name: getattr(data, name)[0].astype(np.float32) for name in "qkv"})
    q, k, v = (x[0, 2:3].astype(np.float32) for x in (data.q, data.k, data.v))
    outliers = [x[:, :512] for x in reference.fa3_inputs(512, 64, seed=1)]
    tables = {"real": study.rmse_table(q, k, v, befores=("", "incoherent"), scalings=("tensor", "block"))}
    tables["outliers"] = study.rmse_table(*outliers, befores=("", "incoherent"), scalings=("tensor", "block"))
    panels.draw_bars(bought, tables, "one real head, and normal numbers with outliers")
    figures.errors(errors, results, label=lambda r: f"{r.rung.name}, {r.case.size}")
    return figure


STAGE = Stage(
    name="fp8",
    title="FP8",
    question="How much of attention survives eight bits?",
    teaches="e4m3, e5m2, scales, and P rounded too",
    lesson="09_fp8",
    rungs=(
        Rung("float32_p", "reference", partial(by_reference, weights="float32"), None,
             summary="codes to float32, weights as they are"),
        Rung("rounded_p", "reference", partial(by_reference, weights="e4m3"), None,
             summary="weights times 2^8, rounded to e4m3, summed after that"),
        Rung("k32", "mma", partial(by_kernel, name="k32"), None, "89",
             "products of 32 codes; K in P's order, V by columns", lambda case: not few(case)),
        Rung("emulated", "mma", partial(by_kernel, name="emulated"), None, "75",
             "K and V stored in 8 bits, multiplied as float16", lambda case: not few(case)),
        Rung("split", "mma", partial(by_kernel, name="split"), None, "80",
             "decoding: few queries, half the bytes of keys", few),
    ),
    cases=cases,
    draw=draw,
)  # fmt: skip
