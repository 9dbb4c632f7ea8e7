"""Attention on tensor cores for one tile of rows of Q, FlashAttention-2 style: what a block of many a kernel does.

Each warp owns whole rows, so the softmax is four lanes' business. K and V come by asynchronous copies into swizzled
shared memory, while the products of the step before run::

    two slots   wait K_j, V_j, barrier | start K_j+1, V_j+1 | S = Q K_j^T | softmax, O += P V_j
    one slot    wait K_j, barrier | start V_j | S = Q K_j^T | wait V_j, barrier | start K_j+1 | softmax, O += P V_j

Masks are applied only to tiles that touch the diagonal or the end; a causal tile of rows ends at its diagonal. O is
divided once, at the end.

Which tile of which head a block attends to, and whether to one or to several, is the kernel's affair
(:mod:`flashnumba.tiles.schedule`).

Source: Dao, FlashAttention-2, arXiv 2307.08691. The steps are in :mod:`flashnumba.tiles.attention`.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import shared_address
from flashnumba.machine.numba import cuda, float32, int32, int64, uint8, uint32
from flashnumba.tiles.attention import Steps, make_steps
from flashnumba.tiles.chain import P_LOG2, STRIDED, make_chain, order_for
from flashnumba.tiles.copy_tile import copies_ahead, make_copy_tile, make_waiting
from flashnumba.tiles.descale import make_descales
from flashnumba.tiles.fp8 import make_copy_by_columns, with_values_by_columns
from flashnumba.tiles.fp8_convert import make_halves
from flashnumba.tiles.fp8_halves import make_copy_as_float16, with_halves
from flashnumba.tiles.marks import ANY, COPY, OTHER, PV, QK, SOFTMAX, STORE, WAIT, make_marks
from flashnumba.tiles.rows import address_of, make_hide, make_store, make_store_sums
from flashnumba.tiles.schedule import seen_keys
from flashnumba.tiles.sizes import ALIGNMENT, NATURAL, AttentionTiles
from flashnumba.tiles.swizzle import swizzle

__all__ = ["FAULTS", "check_element", "make_attend", "tier", "tiles_for"]

FAULTS = (
    "barrier", "v_barrier", "wait", "early_copy", "swizzle", "stride", "rescale", "tail", "causal", "sign",
)  # fmt: skip
"""What can be planted."""


@cache
def make_attend(
    tiles: AttentionTiles, element: str, vector: int = 16, arch: str = "80", *, even: bool = True, traced: bool = False,
    chain: str = "registers", scaled: str = "", broken: str = "",
) -> DeviceFunction:  # fmt: skip
    """``attend(q, k, v, o, lse, scale, causal, batch, head, block)``: rows ``tiles.bm * block`` and on of a head.

    The arrays and scalars are the kernel's, as :mod:`flashnumba.stages.heads` names them; ``batch``, ``head`` and
    ``block`` int64. All threads of a block call it, with ``tiles.shared`` bytes of dynamic shared memory. Between two
    calls lies a barrier, so that nobody reads tiles that the next call fills.

    Args:
        tiles: with one or two slots.
        element: float16 or bfloat16; or one of 8 bits, whose arrays are uint8, with o in bfloat16, ``vector`` 16 and a
            head dimension that is a multiple of 16. With tiles of ``nbytes`` 1 it is multiplied as it is, and V lies as
            :mod:`flashnumba.tiles.fp8` wants it; with ``kv_bytes`` 1 as float16.
        vector: as :attr:`flashnumba.stages.heads.Shape.vector`.
        arch: "75" copies and multiplies with what sm_75 has; "80" with cp.async.
        even: the head dimension is ``tiles.d``.
        traced: ``attend`` takes one argument more, the ``log`` of :mod:`flashnumba.tiles.marks`, and leaves marks. Step
            j is that of K_j and V_j; slots are K's, then V's. Only with 16-bit elements and P by registers.
        chain: how P comes from the first product to the second, of :data:`flashnumba.tiles.chain.WAYS`; it takes
            :func:`flashnumba.tiles.chain.shared_of` further bytes of shared memory.
        scaled: of :data:`flashnumba.tiles.descale.SCALED`. If any, ``attend`` takes ``q_descale, k_descale, v_descale``
            after ``lse``.
        broken: plants one of :data:`FAULTS`, of those of the chain, or of 8 bits ``stale`` and ``twice``.

    Raises:
        ValueError: more than two slots, FP8 tiles that leave no room for O, or a kernel that cannot be traced.
    """
    if tiles.slots > 2:
        raise ValueError(f"slots is {tiles.slots}; this schedule has one or two")
    eight, halves = tiles.nbytes == 1, tiles.kv_bytes == 1
    if eight and tiles.bm * swizzle(tiles.d).pitch > tiles.shared - ALIGNMENT:
        raise ValueError(f"{tiles.bm} rows of {tiles.d} float16 do not fit in the tiles' {tiles.shared} bytes")
    if traced and (eight or halves or chain != "registers"):
        raise ValueError(f"a chain by {chain} of {element} leaves no marks; those of 16 bits by registers do")
    d, bm, bn, threads, frags, slots = tiles.d, tiles.bm, tiles.bn, tiles.threads, tiles.frags, tiles.slots
    pitch = tiles.pitch
    order = order_for(chain, tiles.nbytes)
    inside, stored = "float16" if halves else element, tiles.kv_bytes or tiles.nbytes
    steps = make_steps(tiles, inside, arch, order=order, rescaled=broken != "rescale", stale=broken == "stale")
    if eight:
        steps = with_values_by_columns(steps, tiles, element, arch)
    if halves:
        steps = with_halves(steps, tiles, element, arch)
    factor_for, scale_rows, scale_tile, scale_output = make_descales(
        tiles, scaled, make_halves(element, arch).log2 if halves else 0, broken
    )
    clear, negate_q, load_q, multiply_qk, flatten = (
        steps.clear, steps.negate_q, steps.load_q, steps.multiply_qk, steps.flatten
    )  # fmt: skip
    keep, softmax_pv = make_chain(chain, tiles, inside, steps, arch, broken)
    softmax_pv = _make_marked(tiles, steps) if traced else _make_unmarked(softmax_pv)
    lane_of_q, lane_of_k, lane_of_v = steps.q_lane, steps.k_lane, steps.v_lane
    store_sums = make_store_sums(tiles, steps.total, 2.0**-P_LOG2 if eight else 1.0)
    next_row = int(broken != "causal")
    hide = make_hide(tiles, steps.mask, tail=broken != "tail", next_row=next_row)
    out = "bfloat16" if eight or halves else element
    store = make_store(tiles, out, vector, arch, even=even, in_fours=halves)
    copy_q = make_copy_tile(bm, d, threads, vector, arch, even=even, nbytes=tiles.nbytes)
    if halves:
        copy_q = make_copy_as_float16(bm, d, threads, element, arch)
    copied = None if order == NATURAL else order
    if broken == "order":
        copied = None if copied else STRIDED
    copy_k = make_copy_tile(
        bn, d, threads, vector, arch, even=even, on=broken != "swizzle", order=copied, nbytes=stored
    )
    copy_v = make_copy_tile(bn, d, threads, vector, arch, even=even, nbytes=stored)
    if eight:
        copy_v = make_copy_by_columns(tiles)
    slot_bytes, apart = tiles.slot, eight and broken != "o_barrier"
    o_regs, s_regs, rows_held, q_regs = frags * d // 2, frags * bn // 2, 2 * frags, max(1, 4 * frags * tiles.q_held)
    no_barrier, no_v_barrier, early = broken == "barrier", broken == "v_barrier", broken == "early_copy"
    swapped, no_sign = broken == "stride", broken == "sign"

    wait, commit = make_waiting(copies_ahead(vector, arch), 0, waits=broken != "wait")
    mark = make_marks(traced).mark

    @device
    def attend_all(q, k, v, o, lse, q_descale, k_descale, v_descale, scale, causal, batch, head, block, log):
        smem = cuda.shared.array(0, uint8)
        q_tile = (shared_address(smem) + uint32(ALIGNMENT - 1)) & uint32(0x100000000 - ALIGNMENT)
        k_tile = q_tile + uint32(bm * pitch)
        v_tile = k_tile + uint32(slots * slot_bytes)
        p_tile = v_tile + uint32(slots * slot_bytes)
        lane = int32(cuda.threadIdx.x & 31)
        warp_row = int32((cuda.threadIdx.x >> 5) * (16 * frags))

        m_rows, n_rows, columns = q.shape[2], k.shape[2], q.shape[3]
        row0, offset = block * bm, n_rows - m_rows
        head_kv = head // (q.shape[1] // k.shape[1])
        q_from, k_from = address_of(q, batch, head, row0), address_of(k, batch, head_kv, int64(0))
        v_from = address_of(v, batch, head_kv, int64(0))
        v_row, v_column = v.strides[2], v.strides[3]
        if swapped:
            v_row, v_column = v.strides[3], v.strides[2]

        end, whole = seen_keys(row0, bm, n_rows, offset, causal, next_row)
        last = (end + (bn - 1)) // bn

        factor = factor_for(scale, q_descale, k_descale, batch, head, head_kv)
        q_lane, k_lane, v_lane = lane_of_q(q_tile, warp_row, lane), lane_of_k(k_tile, lane), lane_of_v(v_tile, lane)
        kept = cuda.local.array(2, uint32)
        keep(kept, p_tile, warp_row, lane)
        held = cuda.local.array(q_regs, uint32)
        s = cuda.local.array(s_regs, float32)
        acc = cuda.local.array(o_regs, float32)
        m = cuda.local.array(rows_held, float32)
        l = cuda.local.array(rows_held, float32)
        clear(acc, m, l)
        of_q = cuda.local.array(rows_held, float32)
        scale_rows(of_q, q_descale, batch, head, int64(1), row0 + warp_row + (lane >> 2), m_rows)

        mark(log, COPY, 0, ANY)
        copy_q(q_tile, q_from, q.strides[2], q.strides[3], m_rows - row0, columns)
        mark(log, COPY, 0, 0)
        copy_k(k_tile, k_from, k.strides[2], k.strides[3], n_rows, columns)
        if slots == 2:
            mark(log, COPY, 0, slots)
            copy_v(v_tile, v_from, v_row, v_column, n_rows, columns)
        commit()
        mark(log, WAIT, 0, ANY)
        wait()
        cuda.syncthreads()  # Q is there for all
        mark(log, OTHER, 0, ANY)
        if scale < float32(0) and not no_sign:
            negate_q(q_tile, warp_row, lane)
        load_q(held, q_lane)
        for j in range(int64(0), last):
            here = uint32(0)
            if slots == 2:
                here = uint32(j & 1) * uint32(slot_bytes)
            if early:
                copy_v(v_tile, v_from + j * bn * v_row, v_row, v_column, n_rows - j * bn, columns)
            mark(log, WAIT, j, ANY)
            wait()
            if not no_barrier:
                cuda.syncthreads()  # K_j (and V_j) are there for all, and nobody reads the slots filled next
            if slots == 2:
                if j + 1 < last:
                    other, key = uint32(slot_bytes) - here, (j + 1) * bn
                    mark(log, COPY, j + 1, (j + 1) & 1)
                    copy_k(
                        k_tile + other, k_from + key * k.strides[2], k.strides[2], k.strides[3], n_rows - key, columns
                    )
                    mark(log, COPY, j + 1, slots + ((j + 1) & 1))
                    copy_v(v_tile + other, v_from + key * v_row, v_row, v_column, n_rows - key, columns)
            elif not early:
                mark(log, COPY, j, 1)
                copy_v(v_tile, v_from + j * bn * v_row, v_row, v_column, n_rows - j * bn, columns)
            commit()
            mark(log, QK, j, j & (slots - 1))
            multiply_qk(s, held, q_lane, k_lane + here)
            mark(log, SOFTMAX, j, ANY)
            scale_tile(s, acc, of_q, k_descale, v_descale, batch, head_kv, j * bn)  # of FP8 in blocks alone
            if scale == float32(0):
                flatten(s)
            if (j + 1) * bn > whole:
                hide(s, j, row0 + warp_row + (lane >> 2), int64(1), offset, causal, n_rows, lane)
            if slots == 1:
                mark(log, WAIT, j, 1)
                wait()
                if not no_v_barrier:
                    cuda.syncthreads()  # V_j is there for all, and nobody reads K_j any more
                if j + 1 < last:
                    key = (j + 1) * bn
                    mark(log, COPY, j + 1, 0)
                    copy_k(k_tile, k_from + key * k.strides[2], k.strides[2], k.strides[3], n_rows - key, columns)
                commit()
            softmax_pv(s, acc, m, l, factor, v_lane + here, kept, log, j, slots + (j & (slots - 1)))

        mark(log, STORE, last, ANY)
        scale_output(acc, v_descale, batch, head_kv, (last - 1) * bn)
        store_sums(lse, m, l, factor, batch, head, row0 + warp_row + (lane >> 2), m_rows, lane)
        if apart:
            cuda.syncthreads()  # nobody reads K any more: O takes twice the room of Q
        o_from = address_of(o, batch, head, row0)
        store(o_from, o.strides[2], o.strides[3], acc, l, q_tile, warp_row, lane, m_rows - row0, columns)

    @device
    def attend(q, k, v, o, lse, scale, causal, batch, head, block):
        attend_all(q, k, v, o, lse, None, None, None, scale, causal, batch, head, block, None)

    @device
    def attend_marked(q, k, v, o, lse, scale, causal, batch, head, block, log):
        attend_all(q, k, v, o, lse, None, None, None, scale, causal, batch, head, block, log)

    @device
    def attend_scaled(q, k, v, o, lse, q_descale, k_descale, v_descale, scale, causal, batch, head, block):
        attend_all(q, k, v, o, lse, q_descale, k_descale, v_descale, scale, causal, batch, head, block, None)

    return attend_marked if traced else attend_scaled if scaled else attend


def _make_unmarked(softmax_pv: DeviceFunction) -> DeviceFunction:
    """A chain's ``softmax_pv`` with ``log, step, slot`` behind its arguments."""

    @device
    def unmarked(s, acc, m, l, factor, v_lane, kept, log, step, slot):
        softmax_pv(s, acc, m, l, factor, v_lane, kept)

    return unmarked


def _make_marked(tiles: AttentionTiles, steps: Steps) -> DeviceFunction:
    """``Steps.softmax_pv`` with the same arguments, and marks between its parts."""
    mark = make_marks(True).mark
    raise_maximum, exponentials, multiply_pv = steps.raise_maximum, steps.exponentials, steps.multiply_pv
    rows, p_regs, k_steps = 2 * tiles.frags, tiles.frags * tiles.bn // 4, tiles.bn // 16

    @device
    def marked(s, acc, m, l, factor, v_lane, kept, log, step, slot):
        p = cuda.local.array(p_regs, uint32)
        origin = cuda.local.array(rows, float32)
        mark(log, SOFTMAX, step, ANY)
        raise_maximum(s, acc, m, l, origin, factor)
        for k in range(k_steps):
            if k > 0:
                mark(log, SOFTMAX, step, ANY)
            exponentials(p, s, l, origin, factor, k)
            mark(log, PV, step, slot)
            multiply_pv(acc, p, v_lane, k)

    return marked


def tiles_for(d: int, arch: str, vector: int = 16) -> AttentionTiles:
    """Tiles for a head dimension: on sm_90 those that were fastest on an H200, elsewhere what leaves registers enough.

    Shared memory a block: 227 KB on sm_90, 163 KB on sm_80, 99 KB on sm_86, 89 and 120, 64 KB on sm_75.
    """
    number = int(arch.rstrip("a"))
    d = -(-d // 32) * 32
    if number < 80:
        return AttentionTiles(d, 64, 32) if d <= 128 else AttentionTiles(d, 32, 16, warps=2)
    if vector < 16:  # addresses of narrow copies take registers
        return AttentionTiles(d, 64, 64 if d <= 128 and vector > 2 else 32)
    if d > 128:
        return AttentionTiles(d, 64, 64, subtract=number == 90, q_held=3 if d > 192 and number == 90 else 2)
    if number == 90:
        if d <= 64:
            return AttentionTiles(d, 128, 128, slots=2, q_held=2 if d == 32 else 0)
        return AttentionTiles(d, 128, 64, slots=2, lazy=True)
    if d <= 64:
        wide = 128 if number < 90 else 64
        return AttentionTiles(d, 128, wide, slots=2 if number == 80 else 1)
    return AttentionTiles(d, 128, 64 if number < 90 else 32, lazy=True)


def tier(arch: str) -> str:
    """What kernels are made for: those for sm_75 do without instructions that came with sm_80."""
    return "75" if int(arch.rstrip("a")) < 80 else "80"


def check_element(element: str, arch: str) -> None:
    """ValueError if tensor cores do not multiply these elements in the way that is needed here."""
    if element == "float32":
        raise ValueError("q is float32; tensor cores would round it to 11 bits: use flash_forward.simt")
    if element == "bfloat16" and tier(arch) == "75":
        raise ValueError(f"q is bfloat16, and sm_{arch} has no product for it: use flash_forward.simt")
