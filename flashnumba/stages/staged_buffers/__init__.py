"""The stage staged_buffers: both products share one ring of slots. ``reference.py`` has its table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from flashnumba.data import load_minilm
from flashnumba.machine.occupancy import machine_of
from flashnumba.stages import figures, heads
from flashnumba.stages.flash_forward import case, count
from flashnumba.stages.heads import Planner, Shape
from flashnumba.stages.stage import Case, Result, Rung, Stage
from flashnumba.stages.staged_buffers import panels, reference

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["STAGE", "plans", "registers_allowed"]


def plans() -> dict[str, Planner]:
    """The planner of each kernel of this stage, by name."""
    from flashnumba.stages.staged_buffers import mma

    return mma.PLANS


def registers_allowed(d: int = 128) -> dict[str, dict[str, int]]:
    """Registers a thread by machine and kernel: the notes' 256; elsewhere the most that leave room for as many blocks
    as the kernels are compiled for, all of which they use but a few."""
    from flashnumba.stages.staged_buffers.mma import tiles_for

    found = {"notes": dict.fromkeys(plans(), machine_of("notes").max_registers)}
    for machine in panels.MACHINES[1:]:
        tiles = tiles_for(d, machine)
        most = machine_of(machine).registers_within(max(1, tiles.min_blocks), tiles.threads)
        found[machine] = dict.fromkeys(plans(), most)
    return found


def cases(machine: str, full: bool) -> Sequence[Case]:
    """One real head: some queries before all keys near them, and the last ones that look back.

    On a GPU all 36 heads. On the emulator part of one that holds its greatest score, or the whole of it if ``full``.
    """
    data = load_minilm()
    if machine == "cuda":
        name, (q, k, v) = "36 heads of 3 layers", (data.q, data.k, data.v)
    else:
        name, (q, k, v) = f"layer {data.layers[0]}, head 2", (x[0, 2] for x in (data.q, data.k, data.v))
    if full or machine == "cuda":
        (rows, keys), (last, before) = (slice(None), slice(None)), (slice(212, 512), slice(None))
    else:
        (rows, keys), (last, before) = (slice(340, 380), slice(300, 400)), (slice(350, 380), slice(250, 380))
    return (
        case(name, q[..., rows, :], k[..., keys, :], v[..., keys, :], False),
        case(name, q[..., last, :], k[..., before, :], v[..., before, :], True),
    )


def by_table(case: Case, machine: str) -> np.ndarray:
    """Each head by the reference, with four quarter-size slots."""
    q, k, v, causal = (case.inputs[x] for x in ("q", "k", "v", "causal"))
    o = np.empty(q.shape)
    for at in np.ndindex(*q.shape[:-2]):
        o[at], _ = reference.attention(q[at], k[at], v[at], 4, "quarter", causal=bool(causal))
    return o


def moved(shape: Shape) -> count.Moved:
    from flashnumba.stages.staged_buffers.mma import tiles_for

    tiles = tiles_for(shape.d, shape.arch)
    return count.fused(shape, tiles.bm, tiles.bn)


def kernel(stages: int, cut: str, takes: Callable[[Case], bool]) -> Rung:
    name = f"{cut}_{stages}"

    def run(case: Case, machine: str) -> np.ndarray:
        q, k, v, causal = (case.inputs[x] for x in ("q", "k", "v", "causal"))
        o, _ = heads.forward(q, k, v, plans()[name], causal=bool(causal), machine=machine)
        return o

    slots = f"{'one slot' if stages == 1 else f'{stages} slots'} of {'a whole tile' if cut == 'tile' else 'a quarter'}"
    return Rung(name, "mma", run, count.Traffic("QO+KV/tile", moved), "80", f"{slots} for K and V", takes=takes)


def is_causal(case: Case, expected: bool) -> bool:
    return bool(case.inputs["causal"]) == expected


def draw(results: Sequence[Result]) -> Figure:
    """The ring of four quarters, shared memory against slots, what fits on three machines, and the errors."""
    figure, (ring, shared, fits, errors) = figures.four_panels("one ring of slots for both products")
    panels.draw_schedule(ring, 4, "quarter")
    panels.draw_shared(shared)
    panels.draw_blocks(fits, tuple(plans()), registers_allowed())
    figures.errors(errors, results, label=lambda r: f"{r.rung.name}, {r.case.size.replace(' float16', '')}")
    return figure


STAGE = Stage(
    name="staged_buffers",
    title="Staged buffers",
    question="How little shared memory hides the copies?",
    teaches="copies in flight, an occupancy budget",
    lesson="06_staged_buffers",
    rungs=(
        Rung("by_table", "reference", by_table, count.Traffic("QKVO", count.floor), summary="by the table, in NumPy"),
        *(
            kernel(stages, cut, partial(is_causal, expected=stages % 2 == (cut == "tile")))
            for cut in reference.CUTS
            for stages in reference.STAGES
        ),
    ),
    cases=cases,
    draw=draw,
)
