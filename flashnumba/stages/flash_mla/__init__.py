"""The stage flash_mla: one latent row for all heads, read once and used twice, in pages, in parts, and in 8 bits.

``reference.py`` has the algebra, ``sizes.py`` who does what in a kernel, ``schedule.py`` which block does what.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from flashnumba.data import load_minilm
from flashnumba.stages import figures
from flashnumba.stages.flash_mla import codec, reference
from flashnumba.stages.flash_mla.sizes import DV, PAGE, D
from flashnumba.stages.stage import Case, Result, Rung, Stage

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["HEADS", "STAGE", "case", "latent_rows", "stored"]

HEADS = 10
"""Query heads of the cases: eight whose keys and values are the latent columns, two whose keys are the others."""
SCALE = D**-0.5
WIDTH = 32


def latent_rows(layer: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Real heads as latent attention: (q ``[512, HEADS, 576]``, rows ``[512, 576]``) float16.

    A latent row is the keys and values of eight heads, ``8 (32 + 32) = 512`` numbers, and the keys of two more. What
    makes a head's own keys of it picks 32 columns, so its query, absorbed, has its numbers there and zeros elsewhere.
    Scores are those of the heads: their scale, ``32^-0.5``, over ours is in q.
    """
    data = load_minilm()
    heads = [data.k[layer, h] for h in range(8)] + [data.v[layer, h] for h in range(8)]
    rows = np.concatenate([*heads, data.k[layer, 8], data.k[layer, 9]], -1)  # [512, 576]
    q = np.zeros((len(rows), HEADS, D), np.float16)
    for h in range(HEADS):
        at = WIDTH * h if h < 8 else DV + WIDTH * (h - 8)
        q[:, h, at : at + WIDTH] = data.q[layer, h].astype(np.float64) * (WIDTH**-0.5 / SCALE)
    return q, rows


def sizes_of(case: Case) -> tuple[np.ndarray, np.ndarray, str, bool]:
    """(q ``[S, HEADS, 576]``, rows ``[N, 576]``, the format or nothing, causal) of a case."""
    given = case.inputs
    return given["q"].reshape(-1, HEADS, D), given["k"], str(given["fmt"]), bool(given["causal"])


def stored(case: Case) -> np.ndarray:
    """``[N, 576]`` float64: what the cache holds of the rows."""
    _, rows, fmt, _ = sizes_of(case)
    return codec.dequantize(codec.quantize(rows, fmt), fmt, rotated=rows.dtype) if fmt else rows.astype(np.float64)


def case(name: str, q: np.ndarray, rows: np.ndarray, fmt: str = "", causal: bool = False) -> Case:
    """A case of this stage: q ``[S, HEADS, 576]`` and rows ``[N, 576]`` float16, kept as they are or in 8 bits.

    The judge is attention to what the cache holds in float64: what quantising loses is not the kernel's fault.
    """
    given = {"q": q.reshape(-1, D), "k": rows, "fmt": np.array(fmt), "causal": np.array(causal)}
    size = f"{len(given['q'])}x{len(rows)}x{D} {q.dtype.name}{' causal' if causal else ''}"
    made = Case(name, given, np.empty(0), np.empty(0), size)
    k, seen = stored(made), reference.seen(len(q), len(rows), causal)
    o, _ = reference.attend(q.astype(np.float64), k, k[:, :DV], SCALE, seen)  # [S, HEADS, 512]
    pages = np.zeros((1, len(rows), D), q.dtype)
    pages[0] = k  # as wide as kernels multiply it
    low, _ = rounded(q, pages[0], causal)
    return Case(name, given, o.reshape(-1, DV), low.reshape(-1, DV), size)


def rounded(q: np.ndarray, rows: np.ndarray, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    pages, table = in_pages(rows)
    return tuple(x[0] for x in reference.rounded(q[None], pages, table, [len(rows)], SCALE, causal))


def in_pages(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(pages ``[count, 64, width]``, block_table ``[1, count]`` int32): tokens in pages of no order."""
    count = -(-len(tokens) // PAGE)
    order = np.random.default_rng(7).permutation(count)
    pages = np.zeros((count, PAGE, tokens.shape[1]), tokens.dtype)
    padded = np.zeros((count * PAGE, tokens.shape[1]), tokens.dtype)
    padded[: len(tokens)] = tokens
    pages[order] = padded.reshape(count, PAGE, -1)
    return pages, order[None].astype(np.int32)


def cases(machine: str, full: bool) -> Sequence[Case]:
    """Two tokens of decoding that look back at a real text, one of them on a cache in 8 bits, and a prompt.

    On the emulator few tokens, and few rows unless ``full``; token 364 has the score of 79.
    """
    q, rows = latent_rows()
    steps, prompt, keys = (8, 365, 365) if machine == "cuda" else (4, 40, 365) if full else (1, 3, 70)
    name, few = "8 heads of layer 0 as latent rows", slice(365 - steps, 365)
    return (
        case(f"{name}, decoding", q[few], rows[365 - keys : 365], causal=True),
        case(f"{name}, decoding, e4m3", q[few], rows[365 - keys : 365], "e4m3", causal=True),
        case(f"{name}, prompt", q[365 - prompt : 365], rows[365 - keys : 365]),
    )


def decodes(case: Case) -> bool:
    return "decoding" in case.name


def eight(case: Case) -> bool:
    return bool(str(case.inputs["fmt"]))


def by_parts(case: Case, machine: str) -> np.ndarray:
    """Three parts of the keys, the last of which is empty, merged."""
    q, rows, _, causal = sizes_of(case)
    k, seen, n = stored(case), reference.seen(len(q), len(rows), causal), len(rows)
    cuts = ((0, n // 3), (n // 3, n), (n, n))
    parts = [reference.attend(q.astype(np.float64), k[a:b], k[a:b, :DV], SCALE, seen[:, a:b]) for a, b in cuts]
    return reference.merge(list(zip(*parts, strict=True)))[0].reshape(-1, DV)


def by_seesaw(case: Case, machine: str) -> np.ndarray:
    q, _, _, _ = sizes_of(case)
    return reference.seesaw(q.reshape(-1, D).astype(np.float64), stored(case), DV, SCALE)[0]


def by_decode(case: Case, machine: str) -> np.ndarray:
    from flashnumba.stages.flash_mla import host

    q, rows, fmt, causal = sizes_of(case)
    pages, table = in_pages(codec.quantize(rows, fmt) if fmt else rows)
    lengths = np.array([len(rows)], np.int32)
    return host.prepare_decode(
        q[None], pages[:, :, None], table, lengths, None, None, scale=SCALE, causal=causal,
        code=host.CODES[fmt] if fmt else "", machine=machine, stream=None,
    ).run()[0].reshape(-1, DV)  # fmt: skip


def by_prefill(case: Case, machine: str) -> np.ndarray:
    from flashnumba.stages.flash_mla import host

    q, rows, _, causal = sizes_of(case)
    out, _ = host.prefill(q[None], rows[None, :, None], scale=SCALE, causal=causal, machine=machine, stream=None)
    return out.reshape(-1, DV)


def draw(results: Sequence[Result]) -> Figure:
    """Bytes a token, where heads stand on the roofline, the schedule's parts, and the kernels' errors."""
    from flashnumba.stages.flash_mla import panels
    from flashnumba.stages.flash_mla.schedule import schedule

    figure, (sizes, roof, parts, errors) = figures.four_panels("latent attention")
    panels.draw_bytes(sizes)
    panels.draw_roofline(roof)
    lengths = np.array([900, 60, 4000, 0, 1500, 2600])
    panels.draw_parts(parts, schedule(lengths, 8), lengths)
    figures.errors(errors, results, label=lambda r: f"{r.rung.name}, {r.case.name.split(', ', 1)[-1]}")
    return figure


STAGE = Stage(
    name="flash_mla",
    title="FlashMLA",
    question="What is left to read when all heads share one latent row?",
    teaches="latent KV, paged cache, split KV",
    lesson="11_flash_mla",
    rungs=(
        Rung("parts", "reference", by_parts, None, summary="attention to parts of the keys, merged; one is empty"),
        Rung("seesaw", "reference", by_seesaw, None, summary="two blocks a step, O's columns in two halves",
             takes=lambda case: not bool(case.inputs["causal"])),
        Rung("decode", "mma", by_decode, None, "80", "few tokens on pages of a cache; V is K's first columns",
             lambda case: decodes(case) and not eight(case)),
        Rung("decode_fp8", "mma", by_decode, None, "80", "the same on a cache in 8 bits: 0.57 of the bytes",
             lambda case: decodes(case) and eight(case)),
        Rung("prefill", "mma", by_prefill, None, "80", "many tokens: a block for each tile of their rows",
             lambda case: not decodes(case)),
    ),
    cases=cases,
    draw=draw,
)  # fmt: skip
