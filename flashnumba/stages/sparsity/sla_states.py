"""The states of SLA's linear part, one for each key tile: h_j = phi(K_j)^T (V_j proj) and z_j.

One pass over Q, K and V leaves them and the mean of each tile's rows, which the map is made of; a block for each key
tile, and then one for each row tile. V is projected and not O^l: a key tile's values are at hand here, and attention
then has no product more at its end.

A state is a row of D (D + 1) numbers: h_j row by row, and z_j behind it.

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

__all__ = ["STATES_FAULTS", "make_states", "states_shared"]

STATES_FAULTS = ("wait", "barrier", "mean", "reuse", "swizzle", "tail", "average")
"""What can be planted: "mean" takes phi while others still add up K, "reuse" lays results where others still read,
"tail" has a phi of rows that are not there, "average" takes the last tile as if it were whole."""


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
