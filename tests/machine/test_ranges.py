"""Ranges step without a branch: they mean what Python means, and they unroll under every NVVM."""

from __future__ import annotations

import re

import numpy as np
import pytest

from flashnumba.machine.compiler import TARGETS, compile_kernel, signature_of, why_not
from flashnumba.machine.function import device, kernel
from flashnumba.machine.numba import cuda, float32, int32, uint32, uint64

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "the compiler is installed")

FLOATS, WORDS = np.zeros(4096, np.float32), np.zeros(64, np.int64)
ROWS, COLUMNS = 4, 8
REGISTERS = ROWS * COLUMNS * 2


def stored(body):
    """The constants that an unrolled kernel stores, in order."""
    text = compile_kernel(kernel(threads=32)(body), signature_of((WORDS,)), "80").ptx
    names = {m[1]: int(m[2]) for m in re.finditer(r"mov\.u64\s+(%rd\d+), (-?\d+);", text)}
    values = re.findall(r"st\.global\.(?:v2\.)?u64\s+\[%rd\d+(?:\+\d+)?\], {?([^;}]*)}?;", text)
    return [names[n] for value in values for n in value.split(", ")]


def taken(*bounds):
    """What a kernel sees of ``range(*bounds)``, its first value 10 first."""
    start = bounds[0] if len(bounds) > 1 else 0
    stop = bounds[1] if len(bounds) > 1 else bounds[0]
    step = bounds[2] if len(bounds) > 2 else 1

    def body(out):
        place = 0
        for i in range(start, stop, step):
            out[uint32(place)] = 1000 + i
            place += 1  # noqa: SIM113

    return [value - 1000 for value in stored(body)]


@pytest.mark.parametrize(
    "bounds",
    [(5,), (1,), (0,), (-3,), (2, 7), (7, 2), (3, 3), (0, 10, 3), (0, 9, 3), (7, -2, -2), (6, 0, -2), (0, 5, -1)],
)
def test_a_range_has_the_values_python_gives_it(bounds):
    assert taken(*bounds) == list(range(*bounds))


def test_ranges_of_other_integers():
    def narrow(out):
        for i in range(int32(3)):
            out[uint32(i)] = i + 7

    def unsigned(out):
        for i in range(uint64(2), uint64(4)):
            out[i] = 40 + i

    assert stored(narrow) == [7, 8, 9]
    assert stored(unsigned) == [42, 43]


def test_break_continue_and_the_value_after_the_loop():
    def body(out):
        last = 0
        for i in range(8):
            if i == 2:
                continue
            if i == 5:
                break
            last = i
            out[uint32(i)] = i + 100
        out[uint32(9)] = last

    assert stored(body) == [100, 101, 103, 104, 4]


@device
def reduced(s, m):
    """Nested loops over rows and columns of registers: the shape of an online-softmax step."""
    for row in range(ROWS):
        total = m[row]
        for column in range(COLUMNS):
            total = max(total, s[(column * ROWS + row) * 2] + s[(column * ROWS + row) * 2 + 1])
        m[row] = total
        for column in range(COLUMNS):
            s[(column * ROWS + row) * 2] *= total
            s[(column * ROWS + row) * 2 + 1] *= total


@kernel(threads=128, fastmath=True)
def nested(x, out):
    i = uint32(cuda.threadIdx.x)
    s, m = cuda.local.array(REGISTERS, float32), cuda.local.array(ROWS, float32)
    for j in range(REGISTERS):
        s[j] = x[i + uint32(128 * j)]
    for row in range(ROWS):
        m[row] = float32(0)
    reduced(s, m)
    for j in range(REGISTERS):
        out[i + uint32(128 * j)] = s[j]


@pytest.mark.parametrize("arch", TARGETS)
def test_nested_loops_unroll_and_their_arrays_stay_in_registers(arch):
    result = compile_kernel(nested, signature_of((FLOATS, FLOATS)), arch)
    assert (result.local_memory, result.stack, result.count("bra")) == (0, 0, 0)
    assert result.count("max") == ROWS * COLUMNS
