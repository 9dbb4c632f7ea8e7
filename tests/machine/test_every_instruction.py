"""Every declared instruction passes the assembler, on the smallest and on the newest architecture that has it.

For each a kernel is written that feeds its operands from parameters and stores what comes out.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from flashnumba.machine import instructions
from flashnumba.machine.compiler import _opcodes, architectures, compile_kernel, signature_of, why_not
from flashnumba.machine.function import kernel
from flashnumba.machine.instruction import _TYPES, REGISTRY, Fragment
from flashnumba.machine.numba import cuda

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "the compiler is installed")

# What factories make, in all its forms.
MADE = [
    *(instructions.wgmma(n) for n in (8, 64, 176, 256)),
    *(instructions.wgmma(64, dtype) for dtype in ("bf16", "e4m3", "e5m2")),
    *(instructions.wgmma(128, dtype, a="registers") for dtype in ("f16", "bf16", "e4m3", "e5m2")),
    instructions.wgmma(64, a_major="mn"),
    instructions.wgmma(64, b_major="mn"),
    instructions.wgmma(64, a="registers", b_major="mn"),
    *(instructions.wgmma_wait(n) for n in (0, 1)),
    *(instructions.cp_async_wait(n) for n in (0, 3)),
    *(instructions.bulk_wait(n) for n in (0, 1)),
    *(instructions.bulk_wait_read(n) for n in (0, 1)),
    instructions.setmaxnreg_inc(240),
    instructions.setmaxnreg_dec(24),
]
DECLARED = [*{i.name: i for i in (*REGISTRY.values(), *MADE)}.values()]


def kernel_with(declared):
    """A kernel of that one instruction, and its signature."""
    parameters, arguments, setup, results, examples = [], [], [], [], []
    scope = {"op": declared, "cuda": cuda, **{f"t_{name}": t.numba for name, t in _TYPES.items()}}

    def parameter(kind, example):
        parameters.append(f"p{len(parameters)}")
        examples.append(example)
        return parameters[-1]

    def output(kind, source):
        array = parameter(kind, np.zeros(64, _TYPES[kind].numpy))
        results.append(f"{array}[0] = {source}")

    for operand in declared.operands:
        if isinstance(operand, Fragment):
            scope[f"n_{operand.name}"] = operand.count
            first = parameter(operand.type, np.zeros(1, _TYPES[operand.type].numpy))
            setup.append(f"{operand.name} = cuda.local.array(n_{operand.name}, t_{operand.type})")
            setup.append(f"for i in range(n_{operand.name}): {operand.name}[i] = {first}[i]")
            arguments += [operand.name, "0"]
            if operand.role != "in":
                out = parameter(operand.type, np.zeros(1, _TYPES[operand.type].numpy))
                results.append(f"for i in range(n_{operand.name}): {out}[i] = {operand.name}[i]")
        elif operand.type == "array":
            arguments.append(parameter("array", np.zeros(64, np.float32)))
        else:
            kind = "f32" if operand.type == "b32" else operand.type
            arguments.append(parameter(kind, _TYPES[kind].numpy.type(1)))
    call = f"op({', '.join(arguments)})"
    if declared.returns:
        setup.append(f"answer = {call}")
        output("f32" if declared.returns == "b32" else declared.returns, "answer")
    else:
        setup.append(call)
    source = f"def body({', '.join(parameters)}):\n" + "".join(f"    {line}\n" for line in (*setup, *results))
    exec(source, scope)
    return kernel(threads=128, min_blocks=1, arch=declared.arch)(scope["body"]), signature_of(examples)


def test_the_instructions_are_all_here():
    assert len(DECLARED) > 100
    assert {i.arch for i in DECLARED} == {"75", "80", "89", "90", "90a"}


@pytest.mark.parametrize("declared", DECLARED, ids=lambda i: i.name)
def test_an_instruction_assembles(declared):
    made, signature = kernel_with(declared)
    for arch in {architectures(made)[0], architectures(made)[-1]}:
        result = compile_kernel(made, signature, arch)
        wanted = set(_opcodes(re.sub(r"\$\{:uid\}|\$\$", "", declared.ptx)))
        assert wanted
        assert wanted <= set(result.census)
        assert result.local_memory == 0
        # A fence, a wait or a product on its own draws no remark; registers that nobody fills may.
        assert not [said for said in result.warnings if "ignored" in said]
