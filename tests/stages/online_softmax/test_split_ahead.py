"""split_ahead: chunks in shared memory, loaded ahead; right, repeatable, and wrong once a step is left out."""

import numpy as np
import pytest

from flashnumba.machine.emulator import launch
from flashnumba.machine.instructions import ordered
from flashnumba.stages.online_softmax import simt
from flashnumba.stages.online_softmax.split_ahead import make_split_ahead, shared_bytes
from flashnumba.stages.rows import Shape
from tests.stages.rowwise import DTYPES, Guarded, assert_softmax, caught, hard_rows, names, scores

THREADS, PER_THREAD = 32, 2


def run(x, out, blocks=0, seed=0, slots=3, threads=THREADS, broken=""):
    elements = 16 // x.dtype.itemsize
    chunks = -(-(x.shape[1] // elements) // (threads * PER_THREAD))
    made = make_split_ahead(names(x.dtype), threads, PER_THREAD, slots, broken=broken)
    scratch = np.zeros(1 + len(x) * chunks, np.uint64)
    shared = shared_bytes(threads, PER_THREAD, slots)
    launch(made, max(blocks, chunks), threads, (x, out, scratch), shared=shared, seed=seed)


@pytest.mark.parametrize("slots", [2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=names)
@pytest.mark.parametrize("cols", [8, 64, 256, 520, 1000])
def test_every_length(cols, dtype, slots):
    x = scores(5, cols, dtype)
    out = Guarded(x.shape, dtype)
    run(x, out.array, blocks=3, slots=slots, seed=slots - 2)
    assert_softmax(out.array, x)
    out.check()


@pytest.mark.parametrize("dtype", DTYPES, ids=names)
def test_hard_rows(dtype):
    x = hard_rows(1024, dtype)
    out = Guarded(x.shape, dtype)
    run(x, out.array, blocks=5)
    assert_softmax(out.array, x)
    assert (out.array[1] == 0).all()


def test_more_chunks_than_a_warp_has_lanes():
    x = scores(2, 40 * 256, np.float32)
    out = Guarded(x.shape, x.dtype)
    run(x, out.array)
    assert_softmax(out.array, x)


def test_rows_backwards():
    x = scores(4, 260, np.float32)[::-1]
    assert_softmax(simt.softmax(x, kernel="split_ahead", machine="emulator"), x)


def test_row_strides_and_in_place():
    wide = scores(4, 560, np.float32)
    x = wide[:, :520]
    expected = x.copy()
    run(x, x, blocks=4)
    assert_softmax(x, expected)
    assert (wide[:, 520:] == scores(4, 560, np.float32)[:, 520:]).all()


def test_the_same_bits_whatever_the_order():
    x = scores(4, 1000, np.float16)
    outs = [np.empty_like(x) for _ in range(3)]
    for seed, (out, blocks) in enumerate(zip(outs, (2, 5, 7), strict=True)):
        run(x, out, blocks=blocks, seed=seed)
    assert all((out == outs[0]).all() for out in outs)


@pytest.mark.parametrize("broken", ["full", "free", "bytes", "publish", "wait"])
def test_planted_faults_are_caught(broken, monkeypatch):
    monkeypatch.setattr(ordered, "PATIENCE", 5000)
    x = scores(6, 1000, np.float32)
    assert caught(lambda out, seed: run(x, out, blocks=3, seed=seed, threads=64, broken=broken), x)


def test_through_the_host(machine):
    x = scores(3, 1 << 15, np.float32)
    out = simt.softmax(x, kernel="split_ahead", machine=machine)
    assert_softmax(out, x)


def test_rows_that_the_copy_engine_cannot_bring():
    with pytest.raises(ValueError, match="split_ahead needs sm_90, and rows that start at multiples of 16 bytes"):
        simt.softmax(np.zeros((2, 33), np.float32), kernel="split_ahead", machine="emulator")
    with pytest.raises(ValueError, match="the GPU is sm_80: use split"):
        simt.plan_split_ahead(Shape("float32", 10, 1 << 17, 16, "80"))
    assert simt.choose(Shape("float32", 1000, 1 << 17, 16, "80")) == "split"
    assert simt.choose(Shape("float32", 1000, 1 << 17, 8, "90a")) == "split"
