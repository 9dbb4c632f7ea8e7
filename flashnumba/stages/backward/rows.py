"""What the backward needs to know of each row before anything else: delta, and how to make its weights again.

::

    delta = rowsum(dO o O) - dlse            P_ij = exp(scale (s_ij - origin) - bias)            s = Q K^T

The kernels on tensor cores take ``bias log2 e`` instead, for exponents of base 2.

As many lanes a row as read it at once, 16 bytes each: a warp has several short rows. Where abs(lse) is at most
:data:`~flashnumba.stages.backward.reference.NEAR`, origin is 0 and bias is lse. Beyond, lse in float32 has lost digits:
at scores of 1e5 each weight would be off by 0.4 %. Such a row asks its keys again, with the whole warp: origin becomes
its greatest score and bias the logarithm of its sum of exponentials, which is small, so that weights are as exact as in
the forward. That costs a product of the row with K on CUDA cores, on which attention with scores of a usual size never
spends anything. A row that sees nothing has bias = inf, and weights of 0; its delta is 0, since a gradient of its
lse = -inf is easily inf or NaN, which times 0 would be NaN in all of dK.

The limit: scores here are sums in the order of columns, and those of a tensor core in another. Of scores beyond 1e7
whose products are not exact in float32 the difference is more than their softmax bears; so is the forward's.

Source: Dao, FlashAttention-2, arXiv 2307.08691, algorithm 2, line 4, for delta.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import Kernel, device, kernel
from flashnumba.machine.instructions import ex2_approx, global_address, lg2_approx, vote_any
from flashnumba.machine.numba import cuda, float32, int64, uint32, uint64
from flashnumba.stages.backward.problem import Launch, Shape
from flashnumba.stages.backward.reference import NEAR
from flashnumba.tiles.elements import ITEMSIZE, scalar, vectors
from flashnumba.tiles.online import LOG2_E, NOTHING, anchor
from flashnumba.tiles.reduce import lanes_max, lanes_sum

__all__ = ["ARGUMENTS", "FAULTS", "lanes_for", "launch_rows", "make_rows", "make_weight", "width_for"]

ARGUMENTS = ("q", "k", "o", "do", "lse", "dlse", "delta", "origin", "bias", "scale", "causal", "has_dlse")
FAULTS = ("far", "nothing", "dlse", "lanes")
"""What can be planted: lse is trusted whatever its size; an empty row's too; dlse is added; a lane's share is lost."""
WARPS = 4
LN_2 = 0.6931471805599453


@cache
def make_rows(element: str, nbytes: int, lanes: int = 32, base2: bool = False, broken: str = "") -> Kernel:
    """The kernel, which reads o and do ``nbytes`` at a time by ``lanes`` lanes a row, a power of two. ``base2``: bias
    comes times log2 e."""
    wide, load = vectors(element, nbytes), scalar(element, "75").load
    elements, words, fetch, low, high = wide.elements, wide.words, wide.load, wide.low, wide.high
    per_word, single = 2 if wide.pairs else 1, nbytes == ITEMSIZE[element]
    over_max, over_all = lanes_max(), lanes_sum()
    over_sum, at_once = lanes_sum(lanes // 2 if broken == "lanes" else lanes), 32 // lanes
    block_rows = WARPS * at_once
    unit = LOG2_E if base2 else 1.0
    trusting, unaware, wrong_sign = broken == "far", broken == "nothing", broken == "dlse"

    @device
    def dot(o, do, batch, head, row):
        """The sum of products of two rows, in all lanes of the row."""
        a = cuda.local.array(words, uint32)
        b = cuda.local.array(words, uint32)
        lane, columns = int64(cuda.threadIdx.x & (lanes - 1)), o.shape[3]
        o_row = int64(global_address(o)) + batch * o.strides[0] + head * o.strides[1] + row * o.strides[2]
        do_row = int64(global_address(do)) + batch * do.strides[0] + head * do.strides[1] + row * do.strides[2]
        o_step = o.strides[3] if single else int64(nbytes // elements)
        do_step = do.strides[3] if single else int64(nbytes // elements)
        total = float32(0)
        for column in range(lane * elements, columns, lanes * elements):
            fetch(a, 0, uint64(o_row + column * o_step))
            fetch(b, 0, uint64(do_row + column * do_step))
            for w in range(words):
                total += low(a[w]) * low(b[w])
                if per_word == 2:
                    total += high(a[w]) * high(b[w])
        return over_sum(total)

    @device
    def ask_again(q, k, row, keys, factor, state):
        """``state``: origin and bias of a row from its scores with ``keys`` keys. ``q`` is [M, D], ``k`` [N, D]."""
        turned = factor < float32(0)
        base2 = abs(factor)
        m, l = float32(NOTHING), float32(0)
        for key in range(int64(cuda.threadIdx.x & 31), keys, int64(32)):
            s = float32(0)
            for column in range(q.shape[1]):
                s = cuda.fma(load(q, row, column), load(k, key, column), s)
            s = -s if turned else s
            top = max(m, s)
            l = l * ex2_approx((m - anchor(top)) * base2) + ex2_approx((s - anchor(top)) * base2)
            m = top
        top = over_max(m)
        l = over_all(l * ex2_approx((m - anchor(top)) * base2))
        state[0] = -top if turned else top
        state[1] = lg2_approx(l) * float32(LN_2)

    @kernel(threads=32 * WARPS, arch="75", name="backward.rows")
    def rows(q, k, o, do, lse, dlse, delta, origin, bias, scale, causal, has_dlse):
        state = cuda.local.array(2, float32)
        heads, m_rows, keys = q.shape[1], q.shape[2], k.shape[2]
        tiles = uint32((m_rows + (block_rows - 1)) // block_rows)
        of_heads, tile = uint32(cuda.blockIdx.x) // tiles, uint32(cuda.blockIdx.x) % tiles
        batch, head = int64(of_heads // uint32(heads)), int64(of_heads % uint32(heads))
        of_key = head // (heads // k.shape[1])
        first = int64(tile) * block_rows + int64(cuda.threadIdx.x >> 5) * at_once
        if first >= m_rows:
            return  # the whole warp, as all of its lanes vote below
        mine = int64(cuda.threadIdx.x & 31) // lanes
        row = min(first + mine, m_rows - 1)  # of lanes beyond the last
        total = dot(o, do, batch, head, row)
        if has_dlse != 0:
            total += dlse[batch, head, row] if wrong_sign else -dlse[batch, head, row]
        log = lse[batch, head, row]
        start, shift = float32(0), log
        empty = log == float32(NOTHING) and not unaware
        if empty:
            shift = float32(-NOTHING)
        far = abs(log) > float32(NEAR) and not empty and not trusting
        if vote_any(far):
            for other in range(at_once):
                if vote_any(far and mine == other):
                    asked = min(first + other, m_rows - 1)
                    seen = min(keys, asked + keys - m_rows + 1) if causal != 0 else keys
                    ask_again(q[batch, head], k[batch, of_key], asked, seen, scale * float32(LOG2_E), state)
                    if mine == other:
                        start, shift = state[0], state[1]
        if cuda.threadIdx.x & (lanes - 1) == 0 and first + mine < m_rows:
            delta[batch, head, row] = float32(0) if empty else total
            origin[batch, head, row] = start
            bias[batch, head, row] = shift * float32(unit)

    return rows


@device
def make_weight(s, origin, scale, bias):
    """P of a score, from what the kernel above says of its row. The product with log2 e comes last, so that nothing is
    rounded but lse itself."""
    return ex2_approx(cuda.fma(s - origin, scale, -bias) * float32(LOG2_E))


def width_for(shape: Shape) -> int:
    """Bytes a lane reads at once, as wide as alignment lets it."""
    return min(16, shape.vector if shape.vector >= 4 else ITEMSIZE[shape.element])


def lanes_for(shape: Shape) -> int:
    """Lanes a row: a power of two, so that all of them have something to read."""
    reads = -(-shape.d * ITEMSIZE[shape.element] // width_for(shape))
    return min(32, 1 << max(0, reads - 1).bit_length())


def launch_rows(shape: Shape, *, base2: bool = False, broken: str = "") -> Launch:
    """The launch that every plan begins with."""
    lanes = lanes_for(shape)
    kernel = make_rows(shape.element, width_for(shape), lanes, base2, broken)
    blocks = -(-shape.m * lanes // (32 * WARPS)) * shape.heads * shape.batch
    return Launch(kernel, blocks, kernel.threads, 0, ARGUMENTS)
