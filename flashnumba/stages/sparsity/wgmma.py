"""BLASST on Hopper: the kernel of ``flash_forward.wgmma``, whose consumers vote on each tile.

Beside ``blasst`` the rows that agree are the 64 of a consumer, not the block's: a product of wgmma is of 64 rows. V of
a tile that nobody wants is not read. What is left out costs one product and a maximum; the vote, which lies between
that product and the softmax, costs something where nothing is left out: :mod:`flashnumba.tiles.specialised`.

Source: BLASST, arXiv 2512.12087.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

from flashnumba.machine.function import Kernel, kernel
from flashnumba.stages.heads import map_of
from flashnumba.stages.sparsity.problem import Launch, Plan, Shape, signature
from flashnumba.tiles.specialised import make_specialised
from flashnumba.tiles.specialised_tiles import ROWS, SpecialisedTiles, check_specialised, tiles_for

if TYPE_CHECKING:
    from flashnumba.machine.compiler import CompileCase

__all__ = ["compile_cases", "make_blasst", "plan_blasst", "tile_of"]

ARGUMENTS = ("q", "k", "lse", "scale", "causal", *(map_of(name) for name in "qkvo"), "limit")


@cache
def make_blasst(tiles: SpecialisedTiles, element: str, *, noted: bool = False, broken: str = "") -> Kernel:
    """The kernel ``(q, k, lse, scale, causal, q_map, k_map, v_map, o_map, limit)``, with ``tile_map`` if ``noted``.

    Args:
        broken: plants one of :data:`flashnumba.tiles.specialised.FAULTS` or of its ``VOTE_FAULTS``.
    """
    attend = make_specialised(tiles, element, vote=True, noted=noted, broken=broken)
    options = {"threads": tiles.threads, "min_blocks": 1, "arch": "90a", "name": "sparsity.blasst_wgmma"}

    @kernel(**options)
    def plain(q, k, lse, scale, causal, q_map, k_map, v_map, o_map, limit):
        attend(q, k, lse, scale, causal, q_map, k_map, v_map, o_map, limit, None)

    @kernel(**options)
    def with_map(q, k, lse, scale, causal, q_map, k_map, v_map, o_map, limit, tile_map):
        attend(q, k, lse, scale, causal, q_map, k_map, v_map, o_map, limit, tile_map)

    return with_map if noted else plain


def tile_of(shape: Shape) -> tuple[int, int]:
    """Rows and keys that a decision is about."""
    return ROWS, tiles_for(shape.d, shape.n).bn


def plan_blasst(
    shape: Shape, *, noted: bool = False, tiles: SpecialisedTiles | None = None, broken: str = ""
) -> Plan:  # fmt: skip
    """All tiles of keys, each left out where 64 rows vote so.

    Args:
        tiles: those of ``flash_forward.wgmma`` if None.

    Raises:
        ValueError: as :func:`flashnumba.tiles.specialised_tiles.check_specialised`.
    """
    check_specialised(shape.element, shape.arch, shape.mapped)
    tiles = tiles or tiles_for(shape.d, shape.n)
    made = make_blasst(tiles, shape.element, noted=noted, broken=broken)
    blocks = -(-shape.m // tiles.bm) * shape.heads * shape.batch  # nobody knows how long each takes
    args = (*ARGUMENTS, *(("tile_map",) if noted else ()))
    scratch = {"tile_map": (shape.batch, shape.heads, -(-shape.m // ROWS), -(-shape.n // tiles.bn))} if noted else {}
    return Plan((Launch(made, blocks, tiles.threads, tiles.shared, args, tiles.boxes),), scratch)


def compile_cases() -> Iterator[CompileCase]:
    """The kernel as it is launched, for the compiler's tables and gates."""
    from flashnumba.machine.compiler import CompileCase

    for element, d, n, noted in (
        ("float16", 64, 16384, False), ("float16", 128, 16384, False), ("float16", 128, 4096, True),
        ("bfloat16", 128, 16384, False), ("float16", 192, 16384, False), ("float16", 256, 16384, False),
    ):  # fmt: skip
        (launch,) = plan_blasst(Shape(element, 1, 1, 1, n, n, d), noted=noted).launches
        name = f"sparsity.blasst_wgmma {element} d {d}, {n} keys{', with a map' if noted else ''}"
        yield CompileCase(name, launch.kernel, signature(element, launch.args), launch.threads, launch.shared)
