"""FlashAttention's forward on CUDA cores: float32 arithmetic for float32, float16, bfloat16, any GPU from sm_75.

The idea. A block owns ``bm`` query rows of one head and walks over the keys, ``bn`` at a time. What it knows of a row
is the maximum m so far, the sum l of exponentials in units of exp(m), and the weighted sum acc of values in the same
units. The matrix of scores never reaches memory::

    S = scale * Q K^T       m' = max(m, rowmax S)       P = exp(S - m')       alpha = exp(m - m')
    l = alpha * l + rowsum P    acc = alpha * acc + P V    m = m'         O = acc / l    lse = m + ln l

Who has what. Sixteen neighbouring threads share a row, and each has ``rows`` rows. A row's maximum takes four
exchanges; its sum is kept in sixteen parts, one a thread, until the end. P goes through shared memory, as each thread
needs the weights of all keys for its columns of acc. ::

    shared memory    Q  bm x d,   P  bm x bn,   and one piece: of K bn keys x bd columns, or of V bk keys x d columns

Both products walk in pieces over what they sum over, S over columns and acc over keys, so a block needs little shared
memory whatever d is. Loads of a piece are under way while other warps still work on the last one.

The limits. D is 1 to 256, padded with zeros to a multiple of 32. Causal is bottom-right: row i sees key j if
``j <= i + N - M``. Tiles that no row of the block sees are not visited; masks are applied where the diagonal or the
last key crosses a tile, nowhere else. Scale first, then -inf. A row that sees nothing has O = 0 and lse = -inf. Results
are the same bits every time.

What changed since the stage online_softmax: scores are made here, not read, and the state has a third component.

Sources: Dao et al., FlashAttention, arXiv 2205.14135, algorithm 1; Dao, FlashAttention-2, arXiv 2307.08691, section
3.1: no division before the end, blocks over rows as well as heads, masks only at the diagonal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

from flashnumba.machine.function import Kernel, device, kernel
from flashnumba.machine.instructions import ex2_approx, global_address, shared_address, st_shared_f32
from flashnumba.machine.numba import cuda, float32, uint32, uint64
from flashnumba.stages.flash_forward.simt_tiles import PAD, Tiles, tiles_for
from flashnumba.stages.heads import Launch, Plan, Shape, signature
from flashnumba.tiles.elements import scalar
from flashnumba.tiles.online import LOG2_E, NOTHING, anchor, exponential, inverse, rescale
from flashnumba.tiles.products import LANES, column_pair, lane_and_row, make_multiply, make_multiply_transposed
from flashnumba.tiles.reduce import lanes_max, lanes_sum
from flashnumba.tiles.window import window

if TYPE_CHECKING:
    from flashnumba.machine.compiler import CompileCase

__all__ = ["PLANS", "Tiles", "compile_cases", "make_simt", "plan_simt"]


@cache
def make_simt(tiles: Tiles, element: str, broken: str = "") -> Kernel:
    """The kernel for some tiles and an element type; a launch has ``tiles.threads`` and ``tiles.shared``.

    Args:
        tiles: see :class:`Tiles`.
        element: float16, bfloat16 or float32.
        broken: plants a fault. Barriers left out: ``"k_free"``, ``"k_ready"``, ``"v_free"``, ``"v_ready"``. In the
            recurrence: ``"rescale"`` leaves acc in its old units, ``"anchor"`` takes -inf from -inf, ``"product"``
            multiplies by log2 e before the difference. In masks: ``"tail"`` and ``"diagonal"`` leave them out,
            ``"top_left"`` aligns there, ``"order"`` scales after them, ``"limit"`` stops a tile early. In addresses:
            ``"stride"`` takes K's rows for V's, ``"heads"`` deals heads out in turns, ``"columns"`` reads past d.
    """
    D, BM, BN, BD, BK, R = tiles.d, tiles.bm, tiles.bn, tiles.bd, tiles.bk, tiles.rows
    C, CD = BN // LANES, D // LANES  # keys, and columns of acc, a thread
    q_pitch, k_pitch, p_pitch = D + PAD, BD + PAD, BN + PAD
    q_bytes, piece_bytes, s_size, acc_size = 4 * tiles.q_words, 4 * tiles.piece_words, R * C, R * CD
    moves = [
        window(element, tiles.vector, tiles.threads, *size, cleared=broken != "columns")
        for size in ((BM, BD, q_pitch), (BN, BD, k_pitch), (BK, D, D))
    ]
    (_, fetch_q, put_q), (_, fetch_k, put_k), (_, fetch_v, put_v) = moves
    raw_size = max(move.words for move in moves)
    multiply_qk = make_multiply_transposed(R, C, BD, q_pitch, k_pitch)
    multiply_pv = make_multiply(R, CD, BK, p_pitch, D)
    place, over_max, over_sum = lane_and_row(R), lanes_max(LANES), lanes_sum(LANES)
    store = scalar(element, "75").store
    k_free, k_ready, v_free, v_ready = (broken != name for name in ("k_free", "k_ready", "v_free", "v_ready"))
    no_rescale, no_anchor, product_first = (broken == name for name in ("rescale", "anchor", "product"))
    no_tail, no_diagonal, top_left, late = (broken == name for name in ("tail", "diagonal", "top_left", "order"))
    in_turns, swapped, short = broken == "heads", broken == "stride", BN if broken == "limit" else 0

    @device
    def scale_all(s, scale):
        for i in range(s_size):
            s[i] *= scale

    @device
    def hide(s, end, diagonal, causal):
        """-inf for keys from ``end`` on, and if causal for those beyond ``diagonal`` + row; all counted in the tile."""
        x, y = place()
        for i in range(R):
            first = BN if no_tail else end
            if causal and not no_diagonal:
                first = min(first, diagonal + y + i + 1)
            for j in range(C):
                if x + LANES * j >= first:
                    s[i * C + j] = float32(NOTHING)

    @device
    def online_softmax(s, m, l, acc):
        """One step of the recurrence, row by row: s becomes P, and the state is in units of exp(the new m)."""
        for i in range(R):
            top = m[i]
            for j in range(C):
                top = max(top, s[i * C + j])
            top = over_max(top)
            origin = top if no_anchor else anchor(top)
            alpha = rescale(m[i], top)
            m[i] = top
            l[i] *= alpha
            if not no_rescale:
                for c in range(CD):
                    acc[i * CD + c] *= alpha
            for j in range(C):
                p = exponential(s[i * C + j], origin)
                if product_first:
                    p = ex2_approx(s[i * C + j] * float32(LOG2_E) - origin * float32(LOG2_E))
                s[i * C + j] = p
                l[i] += p

    @device
    def put_p(s, p_tile):
        x, y = place()
        for i in range(R):
            for j in range(C):
                st_shared_f32(p_tile + uint32(4 * ((y + i) * p_pitch + x + LANES * j)), s[i * C + j])

    @device
    def store_rows(out, lse, row0, acc, m, l):
        """Divide, and write the rows and columns that there are: ``out`` is [M, d], ``lse`` [M]."""
        x, y = place()
        for i in range(R):
            row = row0 + y + i
            total = over_sum(l[i])
            share = inverse(total)
            if row < out.shape[0]:
                for c in range(CD):
                    col = column_pair(x, c)
                    if col < out.shape[1]:
                        store(out, row, col, acc[i * CD + c] * share)
                if x == 0:
                    lse[row] = m[i] + math.log(total)

    @kernel(threads=tiles.threads, min_blocks=tiles.blocks, arch=tiles.arch)
    def simt(q, k, v, o, lse, scale, causal):
        q_tile = shared_address(cuda.shared.array(0, float32))
        piece = q_tile + uint32(q_bytes)
        p_tile = piece + uint32(piece_bytes)
        raw = cuda.local.array(raw_size, uint32)
        s = cuda.local.array(s_size, float32)
        acc = cuda.local.array(acc_size, float32)
        m = cuda.local.array(R, float32)
        l = cuda.local.array(R, float32)

        _, heads, rows, d = q.shape
        _, kv_heads, n, _ = k.shape
        row_tiles = (rows + BM - 1) // BM
        row0 = cuda.blockIdx.x % row_tiles * BM
        head = cuda.blockIdx.x // row_tiles % heads
        batch = cuda.blockIdx.x // row_tiles // heads
        kv_head = head % kv_heads if in_turns else head // (heads // kv_heads)
        q_rows = global_address(q) + uint64(batch * q.strides[0] + head * q.strides[1] + row0 * q.strides[2])
        k_rows = global_address(k) + uint64(batch * k.strides[0] + kv_head * k.strides[1])
        v_rows = global_address(v) + uint64(batch * v.strides[0] + kv_head * v.strides[1])
        v_step = k.strides[2] if swapped else v.strides[2]
        diagonal = row0 if top_left else row0 + n - rows  # the last key that the first row sees, if causal
        keys = n
        if causal:
            keys = min(n, diagonal + BM)  # no row of this block sees more

        for i in range(R):
            m[i] = float32(NOTHING)
            l[i] = float32(0)
        for i in range(acc_size):
            acc[i] = float32(0)
        for col in range(0, D, BD):
            fetch_q(raw, q_rows + uint64(col * q.strides[3]), q.strides[2], q.strides[3], rows - row0, d - col)
            put_q(raw, q_tile + uint32(4 * col))
        for key in range(0, keys - short, BN):
            for i in range(s_size):
                s[i] = float32(0)
            for col in range(0, D, BD):
                source = k_rows + uint64(key * k.strides[2] + col * k.strides[3])
                fetch_k(raw, source, k.strides[2], k.strides[3], keys - key, d - col)
                if k_free:
                    cuda.syncthreads()  # all have read the last piece, of V or of K, before this one takes its place
                put_k(raw, piece)
                if k_ready:
                    cuda.syncthreads()  # the piece is there, and Q before the first, when it is read
                multiply_qk(s, q_tile + uint32(4 * col), piece)
            if not late:
                scale_all(s, scale)
            if key + BN > keys or (causal and key + BN - 1 > diagonal):
                hide(s, keys - key, diagonal - key, causal)
            if late:
                scale_all(s, scale)
            online_softmax(s, m, l, acc)
            put_p(s, p_tile)  # the last P was read before the barriers of K's pieces
            for first in range(0, min(BN, keys - key), BK):
                fetch_v(raw, v_rows + uint64((key + first) * v_step), v_step, v.strides[3], keys - key - first, d)
                if v_free:
                    cuda.syncthreads()  # all have read the last piece, of K or of V, before this one takes its place
                put_v(raw, piece)
                if v_ready:
                    cuda.syncthreads()  # the piece is there, and P before the first, when it is read
                multiply_pv(acc, p_tile + uint32(4 * first), piece)
        store_rows(o[batch, head], lse[batch, head], row0, acc, m, l)

    return simt


def plan_simt(shape: Shape) -> Plan:
    """One launch: a block for each tile of rows of each head."""
    tiles = tiles_for(shape)
    blocks = -(-shape.m // tiles.bm) * shape.heads * shape.batch
    return Plan((Launch(make_simt(tiles, shape.element), blocks, tiles.threads, tiles.shared),))


PLANS = {"simt": plan_simt}


def compile_cases() -> Iterator[CompileCase]:
    """The kernel as it is launched, for the compiler's tables and gates: every padded d that doubles, every element;
    and of those for older GPUs and of narrow loads what takes most registers."""
    from flashnumba.machine.compiler import CompileCase

    cases = [("float32", d, 16, "90a") for d in (32, 64, 128, 256)]
    cases += [("float16", 128, 16, "90a"), ("bfloat16", 64, 16, "90a")]
    cases += [("float32", 128, 16, "75"), ("bfloat16", 256, 2, "75")]
    for element, d, vector, arch in cases:
        (launch,) = plan_simt(Shape(element, 1, 1, 1, 1024, 1024, d, vector=vector, arch=arch)).launches
        title = f"flash_forward.simt {element} d {d} by {vector} bytes, sm_{launch.kernel.arch} on"
        yield CompileCase(title, launch.kernel, signature(element), launch.threads, launch.shared)
