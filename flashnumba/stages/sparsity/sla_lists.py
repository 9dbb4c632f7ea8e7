"""SLA's map, and the lists that kernels walk over: the key tiles that a row tile attends to, and the other way round.

``classify``
    A warp for each row tile, and several in a block so that the means of keys, of which each warp reads all, come from
    the cache of its multiprocessor: from L2 alone they were most of the time. Guesses are products of means, a lane for
    each key tile. The k-th greatest is found bit by bit, from the top: of 32 bits that order as the float does, the
    greatest prefix that at least k guesses reach. That is 32 passes over the guesses in shared memory whatever k is,
    with no sort, and exact. Equal guesses are taken in order.
``row_lists``
    A warp for each row tile: its critical tiles in order, packed, how many they are, and the row of the 0/1 matrix by
    which the states of the linear part are summed on tensor cores, times a power of two (``sla_reference.mean_of``).
``key_lists``
    A lane for each key tile: the row tiles for which it is critical, in order.

Cost: of N tokens T = N / 64 tiles; T^2 d multiply-adds and about 400 T^2 / 32 instructions of a warp, where dense
attention has 8192 T^2 d multiply-adds.

Source: as :mod:`flashnumba.stages.sparsity.sla_reference`; selection by bits is the radix select of Alabi et al.,
"Fast k-selection algorithms for graphics processing units", 2012.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import Kernel, device, kernel
from flashnumba.machine.instructions import f32_to_bits, syncwarp, vote_ballot
from flashnumba.machine.numba import cuda, float32, int8, int32, int64, uint32
from flashnumba.stages.sparsity.sla_features import piece_of
from flashnumba.stages.sparsity.sla_reference import BLOCK, CUT, FORMS, MILLION, UNSEEN
from flashnumba.tiles.elements import scalar

__all__ = ["classify_warps", "make_classify", "make_key_lists", "make_row_lists"]

MOST = 0xFFFFFFFF
KEY_THREADS = 128
AHEAD = 8
"""Row tiles whose class a thread of ``key_lists`` loads before it looks at the first of them."""
MOST_GUESSES = 64 * 1024
"""Bytes of guesses in shared memory up to which a block has more than one warp."""


@device
def in_order(x):
    """Bits that order as the float does."""
    bits = f32_to_bits(x)
    return uint32(bits ^ uint32(MOST)) if bits >= uint32(0x80000000) else uint32(bits | uint32(0x80000000))


@device
def below(ballot, lane):
    """How many of the lanes before this one voted."""
    return int32(cuda.popc(uint32(ballot & uint32((uint32(1) << uint32(lane)) - uint32(1)))))


@device
def reaching(keys, seen, least, lane):
    """How many of the first ``seen`` keys are at least ``least``."""
    found = int32(0)
    for first in range(int32(0), int32(seen), int32(32)):
        j = int32(first + lane)
        found += int32(cuda.popc(vote_ballot(j < seen and keys[j] >= least)))
    return found


@device
def greatest(keys, seen, k, lane):
    """The k-th greatest of the first ``seen`` keys, k from 1 on; 2^32 - 1 for k = 0."""
    if k == int32(0):
        return uint32(MOST)
    prefix, bit = uint32(0), uint32(0x80000000)
    while bit != uint32(0):
        if reaching(keys, seen, uint32(prefix | bit), lane) >= k:
            prefix = uint32(prefix | bit)
        bit = uint32(bit >> uint32(1))
    return prefix


def classify_warps(tiles: int) -> int:
    """Warps of a block of ``classify`` for so many key tiles; each has 4 bytes of shared memory for each of them."""
    return next((warps for warps in (8, 4, 2) if 4 * warps * tiles <= MOST_GUESSES), 1)


@cache
def make_classify(d: int, warps: int = 8, *, broken: str = "") -> Kernel:
    """``(q_means, k_means, classes, rows, keys, critical, negligible, causal)``: means float32 ``[B, H, d, tiles]``,
    classes int8 ``[B, H, row tiles, key tiles]``, the shares in millionths, int64. A block for each ``warps`` row
    tiles of a head, with :func:`classify_warps` times 4 bytes of dynamic shared memory for each key tile.

    Args:
        broken: plants ``"wait"`` (lanes do not wait for one another's part of the mean) or ``"ties"`` (of equal guesses
            all are taken).
    """
    waits, all_ties, size = broken != "wait", broken == "ties", d * warps

    @kernel(threads=32 * warps, min_blocks=2, arch="75", name="sparsity.sla classify")
    def classify(q_means, k_means, classes, rows, keys, critical, negligible, causal):
        all_guesses = cuda.shared.array(0, uint32)
        all_means = cuda.shared.array(size, float32)
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        tiles = classes.shape[3]
        parts = (classes.shape[2] + (warps - 1)) // warps
        batch, head, part = piece_of(cuda.blockIdx.x, parts, classes.shape[1])
        tile = part * warps + int64(warp)
        if tile >= classes.shape[2]:
            return  # the whole warp; there is no barrier of the block
        guesses, mean = all_guesses[int64(warp) * tiles :], all_means[int32(d) * warp :]
        end, whole = keys, keys
        if causal != 0:
            last = min((tile + 1) * BLOCK, rows)
            end = min(keys, max(int64(0), last + keys - rows))
            whole = min(keys, max(int64(0), tile * BLOCK + 1 + keys - rows))
        seen = int32((end + (BLOCK - 1)) // BLOCK)
        for c in range(d // 32):
            mean[32 * c + lane] = q_means[batch, head, int64(32 * c + lane), tile]
        if waits:
            syncwarp()  # the mean is there for all lanes; a guess is its own lane's alone
        cut = int32(0)
        for first in range(int32(0), seen, int32(32)):
            j = int32(first + lane)
            at = int64(min(j, seen - int32(1)))
            guess = float32(0)
            for c in range(d):
                guess = cuda.fma(mean[c], k_means[batch, head, c, at], guess)
            is_cut = j < seen and min((at + 1) * BLOCK, keys) > whole
            if j < seen:
                guesses[j] = uint32(MOST) if is_cut else in_order(guess)
            cut += int32(cuda.popc(vote_ballot(is_cut)))
        most = int32(-((-critical * int64(seen)) // MILLION))
        most = max(most, cut)
        least = min(int32(negligible * int64(seen) // MILLION), int32(seen - most))
        high, low = greatest(guesses, seen, most, lane), greatest(guesses, seen, int32(seen - least), lane)
        # Of the guesses that equal a limit, as many are within as are missing; the first ones.
        high_left = most
        if high != uint32(MOST):
            high_left -= reaching(guesses, seen, high + uint32(1), lane)
        low_left = (
            seen - least - reaching(guesses, seen, low + uint32(1), lane) if low != uint32(MOST) else seen - least
        )
        if all_ties:
            high_left, low_left = seen, seen
        for first in range(int32(0), int32(tiles), int32(32)):
            j = int32(first + lane)
            guess = guesses[j] if j < seen else uint32(0)
            at_high = vote_ballot(j < seen and guess == high)
            at_low = vote_ballot(j < seen and guess == low)
            found = int32(UNSEEN)
            if j < seen:
                found = int32(-1)
                if guess > low or (guess == low and below(at_low, lane) < low_left):
                    found = int32(0)
                if guess > high or (guess == high and below(at_high, lane) < high_left):
                    found = int32(1)
                if min(int64(j + int32(1)) * BLOCK, keys) > whole:
                    found = int32(CUT)
            high_left -= int32(cuda.popc(at_high))
            low_left -= int32(cuda.popc(at_low))
            if j < tiles:
                classes[batch, head, tile, int64(j)] = int8(found)

    return classify


@cache
def make_row_lists(element: str, form: str = "paper", arch: str = "80") -> Kernel:
    """``(classes, lists, counts, sums, unit)``: lists int32 as the map, counts int32 ``[B, H, row tiles]``; sums of the
    inputs' type ``[B, H, row tiles, padded key tiles]``, ``unit`` float32 where a tile is in the linear part and else
    0. A warp for each row tile."""
    store = scalar(element, arch).store
    rest, everything = form != FORMS[0], form == FORMS[2]

    @kernel(threads=32, arch=arch, name="sparsity.sla row lists")
    def row_lists(classes, lists, counts, sums, unit):
        lane = int32(cuda.threadIdx.x)
        batch, head, tile = piece_of(cuda.blockIdx.x, classes.shape[2], classes.shape[1])
        tiles, at = int32(classes.shape[3]), int32(0)
        to = sums[batch, head]
        for first in range(int32(0), int32(sums.shape[3]), int32(32)):
            j = int32(first + lane)
            found = int32(UNSEEN)
            if j < tiles:
                found = int32(classes[batch, head, tile, int64(j)])
            critical = vote_ballot(found > int32(0))
            if found > int32(0):
                lists[batch, head, tile, int64(at + below(critical, lane))] = j
            at += int32(cuda.popc(critical))
            linear = found == int32(0)
            if rest:
                linear = linear or found == int32(-1)
            if everything:
                linear = linear or found == int32(1)
            if j < sums.shape[3]:
                store(to, tile, int64(j), unit if linear else float32(0))
        if lane == 0:
            counts[batch, head, tile] = at

    return row_lists


@kernel(threads=KEY_THREADS, arch="75", name="sparsity.sla key lists")
def key_lists(classes, lists, counts):
    """Lists int32 ``[B, H, key tiles, row tiles]``, counts int32 ``[B, H, key tiles]``; a thread for each key tile."""
    row_tiles, tiles = classes.shape[2], classes.shape[3]
    parts = (tiles + (KEY_THREADS - 1)) // KEY_THREADS
    batch, head, part = piece_of(cuda.blockIdx.x, parts, classes.shape[1])
    j = part * KEY_THREADS + int64(cuda.threadIdx.x)
    if j < tiles:
        found, ahead = int64(0), cuda.local.array(AHEAD, int32)
        for first in range(int64(0), row_tiles, int64(AHEAD)):
            for i in range(AHEAD):
                ahead[i] = int32(classes[batch, head, min(first + i, row_tiles - 1), j])
            for i in range(AHEAD):
                if first + i < row_tiles and ahead[i] > int32(0):
                    lists[batch, head, j, found] = int32(first + i)
                    found += 1
        counts[batch, head, j] = int32(found)


def make_key_lists() -> Kernel:
    """``(classes, lists, counts)``."""
    return key_lists
