"""Attention for one tile of rows that leaves out tiles of keys: those not on a list, and those not worth it.

The schedule and the steps are those of :mod:`flashnumba.tiles.forward`, for 16-bit elements, so with nothing left out
every bit is the same. What changes is two decisions::

    which K_j come at all      the next number of the row tile's list, or simply the next
    whether S_j is worth it    after S_j = Q K_j^T and before its exponentials, by :mod:`flashnumba.tiles.skip`

A tile left out by the second was multiplied with Q; what it saves is exponentials, sums and the product with V, a bit
more than half. V is on its way before it is known whether it is wanted, or nothing would hide its latency. To ask for
it only after the vote before was tried on an H200 with 16384 keys, each way in a run of its own: where nothing is left
out it had 0.97 of dense beside 1.02, and 1.38 beside 1.34 where 70 % are.
:mod:`flashnumba.tiles.sparse_split` is for when memory decides.

What is left to a step without its second half is 128 products of a warp's 32 rows with 64 keys, 48 loads of fragments,
and what is done once a step, which then is most of the instructions and nearly all of the waiting: on an H200 the
tensor cores were busy for 55 % of the time where 90 % is left out, shared memory for 54 %, and two warps a scheduler
cannot hide more. So a step has little else: tiles are counted in 32 bits, what a thread copies goes on from tile to
tile (:func:`flashnumba.tiles.copy_tile.make_copy_whole`), and addresses of lanes pass through a shuffle, without which
the compiler would make them again in each step. Blocks of 256 rows, which copy K and V half as often, were slower by a
tenth: eight warps in step hide less than two blocks of four.

The numbers of a list are loaded two steps before their keys are multiplied, and one before their copy begins.

Sources: BLASST, arXiv 2512.12087; SpargeAttn, arXiv 2502.18137, algorithm 1.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import global_address, ld_global_b32, shared_address, shfl_idx
from flashnumba.machine.numba import cuda, float32, int32, int64, uint8, uint32, uint64
from flashnumba.tiles.attention import factor_of, make_steps
from flashnumba.tiles.copy_tile import copies_ahead, make_copy_tile, make_copy_whole, make_waiting
from flashnumba.tiles.rows import address_of, make_hide, make_store, make_store_sums
from flashnumba.tiles.schedule import seen_keys
from flashnumba.tiles.sizes import ALIGNMENT, AttentionTiles
from flashnumba.tiles.skip import VOTES, make_agree, make_needs, make_shut_out

__all__ = ["COMPUTED", "FAULTS", "SKIPPED", "make_sparse_attend", "unit_rows"]

COMPUTED, SKIPPED = 1, 2
"""In a map of tiles: its exponentials were taken; they were not, as no row needed them. 0: it was not looked at."""
FAULTS = ("barrier", "v_barrier", "wait", "moved", "next", "count", "tail", "causal")
"""What can be planted beside those of :mod:`flashnumba.tiles.skip`: a tile left out still sets the maximum; the copy
ahead is of the next tile, not of the next on the list; the last of a list is not visited; or as
:mod:`flashnumba.tiles.forward` has it."""


def unit_rows(tiles: AttentionTiles, vote: str) -> int:
    """Rows that a decision is about."""
    return tiles.bm // tiles.warps if vote == "warp" else tiles.bm


@cache
def make_sparse_attend(
    tiles: AttentionTiles, element: str, vector: int = 16, arch: str = "80", *, even: bool = True, vote: str = "",
    keep_sum: bool = False, listed: bool = False, noted: bool = False, broken: str = "",
) -> DeviceFunction:  # fmt: skip
    """``attend(q, k, v, o, lse, scale, causal, limit, indices, counts, tile_map, batch, head, block)``.

    Args:
        tiles, element, vector, arch, even: as :func:`flashnumba.tiles.forward.make_attend`; 16-bit elements.
        vote: of :data:`flashnumba.tiles.skip.VOTES`; ``limit`` is then a float32, and else None.
        keep_sum: a tile without its product with V still counts in the sum of exponentials. By warp alone.
        listed: ``indices`` int32 ``[B, H, row tiles, any]`` and ``counts`` int32 ``[B, H, row tiles]`` say which tiles
            of ``tiles.bn`` keys a row tile looks at, in ascending order, each no later than the last that it may see;
            else both are None.
        noted: ``tile_map``, uint8 ``[B, H, row units, key tiles]`` of :func:`unit_rows` rows, is filled; else None.
        broken: plants one of :data:`FAULTS` or of :data:`flashnumba.tiles.skip.FAULTS`.

    Raises:
        ValueError: more than two slots, or a sum that is kept by a vote that is not the warp's.
    """
    if tiles.slots > 2 or tiles.nbytes != 2 or tiles.kv_bytes:
        raise ValueError(f"tiles are {tiles}; sparse attention takes one or two slots and 16-bit elements")
    if vote not in VOTES or (keep_sum and vote != "warp"):
        raise ValueError(f"vote is {vote!r} and keep_sum {keep_sum}; a sum is kept by warp, votes are {VOTES}")
    d, bm, bn, threads, frags, slots = tiles.d, tiles.bm, tiles.bn, tiles.threads, tiles.frags, tiles.slots
    pitch, slot_bytes, warps, unit = tiles.pitch, tiles.slot, tiles.warps, unit_rows(tiles, vote)
    steps = make_steps(tiles, element, arch)
    clear, negate_q, load_q, multiply_qk, flatten = (
        steps.clear, steps.negate_q, steps.load_q, steps.multiply_qk, steps.flatten
    )  # fmt: skip
    raise_to, exponentials, multiply_pv, find_tops = steps.raise_to, steps.exponentials, steps.multiply_pv, steps.tops
    softmax_pv, store_sums = steps.softmax_pv, make_store_sums(tiles, steps.total)
    lane_of_q, lane_of_k, lane_of_v = steps.q_lane, steps.k_lane, steps.v_lane
    needs, shut_out = make_needs(tiles, broken), make_shut_out(tiles, broken)
    agree = make_agree(tiles, vote, broken)
    next_row = int(broken != "causal")
    hide = make_hide(tiles, steps.mask, tail=broken != "tail", next_row=next_row)
    store = make_store(tiles, element, vector, arch, even=even)
    copy_q = make_copy_tile(bm, d, threads, vector, arch, even=even)
    copy_kv = make_copy_tile(bn, d, threads, vector, arch, even=even)
    running = slots == 2 and even and vector == 16 and d % 64 == 0 and threads % 64 == 0 and not listed
    start, copy_whole = make_copy_whole(bn, d, threads, arch) if running else (None, None)
    v_after_k = slots * slot_bytes
    wait, commit = make_waiting(copies_ahead(vector, arch), 0, waits=broken != "wait")
    o_regs, s_regs, rows_held, q_regs = frags * d // 2, frags * bn // 2, 2 * frags, max(1, 4 * frags * tiles.q_held)
    p_regs, k_steps, votes, flag_words = frags * bn // 4, bn // 16, vote != "", max(1, warps)
    no_barrier, no_v_barrier, moved = broken == "barrier", broken == "v_barrier", broken == "moved"
    in_order, short = broken == "next", int(broken == "count")

    @device
    def number_at(numbers, i, j):
        """Entry i of a list, or i itself; ``j`` is where a planted fault goes on."""
        if listed:
            if in_order:
                return j
            return int64(ld_global_b32(numbers + uint64(4 * i)))
        return i

    @device
    def work(s, acc, m, l, factor, v_lane, tops):
        """Steps.softmax_pv, the lanes' maxima being there."""
        p = cuda.local.array(p_regs, uint32)
        bias = cuda.local.array(rows_held, float32)
        raise_to(s, acc, m, l, bias, factor, tops)
        for k in range(k_steps):
            exponentials(p, s, l, bias, factor, k)
            multiply_pv(acc, p, v_lane, k)

    @device
    def work_or_sum(s, acc, m, l, factor, v_lane, tops, needed):
        """The same; if not needed, without the product."""
        p = cuda.local.array(p_regs, uint32)
        bias = cuda.local.array(rows_held, float32)
        raise_to(s, acc, m, l, bias, factor, tops)
        if needed:
            for k in range(k_steps):
                exponentials(p, s, l, bias, factor, k)
                multiply_pv(acc, p, v_lane, k)
        else:
            for k in range(k_steps):
                exponentials(p, s, l, bias, factor, k)

    @device
    def finish(s, acc, m, l, factor, v_lane, tops, needed):
        """The rest of a step, once it is known whether it is worth it."""
        if keep_sum:
            work_or_sum(s, acc, m, l, factor, v_lane, tops, needed)
        elif needed:
            work(s, acc, m, l, factor, v_lane, tops)
        if moved and not needed:
            for r in range(rows_held):
                m[r] = tops[r]

    @device
    def begin_map(tile_map, batch, head, row, lane):
        """Zeros in the map's row of this warp's unit; whether it has one."""
        mine = row % unit == 0 and row // unit < tile_map.shape[2]
        if mine:
            for t in range(lane, tile_map.shape[3], 32):
                tile_map[batch, head, row // unit, t] = uint8(0)
        return mine

    @device
    def attend(q, k, v, o, lse, scale, causal, limit, indices, counts, tile_map, batch, head, block):
        smem = cuda.shared.array(0, uint8)
        flags = cuda.shared.array(flag_words, uint32)
        q_tile = (shared_address(smem) + uint32(ALIGNMENT - 1)) & uint32(0x100000000 - ALIGNMENT)
        k_tile = q_tile + uint32(bm * pitch)
        v_tile = k_tile + uint32(slots * slot_bytes)
        lane = int32(cuda.threadIdx.x & 31)
        warp_row = int32((cuda.threadIdx.x >> 5) * (16 * frags))

        m_rows, n_rows, columns = q.shape[2], k.shape[2], q.shape[3]
        row0, offset = block * bm, n_rows - m_rows
        head_kv = head // (q.shape[1] // k.shape[1])
        q_from, k_from = address_of(q, batch, head, row0), address_of(k, batch, head_kv, int64(0))
        v_from = address_of(v, batch, head_kv, int64(0))

        end, whole = seen_keys(row0, bm, n_rows, offset, causal, next_row)
        last, numbers = (end + (bn - 1)) // bn, uint64(0)
        if listed:
            row_tile = (batch * q.shape[1] + head) * counts.shape[2] + block
            last = int64(counts[batch, head, block]) - short
            numbers = global_address(indices) + uint64(4 * row_tile * indices.shape[3])
        now, following = int64(0), int64(0)
        if last > 0:
            now = number_at(numbers, int64(0), int64(0))
        noting = False
        if noted:
            noting = begin_map(tile_map, batch, head, row0 + warp_row, lane)

        factor = factor_of(scale)
        q_lane = shfl_idx(uint32(lane_of_q(q_tile, warp_row, lane)), lane)
        k_lane = shfl_idx(uint32(lane_of_k(k_tile, lane)), lane)
        v_lane = shfl_idx(uint32(lane_of_v(v_tile, lane)), lane)
        held = cuda.local.array(q_regs, uint32)
        s = cuda.local.array(s_regs, float32)
        acc = cuda.local.array(o_regs, float32)
        m = cuda.local.array(rows_held, float32)
        l = cuda.local.array(rows_held, float32)
        clear(acc, m, l)
        if votes:
            shut_out(m, m_rows - (row0 + warp_row + (lane >> 2)), factor)
            if cuda.threadIdx.x < warps:
                flags[cuda.threadIdx.x] = uint32(0)

        copy_q(q_tile, q_from, q.strides[2], q.strides[3], m_rows - row0, columns)
        key = now * bn
        if last > 0:
            copy_kv(k_tile, k_from + key * k.strides[2], k.strides[2], k.strides[3], n_rows - key, columns)
            if slots == 2:
                copy_kv(v_tile, v_from + key * v.strides[2], v.strides[2], v.strides[3], n_rows - key, columns)
        commit()
        wait()
        cuda.syncthreads()  # Q is there for all, and the words of the vote are zeros
        if scale < float32(0):
            negate_q(q_tile, warp_row, lane)
        load_q(held, q_lane)
        tops = cuda.local.array(rows_held, float32)
        if last > 1:
            following = number_at(numbers, int64(1), now + 1)
        k_step, v_step, left = bn * k.strides[2], bn * v.strides[2], n_rows - bn
        k_next, v_next, seen_whole = k_from + k_step, v_from + v_step, int32(whole // bn)
        steps_n = int32(last)
        if running:
            at, k_next = start(k_tile, k_next, k.strides[2])
            _, v_next = start(v_tile, v_next, v.strides[2])
            k_to = shfl_idx(uint32(at), lane)
        for i in range(int32(0), steps_n):
            here = uint32(0)
            if slots == 2:
                here = uint32(i & 1) * uint32(slot_bytes)
            j = int64(i)
            if listed:
                j, left = now, n_rows - following * bn
                k_next, v_next = k_from + following * k_step, v_from + following * v_step
                now = following
                if i + 2 < steps_n:
                    following = number_at(numbers, i + 2, following + 1)
            wait()
            if not no_barrier:
                cuda.syncthreads()  # K_j (and V_j) are there for all; nobody reads the slots filled next, or last votes
            if slots == 2:
                if int32(i + 1) < steps_n:
                    other = uint32(slot_bytes) - here
                    if running:
                        if left >= bn:
                            copy_whole(k_to + other, k_next, k.strides[2])
                            copy_whole(k_to + other + uint32(v_after_k), v_next, v.strides[2])
                        else:
                            k_last, v_last = k_from + (j + 1) * k_step, v_from + (j + 1) * v_step
                            copy_kv(k_tile + other, k_last, k.strides[2], k.strides[3], left, columns)
                            copy_kv(v_tile + other, v_last, v.strides[2], v.strides[3], left, columns)
                    else:
                        copy_kv(k_tile + other, k_next, k.strides[2], k.strides[3], left, columns)
                        copy_kv(v_tile + other, v_next, v.strides[2], v.strides[3], left, columns)
                    v_next += v_step
            else:
                copy_kv(v_tile, v_from + j * v_step, v.strides[2], v.strides[3], n_rows - j * bn, columns)
            commit()
            multiply_qk(s, held, q_lane, k_lane + here)
            if scale == float32(0):
                flatten(s)
            if j >= seen_whole:
                hide(s, j, row0 + warp_row + (lane >> 2), int64(1), offset, causal, n_rows, lane)
            if slots == 1:
                wait()
                if not no_v_barrier:
                    cuda.syncthreads()  # V_j is there for all, and nobody reads K_j any more
                if i + 1 < steps_n:
                    copy_kv(k_tile, k_next, k.strides[2], k.strides[3], left, columns)
                commit()
            k_next += k_step
            left -= bn
            needed = True
            if votes:
                find_tops(tops, s)
                needed = agree(flags, needs(tops, m, factor, limit), uint32(i + 1))
                finish(s, acc, m, l, factor, v_lane + here, tops, needed)
            else:
                softmax_pv(s, acc, m, l, factor, v_lane + here)
            if noted and noting and lane == 0:
                tile_map[batch, head, (row0 + warp_row) // unit, j] = uint8(COMPUTED if needed else SKIPPED)

        store_sums(lse, m, l, factor, batch, head, row0 + warp_row + (lane >> 2), m_rows, lane)
        o_from = address_of(o, batch, head, row0)
        store(o_from, o.strides[2], o.strides[3], acc, l, q_tile, warp_row, lane, m_rows - row0, columns)

    return attend
