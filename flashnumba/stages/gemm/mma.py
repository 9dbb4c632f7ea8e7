"""Plans for ``mma.sync``: float16 on any GPU from sm_75, bfloat16 from sm_80. The kernel is in :mod:`.multistage`.

``mma`` takes every shape and alignment. Copies are as wide as the alignment of the lines allows: 16, 8 or 4 bytes by
cp.async, which fills tails with zeros; single elements through registers where lines start at odd multiples of 2 bytes.
On sm_75 all copies go through registers, as wide as lines consist of whole ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flashnumba.machine.compiler import CompileCase
from flashnumba.stages.gemm.multistage import Tiles, make_mma
from flashnumba.stages.gemm.problem import Plan, Shape, signature
from flashnumba.stages.gemm.waves import TileChoice, cheapest, tiles_of

__all__ = ["PLANS", "compile_cases", "plan_mma", "variants"]

LARGE = Tiles(128, 256, 32, 64, 64, slots=4)
MEDIUM = Tiles(128, 128, 32, 64, 64, slots=3, min_blocks=2)
SMALL = Tiles(64, 64, 32, 32, 32, slots=4)
CHOICES = (TileChoice(LARGE, 1.0), TileChoice(MEDIUM, 0.9), TileChoice(SMALL, 0.6))
"""Where copies go past the registers. Up to 97 KB of shared memory: what every GPU from sm_80 on has."""

STAGED_LARGE = Tiles(128, 128, 32, 64, 32, slots=2)
STAGED_SMALL = Tiles(64, 64, 32, 32, 32, slots=2)
STAGED_CHOICES = (TileChoice(STAGED_LARGE, 1.0), TileChoice(STAGED_SMALL, 0.6))
"""Where copies wait in registers: fewer accumulators, and two slots, one read and one written."""


def staged(shape: Shape) -> bool:
    """Whether some copy goes through registers."""
    return shape.capability < 80 or 2 in (shape.vector_a, shape.vector_b)


def plan_of(shape: Shape, tiles: Tiles, broken: str = "") -> Plan:
    """A launch with given sizes; ``broken`` as in :func:`~flashnumba.stages.gemm.multistage.make_mma`.

    Raises:
        ValueError: the element is not float16, or from sm_80 on bfloat16.
    """
    if shape.element != "float16" and (shape.element != "bfloat16" or shape.capability < 80):
        raise ValueError(
            f"mma of {shape.element} on sm_{shape.arch}: it multiplies float16, and from sm_80 on bfloat16; "
            "use register_tile"
        )
    old = shape.capability < 80
    width_a, width_b = (shape.whole("a"), shape.whole("b")) if old else (shape.vector_a, shape.vector_b)
    made = make_mma(
        shape.element, tiles, shape.a_major, shape.b_major, width_a, width_b, shape.whole("c"),
        arch="75" if old else "80", broken=broken,
    )  # fmt: skip
    rows, cols = tiles_of(shape, tiles)
    return Plan(made, rows * cols, tiles.threads, tiles.shared)


def plan_mma(shape: Shape) -> Plan:
    """The kernel with tiles as large as the shape fills the GPU with.

    Raises:
        ValueError: as :func:`plan_of`.
    """
    return plan_of(shape, cheapest(shape, STAGED_CHOICES if staged(shape) else CHOICES))


def variants(shape: Shape) -> dict[str, Plan]:
    """Plans of other sizes, to be timed on a GPU; some need the shared memory of sm_80 or sm_90."""
    if staged(shape):
        sizes = [STAGED_LARGE, replace(STAGED_LARGE, wm=32, wn=64), replace(STAGED_LARGE, slots=3), STAGED_SMALL]
    else:
        sizes = [LARGE, MEDIUM, SMALL, *(replace(LARGE, band=band) for band in (4, 16))]
        sizes += [replace(LARGE, slots=3), replace(LARGE, bm=256, bn=128), replace(MEDIUM, slots=4)]
        if shape.capability in (80, 90, 100):
            sizes += [replace(LARGE, bk=64, slots=3), replace(MEDIUM, bk=64, slots=2)]
        if shape.capability in (90, 100):
            sizes += [replace(LARGE, slots=6), replace(LARGE, bk=64, slots=4), replace(MEDIUM, bk=64, slots=3)]
            sizes += [replace(LARGE, bm=256, bn=128, bk=64, slots=4)]
    return {f"{t.bm}x{t.bn}x{t.bk} by {t.wm}x{t.wn}, {t.slots} slots, band {t.band}": plan_of(shape, t) for t in sizes}


PLANS = {"mma": plan_mma}


def compile_cases() -> Iterator[CompileCase]:
    """The kernel as it is launched: each size, and each way and width of copying, over element types and majors."""
    large, small = 4096, 256
    cases = [
        ("16 bytes", Shape.packed("float16", large, large, large)),
        ("16 bytes", Shape.packed("bfloat16", large, large, large, "m", "k")),
        ("16 bytes", Shape.packed("float16", 1408, 1408, large, "k", "k")),
        ("8 bytes", replace(Shape.packed("float16", small, small, small, "m", "n"), vector_a=8, vector_b=4)),
        ("2 bytes", Shape.packed("float16", 4097, 4097, 4097, "m", "k")),
        ("sm_75", Shape.packed("float16", large, large, large, arch="75")),
    ]
    for how, shape in cases:
        plan = plan_mma(shape)
        name = f"gemm.mma {shape.element} {shape.m} {shape.a_major}{shape.b_major} by {how}, sm_{plan.kernel.arch} on"
        yield CompileCase(name, plan.kernel, signature(shape), plan.threads, plan.shared)
