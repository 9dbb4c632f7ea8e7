"""The compiler without a GPU: targets, errors, and what it reports of a kernel."""

from __future__ import annotations

import re
import threading

import numpy as np
import pytest

from flashnumba.machine import compiler, install
from flashnumba.machine.compiler import (
    ARCHITECTURES,
    CompileError,
    architectures,
    compile_kernel,
    sass,
    signature_of,
    why_not,
)
from flashnumba.machine.function import device, kernel
from flashnumba.machine.instruction import REGISTRY, instruction
from flashnumba.machine.numba import CAN_COMPILE, cuda, float32, types, uint32

needs_compiler = pytest.mark.skipif(bool(why_not()), reason=why_not() or "the compiler is installed")
needs_numba_cuda = pytest.mark.skipif(not CAN_COMPILE, reason="numba-cuda is not installed")


more_registers = instruction("c_setmaxnreg", "setmaxnreg.inc.sync.aligned.u32 240;", arch="90a", effect="control")(
    lambda thread: None
)
del REGISTRY["c_setmaxnreg"]  # it is for this file only

FLOATS, HALVES, INTS = np.zeros(1024, np.float32), np.zeros(1024, np.float16), np.zeros(64, np.int32)
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


# Architectures


@needs_compiler
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_kernel_compiles_for_every_architecture(arch):
    result = compile_kernel(fresh(relu), TWO, arch)
    assert f".target sm_{arch}\n" in result.ptx
    assert (result.name, result.arch) == ("relu", arch)
    assert 4 <= result.registers <= 32
    assert (result.spill_stores, result.spill_loads, result.stack, result.shared, result.local_memory) == (0,) * 5
    assert not result.uses_f64
    assert result.warnings == ()
    assert result.cubin[:4] == b"\x7fELF"


def test_the_architectures_a_kernel_claims():
    assert architectures(fresh(relu)) == ("75", "80", "86", "89", "90a", "100a", "120a")
    assert architectures(fresh(relu, "89")) == ("89", "90a", "100a", "120a")
    assert architectures(fresh(relu, "90a")) == ("90a",)


@pytest.mark.parametrize("arch", ["70", "sm_80", "9.0", "110", ""])
def test_an_unknown_architecture_is_refused(arch):
    with pytest.raises(ValueError, match="is not one of 75, 80, 86, 89, 90, 90a, 100, 100a, 120, 120a"):
        compile_kernel(fresh(relu), TWO, arch)


def test_an_architecture_older_than_the_kernels_is_refused():
    with pytest.raises(ValueError, match="relu needs sm_89; it cannot run on sm_86"):
        compile_kernel(fresh(relu, "89"), TWO, 86)


def test_an_architecture_specific_kernel_runs_there_alone():
    for arch in ("90", "100a", "120a"):
        with pytest.raises(ValueError, match=f"relu needs sm_90a; it cannot run on sm_{arch}"):
            compile_kernel(fresh(relu, "90a"), TWO, arch)


@needs_compiler
def test_fast_arithmetic_reaches_the_device_functions():
    exact, fast = compile_kernel(fresh(relu), TWO, 80), compile_kernel(fresh(relu, fastmath=True), TWO, 80)
    assert (exact.census["max.f32"], exact.count("max.ftz")) == (1, 0)
    assert (fast.census["max.ftz.f32"], fast.count("max.f32")) == (1, 0)


@needs_compiler
def test_a_kernel_of_a_cached_factory_closure_compiles_once_a_signature():
    def make_kernel(scale):
        @kernel(threads=64)
        def scaled(x, out):
            i = uint32(cuda.threadIdx.x)
            out[i] = x[i] * scale

        return scaled

    three, five = make_kernel(np.float32(3)), make_kernel(np.float32(5))
    first = compile_kernel(three, TWO, 80)
    assert compile_kernel(three, TWO, "80") is first
    assert compile_kernel(three, signature_of((FLOATS[::2], FLOATS)), 80) is not first
    assert "0f40400000" in first.ptx
    assert "0f40A00000" in compile_kernel(five, TWO, 80).ptx


# The stand-in for the device that numba asks for


@needs_compiler
def test_the_stand_in_device_is_taken_away_again():
    from numba.cuda import dispatcher

    before = dispatcher.get_current_device
    compile_kernel(fresh(relu), TWO, 80)
    assert dispatcher.get_current_device is before

    def does_not_type(x, out):
        out[0] = rectified(x.nothing)

    with pytest.raises(Exception, match="nothing"):
        compile_kernel(fresh(does_not_type), TWO, 80)
    assert dispatcher.get_current_device is before


@needs_compiler
def test_another_thread_still_sees_the_real_device(monkeypatch):
    from numba.cuda import dispatcher

    monkeypatch.setattr(dispatcher, "get_current_device", lambda: "the real device")
    seen = []
    with compiler._stand_in_device((9, 0, "a")):
        assert dispatcher.get_current_device().compute_capability == (9, 0)
        other = threading.Thread(target=lambda: seen.append(dispatcher.get_current_device()))
        other.start()
        other.join()
    assert seen == ["the real device"]
    assert dispatcher.get_current_device() == "the real device"


# What it reports


@needs_compiler
def test_a_local_array_stays_in_registers_only_under_constant_indices():
    count = 64

    def unrolled(x, out):
        a = cuda.local.array(count, float32)
        for j in range(count):
            a[j] = x[uint32(j)]
        for j in range(count):
            out[uint32(j)] = a[count - 1 - j]

    def indexed(x, out, k):
        a = cuda.local.array(count, float32)
        for j in range(count):
            a[j] = x[uint32(j)]
        for step in range(k):
            a[(step * k) % count] += x[uint32(step)]
        out[uint32(0)] = a[k]

    assert compile_kernel(fresh(unrolled), TWO, 80).local_memory == 0
    result = compile_kernel(fresh(indexed), (*TWO, types.int64), 80)
    assert result.local_memory == result.stack == 256
    assert result.spill_stores == 0


@needs_compiler
def test_spills_are_counted_when_registers_are_promised_to_other_blocks():
    count = 96

    def hungry(x, out):
        i = uint32(cuda.threadIdx.x)
        a = cuda.local.array(count, float32)
        for j in range(count):
            a[j] = x[i + uint32(j)]
        cuda.syncthreads()
        for j in range(count):
            out[i * uint32(count) + uint32(j)] = a[j] * a[(7 * j + 3) % count]

    roomy = compile_kernel(kernel(threads=128)(hungry), TWO, 80)
    tight = compile_kernel(kernel(threads=1024, min_blocks=1)(hungry), TWO, 80)
    assert (roomy.spill_stores, roomy.stack) == (0, 0)
    assert roomy.registers > 96
    assert tight.registers <= 64
    assert tight.spill_stores > 0
    assert tight.spill_loads > 0
    assert tight.stack > 0
    assert tight.local_memory == 0


@needs_compiler
def test_launch_bounds_are_those_of_the_kernel():
    bounded = compile_kernel(kernel(threads=256, min_blocks=3)(relu), TWO, 80).ptx
    free = compile_kernel(kernel(threads=256)(relu), TWO, 80).ptx
    assert ".maxntid 256, 1, 1" in bounded
    assert ".minnctapersm 3" in bounded
    assert ".maxntid 256, 1, 1" in free
    assert "minnctapersm" not in free


@needs_compiler
def test_what_ptxas_ignores_is_a_warning():
    def asks_for_registers(x, out):
        more_registers()
        i = uint32(cuda.threadIdx.x)
        out[i] = x[i]

    heard = compile_kernel(fresh(asks_for_registers, "90a", min_blocks=1), TWO, "90a")
    ignored = compile_kernel(fresh(asks_for_registers, "90a"), TWO, "90a")
    assert heard.warnings == ()
    (said,) = ignored.warnings
    assert said.endswith(
        "Potential Performance Loss: 'setmaxnreg' ignored; unable to determine register count at entry."
    )


def rectified_with(zero):
    def body(x, out):
        i = uint32(cuda.threadIdx.x)
        out[i] = max(x[i], zero)

    return fresh(body, fastmath=True)


@needs_compiler
def test_double_precision_is_seen():
    assert compile_kernel(rectified_with(0.0), TWO, 80).uses_f64
    assert not compile_kernel(rectified_with(np.float32(0)), TWO, 80).uses_f64


@needs_compiler
def test_shared_memory_and_barriers_are_reported():
    def reversed_rows(x, out):
        s = cuda.shared.array(1024, float32)
        i = uint32(cuda.threadIdx.x)
        s[i] = x[i]
        cuda.syncthreads()
        out[i] = s[uint32(127) - i]

    result = compile_kernel(fresh(reversed_rows), TWO, 80)
    assert result.shared == 4096
    assert result.barriers == 1


@needs_compiler
def test_more_static_shared_memory_than_48_kb_is_refused_with_the_linkers_words():
    def greedy(x, out):
        s = cuda.shared.array(13000, float32)
        s[cuda.threadIdx.x] = x[0]
        cuda.syncthreads()
        out[0] = s[5]

    with pytest.raises(CompileError, match=r"greedy for sm_80: .*shared"):
        compile_kernel(fresh(greedy), TWO, 80)


def test_remarks_are_kept_once_without_mangled_names():
    log = "\n".join([
        "ptxas info    : Compiling entry function '_Zk' for 'sm_90a'",
        "ptxas info    : (C7517) wgmma.wait_group is injected in function '_Zk'",
        "ptxas info    : (C7517) wgmma.wait_group is injected in function '_Zk'",
        "ptxas warning : a warning",
        "ptxas info    : Used 10 registers, used 0 barriers",
    ])  # fmt: skip
    assert compiler._warnings(log) == ("(C7517) wgmma.wait_group is injected", "a warning")


def test_every_statement_is_counted_once():
    text = """
    .visible .entry k(.param .u64 k_param_0) .maxntid 128, 1, 1 {
        .reg .pred %p<2>; // ld.global.f32 in a comment;
        ld.param.u64 %rd1, [k_param_0];
    $L__BB0_1:
        @%p1 bra $L__BB0_2;
        { .reg .pred q; setp.ne.b32 q, %r1, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1, %f2}, %rd1, q; }
        cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3}], [%r4];
        cp.async.commit_group;
    W_1: mbarrier.try_wait.parity.shared.b64 p, [%r1], %r2; @p bra D_1; bra W_1; D_1:
        @!%p1 st.global.f32 [%rd1], %f1;
        ret;
    }"""
    assert sorted(compiler._opcodes(text)) == sorted([
        "ld.param.u64", "bra", "setp.ne.b32", "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16",
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes", "cp.async.commit_group",
        "mbarrier.try_wait.parity.shared.b64", "bra", "bra", "st.global.f32", "ret",
    ])  # fmt: skip


@needs_compiler
def test_a_count_takes_whole_words():
    result = compile_kernel(fresh(relu), TWO, 80)
    assert result.count("ld") == 3
    assert result.count("ld.param") == 2
    assert result.count("ld.global.f32") == result.count("ld.global") == 1
    assert result.count("l") == 0


# Machine code


@needs_compiler
def test_machine_code_is_disassembled():
    from cuda import pathfinder

    if pathfinder.find_nvidia_binary_utility("nvdisasm") is None:
        pytest.skip("nvdisasm is not installed: pip install nvidia-cuda-nvdisasm")
    text = sass(fresh(relu, fastmath=True), TWO, "90a")
    assert text.count("FMNMX.FTZ") == 1
    assert "EXIT" in text


@needs_compiler
def test_without_nvdisasm_the_command_is_named(monkeypatch):
    monkeypatch.setattr("cuda.pathfinder.find_nvidia_binary_utility", lambda name: None)
    said = re.escape(f"nvdisasm is not installed: {install.pip('nvidia-cuda-nvdisasm')}")
    with pytest.raises(RuntimeError, match=said):
        sass(fresh(relu), TWO, 80)


# A machine without the compiler


@needs_numba_cuda
def test_missing_compiler_wheels_are_named_with_the_command(monkeypatch):
    from cuda import pathfinder

    found = pathfinder.load_nvidia_dynamic_lib

    def without_nvjitlink(name):
        if name == "nvJitLink":
            raise pathfinder.DynamicLibNotFoundError(name)
        return found(name) if not why_not_here else None

    why_not_here = why_not()
    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", without_nvjitlink)
    why_not.cache_clear()
    try:
        said = "cannot compile relu: .* nvJitLink are not installed: " + re.escape(install.extra("cu13"))
        with pytest.raises(RuntimeError, match=said):
            compile_kernel(fresh(relu), TWO, 80)
    finally:
        why_not.cache_clear()


def test_a_machine_without_numba_cuda_is_told_so(monkeypatch):
    monkeypatch.setattr(compiler, "CAN_COMPILE", False)
    try:
        for platform, said in (
            ("linux", f"numba-cuda is not installed: {install.extra('cu13')}"),
            ("darwin", "numba-cuda is not installed; it has no macOS wheels"),
        ):
            monkeypatch.setattr(compiler.sys, "platform", platform)
            why_not.cache_clear()
            assert why_not() == said
    finally:
        why_not.cache_clear()
