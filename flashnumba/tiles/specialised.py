"""Attention on Hopper: one warpgroup moves tiles, the others multiply, FlashAttention-3 style.

A block has ``64 consumers`` rows of one head at a time, a row tile, and goes from one to the next. Its warpgroups have
roles::

    warpgroup 0     producer    one thread orders Q, and K and V tile by tile (flashnumba.tiles.specialised_producer)
    warpgroups 1..  consumers   64 rows each: S = Q K^T, softmax, O += P V by wgmma (specialised_consumer)

A consumer has two products under way, S_j and O += P_j-1 V_j-1, and makes weights of S_j while the second runs. Named
barriers let the consumers take turns in starting products, so that one multiplies while another has its softmax.

What lies beyond an array the copy engine reads as zeros and does not write: columns and rows beyond the last cost
nothing but time. Keys beyond the last, and those a row must not see, are masked, in tiles that have such keys alone.

A grid may have fewer blocks than there are row tiles: then each takes every ``grid``-th, under a causal mask in pairs
of equal work. What a block's start and end cost is then paid once, and copies for the next row tile travel while O of
this one is divided and written. With a block for each row tile the longest come first. With lists nobody knows how long
a row tile takes, so blocks draw them from a counter.

With a vote (:mod:`flashnumba.tiles.skip`) a consumer does without weights and V where all of its 64 rows can. Consumers
need not agree with one another: a product of wgmma is of 64 rows.

Sources: Shah et al., FlashAttention-3, arXiv 2407.08608 (roles, turns, two products under way); BLASST, arXiv
2512.12087 (the vote).
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import (
    bar_arrive,
    bar_sync,
    bulk_wait_read,
    fence_mbarrier_init,
    ld_shared_b32,
    mbarrier_arrive,
    mbarrier_wait,
    setmaxnreg_dec,
    setmaxnreg_inc,
    shared_address,
    shfl_idx,
    syncwarp,
    tma_prefetch,
    wgmma_commit,
    wgmma_fence,
    wgmma_wait,
)
from flashnumba.machine.numba import cuda, float32, int32, int64, uint8, uint32, uint64
from flashnumba.tiles import skip, specialised_consumer, specialised_producer, specialised_steps
from flashnumba.tiles.attention import factor_of, log_sum, make_steps, share_of
from flashnumba.tiles.descriptor import descriptor
from flashnumba.tiles.panels import PANEL_BYTES, make_panel_store
from flashnumba.tiles.skip import make_shut_out
from flashnumba.tiles.sparse import COMPUTED, SKIPPED
from flashnumba.tiles.specialised_consumer import OWN, OWN_THREADS, TURN, TURN_THREADS, make_take_step
from flashnumba.tiles.specialised_lists import make_keys
from flashnumba.tiles.specialised_producer import END, Q_EMPTY, Q_FULL, STOP, V_EMPTY, V_FULL, make_produce, make_ring
from flashnumba.tiles.specialised_steps import make_consumer_steps
from flashnumba.tiles.specialised_tiles import ALIGNMENT, PANEL, PRODUCER_REGISTERS, ROWS, SpecialisedTiles

__all__ = ["FAULTS", "VOTE_FAULTS", "make_specialised"]

FAULTS = (
    "init", "sign", "last_v", "rows", *specialised_consumer.FAULTS, *specialised_producer.FAULTS,
    *specialised_steps.FAULTS,
)  # fmt: skip
"""What can be planted: mbarriers used before they are there; a negative scale taken for a positive one; V of the last
tile is never let go; Q's place is given back before products with it; and the faults of the parts."""
VOTE_FAULTS = (
    "tile_wide", "unscaled", "first", "padding", "end", *specialised_consumer.VOTE_FAULTS,
    *specialised_producer.VOTE_FAULTS,
)  # fmt: skip
"""With a vote: as :mod:`flashnumba.tiles.skip` has them; V of the last tile is waited for in whatever phase its
slot is; and the faults of the parts."""


@cache
def make_specialised(
    tiles: SpecialisedTiles, element: str, *, vote: bool = False, noted: bool = False, broken: str = ""
) -> DeviceFunction:  # fmt: skip
    """``attend(q, k, lse, scale, causal, q_map, k_map, v_map, o_map, limit, indices, counts, counter, tile_map)``: what
    a block does.

    All threads of a block of ``tiles.threads`` call it, once, with ``tiles.shared`` bytes of dynamic shared memory;
    ``min_blocks`` of the kernel is 1. Any number of blocks does the whole work. Of ``q`` and ``k`` the shapes are read;
    maps have the boxes ``tiles.boxes``.

    Args:
        tiles: sizes. With ``tiles.block``, ``indices``, int32 ``[B, H, row tiles, any]``, and ``counts``, int32 ``[B,
            H, row tiles]``, say which blocks of so many keys a row tile looks at, in ascending order, each no later
            than the last that it may see; ``counter``, int32 [1], is zero. Else all three are None.
        element: float16 or bfloat16.
        vote: a consumer leaves out tiles that its rows can do without, by ``limit``, a float32; else that is None.
        noted: ``tile_map``, uint8 ``[B, H, units of 64 rows, key tiles, or blocks]``, is filled as
            :mod:`flashnumba.tiles.sparse` has it; else None.
        broken: plants one of :data:`FAULTS`, of :data:`VOTE_FAULTS`, or of
            :data:`flashnumba.tiles.specialised_lists.FAULTS`.
    """
    bm, bn, consumers, slots = tiles.bm, tiles.bn, tiles.consumers, tiles.slots
    part, slot_bytes, bar_bytes, all_words = tiles.part, tiles.slot, 8 * tiles.bars, tiles.words
    panels, k_panel = tiles.d // PANEL, 2 * bn * PANEL
    _, open_list, keys_of, find = make_keys(tiles, broken)
    gathered, pieces = tiles.block > 0, bn // tiles.keys
    made, own_steps = make_ring(tiles, vote, broken), make_consumer_steps(tiles, element, broken)
    bar, one, after, make_bars = made[:4]
    produce = make_produce(tiles, made, broken)
    take_step = make_take_step(tiles, element, made, own_steps, vote, broken)
    negate_q, multiply_pv = own_steps.negate_q, own_steps.multiply_pv
    give, take = setmaxnreg_dec(PRODUCER_REGISTERS), setmaxnreg_inc(tiles.registers)
    wait_all, all_read = wgmma_wait(0), bulk_wait_read(0)
    seen_as = tiles.of_consumer
    steps = make_steps(seen_as, element)
    clear, row_total = steps.clear, steps.total
    shut_out = make_shut_out(seen_as, broken if broken in skip.FAULTS else "")
    apart, staged = tiles.out_panels > 0, tiles.out_panels or panels
    out_bytes, warp_bytes = tiles.out, staged * PANEL_BYTES
    store_panel = make_panel_store(element, staged, batched=True)
    o_regs, s_regs, p_regs, d_groups = tiles.d // 2, bn // 2, bn // 4, tiles.d // 8
    own_threads, turn_threads, v_stride = OWN_THREADS, TURN_THREADS, 512 if broken == "stride" else 1024
    ends = vote and broken != "end"
    syncs, signs, waits_v, lets_go, early = (
        broken != "init", broken != "sign", broken != "v_wait", broken != "last_v", broken == "rows"
    )  # fmt: skip

    @device
    def mark(tile_map, batch, head, unit, listed, j, computed):
        """In the map, what became of tile j."""
        at = cuda.local.array(pieces, int32)
        find(at, listed, j)
        for i in range(pieces):
            if at[i] < tile_map.shape[3]:
                tile_map[batch, head, unit, at[i]] = uint8(COMPUTED if computed else SKIPPED)

    @device
    def told(words, at, lane):
        """A word of the producer's, read by the lane that says when the warp needs the row tile no more."""
        said = int32(0)
        if lane == 0:
            said = int32(ld_shared_b32(words + uint32(4 * all_words + at)))
        return int64(uint32(shfl_idx(said, int32(0))))

    @device
    def write_out(acc, m, l, lse, factor, row, m_rows, o_map, stage, turn, first_row, warp, lane, batch, head):
        """O divided by its sums, to global memory; and the sums."""
        for half in range(2):
            total = row_total(l[half])
            if (lane & 3) == 0 and row + 8 * half < m_rows:
                lse[batch, head, row + 8 * half] = log_sum(m[half], total, factor)
            share = share_of(total)
            for n in range(d_groups):
                acc[4 * n + 2 * half] *= share
                acc[4 * n + 2 * half + 1] *= share
        for i in range(panels):
            turn = store_panel(
                acc, i * PANEL // 2, stage, turn, o_map, int32(first_row) + int32(16 * warp), int32(PANEL * i),
                int32(head), int32(batch),
            )  # fmt: skip
        return turn

    @device
    def consume(
        q_tile, o_tile, k_ring, v_ring, bars, words, lse, scale, causal, o_map, limit, indices, tile_map, m_rows, n_rows
    ):  # fmt: skip
        # A shuffle says nothing new here; but the compiler then keeps what follows from it once a warp.
        mine = shfl_idx(int32((cuda.threadIdx.x >> 7) - 1), int32(0))
        thread, lane = int32(cuda.threadIdx.x & 127), int32(cuda.threadIdx.x & 31)
        warp, leads = thread >> 5, thread == 0
        factor = factor_of(scale)
        q_mine = q_tile + uint32(mine) * uint32(part)
        firsts = descriptor(q_mine, 16, 1024), descriptor(k_ring, 16, 1024), descriptor(v_ring, k_panel, v_stride)
        stage = (o_tile if apart else q_tile) + uint32(4 * mine + warp) * uint32(warp_bytes)
        acc = cuda.local.array(o_regs, float32)
        s = cuda.local.array(s_regs, float32)
        p = cuda.local.array(p_regs, uint32)
        m = cuda.local.array(2, float32)
        l = cuda.local.array(2, float32)
        if mine == int32(consumers - 1):
            bar_arrive(int32(TURN), int32(turn_threads))  # consumer 0 goes first
        ring, done, out_turn, turn = (uint32(slots - 1), uint32(1)), uint32(0), uint32(0), uint32(0)
        while True:
            mbarrier_wait(one(bars, Q_FULL), turn & uint32(1))  # Q is there
            tile = told(words, 0, lane)
            if tile == int64(STOP):
                break
            head, batch = told(words, 4, lane), told(words, 8, lane)
            count = int32(0)
            if gathered:
                count = int32(told(words, 12, lane))
            if apart and early and lane == 0:
                mbarrier_arrive(one(bars, Q_EMPTY))
            listed = open_list(indices, batch, head, tile, count, n_rows)
            last, whole = keys_of(listed, tile, m_rows, n_rows, causal, scale)
            first_row = tile * bm + int64(ROWS * mine)
            row = first_row + int64(16 * warp + (lane >> 2))
            view = row, n_rows - m_rows, causal, n_rows, whole, scale, factor, limit, listed
            who = bars, words, mine, leads, lane, done
            clear(acc, m, l)
            if vote:
                shut_out(m, m_rows - row, factor)
            if noted and first_row < m_rows:
                unseen = int32(0) if gathered else last  # what no row of the row tile may see, or is not listed
                for t in range(unseen + thread, int32(tile_map.shape[3]), int32(own_threads)):
                    tile_map[batch, head, first_row // ROWS, t] = uint8(0)
            if scale < float32(0) and signs:
                negate_q(q_mine, thread)
                bar_sync(int32(OWN) + mine, int32(own_threads))  # the consumer's rows are turned
            left, first = False, int32(0)
            if not vote and last > 0:  # so that in the loop there is always a product left
                ring, first = after(ring[0], ring[1]), int32(1)
                left = take_step(acc, s, p, m, l, firsts, ring, ring, False, int32(0), view, who)
                if noted and leads and first_row < m_rows:
                    mark(tile_map, batch, head, first_row // ROWS, listed, int32(0), True)
            for j in range(first, last):
                before = ring
                ring = after(ring[0], ring[1])
                left = take_step(acc, s, p, m, l, firsts, ring, before, left if vote else True, j, view, who)
                if noted and leads and first_row < m_rows:
                    mark(tile_map, batch, head, first_row // ROWS, listed, j, left)
            if left and ends:
                mbarrier_wait(one(bars, END), turn & uint32(1))  # V's slot is in the last tile's phase
                syncwarp()  # with Q's place given back the END after this one may come: no lane waits for this one
            if apart and not early and lane == 0:
                mbarrier_arrive(one(bars, Q_EMPTY))  # the warp's products with Q are done
            if left:
                if waits_v:
                    mbarrier_wait(bar(bars, V_FULL, ring[0]), ring[1])
                wgmma_fence()
                multiply_pv(acc, p, firsts[2] + uint64(ring[0] * uint32(slot_bytes // 16)))
                wgmma_commit()
                wait_all()
                if leads and lets_go:
                    mbarrier_arrive(bar(bars, V_EMPTY, ring[0]))
            if not apart:
                bar_sync(int32(OWN) + mine, int32(own_threads))  # no warp waits for a product with Q any more
            out_turn = write_out(
                acc, m, l, lse, factor, row, m_rows, o_map, stage, out_turn, first_row, warp, lane, batch, head
            )
            if not apart and lane == 0:
                all_read()
                mbarrier_arrive(one(bars, Q_EMPTY))  # O has been read where Q was
            done += uint32(last)
            turn += uint32(1)
        if lane == 0:
            all_read()

    @device
    def attend(q, k, lse, scale, causal, q_map, k_map, v_map, o_map, limit, indices, counts, counter, tile_map):
        smem = cuda.shared.array(0, uint8)
        at = uint32((shared_address(smem) + uint32(ALIGNMENT - 1)) & uint32(0x100000000 - ALIGNMENT))
        q_tile = shfl_idx(at, int32(0))  # as above
        o_tile = q_tile + uint32(consumers * part)
        k_ring = o_tile + uint32(out_bytes)
        v_ring = k_ring + uint32(slots * slot_bytes)
        bars = v_ring + uint32(slots * slot_bytes)
        words = bars + uint32(bar_bytes)
        m_rows, n_rows = q.shape[2], k.shape[2]
        if cuda.threadIdx.x == 0:
            make_bars(bars, words)
            fence_mbarrier_init()
            tma_prefetch(q_map)
            tma_prefetch(k_map)
            tma_prefetch(v_map)
            tma_prefetch(o_map)
        if syncs:
            cuda.syncthreads()  # the mbarriers exist before anyone uses them
        if cuda.threadIdx.x < 128:
            give()
            if cuda.threadIdx.x == 0:
                maps = (q_map, k_map, v_map)
                produce(q_tile, k_ring, v_ring, bars, words, q, k, scale, causal, maps, indices, counts, counter)
        else:
            take()
            consume(
                q_tile, o_tile, k_ring, v_ring, bars, words, lse, scale, causal, o_map, limit, indices, tile_map,
                m_rows, n_rows
            )  # fmt: skip

    return attend
