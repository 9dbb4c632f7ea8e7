"""Split-KV attention that does not even load what is not worth it: several tiles' scores first, then their V.

In decoding memory decides, so a tile saves something only if its V stays where it is. It must then be known before V is
asked for, and something else has to be on its way meanwhile. So a block takes several tiles at once::

    wait K_g | S_g = Q K_g^T, all tiles of the step | votes, barrier
    start V of those that are needed, start K_g+1 | wait V | exponentials, O += P V of those | barrier

While a block waits for V, the next keys are under way behind it, and other blocks of the multiprocessor are at other
places of this line. K and V have one slot each.

A tile is measured by the greatest score that the row has up to the end of the step, not up to the tile: all scores of
the step are there, and whoever is greatest is always needed. So what is left out is below the threshold as before, and
the order of the tiles of a step does not matter. Rows of one block are query heads that share K: all have to agree.

What is left, and how parts are merged, is as in :mod:`flashnumba.tiles.split`; with nothing left out so is every bit.

Source: BLASST, arXiv 2512.12087, on decoding.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import Kernel, device, kernel
from flashnumba.machine.instructions import global_address, shared_address, st_global_f32, vote_any
from flashnumba.machine.numba import cuda, float32, int32, int64, uint8, uint32, uint64
from flashnumba.tiles.attention import factor_of, make_steps
from flashnumba.tiles.copy_tile import copies_ahead, make_copy_tile, make_waiting
from flashnumba.tiles.dependency import make_trigger
from flashnumba.tiles.reduce import lanes_max
from flashnumba.tiles.rows import address_of, make_hide
from flashnumba.tiles.sizes import ALIGNMENT, AttentionTiles
from flashnumba.tiles.skip import make_shut_out
from flashnumba.tiles.sparse import COMPUTED, SKIPPED
from flashnumba.tiles.split import SPLIT_ARGS

__all__ = ["FAULTS", "SPARSE_SPLIT_ARGS", "TILE", "make_sparse_split"]

TILE = 32
"""Keys that are left out together; ``tiles.bn``, a step, is several of them."""
SPARSE_SPLIT_ARGS = (*SPLIT_ARGS, "limit")
FAULTS = ("barrier", "vote_barrier", "v_barrier", "wait", "v_wait", "alone", "padding", "unscaled", "tail", "causal")
"""What can be planted."""


@cache
def make_sparse_split(
    tiles: AttentionTiles, element: str, vector: int = 16, arch: str = "80", *, even: bool = True, noted: bool = False,
    name: str = "", broken: str = "",
) -> Kernel:  # fmt: skip
    """The kernel that attends to one part of the keys; its arguments are :data:`SPARSE_SPLIT_ARGS`.

    Args:
        tiles: with one slot and one fragment a warp, and ``bn`` a multiple of :data:`TILE`.
        element, vector, arch, even: as :func:`flashnumba.tiles.split.make_split`; 16-bit elements.
        noted: an argument ``tile_map`` follows, uint8 ``[B, Hkv, row blocks, tiles]``, which is filled.
        broken: plants one of :data:`FAULTS`.

    Raises:
        ValueError: tiles of another kind.
    """
    if tiles.slots != 1 or tiles.frags != 1 or tiles.bn % TILE or tiles.nbytes != 2:
        raise ValueError(
            f"tiles are {tiles}; they must have one slot, one fragment a warp and a multiple of {TILE} keys"
        )
    d, bm, bn, threads, warps = tiles.d, tiles.bm, tiles.bn, tiles.threads, tiles.warps
    pitch, slot_bytes, parts_n, tile_bytes = tiles.pitch, tiles.slot, bn // TILE, TILE * tiles.kv_pitch
    steps = make_steps(tiles, element, arch)
    clear, negate_q, load_q, multiply_qk, flatten = (
        steps.clear, steps.negate_q, steps.load_q, steps.multiply_qk, steps.flatten
    )  # fmt: skip
    raise_to, exponentials, multiply_pv, row_total = (
        steps.raise_to, steps.exponentials, steps.multiply_pv, steps.total
    )  # fmt: skip
    lane_of_q, lane_of_k, lane_of_v = steps.q_lane, steps.k_lane, steps.v_lane
    copy_q = make_copy_tile(bm, d, threads, vector, arch, even=even, packed=True)
    copy_k = make_copy_tile(bn, d, threads, vector, arch, even=even)
    copy_v = make_copy_tile(TILE, d, threads, vector, arch, even=even)
    hide = make_hide(tiles, steps.mask, tail=broken != "tail", next_row=int(broken != "causal"))
    ahead, quad_max = copies_ahead(vector, arch), lanes_max(4)
    wait_all, commit = make_waiting(ahead, 0, waits=broken != "wait")
    wait_v, _ = make_waiting(ahead, 1, waits=broken != "v_wait")
    shut_out = make_shut_out(tiles, broken)
    trigger, d_groups, next_row = make_trigger(arch), d // 8, int(broken != "causal")
    o_regs, s_regs, q_regs, p_regs, k_each = d // 2, bn // 2, max(1, 4 * tiles.q_held), bn // 4, TILE // 16
    groups_each, tops_regs = TILE // 8, 2 * parts_n
    no_barrier, no_vote, no_v = broken == "barrier", broken == "vote_barrier", broken == "v_barrier"
    alone, unscaled = broken == "alone", broken == "unscaled"

    @device
    def vote(s, m, tops, factor, limit):
        """The tiles that some row of the warp needs, a bit each; ``tops``: the lane's maximum of each row."""
        of_tile = cuda.local.array(tops_regs, float32)
        bits = uint32(0)
        for half in range(2):
            tops[half] = s[2 * half]
            for t in range(parts_n):
                top = s[t * groups_each * 4 + 2 * half]
                for n in range(groups_each):
                    at = (t * groups_each + n) * 4 + 2 * half
                    top = max(top, max(s[at], s[at + 1]))
                of_tile[2 * t + half] = top
                tops[half] = max(tops[half], top)
        unit = float32(1) if unscaled else factor
        for t in range(parts_n):
            needed = False
            for half in range(2):
                high = max(m[half], quad_max(tops[half]))
                needed = needed or not ((of_tile[2 * t + half] - high) * unit < limit)
            if vote_any(needed):
                bits |= uint32(1 << t)
        return bits

    @device
    def attend(q, k, v, acc_parts, m_parts, l_parts, scale, causal, limit, tile_map):
        trigger()
        smem = cuda.shared.array(0, uint8)
        flags = cuda.shared.array(warps, uint32)
        q_tile = (shared_address(smem) + uint32(ALIGNMENT - 1)) & uint32(0x100000000 - ALIGNMENT)
        k_tile = q_tile + uint32(bm * pitch)
        v_tile = k_tile + uint32(slot_bytes)
        lane = int32(cuda.threadIdx.x & 31)
        warp = int32(cuda.threadIdx.x >> 5)
        warp_row = int32(16) * warp

        # Which part of the keys, for which rows of which head of keys and values.
        splits, group = m_parts.shape[0], q.shape[1] // k.shape[1]
        rows, n_rows, columns, offset = q.shape[2] * group, k.shape[2], q.shape[3], k.shape[2] - q.shape[2]
        blocks = (rows + (bm - 1)) // bm
        part = int64(uint32(cuda.blockIdx.x) % uint32(splits))
        rest = int64(uint32(cuda.blockIdx.x) // uint32(splits))
        block = rest % blocks
        row0 = block * bm
        head_kv = (rest // blocks) % k.shape[1]
        batch = rest // blocks // k.shape[1]
        q_from = address_of(q, batch, head_kv * group, int64(0))
        k_from, v_from = address_of(k, batch, head_kv, int64(0)), address_of(v, batch, head_kv, int64(0))
        end, whole = n_rows, n_rows
        if causal != 0:
            end = min(n_rows, max(int64(0), (min(row0 + bm, rows) - 1) // group + 1 + offset))
            whole = min(n_rows, row0 // group + offset + next_row)
        tiles_n = (end + (bn - 1)) // bn
        first, last = tiles_n * part // splits, tiles_n * (part + 1) // splits

        factor = factor_of(scale)
        q_lane, k_lane, v_lane = lane_of_q(q_tile, warp_row, lane), lane_of_k(k_tile, lane), lane_of_v(v_tile, lane)
        held = cuda.local.array(q_regs, uint32)
        s = cuda.local.array(s_regs, float32)
        acc = cuda.local.array(o_regs, float32)
        p = cuda.local.array(p_regs, uint32)
        m = cuda.local.array(2, float32)
        l = cuda.local.array(2, float32)
        bias = cuda.local.array(2, float32)
        tops = cuda.local.array(2, float32)
        clear(acc, m, l)
        shut_out(m, rows - (row0 + warp_row + (lane >> 2)), factor)

        copy_q(q_tile, q_from, q.strides[2], q.strides[3], rows, columns, row0, group, q.strides[1])
        key = first * bn
        if first < last:
            copy_k(k_tile, k_from + key * k.strides[2], k.strides[2], k.strides[3], n_rows - key, columns)
        commit()
        wait_all()
        cuda.syncthreads()  # Q is there for all
        if scale < float32(0):
            negate_q(q_tile, warp_row, lane)
        load_q(held, q_lane)
        if noted and part == splits - 1:
            for t in range(last * parts_n + cuda.threadIdx.x, tile_map.shape[3], threads):
                tile_map[batch, head_kv, block, t] = uint8(0)
        for j in range(first, last):
            key = j * bn
            wait_all()
            if not no_barrier:
                cuda.syncthreads()  # K_g is there for all, and nobody reads the last V or the last votes
            multiply_qk(s, held, q_lane, k_lane)
            if scale == float32(0):
                flatten(s)
            if (j + 1) * bn > whole:
                hide(s, j, row0 + warp_row + (lane >> 2), group, offset, causal, n_rows, lane)
            needed = vote(s, m, tops, factor, limit)
            if lane == 0:
                flags[warp] = needed
            if not no_vote:
                cuda.syncthreads()  # all have voted, and nobody reads K_g any more
            if not alone:
                for w in range(warps):
                    needed |= flags[w]
            for t in range(parts_n):
                at = key + TILE * t
                if needed & uint32(1 << t) != 0:
                    copy_v(
                        v_tile + uint32(t * tile_bytes), v_from + at * v.strides[2], v.strides[2], v.strides[3],
                        n_rows - at, columns,
                    )  # fmt: skip
            commit()
            key += bn
            if j + 1 < last:
                copy_k(k_tile, k_from + key * k.strides[2], k.strides[2], k.strides[3], n_rows - key, columns)
            commit()
            raise_to(s, acc, m, l, bias, factor, tops)
            wait_v()
            if not no_v:
                cuda.syncthreads()  # V of the tiles needed is there for all
            for t in range(parts_n):
                if needed & uint32(1 << t) != 0:
                    for i in range(k_each):
                        exponentials(p, s, l, bias, factor, t * k_each + i)
                        multiply_pv(acc, p, v_lane, t * k_each + i)
                if noted and cuda.threadIdx.x == 0 and j * parts_n + t < tile_map.shape[3]:
                    worth = COMPUTED if needed & uint32(1 << t) != 0 else SKIPPED
                    tile_map[batch, head_kv, block, j * parts_n + t] = uint8(worth)

        for r in range(2):
            row = row0 + warp_row + (8 * r + (lane >> 2))
            total = row_total(l[r])
            if row < rows:
                head = head_kv * group + row % group
                place = ((part * q.shape[0] + batch) * q.shape[1] + head) * q.shape[2] + row // group
                if (lane & 3) == 0:
                    m_parts[part, batch, head, row // group] = m[r]
                    l_parts[part, batch, head, row // group] = total
                to = global_address(acc_parts) + uint64(place * columns * 4)
                for n in range(d_groups):
                    for i in range(2):
                        column = int64(8 * n + i) + int64(2 * (lane & 3))
                        if even or column < columns:
                            st_global_f32(to + uint64(4 * column), acc[n * 4 + 2 * r + i])

    options = {"threads": threads, "min_blocks": tiles.min_blocks, "arch": arch, "name": name}

    @kernel(**options)
    def sparse_split(q, k, v, acc_parts, m_parts, l_parts, scale, causal, limit):
        attend(q, k, v, acc_parts, m_parts, l_parts, scale, causal, limit, None)

    @kernel(**options)
    def with_map(q, k, v, acc_parts, m_parts, l_parts, scale, causal, limit, tile_map):
        attend(q, k, v, acc_parts, m_parts, l_parts, scale, causal, limit, tile_map)

    return with_map if noted else sparse_split
