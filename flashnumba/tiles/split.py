"""Split-KV attention, flash decoding: when queries are few, the keys are shared out over blocks and merged at the end.

With one query a head a block a head would walk over all keys alone, while most of the GPU idles. Here a head's keys are
cut into ``splits`` parts; each block attends to its own and leaves its state (m, l, acc) in float32, and a second
kernel, :mod:`flashnumba.tiles.merge`, merges them; m is the maximum of S unscaled, f = abs(scale) log2 e::

    M = max_s m_s        O = sum_s 2^((m_s - M) f) acc_s / sum_s 2^((m_s - M) f) l_s
    LSE = (M f + log2 sum_s 2^((m_s - M) f) l_s) ln 2

Flash decoding merges (O_s, LSE_s), which is one number a row less; but a float32 LSE of 1e5 has lost what tells parts
apart, and m has not. A part in which a row sees nothing has m = -inf and weight 0. The order of the sums is fixed, so
results are bitwise repeatable.

The query heads that share a head of keys and values are rows of one tile (row ``r`` is query ``r // group`` of head
``r % group``), so each key is read once for all of them. With up to 16 rows a block is one warp, which needs no other's
barrier, and six blocks a multiprocessor keep memory busy.

Source: Dao, Haziza, Massa, Sizov, "Flash-Decoding for long-context inference", 2023; the packing of GQA heads as in
FlashAttention-3's decoding, arXiv 2407.08608.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import Kernel, device, kernel
from flashnumba.machine.instructions import global_address, shared_address, st_global_f32
from flashnumba.machine.numba import cuda, float32, int32, int64, uint8, uint32, uint64
from flashnumba.tiles.attention import ALIGNMENT, AttentionTiles, make_steps
from flashnumba.tiles.copy_tile import copies_ahead, make_copy_tile, make_waiting
from flashnumba.tiles.dependency import make_trigger
from flashnumba.tiles.descale import make_descales
from flashnumba.tiles.fp8_convert import make_halves
from flashnumba.tiles.fp8_halves import make_copy_as_float16, with_halves
from flashnumba.tiles.rows import make_hide

__all__ = ["FAULTS", "MOST_SPLITS", "SPLIT_ARGS", "make_split", "splits_for"]

SPLIT_ARGS = ("q", "k", "v", "acc_parts", "m_parts", "l_parts", "scale", "causal")
MOST_SPLITS = 256
FAULTS = ("barrier", "free_barrier", "wait", "tail", "causal", "head", "range")
"""What can be planted."""


@cache
def make_split(
    tiles: AttentionTiles, element: str, vector: int = 16, arch: str = "80", *, even: bool = True,
    scaled: str = "", name: str = "", broken: str = "",
) -> Kernel:  # fmt: skip
    """The kernel that attends to one part of the keys, ``(q, k, v, acc_parts, m_parts, l_parts, scale, causal)``.

    Args:
        tiles, element, vector, arch, even: as :func:`flashnumba.tiles.forward.make_attend`; 8-bit elements with tiles
            of ``kv_bytes`` 1.
        scaled: ``"block"`` for 8-bit elements: ``q_descale, k_descale, v_descale`` come before ``scale``.
        name: of the kernel in tables.
        broken: plants one of :data:`FAULTS`, or ``twice`` of the scales.
    """
    d, bm, bn, threads, frags, slots = tiles.d, tiles.bm, tiles.bn, tiles.threads, tiles.frags, tiles.slots
    pitch, slot_bytes, halves = tiles.pitch, tiles.slot, tiles.kv_bytes == 1
    steps = make_steps(tiles, "float16" if halves else element, arch)
    if halves:
        steps = with_halves(steps, tiles, element, arch)
    factor_for, scale_rows, scale_tile, scale_output = make_descales(
        tiles, scaled, make_halves(element, arch).log2 if halves else 0, broken
    )
    clear, negate_q, load_q, multiply_qk, flatten, softmax_pv = (
        steps.clear, steps.negate_q, steps.load_q, steps.multiply_qk, steps.flatten, steps.softmax_pv
    )  # fmt: skip
    lane_of_q, lane_of_k, lane_of_v = steps.q_lane, steps.k_lane, steps.v_lane
    row_total = steps.total
    copy_q = make_copy_tile(bm, d, threads, vector, arch, even=even, packed=True)
    if halves:
        copy_q = make_copy_as_float16(bm, d, threads, element, arch, packed=True)
    copy_kv = make_copy_tile(bn, d, threads, vector, arch, even=even, nbytes=tiles.kv_bytes or tiles.nbytes)
    d_groups, trigger = d // 8, make_trigger(arch)
    o_regs, s_regs, rows_held, q_regs = frags * d // 2, frags * bn // 2, 2 * frags, max(1, 4 * frags * tiles.q_held)
    no_barrier, no_free_barrier = broken == "barrier", broken == "free_barrier"
    next_row, head_shift, shift = int(broken != "causal"), int(broken == "head"), int(broken == "range")

    hide = make_hide(tiles, steps.mask, tail=broken != "tail", next_row=next_row)
    wait, commit = make_waiting(copies_ahead(vector, arch), slots - 1, waits=broken != "wait")

    @device
    def column_of(n, i, lane):
        """Which column value i of accumulator group n belongs to."""
        if halves:
            return int64(16 * (n // 2) + n % 2 + 2 * i) + int64(4 * (lane & 3))
        return int64(8 * n + i) + int64(2 * (lane & 3))

    @device
    def attend(q, k, v, acc_parts, m_parts, l_parts, q_descale, k_descale, v_descale, scale, causal):
        trigger()
        smem = cuda.shared.array(0, uint8)
        q_tile = (shared_address(smem) + uint32(ALIGNMENT - 1)) & uint32(0x100000000 - ALIGNMENT)
        k_tile = q_tile + uint32(bm * pitch)
        v_tile = k_tile + uint32(slots * slot_bytes)
        lane = int32(cuda.threadIdx.x & 31)
        warp_row = int32((cuda.threadIdx.x >> 5) * (16 * frags))

        # Which part of the keys, for which rows of which head of keys and values.
        splits, group = m_parts.shape[0], q.shape[1] // k.shape[1]
        rows, n_rows, columns, offset = q.shape[2] * group, k.shape[2], q.shape[3], k.shape[2] - q.shape[2]
        blocks = (rows + (bm - 1)) // bm
        part = int64(uint32(cuda.blockIdx.x) % uint32(splits))
        rest = int64(uint32(cuda.blockIdx.x) // uint32(splits))
        row0 = (rest % blocks) * bm
        head_kv = (rest // blocks) % k.shape[1]
        batch = rest // blocks // k.shape[1]
        q_from = int64(global_address(q)) + batch * q.strides[0] + head_kv * group * q.strides[1]
        k_from = int64(global_address(k)) + batch * k.strides[0] + head_kv * k.strides[1]
        v_from = int64(global_address(v)) + batch * v.strides[0] + head_kv * v.strides[1]
        end, whole = n_rows, n_rows
        if causal != 0:
            end = min(n_rows, max(int64(0), (min(row0 + bm, rows) - 1) // group + 1 + offset))
            whole = min(n_rows, row0 // group + offset + next_row)
        tiles_n = (end + (bn - 1)) // bn
        first, last = tiles_n * part // splits, tiles_n * (part + 1) // splits - shift

        factor = factor_for(scale, q_descale, k_descale, batch, head_kv * group, head_kv)
        q_lane, k_lane, v_lane = lane_of_q(q_tile, warp_row, lane), lane_of_k(k_tile, lane), lane_of_v(v_tile, lane)
        held = cuda.local.array(q_regs, uint32)
        s = cuda.local.array(s_regs, float32)
        acc = cuda.local.array(o_regs, float32)
        m = cuda.local.array(rows_held, float32)
        l = cuda.local.array(rows_held, float32)
        clear(acc, m, l)
        of_q = cuda.local.array(rows_held, float32)
        scale_rows(of_q, q_descale, batch, head_kv * group, group, row0 + warp_row + (lane >> 2), rows)

        copy_q(q_tile, q_from, q.strides[2], q.strides[3], rows, columns, row0, group, q.strides[1])
        for i in range(slots):
            key, to = (first + i) * bn, uint32(i * slot_bytes)
            if first + i < last:
                copy_kv(k_tile + to, k_from + key * k.strides[2], k.strides[2], k.strides[3], n_rows - key, columns)
                copy_kv(v_tile + to, v_from + key * v.strides[2], v.strides[2], v.strides[3], n_rows - key, columns)
            commit()
        wait()
        cuda.syncthreads()  # Q is there for all
        if scale < float32(0):
            negate_q(q_tile, warp_row, lane)
        load_q(held, q_lane)
        here = uint32(0)
        for j in range(first, last):
            wait()
            if not no_barrier:
                cuda.syncthreads()  # K_j and V_j are there for all
            multiply_qk(s, held, q_lane, k_lane + here)
            scale_tile(s, acc, of_q, k_descale, v_descale, batch, head_kv, j * bn)  # of FP8 alone
            if scale == float32(0):
                flatten(s)
            if (j + 1) * bn > whole:
                hide(s, j, row0 + warp_row + (lane >> 2), group, offset, causal, n_rows, lane)
            softmax_pv(s, acc, m, l, factor, v_lane + here)
            if not no_free_barrier:
                cuda.syncthreads()  # nobody reads this slot any more
            key = (j + slots) * bn
            if j + slots < last:
                copy_kv(k_tile + here, k_from + key * k.strides[2], k.strides[2], k.strides[3], n_rows - key, columns)
                copy_kv(v_tile + here, v_from + key * v.strides[2], v.strides[2], v.strides[3], n_rows - key, columns)
            commit()
            here += uint32(slot_bytes)
            if here == uint32(slots * slot_bytes):
                here = uint32(0)

        scale_output(acc, v_descale, batch, head_kv, (last - 1) * bn)
        for r in range(rows_held):
            row = row0 + warp_row + (16 * (r // 2) + 8 * (r % 2) + (lane >> 2))
            total = row_total(l[r])
            if row < rows:
                head = head_kv * group + (row + head_shift) % group
                place = ((part * q.shape[0] + batch) * q.shape[1] + head) * q.shape[2] + row // group
                if (lane & 3) == 0:
                    m_parts[part, batch, head, row // group] = m[r]
                    l_parts[part, batch, head, row // group] = total
                to = global_address(acc_parts) + uint64(place * columns * 4)
                for n in range(d_groups):
                    at = ((r // 2) * d_groups + n) * 4 + 2 * (r % 2)
                    for i in range(2):
                        column = column_of(n, i, lane)
                        if even or column < columns:
                            st_global_f32(to + uint64(4 * column), acc[at + i])

    @kernel(threads=threads, min_blocks=tiles.min_blocks, arch=arch, name=name)
    def split(q, k, v, acc_parts, m_parts, l_parts, scale, causal):
        attend(q, k, v, acc_parts, m_parts, l_parts, None, None, None, scale, causal)

    @kernel(threads=threads, min_blocks=tiles.min_blocks, arch=arch, name=name)
    def split_scaled(q, k, v, acc_parts, m_parts, l_parts, q_descale, k_descale, v_descale, scale, causal):
        attend(q, k, v, acc_parts, m_parts, l_parts, q_descale, k_descale, v_descale, scale, causal)

    return split_scaled if scaled else split


def splits_for(units: int, tiles: int, multiprocessors: int) -> int:
    """Parts to cut ``tiles`` steps of keys into, where a part is ``units`` blocks.

    The time is that of the busiest multiprocessor: the blocks it gets times the steps of the longest part, and one more
    for what a part leaves and the merge reads. Two blocks at least should be on each, to keep memory busy.
    """
    most = max(1, min(tiles, MOST_SPLITS))
    fewest = min(most, -(-2 * multiprocessors // units))

    def busiest(splits: int) -> int:
        return -(-units * splits // multiprocessors) * (-(-tiles // splits) + 1)

    return min(range(min(fewest, most), min(most, 4 * fewest) + 1), key=busiest)
