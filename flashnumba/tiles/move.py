"""A tile of 16-bit elements from global memory into swizzled shared memory, by all threads of a block.

A tile is some *lines* of memory, each ``chunks`` times 16 bytes long; from line to line it is ``lead`` bytes. Threads
take neighbouring chunks, so that a warp reads whole stretches of lines, and put each where
:mod:`~flashnumba.tiles.swizzle` says. What lies beyond the matrix becomes zeros: a product over k may add them.

Two ways, by the bytes to which every line is aligned (``width``):

``cp.async`` (sm_80, 16, 8 or 4 bytes)
    the copy goes past the registers; ``start`` starts it, and nothing is left to finish. A source size smaller than the
    copy fills the rest with zeros, so a tail costs no branch.
through registers (any GPU, 16 to 2 bytes)
    ``start`` loads, ``finish`` stores what has come since: between the two lies the arithmetic that hides the wait. A
    load reads all of its bytes or none, so lines must consist of whole ones.

Source: CUTLASS, ``include/cutlass/gemm/threadblock/mma_multistage.h`` and ``mma_pipelined.h``.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import (
    cp_async_4_zfill,
    cp_async_8_zfill,
    cp_async_16_zfill,
    ld_global_b16,
    ld_global_b32,
    ld_global_v2,
    ld_global_v4,
    st_shared_v4,
)
from flashnumba.machine.numba import cuda, int32, uint32, uint64
from flashnumba.tiles.swizzle import make_place

__all__ = ["Mover", "make_mover"]


class Mover(NamedTuple):
    """Device functions of one tile's copy.

    Attributes:
        registers: uint32 a thread that wait between ``start`` and ``finish``; 0 with cp.async.
        own: ``own(source, lead) -> uint64``: where this thread's part begins of a tile at global address ``source``.
            It moves with the tile, so a loop over tiles advances it rather than ``source``.
        start: ``start(raw, at, tile, own, lead, present, nbytes)``: begin to bring the tile to shared address ``tile``;
            ``raw[at : at + registers]`` is a local uint32 array. Of each of the first ``present`` (int32) lines
            ``nbytes`` (int32) bytes exist, the rest is zero.
        finish: ``finish(raw, at, tile)``: what was started is in place after it and the wait for cp.async groups.
    """

    registers: int
    own: DeviceFunction
    start: DeviceFunction
    finish: DeviceFunction


@cache
def make_mover(
    lines: int, chunks: int, threads: int, width: int, *, through_registers: bool = False, swizzled: bool = True,
    masked: bool = True,
) -> Mover:  # fmt: skip
    """The copy of ``lines`` lines of ``chunks`` chunks of 16 bytes by ``threads`` threads.

    Args:
        width: bytes a copy, 16, 8, 4 or 2; 2 goes through registers.
        through_registers: for GPUs without cp.async.
        swizzled, masked: False plants a fault.

    Raises:
        ValueError: the tile does not divide among the threads, or there is no copy of such a width.
    """
    if width not in (16, 8, 4, 2):
        raise ValueError(f"copies of {width} bytes; the widths are 16, 8, 4 and 2")
    if lines * chunks % threads or threads % chunks:
        raise ValueError(
            f"{lines} lines of {chunks} chunks for {threads} threads; each thread must have equally many, in one column"
        )
    place = make_place(chunks, swizzled)
    per_thread, step = lines * chunks // threads, threads // chunks
    pieces, whole = 16 // width, 16 if masked else 0

    @device
    def mine():
        """(line, chunk) of this thread's first chunk; its others follow ``step`` lines apart."""
        thread = uint32(cuda.threadIdx.x)
        return uint32(thread // uint32(chunks)), uint32(thread % uint32(chunks))

    @device
    def own(source, lead):
        line, chunk = mine()
        return uint64(source + uint64(line) * uint64(lead) + uint64(chunk * uint32(16)))

    @device
    def existing(i, present, nbytes):
        """Bytes of this thread's chunk i that lie in the matrix."""
        if whole == 0:
            return int32(16)
        line, chunk = mine()
        inside = max(int32(0), min(int32(16), int32(nbytes - int32(16) * int32(chunk))))
        return inside if int32(i * step) < int32(present - int32(line)) else int32(0)

    @device
    def copy_16(target, source, valid):
        cp_async_16_zfill(target, source, uint32(valid))

    @device
    def copy_8(target, source, valid):
        for i in range(2):
            cp_async_8_zfill(
                target + uint32(8 * i), source + uint64(8 * i), uint32(max(0, min(8, int32(valid - int32(8 * i)))))
            )

    @device
    def copy_4(target, source, valid):
        for i in range(4):
            cp_async_4_zfill(
                target + uint32(4 * i), source + uint64(4 * i), uint32(max(0, min(4, int32(valid - int32(4 * i)))))
            )

    @device
    def load_16(raw, at, source):
        ld_global_v4(raw, at, source)

    @device
    def load_8(raw, at, source):
        ld_global_v2(raw, at, source)

    @device
    def load_4(raw, at, source):
        raw[at] = ld_global_b32(source)

    copy = {16: copy_16, 8: copy_8, 4: copy_4}.get(width)
    load = {16: load_16, 8: load_8, 4: load_4}.get(width)
    words = width // 4

    @device
    def target_of(tile, i):
        """Where this thread's chunk i lies; chunks that are whole periods of the swizzle apart lie so in memory."""
        line, chunk = mine()
        if step % 8 == 0:
            return tile + place(line, chunk) + uint32(i * step * chunks * 16)
        return tile + place(line + uint32(i * step), chunk)

    @device
    def start_async(raw, at, tile, own, lead, present, nbytes):
        for i in range(per_thread):
            copy(target_of(tile, i), own + uint64(i * step) * uint64(lead), existing(i, present, nbytes))

    @device
    def finish_async(raw, at, tile):
        pass

    @device
    def load_pieces(raw, at, source, valid):
        """A chunk as pieces of ``width`` bytes, each there or not."""
        for p in range(pieces):
            if int32(p * width) < valid:
                load(raw, at + p * words, source + uint64(p * width))
            else:
                for i in range(words):
                    raw[at + p * words + i] = uint32(0)

    @device
    def load_elements(raw, at, source, valid):
        """A chunk element by element, two of them a word."""
        for w in range(4):
            low, high = uint32(0), uint32(0)
            if int32(4 * w) < valid:
                low = uint32(ld_global_b16(source + uint64(4 * w)))
            if int32(4 * w + 2) < valid:
                high = uint32(ld_global_b16(source + uint64(4 * w + 2)))
            raw[at + w] = uint32(low | (high << uint32(16)))

    load_chunk = load_elements if width == 2 else load_pieces

    @device
    def start_loads(raw, at, tile, own, lead, present, nbytes):
        for i in range(per_thread):
            load_chunk(raw, at + 4 * i, own + uint64(i * step) * uint64(lead), existing(i, present, nbytes))

    @device
    def store_loaded(raw, at, tile):
        for i in range(per_thread):
            st_shared_v4(target_of(tile, i), raw, at + 4 * i)

    if width == 2 or through_registers:
        return Mover(4 * per_thread, own, start_loads, store_loaded)
    return Mover(0, own, start_async, finish_async)
