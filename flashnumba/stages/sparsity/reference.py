"""Sparse attention in NumPy: which tiles each method leaves out, and what then comes out.

Scores of far-away tokens are often so small that their weights do not show. Three schools decide which tiles of S to
leave out:

    while going     BLASST, warp-level skip      after S_ij, from the maximum of the rows so far
    beforehand      SpargeAttn                   from one mean token for each block of q and of k
    as told         any mask of blocks           by whoever calls

**While going.** Tile j is left out of rows i if no row of them has, with m_i its greatest score of the tiles before ::

    max_j S_ij - max(m_i, max_j S_ij) >= ln threshold

Its weights are below threshold times that of the row's maximum, each; the maximum itself never moves by it, so what is
left out is all that is lost: at most (keys left out) * threshold of the row's sum. That is why thresholds go down as
1 / N. The first tile a row sees is never left out for it. BLASST asks all rows of a tile; the warp-level skip of
SpargeAttn the rows of one warp, and in its paper the tile's weights still count in the sum (``keep_sum``), while the
released code drops them.

**Beforehand.** A block's tokens are alike if the mean cosine of their pairs is above ``alike``. For blocks alike the
scores of mean tokens stand for those of all pairs: of their softmax the largest are kept, while the sum of those kept
stays within ``cdf``, or ``topk`` of all blocks. Whatever is not alike is computed in full: rows with all keys, keys for
all rows. A token of zeros is like no other.

Conventions are :mod:`flashnumba.stages.flash_forward.reference`'s. Everything is in float64. A threshold of 0, or a
mask of ones, leaves out nothing. Rows none of whose blocks is kept give 0 and lse = -inf.

Sources: BLASST, arXiv 2512.12087, section 3; SpargeAttn, arXiv 2502.18137, sections 3.3 and 3.4, and its released code.
"""

from __future__ import annotations

from math import sqrt

import numpy as np

from flashnumba.stages.flash_forward.reference import in_order, normalise

__all__ = ["alikeness", "attend", "by_blocks", "expand", "low_precision", "predict", "scores", "skip",
           "skip_gathered", "top_blocks", "visible_blocks"]  # fmt: skip


def scores(q: np.ndarray, k: np.ndarray, scale: float | None = None, causal: bool = False) -> np.ndarray:
    """Scaled scores, -inf where a row must not look: ``[B, H, M, N]`` float64."""
    m, n = q.shape[-2], k.shape[-2]
    k = np.repeat(k, q.shape[-3] // max(1, k.shape[-3]), axis=-3)  # [B, H, N, D]
    s = q.astype(np.float64) @ k.astype(np.float64).swapaxes(-1, -2)  # [B, H, M, N]
    s = s * (1 / sqrt(q.shape[-1]) if scale is None else scale)  # [B, H, M, N]
    seen = np.arange(n) <= np.arange(m)[:, None] + n - m if causal else np.ones((m, n), bool)  # [M, N]
    return np.where(seen, s, -np.inf)  # [B, H, M, N]


def attend(s: np.ndarray, v: np.ndarray, kept: np.ndarray, summed: np.ndarray | None = None):
    """(o, lse) of scores where only ``kept`` ones count, or ``summed`` ones in the sum: bool ``[B, H, M, N]``."""
    v = np.repeat(v, s.shape[-3] // max(1, v.shape[-3]), axis=-3).astype(np.float64)  # [B, H, N, D]
    of_sum = np.where(kept if summed is None else summed, s, -np.inf)  # [B, H, M, N]
    top = of_sum.max(-1, keepdims=True, initial=-np.inf)  # [B, H, M, 1]
    origin = np.where(np.isneginf(top), 0, top)  # [B, H, M, 1]
    total = np.exp(of_sum - origin).sum(-1, keepdims=True)  # [B, H, M, 1]
    p = np.where(kept, np.exp(s - origin), 0)  # [B, H, M, N]
    with np.errstate(divide="ignore"):
        lse = (origin + np.log(total))[..., 0]  # [B, H, M]
    return times_kept(p, v, kept) / np.where(total == 0, 1, total), lse


def times_kept(p: np.ndarray, v: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """``p @ v``, in which a row does not read what it does not keep, or 0 * NaN would be NaN."""
    odd = ~np.isfinite(v).all(-1)  # [B, H, N]
    o = p @ np.where(odd[..., None], 0, v)  # [B, H, M, D]
    for b, h in np.argwhere(odd.any(-1)):
        at = np.flatnonzero(odd[b, h])  # [n]
        with np.errstate(invalid="ignore"):
            terms = p[b, h][:, at, None] * v[b, h][at]  # [M, n, D]
            o[b, h] += np.where(kept[b, h][:, at, None], terms, 0).sum(1)
    return o


def low_precision(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, kept: np.ndarray, summed: np.ndarray | None = None,
    scale: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """:func:`attend` from q, k and v as a GPU does it: the model of
    :func:`flashnumba.stages.flash_forward.reference.low_precision`, with scores left out. ``kept`` and ``summed`` hold
    visible scores alone. Returns o of q's dtype, 16 bits, and lse float32."""
    k, v = (
        np.repeat(x, q.shape[-3] // max(1, x.shape[-3]), axis=-3).astype(np.float32) for x in (k, v)
    )  # [B, H, N, D], twice
    s = in_order(q.astype(np.float32), k.swapaxes(-1, -2), 16)  # [B, H, M, N]
    s = s * np.float32(1 / sqrt(q.shape[-1]) if scale is None else scale)  # [B, H, M, N]
    s = np.where(kept if summed is None else summed, s, np.float32(-np.inf))  # [B, H, M, N]
    top = s.max(-1, initial=-np.inf)  # [B, H, M]
    p = np.exp(s - np.where(np.isneginf(top), np.float32(0), top)[..., None])  # [B, H, M, N]
    total = np.add.accumulate(p, -1)[..., -1] if p.shape[-1] else np.zeros_like(top)  # [B, H, M]
    weights = np.where(kept, p, 0).astype(q.dtype).astype(np.float32)  # [B, H, M, N]
    o, lse = normalise((top, total, in_order(weights, v, 16)))  # [B, H, M, D], [B, H, M]
    return o.astype(q.dtype), lse


def expand(blocks: np.ndarray, rows: int, keys: int, m: int, n: int) -> np.ndarray:
    """Of each block, ``[..., R, C]``, its ``rows`` x ``keys`` scores: ``[..., M, N]``."""
    return np.repeat(np.repeat(blocks, rows, -2)[..., :m, :], keys, -1)[..., :n]  # [..., M, N]


def visible_blocks(m: int, n: int, rows: int, keys: int, causal: bool) -> np.ndarray:
    """Blocks of which some row sees some key: bool ``[R, C]``."""
    last_row = np.minimum(np.arange(1, -(-m // rows) + 1) * rows, m) - 1  # [R]
    first_key = np.arange(-(-n // keys)) * keys  # [C]
    seen = first_key <= last_row[:, None] + n - m  # [R, C]
    return seen if causal else np.ones_like(seen)  # [R, C]


def skip(s: np.ndarray, rows: int, keys: int, threshold: float) -> np.ndarray:
    """Which tiles of ``rows`` x ``keys`` scores are computed, from the first key to the last: bool ``[..., R, C]``.

    A tile that no row sees is not.
    """
    m, n = s.shape[-2:]
    tiles_r, tiles_c = -(-m // rows), -(-n // keys)
    padded = np.full((*s.shape[:-2], tiles_r * rows, tiles_c * keys), -np.inf)  # [..., R rows, C keys]
    padded[..., :m, :n] = s
    top = padded.reshape(*s.shape[:-2], tiles_r, rows, tiles_c, keys).max(-1)  # [..., R, rows, C]
    with np.errstate(divide="ignore"):
        limit = np.log(threshold)
    before = np.full(top.shape[:-1], -np.inf)  # [..., R, rows]
    kept = np.zeros((*s.shape[:-2], tiles_r, tiles_c), bool)  # [..., R, C]
    for j in range(tiles_c):
        local = top[..., j]  # [..., R, rows]
        above = np.maximum(before, local)  # [..., R, rows]
        with np.errstate(invalid="ignore"):
            away = np.where(np.isneginf(local), -np.inf, local - above)  # [..., R, rows]
        needed = ~(away < limit) if threshold > 0 else ~np.isneginf(local)  # [..., R, rows]; a NaN needs its tile
        kept[..., j] = needed.any(-1)  # [..., R]
        before = np.where(kept[..., j, None], above, before)  # [..., R, rows]
    return kept


def skip_gathered(
    s: np.ndarray, listed: np.ndarray, unit: int, rows: int, keys: int, pieces: int, threshold: float
) -> np.ndarray:  # fmt: skip
    """As :func:`skip`, of tiles that are gathered from ``pieces`` blocks of a list each, in its order.

    Args:
        s: ``[B, H, M, N]``.
        listed: blocks of ``keys`` keys that a row tile of ``rows`` rows looks at, bool ``[B, H, row tiles, C]``.
        unit: rows that decide together, a divisor of ``rows``.

    Returns:
        Which blocks are computed, bool ``[B, H, R, C]`` of ``unit`` rows.
    """
    batch, heads, m, n = s.shape
    kept = np.zeros((batch, heads, -(-m // unit), listed.shape[-1]), bool)  # [B, H, R, C]
    for b, h, tile in np.ndindex(listed.shape[:3]):
        numbers = np.flatnonzero(listed[b, h, tile])  # [L]
        key = (numbers[:, None] * keys + np.arange(keys)).ravel()  # [L keys]
        some = s[b, h, tile * rows : (tile + 1) * rows]  # [rows, N]
        found = np.where(key < n, some[:, np.minimum(key, n - 1)], -np.inf)  # [rows, L keys]
        tiles = skip(found, unit, pieces * keys, threshold)  # [R of the row tile, L / pieces]
        units = slice(tile * (rows // unit), tile * (rows // unit) + len(tiles))
        kept[b, h, units][:, numbers] = np.repeat(tiles, pieces, -1)[:, : len(numbers)]
    return kept


def by_blocks(q, k, v, blocks: np.ndarray, rows: int, keys: int, scale=None, causal=False):
    """(o, lse) over the blocks, bool ``[B, H, R, C]``, alone."""
    s = scores(q, k, scale, causal)  # [B, H, M, N]
    kept = expand(blocks, rows, keys, *s.shape[-2:])  # [B, H, M, N]
    return attend(np.where(kept, s, -np.inf), v, kept & ~np.isneginf(s))


def blocks_of(x: np.ndarray, rows: int) -> list[np.ndarray]:
    """``[..., N, D]`` cut into blocks of rows; the last may be short."""
    return [x[..., at : at + rows, :].astype(np.float64) for at in range(0, x.shape[-2], rows)]


def alikeness(x: np.ndarray, rows: int) -> np.ndarray:
    """The mean cosine of all pairs of tokens in each block of ``rows``: ``[..., blocks]``."""
    found = []
    for block in blocks_of(x, rows):
        length = np.linalg.norm(block, axis=-1, keepdims=True)  # [..., rows, 1]
        unit = block / np.where(length == 0, np.inf, length)  # [..., rows, D]
        found.append((unit @ unit.swapaxes(-1, -2)).mean((-1, -2)))  # [...]
    return np.stack(found, -1)  # [..., blocks]


def top_blocks(p: np.ndarray, cdf: float = 1.0, topk: float | None = None) -> np.ndarray:
    """Of each row of weights, ``[..., C]``, the largest whose sum stays within ``cdf``, or ``topk`` of all C: bool.

    One at least; equal weights in the order of their blocks. Weights below 0 are no candidates.
    """
    order = np.argsort(-p, axis=-1, kind="stable")  # [..., C]
    ranked = np.take_along_axis(p, order, -1)  # [..., C]
    if topk is None:
        chosen = np.cumsum(np.maximum(ranked, 0), -1) <= (np.inf if cdf >= 1 else cdf)  # [..., C]
    else:
        chosen = np.broadcast_to(np.arange(p.shape[-1]) < int(topk * p.shape[-1]), p.shape).copy()  # [..., C]
    chosen[..., :1] = True
    kept = np.zeros_like(chosen)
    np.put_along_axis(kept, order, chosen & (ranked >= 0), -1)
    return kept  # [..., C]


def predict(
    q: np.ndarray, k: np.ndarray, *, rows: int = 128, keys: int = 64, alike: float = 0.6, cdf: float = 0.98,
    topk: float | None = None, sink: bool = False, scale: float | None = None, causal: bool = False,
) -> np.ndarray:  # fmt: skip
    """SpargeAttn's mask of blocks: bool ``[B, H, R, C]``, of visible blocks alone."""
    group, m, n = q.shape[-3] // max(1, k.shape[-3]), q.shape[-2], k.shape[-2]
    if 0 in (m, n):
        return np.zeros((*q.shape[:-2], -(-m // rows), -(-n // keys)), bool)  # [B, H, R, C]
    same_q = alikeness(q, rows) > alike  # [B, H, R]
    same_k = np.repeat(alikeness(k, keys) > alike, group, -2)  # [B, H, C]
    mean_q = np.stack([x.mean(-2) for x in blocks_of(q, rows)], -2)  # [B, H, R, D]
    mean_k = np.repeat(np.stack([x.mean(-2) for x in blocks_of(k, keys)], -2), group, -3)  # [B, H, C, D]
    s = mean_q @ mean_k.swapaxes(-1, -2) * (1 / sqrt(q.shape[-1]) if scale is None else scale)  # [B, H, R, C]
    seen = visible_blocks(m, n, rows, keys, causal)  # [R, C]
    candidates = seen & same_k[..., None, :] & np.isfinite(s)  # [B, H, R, C]
    s = np.where(candidates, s, -np.inf)  # [B, H, R, C]
    top = s.max(-1, keepdims=True)  # [B, H, R, 1]
    p = np.exp(s - np.where(np.isneginf(top), 0, top))  # [B, H, R, C]
    total = p.sum(-1, keepdims=True)  # [B, H, R, 1]
    p = np.where(candidates, p / np.where(total == 0, 1, total), -1)  # [B, H, R, C]
    kept = top_blocks(p, cdf, topk) | ~same_q[..., None] | ~same_k[..., None, :]  # [B, H, R, C]
    if sink:
        kept[..., 0] = True
    return kept & seen  # [B, H, R, C]
