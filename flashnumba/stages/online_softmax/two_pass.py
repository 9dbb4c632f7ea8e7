"""The recurrence over a row of any length: read for (m, d), read again for the quotient."""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import Kernel, device, kernel
from flashnumba.machine.instructions import global_address
from flashnumba.machine.numba import cuda, float32, int64, uint32, uint64
from flashnumba.tiles.elements import ITEMSIZE, arch_of, vectors
from flashnumba.tiles.online import NOTHING, anchor, exponential, inverse, rescale
from flashnumba.tiles.reduce import lanes_max, lanes_sum, make_block_merge

__all__ = ["make_two_pass"]


@cache
def make_two_pass(
    element: str, threads: int = 256, nbytes: int = 16, at_once: int = 4, *, arch: str = "80", broken: str = ""
) -> Kernel:  # fmt: skip
    """One block a row, two passes.

    Since ``vectorized``: maximum and sum come from one pass. Each thread keeps (m, d) of what it has seen; ``at_once``
    vectors are loaded together, their maximum is taken, d is put into its units once, and their exponentials are added.
    2R+1W instead of 3R+1W. Lanes and warps merge their states at the end: one barrier a row, and two sets of shared
    words taken in turns.

    Args:
        element: float16, bfloat16 or float32.
        threads: of a block.
        nbytes: bytes a vector, as ``vectorized`` says.
        at_once: vectors that a thread loads before it works on any.
        arch: below 80 bfloat16 is rounded in integers.
        broken: plants a fault: ``"barrier"``, ``"buffers"`` and ``"stride"`` as in ``one_pass``; ``"rescale"`` leaves
            the factor out of the merge, ``"recurrence"`` out of the recurrence; ``"tail"`` leaves the mask out.
    """
    wide = vectors(element, nbytes, "plain", arch)
    load, store, low, high, pack, pairs = wide.load, wide.store, wide.low, wide.high, wide.pack, wide.pairs
    elements, words, nothing = wide.elements, wide.words, wide.nothing
    all_words = words * at_once
    block_merge = make_block_merge(threads, broken != "barrier", broken != "rescale")
    over_max, over_sum = lanes_max(), lanes_sum()
    single, turn, swapped = nbytes == ITEMSIZE[element], 0 if broken == "buffers" else 32, broken == "stride"
    no_mask, no_rescale = broken == "tail", broken == "recurrence"

    @device
    def load_some(raw, source, step, first, count):
        """Vectors first, first + threads, ...; -inf beyond the row."""
        for v in range(at_once):
            n = first + v * threads
            if no_mask or n < count:
                load(raw, v * words, source + uint64(n * step))
            else:
                for i in range(words):
                    raw[v * words + i] = uint32(nothing)

    @device
    def take_in(raw, state):
        """One step of the recurrence with all that ``raw`` holds."""
        m = state[0]
        for i in range(all_words):
            m = max(m, low(raw[i]))
            if pairs:
                m = max(m, high(raw[i]))
        origin = anchor(m)
        d = state[1]
        if not no_rescale:
            d *= rescale(state[0], m)
        for i in range(all_words):
            d += exponential(low(raw[i]), origin)
            if pairs:
                d += exponential(high(raw[i]), origin)
        state[0] = m
        state[1] = d

    @device
    def store_some(target, step, first, count, raw, origin, share):
        for v in range(at_once):
            n = first + v * threads
            if n < count:
                for i in range(v * words, v * words + words):
                    p = exponential(low(raw[i]), origin) * share
                    q = exponential(high(raw[i]), origin) * share if pairs else float32(0)
                    raw[i] = pack(p, q)
                store(target + uint64(n * step), raw, v * words)

    @kernel(threads=threads, arch=arch_of(element, arch))
    def two_pass(x, out):
        maxima = cuda.shared.array(64, float32)
        sums = cuda.shared.array(64, float32)
        raw = cuda.local.array(all_words, uint32)
        state = cuda.local.array(2, float32)
        thread = cuda.threadIdx.x
        rows, cols = x.shape
        count = cols // elements
        x_row = out.strides[0] if swapped else x.strides[0]
        x_step = x.strides[1] if single else int64(nbytes)
        out_step = out.strides[1] if single else int64(nbytes)
        at = 0
        for row in range(cuda.blockIdx.x, rows, cuda.gridDim.x):
            source = global_address(x) + uint64(row * x_row)
            target = global_address(out) + uint64(row * out.strides[0])
            state[0] = float32(NOTHING)
            state[1] = float32(0)
            for first in range(thread, count, threads * at_once):
                load_some(raw, source, x_step, first, count)
                take_in(raw, state)
            m = over_max(state[0])
            d = over_sum(state[1] if no_rescale else state[1] * rescale(state[0], m))
            # Its barrier comes after all reads of the other set, which the next row may then write.
            block_merge(maxima, sums, at, m, d, state)
            origin = anchor(state[0])
            share = inverse(state[1])
            for first in range(thread, count, threads * at_once):
                load_some(raw, source, x_step, first, count)
                store_some(target, out_step, first, count, raw, origin, share)
            at ^= turn

    return two_pass
