"""dK and dV on tensor cores: a block owns rows of K and V and walks over the queries of all heads that read them.

::

    S^T = K Q_i^T | P^T = 2^((S^T - origin) factor - bias) | dV += P^T dO_i
    dP^T = V dO_i^T | dS^T = P^T o (dP^T - delta) | dK += dS^T Q_i

Transposed, the accumulators of S and dP are, rounded, A operands of the products that follow, with no exchange between
lanes. Q_i and dO_i are read twice each, in rows and, transposed by ldmatrix, in columns; they come by asynchronous
copies under the products of the step before, with delta, origin and bias of their rows.

The heads of a group follow one another inside the block, so that dK and dV are sums in a fixed order: no atomics, the
same bits every time. ``results`` of the tiles being 1, a kernel makes one of the two and leaves out what the other
needs.

``sums`` asks for dQ in the same pass, five products instead of seven: dS^T goes through shared memory, each warp
multiplies part of it with K, and adds the result to ``sums`` by atomics, in the order in which blocks come: not the
same bits every time. There an accumulator lies as threads hold it, 128 bytes side by side for a warp. ::

    sums[((head of all batches * row tiles + i) * registers + r) * threads + t]

Source: Dao, FlashAttention-2, arXiv 2307.08691, algorithm 2; its ``flash_bwd_kernel.h`` has such a buffer for dQ.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import Kernel, device, kernel
from flashnumba.machine.instructions import shared_address
from flashnumba.machine.numba import cuda, float32, int32, int64, uint8, uint32
from flashnumba.stages.backward.mma_keys import make_add_dq, make_key_steps, make_scatter, make_walk
from flashnumba.stages.backward.mma_parts import make_parts
from flashnumba.stages.backward.mma_tiles import Tiles
from flashnumba.tiles.online import LOG2_E
from flashnumba.tiles.rows import address_of
from flashnumba.tiles.sizes import ALIGNMENT

__all__ = ["FAULTS", "make_dkdv"]

FAULTS = (
    "barrier", "free", "wait", "swizzle", "tail", "causal", "start", "scale", "delta", "group", "stride", "exchange",
)  # fmt: skip
"""What can be planted; "free" is the barrier before a single slot is filled again, "exchange" the one between dS in
shared memory and its readers, "start" begins a causal walk a step late, "group" takes its first head alone."""


@cache
def make_dkdv(
    tiles: Tiles, element: str, vector: int = 16, arch: str = "80", *, even: bool = True, which: str = "dk dv",
    broken: str = "",
) -> Kernel:  # fmt: skip
    """The kernel for float16 or bfloat16; arguments as :func:`flashnumba.tiles.forward.make_attend`, and ``which``,
    "dk dv", "dk" or "dv". With ``tiles.exchange`` it adds to dQ as well.

    A launch has a block for each ``tiles.own`` keys of each head of k, ``tiles.threads`` and ``tiles.shared``.
    """
    d, other, frags, slots = tiles.d, tiles.other, tiles.frags, tiles.slots
    threads, exchange, under = tiles.threads, tiles.exchange, tiles.under
    parts = make_parts(tiles, element, vector, arch, even=even, waits=broken != "wait", swizzled=broken != "swizzle")
    copy_own, wait, commit, pack, clear, store = (
        parts.copy_own, parts.wait, parts.commit, parts.pack, parts.clear, parts.store,
    )  # fmt: skip
    copy_step, weigh, hide, differ = make_key_steps(tiles, parts, broken)
    piece, after, number, number_after = make_walk(tiles, broken)
    lane_of_own, lane_of_rows, lane_of_columns = parts.steps.q_lane, parts.steps.k_lane, parts.steps.v_lane
    multiply, accumulate = parts.steps.multiply_qk, parts.steps.multiply_pv
    to_do = slots * tiles.slot_bytes  # from a tile of Q to that of dO
    own_bytes, slot_bytes, statistics_bytes = tiles.own_bytes, tiles.slot_bytes, tiles.statistics_bytes
    s_regs, acc_regs, p_regs = frags * other // 2, frags * d // 2, frags * other // 4
    makes_dk, makes_dv = "dk" in which.split(), "dv" in which.split()
    dk_regs, dv_regs = (acc_regs if makes else frags * d // 2 for makes in (makes_dk, makes_dv))
    no_barrier, no_free, no_scale, no_exchange = (broken == name for name in ("barrier", "free", "scale", "exchange"))
    (lane_of_ds, scatter), add_dq = make_scatter(tiles), make_add_dq(tiles, element, arch) if exchange else None

    @device
    def copy_next(more, here, q_tile, do_tile, statistics, q, do, delta, origin, bias, batch, head, row):
        """The next step's tiles into the slots that step ``here`` leaves free."""
        if more:
            there, numbers = uint32(slot_bytes) - here, statistics
            if here == uint32(0):
                numbers += uint32(statistics_bytes)
            copy_step(q_tile + there, do_tile + there, numbers, q, do, delta, origin, bias, batch, head, row)
        commit()

    @device
    def body(q, k, v, do, dk, dv, delta, origin, bias, sums, scale, causal):
        smem = cuda.shared.array(0, uint8)
        k_tile = (shared_address(smem) + uint32(ALIGNMENT - 1)) & uint32(0x100000000 - ALIGNMENT)
        v_tile = k_tile + uint32(own_bytes)
        q_tile = v_tile + uint32(own_bytes)
        do_tile = q_tile + uint32(slots * slot_bytes)
        ds_tile = do_tile + uint32(slots * slot_bytes)
        statistics = ds_tile + uint32(tiles_exchange)
        lane = int32(cuda.threadIdx.x & 31)
        warp_row = int32((cuda.threadIdx.x >> 5) * (16 * frags))

        m_rows, n_rows, columns = q.shape[2], k.shape[2], q.shape[3]
        batch, head_kv, key0, begin, whole, head, end = piece(q, k, causal)
        offset = int32(n_rows - m_rows)

        factor = scale * float32(LOG2_E)
        held = cuda.local.array(1, uint32)
        s = cuda.local.array(s_regs, float32)
        dp = cuda.local.array(s_regs, float32)
        p = cuda.local.array(p_regs, uint32)
        ds = cuda.local.array(p_regs, uint32)
        dk_acc = cuda.local.array(dk_regs, float32)
        dv_acc = cuda.local.array(dv_regs, float32)
        clear(dk_acc)
        clear(dv_acc)
        k_lane, q_lane = lane_of_own(k_tile, warp_row, lane), lane_of_rows(q_tile, lane)
        q_columns = lane_of_columns(q_tile, lane)

        left, batch64, head64 = n_rows - int64(key0), int64(batch), int64(head_kv)
        copy_own(k_tile, address_of(k, batch64, head64, int64(key0)), k.strides[2], k.strides[3], left, columns)
        if makes_dk:
            copy_own(v_tile, address_of(v, batch64, head64, int64(key0)), v.strides[2], v.strides[3], left, columns)
        row, coming = begin, begin  # coming: the first row of the step to copy next
        tile = number(q, batch, head, begin)
        # A step is followed by another until the heads of the group have had their rows.
        more, here = begin < m_rows and head < end, uint32(0)
        if more:
            copy_step(q_tile, do_tile, statistics, q, do, delta, origin, bias, batch, head, row)
        commit()
        while more:
            row = coming
            head, coming = after(head, coming, begin, m_rows)
            more = head < end
            lane_statistics = statistics + uint32(8 * (lane & 3))
            if here > uint32(0):
                lane_statistics += uint32(statistics_bytes)
            wait()
            if not no_barrier:
                cuda.syncthreads()  # the step's tiles are there for all, and nobody reads the slots filled next
            if slots == 2 and not under:
                copy_next(more, here, q_tile, do_tile, statistics, q, do, delta, origin, bias, batch, head, coming)
            multiply(s, held, k_lane, q_lane + here)
            if slots == 2 and under:  # after the product has begun: addresses are computed under it
                copy_next(more, here, q_tile, do_tile, statistics, q, do, delta, origin, bias, batch, head, coming)
            weigh(s, lane_statistics, factor)
            if row < whole or row + other > m_rows:
                key = int32(warp_row + (lane >> int32(2)))
                rows_left, keys_left = int32(int32(m_rows) - row), int32(int32(n_rows) - key0)
                hide(s, int32(key0 - offset + key - row), key, rows_left, keys_left, causal, lane)
            if makes_dv:
                for i in range(other // 16):
                    pack(s, p, i)
                    accumulate(dv_acc, p, q_columns + here + uint32(to_do), i)
            if makes_dk:
                multiply(dp, held, k_lane + uint32(own_bytes), q_lane + here + uint32(to_do))
                differ(dp, s, lane_statistics)
                for i in range(other // 16):
                    pack(dp, ds, i)
                if exchange:
                    scatter(lane_of_ds(ds_tile, warp_row, 0), ds)
                for i in range(other // 16):
                    accumulate(dk_acc, ds, q_columns + here, i)
                if exchange:
                    if not no_exchange:
                        cuda.syncthreads()  # dS is there for all, before a warp multiplies all keys' with K
                    add_dq(sums, tile, ds_tile, k_tile)
                    tile = number_after(tile, coming, begin)
            if slots == 2:
                here = uint32(slot_bytes) - here
            else:
                if not no_free:
                    cuda.syncthreads()  # nobody reads the step's tiles any more
                if more:
                    copy_step(q_tile, do_tile, statistics, q, do, delta, origin, bias, batch, head, coming)
                commit()

        wait()  # also where no row sees a key and nobody waited for K and V
        cuda.syncthreads()  # K and V are there and nobody reads them any more, before their tiles are written to
        left = n_rows - int64(key0)
        if makes_dk:
            to = address_of(dk, int64(batch), int64(head_kv), int64(key0))
            factor_out = float32(1) if no_scale else scale
            store(to, dk.strides[2], dk.strides[3], dk_acc, factor_out, k_tile, warp_row, lane, left, columns)
        if makes_dv:
            to = address_of(dv, int64(batch), int64(head_kv), int64(key0))
            store(to, dv.strides[2], dv.strides[3], dv_acc, float32(1), v_tile, warp_row, lane, left, columns)

    tiles_exchange = tiles.exchange_bytes

    @kernel(threads=threads, min_blocks=tiles.min_blocks, arch=arch, name=f"backward.mma {which}")
    def mma_dkdv(q, k, v, do, dk, dv, delta, origin, bias, scale, causal):
        body(q, k, v, do, dk, dv, delta, origin, bias, None, scale, causal)

    @kernel(threads=threads, min_blocks=tiles.min_blocks, arch=arch, name="backward.one_pass")
    def one_pass(q, k, v, do, dk, dv, delta, origin, bias, sums, scale, causal):
        body(q, k, v, do, dk, dv, delta, origin, bias, sums, scale, causal)

    return one_pass if exchange else mma_dkdv
