"""Attention of 8-bit q, k and v on tensor cores: multiplied as they are, or stored in 8 bits and multiplied as float16.

::

    k32        sm_89 and later   mma.m16n8k32: half the bytes, half the products; P e4m3; v by columns
    emulated   any GPU, sm_75    K and V converted on their way from shared memory to the product; P float16; v by rows
    split      sm_80 and later   emulated, the keys of few queries over many blocks: decoding (stages/fp8/split.py)

The schedule is that of the flash forward (:mod:`flashnumba.tiles.forward`): ``k32`` changes what is moved and
multiplied (:mod:`flashnumba.tiles.fp8`), P's layout (:mod:`flashnumba.tiles.chain`) and its scale; ``emulated`` what is
between ldmatrix and mma (:mod:`flashnumba.tiles.fp8_halves`). Scales of heads cost nothing, scales of blocks of 64 rows
a product an element of S (:mod:`flashnumba.tiles.descale`).

mma.m16n8k32 computes in FP8 on sm_89 and sm_120. On sm_90 the assembler makes of it conversions to float16 and two
products of half the depth: the same results, and no gain but that of memory. FP8's arithmetic is wgmma's there, whose
operands lie as these do: K by rows, V by columns, P in the order QUADS; ``wgmma.py`` is to take the same arguments.

sm_89 keeps 13 bits behind the point in the sums of a product; l is added up tile by tile in float32.

Sources: Shah et al., FlashAttention-3, arXiv 2407.08608; Zhang et al., SageAttention2, arXiv 2411.10958; PTX ISA, mma.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

from flashnumba.machine.function import Kernel, kernel
from flashnumba.machine.numba import cuda, uint32
from flashnumba.stages.fp8 import convert, split
from flashnumba.stages.fp8_heads import ARGUMENTS
from flashnumba.stages.heads import Launch, Plan, Planner, Shape, signature
from flashnumba.tiles import fp8
from flashnumba.tiles.forward import make_attend
from flashnumba.tiles.fp8_convert import ELEMENTS, native
from flashnumba.tiles.schedule import SCHEDULES
from flashnumba.tiles.scheduled import make_place
from flashnumba.tiles.sizes import AttentionTiles

if TYPE_CHECKING:
    from flashnumba.machine.compiler import CompileCase

__all__ = ["FAULTS", "PLANS", "compile_cases", "emulated_tiles", "make_forward", "plan_emulated", "plan_k32"]

SCHEDULE = SCHEDULES["longest_first"]
FAULTS = {
    "k32": ("twice", "order", "saturate", "stale", "o_barrier", "tail", "causal", "sign", "barrier"),
    "emulated": ("twice", "tail", "causal", "sign", "barrier", "rescale"),
}
"""What can be planted: scales twice, K in an order that P does not know, P beyond the largest number, the maximum of
the first tile for all; and what the flash forward has."""


@cache
def make_forward(
    tiles: AttentionTiles, element: str, arch: str = "89", *, scaled: str = "head", even: bool = True, broken: str = ""
) -> Kernel:
    """The kernel with :data:`flashnumba.stages.fp8_heads.ARGUMENTS`.

    Args:
        tiles: with ``nbytes`` 1 to multiply codes as they are, with ``kv_bytes`` 1 as float16.
        element: one of :data:`flashnumba.tiles.fp8_convert.ELEMENTS`.
        arch: "89"; and for float16 "80" and "75", which convert e4m3 in integers.
        scaled: ``"head"`` or ``"block"``.
        even: the head dimension is ``tiles.d``.
        broken: plants one of :data:`FAULTS`.
    """
    name = "fp8.k32" if tiles.nbytes == 1 else "fp8.emulated"
    place = make_place(tiles, element, SCHEDULE.piece)
    attend = make_attend(tiles, element, 16, arch, even=even, scaled=scaled, broken=broken)

    @kernel(threads=tiles.threads, min_blocks=tiles.min_blocks, arch=arch, name=name)
    def forward(q, k, v, o, lse, q_descale, k_descale, v_descale, scale, causal):
        batch, head, tile, _ = place(q, k, causal, uint32(cuda.blockIdx.x))
        attend(q, k, v, o, lse, q_descale, k_descale, v_descale, scale, causal, batch, head, tile)

    return forward


def plan_k32(shape: Shape, tiles: AttentionTiles | None = None, *, broken: str = "") -> Plan:
    """A block for each tile of rows of each head, products of 32 codes.

    Raises:
        ValueError: elements of more than 8 bits, or a GPU below sm_89.
    """
    check_element(shape)
    if not native(shape.arch):
        raise ValueError(f"tensor cores multiply {shape.element} from sm_89 on, this is sm_{shape.arch}: use emulated")
    return _plan(shape, tiles or fp8.tiles_for(shape.d, shape.arch), "89", broken)


def plan_emulated(shape: Shape, tiles: AttentionTiles | None = None, *, broken: str = "") -> Plan:
    """A block for each tile of rows of each head, products of float16.

    Raises:
        ValueError: elements of more than 8 bits.
    """
    check_element(shape)
    number = int(shape.arch.rstrip("a"))
    tier = "89" if native(shape.arch) else "80" if number >= 80 else "75"
    narrow = shape.scaled == "block" or shape.element != ELEMENTS[0]
    return _plan(shape, tiles or emulated_tiles(shape.d, shape.arch, narrow=narrow), tier, broken)


def _plan(shape: Shape, tiles: AttentionTiles, arch: str, broken: str) -> Plan:
    kernel = make_forward(
        tiles, shape.element, arch, scaled=shape.scaled or "head", even=shape.d == tiles.d, broken=broken
    )
    blocks = SCHEDULE.blocks(-(-shape.m // tiles.bm), shape.heads * shape.batch)
    launch = Launch(kernel, blocks, tiles.threads, tiles.shared, ARGUMENTS)
    return Plan((launch,), v_by_columns=tiles.nbytes == 1)


def check_element(shape: Shape) -> None:
    """ValueError unless q, k and v are of 8 bits, in rows of whole 16 bytes."""
    if shape.element not in ELEMENTS or shape.vector != 16 or shape.d % 16:
        raise ValueError(
            f"q is {shape.element} with rows of {shape.d}; it must be {' or '.join(ELEMENTS)}, in multiples of 16 bytes"
        )


def emulated_tiles(d: int, arch: str, *, narrow: bool = False) -> AttentionTiles:
    """Tiles for a head dimension. Conversions take registers that products of float16 alone would not.

    Args:
        narrow: for e5m2, whose two masks a word the compiler keeps at hand, and for scales of blocks.
    """
    d, number = -(-d // 64) * 64, int(arch.rstrip("a"))
    if number < 80:
        return AttentionTiles(d, 64, 32, kv_bytes=1) if d <= 128 else AttentionTiles(d, 32, 16, warps=2, kv_bytes=1)
    if d > 128:
        return AttentionTiles(d, 64, 32, kv_bytes=1)
    few = d > 64 and (narrow or number > 90)
    return AttentionTiles(d, 128, 32 if few else 64, slots=2, lazy=d > 64 and number <= 90, kv_bytes=1)


PLANS: dict[str, Planner] = {"k32": plan_k32, "emulated": plan_emulated, "split": split.plan_split}


def compile_cases() -> Iterator[CompileCase]:
    """Kernels as they are launched, for the compiler's tables and gates."""
    from flashnumba.machine.compiler import CompileCase

    def case(plan: Planner, element: str, d: int, chosen_for: tuple[str, ...], scaled: str = "head") -> CompileCase:
        shape = Shape(element, 1, 1, 1, 4096, 4096, d, arch=chosen_for[0], scaled=scaled)
        (launch,) = plan(shape).launches
        by = " by blocks" if scaled == "block" else ""
        title = f"{launch.kernel.__name__} {element.removeprefix('float8_')} d {d}{by}, tiles for sm_{chosen_for[0]}"
        return CompileCase(
            title, launch.kernel, signature(element, launch.args), launch.threads, launch.shared, chosen_for=chosen_for
        )

    e4m3, e5m2 = ELEMENTS
    for d in (64, 128, 256):
        for chosen_for in (("89",), ("90a", "100a", "120a")):
            yield case(plan_k32, e4m3, d, chosen_for)
        for chosen_for in (("75",), ("80", "86"), ("89", "90a"), ("100a", "120a")):
            yield case(plan_emulated, e4m3, d, chosen_for)
    for plan in (plan_k32, plan_emulated):
        yield case(plan, e5m2, 128, ("89",))
        yield case(plan, e5m2, 128, ("90a", "100a", "120a"))
        yield case(plan, e4m3, 128, ("89",), "block")
        yield case(plan, e4m3, 128, ("90a", "100a", "120a"), "block")
    yield case(plan_emulated, e5m2, 128, ("75",))
    yield case(plan_emulated, e5m2, 128, ("80", "86"))
    yield from split.compile_cases()
    yield from convert.compile_cases()
