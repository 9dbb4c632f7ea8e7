"""What a warp does with one slice of Q, K or V, and how O leaves through a slot.

A slice lies in its slot in strips of 16 columns, the depth of one product on tensor cores: strip after strip, each
with its rows 32 bytes apart. Eight rows of a strip fill all banks twice, so of rows 4 to 7 of each eight the two chunks
of 16 bytes are exchanged, and an ``ldmatrix`` meets no bank twice. A lane's address is then one number for all strips
and slices; what comes on top is a constant::

    slice of K   bn x d/c     strip k: columns 16 k .. of all keys     one step of S = Q K^T
    slice of V   bn/c x d     strip n: columns 16 n .. of its keys     16 columns of O

Registers are as :mod:`flashnumba.tiles.attention` has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import (
    ld_shared_v4,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    st_global_b16,
    st_global_v4,
    st_shared_b32,
    syncwarp,
)
from flashnumba.machine.numba import cuda, float32, int64, uint16, uint32, uint64
from flashnumba.stages.staged_buffers.budget import registers_held, ring_bytes, slot_bytes
from flashnumba.tiles.attention import share_of
from flashnumba.tiles.copy_strips import STRIP
from flashnumba.tiles.elements import vectors
from flashnumba.tiles.reduce import lanes_sum
from flashnumba.tiles.sizes import ALIGNMENT, AttentionTiles
from flashnumba.tiles.swizzle import make_place
from flashnumba.tiles.tensor import make_multiply

__all__ = ["SliceSteps", "StagedTiles", "make_slice_steps"]

MOST_HELD = 224
"""Registers for O, S and Q that leave room for the rest."""


@dataclass(frozen=True)
class StagedTiles:
    """Sizes of a kernel of this stage.

    Attributes:
        d: head dimension that is computed, a multiple of 64; the user's may be smaller.
        bm, bn: rows of Q a block, keys a tile; a slice of Q must fit a slot, so bm is at most bn.
        warps: a block; each owns ``bm / warps`` rows, a multiple of 16.
        lazy, subtract: as in :class:`flashnumba.tiles.sizes.AttentionTiles`.
        min_blocks: blocks a multiprocessor that the compiler leaves registers for; 0 promises none.

    Raises:
        ValueError: sizes that do not fit one another; the message says which.
    """

    d: int
    bm: int = 64
    bn: int = 64
    warps: int = 4
    lazy: bool = True
    subtract: bool = False
    min_blocks: int = 0

    def __post_init__(self) -> None:
        if self.d % 64 or not 64 <= self.d <= 256:
            raise ValueError(f"d is {self.d}; it must be a multiple of 64 from 64 to 256, to be cut into four")
        if self.bn % 64 or self.bn <= 0:
            raise ValueError(f"bn is {self.bn}; it must be a multiple of 64: four slices of 16 keys")
        if self.bm % (16 * self.warps) or not 0 < self.bm <= self.bn:
            raise ValueError(
                f"bm is {self.bm}; it must be a multiple of 16 rows for each of {self.warps} warps, and at most bn, "
                f"{self.bn}"
            )
        if self.held > MOST_HELD:
            raise ValueError(
                f"{self.bm} x {self.bn} tiles by {self.warps} warps take {self.held} registers for O, S and Q; "
                f"{MOST_HELD} leave room for the rest"
            )

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def frags(self) -> int:
        """Fragments of 16 rows a warp."""
        return self.bm // (16 * self.warps)

    @property
    def held(self) -> int:
        """Registers a thread for O, S and Q."""
        return registers_held(self.d, self.bn, 16 * self.frags)

    @property
    def attention(self) -> AttentionTiles:
        """The same for the steps that know nothing of slices."""
        return AttentionTiles(self.d, self.bm, self.bn, self.warps, lazy=self.lazy, subtract=self.subtract)

    def slot(self, cut: str) -> int:
        """Bytes of a slot."""
        return slot_bytes(cut, self.d, self.bn)

    def shared(self, stages: int, cut: str) -> int:
        """Bytes of dynamic shared memory."""
        return ALIGNMENT + ring_bytes(stages, cut, self.d, self.bn)


class SliceSteps(NamedTuple):
    """Device functions on registers and on a lane's address in a slot, ``slot + lane``; ``part`` is a constant.

    Attributes:
        q_lane, k_lane, v_lane: ``(warp_row or nothing, lane) -> offset``: where a lane's ldmatrix begins in a slot.
        load_q: ``(held, at, part)``: the warp's rows of a slice of Q.
        negate_q: ``(held)``: -Q.
        multiply_qk: ``(s, held, at, part)``: S = Q K^T for a slice of K; the first one begins S.
        multiply_pv: ``(acc, p, at, k, i)``: O += P V for keys 16 k and on of the tile, 16 i and on of the slice.
        store: ``(o_from, row_step, column_step, acc, l, slot, warp_row, lane, rows, columns)``: O / l, written slice by
            slice by way of the warp's rows of a slot, so that stores are 16 bytes wide.
    """

    q_lane: DeviceFunction
    k_lane: DeviceFunction
    v_lane: DeviceFunction
    load_q: DeviceFunction
    negate_q: DeviceFunction
    multiply_qk: DeviceFunction
    multiply_pv: DeviceFunction
    store: DeviceFunction


@cache
def make_slice_steps(
    tiles: StagedTiles, parts: int, element: str, vector: int = 16, arch: str = "80", *, even: bool = True
) -> SliceSteps:
    """The steps for tiles cut into ``parts`` slices."""
    d, bm, bn, frags = tiles.d, tiles.bm, tiles.bn, tiles.frags
    multiply, place = make_multiply(element, arch), make_place(2)
    pack, row_total = vectors(element, 4, arch=arch).pack, lanes_sum(4)
    a_regs, rows_held, d_groups, n_groups, wide = 4 * frags, 2 * frags, d // 8, bn // 8, vector == 16
    depth, keys, q_regs = d // STRIP // parts, bn // parts, 4 * frags * d // STRIP
    line, q_strip, k_strip, v_strip = 2 * STRIP, 2 * STRIP * bm, 2 * STRIP * bn, 2 * STRIP * keys

    @device
    def q_lane(warp_row, lane):
        return place(warp_row + (lane & 15), lane >> 4)

    @device
    def k_lane(lane):
        return place((lane & 7) + 8 * (lane >> 4), (lane >> 3) & 1)

    @device
    def v_lane(lane):
        return place(lane & 15, lane >> 4)

    @device
    def load_q(held, at, part):
        for k in range(depth):
            for f in range(frags):
                ldmatrix_x4(held, ((part * depth + k) * frags + f) * 4, at + uint32(k * q_strip + f * 16 * line))

    @device
    def negate_q(held):
        for i in range(q_regs):
            held[i] ^= uint32(0x80008000)

    @device
    def multiply_qk(s, held, at, part):
        b = cuda.local.array(4, uint32)
        if part == 0:
            for i in range(frags * n_groups * 4):
                s[i] = float32(0)
        for k in range(depth):
            for n in range(bn // 16):
                ldmatrix_x4(b, 0, at + uint32(k * k_strip + n * 16 * line))
                for f in range(frags):
                    to, of = (f * n_groups + 2 * n) * 4, ((part * depth + k) * frags + f) * 4
                    multiply(s, to, held, of, b, 0)
                    multiply(s, to + 4, held, of, b, 2)

    @device
    def multiply_pv(acc, p, at, k, i):
        b = cuda.local.array(4, uint32)
        for n in range(d // 16):
            ldmatrix_x4_trans(b, 0, at + uint32(n * v_strip + i * 16 * line))
            for f in range(frags):
                multiply(acc, (f * d_groups + 2 * n) * 4, p, k * a_regs + 4 * f, b, 0)
                multiply(acc, (f * d_groups + 2 * n + 1) * 4, p, k * a_regs + 4 * f, b, 2)

    @device
    def store(o_from, row_step, column_step, acc, l, slot, warp_row, lane, rows, columns):
        share = cuda.local.array(rows_held, float32)
        for r in range(rows_held):
            share[r] = share_of(row_total(l[r]))
        raw = cuda.local.array(4, uint32)
        # Of each strip eight neighbouring lanes write 32 bytes of four rows.
        first, chunk = warp_row + (lane >> 1), lane & 1
        for part in range(parts):
            for r in range(rows_held):
                row = warp_row + 16 * (r // 2) + 8 * (r % 2) + (lane >> 2)
                for n in range(2 * depth):
                    at = ((r // 2) * d_groups + part * 2 * depth + n) * 4 + 2 * (r % 2)
                    to = slot + uint32(n // 2 * q_strip) + place(row, n % 2) + uint32(4 * (lane & 3))
                    st_shared_b32(to, pack(acc[at] * share[r], acc[at + 1] * share[r]))
            syncwarp()  # the rows are there
            for k in range(depth):
                for f in range(frags):
                    row = int64(first) + int64(16 * f)
                    column = int64(8 * chunk) + int64((part * depth + k) * STRIP)
                    if row < rows and (even or column < columns):
                        ld_shared_v4(raw, 0, slot + uint32(k * q_strip) + place(first + 16 * f, chunk))
                        to_row = o_from + row * row_step + column * column_step
                        if wide:
                            st_global_v4(uint64(to_row), raw, 0)
                        else:
                            for e in range(8):
                                if column + e < columns:
                                    half = uint16(raw[e // 2] >> uint32(16 * (e % 2)))
                                    st_global_b16(uint64(to_row + e * column_step), half)
            syncwarp()  # they are read, and the next slice may lie there

    return SliceSteps(q_lane, k_lane, v_lane, load_q, negate_q, multiply_qk, multiply_pv, store)
