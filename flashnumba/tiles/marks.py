"""Marks that a kernel leaves while it runs: what each warp does, with which slot, from when on.

A kernel's factory takes ``traced=False`` and asks for its three device functions. Not traced, they are empty, and the
compiled kernel is the one without them, instruction for instruction. Traced, the kernel has one argument more, the
buffer of :mod:`flashnumba.machine.timeline.trace`::

    start, mark, finish = make_marks(traced)

    @device
    def body(q, k, v, ..., log):
        mark(log, COPY, j + 1, slot)            # from here on this warp starts the copies of step j + 1
        copy_k(...)
        mark(log, WAIT, j, ANY)                 # from here on it waits; ANY: for all slots filled for step j
        wait()
        cuda.syncthreads()
        mark(log, QK, j, slot)                  # ... and multiplies what lies in this slot
        multiply_qk(...)
        mark(log, SOFTMAX, j, ANY)
        ...
        mark(log, OTHER, 0, ANY)                # nothing of interest

    @kernel(...)                                # traced                    not traced
    def traced_kernel(q, k, v, ..., trace):     # def kernel(q, k, v, ...):
        log = cuda.local.array(LOG, uint64)     #
        start(log, trace)                       #
        body(q, k, v, ..., log)                 #     body(q, k, v, ..., None)
        finish(log, trace)                      #

The step and slot of a copy are those of the data that is copied: the slot it goes to, and the step that will use it. A
wait for that step and slot, or for that step and ``ANY``, says that it is there; a product with the same step and slot,
that it is used. From these three the lower half of the picture is drawn, and the overlap computed.

A mark ends what the mark before it began, so spans of a warp cannot overlap. All lanes of the warp come to every mark,
none under a condition that lanes answer differently. Lane 0 writes: one read of the multiprocessor's clock, and 8 bytes
to device memory, for which it does not wait. A warp that has used up its room goes on counting; what is lost is told.

A stage's ``TRACED`` names planners as its ``PLANS`` does, whose one launch has ``args=(*ARGUMENTS, "trace")``; these
are the kernels that ``flashnumba timeline`` knows.

Traced, a kernel keeps four registers more and executes five instructions a mark, and the compiler neither merges nor
interleaves what lies on two sides of one: in the machine code for sm_90a every load, product and exponential is found
between its marks. Its times are therefore longer than those of the kernel as it is used, the more so the finer the
marks. An instruction counts where it is issued: a mark after an mma does not mean that its result is there.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import global_address, read_clock, read_globaltimer, read_smid, st_global_v2
from flashnumba.machine.numba import cuda, uint32, uint64
from flashnumba.machine.timeline.trace import ANY, COPY, HEADER, OTHER, PV, QK, SOFTMAX, STORE, WAIT

__all__ = ["ANY", "COPY", "LOG", "OTHER", "PV", "QK", "SOFTMAX", "STORE", "WAIT", "Marks", "make_marks"]

LOG = 2
"""Elements of a traced kernel's local uint64 array: the address of the next mark, and that of the end of the room."""


class Marks(NamedTuple):
    """Device functions, called by all lanes of a warp.

    Attributes:
        start: ``(log, trace)``: open this warp's row of ``trace [blocks, warps, HEADER + 2 most]``, uint32, packed and
            filled with zeros; blocks beyond it are not traced.
        mark: ``(log, kind, step, slot)``: what this warp does from now on; step 0 to 65535, slot 0 to 254 or ANY.
        finish: ``(log, trace)``: end the last span, and say how many marks there were.
    """

    start: DeviceFunction
    mark: DeviceFunction
    finish: DeviceFunction


@cache
def make_marks(traced: bool) -> Marks:
    """The functions, or empty ones."""

    @device
    def row_of(trace):
        """Address of this warp's row; 0 for a block that is not traced and for all lanes but the first."""
        block = uint32(cuda.blockIdx.x)
        warp = uint32(cuda.threadIdx.x >> 5)
        at = uint64(0)
        if (cuda.threadIdx.x & 31) == 0 and block < uint32(trace.shape[0]):
            row = uint64(block) * uint64(trace.shape[1]) + uint64(warp)
            at = global_address(trace) + row * uint64(4 * trace.shape[2])
        return at

    @device
    def put(at, low, high):
        pair = cuda.local.array(2, uint32)
        pair[0] = low
        pair[1] = high
        st_global_v2(at, pair, 0)

    @device
    def put_long(at, value):
        put(at, uint32(value), uint32(value >> uint64(32)))

    @device
    def start(log, trace):
        row = row_of(trace)
        log[0] = row + uint64(4 * HEADER)
        log[1] = row
        if row != uint64(0):
            log[1] = row + uint64(4 * trace.shape[2])
            put_long(row + uint64(16), read_globaltimer())
            put_long(row + uint64(8), read_clock())

    @device
    def mark(log, kind, step, slot):
        if log[0] < log[1]:
            tag = uint32(kind) | uint32(slot) << uint32(8) | uint32(step) << uint32(16)
            put(log[0], uint32(tag), uint32(read_clock()))
        log[0] += uint64(8)

    @device
    def finish(log, trace):
        row = row_of(trace)
        if row != uint64(0):
            put_long(row + uint64(24), read_clock())
            put_long(row + uint64(32), read_globaltimer())
            put(row, uint32((log[0] - row - uint64(4 * HEADER)) >> uint64(3)), read_smid())

    @device
    def no_row(log, trace):
        pass

    @device
    def no_mark(log, kind, step, slot):
        pass

    return Marks(start, mark, finish) if traced else Marks(no_row, no_mark, no_row)
