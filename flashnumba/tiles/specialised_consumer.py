"""One step of a consumer of warp-specialised attention: S_j, its weights, and the product left by the step before.

    wait K_j | turn | start S_j, then P V_j-1 | next one's turn | wait S_j, let K_j go | weights of S_j
    wait P V_j-1, let V_j-1 go | O to the units of the new maximum | P_j packed

With a vote the consumer decides when S_j is there, by one barrier of its four warps that also carries their votes, and
tells the producer.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import (
    bar_arrive,
    bar_red_or,
    bar_sync,
    mbarrier_arrive,
    mbarrier_wait,
    st_shared_b32,
    vote_any,
    wgmma_commit,
    wgmma_fence,
    wgmma_wait,
)
from flashnumba.machine.numba import cuda, float32, int32, uint32, uint64
from flashnumba.tiles import skip
from flashnumba.tiles.attention import make_steps
from flashnumba.tiles.skip import make_needs
from flashnumba.tiles.specialised_lists import make_hide_tile, make_keys
from flashnumba.tiles.specialised_producer import DECIDED, K_EMPTY, K_FULL, V_EMPTY, V_FULL, Ring
from flashnumba.tiles.specialised_steps import ConsumerSteps
from flashnumba.tiles.specialised_tiles import DECISIONS, SpecialisedTiles

__all__ = ["FAULTS", "OWN", "TURN", "VOTE_FAULTS", "make_take_step"]

FAULTS = ("k_wait", "v_wait", "release", "turn", "s_wait", "pv_wait", "fence", "tail", "causal")
"""What can be planted: a wait for K, V, S or P V left out; V let go while a product reads it; turns out of order; no
fence before products; or as :mod:`flashnumba.tiles.forward` has it."""
VOTE_FAULTS = ("alone", "moved", "word")
"""With a vote: warps that do not ask the others; a tile left out still sets the maximum; a consumer that does not say
that it wants a tile."""
TURN, OWN = 1, 8
"""Named barriers: the first of the consumers' turns, and the first of each one's own."""
OWN_THREADS, TURN_THREADS = 128, 256


@cache
def make_take_step(
    tiles: SpecialisedTiles, element: str, ring: Ring, steps: ConsumerSteps, vote: bool, broken: str = ""
) -> DeviceFunction:  # fmt: skip
    """``take_step(acc, s, p, m, l, firsts, ring, before, left, j, view, who) -> left``.

    Args of it: O, S, P, maxima and sums; the descriptors of the consumer's Q and of slots 0 of K and V; the slot of
    step j and the parity of its phase, and those of the step before; whether that has left a product; ``view`` is
    ``(row, offset, causal, n_rows, whole, scale, factor, limit, listed)``, the lane's first row, N - M, the tiles that
    all rows see whole, and the list of :mod:`flashnumba.tiles.specialised_lists`; ``who`` is ``(bars, words, mine,
    leads, lane, done)``, the last the tiles of keys that the block has done before. It returns whether this step leaves
    a product.
    """
    consumers, slot_bytes, bar = tiles.consumers, tiles.slot, ring.bar
    multiply_qk, multiply_pv, find_tops, weights, rescale, pack = steps[1:]
    wait_all, wait_but_one = wgmma_wait(0), wgmma_wait(1)
    seen_as = tiles.of_consumer
    shared = make_steps(seen_as, element)
    flatten, new_maximum = shared.flatten, shared.new_maximum
    hide = make_hide_tile(tiles, shared.mask, make_keys(tiles, broken), broken)
    needs = make_needs(seen_as, broken if broken in skip.FAULTS else "", together=False)
    own_threads, turn_threads = OWN_THREADS, TURN_THREADS
    waits_k, waits_v, early, shift = (
        broken != "k_wait", broken != "v_wait", broken == "release", int(broken == "turn")
    )  # fmt: skip
    waits_s, waits_pv, fences = (broken != x for x in ("s_wait", "pv_wait", "fence"))
    together, moved, says = broken != "alone", broken == "moved", broken != "word"

    @device
    def begin(s, firsts, ring, who):
        """Start S_j, when it is this consumer's turn."""
        slot, parity = ring
        bars, _, mine, _, _, _ = who
        if waits_k:
            mbarrier_wait(bar(bars, K_FULL, slot), parity)
        bar_sync(int32(TURN) + (mine ^ int32(shift)), int32(turn_threads))
        if fences:
            wgmma_fence()
        multiply_qk(s, firsts[0], firsts[1] + uint64(slot * uint32(slot_bytes // 16)))
        wgmma_commit()

    @device
    def next_turn(mine):
        following = mine + int32(1) if mine + int32(1) < int32(consumers) else int32(0)
        bar_arrive(int32(TURN) + following, int32(turn_threads))

    @device
    def say(j, who, wanted):
        """Tell the producer whether V_j is wanted."""
        bars, words, mine, _, _, done = who
        entry = (done + uint32(j)) & uint32(DECISIONS - 1)
        if wanted and says:
            st_shared_b32(words + uint32(4) * (uint32(consumers) * entry + uint32(mine)), uint32(1))
        mbarrier_arrive(bar(bars, DECIDED, entry))

    @device
    def look(tops, s, m, ring, j, view, who):
        """S_j is there: whether the consumer's rows need it."""
        row, offset, causal, n_rows, whole, scale, factor, limit, listed = view
        bars, _, mine, leads, lane, _ = who
        if leads:
            mbarrier_arrive(bar(bars, K_EMPTY, ring[0]))
        if j >= whole:
            if scale == float32(0):
                flatten(s)
            hide(s, listed, j, row, offset, causal, n_rows, lane)
        find_tops(tops, s)
        needed = True
        if vote:
            needed = needs(tops, m, factor, limit)
            if together:
                needed = bar_red_or(int32(OWN) + mine, int32(own_threads), needed)
            needed = vote_any(needed)  # nothing new; but the compiler then knows that all lanes go one way
        return needed

    @device
    def weigh(tops, s, m, l, alpha, j, view, who, ordered):
        """S becomes weights; whether some row has a new maximum. The producer is told, first if V_j is not ordered."""
        bias = cuda.local.array(2, float32)
        factor, leads = view[6], who[3]
        if vote and not ordered and leads:
            say(j, who, True)
        risen = vote_any(new_maximum(s, m, bias, alpha, factor, tops))
        weights(s, l, alpha, bias, factor)
        if vote and ordered and leads:
            say(j, who, True)
        return risen

    @device
    def leave_out(tops, m, j, who):
        """Nobody here wants V_j."""
        if who[3]:
            say(j, who, False)
        if moved:
            for half in range(2):
                m[half] = tops[half]

    @device
    def let_v_go(before, who):
        """The product with the V before is done."""
        if waits_pv:
            wait_all()
        if who[3] and not early:
            mbarrier_arrive(bar(who[0], V_EMPTY, before[0]))

    @device
    def take_step(acc, s, p, m, l, firsts, ring, before, left, j, view, who):
        """Step j, and the product that the step before has left, if it has left one; whether this one leaves one.

        Two ways with all waits in each: where they part and meet again the compiler no longer knows which products are
        under way, and makes them wait for one another. With a product left the turn goes on once both have begun: the
        first is nearly done then. Without one it goes on when S_j is there, or two consumers' products would share the
        tensor cores, come in at one time, and leave them idle together.
        """
        alpha = cuda.local.array(2, float32)
        tops = cuda.local.array(2, float32)
        bars, _, mine, leads, _, _ = who
        if left:
            begin(s, firsts, ring, who)
            if waits_v:
                mbarrier_wait(bar(bars, V_FULL, before[0]), before[1])
            multiply_pv(acc, p, firsts[2] + uint64(before[0] * uint32(slot_bytes // 16)))
            wgmma_commit()
            next_turn(mine)
            if early and leads:
                mbarrier_arrive(bar(bars, V_EMPTY, before[0]))
            if waits_s:
                wait_but_one()  # S_j is there, the other product still runs
            needed = look(tops, s, m, ring, j, view, who)
            if needed:
                risen = weigh(tops, s, m, l, alpha, j, view, who, True)
                let_v_go(before, who)
                if risen:
                    rescale(acc, alpha)
                pack(p, s)
            else:
                leave_out(tops, m, j, who)
                let_v_go(before, who)
        else:
            begin(s, firsts, ring, who)
            if waits_s:
                wait_all()
            next_turn(mine)
            needed = look(tops, s, m, ring, j, view, who)
            if needed:
                if weigh(tops, s, m, l, alpha, j, view, who, False):
                    rescale(acc, alpha)
                pack(p, s)
            else:
                leave_out(tops, m, j, who)
        return needed

    return take_step
