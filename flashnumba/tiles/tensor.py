"""One product on a warp's tensor cores: 16 x 8 x 16 for 16-bit types, the same step from sm_75 on; 16 x 8 x 32 for FP8.

``multiply(acc, acc_at, a, a_at, b, b_at)`` adds ``A[16, k] B[k, 8]`` to four float32 accumulators; A is four registers,
B two, as :mod:`flashnumba.machine.instructions.fragments` draws them. sm_75 has no such instruction but one
of half the depth: the operands' registers 0, 1 of A and 0 of B are those of the first half, so two of these do.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import (
    mma_m16n8k8_f16,
    mma_m16n8k16_bf16,
    mma_m16n8k16_f16,
    mma_m16n8k32_e4m3,
    mma_m16n8k32_e4m3_e5m2,
    mma_m16n8k32_e5m2,
)

__all__ = ["make_multiply"]

EIGHT = {"float8_e4m3fn": mma_m16n8k32_e4m3, "float8_e5m2": mma_m16n8k32_e5m2}
WEIGHTED = {"float8_e4m3fn": mma_m16n8k32_e4m3, "float8_e5m2": mma_m16n8k32_e4m3_e5m2}
"""Products of A in e4m3, whatever B is."""


@cache
def make_multiply(element: str, arch: str = "80", *, weights: bool = False) -> DeviceFunction:
    """``multiply`` for float16, bfloat16, ``float8_e4m3fn`` or ``float8_e5m2``.

    Args:
        weights: of the two 8-bit types, A is e4m3 in any case, and only B is of ``element``.

    Raises:
        ValueError: no such product: another element, bfloat16 below sm_80, or FP8 below sm_89.
    """
    native = int(arch.rstrip("a")) >= 80
    if element in EIGHT and int(arch.rstrip("a")) < 89:
        raise ValueError(f"tensor cores multiply {element} from sm_89 on, not on sm_{arch}")
    if element not in EIGHT and element not in ("float16", "bfloat16"):
        raise ValueError(f"tensor cores multiply float16, bfloat16 and FP8 here, not {element}")
    if element == "bfloat16" and not native:
        raise ValueError(f"tensor cores multiply bfloat16 from sm_80 on, not on sm_{arch}")
    eight = WEIGHTED if weights else EIGHT
    wide = {"float16": mma_m16n8k16_f16, "bfloat16": mma_m16n8k16_bf16, **eight}[element]

    @device
    def multiply(acc, acc_at, a, a_at, b, b_at):
        wide(acc, acc_at, a, a_at, b, b_at)

    @device
    def multiply_in_halves(acc, acc_at, a, a_at, b, b_at):
        mma_m16n8k8_f16(acc, acc_at, a, a_at, b, b_at)
        mma_m16n8k8_f16(acc, acc_at, a, a_at + 2, b, b_at + 1)

    return multiply if native else multiply_in_halves
