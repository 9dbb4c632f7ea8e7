"""Plans for ``wgmma``: float16 and bfloat16 on sm_90a. The kernel is in :mod:`.warp_specialised`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from flashnumba.machine.arrays import describe
from flashnumba.machine.compiler import CompileCase
from flashnumba.machine.numba import types
from flashnumba.machine.tensor_map import TensorMap
from flashnumba.stages.gemm.problem import Plan, Shape
from flashnumba.stages.gemm.warp_specialised import PANEL, Tiles, make_wgmma
from flashnumba.stages.gemm.waves import TileChoice, cheapest, multiprocessors, tiles_of

__all__ = ["PLANS", "compile_cases", "plan_wgmma", "variants"]

LARGE = Tiles(128, 256, slots=4)
MEDIUM = Tiles(128, 128, slots=6)
SMALL = Tiles(128, 64, slots=8)
CHOICES = (TileChoice(LARGE, 1.0), TileChoice(MEDIUM, 0.85), TileChoice(SMALL, 0.6))


def transposed(array: Any) -> Any:
    """The array with its axes exchanged, sharing its memory."""
    found = describe(array)
    if found.kind in ("numpy", "torch-cpu", "torch-cuda", "cupy"):
        return array.T
    return replace(found, shape=found.shape[::-1], strides=found.strides[::-1], kind="numba")


def plan_of(shape: Shape, tiles: Tiles, blocks: int = 0, broken: str = "") -> Plan:
    """A launch with given sizes.

    Args:
        blocks: at most; each walks over tiles. By default as many as the GPU has multiprocessors; as many as there are
            tiles makes each block stay for one.
        broken: as in :func:`~flashnumba.stages.gemm.warp_specialised.make_wgmma`.

    Raises:
        ValueError: the copy engine or the tensor cores cannot take the shape.
    """
    if shape.arch != "90a" or shape.element not in ("float16", "bfloat16"):
        raise ValueError(
            f"wgmma of {shape.element} on sm_{shape.arch}: it multiplies float16 and bfloat16 on sm_90a; use "
            f"{'register_tile' if shape.element == 'float32' else 'mma'}"
        )
    narrow = [f"vector_{x} is {v}" for x, v in zip("abc", (shape.vector_a, shape.vector_b, shape.vector_c), strict=True)
              if v != 16]  # fmt: skip
    if narrow:
        raise ValueError(
            f"{narrow[0]}; wgmma's copy engine takes lines that start at multiples of 16 bytes: use mma, or pad lines "
            "to a multiple of 8 elements"
        )
    if shape.whole("c") != 16:
        raise ValueError(
            f"n is {shape.n}; the copy engine writes rows of C in whole 16 bytes, so n must be a multiple of 8: use mma"
        )
    if max(shape.m, shape.n, shape.k) > 2**31 - 512:
        raise ValueError(f"{shape.m} x {shape.n} x {shape.k}; coordinates of the copy engine are 32 bits: use mma")
    rows, cols = tiles_of(shape, tiles)
    depth = -(-shape.k // PANEL)
    element, a_along_k, b_along_k = shape.element, shape.a_major == "k", shape.b_major == "k"

    def arguments(a: Any, b: Any, c: Any) -> tuple[Any, ...]:
        box_a, box_b = (tiles.bm if a_along_k else PANEL, PANEL), (tiles.bn if b_along_k else PANEL, PANEL)
        return (
            TensorMap(a if a_along_k else transposed(a), box_a, element=element, name="a"),
            TensorMap(transposed(b) if b_along_k else b, box_b, element=element, name="b"),
            TensorMap(c, (16, PANEL), element=element, name="c"),
            np.uint32(rows), np.uint32(cols), np.uint32(depth),
        )  # fmt: skip

    made = make_wgmma(element, tiles, shape.a_major, shape.b_major, broken=broken)
    return Plan(made, min(blocks or multiprocessors(), rows * cols), tiles.threads, tiles.shared, arguments)


def plan_wgmma(shape: Shape) -> Plan:
    """The kernel with tiles as large as the shape fills the GPU with.

    Raises:
        ValueError: as :func:`plan_of`.
    """
    return plan_of(shape, cheapest(shape, CHOICES))


def variants(shape: Shape) -> dict[str, Plan]:
    """Plans of other sizes, to be timed on a GPU; ``one tile a block`` is not persistent."""
    sizes = [LARGE, *(replace(LARGE, band=band) for band in (4, 8, 12, 24, 32))]
    sizes += [
        replace(LARGE, slots=3, panels=4), Tiles(256, 128, slots=4, band=8), Tiles(128, 192, slots=5, panels=1),
        Tiles(128, 192, slots=4), Tiles(192, 256, slots=3, consumers=3, columns=128, band=11), MEDIUM, SMALL,
    ]  # fmt: skip
    plans = {
        f"{t.bm}x{t.bn}, {t.slots} slots, {t.consumers} consumers, {t.panels} panels, band {t.band}": plan_of(shape, t)
        for t in sizes
    }
    rows, cols = tiles_of(shape, LARGE)
    return {**plans, "128x256, 4 slots, one tile a block": plan_of(shape, LARGE, rows * cols)}


PLANS = {"wgmma": plan_wgmma}


def compile_cases() -> Iterator[CompileCase]:
    """The kernel as it is launched: each size, all majors, both elements."""
    signature = (types.uint64,) * 3 + (types.uint32,) * 3
    cases = [("float16", 8192, a, b) for a in "km" for b in "nk"]
    for element, size, a_major, b_major in [*cases, ("bfloat16", 1408, "k", "n"), ("bfloat16", 512, "m", "k")]:
        plan = plan_wgmma(Shape.packed(element, size, size, size, a_major, b_major))
        name = f"gemm.wgmma {element} {size} {a_major}{b_major}"
        yield CompileCase(name, plan.kernel, signature, plan.threads, plan.shared)
