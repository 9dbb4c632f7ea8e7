"""Planted faults of memory: races, reads of nothing, addresses that lead astray."""

from __future__ import annotations

import numpy as np

from flashnumba.machine.emulator import Misaligned, OutOfBounds, Race, ReadOnly, UninitialisedRead
from flashnumba.machine.function import Kernel, kernel
from flashnumba.machine.instructions import (
    global_address,
    ld_global_v4_f32,
    ld_shared_f32,
    shared_address,
    st_shared_v4_f32,
)
from flashnumba.machine.numba import cuda, float32, int32, uint32, uint64
from tests.machine.gallery.entry import Entry, Inputs, vector


def reverse(broken: bool) -> Kernel:
    @kernel(threads=64)
    def reverse(x, out):
        s = cuda.shared.array(64, float32)
        t = cuda.threadIdx.x
        s[t] = x[t]
        if not broken:
            cuda.syncthreads()  # every element is there before another thread reads it
        out[t] = s[63 - t]

    return reverse


def tiles(broken: bool) -> Kernel:
    @kernel(threads=64)
    def tiles(x, out):
        s = cuda.shared.array(64, float32)
        t = cuda.threadIdx.x
        total = float32(0)
        for tile in range(2):
            s[t] = x[64 * tile + t]
            cuda.syncthreads()  # the tile is complete
            total += s[63 - t]
            if not broken:
                cuda.syncthreads()  # all have read this tile before the next one overwrites it
        out[t] = total

    return tiles


def warp_sum(broken: bool) -> Kernel:
    @kernel(threads=32)
    def warp_sum(x, out):
        s = cuda.shared.array(32, float32)
        lane = cuda.threadIdx.x
        s[lane] = x[lane]
        step = 16
        while step > 0:
            cuda.syncwarp()  # the partners' sums are written
            if lane < step:
                s[lane] = s[lane] + s[lane + step]
            step //= 2
        if not broken:
            cuda.syncwarp()  # lane 0 has the total
        out[lane] = s[0]

    return warp_sum


def one_writer(broken: bool) -> Kernel:
    @kernel(threads=64)
    def one_writer(x, out):
        s = cuda.shared.array(1, float32)
        t = cuda.threadIdx.x
        if broken or t == 0:
            s[0] = x[0]
        cuda.syncthreads()  # the value is there
        out[t] = s[0]

    return one_writer


def histogram(broken: bool) -> Kernel:
    @kernel(threads=64)
    def histogram(x, out):
        counts = cuda.shared.array(8, int32)
        t = cuda.threadIdx.x
        if t < 8:
            counts[t] = 0
        if not broken:
            cuda.syncthreads()  # the counters are zero before anyone counts
        cuda.atomic.add(counts, x[t], 1)
        cuda.syncthreads()  # all have counted
        if t < 8:
            out[t] = counts[t]

    return histogram


def padded(broken: bool) -> Kernel:
    @kernel(threads=32)
    def padded(x, out):
        s = cuda.shared.array(32, float32)
        t = cuda.threadIdx.x
        if t < 24:
            s[t] = x[t]
        elif not broken:
            s[t] = float32(0)  # the tail counts as zero
        cuda.syncthreads()  # the row is complete
        out[t] = s[31 - t]

    return padded


def accumulate(broken: bool) -> Kernel:
    @kernel(threads=32)
    def accumulate(x, out):
        acc = cuda.local.array(4, float32)
        if not broken:
            for i in range(4):
                acc[i] = float32(0)
        for i in range(4):
            acc[i] += x[cuda.threadIdx.x]
        out[cuda.threadIdx.x] = acc[0] + acc[3]

    return accumulate


def tail(broken: bool) -> Kernel:
    @kernel(threads=64)
    def tail(x, out):
        i = cuda.grid(1)
        if broken or i < x.shape[0]:
            out[i] = x[i] + float32(1)

    return tail


def neighbour(broken: bool) -> Kernel:
    @kernel(threads=32)
    def neighbour(x, out):
        s = cuda.shared.array(32, float32)
        t = cuda.threadIdx.x
        s[t] = x[t]
        cuda.syncthreads()  # all neighbours are written
        if broken or t < 31:
            out[t] = s[t + 1]
        else:
            out[t] = float32(0)

    return neighbour


def registers(broken: bool) -> Kernel:
    last = 5 if broken else 4

    @kernel(threads=32)
    def registers(x, out):
        r = cuda.local.array(4, float32)
        for i in range(last):
            r[i] = x[cuda.threadIdx.x]
        out[cuda.threadIdx.x] = r[0] + r[3]

    return registers


def vectors(broken: bool) -> Kernel:
    first = 1 if broken else 0

    @kernel(threads=32)
    def vectors(x, out):
        frag = cuda.local.array(4, float32)
        t = cuda.threadIdx.x
        ld_global_v4_f32(frag, 0, global_address(x) + uint64(16 * (t + first)))
        out[t] = frag[0] + frag[3]

    return vectors


def beyond(broken: bool) -> Kernel:
    offset = 4 if broken else 0

    @kernel(threads=32)
    def beyond(x, out):
        s = cuda.shared.array(32, float32)
        t = cuda.threadIdx.x
        s[t] = x[t]
        cuda.syncthreads()  # all are written
        out[t] = ld_shared_f32(shared_address(s) + uint32(4 * (31 - t) + offset))

    return beyond


def odd_row(broken: bool) -> Kernel:
    row = 5 if broken else 8

    @kernel(threads=4)
    def odd_row(x, out):
        s = cuda.shared.array(32, float32, alignment=16)
        frag = cuda.local.array(4, float32)
        t = cuda.threadIdx.x
        for i in range(4):
            frag[i] = x[4 * t + i]
        st_shared_v4_f32(shared_address(s) + uint32(4 * row * t), frag, 0)
        out[t] = s[row * t + 2]

    return odd_row


def odd_load(broken: bool) -> Kernel:
    step = 12 if broken else 16

    @kernel(threads=8)
    def odd_load(x, out):
        frag = cuda.local.array(4, float32)
        t = cuda.threadIdx.x
        ld_global_v4_f32(frag, 0, global_address(x) + uint64(step * t))
        out[t] = frag[1]

    return odd_load


def in_place(broken: bool) -> Kernel:
    @kernel(threads=32)
    def in_place(x, out):
        t = cuda.threadIdx.x
        if broken:
            x[t] = x[t] * float32(2)
            out[t] = x[t]
        else:
            out[t] = x[t] * float32(2)

    return in_place


def _bins(rng: np.random.Generator) -> Inputs:
    x = rng.integers(0, 8, 64).astype(np.int32)
    out = np.full(8, -1, np.int32)
    return [x, out], out, np.bincount(x, minlength=8)


def _read_only(rng: np.random.Generator) -> Inputs:
    x = rng.permutation(32).astype(np.float32)
    x.flags.writeable = False
    out = np.full(32, np.nan, np.float32)
    return [x, out], out, 2 * x


def _padded(x: np.ndarray) -> np.ndarray:
    return np.concatenate([x[:24], np.zeros(8, np.float32)])[::-1]


ENTRIES = (
    Entry("race", Race, "no syncthreads() between a store and another thread's read", reverse,
          vector(64, lambda x: x[::-1]), "s[", block=64),
    Entry("race_next_tile", Race, "no syncthreads() before the next tile overwrites what others may still read", tiles,
          vector(128, lambda x: x.reshape(2, 64)[:, ::-1].sum(0), 64), "s[", block=64),
    Entry("race_in_a_warp", Race, "no syncwarp() before the lanes read lane 0's sum", warp_sum,
          vector(32, lambda x: x.sum()), "s["),
    Entry("race_of_writers", Race, "all threads write one element, even though they write the same", one_writer,
          vector(64, lambda x: x[0]), "s[0] = x[0]", block=64),
    Entry("race_with_an_atomic", Race, "counters are cleared and counted in with no barrier between", histogram,
          _bins, "counts", block=64),
    Entry("uninitialised_shared", UninitialisedRead, "the tail of a shared row is never written", padded,
          vector(32, _padded), "out[t] = s[31 - t]", threads=tuple(range(8))),
    Entry("uninitialised_local", UninitialisedRead, "accumulators are not set to zero", accumulate,
          vector(32, lambda x: 2 * x), "acc[i] += x"),
    Entry("out_of_bounds_global", OutOfBounds, "the tail is not masked", tail,
          vector(50, lambda x: x + 1), "out[i] = x[i]", block=64),
    Entry("out_of_bounds_shared", OutOfBounds, "the last thread reads beyond a shared array", neighbour,
          vector(32, lambda x: [*x[1:], 0]), "out[t] = s[t + 1]", threads=(31,)),
    Entry("out_of_bounds_local", OutOfBounds, "a loop runs one element past a local array", registers,
          vector(32, lambda x: 2 * x), "r[i] = x"),
    Entry("out_of_bounds_address", OutOfBounds, "16-byte loads start one too far and leave the array", vectors,
          vector(128, lambda x: x.reshape(32, 4)[:, 0] + x.reshape(32, 4)[:, 3], 32), "ld_global_v4_f32",
          threads=(31,)),
    Entry("out_of_bounds_shared_address", OutOfBounds, "a shared address lies past the block's shared memory", beyond,
          vector(32, lambda x: x[::-1]), "ld_shared_f32", threads=(0,)),
    Entry("misaligned_shared", Misaligned, "rows of 20 bytes under 16-byte stores", odd_row,
          vector(16, lambda x: x[2::4], 4), "st_shared_v4_f32", block=4),
    Entry("misaligned_global", Misaligned, "16-byte loads every 12 bytes", odd_load,
          vector(32, lambda x: x[1::4], 8), "ld_global_v4_f32", block=8),
    Entry("read_only", ReadOnly, "a store into an array that may not be written", in_place, _read_only,
          "x[t] = x[t] * "),
)  # fmt: skip
