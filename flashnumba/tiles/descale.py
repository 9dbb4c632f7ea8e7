"""How the scales of 8-bit Q, K and V enter an attention kernel, each exactly once.

One number a head is part of the factor that scores are multiplied with anyway. Scales of blocks of 64 rows multiply S,
row by row and tile by tile. Those of V are treated as the maximum is: O's accumulators are kept in units of the last
block's scale, and are rescaled where the next one's is another. What an 8-bit number lost on its way to float16, 2^8,
is a scale too.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.numba import float32, int64, uint32
from flashnumba.tiles.attention import SMALLEST, factor_of
from flashnumba.tiles.sizes import AttentionTiles

__all__ = ["BLOCK", "SCALED", "Descales", "make_descales"]

BLOCK = 64
"""Rows that share a scale, where blocks have one each."""
SCALED = ("", "head", "block")
"""Scales that kernels know: none, one for each head, or one for each row of a tile and each block of keys."""


class Descales(NamedTuple):
    """Device functions on the scales ``q_descale [B, H, blocks]``, ``k_descale`` and ``v_descale [B, Hkv, blocks]``.

    Attributes:
        factor: ``(scale, q_descale, k_descale, batch, head, head_kv) -> float32``: of the exponents.
        rows: ``(mine, q_descale, batch, head, group, row, rows)``: q's scales of a lane's rows into ``mine[2 frags]``,
            where its first row is ``row`` of ``rows``; row r is query ``r // group`` of head ``head + r % group``.
        tile: ``(s, acc, mine, k_descale, v_descale, batch, head_kv, key)``: S of the tile whose first key is ``key``,
            scaled, and O in the units of its V.
        output: ``(acc, v_descale, batch, head_kv, key)``: O as it is, where ``key`` was the last tile's first.
    """

    factor: DeviceFunction
    rows: DeviceFunction
    tile: DeviceFunction
    output: DeviceFunction


@cache
def make_descales(tiles: AttentionTiles, scaled: str, log2: int = 0, broken: str = "") -> Descales:
    """How scales enter a kernel.

    Args:
        scaled: of :data:`SCALED`; ``block`` with tiles whose blocks lie in one block of keys.
        log2: of :class:`flashnumba.tiles.fp8_convert.Halves`: what is missing in S, twice, and in O.
        broken: ``"twice"`` plants a fault: q's scale twice.

    Raises:
        ValueError: tiles of more keys than a block.
    """
    if scaled == "block" and BLOCK % tiles.bn:
        raise ValueError(f"bn is {tiles.bn}; with scales of blocks it must divide {BLOCK}")
    s_regs, o_regs, rows_held, n_groups = (
        tiles.frags * tiles.bn // 2,
        tiles.frags * tiles.d // 2,
        2 * tiles.frags,
        tiles.bn // 8,
    )
    missing_s, missing_o, twice = 2.0 ** (2 * log2), 2.0**log2, broken == "twice"
    reach = tiles.teams * tiles.bn  # keys from one tile of a warp to its next
    by_head, by_block, whole = scaled == "head", scaled == "block", log2 == 0

    @device
    def factor(scale, q_descale, k_descale, batch, head, head_kv):
        one = factor_of(scale)
        if by_block or scale == float32(0):
            return one
        more = float32(missing_s)
        if by_head:
            more *= q_descale[batch, head, 0] * k_descale[batch, head_kv, 0]
            if twice:
                more *= q_descale[batch, head, 0]
        return max(one * more, float32(SMALLEST))

    @device
    def nothing_of(scale, q_descale, k_descale, batch, head, head_kv):
        return factor_of(scale)

    @device
    def rows(mine, q_descale, batch, head, group, row, rows):
        for r in range(rows_held):
            at = max(int64(0), min(row + int64(16 * (r // 2) + 8 * (r % 2)), rows - 1))
            mine[r] = q_descale[batch, head + at % group, at // group // BLOCK] * float32(missing_s)
            if twice:
                mine[r] *= q_descale[batch, head + at % group, at // group // BLOCK]

    @device
    def tile(s, acc, mine, k_descale, v_descale, batch, head_kv, key):
        b, h, block = uint32(batch), uint32(head_kv), uint32(uint32(key) // uint32(BLOCK))
        last_block = uint32(uint32(max(key, int64(reach)) - int64(reach)) // uint32(BLOCK))
        # Loaded whether they differ or not, so that the loads can travel under the product.
        of_k, before, now = k_descale[b, h, block], v_descale[b, h, last_block], v_descale[b, h, block]
        for i in range(s_regs):
            s[i] *= mine[2 * (i // (4 * n_groups)) + i // 2 % 2] * of_k
        if before != now:
            ratio = before / now
            for i in range(o_regs):
                acc[i] *= ratio

    @device
    def output(acc, v_descale, batch, head_kv, key):
        share = float32(missing_o)
        if by_head:
            share *= v_descale[batch, head_kv, 0]
        if by_block:
            share *= v_descale[batch, head_kv, max(int64(0), key) // BLOCK]
        for i in range(o_regs):
            acc[i] *= share

    @device
    def no_rows(mine, q_descale, batch, head, group, row, rows):
        pass

    @device
    def no_tile(s, acc, mine, k_descale, v_descale, batch, head_kv, key):
        pass

    @device
    def no_output(acc, v_descale, batch, head_kv, key):
        pass

    if by_block:
        return Descales(factor, rows, tile, output)
    if by_head or not whole:
        return Descales(factor, no_rows, no_tile, output)
    return Descales(nothing_of, no_rows, no_tile, no_output)
