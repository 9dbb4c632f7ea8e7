"""The states of SLA's linear part, one for each key tile: h_j = phi(K_j)^T (V_j proj) and z_j.

One pass over Q, K and V leaves them and the mean of each tile's rows, which the map is made of. V is projected and not
O^l: a key tile's values are at hand here, and attention then has no product more at its end.

A state is a row of D (D + 1) numbers: h_j row by row, and z_j behind it.

Blocks are as many as a GPU holds, keep proj, and walk over key tiles and then over pairs of row tiles, while what comes
next is copied to the other half of a block's room. At D = 128 and 16 heads of 16k tokens an H200 takes 0.148 ms, and
0.159 with a block for each tile, where the bytes alone would take 0.08: registers admit two blocks a multiprocessor,
and each goes through its steps one after the other.

Source: arXiv 2509.24006, section 5 and appendix (sums of states).
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import Kernel, device, kernel
from flashnumba.machine.instructions import (
    cp_async_commit,
    cp_async_wait,
    global_address,
    lane_id,
    rcp_approx,
    shared_address,
)
from flashnumba.machine.numba import cuda, float32, int32, int64, uint8, uint32
from flashnumba.stages.sparsity.sla_features import make_features
from flashnumba.stages.sparsity.sla_pieces import address_of, make_copy_rows, piece_of
from flashnumba.stages.sparsity.sla_products import (
    WARPS,
    make_column_sums,
    make_product,
    make_project_rows,
    make_store_state,
)
from flashnumba.stages.sparsity.sla_reference import BLOCK
from flashnumba.tiles.elements import scalar
from flashnumba.tiles.sizes import ALIGNMENT

__all__ = ["STATES_FAULTS", "make_states", "states_blocks", "states_items", "states_shared"]

STATES_FAULTS = ("wait", "barrier", "mean", "reuse", "swizzle", "tail", "average", "free", "columns")
"""What can be planted: "mean" takes phi while others still add up K, "reuse" lays results where others still read,
"tail" has a phi of rows that are not there and "columns" one of columns, "average" takes the last tile as if it were
whole, "free" copies a tile to where others still read."""


def states_blocks(d: int, projected: bool, columns: int = 0) -> int:
    """Blocks a multiprocessor, by registers."""
    if d <= 64:
        return 3 if columns else 4
    return 2 if projected else 3


def states_items(row_tiles: int, key_tiles: int, pooled: bool) -> int:
    """What blocks walk over: key tiles of all heads, and pairs of row tiles of all heads."""
    return key_tiles + (-(-row_tiles // 2) if pooled else 0)


def states_shared(d: int, projected: bool) -> int:
    """Bytes of dynamic shared memory of ``states``."""
    return ALIGNMENT + 2 * 2 * 2 * BLOCK * d + (2 * d * d if projected else 0)


@cache
def make_states(
    d: int, element: str, feature_map: str, projected: bool = True, pooled: bool = True, arch: str = "80", *,
    columns: int = 0, broken: str = "",
) -> Kernel:  # fmt: skip
    """``(q, k, v, proj, q_means, k_means, states)``: q ``[B, H, M, d]``, k and v ``[B, Hkv, N, d]``, proj ``[d, d]``
    with packed rows, means float32 ``[B, H, d, row tiles]`` and ``[B, Hkv, d, key tiles]``, states ``[B, Hkv, key
    tiles, d (d + 1)]``.

    Any number of blocks, 32 :data:`WARPS` threads and :func:`states_shared` bytes.

    Args:
        projected: False: proj is not read, and is the identity.
        pooled: False: means of q are left out.
        columns: as :func:`~.sla_forward.make_attend`; proj has as many rows too.
        broken: of :data:`STATES_FAULTS`.
    """
    threads, tile_bytes, blocks = 32 * WARPS, 2 * BLOCK * d, states_blocks(d, projected, columns)
    copy = make_copy_rows(BLOCK, d, threads, arch, columns=columns)
    copy_proj = make_copy_rows(d, d, threads, arch, columns=columns)
    features = make_features(
        d, element, feature_map, arch, columns=columns, tail=broken != "tail", masked=broken != "columns"
    )  # fmt: skip
    multiply, _ = make_product(element, d, d, BLOCK, False, False, arch, swizzled=broken != "swizzle")
    project = make_project_rows(d, element, arch)
    regs, clear, store = make_store_state(d, element, arch)
    column_sum, put = make_column_sums(d, element, arch), scalar(element, arch).store
    wait_for_this = cp_async_wait(1)
    waits, meets, sums_first, frees, whole, free = (
        broken != "wait", broken != "barrier", broken != "mean", broken != "reuse", broken == "average",
        broken != "free",
    )  # fmt: skip

    @device
    def begin(to, x, number, tiles):
        """Copy a tile, one of all heads'."""
        batch, head, tile = piece_of(number, tiles, x.shape[1])
        left = x.shape[2] - tile * BLOCK
        copy(to, address_of(x, batch, head, tile * BLOCK), x.strides[2], x.strides[3], left, x.shape[3])

    @device
    def begin_item(to, q, k, v, number, all_keys, row_tiles, key_tiles):
        """Copy what item ``number`` is made of, if there is one."""
        if number < all_keys:
            begin(to, k, number, key_tiles)
            begin(to + uint32(tile_bytes), v, number, key_tiles)
        elif pooled:
            first = int64(2) * (number - all_keys)
            for i in range(2):
                if first + i < row_tiles * q.shape[0] * q.shape[1]:
                    begin(to + uint32(i * tile_bytes), q, first + i, row_tiles)
        cp_async_commit()

    @device
    def average(means, at, x, number, tiles):
        """The mean of a tile's rows."""
        batch, head, tile = piece_of(number, tiles, x.shape[1])
        if cuda.threadIdx.x < d:
            there = int64(BLOCK) if whole else min(int64(BLOCK), x.shape[2] - tile * BLOCK)
            mean = column_sum(at, cuda.threadIdx.x) * rcp_approx(float32(there))
            means[batch, head, int64(cuda.threadIdx.x), tile] = mean

    @device
    def make_state(k_tile, v_tile, proj_tile, k, states, number, tiles):
        batch, head, tile = piece_of(number, tiles, k.shape[1])
        warp, left = int32(cuda.threadIdx.x >> 5), k.shape[2] - tile * BLOCK
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

    @kernel(threads=threads, min_blocks=blocks, arch=arch, name="sparsity.sla states")
    def sla_states(q, k, v, proj, q_means, k_means, states):
        smem = cuda.shared.array(0, uint8)
        room = (shared_address(smem) + uint32(ALIGNMENT - 1)) & uint32(0x100000000 - ALIGNMENT)
        proj_tile = room + uint32(4 * tile_bytes)
        row_tiles, key_tiles = q_means.shape[3], states.shape[2]
        all_keys = key_tiles * k.shape[0] * k.shape[1]
        all_rows = row_tiles * q.shape[0] * q.shape[1]
        items = all_keys + (all_rows + 1) // 2 if pooled else all_keys
        if projected:
            rows = proj.shape[0] if columns else int64(d)
            copy_proj(proj_tile, int64(global_address(proj)), proj.strides[0], proj.strides[1], rows, int64(d))
        begin_item(room, q, k, v, int64(cuda.blockIdx.x), all_keys, row_tiles, key_tiles)
        here = uint32(0)
        for number in range(int64(cuda.blockIdx.x), items, int64(cuda.gridDim.x)):
            first, there = room + here, uint32(2 * tile_bytes) - here
            second = first + uint32(tile_bytes)
            begin_item(room + there, q, k, v, number + int64(cuda.gridDim.x), all_keys, row_tiles, key_tiles)
            if waits:
                wait_for_this()
            if meets:
                cuda.syncthreads()  # this item's tiles are there for all
            if number < all_keys:
                average(k_means, first, k, number, key_tiles)
                if sums_first:
                    cuda.syncthreads()  # K is added up; phi takes its place
                make_state(first, second, proj_tile, k, states, number, key_tiles)
            elif pooled:
                row = int64(2) * (number - all_keys)
                average(q_means, first, q, row, row_tiles)
                if row + 1 < all_rows:
                    average(q_means, second, q, row + 1, row_tiles)
            if free:
                cuda.syncthreads()  # nobody reads this item's tiles any more; the one after the next takes their place
            here = there

    return sla_states
