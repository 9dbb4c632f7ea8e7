"""What every bench does with its candidates, without a GPU."""

from __future__ import annotations

import json
import time
import warnings

import numpy as np
import pytest

from flashnumba.bench import runner as module
from flashnumba.bench import timing
from flashnumba.bench.runner import Candidate, Clock, Runner, Size, Wrong, spread, willing, write
from flashnumba.compare import compare
from tests.bench.fakes import HostClock

REFERENCE = np.array([[0.25, 0.75]])


def judge(result):
    return compare(np.asarray(result, np.float16), REFERENCE)


@pytest.fixture
def make():
    """A runner of a size with figures in units, and what was reported."""

    def made(**more):
        told = []
        size = Size({"element": "float16"})
        return Runner(
            size, lambda seconds: {"rate": 100 / seconds}, {"of_peer": "peer"}, clock=HostClock(),
            report=lambda size, m: told.append(m.name), **more,
        ), told  # fmt: skip

    return made


def raising(error):
    def call(*args, **options):
        raise error

    return call


def test_a_candidate_that_is_right_has_figures(make):
    runner, told = make()
    peer = runner.run(Candidate("peer", lambda: [lambda: None], ours=False))
    ours = runner.run(Candidate("ours", lambda: [lambda: REFERENCE]), judge)
    assert (peer.seconds, peer.figures) == (99.0, {"rate": 100 / 99, "of_peer": None})
    assert (ours.seconds, ours.figures) == (98.0, {"rate": 100 / 98, "of_peer": 99 / 98})
    assert ours.error == 0 and ours.budget > 0 and not ours.bad
    assert told == ["peer", "ours"]
    assert runner.size.best() is ours
    assert runner.size.record() == {"element": "float16", "measured": [peer.record(), ours.record()]}


def test_one_that_is_wrong_is_not_timed(make):
    runner, _ = make()
    runner.clock.time = raising(AssertionError("it must not be timed"))
    wrong = runner.run(Candidate("wrong", lambda: [lambda: [[0.25, 0.5]]]), judge)
    assert wrong.bad and wrong.seconds is None and wrong.error == 0.25
    assert wrong.note.startswith("WRONG: error 0.25 above the budget")
    assert wrong.figures == {"rate": None, "of_peer": None}
    unwritten = runner.run(Candidate("unwritten", lambda: [lambda: None]), raising(Wrong("3 elements are not finite")))
    assert unwritten.bad and unwritten.note == "WRONG: 3 elements are not finite"
    assert runner.size.best() is None


def test_a_peer_s_error_is_stated_and_forgiven(make):
    peer = make()[0].run(Candidate("peer", lambda: [lambda: [[0.25, 0.5]]], ours=False), judge)
    assert peer.seconds == 99.0 and peer.error == 0.25 and not peer.bad


@pytest.mark.parametrize(
    ("prepare", "ours", "note", "bad"),
    [
        (raising(ValueError("m is 3\nand more")), True, "m is 3", False),
        (raising(KeyError("k")), True, "FAILED: KeyError: 'k'", True),
        (lambda: [raising(ValueError("odd"))], True, "FAILED: ValueError: odd", True),
        (lambda: [raising(RuntimeError("illegal address\nat 3"))], True, "FAILED: RuntimeError: illegal address", True),
        (lambda: [raising(RuntimeError("no"))], False, "not measured: RuntimeError: no", False),
        (lambda: [raising(RuntimeError())], True, "FAILED: RuntimeError: ", True),
    ],
)
def test_what_does_not_fit_or_raises_is_noted_and_the_next_is_tried(make, prepare, ours, note, bad):
    runner, told = make()
    first = runner.run(Candidate("first", prepare, ours=ours), judge)
    assert (first.note, first.bad, first.seconds) == (note, bad, None)
    assert runner.run(Candidate("second", lambda: [lambda: REFERENCE]), judge).seconds == 99.0
    assert told == ["first", "second"]


def test_a_clock_that_raises_is_noted(make):
    runner, _ = make()
    runner.clock.time = raising(RuntimeError("lost"))
    assert runner.run(Candidate("a", lambda: [lambda: None])).note == "FAILED: RuntimeError: lost"


def test_out_of_time(make):
    runner, _ = make(until=time.monotonic() - 1)
    late = runner.run(Candidate("late", raising(AssertionError("it must not begin"))))
    assert late.note == "out of time" and not late.bad


def test_all_calls_are_taken_in_turn(make):
    seen = []
    make()[0].run(Candidate("a", lambda: [lambda i=i: seen.append(i) for i in range(3)]))
    assert seen == [0, 1, 2]


@pytest.mark.parametrize(
    ("once", "again", "expected"),
    [
        (0.01, None, {"warmup": 30, "runs": 20}),
        (0.1, None, {"warmup": 3, "runs": 2}),
        (0.9, 0.001, {"warmup": 300, "runs": 20}),  # the first call had loaded a library
        (0.9, 0.8, None),
    ],
)
def test_how_often_a_call_is_timed(monkeypatch, once, again, expected):
    asked = []
    monkeypatch.setattr(timing, "once", lambda call: (None, again))
    monkeypatch.setattr(timing, "time_gpu", lambda f, inputs, **how: asked.append(how) or 0.5)
    clock = Clock(runs=20, seconds=0.25, warm_up=0.3)
    found = clock.time([lambda: None], once)
    assert found == ((0.5, "") if expected else (0.8, "one call timed"))
    assert asked == ([expected] if expected else [])
    if expected:
        clock.time([lambda: None], 0.01)
        assert asked[1] == {"warmup": 30, "runs": 20}, "the next finds the GPU in the same state"


def test_two_kernels_timed_in_turn(monkeypatch):
    """A clock that drifts: whoever is timed later is slower."""
    asked, speed = [], {"fast": 1e-3, "slow": 2e-3}
    monkeypatch.setattr(timing, "once", lambda call: (None, speed[call()]))

    def timed(f, inputs, warmup, runs):
        name = inputs[0][0]()
        asked.append((name, runs))
        return speed[name] * 1.01 ** len(asked)

    monkeypatch.setattr(timing, "time_gpu", timed)
    found = Clock(runs=20, seconds=0.03).in_turn([lambda: "fast"], [lambda: "slow"], rounds=2)
    assert abs(found - 2) < 1e-3
    assert asked == [("slow", 7), ("fast", 15), ("fast", 15), ("slow", 7)]


def test_a_peer_that_refuses_says_why():
    def refuse():
        warnings.warn("needs sm_90 (Triggered internally at /somewhere)", stacklevel=1)
        warnings.warn("needs float16", stacklevel=1)
        raise RuntimeError("no backend")

    with pytest.raises(ValueError, match=r"^refused: needs sm_90 needs float16$"):
        willing(refuse)
    with pytest.raises(ValueError, match=r"^refused: no backend$"):
        willing(raising(RuntimeError("no backend\nat all")))
    assert len(willing(lambda: None)) == 1


@pytest.mark.parametrize(("n", "count"), [(0, 4), (1, 4), (3, 4), (100, 4), (8192, 16)])
def test_spread(n, count):
    picked = spread(n, count)
    assert len(picked) == min(n, count) == len(set(picked))
    assert picked == sorted(picked)
    assert not n or (picked[0] == 0 and picked[-1] == n - 1)


def test_files_are_written_whole_or_not_at_all(tmp_path, make, monkeypatch):
    runner, _ = make()
    runner.run(Candidate("a", lambda: [lambda: REFERENCE]), judge)
    path = tmp_path / "bench.json"
    write(path, {"device": "d"}, [runner.size], host=[{"name": "x"}])
    held = json.loads(path.read_text())
    assert held == {"environment": {"device": "d"}, "sizes": [runner.size.record()], "host": [{"name": "x"}]}
    with pytest.raises(TypeError, match="not JSON serializable"):
        write(path, {"device": object()}, [])
    assert json.loads(path.read_text()) == held
    monkeypatch.setattr(type(path), "replace", raising(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write(path, {}, [])
    assert [p.name for p in tmp_path.iterdir()] == ["bench.json"] and json.loads(path.read_text()) == held


def test_finite_everywhere():
    torch = pytest.importorskip("torch")
    x = torch.zeros(3, 4)
    module.check_written(torch, x)
    x[1, 2] = float("nan")
    with pytest.raises(Wrong, match=r"^1 elements are not finite, the first at \[1, 2\]: nan$"):
        module.check_written(torch, torch.zeros(2), x)
