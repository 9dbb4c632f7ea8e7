"""The producer of warp-specialised attention: one thread that orders tiles from the copy engine, slot by slot.

    slot s:   producer --full[s], by the bytes that came--> consumers --empty[s], one arrival each--> producer

Without votes K_j and V_j are ordered as soon as all consumers have let their slots go. With votes V_j is ordered once a
consumer wants it, or wanted the tile before: it is multiplied a whole step after that is known. ::

    consumers --decided[j % 8], one arrival each, and a word each that says how--> producer

K runs ahead: the votes on tile t are read when K of tile t + slots has been ordered, for which all consumers have let
K_t go, so they are there or about to be. The producer itself lets V's slot go for consumers that leave the tile out:
these run ahead, and an arrival of their own would count as that of a consumer still at the tile before. Once all have
said how they vote on tile t, all have let go of tile t - 2. A tile that nobody wants takes its slot's turn all the
same, with a phase in which nothing comes: then slots and parities follow from the number of the tile alone.

A parity tells a phase from the next one alone, so whoever waits for V_t must know that the phase before is over. Who
has K_t+1 knows it: the producer has dealt with tile t - slots before it ordered that, and if V was ordered in vain, has
waited for it. After the last tile it says so by a phase of K with nothing in it.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import (
    ld_shared_b32,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    st_shared_b32,
    tma_load_4d,
)
from flashnumba.machine.numba import int32, uint32
from flashnumba.tiles.ring import make_after
from flashnumba.tiles.specialised_tiles import DECISIONS, PANEL, ROWS, SpecialisedTiles

__all__ = ["DECIDED", "FAULTS", "K_EMPTY", "K_FULL", "VOTE_FAULTS", "V_EMPTY", "V_FULL", "Ring",
           "make_ring"]  # fmt: skip

K_FULL, V_FULL, K_EMPTY, V_EMPTY, DECIDED = range(5)
FAULTS = ("bytes", "empty", "full", "head")
"""What can be planted: a phase that expects too few bytes; K's, or V's, slot is not waited for; the next head of keys,
of which there are two or more."""
VOTE_FAULTS = ("unwanted", "unread")
"""With votes: a tile nobody wants takes no turn; a V ordered in vain is not waited for."""


class Ring(NamedTuple):
    """Device functions.

    Attributes:
        bar: ``(bars, kind, slot) -> address`` of an mbarrier; Q's is ``bars`` itself.
        after: of :func:`flashnumba.tiles.ring.make_after`.
        make: ``(bars, words)``: all mbarriers, by one thread.
        produce: ``(q_tile, k_ring, v_ring, bars, words, maps, steps, row0, head, head_kv, batch)``: everything for
            ``steps`` tiles of keys, int32, by one thread; ``maps`` are those of q, k and v.
    """

    bar: DeviceFunction
    after: DeviceFunction
    make: DeviceFunction
    produce: DeviceFunction


@cache
def make_ring(tiles: SpecialisedTiles, vote: bool, broken: str = "") -> Ring:
    """The ring of a block; with ``vote`` V is ordered where it is wanted."""
    bn, consumers, slots, slot_bytes, part = tiles.bn, tiles.consumers, tiles.slots, tiles.slot, tiles.part
    panels, q_panel, k_panel = tiles.d // PANEL, 2 * ROWS * PANEL, 2 * bn * PANEL
    after = make_after(slots)
    filled, all_bars, all_words = 1 + 2 * slots, tiles.bars, tiles.words
    expected = slot_bytes - (16 if broken == "bytes" else 0)
    waits_k, waits_v = broken != "empty", broken != "full"
    in_turn, comes, wrong_head = broken != "unwanted", broken != "unread", int(broken == "head")

    @device
    def bar(bars, kind, slot):
        return bars + (uint32(1 + kind * slots) + slot) * uint32(8)

    @device
    def make(bars, words):
        for i in range(all_bars):
            mbarrier_init(bars + uint32(8 * i), uint32(1 if i < filled else consumers))
        for i in range(all_words):
            st_shared_b32(words + uint32(4 * i), uint32(0))

    @device
    def load_tile(target, tensor, full, j, head, batch):
        mbarrier_arrive_expect_tx(full, uint32(expected))
        for i in range(panels):
            tma_load_4d(target + uint32(i * k_panel), tensor, full, int32(PANEL * i), j * int32(bn), head, batch)

    @device
    def load_q(q_tile, bars, tensor, row0, head, batch):
        mbarrier_arrive_expect_tx(bars, uint32(consumers * part))
        for c in range(consumers):
            for i in range(panels):
                target = q_tile + uint32(c * part + i * q_panel)
                tma_load_4d(target, tensor, bars, int32(PANEL * i), row0 + int32(ROWS * c), head, batch)

    @device
    def load_k(k_ring, bars, k_map, slot, parity, j, head, batch):
        if waits_k:
            mbarrier_wait(bar(bars, K_EMPTY, slot), parity)  # all consumers have let the slot go
        load_tile(k_ring + slot * uint32(slot_bytes), k_map, bar(bars, K_FULL, slot), j, head, batch)

    @device
    def load_v(v_ring, bars, v_map, slot, parity, j, head, batch):
        if waits_v:
            mbarrier_wait(bar(bars, V_EMPTY, slot), parity)
        load_tile(v_ring + slot * uint32(slot_bytes), v_map, bar(bars, V_FULL, slot), j, head, batch)

    @device
    def produce(q_tile, k_ring, v_ring, bars, words, maps, steps, row0, head, head_kv, batch):
        q_map, k_map, v_map = maps
        head_kv += int32(wrong_head)
        load_q(q_tile, bars, q_map, row0, head, batch)
        slot, parity = uint32(0), uint32(1)
        for j in range(int32(0), steps):
            load_k(k_ring, bars, k_map, slot, parity, j, head_kv, batch)
            load_v(v_ring, bars, v_map, slot, parity, j, head_kv, batch)
            slot, parity = after(slot, parity)

    @device
    def hear(bars, words, slot, t):
        """Whether some consumer wants V_t. The words are zeros again; and V's slot is let go for those that do not."""
        entry, wanted = uint32(t) & uint32(DECISIONS - 1), uint32(0)
        mbarrier_wait(bar(bars, DECIDED, entry), (uint32(t) // uint32(DECISIONS)) & uint32(1))  # all have said
        for c in range(consumers):
            at = words + uint32(4 * c) + uint32(4 * consumers) * entry
            said = ld_shared_b32(at)
            st_shared_b32(at, uint32(0))
            wanted |= said
            if said == uint32(0):
                mbarrier_arrive(bar(bars, V_EMPTY, slot))
        return wanted != uint32(0)

    @device
    def produce_wanted(q_tile, k_ring, v_ring, bars, words, maps, steps, row0, head, head_kv, batch):
        q_map, k_map, v_map = maps
        head_kv += int32(wrong_head)
        load_q(q_tile, bars, q_map, row0, head, batch)
        slot, parity, v_slot, v_parity, ordered = uint32(0), uint32(1), uint32(0), uint32(1), False
        for j in range(int32(0), steps + int32(slots)):
            if j < steps:
                load_k(k_ring, bars, k_map, slot, parity, j, head_kv, batch)
                slot, parity = after(slot, parity)
                if j == int32(0):
                    load_v(v_ring, bars, v_map, v_slot, v_parity, j, head_kv, batch)  # the first is always wanted
                    ordered = True
            t = j - int32(slots)
            if t >= int32(0):
                wanted = hear(bars, words, v_slot, t)
                if wanted and not ordered:
                    load_v(v_ring, bars, v_map, v_slot, v_parity, t, head_kv, batch)
                if not wanted and not ordered and in_turn:
                    mbarrier_arrive(bar(bars, V_FULL, v_slot))
                if not wanted and ordered and comes:
                    mbarrier_wait(bar(bars, V_FULL, v_slot), v_parity ^ uint32(1))  # nobody else waits for it
                v_slot, v_parity = after(v_slot, v_parity)
                ordered = wanted and t + int32(1) < steps
                if ordered:
                    load_v(v_ring, bars, v_map, v_slot, v_parity, t + int32(1), head_kv, batch)
            if j == steps:
                mbarrier_arrive(bar(bars, K_FULL, slot))  # a K beyond the last, of nothing

    return Ring(bar, after, make, produce_wanted if vote else produce)
