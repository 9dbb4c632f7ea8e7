"""A warp-specialised wgmma kernel, whole: its error against float64, and what happens when one of its steps is left
out."""

import numpy as np
import pytest

from flashnumba.machine import emulator
from flashnumba.machine.emulator import launch
from flashnumba.machine.tensor_map import TensorMap
from tests.kernels import hopper_forward as kernel


def relative_error(broken: str = "", tokens: int = 256, seed: int = 0, checks: bool = True) -> float:
    """max |out - ref| / max |ref| of one head of attention, with one thing broken."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, tokens, kernel.D)).astype(np.float16) for _ in range(3))
    out = np.full((1, tokens, kernel.D), np.nan, np.float16)
    scale = 1 / np.sqrt(kernel.D)
    maps = [TensorMap(a, (1, kernel.BN, kernel.PANEL), swizzle=128) for a in (q, k, v)]
    arguments = [*maps, out, tokens // kernel.BN, tokens, np.float32(scale * np.log2(np.e))]
    grid = (tokens // kernel.BM, 1)
    made = kernel.make_kernel(broken)
    launch(made, grid, 384, arguments, shared=kernel.SHARED, seed=seed, checks=checks)
    s = q.astype(np.float64) @ k.astype(np.float64).transpose(0, 2, 1) * scale
    p = np.exp(s - s.max(-1, keepdims=True))
    ref = p / p.sum(-1, keepdims=True) @ v.astype(np.float64)
    return np.abs(out - ref).max() / np.abs(ref).max()


@pytest.mark.parametrize("seed", [0, 5])
def test_error_is_that_of_the_hardware(seed):
    # The H200 has 2.7e-4 with these tiles.
    assert relative_error(seed=seed) < 3e-4


def test_more_tiles_than_slots_and_no_checks():
    assert relative_error(tokens=384, checks=False) < 4e-4


PLANTS = {
    "wgmma_fence": "MissingFence",
    "wgmma_wait": "AccumulatorInFlight",
    "full_wait": "ReadInFlight",
    "expect_tx": "Deadlock",
    "init_sync": "MbarrierMisuse",
    "init_fence": "MissingProxyFence",
    "ping_pong": "BarrierMismatch",
}


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("seed", [0, 3])
def test_planted_fault(plant, seed):
    with pytest.raises(getattr(emulator, PLANTS[plant])) as caught:
        relative_error(plant, seed=seed)
    assert caught.value.where[0][0].co_filename == kernel.__file__


@pytest.mark.parametrize("plant", ["early_release", "empty_wait"])
@pytest.mark.parametrize("seed", [0, 3])
def test_planted_fault_of_the_ring(plant, seed):
    # Without its wait for an empty slot the producer runs ahead and counts on an mbarrier whose phase is full.
    fault = {"early_release": "OverwriteInFlight", "empty_wait": "MbarrierMisuse"}[plant]
    with pytest.raises(getattr(emulator, fault)):
        relative_error(plant, tokens=512, seed=seed)


@pytest.mark.parametrize("plant", ["stride", "rescale"])
def test_wrong_arithmetic_shows_in_the_comparison(plant):
    assert relative_error(plant) > 0.1
