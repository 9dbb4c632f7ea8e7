"""Planted faults of wgmma: its fences, its waits, the operands it reads while other threads go on."""

from __future__ import annotations

import numpy as np

from flashnumba.machine.emulator import AccumulatorInFlight, MissingFence, MissingProxyFence, OverwriteInFlight
from flashnumba.machine.function import Kernel, kernel
from flashnumba.machine.instructions import (
    bulk_load,
    fence_mbarrier_init,
    fence_proxy_async,
    global_address,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    shared_address,
    wgmma,
    wgmma_commit,
    wgmma_fence,
    wgmma_wait,
)
from flashnumba.machine.numba import cuda, float16, float32, int32, uint8, uint32, uint64
from flashnumba.tiles.descriptor import make_descriptor
from tests.machine.gallery.entry import Entry, Inputs

multiply, wait = wgmma(8), wgmma_wait(0)
descriptor = make_descriptor(0)
A_BYTES, B_BYTES = 64 * 32, 8 * 32


def cores(matrix: np.ndarray) -> np.ndarray:
    """[..., rows, 16] halves as wgmma wants them without a swizzle: core matrices of 8 rows by 16 bytes, one after
    another."""
    *more, rows, _ = matrix.shape
    return np.ascontiguousarray(matrix.reshape(*more, rows // 8, 8, 2, 8).swapaxes(-3, -2)).reshape(*more, -1)


def product(plant: str) -> Kernel:
    """out[64, 8] = sum of a[64, 16] b_i[8, 16]^T over two tiles b_i, which ordinary stores bring one after the
    other."""

    @kernel(threads=128, arch="90a")
    def product(a, b, out):
        smem = cuda.shared.array(A_BYTES // 2 + B_BYTES // 2, float16, alignment=128)
        acc = cuda.local.array(4, float32)
        t = cuda.threadIdx.x
        a_tile = shared_address(smem)
        b_tile = a_tile + uint32(A_BYTES)
        for i in range(8):
            smem[128 * i + t] = a[128 * i + t]
        for tile in range(2):
            smem[1024 + t] = b[tile, t]
            if plant != "proxy":
                fence_proxy_async()
            cuda.syncthreads()  # A and this B are complete
            if plant == "touch" and tile == 1:
                acc[0] = acc[0] + float32(0)
            if plant != "fence" and (tile == 0 or plant != "touch"):
                wgmma_fence()
            multiply(acc, 0, descriptor(a_tile, 128, 256), descriptor(b_tile, 128, 256), int32(tile))
            wgmma_commit()
            if (plant != "accumulator" or tile == 0) and (plant != "operand" or tile == 1):
                wait()
            cuda.syncthreads()  # all have multiplied: B may be overwritten
        row = t // 32 * 16 + t % 32 // 4
        for i in range(4):
            out[row + i // 2 * 8, t % 4 * 2 + i % 2] = acc[i]

    return product


def slots(broken: bool) -> Kernel:
    """Warp 4 brings three tiles b_i through one slot; the warpgroup says when it may be filled again."""

    @kernel(threads=160, arch="90a")
    def slots(a, b, out):
        smem = cuda.shared.array(A_BYTES + B_BYTES, uint8, alignment=128)
        bars = cuda.shared.array(3, uint64)
        acc = cuda.local.array(4, float32)
        t = cuda.threadIdx.x
        a_tile = shared_address(smem)
        b_tile = a_tile + uint32(A_BYTES)
        a_full = shared_address(bars)
        full, empty = a_full + uint32(8), a_full + uint32(16)
        if t == 0:
            mbarrier_init(a_full, uint32(1))
            mbarrier_init(full, uint32(1))
            mbarrier_init(empty, uint32(1))
            fence_mbarrier_init()
        cuda.syncthreads()  # the mbarriers exist
        if t == 128:
            mbarrier_arrive_expect_tx(a_full, uint32(A_BYTES))
            bulk_load(a_tile, global_address(a), uint32(A_BYTES), a_full)
            for tile in range(3):
                mbarrier_wait(empty, uint32((tile + 1) % 2))
                mbarrier_arrive_expect_tx(full, uint32(B_BYTES))
                bulk_load(b_tile, global_address(b) + uint64(B_BYTES * tile), uint32(B_BYTES), full)
        if t < 128:
            mbarrier_wait(a_full, uint32(0))
            for tile in range(3):
                mbarrier_wait(full, uint32(tile % 2))
                wgmma_fence()
                multiply(acc, 0, descriptor(a_tile, 128, 256), descriptor(b_tile, 128, 256), int32(tile))
                wgmma_commit()
                if broken and t == 0:
                    mbarrier_arrive(empty)
                wait()
                if not broken and t == 0:
                    mbarrier_arrive(empty)  # the product has read the slot
            row = t // 32 * 16 + t % 32 // 4
            for i in range(4):
                out[row + i // 2 * 8, t % 4 * 2 + i % 2] = acc[i]

    return slots


def _inputs(tiles: int):
    def inputs(rng: np.random.Generator) -> Inputs:
        a = rng.integers(-8, 9, (64, 16)).astype(np.float16)
        b = rng.integers(-8, 9, (tiles, 8, 16)).astype(np.float16)
        out = np.full((64, 8), np.nan, np.float32)
        return [cores(a), cores(b), out], out, a.astype(np.float32) @ b.astype(np.float32).sum(0).T

    return inputs


def _entry(name, fault, planted, plant, line, **more):
    return Entry(
        name, fault, planted, lambda broken: product(plant if broken else ""), _inputs(2), line, block=128, **more
    )


ENTRIES = (
    _entry("accumulator_in_flight", AccumulatorInFlight, "no wgmma_wait before the accumulators are read",
           "accumulator", "= acc[i]"),
    _entry("missing_fence", MissingFence, "no wgmma_fence() before the first wgmma", "fence", "multiply(acc"),
    _entry("missing_fence_touched", MissingFence, "an accumulator is changed between two wgmma with no fence", "touch",
           "multiply(acc"),
    _entry("proxy_fence_wgmma", MissingProxyFence,
           "no fence_proxy_async() between stores and the wgmma that reads them", "proxy", "multiply(acc"),
    _entry("overwrite_operand", OverwriteInFlight,
           "the next tile is stored before the wgmma that reads this one is waited for",
           "operand", "smem[1024 + t] = b[tile, t]"),
    Entry("slot_released_early", OverwriteInFlight, "a consumer releases a slot before its wgmma is waited for", slots,
          _inputs(3), "bulk_load(b_tile", block=160, threads=(128,)),
)  # fmt: skip
