"""The gradients of SLA's linear part, which come before those of the softmax part and leave theirs in dq, dk and dv.

- ``rows``, for each row tile: g, w, dphi(Q), through phi to dq; and dH_i and dZ_i. Also delta of the softmax part: what
  it has of rowsum(dO o O) once that of the linear part is taken away.
- ``keys``, for each key tile, after ``gather`` has summed dh: dphi(K_j), through phi to dk; and dv.
- ``project``: dproj, in as many parts as there are blocks, and ``add_up`` adds these in order.

Equations are those of :mod:`flashnumba.stages.sparsity.sla_reference` with values V proj, which rows know nothing of.
Each tile is read once; products of 64 x D x D are 2 for a row tile and 2 for a key tile, or 4 and one of ``project``
with a projection, beside D N^2 / 16 multiply-adds of ``gather``.

Source: Zhang et al., SLA, arXiv 2509.24006, algorithm 2.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import Kernel, device, kernel
from flashnumba.machine.instructions import (
    cp_async_commit,
    cp_async_wait,
    global_address,
    lane_id,
    shared_address,
    syncwarp,
)
from flashnumba.machine.numba import cuda, float32, int32, int64, uint8, uint32
from flashnumba.stages.sparsity.sla_features import make_features, make_pull_back
from flashnumba.stages.sparsity.sla_pieces import address_of, make_copy_rows, piece_of
from flashnumba.stages.sparsity.sla_products import (
    WARPS,
    make_column_sums,
    make_product,
    make_project_rows,
    make_row_steps,
    make_store_state,
)
from flashnumba.stages.sparsity.sla_reference import BLOCK
from flashnumba.tiles.elements import scalar
from flashnumba.tiles.sizes import ALIGNMENT

__all__ = ["FAULTS", "keys_shared", "make_add_up", "make_keys", "make_project", "make_rows", "project_shared",
           "rows_shared"]  # fmt: skip

FAULTS = ("barrier", "wait", "rows_barrier", "mean", "columns")
"""What can be planted: "rows_barrier" is the one before all rows of phi and g are read, "mean" leaves D^l out,
"columns" has a phi of columns that are not there."""
THREADS = 32 * WARPS


def rows_shared(d: int) -> int:
    """Bytes of dynamic shared memory of ``rows``."""
    return ALIGNMENT + 2 * d * (2 * BLOCK + d)


def keys_shared(d: int, projected: bool) -> int:
    """Bytes of dynamic shared memory of ``keys``."""
    return ALIGNMENT + 2 * d * (2 * BLOCK + d + (d if projected else 0))


def project_shared(d: int) -> int:
    """Bytes of dynamic shared memory of ``project``."""
    return ALIGNMENT + 2 * 2 * 2 * d * BLOCK


@cache
def make_rows(
    d: int, element: str, feature_map: str, min_blocks: int = 0, arch: str = "80", *, columns: int = 0,
    broken: str = "",
) -> Kernel:  # fmt: skip
    """``(do, o, q, sums, share, dq, dsums, delta)``: as :func:`~.sla_forward.make_attend` has them; dq ``[B, H, M,
    d]``, dsums as sums, delta float32 ``[B, H, M]``. A block for each row tile. ``columns`` as there."""
    row_bytes = 2 * BLOCK * d
    steps = make_row_steps(d, element, make_pull_back(feature_map), arch, columns=columns)
    features = make_features(d, element, feature_map, arch, columns=columns, masked=broken != "columns")
    clear, pack, take, put, store = steps.clear, steps.pack, steps.take, steps.put, steps.store
    dot_tile, dot_rows, pull_back, add_outer = steps.dot_tile, steps.dot_rows, steps.pull_back, steps.add_outer
    copy_rows = make_copy_rows(BLOCK, d, THREADS, arch, columns=columns)
    copy_state = make_copy_rows(d, d, THREADS, arch)
    _, transposed_packed = make_product(element, BLOCK, d, d, True, True, arch)
    outer, _ = make_product(element, d, d, BLOCK, False, False, arch)
    state_regs, clear_state, store_state = make_store_state(d, element, arch)
    column_sum, put_one = make_column_sums(d, element, arch, weighted=True), scalar(element, arch).store
    state_bytes, regs, packed, wait_all = 2 * d * d, d // 2, d // 4, cp_async_wait(0)
    waits, meets, all_rows, with_mean = (broken != x for x in ("wait", "barrier", "rows_barrier", "mean"))

    @kernel(threads=THREADS, min_blocks=min_blocks, arch=arch, name="sparsity.sla rows backward")
    def rows(do, o, q, sums, share, dq, dsums, delta):
        smem = cuda.shared.array(0, uint8)
        weights = cuda.shared.array(BLOCK, float32)
        do_tile = (shared_address(smem) + uint32(ALIGNMENT - 1)) & uint32(0x100000000 - ALIGNMENT)
        phi_tile = do_tile + uint32(row_bytes)
        state = phi_tile + uint32(row_bytes)
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        warp_row = int32(16) * warp
        batch, head, tile = piece_of(cuda.blockIdx.x, sums.shape[2], q.shape[1])
        row0, left, width = tile * BLOCK, q.shape[2] - tile * BLOCK, q.shape[3]
        h_from = address_of(sums, batch, head, tile)
        copy_rows(do_tile, address_of(do, batch, head, row0), do.strides[2], do.strides[3], left, width)
        copy_rows(phi_tile, address_of(q, batch, head, row0), q.strides[2], q.strides[3], left, width)
        copy_state(state, h_from, int64(2 * d), int64(2), int64(d), int64(d))
        cp_async_commit()
        if waits:
            wait_all()
        if meets:
            cuda.syncthreads()  # all tiles are there for all

        c = cuda.local.array(regs, float32)
        p = cuda.local.array(packed, uint32)
        both = cuda.local.array(2, float32)
        mean = cuda.local.array(2, float32)
        w = cuda.local.array(2, float32)
        features(phi_tile, warp_row, int32(lane_id()), left)  # takes the place of Q
        take(c, do_tile, warp_row, lane)
        dot_rows(c, address_of(o, batch, head, row0), o.strides[2], warp_row, lane, left, both)
        for half in range(2):
            row = int64(warp_row) + int64(lane >> 2) + int64(8 * half)
            w[half] = share[batch, head, row0 + row] if row < left else float32(0)
            for n in range(d // 8):
                for i in range(2):
                    c[4 * n + 2 * half + i] *= w[half]
        pack(c, p)
        syncwarp()  # no lane reads the warp's rows of dO any more
        put(c, do_tile, warp_row, lane)  # g takes their place
        clear(c)
        transposed_packed(c, p, state)
        dot_tile(c, phi_tile, warp_row, lane, mean)  # D^l
        for half in range(2):
            row = int64(warp_row) + int64(lane >> 2) + int64(8 * half)
            w[half] *= -mean[half] if with_mean else float32(0)
            if (lane & 3) == 0:
                weights[warp_row + (lane >> 2) + 8 * half] = w[half]
                if row < left:
                    delta[batch, head, row0 + row] = both[half] - mean[half]
        add_outer(c, w, h_from + int64(state_bytes), lane)
        pull_back(c, phi_tile, warp_row, lane)
        if all_rows:
            cuda.syncthreads()  # phi, g and w are there for all, and nobody reads H any more
        to = address_of(dq, batch, head, row0)
        store(to, dq.strides[2], dq.strides[3], c, state, warp_row, lane, left, width)
        dh = cuda.local.array(state_regs, float32)
        clear_state(dh)
        outer(dh, phi_tile, do_tile, warp)
        if cuda.threadIdx.x < d:
            total = column_sum(phi_tile, cuda.threadIdx.x, weights)
            put_one(dsums[batch, head], tile, int64(d * d) + int64(cuda.threadIdx.x), total)
        cuda.syncthreads()  # dq has left; dH takes its place
        store_state(address_of(dsums, batch, head, tile), dh, state, warp, lane)

    return rows


@cache
def make_keys(
    d: int, element: str, feature_map: str, projected: bool = True, arch: str = "80", *, columns: int = 0,
    broken: str = "",
) -> Kernel:  # fmt: skip
    """``(k, v, proj, dstates, dk, dv, dv_l)``: k, v, dk, dv and dv_l ``[B, Hkv, N, d]``, proj ``[d, d]`` with packed
    rows, dstates ``[B, Hkv, key tiles, d (d + 1)]``; dv_l is the gradient of V proj. A block for each key tile.

    Args:
        projected: False: proj is not read nor dv_l written, as proj is the identity.
        columns: as :func:`~.sla_forward.make_attend`; proj has as many rows too.
        broken: of :data:`FAULTS`.
    """
    row_bytes, state_bytes = 2 * BLOCK * d, 2 * d * d
    steps = make_row_steps(d, element, make_pull_back(feature_map), arch, columns=columns)
    features = make_features(d, element, feature_map, arch, columns=columns, masked=broken != "columns")
    project = make_project_rows(d, element, arch)
    clear, pack, pull_back, add_outer, store = steps.clear, steps.pack, steps.pull_back, steps.add_outer, steps.store
    copy_rows = make_copy_rows(BLOCK, d, THREADS, arch, columns=columns)
    copy_state = make_copy_rows(d, d, THREADS, arch)
    copy_proj = make_copy_rows(d, d, THREADS, arch, columns=columns)
    transposed, transposed_packed = make_product(element, BLOCK, d, d, True, True, arch)
    straight, _ = make_product(element, BLOCK, d, d, True, False, arch)
    regs, packed, wait_all = d // 2, d // 4, cp_async_wait(0)
    waits, meets = broken != "wait", broken != "barrier"

    @kernel(threads=THREADS, arch=arch, name="sparsity.sla keys backward")
    def keys(k, v, proj, dstates, dk, dv, dv_l):
        smem = cuda.shared.array(0, uint8)
        v_tile = (shared_address(smem) + uint32(ALIGNMENT - 1)) & uint32(0x100000000 - ALIGNMENT)
        phi_tile = v_tile + uint32(row_bytes)
        state = phi_tile + uint32(row_bytes)
        proj_tile = state + uint32(state_bytes)
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        warp_row = int32(16) * warp
        batch, head, tile = piece_of(cuda.blockIdx.x, dstates.shape[2], k.shape[1])
        row0, left, width = tile * BLOCK, k.shape[2] - tile * BLOCK, k.shape[3]
        dh_from = address_of(dstates, batch, head, tile)
        copy_rows(v_tile, address_of(v, batch, head, row0), v.strides[2], v.strides[3], left, width)
        copy_rows(phi_tile, address_of(k, batch, head, row0), k.strides[2], k.strides[3], left, width)
        copy_state(state, dh_from, int64(2 * d), int64(2), int64(d), int64(d))
        if projected:
            rows = proj.shape[0] if columns else int64(d)
            copy_proj(proj_tile, int64(global_address(proj)), proj.strides[0], proj.strides[1], rows, int64(d))
        cp_async_commit()
        if waits:
            wait_all()
        if meets:
            cuda.syncthreads()  # all tiles are there for all
        c = cuda.local.array(regs, float32)
        p = cuda.local.array(packed, uint32)
        one = cuda.local.array(2, float32)
        one[0] = one[1] = float32(1)
        features(phi_tile, warp_row, int32(lane_id()), left)  # takes the place of K
        if projected:
            project(v_tile, proj_tile, warp)
        syncwarp()  # phi and V proj of the warp's rows are there
        clear(c)
        transposed(c, v_tile, state, warp)
        add_outer(c, one, dh_from + int64(state_bytes), lane)
        pull_back(c, phi_tile, warp_row, lane)
        store(address_of(dk, batch, head, row0), dk.strides[2], dk.strides[3], c, v_tile, warp_row, lane, left, width)
        clear(c)
        straight(c, phi_tile, state, warp)
        if projected:
            pack(c, p)
            to = address_of(dv_l, batch, head, row0)
            store(to, dv_l.strides[2], dv_l.strides[3], c, v_tile, warp_row, lane, left, width)
            clear(c)
            transposed_packed(c, p, proj_tile)
        store(
            address_of(dv, batch, head, row0), dv.strides[2], dv.strides[3], c, phi_tile, warp_row, lane, left, width
        )  # fmt: skip

    return keys


@cache
def make_project(d: int, element: str, arch: str = "80", *, columns: int = 0, broken: str = "") -> Kernel:
    """``(v, dv_l, parts)``: parts float32 ``[blocks, d, d]``: the sum of V^T dV^l over every ``blocks``-th key tile of
    all heads; dv_l is the gradient of V proj. ``columns`` as :func:`~.sla_forward.make_attend`."""
    row_bytes = 2 * BLOCK * d
    copy_rows = make_copy_rows(BLOCK, d, THREADS, arch, columns=columns)
    outer, _ = make_product(element, d, d, BLOCK, False, False, arch)
    regs, clear, _ = make_store_state(d, element, arch)
    frags, groups, wait_all = d // (16 * WARPS), d // 8, cp_async_wait(0)
    waits, meets = broken != "wait", broken != "barrier"

    @device
    def copy_step(at, v, dv_l, number, tiles):
        """Key tile ``number`` of all heads."""
        batch, head, tile = piece_of(number, tiles, v.shape[1])
        row0, left, width = tile * BLOCK, v.shape[2] - tile * BLOCK, v.shape[3]
        copy_rows(at, address_of(v, batch, head, row0), v.strides[2], v.strides[3], left, width)
        copy_rows(
            at + uint32(row_bytes), address_of(dv_l, batch, head, row0), dv_l.strides[2], dv_l.strides[3], left, width
        )  # fmt: skip

    @device
    def put_group(mine, first_row, first_column, c, n):
        """Eight columns of the warp's rows."""
        for f in range(frags):
            for e in range(4):
                row, column = first_row + int64(16 * f + 8 * (e // 2)), first_column + int64(8 * n + e % 2)
                mine[row, column] = c[(f * groups + n) * 4 + e]

    @kernel(threads=THREADS, arch=arch, name="sparsity.sla project")
    def project(v, dv_l, parts):
        smem = cuda.shared.array(0, uint8)
        base = (shared_address(smem) + uint32(ALIGNMENT - 1)) & uint32(0x100000000 - ALIGNMENT)
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        tiles = (v.shape[2] + (BLOCK - 1)) // BLOCK
        every, all_tiles = int64(cuda.gridDim.x), tiles * v.shape[0] * v.shape[1]
        c = cuda.local.array(regs, float32)
        clear(c)
        here = uint32(0)
        if int64(cuda.blockIdx.x) < all_tiles:
            copy_step(base, v, dv_l, int64(cuda.blockIdx.x), tiles)
        cp_async_commit()
        for number in range(int64(cuda.blockIdx.x), all_tiles, every):
            if waits:
                wait_all()
            if meets:
                cuda.syncthreads()  # this step's tiles are there for all, and nobody reads those filled next
            there = uint32(2 * row_bytes) - here
            if number + every < all_tiles:
                copy_step(base + there, v, dv_l, number + every, tiles)
            cp_async_commit()
            outer(c, base + here, base + here + uint32(row_bytes), warp)
            here = there
        mine = parts[int64(cuda.blockIdx.x)]
        first_row, first_column = int64(warp * int32(16 * frags) + (lane >> 2)), int64(int32(2) * (lane & 3))
        # In two loops, as one would be too long for the compiler to unroll.
        for n in range(groups // 2):
            put_group(mine, first_row, first_column, c, n)
        for n in range(groups // 2, groups):
            put_group(mine, first_row, first_column, c, n)

    return project


@kernel(threads=THREADS, arch="75", name="sparsity.sla add up")
def add_up(parts, dproj):
    """``dproj[r, c]`` float32: the sum of parts ``[blocks, d, d]``, the first one first; dproj may have fewer rows and
    columns."""
    number = int64(cuda.blockIdx.x) * THREADS + int64(cuda.threadIdx.x)
    row, column = number // dproj.shape[1], number % dproj.shape[1]
    if row < dproj.shape[0]:
        total = float32(0)
        for i in range(parts.shape[0]):
            total += parts[i, row, column]
        dproj[row, column] = total


def make_add_up() -> Kernel:
    """``(parts, dproj)``: a thread for each number."""
    return add_up
