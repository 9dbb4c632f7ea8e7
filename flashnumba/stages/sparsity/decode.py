"""BLASST for few queries: the keys shared out over blocks, and values loaded only of tiles that are worth it.

The kernel is :mod:`flashnumba.tiles.sparse_split`; the parts are merged as ``flash_forward.split`` merges them. With a
threshold of 0 the results are, bit for bit, those of :func:`flashnumba.tiles.split.make_split` with the same tiles and
as many parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from flashnumba.stages.sparsity.problem import Launch, Plan, Shape, signature
from flashnumba.tiles.attention import AttentionTiles
from flashnumba.tiles.dependency import can_start_early
from flashnumba.tiles.merge import MERGE_ARGS, make_merge, warps_for
from flashnumba.tiles.sparse_split import ASKED, SPARSE_SPLIT_ARGS, make_sparse_split
from flashnumba.tiles.split import splits_for

if TYPE_CHECKING:
    from flashnumba.machine.compiler import CompileCase

__all__ = ["FEW", "compile_cases", "decode_tiles", "plan_decode"]

FEW = 16
"""Rows, queries times the heads that share a head of keys, that a block has: with more, K is read again."""


def decode_tiles(d: int) -> AttentionTiles:
    """A group of tiles of 32 keys, or of 16 from a head dimension of 129 on: up to 32 KB of K, and as much of V."""
    d = -(-d // 32) * 32
    return AttentionTiles(d, FEW, 128 if d <= 128 else 64, warps=1, q_held=4 if d == 64 else 2 if d <= 128 else 0)


def plan_decode(
    shape: Shape, *, noted: bool = False, tiles: AttentionTiles | None = None, splits: int = 0, broken: str = ""
) -> Plan:
    """As many parts as fill the GPU. ``noted``: also ``tile_map``, of tiles of ``tiles.bn // ASKED`` keys.

    Args:
        tiles: :func:`decode_tiles` if None.
        splits: parts of the keys; what fills the GPU if 0.

    Raises:
        ValueError: float32, or a GPU below sm_80.
    """
    if shape.element == "float32":
        raise ValueError("q is float32; tensor cores would round it to 11 bits: there is no sparse kernel for it")
    if int(shape.arch.rstrip("a")) < 80:
        raise ValueError(f"decoding needs sm_80, this is sm_{shape.arch}: use blasst")
    tiles = tiles or decode_tiles(shape.d)
    row_tiles = -(-shape.m * shape.group // tiles.bm)
    units = row_tiles * shape.kv_heads * shape.batch
    splits = splits or splits_for(units, -(-shape.n // tiles.bn), shape.multiprocessors)
    arch = "90" if can_start_early(shape.arch) else "80"
    kernel = make_sparse_split(
        tiles, shape.element, shape.vector, arch, even=shape.d == tiles.d, noted=noted, name="sparsity.blasst_decode",
        broken=broken,
    )  # fmt: skip
    merge = make_merge(tiles.d, shape.element, warps_for(splits), arch, wide=shape.d % 4 == 0)
    args = (*SPARSE_SPLIT_ARGS, *(("tile_map",) if noted else ()))
    sizes = (splits, shape.batch, shape.heads, shape.m)
    scratch = {"acc_parts": (*sizes, shape.d), "m_parts": sizes, "l_parts": sizes}
    if noted:
        scratch["tile_map"] = (shape.batch, shape.kv_heads, row_tiles, -(-shape.n // (tiles.bn // ASKED)))
    return Plan(
        (
            Launch(kernel, units * splits, tiles.threads, tiles.shared, args),
            Launch(merge, shape.batch * shape.heads * shape.m, merge.threads, 0, MERGE_ARGS),
        ),
        scratch,
    )


def compile_cases() -> Iterator[CompileCase]:
    """Kernels as they are launched, for the compiler's tables and gates."""
    from flashnumba.machine.compiler import CompileCase

    for element, d in (("float16", 64), ("float16", 128), ("bfloat16", 128), ("float16", 256)):
        for chosen_for in (("90a", "120a"), ("80", "86")):
            launch = plan_decode(Shape(element, 1, 64, 8, 1, 8192, d, arch=chosen_for[0])).launches[0]
            yield CompileCase(
                f"{launch.kernel.name} {element} d {d}, for sm_{chosen_for[0]}", launch.kernel,
                signature(element, launch.args), launch.threads, launch.shared, chosen_for=chosen_for,
            )  # fmt: skip
