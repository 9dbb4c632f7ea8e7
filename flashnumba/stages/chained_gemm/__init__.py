"""The stage chained_gemm: P lies otherwise than the second product wants it. ``reference.py`` has three ways out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from flashnumba.data import load_minilm
from flashnumba.stages import figures, heads
from flashnumba.stages.chained_gemm import reference
from flashnumba.stages.chained_gemm.layouts import ORDERS, accumulators, fused, operands, order_of, senders, unit
from flashnumba.stages.flash_forward import case as float_case
from flashnumba.stages.flash_forward import count as flash_count
from flashnumba.stages.fp8 import reference as fp8_reference
from flashnumba.stages.heads import Planner
from flashnumba.stages.stage import Case, Result, Rung, Stage

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["STAGE", "plans"]

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


def plans() -> dict[str, Planner]:
    """The planner of each 16-bit kernel of this stage, by name."""
    from flashnumba.stages.chained_gemm import mma

    return mma.PLANS


def in_fp8(name: str, q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> Case:
    """A case whose float16 arrays hold e4m3 numbers, which kernels get as such; o is bfloat16."""
    coded = [x.astype(FP8) for x in (q, k, v)]
    made = float_case(f"{name}, in e4m3", *(x.astype(np.float16) for x in coded), causal)
    low, _ = fp8_reference.attention(*(x.view(np.uint8) for x in coded), "e4m3", causal=causal)  # [..., M, D]
    low = low.astype(np.float16)  # of bfloat16, which holds less
    return Case(made.name, {**made.inputs, "fp8": np.array(True)}, made.reference, low, made.size)


def cases(machine: str, full: bool) -> Sequence[Case]:
    """One real head; all keys for some queries, the last ones that look back, and both in FP8.

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
        (rows, keys), (last, before) = (slice(330, 394), slice(300, 400)), (slice(340, 380), slice(260, 380))

    def of(make: Callable[..., Case], rows: slice, keys: slice, causal: bool) -> Case:
        return make(name, q[..., rows, :], k[..., keys, :], v[..., keys, :], causal)

    return of(float_case, rows, keys, False), of(float_case, last, before, True), of(in_fp8, last, before, True)


def is_fp8(case: Case) -> bool:
    return "fp8" in case.inputs


def lane_by_lane(case: Case, machine: str, way: str) -> np.ndarray:
    """Each head by the notes' mmac, in NumPy."""
    q, k, v = (case.inputs[x] for x in "qkv")
    order = fused() if way == "registers" else None
    out = np.empty(q.shape)
    for at in np.ndindex(*q.shape[:-2]):
        out[at] = reference.attention(
            q[at], k[at], v[at], unit("mmac16x16x16"), way, order, causal=bool(case.inputs["causal"]), kpack=2
        )
    return out


def by_kernel(case: Case, machine: str, way: str) -> np.ndarray:
    from flashnumba.stages.chained_gemm import fp8

    q, k, v, causal = (case.inputs[x] for x in ("q", "k", "v", "causal"))
    if is_fp8(case):
        q, k, v = (x.astype(FP8) for x in (q, k, v))
        return fp8.forward(q, k, v, fp8.PLANS[way], causal=bool(causal), machine=machine)[0]
    return heads.forward(q, k, v, plans()[way], causal=bool(causal), machine=machine)[0]


def moved(shape: heads.Shape) -> flash_count.Moved:
    from flashnumba.stages.chained_gemm.mma import tiles_for

    tiles = tiles_for(shape.d, shape.arch)
    return flash_count.fused(shape, tiles.bm, tiles.bn)


def references() -> tuple[Rung, ...]:
    words = {
        "shared": "64 lanes of an mmac, P through shared memory",
        "shuffles": "the same, lanes exchange registers of P in as few rounds as there can be",
        "registers": "K's rows dealt out over four mmacs, so that P's registers only change names",
    }
    traffic = flash_count.Traffic("QO+KV/tile", lambda shape: flash_count.fused(shape, 16, 64))
    return tuple(
        Rung(f"{way}_64", "reference", partial(lane_by_lane, way=way), traffic, summary=said)
        for way, said in words.items()
    )


def kernels() -> tuple[Rung, ...]:
    words = {
        "shared": "K in mmac's order; P stored to shared memory, ldmatrix back",
        "shuffles": "K in mmac's order; lanes exchange words of P",
        "registers": "K in the order that P wants: packing is all",
    }
    traffic = flash_count.Traffic("QO+KV/tile", moved)
    sixteen = tuple(
        Rung(way, "mma", partial(by_kernel, way=way), traffic, "80", said, takes=lambda case: not is_fp8(case))
        for way, said in words.items()
    )
    eight = tuple(
        Rung(
            f"fp8_{way}", "mma", partial(by_kernel, way=way), None, "89",
            f"e4m3, products of 32; {said.replace('in mmac' + chr(39) + 's order', 'as it is')}", takes=is_fp8,
        )
        for way, said in words.items()
    )  # fmt: skip
    return sixteen + eight


def draw(results: Sequence[Result]) -> Figure:
    """The two layouts lane by lane, who sends to whom, what each way costs, and the errors."""
    from flashnumba.stages.chained_gemm import panels

    figure, (layouts, sent, costs, errors) = figures.four_panels("from one product to the next")
    mmac = unit("mmac16x16x16")
    title = "mmac: the lane that holds an element"
    panels.draw_layouts(layouts, accumulators(mmac, 16), operands(mmac, 16), np.arange(64) // 16, title)
    chains = {
        "mmac": (mmac, 16, None),
        "m16n8k16,\nmmac's order": (unit("m16n8k16"), 16, order_of(*ORDERS["strided"])),
        "m16n8k32 (FP8)": (unit("m16n8k32"), 32, None),
        "m16n8k16": (unit("m16n8k16"), 16, None),
    }
    panels.draw_senders(
        sent,
        {
            name: (senders(accumulators(u, n, order), operands(u, n)), np.arange(4) * (16 if u is mmac else 1))
            for name, (u, n, order) in chains.items()
        },
    )
    panels.draw_costs(costs)
    figures.errors(errors, results, label=lambda r: f"{r.rung.name}, {r.case.size.replace(' float16', '')}")
    return figure


STAGE = Stage(
    name="chained_gemm",
    title="Chained matrix products",
    question="Where must P's numbers go between the two products?",
    teaches="S's accumulator layout is not P's operand layout",
    lesson="05_chained_gemm",
    rungs=references() + kernels(),
    cases=cases,
    draw=draw,
)
