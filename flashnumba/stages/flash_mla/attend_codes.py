"""Attention of 16 rows to latent rows in 8 bits by one block; ``codes.py`` has who does what, and why.

A tile goes through two barriers::

    wait for tile j                                    its copy, and that of nothing else
      | barrier      it is there for all, and nobody reads tile j - 1 or its summands of S
    start the copy of tile j + slots - 1               into the place of tile j - 1
    a summand of S = Q K_j^T                           a warp's block of columns
      | barrier      all summands are there
    S, maxima, P = 2^((S - m) f)                       every warp for itself
    O += P V_j                                         a warp's block of columns
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import ld_shared_b32, shared_address, st_shared_b32, st_shared_f32
from flashnumba.machine.numba import cuda, float32, int32, uint8, uint32
from flashnumba.stages.flash_mla.codes import make_code_steps
from flashnumba.stages.flash_mla.leave import make_leave, make_total
from flashnumba.stages.flash_mla.pages import make_begin, make_copy_q, make_hide, make_pages, make_ring, make_span, turn
from flashnumba.stages.flash_mla.sizes import BLOCK, MLATiles
from flashnumba.tiles.attention import factor_of
from flashnumba.tiles.copy_tile import make_waiting
from flashnumba.tiles.reduce import lanes_sum
from flashnumba.tiles.sizes import ALIGNMENT

__all__ = ["CODE_FAULTS", "make_attend_codes"]

CODE_FAULTS = ("wait", "barrier", "exchange", "page", "rescale", "tail", "scale")
"""What can be planted."""


@cache
def make_attend_codes(
    tiles: MLATiles, element: str, arch: str = "80", *, code: str, broken: str = ""
) -> DeviceFunction:
    """As :func:`flashnumba.stages.flash_mla.attend.make_attend`, for tiles that are ``direct`` and pages of codes."""
    d, bm, bn, slots, stage = tiles.d, tiles.bm, tiles.bn, tiles.slots, tiles.raw
    steps = make_code_steps(tiles, element, code, arch, broken)
    clear, load_q, multiply_qk, exchange, add = steps[:5]
    weights, multiply_pv, settle = steps.weights, steps.multiply_pv, steps.settle
    page_of, copy = pages = make_pages(tiles, arch, True, broken)
    span, hide = make_span(tiles, broken), make_hide(bn, 1, bn // 8, broken)
    leave, quad_sum = make_leave(tiles, element, arch, make_total(bm, 1), pairs=True), lanes_sum(4)
    copy_q = make_copy_q(tiles, arch)
    wait, commit = make_waiting(True, slots - 2, waits=broken != "wait")
    wait_q, _ = make_waiting(True, slots - 1)
    wait_all, _ = make_waiting(True, 0)
    begin, (next_of, before) = make_begin(pages, commit, slots - 1, stage), make_ring(slots, stage)
    s_count, s_room = bn // 2, tiles.s_bytes
    q_regs, half_count, o_count = (BLOCK + (d - tiles.dv) // tiles.warps) // 4, bn // 4, BLOCK // 2
    no_barrier, no_exchange, no_tail = broken == "barrier", broken == "exchange", broken == "tail"

    @device
    def attend(q, cache, table, length, acc_parts, m_parts, l_parts, o, lse, scale, causal, request, row0, first_page,
               last_page, split):  # fmt: skip
        smem = cuda.shared.array(0, uint8)
        raw_tiles = (shared_address(smem) + uint32(ALIGNMENT - 1)) & uint32(0x100000000 - ALIGNMENT)
        q_tile = raw_tiles + uint32((slots - 1) * stage)  # until it is in registers
        s_tile = raw_tiles + uint32(slots * stage)
        sums = s_tile + uint32(s_room)
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        factor = factor_of(scale)

        cuda.syncthreads()  # nobody reads what the piece before left in shared memory
        home = sums + uint32(4 * bm)
        if cuda.threadIdx.x == 0:
            st_shared_b32(home, uint32(row0))
        cuda.syncthreads()  # it is there; out of registers, or what depends on it would be kept through the loop
        row0 = int32(ld_shared_b32(home))
        queries, heads = int32(q.shape[1]), int32(q.shape[2])
        rows = int32(queries * heads)
        first, last, whole = span(row0, heads, queries, length, causal, first_page, last_page)

        q_held = cuda.local.array(q_regs, uint32)
        q_unit = cuda.local.array(2, float32)
        s = cuda.local.array(s_count, float32)
        scales = cuda.local.array(half_count, float32)
        p = cuda.local.array(half_count, uint32)
        acc = cuda.local.array(o_count, float32)
        m = cuda.local.array(2, float32)
        l = cuda.local.array(2, float32)
        inverse = cuda.local.array(1, float32)
        clear(acc, m, l, inverse)
        copy_q(q_tile, q, request, row0)
        commit()
        begin(raw_tiles, cache, table, request, first, last, length)
        wait_q()
        cuda.syncthreads()  # Q is there for all; the first tile's barrier is before anything is put in its place
        load_q(q_held, q_unit, q_tile, warp, lane)
        page, here = page_of(table, request, int32(first + int32(slots - 1)), last), uint32(0)
        j = first
        while j < last:
            wait()
            if not no_barrier:
                cuda.syncthreads()  # tile j is there for all, and nobody reads the one before or its summands
            if int32(j + int32(slots - 1)) < last:
                copy(raw_tiles + before(here), cache, request, page, int32(j + int32(slots - 1)), length)
            commit()
            page = page_of(table, request, int32(j + int32(slots)), last)
            raw_tile = raw_tiles + here
            multiply_qk(s, scales, q_held, q_unit, raw_tile, warp, lane)
            exchange(s, s_tile, warp, lane)
            if not no_exchange:
                cuda.syncthreads()  # all summands are there
            add(s, s_tile, lane)
            if scale <= float32(0):
                turn(s, s_count, scale)
            if int32((j + int32(1)) * int32(bn)) > whole and not no_tail:
                hide(s, int32(0), int32(ld_shared_b32(home)), j, int32(0), heads, queries, length, causal, lane)
            weights(p, s, scales, acc, m, l, inverse, factor)
            multiply_pv(acc, p, raw_tile, warp, lane)
            here, j = next_of(here), int32(j + int32(1))

        wait_all()  # for copies of nothing
        settle(acc, inverse)
        for half in range(2):
            mine = quad_sum(l[half])
            if warp == 0 and (lane & 3) == 0:
                st_shared_f32(sums + uint32(4) * ((uint32(lane) >> uint32(2)) + uint32(8 * half)), mine)
        cuda.syncthreads()  # the sums are there for all
        row0 = int32(ld_shared_b32(home))
        leave(acc, m, sums, acc_parts, m_parts, l_parts, o, lse, factor, request, split, row0, rows, heads, warp, lane)

    return attend
