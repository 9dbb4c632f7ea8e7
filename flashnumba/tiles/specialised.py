"""Attention on Hopper for one tile of rows: one warpgroup moves tiles, the others multiply, FlashAttention-3 style.

A block owns ``64 consumers`` rows of one head. Its warpgroups have roles::

    warpgroup 0     producer    one thread orders Q, and K and V tile by tile (flashnumba.tiles.specialised_producer)
    warpgroups 1..  consumers   64 rows each: S = Q K^T, softmax, O += P V by wgmma (specialised_consumer)

A consumer has two products under way, S_j and O += P_j-1 V_j-1, and makes weights of S_j while the second runs. Named
barriers let the consumers take turns in starting products, so that one multiplies while another has its softmax.

What lies beyond an array the copy engine reads as zeros and does not write: columns and rows beyond the last cost
nothing but time. Keys beyond the last, and those a row must not see, are masked, in tiles that have such keys alone.

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
    bulk_wait,
    fence_mbarrier_init,
    mbarrier_wait,
    setmaxnreg_dec,
    setmaxnreg_inc,
    shared_address,
    shfl_idx,
    tma_prefetch,
    wgmma_commit,
    wgmma_fence,
    wgmma_wait,
)
from flashnumba.machine.numba import cuda, float32, int32, int64, uint8, uint32, uint64
from flashnumba.tiles import skip, specialised_consumer, specialised_producer, specialised_steps
from flashnumba.tiles.attention import factor_of, log_sum, make_steps, share_of
from flashnumba.tiles.descriptor import descriptor
from flashnumba.tiles.panels import make_panel_store
from flashnumba.tiles.schedule import seen_keys
from flashnumba.tiles.skip import make_shut_out
from flashnumba.tiles.sparse import COMPUTED, SKIPPED
from flashnumba.tiles.specialised_consumer import OWN, OWN_THREADS, TURN, TURN_THREADS, make_take_step
from flashnumba.tiles.specialised_producer import K_FULL, V_FULL, make_ring
from flashnumba.tiles.specialised_steps import make_consumer_steps
from flashnumba.tiles.specialised_tiles import ALIGNMENT, PANEL, PRODUCER_REGISTERS, ROWS, SpecialisedTiles

__all__ = ["FAULTS", "VOTE_FAULTS", "make_specialised"]

FAULTS = (
    "init", "sign", *specialised_consumer.FAULTS, *specialised_producer.FAULTS, *specialised_steps.FAULTS,
)  # fmt: skip
"""What can be planted: mbarriers used before they are there; a negative scale taken for a positive one; and the
faults of the parts."""
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
    """``attend(q, k, lse, scale, causal, q_map, k_map, v_map, o_map, limit, tile_map, batch, head, block)``.

    All threads of a block of ``tiles.threads`` call it, once, with ``tiles.shared`` bytes of dynamic shared memory;
    ``min_blocks`` of the kernel is 1. Of ``q`` and ``k`` the shapes are read; maps have the boxes ``tiles.boxes``.

    Args:
        tiles: sizes.
        element: float16 or bfloat16.
        vote: a consumer leaves out tiles that its rows can do without, by ``limit``, a float32; else that is None.
        noted: ``tile_map``, uint8 ``[B, H, units of 64 rows, key tiles]``, is filled as
            :mod:`flashnumba.tiles.sparse` has it; else None.
        broken: plants one of :data:`FAULTS` or of :data:`VOTE_FAULTS`.
    """
    bm, bn, consumers, slots = tiles.bm, tiles.bn, tiles.consumers, tiles.slots
    part, slot_bytes, bar_bytes = tiles.part, tiles.slot, 8 * tiles.bars
    panels, k_panel = tiles.d // PANEL, 2 * bn * PANEL
    made, own_steps = make_ring(tiles, vote, broken), make_consumer_steps(tiles, element, broken)
    bar, after, make_bars, produce = made
    take_step = make_take_step(tiles, element, made, own_steps, vote, broken)
    negate_q, multiply_pv = own_steps.negate_q, own_steps.multiply_pv
    give, take = setmaxnreg_dec(PRODUCER_REGISTERS), setmaxnreg_inc(tiles.registers)
    wait_all, all_stored = wgmma_wait(0), bulk_wait(0)
    seen_as = tiles.of_consumer
    steps = make_steps(seen_as, element)
    clear, row_total = steps.clear, steps.total
    shut_out = make_shut_out(seen_as, broken if broken in skip.FAULTS else "")
    store_panel = make_panel_store(element, panels, batched=True)
    o_regs, s_regs, p_regs, d_groups = tiles.d // 2, bn // 2, bn // 4, tiles.d // 8
    own_threads, turn_threads, v_stride = OWN_THREADS, TURN_THREADS, 512 if broken == "stride" else 1024
    next_row, ends = int(broken != "causal"), vote and broken != "end"
    syncs, signs, waits_v = (broken != x for x in ("init", "sign", "v_wait"))

    @device
    def consume(
        q_tile, k_ring, v_ring, bars, words, lse, scale, causal, o_map, limit, tile_map, last, whole, m_rows, n_rows,
        batch, head, row0,
    ):  # fmt: skip
        # A shuffle says nothing new here; but the compiler then keeps what follows from it once a warp.
        mine = shfl_idx(int32((cuda.threadIdx.x >> 7) - 1), int32(0))
        thread, lane = int32(cuda.threadIdx.x & 127), int32(cuda.threadIdx.x & 31)
        warp, leads = thread >> 5, thread == 0
        first_row = row0 + int64(ROWS * mine)
        row = first_row + int64(16 * warp + (lane >> 2))
        factor = factor_of(scale)
        view = row, n_rows - m_rows, causal, n_rows, whole, scale, factor, limit
        who = bars, words, mine, leads, lane
        q_mine = q_tile + uint32(mine) * uint32(part)
        firsts = descriptor(q_mine, 16, 1024), descriptor(k_ring, 16, 1024), descriptor(v_ring, k_panel, v_stride)
        acc = cuda.local.array(o_regs, float32)
        s = cuda.local.array(s_regs, float32)
        p = cuda.local.array(p_regs, uint32)
        m = cuda.local.array(2, float32)
        l = cuda.local.array(2, float32)
        clear(acc, m, l)
        if vote:
            shut_out(m, m_rows - row, factor)
        if noted and first_row < m_rows:
            for t in range(last + thread, int32(tile_map.shape[3]), int32(own_threads)):
                tile_map[batch, head, first_row // ROWS, t] = uint8(0)  # what no row of the block may see
        if mine == int32(consumers - 1):
            bar_arrive(int32(TURN), int32(turn_threads))  # consumer 0 goes first
        mbarrier_wait(bars, uint32(0))  # Q is there
        if scale < float32(0) and signs:
            negate_q(q_mine, thread)
            bar_sync(int32(OWN) + mine, int32(own_threads))  # the consumer's rows are turned
        ring, left, first = (uint32(slots - 1), uint32(1)), False, int32(0)  # of the step before the first
        if not vote and last > 0:  # so that in the loop there is always a product left
            ring, first = after(ring[0], ring[1]), int32(1)
            left = take_step(acc, s, p, m, l, firsts, ring, ring, False, int32(0), view, who)
        for j in range(first, last):
            before = ring
            ring = after(ring[0], ring[1])
            left = take_step(acc, s, p, m, l, firsts, ring, before, left if vote else True, j, view, who)
            if noted and leads and first_row < m_rows:
                tile_map[batch, head, first_row // ROWS, j] = uint8(COMPUTED if left else SKIPPED)
        if left:
            if ends:
                beyond = after(ring[0], ring[1])
                mbarrier_wait(bar(bars, K_FULL, beyond[0]), beyond[1])  # no K, but V's slot is in the last one's phase
            if waits_v:
                mbarrier_wait(bar(bars, V_FULL, ring[0]), ring[1])
            wgmma_fence()
            multiply_pv(acc, p, firsts[2] + uint64(ring[0] * uint32(slot_bytes // 16)))
            wgmma_commit()
            wait_all()
        for half in range(2):
            total = row_total(l[half])
            if (lane & 3) == 0 and row + 8 * half < m_rows:
                lse[batch, head, row + 8 * half] = log_sum(m[half], total, factor)
            share = share_of(total)
            for n in range(d_groups):
                acc[4 * n + 2 * half] *= share
                acc[4 * n + 2 * half + 1] *= share
        bar_sync(int32(OWN) + mine, int32(own_threads))  # no warp of the consumer waits for a product with Q any more
        stage, turn = q_mine + uint32(warp) * uint32(part // 4), uint32(0)
        for i in range(panels):
            turn = store_panel(
                acc, i * PANEL // 2, stage, turn, o_map, int32(first_row) + int32(16 * warp), int32(PANEL * i),
                int32(head), int32(batch),
            )  # fmt: skip
        if lane == 0:
            all_stored()

    @device
    def attend(q, k, lse, scale, causal, q_map, k_map, v_map, o_map, limit, tile_map, batch, head, block):
        smem = cuda.shared.array(0, uint8)
        place = uint32((shared_address(smem) + uint32(ALIGNMENT - 1)) & uint32(0x100000000 - ALIGNMENT))
        q_tile = shfl_idx(place, int32(0))  # as above
        k_ring = q_tile + uint32(consumers * part)
        v_ring = k_ring + uint32(slots * slot_bytes)
        bars = v_ring + uint32(slots * slot_bytes)
        words = bars + uint32(bar_bytes)
        m_rows, n_rows = q.shape[2], k.shape[2]
        row0, head_kv = block * bm, head // (q.shape[1] // k.shape[1])
        end, whole = seen_keys(row0, bm, n_rows, n_rows - m_rows, causal, next_row)
        last, whole = int32((end + (bn - 1)) // bn), int32(whole // bn)
        if scale == float32(0):
            whole = int32(0)  # S is made zero where it is masked
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
                produce(
                    q_tile, k_ring, v_ring, bars, words, (q_map, k_map, v_map), last, int32(row0), int32(head),
                    int32(head_kv), int32(batch),
                )  # fmt: skip
        else:
            take()
            consume(
                q_tile, k_ring, v_ring, bars, words, lse, scale, causal, o_map, limit, tile_map, last, whole, m_rows,
                n_rows, batch, head, row0,
            )  # fmt: skip

    return attend
