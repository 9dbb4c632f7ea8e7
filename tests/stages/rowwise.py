"""What the tests of row-wise kernels share: hard rows, guarded outputs, and the hunt for planted faults."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from flashnumba.compare import assert_close, compare
from flashnumba.machine.emulator import Fault, launch
from flashnumba.stages.softmax.reference import low_precision, safe

DTYPES = (np.float16, ml_dtypes.bfloat16, np.float32)
COLS = (1, 7, 15, 31, 33, 63, 100, 128, 1000, 4099)
INF, NAN = np.inf, np.nan
BAND = 64


def names(dtype):
    return np.dtype(dtype).name


def scores(rows, cols, dtype, seed=0):
    """Normal numbers whose spread differs from row to row, so that no two rows and no two columns are alike."""
    rng = np.random.default_rng(1000 * seed + cols)
    return (rng.standard_normal((rows, cols)) * np.geomspace(0.5, 8, rows)[:, None]).astype(dtype)


def hard_rows(cols, dtype):
    """One row for each thing that may go wrong; all of them in one array, as neighbours must not matter."""
    largest = float(ml_dtypes.finfo(dtype).max)
    x = np.random.default_rng(cols).standard_normal((10, cols))
    last = cols - 1
    x[1] = -INF
    x[2, : cols // 2] = -INF
    x[3, last] = NAN
    x[4] = NAN
    x[5, cols // 3] = INF
    x[6] = x[6] * 1e3 + (1e5 if largest > 1e5 else 6e4)
    x[7] = -largest
    x[8] = np.where(np.arange(cols) % 2, largest, -largest)
    x[9, :last] = -INF
    with np.errstate(over="ignore"):
        return np.clip(x, -INF, INF).astype(dtype)


class Guarded:
    """An array full of NaN between bands of a bit pattern that no kernel writes."""

    def __init__(self, shape, dtype, strides=None, at=0):
        """``strides`` in elements; packed if None. ``at`` moves the first element by so many: alignment is then that of
        one element."""
        itemsize = np.dtype(dtype).itemsize
        word = np.uint16 if itemsize == 2 else np.uint32
        self.pattern = word(0x5A5A if itemsize == 2 else 0x5A5A5A5A)
        strides = strides or tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
        self.words = np.full(BAND + at + reach + BAND, self.pattern, word)
        whole = self.words.view(dtype)
        self.array = np.lib.stride_tricks.as_strided(
            whole[BAND + at :], shape, tuple(s * itemsize for s in strides), writeable=True
        )
        self.array[...] = NAN
        self.mine = np.zeros(self.words.shape, bool)
        np.lib.stride_tricks.as_strided(self.mine[BAND + at :], shape, strides, writeable=True)[...] = True

    def check(self, what=""):
        changed = np.flatnonzero(~self.mine & (self.words != self.pattern))
        assert changed.size == 0, f"{what}: written outside the array at words {changed[:8]}"


def assert_softmax(out, x, what=""):
    return assert_close(out, safe(x), low_precision(x), what=what)


def caught(run, x, seeds=(0, 1, 2, 3)):
    """What a planted fault is caught by: the fault's name, or ``"wrong result"``; the test fails if it is not.

    Args:
        run: ``run(out, seed)`` launches the broken kernel on ``x``.
    """
    for seed in seeds:
        out = Guarded(x.shape, x.dtype)
        try:
            run(out.array, seed)
        except Fault as fault:
            return fault.name
        if not compare(out.array, safe(x), low_precision(x)).ok:
            return "wrong result"
    pytest.fail("the planted fault was not caught")


def emulate(kernel, grid, x, out, *more, seed=0):
    return launch(kernel, grid, kernel.threads, (x, out, *more), seed=seed)
