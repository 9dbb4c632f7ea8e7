"""Pictures of the stage: bytes a token, intensity and the roofline, the page table, and the parts of the schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from flashnumba.stages.figures import BLUE, GREEN, GREY, ORANGE, RED
from flashnumba.stages.flash_mla.schedule import SplitPlan
from flashnumba.stages.flash_mla.sizes import DV, PAGE, D, token_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["CACHES", "H200", "bytes_a_token", "draw_bytes", "draw_pages", "draw_parts", "draw_roofline", "intensity"]

H200 = {"bytes": 4.25e12, "flops": {"wgmma": 692e12, "mma.sync": 404e12}}
"""What a copy of 1 GiB, and our products of float16 matrices of 8192 x 8192, reach there a second (docs/results)."""
CACHES = ("MHA, 128 heads", "GQA, 8 heads", "MLA, 16 bits", "MLA, 8 bits")


def bytes_a_token(heads: int = 128, groups: int = 8, d: int = 128) -> dict[str, int]:
    """What one layer keeps of a token: all keys and values; those of some heads; one latent row; that in 8 bits."""
    return dict(zip(CACHES, (2 * 2 * heads * d, 2 * 2 * groups * d, 2 * D, token_bytes()), strict=True))


def intensity(heads: int, tokens: int, nbytes: int = 2 * D) -> float:
    """Operations for each byte of the cache: every row of the cache meets ``heads x tokens`` rows of queries."""
    return 2 * heads * tokens * (D + DV) / nbytes


def draw_bytes(axes: Axes) -> None:
    """Bytes a token and layer of each kind of cache."""
    sizes = bytes_a_token()
    axes.barh(range(len(sizes)), list(sizes.values()), color=[GREY, GREY, BLUE, GREEN], height=0.6)
    for y, nbytes in enumerate(sizes.values()):
        axes.text(nbytes * 1.1, y, f"{nbytes}", va="center", fontsize=9)
    axes.set_yticks(range(len(sizes)), list(sizes))
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set(title="bytes a token and layer", xlabel="bytes", xlim=(200, max(sizes.values()) * 4))


def draw_roofline(axes: Axes, measured: Mapping[tuple[str, float], float] | None = None) -> None:
    """What memory and products allow at each intensity, and where so many heads and tokens stand.

    Args:
        measured: operations a second by (label, intensity).
    """
    x = np.geomspace(8, 2048, 200)
    for (name, flops), color in zip(H200["flops"].items(), (GREY, BLUE), strict=True):
        axes.plot(x, np.minimum(flops, x * H200["bytes"]) / 1e12, color=color, label=f"H200, {name}")
        axes.plot([flops / H200["bytes"]] * 2, [1, flops / 1e12], color=color, lw=0.7, ls=":")
    marks = [(h, s) for h, s in ((16, 1), (32, 1), (64, 1), (128, 1), (128, 4))]
    for h, s in marks:
        at = intensity(h, s)
        axes.plot(at, min(H200["flops"]["mma.sync"], at * H200["bytes"]) / 1e12, "o", color=ORANGE, ms=5)
        axes.annotate(f"{h} x {s}", (at, min(404.0, at * 4.25)), (4, -13), textcoords="offset points", fontsize=8)
    for (label, at), flops in (measured or {}).items():
        axes.plot(at, flops / 1e12, "x", color=RED, ms=7)
        axes.annotate(label, (at, flops / 1e12), (5, -4), textcoords="offset points", fontsize=8, color=RED)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(title="heads x query tokens on the roofline", xlabel="operations a byte of cache", ylabel="TFLOP/s")
    axes.legend(fontsize=8, loc="lower right")


def draw_pages(axes: Axes, block_table: np.ndarray, lengths: Sequence[int], pages: int) -> None:
    """Which page each request's tokens are in: a column a page of the pool, its shade how full it is."""
    colors = (BLUE, ORANGE, GREEN, RED, "#CC79A7", "#56B4E9")
    axes.bar(range(pages), [1] * pages, width=0.9, color="none", edgecolor=GREY, lw=0.6)
    for b, length in enumerate(lengths):
        for i in range(-(-int(length) // PAGE)):
            page, held = int(block_table[b, i]), min(PAGE, int(length) - i * PAGE) / PAGE
            axes.bar(page, held, width=0.9, color=colors[b % len(colors)])
            axes.text(page, 1.03, f"{b}.{i}", ha="center", fontsize=7)
    axes.set(title="pages of the pool: request.page, filled as far as there are tokens", xlabel="page", ylim=(0, 1.2))
    axes.set_yticks([])


def draw_parts(axes: Axes, planned: SplitPlan, lengths: np.ndarray, fixed: int = 5) -> None:
    """A lane a part: its pieces, a colour for each request, each with what a request costs beside its pages."""
    colors = (BLUE, ORANGE, GREEN, RED, "#CC79A7", "#56B4E9", "#F0E442")
    ends = np.zeros(len(planned.parts))
    for part, request, first, end, _ in planned.pieces(lengths):
        axes.barh(part, end - first, left=ends[part], color=colors[request % len(colors)], height=0.75)
        axes.barh(part, fixed, left=ends[part] + end - first, color="#DDDDDD", height=0.75)
        if end - first > 3:
            axes.text(ends[part] + (end - first) / 2, part, str(request), ha="center", va="center", fontsize=7)
        ends[part] += end - first + fixed
    alone = max(-(-int(n) // PAGE) + fixed for n in lengths)
    axes.plot([alone] * 2, [-0.6, len(ends) - 0.4], color=RED, lw=1, ls="--", label="a block for each request")
    axes.invert_yaxis()
    axes.legend(fontsize=8, loc="lower right")
    axes.set(title="parts: pages of requests, and what each costs beside them", xlabel="pages", ylabel="part")
