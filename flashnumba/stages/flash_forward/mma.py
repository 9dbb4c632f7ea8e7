"""Attention on tensor cores, FlashAttention-2 style: mma.sync, cp.async, softmax in registers.

Beside ``simt`` it changes three things. Products run on tensor cores (16 x 8 x 16, float16 or bfloat16 in, float32
out). Each warp owns whole rows, so the softmax is four lanes' business and nothing of S or P leaves registers. K and V
come by asynchronous copies into swizzled shared memory, while the products of the step before run::

    two slots   wait K_j, V_j, barrier | start K_j+1, V_j+1 | S = Q K_j^T | softmax, O += P V_j
    one slot    wait K_j, barrier | start V_j | S = Q K_j^T | wait V_j, barrier | start K_j+1 | softmax, O += P V_j

The softmax works in base 2, O is divided once at the end, and masks are applied only to tiles that touch the diagonal
or the end. A causal block's tiles end at its diagonal, and the longest blocks of a head start first.

What a query may not see has weight 0; 0 times a NaN or infinity in V is NaN all the same where the tile is computed.

Source: Dao, FlashAttention-2, arXiv 2307.08691. The steps are in :mod:`flashnumba.tiles.attention`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

from flashnumba.machine.function import Kernel, device, kernel
from flashnumba.machine.instructions import (
    global_address,
    ld_shared_v4,
    shared_address,
    st_global_b16,
    st_global_v4,
    st_shared_b32,
    syncwarp,
)
from flashnumba.machine.numba import cuda, float32, int32, int64, uint8, uint16, uint32, uint64
from flashnumba.stages.flash_forward import split
from flashnumba.stages.heads import Launch, Plan, Planner, Shape, signature
from flashnumba.tiles.attention import ALIGNMENT, AttentionTiles, factor_of, log_sum, make_steps, share_of
from flashnumba.tiles.copy_tile import copies_ahead, make_copy_tile, make_waiting
from flashnumba.tiles.elements import vectors
from flashnumba.tiles.online import NOTHING
from flashnumba.tiles.swizzle import swizzle

if TYPE_CHECKING:
    from flashnumba.machine.compiler import CompileCase

__all__ = ["FAULTS", "PLANS", "compile_cases", "make_mma", "plan_mma", "tiles_for"]

FAULTS = (
    "barrier", "v_barrier", "wait", "early_copy", "swizzle", "stride", "rescale", "tail", "causal", "sign",
)  # fmt: skip
"""What can be planted."""


@cache
def make_mma(
    tiles: AttentionTiles, element: str, vector: int = 16, arch: str = "80", *, even: bool = True, broken: str = ""
) -> Kernel:
    """The kernel for float16 or bfloat16.

    Args:
        vector: as :attr:`flashnumba.stages.heads.Shape.vector`.
        arch: "75" copies and multiplies with what sm_75 has; "80" with cp.async.
        even: the head dimension is ``tiles.d``.
        broken: plants one of :data:`FAULTS`.

    Raises:
        ValueError: more than two slots.
    """
    if tiles.slots > 2:
        raise ValueError(f"slots is {tiles.slots}; this schedule has one or two")
    d, bm, bn, threads, frags, slots = tiles.d, tiles.bm, tiles.bn, tiles.threads, tiles.frags, tiles.slots
    pitch, place = tiles.pitch, swizzle(d).at
    steps = make_steps(tiles, element, arch, rescaled=broken != "rescale")
    negate_q, load_q, multiply_qk, flatten, mask, softmax_pv = (
        steps.negate_q, steps.load_q, steps.multiply_qk, steps.flatten, steps.mask, steps.softmax_pv
    )  # fmt: skip
    lane_of_q, lane_of_k, lane_of_v = steps.q_lane, steps.k_lane, steps.v_lane
    row_total = steps.total
    pack = vectors(element, 4, arch=arch).pack
    copy_q = make_copy_tile(bm, d, threads, vector, arch, even=even)
    copy_k = make_copy_tile(bn, d, threads, vector, arch, even=even, on=broken != "swizzle")
    copy_v = make_copy_tile(bn, d, threads, vector, arch, even=even)
    d_groups, chunks, slot_bytes = d // 8, d // 8, bn * pitch
    o_regs, s_regs, rows_held, q_regs = frags * d // 2, frags * bn // 2, 2 * frags, max(1, 4 * frags * tiles.q_held)
    wide, swapped, next_row = vector == 16, broken == "stride", int(broken != "causal")
    no_barrier, no_v_barrier, early = broken == "barrier", broken == "v_barrier", broken == "early_copy"
    no_tail, no_sign = broken == "tail", broken == "sign"

    wait, commit = make_waiting(copies_ahead(vector, arch), 0, waits=broken != "wait")

    @device
    def hide(s, j, row, offset, causal, n_rows, lane):
        """Mask what lies beyond the end, or beyond row ``i``'s last visible key ``i + offset``."""
        visible = cuda.local.array(rows_held, int32)
        for r in range(rows_held):
            limit = n_rows
            if no_tail:
                limit = (j + 1) * bn
            if causal != 0:
                limit = min(limit, row + int64(16 * (r // 2) + 8 * (r % 2)) + offset + next_row)
            visible[r] = int32(min(max(limit - j * bn, int64(0)), int64(bn)))
        mask(s, visible, lane)

    @device
    def store(o_from, row_step, column_step, acc, l, q_tile, warp_row, lane, rows, columns):
        """Divide, and write the warp's rows by way of its part of the Q tile, so that stores are 16 bytes wide."""
        syncwarp()  # no lane reads Q any more
        for r in range(rows_held):
            share = share_of(row_total(l[r]))
            row = warp_row + 16 * (r // 2) + 8 * (r % 2) + (lane >> 2)
            for n in range(d_groups):
                at = ((r // 2) * d_groups + n) * 4 + 2 * (r % 2)
                st_shared_b32(
                    place(q_tile, row, n) + uint32(4 * (lane & 3)), pack(acc[at] * share, acc[at + 1] * share)
                )
        syncwarp()  # the rows are there
        raw = cuda.local.array(4, uint32)
        for i in range(frags * 16 * chunks // 32):
            index = uint32(lane) + uint32(32 * i)
            row = int64(warp_row) + int64(index // uint32(chunks))
            column = int64(8) * int64(index % uint32(chunks))
            if row < rows and (even or column < columns):
                ld_shared_v4(raw, 0, place(q_tile, row, index % uint32(chunks)))
                to = o_from + row * row_step + column * column_step
                if wide:
                    st_global_v4(uint64(to), raw, 0)
                else:
                    for e in range(8):
                        if column + e < columns:
                            st_global_b16(uint64(to + e * column_step), uint16(raw[e // 2] >> uint32(16 * (e % 2))))

    @kernel(threads=threads, min_blocks=tiles.min_blocks, arch=arch, name="flash_forward.mma")
    def mma(q, k, v, o, lse, scale, causal):
        smem = cuda.shared.array(0, uint8)
        q_tile = (shared_address(smem) + uint32(ALIGNMENT - 1)) & uint32(0x100000000 - ALIGNMENT)
        k_tile = q_tile + uint32(bm * pitch)
        v_tile = k_tile + uint32(slots * slot_bytes)
        lane = int32(cuda.threadIdx.x & 31)
        warp_row = int32((cuda.threadIdx.x >> 5) * (16 * frags))

        # Which rows of which head: the tiles of a head follow one another, a causal one's longest first.
        m_rows, n_rows, columns = q.shape[2], k.shape[2], q.shape[3]
        blocks = (m_rows + (bm - 1)) // bm
        head = int64(uint32(cuda.blockIdx.x) // uint32(blocks))
        block = int64(uint32(cuda.blockIdx.x) % uint32(blocks))
        if causal != 0:
            block = blocks - 1 - block
        row0, offset = block * bm, n_rows - m_rows
        batch, head = head // q.shape[1], head % q.shape[1]
        head_kv = head // (q.shape[1] // k.shape[1])
        q_from = int64(global_address(q)) + batch * q.strides[0] + head * q.strides[1] + row0 * q.strides[2]
        k_from = int64(global_address(k)) + batch * k.strides[0] + head_kv * k.strides[1]
        v_from = int64(global_address(v)) + batch * v.strides[0] + head_kv * v.strides[1]
        v_row, v_column = v.strides[2], v.strides[3]
        if swapped:
            v_row, v_column = v.strides[3], v.strides[2]

        # Which keys: [0, end) are visible to some row of the block, [0, whole) to all.
        end, whole = n_rows, n_rows
        if causal != 0:
            end = min(n_rows, max(int64(0), row0 + bm + offset))
            whole = min(n_rows, row0 + offset + next_row)
        last = (end + (bn - 1)) // bn

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

        copy_q(q_tile, q_from, q.strides[2], q.strides[3], m_rows - row0, columns)
        copy_k(k_tile, k_from, k.strides[2], k.strides[3], n_rows, columns)
        if slots == 2:
            copy_v(v_tile, v_from, v_row, v_column, n_rows, columns)
        commit()
        wait()
        cuda.syncthreads()  # Q is there for all
        if scale < float32(0) and not no_sign:
            negate_q(q_tile, warp_row, lane)
        load_q(held, q_lane)
        for j in range(int64(0), last):
            here = uint32(0)
            if slots == 2:
                here = uint32(j & 1) * uint32(slot_bytes)
            if early:
                copy_v(v_tile, v_from + j * bn * v_row, v_row, v_column, n_rows - j * bn, columns)
            wait()
            if not no_barrier:
                cuda.syncthreads()  # K_j (and V_j) are there for all, and nobody reads the slots filled next
            if slots == 2:
                if j + 1 < last:
                    other, key = uint32(slot_bytes) - here, (j + 1) * bn
                    copy_k(
                        k_tile + other, k_from + key * k.strides[2], k.strides[2], k.strides[3], n_rows - key, columns
                    )
                    copy_v(v_tile + other, v_from + key * v_row, v_row, v_column, n_rows - key, columns)
            elif not early:
                copy_v(v_tile, v_from + j * bn * v_row, v_row, v_column, n_rows - j * bn, columns)
            commit()
            multiply_qk(s, held, q_lane, k_lane + here)
            if scale == float32(0):
                flatten(s)
            if (j + 1) * bn > whole:
                hide(s, j, row0 + warp_row + (lane >> 2), offset, causal, n_rows, lane)
            if slots == 1:
                wait()
                if not no_v_barrier:
                    cuda.syncthreads()  # V_j is there for all, and nobody reads K_j any more
                if j + 1 < last:
                    key = (j + 1) * bn
                    copy_k(k_tile, k_from + key * k.strides[2], k.strides[2], k.strides[3], n_rows - key, columns)
                commit()
            softmax_pv(s, acc, m, l, factor, v_lane + here)

        for r in range(rows_held):
            row = row0 + warp_row + (16 * (r // 2) + 8 * (r % 2) + (lane >> 2))
            total = row_total(l[r])
            if (lane & 3) == 0 and row < m_rows:
                lse[batch, head, row] = log_sum(m[r], total)
        o_from = int64(global_address(o)) + batch * o.strides[0] + head * o.strides[1] + row0 * o.strides[2]
        store(o_from, o.strides[2], o.strides[3], acc, l, q_tile, warp_row, lane, m_rows - row0, columns)

    return mma


def tiles_for(d: int, arch: str, vector: int = 16) -> AttentionTiles:
    """Tiles for a head dimension: on sm_90 those that were fastest on an H200, elsewhere what leaves registers enough.

    Shared memory a block: 227 KB on sm_90, 163 KB on sm_80, 99 KB on sm_86, 89 and 120, 64 KB on sm_75.
    """
    number = int(arch.rstrip("a"))
    d = -(-d // 32) * 32
    if number < 80:
        return AttentionTiles(d, 64, 32) if d <= 128 else AttentionTiles(d, 32, 16, warps=2)
    if vector < 16:  # addresses of narrow copies take registers
        return AttentionTiles(d, 64, 64 if d <= 128 and vector > 2 else 32)
    if d > 128:
        return AttentionTiles(d, 64, 64, q_held=3 if d > 192 else 2)
    if number == 90:
        if d <= 64:
            return AttentionTiles(d, 128, 128, slots=2, q_held=2 if d == 32 else 0)
        return AttentionTiles(d, 128, 64, slots=2, lazy=True)
    if d <= 64:
        wide = 128 if number < 90 else 64
        return AttentionTiles(d, 128, wide, slots=2 if number == 80 else 1)
    return AttentionTiles(d, 128, 64 if number < 90 else 32, lazy=True)


def plan_mma(shape: Shape) -> Plan:
    """One block for each tile of rows of each head.

    Raises:
        ValueError: float32, or bfloat16 below sm_80.
    """
    check_element(shape)
    tiles = tiles_for(shape.d, shape.arch, shape.vector)
    kernel = make_mma(tiles, shape.element, shape.vector, tier(shape), even=shape.d == tiles.d)
    blocks = -(-shape.m // tiles.bm) * shape.heads * shape.batch
    return Plan((Launch(kernel, blocks, tiles.threads, tiles.shared),))


def tier(shape: Shape) -> str:
    """What kernels are made for: those for sm_75 do without instructions that came with sm_80."""
    return "75" if int(shape.arch.rstrip("a")) < 80 else "80"


def check_element(shape: Shape) -> None:
    """ValueError if tensor cores do not multiply these elements in the way that is needed here."""
    if shape.element == "float32":
        raise ValueError("q is float32; tensor cores would round it to 11 bits: use flash_forward.simt")
    if shape.element == "bfloat16" and tier(shape) == "75":
        raise ValueError(f"q is bfloat16, and sm_{shape.arch} has no product for it: use flash_forward.simt")


PLANS: dict[str, Planner] = {"mma": plan_mma, "split": split.plan_split}


def compile_cases() -> Iterator[CompileCase]:
    """Kernels as they are launched, for the compiler's tables and gates."""
    from flashnumba.machine.compiler import CompileCase

    def case(element: str, d: int, chosen_for: tuple[str, ...], vector: int = 16) -> CompileCase:
        shape = Shape(element, 1, 1, 1, 4096, 4096, d, vector=vector, arch=chosen_for[0])
        launch = plan_mma(shape).launches[0]
        width = "" if vector == 16 else f" by {vector} bytes"
        title = f"flash_forward.mma {element} d {d}{width}, tiles for sm_{chosen_for[0]}"
        return CompileCase(
            title, launch.kernel, signature(element), launch.threads, launch.shared, chosen_for=chosen_for
        )

    for d in (32, 64, 96, 128, 192, 256):
        yield case("float16", d, ("90a",))
    yield case("bfloat16", 128, ("90a",))
    for d, vector in ((100, 8), (33, 2), (255, 2)):
        yield case("float16", d, ("90a", "120a"), vector)
    for d in (64, 128, 256):
        yield case("float16", d, ("80",))
        yield case("float16", d, ("86", "89"))
        yield case("float16", d, ("100a", "120a"))
        yield case("float16", d, ("75",))
    yield from split.compile_cases()
