"""Attention to latent rows by one block: some rows of Q, one request, the keys of some pages.

A tile of K goes through three barriers::

    wait for K_j                                       its copy, and that of nothing else
      | barrier      K_j is there for all, and nobody reads K_(j-1), its P or its maxima
    start the copy of K_(j + slots - 1)                into the place of K_(j-1)
    S = Q K_j^T     a warp's part of rows and keys
    maxima of the part
      | barrier      the maxima of all parts are there
    P = 2^((S - m) f)  to shared memory; O in units of the new maximum
      | barrier      P is there
    O += P V_j      all rows, a warp's columns; V_j is K_j's first columns

so that a tile is copied once, read twice, and ``slots - 1`` of them are on their way while one is multiplied. The
number of the page that is copied next is loaded a step before it is needed.

Rows of Q are the heads of one query token after those of the one before: row ``r`` is head ``r % H`` of token ``r //
H``. There is one head of K, so they all share its tile.

Source: FlashMLA, ``docs/20250422-new-kernel-deep-dive.md``, for one copy with two
uses; the sharing among warps is ours.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import (
    ld_shared_b32,
    ld_shared_f32,
    shared_address,
    st_shared_b32,
    st_shared_f32,
)
from flashnumba.machine.numba import cuda, float32, int32, uint8, uint32
from flashnumba.stages.flash_mla.leave import make_leave
from flashnumba.stages.flash_mla.load import make_convert
from flashnumba.stages.flash_mla.pages import make_begin, make_copy_q, make_hide, make_pages, make_ring, make_span, turn
from flashnumba.stages.flash_mla.sizes import MLATiles
from flashnumba.stages.flash_mla.steps import make_steps
from flashnumba.tiles.attention import factor_of
from flashnumba.tiles.copy_tile import make_waiting
from flashnumba.tiles.sizes import ALIGNMENT

__all__ = ["FAULTS", "make_attend"]

FAULTS = ("wait", "barrier", "maxima", "weights", "free", "page", "rescale", "causal", "tail", "scale")
"""What can be planted."""


@cache
def make_attend(
    tiles: MLATiles, element: str, arch: str = "80", *, code: str = "", paged: bool = True, broken: str = ""
) -> DeviceFunction:
    """``attend(q, cache, table, length, acc_parts, m_parts, l_parts, o, lse, scale, causal, request, row0, first, last,
    split)``: pages ``first`` to before ``last`` of a request of ``length`` tokens.

    With ``split`` below zero these are all keys, and O and LSE are written; otherwise the state is left in part
    ``split``. Numbers are int32; arrays are those of :mod:`flashnumba.stages.flash_mla.mma`.

    Args:
        tiles, element, arch: sizes, of Q and O the type, float16 or bfloat16, and the GPU.
        code: of a cache in 8 bits, ``float8_e4m3fn`` or ``float8_e5m2``; the tiles are then ``eight``.
        paged: the cache is pages, found by ``table``; otherwise it is ``[B, N, D]``, and the table is not read.
        broken: plants one of :data:`FAULTS`.
    """
    d, bm, bn, slots, held, eight, deep = tiles.d, tiles.bm, tiles.bn, tiles.slots, tiles.held, tiles.eight, tiles.deep
    if eight != bool(code):
        raise ValueError(f"code is {code!r} and eight {eight}; tiles for 8 bits take a code, others none")
    frags, key_parts, bk, tile_bytes = tiles.frags, tiles.key_parts, tiles.bk, tiles.tile
    steps = make_steps(tiles, element, arch, broken)
    copy_q = make_copy_q(tiles, arch)
    convert = make_convert(tiles, element, code, arch, broken) if eight else steps.clear  # not called in 16 bits
    ahead, stage = (slots, tiles.raw) if eight else (slots - 1, tile_bytes)
    wait, commit = make_waiting(True, ahead - 1, waits=broken != "wait")
    wait_q, _ = make_waiting(True, ahead)
    wait_all, _ = make_waiting(True, 0)
    o_frags, s_count = bm // 16, frags * bk // 2
    o_regs, s_regs = o_frags * tiles.columns // 2, s_count * (2 if deep else 1)
    held_regs = d // 4 * frags if held else 1
    s_rows, o_rows = 2 * frags, 2 * o_frags
    q_room = 0 if held else bm * tiles.pitch
    p_room, k_room, stats_room = tiles.p_bytes, slots * stage + (tile_bytes if eight else 0), tiles.stats
    no_barrier, no_maxima, no_weights = broken == "barrier", broken == "maxima", broken == "weights"
    same_rows = tiles.row_parts == 1  # a warp has all rows of S, as of O, and keeps their state once
    too_early, no_tail = broken == "free", broken == "tail"

    page_of, copy = pages = make_pages(tiles, arch, paged, broken)
    begin, (next_of, before) = make_begin(pages, commit, ahead, stage), make_ring(slots, stage)
    span, hide = make_span(tiles, broken), make_hide(bn, frags, bk // 8, broken)
    leave = make_leave(tiles, element, arch, steps.total, paged=paged)
    clear, load_q, multiply_qk, exchange = steps.clear, steps.load_q, steps.multiply_qk, steps.exchange
    leave_maximum, raise_maximum, weights, rescale = (
        steps.leave_maximum, steps.raise_maximum, steps.weights, steps.rescale
    )  # fmt: skip
    multiply_pv, leave_sum = steps.multiply_pv, steps.leave_sum
    lane_of_q, lane_of_k, lane_of_p, lane_of_v = steps.q_lane, steps.k_lane, steps.p_lane, steps.v_lane

    @device
    def same(here):
        return here

    # What is filled while a tile is multiplied: the place before; or its own, if codes are converted into another tile.
    free_at = same if eight else before

    @device
    def attend(q, cache, table, length, acc_parts, m_parts, l_parts, o, lse, scale, causal, request, row0, first_page,
               last_page, split):  # fmt: skip
        smem = cuda.shared.array(0, uint8)
        q_tile = (shared_address(smem) + uint32(ALIGNMENT - 1)) & uint32(0x100000000 - ALIGNMENT)
        k_tile = q_tile + uint32(q_room)
        p_tile = k_tile + uint32(k_room)
        stats = p_tile + uint32(p_room)
        home = stats + uint32(stats_room)
        copies = k_tile + uint32(tile_bytes if eight else 0)  # where copies go
        if held:
            q_tile = k_tile + uint32(0 if eight else (slots - 1) * stage)
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        part, part_row = warp, int32(0)
        if not same_rows:
            part, part_row = warp % int32(key_parts), warp // int32(key_parts) * int32(16 * frags)
        key, stat_row = part * int32(bk), part_row + (lane >> 2)

        cuda.syncthreads()  # nobody reads what the piece before left in shared memory
        if cuda.threadIdx.x == 0:
            st_shared_b32(home, uint32(row0))
            st_shared_f32(home + uint32(4), factor_of(scale))
        cuda.syncthreads()  # both are there; out of registers, or what depends on row0 would be kept for all pieces
        row0 = int32(ld_shared_b32(home))

        queries, heads = int32(q.shape[1]), int32(q.shape[2])
        rows = int32(queries * heads)
        first, last, whole = span(row0, heads, queries, length, causal, first_page, last_page)

        q_held = cuda.local.array(held_regs, uint32)
        s = cuda.local.array(s_regs, float32)
        acc = cuda.local.array(o_regs, float32)
        m = cuda.local.array(o_rows, float32)
        m_s = cuda.local.array(s_rows, float32)
        l = cuda.local.array(s_rows, float32)
        clear(acc, m, m_s, l)
        copy_q(q_tile, q, request, row0)
        if held:
            commit()
        begin(copies, cache, table, request, first, last, length)
        q_lane = lane_of_q(q_tile, part_row, lane)
        if held:
            wait_q()
            cuda.syncthreads()  # Q is there for all; the first tile's barrier is before anything is put in its place
            load_q(q_held, q_lane)
        page = page_of(table, request, int32(first + int32(ahead)), last)
        here = uint32(0)
        for step in range(first, last):
            j = int32(step)
            wait()
            if not no_barrier:
                cuda.syncthreads()  # K_j is there for all, and nobody reads the tile before, its P or its maxima
            if eight:
                convert(k_tile, copies + here)
                cuda.syncthreads()  # the tile is there for all, and nobody reads the codes
            if int32(j + int32(ahead)) < last and not too_early:
                copy(copies + free_at(here), cache, request, page, int32(j + int32(ahead)), length)
            if not too_early:
                commit()
            page = page_of(table, request, int32(j + int32(ahead + 1)), last)
            k_now = k_tile + (uint32(0) if eight else here)
            multiply_qk(s, q_held, q_lane, lane_of_k(k_now, key, lane))
            if deep:
                exchange(s, p_tile, lane)
            if scale <= float32(0):
                turn(s, s_count, scale)
            if int32((j + int32(1)) * int32(bn)) > whole and not no_tail:
                hide(s, part_row, row0, j, key, heads, queries, length, causal, lane)
            leave_maximum(s, stats, stat_row, part, lane)
            if not no_maxima:
                cuda.syncthreads()  # the maxima of all parts are there
            factor = ld_shared_f32(home + uint32(4))
            if same_rows:
                rescale(acc, m, l, stats, factor, lane)
                weights(s, m, l, p_tile, stat_row, key, factor, lane)
            else:
                raise_maximum(m_s, l, stats, stat_row, factor)
                weights(s, m_s, l, p_tile, stat_row, key, factor, lane)
                rescale(acc, m, l, stats, factor, lane)
            if too_early:
                if int32(j + int32(ahead)) < last:
                    copy(copies + here, cache, request, page, int32(j + int32(ahead)), length)
                commit()
            if not no_weights:
                cuda.syncthreads()  # P is there
            multiply_pv(acc, lane_of_p(p_tile, lane), lane_of_v(k_now, warp, lane))
            here = next_of(here)

        wait_all()  # for Q, where there was no key
        cuda.syncthreads()  # nobody reads maxima any more
        leave_sum(l, stats, stat_row, part, lane)
        cuda.syncthreads()  # the sums of all parts are there
        row0, factor = int32(ld_shared_b32(home)), ld_shared_f32(home + uint32(4))
        leave(acc, m, stats, acc_parts, m_parts, l_parts, o, lse, factor, request, split, row0, rows, heads, warp, lane)

    return attend
