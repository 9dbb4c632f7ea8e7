"""The gradients of SLA's softmax part: those of attention, over lists of tiles.

``dq``          a block for each row tile walks over its critical key tiles,
``dk dv``       a block for each key tile over the row tiles for which it is critical, of all heads of its group.

Equations and steps are those of :mod:`flashnumba.stages.backward.mma_dq` and ``mma_dkdv``; what changed is which tile
comes next. The maximum and the logarithm of the sum come apart from the forward, so that no row has to ask its keys
again, whatever its scores are. What the linear part has left in dq, dk and dv is added before the result is rounded.
Every sum has a fixed order: no atomics, the same bits every time.

With all tiles critical these are the gradients of dense attention and within the same budget, but not its bits. A dense
weight is 2^(s factor - lse log2 e), as lse is all that its caller has, and here 2^((s - maximum) factor - log2 sum):
they round apart, and sometimes the weight of 11 bits then does. Products are also summed in the order of other tiles.

Where heads of queries share one of keys, the list of a key tile has the row tiles of the group's heads one after the
other, and a block's sums go on from head to head: dk and dv are summed over the group in registers, in that order.

The limit: a key tile that many rows find critical is one block's work, and the last block decides when a launch ends;
with few heads of keys blocks are also few.

Source: Dao, FlashAttention-2, arXiv 2307.08691, algorithm 2; Zhang et al., SLA, arXiv 2509.24006, algorithm 2.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import Kernel, device, kernel
from flashnumba.machine.instructions import ld_global_b32, shared_address
from flashnumba.machine.numba import cuda, float32, int32, int64, uint8, uint32, uint64
from flashnumba.stages.backward.mma_keys import make_key_steps
from flashnumba.stages.backward.mma_parts import Parts, make_parts
from flashnumba.stages.backward.mma_tiles import Tiles
from flashnumba.stages.sparsity.sla_pieces import head_of_keys, is_even, make_copy_rows, piece_of
from flashnumba.stages.sparsity.sla_products import make_row_steps
from flashnumba.stages.sparsity.sla_reference import BLOCK
from flashnumba.tiles.online import LOG2_E
from flashnumba.tiles.rows import address_of
from flashnumba.tiles.sizes import ALIGNMENT

__all__ = ["FAULTS", "dkdv_tiles", "dq_tiles", "make_dkdv", "make_dq"]

FAULTS = ("barrier", "wait", "swizzle", "tail", "causal", "delta", "list", "linear", "group")
"""What can be planted: "list" walks over the tiles from the first on, "linear" leaves out the other part, "group" takes
the first head of keys for all, or of a group's heads the first for all."""


def dq_tiles(d: int, arch: str) -> Tiles:
    """Tiles of ``dq``."""
    return Tiles(d, BLOCK, BLOCK)


def dkdv_tiles(d: int, arch: str) -> Tiles:
    """Tiles of ``dk dv``; elsewhere than on sm_90 the compiler finds no registers for 64 x 64 at d = 128."""
    if d <= 64 or arch.rstrip("a") == "90":
        return Tiles(d, BLOCK, BLOCK, results=2, under=d > 64)
    return Tiles(d, BLOCK, 32, results=2)


def make_row_parts(tiles: Tiles, element: str, arch: str, columns: int, broken: str) -> Parts:
    """The parts for rows of ``columns``, as :func:`~.sla_pieces.make_copy_rows` copies them."""
    swizzled, threads = broken != "swizzle", tiles.threads
    return make_parts(
        tiles, element, 16, arch, even=is_even(tiles.d, columns), waits=broken != "wait", swizzled=swizzled
    )._replace(
        copy_own=make_copy_rows(tiles.own, tiles.d, threads, arch, columns=columns),
        copy_other=make_copy_rows(tiles.other, tiles.d, threads, arch, columns=columns, on=swizzled),
    )  # fmt: skip


@cache
def make_dq(
    tiles: Tiles, element: str, arch: str = "80", *, columns: int = 0, grouped: bool = False, broken: str = ""
) -> Kernel:  # fmt: skip
    """``(q, k, v, do, dq, delta, origin, bias, lists, counts, scale, causal)``: dq has the linear part's when it
    begins. A block for each row tile. ``columns`` and ``grouped`` as :func:`~.sla_forward.make_attend`."""
    own, other, groups, slots = tiles.own, tiles.other, tiles.other // 8, tiles.slots
    per_tile = BLOCK // other
    parts = make_row_parts(tiles, element, arch, columns, broken)
    copy_own, copy_other, wait, commit = parts.copy_own, parts.copy_other, parts.wait, parts.commit
    weight, pack, clear, store = parts.weight, parts.pack, parts.clear, parts.store
    lane_of_own, lane_of_rows, lane_of_columns = parts.steps.q_lane, parts.steps.k_lane, parts.steps.v_lane
    multiply, accumulate = parts.steps.multiply_qk, parts.steps.multiply_pv
    add = make_row_steps(tiles.d, element, None, arch, columns=columns).add
    own_bytes, slot_bytes, acc_regs, s_regs = tiles.own_bytes, tiles.slot_bytes, tiles.d // 2, other // 2
    p_regs, next_row = s_regs // 2, int(broken != "causal")
    no_barrier, no_tail, no_delta, in_turn, alone, apart = (
        broken == x for x in ("barrier", "tail", "delta", "list", "linear", "group")
    )  # fmt: skip

    @device
    def copy_step(k_tile, v_tile, k_from, v_from, k, v, key):
        left, width = k.shape[2] - key, k.shape[3]
        copy_other(k_tile, k_from + key * k.strides[2], k.strides[2], k.strides[3], left, width)
        copy_other(v_tile, v_from + key * v.strides[2], v.strides[2], v.strides[3], left, width)

    @device
    def hide(p, row, key, offset, causal, n_rows, lane):
        """No weight beyond the last key, nor if causal beyond ``offset`` + row; ``row`` is the lane's first."""
        for half in range(2):
            limit = key + other if no_tail else n_rows
            if causal != 0:
                limit = min(limit, row + int64(8 * half) + offset + next_row)
            visible = int32(min(max(limit - key, int64(0)), int64(other)))
            for n in range(groups):
                for i in range(2):
                    if 2 * (lane & 3) + int32(8 * n + i) >= visible:
                        p[4 * n + 2 * half + i] = float32(0)

    @kernel(threads=tiles.threads, min_blocks=tiles.min_blocks, arch=arch, name="sparsity.sla dq")
    def sla_dq(q, k, v, do, dq, delta, origin, bias, lists, counts, scale, causal):
        smem = cuda.shared.array(0, uint8)
        q_tile = (shared_address(smem) + uint32(ALIGNMENT - 1)) & uint32(0x100000000 - ALIGNMENT)
        do_tile = q_tile + uint32(own_bytes)
        k_tile = do_tile + uint32(own_bytes)
        v_tile = k_tile + uint32(slots * slot_bytes)
        lane, warp_row = int32(cuda.threadIdx.x & 31), int32((cuda.threadIdx.x >> 5) * 16)
        m_rows, n_rows, width = q.shape[2], k.shape[2], q.shape[3]
        batch, head, block = piece_of(cuda.blockIdx.x, counts.shape[2], q.shape[1])
        row0, offset = block * own, n_rows - m_rows
        of_keys = (int64(0) if apart else head_of_keys(head, q, k)) if grouped else head
        k_from, v_from = address_of(k, batch, of_keys, int64(0)), address_of(v, batch, of_keys, int64(0))
        whole = min(n_rows, row0 + offset + next_row) if causal != 0 else n_rows  # all rows see the keys before it
        mine, count = lists[batch, head, block], int32(counts[batch, head, block] * int32(per_tile))

        factor = scale * float32(LOG2_E)
        of_origin = cuda.local.array(2, float32)
        of_bias = cuda.local.array(2, float32)
        of_delta = cuda.local.array(2, float32)
        for half in range(2):
            row = row0 + int64(warp_row) + int64(8 * half) + int64(lane >> 2)
            of_origin[half], of_bias[half], of_delta[half] = float32(0), float32(0), float32(0)
            if row < m_rows:
                of_origin[half] = origin[batch, head, row]
                of_bias[half] = bias[batch, head, row]
                of_delta[half] = delta[batch, head, row]

        held = cuda.local.array(1, uint32)
        s = cuda.local.array(s_regs, float32)
        dp = cuda.local.array(s_regs, float32)
        ds = cuda.local.array(p_regs, uint32)
        acc = cuda.local.array(acc_regs, float32)
        clear(acc)
        q_lane, do_lane = lane_of_own(q_tile, warp_row, lane), lane_of_own(do_tile, warp_row, lane)
        k_lane, v_lane, k_columns = (
            lane_of_rows(k_tile, lane), lane_of_rows(v_tile, lane), lane_of_columns(k_tile, lane),
        )  # fmt: skip
        copy_own(q_tile, address_of(q, batch, head, row0), q.strides[2], q.strides[3], m_rows - row0, width)
        copy_own(do_tile, address_of(do, batch, head, row0), do.strides[2], do.strides[3], m_rows - row0, width)
        key, coming = int64(0), int64(0)
        if count > 0:
            key = int64(0) if in_turn else int64(mine[0]) * BLOCK
            copy_step(k_tile, v_tile, k_from, v_from, k, v, key)
        commit()
        for i in range(int32(0), count, int32(1)):
            here = uint32(i & 1) * uint32(slot_bytes)
            if i + 1 < count:
                ahead = int32(i + 1)
                coming = int64(ahead // int32(per_tile)) if in_turn else int64(mine[ahead // int32(per_tile)])
                coming = coming * BLOCK + int64(ahead % int32(per_tile)) * other
            wait()
            if not no_barrier:
                cuda.syncthreads()  # this step's K and V are there for all, and nobody reads the slots filled next
            if i + 1 < count:
                there = uint32(slot_bytes) - here
                copy_step(k_tile + there, v_tile + there, k_from, v_from, k, v, coming)
            commit()
            multiply(s, held, q_lane, k_lane + here)
            for n in range(groups):
                for e in range(4):
                    s[4 * n + e] = weight(s[4 * n + e], of_origin[e // 2], factor, of_bias[e // 2])
            if key + other > whole:
                hide(s, row0 + warp_row + (lane >> 2), key, offset, causal, n_rows, lane)
            multiply(dp, held, do_lane, v_lane + here)
            for n in range(groups):
                for e in range(4):
                    dp[4 * n + e] = s[4 * n + e] * (dp[4 * n + e] if no_delta else dp[4 * n + e] - of_delta[e // 2])
            for j in range(other // 16):
                pack(dp, ds, j)
                accumulate(acc, ds, k_columns + here, j)
            key = coming

        wait()  # also where there was no tile and nobody waited for Q
        cuda.syncthreads()  # Q is there, before its tile is written to
        to, left = address_of(dq, batch, head, row0), m_rows - row0
        for i in range(acc_regs):
            acc[i] *= scale
        if not alone:
            add(acc, to, dq.strides[2], warp_row, lane, left)
        store(to, dq.strides[2], dq.strides[3], acc, float32(1), q_tile, warp_row, lane, left, width)

    return sla_dq


@cache
def make_dkdv(
    tiles: Tiles, element: str, arch: str = "80", *, columns: int = 0, grouped: bool = False, broken: str = ""
) -> Kernel:  # fmt: skip
    """``(q, k, v, do, dk, dv, delta, origin, bias, lists, counts, scale, causal)``: dk and dv have the linear part's
    when it begins; lists are those of key tiles, :func:`~.sla_lists.make_key_lists`. A block for each key tile.
    ``columns`` and ``grouped`` as :func:`~.sla_forward.make_attend`."""
    own, other, slots, per_tile = tiles.own, tiles.other, tiles.slots, BLOCK // tiles.other
    parts = make_row_parts(tiles, element, arch, columns, broken)
    copy_own, wait, commit, pack, clear, store = (
        parts.copy_own, parts.wait, parts.commit, parts.pack, parts.clear, parts.store,
    )  # fmt: skip
    copy_step, weigh, hide, differ = make_key_steps(tiles, parts, broken)
    add = make_row_steps(tiles.d, element, None, arch, columns=columns).add
    lane_of_own, lane_of_rows, lane_of_columns = parts.steps.q_lane, parts.steps.k_lane, parts.steps.v_lane
    multiply, accumulate = parts.steps.multiply_qk, parts.steps.multiply_pv
    to_do = slots * tiles.slot_bytes  # from a tile of Q to that of dO
    own_bytes, slot_bytes, statistics_bytes = tiles.own_bytes, tiles.slot_bytes, tiles.statistics_bytes
    s_regs, acc_regs, p_regs, under = other // 2, tiles.d // 2, other // 4, tiles.under
    no_barrier, in_turn, alone, apart = (broken == x for x in ("barrier", "list", "linear", "group"))

    @device
    def entry_of(entry, step):
        """The list's entry at an address, the ``step``-th."""
        return int32(step // int32(per_tile)) if in_turn else int32(ld_global_b32(uint64(entry)))

    @device
    def of_group(number, head, q, k, m_rows):
        """(head of q, its row tile) of an entry, where lists are those of a group's heads."""
        tiles_of_head = uint32((m_rows + (BLOCK - 1)) // BLOCK)
        first = uint32(head) * (uint32(q.shape[1]) // uint32(k.shape[1]))
        member = uint32(0) if apart else uint32(number) // tiles_of_head
        return int32(first + member), int32(uint32(number) % tiles_of_head)

    @kernel(threads=tiles.threads, min_blocks=tiles.min_blocks, arch=arch, name="sparsity.sla dk dv")
    def sla_dkdv(q, k, v, do, dk, dv, delta, origin, bias, lists, counts, scale, causal):
        smem = cuda.shared.array(0, uint8)
        k_tile = (shared_address(smem) + uint32(ALIGNMENT - 1)) & uint32(0x100000000 - ALIGNMENT)
        v_tile = k_tile + uint32(own_bytes)
        q_tile = v_tile + uint32(own_bytes)
        do_tile = q_tile + uint32(slots * slot_bytes)
        statistics = do_tile + uint32(slots * slot_bytes)
        lane, warp_row = int32(cuda.threadIdx.x & 31), int32((cuda.threadIdx.x >> 5) * 16)
        m_rows, n_rows, width = q.shape[2], k.shape[2], q.shape[3]
        batch64, head64, block = piece_of(cuda.blockIdx.x, counts.shape[2], k.shape[1])
        batch, head, key0, offset = int32(batch64), int32(head64), int32(block * own), int32(n_rows - m_rows)
        count = int32(counts[batch64, head64, block] * int32(per_tile))
        entry = address_of(lists, batch64, head64, block)  # of the list, the one whose tile is copied next
        # From whole on all rows see all keys of the block.
        whole = max(int32(0), int32(key0 + int32(own - 1) - offset)) if causal != 0 else int32(0)
        if key0 + own > n_rows:
            whole = int32(m_rows)

        factor = scale * float32(LOG2_E)
        held = cuda.local.array(1, uint32)
        s = cuda.local.array(s_regs, float32)
        dp = cuda.local.array(s_regs, float32)
        p = cuda.local.array(p_regs, uint32)
        ds = cuda.local.array(p_regs, uint32)
        dk_acc = cuda.local.array(acc_regs, float32)
        dv_acc = cuda.local.array(acc_regs, float32)
        clear(dk_acc)
        clear(dv_acc)
        k_lane, q_lane = lane_of_own(k_tile, warp_row, lane), lane_of_rows(q_tile, lane)
        q_columns = lane_of_columns(q_tile, lane)
        keys_left = n_rows - int64(key0)
        k_from, v_from = address_of(k, batch64, head64, int64(key0)), address_of(v, batch64, head64, int64(key0))
        copy_own(k_tile, k_from, k.strides[2], k.strides[3], keys_left, width)
        copy_own(v_tile, v_from, v.strides[2], v.strides[3], keys_left, width)
        row, coming, of_q = int32(0), int32(0), head
        if count > 0:
            row = entry_of(entry, int32(0))
            if grouped:
                of_q, row = of_group(row, head, q, k, m_rows)
            row = int32(row * int32(BLOCK))
            copy_step(q_tile, do_tile, statistics, q, do, delta, origin, bias, batch, of_q, row)
        commit()
        for i in range(int32(0), count, int32(1)):
            here, numbers = uint32(i & 1) * uint32(slot_bytes), statistics + uint32(i & 1) * uint32(statistics_bytes)
            if i + 1 < count:
                if per_tile == 1 or (i + 1) % int32(per_tile) == 0:
                    entry += int64(4)
                    coming = entry_of(entry, int32(i + 1))
                    if grouped:
                        of_q, coming = of_group(coming, head, q, k, m_rows)
                    coming = int32(coming * int32(BLOCK))
                else:
                    coming = int32(row + int32(other))
            wait()
            if not no_barrier:
                cuda.syncthreads()  # this step's tiles are there for all, and nobody reads the slots filled next
            of_lane = numbers + uint32(8 * (lane & 3))
            if under:  # after the product has begun: addresses are computed under it
                multiply(s, held, k_lane, q_lane + here)
            if i + 1 < count:
                there = uint32(slot_bytes) - here
                copy_step(
                    q_tile + there, do_tile + there, statistics + uint32((i + 1) & 1) * uint32(statistics_bytes),
                    q, do, delta, origin, bias, batch, of_q, coming,
                )  # fmt: skip
            commit()
            if not under:
                multiply(s, held, k_lane, q_lane + here)
            weigh(s, of_lane, factor)
            if row < whole or row + other > m_rows:
                key = int32(warp_row + (lane >> int32(2)))
                hide(
                    s, int32(key0 - offset + key - row), key, int32(int32(m_rows) - row), int32(keys_left), causal, lane
                )  # fmt: skip
            for j in range(other // 16):
                pack(s, p, j)
                accumulate(dv_acc, p, q_columns + here + uint32(to_do), j)
            multiply(dp, held, k_lane + uint32(own_bytes), q_lane + here + uint32(to_do))
            differ(dp, s, of_lane)
            for j in range(other // 16):
                pack(dp, ds, j)
                accumulate(dk_acc, ds, q_columns + here, j)
            row = coming

        wait()  # also where there was no tile and nobody waited for K and V
        cuda.syncthreads()  # K and V are there and nobody reads them any more, before their tiles are written to
        batch64, head64 = int64(batch), int64(head)
        dk_to, dv_to = address_of(dk, batch64, head64, int64(key0)), address_of(dv, batch64, head64, int64(key0))
        for i in range(acc_regs):
            dk_acc[i] *= scale
        if not alone:
            add(dk_acc, dk_to, dk.strides[2], warp_row, lane, keys_left)
            add(dv_acc, dv_to, dv.strides[2], warp_row, lane, keys_left)
        one = float32(1)
        store(dk_to, dk.strides[2], dk.strides[3], dk_acc, one, k_tile, warp_row, lane, keys_left, width)
        store(dv_to, dv.strides[2], dv.strides[3], dv_acc, one, v_tile, warp_row, lane, keys_left, width)

    return sla_dkdv
