"""Long rows over several blocks, with the copy engine loading ahead (sm_90)."""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import Kernel, device, kernel
from flashnumba.machine.instructions import (
    bulk_load,
    f32_to_bits,
    fence_mbarrier_init,
    global_address,
    ld_shared_v4,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    shared_address,
    st_relaxed_gpu_b64,
)
from flashnumba.machine.numba import cuda, float32, uint8, uint32, uint64
from flashnumba.stages.online_softmax.split import make_merge_row
from flashnumba.tiles.elements import vectors
from flashnumba.tiles.online import NOTHING, anchor, exponential, inverse
from flashnumba.tiles.reduce import lanes_max, lanes_sum, make_block_merge

__all__ = ["make_split_ahead", "shared_bytes"]


def shared_bytes(threads: int, per_thread: int, slots: int) -> int:
    """Dynamic shared memory of a kernel: its slots, and room to align them to 128 bytes."""
    return threads * per_thread * 16 * slots + 128


@cache
def make_split_ahead(
    element: str, threads: int = 256, per_thread: int = 8, slots: int = 3, *, hint: str = "plain", broken: str = ""
) -> Kernel:
    """Rows of any length in chunks of ``threads * per_thread`` vectors of 16 bytes, a block a chunk at a time.

    Since ``split``: there, a block that waits for its row's other chunks moves no data, and registers hold too few
    chunks to cover that. Here chunks wait in ``slots`` of shared memory, filled by the copy engine. A block works on
    two of them in turn: it reduces and publishes the next chunk before it waits for the current row. ::

        slot      0            1            2
                  write i      reduce i+1   load i+2      then slot 0 is loaded with chunk i+3

    Memory moves the same bytes, 1R+1W; only the waiting is covered. The kernel takes ``(x, out, scratch)`` as ``split``
    does, but for the counter: chunk i goes to block i modulo the grid. Since a grid has at least as many blocks as a
    row has chunks, a block never holds two chunks of one row, and the first chunk that is not published belongs to a
    block that waits for nothing: no deadlock.

    Args:
        element: float16, bfloat16 or float32. Rows start at multiples of 16 bytes and are multiples of 16 bytes long.
        threads: of a block.
        per_thread: vectors of a chunk that a thread has.
        slots: chunks in shared memory, at least 2.
        hint: what the caches are told of the stores.
        broken: plants a fault: ``"full"`` reads a slot without waiting for its copy, ``"free"`` loads into a slot
            before all have read it, ``"bytes"`` expects too few, ``"publish"`` and ``"wait"`` as in ``split``.
    """
    wide = vectors(element, 16, hint, "90")
    low, high, pack, larger, store_vector = wide.low, wide.high, wide.pack, wide.larger, wide.store
    pairs, nothing, elements = wide.pairs, wide.nothing, wide.elements
    words = 4 * per_thread
    chunk_vectors = threads * per_thread
    chunk_bytes = chunk_vectors * 16
    block_merge = make_block_merge(threads)
    merge_row = make_merge_row(waits=broken != "wait")
    over_max, over_sum = lanes_max(), lanes_sum()
    waits_full, waits_free, publishes = broken != "full", broken != "free", broken != "publish"
    short = 16 if broken == "bytes" else 0

    @device
    def fetch(slot, bar, source, nbytes):
        """Start the copy of a chunk; one thread does."""
        mbarrier_arrive_expect_tx(bar, uint32(nbytes - short))
        bulk_load(slot, source, uint32(nbytes), bar)

    @device
    def read(raw, slot, count):
        """This thread's vectors of a chunk, from shared memory; -inf beyond the row's end."""
        for v in range(per_thread):
            n = cuda.threadIdx.x + v * threads
            if n < count:
                ld_shared_v4(raw, 4 * v, slot + uint32(16 * n))
            else:
                for i in range(4):
                    raw[4 * v + i] = uint32(nothing)

    @device
    def top(raw):
        if larger is not None:
            most = uint32(nothing)
            for i in range(words):
                most = larger(most, raw[i])
            return max(low(most), high(most))
        m = float32(NOTHING)
        for i in range(words):
            m = max(m, low(raw[i]))
        return m

    @device
    def total(raw, m):
        origin = anchor(m)
        d = float32(0)
        for i in range(words):
            d += exponential(low(raw[i]), origin)
            if pairs:
                d += exponential(high(raw[i]), origin)
        return d

    @device
    def write(target, slot, count, m, share):
        """The quotients of a chunk, from shared memory to device memory."""
        origin = anchor(m)
        raw = cuda.local.array(4, uint32)
        for v in range(per_thread):
            n = cuda.threadIdx.x + v * threads
            if n < count:
                ld_shared_v4(raw, 0, slot + uint32(16 * n))
                for i in range(4):
                    p = exponential(low(raw[i]), origin) * share
                    q = exponential(high(raw[i]), origin) * share if pairs else float32(0)
                    raw[i] = pack(p, q)
                store_vector(target + uint64(16 * n), raw, 0)

    @kernel(threads=threads, min_blocks=1, arch="90", concurrent=True)
    def split_ahead(x, out, scratch):
        smem = cuda.shared.array(0, uint8)
        bars = cuda.shared.array(slots, uint64)
        maxima = cuda.shared.array(32, float32)
        sums = cuda.shared.array(32, float32)
        row_state = cuda.shared.array(2, float32)
        raw = cuda.local.array(words, uint32)
        state = cuda.local.array(2, float32)
        thread = cuda.threadIdx.x
        base = (shared_address(smem) + uint32(127)) & uint32(0xFFFFFF80)
        bar = shared_address(bars)
        rows, cols = x.shape
        count = cols // elements  # vectors a row
        chunks = (count + chunk_vectors - 1) // chunk_vectors
        items = (rows * chunks - cuda.blockIdx.x + cuda.gridDim.x - 1) // cuda.gridDim.x  # of this block
        if thread == 0:
            for s in range(slots):
                mbarrier_init(bar + uint32(8 * s), uint32(1))
            fence_mbarrier_init()
            for j in range(min(items, slots)):
                item = cuda.blockIdx.x + j * cuda.gridDim.x
                chunk = item % chunks
                size = min(count - chunk * chunk_vectors, chunk_vectors)
                source = global_address(x) + uint64(item // chunks * x.strides[0] + chunk * chunk_bytes)
                fetch(base + uint32(j * chunk_bytes), bar + uint32(8 * j), source, 16 * size)
        cuda.syncthreads()  # the mbarriers exist before anyone waits on them

        for j in range(items + 1):
            if j < items:  # reduce and publish chunk j
                slot = j % slots
                item = cuda.blockIdx.x + j * cuda.gridDim.x
                chunk = item % chunks
                size = min(count - chunk * chunk_vectors, chunk_vectors)
                if waits_full:
                    mbarrier_wait(bar + uint32(8 * slot), uint32(j // slots & 1))
                read(raw, base + uint32(slot * chunk_bytes), size)
                m = over_max(top(raw))
                d = over_sum(total(raw, m))
                block_merge(maxima, sums, 0, m, d, state)
                if thread == 0 and publishes:
                    word = (uint64(f32_to_bits(state[0])) << uint64(32)) | uint64(f32_to_bits(state[1]))
                    st_relaxed_gpu_b64(global_address(scratch) + uint64(8 * (1 + item)), word)
            if j > 0:  # write chunk j - 1
                slot = (j - 1) % slots
                item = cuda.blockIdx.x + (j - 1) * cuda.gridDim.x
                row = item // chunks
                chunk = item - row * chunks
                size = min(count - chunk * chunk_vectors, chunk_vectors)
                if thread < 32:
                    merge_row(global_address(scratch) + uint64(8 * (1 + row * chunks)), chunks, state)
                    if thread == 0:
                        row_state[0] = state[0]
                        row_state[1] = inverse(state[1])
                cuda.syncthreads()  # the row's state is there; maxima and sums may be written again
                target = global_address(out) + uint64(row * out.strides[0] + chunk * chunk_bytes)
                write(target, base + uint32(slot * chunk_bytes), size, row_state[0], row_state[1])
                if waits_free:
                    cuda.syncthreads()  # all have read the slot, and the row's state
                ahead = j - 1 + slots
                if thread == 0 and ahead < items:
                    item = cuda.blockIdx.x + ahead * cuda.gridDim.x
                    chunk = item % chunks
                    size = min(count - chunk * chunk_vectors, chunk_vectors)
                    source = global_address(x) + uint64(item // chunks * x.strides[0] + chunk * chunk_bytes)
                    fetch(base + uint32(slot * chunk_bytes), bar + uint32(8 * slot), source, 16 * size)
            else:
                cuda.syncthreads()  # maxima and sums may be written again

    return split_ahead
