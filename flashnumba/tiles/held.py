"""A row, or a part of one, held in registers from its one read to its one write.

``threads`` neighbouring threads hold ``vectors`` vectors each; thread t has vectors t, t + threads, ... so that every
load of a warp covers one stretch of memory. The words stay as memory has them: a 16-bit row takes half the registers,
and is unpacked for the maximum, for the sum and for the quotient, each time with one instruction an element. float32
words are replaced by their exponentials on the way, which saves computing these a second time.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import bits_to_f32, f32_to_bits
from flashnumba.machine.numba import cuda, float32, int64, uint32, uint64
from flashnumba.tiles.elements import ITEMSIZE, vectors
from flashnumba.tiles.online import NOTHING, anchor, exponential, rescale

__all__ = ["Held", "held"]


class Held(NamedTuple):
    """Device functions on ``raw``, a local uint32 array, of which the ``words`` elements from ``at`` on are used.

    Attributes:
        words: registers a thread.
        elements: in a vector; a row of N elements is N / elements vectors.
        load: ``load(raw, at, source, step, lane, count)``: vectors ``lane``, ``lane + threads``, ... of the ``count``
            that start at address ``source`` and follow each other by ``step`` bytes; -inf for those beyond.
        top: ``top(raw, at) -> float32``, the thread's maximum.
        total: ``total(raw, at, m) -> float32``: the thread's sum of exponentials in units of exp(m).
        store: ``store(target, step, lane, count, raw, at, m, m_row, share)``: the quotients, where ``m`` is what
            ``total`` got, ``m_row`` the row's maximum and ``share`` 1 over its sum.
    """

    words: int
    elements: int
    load: DeviceFunction
    top: DeviceFunction
    total: DeviceFunction
    store: DeviceFunction


@cache
def held(
    element: str, threads: int, per_thread: int, nbytes: int = 16, *, exact: bool = False, hint: str = "plain",
    arch: str = "80", recompute: bool | None = None, masked: bool = True, rescaled: bool = True,
) -> Held:  # fmt: skip
    """Functions for ``threads`` threads that hold ``per_thread`` vectors of ``nbytes`` bytes each.

    Args:
        exact: there are always ``threads * per_thread`` vectors, so nothing is masked.
        hint: what the caches are told, see :data:`flashnumba.tiles.elements.HINTS`.
        recompute: whether 16-bit words are unpacked anew for the quotient, which costs an exponential an element and
            saves a register an element; by default where both would take more than 48.
        masked, rescaled: False plants a fault.
    """
    wide = vectors(element, nbytes, hint, arch)
    load_vector, store_vector, low, high, pack = wide.load, wide.store, wide.low, wide.high, wide.pack
    words, pairs, nothing = wide.words, wide.pairs, wide.nothing
    total_words = words * per_thread
    single = nbytes == ITEMSIZE[element]  # may have any distance between columns
    keeps = element == "float32"
    # 16-bit words, and what they are unpacked to: the compiler would keep both.
    crowded = not keeps and total_words + wide.elements * per_thread > 48
    recomputes = crowded if recompute is None else recompute and not keeps
    larger, in_pairs = wide.larger, wide.larger is not None
    masks_load, masks_store = not exact and masked, not exact

    # The word itself, but as a value of its own: the compiler would else keep what it has made of it before, in more
    # registers than there are. A grid has one layer here, but the compiler does not know. The two differ to it too.
    @device
    def again(word):
        if recomputes and not in_pairs:
            return uint32(word + uint32(cuda.gridDim.z - 1))
        return word

    @device
    def once_more(word):
        if recomputes:
            return uint32(word ^ uint32(cuda.gridDim.z - 1))
        return word

    @device
    def distance(step):
        return step if single else int64(nbytes)

    @device
    def load(raw, at, source, step, lane, count):
        for v in range(per_thread):
            n = lane + v * threads
            if not masks_load or n < count:
                load_vector(raw, at + v * words, source + uint64(n * distance(step)))
            else:
                for i in range(words):
                    raw[at + v * words + i] = uint32(nothing)

    @device
    def top(raw, at):
        if in_pairs:
            larger_words = uint32(nothing)
            for i in range(total_words):
                larger_words = larger(larger_words, raw[at + i])
            return max(low(larger_words), high(larger_words))
        m = float32(NOTHING)
        for i in range(total_words):
            m = max(m, low(raw[at + i]))
            if pairs:
                m = max(m, high(raw[at + i]))
        return m

    @device
    def total(raw, at, m):
        origin = anchor(m)
        d = float32(0)
        for i in range(total_words):
            word = again(raw[at + i])
            e = exponential(low(word), origin)
            d += e
            if pairs:
                d += exponential(high(word), origin)
            if keeps:
                raw[at + i] = f32_to_bits(e)
        return d

    @device
    def store(target, step, lane, count, raw, at, m, m_row, share):
        origin = anchor(m_row)
        factor = share
        if keeps and rescaled:
            factor = rescale(m, m_row) * share
        for v in range(per_thread):
            n = lane + v * threads
            if not masks_store or n < count:
                for i in range(at + v * words, at + v * words + words):
                    if keeps:
                        raw[i] = f32_to_bits(bits_to_f32(raw[i]) * factor)
                    else:
                        word = once_more(raw[i])
                        p = exponential(low(word), origin) * share
                        q = exponential(high(word), origin) * share if pairs else float32(0)
                        raw[i] = pack(p, q)
                store_vector(target + uint64(n * distance(step)), raw, at + v * words)

    return Held(total_words, wide.elements, load, top, total, store)
