"""The states of SLA's linear part: one for each key tile, and their sums for each row tile, as one matrix product.

``states``      one pass over Q, K and V: the mean of each tile's rows, h_j = phi(K_j)^T (V_j proj) and z_j; a block
                for each key tile, and then one for each row tile.
``gather``      H = W h: row i of W is 2^-s where tile j is in the linear part of row tile i, and else 0.

A state is a row of D (D + 1) numbers: h_j row by row, and z_j behind it. So sums over the lists of all row tiles are a
product of a 0/1 matrix ``[T, T]`` with the states ``[T, D (D + 1)]``. Each sum by itself would read T D^2 numbers for
each of T row tiles, which is bound by memory: at 64k tokens 10 GB a head, where dense attention takes 7 ms in all. On
tensor cores it is D N^2 / 16 multiply-adds for N tokens, a 32nd of the two products of dense attention, and each state
is read once for each 128 row tiles. Sums are exact in the 0/1 matrix, float32 inside, and rounded once.

The authors add up the smaller set, or take it from the total; here that saves nothing.

The gradient needs the same product with W transposed: dh = W^T dH.

Source: arXiv 2509.24006, section 5 and appendix (sums of states); the matrix product is our own.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import Kernel, device, kernel
from flashnumba.machine.instructions import cp_async_commit, cp_async_wait, global_address, lane_id, rcp_approx, shared_address
from flashnumba.machine.numba import cuda, float32, int32, int64, uint8, uint32
from flashnumba.stages.sparsity.sla_features import make_features
from flashnumba.stages.sparsity.sla_products import (
    WARPS,
    address_of,
    make_column_sums,
    make_product,
    make_project_rows,
    make_store_state,
    piece_of,
)
from flashnumba.stages.sparsity.sla_reference import BLOCK
from flashnumba.tiles.attention import ALIGNMENT
from flashnumba.tiles.copy_tile import make_copy_tile
from flashnumba.tiles.elements import scalar
from flashnumba.tiles.operands import make_operand
from flashnumba.tiles.tensor import make_multiply
from flashnumba.tiles.writeback import make_writeback

__all__ = ["GATHER_SHARED", "GATHER_THREADS", "GATHER_TILE", "STATES_FAULTS", "make_gather", "make_states",
           "states_shared"]  # fmt: skip

STATES_FAULTS = ("wait", "barrier", "mean", "reuse", "swizzle", "tail", "average")
"""What can be planted: "mean" takes phi while others still add up K, "reuse" lays results where others still read,
"tail" has a phi of rows that are not there, "average" takes the last tile as if it were whole."""
GATHER_TILE = 128
"""Rows and columns of H a block."""
DEPTH, SLOTS, GATHER_WARPS = 32, 3, 8
GATHER_THREADS = 32 * GATHER_WARPS
GATHER_SHARED = ALIGNMENT + max(SLOTS * 2 * DEPTH * 2 * GATHER_TILE, 2 * GATHER_TILE * GATHER_TILE)


def states_shared(d: int, projected: bool) -> int:
    """Bytes of dynamic shared memory of ``states``."""
    return ALIGNMENT + 2 * 2 * BLOCK * d + (2 * d * d if projected else 0)


@cache
def make_states(
    d: int, element: str, feature_map: str, projected: bool = True, arch: str = "80", *, broken: str = ""
) -> Kernel:
    """``(q, k, v, proj, q_means, k_means, states)``: q ``[B, H, M, d]``, k and v ``[B, H, N, d]``, proj ``[d, d]`` with
    packed rows, means float32 ``[B, H, d, tiles]``, states ``[B, H, key tiles, d (d + 1)]``. ``projected`` False: proj
    is not read, and is the identity.

    A block for each key tile of all heads and then, unless the grid ends there, for each row tile; 32 :data:`WARPS`
    threads and :func:`states_shared` bytes. ``broken`` is of :data:`STATES_FAULTS`.
    """
    threads, tile_bytes = 32 * WARPS, 2 * BLOCK * d
    copy = make_copy_tile(BLOCK, d, threads, 16, arch, even=True)
    copy_proj = make_copy_tile(d, d, threads, 16, arch, even=True)
    features = make_features(d, element, feature_map, arch, tail=broken != "tail")
    multiply, _ = make_product(element, d, d, BLOCK, False, False, arch, swizzled=broken != "swizzle")
    project = make_project_rows(d, element, arch)
    regs, clear, store = make_store_state(d, element, arch)
    column_sum, put = make_column_sums(d, element, arch), scalar(element, arch).store
    wait_all = cp_async_wait(0)
    waits, meets, sums_first, frees, whole = (
        broken != "wait", broken != "barrier", broken != "mean", broken != "reuse", broken == "average",
    )  # fmt: skip

    @device
    def begin(to, x, batch, head, tile):
        """Copy a tile; how many rows it has."""
        left = x.shape[2] - tile * BLOCK
        copy(to, address_of(x, batch, head, tile * BLOCK), x.strides[2], x.strides[3], left, x.shape[3])
        return min(left, int64(BLOCK))

    @device
    def meet():
        cp_async_commit()
        if waits:
            wait_all()
        if meets:
            cuda.syncthreads()  # the tiles are there for all

    @device
    def average(means, at, batch, head, tile, left):
        """The mean of a tile's rows."""
        if cuda.threadIdx.x < d:
            there = int64(BLOCK) if whole else left
            mean = column_sum(at, cuda.threadIdx.x) * rcp_approx(float32(there))
            means[batch, head, int64(cuda.threadIdx.x), tile] = mean

    @device
    def make_state(k_tile, v_tile, proj_tile, states, batch, head, tile, left):
        warp = int32(cuda.threadIdx.x >> 5)
        features(k_tile, int32(16) * warp, int32(lane_id()), left)
        if projected:
            project(v_tile, proj_tile, warp)
        cuda.syncthreads()  # phi of all rows is there, and V proj
        if cuda.threadIdx.x < d:
            total = column_sum(k_tile, cuda.threadIdx.x)
            put(states[batch, head], tile, int64(d * d) + int64(cuda.threadIdx.x), total)
        h = cuda.local.array(regs, float32)
        clear(h)
        multiply(h, k_tile, v_tile, warp)
        if frees:
            cuda.syncthreads()  # nobody reads the tiles any more; h takes their place
        store(address_of(states, batch, head, tile), h, k_tile, warp, int32(lane_id()))

    blocks = 2 if projected else 3  # registers for as many a multiprocessor

    @kernel(threads=threads, min_blocks=blocks, arch=arch, name="sparsity.sla states")
    def sla_states(q, k, v, proj, q_means, k_means, states):
        smem = cuda.shared.array(0, uint8)
        first = (shared_address(smem) + uint32(ALIGNMENT - 1)) & uint32(0x100000000 - ALIGNMENT)
        second = first + uint32(tile_bytes)
        third = second + uint32(tile_bytes)
        number, key_blocks = int64(cuda.blockIdx.x), states.shape[2] * k.shape[0] * k.shape[1]
        if number < key_blocks:
            batch, head, tile = piece_of(number, states.shape[2], k.shape[1])
            left = begin(first, k, batch, head, tile)
            begin(second, v, batch, head, tile)
            if projected:
                copy_proj(third, int64(global_address(proj)), proj.strides[0], proj.strides[1], int64(d), int64(d))
            meet()
            average(k_means, first, batch, head, tile, left)
            if sums_first:
                cuda.syncthreads()  # K is added up; phi takes its place
            make_state(first, second, third, states, batch, head, tile, left)
        else:
            batch, head, tile = piece_of(number - key_blocks, q_means.shape[3], q.shape[1])
            left = begin(first, q, batch, head, tile)
            meet()
            average(q_means, first, batch, head, tile, left)

    return sla_states


@cache
def make_gather(element: str, transposed: bool = False, arch: str = "80", *, broken: str = "") -> Kernel:
    """``(w, states, sums)``: sums = W states, head by head; W ``[B, H, T, U]``, states ``[B, H, U, L]``, sums ``[B, H,
    T, L]``, all packed with rows at multiples of 16 bytes; W's rows may be longer than U. Or W^T: then W is ``[B, H, U,
    T]``, with longer rows than T perhaps.

    A block for each :data:`GATHER_TILE` rows and columns of sums, :data:`GATHER_THREADS` threads and
    :data:`GATHER_SHARED` bytes. Blocks that have the same columns follow one another, so that states come from L2.

    Args:
        broken: plants ``"wait"``, ``"barrier"``, ``"slot"`` (copies go where others read), ``"reuse"`` or ``"tail"``.
    """
    side, across = GATHER_TILE, 2
    wm, wn = side // (GATHER_WARPS // across), side // across
    part_a = make_operand("a", not transposed, wm, side, DEPTH)
    part_b = make_operand("b", False, wn, side, DEPTH)
    locate_a, load_a, a_words, a_offsets = part_a.locate, part_a.load, part_a.registers, part_a.offsets
    locate_b, load_b, b_words, b_offsets = part_b.locate, part_b.load, part_b.registers, part_b.offsets
    a_frags, b_frags, steps = wm // 16, wn // 8, DEPTH // 16
    regs, product = 4 * a_frags * b_frags, make_multiply(element, arch)
    lines, length = (DEPTH, side) if transposed else (side, DEPTH)
    copy_a = make_copy_tile(lines, length, GATHER_THREADS, 16, arch)
    copy_b = make_copy_tile(DEPTH, side, GATHER_THREADS, 16, arch)
    write = make_writeback(element, wm, wn, 16, arch)
    a_bytes = 2 * side * DEPTH
    slot_bytes = 2 * a_bytes
    wait_next, wait_all = cp_async_wait(SLOTS - 2), cp_async_wait(0)
    waits, meets, early, frees, whole = (broken != x for x in ("wait", "barrier", "slot", "reuse", "tail"))

    @device
    def copy_step(slot, w, states, w_from, states_from, row0, col0, first, rows, depth):
        """What is multiplied of the depth from ``first`` on; nothing beyond it."""
        if first < depth:
            left = depth - first if whole else int64(DEPTH)
            if transposed:
                source = w_from + first * w.strides[2] + int64(2) * row0
                copy_a(slot, source, w.strides[2], int64(2), left, rows - row0)
            else:
                source = w_from + row0 * w.strides[2] + int64(2) * first
                copy_a(slot, source, w.strides[2], int64(2), rows - row0, left)
            source = states_from + first * states.strides[2] + int64(2) * col0
            copy_b(slot + uint32(a_bytes), source, states.strides[2], int64(2), left, states.shape[3] - col0)
        cp_async_commit()

    name = "sparsity.sla gather back" if transposed else "sparsity.sla gather"

    @kernel(threads=GATHER_THREADS, min_blocks=2, arch=arch, name=name)
    def gather(w, states, sums):
        smem = cuda.shared.array(0, uint8)
        ring = (shared_address(smem) + uint32(ALIGNMENT - 1)) & uint32(0x100000000 - ALIGNMENT)
        warp = uint32(cuda.threadIdx.x >> 5)
        rows, depth = sums.shape[2], states.shape[2]
        row_tiles, col_tiles = (rows + (side - 1)) // side, (sums.shape[3] + (side - 1)) // side
        batch, head, tile = piece_of(cuda.blockIdx.x, row_tiles * col_tiles, sums.shape[1])
        row0, col0 = tile % row_tiles * side, tile // row_tiles * side
        w_from, states_from = address_of(w, batch, head, int64(0)), address_of(states, batch, head, int64(0))
        a = cuda.local.array(a_words, uint32)
        b = cuda.local.array(b_words, uint32)
        from_a = cuda.local.array(a_offsets, uint32)
        from_b = cuda.local.array(b_offsets, uint32)
        c = cuda.local.array(regs, float32)
        for i in range(regs):
            c[i] = float32(0)
        warp_row, warp_col = warp // uint32(across) * uint32(wm), warp % uint32(across) * uint32(wn)
        locate_a(from_a, warp_row)
        locate_b(from_b, warp_col)
        for s in range(SLOTS - 1):
            slot = ring + uint32(s * slot_bytes)
            copy_step(slot, w, states, w_from, states_from, row0, col0, int64(s * DEPTH), rows, depth)
        here, there = uint32(0), uint32((SLOTS - 1) * slot_bytes)
        for first in range(int64(0), depth, int64(DEPTH)):
            if waits:
                wait_next()
            if meets:
                cuda.syncthreads()  # this step's tiles are there for all, and nobody reads those of the one before
            target = ring + (there if early else here)
            ahead = first + (SLOTS - 1) * DEPTH
            copy_step(target, w, states, w_from, states_from, row0, col0, ahead, rows, depth)
            for s in range(steps):
                load_a(a, 0, ring + here, from_a, s)
                load_b(b, 0, ring + here + uint32(a_bytes), from_b, s)
                for i in range(a_frags):
                    for j in range(b_frags):
                        product(c, 4 * (i * b_frags + j), a, 4 * i, b, 2 * j)
            there = here
            here = uint32(0) if here == uint32((SLOTS - 1) * slot_bytes) else here + uint32(slot_bytes)
        wait_all()
        if frees:
            cuda.syncthreads()  # nobody reads the ring any more; it becomes the place of the result
        write(
            ring + warp * uint32(2 * wm * wn), c, sums[batch, head], row0 + int64(warp_row), col0 + int64(warp_col)
        )  # fmt: skip

    return gather
