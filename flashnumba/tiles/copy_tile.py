"""A block copies a tile of rows from global memory into swizzled shared memory, zeros where there is nothing.

By ``cp.async`` where rows are aligned to 4 bytes or more: the threads go on, and wait later. Otherwise, and on sm_75,
by loads and stores, element by element where even a 16-byte load is not aligned.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import (
    cp_async_4_zfill,
    cp_async_8_zfill,
    cp_async_16_zfill,
    cp_async_commit,
    cp_async_wait,
    ld_global_b16,
    ld_global_v4,
    st_shared_v4,
)
from flashnumba.machine.numba import cuda, int32, int64, uint32, uint64
from flashnumba.tiles.swizzle import swizzle

__all__ = ["copies_ahead", "make_copy_chunk", "make_copy_tile", "make_copy_whole", "make_waiting"]


def copies_ahead(vector: int, arch: str) -> bool:
    """Whether tiles are copied by ``cp.async``, which has to be waited for."""
    return vector >= 4 and int(arch.rstrip("a")) >= 80


@cache
def make_waiting(asynchronous: bool, pending: int, waits: bool = True) -> tuple[DeviceFunction, DeviceFunction]:
    """``(wait, commit)`` for copies: wait until at most ``pending`` groups are in flight; nothing where copies are done
    when they are called. ``waits=False`` plants a fault."""
    wait_for = cp_async_wait(pending)

    @device
    def wait():
        wait_for()

    @device
    def commit():
        cp_async_commit()

    @device
    def nothing():
        pass

    return (wait if asynchronous and waits else nothing), (commit if asynchronous else nothing)


@cache
def make_copy_tile(
    rows: int, columns: int, threads: int, vector: int, arch: str = "80", *, even: bool = False, on: bool = True,
    packed: bool = False, order: tuple[int, int, int] | None = None,
    nbytes: int = 2, teams: bool = False,
) -> DeviceFunction:  # fmt: skip
    """``copy_tile(tile, source, row_step, column_step, rows_left, columns_left)`` for a whole block.

    ``tile`` is a shared address; ``source`` the global address of the first row, int64, from which rows are
    ``row_step`` and columns ``column_step`` bytes apart. Rows from ``rows_left`` and columns from ``columns_left`` on
    become zeros. Eight neighbouring threads copy 128 bytes of a row, or four 64 bytes where rows are no multiple of
    128.

    Args:
        rows, columns: of the tile; columns are a multiple of 64 bytes.
        threads: of the block.
        vector: bytes that every row is aligned to and a multiple of, 16, 8 or 4, where ``row_step`` is 0 to 2^23; 2 for
            elements at any distance.
        even: there are always ``columns`` columns.
        on: False leaves the swizzle out, which plants a fault.
        packed: rows are those of several heads in turn. Three arguments follow, ``row0, group, head_step``: row r of
            the tile is row ``(row0 + r) // group`` of head ``(row0 + r) % group``, and there are ``rows_left`` from row
            0 on.
        order: of each 16 rows, as :class:`flashnumba.tiles.sizes.Order` counts them: row ``8 t + 2 q + i`` of the
            tile is row ``order[0] q + order[1] t + order[2] i`` of the source. As they are if None.
        nbytes: of an element, 2; or 1 with ``vector`` 16.
        teams: each ``threads`` neighbouring threads of the block, a power of two, copy a tile of their own.

    Raises:
        ValueError: the threads do not share out the rows evenly, or not by the sixteen that an order needs.
    """
    elements = 16 // nbytes
    together = 8 if columns % (8 * elements) == 0 else 4
    rows_at_once = threads // together
    if nbytes == 1 and vector != 16:
        raise ValueError(f"vector is {vector}; rows of 8-bit elements are copied 16 bytes at a time")
    if columns % (4 * elements) or rows % rows_at_once:
        raise ValueError(f"{threads} threads do not share out {rows} rows of {columns} elements")
    if order and rows_at_once % 16:
        raise ValueError(f"{threads} threads copy {rows_at_once} rows at once; an order takes a multiple of 16")
    steps, groups = rows // rows_at_once, columns // (elements * together)
    by_lane, by_tile, by_pair = order or (0, 0, 0)
    layout = swizzle(columns * nbytes // 2, on)
    place, pitch = layout.at, layout.pitch
    copy_chunk = make_copy_chunk(vector, arch)
    near = vector >= 4

    @device
    def same_row(row):
        return row

    @device
    def row_in_order(row):
        """``row`` is uint32; of 16 rows, bits 3, 2 and 1, and 0 are t, q and i."""
        lane, tile, pair = (row >> uint32(1)) & uint32(3), (row >> uint32(3)) & uint32(1), row & uint32(1)
        inside = lane * uint32(by_lane) + tile * uint32(by_tile) + pair * uint32(by_pair)
        return uint32((row & uint32(0xFFFFFFF0)) + inside)

    source_row = row_in_order if order else same_row

    @device
    def thread_of_block():
        return uint32(cuda.threadIdx.x)

    @device
    def thread_of_team():
        return uint32(cuda.threadIdx.x) & uint32(threads - 1)

    thread_of = thread_of_team if teams else thread_of_block

    @device
    def chunk_at(tile, row, chunk, i, g):
        """Where chunk ``chunk + together * g`` of row ``row + rows_at_once * i`` lies; all but tile, row and chunk are
        constants, so that most of it is one too."""
        at = place(tile, row + uint32(i * rows_at_once % 8), chunk) + uint32(i * rows_at_once // 8 * 8 * pitch)
        if together == 8:
            return at + uint32(128 * g)
        return (at ^ uint32(64 * (g % 2))) + uint32(128 * (g // 2))

    @device
    def copy_tile(tile, source, row_step, column_step, rows_left, columns_left):
        row = thread_of() // uint32(together)
        chunk = thread_of() % uint32(together)
        from_row = source_row(row)
        if near:
            # One 32-bit offset a thread, from bases that all threads share.
            offset = uint32(from_row * uint32(row_step) + uint32(16) * chunk)
        if near and even and rows_left >= rows:
            for i in range(steps):
                base = source + int64(i * rows_at_once) * row_step
                for g in range(groups):
                    to = chunk_at(tile, row, chunk, i, g)
                    copy_chunk(to, base + int64(16 * together * g) + int64(offset), column_step, int32(16))
        else:
            for i in range(steps):
                for g in range(groups):
                    there = int32(16)
                    if not even:
                        left = int32(columns_left) - int32(elements) * int32(chunk) - int32(elements * together * g)
                        there = min(int32(16), max(int32(0), int32(nbytes) * left))
                    if int64(from_row) + int64(i * rows_at_once) >= int64(rows_left):
                        there = int32(0)
                    if near:
                        origin = source + int64(i * rows_at_once) * row_step + int64(16 * together * g) + int64(offset)
                    else:
                        origin = (
                            source + (int64(from_row) + int64(i * rows_at_once)) * row_step
                            + (int64(8) * int64(chunk) + int64(8 * together * g)) * column_step
                        )  # fmt: skip
                    copy_chunk(chunk_at(tile, row, chunk, i, g), origin, column_step, there)

    @device
    def copy_packed(tile, source, row_step, column_step, rows_left, columns_left, row0, group, head_step):
        row = uint32(cuda.threadIdx.x) // uint32(together)
        chunk = uint32(cuda.threadIdx.x) % uint32(together)
        for i in range(steps):
            index = row0 + int64(row) + int64(i * rows_at_once)
            query = uint32(index) // uint32(group)
            head = uint32(index) - query * uint32(group)
            origin = source + int64(query) * row_step + int64(head) * head_step
            for g in range(groups):
                column = int64(8) * int64(chunk) + int64(8 * together * g)
                there = int32(min(int64(16), max(int64(0), int64(2) * (columns_left - column))))
                if index >= rows_left:
                    there = int32(0)
                copy_chunk(chunk_at(tile, row, chunk, i, g), origin + column * column_step, column_step, there)

    return copy_packed if packed else copy_tile


@cache
def make_copy_whole(rows: int, columns: int, threads: int, arch: str = "80") -> tuple[DeviceFunction, DeviceFunction]:
    """``(start, copy_whole)``: :func:`make_copy_tile` of whole tiles of 16-byte rows, for who copies one after another.

    ``start(tile, source, row_step) -> (to, origin)`` is where the thread's first chunk goes, uint32, and comes from,
    int64; ``copy_whole(to, origin, row_step)`` copies its chunks. What lies a tile further is a constant more of each,
    so that nothing but that is computed again.

    Raises:
        ValueError: columns are no multiple of 64 of 16 bits, or the threads copy no multiple of 8 rows at once.
    """
    rows_at_once, layout = threads // 8, swizzle(columns)
    if columns % 64 or rows_at_once % 8 or rows % rows_at_once:
        raise ValueError(f"{threads} threads do not copy {rows} rows of {columns} elements by whole swizzles")
    steps, groups, pitch, place = rows // rows_at_once, columns // 64, layout.pitch, layout.at
    copy_chunk = make_copy_chunk(16, arch)

    @device
    def start(tile, source, row_step):
        row, chunk = uint32(cuda.threadIdx.x) // uint32(8), uint32(cuda.threadIdx.x) % uint32(8)
        return uint32(place(tile, row, chunk)), source + int64(row) * row_step + int64(uint32(16) * chunk)

    @device
    def copy_whole(to, origin, row_step):
        for i in range(steps):
            base = origin + int64(i * rows_at_once) * row_step
            for g in range(groups):
                at = to + uint32(i * rows_at_once * pitch + 128 * g)
                copy_chunk(at, base + int64(128 * g), int64(2), int32(16))

    return start, copy_whole


def make_copy_chunk(vector: int, arch: str) -> DeviceFunction:
    """``copy_chunk(to, source, column_step, there)``: 16 bytes of which ``there`` exist."""

    @device
    def ahead_16(to, source, column_step, there):
        cp_async_16_zfill(to, uint64(source), uint32(there))

    @device
    def ahead_8(to, source, column_step, there):
        for i in range(2):
            part = min(int32(8), max(int32(0), there - int32(8 * i)))
            cp_async_8_zfill(to + uint32(8 * i), uint64(source + int64(8 * i)), uint32(part))

    @device
    def ahead_4(to, source, column_step, there):
        for i in range(4):
            part = min(int32(4), max(int32(0), there - int32(4 * i)))
            cp_async_4_zfill(to + uint32(4 * i), uint64(source + int64(4 * i)), uint32(part))

    @device
    def now_16(to, source, column_step, there):
        raw = cuda.local.array(4, uint32)
        for i in range(4):
            raw[i] = uint32(0)
        if there > int32(0):
            ld_global_v4(raw, 0, uint64(source))
        st_shared_v4(to, raw, 0)

    @device
    def by_element(to, source, column_step, there):
        raw = cuda.local.array(4, uint32)
        for i in range(4):
            raw[i] = uint32(0)
            if int32(4 * i) < there:
                raw[i] = uint32(ld_global_b16(uint64(source + int64(2 * i) * column_step)))
            if int32(4 * i + 2) < there:
                raw[i] |= uint32(ld_global_b16(uint64(source + int64(2 * i + 1) * column_step))) << uint32(16)
        st_shared_v4(to, raw, 0)

    if copies_ahead(vector, arch):
        return {16: ahead_16, 8: ahead_8, 4: ahead_4}[vector]
    return now_16 if vector == 16 else by_element
