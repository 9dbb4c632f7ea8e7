"""Decoding with keys and values in 8 bits: half the bytes, and decoding is bytes.

The kernel is that of :mod:`flashnumba.tiles.split`: the keys of few queries are cut into parts, each a block's, and a
second kernel merges what they leave. K and V are read by rows, as a cache of them grows, and become float16 between
ldmatrix and mma (:mod:`flashnumba.tiles.fp8_halves`). S is multiplied by the scales of its rows and keys, which of
heads or of blocks is all one, so what parts leave is in plain units and the merge knows of no scales. Teams of a block
have tiles of their own, so each keeps O in the units of its own last one.

Rows of Q in one tile may be of several heads, so each has its own scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from flashnumba.stages.heads import Launch, Plan, Shape, signature
from flashnumba.tiles.dependency import can_start_early
from flashnumba.tiles.fp8_convert import ELEMENTS, native
from flashnumba.tiles.merge import MERGE_ARGS, make_merge, warps_for
from flashnumba.tiles.sizes import AttentionTiles
from flashnumba.tiles.split import SPLIT_ARGS, make_split, splits_for

if TYPE_CHECKING:
    from flashnumba.machine.compiler import CompileCase

__all__ = ["compile_cases", "plan_split", "tiles_for"]

DESCALES = ("q_descale", "k_descale", "v_descale")
ARGS = (*SPLIT_ARGS[:-2], *DESCALES, *SPLIT_ARGS[-2:])
OUT = "bfloat16"


def tiles_for(d: int, rows: int, arch: str = "90a") -> AttentionTiles:
    """Up to 16 rows: four teams of one warp, each 32 KB ahead, so that one block fills a multiprocessor; half of that
    where shared memory is small. More rows: four warps that share steps of 8 KB, two ahead.

    No more than :data:`flashnumba.tiles.descale.BLOCK` keys are a step.
    """
    d = -(-d // 64) * 64
    if rows > 16:
        return AttentionTiles(d, 64, 64 if d <= 64 else 32, slots=2, kv_bytes=1)
    bn, slots, teams = 64 if d <= 128 else 32, 4 if d <= 64 else 2, 4
    if arch.rstrip("a") not in ("80", "90", "100"):
        bn, slots, teams = (64 if d <= 64 else 32, 2, 4) if d <= 128 else (16, 3, 2)
    return AttentionTiles(d, 16, bn, warps=1, slots=slots, q_held=d // 16 if d <= 128 else 0, kv_bytes=1, teams=teams)


def plan_split(shape: Shape, *, broken: str = "") -> Plan:
    """As many parts as fill the GPU.

    Raises:
        ValueError: elements of more than 8 bits, or a GPU below sm_80.
    """
    if shape.element not in ELEMENTS or shape.vector != 16 or shape.d % 16:
        raise ValueError(f"q is {shape.element} with rows of {shape.d}; it must be {' or '.join(ELEMENTS)}")
    if int(shape.arch.rstrip("a")) < 80:
        raise ValueError(f"fp8.split needs sm_80, this is sm_{shape.arch}: use fp8.emulated")
    rows = shape.m * shape.group
    tiles = tiles_for(shape.d, rows, shape.arch)
    units = -(-rows // tiles.bm) * shape.kv_heads * shape.batch
    resident = 1 if tiles.teams > 1 else 0  # what shared memory has room for
    splits = splits_for(units, -(-shape.n // (tiles.bn * tiles.teams)), shape.multiprocessors, resident)
    early = "90" if can_start_early(shape.arch) else "80"
    arch = "90" if early == "90" else "89" if native(shape.arch) else "80"
    kernel = make_split(
        tiles, shape.element, 16, arch, even=shape.d == tiles.d, scaled="block", name="fp8.split", broken=broken
    )
    merge = make_merge(tiles.d, OUT, warps_for(splits), early, wide=shape.d % 4 == 0)
    sizes = (splits, shape.batch, shape.heads, shape.m)
    return Plan(
        (
            Launch(kernel, units * splits, tiles.block, tiles.shared, ARGS),
            Launch(merge, shape.batch * shape.heads * shape.m, merge.threads, 0, MERGE_ARGS),
        ),
        {"acc_parts": (*sizes, shape.d), "m_parts": sizes, "l_parts": sizes},
    )


def compile_cases() -> Iterator[CompileCase]:
    """Kernels as they are launched, for the compiler's tables and gates; the merge is the flash forward's."""
    from flashnumba.machine.compiler import CompileCase

    e4m3, e5m2 = ELEMENTS
    for element, d, m in ((e4m3, 64, 1), (e4m3, 128, 1), (e5m2, 128, 1), (e4m3, 256, 1), (e4m3, 128, 8)):
        for chosen_for in (("90a",), ("120a",), ("89",), ("80",), ("86",)):
            launch = plan_split(Shape(element, 1, 64, 8, m, 8192, d, arch=chosen_for[0])).launches[0]
            title = f"fp8.split {element.removeprefix('float8_')} d {d} {8 * m} rows, for sm_{chosen_for[0]}"
            yield CompileCase(
                title, launch.kernel, signature(element, launch.args), launch.threads, launch.shared,
                chosen_for=chosen_for,
            )  # fmt: skip
