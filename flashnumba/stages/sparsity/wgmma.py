"""Sparse attention on Hopper: the kernel of ``flash_forward.wgmma``, told by a threshold or a list what to leave out.

    blasst_wgmma    every tile of K is multiplied; its exponentials and V only where 64 rows agree they matter
    blocks_wgmma    only the blocks of a list, made from a mask; among them the vote, if it is wanted

Beside their likes in :mod:`flashnumba.stages.sparsity.mma` the rows that agree are the 64 of a consumer, not a warp's
or the block's: a product of wgmma is of 64 rows. V of a tile that nobody wants is not read. What is left out by vote
costs one product and a maximum; the vote, which lies between that product and the softmax, costs something where
nothing is left out: :mod:`flashnumba.tiles.specialised`. Blocks of a list are gathered into tiles of more keys:
:mod:`flashnumba.tiles.specialised_lists`.

Sources: BLASST, arXiv 2512.12087; SpargeAttn, arXiv 2502.18137, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

from flashnumba.machine.function import Kernel, kernel
from flashnumba.stages.heads import map_of
from flashnumba.stages.sparsity import lists, predict
from flashnumba.stages.sparsity.problem import Launch, Plan, Shape, signature
from flashnumba.tiles.specialised import make_specialised
from flashnumba.tiles.specialised_tiles import ROWS, SpecialisedTiles, check_specialised, takes, tiles_for

if TYPE_CHECKING:
    from flashnumba.machine.compiler import CompileCase

__all__ = ["BLOCK", "LISTED", "compile_cases", "list_tiles", "make_sparse", "plan_blasst", "plan_blocks", "plan_sparge",
           "takes_blocks", "tile_of"]  # fmt: skip

ARGUMENTS = ("q", "k", "lse", "scale", "causal", *(map_of(name) for name in "qkvo"), "limit")
BLOCK = 64
"""Keys of a list's blocks."""
LISTED = ROWS, BLOCK
"""Rows and keys of a tile of a list's map."""


@cache
def make_sparse(
    tiles: SpecialisedTiles, element: str, *, vote: bool = False, noted: bool = False, name: str, broken: str = ""
) -> Kernel:  # fmt: skip
    """The kernel ``(q, k, lse, scale, causal, q_map, k_map, v_map, o_map, limit)``; ``indices, counts, counter`` follow
    if ``tiles.block``, ``tile_map`` if ``noted``. Arguments as of
    :func:`flashnumba.tiles.specialised.make_specialised`."""
    attend = make_specialised(tiles, element, vote=vote, noted=noted, broken=broken)
    options = {"threads": tiles.threads, "min_blocks": 1, "arch": "90a", "name": f"sparsity.{name}"}

    @kernel(**options)
    def plain(q, k, lse, scale, causal, q_map, k_map, v_map, o_map, limit):
        attend(q, k, lse, scale, causal, q_map, k_map, v_map, o_map, limit, None, None, None, None)

    @kernel(**options)
    def by_list(q, k, lse, scale, causal, q_map, k_map, v_map, o_map, limit, indices, counts, counter):
        attend(q, k, lse, scale, causal, q_map, k_map, v_map, o_map, limit, indices, counts, counter, None)

    @kernel(**options)
    def with_map(q, k, lse, scale, causal, q_map, k_map, v_map, o_map, limit, tile_map):
        attend(q, k, lse, scale, causal, q_map, k_map, v_map, o_map, limit, None, None, None, tile_map)

    @kernel(**options)
    def by_list_with_map(
        q, k, lse, scale, causal, q_map, k_map, v_map, o_map, limit, indices, counts, counter, tile_map
    ):  # fmt: skip
        attend(
            q, k, lse, scale, causal, q_map, k_map, v_map, o_map, limit, indices, counts, counter, tile_map
        )  # fmt: skip

    listed = tiles.block > 0
    return {(False, False): plain, (True, False): by_list, (False, True): with_map, (True, True): by_list_with_map}[
        listed, noted
    ]


def tile_of(shape: Shape) -> tuple[int, int]:
    """Rows and keys that a vote without a list is about."""
    return ROWS, tiles_for(shape.d, shape.n).bn


def list_tiles(d: int) -> SpecialisedTiles:
    """Tiles of 128 rows, gathered from blocks of :data:`BLOCK` keys: up to D = 128 the fastest of three, or as fast,
    on an H200; above it those that fit, and nothing else was timed."""
    if d <= 128:
        return SpecialisedTiles(64, 192, block=BLOCK) if d <= 64 else SpecialisedTiles(128, 128, block=BLOCK)
    return SpecialisedTiles(192, BLOCK, slots=3, block=BLOCK) if d <= 192 else SpecialisedTiles(256, BLOCK, block=BLOCK)


def takes_blocks(shape: Shape, block_m: int) -> bool:
    """Whether wgmma takes a problem with a mask of blocks of ``block_m`` rows, and any multiple of :data:`BLOCK` keys:
    a row tile of it has 128."""
    return takes(shape.element, shape.arch, shape.mapped) and block_m % list_tiles(shape.d).bm == 0


def attend_launch(shape: Shape, tiles: SpecialisedTiles, vote: bool, noted: bool, name: str, broken: str) -> Launch:
    """The launch of :func:`make_sparse`: a block for each row tile, or, with lists, for each multiprocessor.

    Raises:
        ValueError: as :func:`flashnumba.tiles.specialised_tiles.check_specialised`.
    """
    check_specialised(shape.element, shape.arch, shape.mapped)
    made = make_sparse(tiles, shape.element, vote=vote, noted=noted, name=name, broken=broken)
    pieces = -(-shape.m // tiles.bm) * shape.heads * shape.batch
    blocks = min(pieces, shape.multiprocessors) if tiles.block else pieces
    args = (*ARGUMENTS, *(("indices", "counts", "counter") if tiles.block else ()), *(("tile_map",) if noted else ()))
    return Launch(made, blocks, tiles.threads, tiles.shared, args, tiles.boxes)


def map_shape(shape: Shape, tiles: SpecialisedTiles) -> tuple[int, int, int, int]:
    """Of ``tile_map``."""
    return shape.batch, shape.heads, -(-shape.m // ROWS), -(-shape.n // tiles.keys)


def plan_blasst(
    shape: Shape, *, noted: bool = False, tiles: SpecialisedTiles | None = None, broken: str = ""
) -> Plan:  # fmt: skip
    """All tiles of keys, each left out where 64 rows vote so.

    Args:
        tiles: those of ``flash_forward.wgmma`` if None.

    Raises:
        ValueError: as :func:`flashnumba.tiles.specialised_tiles.check_specialised`.
    """
    tiles = tiles or tiles_for(shape.d, shape.n)
    launch = attend_launch(shape, tiles, True, noted, "blasst_wgmma", broken)
    return Plan((launch,), {"tile_map": map_shape(shape, tiles)} if noted else {})


def plan_blocks(
    shape: Shape, *, block_m: int = 128, block_n: int = BLOCK, vote: bool = False, noted: bool = False,
    tiles: SpecialisedTiles | None = None, name: str = "blocks_wgmma", broken: str = "",
) -> Plan:  # fmt: skip
    """The blocks of ``mask``, which is given; of the tiles gathered from them 64 rows may leave out some if ``vote``.

    Args:
        tiles: :func:`list_tiles` if None.

    Raises:
        ValueError: as :func:`flashnumba.tiles.specialised_tiles.check_specialised`, or blocks that no tiles make up.
    """
    tiles = tiles or list_tiles(shape.d)
    if block_m <= 0 or block_n <= 0 or block_m % tiles.bm or block_n % tiles.keys:
        raise ValueError(
            f"block_m and block_n are {block_m} and {block_n}; they must be multiples of {tiles.bm} and {tiles.keys}"
        )
    attend = attend_launch(shape, tiles, vote, noted, name, broken)
    pack, listed = lists.plan_lists(shape, tiles.bm, tiles.keys, block_m, block_n, broken)
    return Plan((pack, attend), listed | ({"tile_map": map_shape(shape, tiles)} if noted else {}))


def plan_sparge(
    shape: Shape, *, by_count: bool = False, block_m: int = 128, block_n: int = BLOCK, vote: bool = False,
    noted: bool = False, tiles: SpecialisedTiles | None = None, broken: str = "",
) -> Plan:  # fmt: skip
    """A mask by prediction, and attention over its blocks.

    Raises:
        ValueError: as :func:`plan_blocks`, or too many blocks of keys.
    """
    rest = plan_blocks(
        shape, block_m=block_m, block_n=block_n, vote=vote, noted=noted, tiles=tiles, name="sparge_wgmma",
        broken=broken,
    )  # fmt: skip
    return predict.plan_predicted(shape, rest, block_m, block_n, by_count, broken)


def compile_cases() -> Iterator[CompileCase]:
    """Kernels as they are launched, for the compiler's tables and gates."""
    from flashnumba.machine.compiler import CompileCase

    def case(title: str, launch: Launch, element: str) -> CompileCase:
        wanted = signature(element, launch.args)
        return CompileCase(f"sparsity.{title}", launch.kernel, wanted, launch.threads, launch.shared)

    for element, d, n, noted in (
        ("float16", 64, 16384, False), ("float16", 128, 16384, False), ("float16", 128, 4096, True),
        ("bfloat16", 128, 16384, False), ("float16", 192, 16384, False), ("float16", 256, 16384, False),
    ):  # fmt: skip
        (launch,) = plan_blasst(Shape(element, 1, 1, 1, n, n, d), noted=noted).launches
        yield case(f"blasst_wgmma {element} d {d}, {n} keys{', with a map' if noted else ''}", launch, element)
    for element, d, vote, noted in (
        ("float16", 64, False, False), ("float16", 128, False, False), ("float16", 128, True, False),
        ("float16", 128, True, True), ("bfloat16", 128, False, False), ("float16", 192, False, False),
        ("float16", 256, False, False),
    ):  # fmt: skip
        shape = Shape(element, 1, 1, 1, 4096, 4096, d)
        launch = plan_blocks(shape, vote=vote, noted=noted).launches[-1]
        how = f"{', with votes' if vote else ''}{' and a map' if noted else ''}"
        yield case(f"blocks_wgmma {element} d {d}{how}", launch, element)
