"""phi of SLA's linear part, and the way back through it, for the rows of a tile in shared memory.

phi is not kept: wherever a tile of Q or of K is at hand, its phi is a few instructions an element, and fewer bytes than
to write it once and read it twice. Four lanes share a row, as in the accumulators of a product, so that sums over
columns are a butterfly among them; phi takes the place of what it is made of, rounded to the inputs' type, as tensor
cores will read it.

Source: as :mod:`flashnumba.stages.sparsity.sla_reference`.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import ex2_approx, ld_shared_b32, rcp_approx, st_shared_b32
from flashnumba.machine.numba import cuda, float32, int32, uint32
from flashnumba.tiles.elements import vectors
from flashnumba.tiles.online import LOG2_E, NOTHING
from flashnumba.tiles.reduce import lanes_max, lanes_sum
from flashnumba.tiles.swizzle import swizzle

__all__ = ["make_features", "make_pull_back"]


@cache
def make_map(feature_map: str, count: int) -> DeviceFunction:
    """``phi(x)``: of a row of which four lanes have ``count`` columns each, in place."""
    over_max, over_sum = lanes_max(4), lanes_sum(4)

    @device
    def softmax(x):
        top, total = float32(NOTHING), float32(0)
        for e in range(count):
            top = max(top, x[e])
        top = over_max(top)
        for e in range(count):
            x[e] = ex2_approx((x[e] - top) * float32(LOG2_E))
            total += x[e]
        share = rcp_approx(over_sum(total))
        for e in range(count):
            x[e] *= share

    @device
    def elu(x):
        for e in range(count):
            below = ex2_approx(min(x[e], float32(0)) * float32(LOG2_E))
            x[e] = x[e] + float32(1) if x[e] > float32(0) else below

    @device
    def relu(x):
        for e in range(count):
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
def make_features(
    d: int, element: str, feature_map: str, arch: str = "80", *, columns: int = 0, tail: bool = True,
    masked: bool = True,
) -> DeviceFunction:  # fmt: skip
    """``features(tile, warp_row, lane, left)``: 16 rows from ``warp_row`` on become their phi, and zeros from row
    ``left`` of the tile and from column ``columns`` on.

    A column that is not there counts as -inf, whose phi is 0 by each map: it has no part in the softmax's sum. All
    that is made of phi, states and gradients too, is then 0 there.

    A lane reads and writes its own words; others of the warp may read after ``syncwarp``.

    Args:
        columns: of the head dimension, up to ``d``; 0 for ``d``.
        tail, masked: False plants a fault: rows, or columns, that are not there have a phi as well.
    """
    groups, count, place = d // 8, d // 4, swizzle(d).at
    wide = vectors(element, 4, arch=arch)
    low, high, pair, phi = wide.low, wide.high, wide.pack, make_map(feature_map, count)
    whole_groups, there = (columns // 8, columns) if columns and masked else (groups, d)

    @device
    def features(tile, warp_row, lane, left):
        x = cuda.local.array(count, float32)
        for half in range(2):
            row = warp_row + (lane >> 2) + 8 * half
            for n in range(groups):
                word = ld_shared_b32(place(tile, row, n) + uint32(4 * (lane & 3)))
                x[2 * n] = low(word)
                x[2 * n + 1] = high(word)
            for n in range(whole_groups, groups):
                for i in range(2):
                    if int32(2) * (lane & int32(3)) + int32(8 * n + i) >= int32(there):
                        x[2 * n + i] = float32(NOTHING)
            phi(x)
            if tail and row >= left:
                for e in range(count):
                    x[e] = float32(0)
            for n in range(groups):
                st_shared_b32(place(tile, row, n) + uint32(4 * (lane & 3)), pair(x[2 * n], x[2 * n + 1]))

    return features
