"""What a block of split-KV attention leaves of its part: the state (m, l, acc) of each row, in float32.

A block of one team has it in registers, and leaves it as it is. Several teams have seen different keys; their states
meet in shared memory, where the keys were, and are merged as :mod:`flashnumba.tiles.merge` merges those of blocks: each
thread takes four neighbouring columns of a row, from all teams in their order. So what goes through memory does not
grow with the teams, and results are bitwise repeatable.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import (
    global_address,
    ld_shared_v4_f32,
    st_global_f32,
    st_global_v4_f32,
    st_shared_v2_f32,
    st_shared_v4_f32,
)
from flashnumba.machine.numba import cuda, float32, int64, uint32, uint64
from flashnumba.tiles.merge import make_weight
from flashnumba.tiles.online import NOTHING
from flashnumba.tiles.reduce import lanes_sum
from flashnumba.tiles.sizes import AttentionTiles

__all__ = ["make_leave"]

PADDING = 32
"""Bytes between rows of acc in shared memory, so that rows which a warp stores at a time meet no bank twice."""


@cache
def make_leave(
    tiles: AttentionTiles, *, even: bool = True, in_fours: bool = False, head_shift: int = 0, broken: str = ""
) -> DeviceFunction:  # fmt: skip
    """``leave(acc, m, l, factor, ring, acc_parts, m_parts, l_parts, part, batch, head, group, row0, warp_row, rows)``.

    ``ring`` is the team's shared memory, that nobody reads or fills any more; ``head`` the first of ``group`` query
    heads, whose rows are row ``r // group`` of head ``head + r % group``; the warp's rows begin at ``warp_row`` of
    those from ``row0`` on, of ``rows``.

    Args:
        in_fours: as of :func:`flashnumba.tiles.rows.make_store`.
        head_shift, broken: plant faults; of ``broken`` it is ``"teams"``.

    Raises:
        ValueError: several teams whose acc does not fit into the room that their keys had.
    """
    d, bm, teams, threads = tiles.d, tiles.bm, tiles.teams, tiles.block
    d_groups, rows_held, pitch = d // 8, 2 * tiles.frags, 4 * d + PADDING
    ring_bytes, columns_at_once = 2 * tiles.slots * tiles.slot, d // 4
    if teams > 1 and bm * pitch > ring_bytes:
        raise ValueError(f"tiles are {tiles}; {bm} rows of acc do not fit into {ring_bytes} bytes of keys")
    items, states = -(-bm * columns_at_once // threads), (teams, bm, 2)
    row_total, weight, no_barrier = lanes_sum(4), make_weight(), broken == "teams"

    @device
    def column_of(n, i, lane):
        """Which column value i of accumulator group n belongs to."""
        if in_fours:
            return int64(16 * (n // 2) + n % 2 + 2 * i) + int64(4 * (lane & 3))
        return int64(8 * n + i) + int64(2 * (lane & 3))

    @device
    def place_of(m_parts, part, batch, head, group, row):
        """(head, query, number of the row among all parts' rows)."""
        query = int64(uint32(row) // uint32(group))
        at = head + (row + head_shift) % group if head_shift != 0 else head + row - query * group
        return at, query, ((part * m_parts.shape[1] + batch) * m_parts.shape[2] + at) * m_parts.shape[3] + query

    @device
    def store_row_in_twos(to, acc, r, quad):
        for n in range(d_groups):
            st_shared_v2_f32(to + uint32(32 * n) + uint32(8) * quad, acc, 4 * n + 2 * r)

    @device
    def store_row_in_fours(to, acc, r, quad):
        x = cuda.local.array(4, float32)
        for pair in range(d_groups // 2):
            for n in range(2):
                for i in range(2):
                    x[n + 2 * i] = acc[4 * (2 * pair + n) + 2 * r + i]
            st_shared_v4_f32(to + uint32(64 * pair) + uint32(16) * quad, x, 0)

    store_row = store_row_in_fours if in_fours else store_row_in_twos

    @device
    def leave_own(acc, m, l, factor, ring, acc_parts, m_parts, l_parts, part, batch, head, group, row0, warp_row, rows):
        lane = cuda.threadIdx.x & 31
        columns = acc_parts.shape[4]
        for r in range(rows_held):
            row = row0 + warp_row + (16 * (r // 2) + 8 * (r % 2) + (lane >> 2))
            total = row_total(l[r])
            if row < rows:
                at, query, place = place_of(m_parts, part, batch, head, group, row)
                if (lane & 3) == 0:
                    m_parts[part, batch, at, query] = m[r]
                    l_parts[part, batch, at, query] = total
                to = global_address(acc_parts) + uint64(place * columns * 4)
                for n in range(d_groups):
                    i0 = ((r // 2) * d_groups + n) * 4 + 2 * (r % 2)
                    for i in range(2):
                        column = column_of(n, i, lane)
                        if even or column < columns:
                            st_global_f32(to + uint64(4 * column), acc[i0 + i])

    @device
    def leave_merged(
        acc, m, l, factor, ring, acc_parts, m_parts, l_parts, part, batch, head, group, row0, warp_row, rows
    ):  # fmt: skip
        state = cuda.shared.array(states, float32)
        thread = uint32(cuda.threadIdx.x)
        lane, team = thread & uint32(31), thread >> uint32(5)
        columns = acc_parts.shape[4]
        for r in range(rows_held):
            row = uint32(8 * r) + (lane >> uint32(2))
            total = row_total(l[r])
            if row0 + int64(row) < rows:
                if (lane & uint32(3)) == uint32(0):
                    state[team, row, 0] = m[r]
                    state[team, row, 1] = total
                store_row(ring + row * uint32(pitch), acc, r, lane & uint32(3))
        if not no_barrier:
            cuda.syncthreads()  # the states of all teams are there
        one = cuda.local.array(4, float32)
        x = cuda.local.array(4, float32)
        first_ring = ring - team * uint32(ring_bytes)
        for i in range(items):
            item = thread + uint32(threads * i)
            in_row, four = item // uint32(columns_at_once), item % uint32(columns_at_once)
            row = row0 + int64(in_row)
            if in_row < uint32(bm) and row < rows:
                top, total = float32(NOTHING), float32(0)
                for t in range(teams):
                    top = max(top, state[t, in_row, 0])
                for c in range(4):
                    x[c] = float32(0)
                for t in range(teams):
                    share = weight(state[t, in_row, 0], top, factor)
                    total += share * state[t, in_row, 1]
                    at = first_ring + uint32(t * ring_bytes) + in_row * uint32(pitch) + uint32(16) * four
                    ld_shared_v4_f32(one, 0, at)
                    for c in range(4):
                        x[c] += share * one[c]
                of_head, query, place = place_of(m_parts, part, batch, head, group, row)
                if four == uint32(0):
                    m_parts[part, batch, of_head, query] = top
                    l_parts[part, batch, of_head, query] = total
                to = global_address(acc_parts) + uint64((place * columns + int64(4) * int64(four)) * 4)
                if even:
                    st_global_v4_f32(to, x, 0)
                else:
                    for c in range(4):
                        if int64(4) * int64(four) + c < columns:
                            st_global_f32(to + uint64(4 * c), x[c])

    return leave_merged if teams > 1 else leave_own
