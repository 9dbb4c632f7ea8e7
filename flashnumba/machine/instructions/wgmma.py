"""wgmma (sm_90a): four warps multiply a 64-row tile, operands in shared memory, the product in their registers.

::

    D[64, n] (+)= A[64, k] B[k, n]          k elements make 32 bytes: 16 of f16 or bf16, 32 of e4m3 or e5m2

    accumulators: warp w of the warpgroup holds rows 16 w .. 16 w + 15; of eight columns 8 j .. 8 j + 7, lane (g, q) =
    (lane / 4, lane % 4) holds   acc[4j], acc[4j+1] = D[g][2q], D[g][2q+1]      acc[4j+2], acc[4j+3]: those of row g + 8
    A in registers: the m16k16 (or m16k32) operand layout of mma.sync, per warp; an f16 accumulator, packed in pairs, is
    one

An operand in shared memory is named by a 64-bit descriptor (:func:`flashnumba.tiles.descriptor`), K-major (each row's k
contiguous) or, for 16-bit types, MN-major. The work is asynchronous: ``wgmma_fence()`` before the first that uses
registers touched since, ``wgmma_commit()`` to close a group, ``wgmma_wait(n)`` before touching accumulators or
overwriting operands.
"""

from __future__ import annotations

from functools import cache
from operator import index
from typing import Any

import ml_dtypes
import numpy as np

from flashnumba.machine.emulator import matrix_engine
from flashnumba.machine.instruction import REGISTRY, Fragment, Instruction, Scalar, instruction

__all__ = ["wgmma", "wgmma_commit", "wgmma_fence", "wgmma_wait"]

_TYPES: dict[str, Any] = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}


def wgmma(n: int, dtype: str = "f16", a: str = "shared", a_major: str = "k", b_major: str = "k") -> Instruction:
    """The instruction for one shape and type: ``instr(acc, acc_at, a, b, accumulate)``.

    Args:
        n: columns, 8 to 256, a multiple of 8; ``acc`` has n / 2 float32 registers.
        dtype: f16, bf16, e4m3 or e5m2, of both operands.
        a: "shared" (``a`` is a descriptor) or "registers" (``a, a_at``: four uint32).
        a_major, b_major: "k", or "mn" for an operand whose rows (A) or columns (B) are contiguous; 16-bit types only.

    Returns:
        An instruction; its last operand is 0 to overwrite the accumulators, 1 to add to them.

    Raises:
        ValueError: a shape or type that the hardware does not have.
    """
    n = index(n)
    if n % 8 or not 8 <= n <= 256:
        raise ValueError(f"wgmma with n = {n}; it must be a multiple of 8 from 8 to 256")
    if dtype not in _TYPES:
        raise ValueError(f"wgmma of {dtype!r}; it must be one of {', '.join(_TYPES)}")
    if a not in ("shared", "registers") or a_major not in ("k", "mn") or b_major not in ("k", "mn"):
        raise ValueError(
            f"wgmma with a={a!r}, a_major={a_major!r}, b_major={b_major!r}; a is shared or registers, majors k or mn"
        )
    fp8 = dtype.startswith("e")
    if "mn" in (a_major, b_major) and fp8:
        raise ValueError(f"wgmma of {dtype} takes K-major operands only")
    if a == "registers" and a_major == "mn":
        raise ValueError("wgmma with A in registers has no major axis to choose")
    k, in_registers = (32 if fp8 else 16), a == "registers"
    transposes = (
        ""
        if fp8
        else f", {int(b_major == 'mn')}"
        if in_registers
        else f", {int(a_major == 'mn')}, {int(b_major == 'mn')}"
    )
    first = Fragment("a", "u32", 4, "in") if in_registers else Scalar("a", "u64")
    suffix = ("rs" if in_registers else "ss") + (f"_{a_major}_{b_major}" if "mn" in (a_major, b_major) else "")
    name = f"wgmma_m64n{n}k{k}_{dtype}_{suffix}"
    if name in REGISTRY:
        return REGISTRY[name]
    shape = matrix_engine.Shape(n, dtype, _TYPES[dtype], in_registers, a_major == "mn", b_major == "mn")
    declare = instruction(
        name,
        "{ .reg .pred p; setp.ne.b32 p, %accumulate, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{dtype}.{dtype} "
        f"{{%acc}}, {'{%a}' if in_registers else '%a'}, %b, p, 1, 1{transposes}; }}",
        (Fragment("acc", "f32", n // 2, "inout"), first, Scalar("b", "u64"), Scalar("accumulate", "i32")),
        arch="90a",
        group="warpgroup",
        effect="control",
        doc=f"D[64, {n}] (+)= A[64, {k}] B[{k}, {n}] of {dtype}, float32 accumulators; A from {a}"
        f"{'' if in_registers else f', {a_major}-major'}, B {b_major}-major.",
    )

    def emulate(thread: Any, *args: Any) -> None:
        matrix_engine.issue(made, shape, thread, args)

    emulate.__module__ = __name__
    made = declare(emulate)
    return made


@instruction("wgmma_fence", "wgmma.fence.sync.aligned;", arch="90a", group="warpgroup", effect="control")
def wgmma_fence(thread: Any) -> None:
    """Order this warp's register accesses before the wgmma that follow: needed before the first one, and after every
    change of an accumulator or of A's registers."""
    thread.register_fences += 1


@instruction("wgmma_commit", "wgmma.commit_group.sync.aligned;", arch="90a", group="warpgroup", effect="control")
def wgmma_commit(thread: Any) -> None:
    """Close the group of wgmma issued since the last commit."""
    matrix_engine.commit(wgmma_commit, thread)


@cache
def wgmma_wait(pending: int) -> Instruction:
    """The instruction that waits until at most ``pending`` of the newest groups are in flight."""
    if not 0 <= pending <= 7:
        raise ValueError(f"wgmma_wait({pending}); the number of groups must be 0 to 7")
    declare = instruction(
        f"wgmma_wait_{pending}",
        f"wgmma.wait_group.sync.aligned {pending};",
        arch="90a",
        group="warpgroup",
        effect="control",
        doc=f"Wait until at most {pending} of the newest wgmma groups are in flight: the others' accumulators may be "
        "read, their shared-memory operands overwritten.",
    )

    def emulate(thread: Any) -> None:
        matrix_engine.wait(thread, pending)

    emulate.__module__ = __name__
    return declare(emulate)
