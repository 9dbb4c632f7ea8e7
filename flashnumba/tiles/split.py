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
``r % group``), so each key is read once for all of them.

With up to 16 rows one warp computes a tile, and slower than memory brings it. So a block has *teams* of one warp, which
take the tiles of its part in turn, each into slots of its own: no team waits for another, and what a multiprocessor has
asked for at one time is all of its shared memory. At the end the teams' states are merged where the keys were
(:mod:`flashnumba.tiles.parts`), and a block leaves one.

A call takes about as long as memory needs and some microseconds in which memory idles: a kernel starts, its last blocks
merge, the next one starts. From sm_90 on both kernels start early: their blocks come as soon as there is room, ask for
the first tiles to be brought into the L2 cache, and only then wait for what was ahead of them. Nothing is read before.

Source: Dao, Haziza, Massa, Sizov, "Flash-Decoding for long-context inference", 2023; the packing of GQA heads as in
FlashAttention-3's decoding, arXiv 2407.08608.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import DeviceFunction, Kernel, device, kernel
from flashnumba.machine.instructions import bulk_prefetch, shared_address, syncwarp
from flashnumba.machine.numba import cuda, float32, int32, int64, uint8, uint32, uint64
from flashnumba.tiles.attention import make_steps
from flashnumba.tiles.copy_tile import copies_ahead, make_copy_tile, make_waiting
from flashnumba.tiles.dependency import can_start_early, make_trigger, make_wait, nothing
from flashnumba.tiles.descale import make_descales
from flashnumba.tiles.fp8_convert import make_halves
from flashnumba.tiles.fp8_halves import make_copy_as_float16, with_halves
from flashnumba.tiles.parts import make_leave
from flashnumba.tiles.rows import address_of, make_hide
from flashnumba.tiles.sizes import ALIGNMENT, AttentionTiles

__all__ = ["FAULTS", "MOST_SPLITS", "SPLIT_ARGS", "make_split", "splits_for"]

SPLIT_ARGS = ("q", "k", "v", "acc_parts", "m_parts", "l_parts", "scale", "causal")
MOST_SPLITS = 256
AHEAD = 1
"""Tiles of each team that are brought into the L2 cache before a kernel may read them. On an H200 8 MB in all made a
call quicker, 26 MB slower than none, for a kernel of three tiles of 8 KB."""
SHORTER = 0.1
"""By how much a wave of blocks that is not full may be shorter than one that is."""
FAULTS = ("barrier", "free_barrier", "wait", "tail", "causal", "head", "range", "early", "teams")
"""What can be planted."""


@cache
def make_fetch_ahead(tiles: AttentionTiles, vector: int, arch: str, ahead: int) -> DeviceFunction:
    """``fetch_ahead(k_from, v_from, k_step, v_step, first, last, n_rows, columns)``: the first tiles of a part into L2.

    Nothing is read, so it may come before the wait for the kernel ahead, whose last blocks leave memory idle. One
    thread does it, where rows lie end to end; where they do not, or no kernel can start early, nobody.

    Args:
        ahead: tiles of each team.
    """
    bn, itemsize, reach = tiles.bn, tiles.kv_bytes or tiles.nbytes, ahead * tiles.teams

    @device
    def fetch_ahead(k_from, v_from, k_step, v_step, first, last, n_rows, columns):
        row = columns * itemsize
        keys = min(n_rows, min(last, first + reach) * bn) - first * bn
        if cuda.threadIdx.x == 0 and keys > 0 and k_step == row and v_step == row:
            bulk_prefetch(uint64(k_from + first * bn * row), uint32(keys * row))
            bulk_prefetch(uint64(v_from + first * bn * row), uint32(keys * row))

    return fetch_ahead if can_start_early(arch) and vector == 16 and ahead else nothing_ahead


@device
def nothing_ahead(k_from, v_from, k_step, v_step, first, last, n_rows, columns):
    pass


@cache
def make_split(
    tiles: AttentionTiles, element: str, vector: int = 16, arch: str = "80", *, even: bool = True,
    scaled: str = "", ahead: int = AHEAD, name: str = "", broken: str = "",
) -> Kernel:  # fmt: skip
    """The kernel that attends to one part of the keys, ``(q, k, v, acc_parts, m_parts, l_parts, scale, causal)``.

    Args:
        tiles, element, vector, arch, even: as :func:`flashnumba.tiles.forward.make_attend`; 8-bit elements with tiles
            of ``kv_bytes`` 1.
        scaled: ``"block"`` for 8-bit elements: ``q_descale, k_descale, v_descale`` come before ``scale``.
        ahead: as of :func:`make_fetch_ahead`.
        name: of the kernel in tables.
        broken: plants one of :data:`FAULTS`, or ``twice`` of the scales.
    """
    d, bm, bn, threads, frags, slots, teams = (
        tiles.d, tiles.bm, tiles.bn, tiles.threads, tiles.frags, tiles.slots, tiles.teams
    )  # fmt: skip
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
    q_threads = min(tiles.block, bm * (8 if d % 64 == 0 else 4))  # each has a row to copy of
    copy_q = make_copy_tile(bm, d, q_threads, vector, arch, even=even, packed=True)
    if halves:
        copy_q = make_copy_as_float16(bm, d, q_threads, element, arch, packed=True)
    itemsize = tiles.kv_bytes or tiles.nbytes
    copy_kv = make_copy_tile(bn, d, threads, vector, arch, even=even, nbytes=itemsize, teams=teams > 1)
    o_regs, s_regs, rows_held, q_regs = frags * d // 2, frags * bn // 2, 2 * frags, max(1, 4 * frags * tiles.q_held)
    next_row, head_shift, shift = int(broken != "causal"), int(broken == "head"), int(broken == "range")
    hide = make_hide(tiles, steps.mask, tail=broken != "tail", next_row=next_row)
    wait, commit = make_waiting(copies_ahead(vector, arch), slots - 1, waits=broken != "wait")
    trigger, wait_for_kernel_ahead = make_trigger(arch), make_wait(arch, broken != "early")
    fetch_ahead = make_fetch_ahead(tiles, vector, arch, ahead)
    leave = make_leave(tiles, even=even, in_fours=halves, head_shift=head_shift, broken=broken)

    @device
    def meet_block():
        cuda.syncthreads()

    @device
    def meet_team():
        syncwarp()

    meet = meet_team if teams > 1 else meet_block
    tile_is_there = nothing if broken == "barrier" else meet
    slot_is_free = nothing if broken == "free_barrier" else meet

    @device
    def warp_of_team():
        """(team, the warp's first row)."""
        return int32(cuda.threadIdx.x >> 5), int32(0)

    @device
    def warp_of_block():
        return int32(0), int32((cuda.threadIdx.x >> 5) * (16 * frags))

    place_of_warp = warp_of_team if teams > 1 else warp_of_block

    @device
    def attend(q, k, v, acc_parts, m_parts, l_parts, q_descale, k_descale, v_descale, scale, causal):
        trigger()
        smem = cuda.shared.array(0, uint8)
        lane = int32(cuda.threadIdx.x & 31)
        team, warp_row = place_of_warp()
        q_tile = (shared_address(smem) + uint32(ALIGNMENT - 1)) & uint32(0x100000000 - ALIGNMENT)
        k_tile = q_tile + uint32(bm * pitch) + uint32(team) * uint32(2 * slots * slot_bytes)
        v_tile = k_tile + uint32(slots * slot_bytes)

        # Which part of the keys, for which rows of which head of keys and values.
        splits, kv_heads, group = m_parts.shape[0], uint32(k.shape[1]), int64(uint32(q.shape[1]) // uint32(k.shape[1]))
        rows, n_rows, columns, offset = q.shape[2] * group, k.shape[2], q.shape[3], k.shape[2] - q.shape[2]
        blocks = uint32((rows + (bm - 1)) // bm)
        rest = uint32(cuda.blockIdx.x) // uint32(splits)
        part = int64(uint32(cuda.blockIdx.x) - rest * uint32(splits))
        unit = rest // blocks
        row0 = int64(rest - unit * blocks) * bm
        batch = int64(unit // kv_heads)
        head_kv = int64(unit) - batch * int64(kv_heads)
        q_from = address_of(q, batch, head_kv * group, int64(0))
        k_from, v_from = address_of(k, batch, head_kv, int64(0)), address_of(v, batch, head_kv, int64(0))
        end, whole = n_rows, n_rows
        if causal != 0:
            end = min(n_rows, max(int64(0), (min(row0 + bm, rows) - 1) // group + 1 + offset))
            whole = min(n_rows, row0 // group + offset + next_row)
        tiles_n, of = (end + (bn - 1)) // bn, uint64(splits)
        first = int64(uint64(tiles_n * part) // of)
        last = int64(uint64(tiles_n * (part + 1)) // of) - shift

        fetch_ahead(k_from, v_from, k.strides[2], v.strides[2], first, last, n_rows, columns)
        wait_for_kernel_ahead()
        first += team
        factor = factor_for(scale, q_descale, k_descale, batch, head_kv * group, head_kv)
        q_lane, k_lane, v_lane = lane_of_q(q_tile, warp_row, lane), lane_of_k(k_tile, lane), lane_of_v(v_tile, lane)
        held = cuda.local.array(q_regs, uint32)
        s = cuda.local.array(s_regs, float32)
        acc = cuda.local.array(o_regs, float32)
        m = cuda.local.array(rows_held, float32)
        l = cuda.local.array(rows_held, float32)
        of_q = cuda.local.array(rows_held, float32)
        scale_rows(of_q, q_descale, batch, head_kv * group, group, row0 + warp_row + (lane >> 2), rows)

        if cuda.threadIdx.x < q_threads:
            copy_q(q_tile, q_from, q.strides[2], q.strides[3], rows, columns, row0, group, q.strides[1])
        for i in range(slots):
            key, to = (first + i * teams) * bn, uint32(i * slot_bytes)
            if first + i * teams < last:
                copy_kv(k_tile + to, k_from + key * k.strides[2], k.strides[2], k.strides[3], n_rows - key, columns)
                copy_kv(v_tile + to, v_from + key * v.strides[2], v.strides[2], v.strides[3], n_rows - key, columns)
            commit()
        clear(acc, m, l)
        wait()
        cuda.syncthreads()  # Q is there for all
        if scale < float32(0):
            if team == 0:
                negate_q(q_tile, warp_row, lane)
            if teams > 1:
                cuda.syncthreads()  # it is turned for all
        load_q(held, q_lane)
        here = uint32(0)
        for j in range(first, last, teams):
            wait()
            tile_is_there()  # K_j and V_j, for all of the team
            multiply_qk(s, held, q_lane, k_lane + here)
            scale_tile(s, acc, of_q, k_descale, v_descale, batch, head_kv, j * bn)  # of FP8 alone
            if scale == float32(0):
                flatten(s)
            if (j + 1) * bn > whole:
                hide(s, j, row0 + warp_row + (lane >> 2), group, offset, causal, n_rows, lane)
            softmax_pv(s, acc, m, l, factor, v_lane + here)
            slot_is_free()  # nobody reads it any more
            key = (j + slots * teams) * bn
            if j + slots * teams < last:
                copy_kv(k_tile + here, k_from + key * k.strides[2], k.strides[2], k.strides[3], n_rows - key, columns)
                copy_kv(v_tile + here, v_from + key * v.strides[2], v.strides[2], v.strides[3], n_rows - key, columns)
            commit()
            here += uint32(slot_bytes)
            if here == uint32(slots * slot_bytes):
                here = uint32(0)

        scale_output(acc, v_descale, batch, head_kv, (first + (last - 1 - first) // teams * teams) * bn)
        leave(
            acc, m, l, factor, k_tile, acc_parts, m_parts, l_parts, part, batch, head_kv * group, group, row0, warp_row,
            rows,
        )  # fmt: skip

    options = {
        "threads": tiles.block, "min_blocks": tiles.min_blocks, "arch": arch, "early": can_start_early(arch),
        "name": name,
    }  # fmt: skip

    @kernel(**options)
    def split(q, k, v, acc_parts, m_parts, l_parts, scale, causal):
        attend(q, k, v, acc_parts, m_parts, l_parts, None, None, None, scale, causal)

    @kernel(**options)
    def split_scaled(q, k, v, acc_parts, m_parts, l_parts, q_descale, k_descale, v_descale, scale, causal):
        attend(q, k, v, acc_parts, m_parts, l_parts, q_descale, k_descale, v_descale, scale, causal)

    return split_scaled if scaled else split


def splits_for(units: int, tiles: int, multiprocessors: int, resident: int = 0) -> int:
    """Parts to cut ``tiles`` steps of keys into, where a part is ``units`` blocks.

    The time is that of the busiest multiprocessor: the blocks it gets times the steps of the longest part, and one more
    for what a part leaves and the merge reads. Two blocks at least should be on each, to keep memory busy.

    Args:
        resident: blocks that a multiprocessor has room for and that keep memory busy, if not that. The time is then
            that of waves of so many blocks each. Those of a wave that is not full share memory's speed, so it is
            shorter, but not by more than :data:`SHORTER`.
    """
    most = max(1, min(tiles, MOST_SPLITS))
    if resident:
        room = resident * multiprocessors
        return min(range(1, most + 1), key=lambda s: waves(units * s, room) * (-(-tiles // s) + 1))
    fewest = min(most, -(-2 * multiprocessors // units))

    def busiest(splits: int) -> int:
        return -(-units * splits // multiprocessors) * (-(-tiles // splits) + 1)

    return min(range(min(fewest, most), min(most, 4 * fewest) + 1), key=busiest)


def waves(blocks: int, room: int) -> float:
    """How often ``room`` blocks make ``blocks``, in the time of a full one."""
    full, rest = divmod(blocks, room)
    return full + (max(rest / room, 1 - SHORTER) if rest else 0)
