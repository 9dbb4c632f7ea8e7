"""A long row over several blocks: each holds a part in registers, and they merge their states through global memory."""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import DeviceFunction, Kernel, device, kernel
from flashnumba.machine.instructions import (
    bits_to_f32,
    f32_to_bits,
    global_address,
    ld_relaxed_gpu_b64,
    st_relaxed_gpu_b64,
)
from flashnumba.machine.numba import cuda, float32, int64, uint32, uint64
from flashnumba.tiles.elements import arch_of
from flashnumba.tiles.held import held
from flashnumba.tiles.online import NOTHING, inverse, rescale
from flashnumba.tiles.reduce import lanes_max, lanes_sum, make_block_merge

__all__ = ["make_merge_row", "make_split"]


@cache
def make_merge_row(*, waits: bool = True, rescales: bool = True) -> DeviceFunction:
    """``merge_row(address, chunks, state)`` for one warp: the state of a row whose ``chunks`` states, one uint64 each,
    are published at ``address``; waits for those that are not there yet. False plants a fault."""
    over_max, over_sum = lanes_max(), lanes_sum()

    @device
    def wait_for(address):
        word = ld_relaxed_gpu_b64(address)
        while waits and word == uint64(0):
            word = ld_relaxed_gpu_b64(address)
        return word

    @device
    def merge_row(address, chunks, state):
        """Each lane takes the states of chunks lane, lane + 32, ..., then a butterfly merges the lanes."""
        m = float32(NOTHING)
        d = float32(0)
        for chunk in range(cuda.threadIdx.x, chunks, 32):
            word = wait_for(address + uint64(8 * chunk))
            m_chunk = bits_to_f32(uint32(word >> uint64(32)))
            d_chunk = bits_to_f32(uint32(word & uint64(0xFFFFFFFF)))
            m_both = max(m, m_chunk)
            if rescales:
                d = d * rescale(m, m_both) + d_chunk * rescale(m_chunk, m_both)
            else:
                d += d_chunk
            m = m_both
        state[0] = over_max(m)
        state[1] = over_sum(d * rescale(m, state[0]) if rescales else d)

    return merge_row


@cache
def make_split(
    element: str, threads: int = 256, vectors: int = 8, nbytes: int = 16, *, exact: bool = False, hint: str = "plain",
    draws: bool = True, min_blocks: int = 0, recompute: bool | None = None, arch: str = "80", broken: str = "",
) -> Kernel:  # fmt: skip
    """Rows of any length, cut into chunks of ``threads * vectors`` vectors, a block a chunk.

    Since ``one_pass``: a row may be longer than a block's registers; memory still moves each element twice, 1R+1W, and
    16 bytes a chunk more. The kernel takes ``(x, out, scratch)``: ``scratch`` is uint64[1 + rows * chunks], zero.

    Every block publishes the (m, d) of its chunk as one 64-bit word, so nobody can see half of it, and waits for the
    words of the row's other chunks. A word of zero is not there yet: no state is zero, as m = -inf has bits of its own
    and any other m has d >= 1 or NaN. Nothing else is handed over, so no access needs ordering. All blocks merge all
    words in the same order, and get the same bits.

    Who waits must not keep out whom it waits for. Blocks stay until the work is done and all are resident (the launch
    is cooperative), and the grid has at least as many blocks as a row has chunks. Each draws its next chunk from a
    counter once its row is complete. So chunks are begun in order, and while the first incomplete row lacks a chunk,
    fewer blocks wait than there are: another comes to draw it. Drawn any earlier, the next chunk may be one that the
    block itself is about to wait for.

    Args:
        element, threads, nbytes, exact, hint, recompute, arch: as ``one_pass``; ``exact`` is about chunks.
        draws: False deals chunk i to block i modulo the grid instead: nothing to wait for, but all go at the pace of
            the slowest.
        vectors: a thread holds so many of a chunk.
        min_blocks: blocks a multiprocessor that the compiler leaves registers for.
        broken: plants a fault: ``"publish"`` leaves it out, ``"wait"`` takes words as they are, ``"rescale"`` adds sums
            in different units, ``"tail"`` leaves the mask out, ``"barrier"`` leaves out the one before the row's state
            is read, ``"stride"`` takes the output's row stride, ``"early"`` draws the next chunk before the row is
            complete.
    """
    block = held(
        element, threads, vectors, nbytes, exact=exact, hint=hint, arch=arch, recompute=recompute,
        masked=broken != "tail", rescaled=broken != "rescale",
    )  # fmt: skip
    words, elements, load, top, total, store = block
    chunk_vectors = threads * vectors
    block_merge = make_block_merge(threads, rescaled=broken != "rescale")
    over_max, over_sum = lanes_max(), lanes_sum()
    merge_row = make_merge_row(waits=broken != "wait", rescales=broken != "rescale")
    publishes = broken != "publish"
    synchronises, swapped, early = broken != "barrier", broken == "stride", broken == "early"

    @kernel(threads=threads, min_blocks=min_blocks, arch=arch_of(element, arch), concurrent=True)
    def split(x, out, scratch):
        maxima = cuda.shared.array(32, float32)
        sums = cuda.shared.array(32, float32)
        row_state = cuda.shared.array(2, float32)
        ticket = cuda.shared.array(1, int64)
        raw = cuda.local.array(words, uint32)
        state = cuda.local.array(2, float32)
        thread = cuda.threadIdx.x
        rows, cols = x.shape
        count = cols // elements
        chunks = (count + chunk_vectors - 1) // chunk_vectors
        x_row = out.strides[0] if swapped else x.strides[0]
        x_step = x.strides[1]
        out_step = out.strides[1]
        item = int64(cuda.blockIdx.x)
        if draws:
            if thread == 0:
                ticket[0] = int64(cuda.atomic.add(scratch, 0, uint64(1)))
            cuda.syncthreads()  # the first ticket is drawn
            item = ticket[0]
        while item < rows * chunks:
            row = int64(uint32(item) // uint32(chunks))
            chunk = int64(uint32(item) - uint32(row) * uint32(chunks))
            first = chunk * chunk_vectors + thread
            source = global_address(x) + uint64(row * x_row)
            load(raw, 0, source, x_step, first, count)
            m = over_max(top(raw, 0))
            d = over_sum(total(raw, 0, m))
            # Its barrier also separates all reads of row_state and ticket from what is written below.
            block_merge(maxima, sums, 0, m, d, state)
            if thread < 32:
                words_of_row = global_address(scratch) + uint64(8 * (1 + row * chunks))
                if thread == 0:
                    if publishes:
                        word = (uint64(f32_to_bits(state[0])) << uint64(32)) | uint64(f32_to_bits(state[1]))
                        st_relaxed_gpu_b64(words_of_row + uint64(8 * chunk), word)
                    if early:
                        ticket[0] = int64(cuda.atomic.add(scratch, 0, uint64(1)))
                merge_row(words_of_row, chunks, state)
                if thread == 0:
                    row_state[0] = state[0]
                    row_state[1] = inverse(state[1])
            if synchronises:
                cuda.syncthreads()  # the row's state is there; maxima and sums may be written again
            if draws and not early and thread == 0:
                ticket[0] = int64(cuda.atomic.add(scratch, 0, uint64(1)))  # on its way while the block writes
            target = global_address(out) + uint64(row * out.strides[0])
            store(target, out_step, first, count, raw, 0, m, row_state[0], row_state[1])
            if draws:
                cuda.syncthreads()  # the next ticket is drawn
                item = ticket[0]
            else:
                item += cuda.gridDim.x

    return split
