"""Decoding that does not load the values of tiles not worth it: BLASST where memory decides.

The kernel of :mod:`flashnumba.tiles.split` with one change. There K and V come together, ahead of their use; here V
comes only where it is wanted, and to know that takes S. So a step is a group of :data:`ASKED` tiles, whose scores are
made first, and which are then judged one after the other by :mod:`flashnumba.tiles.skip`, each with the maximum that
the ones before it left::

    wait K of the group | S = Q K^T | judge each tile | start V of the tiles that stay, start K of the next group
                        | exponentials | wait V | O += P V

While V comes so does the next group of K: it is asked for right behind V, so memory never rests. What is saved is the
bytes of V, at most half of all; with a share s left out the bound is ``2 / (2 - s)``: 1.54 at 0.7. A tile left out
costs no exponential either, but there is time for those.

A block is one warp with up to 16 rows: the queries of the heads that share a head of keys, as in
:mod:`flashnumba.tiles.split`, so a tile is left out only if all of these heads can do without. Each part of the keys
has maxima of its own, and keeps its first tile.

Source: BLASST, arXiv 2512.12087, section 3.3.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import Kernel, device, kernel
from flashnumba.machine.instructions import global_address, shared_address, st_global_f32
from flashnumba.machine.numba import cuda, float32, int32, int64, uint8, uint32, uint64
from flashnumba.tiles.attention import ALIGNMENT, AttentionTiles, factor_of, make_steps
from flashnumba.tiles.copy_tile import copies_ahead, make_copy_tile, make_waiting
from flashnumba.tiles.dependency import make_trigger
from flashnumba.tiles.online import NOTHING
from flashnumba.tiles.reduce import lanes_max
from flashnumba.tiles.rows import make_hide
from flashnumba.tiles.skip import make_needs, make_shut_out
from flashnumba.tiles.sparse import COMPUTED, SKIPPED

__all__ = ["ASKED", "FAULTS", "SPARSE_SPLIT_ARGS", "make_sparse_split"]

ASKED = 4
"""Tiles whose scores are made before the values of any are loaded."""
SPARSE_SPLIT_ARGS = ("q", "k", "v", "acc_parts", "m_parts", "l_parts", "scale", "causal", "limit")
FAULTS = ("barrier", "k_barrier", "v_barrier", "wait", "early", "still")
"""What can be planted: barriers before S, before K is filled again, and before V is read; V not waited for; V loaded
where the tile before was wanted; tiles of a group judged by the maximum before the group."""


@cache
def make_sparse_split(
    tiles: AttentionTiles, element: str, vector: int = 16, arch: str = "80", *, even: bool = True, noted: bool = False,
    name: str = "", broken: str = "",
) -> Kernel:  # fmt: skip
    """The kernel, with :data:`SPARSE_SPLIT_ARGS`; and ``tile_map`` if ``noted``.

    Args:
        tiles: of one warp, 16 rows and one slot, whose ``bn`` keys are a group of :data:`ASKED` tiles.
        element, vector, arch, even: as :func:`flashnumba.tiles.forward.make_attend`.
        noted: ``tile_map``, uint8 ``[B, Hkv, row tiles, key tiles]``, is filled as :mod:`flashnumba.tiles.sparse` does.
        broken: plants one of :data:`FAULTS`, or of :data:`flashnumba.tiles.skip.FAULTS`.

    Raises:
        ValueError: other tiles.
    """
    if tiles.warps != 1 or tiles.frags != 1 or tiles.slots != 1 or tiles.bn % (16 * ASKED) or tiles.nbytes != 2:
        raise ValueError(f"tiles are {tiles}; they must be of one warp, 16 rows, one slot and {16 * ASKED} keys a step")
    d, bm, bn, threads = tiles.d, tiles.bm, tiles.bn, tiles.threads
    pitch, each = tiles.pitch, bn // ASKED
    steps = make_steps(tiles, element, arch)
    clear, negate_q, load_q, multiply_qk, flatten = (
        steps.clear, steps.negate_q, steps.load_q, steps.multiply_qk, steps.flatten
    )  # fmt: skip
    raise_to, exponentials, multiply_pv, row_total = steps.raise_to, steps.exponentials, steps.multiply_pv, steps.total
    lane_of_q, lane_of_k, lane_of_v = steps.q_lane, steps.k_lane, steps.v_lane
    needs, shut_out, quad_max = make_needs(tiles, broken), make_shut_out(tiles, broken), lanes_max(4)
    hide = make_hide(tiles, steps.mask)
    copy_q = make_copy_tile(bm, d, threads, vector, arch, even=even, packed=True)
    copy_k = make_copy_tile(bn, d, threads, vector, arch, even=even)
    copy_v = make_copy_tile(each, d, threads, vector, arch, even=even)
    ahead = copies_ahead(vector, arch)
    wait_all, commit = make_waiting(ahead, 0)
    wait_v, _ = make_waiting(ahead, 1, waits=broken != "wait")
    d_groups, trigger = d // 8, make_trigger(arch)
    o_regs, s_regs, q_regs, p_regs, k_steps = d // 2, bn // 2, max(1, 4 * tiles.q_held), bn // 4, bn // 16
    tile_steps, groups_each = each // 16, each // 8
    barrier, k_barrier, v_barrier = broken != "barrier", broken != "k_barrier", broken != "v_barrier"
    early, still = int(broken == "early"), broken == "still"

    @device
    def judge(s, m, tops, first_key, end, factor, limit):
        """One bit a tile of the group that is wanted; ``tops`` are the lane's maxima of all of them."""
        before = cuda.local.array(2, float32)
        local = cuda.local.array(2, float32)
        for r in range(2):
            before[r] = m[r]
            tops[r] = float32(NOTHING)
        wanted = uint32(0)
        for t in range(ASKED):
            for r in range(2):
                top = s[4 * t * groups_each + 2 * r]
                for n in range(groups_each):
                    at = 4 * (t * groups_each + n) + 2 * r
                    top = max(top, max(s[at], s[at + 1]))
                local[r] = top
                tops[r] = max(tops[r], top)
            needed = needs(local, before, factor, limit)
            if needed and first_key + t * each < end:
                wanted |= uint32(1 << t)
            if not still:
                for r in range(2):
                    before[r] = max(before[r], quad_max(local[r]))
        return wanted

    @device
    def note(tile_map, batch, head_kv, block, j, wanted, end, lane):
        for t in range(ASKED):
            tile = j * ASKED + t
            if lane == t and tile < tile_map.shape[3]:
                what = uint8(SKIPPED)
                if (wanted >> uint32(t)) & uint32(1):
                    what = uint8(COMPUTED)
                if tile * each >= end:
                    what = uint8(0)
                tile_map[batch, head_kv, block, tile] = what

    @device
    def attend(q, k, v, acc_parts, m_parts, l_parts, scale, causal, limit, tile_map):
        trigger()
        smem = cuda.shared.array(0, uint8)
        q_tile = (shared_address(smem) + uint32(ALIGNMENT - 1)) & uint32(0x100000000 - ALIGNMENT)
        k_tile = q_tile + uint32(bm * pitch)
        v_tile = k_tile + uint32(bn * pitch)
        lane = int32(cuda.threadIdx.x & 31)

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
        q_from = int64(global_address(q)) + batch * q.strides[0] + head_kv * group * q.strides[1]
        k_from = int64(global_address(k)) + batch * k.strides[0] + head_kv * k.strides[1]
        v_from = int64(global_address(v)) + batch * v.strides[0] + head_kv * v.strides[1]
        end, whole = n_rows, n_rows
        if causal != 0:
            end = min(n_rows, max(int64(0), (min(row0 + bm, rows) - 1) // group + 1 + offset))
            whole = min(n_rows, row0 // group + offset + 1)
        tiles_n = (end + (bn - 1)) // bn
        first, last = tiles_n * part // splits, tiles_n * (part + 1) // splits

        factor = factor_of(scale)
        q_lane, k_lane, v_lane = lane_of_q(q_tile, int32(0), lane), lane_of_k(k_tile, lane), lane_of_v(v_tile, lane)
        held = cuda.local.array(q_regs, uint32)
        s = cuda.local.array(s_regs, float32)
        p = cuda.local.array(p_regs, uint32)
        acc = cuda.local.array(o_regs, float32)
        m = cuda.local.array(2, float32)
        l = cuda.local.array(2, float32)
        tops = cuda.local.array(2, float32)
        bias = cuda.local.array(2, float32)
        clear(acc, m, l)
        shut_out(m, rows - (row0 + (lane >> 2)), factor)

        copy_q(q_tile, q_from, q.strides[2], q.strides[3], rows, columns, row0, group, q.strides[1])
        if first < last:
            key = first * bn
            copy_k(k_tile, k_from + key * k.strides[2], k.strides[2], k.strides[3], n_rows - key, columns)
        commit()
        wait_all()
        cuda.syncthreads()  # Q is there for all
        if scale < float32(0):
            negate_q(q_tile, int32(0), lane)
        load_q(held, q_lane)
        for j in range(first, last):
            wait_all()
            if barrier:
                cuda.syncthreads()  # K is there for all, and nobody reads V any more
            multiply_qk(s, held, q_lane, k_lane)
            if scale == float32(0):
                flatten(s)
            if (j + 1) * bn > whole:
                hide(s, j, row0 + (lane >> 2), group, offset, causal, n_rows, lane)
            wanted = judge(s, m, tops, j * bn, end, factor, limit)
            load = uint32(wanted << uint32(early))
            for t in range(ASKED):
                key = j * bn + t * each
                if (load >> uint32(t)) & uint32(1) and key < n_rows:
                    copy_v(
                        v_tile + uint32(t * each * pitch), v_from + key * v.strides[2], v.strides[2], v.strides[3],
                        n_rows - key, columns,
                    )  # fmt: skip
            commit()
            if k_barrier:
                cuda.syncthreads()  # nobody reads K any more
            if j + 1 < last:
                key = (j + 1) * bn
                copy_k(k_tile, k_from + key * k.strides[2], k.strides[2], k.strides[3], n_rows - key, columns)
            commit()
            if noted:
                note(tile_map, batch, head_kv, block, j, wanted, end, lane)
            if wanted != uint32(0):
                raise_to(s, acc, m, l, bias, factor, tops)
                for i in range(k_steps):
                    if (wanted >> uint32(i // tile_steps)) & uint32(1):
                        exponentials(p, s, l, bias, factor, i)
                wait_v()
                if v_barrier:
                    cuda.syncthreads()  # V is there for all
                for i in range(k_steps):
                    if (wanted >> uint32(i // tile_steps)) & uint32(1):
                        multiply_pv(acc, p, v_lane, i)

        for r in range(2):
            row = row0 + (8 * r + (lane >> 2))
            total = row_total(l[r])
            if row < rows:
                head = head_kv * group + row % group
                place = ((part * q.shape[0] + batch) * q.shape[1] + head) * q.shape[2] + row // group
                if (lane & 3) == 0:
                    m_parts[part, batch, head, row // group] = m[r]
                    l_parts[part, batch, head, row // group] = total
                to = global_address(acc_parts) + uint64(place * columns * 4)
                for n in range(d_groups):
                    at = n * 4 + 2 * r
                    for i in range(2):
                        column = int64(8 * n + i) + int64(2 * (lane & 3))
                        if column < columns:
                            st_global_f32(to + uint64(4 * column), acc[at + i])

    options = {"threads": threads, "min_blocks": tiles.min_blocks, "arch": arch, "name": name}

    @kernel(**options)
    def plain(q, k, v, acc_parts, m_parts, l_parts, scale, causal, limit):
        attend(q, k, v, acc_parts, m_parts, l_parts, scale, causal, limit, None)

    @kernel(**options)
    def with_map(q, k, v, acc_parts, m_parts, l_parts, scale, causal, limit, tile_map):
        attend(q, k, v, acc_parts, m_parts, l_parts, scale, causal, limit, tile_map)

    return with_map if noted else plain
