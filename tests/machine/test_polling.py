"""Loads that wait for other blocks: on the emulator they give way, and one that waits for nothing is a deadlock."""

import numpy as np
import pytest

from flashnumba.machine.emulator import Deadlock, launch
from flashnumba.machine.function import kernel
from flashnumba.machine.instructions import (
    global_address,
    ld_acquire_gpu_b32,
    ld_relaxed_gpu_b64,
    ordered,
    st_relaxed_gpu_b64,
    st_release_gpu_b32,
)
from flashnumba.machine.numba import cuda, uint32, uint64


@kernel(threads=1, concurrent=True)
def relay(words, seen):
    """Block b waits for block b + 1 and then lets block b - 1 go: the last block to start comes first."""
    b = cuda.blockIdx.x
    here = global_address(words) + uint64(8 * b)
    if b < cuda.gridDim.x - 1:
        value = ld_relaxed_gpu_b64(here)
        while value == uint64(0):
            value = ld_relaxed_gpu_b64(here)
        seen[b] = value
    if b > 0:
        st_relaxed_gpu_b64(here - uint64(8), uint64(cuda.gridDim.x - b + (1 << 40)))


@kernel(threads=1, concurrent=True)
def count_up(flag, log):
    """Two blocks take turns on one word."""
    b = cuda.blockIdx.x
    at = global_address(flag)
    for i in range(5):
        turn = uint32(2 * i + b)
        while ld_acquire_gpu_b32(at) != turn:
            pass
        log[2 * i + b] = b
        st_release_gpu_b32(at, uint32(turn + uint32(1)))


@pytest.mark.parametrize("seed", range(4))
def test_a_block_that_waits_lets_the_others_run(seed):
    words, seen = np.zeros(6, np.uint64), np.zeros(6, np.uint64)
    launch(relay, 6, 1, (words, seen), seed=seed)
    np.testing.assert_array_equal(seen, [(1 << 40) + i for i in (5, 4, 3, 2, 1)] + [0])


@pytest.mark.parametrize("seed", range(4))
def test_a_word_that_changes_often(seed):
    flag, log = np.zeros(1, np.uint32), np.full(10, -1, np.int64)
    launch(count_up, 2, 1, (flag, log), seed=seed)
    np.testing.assert_array_equal(log, [0, 1] * 5)
    assert flag[0] == 10


def test_nobody_left_to_wait_for():
    with pytest.raises(Deadlock, match=r"thread 0 waits for a change of the 4 bytes .*, which stay 0x3") as caught:
        launch(count_up, 1, 1, (np.full(1, 3, np.uint32), np.zeros(10, np.int64)))
    assert "ld_acquire_gpu_b32(at) != turn" in str(caught.value)


def test_two_that_wait_for_each_other(monkeypatch):
    monkeypatch.setattr(ordered, "PATIENCE", 100)
    with pytest.raises(Deadlock, match="a change of the 4 bytes"):
        launch(count_up, 2, 1, (np.full(1, 3, np.uint32), np.zeros(10, np.int64)))
