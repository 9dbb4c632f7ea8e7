"""Attention of every head of the real data, within its budget: what a trained transformer asks, not what a test draws.

On the emulator the kernel ``mma`` computes three heads whole (one in CI), and of each other head one tile of 128
queries before all 512 keys, a different one from head to head. On a GPU every kernel computes all 36 heads whole.
"""

from __future__ import annotations

import os

import numpy as np
import pytest

from flashnumba.compare import assert_close
from flashnumba.data import load_minilm
from flashnumba.machine import emulator
from flashnumba.stages import heads
from flashnumba.stages.flash_forward import mma, plans
from flashnumba.stages.flash_forward.reference import dense, low_precision
from flashnumba.tiles.forward import tiles_for

LAYERS, HEADS, LENGTH = 3, 12, 512
TILE = tiles_for(32, "90a").bm
WHOLE = {(0, 2)} if "CI" in os.environ else {(0, 2), (1, 8), (2, 0)}
"""Heads that the emulator computes whole; the first has the score of 79."""


def of_head(layer: int, head: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k, v of one head, ``[1, 1, 512, 32]`` float16."""
    data = load_minilm()
    q, k, v = (x[layer, head][None, None] for x in (data.q, data.k, data.v))
    return q, k, v


def assert_right(o, lse, q, k, v, causal, what):
    for name, got, expected, low in zip(
        ("o", "lse"), (o, lse), dense(q, k, v, causal=causal), low_precision(q, k, v, causal=causal), strict=True
    ):
        assert_close(got, expected, low, what=f"{name} of {what}")


EVERY = [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]
SOME = [(layer, head) for layer, head in EVERY if (layer, head) in {(0, 2), (1, 8), (2, 0)} or head % 3 == layer]
"""In CI, so that each layer and each number of a head is there; all of them anywhere else."""


@pytest.mark.parametrize(("layer", "head"), SOME if "CI" in os.environ else EVERY)
def test_every_head(layer, head):
    """Causal for every second head: its queries are then the last of the keys up to them."""
    q, k, v = of_head(layer, head)
    causal = head % 2 == 1
    if (layer, head) not in WHOLE:
        end = TILE * ((layer * HEADS + head) // 2 % (LENGTH // TILE) + 1)
        q = q[:, :, end - TILE : end]
        if causal:
            k, v = k[:, :, :end], v[:, :, :end]
    (launch,) = mma.plan_mma(heads.Shape("float16", 1, 1, 1, q.shape[2], k.shape[2], 32, causal)).launches
    o, lse = np.full_like(q, np.nan), np.full(q.shape[:3], np.nan, np.float32)
    args = (q, k, v, o, lse, np.float32(32**-0.5), np.int32(causal))
    emulator.launch(launch.kernel, launch.grid, launch.threads, args, shared=launch.shared, checks=False)
    assert_right(o, lse, q, k, v, causal, f"layer {layer}, head {head}")


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", plans())
def test_all_heads_at_once(kernel, causal):
    """Their tail, too: 500 of the queries. Each head is judged by its own budget."""
    data = load_minilm()
    q, k, v = data.q[:, :, 12:], data.k, data.v
    o, lse = heads.forward(q, k, v, plans()[kernel], causal=causal, machine="cuda")
    for layer, head in np.ndindex(LAYERS, HEADS):
        at = (layer, head)
        assert_right(o[at], lse[at], q[at], k[at], v[at], causal, f"layer {layer}, head {head}")
