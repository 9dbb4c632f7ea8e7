"""The row stays in registers: one read, one write."""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import Kernel, device, kernel
from flashnumba.machine.instructions import global_address, shfl_xor
from flashnumba.machine.numba import cuda, float32, int32, uint32, uint64
from flashnumba.tiles.elements import arch_of
from flashnumba.tiles.held import held
from flashnumba.tiles.online import inverse
from flashnumba.tiles.reduce import lanes_max, lanes_sum, make_block_merge, steps_of

__all__ = ["make_one_pass"]


@cache
def make_one_pass(
    element: str, threads_per_row: int = 32, vectors: int = 4, rows_per_block: int = 4, nbytes: int = 16, *,
    rows_at_once: int = 1, exact: bool = False, hint: str = "plain", min_blocks: int = 0,
    recompute: bool | None = None, arch: str = "80", broken: str = "",
) -> Kernel:  # fmt: skip
    """Rows of at most ``threads_per_row * vectors`` vectors, held in registers.

    Since ``two_pass``: what was read for the sum is still there for the quotient, so memory moves each element twice,
    1R+1W, which is the least there is. Registers set the limit: with 32 words a thread 1024 threads hold 128 KB.

    With up to 32 threads a row there is neither shared memory nor a barrier. With more, a block has one row: each warp
    brings its own (m, d), in units of its own maximum, and one barrier a row suffices to merge them; two sets of shared
    words taken in turns save the second one.

    Args:
        element: float16, bfloat16 or float32.
        threads_per_row: 4, 8, 16 or 32 lanes, or 64 to 1024 threads.
        vectors: a thread holds so many of a row.
        rows_per_block: groups of ``threads_per_row`` a block; 1 above 32.
        nbytes: bytes a vector.
        rows_at_once: rows that a group loads before it works on any of them: more loads in flight for short rows.
        exact: rows are exactly ``threads_per_row * vectors`` vectors, so nothing is masked.
        hint: what the caches are told; ``"plain"`` where input and output are one.
        min_blocks: blocks a multiprocessor that the compiler leaves registers for.
        recompute: see :func:`flashnumba.tiles.held.held`.
        arch: below 80 bfloat16 is rounded in integers, and maxima are taken one by one.
        broken: plants a fault: ``"barrier"`` leaves it out, ``"buffers"`` uses one set of shared words, ``"rescale"``
            adds sums in different units, ``"lanes"`` leaves out the last exchange, ``"tail"`` the mask, ``"stride"``
            takes the output's row stride.

    Raises:
        ValueError: sizes that do not go together.
    """
    wide = threads_per_row > 32
    if wide and (rows_per_block, rows_at_once) != (1, 1):
        raise ValueError(f"{threads_per_row} threads a row are a block, which has one row, not {rows_per_block}")
    threads = threads_per_row * rows_per_block
    if threads % 32 or threads > 1024:
        raise ValueError(
            f"{rows_per_block} rows of {threads_per_row} threads; a block has whole warps, up to 1024 threads"
        )
    row = held(
        element, threads_per_row, vectors, nbytes, exact=exact, hint=hint, arch=arch, recompute=recompute,
        masked=broken != "tail", rescaled=broken != "rescale",
    )  # fmt: skip
    words, elements, load, top, total, store = row
    options = {"threads": threads, "min_blocks": min_blocks, "arch": arch_of(element, arch), "name": "one_pass"}
    swapped = broken == "stride"

    @device
    def row_distance(x, out):
        return out.strides[0] if swapped else x.strides[0]

    if wide:
        block_merge = make_block_merge(threads, broken != "barrier", broken != "rescale")
        over_max, over_sum = lanes_max(), lanes_sum()
        turn = 0 if broken == "buffers" else 32

        @kernel(**options)
        def one_row_a_block(x, out):
            maxima = cuda.shared.array(64, float32)
            sums = cuda.shared.array(64, float32)
            raw = cuda.local.array(words, uint32)
            state = cuda.local.array(2, float32)
            thread = cuda.threadIdx.x
            rows, cols = x.shape
            count = cols // elements
            at = 0
            for row in range(cuda.blockIdx.x, rows, cuda.gridDim.x):
                source = global_address(x) + uint64(row * row_distance(x, out))
                load(raw, 0, source, x.strides[1], thread, count)
                m = over_max(top(raw, 0))
                d = over_sum(total(raw, 0, m))
                # Its barrier comes after all reads of the other set, which the next row may then write.
                block_merge(maxima, sums, at, m, d, state)
                target = global_address(out) + uint64(row * out.strides[0])
                store(target, out.strides[1], thread, count, raw, 0, m, state[0], inverse(state[1]))
                at ^= turn

        return one_row_a_block

    steps = steps_of(threads_per_row)
    all_words = words * rows_at_once
    block_rows = rows_per_block * rows_at_once
    last = steps - 1 if broken == "lanes" else steps

    @kernel(**options)
    def several_rows_a_block(x, out):
        raw = cuda.local.array(all_words, uint32)
        m = cuda.local.array(rows_at_once, float32)
        d = cuda.local.array(rows_at_once, float32)
        lane = cuda.threadIdx.x & (threads_per_row - 1)
        group = cuda.threadIdx.x >> steps
        rows, cols = x.shape
        count = cols // elements
        for base in range(cuda.blockIdx.x * block_rows, rows, cuda.gridDim.x * block_rows):
            for r in range(rows_at_once):
                row = base + r * rows_per_block + group
                # Lanes without a row take part in the shuffles all the same, on the block's first row.
                row = row if row < rows else base
                source = global_address(x) + uint64(row * row_distance(x, out))
                load(raw, r * words, source, x.strides[1], lane, count)
            for r in range(rows_at_once):
                m[r] = top(raw, r * words)
            for i in range(steps):
                for r in range(rows_at_once):
                    m[r] = max(m[r], shfl_xor(m[r], int32(1 << i)))
            for r in range(rows_at_once):
                d[r] = total(raw, r * words, m[r])
            for i in range(last):
                for r in range(rows_at_once):
                    d[r] += shfl_xor(d[r], int32(1 << i))
            for r in range(rows_at_once):
                row = base + r * rows_per_block + group
                if row < rows:
                    target = global_address(out) + uint64(row * out.strides[0])
                    store(target, out.strides[1], lane, count, raw, r * words, m[r], m[r], inverse(d[r]))

    return several_rows_a_block
