"""Tensor cores by ``mma.sync``: a ring of shared-memory slots filled ahead, fragments loaded one step ahead.

A block owns ``bm x bn`` of C, a warp ``wm x wn`` of that, in registers. k comes in tiles of ``bk``. While the tensor
cores multiply 16 of them, the registers for the next 16 are loaded, and the tiles after that are on their way from
memory, one slot each::

    slot of tile t      read, 16 k at a time: fragments of step s + 1 travel under the products of step s
    slots of t + 1 ...  being filled by cp.async, which needs no registers
    last step of t      wait for tile t + 1 | barrier | fragments of t + 1, step 0 | start tile t + slots | products

The one barrier a tile says two things: tile t + 1 is there for all, and nobody reads tile t any more (its last
fragments were loaded a step ago), so its slot may be filled again. It stands in the middle of the products, and the
copies behind it, so that neither leaves the tensor cores without work.

What changed since ``register_tile``: 4096 multiplications an instruction instead of one; a fragment is 16-bit and lies
across a warp, so that an element of shared memory is read ``wm`` or ``wn`` times less often; copies do not pass through
registers; chunks are swizzled instead of padded (:mod:`flashnumba.tiles.swizzle`).

Bytes from shared memory a step of 16 k: each warp reads (wm + wn) * 32. A 64 x 64 warp tile does 131072 operations for
4096 bytes; a multiprocessor of sm_90 delivers them in 32 cycles and computes for about 50.

On sm_75 there is no cp.async and no m16n8k16: copies go through registers, two slots do, and a step is two m16n8k8.

Source: CUTLASS, ``include/cutlass/gemm/threadblock/mma_multistage.h``; the "multistage" pipeline there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from flashnumba.machine.function import DeviceFunction, Kernel, device, kernel
from flashnumba.machine.instructions import (
    cp_async_commit,
    cp_async_wait,
    global_address,
    mma_m16n8k8_f16,
    mma_m16n8k16_bf16,
    mma_m16n8k16_f16,
    shared_address,
)
from flashnumba.machine.numba import cuda, float32, int32, int64, uint8, uint32, uint64
from flashnumba.tiles.move import make_mover
from flashnumba.tiles.operands import make_operand
from flashnumba.tiles.raster import make_raster
from flashnumba.tiles.writeback import make_writeback

__all__ = ["Tiles", "make_mma"]


@dataclass(frozen=True)
class Tiles:
    """Sizes of the kernel.

    Attributes:
        bm, bn, bk: a block's tile of C, and how much of k a slot holds.
        wm, wn: a warp's tile of C.
        slots: of the ring.
        band: rows of tiles that neighbouring blocks share, see :mod:`flashnumba.tiles.raster`.
        min_blocks: blocks a multiprocessor that the registers must leave room for.

    Raises:
        ValueError: sizes that do not go together; the message says which.
    """

    bm: int = 128
    bn: int = 256
    bk: int = 32
    wm: int = 64
    wn: int = 64
    slots: int = 4
    band: int = 8
    min_blocks: int = 1

    def __post_init__(self) -> None:
        for name in ("bm", "bn", "bk", "wm", "wn"):
            value = getattr(self, name)
            if value < 16 or value & (value - 1):
                raise ValueError(f"{name} is {value}; it must be a power of two from 16 on, so that chunks pair off")
        if self.bk < 32:
            raise ValueError(
                f"bk is {self.bk}; it must be 32 or more: two steps of 16, one multiplied while one is loaded"
            )
        if self.wm > self.bm or self.wn > self.bn:
            raise ValueError(f"a warp's {self.wm} x {self.wn} is more than the block's {self.bm} x {self.bn}")
        if not 2 <= self.slots <= 8:
            raise ValueError(f"slots is {self.slots}; it must be 2 to 8")
        if self.registers > 224:
            raise ValueError(
                f"a warp's {self.wm} x {self.wn} takes {self.registers} registers a thread for accumulators and two "
                "sets of fragments; 224 leave room for addresses"
            )
        if self.threads > 1024 or self.threads * 8 > min(self.bm, self.bn) * self.bk:
            raise ValueError(
                f"{self.threads} threads; a block has at most 1024, each with a chunk of 8 elements of either tile"
            )

    @property
    def threads(self) -> int:
        return self.bm // self.wm * (self.bn // self.wn) * 32

    @property
    def registers(self) -> int:
        """Accumulators and two sets of fragments, a thread."""
        return self.wm * self.wn // 32 + self.wm // 2 + self.wn // 2

    @property
    def slot_bytes(self) -> int:
        return (self.bm + self.bn) * self.bk * 2

    @property
    def shared(self) -> int:
        """Dynamic shared memory: the ring, in whose place C is written at the end, and room to align it."""
        return 128 + max(self.slots * self.slot_bytes, self.bm * self.bn * 2)


def _multiply_16(element: str, native: bool) -> DeviceFunction:
    """``multiply_16(acc, acc_at, a, a_at, b, b_at)``: 16 x 8 by 16 k."""
    whole = {"float16": mma_m16n8k16_f16, "bfloat16": mma_m16n8k16_bf16}[element]

    @device
    def one(acc, acc_at, a, a_at, b, b_at):
        whole(acc, acc_at, a, a_at, b, b_at)

    @device
    def two_halves(acc, acc_at, a, a_at, b, b_at):
        mma_m16n8k8_f16(acc, acc_at, a, a_at, b, b_at)
        mma_m16n8k8_f16(acc, acc_at, a, a_at + 2, b, b_at + 1)

    return one if native else two_halves


def _groups(native: bool, slots: int, waits: bool) -> tuple[DeviceFunction, DeviceFunction, DeviceFunction]:
    """``commit``, ``wait_next`` (for all but the newest ``slots - 2`` tiles) and ``wait_all``."""
    all_but_later, all_groups = cp_async_wait(slots - 2), cp_async_wait(0)

    @device
    def nothing():
        pass

    @device
    def commit():
        cp_async_commit()

    @device
    def wait_next():
        all_but_later()

    @device
    def wait_all():
        all_groups()

    if not native:
        return nothing, nothing, nothing
    return commit, wait_next if waits else nothing, wait_all


@device
def _left(extent, first, tile):
    """How much of a tile that begins at ``first`` lies within ``extent``."""
    return int32(max(int64(0), min(int64(tile), int64(extent) - int64(first))))


@cache
def make_mma(
    element: str, tiles: Tiles, a_major: str = "k", b_major: str = "n", width_a: int = 16, width_b: int = 16,
    width_c: int = 16, *, arch: str = "80", broken: str = "",
) -> Kernel:  # fmt: skip
    """The kernel ``(a, b, c)``; it takes one block for each tile of C.

    Args:
        element: float16, or from sm_80 on bfloat16.
        a_major, b_major: see :mod:`flashnumba.stages.gemm.problem`.
        width_a, width_b: bytes a copy, at whose multiples every line starts. Copies through registers (2 bytes, or
            sm_75) need lines that consist of whole ones too.
        width_c: bytes a store, at whose multiples every row of C starts and of which it consists.
        arch: ``"75"``, or what it is declared for from 80 on.
        broken: plants a fault: ``"barrier"`` (none between tiles), ``"wait"`` (none for copies), ``"slot"`` (copies go
            to the slot that is read next), ``"drain"`` (C overwrites the ring while it is read), ``"lanes"`` (a warp's
            lanes do not wait for each other's part of C), ``"swizzle"`` (B is read as if not swizzled), ``"stride"``
            (A's lines are taken to be as far apart as its elements), ``"tail"`` (nothing is masked).

    Raises:
        ValueError: what this architecture or these sizes cannot do.
    """
    native = arch != "75"
    if element != "float16" and (element != "bfloat16" or not native):
        raise ValueError(f"mma of {element} on sm_{arch}; it multiplies float16, and from sm_80 on bfloat16")
    bm, bn, bk, wm, wn, slots = tiles.bm, tiles.bn, tiles.bk, tiles.wm, tiles.wn, tiles.slots
    threads, across, steps = tiles.threads, bn // wn, bk // 16
    a_bytes, slot_bytes, ring_bytes = bm * bk * 2, tiles.slot_bytes, slots * tiles.slot_bytes
    a_along_k, b_along_k = a_major == "k", b_major == "k"
    how = {"through_registers": not native, "masked": broken != "tail"}
    move_a = make_mover(*((bm, bk // 8) if a_along_k else (bk, bm // 8)), threads, width_a, **how)
    move_b = make_mover(*((bn, bk // 8) if b_along_k else (bk, bn // 8)), threads, width_b, **how)
    start_a, finish_a, start_b, finish_b = move_a.start, move_a.finish, move_b.start, move_b.finish
    own_a, own_b = move_a.own, move_b.own
    raw_b, raw_words = move_a.registers, max(1, move_a.registers + move_b.registers)
    part_a = make_operand("a", a_along_k, wm, bm, bk)
    part_b = make_operand("b", b_along_k, wn, bn, bk, swizzled=broken != "swizzle")
    locate_a, load_a, a_words, a_offsets = part_a.locate, part_a.load, part_a.registers, part_a.offsets
    locate_b, load_b, b_words, b_offsets = part_b.locate, part_b.load, part_b.registers, part_b.offsets
    two_a, two_b, m_frags, n_frags = 2 * a_words, 2 * b_words, wm // 16, wn // 8
    accumulators = 4 * m_frags * n_frags
    multiply_16 = _multiply_16(element, native)
    commit, wait_next, wait_all = _groups(native, slots, broken != "wait")
    raster = make_raster(tiles.band)
    write_warp = make_writeback(element, wm, wn, width_c, arch, ordered=broken != "lanes")
    meets, drains, early = broken != "barrier", broken != "drain", broken == "slot"
    a_line, b_line = (0 if a_along_k else 1), (1 if b_along_k else 0)  # the axis that counts lines
    a_packed = a_line if broken != "stride" else 1 - a_line

    @device
    def start_tile(raw, slot, source_a, lead_a, source_b, lead_b, rows, cols, depth):
        """Begin to fill a slot; of the tile ``rows`` x ``depth`` of A and ``depth`` x ``cols`` of B exist."""
        if a_along_k:
            start_a(raw, 0, slot, source_a, lead_a, rows, int32(2 * depth))
        else:
            start_a(raw, 0, slot, source_a, lead_a, depth, int32(2 * rows))
        if b_along_k:
            start_b(raw, raw_b, slot + uint32(a_bytes), source_b, lead_b, cols, int32(2 * depth))
        else:
            start_b(raw, raw_b, slot + uint32(a_bytes), source_b, lead_b, depth, int32(2 * cols))
        commit()

    @device
    def finish_tile(raw, slot):
        finish_a(raw, 0, slot)
        finish_b(raw, raw_b, slot + uint32(a_bytes))

    @device
    def following(slot):
        """The slot after one, both as offsets in the ring."""
        further = uint32(slot + uint32(slot_bytes))
        return uint32(0) if further == uint32(ring_bytes) else further

    @device
    def load_fragments(fa, fb, half, slot, offset_a, offset_b, step):
        load_a(fa, half * a_words, slot, offset_a, step)
        load_b(fb, half * b_words, slot + uint32(a_bytes), offset_b, step)

    @device
    def multiply(acc, fa, fb, half):
        """acc += A B for 16 k of the warp's tile."""
        for i in range(m_frags):
            for j in range(n_frags):
                multiply_16(acc, 4 * (i * n_frags + j), fa, half * a_words + 4 * i, fb, half * b_words + 2 * j)

    @kernel(threads=threads, min_blocks=tiles.min_blocks, arch=arch)
    def mma(a, b, c):
        smem = cuda.shared.array(0, uint8)
        acc = cuda.local.array(accumulators, float32)
        fa = cuda.local.array(two_a, uint32)
        fb = cuda.local.array(two_b, uint32)
        offset_a = cuda.local.array(a_offsets, uint32)
        offset_b = cuda.local.array(b_offsets, uint32)
        raw = cuda.local.array(raw_words, uint32)
        ring = uint32((shared_address(smem) + uint32(127)) & uint32(0xFFFFFF80))
        m, k = a.shape
        n = b.shape[1]
        tile_row, tile_col = raster(cuda.blockIdx.x, uint32((m + bm - 1) // bm), uint32((n + bn - 1) // bn))
        row0, col0 = int64(tile_row) * bm, int64(tile_col) * bn
        warp = uint32(cuda.threadIdx.x >> 5)
        warp_row, warp_col = uint32(warp // uint32(across) * uint32(wm)), uint32(warp % uint32(across) * uint32(wn))
        rows, cols = _left(m, row0, bm), _left(n, col0, bn)
        # Of a single line the stride may be anything; rounded, even what is not read lies at an aligned address.
        lead_a, lead_b = a.strides[a_packed] & -width_a, b.strides[b_line] & -width_b
        source_a = own_a(global_address(a) + uint64(row0 * (lead_a if a_along_k else 2)), lead_a)
        source_b = own_b(global_address(b) + uint64(col0 * (lead_b if b_along_k else 2)), lead_b)
        step_a, step_b = bk * (2 if a_along_k else lead_a), bk * (2 if b_along_k else lead_b)
        for i in range(accumulators):
            acc[i] = float32(0)
        locate_a(offset_a, warp_row)
        locate_b(offset_b, warp_col)

        fill, started = uint32(0), int64(0)
        for s in range(slots):
            if s > 0:
                finish_tile(raw, ring + fill)
                fill = following(fill)
            start_tile(raw, ring + fill, source_a, lead_a, source_b, lead_b, rows, cols, _left(k, started, bk))
            source_a, source_b, started = source_a + uint64(step_a), source_b + uint64(step_b), started + bk
        wait_next()
        cuda.syncthreads()  # tile 0 is there for all
        read = uint32(0)
        load_fragments(fa, fb, 0, ring, offset_a, offset_b, 0)

        for _ in range((k + bk - 1) // bk):
            for s in range(steps):
                if s == steps - 1:
                    finish_tile(raw, ring + (read if early else fill))
                    wait_next()
                    if meets:
                        cuda.syncthreads()  # the next tile is there for all; nobody reads this one's slot any more
                    read, fill = following(read), following(fill)
                load_fragments(fa, fb, (s + 1) & 1, ring + read, offset_a, offset_b, (s + 1) % steps)
                if s == steps - 1:
                    target = ring + (read if early else fill)
                    start_tile(raw, target, source_a, lead_a, source_b, lead_b, rows, cols, _left(k, started, bk))
                    source_a, source_b, started = source_a + uint64(step_a), source_b + uint64(step_b), started + bk
                multiply(acc, fa, fb, s & 1)

        wait_all()
        if drains:
            cuda.syncthreads()  # nobody copies into the ring or reads it any more; it becomes the place of C
        write_warp(ring + warp * uint32(2 * wm * wn), acc, c, row0 + int64(warp_row), col0 + int64(warp_col))

    return mma
