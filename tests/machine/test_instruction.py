"""The checks of an instruction's declaration."""

from __future__ import annotations

import numpy as np
import pytest

from flashnumba.machine.instruction import _TYPES, REGISTRY, Fragment, Scalar, instruction, runs_on
from flashnumba.machine.numba import float32, float64, int32, int64, uint16, uint32, uint64

F32 = Scalar("x", "f32")


def declare(**changes):
    given = {"name": "t_new", "ptx": "neg.f32 %result, %x;", "operands": (F32,), "returns": "f32", **changes}
    return instruction(given.pop("name"), given.pop("ptx"), given.pop("operands"), **given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group": "block"}, "group of t_new is 'block'; it must be thread, warp or warpgroup"),
        ({"effect": "some"}, "effect of t_new is 'some'; it must be none, memory or control"),
        ({"arch": "sm_80"}, "arch of t_new is 'sm_80'"),
        ({"ptx": "neg.f32 %result, %y;"}, r"the PTX names \['result', 'y'\], the operands are \['result', 'x'\]"),
        ({"ptx": "neg.f32 %result, 0;"}, r"the PTX names \['result'\], the operands are \['result', 'x'\]"),
        ({"returns": None}, "t_new has no output and no effect"),
        ({"operands": (F32, F32)}, "operand names must differ"),
        ({"operands": (Scalar("class", "f32"),)}, "'class' cannot be a name in a kernel's source"),
        ({"operands": (Scalar("a b", "f32"),)}, "'a b' cannot be a name"),
        ({"operands": (Fragment("a", "f32", 2, "in"), Scalar("a_at", "u32"))}, "operand names must differ"),
        ({"operands": (Scalar("result", "f32"),)}, "operand names must differ"),
        ({"operands": (Scalar("x", "f16"),)}, "type of x is 'f16'; it must be one of"),
        ({"operands": (Fragment("x", "b32", 2, "in"),)}, "type of x is 'b32'; it must be one of"),
        ({"operands": (Fragment("x", "f32", 2, "read"),)}, "role of x is 'read'; it must be in, out or inout"),
        ({"operands": (Fragment("x", "f32", 0, "in"),)}, "x has 0 registers; it needs at least 1"),
        ({"returns": "b32"}, "it returns the type of its first b32 operand, but has none"),
        ({"returns": "s32"}, "it returns 's32'; it must be one of"),
    ],
)
def test_a_wrong_declaration_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        declare(**changes)
    assert "t_new" not in REGISTRY


def test_a_name_is_taken_once():
    try:
        declare()(lambda x: -x)
        with pytest.raises(ValueError, match="an instruction named t_new is declared already"):
            declare()(lambda x: -x)
    finally:
        del REGISTRY["t_new"]


def test_a_declaration_knows_how_it_is_called_and_what_it_does():
    def emulate(x):
        """Change the sign."""

    try:
        made = declare()(emulate)
    finally:
        del REGISTRY["t_new"]
    assert made.signature == "t_new(x)"
    assert made.doc == made.__doc__ == "Change the sign."
    assert made.family == __name__.rsplit(".", 1)[-1]


def test_a_fragment_is_called_with_the_place_of_its_first_register():
    try:
        made = declare(
            ptx="mma {%acc}, {%a}, {%acc};",
            operands=(Fragment("acc", "f32", 4, "inout"), Fragment("a", "u32", 2, "in")),
            returns=None,
        )(lambda acc, a: acc)
    finally:
        del REGISTRY["t_new"]
    assert made.signature == "t_new(acc, acc_at, a, a_at)"


def test_an_instruction_called_on_the_host_says_so():
    try:
        made = declare()(lambda x: -x)
    finally:
        del REGISTRY["t_new"]
    with pytest.raises(TypeError, match="t_new is an instruction: it runs inside a kernel"):
        made(1.0)


@pytest.mark.parametrize(
    ("arch", "needed", "answer"),
    [
        ("80", "75", True), ("80", "80", True), ("75", "80", False), ("90a", "80", True), ("90a", "90a", True),
        ("90", "90a", False), ("100a", "90a", False), ("100", "90", True), ("120a", "100", True), ("86", "89", False),
    ],
)  # fmt: skip
def test_runs_on(arch, needed, answer):
    assert runs_on(arch, needed) is answer


def test_the_numpy_type_of_a_register_is_the_emulators():
    """Numba's and NumPy's view of each register class are the same type."""
    pairs = {"u16": uint16, "u32": uint32, "u64": uint64, "i32": int32, "i64": int64, "f32": float32, "f64": float64}
    for name, numba_type in pairs.items():
        assert _TYPES[name].numba == numba_type
        assert _TYPES[name].numpy == np.dtype(str(numba_type))
