"""Split-KV attention, flash decoding: when queries are few, the keys are shared out over blocks and merged at the end.

With one query a head the kernel ``mma`` would start one block a head, each walking over all keys alone, while most of
the GPU idles. Here a head's keys are cut into ``splits`` parts; each block attends to its own and leaves its state
(m, l, acc) in float32, and a second kernel merges them; m is the maximum of S unscaled, f = abs(scale) log2 e::

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

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

from flashnumba.machine.function import Kernel, kernel
from flashnumba.machine.instructions import (
    global_address,
    shared_address,
    st_global_f32,
)
from flashnumba.machine.numba import cuda, float32, int32, int64, uint8, uint32, uint64
from flashnumba.stages.flash_forward.merge import MERGE_ARGS, make_merge, warps_for
from flashnumba.stages.heads import Launch, Plan, Shape, signature
from flashnumba.tiles.attention import ALIGNMENT, AttentionTiles, factor_of, make_steps
from flashnumba.tiles.copy_tile import copies_ahead, make_copy_tile, make_waiting
from flashnumba.tiles.dependency import can_start_early, make_trigger
from flashnumba.tiles.rows import make_hide

if TYPE_CHECKING:
    from flashnumba.machine.compiler import CompileCase

__all__ = [
    "FAULTS",
    "compile_cases",
    "make_split",
    "plan_split",
    "splits_for",
    "tiles_for",
]

SPLIT_ARGS = ("q", "k", "v", "acc_parts", "m_parts", "l_parts", "scale", "causal")
MOST_SPLITS = 256
FAULTS = ("barrier", "free_barrier", "wait", "tail", "causal", "head", "range")
"""What can be planted."""


@cache
def make_split(
    tiles: AttentionTiles, element: str, vector: int = 16, arch: str = "80", *, even: bool = True, broken: str = ""
) -> Kernel:
    """The kernel that attends to one part of the keys; arguments as :func:`.mma.make_mma`.

    Args:
        broken: plants one of :data:`FAULTS`.
    """
    d, bm, bn, threads, frags, slots = tiles.d, tiles.bm, tiles.bn, tiles.threads, tiles.frags, tiles.slots
    pitch, slot_bytes = tiles.pitch, tiles.bn * tiles.pitch
    steps = make_steps(tiles, element, arch)
    clear, negate_q, load_q, multiply_qk, flatten, softmax_pv = (
        steps.clear, steps.negate_q, steps.load_q, steps.multiply_qk, steps.flatten, steps.softmax_pv
    )  # fmt: skip
    lane_of_q, lane_of_k, lane_of_v = steps.q_lane, steps.k_lane, steps.v_lane
    row_total = steps.total
    copy_q = make_copy_tile(bm, d, threads, vector, arch, even=even, packed=True)
    copy_kv = make_copy_tile(bn, d, threads, vector, arch, even=even)
    d_groups, trigger = d // 8, make_trigger(arch)
    o_regs, s_regs, rows_held, q_regs = frags * d // 2, frags * bn // 2, 2 * frags, max(1, 4 * frags * tiles.q_held)
    no_barrier, no_free_barrier = broken == "barrier", broken == "free_barrier"
    next_row, head_shift, shift = int(broken != "causal"), int(broken == "head"), int(broken == "range")

    hide = make_hide(tiles, steps.mask, tail=broken != "tail", next_row=next_row)
    wait, commit = make_waiting(copies_ahead(vector, arch), slots - 1, waits=broken != "wait")

    @kernel(threads=threads, min_blocks=tiles.min_blocks, arch=arch, name="flash_forward.split")
    def split(q, k, v, acc_parts, m_parts, l_parts, scale, causal):
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

        factor = factor_of(scale)
        q_lane, k_lane, v_lane = lane_of_q(q_tile, warp_row, lane), lane_of_k(k_tile, lane), lane_of_v(v_tile, lane)
        held = cuda.local.array(q_regs, uint32)
        s = cuda.local.array(s_regs, float32)
        acc = cuda.local.array(o_regs, float32)
        m = cuda.local.array(rows_held, float32)
        l = cuda.local.array(rows_held, float32)
        clear(acc, m, l)

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
                        column = int64(8 * n + i) + int64(2 * (lane & 3))
                        if even or column < columns:
                            st_global_f32(to + uint64(4 * column), acc[at + i])

    return split


def tiles_for(d: int, rows: int) -> AttentionTiles:
    """One warp for up to 16 rows, four for more; steps of about 16 KB, two of them ahead."""
    d = -(-d // 32) * 32
    bn = 64 if d <= 64 else 32 if d <= 128 else 16
    if rows <= 16:
        return AttentionTiles(d, 16, bn, warps=1, slots=2, q_held=d // 16 if d <= 128 else 0)
    return AttentionTiles(d, 64, max(bn, 32), slots=2)


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


def plan_split(shape: Shape) -> Plan:
    """As many parts as fill the GPU.

    Raises:
        ValueError: float32, or bfloat16 or a GPU below sm_80.
    """
    if shape.element == "float32":
        raise ValueError("q is float32; tensor cores would round it to 11 bits: use flash_forward.simt")
    if int(shape.arch.rstrip("a")) < 80:
        raise ValueError(f"flash_forward.split needs sm_80, this is sm_{shape.arch}: use flash_forward.mma or simt")
    rows = shape.m * shape.group
    tiles = tiles_for(shape.d, rows)
    units = -(-rows // tiles.bm) * shape.kv_heads * shape.batch
    splits = splits_for(units, -(-shape.n // tiles.bn), shape.multiprocessors)
    arch = "90" if can_start_early(shape.arch) else "80"
    kernel = make_split(tiles, shape.element, shape.vector, arch, even=shape.d == tiles.d)
    merge = make_merge(tiles.d, shape.element, warps_for(splits), arch, wide=shape.d % 4 == 0)
    sizes = (splits, shape.batch, shape.heads, shape.m)
    return Plan(
        (
            Launch(kernel, units * splits, tiles.threads, tiles.shared, SPLIT_ARGS),
            Launch(merge, shape.batch * shape.heads * shape.m, merge.threads, 0, MERGE_ARGS),
        ),
        {"acc_parts": (*sizes, shape.d), "m_parts": sizes, "l_parts": sizes},
    )


def compile_cases() -> Iterator[CompileCase]:
    """Kernels as they are launched, for the compiler's tables and gates."""
    from flashnumba.machine.compiler import CompileCase

    for element, d, m in (("float16", 64, 1), ("float16", 128, 1), ("bfloat16", 128, 1), ("float16", 256, 1),
                          ("float16", 128, 8)):  # fmt: skip
        for chosen_for in (("90a", "120a"), ("80", "86")):
            for launch in plan_split(Shape(element, 1, 64, 8, m, 8192, d, arch=chosen_for[0])).launches:
                if launch.args == MERGE_ARGS and m > 1:
                    continue
                rows = "" if launch.args == MERGE_ARGS else f" {8 * m} rows"
                yield CompileCase(
                    f"{launch.kernel.__name__} {element} d {d}{rows}, for sm_{chosen_for[0]}", launch.kernel,
                    signature(element, launch.args), launch.threads, launch.shared, chosen_for=chosen_for,
                )  # fmt: skip
