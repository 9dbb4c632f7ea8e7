"""Small tables and one picture: the ladder, the lessons, the faults, what was recorded on hardware, the budgets."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from flashnumba.attention import CHOICES
from flashnumba.ladder import STAGES, Rung, Stage
from flashnumba.machine import emulator
from flashnumba.machine.emulator.tensor_core import RULES
from flashnumba.machine.instructions import APPROXIMATIONS
from flashnumba.machine.occupancy import MACHINES, NOTES, budget, draw_budget

__all__ = ["attention", "budgets", "conformance", "draw_budgets", "faults", "ladder", "lessons", "markdown",
           "tensor_core"]  # fmt: skip


EXECUTED = "The pages here were executed by the build of this site.\n"
NOT_EXECUTED = "This build ran no lesson, so the pages have no outputs.\n"


def markdown(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; bars within cells are escaped."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |\n" for line in lines)


# -- the ladder --------------------------------------------------------------------------------------------------------
def ladder(there: Sequence[str]) -> str:
    """A section a stage. ``there``: names of the lessons that exist."""
    return "\n".join(stage_section(stage, there) for stage in STAGES)


def stage_section(stage: Stage, there: Sequence[str]) -> str:
    lesson = f"Lesson: [{stage.lesson}](/lessons/{stage.lesson}.ipynb). " if stage.lesson in there else ""
    rows = [(f"`{rung.name}`", rung.tier, needs(rung), rung.traffic or "-", summary(rung)) for rung in stage.rungs]
    return (
        f"## {stage.title}\n\n{stage.question} It teaches {stage.teaches}.\n\n"
        + markdown(("rung", "tier", "needs", "traffic", "what it does"), rows)
        + f"\n{lesson}Mathematics and sources: {{py:mod}}`flashnumba.stages.{stage.name}.reference`. "
        + f"Run it: `flashnumba walkthrough --stage {stage.name}`.\n"
    )


def summary(rung: Rung) -> str:
    return rung.summary + (f" (must fail: {rung.must_fail})" if rung.must_fail else "")


def needs(rung: Rung) -> str:
    return "NumPy" if rung.tier == "reference" else f"sm_{rung.arch}"


def lessons(there: Sequence[str], *, execute: bool) -> str:
    """What the lessons are, whether the build executes them, and a table of contents of those that exist."""
    rows = []
    for stage in STAGES:
        exists = stage.lesson in there
        name = f"[{stage.lesson}](/lessons/{stage.lesson}.ipynb)" if exists else f"{stage.lesson} (to come)"
        rows.append((name, stage.title, stage.question))
    contents = "```{toctree}\n:hidden:\n\n" + "".join(f"/lessons/{name}\n" for name in there) + "```\n"
    text = EXECUTED if execute else NOT_EXECUTED
    return f"{text}\n" + markdown(("lesson", "stage", "question"), rows) + ("\n" + contents if there else "")


# -- attention ---------------------------------------------------------------------------------------------------------
def attention() -> str:
    """Which kernel ``attention()`` takes when."""
    rows = [(i, choice.when, f"`{choice.backend}`") for i, choice in enumerate(CHOICES, 1)]
    return markdown(("", "when", "backend"), rows)


# -- the emulator ------------------------------------------------------------------------------------------------------
def faults() -> str:
    """Every named fault and its meaning."""
    kinds = [getattr(emulator, name) for name in emulator.__all__]
    kinds = [k for k in kinds if isinstance(k, type) and issubclass(k, emulator.Fault) and k is not emulator.Fault]
    return markdown(("fault", "what it means"), [(f"`{kind.__name__}`", kind.meaning) for kind in kinds])


def conformance(folder: Path) -> str:
    """How much was recorded on hardware; the tests compare it with the emulator."""
    vectors = np.load(folder / "vectors.npz")
    about = json.loads(str(vectors["index"]))
    with np.load(folder / "programs.npz") as held:
        programs = {key.rsplit(".", 1)[0] for key in held}
    names = set(about["instructions"])
    inexact = sorted(names & APPROXIMATIONS.keys())
    return (
        f"Recorded on one {about['device']} (sm_{about['arch']}): the inputs and outputs of **{len(names)} "
        f"instructions**, and the memory that **{len(programs)} programs** around asynchronous instructions "
        "(`cp.async`, bulk and tensor copies, named barriers, mbarriers, `wgmma`) left behind. "
        f"The tests demand every bit of {len(names) - len(inexact)} of the instructions and of all programs. The other "
        f"{len(inexact)} are approximations, whose low bits the hardware leaves open; for them the emulator gives the "
        "correctly rounded result, and the hardware's must lie within the bound that the PTX ISA states:\n\n"
        + markdown(("instruction", "units in the last place", "or absolutely"), map(bound, inexact))
    )


def bound(name: str) -> tuple[str, ...]:
    allowed = APPROXIMATIONS[name]
    return (f"`{name}`", f"{allowed.ulps:g}", f"{allowed.absolute:.2g}" if allowed.absolute else "-")


def tensor_core() -> str:
    """The rule of each generation, from the emulator's own table."""
    rows = []
    for (unit, first), formats in RULES.items():
        for operand, rule in formats.items():
            result = "as float16, then added in float32" if rule.as_f16 else f"{rule.result_bits} bits"
            rows.append((f"`{unit}`", f"sm_{first}", operand, rule.chunk, rule.fraction_bits, result))
    heads = ("unit", "since", "operands", "products a step", "bits kept below the largest", "result's fraction")
    return markdown(heads, rows)


# -- the notes' machine and NVIDIA's ----------------------------------------------------------------------------------
def budgets() -> str:
    """256 threads with all the registers a thread may have, on every machine."""
    rows = []
    for machine in (NOTES, *(machine for machine in MACHINES.values() if machine is not NOTES)):
        one = budget(machine, threads=256, registers=machine.max_registers)
        taken, all_of_it = 4 * one.takes["registers"] // 1024, 4 * one.holds["registers"] // 1024
        shared = f"{machine.shared_within(one.blocks) / 1024:.4g} of {machine.shared // 1024} KB"
        rows.append((machine.name, machine.max_registers, f"{taken} of {all_of_it} KB", one.blocks, shared))
    return markdown(("machine", "registers a thread", "registers a block", "blocks", "shared memory for each"), rows)


def draw_budgets(path: Path) -> None:
    """The notes' machine beside sm_90: 256 threads, and what is left for four buffers."""
    matplotlib.rcParams["svg.hashsalt"] = "flashnumba"
    figure = Figure(figsize=(10.4, 3.2), layout="constrained", facecolor="white")
    shown = [
        budget(NOTES, threads=256, registers=256, shared=NOTES.shared_within(3)),
        budget("90", threads=256, registers=168, shared=MACHINES["90"].shared_within(1)),
    ]
    draw_budget(shown, list(figure.subplots(1, 2)))
    figure.savefig(path, metadata={"Date": None})
