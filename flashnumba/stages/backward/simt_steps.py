"""Steps of the kernels on CUDA cores: tiles that come in pieces, the two kinds of products, weights handed on, results.

Sixteen neighbouring threads share a row; :mod:`flashnumba.tiles.products` says who has what.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import global_address, st_shared_f32
from flashnumba.machine.numba import cuda, float32, uint32, uint64
from flashnumba.stages.backward.simt_tiles import PAD, Tiles
from flashnumba.tiles.elements import scalar
from flashnumba.tiles.products import LANES, column_pair, lane_and_row, make_multiply, make_multiply_transposed
from flashnumba.tiles.window import window

__all__ = ["GradientSteps", "make_steps", "start_of"]


class GradientSteps(NamedTuple):
    """What both kernels do with tiles, as device functions; ``raw`` is the registers of a move.

    Attributes:
        raw_size: of ``raw``, uint32.
        load: ``load(raw, tile, source, row_step, column_step, rows_left, columns_left)``: the block's own rows.
        multiply: ``multiply(raw, c, tile, piece, ...)``: C += own rows times the others', walking over columns.
        accumulate: ``accumulate(raw, acc, weights, piece, ...)``: acc += weights times the others' rows.
        put: ``put(c, weights)``: to shared memory.
        store: ``store(out, row0, acc, factor)``: the block's rows of ``out``, [rows, d].
    """

    raw_size: int
    load: DeviceFunction
    multiply: DeviceFunction
    accumulate: DeviceFunction
    put: DeviceFunction
    store: DeviceFunction


@cache
def make_steps(tiles: Tiles, element: str, broken: str = "") -> GradientSteps:
    """The steps for some tiles and an element type; ``broken`` as :data:`flashnumba.stages.backward.simt.FAULTS`."""
    D, OWN, OTHER, BD, BK, R = tiles.d, tiles.own, tiles.other, tiles.bd, tiles.bk, tiles.rows
    C, CD = OTHER // LANES, D // LANES
    own_pitch, piece_pitch, weight_pitch = D + PAD, BD + PAD, OTHER + PAD
    moves = [
        window(element, tiles.vector, tiles.threads, *size)
        for size in ((OWN, BD, own_pitch), (OTHER, BD, piece_pitch), (BK, D, D))
    ]
    (_, fetch_own, put_own), (_, fetch_columns, put_columns), (_, fetch_rows, put_rows) = moves
    product = make_multiply_transposed(R, C, BD, own_pitch, piece_pitch)
    weigh = make_multiply(R, CD, BK, weight_pitch, D)
    place, write = lane_and_row(R), scalar(element, "75").store
    free, ready = broken != "free", broken != "ready"

    @device
    def load(raw, tile, source, row_step, column_step, rows_left, columns_left):
        for col in range(0, D, BD):
            fetch_own(raw, source + uint64(col * column_step), row_step, column_step, rows_left, columns_left - col)
            put_own(raw, tile + uint32(4 * col))

    @device
    def multiply(raw, c, tile, piece, source, row_step, column_step, rows_left, columns_left):
        for i in range(R * C):
            c[i] = float32(0)
        for col in range(0, D, BD):
            fetch_columns(raw, source + uint64(col * column_step), row_step, column_step, rows_left, columns_left - col)
            if free:
                cuda.syncthreads()  # all have read the last piece before this one takes its place
            put_columns(raw, piece)
            if ready:
                cuda.syncthreads()  # the piece is there, and the block's own rows before the first
            product(c, tile + uint32(4 * col), piece)

    @device
    def accumulate(raw, acc, weights, piece, source, row_step, column_step, rows_left, columns_left):
        for first in range(0, min(OTHER, rows_left), BK):
            fetch_rows(raw, source + uint64(first * row_step), row_step, column_step, rows_left - first, columns_left)
            if free:
                cuda.syncthreads()  # all have read the last piece before this one takes its place
            put_rows(raw, piece)
            if ready:
                cuda.syncthreads()  # the piece is there, and the weights before the first
            weigh(acc, weights + uint32(4 * first), piece)

    @device
    def put(c, weights):
        x, y = place()
        for i in range(R):
            for j in range(C):
                st_shared_f32(weights + uint32(4 * ((y + i) * weight_pitch + x + LANES * j)), c[i * C + j])

    @device
    def store(out, row0, acc, factor):
        x, y = place()
        for i in range(R):
            row = row0 + y + i
            if row < out.shape[0]:
                for c in range(CD):
                    col = column_pair(x, c)
                    if col < out.shape[1]:
                        write(out, row, col, acc[i * CD + c] * factor)

    return GradientSteps(max(move.words for move in moves), load, multiply, accumulate, put, store)


@device
def start_of(x, batch, head, row):
    """The address of a row of a 4-D array."""
    return global_address(x) + uint64(batch * x.strides[0] + head * x.strides[1] + row * x.strides[2])
