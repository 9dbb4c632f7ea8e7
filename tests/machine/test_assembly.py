"""The inline assembly that Numba emits for an instruction.

The instructions declared here exist for these tests only; they are taken out of the registry again.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from flashnumba.machine.compiler import CompileError, compile_kernel, signature_of, why_not
from flashnumba.machine.function import kernel
from flashnumba.machine.instruction import REGISTRY, Fragment, Scalar, instruction
from flashnumba.machine.numba import boolean, cuda, float32, int32, int64, uint32

needs_compiler = pytest.mark.skipif(bool(why_not()), reason=why_not() or "the compiler is installed")


def unregistered(name, ptx, operands=(), **options):
    """An instruction for one test."""

    def emulate(*inputs):
        """Nothing."""

    made = instruction(name, ptx, operands, **options)(emulate)
    del REGISTRY[name]
    return made


F32 = Scalar("x", "f32")
ex2 = unregistered("t_ex2", "ex2.approx.ftz.f32 %result, %x;", (F32,), returns="f32")
shift = unregistered(
    "t_shift", "shf.l.wrap.b32 %result, %x, %x, %by;", (Scalar("x", "b32"), Scalar("by", "u32")), returns="b32"
)
both = unregistered("t_both", "and.b32 %result, %x, %y;", (Scalar("x", "b32"), Scalar("y", "b32")), returns="b32")
choose = unregistered(
    "t_choose",
    "{ .reg .pred q; setp.ne.b32 q, %which, 0; selp.f32 %result, %x, %y, q; }",
    (Scalar("which", "pred"), F32, Scalar("y", "f32")),
    returns="f32",
)
above = unregistered(
    "t_above",
    "{ .reg .pred q; setp.gt.f32 q, %x, %y; selp.b32 %result, 1, 0, q; }",
    (F32, Scalar("y", "f32")),
    returns="pred",
)
widths = unregistered(
    "t_widths",
    "{ cvt.u32.u16 %a, %h; cvt.u32.u64 %b, %l; cvt.rn.f32.f64 %c, %d; }",
    (
        Scalar("h", "u16"), Scalar("l", "u64"), Scalar("d", "f64"),
        Fragment("a", "u32", 1, "out"), Fragment("b", "u32", 1, "out"), Fragment("c", "f32", 1, "out"),
    ),
)  # fmt: skip
ldmatrix = unregistered(
    "t_ldmatrix",
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%frag}, [%addr];",
    (Fragment("frag", "u32", 4, "out"), Scalar("addr", "u32")),
    group="warp",
    effect="memory",
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
fence = unregistered("t_fence", "membar.cta;", effect="memory")
lane = unregistered("t_lane", "mov.u32 %result, %laneid;", returns="u32")
tick = unregistered("t_tick", "mov.u32 %result, %clock;", returns="u32", effect="memory")


index = unregistered("t_index", "mov.u32 %result, %i;", (Scalar("i", "u32"),), returns="u32")


def make_wgmma(n):
    return unregistered(
        f"t_wgmma_n{n}",
        "{ .reg .pred q; setp.ne.b32 q, %more, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.f16.f16 {{%acc}}, %a, %b, q, 1, 1, 0, 0; }}",
        (Fragment("acc", "f32", n // 2, "inout"), Scalar("a", "u64"), Scalar("b", "u64"), Scalar("more", "i32")),
        arch="90a",
        group="warpgroup",
        effect="memory",
    )


FLOATS, WORDS = np.zeros(256, np.float32), np.zeros(256, np.uint32)


def compiled(function, *args, arch="80", **options):
    made = kernel(threads=128, arch=arch, **options)(function)
    return compile_kernel(made, signature_of(args), "90a" if arch == "90a" else arch)


def lines(result):
    return [line.strip() for line in result.ptx.splitlines()]


def assembly(result):
    """The text of each inline assembly block."""
    return [
        re.sub(r"\s+", " ", t).strip()
        for t in re.findall(r"// begin inline asm(.*?)// end inline asm", result.ptx, re.S)
    ]


def one(result, pattern):
    """The groups of the only inline assembly block, which must match."""
    (text,) = assembly(result)
    match = re.fullmatch(pattern, text)
    assert match, text
    return match.groups()


@needs_compiler
def test_a_scalar_goes_in_and_the_result_comes_back():
    def body(x, out):
        i = uint32(cuda.threadIdx.x)
        out[i] = ex2(x[i])

    result = compiled(body, FLOATS, FLOATS)
    to, source = one(result, r"ex2\.approx\.ftz\.f32 (%f\d+), (%f\d+);")
    assert any(re.match(rf"ld\.global\.f32\s+{source},", line) for line in lines(result))
    assert any(re.match(rf"st\.global\.f32\s+\[%rd\d+\], {to};", line) for line in lines(result))


@needs_compiler
def test_a_special_register_is_not_an_operand():
    def body(out):
        out[uint32(cuda.threadIdx.x)] = lane()

    assert one(compiled(body, WORDS), r"mov\.u32 (%r\d+), %laneid;")


@needs_compiler
@pytest.mark.parametrize(("dtype", "register"), [(np.uint32, "r"), (np.int32, "r"), (np.float32, "f")])
def test_b32_is_what_the_caller_has(dtype, register):
    def body(x, out):
        i = uint32(cuda.threadIdx.x)
        out[i] = shift(x[i], uint32(3))

    array = np.zeros(64, dtype)
    result = compiled(body, array, array)
    to, first, second = one(result, r"shf\.l\.wrap\.b32 (%\w+), (%\w+), (%\w+), %r\d+;")
    assert first == second
    assert {to[1], first[1]} == {register}
    assert result.count("cvt") == 0


@needs_compiler
def test_the_result_of_b32_has_the_type_of_the_first():
    def body(x, y, out):
        i = uint32(cuda.threadIdx.x)
        out[i] = both(x[i], y[i])

    to, first, second = one(compiled(body, WORDS, FLOATS, WORDS), r"and\.b32 (%\w+), (%\w+), (%\w+);")
    assert (to[1], first[1], second[1]) == ("r", "r", "f")


@needs_compiler
def test_a_truth_value_goes_in_as_0_or_1():
    def body(x, out):
        i = uint32(cuda.threadIdx.x)
        out[i] = choose(i < uint32(7), x[i], out[i])

    result = compiled(body, FLOATS, FLOATS)
    which, _, _, _ = one(
        result, r"{ \.reg \.pred q; setp\.ne\.b32 q, (%r\d+), 0; selp\.f32 (%f\d+), (%f\d+), (%f\d+), q; }"
    )
    assert any(re.match(rf"selp\.u32\s+{which}, 1, 0, %p\d+;", line) for line in lines(result))


@needs_compiler
def test_a_truth_value_comes_back_as_a_condition():
    def body(x, out):
        i = uint32(cuda.threadIdx.x)
        if above(x[i], float32(2)):
            out[i] = float32(1)

    result = compiled(body, FLOATS, FLOATS)
    (to,) = re.search(r"selp\.b32 (%r\d+), 1, 0, q;", assembly(result)[0]).groups()
    assert any(re.match(rf"setp\.(eq|ne)\.s32\s+%p\d+, {to}, 0;", line) for line in lines(result))


@needs_compiler
def test_every_register_class_has_its_constraint():
    def body(h, l, d, words, floats):
        i = uint32(cuda.threadIdx.x)
        a, b, c = cuda.local.array(1, uint32), cuda.local.array(1, uint32), cuda.local.array(1, float32)
        widths(h[i], l[i], d[i], a, 0, b, 0, c, 0)
        words[i], words[i + uint32(64)], floats[i] = a[0], b[0], c[0]

    half, long, double = (np.zeros(64, t) for t in (np.uint16, np.uint64, np.float64))
    result = compiled(body, half, long, double, WORDS, FLOATS)
    names = one(
        result,
        r"{ cvt\.u32\.u16 %(r)\d+, %(rs)\d+; cvt\.u32\.u64 %(r)\d+, %(rd)\d+; cvt\.rn\.f32\.f64 %(f)\d+, %(fd)\d+; }",
    )
    assert names == ("r", "rs", "r", "rd", "f", "fd")


@needs_compiler
def test_a_fragment_comes_out_into_the_registers_it_names():
    def body(addr, out):
        frag = cuda.local.array(8, uint32)
        ldmatrix(frag, 4, addr)
        for i in range(4):
            out[uint32(i)] = frag[i + 4]

    result = compiled(body, np.uint32(0), WORDS)
    registers = one(result, r"ldmatrix\S+ {(%r\d+), (%r\d+), (%r\d+), (%r\d+)}, \[%r\d+\];")
    stored = [m.group(1) for m in re.finditer(r"st\.global\.u32\s+\[%rd\d+(?:\+\d+)?\], (%r\d+);", result.ptx)]
    assert stored == list(registers)
    assert result.local_memory == 0


@needs_compiler
def test_an_inout_fragment_is_read_and_written_in_the_same_registers():
    def body(x, out):
        i = uint32(cuda.threadIdx.x)
        acc, a, b = cuda.local.array(8, float32), cuda.local.array(4, uint32), cuda.local.array(4, uint32)
        for j in range(8):
            acc[j] = x[i + uint32(j)]
        for j in range(4):
            a[j] = i + uint32(j)
            b[j] = i * uint32(j + 2)
        mma(acc, 4, a, 0, b, 2)
        for j in range(8):
            out[i * uint32(8) + uint32(j)] = acc[j]

    result = compiled(body, FLOATS, FLOATS)
    text = assembly(result)[0]
    groups = [group.split(", ") for group in re.findall(r"{([^}]*)}", text)]
    assert [len(group) for group in groups] == [4, 4, 2, 4]
    assert groups[0] == groups[3]
    stored = [m.group(1) for m in re.finditer(r"st\.global\.f32\s+\[%rd\d+(?:\+\d+)?\], (%f\d+);", result.ptx)]
    assert stored[4:] == groups[0]
    assert not set(stored[:4]) & set(groups[0])
    assert result.local_memory == 0


@needs_compiler
@pytest.mark.parametrize("n", [128, 256])
def test_a_fragment_of_64_and_128_registers_is_tied_register_by_register(n):
    """More ties than operands have letters: the constraint list counts outputs, ties and inputs apart."""
    wgmma, count = make_wgmma(n), n // 2

    def body(x, out, a, b):
        i = uint32(cuda.threadIdx.x)
        acc = cuda.local.array(count, float32)
        for j in range(count):
            acc[j] = x[i + uint32(j)]
        wgmma(acc, 0, a, b, int32(1))
        for j in range(count):
            out[i * uint32(count) + uint32(j)] = acc[j]

    result = compiled(body, FLOATS, FLOATS, np.uint64(0), np.uint64(0), arch="90a", min_blocks=1)
    text = next(t for t in assembly(result) if "wgmma" in t)
    registers = re.search(r"k16\.f32\.f16\.f16 {([^}]*)}, (%rd\d+), (%rd\d+), q", text)
    names = registers.group(1).split(", ")
    stored = [m.group(1) for m in re.finditer(r"st\.global\.f32\s+\[%rd\d+(?:\+\d+)?\], (%f\d+);", result.ptx)]
    assert len(names) == len(set(names)) == count
    assert stored == names
    assert registers.group(2) != registers.group(3)
    assert (result.local_memory, result.spill_stores, result.stack) == (0, 0, 0)
    assert result.registers > count


@needs_compiler
def test_fragments_stay_in_registers_through_an_unrolled_loop_of_a_factory():
    def make_kernel(tiles):
        registers = 4 * tiles

        @kernel(threads=128, arch="80", fastmath=True)
        def product(x, out):
            i = uint32(cuda.threadIdx.x)
            acc = cuda.local.array(registers, float32)
            a, b = cuda.local.array(4, uint32), cuda.local.array(2, uint32)
            for j in range(registers):
                acc[j] = float32(0)
            for j in range(4):
                a[j] = i + uint32(j)
            for t in range(tiles):
                b[0], b[1] = i + uint32(t), i
                mma(acc, 4 * t, a, 0, b, 0)
            for j in range(registers):
                out[i + uint32(128 * j)] = acc[j]

        return product

    result = compile_kernel(make_kernel(12), signature_of((FLOATS, FLOATS)), "80")
    assert result.count("mma.sync") == 12
    assert (result.local_memory, result.stack, result.spill_stores) == (0, 0, 0)
    assert result.registers >= 48


@needs_compiler
def test_an_array_is_handed_over_as_its_address():
    def body(x, out):
        pair = cuda.local.array(2, float32)
        load(pair, 0, x)
        out[uint32(0)] = pair[0] + pair[1]

    result = compiled(body, FLOATS, FLOATS)
    _, _, address = one(result, r"ld\.global\.v2\.f32 {(%f\d+), (%f\d+)}, \[(%rd\d+)\+8\];")
    assert any(re.match(rf"ld\.param\.u64\s+{address},", line) for line in lines(result))


@needs_compiler
def test_what_has_no_effect_is_dropped_unused_and_what_has_one_is_kept():
    def body(x, out):
        i = uint32(cuda.threadIdx.x)
        ex2(x[i])
        tick()
        fence()
        out[i] = x[i]

    result = compiled(body, FLOATS, FLOATS)
    assert assembly(result)[1:] == ["membar.cta;"]
    assert re.fullmatch(r"mov\.u32 %r\d+, %clock;", assembly(result)[0])


@needs_compiler
def test_a_memory_effect_keeps_stores_and_loads_on_their_sides():
    def body(out):
        i = uint32(cuda.threadIdx.x)
        s = cuda.shared.array(128, float32)
        s[i] = float32(3)
        fence()
        out[i] = s[i]

    text = compiled(body, FLOATS).ptx
    assert text.index("st.shared") < text.index("membar") < text.index("ld.shared")


@needs_compiler
def test_an_integer_fits_any_integer_register_and_a_float_register():
    def body(out):
        i = uint32(cuda.threadIdx.x)
        out[i] = ex2(2) + float32(index(int64(3))) + float32(index(boolean(True)))

    result = compiled(body, FLOATS)
    assert not result.uses_f64
    assert len(assembly(result)) == 3


@needs_compiler
def test_assembly_that_ptxas_refuses_is_reported_with_its_words():
    nonsense = unregistered("t_nonsense", "nonsense.f32 %result, %x;", (F32,), returns="f32")

    def body(x, out):
        out[uint32(0)] = nonsense(x[uint32(0)])

    with pytest.raises(CompileError, match=r"body for sm_80: .*nonsense"):
        compiled(body, FLOATS, FLOATS)
