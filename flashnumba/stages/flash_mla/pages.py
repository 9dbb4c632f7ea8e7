"""Tiles of keys out of a cache's pages, or out of rows that lie one after the other; and which keys a row sees."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import global_address
from flashnumba.machine.numba import float32, int32, int64, uint32
from flashnumba.stages.flash_mla.load import make_copy_codes
from flashnumba.stages.flash_mla.sizes import PAGE, MLATiles
from flashnumba.tiles.copy_tile import make_copy_tile
from flashnumba.tiles.online import NOTHING

__all__ = ["Pages", "keys_of", "make_begin", "make_copy_q", "make_hide", "make_pages", "make_ring", "make_span", "turn"]


class Pages(NamedTuple):
    """Device functions.

    Attributes:
        page_of: ``(table, request, tile, end) -> int32``: the page of the cache that a tile is in.
        copy: ``(to, cache, request, page, tile, keys)``: start the copy of a tile, of ``keys`` keys in all.
    """

    page_of: DeviceFunction
    copy: DeviceFunction


@cache
def make_pages(tiles: MLATiles, arch: str, paged: bool, broken: str = "") -> Pages:
    """Tiles of ``bn`` keys, packed tokens where tiles are ``eight``. ``broken="page"`` plants the page before."""
    bn, d, eight, stale = tiles.bn, tiles.d, tiles.eight, broken == "page"
    per_page = PAGE // bn
    copy_k = make_copy_tile(bn, d, tiles.threads, 16, arch, even=True)
    copy_codes = make_copy_codes(tiles) if eight else copy_k  # not called in 16 bits

    @device
    def page_in_table(table, request, tile, end):
        """Beyond the last tile there is none to look up."""
        if tile >= end:
            return int32(0)
        page = uint32(uint32(tile) // uint32(per_page))
        if stale:
            page = max(page, uint32(1)) - uint32(1)
        return table[request, page]

    @device
    def no_page(table, request, tile, end):
        return int32(0)

    @device
    def copy(to, cache, request, page, tile, keys):
        """A tile beyond the last is none."""
        left = min(int32(keys - tile * int32(bn)), int32(bn))
        outer, row = request, tile * int32(bn)
        if paged:
            outer, row = page, int32(uint32(tile) % uint32(per_page) * uint32(bn))
        source = int64(global_address(cache)) + int64(outer) * cache.strides[0] + int64(row) * cache.strides[1]
        if eight:
            copy_codes(to, source, left)
        else:
            copy_k(to, source, cache.strides[1], cache.strides[2], int64(left), int64(d))

    return Pages(page_in_table if paged else no_page, copy)


@cache
def make_copy_q(tiles: MLATiles, arch: str) -> DeviceFunction:
    """``copy_q(q_tile, q, request, row0)``: start the copy of a tile's rows of Q, those of the heads in turn."""
    d, copy = tiles.d, make_copy_tile(tiles.bm, tiles.d, tiles.threads, 16, arch, even=True, packed=True)

    @device
    def copy_q(q_tile, q, request, row0):
        heads = int32(q.shape[2])
        rows = int32(int32(q.shape[1]) * heads)
        copy(
            q_tile, int64(global_address(q)) + int64(request) * q.strides[0], q.strides[1], q.strides[3], int64(rows),
            int64(d), int64(row0), int64(heads), q.strides[2],
        )  # fmt: skip

    return copy_q


@cache
def make_begin(pages: Pages, commit: DeviceFunction, ahead: int, stage: int) -> DeviceFunction:
    """``begin(to, cache, table, request, first, last, keys)``: start the copies of the first ``ahead`` tiles of those
    from ``first`` to before ``last``, ``stage`` bytes apart, each a group of copies of its own; of tiles that there
    are not, of nothing."""
    page_of, copy = pages

    @device
    def begin(to, cache, table, request, first, last, keys):
        for i in range(ahead):
            tile = int32(first + int32(i))
            if tile < last:
                copy(to + uint32(i * stage), cache, request, page_of(table, request, tile, last), tile, keys)
            commit()

    return begin


@cache
def make_ring(slots: int, stage: int) -> tuple[DeviceFunction, DeviceFunction]:
    """``next_of(at)`` and ``before(at)``: the bytes from the first of ``slots`` places to the next one and to the one
    before, in a ring."""

    @device
    def next_of(at):
        after = uint32(at + uint32(stage))
        return uint32(0) if after == uint32(slots * stage) else after

    @device
    def before(at):
        return uint32((slots - 1) * stage) if at == uint32(0) else uint32(at - uint32(stage))

    return next_of, before


@cache
def make_span(tiles: MLATiles, broken: str = "") -> DeviceFunction:
    """``span(row0, heads, queries, length, causal, first_page, last_page) -> (first, last, whole)``: tiles of keys from
    ``first`` to before ``last`` are in these pages and seen by some row of the tile from ``row0`` on; keys before
    ``whole`` are seen by all of them."""
    bm, bn, per_page, visible_keys = tiles.bm, tiles.bn, PAGE // tiles.bn, keys_of(broken)

    @device
    def span(row0, heads, queries, length, causal, first_page, last_page):
        rows = int32(queries * heads)
        keys = visible_keys(min(int32(row0 + int32(bm)), rows) - int32(1), heads, queries, length, causal)
        first = int32(first_page * int32(per_page))
        last = min(int32(last_page * int32(per_page)), int32((keys + int32(bn - 1)) // int32(bn)))
        return first, last, visible_keys(row0, heads, queries, length, causal)

    return span


@cache
def keys_of(broken: str = "") -> DeviceFunction:
    """``(row, heads, queries, length, causal) -> int32``: how many keys a row sees; ``"causal"`` plants one too few."""
    next_key = int(broken != "causal")

    @device
    def keys_of(row, heads, queries, length, causal):
        if causal == 0:
            return length
        return max(int32(0), int32(length - queries + int32(row // heads) + int32(next_key)))

    return keys_of


@cache
def make_hide(bn: int, frags: int, groups: int, broken: str = "") -> DeviceFunction:
    """``hide(s, part_row, row0, tile, key, heads, queries, length, causal, lane)``: -inf for keys that a row does not
    see; s is of ``frags`` times 16 rows from ``part_row`` and ``8 groups`` keys from ``key`` of the tile."""
    visible_keys = keys_of(broken)

    @device
    def hide(s, part_row, row0, tile, key, heads, queries, length, causal, lane):
        for f in range(frags):
            for half in range(2):
                row = int32(row0 + part_row + (lane >> 2) + int32(16 * f + 8 * half))
                keys = visible_keys(row, heads, queries, length, causal)
                visible = min(int32(keys - tile * int32(bn)), int32(bn))
                for n in range(groups):
                    for i in range(2):
                        if key + int32(8 * n + i) + 2 * (lane & 3) >= visible:
                            s[(f * groups + n) * 4 + 2 * half + i] = float32(NOTHING)

    return hide


@device
def turn(s, count, scale):
    """S times -1 for a scale below zero, and times 0 for none: kernels take the size of the scale."""
    by = float32(0) if scale == float32(0) else float32(-1)
    for i in range(count):
        s[i] *= by
