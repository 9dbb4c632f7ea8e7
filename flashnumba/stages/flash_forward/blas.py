"""Attention for everyday use without a GPU: the blocked recurrence on NumPy's BLAS, in float32, on all cores.

The idea. Most of the work is two matrix products, which BLAS does at a core's full speed; what is left, the softmax, is
a few passes over a tile of scores that stays in the core's own cache. A tile is ``TILE`` scores: ``ROWS`` rows (or as
many as there are) by as many keys as then fit. Heads that are smaller than a tile share one. Memory is bounded: each
worker has one tile, one block of K and V, and the state of ``CHUNK`` rows; no M x N, and no copy of whole K or V.

The scores are kept transposed, ``[keys, rows]``: what belongs to a row, its maximum and its sum, then lies along the
last axis, where NumPy broadcasts and reduces fastest. The query heads that share a head of K and V (GQA) are rows of
one tile, query by query, so that K and V are neither copied nor read again. Under a causal mask tiles end at the last
key that one of their rows sees.

Workers are threads: NumPy lets go of Python's lock while it computes. BLAS's own threads are stopped meanwhile, by
threadpoolctl, for the whole process: both together are slower than either.

Conventions and limits are those of ``reference.py``. Raw scores must be finite in float32. Work is cut by shapes alone,
whatever the number of threads, so that results repeat bit for bit.

What changed since ``reference.py``: float32, tiles, threads. Source: as there.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import prod
from threading import Lock
from typing import Any

import numpy as np

__all__ = ["attend", "forward"]

TILE = 1 << 18
"""Scores a tile: 1 MB of float32, half of a core's second-level cache."""
ROWS = 256
"""Rows a tile: fewer make the products slower, more waste work along the diagonal of a causal mask."""
CHUNK = 2048
"""Most rows of a task, for which a block of K and V is converted once."""
TASKS = 16
"""Tasks that a problem is cut into, if that leaves each a tile: threads are then busy to the end."""
KEYS = 4096
"""Most keys a tile has, however few its rows."""
SERIAL = 1 << 24
"""Multiplications below which another thread costs more than it brings."""


@dataclass(frozen=True)
class Tiling:
    """How a problem is cut, from its sizes alone.

    Attributes:
        batches, heads: of q's batch entries and of K's heads, that a tile takes together.
        queries, chunk: a tile's, and a task's; each makes H // Hkv rows.
        keys: a tile's.
    """

    batches: int
    heads: int
    queries: int
    chunk: int
    keys: int


def tiling(batch: int, kv_heads: int, group: int, m: int, n: int, d: int) -> Tiling:
    """Tiles of about :data:`TILE` scores, in whole queries; of fewer where heads are so small that inputs decide."""
    queries = min(m, max(1, ROWS // group))
    rows = queries * group
    keys = min(max(1, n), KEYS, max(1, TILE // rows))
    tiles = -(-m // queries)
    chunk = queries * max(1, min(CHUNK // rows, tiles * batch * kv_heads // TASKS))
    room = TILE // max(rows * keys, (rows + keys) * d // 4) if queries == m and keys >= n else 1
    heads = min(kv_heads, max(1, room))
    batches = min(batch, max(1, room // heads)) if heads == kv_heads else 1
    return Tiling(batches, heads, queries, chunk, keys)


def forward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float | None = None, causal: bool = False
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Attention with results of its own: o as q, packed, and lse ``[..., H, M]`` float32; see :func:`attend`."""
    o, lse = np.empty(q.shape, q.dtype), np.empty(q.shape[:-1], np.float32)
    more = (None,) * (4 - q.ndim)
    attend(q[more], k[more], v[more], o[more], lse[more], q.shape[-1] ** -0.5 if scale is None else scale, causal)
    return o, lse


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, o: np.ndarray, lse: np.ndarray, scale: float, causal: bool
) -> None:  # fmt: skip
    """Attention into given arrays, which are checked by the caller.

    Args:
        q: ``[B, H, M, D]`` float16, bfloat16 or float32, any strides.
        k, v: ``[B, Hkv, N, D]`` of the same dtype; Hkv divides H.
        o: as q, packed, written. It is rounded once, from float32.
        lse: ``[B, H, M]`` float32, packed, written.
        scale: of the scores.
        causal: key j is visible to row i iff ``j <= i + N - M``.
    """
    if q.size == 0:
        return
    (batch, heads, m, d), (kv_heads, n) = q.shape, k.shape[1:3]
    group = heads // kv_heads
    # An axis that is cut in two needs no copy, whatever its stride.
    q, o = (x.reshape(batch, kv_heads, group, m, d).transpose(0, 1, 3, 2, 4) for x in (q, o))
    lse = lse.reshape(batch, kv_heads, group, m).transpose(0, 1, 3, 2)
    cut = tiling(batch, kv_heads, group, m, n, d)
    # Under a causal mask a chunk's keys grow with its rows: the longest first.
    tasks = deque(product(_slices(m, cut.chunk)[::-1], _slices(batch, cut.batches), _slices(kv_heads, cut.heads)))
    large = q.size * n > SERIAL
    workers = min(len(tasks), THREADS.count()) if large else 1

    def work() -> None:
        own = Buffers()
        # NaN and infinities are results, see the reference's limits; the setting is a thread's own.
        with np.errstate(invalid="ignore", over="ignore", under="ignore"):
            while tasks:
                try:
                    i, b, h = tasks.popleft()
                except IndexError:  # another worker was quicker
                    return
                _chunk(own, cut, q[b, h, i], k[b, h], v[b, h], o[b, h, i], lse[b, h, i], scale, i.start + n - m, causal)

    if workers > 1:
        with THREADS, ThreadPoolExecutor(workers) as pool:
            for done in [pool.submit(work) for _ in range(workers)]:
                done.result()
    else:
        with nullcontext() if large else THREADS:  # a single large task: BLAS's own threads share it
            work()


class Buffers:
    """A worker's own memory, by name; it grows to what is asked for and is used again."""

    def __init__(self) -> None:
        self._held: dict[str, np.ndarray] = {}

    def __call__(self, name: str, *shape: int) -> np.ndarray:
        """A packed float32 array of any contents."""
        size = prod(shape)
        held = self._held.get(name)
        if held is None or held.size < size:
            held = self._held[name] = np.empty(size, np.float32)
        return held[:size].reshape(shape)


def _chunk(
    own: Buffers, cut: Tiling, q: np.ndarray, k: np.ndarray, v: np.ndarray, o: np.ndarray, lse: np.ndarray,
    scale: float, ahead: int, causal: bool,
) -> None:  # fmt: skip
    """Some queries ``q [b, h, i, group, D]`` with all keys ``k [b, h, N, D]``; query i sees keys up to i + ahead."""
    *outer, queries, group, d = q.shape
    rows, n = queries * group, k.shape[-2]
    packed = own("q", *outer, rows, d)
    np.copyto(packed.reshape(q.shape), q, casting="unsafe")
    m, l, acc = own("m", *outer, rows), own("l", *outer, rows), own("acc", *outer, rows, d)
    m[...], l[...], acc[...] = -np.inf, 0, 0
    seen = max(0, min(n, queries + ahead)) if causal else n
    for j in range(0, seen, cut.keys):
        end = min(seen, j + cut.keys)
        k_block, v_block = _float32(own, "k", k[..., j:end, :]), _float32(own, "v", v[..., j:end, :])
        first = max(0, j - ahead) // cut.queries * cut.queries if causal else 0
        for i in range(first, queries, cut.queries):
            last = min(queries, i + cut.queries)
            r = slice(i * group, last * group)
            many, limit = (min(end, last + ahead) - j, i + ahead - j) if causal else (end - j, end - j)
            _step(
                own, packed[..., r, :], m[..., r], l[..., r], acc[..., r, :],
                k_block[..., :many, :], v_block[..., :many, :], scale, limit, group,
            )  # fmt: skip
    l_or_one = np.where(l == 0, np.float32(1), l)
    acc /= l_or_one[..., None]
    o[...] = acc.reshape(q.shape).astype(o.dtype, copy=False)
    lse[...] = (m + np.log(l_or_one)).reshape(q.shape[:-1])


def _step(
    own: Buffers, q: np.ndarray, m: np.ndarray, l: np.ndarray, acc: np.ndarray, k: np.ndarray, v: np.ndarray,
    scale: float, limit: int, group: int,
) -> None:  # fmt: skip
    """One tile of the recurrence: rows ``q [..., R, D]`` meet keys ``k``, ``v [..., C, D]``; updates m, l and acc.

    Row r sees keys up to ``limit + r // group``.
    """
    rows, keys = q.shape[-2], k.shape[-2]
    s = np.matmul(k, q.swapaxes(-1, -2), out=own("s", *k.shape[:-1], rows))
    s *= np.float32(scale)
    if limit < keys - 1:
        hidden = max(0, limit + 1)  # the first key that some row does not see
        at = np.arange(hidden, keys)[:, None] > limit + np.arange(rows) // group
        np.copyto(s[..., hidden:, :], -np.inf, where=at)
    m_next = np.maximum(m, s.max(-2))
    anchor = np.where(m_next == -np.inf, np.float32(0), m_next)
    s -= anchor[..., None, :]
    p = np.exp(s, out=s)
    alpha = np.exp(m - anchor)
    m[...] = m_next
    l *= alpha
    l += np.matmul(np.ones(keys, np.float32), p)
    acc *= alpha[..., None]
    acc += np.matmul(p.swapaxes(-1, -2), v, out=own("o", *acc.shape))


def _float32(own: Buffers, name: str, x: np.ndarray) -> np.ndarray:
    """The array itself where BLAS can read it as it lies; else a float32 copy."""
    row, element = x.strides[-2:]
    if x.dtype == np.float32 and element == 4 and row >= 4 * x.shape[-1] and row % 4 == 0:
        return x
    block = own(name, *x.shape)
    np.copyto(block, x, casting="unsafe")
    return block


def _slices(size: int, step: int) -> list[slice]:
    return [slice(i, min(size, i + step)) for i in range(0, size, step)]


# -- threads -----------------------------------------------------------------------------------------------------------
class Threads:
    """How many threads BLAS would use, and a way to hold it to one while threads of ours call it.

    The limit is the process's: the first of several callers at once sets it, the last lifts it.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._limit, self._before = Lock(), 0, None, 1

    def count(self) -> int:
        """Threads to use: BLAS's own number, so that OPENBLAS_NUM_THREADS and its like hold here too."""
        with self._lock:
            return self._before if self._inside else self._ask()

    @staticmethod
    def _ask() -> int:
        if _blas() is None:
            return 1  # BLAS's threads cannot be held, and both together are slower than either
        numbers = [library.num_threads for library in _blas().lib_controllers]
        return max(numbers, default=os.cpu_count() or 1)  # Accelerate, macOS', is not seen and needs no limit

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = self._ask()
                self._limit = _blas().limit(limits=1) if _blas() else None
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._limit:
                self._limit.restore_original_limits()


@cache
def _blas() -> Any:
    """threadpoolctl's handle of the BLAS that NumPy has loaded; None without threadpoolctl."""
    try:
        from threadpoolctl import ThreadpoolController
    except ImportError:
        return None
    return ThreadpoolController().select(user_api="blas")


THREADS = Threads()
