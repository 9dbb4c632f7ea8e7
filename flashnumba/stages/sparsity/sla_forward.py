"""The forward of SLA: softmax attention over a row tile's list of key tiles, and the linear part at its end.

The flash forward's steps, whose next key tile is the list's and not the next one; then
:mod:`flashnumba.stages.sparsity.sla_linear` adds the linear part while O^s is in registers. Beside o it leaves lse, and
of each row what the gradients make its weights of: the maximum of S and log2 of the sum, apart, so that scores of any
size lose nothing.

What changed beside :mod:`flashnumba.tiles.forward`: 64 rows a block, since that is what shares a list. So K and V come
from L2 for 64 rows and not for 128; where the compiler finds no registers for warps of 32 rows they are also read from
shared memory for 16 rows at a time. So a tile costs more than in dense attention, and 95 % fewer tiles are less than 20
times faster.

With all tiles critical o is that of dense attention with as many keys a step, bit for bit. Under a causal mask later
rows have the longer lists, and go first.

Source: as :mod:`flashnumba.stages.sparsity.sla_reference`.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import Kernel, device, kernel
from flashnumba.machine.instructions import cp_async_commit, cp_async_wait, lane_id, lg2_approx, shared_address
from flashnumba.machine.numba import cuda, float32, int32, int64, uint8, uint32
from flashnumba.stages.sparsity import sla_linear
from flashnumba.stages.sparsity.sla_pieces import address_of, head_of_keys, is_even, make_copy_rows, piece_of
from flashnumba.stages.sparsity.sla_products import WARPS
from flashnumba.stages.sparsity.sla_reference import BLOCK
from flashnumba.tiles.attention import factor_of, log_sum, make_steps, seen
from flashnumba.tiles.rows import make_hide, make_store
from flashnumba.tiles.sizes import ALIGNMENT, AttentionTiles

__all__ = ["FAULTS", "forward_tiles", "make_attend"]

FAULTS = ("barrier", "wait", "swizzle", "tail", "causal", "list", "stride", "group", *sla_linear.FAULTS)
"""What can be planted: "list" walks over the key tiles from the first on, whatever the list says; "group" takes the
first head of keys for all."""


def forward_tiles(d: int, arch: str = "90a", columns: int = 0) -> AttentionTiles:
    """Tiles of ``attend``, those that were fastest on an H200: at d = 128 two warps of 32 rows, which read K and V from
    shared memory half as often as four of 16 (325 TFLOP/s for 292 at 16k tokens), four blocks a multiprocessor. They
    take all 255 registers: with fewer ``columns``, where also a lane's place in a row decides, it is four of 16.

    All rescale O only where a maximum rises, as dense attention does at d = 128 on sm_90: the compiler fuses what is
    multiplied and added in any case, and bits would differ.
    """
    if d > 64:
        return AttentionTiles(d, BLOCK, BLOCK, WARPS if columns or arch.rstrip("a") != "90" else 2, 1, lazy=True)
    return AttentionTiles(d, BLOCK, BLOCK, WARPS, 2, lazy=True)


@cache
def make_attend(
    tiles: AttentionTiles, element: str, feature_map: str = "softmax", arch: str = "80", *, columns: int = 0,
    grouped: bool = False, broken: str = "",
) -> Kernel:  # fmt: skip
    """``(q, k, v, o, lse, origin, bias, share, lists, counts, sums, scale, eps, causal)``; rows at multiples of 16
    bytes, columns packed; scale above 0; sums ``[B, H, row tiles, d (d + 1)]``. A block for each row tile.

    Args:
        columns: of the head dimension, up to ``tiles.d``; 0 for that. q, k, v and o have as many, and zeros up to the
            next multiple of 8.
        grouped: heads of k and v may be fewer than those of q.
        broken: of :data:`FAULTS`.
    """
    d, bm, bn, threads, frags, slots = tiles.d, tiles.bm, tiles.bn, tiles.threads, tiles.frags, tiles.slots
    steps = make_steps(tiles, element, arch)
    clear, load_q, multiply_qk, softmax_pv, row_total = (
        steps.clear, steps.load_q, steps.multiply_qk, steps.softmax_pv, steps.total,
    )  # fmt: skip
    lane_of_q, lane_of_k, lane_of_v = steps.q_lane, steps.k_lane, steps.v_lane
    next_row, pitch, slot_bytes = int(broken != "causal"), tiles.pitch, tiles.slot
    hide = make_hide(tiles, steps.mask, tail=broken != "tail", next_row=next_row)
    store = make_store(tiles, element, 16, arch, even=is_even(d, columns))
    add_linear = sla_linear.make_linear(tiles, element, feature_map, arch, columns=columns, broken=broken)
    copy_q = make_copy_rows(bm, d, threads, arch, columns=columns)
    copy_k = make_copy_rows(bn, d, threads, arch, columns=columns, on=broken != "swizzle")
    copy_v = make_copy_rows(bn, d, threads, arch, columns=columns)
    s_regs, o_regs, rows_held, q_regs = frags * bn // 2, frags * d // 2, 2 * frags, max(1, 4 * frags * tiles.q_held)
    wait_all = cp_async_wait(0)
    waits, meets, listed, swapped, shares = (broken != x for x in ("wait", "barrier", "list", "stride", "group"))

    @device
    def copy_keys(k_tile, k_from, k, tile):
        first = int64(tile) * bn
        copy_k(k_tile, k_from + first * k.strides[2], k.strides[2], k.strides[3], k.shape[2] - first, k.shape[3])

    @device
    def copy_values(v_tile, v_from, v, tile):
        first, v_row = int64(tile) * bn, v.strides[2] if swapped else v.strides[3]
        copy_v(v_tile, v_from + first * v_row, v_row, v.strides[3], v.shape[2] - first, v.shape[3])

    @kernel(threads=threads, min_blocks=tiles.min_blocks, arch=arch, name="sparsity.sla attend")
    def attend(q, k, v, o, lse, origin, bias, share, lists, counts, sums, scale, eps, causal):
        smem = cuda.shared.array(0, uint8)
        q_tile = (shared_address(smem) + uint32(ALIGNMENT - 1)) & uint32(0x100000000 - ALIGNMENT)
        k_tile = q_tile + uint32(bm * pitch)
        v_tile = k_tile + uint32(slots * slot_bytes)
        lane = int32(cuda.threadIdx.x & 31)
        warp_row = int32((cuda.threadIdx.x >> 5) * (16 * frags))
        m_rows, n_rows, width = q.shape[2], k.shape[2], q.shape[3]
        batch, head, block = piece_of(cuda.blockIdx.x, counts.shape[2], q.shape[1])
        if causal != 0:
            block = counts.shape[2] - 1 - block
        row0, offset = block * bm, n_rows - m_rows
        of_keys = (head_of_keys(head, q, k) if shares else int64(0)) if grouped else head
        k_from, v_from = address_of(k, batch, of_keys, int64(0)), address_of(v, batch, of_keys, int64(0))
        whole = min(n_rows, row0 + offset + next_row) if causal != 0 else n_rows  # all rows see the keys before it
        mine, count = lists[batch, head, block], counts[batch, head, block]

        factor = factor_of(scale)
        q_lane, k_lane, v_lane = lane_of_q(q_tile, warp_row, lane), lane_of_k(k_tile, lane), lane_of_v(v_tile, lane)
        held = cuda.local.array(q_regs, uint32)
        s = cuda.local.array(s_regs, float32)
        acc = cuda.local.array(o_regs, float32)
        m = cuda.local.array(rows_held, float32)
        l = cuda.local.array(rows_held, float32)
        clear(acc, m, l)
        copy_q(q_tile, address_of(q, batch, head, row0), q.strides[2], q.strides[3], m_rows - row0, width)
        tile, coming = int32(0), int32(0)
        if count > 0:
            tile = mine[0] if listed else int32(0)
            copy_keys(k_tile, k_from, k, tile)
            if slots == 2:
                copy_values(v_tile, v_from, v, tile)
        cp_async_commit()
        wait_all()
        cuda.syncthreads()  # Q is there for all
        load_q(held, q_lane)
        for i in range(int32(0), int32(count), int32(1)):
            here = uint32(i & 1) * uint32(slot_bytes) if slots == 2 else uint32(0)
            there, more = uint32(slot_bytes) - here, i + 1 < count
            if more:
                coming = mine[i + 1] if listed else int32(i + 1)
            if waits:
                wait_all()
            if meets:
                cuda.syncthreads()  # this tile's K (and V) are there for all, and nobody reads the slots filled next
            if slots == 1:
                copy_values(v_tile, v_from, v, tile)
            elif more:
                copy_keys(k_tile + there, k_from, k, coming)
                copy_values(v_tile + there, v_from, v, coming)
            cp_async_commit()
            multiply_qk(s, held, q_lane, k_lane + here)
            if int64(tile + 1) * bn > whole:
                hide(s, int64(tile), row0 + warp_row + (lane >> 2), int64(1), offset, causal, n_rows, lane)
            if slots == 1:
                if waits:
                    wait_all()
                if meets:
                    cuda.syncthreads()  # V is there for all, and nobody reads K any more
                if more:
                    copy_keys(k_tile, k_from, k, coming)
                cp_async_commit()
            softmax_pv(s, acc, m, l, factor, v_lane + here)
            tile = coming

        for r in range(rows_held):
            row = row0 + warp_row + (16 * (r // 2) + 8 * (r % 2) + (lane >> 2))
            total = row_total(l[r])
            if (lane & 3) == 0 and row < m_rows:
                lse[batch, head, row] = log_sum(m[r], total, factor)
                origin[batch, head, row] = seen(m[r])
                bias[batch, head, row] = float32(float("inf")) if total == float32(0) else lg2_approx(total)
        add_linear(acc, l, q_tile, k_tile, sums, share, eps, batch, head, block, warp_row, m_rows - row0)
        to = address_of(o, batch, head, row0)
        store(to, o.strides[2], o.strides[3], acc, l, q_tile, warp_row, int32(lane_id()), m_rows - row0, width)

    return attend
