"""dQ on tensor cores: a block owns rows of Q and dO and walks over the keys, as the forward does.

::

    S = Q K_j^T | P = 2^((S - origin) factor - bias) | dP = dO V_j^T | dS = P o (dP - delta) | dQ += dS K_j

dS stays in registers, rounded, as an A operand. K_j is read twice, in rows for S and, transposed by ldmatrix, for dQ.
K and V come by asynchronous copies under the products of the step before. Nothing is added to memory.

Source: Dao, FlashAttention-2, arXiv 2307.08691, algorithm 2, turned to rows.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import Kernel, device, kernel
from flashnumba.machine.instructions import shared_address
from flashnumba.machine.numba import cuda, float32, int32, int64, uint8, uint32
from flashnumba.stages.backward.mma_parts import make_parts
from flashnumba.stages.backward.mma_tiles import Tiles
from flashnumba.tiles.online import LOG2_E
from flashnumba.tiles.rows import address_of
from flashnumba.tiles.schedule import seen_keys
from flashnumba.tiles.sizes import ALIGNMENT

__all__ = ["FAULTS", "make_dq"]

FAULTS = ("barrier", "free", "wait", "swizzle", "tail", "causal", "scale", "delta", "stride")
"""What can be planted; "free" is the barrier before a single slot is filled again."""


@cache
def make_dq(
    tiles: Tiles, element: str, vector: int = 16, arch: str = "80", *, even: bool = True, broken: str = ""
) -> Kernel:
    """The kernel for float16 or bfloat16; arguments as :func:`flashnumba.tiles.forward.make_attend`.

    A launch has a block for each ``tiles.own`` rows of each head, ``tiles.threads`` and ``tiles.shared``.
    """
    own, other, frags, slots, groups = tiles.own, tiles.other, tiles.frags, tiles.slots, tiles.other // 8
    under = tiles.under
    parts = make_parts(tiles, element, vector, arch, even=even, waits=broken != "wait", swizzled=broken != "swizzle")
    copy_own, copy_other, wait, commit = parts.copy_own, parts.copy_other, parts.wait, parts.commit
    weight, pack, clear, store = parts.weight, parts.pack, parts.clear, parts.store
    lane_of_own, lane_of_rows, lane_of_columns = parts.steps.q_lane, parts.steps.k_lane, parts.steps.v_lane
    multiply, accumulate = parts.steps.multiply_qk, parts.steps.multiply_pv
    own_bytes, slot_bytes = tiles.own_bytes, tiles.slot_bytes
    rows_held, s_regs, acc_regs = 2 * frags, frags * other // 2, frags * tiles.d // 2
    p_regs, next_row = s_regs // 2, int(broken != "causal")
    no_barrier, no_free, no_tail, no_scale, no_delta, swapped = (
        broken == name for name in ("barrier", "free", "tail", "scale", "delta", "stride")
    )

    @device
    def copy_step(k_tile, v_tile, k_from, v_from, k, v, key, end):
        """Keys from ``key`` on, of which there are ``end``; nothing from there on."""
        v_row, v_column = v.strides[2], v.strides[3]
        if swapped:
            v_row, v_column = v.strides[3], v.strides[2]
        if key < end:
            left, columns = k.shape[2] - key, k.shape[3]
            copy_other(k_tile, k_from + key * k.strides[2], k.strides[2], k.strides[3], left, columns)
            copy_other(v_tile, v_from + key * v_row, v_row, v_column, left, columns)
        commit()

    @device
    def weigh(s, origin, bias2, factor):
        for f in range(frags):
            for n in range(groups):
                for e in range(4):
                    at, r = (f * groups + n) * 4 + e, 2 * f + e // 2
                    s[at] = weight(s[at], origin[r], factor, bias2[r])

    @device
    def hide(p, row, key, offset, causal, n_rows, lane):
        """No weight beyond the last key, nor if causal beyond ``offset`` + row; ``row`` is the lane's first."""
        for r in range(rows_held):
            limit = key + other if no_tail else n_rows
            if causal != 0:
                limit = min(limit, row + int64(16 * (r // 2) + 8 * (r % 2)) + offset + next_row)
            visible = int32(min(max(limit - key, int64(0)), int64(other)))
            for n in range(groups):
                for i in range(2):
                    if 2 * (lane & 3) + int32(8 * n + i) >= visible:
                        p[((r // 2) * groups + n) * 4 + 2 * (r % 2) + i] = float32(0)

    @device
    def differ(dp, p, delta):
        for f in range(frags):
            for n in range(groups):
                for e in range(4):
                    at = (f * groups + n) * 4 + e
                    dp[at] = p[at] * (dp[at] if no_delta else dp[at] - delta[2 * f + e // 2])

    @kernel(threads=tiles.threads, min_blocks=tiles.min_blocks, arch=arch, name="backward.mma dq")
    def mma_dq(q, k, v, do, dq, delta, origin, bias, scale, causal):
        smem = cuda.shared.array(0, uint8)
        q_tile = (shared_address(smem) + uint32(ALIGNMENT - 1)) & uint32(0x100000000 - ALIGNMENT)
        do_tile = q_tile + uint32(own_bytes)
        k_tile = do_tile + uint32(own_bytes)
        v_tile = k_tile + uint32(slots * slot_bytes)
        lane = int32(cuda.threadIdx.x & 31)
        warp_row = int32((cuda.threadIdx.x >> 5) * (16 * frags))

        m_rows, n_rows, columns = q.shape[2], k.shape[2], q.shape[3]
        blocks = (m_rows + (own - 1)) // own
        index = int64(uint32(cuda.blockIdx.x) // uint32(blocks))
        block = int64(uint32(cuda.blockIdx.x) % uint32(blocks))
        if causal != 0:
            block = blocks - 1 - block  # the longest first
        batch, head = index // q.shape[1], index % q.shape[1]
        row0, offset = block * own, n_rows - m_rows
        head_kv = head // (q.shape[1] // k.shape[1])
        k_from, v_from = address_of(k, batch, head_kv, 0), address_of(v, batch, head_kv, 0)

        end, whole = seen_keys(row0, own, n_rows, offset, causal, next_row)

        factor = scale * float32(LOG2_E)
        here_origin = cuda.local.array(rows_held, float32)
        here_bias = cuda.local.array(rows_held, float32)
        here_delta = cuda.local.array(rows_held, float32)
        for r in range(rows_held):
            row = row0 + int64(warp_row) + int64(16 * (r // 2) + 8 * (r % 2)) + int64(lane >> 2)
            here_origin[r], here_bias[r], here_delta[r] = float32(0), float32(0), float32(0)
            if row < m_rows:
                here_origin[r] = origin[batch, head, row]
                here_bias[r] = bias[batch, head, row]
                here_delta[r] = delta[batch, head, row]

        held = cuda.local.array(1, uint32)
        s = cuda.local.array(s_regs, float32)
        dp = cuda.local.array(s_regs, float32)
        ds = cuda.local.array(p_regs, uint32)
        acc = cuda.local.array(acc_regs, float32)
        clear(acc)
        q_lane, do_lane = lane_of_own(q_tile, warp_row, lane), lane_of_own(do_tile, warp_row, lane)
        k_lane, v_lane, k_columns = (
            lane_of_rows(k_tile, lane),
            lane_of_rows(v_tile, lane),
            lane_of_columns(k_tile, lane),
        )

        copy_own(q_tile, address_of(q, batch, head, row0), q.strides[2], q.strides[3], m_rows - row0, columns)
        copy_own(do_tile, address_of(do, batch, head, row0), do.strides[2], do.strides[3], m_rows - row0, columns)
        copy_step(k_tile, v_tile, k_from, v_from, k, v, int64(0), n_rows)
        for j in range(int64(0), (end + (other - 1)) // other):
            key, here = j * other, uint32(0)
            if slots == 2:
                here = uint32(j & 1) * uint32(slot_bytes)
            wait()
            if not no_barrier:
                cuda.syncthreads()  # K_j and V_j are there for all, and nobody reads the slots filled next
            there, ahead = uint32(slot_bytes) - here, key + other
            if slots == 2 and not under:
                copy_step(k_tile + there, v_tile + there, k_from, v_from, k, v, ahead, end)
            multiply(s, held, q_lane, k_lane + here)
            if slots == 2 and under:  # after the product has begun: addresses are computed under it
                copy_step(k_tile + there, v_tile + there, k_from, v_from, k, v, ahead, end)
            weigh(s, here_origin, here_bias, factor)
            if key + other > whole:
                hide(s, row0 + warp_row + (lane >> 2), key, offset, causal, n_rows, lane)
            multiply(dp, held, do_lane, v_lane + here)
            differ(dp, s, here_delta)
            for i in range(other // 16):
                pack(dp, ds, i)
                accumulate(acc, ds, k_columns + here, i)
            if slots == 1:
                if not no_free:
                    cuda.syncthreads()  # nobody reads K_j and V_j any more
                copy_step(k_tile, v_tile, k_from, v_from, k, v, ahead, end)

        wait()  # also where no key was visible and nobody waited for Q
        cuda.syncthreads()  # Q is there, before its tile is written to
        to = address_of(dq, batch, head, row0)
        factor_out = float32(1) if no_scale else scale
        store(to, dq.strides[2], dq.strides[3], acc, factor_out, q_tile, warp_row, lane, m_rows - row0, columns)

    return mma_dq
