"""From S's accumulators to P's operand: three ways to hand over, between the two products of an attention kernel.

With the rows of K in another order than the natural one (:class:`flashnumba.tiles.sizes.Order`), or with 8-bit
elements, the four lanes of a row hold P otherwise than the second product wants it. Count in units of 16 bits: one
float16 or bfloat16, or two neighbouring e4m3. Of 16 units of a row (16 keys, or 32) ::

    lane q of four has      q    q + 4     q + 8     q + 12      units 0 to 3 of it
    and wants               2q   2q + 1    2q + 8    2q + 9      registers p0 (the first two) and p1

For 16-bit elements this is so in the order :data:`STRIDED`, which is how the notes' matrix instruction leaves its
columns; for e4m3 in the natural one. A lane packs units 0 and 2 into a word, and 1 and 3. The three ways:

``shared``
    Lanes store their units into a tile of 16 rows x 32 bytes of their warp, and ldmatrix brings the operand. Chunks of
    16 bytes change places in every second four rows, so that neither stores nor loads meet a bank twice. Two tiles are
    used in turn: the barrier of one step also says that nobody reads what the next one overwrites.
``shuffles``
    Of a lane's two words one is for each of two lanes, and both words it wants have the same two senders. In two rounds
    each lane sends each word once; which first is chosen so that no two lanes ask one lane for different words ::

        round 1   lane 0, 1, 2, 3 reads from lane 0, 2, 1, 3        each sends word 0 if it is even, else word 1
        round 2   lane 0, 1, 2, 3 reads from lane 1, 3, 0, 2        the other one

    That is one shuffle, two selects and one permutation of bytes for each register of P.
``registers``
    K's rows are copied in an order in which each lane finds what it wants: the natural one for 16 bits, :data:`QUADS`
    for 8. Packing is all there is to do.

And one that nobody needs, for measurements: ``detour`` has the order of ``registers`` and stores P all the same, as
whole words, half as many stores as ``shared``; it is what shared memory costs at its best.

Sources: the notes, section 4; for QUADS, SageAttention permutes V in the same manner instead of K.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import (
    ex2_approx,
    ldmatrix_x4,
    pack_e4m3x4,
    shfl_idx,
    st_shared_b16,
    st_shared_b32,
    syncwarp,
)
from flashnumba.machine.numba import cuda, float32, int32, uint16, uint32
from flashnumba.tiles.attention import Steps
from flashnumba.tiles.elements import vectors
from flashnumba.tiles.sizes import NATURAL, AttentionTiles, Order
from flashnumba.tiles.swizzle import make_place
from flashnumba.tiles.tensor import make_multiply

__all__ = ["DETOUR", "FAULTS", "P_LOG2", "QUADS", "STRIDED", "WAYS", "Chain", "make_chain", "order_for", "shared_of"]

WAYS = ("shared", "shuffles", "registers")
DETOUR = "detour"
STRIDED = Order(1, 8, 4)
"""A lane's four values of 16 keys are q, q + 4, q + 8 and q + 12."""
QUADS = Order(4, 2, 1)
"""They are 4q to 4q + 3: four neighbours, as the 8-bit product wants them of each half of its 32 keys."""
P_LOG2 = 8
"""FP8 weights are multiplied by 2^8: of 0 to 1 e4m3 would lose all below 2^-10. The sum has the factor too."""
QUARTERS = {"float8_e4m3fn": 0x28282828, "float8_e5m2": 0x34343434}
"""1/4, four times. All four lanes of a row get the whole sum of its weights, and the four are added in the end."""
FAULTS = {
    "shared": ("sync", "overwrite", "pitch", "unit"),
    "shuffles": ("round", "halves"),
    "registers": (),
}
"""What can be planted in a hand-over; and where it is used, in :func:`flashnumba.tiles.forward.make_attend`, ``order``,
that the mask and P know another order than K was copied in, and with FP8 ``o_barrier``, and ``saturate``, that weights
are multiplied by 2^10."""


class Chain(NamedTuple):
    """How a warp goes from S to O.

    Attributes:
        keep: ``(kept, tile, warp_row, lane)``: what a lane needs for it, into ``kept[0:2]``, uint32; ``tile`` is where
            :func:`shared_of` bytes of shared memory begin, at a multiple of 128.
        softmax_pv: ``(s, acc, m, l, factor, v_lane, kept)``, as :attr:`flashnumba.tiles.attention.Steps.softmax_pv`.
            A barrier of the block lies between two calls.
    """

    keep: DeviceFunction
    softmax_pv: DeviceFunction


def order_for(way: str, nbytes: int) -> Order:
    """In which order K's rows are copied for a way, with elements of so many bytes.

    Raises:
        ValueError: no such way.
    """
    if way not in (*WAYS, DETOUR):
        raise ValueError(f"chain is {way!r}; it must be one of {', '.join(WAYS)}")
    as_wanted = way in ("registers", DETOUR)
    if nbytes == 1:
        return QUADS if as_wanted else NATURAL
    return NATURAL if as_wanted else STRIDED


def shared_of(way: str, tiles: AttentionTiles) -> int:
    """Bytes of shared memory that a way needs beyond the tiles of Q, K and V."""
    return 2 * 32 * tiles.bm if way in ("shared", DETOUR) else 0


@cache
def make_chain(
    way: str, tiles: AttentionTiles, element: str, steps: Steps, arch: str = "80", broken: str = ""
) -> Chain:
    """A way for float16, bfloat16 or the two 8-bit types, with which P is e4m3 in any case.

    What l sums are the weights as they are multiplied: in 8 bits rounding changes them by up to a sixteenth, and a
    product with a column of ones adds up what is left, in float32.

    Args:
        way: one of :data:`WAYS`, or :data:`DETOUR`.
        steps: with what belongs to the element in ``raise_maximum`` and ``multiply_pv``.
        broken: plants one of :data:`FAULTS`.
    """
    order_for(way, tiles.nbytes)
    if way == "registers" and tiles.nbytes == 2:
        return Chain(*_nothing_to_do(steps))
    frags, rows, registers = tiles.frags, 2 * tiles.frags, 4 * tiles.frags
    keys = 16 if tiles.nbytes == 2 else 32
    each, p_regs = tiles.bn // keys, tiles.frags * 4 * (tiles.bn // keys)
    half, scaled = each // 2, tiles.nbytes == 1
    add_up = make_multiply(element, arch, weights=True) if scaled else None
    quarters, factor_log2 = QUARTERS.get(element, 0), P_LOG2 + 2 * (broken == "saturate")
    raise_maximum, multiply_pv = steps.raise_maximum, steps.multiply_pv
    weights = make_weights(tiles, element, arch, neighbours=way in ("registers", DETOUR))
    make = {"shared": _through_shared, DETOUR: _by_detour, "shuffles": _by_shuffles, "registers": _by_registers}[way]
    keep, hand_over = make(frags, broken)

    @device
    def softmax_pv(s, acc, m, l, factor, v_lane, kept):
        p = cuda.local.array(p_regs, uint32)
        words = cuda.local.array(registers, uint32)
        bias = cuda.local.array(rows, float32)
        raise_maximum(s, acc, m, l, bias, factor)
        if scaled:
            ones = cuda.local.array(2, uint32)
            sums = cuda.local.array(registers, float32)
            ones[0] = ones[1] = uint32(quarters)
            for r in range(rows):
                bias[r] += float32(factor_log2)
                sums[2 * r] = sums[2 * r + 1] = float32(0)
        # In two loops, as one of eight steps would be too long for the compiler to unroll.
        for k in range(half):
            weights(words, s, l, bias, factor, k)
            hand_over(p, k * registers, words, kept, k)
            multiply_pv(acc, p, v_lane, k)
            if scaled:
                for f in range(frags):
                    add_up(sums, 4 * f, p, k * registers + 4 * f, ones, 0)
        for k in range(half, each):
            weights(words, s, l, bias, factor, k)
            hand_over(p, k * registers, words, kept, k)
            multiply_pv(acc, p, v_lane, k)
            if scaled:
                for f in range(frags):
                    add_up(sums, 4 * f, p, k * registers + 4 * f, ones, 0)
        if scaled:
            for r in range(rows):
                l[r] += sums[2 * r]

    return Chain(keep, softmax_pv)


def _nothing_to_do(steps: Steps) -> tuple[DeviceFunction, DeviceFunction]:
    softmax_in_place = steps.softmax_pv

    @device
    def keep(kept, tile, warp_row, lane):
        pass

    @device
    def softmax_pv(s, acc, m, l, factor, v_lane, kept):
        softmax_in_place(s, acc, m, l, factor, v_lane)

    return keep, softmax_pv


# -- weights, packed ---------------------------------------------------------------------------------------------------
@cache
def make_weights(tiles: AttentionTiles, element: str, arch: str, *, neighbours: bool) -> DeviceFunction:
    """``weights(words, s, l, bias, factor, k)``: the k-th 16 (FP8: 32) keys' weights, and l grows but for FP8.

    Words ``4 f + 2 half`` and the next hold the four units of 16 bits that a lane has of a row: 0 and 2, 1 and 3; or
    as ``neighbours`` 0 and 1, 2 and 3.
    """
    frags, n_groups, eight = tiles.frags, tiles.bn // 8, tiles.nbytes == 1
    groups = 4 if eight else 2
    values = 2 * groups
    second, third = (1, 2) if neighbours else (2, 1)
    pack_two = None if eight else vectors(element, 4, arch=arch).pack

    @device
    def pack_units(x, a, b):
        return pack_two(x[a], x[b])

    @device
    def pack_pairs(x, a, b):
        return pack_e4m3x4(x[2 * a], x[2 * a + 1], x[2 * b], x[2 * b + 1])

    pack = pack_pairs if eight else pack_units

    @device
    def weights(words, s, l, bias, factor, k):
        x = cuda.local.array(values, float32)
        for f in range(frags):
            for half in range(2):
                r = 2 * f + half
                for t in range(groups):
                    at = (f * n_groups + groups * k + t) * 4 + 2 * half
                    x[2 * t] = ex2_approx(cuda.fma(s[at], factor, bias[r]))
                    x[2 * t + 1] = ex2_approx(cuda.fma(s[at + 1], factor, bias[r]))
                    if not eight:
                        l[r] += x[2 * t] + x[2 * t + 1]
                words[4 * f + 2 * half] = pack(x, 0, second)
                words[4 * f + 2 * half + 1] = pack(x, third, 3)

    return weights


# -- the ways ----------------------------------------------------------------------------------------------------------
# ``keep`` as in Chain; ``hand_over(p, at, words, kept, k)``: from words to the operand ``p[at : at + 4 frags]``.
def _by_registers(frags: int, broken: str) -> tuple[DeviceFunction, DeviceFunction]:
    @device
    def keep(kept, tile, warp_row, lane):
        pass

    @device
    def hand_over(p, at, words, kept, k):
        for f in range(frags):
            for half in range(2):
                p[at + 4 * f + half] = words[4 * f + 2 * half]
                p[at + 4 * f + 2 + half] = words[4 * f + 2 * half + 1]

    return keep, hand_over


def _by_shuffles(frags: int, broken: str) -> tuple[DeviceFunction, DeviceFunction]:
    other_round, in_order = int(broken != "round"), broken == "halves"

    @device
    def keep(kept, tile, warp_row, lane):
        kept[0] = uint32((lane & 28) | ((lane >> 1) & 1) | ((lane & 1) << 1))  # the sender of round 1
        kept[1] = uint32(lane & 3)

    @device
    def hand_over(p, at, words, kept, k):
        odd, upper = (kept[1] & uint32(1)) != uint32(0), kept[1] >= uint32(2)
        if in_order:
            upper = False
        for f in range(frags):
            for half in range(2):
                even_word, odd_word = words[4 * f + 2 * half], words[4 * f + 2 * half + 1]
                first = shfl_idx(odd_word if odd else even_word, int32(kept[0]))
                other = shfl_idx(even_word if odd else odd_word, int32(kept[0] ^ uint32(other_round)))
                # For lanes 2 and 3 the word of the later unit came first.
                low, high = other if upper else first, first if upper else other
                p[at + 4 * f + half] = uint32((low & uint32(0xFFFF)) | (high << uint32(16)))
                p[at + 4 * f + 2 + half] = uint32((low >> uint32(16)) | (high & uint32(0xFFFF0000)))

    return keep, hand_over


def _by_detour(frags: int, broken: str) -> tuple[DeviceFunction, DeviceFunction]:
    place, slot_bytes = make_place(2), 512 * frags

    @device
    def keep(kept, tile, warp_row, lane):
        mine = tile + uint32(64) * uint32(warp_row)
        kept[0] = mine + place(lane >> 2, 0) + uint32(4 * (lane & 3))
        kept[1] = mine + place(lane & 15, lane >> 4)

    @device
    def hand_over(p, at, words, kept, k):
        slot = uint32(k % 2 * slot_bytes)
        for f in range(frags):
            for half in range(2):
                row = kept[0] + slot + uint32(512 * f + 256 * half)
                st_shared_b32(row, words[4 * f + 2 * half])
                st_shared_b32(row ^ uint32(16), words[4 * f + 2 * half + 1])
        syncwarp()  # as below
        for f in range(frags):
            ldmatrix_x4(p, at + 4 * f, kept[1] + slot + uint32(512 * f))

    return keep, hand_over


def _through_shared(frags: int, broken: str) -> tuple[DeviceFunction, DeviceFunction]:
    place, place_back = make_place(2), make_place(2, swizzled=broken != "pitch")
    no_sync, slots, unit_step = broken == "sync", 1 if broken == "overwrite" else 2, 4 if broken == "unit" else 8
    slot_bytes = 512 * frags

    @device
    def keep(kept, tile, warp_row, lane):
        mine = tile + uint32(64) * uint32(warp_row)
        kept[0] = mine + place(lane >> 2, 0) + uint32(2 * (lane & 3))  # unit 0 of the lane's first row
        kept[1] = mine + place_back(lane & 15, lane >> 4)

    @device
    def hand_over(p, at, words, kept, k):
        slot = uint32(k % slots * slot_bytes)
        for f in range(frags):
            for half in range(2):
                row = kept[0] + slot + uint32(512 * f + 256 * half)
                for unit in range(2):
                    word = words[4 * f + 2 * half + unit]
                    st_shared_b16(row + uint32(unit_step * unit), uint16(word & uint32(0xFFFF)))
                    st_shared_b16((row ^ uint32(16)) + uint32(unit_step * unit), uint16(word >> uint32(16)))
        if not no_sync:
            syncwarp()  # the units of all lanes are there; and all have read the other tile, which is written next
        for f in range(frags):
            ldmatrix_x4(p, at + 4 * f, kept[1] + slot + uint32(512 * f))

    return keep, hand_over
