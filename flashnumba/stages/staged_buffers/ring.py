"""The kernel that goes by the table: slots, copies, waits and barriers are those of its rows.

See :mod:`flashnumba.stages.staged_buffers.mma` for what it is and :mod:`flashnumba.stages.staged_buffers.reference` for
the table. What of the table repeats from tile to tile is written out step by step, so that all of it is constants.
Where the slots of the next tile are others (three slots; four whole tiles), their addresses turn in registers.

K and V may be copied ahead of the tile in hand by at most two tiles, so a step needs to know of the keys only how many
are left, in 32 bits.
"""

from __future__ import annotations

from functools import cache, partial

from flashnumba.machine.function import Kernel, device, kernel
from flashnumba.machine.instructions import shared_address
from flashnumba.machine.numba import cuda, float32, int32, int64, uint8, uint32, uint64
from flashnumba.stages.staged_buffers import reference
from flashnumba.stages.staged_buffers.slices import StagedTiles, make_slice_steps
from flashnumba.tiles.attention import factor_of, make_steps
from flashnumba.tiles.copy_strips import make_copy_strips
from flashnumba.tiles.copy_tile import copies_ahead, make_waiting
from flashnumba.tiles.marks import ANY, COPY, LOG, OTHER, PV, QK, SOFTMAX, STORE, WAIT, make_marks
from flashnumba.tiles.rows import address_of, make_hide, make_store_sums
from flashnumba.tiles.schedule import seen_keys
from flashnumba.tiles.sizes import ALIGNMENT

__all__ = ["FAULTS", "make_staged"]

FAULTS = (*reference.FAULTS, "store", "swizzle", "stride", "rescale", "tail", "causal", "sign")
"""What can be planted: faults of the table, and others."""


@cache
def make_staged(
    tiles: StagedTiles, stages: int, cut: str, element: str, vector: int = 16, arch: str = "80", *, even: bool = True,
    broken: str = "", traced: bool = False,
) -> Kernel:  # fmt: skip
    """The kernel for float16 or bfloat16.

    Args:
        stages: slots, 1 to 4.
        cut: what a slot holds, "tile" or "quarter".
        vector: as :attr:`flashnumba.stages.heads.Shape.vector`.
        arch: "75" copies and multiplies with what sm_75 has; "80" with cp.async.
        even: the head dimension is ``tiles.d``.
        broken: plants one of :data:`FAULTS`.
        traced: the kernel leaves marks, see :mod:`flashnumba.tiles.marks`, and has an argument ``trace``.
    """
    rows = reference.schedule(stages, cut, 4)
    if broken in reference.FAULTS:
        rows = reference.damaged(rows, broken, stages)
    first, of_tile, turn = reference.period(rows, stages)
    parts, per_tile = reference.CUTS[cut], len(of_tile)
    ahead, q_steps = stages - 1, first[stages - 1 :]

    def number(piece):
        """Of a slice: 0 is the first of tile 0, those of Q lie before."""
        if piece.operand == "Q":
            return piece.part - parts
        return piece.tile * per_tile + piece.part + (parts if piece.operand == "V" else 0)

    # The table as tuples: what comes before the first tile, Q's steps, and those of a tile.
    filled = tuple(number(row.copy) for row in first[:ahead]) or (0,)  # a tuple of nothing has no type
    fills = tuple(row.into for row in first[:ahead]) or (0,)
    q_slot, q_into = tuple(row.slot for row in q_steps), tuple(row.into for row in q_steps)
    q_copy = tuple(number(row.copy) for row in q_steps)
    slot_of, into_of = tuple(row.slot for row in of_tile), tuple(row.into for row in of_tile)
    copy_of = tuple(number(row.copy) for row in of_tile)
    order = of_tile[0].order
    copies_first, meets, parts_after = order[0] == "copy", "barrier" in order[:-1], order[-1] == "barrier"

    d, bm, bn, threads, frags, shapes = tiles.d, tiles.bm, tiles.bn, tiles.threads, tiles.frags, tiles.attention
    width, keys, slot_bytes, sixteens = d // parts, bn // parts, tiles.slot(cut), bn // 16
    per_slice = sixteens // parts
    steps = make_steps(shapes, element, arch, rescaled=broken != "rescale")
    clear, flatten, mask, raise_maximum, exponentials = (
        steps.clear, steps.flatten, steps.mask, steps.raise_maximum, steps.exponentials
    )  # fmt: skip
    store_sums = make_store_sums(shapes, steps.total)
    sliced = make_slice_steps(tiles, parts, element, vector, arch, even=even)
    lane_of_q, lane_of_k, lane_of_v, load_q, negate_q, multiply_qk, multiply_pv, store = sliced
    hide = make_hide(shapes, mask, tail=broken != "tail", next_row=int(broken != "causal"))
    copy = partial(make_copy_strips, threads=threads, vector=vector, arch=arch)
    copy_q, copy_v = copy(bm, width, even=even), copy(keys, d, even=even)
    copy_k = copy(bn, width, even=even, on=broken != "swizzle")
    wait, commit = make_waiting(copies_ahead(vector, arch), of_tile[0].wait)
    start, mark, finish = make_marks(traced)
    o_regs, s_regs, p_regs, q_regs = frags * d // 2, frags * bn // 2, frags * bn // 4, frags * d // 4
    packed, rows_held, next_row, swapped = vector > 2, 2 * frags, int(broken != "causal"), broken == "stride"
    no_sign, no_barrier = broken == "sign", broken == "store"

    @device
    def few(count):
        """A count as int32, or as many as make no difference."""
        return int32(min(count, int64(1 << 20)))

    @device
    def column_step(x):
        """Bytes from column to column: a constant where rows are read more than one element at a time."""
        return int64(2) if packed else x.strides[3]

    @device
    def issue(n, slot, step, sources, here, more, left, log):
        """Start to copy slice n, counted from the first of this tile, to a slot; nothing where there is no such tile.

        K and V of this tile begin at the addresses ``here``. From it on there are ``more`` tiles and ``left`` keys.
        The slice is for ``step``."""
        q, k, v, q_from, m_left = sources
        k_at, v_at = here
        if n < 0:
            mark(log, COPY, step, ANY)
            part, columns = n + parts, int32(q.shape[3] - (n + parts) * width)
            copy_q(slot, q_from + part * width * column_step(q), q.strides[2], q.strides[3], m_left, columns)
        else:
            tiles_on, part = n // per_tile, n % per_tile
            if more > int32(tiles_on):
                mark(log, COPY, step, step % stages)
                if part < parts:
                    at = k_at + tiles_on * bn * k.strides[2] + part * width * column_step(k)
                    rows_left, columns = int32(left - tiles_on * bn), int32(k.shape[3] - part * width)
                    copy_k(slot, at, k.strides[2], k.strides[3], rows_left, columns)
                else:
                    v_row, v_column = v.strides[2], v.strides[3]
                    if swapped:
                        v_row, v_column = v.strides[3], v.strides[2]
                    key = tiles_on * bn + (part - parts) * keys
                    copy_v(slot, v_at + key * v_row, v_row, v_column, int32(left - key), int32(v.shape[3]))
        commit()

    @device
    def begin(n, slot, step, sources, here, more, left, log):
        """A step up to its product: start what comes later, and wait for what is needed now."""
        if copies_first:
            issue(n, slot, step + ahead, sources, here, more, left, log)
        mark(log, WAIT, step, ANY)
        wait()
        if meets:
            cuda.syncthreads()  # the slice of this step is there for all, and nobody reads that of the step before
        if not copies_first:
            issue(n, slot, step + ahead, sources, here, more, left, log)

    @device
    def end():
        if parts_after:
            cuda.syncthreads()  # with one slot: nobody reads the slice any more

    @device
    def fill(i, ring, sources, here, more, left, log):
        issue(filled[i], ring[fills[i]], i, sources, here, more, left, log)

    @device
    def q_step(i, held, ring, lane_at, sources, here, more, left, log):
        begin(q_copy[i], ring[q_into[i]], i, sources, here, more, left, log)
        mark(log, OTHER, i, ANY)
        load_q(held, ring[q_slot[i]] + lane_at, i)
        end()

    @device
    def k_step(i, s, held, ring, lane_at, step, sources, here, more, left, log):
        begin(copy_of[i], ring[into_of[i]], step + i, sources, here, more, left, log)
        mark(log, QK, step + i, (step + i) % stages)
        multiply_qk(s, held, ring[slot_of[i]] + lane_at, i)
        end()

    @device
    def v_step(i, acc, p, s, l, bias, factor, ring, lane_at, step, sources, here, more, left, log):
        slot = slot_of[parts + i]
        begin(copy_of[parts + i], ring[into_of[parts + i]], step + parts + i, sources, here, more, left, log)
        mark(log, PV, step + parts + i, (step + parts + i) % stages)
        for n in range(per_slice):
            multiply_pv(acc, p, ring[slot] + lane_at, i * per_slice + n, n)
            if i * per_slice + n + 1 < sixteens:
                exponentials(p, s, l, bias, factor, i * per_slice + n + 1)  # beside the product
        end()

    @device
    def attend(q, k, v, o, lse, scale, causal, log):
        smem = cuda.shared.array(0, uint8)
        base = (shared_address(smem) + uint32(ALIGNMENT - 1)) & uint32(0x100000000 - ALIGNMENT)
        lane = int32(cuda.threadIdx.x & 31)
        warp_row = int32((cuda.threadIdx.x >> 5) * (16 * frags))

        # Which rows of which head: the tiles of a head follow one another, a causal one's longest first.
        m_rows, n_rows, columns = q.shape[2], k.shape[2], q.shape[3]
        blocks = (m_rows + (bm - 1)) // bm
        head = int64(uint32(cuda.blockIdx.x) // uint32(blocks))
        block = int64(uint32(cuda.blockIdx.x) % uint32(blocks))
        if causal != 0:
            block = blocks - 1 - block
        batch, head = head // q.shape[1], head % q.shape[1]
        head_kv = head // (q.shape[1] // k.shape[1])
        row0, offset = block * bm, n_rows - m_rows
        q_from, k_at = address_of(q, batch, head, row0), address_of(k, batch, head_kv, int64(0))
        v_at = address_of(v, batch, head_kv, int64(0))
        m_left = few(m_rows - row0)

        end_key, whole = seen_keys(row0, bm, n_rows, offset, causal, next_row)
        last = (end_key + (bn - 1)) // bn

        factor = factor_of(scale)
        q_lane, k_lane, v_lane = lane_of_q(warp_row, lane), lane_of_k(lane), lane_of_v(lane)
        held = cuda.local.array(q_regs, uint32)
        s = cuda.local.array(s_regs, float32)
        p = cuda.local.array(p_regs, uint32)
        acc = cuda.local.array(o_regs, float32)
        m = cuda.local.array(rows_held, float32)
        l = cuda.local.array(rows_held, float32)
        bias = cuda.local.array(rows_held, float32)
        clear(acc, m, l)

        ring = cuda.local.array(stages, uint32)
        turned = cuda.local.array(stages, uint32)
        for i in range(stages):
            ring[i] = base + uint32(i * slot_bytes)
        # Steps are written out, so that what the table says of each is a constant.
        sources, here, more, left = (q, k, v, q_from, m_left), (k_at, v_at), few(last), few(n_rows)
        if ahead > 0:
            fill(0, ring, sources, here, more, left, log)
        if ahead > 1:
            fill(1, ring, sources, here, more, left, log)
        if ahead > 2:
            fill(2, ring, sources, here, more, left, log)
        q_step(0, held, ring, q_lane, sources, here, more, left, log)
        if parts > 1:
            q_step(1, held, ring, q_lane, sources, here, more, left, log)
            q_step(2, held, ring, q_lane, sources, here, more, left, log)
            q_step(3, held, ring, q_lane, sources, here, more, left, log)
        if scale < float32(0) and not no_sign:
            negate_q(held)

        for j in range(int64(0), last):
            step, here, more, left = parts + j * per_tile, (k_at, v_at), few(last - j), few(n_rows - j * bn)
            k_step(0, s, held, ring, k_lane, step, sources, here, more, left, log)
            if parts > 1:
                k_step(1, s, held, ring, k_lane, step, sources, here, more, left, log)
                k_step(2, s, held, ring, k_lane, step, sources, here, more, left, log)
                k_step(3, s, held, ring, k_lane, step, sources, here, more, left, log)
            mark(log, SOFTMAX, step + parts - 1, ANY)
            if scale == float32(0):
                flatten(s)
            if (j + 1) * bn > whole:
                hide(s, j, row0 + warp_row + (lane >> 2), int64(1), offset, causal, n_rows, lane)
            raise_maximum(s, acc, m, l, bias, factor)
            exponentials(p, s, l, bias, factor, 0)
            v_step(0, acc, p, s, l, bias, factor, ring, v_lane, step, sources, here, more, left, log)
            if parts > 1:
                v_step(1, acc, p, s, l, bias, factor, ring, v_lane, step, sources, here, more, left, log)
                v_step(2, acc, p, s, l, bias, factor, ring, v_lane, step, sources, here, more, left, log)
                v_step(3, acc, p, s, l, bias, factor, ring, v_lane, step, sources, here, more, left, log)
            k_at += bn * k.strides[2]
            v_at += bn * v.strides[2]
            if turn:
                for i in range(stages):
                    turned[i] = ring[(i + turn) % stages]
                for i in range(stages):
                    ring[i] = turned[i]

        mark(log, STORE, 0, ANY)
        if not no_barrier:
            cuda.syncthreads()  # nobody reads a slot any more
        store_sums(lse, m, l, factor, batch, head, row0 + warp_row + (lane >> 2), m_rows, lane)
        o_from = address_of(o, batch, head, row0)
        store(o_from, o.strides[2], o.strides[3], acc, l, base, warp_row, lane, m_left, columns)

    options = {
        "threads": threads, "min_blocks": tiles.min_blocks, "arch": arch, "name": f"staged_buffers.{cut}_{stages}",
    }  # fmt: skip

    @kernel(**options)
    def staged(q, k, v, o, lse, scale, causal):
        attend(q, k, v, o, lse, scale, causal, None)

    @kernel(**options)
    def staged_traced(q, k, v, o, lse, scale, causal, trace):
        log = cuda.local.array(LOG, uint64)
        start(log, trace)
        attend(q, k, v, o, lse, scale, causal, log)
        finish(log, trace)

    return staged_traced if traced else staged
