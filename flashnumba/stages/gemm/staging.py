"""The way of an operand's tile from memory to shared memory, through registers, as float32.

A tile has ``outer`` rows of A (or columns of B) and ``bk`` steps of k. In shared memory it lies as ``[bk][outer]``, one
line for each k, whichever way the operand's own lines run: a step of the product then reads neighbouring floats. ::

    lines along outer   a vector of 4 neighbours is stored as it is, 128 bits
    lines along k       a vector is 4 steps of k for one row: it is stored as 4 floats, one in each line (transposed)

Transposed, two lanes take the 32 bytes of one row and the other lanes the next 15 rows, so that whole sectors are read.
Four floats of one lane go into four lines, those of its neighbour into the next four; a line is 4 floats longer than
``outer``, so the two write to banks 16 apart, and 16 rows fill the rest: no bank is asked twice.

Rows beyond the array are not masked: the nearest row that there is is read in their place, and what comes of it is
never stored. Where K is no multiple of ``bk`` the *first* tile is the short one, filled up with zeros; so the loop over
the others masks nothing.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import st_shared_f32, st_shared_v4_f32
from flashnumba.machine.numba import cuda, float32, uint32, uint64
from flashnumba.tiles.elements import ITEMSIZE, vectors

__all__ = ["CHUNK", "PAD", "Staging", "staging"]

CHUNK = 8
"""Steps of k that neighbouring lanes take of one row, where lines run along k; ``bk`` is a multiple."""
PAD = 4
"""Floats that a line of a tile is longer than the tile is wide."""


class Staging(NamedTuple):
    """How a block brings a tile in.

    Attributes:
        loads: vectors a thread.
        words: 32-bit words, so registers, that these take.
        begin: ``begin(addresses, base, first, count, lead)``: where this thread's vectors of the first tile are;
            ``addresses`` has ``loads`` uint64, the tile's first row is ``first`` of ``count``, and lines lie ``lead``
            bytes apart.
        fetch_first: ``fetch_first(raw, addresses, steps, distance)``: load a tile of ``steps`` steps of k, the rest
            zeros, and move on by ``distance`` bytes.
        fetch: ``fetch(raw, addresses, distance)``: load a whole tile into registers and move on.
        put: ``put(tile, raw)``: store it to shared address ``tile``.
    """

    loads: int
    words: int
    begin: DeviceFunction
    fetch_first: DeviceFunction
    fetch: DeviceFunction
    put: DeviceFunction


@cache
def staging(
    element: str, outer: int, bk: int, threads: int, *, along_k: bool, wide: bool, arch: str = "80", broken: str = "",
) -> Staging:  # fmt: skip
    """A block of ``threads`` threads and tiles of ``outer x bk`` elements.

    Args:
        along_k: lines of the operand run along k.
        wide: 4 elements a load, which are aligned in every line and of which lines consist; else one.
        arch: see :func:`flashnumba.tiles.elements.vectors`.
        broken: plants a fault: ``"mask"`` fills nothing up, ``"edge"`` reads rows that are not there, ``"pad"``
            stores lines side by side, without what :data:`PAD` leaves between them.

    Raises:
        ValueError: the threads do not share the tile evenly.
    """
    itemsize = ITEMSIZE[element]
    per_load = 4 if wide else 1
    load_vector, low, high, words_each = _access(element, per_load, arch)
    pairs = itemsize == 2 and wide
    loads = outer * bk // (per_load * threads)
    words = loads * words_each
    line_bytes = 4 * (outer if broken == "pad" else outer + PAD)
    # Lanes along a line, then lines; see the module's docstring for lines along k.
    along = CHUNK // per_load if along_k else outer // per_load
    across = outer if along_k else bk
    along_at_once = min(threads, along)
    across_at_once = min(threads // along_at_once, across)
    beyond_at_once = threads // (along_at_once * across_at_once)
    along_turns, across_turns = along // along_at_once, across // across_at_once
    shared_out = along_at_once * across_at_once * beyond_at_once
    turns_left = loads * per_load * threads != outer * bk or along % along_at_once or across % across_at_once
    if bk % CHUNK or outer % 4 or loads < 1 or shared_out != threads or turns_left:
        raise ValueError(f"{threads} threads do not share a tile of {outer} x {bk} evenly, {per_load} elements a load")

    unmasked, unclamped = broken == "mask", broken == "edge"

    @device
    def place(i):
        """(row, step of k) of this thread's vector ``i``, in the tile."""
        t = uint32(cuda.threadIdx.x)
        at = t % uint32(along_at_once) + uint32(i % along_turns * along_at_once)
        t = t // uint32(along_at_once)
        line = t % uint32(across_at_once) + uint32(i // along_turns % across_turns * across_at_once)
        beyond = t // uint32(across_at_once) + uint32(i // (along_turns * across_turns) * beyond_at_once)
        if along_k:
            return uint32(line), uint32(beyond * uint32(CHUNK) + at * uint32(per_load))
        return uint32(at * uint32(per_load)), uint32(line)

    @device
    def begin(addresses, base, first, count, lead):
        for i in range(loads):
            row, step = place(i)
            row = uint32(first + row)
            if not unclamped:
                row = min(row, uint32(count - uint32(1 if along_k else per_load)))
            if along_k:
                addresses[i] = base + uint64(row) * uint64(lead) + uint64(step * uint32(itemsize))
            else:
                addresses[i] = base + uint64(step) * uint64(lead) + uint64(row) * uint64(itemsize)

    @device
    def fetch_first(raw, addresses, steps, distance):
        for i in range(loads):
            _, k = place(i)
            if k < steps or unmasked:
                load_vector(raw, i * words_each, addresses[i])
            else:
                for w in range(words_each):
                    raw[i * words_each + w] = uint32(0)
            addresses[i] += distance

    @device
    def fetch(raw, addresses, distance):
        for i in range(loads):
            load_vector(raw, i * words_each, addresses[i])
            addresses[i] += distance

    @device
    def put(tile, raw):
        value = cuda.local.array(4, float32)
        for i in range(loads):
            row, step = place(i)
            at = tile + uint32(step * uint32(line_bytes)) + uint32(row * uint32(4))
            for j in range(per_load):
                if pairs:
                    word = raw[i * words_each + j // 2]
                    value[j] = low(word) if j % 2 == 0 else high(word)
                else:
                    value[j] = low(raw[i * words_each + j])
            if per_load == 1:
                st_shared_f32(at, value[0])
            elif along_k:
                for j in range(per_load):
                    st_shared_f32(at + uint32(j * line_bytes), value[j])
            else:
                st_shared_v4_f32(at, value, 0)

    return Staging(loads, words, begin, fetch_first, fetch, put)


def _access(element: str, per_load: int, arch: str) -> tuple:
    """(load, low, high, words) of vectors of so many elements."""
    access = vectors(element, per_load * ITEMSIZE[element], "plain", arch)
    return access.load, access.low, access.high, access.words
