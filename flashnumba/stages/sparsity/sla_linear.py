"""The linear part of SLA's forward, as the end of a block of attention: O = O^s + O^l for its rows.

When the last key tile is done, Q still lies in shared memory, and K's and V's room is free: phi takes Q's place, and
H_i that of K and V. O^s stays where it is, as the sum that a product goes on from: with t = phi Z_i + eps ::

    O = (t O^s + phi H_i) / t                 O^s alone where t is 0, with the bits that it has

What that saves beside a kernel of its own: O^s and phi are not written and read again, and other blocks of the
multiprocessor multiply while this one waits for H_i.

Source: as :mod:`flashnumba.stages.sparsity.sla_reference`.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import (
    cp_async_16_zfill,
    cp_async_commit,
    cp_async_wait,
    lane_id,
    ld_global_b32,
    ldmatrix_x4,
    rcp_approx,
    syncwarp,
)
from flashnumba.machine.numba import cuda, float32, int32, int64, uint32, uint64
from flashnumba.stages.sparsity.sla_features import make_features
from flashnumba.stages.sparsity.sla_pieces import address_of
from flashnumba.tiles.attention import make_steps, share_of
from flashnumba.tiles.sizes import AttentionTiles
from flashnumba.tiles.swizzle import swizzle
from flashnumba.tiles.tensor import make_multiply

__all__ = ["FAULTS", "make_linear"]

FAULTS = ("state", "state_wait", "state_barrier", "divide", "sparse", "columns")
"""What can be planted: "state" lays H_i where others still read K or V; "state_wait" and "state_barrier" use H_i before
it is there; "divide" leaves t out, "sparse" O^s; "columns" has a phi of columns that are not there."""


@cache
def make_linear(
    tiles: AttentionTiles, element: str, feature_map: str, arch: str = "80", *, columns: int = 0, broken: str = ""
) -> DeviceFunction:  # fmt: skip
    """``add_linear(acc, l, q_tile, room, sums, share, eps, batch, head, block, warp_row, rows)``: a warp's O, of
    :mod:`flashnumba.tiles.attention` and not yet divided by l, becomes O; l becomes 0, so that a store divides no more.

    ``share`` gets 1 / t, or 0 where t is 0. ``room`` is where K and V were, ``rows`` how many there are from the
    block's first one on. ``columns`` as :func:`~.sla_features.make_features`, ``broken`` of :data:`FAULTS`.

    Raises:
        ValueError: H_i does not fit where K and V were.
    """
    d, bm, frags, layout = tiles.d, tiles.bm, tiles.frags, swizzle(tiles.d)
    if 2 * d * d > 2 * tiles.slots * tiles.slot:
        raise ValueError(f"d is {d} with {tiles.slots} slots of {tiles.slot} bytes; H_i has {2 * d * d}")
    pitch, place, step, steps, groups = layout.pitch, layout.at, layout.step, d // 16, d // 8
    a_regs, rows_held, z_words, threads = 4 * frags, 2 * frags, d // 8, tiles.threads
    of_attention, multiply = make_steps(tiles, element, arch), make_multiply(element, arch)
    lane_of_rows, lane_of_state, multiply_pv, row_total = (
        of_attention.q_lane, of_attention.v_lane, of_attention.multiply_pv, of_attention.total,
    )  # fmt: skip
    features = make_features(d, element, feature_map, arch, columns=columns, masked=broken != "columns")
    lines = 8 * tiles.threads // d  # rows of H that the block copies at once
    copies, period = d // lines, max(1, 8 // lines)
    wait_all = cp_async_wait(0)
    frees, waits, meets, divides, with_sparse = (broken != fault for fault in FAULTS[:5])

    @device
    def copy_state(room, source, warp_row):
        """H, which is packed. Lanes are asked for anew: addresses made of them then take no registers before."""
        thread = uint32(lane_id()) + uint32(2 * uint32(warp_row) // uint32(frags))
        row, chunk = thread // uint32(groups), thread % uint32(groups)
        for i in range(copies):
            to = place(room, row + uint32(i % period * lines), chunk) + uint32(i // period * period * lines * pitch)
            cp_async_16_zfill(to, uint64(source + int64(16) * int64(thread) + int64(16 * threads * i)), uint32(16))
        cp_async_commit()

    @device
    def load_z(z, z_from):
        """Z_i as B operands: of eight columns it is the first one, and the others are zeros."""
        lane = int32(lane_id())
        for i in range(z_words):
            z[i] = uint32(0)
            if lane < int32(4):
                z[i] = ld_global_b32(uint64(z_from + int64(16 * i) + int64(4) * int64(lane)))

    @device
    def multiply_z(of_z, z, phi_lane):
        """phi Z, in the first of the columns that the first of each four lanes holds."""
        a = cuda.local.array(4, uint32)
        for i in range(a_regs):
            of_z[i] = float32(0)
        for k in range(steps):
            for f in range(frags):
                ldmatrix_x4(a, 0, step(phi_lane, k) + uint32(f * 16 * pitch))
                multiply(of_z, 4 * f, a, 0, z, 2 * k)

    @device
    def multiply_phi(acc, phi_lane, state_lane):
        a = cuda.local.array(a_regs, uint32)
        for k in range(steps):
            for f in range(frags):
                ldmatrix_x4(a, 4 * f, step(phi_lane, k) + uint32(f * 16 * pitch))
            multiply_pv(acc, a, state_lane + uint32(k * 16 * pitch), 0)

    @device
    def scale_row(acc, f, half, factor):
        for n in range(groups):
            for i in range(2):
                acc[(f * groups + n) * 4 + 2 * half + i] *= factor

    @device
    def add_linear(acc, l, q_tile, room, sums, share, eps, batch, head, block, warp_row, rows):
        if frees:
            cuda.syncthreads()  # nobody reads K or V any more; H takes their place
        h_from = address_of(sums, batch, head, block)
        copy_state(room, h_from, warp_row)
        z = cuda.local.array(z_words, uint32)
        of_z = cuda.local.array(a_regs, float32)
        lane = int32(lane_id())
        for f in range(frags):
            features(q_tile, warp_row + int32(16 * f), lane, rows)
        syncwarp()  # phi of the warp's rows is there
        load_z(z, h_from + int64(2 * d * d))
        phi_lane = lane_of_rows(q_tile, warp_row, lane)
        multiply_z(of_z, z, phi_lane)
        for f in range(frags):
            for half in range(2):
                r = 2 * f + half
                total, row = row_total(of_z[4 * f + 2 * half]) + eps, int64(warp_row + (lane >> 2) + 16 * f + 8 * half)
                there = total != float32(0)
                factor = share_of(row_total(l[r]))
                if divides and there:
                    factor *= total
                l[r] = rcp_approx(total) if divides and there else float32(1)
                scale_row(acc, f, half, factor if with_sparse else float32(0))
                if (lane & 3) == 0 and row < rows:
                    share[batch, head, block * bm + row] = l[r] if there else float32(0)
        if waits:
            wait_all()
        if meets:
            cuda.syncthreads()  # H is there for all
        multiply_phi(acc, phi_lane, lane_of_state(room, lane))
        for f in range(frags):
            for half in range(2):
                scale_row(acc, f, half, l[2 * f + half])
        for r in range(rows_held):
            l[r] = float32(0)

    return add_linear
