"""The gradients of attention on tensor cores, FlashAttention-2 style: mma.sync, cp.async, weights in registers.

Beside ``simt`` products run on tensor cores, float16 or bfloat16 in, float32 out; P and dS are rounded to the inputs'
type before their products. Two ways:

``mma``
    each row's numbers, then dQ by rows (:mod:`~flashnumba.stages.backward.mma_dq`), then dK and dV by keys
    (:mod:`~flashnumba.stages.backward.mma_dkdv`): seven products, no atomics, the same bits every time, memory for
    three numbers a row.
``one_pass``
    dK, dV and dQ in one kernel, five products: blocks of keys add to dQ by atomics, in a float32 buffer of its size
    that is cleared before and rounded after. NOT the same bits every time, as float32 sums depend on their order. For
    d up to 128 (64 from sm_100 on, whose compiler finds fewer registers) and rows aligned to 4 bytes.

Source: Dao, FlashAttention-2, arXiv 2307.08691.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from flashnumba.stages.backward.mma_dkdv import make_dkdv
from flashnumba.stages.backward.mma_dq import make_dq
from flashnumba.stages.backward.mma_pairs import make_pairs
from flashnumba.stages.backward.mma_tiles import Tiles, dkdv_tiles, dq_tiles, one_pass_tiles
from flashnumba.stages.backward.one_pass import make_clear, make_finish
from flashnumba.stages.backward.problem import ROWS, Launch, Plan, Planner, Shape, rows_scratch, signature
from flashnumba.stages.backward.rows import launch_rows
from flashnumba.tiles.forward import tier

if TYPE_CHECKING:
    from flashnumba.machine.compiler import CompileCase

__all__ = ["PLANS", "compile_cases", "launch_dkdv", "launch_dq", "plan_mma"]

DQ = ("q", "k", "v", "do", "dq", *ROWS, "scale", "causal")
DKDV = ("q", "k", "v", "do", "dk", "dv", *ROWS, "scale", "causal")
ONE_PASS = ("q", "k", "v", "do", "dk", "dv", *ROWS, "sums", "scale", "causal")


def check_element(element: str, arch: str) -> None:
    """ValueError if tensor cores do not multiply these elements in the way that is needed here."""
    if element == "float32":
        raise ValueError("q is float32; tensor cores would round it to 11 bits: use backward.simt")
    if element == "bfloat16" and tier(arch) == "75":
        raise ValueError(f"q is bfloat16, and sm_{arch} has no product for it: use backward.simt")


def launch_dq(shape: Shape, tiles: Tiles, arch: str = "", broken: str = "") -> Launch:
    """A block for each tile of rows; the kernel is that of the shape's architecture unless ``arch`` says otherwise."""
    even = shape.d == tiles.d
    kernel = make_dq(tiles, shape.element, shape.vector, arch or tier(shape.arch), even=even, broken=broken)
    blocks = -(-shape.m // tiles.own) * shape.heads * shape.batch
    return Launch(kernel, blocks, tiles.threads, tiles.shared, DQ)


def launch_dkdv(shape: Shape, tiles: Tiles, arch: str = "", broken: str = "") -> tuple[Launch, ...]:
    """A block for each tile of keys; two kernels where tiles have one result."""
    blocks = -(-shape.n // tiles.own) * shape.kv_heads * shape.batch
    options = {"arch": arch or tier(shape.arch), "even": shape.d == tiles.d, "broken": broken}
    which = () if tiles.pairs else ("dk dv",) if tiles.results == 2 else ("dk", "dv")
    kernels = [make_dkdv(tiles, shape.element, shape.vector, which=name, **options) for name in which]
    if tiles.pairs:
        kernels = [make_pairs(tiles, shape.element, shape.vector, **options)]
    return tuple(Launch(kernel, blocks, tiles.threads, tiles.shared, DKDV) for kernel in kernels)


def plan_mma(shape: Shape) -> Plan:
    """Each row's numbers, dQ, and dK with dV.

    Raises:
        ValueError: float32, or bfloat16 below sm_80.
    """
    check_element(shape.element, shape.arch)
    of_rows, of_keys = dq_tiles(shape.d, shape.arch, shape.vector), dkdv_tiles(shape.d, shape.arch, shape.vector)
    launches = (launch_rows(shape, base2=True), launch_dq(shape, of_rows), *launch_dkdv(shape, of_keys))
    return Plan(launches, rows_scratch(shape))


def plan_one_pass_with(shape: Shape, tiles: Tiles, arch: str = "", broken: str = "") -> Plan:
    """One pass with some tiles."""
    arch, even = arch or tier(shape.arch), shape.d == tiles.d
    clear = make_clear("all" if broken != "clear" else "")
    factory = make_pairs if tiles.pairs else make_dkdv
    make = factory(tiles, shape.element, shape.vector, arch, even=even, broken=broken)
    finish = make_finish(tiles, shape.element, arch, broken=broken)
    row_tiles = -(-shape.m // tiles.other) * shape.heads * shape.batch
    sums, blocks = row_tiles * tiles.other * tiles.d, -(-shape.n // tiles.own) * shape.kv_heads * shape.batch
    launches = (
        launch_rows(shape, base2=True),
        Launch(clear, -(-sums // (4 * clear.threads)), clear.threads, 0, ("sums",)),
        Launch(make, blocks, tiles.threads, tiles.shared, ONE_PASS),
        Launch(finish, row_tiles, tiles.threads, 0, ("sums", "dq", "scale")),
    )
    return Plan(launches, {**rows_scratch(shape), "sums": (sums,)})


def plan_one_pass(shape: Shape) -> Plan:
    """Each row's numbers, zeros for dQ, the pass, and dQ rounded.

    Raises:
        ValueError: float32, bfloat16 below sm_80, d above 128 (64 from sm_100 on), or rows that are not aligned to
            4 bytes.
    """
    check_element(shape.element, shape.arch)
    if 0 in (shape.batch, shape.heads, shape.m, shape.n):  # nothing to add: zeros, and empty arrays have odd strides
        return plan_mma(shape)
    return plan_one_pass_with(shape, one_pass_tiles(shape.d, shape.arch, shape.vector))


PLANS: dict[str, Planner] = {"mma": plan_mma, "one_pass": plan_one_pass}


def compile_cases() -> Iterator[CompileCase]:
    """Kernels as they are launched, for the compiler's tables and gates."""
    from flashnumba.machine.compiler import CompileCase

    def cases(element: str, d: int, chosen_for: tuple[str, ...], vector: int = 16) -> Iterator[CompileCase]:
        shape = Shape(element, 1, 1, 1, 4096, 4096, d, vector=vector, arch=chosen_for[0])
        width = "" if vector == 16 else f" by {vector} bytes"
        launches = plan_mma(shape).launches[1:]
        if d <= (64 if int(chosen_for[0].rstrip("a")) >= 100 else 128) and chosen_for[0] != "75" and vector >= 4:
            launches += plan_one_pass(shape).launches[2:]
        for launch in launches:
            title = f"{launch.kernel.name} {element} d {d}{width}, tiles for sm_{chosen_for[0]}"
            yield CompileCase(
                title, launch.kernel, signature(element, launch.args), launch.threads, launch.shared,
                chosen_for=chosen_for,
            )  # fmt: skip

    for d in (32, 64, 96, 128, 192, 256):
        yield from cases("float16", d, ("90a",))
    yield from cases("bfloat16", 128, ("90a",))
    yield from cases("float16", 120, ("90a",))
    yield from cases("float16", 56, ("90a",))
    for d, vector in ((100, 8), (33, 2), (255, 2)):
        yield from cases("float16", d, ("90a",), vector)
        yield from cases("float16", d, ("120a",), vector)
    for d in (64, 128, 256):
        yield from cases("float16", d, ("80",))
        yield from cases("float16", d, ("86", "89"))
        yield from cases("float16", d, ("100a",))
        yield from cases("float16", d, ("120a",))
        yield from cases("float16", d, ("75",))
