"""Online softmax: the (m, d) recurrence on CUDA cores, any GPU from sm_75.

What memory moves for each element, and what a row may be::

    two_pass     2R+1W   one block a row of any length
    one_pass     1R+1W   up to 1024 threads hold a row: 128 KB of it, fewer bytes where loads are narrow
    split        1R+1W   several blocks hold a row of any length, and merge their (m, d) through global memory
    split_ahead  1R+1W  the same from sm_90 on, with chunks in shared memory that the copy engine loads ahead

A softmax computes little: about ten instructions an element beside 4 or 8 bytes moved. So its time is that of its
traffic, 1R+1W is the end of the road, and a device copy is the ceiling.

The limits are the reference's: a row of -inf gives zeros, a NaN or +inf gives a row of NaN. All arithmetic is float32.
Results are the same bits every time.

Source: Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv 1805.02867.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashnumba.machine import launcher
from flashnumba.machine.function import Kernel
from flashnumba.machine.numba import types
from flashnumba.stages.again import Recipes, of_rows, rows_key
from flashnumba.stages.online_softmax.one_pass import make_one_pass
from flashnumba.stages.online_softmax.split import make_split
from flashnumba.stages.online_softmax.split_ahead import make_split_ahead, shared_bytes
from flashnumba.stages.online_softmax.two_pass import make_two_pass
from flashnumba.stages.rows import Rows, Shape, prepare_rows, signature
from flashnumba.tiles.elements import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flashnumba.machine.compiler import CompileCase

__all__ = [
    "KERNELS", "Plan", "choose", "compile_cases", "make_one_pass", "make_split", "make_split_ahead",
    "make_two_pass", "plan_one_pass", "plan_split", "plan_split_ahead", "plan_two_pass", "run", "softmax",
]  # fmt: skip

KERNELS = ("two_pass", "one_pass", "split", "split_ahead")
HELD_WORDS = 32
"""32-bit words of a row that a thread holds at most: half of the 64 registers it has beside 1023 others."""
NARROW_WORDS = 16
"""The same where a load is one word: these may stand at any distance, and each address takes registers too."""
FEW_ROWS = 64
"""With no more rows than this a block a row leaves most of a GPU idle."""
PER_THREAD = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)


@dataclass(frozen=True)
class Plan:
    """A kernel and its launch; ``shared`` is dynamic, in bytes. ``chunks`` a row, where a row is split: the blocks
    launched are then as many as fit."""

    kernel: Kernel
    blocks: int
    threads: int
    chunks: int = 0
    shared: int = 0


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length()


def tier(shape: Shape) -> str:
    """What kernels are made for: those for sm_75 do without instructions that came with sm_80."""
    return "75" if int(shape.arch.rstrip("a")) < 80 else "80"


def loads(shape: Shape) -> tuple[int, int]:
    """(vectors a row, 32-bit words that a thread needs to hold one)."""
    return shape.cols * ITEMSIZE[shape.element] // shape.vector, max(1, shape.vector // 4)


def capacity(words: int) -> int:
    """32-bit words of a row that a block holds at most, in loads of so many words."""
    return 1024 * HELD_WORDS if words > 1 else 512 * NARROW_WORDS


def choose(shape: Shape) -> str:
    """What ``kernel="auto"`` means: one read wherever registers hold the row, those of one block or of several."""
    count, words = loads(shape)
    if count * words > capacity(words):
        return "split_ahead" if can_load_ahead(shape) else "split"
    return "split" if shape.rows <= FEW_ROWS and count * words >= 8192 else "one_pass"


def can_load_ahead(shape: Shape) -> bool:
    """Whether the copy engine can bring the rows: it is there from sm_90 on, and moves multiples of 16 bytes."""
    return shape.vector == 16 and int(shape.arch.rstrip("a")) >= 90


def plan_two_pass(shape: Shape) -> Plan:
    """One block a row of about 16 words a thread, 32 to 1024 threads."""
    count, words = loads(shape)
    at_once = max(1, 16 // words)
    threads = min(1024, max(32, power_of_two(-(-count // at_once))))
    kernel = make_two_pass(shape.element, threads, shape.vector, at_once, arch=tier(shape))
    return Plan(kernel, shape.rows, threads)


def plan_one_pass(shape: Shape) -> Plan:
    """A group of lanes for short rows, so that no lane is without work; a warp up to 4 KB; a block beyond.

    Raises:
        ValueError: the row is longer than 1024 threads can hold.
    """
    count, words = loads(shape)
    if count * words > capacity(words):
        raise ValueError(
            f"one_pass holds rows of up to {capacity(words) // words * shape.vector} bytes where loads are of "
            f"{shape.vector} bytes; these have {shape.cols * ITEMSIZE[shape.element]}: use split or two_pass"
        )
    if count * words <= 32 * (HELD_WORDS if words > 1 else NARROW_WORDS // 2):
        group = min(32, max(4, power_of_two(count)))
    elif words > 1:
        # 16 words a thread up to 512 threads, then 32: measured faster on an H200 than 1024 threads of 16.
        group = min(512, power_of_two(-(-count * words // 16)))
        group = group if count * words <= group * HELD_WORDS else 1024
    else:
        group = min(512, power_of_two(-(-count // 8)))
    vectors = next(v for v in PER_THREAD if v * group >= count)
    short = group <= 32
    at_once = max(1, min(2, 16 // (vectors * words))) if short and shape.rows >= 1024 else 1
    rows = max(32 // group, min(128 // group, power_of_two(shape.rows))) if short else 1
    # Of narrow loads ptxas, left to itself, sometimes spills a word or two for the sake of one more block.
    kernel = make_one_pass(
        shape.element, group, vectors, rows, shape.vector, rows_at_once=at_once, exact=vectors * group == count,
        min_blocks=int(words == 1 and not short), arch=tier(shape),
    )  # fmt: skip
    return Plan(kernel, -(-shape.rows // (rows * at_once)), group * rows)


def plan_split(shape: Shape) -> Plan:
    """Chunks of 256 threads that hold all they can; fewer, and smaller ones, where a row would else be one chunk."""
    count, words = loads(shape)
    vectors = HELD_WORDS // words if words > 1 else NARROW_WORDS
    threads = next((t for t in (256, 128, 64, 32) if count > t * vectors), 0)
    if not threads:
        threads, vectors = 32, max(1, -(-count // 64))
    kernel = make_split(
        shape.element, threads, vectors, shape.vector, exact=count % (threads * vectors) == 0,
        hint="plain" if shape.in_place else "once", min_blocks=min(32, 1024 // threads), arch=tier(shape),
    )  # fmt: skip
    chunks = -(-count // (threads * vectors))
    return Plan(kernel, shape.rows * chunks, threads, chunks)


def plan_split_ahead(shape: Shape) -> Plan:
    """Three chunks a block in shared memory, 256 threads, and as many blocks as fit. On an H200 chunks of 32 KB were
    fastest, but of 16 KB for 16-bit rows of up to 512 KB, which take twice the arithmetic a byte. Fewer threads where a
    row would else be one chunk.

    Raises:
        ValueError: the copy engine cannot bring these rows.
    """
    if not can_load_ahead(shape):
        raise ValueError(
            "split_ahead needs sm_90, and rows that start at multiples of 16 bytes and are multiples of 16 bytes long; "
            f"here loads are {shape.vector} bytes wide at most and the GPU is sm_{shape.arch}: use split"
        )
    count, _ = loads(shape)
    per_thread = 4 if ITEMSIZE[shape.element] == 2 and count <= 1 << 15 else 8
    threads = next((t for t in (256, 128, 64) if count > t * per_thread), 32)
    chunks = -(-count // (threads * per_thread))
    kernel = make_split_ahead(shape.element, threads, per_thread)
    return Plan(kernel, shape.rows * chunks, threads, chunks, shared_bytes(threads, per_thread, 3))


PLANS = {"two_pass": plan_two_pass, "one_pass": plan_one_pass, "split": plan_split, "split_ahead": plan_split_ahead}


def resident_blocks(rows: Rows, plan: Plan) -> int:
    """Blocks of a split kernel that the machine runs at once; the emulator runs any number, but each costs."""
    if rows.machine == "emulator":
        return max(plan.chunks, 8)
    key = ("resident", rows.device)
    if key not in plan.kernel.cache:
        args = (rows.x, rows.out, rows.zeros(1))
        ready = launcher.prepare(plan.kernel, args, shared=plan.shared, machine="cuda", device=rows.device)
        plan.kernel.cache[key] = ready.resident_blocks(plan.threads)
    return plan.kernel.cache[key]


def run(rows: Rows, plan: Plan) -> bool:
    """Launch a plan; False if it needs more blocks at once than the machine has, and nothing was launched."""
    if not plan.chunks:
        rows.launch(plan.kernel, min(plan.blocks, 2**31 - 1), plan.threads)
        return True
    resident = resident_blocks(rows, plan)
    if resident < plan.chunks:
        return False
    rows.launch(plan.kernel, min(plan.blocks, resident), plan.threads, shared=plan.shared, scratch=1 + plan.blocks)
    return True


RECIPES = Recipes()


def softmax(x: Any, out: Any = None, *, kernel: str = "auto", machine: str = "auto", stream: Any = None) -> Any:
    """Softmax over the last axis; arguments, result and errors as in the stage softmax, with these kernels.

    Args:
        x: ``[..., N]`` float16, bfloat16 or float32, of any size and any strides: NumPy, torch, CuPy, JAX, numba,
            or what offers ``__cuda_array_interface__`` or DLPack. Leading axes that do not make up rows at one
            distance from each other are copied first.
        out: where to write, of ``x``'s shape and dtype and on its device; ``x`` itself works in place. By default a new
            packed array of ``x``'s kind.
        kernel: one of :data:`KERNELS`, or ``"auto"``: see :func:`choose`.
        machine: ``"cuda"``, ``"emulator"``, or ``"auto"``: where the array is, else a GPU if there is one.
        stream: for a GPU; None follows the current stream of ``x``'s library.

    Returns:
        ``out``. A row of -inf gives zeros; a row with a NaN or +inf gives NaN. Float32 inside.

    Raises:
        TypeError, ValueError: an argument does not fit, or the kernel asked for cannot take rows this long; before
            anything is launched.
    """
    key = rows_key(x, out, kernel, machine, stream)
    known = RECIPES.get(key)
    if known is not None:
        return known(x) if out is None else known(x, out)
    rows: Rows = prepare_rows(x, out, kernel, KERNELS, machine, stream)
    if rows.shape.size:
        name = choose(rows.shape) if kernel == "auto" else kernel
        plan = PLANS[name](rows.shape)
        if not run(rows, plan):
            if kernel != "auto":
                raise ValueError(
                    f"x has rows of {rows.shape.cols} elements, {plan.chunks} chunks; this GPU does not run so many "
                    f"blocks at once as {kernel} needs: use two_pass"
                )
            run(rows, plan_two_pass(rows.shape))
        RECIPES.add(key, of_rows(rows, out))
    return rows.finish()


def compile_cases() -> Iterator[CompileCase]:
    """Kernels as they are launched, for the compiler's tables and gates: the wide loads of every element type, and of
    the narrow ones and of those for sm_75 the kernels that need most registers."""
    from flashnumba.machine.compiler import CompileCase

    wide = [("two_pass", 4096), ("one_pass", 128), ("one_pass", 1000), ("one_pass", 32768), ("split", 262144)]
    groups = [(element, "80", 16, wide) for element in ITEMSIZE]
    groups += [(element, "90", 16, [("split_ahead", 262144)]) for element in ITEMSIZE]
    narrow = [("two_pass", 4096), ("one_pass", 1000), ("one_pass", 8192), ("split", 262144)]
    groups += [("float32", "80", 4, narrow), ("bfloat16", "80", 2, narrow)]
    groups += [("float16", "75", 16, wide[3:]), ("bfloat16", "75", 16, wide[3:])]
    for element, arch, nbytes, names in groups:
        for name, cols in names:
            plan = PLANS[name](Shape(element, 1 << 20, cols, nbytes, arch))
            title = f"online_softmax.{name} {element} {cols} by {nbytes} bytes, sm_{plan.kernel.arch} on"
            more = (types.uint64[::1],) if plan.chunks else ()
            yield CompileCase(title, plan.kernel, signature(element, *more), plan.threads, plan.shared)
