"""The gate finds what is planted, and the file that applies it to the ladder does so."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import flashnumba.ladder
from flashnumba.machine.compiler import CompileCase, compile_kernel, signature_of, why_not
from flashnumba.machine.function import kernel
from flashnumba.machine.gate import budget_of, problems
from flashnumba.machine.instruction import REGISTRY, instruction
from flashnumba.machine.numba import cuda, float32, uint32

needs_compiler = pytest.mark.skipif(bool(why_not()), reason=why_not() or "the compiler is installed")
FLOATS = np.zeros(1024, np.float32)
TWO = signature_of((FLOATS, FLOATS))
COUNT = 96

more_registers = instruction("g_setmaxnreg", "setmaxnreg.inc.sync.aligned.u32 240;", arch="90a", effect="control")(
    lambda thread: None
)
del REGISTRY["g_setmaxnreg"]


def copies(x, out):
    i = uint32(cuda.threadIdx.x)
    out[i] = x[i]


def indexes(x, out):
    a = cuda.local.array(COUNT, float32)
    for j in range(COUNT):
        a[j] = x[uint32(j)]
    for step in range(x.shape[0]):
        a[(step * step) % COUNT] += x[uint32(step)]
    out[uint32(0)] = a[x.shape[0] % COUNT]


def doubles(x, out):
    i = uint32(cuda.threadIdx.x)
    out[i] = max(x[i], 0.0)


def hoards(x, out):
    i = uint32(cuda.threadIdx.x)
    a = cuda.local.array(COUNT, float32)
    for j in range(COUNT):
        a[j] = x[i + uint32(j)]
    cuda.syncthreads()
    for j in range(COUNT):
        out[i * uint32(COUNT) + uint32(j)] = a[j] * a[(7 * j + 3) % COUNT]


def asks(x, out):
    more_registers()
    copies_of = uint32(cuda.threadIdx.x)
    out[copies_of] = x[copies_of]


def case(function, threads=128, shared=0, launched=None, **options):
    made = kernel(threads=threads, **options)(function)
    return CompileCase(function.__name__, made, TWO, threads=launched or threads, shared=shared)


@needs_compiler
def test_a_sound_kernel_has_no_problems():
    assert problems(case(copies), "75") == []
    assert problems(case(copies, shared=99 * 1024), "86") == []


@needs_compiler
@pytest.mark.parametrize(
    ("planted", "arch", "message"),
    [
        (case(indexes), "80", "384 bytes of arrays are in local memory, not in registers"),
        (case(doubles), "80", r"double precision: cvt\.f64\.f32 %fd\d+, %f\d+;"),
        (case(hoards, threads=1024, min_blocks=1), "80", r"\d+ bytes of spill stores where 0 are allowed"),
        (case(copies, shared=100 * 1024), "86", "no block fits: shared memory"),
        (case(copies, launched=256), "80", "launched with 256 threads, but compiled for at most 128"),
        (case(asks, arch="90a"), "90a", r"\(C\d+\) Potential Performance Loss: 'setmaxnreg' ignored; .*"),
    ],
    ids=lambda value: value.name if isinstance(value, CompileCase) else "",
)
def test_a_planted_fault_is_found(planted, arch, message):
    (found,) = problems(planted, arch)
    assert re.fullmatch(message, found)


@needs_compiler
def test_a_spill_that_pays_is_allowed_to_the_byte():
    planted = case(hoards, threads=1024, min_blocks=1)
    bytes_ = compile_kernel(planted.kernel, TWO, "80").spill_stores
    assert problems(planted, "80", bytes_) == []
    assert problems(planted, "80", bytes_ - 1) == [f"{bytes_} bytes of spill stores where {bytes_ - 1} are allowed"]


@needs_compiler
def test_the_budget_of_a_case_counts_static_and_dynamic_shared_memory():
    def both(x, out):
        s = cuda.shared.array(1024, float32)
        i = uint32(cuda.threadIdx.x)
        s[i] = x[i]
        cuda.syncthreads()
        out[i] = s[uint32(127) - i]

    planted = case(both, shared=8192)
    made = compile_kernel(planted.kernel, TWO, "90a")
    answer = budget_of(planted, made)
    assert answer.takes["shared memory"] == 4096 + 8192 + 1024
    assert answer.takes["barriers"] == 1


def offline_gate():
    """A fresh copy of the module that applies the gate to the ladder."""
    path = Path(__file__).with_name("test_offline_gate.py")
    spec = importlib.util.spec_from_file_location("offline_gate_under_test", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@needs_compiler
def test_the_offline_gate_reads_the_ladder(monkeypatch):
    good, bad = case(copies), case(doubles, arch="90a")
    monkeypatch.setattr(flashnumba.ladder, "compile_cases", lambda: iter((good, bad)), raising=False)
    module = offline_gate()
    module.test_the_ladder_has_kernels_of_different_names()
    assert [(c.name, arch) for c, arch in module.CASES] == [("copies", "75"), ("doubles", "90a")]
    assert [(c.name, arch) for c, arch in module.EVERY] == [
        ("copies", "75"), ("copies", "80"), ("copies", "86"), ("copies", "89"), ("copies", "90a"), ("copies", "100a"),
        ("copies", "120a"), ("doubles", "90a"),
    ]  # fmt: skip
    assert module.VERSIONS and module.RECORDED
    module.VERSIONS = module.compiler()
    row = module.resources_of(good, compile_kernel(good.kernel, good.signature, "75"))
    module.RECORDED["copies", "75"] = row
    module.test_a_kernel_compiles_to_what_it_should(good, "75")
    module.RECORDED["copies", "75"] = replace(row, registers=row.registers + 1)
    with pytest.raises(AssertionError, match="writes it anew"):
        module.test_a_kernel_compiles_to_what_it_should(good, "75")
    with pytest.raises(AssertionError):
        module.test_a_kernel_compiles_to_what_it_should(bad, "90a")
    module.SPILLS_THAT_PAY["gone", "80"] = 8
    with pytest.raises(AssertionError):
        module.test_no_exception_outlives_its_kernel()


def test_the_offline_gate_fails_where_the_ladder_has_no_kernels(monkeypatch):
    monkeypatch.setattr(flashnumba.ladder, "compile_cases", lambda: (), raising=False)
    with pytest.raises(AssertionError):
        offline_gate().test_the_ladder_has_kernels_of_different_names()
    monkeypatch.delattr(flashnumba.ladder, "compile_cases")
    with pytest.raises(ImportError, match="compile_cases"):
        offline_gate()
