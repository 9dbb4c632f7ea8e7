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
    global_address,
    ld_shared_b32,
    ld_shared_f32,
    shared_address,
    st_global_b32,
    st_global_v2_f32,
    st_shared_b32,
    st_shared_f32,
)
from flashnumba.machine.numba import cuda, float32, int32, int64, uint8, uint32, uint64
from flashnumba.stages.flash_mla.codes import NO_UNIT, with_codes
from flashnumba.stages.flash_mla.load import make_convert, make_copy_codes
from flashnumba.stages.flash_mla.sizes import PAGE, MLATiles
from flashnumba.stages.flash_mla.steps import make_steps
from flashnumba.tiles.attention import ALIGNMENT, factor_of, log_sum, share_of
from flashnumba.tiles.copy_tile import make_copy_tile, make_waiting
from flashnumba.tiles.elements import vectors

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
    d, dv, bm, bn, slots, held, eight = tiles.d, tiles.dv, tiles.bm, tiles.bn, tiles.slots, tiles.held, tiles.eight
    if eight != bool(code):
        raise ValueError(f"code is {code!r} and eight {eight}; tiles for 8 bits take a code, others none")
    columns, frags, key_parts, bk = tiles.columns, tiles.frags, tiles.key_parts, tiles.bk
    tile_bytes, raw_bytes, pitch = tiles.tile, tiles.raw, tiles.pitch
    steps = make_steps(tiles, element, arch, broken)
    copy_q = make_copy_tile(bm, d, tiles.threads, 16, arch, even=True, packed=True)
    copy_k = make_copy_tile(bn, d, tiles.threads, 16, arch, even=True)
    copy_codes, convert = copy_k, copy_k  # not called in 16 bits
    if eight:
        copy_codes, convert = make_copy_codes(tiles), make_convert(tiles, element, code, arch, broken)
    direct = tiles.direct  # codes are multiplied where they lie, so a slot is read until the end of its step
    whole_tile = eight and not direct
    if direct:
        steps, of_codes = with_codes(steps, tiles, element, code, arch, broken)
        leave_rope, raise_units, weights_of_codes, settle = of_codes
    else:
        leave_rope = raise_units = weights_of_codes = settle = steps.clear  # not called
    ahead = slots if whole_tile else slots - 1
    stage = raw_bytes if eight else tile_bytes
    wait, commit = make_waiting(True, ahead - 1, waits=broken != "wait")
    wait_q, _ = make_waiting(True, ahead)
    wait_all, _ = make_waiting(True, 0)
    pack = vectors(element, 4, arch=arch).pack
    o_frags, o_groups = bm // 16, columns // 8
    o_regs, s_regs = o_frags * columns // 2, frags * bk // 2 * (2 if tiles.deep else 1)
    held_regs = dv // 4 + 2 if direct else max(1, d // 4 * frags * held)
    s_rows, o_rows = 2 * frags, 2 * o_frags
    q_room, per_page = 0 if held else bm * pitch, PAGE // bn
    p_room, k_room = tiles.p_bytes + tiles.rope_bytes, slots * stage + (tile_bytes if whole_tile else 0)
    no_barrier, no_maxima, no_weights = broken == "barrier", broken == "maxima", broken == "weights"
    same_rows = tiles.row_parts == 1  # a warp has all rows of S, as of O, and keeps their state once
    too_early, stale, next_key = broken == "free", int(broken == "page"), int(broken != "causal")
    no_tail, tiles_stats, p_bytes, deep = broken == "tail", tiles.stats, tiles.p_bytes, tiles.deep

    @device
    def page_in_table(table, request, tile, end):
        """The page of the cache that a tile is in; beyond the last tile there is none to look up."""
        if tile >= end:
            return int32(0)
        return table[request, max(int32(tile // int32(per_page)) - int32(stale), int32(0))]

    @device
    def no_page(table, request, tile, end):
        return int32(0)

    page_of = page_in_table if paged else no_page

    @device
    def copy(to, cache, request, page, tile, keys):
        """Start the copy of a tile, of ``keys`` keys in all; one beyond the last is none."""
        left = min(int32(keys - tile * int32(bn)), int32(bn))
        outer, row = request, tile * int32(bn)
        if paged:
            outer, row = page, int32(tile % int32(per_page)) * int32(bn)
        source = int64(global_address(cache)) + int64(outer) * cache.strides[0] + int64(row) * cache.strides[1]
        if eight:
            copy_codes(to, source, left)
        else:
            copy_k(to, source, cache.strides[1], cache.strides[2], int64(left), int64(d))

    @device
    def keys_of(row, heads, queries, length, causal):
        """How many keys a row sees."""
        if causal == 0:
            return length
        return max(int32(0), int32(length - queries + int32(row // heads) + int32(next_key)))

    @device
    def hide(s, part_row, row0, tile, key, heads, queries, length, causal, lane):
        visible = cuda.local.array(s_rows, int32)
        for r in range(s_rows):
            row = int32(row0 + part_row + (lane >> 2) + int32(16 * (r // 2) + 8 * (r % 2)))
            visible[r] = min(int32(keys_of(row, heads, queries, length, causal) - tile * int32(bn)), int32(bn))
        steps_mask(s, visible, key, lane)

    steps_mask, clear, load_q, multiply_qk, exchange, turn = (
        steps.mask, steps.clear, steps.load_q, steps.multiply_qk, steps.exchange, steps.turn
    )  # fmt: skip
    leave_maximum, raise_maximum, weights, rescale = (
        steps.leave_maximum, steps.raise_maximum, steps.weights, steps.rescale
    )  # fmt: skip
    multiply_pv, leave_sum, total = steps.multiply_pv, steps.leave_sum, steps.total
    lane_of_q, lane_of_k, lane_of_p, lane_of_v = steps.q_lane, steps.k_lane, steps.p_lane, steps.v_lane

    @device
    def column_at(n, lane):
        """Bytes of 16 bits from a warp's first column to the lane's of group n."""
        if direct:
            return uint64(32 * (n // 2) + 4 * (n % 2)) + uint64(8) * uint64(lane & 3)
        return uint64(16 * n) + uint64(4) * uint64(lane & 3)

    @device
    def leave_state(acc, m, stats, acc_parts, m_parts, l_parts, split, row0, rows, warp, lane):
        for r in range(o_rows):
            in_tile = int32((lane >> 2) + int32(16 * (r // 2) + 8 * (r % 2)))
            row = int32(row0 + in_tile)
            if row < rows:
                if warp == 0 and (lane & 3) == 0:
                    m_parts[split, row] = m[r]
                    l_parts[split, row] = total(stats, uint32(in_tile))
                to = global_address(acc_parts) + uint64(
                    4 * ((int64(split) * int64(rows) + int64(row)) * dv + int64(warp) * columns)
                )
                for n in range(o_groups):
                    at = ((r // 2) * o_groups + n) * 4 + 2 * (r % 2)
                    st_global_v2_f32(to + uint64(2) * column_at(n, lane), acc, at)

    @device
    def leave_output(acc, m, stats, o, lse, factor, request, row0, rows, heads, warp, lane):
        for r in range(o_rows):
            in_tile = int32((lane >> 2) + int32(16 * (r // 2) + 8 * (r % 2)))
            row = int32(row0 + in_tile)
            if row < rows:
                summed = total(stats, uint32(in_tile))
                share = share_of(summed)
                if warp == 0 and (lane & 3) == 0:
                    lse[request, row % heads, row // heads] = log_sum(m[r], summed, factor)
                to = global_address(o) + uint64(
                    2 * ((int64(request) * int64(rows) + int64(row)) * dv + int64(warp) * columns)
                )
                for n in range(o_groups):
                    at = ((r // 2) * o_groups + n) * 4 + 2 * (r % 2)
                    word = pack(acc[at] * share, acc[at + 1] * share)
                    st_global_b32(to + column_at(n, lane), word)

    @device
    def leave_nothing(acc, m, stats, acc_parts, m_parts, l_parts, split, row0, rows, warp, lane):
        pass

    leave_part = leave_state if paged else leave_nothing

    @device
    def next_of(at):
        after = at + uint32(stage)
        return uint32(0) if after == uint32(slots * stage) else after

    @device
    def attend(q, cache, table, length, acc_parts, m_parts, l_parts, o, lse, scale, causal, request, row0, first_page,
               last_page, split):  # fmt: skip
        smem = cuda.shared.array(0, uint8)
        q_tile = (shared_address(smem) + uint32(ALIGNMENT - 1)) & uint32(0x100000000 - ALIGNMENT)
        k_tile = q_tile + uint32(q_room)
        p_tile = k_tile + uint32(k_room)
        stats = p_tile + uint32(p_room)
        home = stats + uint32(tiles_stats)
        copies = k_tile + uint32(tile_bytes if whole_tile else 0)  # where copies go
        if held:
            q_tile = k_tile + uint32(0 if whole_tile else (slots - 1) * stage)
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
        keys = keys_of(min(int32(row0 + int32(bm)), rows) - int32(1), heads, queries, length, causal)
        first = int32(first_page * int32(per_page))
        last = min(int32(last_page * int32(per_page)), int32((keys + int32(bn - 1)) // int32(bn)))
        whole = keys_of(row0, heads, queries, length, causal)

        q_held = cuda.local.array(held_regs, uint32)
        s = cuda.local.array(s_regs, float32)
        acc = cuda.local.array(o_regs, float32)
        m = cuda.local.array(o_rows, float32)
        m_s = cuda.local.array(s_rows, float32)
        l = cuda.local.array(s_rows, float32)
        units = cuda.local.array(1, uint32)
        units[0] = uint32(NO_UNIT)
        clear(acc, m, m_s, l)
        copy_q(
            q_tile, int64(global_address(q)) + int64(request) * q.strides[0], q.strides[1], q.strides[3], int64(rows),
            int64(d), int64(row0), int64(heads), q.strides[2],
        )  # fmt: skip
        if held:
            commit()
        for i in range(ahead):
            tile = int32(first + int32(i))
            if tile < last:
                copy(copies + uint32(i * stage), cache, request, page_of(table, request, tile, last), tile, length)
            commit()
        q_lane = lane_of_q(q_tile, part_row, lane)
        if held:
            wait_q()
            cuda.syncthreads()  # Q is there for all; the first tile's barrier is before anything is put in its place
            load_q(q_held, q_lane)
            if direct:
                rope = p_tile + uint32(p_bytes)
                leave_rope(q_lane, rope, warp, lane)  # as A operands; the first tile's barrier is before they are read
                q_lane = rope + uint32(16) * uint32(lane)
        page = page_of(table, request, int32(first + int32(ahead)), last)
        here, there = uint32(0), uint32((ahead % slots) * stage)
        for step in range(first, last):
            j = int32(step)
            wait()
            if not no_barrier:
                cuda.syncthreads()  # K_j is there for all, and nobody reads the tile before, its P or its maxima
            if whole_tile:
                convert(k_tile, copies + here)
                cuda.syncthreads()  # the tile is there for all, and nobody reads the codes
            if int32(j + int32(ahead)) < last and not too_early:
                copy(copies + there, cache, request, page, int32(j + int32(ahead)), length)
            if not too_early:
                commit()
            page = page_of(table, request, int32(j + int32(ahead + 1)), last)
            k_now = k_tile + (uint32(0) if whole_tile else here)
            multiply_qk(s, q_held, q_lane, lane_of_k(k_now, key, lane))
            if deep:
                exchange(s, p_tile, lane)
            if scale <= float32(0):
                turn(s, float32(0) if scale == float32(0) else float32(-1))
            if int32((j + int32(1)) * int32(bn)) > whole and not no_tail:
                hide(s, part_row, row0, j, key, heads, queries, length, causal, lane)
            leave_maximum(s, stats, stat_row, part, lane)
            if not no_maxima:
                cuda.syncthreads()  # the maxima of all parts are there
            factor = ld_shared_f32(home + uint32(4))
            if direct:
                rescale(acc, m, l, stats, factor, lane)
                raise_units(acc, units, k_now, warp, lane)
                weights_of_codes(s, m, l, p_tile, stat_row, key, factor, lane, units, k_now)
            elif same_rows:
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
            here, there = next_of(here), next_of(there)

        wait_all()  # for Q, where there was no key
        cuda.syncthreads()  # nobody reads maxima any more
        leave_sum(l, stats, stat_row, part, lane)
        cuda.syncthreads()  # the sums of all parts are there
        row0, factor = int32(ld_shared_b32(home)), ld_shared_f32(home + uint32(4))
        if direct:
            settle(acc, units, warp)
        if split >= 0:
            leave_part(acc, m, stats, acc_parts, m_parts, l_parts, split, row0, rows, warp, lane)
        else:
            leave_output(acc, m, stats, o, lse, factor, request, row0, rows, heads, warp, lane)

    return attend
