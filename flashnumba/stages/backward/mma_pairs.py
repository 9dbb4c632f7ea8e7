"""dK and dV on tensor cores by pairs of warps: two share keys, each makes half of the weights and one of the results.

::

    both:      S^T = K Q_i^T | P^T = 2^((S^T - origin) factor - bias) | dP^T = V dO_i^T | dS^T = P^T o (dP^T - delta)
               for half of the queries of a step each; dS^T to shared memory, and P^T of the second
    first:     dV += P^T dO_i      with its own half of P from registers, then the second's from shared memory
    second:    dK += dS^T Q_i      with its own half of dS from registers, then the first's from shared memory

What changed beside :mod:`flashnumba.stages.backward.mma_dkdv`, whose equations these are: a warp there has two
accumulators of results and one fragment of 16 keys, if d is 128, and fetches each tile of the others for that fragment
alone. Here it has one accumulator, so that registers hold two fragments, and the products of S and dP are squares of 32
keys and 32 queries. A tile that is fetched serves twice the keys, and shared memory, which those kernels wait for, has
three quarters of the traffic: 584 KB instead of 784 KB for 128 keys and 64 queries in one pass. The price is P and dS
through shared memory as 16-bit numbers, which the products take them as anyhow; dS is there for dQ in any case.

Warps of a pair tell one another that their half is there at two named barriers, and wait for nobody else; between
telling and waiting each multiplies its own half.

With ``tiles.exchange`` dQ is made in the same pass as there, but a step late, from dS in one of two buffers: one
barrier of all threads a step does. The first of a pair makes its share as the step begins, the second after its dS:
while one has exponentials to do, the other has products. On an H200 that alone is 5 % of the time. Atomics do
not seem to be what it waits for: L2 was 15 % busy, and without them it was no quicker, though that build spilled more.

The sums of dK and dV have a fixed order: the same bits every time; those of dQ have not.

compute-sanitizer's racecheck does not follow every order that a warp makes by arriving without waiting, and may report
hazards here; the emulator, which knows what an arrival orders, finds no race.

Source: FlashAttention-2, Dao, arXiv 2307.08691, section 3.3, for the partition among warps as what decides the traffic.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import Kernel, device, kernel
from flashnumba.machine.instructions import bar_arrive, bar_sync, ldmatrix_x4, shared_address
from flashnumba.machine.numba import cuda, float32, int32, int64, uint8, uint32
from flashnumba.stages.backward.mma_keys import make_add_dq, make_key_steps, make_scatter, make_walk
from flashnumba.stages.backward.mma_parts import make_parts
from flashnumba.stages.backward.mma_tiles import Tiles
from flashnumba.tiles.online import LOG2_E
from flashnumba.tiles.rows import address_of
from flashnumba.tiles.sizes import ALIGNMENT
from flashnumba.tiles.swizzle import swizzle

__all__ = ["FAULTS", "make_pairs"]

FAULTS = ("barrier", "ready", "wait", "start", "scale", "delta", "group", "half", "exchange")
"""What can be planted; "ready" is the barrier before the partner's half is read, "half" takes the partner's for queries
of one's own, "exchange" writes dS where dQ of the step before is made of it; the others are those of ``mma_dkdv``, and
those of shared steps too."""
FIRST = 1
"""The first of the named barriers, one for each warp; 0 is that of all threads."""


@cache
def make_pairs(
    tiles: Tiles, element: str, vector: int = 16, arch: str = "80", *, even: bool = True, broken: str = ""
) -> Kernel:
    """The kernel for float16 or bfloat16; arguments as :func:`flashnumba.stages.backward.mma_dkdv.make_dkdv`.

    A launch has a block for each ``tiles.own`` keys of each head of k, ``tiles.threads`` and ``tiles.shared``.
    """
    other, frags, warps, columns_held = tiles.other, tiles.frags, tiles.warps, tiles.columns
    parts = make_parts(tiles, element, vector, arch, even=even, waits=broken != "wait", swizzled=broken != "swizzle")
    copy_own, wait, commit, pack, clear, store = (
        parts.copy_own, parts.wait, parts.commit, parts.pack, parts.clear, parts.store,
    )  # fmt: skip
    copy_step, weigh, hide, differ = make_key_steps(tiles, parts, broken)
    piece, after, number, number_after = make_walk(tiles, broken)
    lane_of_own, lane_of_rows, lane_of_columns = parts.steps.q_lane, parts.steps.k_lane, parts.steps.v_lane
    multiply, accumulate = parts.steps.multiply_qk, parts.steps.multiply_pv
    own_bytes, to_do, handed_bytes, exchange = tiles.own_bytes, tiles.slot_bytes, tiles.handed_bytes, tiles.exchange
    # A slot has Q, dO and their rows' numbers, and with exchange what is handed over; without, that lies behind both.
    to_numbers, to_handed = 2 * to_do, 2 * to_do + tiles.statistics_bytes
    next_slot = to_handed + (tiles.buffer_bytes if exchange else 0)
    buffers = exchange and broken != "exchange"
    half_bytes, half_chunks = columns_held * swizzle(tiles.d).pitch, columns_held // 8
    place, step, pitch = swizzle(other).at, swizzle(other).step, swizzle(other).pitch
    s_regs, acc_regs, p_regs = frags * columns_held // 2, frags * tiles.d // 2, frags * columns_held // 4
    no_barrier, no_ready, no_scale, wrong_half = (broken == name for name in ("barrier", "ready", "scale", "half"))
    (lane_of_handed, scatter), add_dq = make_scatter(tiles), make_add_dq(tiles, element, arch) if exchange else None

    @device
    def fetch(p, lane_address):
        """What the partner handed over, as A operands."""
        for k in range(columns_held // 16):
            for f in range(frags):
                ldmatrix_x4(p, 4 * (k * frags + f), step(lane_address, k) + uint32(f * 16 * pitch))

    @device
    def body(q, k, v, do, dk, dv, delta, origin, bias, sums, scale, causal):
        smem = cuda.shared.array(0, uint8)
        k_tile = (shared_address(smem) + uint32(ALIGNMENT - 1)) & uint32(0x100000000 - ALIGNMENT)
        v_tile = k_tile + uint32(own_bytes)
        q_tile = v_tile + uint32(own_bytes)
        handed = q_tile + uint32(to_handed if exchange else 2 * next_slot)  # dS, and after it P
        lane = int32(cuda.threadIdx.x & 31)
        warp = int32(cuda.threadIdx.x >> 5) % int32(warps)
        second = int32(cuda.threadIdx.x >> 5) >= int32(warps)
        half = int32(1) if second else int32(0)
        warp_row = warp * int32(16 * frags)

        m_rows, n_rows, columns = q.shape[2], k.shape[2], q.shape[3]
        batch, head_kv, key0, begin, whole, head, end = piece(q, k, causal)
        offset = int32(n_rows - m_rows)

        factor = scale * float32(LOG2_E)
        held = cuda.local.array(1, uint32)
        s = cuda.local.array(s_regs, float32)
        dp = cuda.local.array(s_regs, float32)
        p = cuda.local.array(p_regs, uint32)
        ds = cuda.local.array(p_regs, uint32)
        acc = cuda.local.array(acc_regs, float32)  # dV, or dK
        clear(acc)
        own_lane = lane_of_own(k_tile, warp_row, lane)
        rows_lane = lane_of_rows(q_tile, lane) + uint32(half_bytes) * uint32(half)
        columns_lane = lane_of_columns(q_tile, lane) + (uint32(half_bytes) if second else uint32(to_do))
        numbers_lane = q_tile + uint32(to_numbers) + uint32(8 * (lane & 3)) + uint32(4 * columns_held) * uint32(half)
        to_other = uint32(0x100000000 - half_bytes) if second else uint32(half_bytes)  # to the partner's queries
        # P of the second, half as wide as dS, takes half as many rows: those of the later warps lie beside the others.
        p_row = warp % int32(warps // 2) * int32(16 * frags)
        p_chunk = warp // int32(warps // 2) * int32(half_chunks)
        ds_lane = lane_of_handed(handed, warp_row, int32(half_chunks) * half)
        p_lane = lane_of_handed(handed + uint32(handed_bytes), p_row, p_chunk)
        given = handed + (uint32(0) if second else uint32(handed_bytes))
        given_row, given_chunk = (warp_row, int32(0)) if second else (p_row, p_chunk)
        if wrong_half:
            given_chunk = int32(half_chunks) - given_chunk
        of_partner = place(given, given_row + (lane & 15), given_chunk + (lane >> 4))
        told = int32(FIRST) + int32(cuda.threadIdx.x >> 5)

        left, batch64, head64 = n_rows - int64(key0), int64(batch), int64(head_kv)
        copy_own(k_tile, address_of(k, batch64, head64, int64(key0)), k.strides[2], k.strides[3], left, columns)
        copy_own(v_tile, address_of(v, batch64, head64, int64(key0)), v.strides[2], v.strides[3], left, columns)
        row, coming = begin, begin  # coming: the first row of the step to copy next
        tile = number(q, batch, head, begin)
        # A step is followed by another until the heads of the group have had their rows.
        more, started = begin < m_rows and head < end, False
        here = uint32(0)  # the step's slot
        if more:
            numbers = q_tile + uint32(to_numbers)
            copy_step(q_tile, q_tile + uint32(to_do), numbers, q, do, delta, origin, bias, batch, head, row)
        commit()
        while more:
            row = coming
            head, coming = after(head, coming, begin, m_rows)
            more = head < end
            wait()
            if not no_barrier:
                cuda.syncthreads()  # the step's tiles and dS of the one before are there; nobody reads what is older
            if more:
                there = q_tile + (uint32(next_slot) - here)
                numbers = there + uint32(to_numbers)
                copy_step(there, there + uint32(to_do), numbers, q, do, delta, origin, bias, batch, head, coming)
            commit()
            if exchange:
                if started and not second:
                    add_dq(sums, tile, handed + (uint32(next_slot) - here if buffers else uint32(0)), k_tile)
            buffer = here if buffers else uint32(0)
            multiply(s, held, own_lane, rows_lane + here)
            weigh(s, numbers_lane + here, factor)
            multiply(dp, held, own_lane + uint32(own_bytes), rows_lane + here + uint32(to_do))
            if row < whole or row + other > m_rows:
                key, first = int32(warp_row + (lane >> int32(2))), int32(row + half * int32(columns_held))
                rows_left, keys_left = int32(int32(m_rows) - first), int32(int32(n_rows) - key0)
                hide(s, int32(key0 - offset + key - first), key, rows_left, keys_left, causal, lane)
            differ(dp, s, numbers_lane + here)
            for i in range(columns_held // 16):
                pack(s, p, i)
                pack(dp, ds, i)
            scatter(ds_lane + buffer, ds)
            if second:
                scatter(p_lane + buffer, p)
            bar_arrive(told, 64)
            for i in range(p_regs):
                p[i] = ds[i] if second else p[i]
            if exchange:
                if started:
                    if second:
                        add_dq(sums, tile, handed + (uint32(next_slot) - here if buffers else uint32(0)), k_tile)
                    tile = number_after(tile, row, begin)
            for i in range(columns_held // 16):
                accumulate(acc, p, columns_lane + here, i)
            if not no_ready:
                bar_sync(told - int32(warps) if second else told + int32(warps), 64)  # the partner's half is there
            fetch(p, of_partner + buffer)
            for i in range(columns_held // 16):
                accumulate(acc, p, columns_lane + here + to_other, i)
            here, started = uint32(next_slot) - here, True

        wait()  # also where no row sees a key and nobody waited for K and V
        cuda.syncthreads()  # K and V are there, and dS of the last step
        if exchange:
            if started:
                add_dq(sums, tile, handed + (uint32(next_slot) - here if buffers else uint32(0)), k_tile)
        cuda.syncthreads()  # nobody reads K any more, before its tile is written to
        left = n_rows - int64(key0)
        if second:
            to = address_of(dk, int64(batch), int64(head_kv), int64(key0))
            factor_out = float32(1) if no_scale else scale
            store(to, dk.strides[2], dk.strides[3], acc, factor_out, k_tile, warp_row, lane, left, columns)
        else:
            to = address_of(dv, int64(batch), int64(head_kv), int64(key0))
            store(to, dv.strides[2], dv.strides[3], acc, float32(1), v_tile, warp_row, lane, left, columns)

    @kernel(threads=tiles.threads, min_blocks=tiles.min_blocks, arch=arch, name="backward.mma dk dv")
    def mma_pairs(q, k, v, do, dk, dv, delta, origin, bias, scale, causal):
        body(q, k, v, do, dk, dv, delta, origin, bias, None, scale, causal)

    @kernel(threads=tiles.threads, min_blocks=tiles.min_blocks, arch=arch, name="backward.one_pass")
    def one_pass(q, k, v, do, dk, dv, delta, origin, bias, sums, scale, causal):
        body(q, k, v, do, dk, dv, delta, origin, bias, sums, scale, causal)

    return one_pass if exchange else mma_pairs
