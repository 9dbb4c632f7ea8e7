"""The register tile: each thread computes a patch of C, and reads shared memory 128 bits at a time.

Since ``shared_tile``: there a thread did two reads of shared memory for each multiplication, and shared memory, not
arithmetic, set the pace. Here a thread owns ``tm x tn`` elements of C. For a step of k it reads ``tm`` floats of A and
``tn`` of B and multiplies each with each: ``tm tn`` FFMA for ``(tm + tn) / 4`` loads, 128 for 6 with a patch of 16 x 8.
The block's tile grows with it: at 128 x 128 an element of A or B is read from memory once for 128 elements of C,
``(1/128 + 1/128) K`` reads for each element of C instead of ``(1/32 + 1/32) K``.

A patch is not one rectangle but groups of 4 x 4 that lie apart::

    columns     0..3   4..7  ...  28..31 | 32..35  ...             a warp of 4 x 8 lanes, each with 8 x 8 elements:
    rows 0..3   lane   lane       lane   | the same lanes again    the lanes' first groups side by side, then the second
         4..7   ...

so that the lanes of a warp read neighbouring vectors. Lanes are numbered in a zigzag (lanes 0 and 1 are one above the
other): of any two or four neighbours some read the same vector, which lets shared memory answer half a warp at a time.

Nothing waits for memory in the loop: while a tile is multiplied, the next one is on its way into registers, from where
it goes to the other of two places in shared memory; one barrier a tile. Within a tile the fragments of the next step of
k are loaded while the last ones are multiplied.

Sources: V. Volkov and J. Demmel, Benchmarking GPUs to tune dense linear algebra, SC 2008 (few threads, large register
tiles); S. Gray, maxas, "SGEMM" (the order of lanes); CUTLASS, "Efficient GEMM in CUDA".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from flashnumba.machine.function import Kernel, device, kernel
from flashnumba.machine.instructions import global_address, ld_shared_v4_f32, shared_address
from flashnumba.machine.numba import cuda, float32, uint32, uint64
from flashnumba.stages.gemm.staging import PAD, staging
from flashnumba.tiles.elements import ITEMSIZE, arch_of, vectors
from flashnumba.tiles.raster import make_raster

__all__ = ["BROKEN", "Tiles", "make_register_tile"]

BROKEN = ("barrier", "buffer", "turn", "stride", "pad", "mask", "edge", "store")


@dataclass(frozen=True)
class Tiles:
    """Sizes of the register tile.

    Attributes:
        bm, bn: rows and columns of C a block.
        bk: steps of k a tile in shared memory, 8 or 16.
        tm, tn: rows and columns of C a thread, multiples of 4.
        lanes_m: rows of lanes in a warp, 4 or 8; the warp has ``32 / lanes_m`` columns of lanes.
        band: rows of tiles a band, see :func:`flashnumba.tiles.raster.make_raster`.
        min_blocks: blocks a multiprocessor that the compiler leaves registers for.

    Raises:
        ValueError: sizes that do not go together.
    """

    bm: int = 128
    bn: int = 128
    bk: int = 8
    tm: int = 16
    tn: int = 8
    lanes_m: int = 4
    band: int = 8
    min_blocks: int = 2

    def __post_init__(self) -> None:
        if self.bk not in (8, 16):
            raise ValueError(f"bk is {self.bk}; it must be 8 or 16")
        if self.lanes_m not in (4, 8):
            raise ValueError(f"lanes_m is {self.lanes_m}; it must be 4 or 8")
        for name, size in (("tm", self.tm), ("tn", self.tn)):
            if size < 4 or size % 4:
                raise ValueError(f"{name} is {size}; it must be a multiple of 4")
        if self.tm * self.tn > 128:
            raise ValueError(
                f"a thread has {self.tm} x {self.tn} sums; more than 128 leave too few registers for the rest"
            )
        for name, size, warp in (("bm", self.bm, self.warp_m), ("bn", self.bn, self.warp_n)):
            if size < warp or size % warp:
                raise ValueError(f"{name} is {size}; it must be a multiple of {warp}, which a warp has")
        if self.threads > 1024:
            raise ValueError(
                f"{self.bm} x {self.bn} by {self.tm} x {self.tn} takes {self.threads} threads; 1024 is most"
            )
        if self.band < 1 or self.min_blocks < 0:
            raise ValueError(f"band is {self.band} and min_blocks {self.min_blocks}; they must be at least 1 and 0")

    @property
    def lanes_n(self) -> int:
        return 32 // self.lanes_m

    @property
    def warp_m(self) -> int:
        """Rows of C a warp."""
        return self.lanes_m * self.tm

    @property
    def warp_n(self) -> int:
        return self.lanes_n * self.tn

    @property
    def threads(self) -> int:
        return self.bm * self.bn // (self.tm * self.tn)

    @property
    def slot(self) -> int:
        """Bytes of a tile of A and one of B in shared memory."""
        return 4 * self.bk * (self.bm + PAD + self.bn + PAD)

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory: two slots."""
        return 2 * self.slot


@cache
def make_register_tile(
    element: str, tiles: Tiles = Tiles(), *, a_major: str = "k", b_major: str = "n", wide_a: bool = False,
    wide_b: bool = False, wide_c: bool = False, arch: str = "80", broken: str = "",
) -> Kernel:  # fmt: skip
    """``register_tile(a, b, c)``: a block a tile of C, on a grid with one axis; K is at least 1.

    Args:
        element: float16, bfloat16 or float32.
        a_major, b_major: see :class:`flashnumba.stages.gemm.problem.Shape`.
        wide_a, wide_b, wide_c: whether the array's lines are aligned to, and consist of, vectors of 4 elements.
        arch: below 80 bfloat16 is rounded in integers.
        broken: plants a fault: ``"barrier"`` leaves out the one a tile, ``"buffer"`` has one place in shared memory
            instead of two, ``"turn"`` loads fragments over those in use, ``"stride"`` takes A's lead for B,
            ``"store"`` stores all of a tile; ``"mask"``, ``"edge"`` and ``"pad"`` are those of :func:`staging`.

    Raises:
        ValueError: the threads do not share a tile evenly.
    """
    bm, bn, bk, tm, tn = tiles.bm, tiles.bn, tiles.bk, tiles.tm, tiles.tn
    threads, itemsize = tiles.threads, ITEMSIZE[element]
    a_along_k, b_along_k = a_major == "k", b_major == "k"
    a_in = staging(element, bm, bk, threads, along_k=a_along_k, wide=wide_a, arch=arch, broken=broken)
    b_in = staging(element, bn, bk, threads, along_k=b_along_k, wide=wide_b, arch=arch, broken=broken)
    a_loads, a_words, begin_a, fetch_first_a, fetch_a, put_a = a_in
    b_loads, b_words, begin_b, fetch_first_b, fetch_b, put_b = b_in
    a_line, b_line = 4 * (bm + PAD), 4 * (bn + PAD)
    b_offset, other_slot = bk * a_line, 0 if broken == "buffer" else tiles.slot
    lanes_m, lanes_n, warp_m, warp_n = tiles.lanes_m, tiles.lanes_n, tiles.warp_m, tiles.warp_n
    warps_n, groups_m, groups_n = bn // warp_n, tm // 4, tn // 4
    sums, a_regs, b_regs = tm * tn, 2 * tm, 2 * tn
    last, ahead = bk - 1, 0 if broken == "turn" else 1
    raster = make_raster(tiles.band)
    barrier, swapped, everything = broken != "barrier", broken == "stride", broken == "store"
    out = vectors(element, (4 if wide_c else 1) * itemsize, "plain", arch)
    pack, store_vector, out_words, out_elements, pairs = out.pack, out.store, out.words, out.elements, out.pairs

    @device
    def my_corner():
        """(row, column) of this thread's first element in the block's tile; see the module's docstring."""
        lane = uint32(cuda.threadIdx.x) & uint32(31)
        warp = uint32(cuda.threadIdx.x) >> uint32(5)
        row = (lane >> uint32(1)) // uint32(lanes_n) * uint32(2) + (lane & uint32(1))
        col = (lane >> uint32(1)) % uint32(lanes_n)
        return (
            uint32(warp // uint32(warps_n) * uint32(warp_m) + row * uint32(4)),
            uint32(warp % uint32(warps_n) * uint32(warp_n) + col * uint32(4)),
        )

    @device
    def take(a, b, turn, a_from, b_from, k):
        """The fragments of step ``k`` into one of two sets of registers."""
        for g in range(groups_m):
            ld_shared_v4_f32(a, turn * tm + 4 * g, a_from + uint32(k * a_line + 16 * g * lanes_m))
        for g in range(groups_n):
            ld_shared_v4_f32(b, turn * tn + 4 * g, b_from + uint32(k * b_line + 16 * g * lanes_n))

    @device
    def multiply(acc, a, b, turn):
        for i in range(tm):
            x = a[turn * tm + i]
            for j in range(tn):
                acc[i * tn + j] += x * b[turn * tn + j]

    @device
    def two_steps(acc, a, b, a_from, b_from, k):
        take(a, b, ahead, a_from, b_from, k + 1)
        multiply(acc, a, b, 0)
        take(a, b, 0, a_from, b_from, k + 2)
        multiply(acc, a, b, ahead)

    @device
    def all_but_the_last(acc, a, b, a_from, b_from):
        """The products of a tile but for its last step, whose fragments are loaded into set 1. Written out because the
        compiler unrolls no loop of this size."""
        two_steps(acc, a, b, a_from, b_from, 0)
        two_steps(acc, a, b, a_from, b_from, 2)
        two_steps(acc, a, b, a_from, b_from, 4)
        if bk == 16:
            two_steps(acc, a, b, a_from, b_from, 6)
            two_steps(acc, a, b, a_from, b_from, 8)
            two_steps(acc, a, b, a_from, b_from, 10)
            two_steps(acc, a, b, a_from, b_from, 12)
        take(a, b, 1, a_from, b_from, last)
        multiply(acc, a, b, 0)

    @device
    def store(c, row, col, acc):
        raw = cuda.local.array(out_words, uint32)
        rows, cols = uint32(c.shape[0]), uint32(c.shape[1])
        line = global_address(c) + uint64(row) * uint64(c.strides[0]) + uint64(col) * uint64(itemsize)
        for i in range(tm):
            r = uint32(row + uint32(i // 4 * 4 * lanes_m + i % 4))
            for j in range(0, tn, out_elements):
                beyond = j // 4 * 4 * lanes_n + j % 4
                for w in range(out_words):
                    if pairs:
                        raw[w] = pack(acc[i * tn + j + 2 * w], acc[i * tn + j + 2 * w + 1])
                    else:
                        raw[w] = pack(acc[i * tn + j + w], float32(0))
                if everything or (r < rows and uint32(col + uint32(beyond)) < cols):
                    store_vector(line + uint64(beyond * itemsize), raw, 0)
            line += uint64(1 if i % 4 < 3 else 4 * lanes_m - 3) * uint64(c.strides[0])

    @kernel(threads=threads, min_blocks=tiles.min_blocks, arch=arch_of(element, arch))
    def register_tile(a, b, c):
        smem = cuda.shared.array(0, float32)
        acc = cuda.local.array(sums, float32)
        a_frag = cuda.local.array(a_regs, float32)
        b_frag = cuda.local.array(b_regs, float32)
        a_raw = cuda.local.array(a_words, uint32)
        b_raw = cuda.local.array(b_words, uint32)
        a_at = cuda.local.array(a_loads, uint64)
        b_at = cuda.local.array(b_loads, uint64)
        rows, cols, left = uint32(c.shape[0]), uint32(c.shape[1]), uint32(a.shape[1])
        down, across = (rows + uint32(bm - 1)) // uint32(bm), (cols + uint32(bn - 1)) // uint32(bn)
        tile_row, tile_col = raster(cuda.blockIdx.x, down, across)
        first_row, first_col = tile_row * uint32(bm), tile_col * uint32(bn)
        a_lead = uint64(a.strides[0] if a_along_k else a.strides[1])
        b_lead = a_lead if swapped else uint64(b.strides[1] if b_along_k else b.strides[0])
        a_step = uint64(itemsize) if a_along_k else a_lead
        b_step = uint64(itemsize) if b_along_k else b_lead
        begin_a(a_at, global_address(a), first_row, rows, a_lead)
        begin_b(b_at, global_address(b), first_col, cols, b_lead)
        for i in range(sums):
            acc[i] = float32(0)

        here = shared_address(smem)
        there, toggle = here + uint32(other_slot), uint32(other_slot)
        steps = uint32((left - uint32(1)) % uint32(bk) + uint32(1))  # what the other tiles, which are whole, leave
        fetch_first_a(a_raw, a_at, steps, uint64(steps) * a_step)
        fetch_first_b(b_raw, b_at, steps, uint64(steps) * b_step)
        put_a(here, a_raw)
        put_b(here + uint32(b_offset), b_raw)
        cuda.syncthreads()  # the first tile is whole before anyone reads of it
        row, col = my_corner()
        a_from, b_from = here + row * uint32(4), here + uint32(b_offset) + col * uint32(4)
        take(a_frag, b_frag, 0, a_from, b_from, 0)
        for _ in range((left - steps) // uint32(bk)):
            fetch_a(a_raw, a_at, uint64(bk) * a_step)
            fetch_b(b_raw, b_at, uint64(bk) * b_step)
            all_but_the_last(acc, a_frag, b_frag, a_from, b_from)
            put_a(there, a_raw)
            put_b(there + uint32(b_offset), b_raw)
            if barrier:
                # The next tile is whole; and all reads of this one are done before the one after next overwrites it.
                cuda.syncthreads()
            a_from += toggle
            b_from += toggle
            there -= toggle
            toggle = uint32(0) - toggle
            take(a_frag, b_frag, 0, a_from, b_from, 0)
            multiply(acc, a_frag, b_frag, 1)
        all_but_the_last(acc, a_frag, b_frag, a_from, b_from)
        multiply(acc, a_frag, b_frag, 1)
        store(c, uint32(first_row + row), uint32(first_col + col), acc)

    return register_tile
