"""The kernels of latent attention on tensor cores: decoding by parts of equal work, and prefill by tiles of rows.

Both are :func:`flashnumba.stages.flash_mla.attend.make_attend`, or for few rows and 8 bits
:func:`flashnumba.stages.flash_mla.attend_codes.make_attend_codes`, with another question of who does what. **Decoding**
has few rows and many keys: as many blocks as fit the GPU at a time walk through the pieces of their part
(:mod:`~flashnumba.stages.flash_mla.schedule`). With more rows than a tile holds, neighbouring blocks take the tiles of
the same pages, which then come from L2 for all but the first. **Prefill** has many rows: a block for each tile of them,
those of the last queries, which see most keys, first.

Arguments: q ``[B, S, H, D]``, cache ``[pages, 64, D]`` or packed ``[pages, 64, bytes]`` uint8, or kv ``[B, N, D]``;
block_table int32 ``[B, most pages]``, lengths int32 ``[B]``; o ``[B, S, H, DV]``, lse ``[B, H, S]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

from flashnumba.machine.function import Kernel, kernel
from flashnumba.machine.numba import cuda, int32, uint32
from flashnumba.stages.flash_mla.attend import make_attend
from flashnumba.stages.flash_mla.attend_codes import make_attend_codes
from flashnumba.stages.flash_mla.sizes import PAGE, MLATiles
from flashnumba.tiles.dependency import make_trigger
from flashnumba.tiles.fp8_convert import ELEMENTS

if TYPE_CHECKING:
    from flashnumba.machine.compiler import CompileCase

__all__ = ["DECODE_ARGS", "PREFILL_ARGS", "compile_cases", "make_decode", "make_prefill", "tiles_for"]

DECODE_ARGS = ("q", "cache", "block_table", "lengths", "parts", "num_splits", "acc_parts", "m_parts", "l_parts", "o",
               "lse", "scale", "causal")  # fmt: skip
PREFILL_ARGS = ("q", "kv", "o", "lse", "scale", "causal")


@cache
def make_decode(tiles: MLATiles, element: str, arch: str = "80", *, code: str = "", broken: str = "") -> Kernel:
    """The kernel of :data:`DECODE_ARGS`, a block for each part and tile of rows; options as of ``make_attend``."""
    bm, make, trigger = tiles.bm, make_attend_codes if tiles.direct else make_attend, make_trigger(arch)
    attend = make(tiles, element, arch, code=code, broken=broken)

    @kernel(threads=tiles.threads, min_blocks=tiles.min_blocks, arch=arch, name="flash_mla.decode")
    def decode(q, cache, block_table, lengths, parts, num_splits, acc_parts, m_parts, l_parts, o, lse, scale, causal):
        trigger()
        row_tiles = (uint32(q.shape[1] * q.shape[2]) + uint32(bm - 1)) // uint32(bm)
        part, row0 = uint32(cuda.blockIdx.x) // row_tiles, int32(uint32(cuda.blockIdx.x) % row_tiles * uint32(bm))
        first_request, last_request = parts[part, 0], parts[part, 2]
        for index in range(first_request, last_request + int32(1)):
            request = int32(index)
            length = lengths[request]
            first, last = int32(0), int32((length + int32(PAGE - 1)) // int32(PAGE))
            split = num_splits[request]
            alone = num_splits[request + int32(1)] - split == int32(1)
            if request == first_request:
                first, split = parts[part, 1], int32(split + parts[part, 4])
            if request == last_request:
                last = parts[part, 3]
            if alone:
                split = int32(-1)
            attend(q, cache, block_table, length, acc_parts, m_parts, l_parts, o, lse, scale, causal, request, row0,
                   first, last, split)  # fmt: skip

    return decode


@cache
def make_prefill(tiles: MLATiles, element: str, arch: str = "80", *, broken: str = "") -> Kernel:
    """The kernel of :data:`PREFILL_ARGS`, a block for each tile of rows of each request."""
    bm, attend = tiles.bm, make_attend(tiles, element, arch, paged=False, broken=broken)

    @kernel(threads=tiles.threads, min_blocks=tiles.min_blocks, arch=arch, name="flash_mla.prefill")
    def prefill(q, kv, o, lse, scale, causal):
        batch, length = uint32(q.shape[0]), int32(kv.shape[1])
        row_tiles = (uint32(q.shape[1] * q.shape[2]) + uint32(bm - 1)) // uint32(bm)
        tile, request = row_tiles - uint32(1) - uint32(cuda.blockIdx.x) // batch, int32(uint32(cuda.blockIdx.x) % batch)
        pages = int32((length + int32(PAGE - 1)) // int32(PAGE))
        attend(q, kv, None, length, None, None, None, o, lse, scale, causal, request, int32(tile * uint32(bm)),
               int32(0), pages, int32(-1))  # fmt: skip

    return prefill


SHARED = {"80": 163, "90a": 227, "100a": 227}
"""KB of shared memory a block may have; 99 elsewhere."""


def tiles_for(rows: int, arch: str, eight: bool = False) -> MLATiles:
    """Tiles for so many rows of a request: 16 where bytes decide, 64 where products do and shared memory has room.

    Codes of 8 bits are multiplied where they lie up to 32 rows, in two tiles of 16: on an H200 1.11 times as fast as
    one tile of 32 for which they are converted first.
    """
    room = SHARED.get(arch, 99)
    if eight and (rows <= 32 or room < 160):
        # sm_100a's code takes more registers than three blocks leave; one block has room for a slot more.
        blocks, slots = (3, 3) if arch == "90a" else (2, 4) if room > 200 else (2, 3) if room > 160 else (1, 4)
        return MLATiles(16, 32, 4, slots=slots, held=True, min_blocks=blocks, eight=True)
    if rows <= 16 or room < 160:
        blocks, slots = (2, 3) if room > 200 else (1, 4) if room > 160 else (1, 2)
        return MLATiles(16, 32, 4, slots=slots, held=True, min_blocks=blocks)
    if rows <= 32 and room > 200:
        return MLATiles(32, 64, 8, row_parts=2, slots=2, deep=True)
    bn, slots = 64 if room > 200 else 32, 1 if eight else 2
    return MLATiles(64, bn, 8, row_parts=4, slots=slots, deep=True, eight=eight)


def compile_cases() -> Iterator[CompileCase]:
    """Kernels as they are launched, for the compiler's tables and gates."""
    from flashnumba.machine.compiler import CompileCase
    from flashnumba.stages.flash_mla import cache, combine
    from flashnumba.stages.flash_mla.host import arch_for, signature

    def case(rows: int, chosen_for: tuple[str, ...], code: str = "", prompt: bool = False) -> CompileCase:
        arch, args = arch_for(chosen_for[0], code), PREFILL_ARGS if prompt else DECODE_ARGS
        tiles = tiles_for(rows, chosen_for[0], bool(code))
        made = make_prefill(tiles, "bfloat16", arch) if prompt else make_decode(tiles, "bfloat16", arch, code=code)
        what = f"{made.__name__}{' ' if code else ''}{code.removeprefix('float8_')} bfloat16 {tiles.bm} rows"
        return CompileCase(
            f"{what}, for sm_{chosen_for[0]}", made, signature(args, "bfloat16", code), tiles.threads, tiles.shared,
            chosen_for=chosen_for,
        )  # fmt: skip

    large, e4m3, e5m2 = ("90a", "100a"), *ELEMENTS
    for rows, chosen_for in ((16, large), (32, large), (64, large), (16, ("80",)), (64, ("80",)), (16, ("86", "89")),
                             (16, ("120a",))):  # fmt: skip
        yield case(rows, chosen_for)
    for rows, chosen_for in ((16, ("90a",)), (16, ("100a",)), (64, large), (16, ("80",)), (64, ("80",)), (16, ("86",)),
                             (16, ("89",)), (16, ("120a",))):  # fmt: skip
        yield case(rows, chosen_for, e4m3)
    for chosen_for in (("90a",), ("100a",), ("80",)):
        yield case(16, chosen_for, e5m2)
    for chosen_for in (large, ("80",), ("86", "89")):
        yield case(64, chosen_for, prompt=True)
    for chosen_for in (("90a", "100a", "120a"), ("80", "86", "89")):
        made = combine.make_combine("bfloat16", arch=arch_for(chosen_for[0]))
        title = f"{made.__name__} bfloat16, for sm_{chosen_for[0]}"
        yield CompileCase(title, made, signature(combine.COMBINE_ARGS, "bfloat16"), made.threads, chosen_for=chosen_for)
    yield from cache.compile_cases()
