"""BLASST for few queries: parts of the keys, whose V is loaded only where some row needs it, and their merge.

The kernel is :mod:`flashnumba.tiles.sparse_split`; how many parts there are is counted as in
:mod:`flashnumba.stages.flash_forward.split`.
"""

from __future__ import annotations

from flashnumba.stages.sparsity.problem import Launch, Plan, Shape
from flashnumba.tiles.dependency import can_start_early
from flashnumba.tiles.forward import check_element
from flashnumba.tiles.merge import MERGE_ARGS, make_merge, warps_for
from flashnumba.tiles.sizes import AttentionTiles
from flashnumba.tiles.sparse_split import SPARSE_SPLIT_ARGS, TILE, make_sparse_split
from flashnumba.tiles.split import splits_for

__all__ = ["decode_tiles", "plan_decode"]


def decode_tiles(d: int, rows: int) -> AttentionTiles:
    """One warp for up to 16 rows, four for more; two tiles of keys a step, one where rows are long."""
    d = -(-d // 32) * 32
    bn = 2 * TILE if d <= 128 else TILE
    if rows <= 16:
        return AttentionTiles(d, 16, bn, warps=1, q_held=d // 16 if d <= 128 else 0)
    return AttentionTiles(d, 64, bn)


def plan_decode(
    shape: Shape, *, noted: bool = False, tiles: AttentionTiles | None = None, splits: int = 0, broken: str = ""
) -> Plan:  # fmt: skip
    """As many parts as fill the GPU, or ``splits``.

    Raises:
        ValueError: float32, or a GPU below sm_80.
    """
    check_element(shape.element, shape.arch)
    if int(shape.arch.rstrip("a")) < 80:
        raise ValueError(f"blasst for few queries needs sm_80, this is sm_{shape.arch}: use variant='prefill'")
    rows = shape.m * shape.group
    tiles = tiles or decode_tiles(shape.d, rows)
    blocks = -(-rows // tiles.bm)
    units = blocks * shape.kv_heads * shape.batch
    splits = splits or splits_for(units, -(-shape.n // tiles.bn), shape.multiprocessors)
    arch = "90" if can_start_early(shape.arch) else "80"
    kernel = make_sparse_split(
        tiles, shape.element, shape.vector, arch, even=shape.d == tiles.d, noted=noted, name="sparsity.blasst_decode",
        broken=broken,
    )  # fmt: skip
    merge = make_merge(tiles.d, shape.element, warps_for(splits), arch, wide=shape.d % 4 == 0)
    sizes = (splits, shape.batch, shape.heads, shape.m)
    scratch: dict[str, tuple[int, ...]] = {"acc_parts": (*sizes, shape.d), "m_parts": sizes, "l_parts": sizes}
    if noted:
        scratch["tile_map"] = (shape.batch, shape.kv_heads, blocks, -(-shape.n // TILE))
    args = (*SPARSE_SPLIT_ARGS, *(("tile_map",) if noted else ()))
    return Plan(
        (
            Launch(kernel, units * splits, tiles.threads, tiles.shared, args),
            Launch(merge, shape.batch * shape.heads * shape.m, merge.threads, 0, MERGE_ARGS),
        ),
        scratch,
    )
