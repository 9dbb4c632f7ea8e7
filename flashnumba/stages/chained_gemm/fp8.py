"""The three ways in FP8, where the problem is not made but met: attention with e4m3 q, k and v on sm_89 and later.

``m16n8k32`` takes four neighbouring keys of P in a register, and the first product leaves two. With K in its natural
order the four lanes of a row stand exactly as those of :mod:`flashnumba.stages.chained_gemm.mma` do in mmac's, counted
in pairs of keys, so the same hand-overs serve. ``registers`` copies K in the order QUADS instead, and V stays as it is.

Everything else is the stage fp8's: what is done to P, to arrays that lie otherwise, and the host side
(:mod:`flashnumba.stages.fp8_heads`).

Limits: no scales but the one of the scores, and e4m3 alone; mma.sync computes in FP8 on sm_89 and sm_120, on sm_90 it
is converted to float16 by the assembler and gains nothing. sm_89 keeps 13 bits behind the point of its sums.

Sources: PTX ISA, mma.m16n8k32; Zhang et al., SageAttention2, arXiv 2411.10958; Shah et al., FlashAttention-3, arXiv
2407.08608, section 3.3.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from flashnumba.stages import fp8_heads
from flashnumba.stages.chained_gemm.mma import make_chained
from flashnumba.stages.heads import Launch, Plan, Planner, Shape, signature
from flashnumba.tiles.chain import WAYS, shared_of
from flashnumba.tiles.fp8 import tiles_for
from flashnumba.tiles.sizes import AttentionTiles

if TYPE_CHECKING:
    from flashnumba.machine.compiler import CompileCase

__all__ = ["ELEMENT", "PLANS", "compile_cases", "forward", "plan_chained", "tiles_for"]

ELEMENT = "float8_e4m3fn"
"""Of q, k and v, as ml_dtypes and torch call it."""


def plan_chained(way: str, shape: Shape, tiles: AttentionTiles | None = None, *, broken: str = "") -> Plan:
    """One block for each tile of rows of each head, with the shared memory of the way that takes most.

    Raises:
        ValueError: another element, a GPU below sm_89, scales, or rows that are not aligned as the kernels need them.
    """
    if shape.scaled:
        raise ValueError(f"chained_gemm.{way} of {ELEMENT} knows no descales; those of the stage fp8 do")
    if shape.element != ELEMENT or shape.vector != 16 or shape.d % 16:
        raise ValueError(f"q is {shape.element} with rows of {shape.d}; it must be {ELEMENT}, in multiples of 16 bytes")
    if int(shape.arch.rstrip("a")) < 89:
        raise ValueError(f"tensor cores multiply {ELEMENT} from sm_89 on; this is sm_{shape.arch}")
    tiles = tiles or tiles_for(shape.d, shape.arch)
    made = make_chained(way, tiles, ELEMENT, 16, "89", even=shape.d == tiles.d, broken=broken)
    blocks = -(-shape.m // tiles.bm) * shape.heads * shape.batch
    most = max(shared_of(each, tiles) for each in WAYS)
    return Plan((Launch(made, blocks, tiles.threads, tiles.shared + most),), v_by_columns=True)


PLANS: dict[str, Planner] = {way: partial(plan_chained, way) for way in WAYS}


def forward(q: Any, k: Any, v: Any, plan: Planner = PLANS["registers"], **options: Any) -> tuple[Any, Any]:
    """Attention of e4m3 arrays by one way: as :func:`flashnumba.stages.fp8_heads.forward`."""
    return fp8_heads.forward(q, k, v, plan, **options)


def compile_cases() -> Iterator[CompileCase]:
    """Kernels as they are launched, for the compiler's tables and gates."""
    from flashnumba.machine.compiler import CompileCase

    for way in WAYS:
        for d in (64, 128):
            for chosen_for in (("89",), ("90a", "100a", "120a")):
                shape = Shape(ELEMENT, 1, 1, 1, 4096, 4096, d, arch=chosen_for[0])
                (launch,) = plan_chained(way, shape).launches
                title = f"chained_gemm.{way} e4m3 d {d}, tiles for sm_{chosen_for[0]}"
                yield CompileCase(
                    title, launch.kernel, signature(ELEMENT), launch.threads, launch.shared, chosen_for=chosen_for
                )
