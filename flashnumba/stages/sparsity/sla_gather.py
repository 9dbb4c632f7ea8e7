"""Sums of SLA's states over the lists of row tiles, as one matrix product for each head: H = W h.

Row i of W is 2^-s where tile j is in the linear part of row tile i, and else 0. So sums over all lists are a product
of a 0/1 matrix ``[T, T]`` with the states ``[T, D (D + 1)]``. Each sum by itself would read T D^2 numbers for each of T
row tiles, which is bound by memory: at 64k tokens 10 GB a head, where dense attention takes 7 ms in all. On tensor
cores it is D N^2 / 16 multiply-adds for N tokens, a 32nd of the two products of dense attention, and each state is read
once for each 128 row tiles. Sums are exact in the 0/1 matrix, float32 inside, and rounded once.

Heads of queries that share one of keys share its states: rows of W are then the row tiles of the whole group, one head
after the other, and in the gradient the same product sums over the group.

The authors add up the smaller set, or take it from the total; here that saves nothing. The gradient needs the same
product with W transposed: dh = W^T dH.

On sm_90a the product is ``wgmma``'s, :func:`flashnumba.stages.gemm.warp_specialised.make_wgmma` for all heads at once:
at 16k tokens it is then bound by the bytes of states and sums. Elsewhere it is :func:`make_gather`.

Source: arXiv 2509.24006, section 5 and appendix (sums of states); the matrix product is our own.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from flashnumba.machine.arrays import describe, host_view, packed
from flashnumba.machine.function import Kernel, device, kernel
from flashnumba.machine.instructions import cp_async_commit, cp_async_wait, shared_address
from flashnumba.machine.numba import cuda, float32, int64, types, uint8, uint32
from flashnumba.machine.tensor_map import TensorMap
from flashnumba.stages.gemm.warp_specialised import PANEL, Tiles, make_wgmma
from flashnumba.stages.gemm.waves import multiprocessors
from flashnumba.stages.heads import Launch, Shape
from flashnumba.stages.sparsity.sla_pieces import address_of, piece_of, width_of
from flashnumba.stages.sparsity.sla_reference import BLOCK
from flashnumba.tiles.copy_tile import make_copy_tile
from flashnumba.tiles.forward import tier
from flashnumba.tiles.operands import make_operand
from flashnumba.tiles.sizes import ALIGNMENT
from flashnumba.tiles.tensor import make_multiply
from flashnumba.tiles.writeback import make_writeback

__all__ = ["ALIASES", "GATHER_SHARED", "GATHER_THREADS", "MAPS", "NUMBERS", "arguments", "make_gather", "plan_gather"]

GATHER_TILE = 128
"""Rows and columns of H a block of :func:`make_gather`."""
DEPTH, SLOTS, GATHER_WARPS = 32, 3, 8
GATHER_THREADS = 32 * GATHER_WARPS
GATHER_SHARED = ALIGNMENT + max(SLOTS * 2 * DEPTH * 2 * GATHER_TILE, 2 * GATHER_TILE * GATHER_TILE)
WGMMA = Tiles(128, 256, slots=4)
MAPS = {
    "weights map": ("weights", WGMMA.bm), "states map": ("states", PANEL), "sums map": ("sums", 16),
    "weights map back": ("weights", PANEL), "dsums map": ("dsums", PANEL), "dstates map": ("dstates", 16),
}  # fmt: skip
"""Tensor maps that ``wgmma`` takes: of which array, and how many rows a box has."""
OF_GROUPS = {f"{name} of groups": name for name in ("weights", "sums", "dsums")}
"""Arrays ``[B, H, row tiles, ...]`` as ``gather`` sees them, ``[B, Hkv, H / Hkv * row tiles, ...]``: of which they are
views."""
ALIASES = {name: array for name, (array, _) in MAPS.items()} | OF_GROUPS
NUMBERS = ("gather rows", "gather columns", "gather depth", "gather rows back", "gather depth back", "heads", "batches")
"""Its numbers, uint32: tiles of H down and across, and of the depth; and the same for the product with W^T."""


def plan_gather(shape: Shape, transposed: bool) -> Launch:
    """The launch for all heads; ``transposed``: that of the gradients."""
    (down, across), length = tiles_of_groups(shape), state_of(shape)
    rows, heads = across if transposed else down, shape.batch * shape.kv_heads
    name = "sparsity.sla gather back" if transposed else "sparsity.sla gather"
    if shape.arch == "90a":
        made = make_wgmma(shape.element, WGMMA, "m" if transposed else "k", batched=name)
        blocks = -(-rows // WGMMA.bm) * -(-length // WGMMA.bn) * heads
        maps, numbers = tuple(MAPS), NUMBERS[:3]
        if transposed:
            maps, numbers = maps[3:], ("gather rows back", "gather columns", "gather depth back")
        args = (*maps[:3], *numbers, "heads", "batches")
        return Launch(made, min(blocks, multiprocessors()), WGMMA.threads, WGMMA.shared, args)
    args = ("weights of groups", "dsums of groups", "dstates")
    if not transposed:
        args = ("weights of groups", "states", "sums of groups")
    blocks = -(-rows // GATHER_TILE) * -(-length // GATHER_TILE) * heads
    made = make_gather(shape.element, transposed, tier(shape.arch))
    return Launch(made, blocks, GATHER_THREADS, GATHER_SHARED, args)


def reshaped(array: Any, shape: tuple[int, ...]) -> Any:
    """A packed array with another shape of as many numbers, as kernels take it; who calls it keeps the array."""
    found = describe(array)
    if found.device is None:
        return host_view(array).reshape(shape)
    if found.kind in ("torch-cuda", "cupy"):
        return array.reshape(shape)
    return replace(found, shape=shape, strides=packed(shape, found.dtype.itemsize), kind="numba")


def tiles_of_groups(shape: Shape) -> tuple[int, int]:
    """Row tiles of a group's heads, and key tiles."""
    return shape.group * -(-shape.m // BLOCK), -(-shape.n // BLOCK)


def state_of(shape: Shape) -> int:
    """Numbers of a state."""
    width = width_of(shape.d)
    return width * (width + 1)


def arguments(shape: Shape, known: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """Those of ``names`` that are views by groups, or maps or numbers of ``wgmma``; ``known`` has the arrays."""
    (i, j), length = tiles_of_groups(shape), state_of(shape)

    def by_groups(name: str) -> Any:
        array = known[name]
        if shape.group == 1 or name not in OF_GROUPS.values():
            return array
        return reshaped(array, (shape.batch, shape.kv_heads, i, array.shape[-1]))

    found: dict[str, Any] = {name: by_groups(of) for name, of in OF_GROUPS.items() if name in names}
    found |= {
        name: TensorMap(by_groups(of), (1, 1, rows, PANEL), element=shape.element, name=of)
        for name, (of, rows) in MAPS.items()
        if name in names
    }
    sizes = (-(-i // WGMMA.bm), -(-length // WGMMA.bn), -(-j // PANEL), -(-j // WGMMA.bm), -(-i // PANEL),
             shape.kv_heads, shape.batch)  # fmt: skip
    return found | {name: np.uint32(size) for name, size in zip(NUMBERS, sizes, strict=True) if name in names}


def numba_types() -> dict[str, Any]:
    """Types of what :func:`arguments` gives."""
    return dict.fromkeys(MAPS, types.uint64) | dict.fromkeys(NUMBERS, types.uint32)


@cache
def make_gather(element: str, transposed: bool = False, arch: str = "80", *, broken: str = "") -> Kernel:
    """``(w, states, sums)``: sums = W states, head by head; W ``[B, H, T, U]``, states ``[B, H, U, L]``, sums ``[B, H,
    T, L]``, all packed with rows at multiples of 16 bytes; W's rows may be longer than U. Or W^T: then W is ``[B, H, U,
    T]``, with longer rows than T perhaps.

    A block for each :data:`GATHER_TILE` rows and columns of sums, :data:`GATHER_THREADS` threads and
    :data:`GATHER_SHARED` bytes. Blocks that have the same columns follow one another, so that states come from L2.

    Args:
        broken: plants ``"wait"``, ``"barrier"``, ``"slot"`` (copies go where others read), ``"reuse"`` or ``"tail"``.
    """
    side, across = GATHER_TILE, 2
    wm, wn = side // (GATHER_WARPS // across), side // across
    part_a = make_operand("a", not transposed, wm, side, DEPTH)
    part_b = make_operand("b", False, wn, side, DEPTH)
    locate_a, load_a, a_words, a_offsets = part_a.locate, part_a.load, part_a.registers, part_a.offsets
    locate_b, load_b, b_words, b_offsets = part_b.locate, part_b.load, part_b.registers, part_b.offsets
    a_frags, b_frags, steps = wm // 16, wn // 8, DEPTH // 16
    regs, product = 4 * a_frags * b_frags, make_multiply(element, arch)
    lines, length = (DEPTH, side) if transposed else (side, DEPTH)
    copy_a = make_copy_tile(lines, length, GATHER_THREADS, 16, arch)
    copy_b = make_copy_tile(DEPTH, side, GATHER_THREADS, 16, arch)
    write = make_writeback(element, wm, wn, 16, arch)
    a_bytes = 2 * side * DEPTH
    slot_bytes = 2 * a_bytes
    wait_next, wait_all = cp_async_wait(SLOTS - 2), cp_async_wait(0)
    waits, meets, early, frees, whole = (broken != x for x in ("wait", "barrier", "slot", "reuse", "tail"))

    @device
    def copy_step(slot, w, states, w_from, states_from, row0, col0, first, rows, depth):
        """What is multiplied of the depth from ``first`` on; nothing beyond it."""
        if first < depth:
            left = depth - first if whole else int64(DEPTH)
            if transposed:
                source = w_from + first * w.strides[2] + int64(2) * row0
                copy_a(slot, source, w.strides[2], int64(2), left, rows - row0)
            else:
                source = w_from + row0 * w.strides[2] + int64(2) * first
                copy_a(slot, source, w.strides[2], int64(2), rows - row0, left)
            source = states_from + first * states.strides[2] + int64(2) * col0
            copy_b(slot + uint32(a_bytes), source, states.strides[2], int64(2), left, states.shape[3] - col0)
        cp_async_commit()

    name = "sparsity.sla gather back" if transposed else "sparsity.sla gather"

    @kernel(threads=GATHER_THREADS, min_blocks=2, arch=arch, name=name)
    def gather(w, states, sums):
        smem = cuda.shared.array(0, uint8)
        ring = (shared_address(smem) + uint32(ALIGNMENT - 1)) & uint32(0x100000000 - ALIGNMENT)
        warp = uint32(cuda.threadIdx.x >> 5)
        rows, depth = sums.shape[2], states.shape[2]
        row_tiles, col_tiles = (rows + (side - 1)) // side, (sums.shape[3] + (side - 1)) // side
        batch, head, tile = piece_of(cuda.blockIdx.x, row_tiles * col_tiles, sums.shape[1])
        row0, col0 = tile % row_tiles * side, tile // row_tiles * side
        w_from, states_from = address_of(w, batch, head, int64(0)), address_of(states, batch, head, int64(0))
        a = cuda.local.array(a_words, uint32)
        b = cuda.local.array(b_words, uint32)
        from_a = cuda.local.array(a_offsets, uint32)
        from_b = cuda.local.array(b_offsets, uint32)
        c = cuda.local.array(regs, float32)
        for i in range(regs):
            c[i] = float32(0)
        warp_row, warp_col = warp // uint32(across) * uint32(wm), warp % uint32(across) * uint32(wn)
        locate_a(from_a, warp_row)
        locate_b(from_b, warp_col)
        for s in range(SLOTS - 1):
            slot = ring + uint32(s * slot_bytes)
            copy_step(slot, w, states, w_from, states_from, row0, col0, int64(s * DEPTH), rows, depth)
        here, there = uint32(0), uint32((SLOTS - 1) * slot_bytes)
        for first in range(int64(0), depth, int64(DEPTH)):
            if waits:
                wait_next()
            if meets:
                cuda.syncthreads()  # this step's tiles are there for all, and nobody reads those of the one before
            target = ring + (there if early else here)
            ahead = first + (SLOTS - 1) * DEPTH
            copy_step(target, w, states, w_from, states_from, row0, col0, ahead, rows, depth)
            for s in range(steps):
                load_a(a, 0, ring + here, from_a, s)
                load_b(b, 0, ring + here + uint32(a_bytes), from_b, s)
                for i in range(a_frags):
                    for j in range(b_frags):
                        product(c, 4 * (i * b_frags + j), a, 4 * i, b, 2 * j)
            there = here
            here = uint32(0) if here == uint32((SLOTS - 1) * slot_bytes) else here + uint32(slot_bytes)
        wait_all()
        if frees:
            cuda.syncthreads()  # nobody reads the ring any more; it becomes the place of the result
        write(
            ring + warp * uint32(2 * wm * wn), c, sums[batch, head], row0 + int64(warp_row), col0 + int64(warp_col)
        )  # fmt: skip

    return gather
