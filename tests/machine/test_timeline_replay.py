"""The replay on logs made by hand, whose times can be counted on fingers."""

import math
from dataclasses import replace

import pytest

from flashnumba.machine.emulator.event_log import EVENTS, Event
from flashnumba.machine.timeline.costs import COSTS, Costs, costs_of
from flashnumba.machine.timeline.replay import replay

PLAIN = Costs(
    "80", ghz=1.0, multiprocessors=4, mma_rate=256, wgmma_rate=512, mma_latency=33, fp32=1, other=2, special=8,
    shared_rate=128, copy_rate=64, copy_latency=500, barrier=20,
)  # fmt: skip
MMA = Event("mma", 2048)  # 8 cycles


def one(*events: Event, costs: Costs = PLAIN) -> tuple[list[float], float]:
    """Times and end of a warp that is alone."""
    found = replay({(0, 0): events}, costs)
    return found.times[0, 0], found.ends[0, 0]


def test_products_follow_one_another_on_one_tensor_core():
    assert one(MMA, MMA, MMA, Event("clock")) == ([0, 1, 9, 17], 18)


def test_two_warps_share_a_tensor_core_only_in_one_partition():
    """Warps 0 and 4 live in partition 0, warp 1 in partition 1."""
    log = {(0, w): [MMA] * 10 if w in (0, 1, 4) else [] for w in range(5)}
    ends = replay(log, PLAIN).ends
    # A warp is done once its last product is issued: 9 before it, or 19 where two warps take turns.
    assert ends == {(0, 0): 18 * 8 + 1, (0, 1): 9 * 8 + 1, (0, 2): 0, (0, 3): 0, (0, 4): 19 * 8 + 1}


def test_a_result_is_touched_when_it_is_there():
    times, end = one(MMA, Event("use", 0), Event("math", 4, 0, 0))
    assert times == [0, 1, 33]
    assert end == 37


def test_kinds_of_arithmetic_go_on_side_by_side():
    assert one(Event("math", 16, 8, 4))[1] == 32  # four special functions of 8 cycles; 16 and 16 beside them
    assert one(Event("math", 16, 8, 1))[1] == 25  # 25 turns
    assert one(Event("math", 0, 0, 4), Event("math", 0, 0, 4))[1] == 64


def test_a_wait_lasts_until_its_copies_have_landed():
    """64 bytes a cycle, then 500 cycles: the copies have landed at 8 + 500, and at 1 + 16 + 500 behind it."""
    copies = [Event("copy", 512), Event("commit"), Event("copy", 1024), Event("commit")]
    assert one(*copies, Event("wait", 1), Event("clock"))[0][-1] == 508
    assert one(*copies, Event("wait", 0), Event("clock"))[0][-1] == 524
    assert one(*copies, Event("wait", 2), Event("clock"))[0][-1] == 5
    landings = replay({(0, 0): copies}, PLAIN).landings
    assert [(x.begin, x.end, x.nbytes) for x in landings] == [(0, 508, 512), (2, 524, 1024)]


def test_work_between_copy_and_wait_hides_the_copy():
    copy = [Event("copy", 512), Event("commit")]
    work = [Event("math", 32, 0, 0)] * 20
    assert one(*copy, *work, Event("wait", 0))[1] == 643  # 642 cycles of work and turns; nothing is left to wait for
    assert one(*copy, Event("wait", 0), *work)[1] == 508 + 640


def test_a_barrier_lets_go_when_the_last_has_come():
    late = [Event("math", 32, 0, 0)] * 3
    meet = Event("barrier", 64, 0, 1)
    found = replay({(0, 0): [meet, Event("clock")], (0, 1): [*late, meet, Event("clock")]}, PLAIN)
    assert found.times[0, 0][-1] == found.times[0, 1][-1] == 96 + 20


def test_an_arrival_without_waiting_counts():
    log = {
        (0, 0): [Event("barrier", 64, 3, 0), Event("clock")],
        (0, 1): [Event("math", 32, 0, 0), Event("barrier", 64, 3, 1), Event("clock")],
    }
    found = replay(log, PLAIN)
    assert (found.times[0, 0][-1], found.times[0, 1][-1]) == (1, 52)


def test_an_mbarrier_waits_for_arrivals_and_bytes():
    bar = 64
    producer = [Event("init", 1, bar), Event("barrier", 64, 0, 1), Event("expect", 640, bar), Event("arrive", 1, bar),
                Event("bulk", 640, bar)]  # fmt: skip
    consumer = [Event("barrier", 64, 0, 1), Event("phase", 0, bar), Event("phase", 1, bar), Event("clock")]
    found = replay({(0, 0): producer, (0, 1): [*consumer[:2], Event("clock")]}, PLAIN)
    # Past the barrier at 21, the copy has its turn at 23, and has landed 10 + 500 cycles later.
    assert found.times[0, 1][-1] == 23 + 510 + 20
    with pytest.raises(ValueError, match=r"warp 1 of block 0 waits at event 2, phase \[1, 64, 0\]"):
        replay({(0, 0): producer, (0, 1): consumer}, PLAIN)


def test_wgmma_is_waited_for_by_groups():
    group = [Event("wgmma", 512 * 64), Event("wgmma_commit")]
    assert one(*group, *group, Event("wgmma_wait", 1), Event("clock"))[0][-1] == 64 + 33
    assert one(*group, *group, Event("wgmma_wait", 0), Event("clock"))[0][-1] == 128 + 33


def test_bulk_stores_are_waited_for_by_groups():
    assert one(Event("bulk_store", 640), Event("bulk_commit"), Event("bulk_wait", 0), Event("clock"))[0][-1] == 510


def test_shared_memory_serves_all_warps_in_turn():
    """512 bytes take 4 cycles, whichever partition asks."""
    found = replay({(0, w): [Event("shared", 512)] * 2 + [Event("clock")] for w in range(4)}, PLAIN)
    assert sorted(found.times[0, w][-1] for w in range(4)) == [17, 21, 25, 29]


def test_loads_in_a_row_overlap_and_what_follows_waits():
    times, _ = one(Event("load", 128), Event("load", 128), Event("clock"), Event("store", 128))
    assert times == [0, 1, 2, 504]


def test_blocks_spread_over_multiprocessors_and_wait_for_places():
    log = {(b, 0): [Event("math", 32, 0, 0)] for b in range(5)}
    found = replay(log, PLAIN, multiprocessors=2)
    assert found.multiprocessors == {0: 0, 1: 1, 2: 0, 3: 1, 4: 0}
    assert [found.ends[b, 0] for b in range(5)] == [32, 32, 64, 64, 96]
    assert found.cycles == 96
    # Two blocks of one warp in one multiprocessor lie in two partitions.
    together = replay(log, PLAIN, multiprocessors=1, resident=2)
    assert [together.ends[b, 0] for b in range(5)] == [32, 32, 64, 64, 96]
    assert set(together.multiprocessors.values()) == {0}


def test_every_event_is_known():
    mbarrier = [Event("init", 1, 8), Event("expect", 0, 8), Event("arrive", 1, 8), Event("phase", 0, 8)]
    rest = [Event(name, 32 if name == "barrier" else 1) for name in EVENTS if name not in {e.name for e in mbarrier}]
    rest = [e for e in rest if e.name != "bulk"] + [Event("bulk", 0, 8)]
    assert {e.name for e in (*mbarrier, *rest)} == set(EVENTS)
    assert math.isfinite(one(*mbarrier, *rest)[1])


def test_what_cannot_be_replayed_is_refused():
    with pytest.raises(ValueError, match="multiprocessors is 0"):
        replay({}, PLAIN, multiprocessors=0)
    with pytest.raises(ValueError, match="resident is 0"):
        replay({}, PLAIN, resident=0)
    with pytest.raises(ValueError, match="'dance' of warp 0, block 3"):
        replay({(3, 0): [Event("dance")]}, PLAIN)
    with pytest.raises(ValueError, match="uses mbarrier 8, which none made"):
        one(Event("arrive", 1, 8))
    with pytest.raises(ValueError, match="waits at event 0, barrier"):
        one(Event("barrier", 64, 0, 1))
    assert replay({}, PLAIN).cycles == 0


def test_costs_are_positive_and_of_known_architectures():
    assert costs_of("90a") is COSTS["90"]
    assert costs_of("80").mma_rate * 8 == 16 * 8 * 16  # an m16n8k16 in 8 cycles
    with pytest.raises(ValueError, match="arch is '75'; there are costs for 80, 90"):
        costs_of("75")
    with pytest.raises(ValueError, match="barrier is 0; a cost must be a positive number"):
        replace(PLAIN, barrier=0)
    with pytest.raises(ValueError, match="fp32 is nan"):
        replace(PLAIN, fp32=float("nan"))
