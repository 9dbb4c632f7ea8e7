"""SLA's map, and the lists that kernels walk over: the key tiles that a row tile attends to, and the other way round.

``classify``
    A block has :data:`ROWS` row tiles. Guesses are products of means, a lane for each key tile: a mean of keys is
    loaded once for all of the block's rows, and so is most of the traffic gone. Then each warp has a row tile. Its two
    limits, the k-th greatest guess for two k, are found together, bit by bit from the top: of 32 bits that order as the
    float does, the greatest prefix that at least k guesses reach. It ends as soon as exactly k reach it, after about 16
    passes over guesses, which up to 512 key tiles are in registers: with no sort, and exact. Equal guesses are taken in
    order.
``row_lists``
    What ``classify`` does at its end, for a map of the caller's: of a row tile its critical tiles in order, packed, how
    many they are, and the row of the 0/1 matrix by which the states of the linear part are summed on tensor cores,
    times a power of two (``sla_reference.mean_of``).
``key_lists``
    A lane for each key tile: the row tiles for which it is critical, in order.

Cost: of N tokens T = N / 64 tiles; T^2 d multiply-adds and about 150 T^2 / 32 instructions of a warp, where dense
attention has 8192 T^2 d multiply-adds.

Source: as :mod:`flashnumba.stages.sparsity.sla_reference`; selection by bits is the radix select of Alabi et al.,
"Fast k-selection algorithms for graphics processing units", 2012.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import DeviceFunction, Kernel, device, kernel
from flashnumba.machine.instructions import (
    ld_shared_v4_f32,
    shared_address,
    st_shared_f32,
    vote_ballot,
)
from flashnumba.machine.numba import cuda, float32, int8, int32, int64, uint32
from flashnumba.stages.sparsity.sla_pieces import head_of_keys, piece_of
from flashnumba.stages.sparsity.sla_reference import BLOCK, CUT, FORMS, MILLION, UNSEEN
from flashnumba.stages.sparsity.sla_select import MOST, below, in_order, make_limits
from flashnumba.tiles.elements import scalar

__all__ = ["CLASSIFY_THREADS", "classify_held", "classify_rows", "classify_shared", "make_classify", "make_key_lists",
           "make_row_lists"]  # fmt: skip

KEY_THREADS = 128
AHEAD = 8
"""Row tiles whose class a thread of ``key_lists`` loads before it looks at the first of them."""
ROWS = (8, 16)
"""Row tiles a block of ``classify``: with up to 512 key tiles as many as it has warps, and then more, as the means of
keys come from L2 once for all of them."""
CLASSIFY_THREADS = 256
MOST_GUESSES = 64 * 1024
"""Bytes of guesses in shared memory up to which a block has more than one row tile."""


@cache
def make_enter(element: str, form: str, arch: str) -> DeviceFunction:
    """``enter(found, j, tiles, mine, weights, tile, at, unit, lane) -> at``: class ``found`` of key tile j of 32 into
    the row tile's list ``mine``, of which there are ``at`` already, and into its row of weights."""
    store = scalar(element, arch).store
    rest, everything = form != FORMS[0], form == FORMS[2]

    @device
    def enter(found, j, mine, weights, tile, at, unit, lane):
        critical = vote_ballot(found > int32(0))
        if found > int32(0):
            mine[at + below(critical, lane)] = j
        linear = found == int32(0)
        if rest:
            linear = linear or found == int32(-1)
        if everything:
            linear = linear or found == int32(1)
        if j < weights.shape[1]:
            store(weights, tile, int64(j), unit if linear else float32(0))
        return int32(at + int32(cuda.popc(critical)))

    return enter


def classify_rows(tiles: int) -> int:
    """Row tiles of a block of ``classify`` for so many key tiles; each has 4 bytes of shared memory for each."""
    most = ROWS[tiles > 512]
    return next((rows for rows in (most, most // 2, most // 4, most // 8) if 4 * rows * tiles <= MOST_GUESSES), 1)


def classify_held(tiles: int) -> int:
    """Keys of a lane that ``classify`` has in registers for so many key tiles; 0 where they are too many."""
    return next((held for held in (8, 16) if tiles <= 32 * held), 0)


def classify_shared(tiles: int, d: int) -> int:
    """Bytes of dynamic shared memory of ``classify``."""
    rows = classify_rows(tiles)
    return 16 + 4 * rows * tiles + 4 * max(4, rows) * d


@cache
def make_classify(
    d: int, element: str, form: str = "paper", rows: int = ROWS[0], held: int = 0, min_blocks: int = 2,
    arch: str = "80", *, grouped: bool = False, broken: str = "",
) -> Kernel:  # fmt: skip
    """``(q_means, k_means, classes, lists, counts, weights, rows, keys, critical, negligible, unit, causal)``: means
    float32 ``[B, H, d, tiles]`` and ``[B, Hkv, d, tiles]``, classes int8 ``[B, H, row tiles, key tiles]``, lists int32
    as classes, counts int32 ``[B, H, row tiles]``, weights of the inputs' type ``[B, H, row tiles, padded key tiles]``:
    ``unit`` where a tile is in the linear part and else 0; the shares in millionths, int64.

    A block for each ``rows`` row tiles of a head, :data:`CLASSIFY_THREADS` threads and :func:`classify_shared` bytes.

    Args:
        rows, held: of :func:`classify_rows` and :func:`classify_held`.
        min_blocks: a multiprocessor, for which the compiler leaves registers.
        grouped: there may be fewer heads of keys than of queries.
        broken: plants ``"wait"`` (before all means are there), ``"barrier"`` (before all guesses are), or ``"ties"``
            (of equal guesses all are taken).
    """
    pitch, warps = max(4, rows), CLASSIFY_THREADS // 32
    groups, numbers = pitch // 4, pitch * d
    enter, (hold, reaching, limits), size = make_enter(element, form, arch), make_limits(held), max(1, held)
    waits, meets, all_ties = broken != "wait", broken != "barrier", broken == "ties"
    ahead = 8 if rows > ROWS[0] else 16  # numbers of a mean that a lane loads before it takes the first

    @device
    def guess(guesses, means, k_from, tiles, seen, first, lane):
        """Of 32 key tiles, the guesses of all rows of the block."""
        total = cuda.local.array(pitch, float32)
        mean = cuda.local.array(4, float32)
        loaded = cuda.local.array(ahead, float32)
        j = int32(first + lane)
        at = min(j, int32(seen - int32(1)))
        for r in range(pitch):
            total[r] = float32(0)
        for c in range(int32(0), int32(d), int32(ahead)):
            for i in range(ahead):
                loaded[i] = k_from[int64(c + int32(i)), int64(at)]
            for i in range(ahead):
                for g in range(groups):
                    ld_shared_v4_f32(mean, 0, means + uint32(4 * pitch) * uint32(c + int32(i)) + uint32(16 * g))
                    for r in range(4):
                        total[4 * g + r] = cuda.fma(mean[r], loaded[i], total[4 * g + r])
        if j < seen:
            for r in range(rows):
                guesses[int32(r) * tiles + j] = in_order(total[r])

    @device
    def sort(
        keys, classes, lists, counts, weights, batch, head, tile, m, n, critical, negligible, unit, causal, lane
    ):  # fmt: skip
        """Classes of a row tile's key tiles, by a warp, and what follows from them."""
        tiles = int32(classes.shape[3])
        end, whole = n, n
        if causal != 0:
            end = min(n, max(int64(0), min((tile + 1) * BLOCK, m) + n - m))
            whole = min(n, max(int64(0), tile * BLOCK + 1 + n - m))
        seen = int32((end + (BLOCK - 1)) // BLOCK)
        first_cut = int32(whole // BLOCK) if whole < n else tiles
        cut = max(int32(0), int32(seen - first_cut))
        for j in range(int32(first_cut // int32(32) * int32(32) + lane), seen, int32(32)):  # a key is one lane's
            if j >= first_cut:
                keys[j] = uint32(MOST)
        most = max(int32(-((-critical * int64(seen)) // MILLION)), cut)
        some = int32(seen - min(int32(negligible * int64(seen) // MILLION), int32(seen - most)))
        own = cuda.local.array(size, uint32)
        hold(own, keys, seen, lane)
        high, low = limits(own, keys, seen, most, some, lane)
        # Of the keys that equal a limit, as many are within as are missing; the first ones.
        after_high, after_low = uint32(min(high, uint32(MOST - 1)) + 1), uint32(min(low, uint32(MOST - 1)) + 1)
        beyond = reaching(own, keys, seen, after_high, after_low, lane)
        high_left = int32(most - int32(beyond >> uint32(16))) if high != uint32(MOST) else most
        low_left = int32(some - int32(beyond & uint32(0xFFFF))) if low != uint32(MOST) else some
        if all_ties:
            high_left, low_left = seen, seen
        mine, of_row, at = lists[batch, head, tile], weights[batch, head], int32(0)
        for first in range(int32(0), int32(weights.shape[3]), int32(32)):
            j = int32(first + lane)
            key = keys[j] if j < seen else uint32(0)
            at_high = vote_ballot(j < seen and key == high)
            at_low = vote_ballot(j < seen and key == low)
            found = int32(UNSEEN)
            if j < seen:
                found = int32(-1)
                if key > low or (key == low and below(at_low, lane) < low_left):
                    found = int32(0)
                if key > high or (key == high and below(at_high, lane) < high_left):
                    found = int32(1)
                if j >= first_cut:
                    found = int32(CUT)
            high_left -= int32(cuda.popc(at_high))
            low_left -= int32(cuda.popc(at_low))
            if j < tiles:
                classes[batch, head, tile, int64(j)] = int8(found)
            at = enter(found, j, mine, of_row, tile, at, unit, lane)
        if lane == 0:
            counts[batch, head, tile] = at

    @kernel(threads=CLASSIFY_THREADS, min_blocks=min_blocks, arch=arch, name="sparsity.sla classify")
    def classify(q_means, k_means, classes, lists, counts, weights, m, n, critical, negligible, unit, causal):
        guesses = cuda.shared.array(0, uint32)
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        row_tiles, tiles = classes.shape[2], int32(classes.shape[3])
        batch, head, part = piece_of(cuda.blockIdx.x, (row_tiles + (rows - 1)) // rows, classes.shape[1])
        means = (shared_address(guesses) + uint32(4 * rows) * uint32(tiles) + uint32(15)) & uint32(0xFFFFFFF0)
        last = min((part + 1) * rows, row_tiles)
        most = n
        if causal != 0:
            most = min(n, max(int64(0), min(last * BLOCK, m) + n - m))
        most = int32((most + (BLOCK - 1)) // BLOCK)
        for i in range(int32(cuda.threadIdx.x), int32(numbers), int32(CLASSIFY_THREADS)):
            row = min(part * rows + int64(i % int32(pitch)), row_tiles - 1)
            st_shared_f32(means + uint32(4) * uint32(i), q_means[batch, head, int64(i // int32(pitch)), row])
        if waits:
            cuda.syncthreads()  # the means of all rows are there
        k_from = k_means[batch, head_of_keys(head, q_means, k_means) if grouped else head]
        for first in range(int32(32) * warp, most, int32(32 * warps)):
            guess(guesses, means, k_from, tiles, most, first, lane)
        if meets:
            cuda.syncthreads()  # the guesses of all key tiles are there; there is no barrier of the block from here on
        for row in range(warp, int32(rows), int32(warps)):
            tile = part * rows + int64(row)
            if tile < row_tiles:
                keys = guesses[int32(row) * tiles :]
                sort(
                    keys, classes, lists, counts, weights, batch, head, tile, m, n, critical, negligible, unit, causal,
                    lane,
                )  # fmt: skip

    return classify


@cache
def make_row_lists(element: str, form: str = "paper", arch: str = "80") -> Kernel:
    """``(classes, lists, counts, weights, unit)``: lists, counts and weights as ``classify`` leaves them. A warp for
    each row tile."""
    enter = make_enter(element, form, arch)

    @kernel(threads=32, arch=arch, name="sparsity.sla row lists")
    def row_lists(classes, lists, counts, weights, unit):
        lane = int32(cuda.threadIdx.x)
        batch, head, tile = piece_of(cuda.blockIdx.x, classes.shape[2], classes.shape[1])
        tiles, at = int32(classes.shape[3]), int32(0)
        mine, of_row = lists[batch, head, tile], weights[batch, head]
        for first in range(int32(0), int32(weights.shape[3]), int32(32)):
            j = int32(first + lane)
            found = int32(UNSEEN)
            if j < tiles:
                found = int32(classes[batch, head, tile, int64(j)])
            at = enter(found, j, mine, of_row, tile, at, unit, lane)
        if lane == 0:
            counts[batch, head, tile] = at

    return row_lists


@cache
def make_key_lists(*, grouped: bool = False, broken: str = "") -> Kernel:
    """``(classes, lists, counts)``: lists int32 ``[B, Hkv, key tiles, H / Hkv * row tiles]``, counts int32 ``[B, Hkv,
    key tiles]``. Row tile i of the group's head g is number ``g * row tiles + i``. A thread for each key tile.

    Args:
        grouped: there may be fewer heads of keys than of queries.
        broken: plants ``"group"``: of a group's heads the last is the only one in the list.
    """
    kept = broken != "group"

    @device
    def collect(classes, lists, batch, head, of_keys, j, before, found):
        """The row tiles of a head of queries, ``before`` which others of the group have had their numbers."""
        row_tiles, ahead = classes.shape[2], cuda.local.array(AHEAD, int32)
        for first in range(int64(0), row_tiles, int64(AHEAD)):
            for i in range(AHEAD):
                ahead[i] = int32(classes[batch, head, min(first + i, row_tiles - 1), j])
            for i in range(AHEAD):
                if first + i < row_tiles and ahead[i] > int32(0):
                    lists[batch, of_keys, j, found] = int32(before + first + i)
                    found += 1
        return found

    @kernel(threads=KEY_THREADS, arch="75", name="sparsity.sla key lists")
    def key_lists(classes, lists, counts):
        row_tiles, tiles = classes.shape[2], classes.shape[3]
        parts = (tiles + (KEY_THREADS - 1)) // KEY_THREADS
        heads = lists.shape[1] if grouped else classes.shape[1]
        batch, head, part = piece_of(cuda.blockIdx.x, parts, heads)
        j = part * KEY_THREADS + int64(cuda.threadIdx.x)
        if j < tiles:
            found = int64(0)
            if grouped:
                group = classes.shape[1] // heads
                for g in range(group):
                    if not kept:
                        found = int64(0)
                    found = collect(classes, lists, batch, head * group + g, head, j, g * row_tiles, found)
            else:
                found = collect(classes, lists, batch, head, head, j, int64(0), found)
            counts[batch, head, j] = int32(found)

    return key_lists
