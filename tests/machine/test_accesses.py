"""Recorded accesses: every one of them, where it went, and the pictures drawn from them."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from flashnumba.machine.access_map import draw_instruction, draw_map, draw_sweeps
from flashnumba.machine.emulator import Race, launch
from flashnumba.machine.emulator.accesses import record
from flashnumba.machine.function import kernel
from flashnumba.machine.instructions import global_address, ld_global_v4, st_global_b32
from flashnumba.machine.numba import cuda, int32, uint32, uint64


@kernel(threads=64)
def scale(x, out):
    """Element by element, the first column twice."""
    t = cuda.threadIdx.x
    row = cuda.blockIdx.x
    for col in range(t, x.shape[1], 64):
        out[row, col] = x[row, col] + x[row, 0]


@kernel(threads=32)
def by_address(x, out):
    """Four words a load, by address; one word a store."""
    raw = cuda.local.array(4, uint32)
    t = cuda.threadIdx.x
    ld_global_v4(raw, 0, global_address(x) + uint64(16 * t))
    st_global_b32(global_address(out) + uint64(4 * t), raw[0])


@kernel(threads=64)
def racy(out):
    word = cuda.shared.array(1, int32)
    word[0] = cuda.threadIdx.x
    out[cuda.threadIdx.x] = word[0]


X = np.arange(2 * 128, dtype=np.float32).reshape(2, 128)


def test_each_access_is_written_down_and_the_result_is_the_launch_s():
    out, same = np.zeros_like(X), np.zeros_like(X)
    got = record(scale, 2, 64, (X, out))
    assert got.report == launch(scale, 2, 64, (X, same))
    np.testing.assert_array_equal(out, same)
    assert got.arrays == ("x", "out")
    assert got.of("x")["nbytes"].sum() == got.report.loaded
    assert got.of("out", store=True)["nbytes"].sum() == got.report.stored
    assert len(got.of("x", store=True)) == len(got.of("out")) == 0
    times = got.times("x", X.nbytes).reshape(2, 128, 4)
    assert (times[:, 1:] == 1).all()
    assert (times[:, 0] == 129).all()
    mine = got.table[(got.table["block"] == 1) & (got.table["thread"] == 5)]
    assert mine["number"].tolist() == [0, 1, 2, 3, 4, 5]
    assert mine["store"].tolist() == [False, False, True] * 2
    assert mine["offset"].tolist() == [512 + 20, 512, 512 + 20, 512 + 276, 512, 512 + 276]
    with pytest.raises(ValueError, match="array is 'y'; the arrays are x, out"):
        got.of("y")


def test_accesses_by_address_are_told_to_their_array():
    out = np.zeros(32, np.float32)
    got = record(by_address, 1, 32, (X, out))
    np.testing.assert_array_equal(out, X.ravel()[: 32 * 4 : 4])
    assert got.of("x")["offset"].tolist() == [16 * t for t in range(32)]
    assert set(got.of("x")["nbytes"]) == {16}
    assert got.of("out", store=True)["offset"].tolist() == [4 * t for t in range(32)]
    assert got.sectors("x").tolist() == [16]
    assert got.sectors("out", store=True).tolist() == [4]


def test_a_warp_s_sectors():
    got = record(scale, 1, 64, (X[:1], np.zeros_like(X[:1])))
    # Two warps, two rounds: 32 neighbouring float32 are 4 sectors, the first column is one.
    assert sorted(got.sectors("x").tolist()) == [1] * 4 + [4] * 4


def test_a_row_of_a_wider_array_counts_from_its_own_start():
    out = np.zeros((1, 64), np.float32)
    got = record(scale, 1, 64, (X[1:, 32:96], out))
    assert got.of("x")["offset"].min() == 0
    assert got.of("x")["offset"].max() == 63 * 4


def test_faults_stop_it_as_they_stop_a_launch():
    with pytest.raises(Race):
        record(racy, 1, 64, (np.zeros(64, np.int32),))


def test_pictures():
    got = record(scale, 2, 64, (X, np.zeros_like(X)))
    axes = Figure().subplots(1, 4)
    draw_map(axes[0], got, "x", X.shape, 4, block=1)
    often = axes[0].images[0].get_array()
    assert often.shape == (64, 128)
    assert often[5].nonzero()[0].tolist() == [0, 5, 69]
    assert often[5, 0] == 2 and often[5, 5] == 1
    assert axes[0].get_title() == "row 1; read 3 times"  # by thread 0, whose own column is the first
    draw_sweeps(axes[1], got, "x", "out", 128, 4, warp=1)
    reads, writes = (set(zip(*line.get_data(), strict=True)) for line in axes[1].lines)
    assert writes == {(2, c) for c in range(32, 64)} | {(5, c) for c in range(96, 128)}
    assert reads == {(0, c) for c in range(32, 64)} | {(3, c) for c in range(96, 128)} | {(1, 0), (4, 0)}
    draw_sweeps(axes[2], got, "x", "out", 128, 4, block=1, row=0)
    assert all(len(line.get_xdata()) == 0 for line in axes[2].lines)
    assert draw_instruction(axes[3], got, "x") == (128, 128)
    assert axes[3].get_title() == "4 sectors, 128 of 128 bytes used"
    assert draw_instruction(axes[3], got, "x", number=1) == (128, 32)
