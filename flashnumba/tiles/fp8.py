"""What 8-bit elements change in the steps of an attention kernel that multiplies them as they are: V by columns.

A register of an operand holds four neighbours along the sum. For Q and K these are neighbours in a row, and ldmatrix,
which moves pairs of bytes, brings them as it brings 16-bit elements. For V they are neighbouring *keys* of one column,
and ldmatrix cannot transpose bytes. So V has to lie by columns in global memory already: keys next to one another, each
column at a multiple of 16 bytes. Its tile in shared memory has a row for each column of V. P is e4m3 whatever V is.

Kernels that multiply them as float16 are another matter: :mod:`flashnumba.tiles.fp8_halves`.

Source: PTX ISA, ldmatrix; FlashAttention-3, arXiv 2407.08608, section 3.3, which transposes V in the kernel instead.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import ldmatrix_x4
from flashnumba.machine.numba import cuda, uint32
from flashnumba.tiles.attention import Steps
from flashnumba.tiles.copy_tile import make_copy_tile
from flashnumba.tiles.sizes import AttentionTiles
from flashnumba.tiles.swizzle import swizzle
from flashnumba.tiles.tensor import make_multiply

__all__ = ["make_copy_by_columns", "tiles_for", "with_values_by_columns"]


@cache
def make_copy_by_columns(tiles: AttentionTiles) -> DeviceFunction:
    """``copy_v(tile, source, row_step, column_step, rows_left, columns_left)`` as of
    :func:`flashnumba.tiles.copy_tile.make_copy_tile`, for V with ``row_step`` 1: columns of V become rows of the tile.
    """
    bn = tiles.bn
    whole, part = (make_copy_tile(tiles.d, bn, tiles.threads, 16, even=even, nbytes=1) for even in (True, False))

    @device
    def copy_v(tile, source, row_step, column_step, rows_left, columns_left):
        if rows_left >= bn:
            whole(tile, source, column_step, row_step, columns_left, rows_left)
        else:
            part(tile, source, column_step, row_step, columns_left, rows_left)

    return copy_v


@cache
def with_values_by_columns(steps: Steps, tiles: AttentionTiles, element: str, arch: str) -> Steps:
    """Steps whose ``v_lane`` and ``multiply_pv`` are for V by columns, 32 keys at a time."""
    frags, d = tiles.frags, tiles.d
    d_groups, a_regs = d // 8, 4 * frags
    layout = swizzle(tiles.bn // 2)
    pitch, place, step = layout.pitch, layout.at, layout.step
    multiply = make_multiply(element, arch, weights=True)

    @device
    def v_lane(v_tile, lane):
        return place(v_tile, (lane & 7) + 8 * (lane >> 4), (lane >> 3) & 1)

    @device
    def multiply_pv(acc, p, v_lane, k):
        b = cuda.local.array(4, uint32)
        for n in range(d // 16):
            ldmatrix_x4(b, 0, step(v_lane, k) + uint32(n * 16 * pitch))
            for f in range(frags):
                multiply(acc, (f * d_groups + 2 * n) * 4, p, k * a_regs + 4 * f, b, 0)
                multiply(acc, (f * d_groups + 2 * n + 1) * 4, p, k * a_regs + 4 * f, b, 2)

    return steps._replace(v_lane=v_lane, multiply_pv=multiply_pv)


def tiles_for(d: int, arch: str) -> AttentionTiles:
    """Tiles for a head dimension. What registers hold is as large as for 16 bits, what lies in shared memory half.

    Elsewhere than on sm_89 the assembler's code takes more registers, so a warp has one fragment of rows.
    """
    d = -(-d // 64) * 64
    if d > 128:
        few = arch in ("89", "120a")
        return AttentionTiles(d, 64, 64, slots=1 if few else 2, lazy=not few, subtract=not few, nbytes=1)
    if arch != "89":
        return AttentionTiles(d, 64, 64, slots=2, lazy=True, nbytes=1)
    return AttentionTiles(d, 128, 64, slots=2 if d == 64 else 1, lazy=d == 128, nbytes=1)
