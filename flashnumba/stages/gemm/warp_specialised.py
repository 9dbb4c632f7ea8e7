"""Tensor cores by ``wgmma`` (sm_90a): one warpgroup moves tiles, the others multiply them, blocks stay for many tiles.

A block owns ``bm x bn`` of C at a time. Its warpgroups have roles:

    warpgroup 0     producer    one thread hands tiles of A and B to the copy engine, slot by slot
    warpgroups 1..  consumers   each multiplies its own rows of A by all of B, 64 rows an instruction

    slot s:   producer --full[s], by the bytes that came--> consumers --empty[s], one arrival each--> producer

Both operands stay in shared memory: an instruction names them by descriptors, reads each element of B once for 64 rows,
and leaves its product in the consumers' registers, which the producer gives up for that. A consumer keeps one group of
products in flight: it starts those of a slot, waits for those of the slot before, and lets that one go. ::

    wait full[s] | start 4 products of 16 k | wait for the last slot's 4 | arrive empty[s - 1]

Blocks are as many as the GPU runs at once, and walk over the tiles of C. The producer is not bound to a tile: while
consumers round and store one, the slots fill with the next. A warp lays its 16 rows down in shared memory of its own,
in panels of 64 columns taken in turn, and the copy engine carries them away: no warp waits for another one.

What lies beyond a matrix the copy engine reads as zeros and does not write, so there are no tails.

Bytes from shared memory for 64 x 256 x 16: 10 KB, 80 of the 128 cycles that the product takes. From L2 a slot of
128 x 256 takes 48 KB and 1024 cycles.

What changed since ``mma``: no thread computes an address of an operand or holds one in registers; an element of B is
read from shared memory once for 64 rows, not for each 64 x 64; stores run beside the next tile. Its limit: every line
starts at a multiple of 16 bytes.

Source: CUTLASS, ``sm90_mma_tma_gmma_ss_warpspecialized.hpp`` and ``sm90_gemm_tma_warpspecialized_cooperative.hpp``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from flashnumba.machine.function import Kernel, device, kernel
from flashnumba.machine.instructions import (
    bulk_wait,
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    setmaxnreg_dec,
    setmaxnreg_inc,
    shared_address,
    tma_load_2d,
    tma_load_4d,
    tma_prefetch,
    wgmma,
    wgmma_commit,
    wgmma_fence,
    wgmma_wait,
)
from flashnumba.machine.numba import cuda, float32, int32, uint8, uint32, uint64
from flashnumba.tiles.descriptor import descriptor
from flashnumba.tiles.panels import COLUMNS as PANEL
from flashnumba.tiles.panels import PANEL_BYTES, make_panel_store
from flashnumba.tiles.raster import make_raster
from flashnumba.tiles.ring import make_after

__all__ = ["PANEL", "Tiles", "make_wgmma"]

PRODUCER_REGISTERS = 24
BLOCK_SHARED = 227 * 1024


@dataclass(frozen=True)
class Tiles:
    """Sizes of the kernel.

    Attributes:
        bm, bn: a block's tile of C.
        slots: of the ring, each with 64 of k.
        consumers: warpgroups that multiply; each has ``bm / consumers`` rows.
        band: rows of tiles that neighbouring blocks share, see :mod:`flashnumba.tiles.raster`.
        panels: of 16 rows x 64 columns of C that a warp has in shared memory at once, 2 KB each.
        columns: of B that one instruction multiplies; all if 0. One of 256 takes more registers than 3 consumers
            are compiled for.

    Raises:
        ValueError: sizes that do not go together; the message says which.
    """

    bm: int = 128
    bn: int = 256
    slots: int = 4
    consumers: int = 2
    band: int = 16
    panels: int = 2
    columns: int = 0

    def __post_init__(self) -> None:
        if self.consumers not in (2, 3) or self.bm % (64 * self.consumers) or self.bm > 256:
            raise ValueError(
                f"bm is {self.bm} for {self.consumers} consumers; 2 or 3 have equally many times 64 rows, 256 in all "
                "at most"
            )
        if self.bn % PANEL or not PANEL <= self.bn <= 256 or self.bn % self.wide or self.wide % PANEL:
            raise ValueError(
                f"bn is {self.bn}, {self.wide} an instruction; they must be multiples of {PANEL} up to 256, the first "
                "of the second"
            )
        if self.accumulators + 24 > self.registers:
            raise ValueError(
                f"{self.bm} x {self.bn} by {self.consumers} consumers is {self.accumulators} accumulators a thread; "
                f"it may have {self.registers} registers"
            )
        if not 2 <= self.slots <= 8 or not 1 <= self.panels <= 8 or self.shared > BLOCK_SHARED:
            raise ValueError(
                f"{self.slots} slots of {self.slot_bytes} bytes, {self.panels} panels a warp: {self.shared} bytes of "
                f"shared memory; it must be 2 to 8 slots, 1 to 8 panels, and {BLOCK_SHARED} bytes at most"
            )

    @property
    def threads(self) -> int:
        return 128 * (1 + self.consumers)

    @property
    def wide(self) -> int:
        """Columns of B an instruction."""
        return self.columns or self.bn

    @property
    def accumulators(self) -> int:
        """float32 registers a thread of a consumer."""
        return self.bm // self.consumers // 64 * self.bn // 2

    @property
    def registers(self) -> int:
        """What a consumer's thread gets of what the launch and the producer leave."""
        launched = 65536 // self.threads // 8 * 8
        return min(240, (launched * (1 + self.consumers) - PRODUCER_REGISTERS) // self.consumers // 8 * 8)

    @property
    def slot_bytes(self) -> int:
        return (self.bm + self.bn) * PANEL * 2

    @property
    def shared(self) -> int:
        """Dynamic shared memory: room to align, the ring, panels of C, the mbarriers."""
        return 1024 + self.slots * self.slot_bytes + self.consumers * 4 * PANEL_BYTES * self.panels + 16 * self.slots


@cache
def make_wgmma(
    element: str, tiles: Tiles, a_major: str = "k", b_major: str = "n", *, batched: str = "", broken: str = ""
) -> Kernel:  # fmt: skip
    """The kernel ``(a, b, c, rows, cols, depth)``: three tensor maps, and C's tiles down, across, and k in slots.

    Boxes are ``[bm, 64]`` of A ``[M, K]``, or ``[64, 64]`` of its transpose where it is m-major; ``[bn, 64]`` of B's
    transpose ``[N, K]``, or ``[64, 64]`` of B where it is n-major; ``[16, 64]`` of C; all with the 128-byte swizzle.

    Args:
        element: float16 or bfloat16.
        a_major, b_major: see :mod:`flashnumba.stages.gemm.problem`.
        batched: the name of a kernel for many products, ``(a, b, c, rows, cols, depth, heads, batches)``: maps have two
            axes more in front, batches and heads, and boxes one of either.
        broken: plants a fault: ``"full"``, ``"empty"``, ``"wait"`` and ``"store"`` leave out a wait (for a slot's
            bytes, for a slot to be free, for the products, for a panel to be taken away), ``"fence"`` the fence before
            the products, ``"proxy"`` that before the copy engine reads C, ``"lanes"`` the barrier of the warp there,
            ``"release"`` lets a slot go while products read it, ``"bytes"`` expects too few, ``"init"`` leaves out the
            barrier after the mbarriers are made, ``"stride"`` swaps a descriptor's strides, ``"swizzle"`` writes C in
            plain order, ``"accumulate"`` adds to the tile before.
    """
    bm, bn, slots, consumers = tiles.bm, tiles.bn, tiles.slots, tiles.consumers
    a_across, b_across = a_major != "k", b_major != "k"
    a_bytes, slot_bytes = bm * PANEL * 2, tiles.slot_bytes
    wide, accumulators = tiles.wide, tiles.accumulators
    high, parts = bm // consumers // 64, bn // wide  # instructions for 16 k of a consumer's part
    words_each, words_row = wide // 2, bn // 2  # registers of one, and of 64 rows
    panel_bytes, a_panels, b_panels = PANEL * PANEL * 2, bm // PANEL, bn // PANEL
    form = {"float16": "f16", "bfloat16": "bf16"}[element]
    product = wgmma(wide, form, a_major="mn" if a_across else "k", b_major="mn" if b_across else "k")
    give, take = setmaxnreg_dec(PRODUCER_REGISTERS), setmaxnreg_inc(tiles.registers)
    all_but_one, all_products = wgmma_wait(1), wgmma_wait(0)
    all_panels, stage_bytes = bulk_wait(0), PANEL_BYTES * tiles.panels
    store_panel = make_panel_store(element, tiles.panels, broken, batched=bool(batched))
    raster, after = make_raster(tiles.band), make_after(slots)
    waits_full, waits_empty, waits_products = broken != "full", broken != "empty", broken != "wait"
    fences, syncs, early, fresh = broken != "fence", broken != "init", broken == "release", broken != "accumulate"
    expected = slot_bytes - (16 if broken == "bytes" else 0)
    # From one descriptor to that of the next 16 k, in units of 16 bytes: 32 bytes within lines along k, or 16 lines.
    a_step, b_step = (128 if a_across else 2), (128 if b_across else 2)
    # From 64 of an operand across k to the next 64, and from 8 lines to the next 8.
    leading, stride = (1024, panel_bytes) if broken == "stride" else (panel_bytes, 1024)

    @device
    def load(target, x, bar, first, second, place):
        tma_load_2d(target, x, bar, first, second)

    @device
    def load_batched(target, x, bar, first, second, place):
        head, batch = place
        tma_load_4d(target, x, bar, first, second, head, batch)

    load_box = load_batched if batched else load

    @device
    def find(tile, rows, cols, heads):
        """(row, column) of a tile of C, and where in the batch."""
        tile_row, tile_col = raster(tile, rows, cols)
        return tile_row, tile_col, ()

    @device
    def find_batched(tile, rows, cols, heads):
        each = uint32(rows * cols)
        number = uint32(tile // each)
        tile_row, tile_col = raster(uint32(tile - number * each), rows, cols)
        return tile_row, tile_col, (int32(number % heads), int32(number // heads))

    @device
    def count(rows, cols, many):
        return uint32(rows * cols)

    @device
    def count_batched(rows, cols, many):
        return uint32(uint32(rows * cols) * many)

    find_tile, in_all = (find_batched, count_batched) if batched else (find, count)

    @device
    def load_slot(target, bar, a, b, row, col, depth, place):
        """Start the copies of one slot: rows from ``row``, columns from ``col``, 64 of k from ``depth``."""
        mbarrier_arrive_expect_tx(bar, uint32(expected))
        if a_across:
            for p in range(a_panels):
                load_box(target + uint32(p * panel_bytes), a, bar, row + int32(PANEL * p), depth, place)
        else:
            load_box(target, a, bar, depth, row, place)
        if b_across:
            for p in range(b_panels):
                load_box(target + uint32(a_bytes + p * panel_bytes), b, bar, col + int32(PANEL * p), depth, place)
        else:
            load_box(target + uint32(a_bytes), b, bar, depth, col, place)

    @device
    def multiply(acc, slot, a_first, b_first, more):
        """acc (+)= A B for one slot; descriptors are those of slot 0; ``more`` is 0 to begin anew."""
        a_here = uint64(a_first + uint64(slot * uint32(slot_bytes // 16)))
        b_here = uint64(b_first + uint64(slot * uint32(slot_bytes // 16)))
        for step in range(PANEL // 16):
            for r in range(high):
                a_part = a_here + uint64(r * panel_bytes // 16 + step * a_step)
                for i in range(parts):
                    b_part = b_here + uint64(i * wide * 128 // 16 + step * b_step)
                    product(acc, r * words_row + i * words_each, a_part, b_part, more if step == 0 else int32(1))

    @device
    def store_tile(acc, stage, turn, c, row, col, place):
        """A warp's 16 rows of each 64 of its consumer, panel by panel."""
        for r in range(high):
            for p in range(bn // PANEL):
                at, below, right = r * words_row + p * PANEL // 2, int32(64 * r), int32(PANEL * p)
                turn = store_panel(acc, at, stage, turn, c, row + below, col + right, *place)
        return turn

    @device
    def produce(ring, full, empty, a, b, rows, cols, depth, heads, many):
        slot, parity = uint32(0), uint32(1)
        tile = uint32(cuda.blockIdx.x)
        while tile < in_all(rows, cols, many):
            tile_row, tile_col, place = find_tile(tile, rows, cols, heads)
            row, col = int32(tile_row * uint32(bm)), int32(tile_col * uint32(bn))
            t = uint32(0)
            while t < depth:
                if waits_empty:
                    mbarrier_wait(empty + slot * uint32(8), parity)  # all consumers have let the slot go
                target, bar = ring + slot * uint32(slot_bytes), full + slot * uint32(8)
                load_slot(target, bar, a, b, row, col, int32(t * uint32(PANEL)), place)
                slot, parity = after(slot, parity)
                t = uint32(t + uint32(1))
            tile = uint32(tile + uint32(cuda.gridDim.x))

    @device
    def consume(acc, ring, full, empty, stage, c, rows, cols, depth, heads, many):
        mine = uint32(uint32(cuda.threadIdx.x >> 7) - uint32(1))
        warp = uint32((cuda.threadIdx.x & 127) >> 5)
        leads = (cuda.threadIdx.x & 127) == 0
        first_64 = uint32(mine * uint32(high))
        a_first = descriptor(ring + first_64 * uint32(panel_bytes), leading, stride)
        b_first = descriptor(ring + uint32(a_bytes), leading, stride)
        my_stage = stage + (mine * uint32(4) + warp) * uint32(stage_bytes)
        slot, parity, before, turn = uint32(0), uint32(0), uint32(0), uint32(0)
        tile = uint32(cuda.blockIdx.x)
        while tile < in_all(rows, cols, many):
            t = uint32(0)
            while t < depth:
                if waits_full:
                    mbarrier_wait(full + slot * uint32(8), parity)  # the slot's bytes are there
                if fences:
                    wgmma_fence()
                more = t > uint32(0) or (not fresh and tile >= uint32(cuda.gridDim.x))
                multiply(acc, slot, a_first, b_first, int32(1 if more else 0))
                wgmma_commit()
                if waits_products:
                    all_but_one()  # the products of the slot before are done
                if early:
                    before = slot
                if leads and (early or t > uint32(0)):
                    mbarrier_arrive(empty + before * uint32(8))
                before = slot
                slot, parity = after(slot, parity)
                t = uint32(t + uint32(1))
            all_products()
            if leads and not early:
                mbarrier_arrive(empty + before * uint32(8))
            tile_row, tile_col, place = find_tile(tile, rows, cols, heads)
            row = int32(tile_row * uint32(bm) + first_64 * uint32(64) + warp * uint32(16))
            turn = store_tile(acc, my_stage, turn, c, row, int32(tile_col * uint32(bn)), place)
            tile = uint32(tile + uint32(cuda.gridDim.x))
        all_panels()

    @device
    def run(a, b, c, rows, cols, depth, heads, many):
        smem = cuda.shared.array(0, uint8)
        ring = uint32((shared_address(smem) + uint32(1023)) & uint32(0xFFFFFC00))
        stage = ring + uint32(slots * slot_bytes)
        full = stage + uint32(consumers * 4 * stage_bytes)
        empty = full + uint32(8 * slots)
        if cuda.threadIdx.x == 0:
            tma_prefetch(a)
            tma_prefetch(b)
            tma_prefetch(c)
            for s in range(slots):
                mbarrier_init(full + uint32(8 * s), uint32(1))
                mbarrier_init(empty + uint32(8 * s), uint32(consumers))
            fence_mbarrier_init()
        if syncs:
            cuda.syncthreads()  # the mbarriers exist before anyone uses them

        if cuda.threadIdx.x < 128:
            give()
            if cuda.threadIdx.x == 0:
                produce(ring, full, empty, a, b, rows, cols, depth, heads, many)
        else:
            take()
            acc = cuda.local.array(accumulators, float32)
            consume(acc, ring, full, empty, stage, c, rows, cols, depth, heads, many)

    @kernel(threads=tiles.threads, min_blocks=1, arch="90a", name="wgmma")
    def wgmma_kernel(a, b, c, rows, cols, depth):
        run(a, b, c, rows, cols, depth, uint32(1), uint32(1))

    @kernel(threads=tiles.threads, min_blocks=1, arch="90a", name=batched)
    def batched_kernel(a, b, c, rows, cols, depth, heads, batches):
        run(a, b, c, rows, cols, depth, heads, uint32(heads * batches))

    return batched_kernel if batched else wgmma_kernel
