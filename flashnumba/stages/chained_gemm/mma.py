"""The flash forward on tensor cores with three ways for P to come from the first product to the second.

The kernels are that of the stage flash_forward but for what lies between S and P's operand, and for the order in which
K's rows are copied, which makes the problem (:mod:`flashnumba.tiles.chain`)::

    shared      K in mmac's order      P stored to shared memory, ldmatrix back
    shuffles    K in mmac's order      lanes exchange words
    registers   K in its own order     packing is all; this is the flash forward, to the instruction

``mmac's order`` deals four keys to a lane as the notes' matrix instruction does. On NVIDIA nobody would for 16-bit
elements: it is there so that the notes' problem can be seen, and measured, on a machine that readers have. FP8 has the
problem by nature: :mod:`flashnumba.stages.chained_gemm.fp8`.

All three are launched with the same tiles and the same bytes of shared memory, so that none has more blocks on a
multiprocessor for what it leaves out.

Source: the notes, section 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import TYPE_CHECKING

from flashnumba.machine.function import Kernel
from flashnumba.stages.heads import Launch, Plan, Planner, Shape, signature
from flashnumba.tiles.chain import DETOUR, WAYS, shared_of
from flashnumba.tiles.forward import check_element, tiles_for
from flashnumba.tiles.scheduled import make_scheduled
from flashnumba.tiles.sizes import AttentionTiles

if TYPE_CHECKING:
    from flashnumba.machine.compiler import CompileCase

__all__ = ["PLANS", "compile_cases", "make_chained", "plan_chained", "tiles_for", "variants"]


@cache
def make_chained(
    way: str, tiles: AttentionTiles, element: str, vector: int = 16, arch: str = "80", *, even: bool = True,
    broken: str = "",
) -> Kernel:  # fmt: skip
    """The kernel for float16 or bfloat16; arguments as :func:`flashnumba.tiles.forward.make_attend`.

    It takes ``tiles.shared + shared_of(way, tiles)`` bytes of dynamic shared memory.
    """
    return make_scheduled(
        tiles, element, vector, arch, schedule="head_by_head", even=even, chain=way, name=f"chained_gemm.{way}",
        broken=broken,
    )  # fmt: skip


def plan_chained(way: str, shape: Shape, tiles: AttentionTiles | None = None) -> Plan:
    """One block for each tile of rows of each head, with the shared memory of the way that takes most.

    Args:
        tiles: those of the flash forward if None.

    Raises:
        ValueError: float32, or a GPU below sm_80.
    """
    check_element(shape.element, shape.arch)
    if int(shape.arch.rstrip("a")) < 80:
        raise ValueError(f"chained_gemm.{way} needs sm_80; this is sm_{shape.arch}")
    tiles = tiles or tiles_for(shape.d, shape.arch, shape.vector)
    made = make_chained(way, tiles, shape.element, shape.vector, even=shape.d == tiles.d)
    blocks = -(-shape.m // tiles.bm) * shape.heads * shape.batch
    most = max(shared_of(each, tiles) for each in WAYS)
    return Plan((Launch(made, blocks, tiles.threads, tiles.shared + most),))


PLANS: dict[str, Planner] = {way: partial(plan_chained, way) for way in WAYS}


def variants(shape: Shape) -> dict[str, Plan]:
    """Shared memory at its best, by name, for measurements.

    Raises:
        ValueError: as :func:`plan_chained`.
    """
    return {DETOUR: plan_chained(DETOUR, shape)}


def compile_cases() -> Iterator[CompileCase]:
    """Kernels as they are launched, those for FP8 too, for the compiler's tables and gates."""
    from flashnumba.machine.compiler import CompileCase
    from flashnumba.stages.chained_gemm import fp8

    for way in WAYS:
        for element, d, chosen_for in (
            ("float16", 64, ("90a",)), ("float16", 128, ("90a",)), ("bfloat16", 128, ("90a",)),
            ("float16", 64, ("80",)), ("float16", 128, ("80",)), ("float16", 128, ("86", "89")),
            ("float16", 128, ("100a", "120a")),
        ):  # fmt: skip
            shape = Shape(element, 1, 1, 1, 4096, 4096, d, arch=chosen_for[0])
            (launch,) = plan_chained(way, shape).launches
            title = f"chained_gemm.{way} {element} d {d}, tiles for sm_{chosen_for[0]}"
            yield CompileCase(
                title, launch.kernel, signature(element), launch.threads, launch.shared, chosen_for=chosen_for
            )
    yield from fp8.compile_cases()
