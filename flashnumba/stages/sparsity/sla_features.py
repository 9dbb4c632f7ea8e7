"""The first pass of SLA over Q and over K: phi of each row, and the mean of each tile's rows.

One read serves both. ``d / 8`` neighbouring lanes share a row, 16 bytes each, so that loads and stores of a warp cover
whole rows; the sums over columns that the softmax needs are a butterfly among them. phi leaves rounded to the inputs'
type, as the tensor cores will take it; means leave in float32, transposed, so that the lanes that compare one row tile
with neighbouring key tiles read side by side (:mod:`flashnumba.stages.sparsity.sla_lists`).

Bytes: each row is read once and written once; that is what it costs.

Source: as :mod:`flashnumba.stages.sparsity.sla_reference`.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import DeviceFunction, Kernel, device, kernel
from flashnumba.machine.instructions import ex2_approx, global_address, rcp_approx
from flashnumba.machine.numba import cuda, float32, int64, uint32, uint64
from flashnumba.stages.sparsity.sla_reference import BLOCK
from flashnumba.tiles.elements import vectors
from flashnumba.tiles.online import LOG2_E, NOTHING
from flashnumba.tiles.reduce import lanes_max, lanes_sum

__all__ = ["THREADS", "make_features", "make_pull_back", "piece_of"]

THREADS = 128
E = 8
"""Elements of 16 bytes."""


@device
def piece_of(number, tiles, heads):
    """(batch, head, tile) of block ``number``: tile by tile, head by head. int64."""
    index, tile = uint32(number) // uint32(tiles), uint32(number) % uint32(tiles)
    return int64(index // uint32(heads)), int64(index % uint32(heads)), int64(tile)


@cache
def make_map(feature_map: str, lanes: int) -> DeviceFunction:
    """``phi(x)``: of a row whose eight columns from each of ``lanes`` lanes are in ``x[0:8]``, in place."""
    over_max, over_sum = lanes_max(lanes), lanes_sum(lanes)

    @device
    def softmax(x):
        top, total = float32(NOTHING), float32(0)
        for e in range(E):
            top = max(top, x[e])
        top = over_max(top)
        for e in range(E):
            x[e] = ex2_approx((x[e] - top) * float32(LOG2_E))
            total += x[e]
        share = rcp_approx(over_sum(total))
        for e in range(E):
            x[e] *= share

    @device
    def elu(x):
        for e in range(E):
            below = ex2_approx(min(x[e], float32(0)) * float32(LOG2_E))
            x[e] = x[e] + float32(1) if x[e] > float32(0) else below

    @device
    def relu(x):
        for e in range(E):
            x[e] = max(x[e], float32(0))

    return {"softmax": softmax, "elu": elu, "relu": relu}[feature_map]


@cache
def make_pull_back(feature_map: str) -> DeviceFunction:
    """``slope(phi, dphi, mean) -> dx`` for one element; ``mean`` is the row's sum of phi dphi, for the softmax."""

    @device
    def softmax(phi, dphi, mean):
        return phi * (dphi - mean)

    @device
    def elu(phi, dphi, mean):
        return dphi * min(phi, float32(1))

    @device
    def relu(phi, dphi, mean):
        return dphi if phi > float32(0) else float32(0)

    return {"softmax": softmax, "elu": elu, "relu": relu}[feature_map]


@cache
def make_features(d: int, element: str, feature_map: str, arch: str = "80", *, broken: str = "") -> Kernel:
    """``(x, phi, means)``: x ``[B, H, N, d]`` with packed rows at multiples of 16 bytes; phi packed; means float32
    ``[B, H, d, tiles]``. A block for each tile, :data:`THREADS` threads.

    Args:
        broken: plants ``"barrier"`` (none before the sums of a tile are added up), or ``"tail"`` (the last tile's mean
            is taken as if it were whole).
    """
    lanes, wide = d // E, vectors(element, 16, arch=arch)
    load, store, low, high, pack = wide.load, wide.store, wide.low, wide.high, wide.pack
    at_once = THREADS // lanes
    steps, size = BLOCK // at_once, at_once * d
    phi_of = make_map(feature_map, lanes)
    meets, whole = broken != "barrier", broken == "tail"

    @device
    def unpack(raw, x):
        for w in range(4):
            x[2 * w] = low(raw[w])
            x[2 * w + 1] = high(raw[w])

    @kernel(threads=THREADS, arch=arch, name="sparsity.sla features")
    def features(x, phi, means):
        parts = cuda.shared.array(size, float32)
        raw = cuda.local.array(4, uint32)
        value = cuda.local.array(E, float32)
        total = cuda.local.array(E, float32)
        rows = x.shape[2]
        batch, head, tile = piece_of(cuda.blockIdx.x, means.shape[3], x.shape[1])
        lane, line = uint32(cuda.threadIdx.x) % uint32(lanes), uint32(cuda.threadIdx.x) // uint32(lanes)
        first = tile * BLOCK + int64(line)
        source = int64(global_address(x)) + batch * x.strides[0] + head * x.strides[1] + int64(16) * int64(lane)
        target = (
            int64(global_address(phi)) + batch * phi.strides[0] + head * phi.strides[1] + int64(16) * int64(lane)
        )  # fmt: skip
        for e in range(E):
            total[e] = float32(0)
        for i in range(steps):
            row = first + i * at_once
            for w in range(4):
                raw[w] = uint32(0)
            if row < rows:
                load(raw, 0, uint64(source + row * x.strides[2]))
            unpack(raw, value)
            for e in range(E):
                total[e] += value[e]
            phi_of(value)
            for w in range(4):
                raw[w] = pack(value[2 * w], value[2 * w + 1])
            if row < rows:
                store(uint64(target + row * phi.strides[2]), raw, 0)
        for e in range(E):
            parts[uint32(line * uint32(d) + lane * uint32(E) + uint32(e))] = total[e]
        if meets:
            cuda.syncthreads()  # the sums of all lines are there
        if cuda.threadIdx.x < d:
            over = float32(0)
            for i in range(at_once):
                over += parts[i * d + cuda.threadIdx.x]
            there = BLOCK if whole else min(int64(BLOCK), rows - tile * BLOCK)
            means[batch, head, int64(cuda.threadIdx.x), tile] = over * rcp_approx(float32(there))

    return features
