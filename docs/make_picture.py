"""Draw the README's picture, docs/_static/ladder.svg: the stages as stairs, and how every kernel is run and judged.

Stages that exist come from flashnumba.ladder; run this again when one is added: ``python docs/make_picture.py``.
"""

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from flashnumba.ladder import STAGES

BLUE, GREY, INK = "#0072B2", "#9a9a9a", "#222222"
# Every step of the ladder and what it adds, in a few words that fit on it; README.md tells more.
STEPS = (
    ("softmax", "overflow,\nthree passes"),
    ("online_softmax", "one pass,\nmerge"),
    ("gemm", "tiles,\ntensor cores"),
    ("flash_forward", "no S in\nmemory"),
    ("chained_gemm", "fragment\nlayouts"),
    ("staged_buffers", "copies in\nflight"),
    ("causal_balance", "triangular\nwork"),
    ("backward", "gradients by\nrecomputing"),
    ("fp8", "scales,\npermutation"),
    ("sparsity", "blocks\nleft out"),
    ("flash_mla", "latent,\npaged KV"),
)


def stairs(axes: Axes) -> None:
    """A step a stage: filled where it exists, dashed where it is planned."""
    there = {stage.name for stage in STAGES}
    for i, (name, adds) in enumerate(STEPS):
        exists, height = name in there, 1.0 + 0.36 * i
        style = {"fc": BLUE, "ec": "white"} if exists else {"fc": "white", "ec": GREY, "ls": "--"}
        axes.add_patch(Rectangle((i + 0.03, 0), 0.94, height, lw=1.2, **style))
        colour = "white" if exists else INK
        axes.text(i + 0.5, height - 0.12, name.replace("_", "\n"), ha="center", va="top", color=colour, weight="bold")
        axes.text(i + 0.5, height - 0.56, adds, ha="center", va="top", color=colour, fontsize=7.5)


def box(axes: Axes, x: float, y: float, width: float, text: str, colour: str) -> None:
    shape = FancyBboxPatch(
        (x, y), width, 0.62, boxstyle="round,pad=0.02,rounding_size=0.08", fc="white", ec=colour, lw=1.4
    )
    axes.add_patch(shape)
    axes.text(x + width / 2, y + 0.31, text, ha="center", va="center", fontsize=9, color=INK)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 1.1})


def machines(axes: Axes) -> None:
    """One kernel in Python, two machines, one judge."""
    box(axes, 0.05, 4.0, 1.55, "a kernel in Python\n(Numba CUDA)", BLUE)
    box(axes, 2.3, 4.45, 1.75, "an NVIDIA GPU:\nspeed", BLUE)
    box(axes, 2.3, 3.55, 1.75, "an emulator, any CPU:\nraces, deadlocks named", BLUE)
    box(axes, 4.75, 4.0, 1.75, "beside NumPy float64,\nwithin an error budget", BLUE)
    for y in (4.76, 3.86):
        arrow(axes, (1.64, 4.31), (2.26, y))
        arrow(axes, (4.09, y), (4.71, 4.31))


def draw() -> Figure:
    figure = Figure(figsize=(11, 5.2), facecolor="white")
    axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
    axes.set(xlim=(0, len(STEPS)), ylim=(0, 5.25))
    axes.axis("off")
    stairs(axes)
    machines(axes)
    axes.text(0.05, 2.95, "filled: here    dashed: planned", fontsize=8.5, color=INK)
    return figure


if __name__ == "__main__":
    # The same bytes at every run, so that a change in the file is a change in the picture.
    matplotlib.rcParams["svg.hashsalt"] = "flashnumba"
    place = Path(__file__).parent / "_static" / "ladder.svg"
    place.parent.mkdir(exist_ok=True)
    draw().savefig(place, metadata={"Date": None})
    print(place)
