"""Small kernels around the asynchronous instructions: a launch on a GPU and one on the emulator give the same bytes.

``cp.async``, bulk and tensor copies dump the shared memory they filled, or the global memory they wrote; each wgmma
multiplies two pieces of a shared-memory image, so that one output checks descriptor, layout and arithmetic at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from flashnumba.machine.function import Kernel, kernel
from flashnumba.machine.instructions import (
    bar_arrive,
    bar_sync,
    bulk_commit,
    bulk_load,
    bulk_store,
    bulk_wait,
    cp_async_4,
    cp_async_4_zfill,
    cp_async_8,
    cp_async_8_zfill,
    cp_async_16,
    cp_async_16_zfill,
    cp_async_commit,
    cp_async_wait,
    fence_mbarrier_init,
    fence_proxy_async,
    global_address,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    shared_address,
    tma_load_1d,
    tma_load_2d,
    tma_load_3d,
    tma_load_4d,
    tma_store_1d,
    tma_store_2d,
    tma_store_3d,
    tma_store_4d,
    wgmma,
    wgmma_commit,
    wgmma_fence,
    wgmma_wait,
)
from flashnumba.machine.numba import cuda, float32, int32, uint8, uint32, uint64
from flashnumba.tiles.descriptor import make_descriptor

__all__ = ["PROGRAMS", "Boxed", "Program"]


@dataclass(frozen=True)
class Boxed:
    """An array that the kernel gets as a tensor map."""

    array: np.ndarray
    box: tuple[int, ...]
    swizzle: int


@dataclass(frozen=True)
class Program:
    """One launch: ``make()`` gives the kernel's arguments; the last one is written.

    ``kept`` selects what of the output is recorded.
    """

    name: str
    kernel: Callable[[], Kernel]
    threads: int
    make: Callable[[], list[Any]]
    shared: int = 0
    kept: Callable[[np.ndarray], np.ndarray] = lambda x: x


PROGRAMS: dict[str, Program] = {}


def _add(name: str, *args: Any, **options: Any) -> None:
    PROGRAMS[name] = Program(name, *args, **options)


def _random_bytes(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8)


# -- cp.async ---------------------------------------------------------------------------------------------------------
@cache
def _cp_async(nbytes: int, zfill: bool) -> Kernel:
    plain = {4: cp_async_4, 8: cp_async_8, 16: cp_async_16}[nbytes]
    filled = {4: cp_async_4_zfill, 8: cp_async_8_zfill, 16: cp_async_16_zfill}[nbytes]
    wait_one, wait_all = cp_async_wait(1), cp_async_wait(0)

    @kernel(threads=64, arch="80")
    def copy(src, out):
        smem = cuda.shared.array(64 * 16, uint8)
        t = cuda.threadIdx.x
        for i in range(16):
            smem[t * 16 + i] = uint8(0xAA)
        cuda.syncthreads()
        dst, at = shared_address(smem) + uint32(t * nbytes), global_address(src) + uint64(t * nbytes)
        if zfill:
            filled(dst, at, uint32(t % (nbytes + 1)))
        else:
            plain(dst, at)
        cp_async_commit()
        cp_async_commit()
        wait_one()
        wait_all()
        cuda.syncthreads()
        for i in range(16):
            out[t * 16 + i] = smem[((t + 1) % 64) * 16 + i]

    return copy


for _n in (4, 8, 16):
    for _z in (False, True):
        _add(
            f"cp_async_{_n}{'_zfill' if _z else ''}",
            lambda n=_n, z=_z: _cp_async(n, z),
            64,
            lambda: [_random_bytes(1024, 1), np.zeros(1024, np.uint8)],
        )


# -- barriers ---------------------------------------------------------------------------------------------------------
@cache
def _hand_over() -> Kernel:
    @kernel(threads=128, arch="90")
    def hand_over(src, out):
        """Warps 0, 1 produce, 2, 3 consume, round after round: named barriers one way, an mbarrier the other."""
        smem = cuda.shared.array(64, uint32)
        bar = cuda.shared.array(1, uint64)
        t = cuda.threadIdx.x
        if t == 0:
            mbarrier_init(shared_address(bar), uint32(64))
        cuda.syncthreads()
        for r in range(8):
            if t < 64:
                mbarrier_wait(shared_address(bar), uint32((r & 1) ^ 1))
                smem[t] = src[64 * r + t]
                bar_arrive(1, 128)
            else:
                bar_sync(1, 128)
                out[64 * r + t - 64] = smem[127 - t] + uint32(r)
                mbarrier_arrive(shared_address(bar))

    return hand_over


_add(
    "barriers",
    _hand_over,
    128,
    lambda: [np.random.default_rng(2).integers(0, 1 << 30, 512).astype(np.uint32), np.zeros(512, np.uint32)],
)


# -- bulk and tensor copies -------------------------------------------------------------------------------------------
@cache
def _bulk() -> Kernel:
    drain = bulk_wait(0)

    @kernel(threads=32, arch="90")
    def bulk(src, out):
        smem = cuda.shared.array(2048, uint8, alignment=128)
        bar = cuda.shared.array(1, uint64)
        at, base = shared_address(bar), shared_address(smem)
        if cuda.threadIdx.x == 0:
            mbarrier_init(at, uint32(1))
            fence_mbarrier_init()
            mbarrier_arrive_expect_tx(at, uint32(2048))
            bulk_load(base, global_address(src) + uint64(16), uint32(1040), at)
            bulk_load(base + uint32(1040), global_address(src) + uint64(4096), uint32(1008), at)
            mbarrier_wait(at, uint32(0))
            bulk_store(global_address(out) + uint64(32), base, uint32(2000))
            bulk_commit()
            drain()

    return bulk


_add("bulk", _bulk, 32, lambda: [_random_bytes(8192, 3), np.zeros(4096, np.uint8)])

_LOADS = {1: tma_load_1d, 2: tma_load_2d, 3: tma_load_3d, 4: tma_load_4d}
_STORES = {1: tma_store_1d, 2: tma_store_2d, 3: tma_store_3d, 4: tma_store_4d}
_SHAPES = {
    1: ((100,), (64,)),
    2: ((37, 80), (24, 64)),
    3: ((3, 21, 80), (2, 16, 64)),
    4: ((3, 5, 9, 64), (2, 3, 8, 64)),
}


@cache
def _tensor_copy(rank: int, nbytes: int) -> Kernel:
    load, store, drain = _LOADS[rank], _STORES[rank], bulk_wait(0)

    @kernel(threads=32, arch="90")
    def through(source, target, c0, c1, c2, c3, s0, s1, s2, s3, dump):
        smem = cuda.shared.array(0, uint8)
        base = (shared_address(smem) + uint32(1023)) & uint32(0xFFFFFC00)
        bar = base + uint32((nbytes + 1023) // 1024 * 1024)
        lead = int32(base - shared_address(smem))
        if cuda.threadIdx.x == 0:
            mbarrier_init(bar, uint32(1))
            fence_mbarrier_init()
            mbarrier_arrive_expect_tx(bar, uint32(nbytes))
            if rank == 1:
                load(base, source, bar, c0)
            elif rank == 2:
                load(base, source, bar, c0, c1)
            elif rank == 3:
                load(base, source, bar, c0, c1, c2)
            else:
                load(base, source, bar, c0, c1, c2, c3)
        cuda.syncthreads()
        mbarrier_wait(bar, uint32(0))
        for i in range(cuda.threadIdx.x, nbytes, 32):
            dump[i] = smem[lead + i]
        if cuda.threadIdx.x == 0:
            if rank == 1:
                store(target, base, s0)
            elif rank == 2:
                store(target, base, s0, s1)
            elif rank == 3:
                store(target, base, s0, s1, s2)
            else:
                store(target, base, s0, s1, s2, s3)
            bulk_commit()
            drain()

    return through


def _tensor_program(rank: int, swizzle: int, dtype: Any, at: tuple[int, ...], tag: str) -> None:
    shape, box = _SHAPES[rank]
    size = np.dtype(dtype).itemsize
    if swizzle:
        box = (*box[:-1], swizzle // size)
    nbytes = int(np.prod(box)) * size

    def make() -> list[Any]:
        data = np.random.default_rng(rank).integers(0, 250, shape).astype(dtype)
        target = np.zeros(shape, dtype)
        maps = [Boxed(x, box, swizzle) for x in (data, target)]
        load_at = (*at, 0, 0, 0)[:4]
        store_at = [max(c + d, 0) for c, d in zip(load_at, (16 // size, -2, 1, -1), strict=True)]
        return [*maps, *map(np.int32, (*load_at, *store_at)), np.zeros(nbytes, np.uint8)]

    _add(f"tma_{rank}d_{tag}", lambda: _tensor_copy(rank, nbytes), 32, make, shared=nbytes + 3072)


for _rank in (1, 2, 3, 4):
    _tensor_program(_rank, 0, np.float16, (8, 5, 1, 0), "plain")
    _tensor_program(_rank, 0, np.float32, (-4, -3, -1, -1), "before")
    _tensor_program(_rank, 0, np.uint8, (48, 20, 2, 1), "beyond")
for _swizzle in (32, 64, 128):
    _tensor_program(2, _swizzle, np.float16, (16, 7, 0, 0), f"swizzle_{_swizzle}")
    _tensor_program(3, _swizzle, np.float32, (4, 9, 1, 0), f"swizzle_{_swizzle}")

# -- wgmma ------------------------------------------------------------------------------------------------------------
IMAGE = 96 * 1024
TYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def _image(dtype: str) -> np.ndarray:
    """Shared memory for the operands: values over a wide range of exponents, so that truncation shows."""
    rng = np.random.default_rng(5)
    kind = TYPES[dtype]
    count = IMAGE // np.dtype(kind).itemsize
    values = rng.standard_normal(count) * np.exp2(rng.integers(-6, 4, count))
    return values.astype(kind).view(np.uint8)


@cache
def _wgmma(n: int, dtype: str, a: str, a_major: str, b_major: str, swizzle: int) -> Kernel:
    multiply = wgmma(n, dtype, a, a_major, b_major)
    descriptor = make_descriptor(swizzle)
    wait = wgmma_wait(0)
    registers, from_registers = n // 2, a == "registers"
    span = swizzle or 16
    eight = 8 * span if swizzle else 256  # bytes from eight rows (or eight k) to the next eight
    along = 16 * span if swizzle else 4096  # from one span of M or N to the next, for 16 k
    a_lead = along if a_major == "mn" else 128
    b_lead = along if b_major == "mn" else 128

    @kernel(threads=128, arch="90a")
    def product(image, fragments, start, out):
        smem = cuda.shared.array(0, uint32)
        base = (shared_address(smem) + uint32(1023)) & uint32(0xFFFFFC00)
        lead = int32(base - shared_address(smem)) >> 2
        t = cuda.threadIdx.x
        for i in range(t, IMAGE // 4, 128):
            smem[lead + i] = image[i]
        fence_proxy_async()
        acc = cuda.local.array(registers, float32)
        p = cuda.local.array(4, uint32)
        for i in range(registers):
            acc[i] = start[t, i]
        for i in range(4):
            p[i] = fragments[t, i]
        cuda.syncthreads()
        a_at, b_at = base, base + uint32(32768)
        wgmma_fence()
        for step in range(2):
            # The second step starts elsewhere in the image: 32 bytes along K, or the next panel.
            at = uint32(step * 32) if swizzle > 32 else uint32(step * 16384)
            b = descriptor(b_at + at, b_lead, eight)
            if from_registers:
                multiply(acc, 0, p, 0, b, int32(1))
            else:
                multiply(acc, 0, descriptor(a_at + at, a_lead, eight), b, int32(step))
        wgmma_commit()
        wait()
        for i in range(registers):
            out[t, i] = acc[i]

    return product


def _kept(out: np.ndarray) -> np.ndarray:
    """All of a small product; of a wide one the registers of eleven lanes."""
    return out if out.shape[1] <= 16 else out[::12]


def _wgmma_program(n: int, dtype: str, a: str, a_major: str, b_major: str, swizzle: int) -> None:
    def make() -> list[Any]:
        rng = np.random.default_rng(n)
        kind = TYPES[dtype]
        per = 4 // np.dtype(kind).itemsize
        fragments = rng.standard_normal((128, 4 * per)).astype(kind).view(np.uint32)
        start = (rng.standard_normal((128, n // 2)) * 8).astype(np.float32)
        return [_image(dtype).view(np.uint32), fragments, start, np.zeros((128, n // 2), np.float32)]

    major = "" if (a_major, b_major) == ("k", "k") else f"_{a_major}_{b_major}"
    _add(
        f"wgmma_n{n}_{dtype}_{a}{major}_swizzle_{swizzle}",
        lambda: _wgmma(n, dtype, a, a_major, b_major, swizzle),
        128,
        make,
        shared=IMAGE + 1024,
        kept=_kept,
    )


for _dtype in TYPES:
    for _swizzle in (0, 32, 64, 128):
        for _a in ("shared", "registers"):
            _wgmma_program(16, _dtype, _a, "k", "k", _swizzle)
    for _n in (8, 24, 96, 128, 176, 256):
        _wgmma_program(_n, _dtype, "registers" if _n % 16 else "shared", "k", "k", 128)
for _dtype in ("f16", "bf16"):
    for _swizzle in (0, 32, 64, 128):
        _wgmma_program(64, _dtype, "registers", "k", "mn", _swizzle)
        _wgmma_program(64, _dtype, "shared", "mn", "k", _swizzle)
        _wgmma_program(128, _dtype, "shared", "mn", "mn", _swizzle)
