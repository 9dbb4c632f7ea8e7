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
waited for it. After the last tile of a row tile it says so by an mbarrier of its own.

A block goes from one row tile to the next without an end: rings, and tiles whose votes are kept, are counted through.
Q's place is free once no product reads it, and when O has been read there, where O has no place of its own.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import (
    atom_add_acq_rel_gpu_u32,
    global_address,
    ld_shared_b32,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    st_shared_b32,
    tma_load_4d,
)
from flashnumba.machine.numba import cuda, int32, int64, uint32
from flashnumba.tiles.ring import make_after
from flashnumba.tiles.schedule import heads_near, longest_first, paired
from flashnumba.tiles.specialised_lists import make_keys
from flashnumba.tiles.specialised_tiles import DECISIONS, PANEL, ROWS, SpecialisedTiles

__all__ = ["DECIDED", "END", "FAULTS", "K_EMPTY", "K_FULL", "Q_EMPTY", "Q_FULL", "STOP", "VOTE_FAULTS", "V_EMPTY",
           "V_FULL", "Ring", "make_produce", "make_ring"]  # fmt: skip

K_FULL, V_FULL, K_EMPTY, V_EMPTY, DECIDED = range(5)
Q_FULL, Q_EMPTY, END = range(3)
STOP = 0xFFFFFFFF
"""Stands for a row tile: there is none any more."""
FAULTS = ("bytes", "empty", "full", "head", "q_empty")
"""What can be planted: a phase that expects too few bytes; K's, V's or Q's slot is not waited for; the next head of
keys, of which there are two or more."""
VOTE_FAULTS = ("unwanted", "unread")
"""With votes: a tile nobody wants takes no turn; a V ordered in vain is not waited for."""


class Ring(NamedTuple):
    """Device functions.

    Attributes:
        bar: ``(bars, kind, slot) -> address`` of an mbarrier of the rings.
        one: ``(bars, which) -> address`` of an mbarrier that there is one of.
        after: of :func:`flashnumba.tiles.ring.make_after`.
        make: ``(bars, words)``: all mbarriers, by one thread.
        load_q: ``(q_tile, bars, words, turn, q_map, tile, head, batch, count)``: the block's ``turn``-th tile of rows,
            whose list has ``count`` blocks.
        load_kv: ``(k_ring, v_ring, bars, words, maps, state, steps, listed, head, batch) -> state``: all tiles of keys
            for it, ``steps`` of them, int32. ``maps`` are those of k and v; ``state`` is what :attr:`begin` makes.
        begin: ``() -> state``: of the rings, before the first tile.
        stop: ``(bars, words, turn)``: there is no ``turn``-th tile of rows.
    """

    bar: DeviceFunction
    one: DeviceFunction
    after: DeviceFunction
    make: DeviceFunction
    load_q: DeviceFunction
    load_kv: DeviceFunction
    begin: DeviceFunction
    stop: DeviceFunction


@cache
def make_ring(tiles: SpecialisedTiles, vote: bool, broken: str = "") -> Ring:
    """The ring of a block; with ``vote`` V is ordered where it is wanted."""
    bn, consumers, slots, slot_bytes, part = tiles.bn, tiles.consumers, tiles.slots, tiles.slot, tiles.part
    panels, q_panel, k_panel = tiles.d // PANEL, 2 * ROWS * PANEL, 2 * bn * PANEL
    after = make_after(slots)
    first, filled, all_bars, all_words = 3, 3 + 2 * slots, tiles.bars, tiles.words
    keys, pieces, find = tiles.keys, bn // tiles.keys, make_keys(tiles, broken).find
    listed_keys = tiles.block > 0
    expected = slot_bytes - (16 if broken == "bytes" else 0)
    waits_k, waits_v, waits_q = (broken != x for x in ("empty", "full", "q_empty"))
    in_turn, comes, wrong_head = broken != "unwanted", broken != "unread", int(broken == "head")

    @device
    def bar(bars, kind, slot):
        return bars + (uint32(first + kind * slots) + slot) * uint32(8)

    @device
    def one(bars, which):
        return bars + uint32(8 * which)

    @device
    def make(bars, words):
        for i in range(all_bars):
            count = 4 * consumers if i == Q_EMPTY else (1 if i < filled else consumers)
            mbarrier_init(bars + uint32(8 * i), uint32(count))
        for i in range(all_words):
            st_shared_b32(words + uint32(4 * i), uint32(0))

    @device
    def load_tile(target, tensor, full, at, head, batch):
        mbarrier_arrive_expect_tx(full, uint32(expected))
        for piece in range(pieces):
            for i in range(panels):
                to = target + uint32(i * k_panel + piece * 2 * keys * PANEL)
                tma_load_4d(to, tensor, full, int32(PANEL * i), at[piece] * int32(keys), head, batch)

    @device
    def say_which(bars, words, turn, tile):
        if waits_q:
            mbarrier_wait(one(bars, Q_EMPTY), (turn & uint32(1)) ^ uint32(1))  # nobody has use for the rows before
        st_shared_b32(words + uint32(4 * all_words), uint32(tile))

    @device
    def stop(bars, words, turn):
        say_which(bars, words, turn, uint32(STOP))
        mbarrier_arrive(one(bars, Q_FULL))

    @device
    def load_q(q_tile, bars, words, turn, q_map, tile, head, batch, count):
        say_which(bars, words, turn, tile)
        st_shared_b32(words + uint32(4 * all_words + 4), uint32(head))
        st_shared_b32(words + uint32(4 * all_words + 8), uint32(batch))
        if listed_keys:
            st_shared_b32(words + uint32(4 * all_words + 12), uint32(count))
        full = one(bars, Q_FULL)
        mbarrier_arrive_expect_tx(full, uint32(consumers * part))
        for c in range(consumers):
            row = int32(tile) * int32(consumers * ROWS) + int32(ROWS * c)
            for i in range(panels):
                target = q_tile + uint32(c * part + i * q_panel)
                tma_load_4d(target, q_map, full, int32(PANEL * i), row, int32(head), int32(batch))

    @device
    def load_k(k_ring, bars, k_map, slot, parity, at, head, batch):
        if waits_k:
            mbarrier_wait(bar(bars, K_EMPTY, slot), parity)  # all consumers have let the slot go
        load_tile(k_ring + slot * uint32(slot_bytes), k_map, bar(bars, K_FULL, slot), at, head, batch)

    @device
    def free_v(bars, slot, parity):
        if waits_v:
            mbarrier_wait(bar(bars, V_EMPTY, slot), parity)

    @device
    def load_v(v_ring, bars, v_map, slot, at, head, batch):
        load_tile(v_ring + slot * uint32(slot_bytes), v_map, bar(bars, V_FULL, slot), at, head, batch)

    @device
    def begin():
        return uint32(0), uint32(1)

    @device
    def load_kv(k_ring, v_ring, bars, words, maps, state, steps, listed, head, batch):
        k_map, v_map = maps
        slot, parity = state
        head += int32(wrong_head)
        at = cuda.local.array(pieces, int32)
        find(at, listed, int32(0))
        for j in range(int32(0), steps):
            load_k(k_ring, bars, k_map, slot, parity, at, head, batch)
            free_v(bars, slot, parity)
            load_v(v_ring, bars, v_map, slot, at, head, batch)
            find(at, listed, j + int32(1))  # a list is looked up while the slot is waited for
            slot, parity = after(slot, parity)
        return slot, parity

    @device
    def hear(bars, words, slot, parity, ordered, t):
        """Whether some consumer wants V of the block's t-th tile. The words are zeros again; and V's slot is let go for
        those that do not."""
        entry, wanted = t & uint32(DECISIONS - 1), uint32(0)
        mbarrier_wait(bar(bars, DECIDED, entry), (t // uint32(DECISIONS)) & uint32(1))  # all have said
        if not ordered:
            free_v(bars, slot, parity)  # so they have let go of what was there
        for c in range(consumers):
            at = words + uint32(4 * c) + uint32(4 * consumers) * entry
            said = ld_shared_b32(at)
            st_shared_b32(at, uint32(0))
            wanted |= said
            if said == uint32(0):
                mbarrier_arrive(bar(bars, V_EMPTY, slot))
        return wanted != uint32(0)

    @device
    def begin_wanted():
        return uint32(0), uint32(1), uint32(0), uint32(1), uint32(0)

    @device
    def load_wanted(k_ring, v_ring, bars, words, maps, state, steps, listed, head, batch):
        k_map, v_map = maps
        slot, parity, v_slot, v_parity, heard = state
        head += int32(wrong_head)
        ordered = False
        at = cuda.local.array(pieces, int32)
        v_at = cuda.local.array(pieces, int32)
        find(at, listed, int32(0))
        for j in range(int32(0), steps + int32(slots)):
            if j < steps:
                load_k(k_ring, bars, k_map, slot, parity, at, head, batch)
                slot, parity = after(slot, parity)
                if j == int32(0):
                    free_v(bars, v_slot, v_parity)
                    load_v(v_ring, bars, v_map, v_slot, at, head, batch)  # the first is always wanted
                    ordered = True
                find(at, listed, j + int32(1))
            t = j - int32(slots)
            if t >= int32(0):
                wanted = hear(bars, words, v_slot, v_parity, ordered, heard)
                heard += uint32(1)
                if wanted and not ordered:
                    find(v_at, listed, t)
                    load_v(v_ring, bars, v_map, v_slot, v_at, head, batch)
                if not wanted and not ordered and in_turn:
                    mbarrier_arrive(bar(bars, V_FULL, v_slot))
                if not wanted and ordered and comes:
                    mbarrier_wait(bar(bars, V_FULL, v_slot), v_parity ^ uint32(1))  # nobody else waits for it
                v_slot, v_parity = after(v_slot, v_parity)
                ordered = wanted and t + int32(1) < steps
                if ordered:
                    find(v_at, listed, t + int32(1))
                    free_v(bars, v_slot, v_parity)
                    load_v(v_ring, bars, v_map, v_slot, v_at, head, batch)
            if j == steps:
                mbarrier_arrive(one(bars, END))  # stands for a tile after the last
        return slot, parity, v_slot, v_parity, heard

    load, start = (load_wanted, begin_wanted) if vote else (load_kv, begin)
    return Ring(bar, one, after, make, load_q, load, start, stop)


@cache
def make_produce(tiles: SpecialisedTiles, ring: Ring, broken: str = "") -> DeviceFunction:
    """``produce(q_tile, k_ring, v_ring, bars, words, q, k, scale, causal, maps, indices, counts, counter)``: all that a
    block's producer does, by one thread; arguments as :func:`flashnumba.tiles.specialised.make_specialised`."""
    bm, gathered = tiles.bm, tiles.block > 0
    load_q, load_kv, begin, say_stop = ring.load_q, ring.load_kv, ring.begin, ring.stop
    count_of, open_list, keys_of, _ = make_keys(tiles, broken)

    @device
    def each(unit, grid, counter):
        return uint32(unit + grid)

    @device
    def draw(unit, grid, counter):
        """The next one that nobody has; each block has begun with that of its number."""
        return uint32(grid + atom_add_acq_rel_gpu_u32(global_address(counter), uint32(1)))

    next_unit = draw if gathered else each

    @device
    def produce(q_tile, k_ring, v_ring, bars, words, q, k, scale, causal, maps, indices, counts, counter):
        group, grid = uint32(q.shape[1]) // uint32(k.shape[1]), uint32(cuda.gridDim.x)
        row_tiles, heads = uint32((q.shape[2] + (bm - 1)) // bm), uint32(q.shape[0] * q.shape[1])
        near = heads_near(heads, group, k.shape[2], q.shape[3] * 2)
        in_pairs = causal != 0 and grid < row_tiles * heads and not gathered
        units = (row_tiles + uint32(1)) // uint32(2) * heads if in_pairs else row_tiles * heads
        state, turn, unit = begin(), uint32(0), uint32(cuda.blockIdx.x)
        while unit < units:
            for half in range(uint32(0), uint32(2) if in_pairs else uint32(1)):
                if in_pairs:
                    head, tile = paired(unit + half * units, row_tiles, heads, near, causal)
                else:
                    head, tile = longest_first(unit, row_tiles, heads, near, causal)
                if tile < row_tiles:  # the middle one of an odd number has no partner
                    batch, head = head // uint32(q.shape[1]), head % uint32(q.shape[1])
                    count = count_of(counts, batch, head, tile)
                    listed = open_list(indices, batch, head, tile, count, k.shape[2])
                    last, _ = keys_of(listed, int64(tile), q.shape[2], k.shape[2], causal, scale)
                    load_q(q_tile, bars, words, turn, maps[0], tile, head, batch, count)
                    state = load_kv(
                        k_ring, v_ring, bars, words, maps[1:], state, last, listed, int32(head // group), int32(batch)
                    )  # fmt: skip
                    turn += uint32(1)
            unit = next_unit(unit, grid, counter)
        say_stop(bars, words, turn)

    return produce
