"""What Numba makes of the kernel language: which spellings stay in single precision, float16, shared views, atomics.

The tables are the ones a kernel's author needs: a spelling moves from one list to the other only if Numba changes.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from flashnumba.machine.compiler import compile_kernel, signature_of, why_not
from flashnumba.machine.function import device, kernel
from flashnumba.machine.numba import cuda, float16, float32, int32, uint8, uint32

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "the compiler is installed")

FLOATS, HALVES, INTS = np.zeros(1024, np.float32), np.zeros(1024, np.float16), np.zeros(64, np.int32)
TWO = signature_of((FLOATS, FLOATS))
EIGHTH, EIGHTH_32, NEGATIVE = 0.125, np.float32(0.125), np.float32(-np.inf)


def fresh(function, arch="75", **options):
    return kernel(threads=128, arch=arch, **options)(function)


def applied(operation):
    """A kernel that applies ``operation(x, n)``, n being an int64, to each element."""
    operation = device(operation)

    def body(x, out, n):
        i = uint32(cuda.threadIdx.x)
        out[i] = operation(x[i], n)

    return compile_kernel(fresh(body, fastmath=True), (*TWO, *signature_of((3,))), "80")


def looped(operation, start):
    """A kernel that accumulates ``operation(state, x)`` from ``start``."""
    operation = device(operation)

    def body(x, out):
        state = start
        for i in range(x.shape[0]):
            state = operation(state, x[i])
        out[0] = state

    return compile_kernel(fresh(body, fastmath=True), TWO, "80")


SINGLE = {
    "exp": lambda x, n: math.exp(x),
    "exp2": lambda x, n: math.exp2(x),
    "log": lambda x, n: math.log(x),
    "sqrt": lambda x, n: math.sqrt(x),
    "fabs": lambda x, n: math.fabs(x),
    "abs": lambda x, n: abs(x),
    "max of a typed zero": lambda x, n: max(x, float32(0)),
    "min of a typed literal": lambda x, n: min(x, float32(1.5)),
    "square": lambda x, n: x**2,
    "typed reciprocal": lambda x, n: float32(1) / x,
    "a typed integer": lambda x, n: x * float32(n),
    "a NumPy constant": lambda x, n: x * EIGHTH_32,
    "isinf": lambda x, n: float32(1) if math.isinf(x) else x,
    "negative infinity": lambda x, n: float32(1) if x == float32(-math.inf) else x,
}
DOUBLE = {
    "max of a literal": lambda x, n: max(x, 0.0),
    "an integer variable": lambda x, n: x * n,
    "division by an integer": lambda x, n: x / n,
    "a logarithm of a constant": lambda x, n: x * math.log2(math.e),
    "a literal that does not round": lambda x, n: x * 0.1,
}


@pytest.mark.parametrize("name", SINGLE)
def test_a_spelling_that_stays_in_single_precision(name):
    assert not applied(SINGLE[name]).uses_f64


@pytest.mark.parametrize("name", DOUBLE)
def test_a_spelling_that_computes_in_double_precision(name):
    assert applied(DOUBLE[name]).uses_f64


def test_a_literal_that_single_precision_holds_is_narrowed_by_the_optimiser():
    """``x * 0.125`` is exact in single precision and comes out so, ``x * 0.1`` is not: type every literal."""
    assert not applied(lambda x, n: x * 0.125).uses_f64
    assert not applied(lambda x, n: x * EIGHTH).uses_f64


@pytest.mark.parametrize(
    ("start", "double"), [(0, True), (0.0, True), (-math.inf, True), (np.float32(0), False), (NEGATIVE, False)], ids=str
)
def test_a_running_state_has_the_type_it_starts_with(start, double):
    assert looped(lambda state, x: state + x, start).uses_f64 is double
    assert looped(lambda state, x: max(state, x), start).uses_f64 is double


def test_the_exponential_is_one_instruction_only_under_fast_arithmetic():
    def body(x, out):
        i = uint32(cuda.threadIdx.x)
        out[i] = math.exp(x[i])

    fast, exact = compile_kernel(fresh(body, fastmath=True), TWO, 80), compile_kernel(fresh(body), TWO, 80)
    arithmetic = ("fma", "mul", "add.f32", "add.ftz", "ex2", "cvt", "sub")
    assert fast.count("ex2.approx.ftz.f32") == exact.count("ex2.approx.ftz.f32") == 1
    assert sum(map(fast.count, arithmetic)) < sum(map(exact.count, arithmetic))


def test_an_unsigned_index_is_not_wrapped_around():
    """Numba reads a negative index from the end, which costs a comparison and a selection an axis."""

    def signed(x, out):
        i = cuda.threadIdx.x
        out[i] = x[i]

    def unsigned(x, out):
        i = uint32(cuda.threadIdx.x)
        out[i] = x[i]

    assert compile_kernel(fresh(signed), TWO, 80).count("selp") == 2
    assert compile_kernel(fresh(unsigned), TWO, 80).count("selp") == 0


def test_strided_elements_are_reached_by_generic_loads():
    def body(x, out):
        i = uint32(cuda.threadIdx.x)
        out[i] = x[i]

    whole = compile_kernel(fresh(body), TWO, 80)
    strided = compile_kernel(fresh(body), signature_of((FLOATS[::2], FLOATS[::2])), 80)
    assert (whole.count("ld.global"), whole.count("st.global")) == (1, 1)
    assert (strided.count("ld.f32"), strided.count("st.f32")) == (1, 1)


def test_dynamic_shared_memory_is_one_buffer_seen_as_several_types():
    def views(x, out):
        raw = cuda.shared.array(0, uint8)
        floats = raw[512:].view(float32)
        i = uint32(cuda.threadIdx.x)
        raw[i] = uint8(7)
        floats[i] = x[i]
        cuda.syncthreads()
        out[i] = floats[uint32(127) - i] + float32(raw[uint32(127) - i])

    result = compile_kernel(fresh(views), TWO, 80)
    assert result.shared == 0
    assert (result.count("st.shared.u8"), result.count("ld.shared.u8")) == (1, 1)
    assert (result.count("st.shared.f32"), result.count("ld.shared.f32")) == (1, 1)
    assert not result.uses_f64


def test_atomics_on_shared_and_global_memory():
    def counts(x, out):
        s = cuda.shared.array(1, int32)
        if cuda.threadIdx.x == 0:
            s[0] = int32(0)
        cuda.syncthreads()
        cuda.atomic.add(s, 0, int32(1))
        cuda.atomic.max(x, 1, int32(2))
        cuda.atomic.add(x, 0, int32(1))
        cuda.syncthreads()
        cuda.atomic.add(out, cuda.threadIdx.x, float32(s[0]))

    result = compile_kernel(fresh(counts), signature_of((INTS, FLOATS)), 75)
    assert result.census["atom.shared.add.u32"] == 1
    assert result.census["atom.global.add.u32"] == 1
    assert result.census["atom.global.max.s32"] == 1
    assert result.census["atom.global.add.f32"] == 1


@pytest.mark.parametrize("arch", ["75", "80", "90a", "120a"])
def test_float16_is_read_and_written_through_float32(arch):
    def halves(x, out):
        i = uint32(cuda.threadIdx.x)
        out[i] = float16(math.exp(float32(x[i])))

    result = compile_kernel(fresh(halves, fastmath=True), signature_of((HALVES, HALVES)), arch)
    assert result.census["cvt.f32.f16"] == 1
    assert result.census["cvt.rn.f16.f32"] == 1
    assert result.count("ex2.approx.ftz.f32") == 1
    assert not result.uses_f64


def test_float16_arithmetic_is_linked_from_its_second_unit():
    def halves(x, out):
        i = uint32(cuda.threadIdx.x)
        out[i] = x[i] + x[i + uint32(1)]

    assert compile_kernel(fresh(halves), signature_of((HALVES, HALVES)), 80).count("add.f16") == 1
