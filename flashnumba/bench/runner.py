"""How every bench goes over its candidates: prepare, run once, judge, and only then time.

A candidate is a kernel of ours or a peer (what another library offers, or a copy). One that does not fit, raises, or is
wrong has no time but a note that says why, and the next one is tried: a bench always ends with its figures written.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flashnumba.bench import timing
from flashnumba.compare import Comparison

__all__ = [
    "Candidate",
    "Clock",
    "Measured",
    "Runner",
    "Size",
    "Wrong",
    "check_written",
    "rounded",
    "spread",
    "willing",
    "write",
]


class Wrong(ArithmeticError):
    """A result that is not what was asked for, other than by a :class:`~flashnumba.compare.Comparison`."""


WRONG, FAILED = "WRONG", "FAILED"
"""How the notes of kernels begin that computed something else, or raised."""


@dataclass
class Measured:
    """What came of one candidate on one size.

    Attributes:
        seconds: of a call; None where it has no time.
        figures: rates, and ratios to peers, by name.
        error, budget: of the comparison with float64, where there was one.
        note: why it has no time, or what to know of it.
        ours: a kernel of this package.
    """

    name: str
    seconds: float | None = None
    figures: dict[str, float | None] = field(default_factory=dict)
    error: float | None = None
    budget: float | None = None
    note: str = ""
    ours: bool = True

    @property
    def bad(self) -> bool:
        return self.note.startswith((WRONG, FAILED))

    def record(self) -> dict[str, Any]:
        last = {"error": self.error, "budget": self.budget, "note": self.note, "ours": self.ours}
        return {"name": self.name, "seconds": self.seconds, **self.figures, **last}


@dataclass
class Size:
    """All that was measured on one size; ``about`` says which."""

    about: dict[str, Any]
    measured: list[Measured] = field(default_factory=list)

    def seconds_of(self, name: str) -> float | None:
        return next((m.seconds for m in self.measured if m.name == name), None)

    def best(self) -> Measured | None:
        """The fastest of our kernels."""
        return min((m for m in self.measured if m.ours and m.seconds), key=lambda m: m.seconds or 0.0, default=None)

    def record(self) -> dict[str, Any]:
        return {**self.about, "measured": [m.record() for m in self.measured]}


@dataclass(frozen=True)
class Candidate:
    """One way to compute.

    Attributes:
        prepare: compiles and allocates; returns the calls to take in turn, each on inputs of its own. A ValueError says
            that it does not fit.
        ours: a kernel of this package, which must be right; of a peer the error is stated.
    """

    name: str
    prepare: Callable[[], Sequence[Callable[[], Any]]]
    ours: bool = True


class Clock:
    """Times calls on the GPU with CUDA events.

    Before the first call that counts the GPU works for ``warm_up`` seconds. When idle it clocks itself down, when busy
    up, and down again where it reaches its power limit: all candidates shall find it in the same state.
    """

    def __init__(self, runs: int = 20, seconds: float = 0.25, warm_up: float = 0.3) -> None:
        """``runs`` calls count, or fewer where they would take longer than ``seconds`` in all."""
        self.runs, self.seconds, self.warm_up = runs, seconds, warm_up

    def once(self, call: Callable[[], Any]) -> tuple[Any, float]:
        """What a call returns, and how long the host waited for it."""
        return timing.once(call)

    def time(self, calls: Sequence[Callable[[], Any]], once: float) -> tuple[float, str]:
        """Seconds a call, and what is to be noted. ``once`` is what the first one took."""
        if once >= self.seconds:
            once = self.once(calls[0])[1]  # the first may have loaded a library
        if once >= self.seconds:
            return once, "one call timed"
        runs = max(1, min(self.runs, int(self.seconds / once)))
        return self.repeated(calls, max(min(3, runs), round(self.warm_up / once)), runs)

    def in_turn(
        self, calls: Sequence[Callable[[], Any]], others: Sequence[Callable[[], Any]], rounds: int = 6
    ) -> float:  # fmt: skip
        """How many times as long as ``calls`` the ``others`` take: the median of rounds in which both are timed, one
        right after the other. At its power limit a GPU's clock drifts by more than what is to be told apart."""
        ratios = []
        for i in range(rounds):
            seconds = {}
            for which in (0, 1) if i % 2 else (1, 0):
                chosen = (calls, others)[which]
                runs = max(1, min(self.runs, int(self.seconds / rounds / self.once(chosen[0])[1])))
                seconds[which], _ = self.repeated(chosen, 1, runs)
            ratios.append(seconds[1] / seconds[0])
        return float(np.median(ratios))

    def repeated(self, calls: Sequence[Callable[[], Any]], warmup: int, runs: int) -> tuple[float, str]:
        return timing.time_gpu(lambda call: call(), [(call,) for call in calls], warmup=warmup, runs=runs), ""


Report = Callable[[Size, Measured], None]


class Runner:
    """Measures one candidate after the other on one size."""

    def __init__(
        self, size: Size, rates: Callable[[float], dict[str, float | None]], ratios: Mapping[str, str], *,
        clock: Clock, until: float = float("inf"), report: Report = lambda size, measured: None,
    ) -> None:  # fmt: skip
        """
        Args:
            rates: figures that follow from the seconds of a call.
            ratios: a figure's name, and whose seconds are divided by the candidate's; that one comes first.
            until: ``time.monotonic()`` after which no further candidate is begun.
            report: called with each result as it is there.
        """
        self.size, self.rates, self.ratios, self.clock = size, rates, ratios, clock
        self.until, self.report = until, report

    def run(self, candidate: Candidate, judge: Callable[[Any], Comparison] | None = None) -> Measured:
        """Measure a candidate. ``judge`` gets what its first call returned."""
        measured = Measured(candidate.name, ours=candidate.ours)
        self.size.measured.append(measured)
        if time.monotonic() > self.until:
            measured.note = "out of time"
        else:
            try:
                self._measure(candidate, judge, measured)
            except Wrong as error:
                measured.note = f"{WRONG}: {error}"
            except Exception as error:
                kept = FAILED if candidate.ours else "not measured"
                measured.note = f"{kept}: {type(error).__name__}: {_first_line(error)}"
        self._add_figures(measured)
        self.report(self.size, measured)
        return measured

    def _measure(
        self, candidate: Candidate, judge: Callable[[Any], Comparison] | None, measured: Measured
    ) -> None:  # fmt: skip
        try:
            calls = candidate.prepare()
        except ValueError as error:
            measured.note = _first_line(error)
            return
        result, seconds = self.clock.once(calls[0])
        if judge is not None:
            verdict = judge(result)
            measured.error, measured.budget = verdict.error, verdict.budget
            if candidate.ours and not verdict.ok:
                measured.note = f"{WRONG}: {verdict}"
                return
        del result
        measured.seconds, measured.note = self.clock.time(calls, seconds)

    def _add_figures(self, measured: Measured) -> None:
        seconds = measured.seconds
        rates = self.rates(seconds or 1.0)
        measured.figures = dict(rates) if seconds else dict.fromkeys(rates)
        for figure, name in self.ratios.items():
            other = self.size.seconds_of(name) if name != measured.name else None
            measured.figures[figure] = other / seconds if seconds and other else None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def willing(call: Callable[[], Any]) -> Sequence[Callable[[], Any]]:
    """The calls of a peer, which is tried first: what it warns of as it refuses is why.

    Raises:
        ValueError: it refuses; the message says why.
    """
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            call()
        except RuntimeError as error:
            reasons = [str(warning.message).split(" (Triggered internally")[0] for warning in said]
            raise ValueError(f"refused: {' '.join(dict.fromkeys(reasons)) or _first_line(error)}") from error
    return [call]


def check_written(torch: Any, *arrays: Any) -> None:
    """Raise :class:`Wrong` for an element that is not finite: results are filled with NaN, and inputs are finite."""
    for array in arrays:
        written = torch.isfinite(array)
        if not written.all():
            at = (~written).nonzero()[0].tolist()
            value = float(array[tuple(at)])
            raise Wrong(f"{int((~written).sum())} elements are not finite, the first at {at}: {value}")


def rounded(values: np.ndarray, element: str) -> np.ndarray:
    """As float16, bfloat16 or float32."""
    from flashnumba.machine.arrays import element_dtype

    return values.astype(element_dtype(element))


def spread(n: int, count: int) -> list[int]:
    """At most ``count`` of ``range(n)``, the first and the last among them, at distances that are no power of two."""
    return sorted({round(i) for i in np.linspace(0, n - 1, min(n, count))}) if n else []


def write(path: Path, environment: Mapping[str, Any], sizes: Sequence[Size], **more: Any) -> None:
    """Write all figures so far, whole or not at all."""
    held = {"environment": dict(environment), "sizes": [size.record() for size in sizes], **more}
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
