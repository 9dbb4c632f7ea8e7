"""The product on CUDA cores, any GPU from sm_75: plans of four kernels, each one step from the last.

What it reads from memory for an element of C and a step of k, counted in sectors of 32 bytes (the first two) or in
elements (tiles), for float32 and row-major operands::

    naive           33 bytes      a warp walks down a column: each lane has a sector for itself
    coalesced       5 bytes       a warp walks along a row
    shared_tile     1/4 byte      tiles of 32 x 32, read by all threads of a block
    register_tile   1/16 byte     tiles of 128 x 128, and of 16 x 8 in the registers of a thread

An H200 moves 4.8 TB/s and does 67 TFLOP/s of float32, so a multiplication and addition may cost an eighth of a byte:
beyond that count only the last is not bound by memory. Caches are better than the count, and shared memory is a limit
of its own; the files of the kernels say more.

All take float16, bfloat16 and float32, any strides and sizes, and add in float32, one step of k after the other, so the
results are the same bits every time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from flashnumba.stages.gemm.one_element import LANES, THREADS, WARPS, make_coalesced, make_naive
from flashnumba.stages.gemm.problem import Plan, Shape, signature
from flashnumba.stages.gemm.register_tile import Tiles, make_register_tile
from flashnumba.stages.gemm.shared_tile import make_shared_tile
from flashnumba.stages.gemm.waves import TileChoice, cheapest, multiprocessors

if TYPE_CHECKING:
    from flashnumba.machine.compiler import CompileCase

__all__ = [
    "CHOICES", "PLANS", "compile_cases", "plan_coalesced", "plan_naive", "plan_of", "plan_register_tile",
    "plan_shared_tile", "variants",
]  # fmt: skip

MOST_BLOCKS = 2**31 - 1
LARGE = Tiles()
MEDIUM = Tiles(64, 64, tm=8, tn=8, min_blocks=4)
SMALL = Tiles(32, 32, tm=4, tn=4, min_blocks=8)
CHOICES = (TileChoice(LARGE, 1.0), TileChoice(MEDIUM, 0.93), TileChoice(SMALL, 0.62))


def tier(shape: Shape) -> str:
    """What kernels are made for: those for sm_75 do without instructions that came with sm_80."""
    return "75" if shape.capability < 80 else "80"


def blocks(shape: Shape, rows: int, cols: int) -> int:
    """Blocks that cover C, each ``rows`` by ``cols``.

    Raises:
        ValueError: more than a grid has.
    """
    many = -(-shape.m // rows) * -(-shape.n // cols)
    if many > MOST_BLOCKS:
        raise ValueError(
            f"C is {shape.m} x {shape.n}, {many} blocks of {rows} x {cols}; a grid has at most {MOST_BLOCKS}: "
            "split the product or use register_tile"
        )
    return many


def plan_naive(shape: Shape, broken: str = "") -> Plan:
    """256 threads have 32 rows and 8 columns of C."""
    return Plan(make_naive(shape.element, tier(shape), broken), blocks(shape, LANES, WARPS), THREADS)


def plan_coalesced(shape: Shape, broken: str = "") -> Plan:
    """256 threads have 8 rows and 32 columns of C."""
    return Plan(make_coalesced(shape.element, tier(shape), broken), blocks(shape, WARPS, LANES), THREADS)


def plan_shared_tile(shape: Shape, broken: str = "") -> Plan:
    """A block has ``tile x tile`` threads and as many elements of C: 32 x 32, or 16 x 16 where the GPU would else have
    multiprocessors without a block."""
    tile = 32 if blocks(shape, 32, 32) >= multiprocessors() else 16
    made = make_shared_tile(
        shape.element, tile, a_major=shape.a_major, b_major=shape.b_major, arch=tier(shape), broken=broken
    )
    return Plan(made, blocks(shape, tile, tile), tile * tile)


def plan_of(shape: Shape, tiles: Tiles, broken: str = "") -> Plan:
    """The register tile with given sizes; ``broken`` as in :func:`.make_register_tile`."""
    wide = {f"wide_{x}": shape.whole(x) >= 4 * shape.itemsize for x in "abc"}
    made = make_register_tile(
        shape.element, tiles, a_major=shape.a_major, b_major=shape.b_major, **wide, arch=tier(shape), broken=broken
    )
    return Plan(made, blocks(shape, tiles.bm, tiles.bn), tiles.threads, tiles.shared)


def plan_register_tile(shape: Shape) -> Plan:
    """The register tile with the sizes that finish first, see :mod:`flashnumba.stages.gemm.waves`."""
    # Rounding bfloat16 in integers takes registers that the largest tile does not have.
    by_integers = shape.element == "bfloat16" and tier(shape) == "75"
    return plan_of(shape, cheapest(shape, CHOICES[1:] if by_integers else CHOICES))


def variants(shape: Shape) -> dict[str, Plan]:
    """Register tiles of other sizes, to be timed on a GPU."""
    sizes = [LARGE, *(replace(LARGE, band=band) for band in (1, 4, 16, 32)), replace(LARGE, bk=16)]
    sizes += [replace(LARGE, tm=8, tn=16, lanes_m=8), replace(LARGE, tm=16, tn=8, lanes_m=8)]
    sizes += [replace(LARGE, tm=8, tn=8), replace(LARGE, tm=8, tn=8, lanes_m=8)]
    for bm, bn in ((128, 256), (256, 128)):
        sizes += [Tiles(bm, bn, bk, min_blocks=1) for bk in (8, 16)]
        sizes += [Tiles(bm, bn, 8, 8, 16, lanes_m=8, min_blocks=1)]
    sizes += [Tiles(128, 64, min_blocks=4), Tiles(64, 128, min_blocks=4), MEDIUM, SMALL]
    return {
        f"{t.bm}x{t.bn}x{t.bk} by {t.tm}x{t.tn}, {t.lanes_m}x{t.lanes_n} lanes, band {t.band}": plan_of(shape, t)
        for t in sizes
    }


PLANS: dict[str, Callable[[Shape], Plan]] = {
    "naive": plan_naive,
    "coalesced": plan_coalesced,
    "shared_tile": plan_shared_tile,
    "register_tile": plan_register_tile,
}


def compile_cases() -> Iterator[CompileCase]:
    """Kernels as they are launched, for the compiler's tables and gates: each element, and of the register tile each
    size, all majors, the wide and the narrow loads."""
    from flashnumba.machine.compiler import CompileCase

    size = 4096
    cases = [(name, Shape.packed(e, size, size, size)) for name in PLANS for e in ("float32", "float16", "bfloat16")]
    cases += [("shared_tile", Shape.packed("float32", size, size, size, "m", "k"))]
    cases += [("register_tile", Shape.packed("float32", size, size, size, *m)) for m in ("kk", "mn", "mk")]
    cases += [("register_tile", Shape.packed("float32", 4095, 4095, 4095, *m)) for m in ("kn", "mk")]
    cases += [("register_tile", Shape.packed("float16", 4095, 4095, 4095, "k", "k"))]
    cases += [
        ("register_tile", Shape.packed("float32", n, n, n, *m)) for n in (768, 767, 256, 255) for m in ("kn", "mk")
    ]
    cases += [("register_tile", Shape.packed("bfloat16", size, size, size, arch="75"))]
    for name, shape in cases:
        plan = PLANS[name](shape)
        title = f"gemm.{name} {shape.element} {shape.m} {shape.a_major}{shape.b_major}, sm_{plan.kernel.arch} on"
        yield CompileCase(title, plan.kernel, signature(shape), plan.threads, plan.shared)
