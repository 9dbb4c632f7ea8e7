"""The gradients of attention on CUDA cores: float32 arithmetic for float32, float16, bfloat16, any GPU from sm_75.

The idea. Three kernels one after the other, none of which adds to memory that another block adds to, so that the bits
are the same every time:

``rows``
    delta and the origin of the exponents of each row, :mod:`flashnumba.stages.backward.rows`.
``dq``
    a block owns rows of Q and dO and walks over the keys: ``dQ += dS K``.
``dkdv``
    a block owns rows of K and V and walks over the queries of all heads that read them: ``dV += P^T dO``,
    ``dK += dS^T Q``.

Both make P and dS again from what they have in shared memory, ::

    S = Q K^T    dP = dO V^T    P = exp(scale (S - origin) - bias)    dS = P o (dP - delta)

the second transposed, S^T = K Q^T and dP^T = V dO^T, so that a thread's rows are always the block's own. That makes
seven products where one pass over tiles would do with five: what repeatability costs.

Who has what. As in flash_forward's simt: sixteen neighbouring threads share a row, products walk in pieces over what
they sum over, and weights go through shared memory to the threads that need them for their columns. ::

    shared memory    two tiles  own x d,   weights  own x other,   one piece: other x bd, or bk x d

The limits. D is 1 to 256, padded with zeros to a multiple of 32. Causal is bottom-right; tiles that nobody sees are not
visited, masks are applied where the diagonal or an end crosses a tile. Gradients of a key that nobody sees are 0.

What changed since flash_forward: no maximum and no sum, as lse knows them; two more products, two more inputs.

Source: Dao, FlashAttention-2, arXiv 2307.08691, algorithm 2; there one kernel adds to dQ by atomics.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

from flashnumba.machine.function import Kernel, device, kernel
from flashnumba.machine.instructions import shared_address
from flashnumba.machine.numba import cuda, float32, uint32, uint64
from flashnumba.stages.backward.problem import ROWS, Launch, Plan, Shape, rows_scratch, signature
from flashnumba.stages.backward.rows import launch_rows, make_weight
from flashnumba.stages.backward.simt_steps import make_steps, start_of
from flashnumba.stages.backward.simt_tiles import Tiles, tiles_for
from flashnumba.tiles.products import LANES, lane_and_row

if TYPE_CHECKING:
    from flashnumba.machine.compiler import CompileCase

__all__ = ["FAULTS", "PLANS", "Tiles", "compile_cases", "make_dkdv", "make_dq", "plan_simt"]

DQ = ("q", "k", "v", "do", "dq", *ROWS, "scale", "causal")
DKDV = ("q", "k", "v", "do", "dk", "dv", *ROWS, "scale", "causal")
FAULTS = ("free", "ready", "weights", "tail", "diagonal", "scale", "delta", "group", "start", "stride")
"""What can be planted. Barriers left out: "free" before a piece is overwritten, "ready" before it is read, "weights"
before dS takes the place of P. In masks: "tail", "diagonal"; "start" begins a causal walk a tile late. In formulas:
"scale" of the result, "delta", "group" takes only a group's first head. "stride" takes one array's for another's."""


@cache
def make_dq(tiles: Tiles, element: str, broken: str = "") -> Kernel:
    """The kernel of dQ; a launch has ``tiles.threads`` and ``tiles.shared``. ``broken``: one of :data:`FAULTS`."""
    D, OWN, OTHER, R = tiles.d, tiles.own, tiles.other, tiles.rows
    C, CD = OTHER // LANES, D // LANES
    own_bytes, piece_bytes, s_size, acc_size = 4 * tiles.own_words, 4 * tiles.piece_words, R * C, R * CD
    raw_size, load, multiply, accumulate, put, store = make_steps(tiles, element, broken)
    place = lane_and_row(R)
    no_tail, no_diagonal, no_scale = (broken == name for name in ("tail", "diagonal", "scale"))
    no_delta, swapped = broken == "delta", broken == "stride"

    @device
    def make_ds(s, dp, rows, scale, end, diagonal, causal):
        """s becomes dS; keys from ``end`` on, and if causal beyond ``diagonal`` + row, have none; all of the tile."""
        x, y = place()
        for i in range(R):
            first = OTHER if no_tail else end
            if causal and not no_diagonal:
                first = min(first, diagonal + y + i + 1)
            for j in range(C):
                at = i * C + j
                p = make_weight(s[at], rows[3 * i], scale, rows[3 * i + 1])
                s[at] = p * (dp[at] if no_delta else dp[at] - rows[3 * i + 2]) if x + LANES * j < first else float32(0)

    rows_size = 3 * R

    @kernel(threads=tiles.threads, min_blocks=2, arch="75", name="backward.simt dq")
    def simt_dq(q, k, v, do, dq, delta, origin, bias, scale, causal):
        q_tile = shared_address(cuda.shared.array(0, float32))
        do_tile = q_tile + uint32(own_bytes)
        piece = do_tile + uint32(own_bytes)
        weights = piece + uint32(piece_bytes)
        raw = cuda.local.array(raw_size, uint32)
        s = cuda.local.array(s_size, float32)
        dp = cuda.local.array(s_size, float32)
        acc = cuda.local.array(acc_size, float32)
        rows = cuda.local.array(rows_size, float32)

        _, heads, m, d = q.shape
        n = k.shape[2]
        row_tiles = (m + OWN - 1) // OWN
        row0 = cuda.blockIdx.x % row_tiles * OWN
        head = cuda.blockIdx.x // row_tiles % heads
        batch = cuda.blockIdx.x // row_tiles // heads
        kv_head = head // (heads // k.shape[1])
        k_rows, v_rows = start_of(k, batch, kv_head, 0), start_of(v, batch, kv_head, 0)
        v_step = k.strides[2] if swapped else v.strides[2]
        diagonal = row0 + n - m  # the last key that the block's first row sees, if causal
        keys = n
        if causal:
            keys = min(n, diagonal + OWN)  # no row of this block sees more

        _, y = place()
        for i in range(R):
            row = min(row0 + y + i, m - 1)  # rows that are not there compute like the last, and store nothing
            rows[3 * i] = origin[batch, head, row]
            rows[3 * i + 1] = bias[batch, head, row]
            rows[3 * i + 2] = delta[batch, head, row]
        for i in range(acc_size):
            acc[i] = float32(0)
        load(raw, q_tile, start_of(q, batch, head, row0), q.strides[2], q.strides[3], m - row0, d)
        load(raw, do_tile, start_of(do, batch, head, row0), do.strides[2], do.strides[3], m - row0, d)
        for key in range(0, keys, OTHER):
            k_from, v_from = k_rows + uint64(key * k.strides[2]), v_rows + uint64(key * v_step)
            multiply(raw, s, q_tile, piece, k_from, k.strides[2], k.strides[3], keys - key, d)
            multiply(raw, dp, do_tile, piece, v_from, v_step, v.strides[3], keys - key, d)
            make_ds(s, dp, rows, scale, keys - key, diagonal - key, causal)
            put(s, weights)  # the last weights were read before the barriers of these products
            accumulate(raw, acc, weights, piece, k_from, k.strides[2], k.strides[3], keys - key, d)
        store(dq[batch, head], row0, acc, float32(1) if no_scale else scale)

    return simt_dq


@cache
def make_dkdv(tiles: Tiles, element: str, broken: str = "") -> Kernel:
    """The kernel of dK and dV; as :func:`make_dq`."""
    D, OWN, OTHER, R = tiles.d, tiles.own, tiles.other, tiles.rows
    C, CD = OTHER // LANES, D // LANES
    own_bytes, piece_bytes, s_size, acc_size = 4 * tiles.own_words, 4 * tiles.piece_words, R * C, R * CD
    raw_size, load, multiply, accumulate, put, store = make_steps(tiles, element, broken)
    place = lane_and_row(R)
    no_tail, no_diagonal, no_scale = (broken == name for name in ("tail", "diagonal", "scale"))
    no_delta, first_only, late, swapped = (broken == name for name in ("delta", "group", "start", "stride"))
    no_barrier = broken == "weights"

    @device
    def make_p_ds(s, dp, origin, bias, delta, row0, rows_left, scale, diagonal, causal):
        """s becomes P^T and dp dS^T; ``origin``, ``bias`` and ``delta`` are [M], of which the tile's rows begin at
        ``row0``. Key 0 of the tile is visible to rows from ``-diagonal`` on, counted in the tile."""
        x, y = place()
        for j in range(C):
            col = x + LANES * j
            row = row0 + col
            there = col < rows_left or no_tail
            at_row = row if col < rows_left else row0
            begin, shift, mean = origin[at_row], bias[at_row], delta[at_row]
            for i in range(R):
                at = i * C + j
                seen = there and (not causal or no_diagonal or y + i <= diagonal + col)
                p = make_weight(s[at], begin, scale, shift)
                s[at] = p if seen else float32(0)
                dp[at] = p * (dp[at] if no_delta else dp[at] - mean) if seen else float32(0)

    @kernel(threads=tiles.threads, min_blocks=2, arch="75", name="backward.simt dkdv")
    def simt_dkdv(q, k, v, do, dk, dv, delta, origin, bias, scale, causal):
        k_tile = shared_address(cuda.shared.array(0, float32))
        v_tile = k_tile + uint32(own_bytes)
        piece = v_tile + uint32(own_bytes)
        weights = piece + uint32(piece_bytes)
        raw = cuda.local.array(raw_size, uint32)
        s = cuda.local.array(s_size, float32)
        dp = cuda.local.array(s_size, float32)
        dk_acc = cuda.local.array(acc_size, float32)
        dv_acc = cuda.local.array(acc_size, float32)

        _, heads, m, d = q.shape
        _, kv_heads, n, _ = k.shape
        key_tiles = (n + OWN - 1) // OWN
        key0 = cuda.blockIdx.x % key_tiles * OWN
        kv_head = cuda.blockIdx.x // key_tiles % kv_heads
        batch = cuda.blockIdx.x // key_tiles // kv_heads
        group = heads // kv_heads
        q_step, do_step = q.strides[2], q.strides[2] if swapped else do.strides[2]
        begin = 0
        if causal:
            begin = max(0, key0 - (n - m)) // OTHER * OTHER  # no row before sees any key of this block
            if late:
                begin += OTHER

        for i in range(acc_size):
            dk_acc[i] = float32(0)
            dv_acc[i] = float32(0)
        load(raw, k_tile, start_of(k, batch, kv_head, key0), k.strides[2], k.strides[3], n - key0, d)
        load(raw, v_tile, start_of(v, batch, kv_head, key0), v.strides[2], v.strides[3], n - key0, d)
        for head in range(kv_head * group, kv_head * group + (min(1, group) if first_only else group)):
            q_rows, do_rows = start_of(q, batch, head, 0), start_of(do, batch, head, 0)
            for row in range(begin, m, OTHER):
                q_from, do_from = q_rows + uint64(row * q_step), do_rows + uint64(row * do_step)
                multiply(raw, s, k_tile, piece, q_from, q_step, q.strides[3], m - row, d)
                multiply(raw, dp, v_tile, piece, do_from, do_step, do.strides[3], m - row, d)
                make_p_ds(
                    s, dp, origin[batch, head], bias[batch, head], delta[batch, head], row, m - row, scale,
                    row + n - m - key0, causal,
                )  # fmt: skip
                put(s, weights)  # the last weights were read before the barriers of these products
                accumulate(raw, dv_acc, weights, piece, do_from, do_step, do.strides[3], m - row, d)
                if not no_barrier:
                    cuda.syncthreads()  # all have read P before dS takes its place
                put(dp, weights)
                accumulate(raw, dk_acc, weights, piece, q_from, q_step, q.strides[3], m - row, d)
        store(dk[batch, kv_head], key0, dk_acc, float32(1) if no_scale else scale)
        store(dv[batch, kv_head], key0, dv_acc, float32(1))

    return simt_dkdv


def plan_with(tiles: Tiles, shape: Shape, broken: str = "") -> Plan:
    """Three launches with some tiles; ``broken`` plants one of :data:`FAULTS` in the last two."""
    of_rows = -(-shape.m // tiles.own) * shape.heads * shape.batch
    of_keys = -(-shape.n // tiles.own) * shape.kv_heads * shape.batch
    dq, dkdv = make_dq(tiles, shape.element, broken), make_dkdv(tiles, shape.element, broken)
    return Plan(
        (
            launch_rows(shape),
            Launch(dq, of_rows, tiles.threads, tiles.shared, DQ),
            Launch(dkdv, of_keys, tiles.threads, tiles.shared, DKDV),
        ),
        rows_scratch(shape),
    )


def plan_simt(shape: Shape) -> Plan:
    """Three launches: each row's numbers, dQ, and dK with dV."""
    return plan_with(tiles_for(shape), shape)


PLANS = {"simt": plan_simt}


def compile_cases() -> Iterator[CompileCase]:
    """The kernels as they are launched, for the compiler's tables and gates."""
    from flashnumba.machine.compiler import CompileCase

    cases = [("float32", d, 16) for d in (64, 128, 256)]
    cases += [("float32", 128, 4), ("bfloat16", 256, 2)]
    told: set[Kernel] = set()  # kernels of rows are the same for several d
    for element, d, vector in cases:
        for launch in plan_simt(Shape(element, 1, 1, 1, 1024, 1024, d, vector=vector)).launches:
            if launch.kernel in told:
                continue
            told.add(launch.kernel)
            title = f"{launch.kernel.name} {element} d {d} by {vector} bytes"
            wanted = signature(element, launch.args)
            yield CompileCase(title, launch.kernel, wanted, launch.threads, launch.shared)
