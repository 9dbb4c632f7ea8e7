"""Attention whose K and V pass through one ring of slots, slice by slice: eight kernels that differ in nothing else.

Beside ``flash_forward.mma`` three things change. Q is loaded once, through the slots, into registers, where the whole
of it stays; no shared memory is kept for it. K and V share one ring of 1 to 4 slots. And a slot holds a whole tile, or
a quarter of one: of K some columns, of V some keys. What happens when is the table of
:func:`flashnumba.stages.staged_buffers.reference.schedule`: the kernel takes slots, copies and waits from its rows.

::

    tile_2       16 KB a slot at D = 128: K_0 | V_0 | K_1 ..        2 steps a tile, 32 KB
    quarter_4     4 KB a slot: K_00 | K_01 | .. | V_00 | ..         8 steps a tile, 16 KB

A warp owns 16 rows. Exponentials of the next 16 keys are computed beside the product with the 16 before them. What a
query may not see, and the limits, are as in flash_forward.

Source: see :mod:`flashnumba.stages.staged_buffers.reference`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flashnumba.machine.occupancy import machine_of
from flashnumba.stages.heads import ARGUMENTS, Launch, Plan, Planner, Shape, signature
from flashnumba.stages.staged_buffers import reference
from flashnumba.stages.staged_buffers.ring import FAULTS, make_staged
from flashnumba.stages.staged_buffers.slices import StagedTiles
from flashnumba.tiles.forward import check_element, tier

if TYPE_CHECKING:
    from flashnumba.machine.compiler import CompileCase

__all__ = [
    "FAULTS",
    "KERNELS",
    "PLANS",
    "TRACED",
    "compile_cases",
    "make_staged",
    "plan_staged",
    "tiles_for",
    "variants",
]

KERNELS = {f"{cut}_{stages}": (stages, cut) for cut in reference.CUTS for stages in reference.STAGES}
"""Slots, and what one holds, of each kernel."""


def tiles_for(d: int, arch: str, vector: int = 16) -> StagedTiles:
    """Tiles for a head dimension: 64 rows by 4 warps before 64 keys, and registers for as many
    blocks as they allow without a spill, by architecture.

    Copies of less than 16 bytes have more addresses. Above 192 columns they do not fit beside O, S and the whole of Q:
    those kernels are right, and spill.
    """
    d, number = -(-d // 64) * 64, int(arch.rstrip("a"))
    blocks = {64: 4 if number == 90 else 3, 128: 3 if 80 <= number <= 90 and vector == 16 else 2}
    return StagedTiles(d, min_blocks=blocks.get(d, 0))


def plan_staged(
    shape: Shape, stages: int, cut: str, traced: bool = False, tiles: StagedTiles | None = None
) -> Plan:  # fmt: skip
    """One block for each tile of rows of each head, by default of :func:`tiles_for`.

    Raises:
        ValueError: float32, bfloat16 below sm_80, or slots that no multiprocessor of this architecture has room for.
    """
    check_element(shape.element, shape.arch)
    tiles = tiles or tiles_for(shape.d, shape.arch, shape.vector)
    shared, most = tiles.shared(stages, cut), machine_of(shape.arch).block_shared
    if shared > most:
        raise ValueError(
            f"{stages} slots of {tiles.slot(cut)} bytes take {shared} bytes of shared memory for head dimension "
            f"{shape.d}; sm_{shape.arch} has {most} a block: take fewer slots, or quarters"
        )
    even = shape.d == tiles.d
    made = make_staged(
        tiles, stages, cut, shape.element, shape.vector, tier(shape.arch), even=even, traced=traced,
    )  # fmt: skip
    blocks = -(-shape.m // tiles.bm) * shape.heads * shape.batch
    args = (*ARGUMENTS, "trace") if traced else ARGUMENTS
    return Plan((Launch(made, blocks, tiles.threads, shared, args),))


def _planner(stages: int, cut: str, traced: bool = False) -> Planner:
    return lambda shape: plan_staged(shape, stages, cut, traced)


PLANS: dict[str, Planner] = {name: _planner(*of) for name, of in KERNELS.items()}
TRACED: dict[str, Planner] = {name: _planner(*of, traced=True) for name, of in KERNELS.items()}
"""The same with marks, for ``flashnumba timeline``."""


def variants(shape: Shape) -> dict[str, Plan]:
    """Four quarters and two whole tiles in other sizes, by name: what :func:`tiles_for` was chosen from."""
    usual = tiles_for(shape.d, shape.arch, shape.vector)
    changes: dict[str, dict[str, Any]] = {
        "always subtract": {"subtract": True},
        "always rescale": {"lazy": False},
        **{f"{blocks} blocks": {"min_blocks": blocks} for blocks in (2, 3, 4, 5)},
    }
    if usual.d == 64:
        changes |= {f"32 rows a warp, {n} blocks": {"warps": 2, "min_blocks": n} for n in (4, 5, 6)}
    return {
        f"{name}, {words}": plan_staged(shape, *KERNELS[name], tiles=replace(usual, **change))
        for words, change in changes.items()
        if replace(usual, **change) != usual
        for name in ("tile_2", "quarter_4")
    }


def compile_cases() -> Iterator[CompileCase]:
    """Kernels as they are launched, for the compiler's tables and gates."""
    from flashnumba.machine.compiler import CompileCase

    def case(name: str, element: str, d: int, chosen_for: tuple[str, ...], vector: int = 16) -> CompileCase:
        (launch,) = PLANS[name](Shape(element, 1, 1, 1, 4096, 4096, d, vector=vector, arch=chosen_for[0])).launches
        width = "" if vector == 16 else f" by {vector} bytes"
        title = f"staged_buffers.{name} {element} d {d}{width}, tiles for sm_{chosen_for[0]}"
        return CompileCase(
            title, launch.kernel, signature(element), launch.threads, launch.shared, chosen_for=chosen_for
        )

    for name in KERNELS:
        for d in (128, 64):
            yield case(name, "float16", d, ("90a",))
            yield case(name, "float16", d, ("80", "86", "89"))
            yield case(name, "float16", d, ("100a", "120a"))
    for d in (128, 64):
        yield case("quarter_4", "float16", d, ("75",))
    yield case("quarter_4", "bfloat16", 128, ("90a",))
    yield case("quarter_4", "float16", 192, ("90a",))
    yield case("quarter_4", "float16", 100, ("90a",), 8)
    yield case("quarter_4", "float16", 33, ("90a",), 2)
