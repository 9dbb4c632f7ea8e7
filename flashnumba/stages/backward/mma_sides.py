"""dK and dV on tensor cores by two sides of a block: one makes weights and dV, the other dS and dK.

::

    side 0:  S^T = K Q_i^T | P^T = 2^((S^T - origin) factor - bias) | P^T to shared memory     | dV += P^T dO_i
    side 1:  dK += dS^T Q_i-1 | dP^T = V dO_i^T | wait for P^T | dS^T = P^T o (dP^T - delta)

What changed beside :mod:`flashnumba.stages.backward.mma_dkdv`, whose equations these are: a warp there has two
accumulators of results and one fragment of rows, if d is 128, and fetches each tile of the others for that fragment
alone. Here it has one accumulator, so that registers hold two fragments: a tile that is fetched serves twice the rows,
and shared memory, which those kernels wait for, has two thirds of the traffic. The price is P in float32 through shared
memory, written once and read once.

Warp w of side 1 waits for warp w of side 0 and for no other, at a named barrier of theirs. P is written anew after the
barrier at which the next step begins, so nobody reads it any more. Side 1 is late by a product, on purpose: while side
0 has its exponentials to do, tensor cores have dK of the step before. Its Q has to stay for so long: three slots.

With ``tiles.exchange`` dQ is made in the same pass as there, a step late by all warps, from dS in one of two buffers.

The sums of dK and dV have a fixed order: the same bits every time; those of dQ have not.

compute-sanitizer's racecheck reports hazards of dS here, between its stores and the loads behind the barrier of all
threads; with ``bar.sync`` in place of ``bar.arrive`` it reports none. The order it misses is that of the barrier 0, at
which every thread waits; the emulator, which knows what an arrival orders, finds no race.

Source: FlashAttention-3's specialised warps, Shah et al., arXiv 2407.08608, for the idea that warps differ.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import Kernel, device, kernel
from flashnumba.machine.instructions import (
    bar_arrive,
    bar_sync,
    ld_shared_v2_f32,
    ld_shared_v4_f32,
    shared_address,
    st_shared_v4_f32,
)
from flashnumba.machine.numba import cuda, float32, int32, int64, uint8, uint32
from flashnumba.stages.backward.mma_keys import make_dq_parts, make_key_steps
from flashnumba.stages.backward.mma_parts import address_of, make_parts
from flashnumba.stages.backward.mma_tiles import Tiles
from flashnumba.tiles.attention import ALIGNMENT
from flashnumba.tiles.online import LOG2_E

__all__ = ["FAULTS", "make_sides"]

FAULTS = ("barrier", "ready", "late", "wait", "start", "scale", "delta", "group", "exchange")
"""What can be planted; "ready" is the barrier before P is read, "late" forgets the last step's dK, "exchange" writes dS
where dQ of the step before is made of it; the others are those of ``mma_dkdv``, and those of shared steps too."""
FIRST = 1
"""The first of the named barriers, one for each warp of a side; 0 is that of all threads."""


@cache
def make_sides(
    tiles: Tiles, element: str, vector: int = 16, arch: str = "80", *, even: bool = True, broken: str = ""
) -> Kernel:
    """The kernel for float16 or bfloat16; arguments as :func:`flashnumba.stages.backward.mma_dkdv.make_dkdv`.

    A launch has a block for each ``tiles.own`` keys of each head of k, ``tiles.threads`` and ``tiles.shared``.
    """
    own, other, frags, warps, slots = tiles.own, tiles.other, tiles.frags, tiles.warps, tiles.slots
    parts = make_parts(tiles, element, vector, arch, even=even, waits=broken != "wait", swizzled=broken != "swizzle")
    copy_own, wait, commit, pack, clear, store = (
        parts.copy_own, parts.wait, parts.commit, parts.pack, parts.clear, parts.store,
    )  # fmt: skip
    copy_step, weigh, hide, _ = make_key_steps(tiles, parts, broken)
    lane_of_own, lane_of_rows, lane_of_columns = parts.steps.q_lane, parts.steps.k_lane, parts.steps.v_lane
    multiply, accumulate = parts.steps.multiply_qk, parts.steps.multiply_pv
    own_bytes, slot_bytes, statistics_bytes = tiles.own_bytes, tiles.slot_bytes, tiles.statistics_bytes
    weight_bytes, exchange, groups = tiles.weight_bytes, tiles.exchange, other // 8
    exchange_bytes, ds_bytes = tiles.exchange_bytes, tiles.exchange_bytes // 2
    s_regs, acc_regs, p_regs = frags * other // 2, frags * tiles.d // 2, frags * other // 4
    no_barrier, no_ready, no_late, late_start, no_scale, no_delta, first_only, one_buffer = (
        broken == name for name in ("barrier", "ready", "late", "start", "scale", "delta", "group", "exchange")
    )
    scatter_ds, add_dq = make_dq_parts(tiles, element, arch) if exchange else (None, None)

    @device
    def give_weights(to, s):
        """P as a thread holds it: 512 bytes side by side for a warp."""
        for i in range(s_regs // 4):
            st_shared_v4_f32(to + uint32(512 * i), s, 4 * i)

    @device
    def differ(dp, source, statistics):
        """dP^T becomes dS^T with the partner's P, four numbers of which are in registers at a time."""
        mean = cuda.local.array(2, float32)
        p = cuda.local.array(4, float32)
        for n in range(groups):
            ld_shared_v2_f32(mean, 0, statistics + uint32(32 * n))
            for f in range(frags):
                ld_shared_v4_f32(p, 0, source + uint32(512 * (f * groups + n)))
                for e in range(4):
                    at = (f * groups + n) * 4 + e
                    dp[at] = p[e] * (dp[at] if no_delta else dp[at] - mean[e % 2])

    @device
    def body(q, k, v, do, dk, dv, delta, origin, bias, sums, scale, causal):
        smem = cuda.shared.array(0, uint8)
        k_tile = (shared_address(smem) + uint32(ALIGNMENT - 1)) & uint32(0x100000000 - ALIGNMENT)
        v_tile = k_tile + uint32(own_bytes)
        q_tile = v_tile + uint32(own_bytes)
        do_tile = q_tile + uint32(slots * slot_bytes)
        weights = do_tile + uint32(slots * slot_bytes)
        ds_tile = weights + uint32(weight_bytes)
        statistics = ds_tile + uint32(exchange_bytes)
        lane = int32(cuda.threadIdx.x & 31)
        warp = int32(cuda.threadIdx.x >> 5) % int32(warps)
        differing = int32(cuda.threadIdx.x >> 5) >= int32(warps)
        warp_row = warp * int32(16 * frags)

        m_rows, n_rows, columns = q.shape[2], k.shape[2], q.shape[3]
        blocks = (n_rows + (own - 1)) // own
        index = int64(uint32(cuda.blockIdx.x) // uint32(blocks))
        block = int32(uint32(cuda.blockIdx.x) % uint32(blocks))  # a causal head's longest come first by themselves
        batch, head_kv = int32(index // k.shape[1]), int32(index % k.shape[1])
        key0, offset = int32(block * int32(own)), int32(n_rows - m_rows)
        group = q.shape[1] // k.shape[1]

        # Which rows: from begin on some see a key of the block, from whole on all see all.
        begin, whole = int32(0), int32(0)
        if causal != 0:
            begin = int32(max(int32(0), int32(key0 - offset)) // int32(other) * int32(other))
            whole = max(int32(0), int32(key0 + int32(own - 1) - offset))
            if late_start:
                begin += int32(other)
        if key0 + own > n_rows:
            whole = int32(m_rows)

        factor = scale * float32(LOG2_E)
        held = cuda.local.array(1, uint32)
        s = cuda.local.array(s_regs, float32)  # or dP
        packed = cuda.local.array(p_regs, uint32)  # P, or dS from step to step
        acc = cuda.local.array(acc_regs, float32)  # dV, or dK
        clear(acc)
        own_lane = lane_of_own(v_tile if differing else k_tile, warp_row, lane)
        other_lane = lane_of_rows(do_tile if differing else q_tile, lane)
        columns_lane = lane_of_columns(q_tile if differing else do_tile, lane)
        my_weights = weights + uint32(128 * s_regs) * uint32(warp) + uint32(16) * uint32(lane)

        left, batch64, head64 = n_rows - int64(key0), int64(batch), int64(head_kv)
        copy_own(k_tile, address_of(k, batch64, head64, int64(key0)), k.strides[2], k.strides[3], left, columns)
        copy_own(v_tile, address_of(v, batch64, head64, int64(key0)), v.strides[2], v.strides[3], left, columns)
        head, row, coming = int32(head_kv * group), begin, begin  # coming: the first row of the step to copy next
        tile = int32(
            (int64(batch) * q.shape[1] + int64(head)) * ((m_rows + (other - 1)) // other) + int64(begin) // other
        )
        # A step is followed by another until the heads of the group have had their rows.
        end = int32(head + int32(min(int64(1), group) if first_only else group))
        more, started = begin < m_rows and head < end, False
        slot, odd = uint32(0), uint32(0)  # the step's slot, and which of the two buffers of dS has the one before
        if more:
            copy_step(q_tile, do_tile, statistics, q, do, delta, origin, bias, batch, head, row)
        commit()
        while more:
            row = coming
            coming = int32(coming + int32(other))
            if coming >= m_rows:
                head, coming = int32(head + int32(1)), begin
            more = head < end
            following = uint32(0) if slot == uint32(slots - 1) else slot + uint32(1)
            wait()
            if not no_barrier:
                cuda.syncthreads()  # the step's tiles are there, dS of the one before too, and its P is read
            if more:
                there, numbers = following * uint32(slot_bytes), statistics + following * uint32(statistics_bytes)
                copy_step(q_tile + there, do_tile + there, numbers, q, do, delta, origin, bias, batch, head, coming)
            commit()
            if exchange:
                if started:
                    add_dq(sums, tile, ds_tile + odd * uint32(ds_bytes), k_tile)
                    tile += int32(1)
                    if row == begin:
                        tile += int32(begin // int32(other))  # the next head's first that sees a key
                    if not one_buffer:
                        odd ^= uint32(1)
            here = slot * uint32(slot_bytes)
            lane_numbers = statistics + slot * uint32(statistics_bytes) + uint32(8 * (lane & 3))
            if differing:
                if started:
                    before = uint32(slots - 1) if slot == uint32(0) else slot - uint32(1)
                    for i in range(other // 16):
                        accumulate(acc, packed, columns_lane + before * uint32(slot_bytes), i)
                multiply(s, held, own_lane, other_lane + here)
                if not no_ready:
                    bar_sync(FIRST + warp, 64)  # the partner's P is there
                differ(s, my_weights, lane_numbers)
                for i in range(other // 16):
                    pack(s, packed, i)
                if exchange:
                    scatter_ds(ds_tile + odd * uint32(ds_bytes), packed, warp_row)
            else:
                multiply(s, held, own_lane, other_lane + here)
                weigh(s, lane_numbers, factor)
                if row < whole or row + other > m_rows:
                    key = int32(warp_row + (lane >> int32(2)))
                    rows_left, keys_left = int32(int32(m_rows) - row), int32(int32(n_rows) - key0)
                    hide(s, int32(key0 - offset + key - row), key, rows_left, keys_left, causal, lane)
                give_weights(my_weights, s)
                bar_arrive(FIRST + warp, 64)
                for i in range(other // 16):
                    pack(s, packed, i)
                    accumulate(acc, packed, columns_lane + here, i)
            slot, started = following, True

        wait()  # also where no row sees a key and nobody waited for K and V
        cuda.syncthreads()  # K and V are there, and dS of the last step
        if started:
            if exchange:
                add_dq(sums, tile, ds_tile + odd * uint32(ds_bytes), k_tile)
            if differing and not no_late:
                before = uint32(slots - 1) if slot == uint32(0) else slot - uint32(1)
                for i in range(other // 16):
                    accumulate(acc, packed, columns_lane + before * uint32(slot_bytes), i)
        cuda.syncthreads()  # nobody reads K any more, before its tile is written to
        left = n_rows - int64(key0)
        if differing:
            to = address_of(dk, int64(batch), int64(head_kv), int64(key0))
            factor_out = float32(1) if no_scale else scale
            store(to, dk.strides[2], dk.strides[3], acc, factor_out, k_tile, warp_row, lane, left, columns)
        else:
            to = address_of(dv, int64(batch), int64(head_kv), int64(key0))
            store(to, dv.strides[2], dv.strides[3], acc, float32(1), v_tile, warp_row, lane, left, columns)

    @kernel(threads=tiles.threads, min_blocks=tiles.min_blocks, arch=arch, name="backward.mma dk dv")
    def mma_sides(q, k, v, do, dk, dv, delta, origin, bias, scale, causal):
        body(q, k, v, do, dk, dv, delta, origin, bias, None, scale, causal)

    @kernel(threads=tiles.threads, min_blocks=tiles.min_blocks, arch=arch, name="backward.one_pass")
    def one_pass(q, k, v, do, dk, dv, delta, origin, bias, sums, scale, causal):
        body(q, k, v, do, dk, dv, delta, origin, bias, sums, scale, causal)

    return one_pass if exchange else mma_sides
