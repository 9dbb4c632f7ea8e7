"""Softmax in three passes over memory: the maximum, the sum, the quotient. CUDA cores, any GPU from sm_75.

Every element is read three times and written once, 3R+1W, in all three kernels; they differ in who reads what::

    warp_per_row    one warp a row: lane l takes columns l, l + 32, ...; lanes meet by shuffles
    block_per_row   one block a row: thread t takes columns t, t + T, ...; warps meet in shared memory
    vectorized      as above, but 16 bytes a load: thread t takes vectors t, t + T, ...

That neighbours in a warp take neighbouring columns is what makes a load cheap: 32 lanes x 2 or 4 bytes are two or four
32-byte sectors side by side. A thread a row would touch 32 sectors for the same 32 elements.

The limits are the reference's: a row of -inf gives zeros, a NaN or +inf gives a row of NaN. All arithmetic is float32.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from flashnumba.machine.function import Kernel, kernel
from flashnumba.machine.instructions import global_address
from flashnumba.machine.numba import cuda, float32, int64, uint32, uint64
from flashnumba.stages.again import Recipes, of_rows, rows_key
from flashnumba.stages.rows import Rows, Shape, prepare_rows
from flashnumba.tiles.elements import ITEMSIZE, arch_of, scalar, vectors
from flashnumba.tiles.online import NOTHING, anchor, exponential, inverse
from flashnumba.tiles.reduce import lanes_max, lanes_sum, make_block_max, make_block_sum

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flashnumba.machine.compiler import CompileCase

__all__ = [
    "KERNELS",
    "choose",
    "compile_cases",
    "make_block_per_row",
    "make_vectorized",
    "make_warp_per_row",
    "softmax",
]

KERNELS = ("warp_per_row", "block_per_row", "vectorized")


@cache
def make_warp_per_row(element: str, warps: int = 4, arch: str = "80", broken: str = "") -> Kernel:
    """One warp a row, ``warps`` rows a block.

    The first rung. Lanes meet by shuffles, five exchanges a reduction, with neither shared memory nor a barrier. Reads
    3, writes 1 element for each element of the result. A long row is one warp's work, while others are idle.

    Args:
        element: float16, bfloat16 or float32.
        arch: below 80 bfloat16 is rounded in integers.
        broken: plants a fault: ``"anchor"`` leaves the maximum out, ``"lanes"`` the last exchange of the sum,
            ``"row"`` takes the wrong stride between rows.
    """
    load, store = scalar(element, arch)
    over_max, over_sum = lanes_max(), lanes_sum(16 if broken == "lanes" else 32)
    no_anchor, row_step = broken == "anchor", 2 if broken == "row" else 1

    @kernel(threads=32 * warps, arch=arch_of(element, arch))
    def warp_per_row(x, out):
        lane = cuda.threadIdx.x & 31
        rows, cols = x.shape
        for row in range(cuda.blockIdx.x * warps + (cuda.threadIdx.x >> 5), rows, cuda.gridDim.x * warps):
            source = row * row_step
            m = float32(NOTHING)
            for col in range(lane, cols, 32):
                m = max(m, load(x, source, col))
            origin = anchor(over_max(m))
            if no_anchor:
                origin = float32(0)
            d = float32(0)
            lost = float32(0)  # what the last sum had no bits for: a lane may add 32768 terms (Kahan)
            for col in range(lane, cols, 32):
                term = exponential(load(x, source, col), origin) - lost
                total = d + term
                lost = (total - d) - term
                d = total
            share = inverse(over_sum(d))
            for col in range(lane, cols, 32):
                store(out, row, col, exponential(load(x, source, col), origin) * share)

    return warp_per_row


@cache
def make_block_per_row(element: str, threads: int = 256, arch: str = "80", broken: str = "") -> Kernel:
    """One block of ``threads`` threads a row.

    Since ``warp_per_row``: the warps of a block share a row and meet in shared memory, at one barrier a reduction.
    Reads and writes are the same 3 and 1; what is bought is that a long row has many loads in flight instead of one
    warp's.

    Args:
        element, arch: as :func:`make_warp_per_row`.
        broken: plants a fault: ``"barrier"`` leaves out the one before the maximum is read, ``"sum"`` the one before
            the sum is, ``"column"`` lets threads take every second column.
    """
    load, store = scalar(element, arch)
    block_max = make_block_max(threads, broken != "barrier")
    block_sum = make_block_sum(threads, broken != "sum")
    step = 2 * threads if broken == "column" else threads

    @kernel(threads=threads, min_blocks=1, arch=arch_of(element, arch))
    def block_per_row(x, out):
        maxima = cuda.shared.array(32, float32)
        sums = cuda.shared.array(32, float32)
        rows, cols = x.shape
        for row in range(cuda.blockIdx.x, rows, cuda.gridDim.x):
            m = float32(NOTHING)
            for col in range(cuda.threadIdx.x, cols, step):
                m = max(m, load(x, row, col))
            # Its barrier also separates the last row's reads of ``sums`` from this row's writes.
            origin = anchor(block_max(maxima, m))
            d = float32(0)
            lost = float32(0)  # as in warp_per_row
            for col in range(cuda.threadIdx.x, cols, step):
                term = exponential(load(x, row, col), origin) - lost
                total = d + term
                lost = (total - d) - term
                d = total
            # Its barrier also separates this row's reads of ``maxima`` from the next row's writes.
            share = inverse(block_sum(sums, d))
            for col in range(cuda.threadIdx.x, cols, step):
                store(out, row, col, exponential(load(x, row, col), origin) * share)

    return block_per_row


@cache
def make_vectorized(
    element: str, threads: int = 256, nbytes: int = 16, arch: str = "80", broken: str = ""
) -> Kernel:  # fmt: skip
    """One block a row, ``nbytes`` bytes a load.

    Since ``block_per_row``: a thread moves 4 float32 or 8 16-bit elements with one instruction, a warp 512 bytes. The
    traffic is the same 3R+1W; what is bought is 4 to 8 times fewer load instructions, and as many more bytes in flight
    for each load that a thread waits for. A vector must lie at a multiple of its size, in every row, and the row must
    be whole vectors: ``nbytes`` is the widest of 16, 8, 4, 2 that allows it. The narrowest, one element, takes any
    column stride.

    Args:
        element, arch: as :func:`make_warp_per_row`.
        nbytes: bytes a vector.
        broken: plants a fault: ``"barrier"`` as :func:`make_block_per_row`, ``"tail"`` reads one vector past the row,
            ``"stride"`` takes the output's row stride for the input's.
    """
    elements, words, pairs, _, load, store, low, high, pack, _ = vectors(element, nbytes, "plain", arch)
    block_max = make_block_max(threads, broken != "barrier")
    block_sum = make_block_sum(threads)
    single, beyond, swapped = nbytes == ITEMSIZE[element], 1 if broken == "tail" else 0, broken == "stride"

    @kernel(threads=threads, arch=arch_of(element, arch))
    def vectorized(x, out):
        maxima = cuda.shared.array(32, float32)
        sums = cuda.shared.array(32, float32)
        raw = cuda.local.array(words, uint32)
        rows, cols = x.shape
        count = cols // elements + beyond
        x_row = out.strides[0] if swapped else x.strides[0]
        x_step = x.strides[1] if single else int64(nbytes)
        out_step = out.strides[1] if single else int64(nbytes)
        for row in range(cuda.blockIdx.x, rows, cuda.gridDim.x):
            source = global_address(x) + uint64(row * x_row)
            target = global_address(out) + uint64(row * out.strides[0])
            m = float32(NOTHING)
            for v in range(cuda.threadIdx.x, count, threads):
                load(raw, 0, source + uint64(v * x_step))
                for i in range(words):
                    m = max(m, low(raw[i]))
                    if pairs:
                        m = max(m, high(raw[i]))
            # The two barriers also separate the rows, as in block_per_row.
            origin = anchor(block_max(maxima, m))
            d = float32(0)
            for v in range(cuda.threadIdx.x, count, threads):
                load(raw, 0, source + uint64(v * x_step))
                part = exponential(low(raw[0]), origin)  # a vector's sum first: fewer roundings of a large sum
                if pairs:
                    part += exponential(high(raw[0]), origin)
                for i in range(1, words):
                    part += exponential(low(raw[i]), origin)
                    if pairs:
                        part += exponential(high(raw[i]), origin)
                d += part
            share = inverse(block_sum(sums, d))
            for v in range(cuda.threadIdx.x, count, threads):
                load(raw, 0, source + uint64(v * x_step))
                for i in range(words):
                    p = exponential(low(raw[i]), origin) * share
                    q = exponential(high(raw[i]), origin) * share if pairs else float32(0)
                    raw[i] = pack(p, q)
                store(target + uint64(v * out_step), raw, 0)

    return vectorized


def choose(shape: Shape) -> str:
    """What ``kernel="auto"`` means: wide loads if a vector holds several elements, else by the length of a row."""
    if shape.vector > ITEMSIZE[shape.element] and shape.cols * ITEMSIZE[shape.element] >= 512:
        return "vectorized"
    return "warp_per_row" if shape.cols <= 1024 else "block_per_row"


def threads_for(loads: int) -> int:
    """Threads a block for a row of so many loads: about four each, 32 to 1024."""
    return min(1024, max(32, 1 << (max(1, -(-loads // 4)) - 1).bit_length()))


def make(name: str, shape: Shape) -> tuple[Kernel, int, int]:
    """(kernel, blocks, threads a block) of one of :data:`KERNELS` for a shape."""
    if name == "warp_per_row":
        warps = 4 if shape.rows >= 4 else 1
        return make_warp_per_row(shape.element, warps, shape.arch), -(-shape.rows // warps), 32 * warps
    if name == "block_per_row":
        threads = threads_for(shape.cols)
        return make_block_per_row(shape.element, threads, shape.arch), shape.rows, threads
    threads = threads_for(shape.cols * ITEMSIZE[shape.element] // shape.vector)
    return make_vectorized(shape.element, threads, shape.vector, shape.arch), shape.rows, threads


RECIPES = Recipes()


def softmax(x: Any, out: Any = None, *, kernel: str = "auto", machine: str = "auto", stream: Any = None) -> Any:
    """Softmax over the last axis.

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
        TypeError, ValueError: an argument does not fit; before anything is launched.
    """
    key = rows_key(x, out, kernel, machine, stream)
    known = RECIPES.get(key)
    if known is not None:
        return known(x) if out is None else known(x, out)
    rows: Rows = prepare_rows(x, out, kernel, KERNELS, machine, stream)
    if rows.shape.size:
        name = choose(rows.shape) if kernel == "auto" else kernel
        made, blocks, threads = make(name, rows.shape)
        rows.launch(made, min(blocks, 2**31 - 1), threads)
        RECIPES.add(key, of_rows(rows, out))
    return rows.finish()


def compile_cases() -> Iterator[CompileCase]:
    """Kernels as they are launched, for the compiler's tables and gates."""
    from flashnumba.machine.compiler import CompileCase
    from flashnumba.stages.rows import signature

    for element, itemsize in ITEMSIZE.items():
        two = signature(element)
        yield CompileCase(f"softmax.warp_per_row {element}", make_warp_per_row(element), two, 128)
        yield CompileCase(f"softmax.block_per_row {element}", make_block_per_row(element), two, 256)
        for nbytes in (16, itemsize):
            made = make_vectorized(element, 256, nbytes)
            yield CompileCase(f"softmax.vectorized {element} by {nbytes} bytes", made, two, 256)
    made = make_vectorized("bfloat16", 256, 16, "75")
    yield CompileCase("softmax.vectorized bfloat16 by 16 bytes, rounded in integers", made, signature("bfloat16"), 256)
