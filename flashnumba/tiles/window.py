"""A window of a strided matrix on its way from global to shared memory, as float32.

A window is ``rows`` x ``cols`` elements that the threads of a block move together, through registers, in two steps:
``fetch`` starts the loads, ``put`` writes what has come to shared memory. Between the two a kernel may wait for other
threads, or work on the last window. What lies outside the matrix becomes 0: nothing is read there, and it adds nothing
to a sum of products.

Neighbouring threads take neighbouring columns, which is what memory likes if these lie side by side. In shared memory
rows lie ``pitch`` words apart; with 4 more than a multiple of 32, eight lanes that read 16 bytes each from eight rows,
one below the other, meet all 32 banks.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import st_shared_f32, st_shared_v4_f32
from flashnumba.machine.numba import cuda, float32, int64, uint32, uint64
from flashnumba.tiles.elements import ITEMSIZE, vectors

__all__ = ["Window", "window"]


class Window(NamedTuple):
    """Device functions that move one window.

    Attributes:
        words: uint32 registers a thread that ``fetch`` fills and ``put`` empties.
        fetch: ``fetch(raw, source, row_step, col_step, rows_left, cols_left)``: start at address ``source``; the steps
            are in bytes, any sign; the matrix ends after ``rows_left`` rows and ``cols_left`` columns, which may be
            less than 1 or more than the window has.
        put: ``put(raw, target)``: to shared address ``target``, a multiple of 16.
    """

    words: int
    fetch: DeviceFunction
    put: DeviceFunction


@cache
def window(
    element: str, nbytes: int, threads: int, rows: int, cols: int, pitch: int, *, cleared: bool = True
) -> Window:  # fmt: skip
    """A window of ``rows`` x ``cols`` elements moved by ``threads`` threads.

    Args:
        element: float16, bfloat16 or float32.
        nbytes: bytes a load: 16, 8, 4 or one element's. With one element's columns may lie at any distance; otherwise
            side by side, and each row of the matrix begins and ends at a multiple of ``nbytes``.
        pitch: words from row to row in shared memory, a multiple of 4.
        cleared: False plants a fault: what lies beyond the last column is not set to 0.

    Raises:
        ValueError: columns that are no whole number of loads, or a pitch that does not fit.
    """
    wide = vectors(element, nbytes)
    elements, words, load, low, high = wide.elements, wide.words, wide.load, wide.low, wide.high
    per_word = 2 if wide.pairs else 1
    if cols % elements or pitch % 4 or pitch < cols:
        raise ValueError(
            f"a window of {cols} columns, {pitch} words apart, by {elements} elements: columns are a multiple of the "
            "elements, the pitch a multiple of 4 and at least the columns"
        )
    in_row = cols // elements
    across = min(in_row & -in_row, 32)  # threads side by side in a row
    passes, groups = -(-rows * across // threads), in_row // across
    down = threads // across
    all_rows, single, quads = rows % down == 0, nbytes == ITEMSIZE[element], elements % 4 == 0

    @device
    def fetch(raw, source, row_step, col_step, rows_left, cols_left):
        step = col_step if single else int64(nbytes)
        n, row = cuda.threadIdx.x % across, cuda.threadIdx.x // across
        address = source + uint64(row * row_step + n * step)
        for r in range(passes):
            for g in range(groups):
                at = (r * groups + g) * words
                if row + r * down < rows_left and ((n + g * across) * elements < cols_left or not cleared):
                    load(raw, at, address + uint64(g * across * step))
                else:
                    for w in range(words):
                        raw[at + w] = uint32(0)
            address += uint64(down * row_step)

    @device
    def put(raw, target):
        value = cuda.local.array(elements, float32)
        n, row = cuda.threadIdx.x % across, cuda.threadIdx.x // across
        for r in range(passes):
            for g in range(groups):
                for w in range(words):
                    word = raw[(r * groups + g) * words + w]
                    value[w * per_word] = low(word)
                    if per_word == 2:
                        value[w * per_word + 1] = high(word)
                if all_rows or row + r * down < rows:
                    address = target + uint32(4 * ((row + r * down) * pitch + (n + g * across) * elements))
                    if quads:
                        for e in range(0, elements, 4):
                            st_shared_v4_f32(address + uint32(4 * e), value, e)
                    else:
                        for e in range(elements):
                            st_shared_f32(address + uint32(4 * e), value[e])

    return Window(passes * groups * words, fetch, put)
