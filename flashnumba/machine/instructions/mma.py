"""mma.sync: a warp multiplies two small matrices held in registers and adds them to a third.

``acc[16, 8] += A[16, k] @ B[k, 8]`` with float32 accumulators. A is row-major and B column-major in the sense that a
register holds neighbours along k. Which lane holds what is drawn in :mod:`.fragments`; the arithmetic, to the bit, is
in :mod:`flashnumba.machine.emulator.tensor_core`.

Source: PTX ISA, "Warp level matrix multiply-accumulate instructions"; CUTLASS mma_sm80.hpp and mma_sm89.hpp.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flashnumba.machine.emulator.tensor_core import dot
from flashnumba.machine.instruction import Fragment, Instruction, instruction
from flashnumba.machine.instructions.formats import decode
from flashnumba.machine.instructions.fragments import from_fragments, to_fragments

__all__ = [
    "mma_m16n8k8_bf16",
    "mma_m16n8k8_f16",
    "mma_m16n8k16_bf16",
    "mma_m16n8k16_f16",
    "mma_m16n8k32_e4m3",
    "mma_m16n8k32_e4m3_e5m2",
    "mma_m16n8k32_e5m2",
    "mma_m16n8k32_e5m2_e4m3",
]


def _mma(shape: str, a_form: str, b_form: str, arch: str) -> Instruction:
    k = int(shape.split("k")[1])
    elements = 4 if k == 32 else 2
    suffix = a_form if a_form == b_form else f"{a_form}_{b_form}"
    name = f"mma_{shape}_{suffix}"

    def emulate(acc: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        product = dot(
            from_fragments(decode(a, a_form), "a", shape),
            from_fragments(decode(b, b_form), "b", shape),
            from_fragments(acc, "c", shape),
            a_form,
            b_form,
        )
        return to_fragments(product, "c", shape)

    emulate.__module__ = __name__
    declare: Callable[..., Instruction] = instruction(
        name,
        f"mma.sync.aligned.{shape}.row.col.f32.{a_form}.{b_form}.f32 {{%acc}}, {{%a}}, {{%b}}, {{%acc}};",
        (
            Fragment("acc", "f32", 4, "inout"),
            Fragment("a", "u32", 16 * k // (32 * elements), "in"),
            Fragment("b", "u32", 8 * k // (32 * elements), "in"),
        ),
        arch=arch,
        group="warp",
        doc=_document(k, elements, a_form, b_form),
    )
    return declare(emulate)


def _document(k: int, e: int, a_form: str, b_form: str) -> str:
    span = f"{e}q .. {e}q+{e - 1}"
    rows = [f"a0: row g,   k {span}", f"a1: row g+8, k {span}"]
    columns = [f"b0: k {span}, column g"]
    if k > 4 * e:
        far = f"{e}q+{4 * e} .. {e}q+{5 * e - 1}"
        rows += [f"a2: row g,   k {far}", f"a3: row g+8, k {far}"]
        columns += [f"b1: k {far}, column g"]
    rows += ["", ""][: len(columns) - len(rows)]
    picture = "\n".join(f"    {line}" for line in [*rows, *columns, "acc0, acc1: row g,   columns 2q, 2q+1",
                                                   "acc2, acc3: row g+8, columns 2q, 2q+1"])  # fmt: skip
    return (
        f"acc[16, 8] += A[16, {k}] @ B[{k}, 8]: A in {a_form}, B in {b_form}, float32 accumulators.\n\n"
        f"Lane g*4 + q (g = lane // 4, q = lane % 4) holds, lowest bits first::\n\n{picture}\n"
    )


mma_m16n8k8_f16 = _mma("m16n8k8", "f16", "f16", "75")
mma_m16n8k8_bf16 = _mma("m16n8k8", "bf16", "bf16", "80")
mma_m16n8k16_f16 = _mma("m16n8k16", "f16", "f16", "80")
mma_m16n8k16_bf16 = _mma("m16n8k16", "bf16", "bf16", "80")
mma_m16n8k32_e4m3 = _mma("m16n8k32", "e4m3", "e4m3", "89")
mma_m16n8k32_e5m2 = _mma("m16n8k32", "e5m2", "e5m2", "89")
mma_m16n8k32_e4m3_e5m2 = _mma("m16n8k32", "e4m3", "e5m2", "89")
mma_m16n8k32_e5m2_e4m3 = _mma("m16n8k32", "e5m2", "e4m3", "89")
