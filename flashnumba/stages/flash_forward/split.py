"""Split-KV attention, flash decoding: when queries are few, the keys are shared out over blocks and merged at the end.

With one query a head the kernel ``mma`` would start one block a head, each walking over all keys alone, while most of
the GPU idles. Here a head's keys are cut into ``splits`` parts; each block attends to its own and leaves its state
(m, l, acc) in float32, and a second kernel merges them, with m in base-2 units::

    M = max_s m_s        O = sum_s 2^(m_s - M) acc_s / sum_s 2^(m_s - M) l_s
    LSE = (M + log2 sum_s 2^(m_s - M) l_s) ln 2

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

from flashnumba.machine.function import Kernel, device, kernel
from flashnumba.machine.instructions import (
    cp_async_commit,
    cp_async_wait,
    ex2_approx,
    f32_to_bf16,
    global_address,
    ld_global_f32,
    shared_address,
    st_global_f32,
)
from flashnumba.machine.numba import cuda, float16, float32, int32, int64, uint8, uint32, uint64
from flashnumba.stages.heads import Launch, Plan, Shape, signature
from flashnumba.tiles.attention import ALIGNMENT, AttentionTiles, factor_of, log_sum, make_steps, share_of
from flashnumba.tiles.copy_tile import copies_ahead, make_copy_tile
from flashnumba.tiles.online import NOTHING
from flashnumba.tiles.reduce import lanes_max, lanes_sum

if TYPE_CHECKING:
    from flashnumba.machine.compiler import CompileCase

__all__ = [
    "FAULTS",
    "MERGE_FAULTS",
    "compile_cases",
    "make_merge",
    "make_split",
    "plan_split",
    "splits_for",
    "tiles_for",
]

SPLIT_ARGS = ("q", "k", "v", "acc_parts", "m_parts", "l_parts", "scale", "causal")
MERGE_ARGS = ("acc_parts", "m_parts", "l_parts", "o", "lse")
MERGE_WARPS, AT_ONCE = 4, 8
MOST_SPLITS = 256
FAULTS = ("barrier", "v_barrier", "wait", "tail", "causal", "head", "range")
MERGE_FAULTS = ("barrier", "weight")
"""What can be planted."""


@cache
def make_split(
    tiles: AttentionTiles, element: str, vector: int = 16, arch: str = "80", *, even: bool = True, broken: str = ""
) -> Kernel:
    """The kernel that attends to one part of the keys; arguments as :func:`.mma.make_mma`.

    Args:
        broken: plants one of :data:`FAULTS`.
    """
    d, bm, bn, threads, frags = tiles.d, tiles.bm, tiles.bn, tiles.threads, tiles.frags
    pitch = tiles.pitch
    steps = make_steps(tiles, element, arch)
    negate_q, load_q, multiply_qk, mask, softmax_pv = (
        steps.negate_q, steps.load_q, steps.multiply_qk, steps.mask, steps.softmax_pv
    )  # fmt: skip
    lane_of_q, lane_of_k, lane_of_v = steps.q_lane, steps.k_lane, steps.v_lane
    row_total = steps.total
    copy_q = make_copy_tile(bm, d, threads, vector, arch, even=even, packed=True)
    copy_kv = make_copy_tile(bn, d, threads, vector, arch, even=even)
    d_groups = d // 8
    o_regs, s_regs, rows_held, q_regs = frags * d // 2, frags * bn // 2, 2 * frags, max(1, 4 * frags * tiles.q_held)
    asynchronous, wait_for_all = copies_ahead(vector, arch), cp_async_wait(0)
    no_barrier, no_v_barrier, no_wait, no_tail = (broken == f for f in ("barrier", "v_barrier", "wait", "tail"))
    next_row, head_shift, shift = int(broken != "causal"), int(broken == "head"), int(broken == "range")

    @device
    def wait():
        if asynchronous and not no_wait:
            wait_for_all()

    @device
    def commit():
        if asynchronous:
            cp_async_commit()

    @device
    def hide(s, j, row, group, offset, causal, n_rows, lane):
        visible = cuda.local.array(rows_held, int32)
        for r in range(rows_held):
            limit = n_rows
            if no_tail:
                limit = (j + 1) * bn
            if causal != 0:
                limit = min(limit, (row + int64(16 * (r // 2) + 8 * (r % 2))) // group + offset + next_row)
            visible[r] = int32(min(max(limit - j * bn, int64(0)), int64(bn)))
        mask(s, visible, lane)

    @kernel(threads=threads, min_blocks=tiles.min_blocks, arch=arch, name="flash_forward.split")
    def split(q, k, v, acc_parts, m_parts, l_parts, scale, causal):
        smem = cuda.shared.array(0, uint8)
        q_tile = (shared_address(smem) + uint32(ALIGNMENT - 1)) & uint32(0x100000000 - ALIGNMENT)
        k_tile = q_tile + uint32(bm * pitch)
        v_tile = k_tile + uint32(bn * pitch)
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
        for i in range(o_regs):
            acc[i] = float32(0)
        for r in range(rows_held):
            m[r] = float32(NOTHING)
            l[r] = float32(0)

        key = first * bn
        copy_q(q_tile, q_from, q.strides[2], q.strides[3], rows, columns, row0, group, q.strides[1])
        copy_kv(k_tile, k_from + key * k.strides[2], k.strides[2], k.strides[3], n_rows - key, columns)
        commit()
        wait()
        cuda.syncthreads()  # Q is there for all
        if scale < float32(0):
            negate_q(q_tile, warp_row, lane)
        load_q(held, q_lane)
        for j in range(first, last):
            wait()
            if not no_barrier:
                cuda.syncthreads()  # K_j is there for all, and nobody reads V_j-1 any more
            key = j * bn
            copy_kv(v_tile, v_from + key * v.strides[2], v.strides[2], v.strides[3], n_rows - key, columns)
            commit()
            multiply_qk(s, held, q_lane, k_lane)
            if (j + 1) * bn > whole:
                hide(s, j, row0 + warp_row + (lane >> 2), group, offset, causal, n_rows, lane)
            wait()
            if not no_v_barrier:
                cuda.syncthreads()  # V_j is there for all, and nobody reads K_j any more
            if j + 1 < last:
                key = (j + 1) * bn
                copy_kv(k_tile, k_from + key * k.strides[2], k.strides[2], k.strides[3], n_rows - key, columns)
            commit()
            softmax_pv(s, acc, m, l, factor, v_lane)

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


@cache
def make_merge(d: int, element: str, arch: str = "80", *, broken: str = "") -> Kernel:
    """The kernel that merges parts: a block a row, each warp every fourth part, then the warps' sums.

    Args:
        d: columns there are at most, a multiple of 32.
        broken: plants one of :data:`MERGE_FAULTS`.
    """
    over_max, over_sum = lanes_max(), lanes_sum()
    threads, per_lane, warps, held = 32 * MERGE_WARPS, d // 32, MERGE_WARPS, AT_ONCE * d // 32
    partial, columns_each = (MERGE_WARPS, d), -(-d // (32 * MERGE_WARPS))
    no_barrier, unweighted = broken == "barrier", broken == "weight"
    is_half = element == "float16"

    @device
    def weight(m, top):
        """2^(m - top); nothing for an empty part."""
        if unweighted:
            return float32(1)
        return ex2_approx(m - (float32(0) if top == float32(NOTHING) else top))

    @device
    def top_of(m_parts, batch, head, row, lane):
        """The maximum over all parts, by each warp for itself."""
        top = float32(NOTHING)
        for s in range(lane, m_parts.shape[0], 32):
            top = max(top, m_parts[s, batch, head, row])
        return over_max(top)

    @device
    def total_of(m_parts, l_parts, top, batch, head, row, lane):
        """The sum of exponentials over all parts in units of 2^top, by each warp for itself."""
        total = float32(0)
        for s in range(lane, m_parts.shape[0], 32):
            total += weight(m_parts[s, batch, head, row], top) * l_parts[s, batch, head, row]
        return over_sum(total)

    @kernel(threads=threads, arch=arch, name="flash_forward.merge")
    def merge(acc_parts, m_parts, l_parts, o, lse):
        sums = cuda.shared.array(partial, float32)
        lane = int64(cuda.threadIdx.x & 31)
        warp = int64(cuda.threadIdx.x >> 5)
        splits, heads, rows, columns = m_parts.shape[0], m_parts.shape[2], m_parts.shape[3], acc_parts.shape[4]
        index = int64(cuda.blockIdx.x)
        row, head, batch = index % rows, index // rows % heads, index // rows // heads
        apart = m_parts.shape[1] * heads * rows * columns  # elements from a part to the next
        top = top_of(m_parts, batch, head, row, lane)
        from_row = global_address(acc_parts) + uint64(4 * index * columns)
        acc = cuda.local.array(per_lane, float32)
        loaded = cuda.local.array(held, float32)
        weights = cuda.local.array(AT_ONCE, float32)
        for i in range(per_lane):
            acc[i] = float32(0)
        for s0 in range(warp, splits, warps * AT_ONCE):
            # Several parts are loaded before the first is used: their latencies overlap.
            for a in range(AT_ONCE):
                s = s0 + a * warps
                weights[a] = float32(0)
                if s < splits:
                    weights[a] = weight(m_parts[s, batch, head, row], top)
                for i in range(per_lane):
                    loaded[a * per_lane + i] = float32(0)
                    if s < splits and lane + 32 * i < columns:
                        loaded[a * per_lane + i] = ld_global_f32(from_row + uint64(4 * (s * apart + lane + 32 * i)))
            for a in range(AT_ONCE):
                for i in range(per_lane):
                    acc[i] += weights[a] * loaded[a * per_lane + i]
        for i in range(per_lane):
            sums[warp, lane + 32 * i] = acc[i]
        total = total_of(m_parts, l_parts, top, batch, head, row, lane)
        share = share_of(total)
        if not no_barrier:
            cuda.syncthreads()  # every warp's sum is there
        for i in range(columns_each):
            column = int64(cuda.threadIdx.x) + i * threads
            if column < columns:
                x = float32(0)
                for w in range(warps):
                    x += sums[w, column]
                if is_half:
                    o[batch, head, row, column] = float16(x * share)
                else:
                    o[batch, head, row, column] = f32_to_bf16(x * share)
        if cuda.threadIdx.x == 0:
            lse[batch, head, row] = log_sum(top, total)

    return merge


def tiles_for(d: int, rows: int) -> AttentionTiles:
    """One warp for up to 16 rows, four for more. Shared memory, 16 KB a tile, lets several blocks live side by side."""
    d = -(-d // 32) * 32
    if rows <= 16:
        return AttentionTiles(d, 16, 64 if d <= 128 else 32, warps=1)
    return AttentionTiles(d, 64, 64 if d <= 128 else 32)


def splits_for(units: int, tiles: int, resident: int) -> int:
    """Parts to cut ``tiles`` steps of keys into, where ``units`` blocks a part are wanted and ``resident`` run at once:
    the fewest that fill the last wave nearly as well as any other number does."""
    most = max(1, min(tiles, MOST_SPLITS))

    def filled(splits: int) -> float:
        waves = units * splits / resident
        return waves / -(-units * splits // resident)

    best = max(filled(s) for s in range(1, most + 1))
    return next(s for s in range(1, most + 1) if filled(s) >= 0.85 * best)


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
    each = max(1, min(100_000 // (tiles.shared + 1024), 2048 // (8 * tiles.threads)))
    splits = splits_for(units, -(-shape.n // tiles.bn), shape.multiprocessors * each)
    kernel = make_split(tiles, shape.element, shape.vector, even=shape.d == tiles.d)
    merge = make_merge(tiles.d, shape.element)
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
                          ("float16", 128, 8), ("float16", 256, 8)):  # fmt: skip
        for launch in plan_split(Shape(element, 1, 64, 8, m, 8192, d)).launches:
            if launch.args == MERGE_ARGS and m > 1:
                continue
            rows = "" if launch.args == MERGE_ARGS else f" {8 * m} rows"
            title = f"{launch.kernel.__name__} {element} d {d}{rows}"
            yield CompileCase(title, launch.kernel, signature(element, launch.args), launch.threads, launch.shared)
