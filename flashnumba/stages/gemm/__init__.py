"""The stage gemm: C = A B, from one thread an element to tensor cores. ``reference.py`` tells the mathematics."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import DTypeLike

from flashnumba.data import load_minilm
from flashnumba.stages import figures
from flashnumba.stages.gemm import reference
from flashnumba.stages.gemm.traffic import LANES, SECTOR, Lanes, Tiled
from flashnumba.stages.stage import Case, Result, Rung, Stage

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["STAGE"]


def case(name: str, a: np.ndarray, b: np.ndarray, dtype: DTypeLike) -> Case:
    """A case of this stage: ``a [M, K]`` and ``b [K, N]`` in ``dtype``."""
    a, b = a.astype(dtype), b.astype(dtype)  # keeps which axis is packed
    size = f"{a.shape[0]}x{b.shape[1]}x{a.shape[1]} {a.dtype.name}"
    return Case(name, {"a": a, "b": b}, reference.naive(a, b), reference.low_precision(a, b), size)


def cases(machine: str, full: bool) -> Sequence[Case]:
    """Scores of one real head, ``Q K^T``: rows of Q and, in K^T, columns are packed. And weights times V in sizes that
    fit no tile: the softmax of these scores and V, cut to odd lengths."""
    data = load_minilm()
    name = f"layer {data.layers[0]}, head 2"
    q, k, v = data.q[0, 2], data.k[0, 2], data.v[0, 2]
    scores = data.scores(0, 2)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    keep = 1 if machine == "cuda" else 4 if full else 8  # of the tokens that ask; half as many answer
    rows, steps = (511, 511) if machine == "cuda" else (63, 99) if full else (33, 19)
    return (
        case(f"{name}: Q K^T", q[::keep], k[:: 2 * keep].T, np.float16),
        case(f"{name}: weights V", weights[:rows, :steps], v[:steps, :31], np.float32),
    )


def kernel(name: str, traffic: Tiled, summary: str, tier: str = "simt", arch: str = "75") -> Rung:
    def run(case: Case, machine: str) -> np.ndarray:
        from flashnumba.stages.gemm.matmul import matmul

        return matmul(case.inputs["a"], case.inputs["b"], kernel=name, machine=machine)

    takes = (lambda case: case.lowprec.dtype != np.float32) if tier != "simt" else (lambda case: True)
    return Rung(name, tier, run, traffic, arch=arch, summary=summary, takes=takes)


def draw(results: Sequence[Result]) -> Figure:
    """Who reads what, the bytes that this makes, the banks of a tensor core's tile, and the error of each rung."""
    title = "the product: who reads which element, and how often"
    figure, (lanes, traffic, banks, errors) = figures.four_panels(title)
    draw_lanes(lanes)
    draw_traffic(traffic, results)
    draw_banks(banks)
    figures.errors(errors, [result for result in results if result.rung.tier != "reference"])
    return figure


@cache
def recorded() -> dict[str, dict[str, np.ndarray]]:
    """Where the first warp loads in the first step of k, float32 and 32 x 32, for each kernel and operand: bytes from
    the operand's start."""
    from flashnumba.machine.emulator.accesses import record
    from flashnumba.stages.gemm.one_element import THREADS, make_coalesced, make_naive

    a, b, c = (np.zeros((LANES, LANES), np.float32) for _ in range(3))
    found = {}
    for made in (make_naive("float32"), make_coalesced("float32")):
        seen = record(made, 1, THREADS, (a, b, c), checks=False)
        loads = {operand: seen.of(operand) for operand in "ab"}
        found[made.__name__] = {
            operand: np.unique(entries["offset"][(entries["thread"] < LANES) & (entries["number"] == i)])
            for i, (operand, entries) in enumerate(loads.items())
        }
    return found


def draw_lanes(axes: Axes) -> None:
    """What one warp loads in one step of k, A and B beside one another, as recorded: elements, and sectors around."""
    from matplotlib.colors import ListedColormap

    n, gap, per_sector = LANES, 6, SECTOR // 4
    colors = ListedColormap(["#eceff1", "#a6cee3", figures.BLUE])
    for i, (name, loads) in enumerate(recorded().items()):
        for j, (operand, offsets) in enumerate(loads.items()):
            used = np.zeros(n * n, bool)
            used[offsets // 4] = True
            moved = used.reshape(-1, per_sector).any(1).repeat(per_sector)
            left, top = j * (n + gap), i * (n + gap)
            where = (left, left + n, top + n, top)
            axes.imshow((used + moved * 1).reshape(n, n), cmap=colors, vmin=0, vmax=2, extent=where, aspect="auto")
            said = f"{operand.upper()}: {used.sum()} of {moved.sum()} elements used"
            axes.text(left + n / 2, top - 0.8, said, ha="center", fontsize=8)
        axes.text(-1.5, i * (n + gap) + n / 2, name, rotation=90, va="center", ha="right", fontsize=9)
    axes.set(xlim=(-4, 2 * n + gap + 1), ylim=(2 * n + gap + 1, -4), xticks=[], yticks=[])
    axes.set_title("one warp's loads in one step of k, and their sectors")
    axes.spines[:].set_visible(False)


def draw_traffic(axes: Axes, results: Sequence[Result]) -> None:
    """Bytes read for an element of C and a step of k, by count, in float32 and in 16 bits."""
    rungs = [rung for rung in {r.rung.name: r.rung for r in results}.values() if rung.tier != "reference"]
    for itemsize, color, label in ((4, figures.BLUE, "float32"), (2, figures.GREEN, "16 bits")):
        shown = [(i, r) for i, r in enumerate(rungs) if itemsize == 2 or r.tier == "simt"]
        at = [i + (0.2 if itemsize == 2 else -0.2) for i, _ in shown]
        values = [r.traffic.per_step(itemsize) for _, r in shown]
        axes.barh(at, values, color=color, height=0.36, label=label)
        for y, value in zip(at, values, strict=True):
            axes.text(value * 1.1, y, f"{value:.3g}", va="center", fontsize=7)
    axes.set_yticks(range(len(rungs)), [r.name for r in rungs], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set(title="bytes read for an element of C and a step of k", xlabel="by count", xlim=(0.005, 200))
    axes.legend(fontsize=8, loc="lower right")


def draw_banks(axes: Axes) -> None:
    """Which of eight groups of four banks each chunk of eight rows of 128 bytes lies in, in order and swizzled."""
    from flashnumba.tiles.swizzle import place_of

    row, chunk = np.mgrid[:8, :8]
    for left, swizzled in ((0, False), (10, True)):
        group = place_of(row, chunk, 8, swizzled) // 16 % 8
        axes.imshow(group, cmap="viridis", alpha=0.75, extent=(left, left + 8, 8, 0), aspect="auto")
        for r, c in np.ndindex(8, 8):
            axes.text(left + c + 0.5, r + 0.5, group[r, c], ha="center", va="center", fontsize=8)
        cycles = int(np.bincount(group[:, 2], minlength=8).max())
        axes.plot([left + 2, left + 3, left + 3, left + 2, left + 2], [0, 0, 8, 8, 0], color=figures.RED, lw=2)
        name = "swizzled" if swizzled else "in order"
        axes.text(left + 4, 8.7, f"{name}: {cycles} cycle{'s' if cycles > 1 else ''}", ha="center", fontsize=9)
    axes.set(xlim=(-0.3, 18.3), ylim=(9.3, -0.3), xticks=[], yticks=[], ylabel="row of the tile")
    axes.set_title("which four of 32 banks, for each 16 bytes; ldmatrix reads a column")
    axes.spines[:].set_visible(False)


STAGE = Stage(
    name="gemm",
    title="Matrix products",
    question="Where does an operand's element come from when it is used again?",
    teaches="tiles, shared memory, register tiles, tensor cores",
    lesson="03_gemm",
    rungs=(
        Rung(
            "dense", "reference", lambda case, machine: reference.naive(case.inputs["a"], case.inputs["b"]), None,
            summary="the formula",
        ),
        Rung(
            "blocked", "reference", lambda case, machine: reference.blocked(case.inputs["a"], case.inputs["b"]),
            None, summary="a sum of products of tiles",
        ),
        kernel("naive", Lanes(LANES, 1), "one thread an element; a warp walks down a column"),
        kernel("coalesced", Lanes(1, LANES), "one thread an element; a warp walks along a row"),
        kernel("shared_tile", Tiled(32, 32), "a block loads tiles for all its threads"),
        kernel("register_tile", Tiled(128, 128), "16 x 8 elements a thread, loads of 128 bits"),
        kernel("mma", Tiled(128, 256), "mma.sync, and a ring of tiles filled by cp.async", "mma"),
        kernel("wgmma", Tiled(128, 256), "wgmma, and a warpgroup that does nothing but load", "wgmma", arch="90a"),
    ),
    cases=cases,
    draw=draw,
)  # fmt: skip
