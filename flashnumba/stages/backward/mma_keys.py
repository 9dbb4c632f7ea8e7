"""Steps of the kernels whose blocks own keys and walk over queries: S and dP transposed, rows of K and V first.

Of a step's queries shared memory has Q and dO, and behind one another delta, origin and bias of each row. Registers are
as in :mod:`flashnumba.stages.backward.mma_parts`: own rows are keys, other rows queries.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import lane_id, ld_shared_v2_f32, ldmatrix_x4_trans, st_shared_b32
from flashnumba.machine.numba import cuda, float32, int32, int64, uint32
from flashnumba.stages.backward.mma_parts import Parts
from flashnumba.stages.backward.mma_tiles import Tiles
from flashnumba.tiles.rows import address_of
from flashnumba.tiles.swizzle import swizzle
from flashnumba.tiles.tensor import make_multiply

__all__ = ["KeySteps", "Walk", "make_add_dq", "make_key_steps", "make_scatter", "make_walk"]


class Walk(NamedTuple):
    """Device functions: which keys are a block's, and which rows of which heads it walks over. Numbers are int32.

    Attributes:
        piece: ``(q, k, causal) -> (batch, head of k, first key, begin, whole, head, end)``: from row ``begin`` on, a
            step's first, some see a key of the block, from ``whole`` on all see all; heads of q from ``head`` to
            before ``end`` read the head of k.
        after: ``(head, row, begin, m_rows) -> (head, row)``: the step behind the one that begins at ``row``.
        number: ``(q, batch, head, row) -> number``: the step's in ``sums``, see ``mma_dkdv``.
        number_after: ``(number, row, begin) -> number``: that of the step behind it, which begins at ``row``.
    """

    piece: DeviceFunction
    after: DeviceFunction
    number: DeviceFunction
    number_after: DeviceFunction


@cache
def make_walk(tiles: Tiles, broken: str = "") -> Walk:
    """A block for each ``tiles.own`` keys of each head of k; it takes ``tiles.other`` rows a step, head after head."""
    own, other, late, first_only = tiles.own, tiles.other, broken == "start", broken == "group"

    @device
    def piece(q, k, causal):
        m_rows, n_rows = q.shape[2], k.shape[2]
        blocks = (n_rows + (own - 1)) // own
        index = int64(uint32(cuda.blockIdx.x) // uint32(blocks))
        block = int32(uint32(cuda.blockIdx.x) % uint32(blocks))  # a causal head's longest come first by themselves
        batch, head_kv = int32(index // k.shape[1]), int32(index % k.shape[1])
        key0, offset = int32(block * int32(own)), int32(n_rows - m_rows)
        group = q.shape[1] // k.shape[1]
        head = int32(head_kv * group)
        end = int32(head + int32(min(int64(1), group) if first_only else group))
        begin, whole = int32(0), int32(0)
        if causal != 0:
            begin = int32(max(int32(0), int32(key0 - offset)) // int32(other) * int32(other))
            whole = max(int32(0), int32(key0 + int32(own - 1) - offset))
            if late:
                begin += int32(other)
        if key0 + own > n_rows:
            whole = int32(m_rows)
        return batch, head_kv, key0, begin, whole, head, end

    @device
    def after(head, row, begin, m_rows):
        row = int32(row + int32(other))
        if row >= m_rows:
            head, row = int32(head + int32(1)), begin
        return head, row

    @device
    def number(q, batch, head, row):
        of_head = int64(batch) * q.shape[1] + int64(head)
        return int32(of_head * ((q.shape[2] + (other - 1)) // other) + int64(row) // other)

    @device
    def number_after(number, row, begin):
        number += int32(1)
        if row == begin:
            number += int32(begin // int32(other))  # the next head's first that sees a key
        return number

    return Walk(piece, after, number, number_after)


class KeySteps(NamedTuple):
    """Device functions of a block.

    Attributes:
        copy_step: ``(q_tile, do_tile, statistics, q, do, delta, origin, bias, batch, head, row)``: begins the copies of
            a step's queries, from ``row`` on.
        weigh: ``(s, statistics, factor)``: S^T becomes P^T; ``statistics`` is the address of the lane's first column.
        hide: ``(p, first_row, key, rows_left, keys_left, causal, lane)``: no weight beyond the last row or key, nor if
            causal of a row before the key's first. All int32 and counted from the step's first row: ``first_row`` the
            one that first sees the lane's first key, which is ``key`` of the block's.
        differ: ``(dp, p, statistics)``: dP^T becomes dS^T.
    """

    copy_step: DeviceFunction
    weigh: DeviceFunction
    hide: DeviceFunction
    differ: DeviceFunction


def make_key_steps(tiles: Tiles, parts: Parts, broken: str = "") -> KeySteps:
    """The steps; ``broken`` as :data:`flashnumba.stages.backward.mma_dkdv.FAULTS`."""
    other, columns, groups, rows_held = tiles.other, tiles.columns, tiles.columns // 8, 2 * tiles.frags
    copy_other, copy_statistics, weight = parts.copy_other, parts.copy_statistics, parts.weight
    no_tail, no_causal, no_delta, swapped = (broken == name for name in ("tail", "causal", "delta", "stride"))

    @device
    def copy_step(q_tile, do_tile, statistics, q, do, delta, origin, bias, batch, head, row):
        m_rows, columns = q.shape[2], q.shape[3]
        batch, head, row = int64(batch), int64(head), int64(row)
        do_row = q.strides[2] if swapped else do.strides[2]
        q_from = address_of(q, batch, head, row)
        do_from = address_of(do, batch, head, int64(0)) + row * do_row
        copy_other(q_tile, q_from, q.strides[2], q.strides[3], m_rows - row, columns)
        copy_other(do_tile, do_from, do_row, do.strides[3], m_rows - row, columns)
        first = (batch * q.shape[1] + head) * m_rows + row
        copy_statistics(statistics, delta, origin, bias, first, m_rows - row)

    @device
    def weigh(s, statistics, factor):
        begin = cuda.local.array(2, float32)
        shift = cuda.local.array(2, float32)
        for n in range(groups):
            ld_shared_v2_f32(begin, 0, statistics + uint32(4 * (other + 8 * n)))
            ld_shared_v2_f32(shift, 0, statistics + uint32(4 * (2 * other + 8 * n)))
            for i in range(2):
                for r in range(rows_held):
                    at = ((r // 2) * groups + n) * 4 + 2 * (r % 2) + i
                    s[at] = weight(s[at], begin[i], factor, shift[i])

    @device
    def hide(p, first_row, key, rows_left, keys_left, causal, lane):
        for r in range(rows_held):
            down = int32(16 * (r // 2) + 8 * (r % 2))
            first = int32(0)
            if causal != 0 and not no_causal:
                first = max(int32(0), int32(first_row + down))
            if key + down >= keys_left:
                first = int32(columns)
            # One comparison for both ends: what is before the first wraps to a large number.
            begin = uint32(int32(2) * (lane & int32(3)) - first)
            seen = uint32(max(int32(0), int32(min(rows_left, int32(columns)) - first)))
            for n in range(groups):
                for i in range(2):
                    if uint32(begin + uint32(8 * n + i)) >= seen and not no_tail:
                        p[((r // 2) * groups + n) * 4 + 2 * (r % 2) + i] = float32(0)

    @device
    def differ(dp, p, statistics):
        mean = cuda.local.array(2, float32)
        for n in range(groups):
            ld_shared_v2_f32(mean, 0, statistics + uint32(32 * n))
            for i in range(2):
                for r in range(rows_held):
                    at = ((r // 2) * groups + n) * 4 + 2 * (r % 2) + i
                    dp[at] = p[at] * (dp[at] if no_delta else dp[at] - mean[i])

    return KeySteps(copy_step, weigh, hide, differ)


@cache
def make_scatter(tiles: Tiles) -> tuple[DeviceFunction, DeviceFunction]:
    """``lane_of(tile, row, chunk) -> address`` and ``scatter(address, p)``: A operands into a tile of keys x queries.

    The operands' first row is ``row``, a multiple of 16. Their first chunk is ``chunk``, 0 or a multiple of as many as
    they have. The first asks for its lane anew: what is made of it takes no registers while S and dP need them all.
    """
    columns, frags, layout = tiles.columns, tiles.frags, swizzle(tiles.other)
    place, pitch = layout.at, layout.pitch

    @device
    def lane_of(tile, row, chunk):
        lane = int32(lane_id())
        return place(tile, row + (lane >> 2), chunk) + uint32(4 * (lane & 3))

    @device
    def scatter(address, p):
        for c in range(columns // 8):
            at = (address ^ uint32(16 * (c % 8))) + uint32(128 * (c // 8))
            for f in range(frags):
                first = 4 * (frags * (c // 2) + f) + 2 * (c % 2)
                st_shared_b32(at + uint32(16 * f * pitch), p[first])
                st_shared_b32(at + uint32((16 * f + 8) * pitch), p[first + 1])

    return lane_of, scatter


@cache
def make_add_dq(tiles: Tiles, element: str, arch: str) -> DeviceFunction:
    """``add_dq(sums, tile, ds_tile, k_tile)``: a step's dQ from dS^T, which lies as keys x queries.

    Of it a warp has ``16 dq_frags`` queries and every ``halves``-th 16 columns. It asks for its lane anew too.
    """
    d, own, other, threads = tiles.d, tiles.own, tiles.other, tiles.threads
    keys, halves, frags, row_warps = swizzle(other), tiles.halves, tiles.dq_frags, tiles.dq_rows
    place, ds_step, ds_pitch = keys.at, keys.step, keys.pitch
    k_place, k_step, k_pitch = swizzle(d).at, swizzle(d).step, swizzle(d).pitch
    product = make_multiply(element, arch)
    registers, a_regs, groups = tiles.dq_registers, 4 * frags, d // 8 // halves

    @device
    def add_dq(sums, tile, ds_tile, k_tile):
        lane = int32(lane_id())
        acc = cuda.local.array(registers, float32)
        a = cuda.local.array(a_regs, uint32)
        b = cuda.local.array(4, uint32)
        warp = uint32(cuda.threadIdx.x) >> uint32(5)
        chunk = uint32(2 * frags) * (warp % uint32(row_warps))
        for i in range(registers):
            acc[i] = float32(0)
        a_lane = place(ds_tile, (lane & 7) + 8 * (lane >> 4), chunk + uint32((lane >> 3) & 1))
        b_lane = k_place(k_tile, lane & 15, uint32(2) * (warp // uint32(row_warps)) + uint32(lane >> 4))
        for k in range(own // 16):
            for f in range(frags):
                ldmatrix_x4_trans(a, 4 * f, ds_step(a_lane, f) + uint32(k * 16 * ds_pitch))
            for n in range(groups // 2):
                ldmatrix_x4_trans(b, 0, k_step(b_lane, halves * n) + uint32(k * 16 * k_pitch))
                for f in range(frags):
                    product(acc, 4 * (f * groups + 2 * n), a, 4 * f, b, 0)
                    product(acc, 4 * (f * groups + 2 * n + 1), a, 4 * f, b, 2)
        # A view that begins with the lane: constant indices into it cost no arithmetic.
        mine = sums[int64(tile) * (other * d) + int64(uint32(32) * warp + uint32(lane)) :]
        for i in range(registers):
            cuda.atomic.add(mine, i * threads, acc[i])

    return add_dq
