"""Attention on tensor cores, FlashAttention-2 style: mma.sync, cp.async, softmax in registers.

Beside ``simt`` it changes three things. Products run on tensor cores (16 x 8 x 16, float16 or bfloat16 in, float32
out). Each warp owns whole rows, so nothing of S or P leaves registers. K and V come by asynchronous copies into
swizzled shared memory, while the products of the step before run. A block attends to one tile of rows:
:func:`flashnumba.tiles.forward.make_attend`, which other stages vary. Which one, its schedule says: under a causal mask
the longest first (:mod:`flashnumba.tiles.schedule`).

What a query may not see has weight 0; 0 times a NaN or infinity in V is NaN all the same where the tile is computed.

Source: Dao, FlashAttention-2, arXiv 2307.08691.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import TYPE_CHECKING

from flashnumba.machine.function import Kernel, kernel
from flashnumba.machine.numba import cuda, uint32, uint64
from flashnumba.stages.flash_forward import split
from flashnumba.stages.heads import ARGUMENTS, Launch, Plan, Planner, Shape, signature
from flashnumba.tiles.forward import check_element, make_attend, tier, tiles_for
from flashnumba.tiles.marks import LOG, make_marks
from flashnumba.tiles.schedule import SCHEDULES
from flashnumba.tiles.scheduled import make_place, make_scheduled
from flashnumba.tiles.sizes import AttentionTiles

if TYPE_CHECKING:
    from flashnumba.machine.compiler import CompileCase

__all__ = ["PLANS", "TRACED", "compile_cases", "make_mma", "plan_mma"]


@cache
def make_mma(
    tiles: AttentionTiles, element: str, vector: int = 16, arch: str = "80", *, schedule: str = "longest_first",
    even: bool = True, traced: bool = False, broken: str = "",
) -> Kernel:  # fmt: skip
    """The kernel for float16 or bfloat16; arguments as :func:`flashnumba.tiles.scheduled.make_scheduled`.

    Args:
        traced: leaves marks, written into an argument ``trace``; of a schedule with one piece a block.
    """
    if not traced:
        return make_scheduled(
            tiles, element, vector, arch, schedule=schedule, even=even, name="flash_forward.mma", broken=broken
        )
    place = make_place(tiles, element, SCHEDULES[schedule].piece)
    attend = make_attend(tiles, element, vector, arch, even=even, traced=True, broken=broken)
    start, _, finish = make_marks(traced)

    @kernel(threads=tiles.threads, min_blocks=tiles.min_blocks, arch=arch, name="flash_forward.mma traced")
    def mma_traced(q, k, v, o, lse, scale, causal, trace):
        log = cuda.local.array(LOG, uint64)
        start(log, trace)
        batch, head, tile, _ = place(q, k, causal, uint32(cuda.blockIdx.x))
        attend(q, k, v, o, lse, scale, causal, batch, head, tile, log)
        finish(log, trace)

    return mma_traced


def plan_mma(shape: Shape, *, traced: bool = False) -> Plan:
    """A block for each tile of rows of each head; ``traced``: with marks, written into an argument ``trace``.

    Raises:
        ValueError: float32, or bfloat16 below sm_80.
    """
    check_element(shape.element, shape.arch)
    tiles, schedule = tiles_for(shape.d, shape.arch, shape.vector), schedule_for(shape)
    kernel = make_mma(
        tiles, shape.element, shape.vector, tier(shape.arch), schedule=schedule, even=shape.d == tiles.d, traced=traced
    )  # fmt: skip
    blocks = SCHEDULES[schedule].blocks(-(-shape.m // tiles.bm), shape.heads * shape.batch)
    args = (*ARGUMENTS, "trace") if traced else ARGUMENTS
    return Plan((Launch(kernel, blocks, tiles.threads, tiles.shared, args),))


def schedule_for(shape: Shape) -> str:
    """The schedule's name. Longest first serves all shapes: without a mask it is head after head."""
    return "longest_first"


PLANS: dict[str, Planner] = {"mma": plan_mma, "split": split.plan_split}
TRACED: dict[str, Planner] = {"mma": partial(plan_mma, traced=True)}
"""Kernels that ``flashnumba timeline`` can run."""


def compile_cases() -> Iterator[CompileCase]:
    """Kernels as they are launched, for the compiler's tables and gates."""
    from flashnumba.machine.compiler import CompileCase

    def case(element: str, d: int, chosen_for: tuple[str, ...], vector: int = 16) -> CompileCase:
        shape = Shape(element, 1, 1, 1, 4096, 4096, d, vector=vector, arch=chosen_for[0])
        launch = plan_mma(shape).launches[0]
        width = "" if vector == 16 else f" by {vector} bytes"
        title = f"flash_forward.mma {element} d {d}{width}, tiles for sm_{chosen_for[0]}"
        return CompileCase(
            title, launch.kernel, signature(element), launch.threads, launch.shared, chosen_for=chosen_for
        )

    for d in (32, 64, 96, 128, 192, 256):
        yield case("float16", d, ("90a",))
    yield case("bfloat16", 128, ("90a",))
    for d, vector in ((100, 8), (33, 2), (255, 2)):
        yield case("float16", d, ("90a", "120a"), vector)
    for d in (64, 128, 256):
        yield case("float16", d, ("80",))
        yield case("float16", d, ("86", "89"))
        yield case("float16", d, ("100a", "120a"))
        yield case("float16", d, ("75",))
    yield from split.compile_cases()
