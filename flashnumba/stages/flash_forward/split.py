"""Split-KV attention, flash decoding: when queries are few, the keys are shared out over blocks and merged at the end.

With one query a head the kernel ``mma`` would start one block a head, each walking over all keys alone, while most of
the GPU idles. The kernel and its mathematics are in :mod:`flashnumba.tiles.split`, as FP8 has it too; here is how many
parts there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from flashnumba.stages.heads import Launch, Plan, Shape, signature
from flashnumba.tiles import split
from flashnumba.tiles.dependency import can_start_early
from flashnumba.tiles.merge import MERGE_ARGS, make_merge, warps_for
from flashnumba.tiles.sizes import AttentionTiles
from flashnumba.tiles.split import FAULTS, MOST_SPLITS, SPLIT_ARGS, splits_for

if TYPE_CHECKING:
    from flashnumba.machine.compiler import CompileCase

__all__ = ["FAULTS", "MOST_SPLITS", "compile_cases", "make_split", "plan_split", "splits_for", "tiles_for"]

make_split = partial(split.make_split, name="flash_forward.split")
"""The kernel that attends to one part of the keys."""


def tiles_for(d: int, rows: int, arch: str = "90a") -> AttentionTiles:
    """Up to 16 rows: four teams of one warp, each two steps of about 16 KB ahead, so that one block fills a
    multiprocessor; half of that where shared memory is small. More rows: four warps that share steps of 16 KB."""
    d = -(-d // 32) * 32
    bn = 64 if d <= 64 else 32 if d <= 128 else 16
    if rows > 16:
        return AttentionTiles(d, 64, max(bn, 32), slots=2)
    teams = 4
    if arch.rstrip("a") not in ("80", "90", "100"):
        bn, teams = max(16, bn // 2), 4 if d <= 128 else 2
    return AttentionTiles(d, 16, bn, warps=1, slots=2, q_held=d // 16 if d <= 128 else 0, teams=teams)


def plan_split(shape: Shape) -> Plan:
    """As many parts as fill the GPU.

    Raises:
        ValueError: float32, or bfloat16 or a GPU below sm_80.
    """
    if shape.element == "float32":
        raise ValueError("q is float32; tensor cores would round it to 11 bits: use flash_forward.simt")
    if int(shape.arch.rstrip("a")) < 80:
        raise ValueError(f"flash_forward.split needs sm_80, this is sm_{shape.arch}: use flash_forward.mma or simt")
    rows = shape.m * shape.group
    tiles = tiles_for(shape.d, rows, shape.arch)
    units = -(-rows // tiles.bm) * shape.kv_heads * shape.batch
    resident = 1 if tiles.teams > 1 else 0  # what shared memory has room for
    splits = splits_for(units, -(-shape.n // (tiles.bn * tiles.teams)), shape.multiprocessors, resident)
    arch = "90" if can_start_early(shape.arch) else "80"
    kernel = make_split(tiles, shape.element, shape.vector, arch, even=shape.d == tiles.d)
    merge = make_merge(tiles.d, shape.element, warps_for(splits), arch, wide=shape.d % 4 == 0)
    sizes = (splits, shape.batch, shape.heads, shape.m)
    return Plan(
        (
            Launch(kernel, units * splits, tiles.block, tiles.shared, SPLIT_ARGS),
            Launch(merge, shape.batch * shape.heads * shape.m, merge.threads, 0, MERGE_ARGS),
        ),
        {"acc_parts": (*sizes, shape.d), "m_parts": sizes, "l_parts": sizes},
    )


def compile_cases() -> Iterator[CompileCase]:
    """Kernels as they are launched, for the compiler's tables and gates."""
    from flashnumba.machine.compiler import CompileCase

    for element, d, m in (("float16", 64, 1), ("float16", 128, 1), ("bfloat16", 128, 1), ("float16", 256, 1),
                          ("float16", 128, 8)):  # fmt: skip
        for chosen_for in (("90a",), ("120a",), ("80",), ("86",)):
            for launch in plan_split(Shape(element, 1, 64, 8, m, 8192, d, arch=chosen_for[0])).launches:
                if launch.args == MERGE_ARGS and m > 1:
                    continue
                rows = "" if launch.args == MERGE_ARGS else f" {8 * m} rows"
                yield CompileCase(
                    f"{launch.kernel.__name__} {element} d {d}{rows}, for sm_{chosen_for[0]}", launch.kernel,
                    signature(element, launch.args), launch.threads, launch.shared, chosen_for=chosen_for,
                )  # fmt: skip
