"""How Numba sees a kernel: its instructions, its target function, its argument types."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

from flashnumba.machine import install
from flashnumba.machine.compiler import compile_kernel
from flashnumba.machine.function import device, kernel
from flashnumba.machine.instruction import REGISTRY, Scalar, instruction
from flashnumba.machine.numba import CAN_COMPILE, cuda, float32, types, uint32
from flashnumba.machine.target import instructions_of, launch_bounds, numba_target, signature_of

needs_numba_cuda = pytest.mark.skipif(not CAN_COMPILE, reason="numba-cuda is not installed")


def unregistered(name, ptx, operands=(), **options):
    """An instruction for these tests only."""
    made = instruction(name, ptx, operands, **options)(lambda *inputs: None)
    del REGISTRY[name]
    return made


ex2 = unregistered("t_ex2", "ex2.approx.ftz.f32 %result, %x;", (Scalar("x", "f32"),), returns="f32")
commit = unregistered("t_commit", "cp.async.commit_group;", arch="80", effect="memory")
more_registers = unregistered("t_setmaxnreg", "setmaxnreg.inc.sync.aligned.u32 240;", arch="90a", effect="control")

FLOATS = np.zeros(1024, np.float32)
TWO = signature_of((FLOATS, FLOATS))


@device
def bigger(a, b):
    return max(a, b)


@device
def rectified(x):
    return bigger(x, float32(0))


def relu(x, out):
    i = uint32(cuda.threadIdx.x)
    out[i] = rectified(x[i])


def fresh(function, arch="75", **options):
    return kernel(threads=128, arch=arch, **options)(function)


# Instructions


@device
def ends_a_group():
    commit()


@device
def stages(x):
    ends_a_group()
    return ex2(x)


def staged(x, out):
    i = uint32(cuda.threadIdx.x)
    out[i] = stages(x[i])


def test_the_instructions_of_a_kernel_with_the_way_to_each():
    assert instructions_of(fresh(staged)) == {
        commit: "staged > stages > ends_a_group > t_commit",
        ex2: "staged > stages > t_ex2",
    }


def test_an_instruction_newer_than_the_kernel_is_named():
    with pytest.raises(ValueError, match=r"t_commit needs sm_80, but staged is declared for sm_75 \(staged > stages >"):
        compile_kernel(fresh(staged), TWO, 80)


def test_instructions_in_closures_and_nested_functions_are_found():
    def factory(step):
        def body(x, out):
            def inner():
                more_registers()

            inner()
            out[0] = step(x[0])

        return body

    assert set(instructions_of(fresh(factory(stages)))) == {commit, ex2, more_registers}
    assert set(instructions_of(fresh(factory(ex2)))) == {ex2, more_registers}


# Targets


@needs_numba_cuda
def test_a_target_leaves_the_kernel_its_own_function():
    made = fresh(relu)
    target = numba_target(made)
    assert target is numba_target(made)
    assert target is not relu
    assert target.__globals__["rectified"] is not rectified
    assert relu.__globals__["rectified"] is rectified
    assert target.__globals__["cuda"] is cuda
    assert target.__globals__["uint32"] is uint32


@needs_numba_cuda
def test_a_device_function_is_made_once_for_all_kernels_of_one_arithmetic():
    def other(x, out):
        out[0] = rectified(x[0])

    one, two = numba_target(fresh(relu)), numba_target(fresh(other))
    fast = numba_target(fresh(other, fastmath=True))
    assert one.__globals__["rectified"] is two.__globals__["rectified"]
    assert fast.__globals__["rectified"] is not two.__globals__["rectified"]


@needs_numba_cuda
def test_a_device_function_that_calls_itself_is_refused():
    @device
    def even(n):
        return odd(n - 1) if n else True

    @device
    def odd(n):
        return even(n - 1) if n else False

    def asks(out):
        out[0] = even(3)

    with pytest.raises(ValueError, match="even calls itself; device functions are inlined and cannot recurse"):
        numba_target(fresh(asks))


def test_without_numba_cuda_a_target_says_what_to_install(monkeypatch):
    monkeypatch.setattr("flashnumba.machine.target.CAN_COMPILE", False)
    with pytest.raises(RuntimeError, match="numba-cuda is not installed.*: " + re.escape(install.extra("cu13"))):
        numba_target(fresh(relu))


def test_launch_bounds_name_blocks_only_where_the_kernel_does():
    assert launch_bounds(kernel(threads=128)(relu)) == (128,)
    assert launch_bounds(kernel(threads=384, min_blocks=1)(relu)) == (384, 1)


# Signatures


class TensorMap:
    device_address = 0x7F00


class OnDevice:
    def __init__(self, typestr, shape, strides=None):
        self.__cuda_array_interface__ = {
            "typestr": typestr, "shape": shape, "strides": strides, "data": (0, False), "version": 3,
        }  # fmt: skip


GRID = np.zeros((4, 6), np.float32)


@pytest.mark.parametrize(
    ("arg", "expected"),
    [
        (GRID, types.Array(types.float32, 2, "C")),
        (GRID.T, types.Array(types.float32, 2, "A")),
        (GRID[:, ::2], types.Array(types.float32, 2, "A")),
        (GRID[:, 2:4], types.Array(types.float32, 2, "A")),
        (GRID[:1, :], types.Array(types.float32, 2, "C")),
        (GRID[:0], types.Array(types.float32, 2, "C")),
        (np.zeros((), np.int64), types.Array(types.int64, 0, "C")),
        (np.zeros(3, np.float16), types.Array(types.float16, 1, "C")),
        (np.zeros(3, bool), types.Array(types.boolean, 1, "C")),
        (np.zeros(3, ml_dtypes.bfloat16), types.Array(types.uint16, 1, "C")),
        (np.zeros(6, ml_dtypes.float8_e4m3fn)[::2], types.Array(types.uint8, 1, "A")),
        (np.zeros(3, ml_dtypes.float8_e5m2), types.Array(types.uint8, 1, "C")),
        (OnDevice("<f2", (3, 4)), types.Array(types.float16, 2, "C")),
        (OnDevice("<f4", (3, 4), (16, 4)), types.Array(types.float32, 2, "C")),
        (OnDevice("<f4", (3, 4), (4, 12)), types.Array(types.float32, 2, "A")),
        (OnDevice("<f4", (1, 4), (999, 4)), types.Array(types.float32, 2, "C")),
        (OnDevice("<f4", (0, 4), (999, 7)), types.Array(types.float32, 2, "C")),
        (np.float64(1), types.float64),
        (np.float16(1), types.float16),
        (np.uint8(1), types.uint8),
        (np.bool_(True), types.boolean),
        (True, types.boolean),
        (7, types.int64),
        (0.5, types.float32),
        (TensorMap(), types.uint64),
    ],
)
def test_a_signature_from_an_example(arg, expected):
    assert signature_of((arg,)) == (expected,)


def test_a_read_only_array_has_the_type_of_a_writable_one():
    frozen = GRID.copy()
    frozen.flags.writeable = False
    assert signature_of((frozen,)) == signature_of((GRID,))


@pytest.mark.parametrize(
    ("arg", "error", "message"),
    [
        (2**63, ValueError, "argument 1: 9223372036854775808 does not fit in int64; pass a numpy.uint64"),
        ("text", TypeError, "argument 1: a kernel takes arrays, numbers and tensor maps, not str"),
        (None, TypeError, "argument 1: a kernel takes arrays, numbers and tensor maps, not NoneType"),
        (
            ml_dtypes.bfloat16(1),
            TypeError,
            "argument 1: a scalar bfloat16 cannot be passed; pass a float32 or its bits",
        ),
        (np.zeros(2, np.complex64), TypeError, "kernels have no dtype complex64; they take bool, int8"),
        (np.zeros(2, np.longdouble), TypeError, "kernels have no dtype"),
        (np.zeros(2, ">f4"), TypeError, "dtype >f4 is not in this machine's byte order; use <f4"),
        (np.zeros(9, np.uint8)[1:].view(np.float32), ValueError, "argument 1: its elements are not aligned to 4 bytes"),
    ],
)
def test_what_cannot_be_passed_is_named(arg, error, message):
    with pytest.raises(error, match=message):
        signature_of((GRID, arg))
