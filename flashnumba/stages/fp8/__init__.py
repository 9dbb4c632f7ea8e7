"""The stage fp8: eight bits an element, and what has to be done that attention survives it.

``codec.py`` has the formats, ``scales.py`` what is done beforehand, ``reference.py`` attention with every rounding.
Kernels are in ``mma.py`` and ``split.py``. Products of FP8 on sm_90 are wgmma's: a kernel of them belongs in
``wgmma.py``, with its planner in :data:`.mma.PLANS`, a rung for "90a" after ``k32`` below, and its row of
:data:`flashnumba.attention.CHOICES` before ``fp8.emulated``; reference, scales and tests are those of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from flashnumba.data import load_minilm
from flashnumba.stages import figures
from flashnumba.stages.flash_forward import reference as float_reference
from flashnumba.stages.flash_forward.blas import THREADS
from flashnumba.stages.fp8 import codec, reference, scales, study
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


def coded(case: Case) -> tuple[list[np.ndarray], dict[str, np.ndarray], str]:
    """(codes of q, k and v, their scales by name, the format) of a case's numbers."""
    fmt, scaling = str(case.inputs["fmt"]), str(case.inputs["scaling"])
    codes, factors = zip(*(scales.quantize(case.inputs[x], fmt, scaling) for x in "qkv"), strict=True)
    return list(codes), dict(zip(DESCALES, factors, strict=True)), fmt


def stand_for(case: Case) -> list[np.ndarray]:
    """q, k and v as the codes and scales have them, float64."""
    codes, descales, fmt = coded(case)
    return [
        codec.decode(x, fmt).astype(np.float64) * scales.per_row(scale, x.shape).astype(np.float64)
        for x, scale in zip(codes, descales.values(), strict=True)
    ]


def case(name: str, q: np.ndarray, k: np.ndarray, v: np.ndarray, fmt: str, scaling: str, causal: bool = False) -> Case:
    """A case of this stage: q ``[..., M, D]``, k and v ``[..., N, D]`` float16, which kernels get quantised.

    The judge is attention of what the codes stand for in float64: what quantising loses is not the kernel's fault.
    """
    given = {"q": q, "k": k, "v": v, "fmt": np.array(fmt), "scaling": np.array(scaling), "causal": np.array(causal)}
    several = q.size // (q.shape[-2] * q.shape[-1])
    lengths = f"{f'{several}x' if several > 1 else ''}{q.shape[-2]}x{k.shape[-2]}x{q.shape[-1]}"
    size = f"{lengths} {q.dtype.name}{' causal' if causal else ''}"
    made = Case(f"{name}, {fmt} by {scaling}", given, np.empty(0), np.empty(0), size)
    codes, descales, _ = coded(made)
    o, _ = float_reference.dense(*stand_for(made), causal=causal)  # [..., M, D]
    with THREADS:  # products of a tile are too small to share out
        low, _ = reference.attention(*codes, fmt, **descales, causal=causal)  # [..., M, D]
    return replace(made, reference=o, lowprec=low.astype(q.dtype))


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


def by_values(case: Case, machine: str) -> np.ndarray:
    return float_reference.online(*stand_for(case), causal=bool(case.inputs["causal"]))[0]


def by_codes(case: Case, machine: str) -> np.ndarray:
    codes, descales, fmt = coded(case)
    return reference.scaled_after(*codes, fmt, *descales.values(), causal=bool(case.inputs["causal"]))


def by_kernel(case: Case, machine: str, name: str) -> np.ndarray:
    from flashnumba.stages import fp8_heads

    codes, descales, fmt = coded(case)
    causal = bool(case.inputs["causal"])
    return fp8_heads.forward(*codes, plans()[name], fmt=fmt, **descales, causal=causal, machine=machine)[0]


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
    figures.errors(errors, results, label=lambda r: f"{r.rung.name}, {r.case.name.split(', ')[-1]}")
    return figure


STAGE = Stage(
    name="fp8",
    title="FP8",
    question="How much of attention survives eight bits?",
    teaches="e4m3, e5m2, scales, a permutation of P",
    lesson="09_fp8",
    rungs=(
        Rung("values", "reference", by_values, None, summary="codes times scales first, then attention, tile by tile"),
        Rung("codes", "reference", by_codes, None, summary="products of codes, and the scales afterwards, once"),
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
