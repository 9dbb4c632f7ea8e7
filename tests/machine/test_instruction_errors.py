"""What a kernel's author reads when an instruction gets the wrong arguments."""

from __future__ import annotations

import numpy as np
import pytest

from flashnumba.machine.compiler import compile_kernel, signature_of, why_not
from flashnumba.machine.function import kernel
from flashnumba.machine.instruction import REGISTRY, Fragment, Scalar, instruction
from flashnumba.machine.numba import cuda, float32, float64, uint32

needs_compiler = pytest.mark.skipif(bool(why_not()), reason=why_not() or "the compiler is installed")
FLOATS = np.zeros(256, np.float32)


def unregistered(name, ptx, operands=(), **options):
    """An instruction for these tests only."""
    made = instruction(name, ptx, operands, **options)(lambda *inputs: None)
    del REGISTRY[name]
    return made


ex2 = unregistered("t_ex2", "ex2.approx.ftz.f32 %result, %x;", (Scalar("x", "f32"),), returns="f32")
index = unregistered("t_index", "mov.u32 %result, %i;", (Scalar("i", "u32"),), returns="u32")
shift = unregistered(
    "t_shift", "shf.l.wrap.b32 %result, %x, %x, %by;", (Scalar("x", "b32"), Scalar("by", "u32")), returns="b32"
)
mma = unregistered(
    "t_mma",
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%acc}, {%a}, {%b}, {%acc};",
    (Fragment("acc", "f32", 4, "inout"), Fragment("a", "u32", 4, "in"), Fragment("b", "u32", 2, "in")),
    arch="80",
    group="warp",
)
load = unregistered(
    "t_load",
    "ld.global.v2.f32 {%pair}, [%array+8];",
    (Fragment("pair", "f32", 2, "out"), Scalar("array", "array")),
    effect="memory",
)


def wrong_scalar(x, out):
    out[0] = ex2(x)


def wrong_number(x, out):
    out[0] = index(x[0])


def wrong_b32(x, out):
    out[0] = shift(float64(x[0]), uint32(1))


def wrong_b32_literal(x, out):
    out[0] = shift(1, uint32(1))


def wrong_element(x, out):
    acc = cuda.local.array(4, float32)
    mma(acc, 0, acc, 0, acc, 0)


def wrong_fragment(x, out):
    mma(x[0], 0, x, 0, x, 0)


def wrong_axes(x, out):
    acc = cuda.local.array((2, 4), float32)
    mma(acc, 0, acc, 0, acc, 0)


def wrong_place(x, out):
    acc = cuda.local.array(4, float32)
    mma(acc, x[0], acc, 0, acc, 0)


def wrong_array(x, out):
    pair = cuda.local.array(2, float32)
    load(pair, 0, x[0])


@needs_compiler
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (wrong_scalar, r"t_ex2: x must be float32, not array\(float32, 1d, C\)"),
        (wrong_number, "t_index: i must be uint32, not float32"),
        (wrong_b32, "t_shift: x must be float32, int32 or uint32, not float64"),
        (wrong_b32_literal, "t_shift: x must be float32, int32 or uint32, not int64"),
        (wrong_element, r"t_mma: a must be a local array of uint32 with one axis, not array\(float32, 1d, C\)"),
        (wrong_fragment, "t_mma: acc must be a local array of float32 with one axis, not float32"),
        (wrong_axes, r"t_mma: acc must be a local array of float32 with one axis, not array\(float32, 2d, C\)"),
        (wrong_place, "t_mma: acc_at must be an integer, not float32"),
        (wrong_array, "t_load: array must be an array, not float32"),
    ],
)
def test_a_wrong_argument_is_named_with_its_type(function, message):
    with pytest.raises(TypeError, match=message):
        compile_kernel(kernel(threads=128, arch="80")(function), signature_of((FLOATS, FLOATS)), 80)
