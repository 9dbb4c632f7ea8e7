"""The steps of an attention kernel that stores and moves 8-bit elements and multiplies float16: on any GPU.

Q becomes float16 once, on its way into shared memory. A word that ldmatrix brings of K holds four neighbours of a row,
which become two words of two float16; which two of the four does not matter to a sum, as long as Q was dealt out in the
same manner. A word of a *transposed* V holds two columns of two keys, and becomes two words of two keys: one for a
product whose columns are the even ones of sixteen, one for the odd ones::

    V, keys 2q and 2q + 1      v[2q][2g]  v[2q][2g+1]  v[2q+1][2g]  v[2q+1][2g+1]      four bytes of a lane (g, q)
    B of the even columns      v[2q][2g]               v[2q+1][2g]                     two float16, column g of 8
    B of the odd columns                  v[2q][2g+1]               v[2q+1][2g+1]

So V lies by rows, as everybody has it. O's accumulators belong to columns 4 q and 4 q + 2, and 4 q + 1 and 4 q + 3, of
sixteen: a lane has four neighbours. P is float16, and nothing need be said of its range.

Source: PTX ISA, ldmatrix and the fragments of mma.m16n8k16.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import ld_global_v4, ldmatrix_x4, ldmatrix_x4_trans, st_shared_v4
from flashnumba.machine.numba import cuda, float32, int64, uint32, uint64
from flashnumba.tiles.attention import Steps, make_softmax_pv
from flashnumba.tiles.fp8_convert import make_halves
from flashnumba.tiles.sizes import AttentionTiles
from flashnumba.tiles.swizzle import swizzle
from flashnumba.tiles.tensor import make_multiply

__all__ = ["make_copy_as_float16", "with_halves"]


@cache
def make_copy_as_float16(
    rows: int, d: int, threads: int, element: str, arch: str = "80", *, packed: bool = False
) -> DeviceFunction:  # fmt: skip
    """``copy_q`` as of :func:`flashnumba.tiles.copy_tile.make_copy_tile`, from codes to float16; it is done on return.

    16 codes become two chunks of 16 bytes: the first pairs of four words, and the second ones.

    Args:
        packed: rows are those of several heads in turn, with three arguments more.
    """
    chunks = d // 16
    shared_evenly = rows * chunks % threads == 0
    place, along = swizzle(d).at, make_halves(element, arch).along

    @device
    def copy_chunk(tile, row, chunk, source, there):
        raw = cuda.local.array(4, uint32)
        first = cuda.local.array(4, uint32)
        second = cuda.local.array(4, uint32)
        for i in range(4):
            raw[i] = uint32(0)
        if there:
            ld_global_v4(raw, 0, uint64(source))
        for i in range(4):
            first[i], second[i] = along(raw[i])
        to = uint32(4) * (chunk // uint32(2)) + chunk % uint32(2)
        st_shared_v4(place(tile, row, to), first, 0)
        st_shared_v4(place(tile, row, to + uint32(2)), second, 0)

    @device
    def copy_q(tile, source, row_step, column_step, rows_left, columns_left):
        for i in range(rows * chunks // threads):
            index = uint32(cuda.threadIdx.x) + uint32(i * threads)
            row, chunk = index // uint32(chunks), index % uint32(chunks)
            there = int64(row) < rows_left and int64(16) * int64(chunk) < columns_left
            copy_chunk(tile, row, chunk, source + int64(row) * row_step + int64(16) * int64(chunk), there)

    @device
    def copy_packed(tile, source, row_step, column_step, rows_left, columns_left, row0, group, head_step):
        for i in range(-(-rows * chunks // threads)):
            index = uint32(cuda.threadIdx.x) + uint32(i * threads)
            row, chunk = index // uint32(chunks), index % uint32(chunks)
            if shared_evenly or row < uint32(rows):
                at = row0 + int64(row)
                there = at < rows_left and int64(16) * int64(chunk) < columns_left
                origin = source + at // group * row_step + at % group * head_step + int64(16) * int64(chunk)
                copy_chunk(tile, row, chunk, origin, there)

    return copy_packed if packed else copy_q


@cache
def with_halves(steps: Steps, tiles: AttentionTiles, element: str, arch: str) -> Steps:
    """Steps of float16 whose K and V are 8-bit elements in shared memory, both by rows.

    S is ``2^-2 log2`` and O ``2^-log2`` times what it should be, where ``log2`` is that of
    :class:`flashnumba.tiles.fp8_convert.Halves`; O's columns lie as the module says.
    """
    d, bn, frags, q_held = tiles.d, tiles.bn, tiles.frags, tiles.q_held
    d_groups, n_groups, a_regs, both = d // 8, bn // 8, 4 * frags, 8 * frags
    s_regs, q_step, q_pitch = frags * n_groups * 4, swizzle(d).step, tiles.pitch
    layout = swizzle(tiles.kv_units)
    pitch, place, step = layout.pitch, layout.at, layout.step
    multiply, halves = make_multiply("float16", arch), make_halves(element, arch)
    along, across = halves.along, halves.across

    @device
    def k_lane(k_tile, lane):
        return place(k_tile, (lane & 7) + 8 * (lane >> 4), (lane >> 3) & 1)

    @device
    def v_lane(v_tile, lane):
        return place(v_tile, lane & 15, lane >> 4)

    @device
    def multiply_step(s, held, q_lane, k_lane, k):
        """Along 32 columns from 32 k on."""
        a = cuda.local.array(both, uint32)
        raw = cuda.local.array(4, uint32)
        b = cuda.local.array(8, uint32)
        for pair in range(2):
            if 2 * k + pair >= q_held:
                for f in range(frags):
                    ldmatrix_x4(a, pair * a_regs + 4 * f, q_step(q_lane, 2 * k + pair) + uint32(f * 16 * q_pitch))
        for n in range(bn // 16):
            ldmatrix_x4(raw, 0, step(k_lane, k) + uint32(n * 16 * pitch))
            for i in range(4):
                b[i], b[4 + i] = along(raw[i])
            for pair in range(2):
                for f in range(frags):
                    at = (f * n_groups + 2 * n) * 4
                    if 2 * k + pair < q_held:
                        multiply(s, at, held, ((2 * k + pair) * frags + f) * 4, b, 4 * pair)
                        multiply(s, at + 4, held, ((2 * k + pair) * frags + f) * 4, b, 4 * pair + 2)
                    else:
                        multiply(s, at, a, pair * a_regs + 4 * f, b, 4 * pair)
                        multiply(s, at + 4, a, pair * a_regs + 4 * f, b, 4 * pair + 2)

    @device
    def multiply_qk(s, held, q_lane, k_lane):
        for i in range(s_regs):
            s[i] = float32(0)
        # In two loops, as one of eight steps would be too long for the compiler to unroll.
        for k in range(d // 64):
            multiply_step(s, held, q_lane, k_lane, k)
        for k in range(d // 64, d // 32):
            multiply_step(s, held, q_lane, k_lane, k)

    @device
    def multiply_columns(acc, p, v_lane, k, n):
        """Of 32 columns from 32 n on."""
        raw = cuda.local.array(4, uint32)
        b = cuda.local.array(4, uint32)
        ldmatrix_x4_trans(raw, 0, step(v_lane, n) + uint32(k * 16 * pitch))
        for chunk in range(2):
            b[0], b[2] = across(raw[2 * chunk])
            b[1], b[3] = across(raw[2 * chunk + 1])
            for f in range(frags):
                at = (f * d_groups + 4 * n + 2 * chunk) * 4
                multiply(acc, at, p, k * a_regs + 4 * f, b, 0)
                multiply(acc, at + 4, p, k * a_regs + 4 * f, b, 2)

    @device
    def multiply_pv(acc, p, v_lane, k):
        # In two loops, as one of eight steps would be too long for the compiler to unroll.
        for n in range(d // 64):
            multiply_columns(acc, p, v_lane, k, n)
        for n in range(d // 64, d // 32):
            multiply_columns(acc, p, v_lane, k, n)

    softmax_pv = make_softmax_pv(tiles, steps.raise_maximum, steps.exponentials, multiply_pv)
    return steps._replace(
        k_lane=k_lane, v_lane=v_lane, multiply_qk=multiply_qk, multiply_pv=multiply_pv, softmax_pv=softmax_pv
    )
