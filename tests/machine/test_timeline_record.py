"""Records: what they say of slots and overlap, how they are drawn, and that a Chrome trace gives them back."""

import json
from dataclasses import replace

import pytest
from matplotlib.figure import Figure

from flashnumba.machine.emulator.event_log import Event
from flashnumba.machine.timeline.costs import costs_of
from flashnumba.machine.timeline.picture import MOST_ROWS, draw, neighbours
from flashnumba.machine.timeline.record import FORMAT, Fill, Record, Span, from_json, to_json
from flashnumba.machine.timeline.replay import replay
from flashnumba.machine.timeline.summary import merged, overlap, summarise
from flashnumba.machine.timeline.trace import ANY, COPY, KINDS, PV, QK, SOFTMAX, STORE, WAIT


def made(*spans: Span, **more: object) -> Record:
    blocks = {s.block: s.block % 2 for s in spans}
    about = {"machine": "cuda", "device": "a GPU", "arch": "90a", "ghz": 2.0, "kernel": "k", "size": "1x2x3", **more}
    return Record(multiprocessors=blocks, spans=tuple(sorted(spans)), **about)


# Warp 0 copies step 0 into slots 0 and 2, both warps wait and multiply, warp 1 copies step 1 meanwhile.
TWO = made(
    Span(0, 0, COPY, 0, 0, 0, 10), Span(0, 0, COPY, 0, 2, 10, 20), Span(0, 0, WAIT, 0, ANY, 20, 100),
    Span(0, 0, QK, 0, 0, 110, 150), Span(0, 0, PV, 0, 2, 150, 190), Span(0, 0, WAIT, 1, 1, 190, 200),
    Span(0, 0, QK, 1, 1, 200, 240),
    Span(0, 1, WAIT, 0, ANY, 0, 102), Span(0, 1, COPY, 1, 1, 102, 112), Span(0, 1, QK, 0, 0, 112, 160),
    Span(0, 1, PV, 0, 2, 160, 188), Span(0, 1, WAIT, 1, 1, 188, 205), Span(0, 1, QK, 1, 1, 205, 230),
)  # fmt: skip


def test_uses_of_slots():
    assert TWO.fills() == [
        Fill(0, 0, 0, 0, 100, 110, 160), Fill(0, 0, 2, 10, 100, 150, 190), Fill(0, 1, 1, 102, 200, 200, 240),
    ]  # fmt: skip
    # A wait for the step that its own warp ended before it copied into the slot is not a wait for that.
    late = made(Span(0, 0, WAIT, 0, ANY, 0, 9), Span(0, 0, COPY, 0, 1, 9, 20), Span(0, 1, WAIT, 0, ANY, 0, 8))
    assert late.fills() == [Fill(0, 0, 1, 9, None, None, None)]


def test_shares_and_overlap():
    """Copies are under way 0-100, 10-100 and 102-200; the block computes 110-190 and from 200 on."""
    found = summarise(TWO)
    assert (found.warps, found.cycles) == (2, 240)
    assert found.copying == 100 + 90 + 98
    assert found.hidden == pytest.approx((0 + 0 + 80) / 288)
    total = 240 + 230
    assert found.shares["wait"] == pytest.approx((80 + 10 + 102 + 17) / total)
    assert found.shares["QK"] == pytest.approx((40 + 40 + 48 + 25) / total)
    assert sum(found.shares.values()) == pytest.approx(1)
    assert found.shares["other"] == pytest.approx(10 / total)
    assert summarise(made(Span(0, 0, QK, 0, ANY, 0, 5))).hidden is None
    assert summarise(made()) == (dict.fromkeys(KINDS, 0.0), 0.0, None, 0, 0.0)


def test_intervals():
    assert merged([]) == [] and merged([(0, 1), (1, 2)]) == [(0, 2)] and merged([(0, 9), (2, 3)]) == [(0, 9)]
    assert overlap((3, 4), [(0, 1), (5, 6)]) == 0


def ring(stages: int, steps: int = 6) -> tuple[list[Event], list[tuple[int, int, int, int]]]:
    """A warp that copies a slot and works on it, ``stages - 1`` steps ahead: its log, and (event, kind, step, slot)."""
    log, marks = [], []

    def mark(kind, step, slot):
        marks.append((len(log), kind, step, slot))
        log.append(Event("clock"))

    def copy(step):
        mark(COPY, step, step % stages)
        if step < steps:
            log.append(Event("copy", 4096))
        log.append(Event("commit"))

    for step in range(stages - 1):
        copy(step)
    for step in range(steps):
        if stages == 1:
            copy(step)
        mark(WAIT, step, step % stages)
        log.append(Event("wait", max(0, stages - 2)))
        log.append(Event("barrier", 32, 0, 1))
        if stages > 1 and step + stages - 1 < steps:
            copy(step + stages - 1)
        elif stages > 1:
            log.append(Event("commit"))
        mark(QK, step, step % stages)
        log.extend([Event("mma", 2048)] * 200)
    mark(STORE, 0, ANY)
    return log, marks


@pytest.mark.parametrize(("stages", "low", "high"), [(1, 0, 0), (2, 0.7, 0.9), (3, 0.85, 1)])
def test_one_stage_hides_nothing_and_more_do(stages, low, high):
    log, marks = ring(stages)
    costs = costs_of("90")
    found = replay({(0, 0): log}, costs)
    times = [found.times[0, 0][at] for at, *_ in marks]
    spans = [
        Span(0, 0, *what, begin, end)
        for (_, *what), begin, end in zip(marks, times, [*times[1:], found.ends[0, 0]], strict=True)
    ]
    hidden = summarise(made(*spans)).hidden
    assert low <= hidden <= high
    # With one stage every step waits a copy's length; with more only the first does.
    waits = [s.end - s.begin for s in spans if s.kind == WAIT]
    assert waits[0] > costs.copy_latency
    assert all((w > costs.copy_latency) == (stages == 1) for w in waits[1:])


RECORDS = [TWO, replace(TWO, machine="emulator", costs={"arch": "90", "ghz": 1.83}, lost=3), made()]


@pytest.mark.parametrize("record", RECORDS)
def test_a_trace_gives_its_record_back(record):
    text = json.dumps(to_json(record), allow_nan=False)
    assert from_json(json.loads(text)) == record


def test_a_trace_is_what_viewers_read():
    """Trace Event Format: complete events with times in microseconds, and metadata that names processes and threads."""
    trace = to_json(TWO)
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    complete = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(complete) == len(TWO.spans)
    for event, span in zip(complete, TWO.spans, strict=True):
        assert set(event) == {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"}
        assert (event["pid"], event["tid"], event["name"]) == (span.block, span.warp, KINDS[span.kind])
        assert event["ts"] == pytest.approx(span.begin / 2000)  # 2 GHz
        assert event["dur"] == pytest.approx((span.end - span.begin) / 2000)
        assert event["dur"] >= 0
    named = {(e["name"], e["pid"], e.get("tid")): e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert named == {
        ("process_name", 0, None): "block 0 on multiprocessor 0", ("thread_name", 0, 0): "warp 0",
        ("thread_name", 0, 1): "warp 1",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda t: [], "no trace that flashnumba wrote"),
        (lambda t: {"traceEvents": []}, FORMAT),
        (lambda t: {**t, "otherData": {**t["otherData"], "format": "other"}}, "no trace that flashnumba wrote"),
        (lambda t: {**t, "otherData": {"format": FORMAT}}, "damaged trace: KeyError"),
        (lambda t: {**t, "traceEvents": [{"ph": "X", "name": "nap"}]}, "damaged trace"),
        (lambda t: {**t, "traceEvents": [{"ph": "X", "pid": 0, "tid": 0, "name": "QK", "args": None}]}, "TypeError"),
    ],
)
def test_another_file_is_refused(spoil, said):
    with pytest.raises(ValueError, match=said):
        from_json(spoil(to_json(TWO)))


def test_a_record_of_some_blocks():
    three = made(Span(0, 0, QK, 0, 0, 0, 5), Span(1, 0, QK, 0, 0, 7, 9), Span(2, 0, QK, 0, 0, 11, 12))
    part = three.of([1, 2])
    assert part.spans == (Span(1, 0, QK, 0, 0, 0, 2), Span(2, 0, QK, 0, 0, 4, 5))
    assert part.multiprocessors == {1: 1, 2: 0}
    assert neighbours(three, 5) == [0, 2] and neighbours(three, 1) == [0]
    with pytest.raises(ValueError, match=r"blocks \[3\] are not in the record; it has \[0, 1, 2\]"):
        three.of([0, 3])


def test_the_picture_has_a_column_for_each_record_on_one_scale():
    other = made(Span(0, 0, SOFTMAX, 0, ANY, 0, 500), device="another")
    figure = draw([TWO, other])
    assert isinstance(figure, Figure)
    warps, beside, slots, empty = figure.axes
    assert [t.get_text() for t in warps.get_yticklabels()] == ["block 0, warp 0", "1"]
    assert [t.get_text() for t in slots.get_yticklabels()] == ["slot 0", "slot 1", "slot 2"]
    assert [t.get_text() for t in slots.texts] == ["0", "1", "0"]  # the steps that lie in them
    assert warps.get_xlim() == beside.get_xlim() == slots.get_xlim()
    assert warps.get_xlim()[1] >= 500
    assert not empty.get_visible()
    # Bars of one kind are one collection: copies, waits, QK and PV of each of two warps.
    assert [len(c.get_paths()) for c in warps.collections] == [2, 2, 2, 1, 1, 2, 2, 1]
    near = draw([TWO], window=(100, 200))
    assert near.axes[0].get_xlim() == (99, 201)
    alone = draw([made(Span(0, 0, QK, 0, ANY, 0, 5))])
    assert len(alone.axes) == 1


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="k has 0 warps to draw"):
        draw([made()])
    many = made(*(Span(0, w, QK, 0, 0, 0, 1) for w in range(MOST_ROWS + 1)))
    with pytest.raises(ValueError, match="49 warps to draw; a panel takes 1 to 48"):
        draw([TWO, many])
