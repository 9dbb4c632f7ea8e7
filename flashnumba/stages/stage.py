"""What a stage of the ladder is: a question, a reference, kernels, and real cases to try them on.

Each folder under ``stages`` exposes one ``STAGE`` from its ``__init__``; :mod:`flashnumba.ladder` lists them. The
walkthrough, the docs and the tests read these records and know nothing else of a stage, so a new stage is a new folder
and one line in the ladder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flashnumba.compare import Comparison, compare

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Case", "Passes", "Result", "Rung", "Stage", "measure", "save"]


@dataclass(frozen=True, eq=False)
class Case:
    """One input from real data, with the answer and the error that its precision excuses.

    Attributes:
        name: which data, e.g. ``"layer 0, head 2"``.
        inputs: what a rung's ``run`` gets, by name.
        reference: the float64 result.
        lowprec: the same mathematics in the kernel's precision, see :mod:`flashnumba.compare`.
        size: shape and dtype in words, e.g. ``"64 x 512 float16"``.
    """

    name: str
    inputs: dict[str, np.ndarray]
    reference: np.ndarray
    lowprec: np.ndarray
    size: str


@dataclass(frozen=True)
class Passes:
    """Traffic of a kernel that walks over its data: each element read ``reads`` times, written ``writes`` times.

    >>> str(Passes(3, 1))
    '3R+1W'
    """

    reads: float
    writes: float

    def __call__(self, case: Case) -> float:
        """Bytes of global memory moved for each element, counted from the algorithm; caches are not considered."""
        return (self.reads + self.writes) * case.lowprec.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.reads:g}R+{self.writes:g}W"


@dataclass(frozen=True, eq=False)
class Rung:
    """One way to compute a stage: a reference or a kernel.

    Attributes:
        name: as the host function's ``kernel=`` names it.
        tier: ``reference`` (NumPy), ``simt``, ``mma`` or ``wgmma``: the file it is in.
        run: computes a case on a machine (``"cuda"`` or ``"emulator"``; a reference ignores it); arrays in, array out.
        traffic: bytes moved per element by count; its ``str`` is the formula. None where counting says nothing.
        arch: smallest compute capability, as :func:`flashnumba.machine.instruction.runs_on` reads it.
        summary: one line on what this rung does.
        takes: which cases it is tried on.
        must_fail: why its result must be non-finite where the reference is finite, e.g. ``"float16 overflow"``;
            anything better is then an error.
    """

    name: str
    tier: str
    run: Callable[[Case, str], np.ndarray]
    traffic: Callable[[Case], float] | None
    arch: str = "75"
    summary: str = ""
    takes: Callable[[Case], bool] = lambda case: True
    must_fail: str = ""


@dataclass(frozen=True, eq=False)
class Stage:
    """A stage of the ladder.

    Attributes:
        name: the folder under ``flashnumba/stages`` and the ``--stage`` of the command line.
        title: for a heading.
        question: what the stage answers.
        teaches: for the ladder's table.
        lesson: the notebook's name in ``lessons/``, without the ending.
        rungs: references first, then kernels, in the order of the lesson.
        cases: ``cases(machine, full)``: inputs from the real data; small on the emulator unless ``full``.
        draw: one figure from the results of :func:`measure`.
    """

    name: str
    title: str
    question: str
    teaches: str
    lesson: str
    rungs: tuple[Rung, ...]
    cases: Callable[[str, bool], Sequence[Case]]
    draw: Callable[[Sequence[Result]], Figure]

    @property
    def references(self) -> tuple[Rung, ...]:
        return tuple(rung for rung in self.rungs if rung.tier == "reference")

    @property
    def kernels(self) -> tuple[Rung, ...]:
        return tuple(rung for rung in self.rungs if rung.tier != "reference")

    def figure(self, results: Sequence[Result], path: Path) -> None:
        """Draw ``results`` and write them to ``path`` as a PNG, whole or not at all."""
        save(self.draw(results), path)


@dataclass(frozen=True, eq=False)
class Result:
    """What came of one rung on one case.

    Attributes:
        machine: ``numpy``, ``cuda`` or ``emulator``.
        comparison: against the float64 reference; None where nothing ran or it raised.
        bytes_per_element: by count; None where the rung states none.
        seconds: of the host call, arrays in to array out, after a first call that compiles.
        output: the array computed; None as ``comparison``.
        verdict: ``ok``, ``as meant`` (it failed, and had to), ``skipped`` or ``FAILED``.
        note: why.
    """

    stage: Stage
    rung: Rung
    case: Case
    machine: str
    comparison: Comparison | None
    bytes_per_element: float | None
    seconds: float | None
    output: np.ndarray | None
    verdict: str
    note: str = ""

    @property
    def bad(self) -> bool:
        return self.verdict == "FAILED"


def measure(stage: Stage, rung: Rung, case: Case, machine: str, unable: str = "") -> Result:
    """Run one rung on one case and judge it. An exception is a failed result, not the end of the walkthrough.

    Args:
        machine: ``"cuda"`` or ``"emulator"``.
        unable: why this machine cannot run the rung; it is then skipped.
    """
    where = "numpy" if rung.tier == "reference" else machine
    moved = rung.traffic(case) if rung.traffic else None

    def result(verdict: str, note: str = "", comparison: Any = None, seconds: Any = None, output: Any = None) -> Result:
        return Result(stage, rung, case, where, comparison, moved, seconds, output, verdict, note)

    if unable:
        return result("skipped", unable)
    try:
        if where == "cuda":
            rung.run(case, machine)  # compiles
        start = time.perf_counter()
        output = rung.run(case, machine)
        seconds = time.perf_counter() - start
        comparison = compare(output, case.reference, case.lowprec)
    except Exception as error:
        return result("FAILED", f"{type(error).__name__}: {error}")
    if not rung.must_fail:
        verdict, note = ("ok", "") if comparison.ok else ("FAILED", str(comparison))
    elif np.isinf(comparison.error):
        spoilt = int((~np.isfinite(output.astype(np.float64))).any(-1).sum())
        verdict, note = "as meant", f"{rung.must_fail} in {spoilt} of {output[..., 0].size} rows"
    else:
        verdict, note = "FAILED", f"{rung.must_fail} was meant to show here and did not"
    return result(verdict, note, comparison, seconds, output)


def save(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG: first beside ``path``, then moved over it, so that no reader sees half a file."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        figure.savefig(partial, format="png", dpi=120)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
