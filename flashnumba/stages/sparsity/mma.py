"""Sparse attention on tensor cores: one kernel, told by a threshold, by a list, or by both what to leave out.

    blasst          every tile of K is multiplied; its exponentials and V only where the block's rows agree they matter
    warp_skip       the same, each warp for itself; its sum of exponentials kept, as SpargeAttn's paper, or dropped
    block_sparse    only the tiles of a list, made from a mask of blocks

A block attends to one tile of rows by :func:`flashnumba.tiles.sparse.make_sparse_attend`, which tile as
``flash_forward.mma`` has it: the longest first under a causal mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from flashnumba.machine.function import Kernel, kernel
from flashnumba.machine.numba import cuda, uint32
from flashnumba.stages.heads import ARGUMENTS
from flashnumba.stages.sparsity import lists, predict, sla_plans
from flashnumba.stages.sparsity.decode import plan_decode
from flashnumba.stages.sparsity.problem import Launch, Plan, Shape, signature
from flashnumba.tiles.forward import check_element, tier, tiles_for
from flashnumba.tiles.schedule import SCHEDULES
from flashnumba.tiles.scheduled import make_place
from flashnumba.tiles.sizes import AttentionTiles
from flashnumba.tiles.sparse import make_sparse_attend, unit_rows

if TYPE_CHECKING:
    from flashnumba.machine.compiler import CompileCase

__all__ = ["BLOCK_M", "BLOCK_N", "attend_launch", "compile_cases", "make_sparse", "map_shape", "plan_blocks",
           "plan_skip", "plan_sparge", "sparse_tiles"]  # fmt: skip

BLOCK_M, BLOCK_N = 128, 64
"""Rows and keys of a block of a mask, if nothing else is said: what SpargeAttn has."""


@cache
def make_sparse(
    tiles: AttentionTiles, element: str, vector: int = 16, arch: str = "80", *, even: bool = True, vote: str = "",
    keep_sum: bool = False, listed: bool = False, noted: bool = False, name: str = "", broken: str = "",
) -> Kernel:  # fmt: skip
    """The kernel ``(q, k, v, o, lse, scale, causal, limit)``; ``indices, counts`` follow if ``listed``, ``tile_map`` if
    ``noted``. Arguments as :func:`flashnumba.tiles.sparse.make_sparse_attend`."""
    place = make_place(tiles, element, SCHEDULES["longest_first"].piece)
    attend = make_sparse_attend(
        tiles, element, vector, arch, even=even, vote=vote, keep_sum=keep_sum, listed=listed, noted=noted, broken=broken
    )
    options = {"threads": tiles.threads, "min_blocks": tiles.min_blocks, "arch": arch, "name": f"sparsity.{name}"}

    @kernel(**options)
    def plain(q, k, v, o, lse, scale, causal, limit):
        batch, head, tile, _ = place(q, k, causal, uint32(cuda.blockIdx.x))
        attend(q, k, v, o, lse, scale, causal, limit, None, None, None, batch, head, tile)

    @kernel(**options)
    def by_list(q, k, v, o, lse, scale, causal, limit, indices, counts):
        batch, head, tile, _ = place(q, k, causal, uint32(cuda.blockIdx.x))
        attend(q, k, v, o, lse, scale, causal, limit, indices, counts, None, batch, head, tile)

    @kernel(**options)
    def with_map(q, k, v, o, lse, scale, causal, limit, tile_map):
        batch, head, tile, _ = place(q, k, causal, uint32(cuda.blockIdx.x))
        attend(q, k, v, o, lse, scale, causal, limit, None, None, tile_map, batch, head, tile)

    @kernel(**options)
    def by_list_with_map(q, k, v, o, lse, scale, causal, limit, indices, counts, tile_map):
        batch, head, tile, _ = place(q, k, causal, uint32(cuda.blockIdx.x))
        attend(q, k, v, o, lse, scale, causal, limit, indices, counts, tile_map, batch, head, tile)

    return {(False, False): plain, (True, False): by_list, (False, True): with_map, (True, True): by_list_with_map}[
        listed, noted
    ]


def sparse_tiles(shape: Shape, block_m: int = BLOCK_M, block_n: int = BLOCK_N) -> AttentionTiles:
    """Those of ``flash_forward.mma``, or smaller ones of which blocks of ``block_m`` rows and ``block_n`` keys consist.

    Raises:
        ValueError: the blocks are not of whole 64 rows and 64 keys.
    """
    if block_m <= 0 or block_n <= 0 or block_m % 64 or block_n % 64:
        raise ValueError(f"block_m and block_n are {block_m} and {block_n}; they must be multiples of 64")
    tiles = tiles_for(shape.d, shape.arch, shape.vector)
    while block_m % tiles.bm:
        tiles = replace(tiles, bm=tiles.bm // 2)
    while block_n % tiles.bn:
        tiles = replace(tiles, bn=tiles.bn // 2)
    return tiles


def attend_launch(
    shape: Shape, tiles: AttentionTiles, *, vote: str = "", keep_sum: bool = False, listed: bool = False,
    noted: bool = False, name: str, broken: str = "",
) -> Launch:  # fmt: skip
    """The launch of :func:`make_sparse` with these tiles.

    Raises:
        ValueError: float32, or bfloat16 below sm_80.
    """
    check_element(shape.element, shape.arch)
    kernel = make_sparse(
        tiles, shape.element, shape.vector, tier(shape.arch), even=shape.d == tiles.d, vote=vote, keep_sum=keep_sum,
        listed=listed, noted=noted, name=name, broken=broken,
    )  # fmt: skip
    args = (*ARGUMENTS, "limit", *(("indices", "counts") if listed else ()), *(("tile_map",) if noted else ()))
    blocks = -(-shape.m // tiles.bm) * shape.heads * shape.batch
    return Launch(kernel, blocks, tiles.threads, tiles.shared, args)


def map_shape(shape: Shape, tiles: AttentionTiles, vote: str) -> tuple[int, int, int, int]:
    """Of ``tile_map``."""
    return shape.batch, shape.heads, -(-shape.m // unit_rows(tiles, vote)), -(-shape.n // tiles.bn)


def plan_skip(
    shape: Shape, *, vote: str, keep_sum: bool = False, noted: bool = False, tiles: AttentionTiles | None = None,
    broken: str = "",
) -> Plan:  # fmt: skip
    """All tiles of keys, each left out where the rows vote so: BLASST by block, the warp-level skip by warp.

    Args:
        tiles: :func:`sparse_tiles` if None.

    Raises:
        ValueError: float32, or bfloat16 below sm_80.
    """
    tiles = tiles or sparse_tiles(shape)
    name = "blasst" if vote == "block" else "warp_skip_sum" if keep_sum else "warp_skip"
    launch = attend_launch(shape, tiles, vote=vote, keep_sum=keep_sum, noted=noted, name=name, broken=broken)
    return Plan((launch,), {"tile_map": map_shape(shape, tiles, vote)} if noted else {})


def plan_blocks(
    shape: Shape, *, block_m: int = BLOCK_M, block_n: int = BLOCK_N, vote: str = "", keep_sum: bool = False,
    noted: bool = False, tiles: AttentionTiles | None = None, name: str = "block_sparse", broken: str = "",
) -> Plan:  # fmt: skip
    """The blocks of ``mask``, which is given; of these a warp may leave out some by itself.

    Raises:
        ValueError: float32, bfloat16 below sm_80, or blocks that no tiles make up.
    """
    tiles = tiles or sparse_tiles(shape, block_m, block_n)
    attend = attend_launch(
        shape, tiles, vote=vote, keep_sum=keep_sum, listed=True, noted=noted, name=name, broken=broken
    )  # fmt: skip
    scratch = lists.list_shapes(shape, tiles.bm, tiles.bn) | (
        {"tile_map": map_shape(shape, tiles, vote)} if noted else {}
    )
    pack = lists.pack_launch(shape, tiles.bm, tiles.bn, block_m, block_n, broken)
    return Plan((pack, attend), scratch)


def plan_sparge(
    shape: Shape, *, by_count: bool = False, block_m: int = BLOCK_M, block_n: int = BLOCK_N, vote: str = "",
    keep_sum: bool = False, noted: bool = False, tiles: AttentionTiles | None = None, broken: str = "",
) -> Plan:  # fmt: skip
    """A mask by prediction, and attention over its blocks.

    Raises:
        ValueError: as :func:`plan_blocks`, or too many blocks of keys.
    """
    rest = plan_blocks(
        shape, block_m=block_m, block_n=block_n, vote=vote, keep_sum=keep_sum, noted=noted, tiles=tiles, name="sparge",
        broken=broken,
    )  # fmt: skip
    return predict.plan_predicted(shape, rest, block_m, block_n, by_count, broken)


def compile_cases() -> Iterator[CompileCase]:
    """Kernels as they are launched, for the compiler's tables and gates."""
    from flashnumba.machine.compiler import CompileCase

    def case(name: str, plan: Plan, element: str, d: int, chosen_for: tuple[str, ...]) -> CompileCase:
        launch = plan.launches[-1]
        title = f"sparsity.{name} {element} d {d}, tiles for sm_{chosen_for[0]}"
        wanted = signature(element, launch.args)
        return CompileCase(title, launch.kernel, wanted, launch.threads, launch.shared, chosen_for=chosen_for)

    for d in (64, 128):
        for name, options in (
            ("blasst", {"vote": "block"}), ("warp_skip", {"vote": "warp"}),
            ("warp_skip_sum", {"vote": "warp", "keep_sum": True}),
        ):  # fmt: skip
            shape = Shape("float16", 1, 1, 1, 4096, 4096, d)
            yield case(name, plan_skip(shape, **options), "float16", d, ("90a",))
        yield case("block_sparse", plan_blocks(shape), "float16", d, ("90a",))
        yield case("sparge", plan_sparge(shape, vote="warp"), "float16", d, ("90a",))
        for arch in (("90a", "120a"), ("80", "86")):
            launch = plan_decode(Shape("float16", 16, 64, 8, 1, 8192, d, arch=arch[0])).launches[0]
            title, wanted = f"sparsity.blasst_decode float16 d {d} for sm_{arch[0]}", signature("float16", launch.args)
            yield CompileCase(title, launch.kernel, wanted, launch.threads, launch.shared, chosen_for=arch)
    for arch in (("80",), ("86", "89"), ("100a", "120a"), ("75",)):
        shape = Shape("float16", 1, 1, 1, 4096, 4096, 128, arch=arch[0])
        yield case("blasst", plan_skip(shape, vote="block"), "float16", 128, arch)
        yield case("block_sparse", plan_blocks(shape), "float16", 128, arch)
    shape = Shape("bfloat16", 1, 1, 1, 4096, 4096, 128)
    yield case("blasst", plan_skip(shape, vote="block"), "bfloat16", 128, ("90a",))
    shape = Shape("float16", 1, 1, 1, 4096, 4096, 128)
    for launch in plan_sparge(shape).launches[:-1]:
        name = launch.kernel.name
        yield CompileCase(
            f"{name} float16", launch.kernel, signature("float16", launch.args), launch.threads, launch.shared
        )
    yield from sla_plans.compile_cases()
