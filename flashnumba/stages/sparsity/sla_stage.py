"""What the stage sparsity shows of SLA: a case, two rungs, and the picture of its classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from flashnumba.data import load_minilm
from flashnumba.stages.sparsity import sla_reference as reference
from flashnumba.stages.sparsity.sla_low_precision import low_precision
from flashnumba.stages.stage import Case, Rung

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["KERNEL", "case", "cases", "draw_classes", "exact", "is_sla"]

D = 64
"""Kernels have tiles of 64 columns; real heads have 32, so that two heads beside one another fill one."""
SHARES = (0.5, 0.0)


def is_sla(case: Case) -> bool:
    """Whether a case of the stage is SLA's."""
    return str(case.inputs["method"]) == "sla"


def case(name: str, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Case:
    """q ``[..., M, 64]``, k and v ``[..., N, 64]`` of one dtype, and what SLA makes of them without a projection."""
    classes = reference.classify(q, k, *SHARES)
    low, _ = low_precision(q, k, v, classes)
    several = q.size // (q.shape[-2] * q.shape[-1])
    size = f"{f'{several}x' if several > 1 else ''}{q.shape[-2]}x{k.shape[-2]}x{q.shape[-1]} {q.dtype.name}"
    inputs = {"q": q, "k": k, "v": v, "method": np.array("sla"), "causal": np.array(False)}
    return Case(f"{name}, sla", inputs, by_states(q, k, v, classes), low.o, size)


def by_states(q: np.ndarray, k: np.ndarray, v: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """O in float64, the linear part by sums of states and not by weights: ``[..., M, D]``."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    block, tiles = reference.BLOCK, range(classes.shape[-1])
    phi_q, phi_k = reference.features(q), reference.features(k)
    keys = [slice(j * block, (j + 1) * block) for j in tiles]
    h = np.stack([phi_k[..., some, :].swapaxes(-1, -2) @ v[..., some, :] for some in keys], -3)  # [..., tiles, D, D]
    z = np.stack([phi_k[..., some, :].sum(-2) for some in keys], -2)  # [..., tiles, D]
    o = reference.attend(q, k, v, classes).o_s.copy()  # [..., M, D]
    linear = reference.linear_tiles(classes).astype(np.float64)  # [..., row tiles, key tiles]
    for i in range(classes.shape[-2]):
        rows = slice(i * block, (i + 1) * block)
        sums = np.einsum("...j,...jrc->...rc", linear[..., i, :], h)  # [..., D, D]
        total = phi_q[..., rows, :] @ (linear[..., i, None, :] @ z).swapaxes(-1, -2)  # [..., block, 1]
        o[..., rows, :] += phi_q[..., rows, :] @ sums / np.where(total == 0, 1, total)
    return o


def cases(machine: str, full: bool) -> Sequence[Case]:
    """Two real heads beside one another; on the emulator two tiles of them, or four if ``full``."""
    data = load_minilm()
    if machine == "cuda":
        name, heads = "18 pairs of heads of 3 layers", (data.q, data.k, data.v)
        q, k, v = (np.concatenate([x[:, ::2], x[:, 1::2]], -1) for x in heads)
    else:
        tokens = slice(320, 448) if not full else slice(192, 448)
        name = f"layer {data.layers[0]}, heads 2 and 3"
        q, k, v = (np.concatenate([x[0, 2, tokens], x[0, 3, tokens]], -1) for x in (data.q, data.k, data.v))
    return (case(name, q, k, v),)


def exact(case: Case) -> np.ndarray:
    """O in float64, with all weights in memory."""
    q, k, v = (case.inputs[x] for x in "qkv")
    return reference.attend(q, k, v, reference.classify(q, k, *SHARES)).o


def run(case: Case, machine: str) -> np.ndarray:
    from flashnumba.stages.sparsity import sla

    q, k, v = (case.inputs[x] for x in "qkv")
    options = sla.check_options(*SHARES, "softmax", "paper", None, False)
    return sla.forward(q, k, v, None, options, machine=machine)[0]


KERNEL = Rung(
    "sla", "mma", run, None, "80", "softmax over critical tiles, linear attention over the marginal ones", is_sla
)
"""The forward's kernels."""


def draw_classes(axes: Axes, q: np.ndarray, k: np.ndarray, critical: float = 0.25, negligible: float = 0.25) -> None:
    """The classes of one head's tiles, ``q`` and ``k`` ``[N, D]``; tiles of 16 tokens, as the sequence is short."""
    from matplotlib.colors import ListedColormap

    from flashnumba.stages.figures import BLUE, ORANGE

    classes = reference.classify(q, k, critical, negligible, block=16)  # [row tiles, key tiles]
    axes.imshow(classes, cmap=ListedColormap(["white", ORANGE, BLUE]), vmin=-1, vmax=1, aspect="auto")
    axes.set_title("SLA: critical (blue), marginal (orange), negligible (white)")
    axes.set_xlabel("tile of keys")
    axes.set_ylabel("tile of rows")
