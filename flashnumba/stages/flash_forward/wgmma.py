"""Attention on Hopper's tensor cores, FlashAttention-3 style: TMA, wgmma, roles, softmax beside products.

Beside ``mma`` it changes three things. Products are of warpgroups, 64 rows each, with K and V read from shared memory
where the copy engine put them: no thread loads an operand, and P's accumulators are one as they lie. A warpgroup of its
own moves tiles, and gives its registers to those that multiply. And a warpgroup's softmax runs beside its own product
with V of the step before, and beside the products of another warpgroup, which takes turns with it.

A block has a multiprocessor to itself, so that nobody else works while it begins and ends. Therefore as many blocks as
multiprocessors stay, and each goes from one tile of rows to the next, under a causal mask in pairs of equal work:
:func:`flashnumba.tiles.specialised.make_specialised`. Head dimensions above 128 leave no room for that under a causal
mask: :func:`plan_of`.

Limits: sm_90a; rows that start at multiples of 16 bytes, so head dimensions are multiples of 8; what the copy engine
does not take, ``mma`` does. Short sequences of a head dimension up to 64 are faster with ``mma``: a block is 192 rows.

Source: Shah, Bikshandi, Zhang, Thakkar, Ramani and Dao, FlashAttention-3, arXiv 2407.08608.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

from flashnumba.machine.function import Kernel, kernel
from flashnumba.stages.heads import Launch, Plan, Planner, Shape, map_of, signature
from flashnumba.tiles.specialised import make_specialised
from flashnumba.tiles.specialised_tiles import SpecialisedTiles, check_specialised, tiles_for

if TYPE_CHECKING:
    from flashnumba.machine.compiler import CompileCase

__all__ = ["ARGUMENTS", "PLANS", "compile_cases", "make_wgmma", "plan_of", "plan_wgmma", "stays", "variants"]

UNEVEN = 1.1
"""Times as long as with pairs shared out evenly, up to which blocks stay. Staying was seen to win up to a tenth; what
uneven pairs lose is an estimate by list scheduling."""
ARGUMENTS = ("q", "k", "lse", "scale", "causal", *(map_of(name) for name in "qkvo"))


@cache
def make_wgmma(tiles: SpecialisedTiles, element: str, *, broken: str = "") -> Kernel:
    """The kernel ``(q, k, lse, scale, causal, q_map, k_map, v_map, o_map)`` for float16 or bfloat16.

    Args:
        broken: plants one of :data:`flashnumba.tiles.specialised.FAULTS`.
    """
    attend = make_specialised(tiles, element, broken=broken)

    @kernel(threads=tiles.threads, min_blocks=1, arch="90a", name="flash_forward.wgmma")
    def wgmma_kernel(q, k, lse, scale, causal, q_map, k_map, v_map, o_map):
        attend(q, k, lse, scale, causal, q_map, k_map, v_map, o_map, None, None, None, None, None)

    return wgmma_kernel


def stays(shape: Shape, tiles: SpecialisedTiles) -> bool:
    """Whether blocks that stay are faster. Not under a causal mask where O goes out by Q's place, as nothing of that is
    hidden; nor where pairs of row tiles share out so unevenly that, the longest first, single ones make up for it."""
    if not shape.causal:
        return True
    pairs, each = shape.batch * shape.heads * -(-shape.m // (2 * tiles.bm)), shape.multiprocessors
    return tiles.out_panels > 0 and -(-pairs // each) * each <= UNEVEN * pairs


def plan_of(shape: Shape, tiles: SpecialisedTiles, blocks: int = 0) -> Plan:
    """A block for each multiprocessor if :func:`stays`, or for each row tile of each head, also if these are fewer.

    Args:
        blocks: at most, or as said if 0.

    Raises:
        ValueError: as :func:`flashnumba.tiles.specialised_tiles.check_specialised`.
    """
    check_specialised(shape.element, shape.arch, shape.mapped)
    pieces = -(-shape.m // tiles.bm) * shape.heads * shape.batch
    blocks = min(pieces, blocks or (shape.multiprocessors if stays(shape, tiles) else pieces))
    made = make_wgmma(tiles, shape.element)
    return Plan((Launch(made, blocks, tiles.threads, tiles.shared, ARGUMENTS, tiles.boxes),))


def plan_wgmma(shape: Shape) -> Plan:
    """:func:`plan_of` with tiles for the shape.

    Raises:
        ValueError: as :func:`flashnumba.tiles.specialised_tiles.check_specialised`.
    """
    return plan_of(shape, tiles_for(shape.d, shape.n))


def variants(shape: Shape) -> dict[str, Plan]:
    """Plans with other tiles, to be timed on a GPU."""
    sizes = {
        64: [SpecialisedTiles(64, 128), SpecialisedTiles(64, 112, consumers=3), SpecialisedTiles(64, 128, slots=4)],
        128: [SpecialisedTiles(128, 128), SpecialisedTiles(128, 176), SpecialisedTiles(128, 80, consumers=3)],
        192: [SpecialisedTiles(192, 96)],
        256: [SpecialisedTiles(256, 64)],
    }[-(-shape.d // 64) * 64]
    return {f"{t.bm}x{t.bn}, {t.consumers} consumers, {t.slots} slots": plan_of(shape, t) for t in sizes}


PLANS: dict[str, Planner] = {"wgmma": plan_wgmma}


def compile_cases() -> Iterator[CompileCase]:
    """The kernel as it is launched, for the compiler's tables and gates."""
    from flashnumba.machine.compiler import CompileCase

    for element, d, n in (
        ("float16", 64, 4096), ("float16", 128, 4096), ("float16", 128, 16384), ("bfloat16", 128, 4096),
        ("float16", 192, 4096), ("float16", 256, 4096),
    ):  # fmt: skip
        (launch,) = plan_wgmma(Shape(element, 1, 1, 1, n, n, d)).launches
        name = f"flash_forward.wgmma {element} d {d}, {n} keys"
        yield CompileCase(name, launch.kernel, signature(element, launch.args), launch.threads, launch.shared)
