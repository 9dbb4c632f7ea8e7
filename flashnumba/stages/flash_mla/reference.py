"""Multi-head latent attention in NumPy: from its definition, absorbed, from pages, and by the seesaw.

A model of this kind keeps of each token one latent row ``c`` of 512 numbers for all heads, and one rotated key ``r`` of
64. Heads have matrices that make their keys and values of it::

    definition    k_h = [c W_uk,h | r]      v_h = c W_uv,h       o_h = softmax(scale q_h k_h^T) v_h
    absorbed      q_nope (c W_uk)^T = (q_nope W_uk^T) c^T        o_h = (softmax(scale q'_h K^T) c) W_uv,h

with ``q' = [q_nope W_uk^T | q_rope]``, 576 numbers a head. So all heads attend to the same rows ``K = [c | r]``, of
which the first 512 columns are V: attention with one head of keys and values, however many of queries.

The scale belongs to the definition, whose heads have 128 + 64 columns: ``(128 + 64)^-0.5``, not ``576^-0.5``.

Shapes: q ``[B, S, H, D]``, K ``[B, N, D]``; out ``[B, S, H, DV]``, lse ``[B, H, S]``. Source: DeepSeek-V2, arXiv
2405.04434, section 2.1; FlashMLA, ``docs/20250422-new-kernel-deep-dive.md``.
"""

from __future__ import annotations

import numpy as np

__all__ = ["absorbed", "definition", "gather", "merge", "paged", "rounded", "seesaw"]

LATENT, ROPE, PAGE = 512, 64, 64


def attend(q, k, v, scale, visible):
    """(o ``[S, H, DV]``, lse ``[H, S]``) of q ``[S, H, D]`` with one head of keys; ``visible`` is ``[S, N]``."""
    s = np.einsum("shd,nd->shn", q, k) * scale  # [S, H, N]
    s = np.where(visible[:, None], s, -np.inf)  # [S, H, N]
    m = s.max(-1, initial=-np.inf, keepdims=True)  # [S, H, 1]
    p = np.exp(s - np.where(np.isneginf(m), 0, m))  # [S, H, N]
    l = p.sum(-1, keepdims=True)  # [S, H, 1]
    with np.errstate(divide="ignore"):
        lse = (m + np.log(l))[..., 0].T  # [H, S]
    return np.einsum("shn,nd->shd", p, v) / np.where(l == 0, 1, l), lse


def seen(s: int, n: int, causal: bool) -> np.ndarray:
    """``[S, N]``: which keys a query sees; causal is bottom-right aligned."""
    if not causal:
        return np.ones((s, n), bool)
    return np.arange(n) <= np.arange(s)[:, None] + n - s


def definition(q_nope, q_rope, c, r, w_uk, w_uv, scale, causal=False):
    """(o ``[S, H, 128]``, lse ``[H, S]``): each head's own keys and values made of the latent rows.

    Args:
        q_nope, q_rope: ``[S, H, 128]`` and ``[S, H, 64]``, the latter rotated.
        c, r: ``[N, 512]`` and ``[N, 64]``, the latter rotated.
        w_uk, w_uv: ``[H, 512, 128]``.
    """
    k = np.concatenate([np.einsum("nc,hcd->hnd", c, w_uk), np.broadcast_to(r, (w_uk.shape[0], *r.shape))], -1)
    v = np.einsum("nc,hcd->hnd", c, w_uv)  # [H, N, 128]
    q = np.concatenate([q_nope, q_rope], -1)  # [S, H, 192]
    each = [attend(q[:, h : h + 1], k[h], v[h], scale, seen(q.shape[0], len(c), causal)) for h in range(w_uk.shape[0])]
    return np.concatenate([o for o, _ in each], 1), np.concatenate([lse for _, lse in each])


def absorbed(q_nope, q_rope, c, r, w_uk, w_uv, scale, causal=False):
    """As :func:`definition`, with queries in latent space: one head of keys and values."""
    q = np.concatenate([np.einsum("shd,hcd->shc", q_nope, w_uk), q_rope], -1)  # [S, H, 576]
    k = np.concatenate([c, r], -1)  # [N, 576]
    o, lse = attend(q, k, c, scale, seen(q.shape[0], len(c), causal))  # [S, H, 512]
    return np.einsum("shc,hcd->shd", o, w_uv), lse


def gather(cache, block_table, length: int) -> np.ndarray:
    """``[length, D]``: a request's rows from pages ``cache [pages, 64, D]``, which its row of the table names."""
    pages = -(-length // PAGE)
    return cache[block_table[:pages]].reshape(-1, cache.shape[-1])[:length]


def paged(q, cache, block_table, lengths, scale, causal=False, dv=LATENT):
    """(o ``[B, S, H, DV]``, lse ``[B, H, S]``) in float64: request b attends to its ``lengths[b]`` rows."""
    b, s, h, _ = q.shape
    o, lse = np.zeros((b, s, h, dv)), np.zeros((b, h, s))
    for i, length in enumerate(lengths):
        k = gather(np.asarray(cache), block_table[i], int(length)).astype(np.float64)  # [N, D]
        o[i], lse[i] = attend(q[i].astype(np.float64), k, k[:, :dv], scale, seen(s, int(length), causal))
    return o, lse


def rounded(q, cache, block_table, lengths, scale, causal=False, dv=LATENT):
    """As :func:`paged` in the kernels' precision: float32 inside, P and the result rounded to q's type."""
    b, s, h, _ = q.shape
    o, lse = np.zeros((b, s, h, dv), np.float32), np.zeros((b, h, s), np.float32)
    for i, length in enumerate(lengths):
        k = gather(np.asarray(cache), block_table[i], int(length)).astype(np.float32)  # [N, D]
        x = np.einsum("shd,nd->shn", q[i].astype(np.float32), k) * np.float32(scale)
        x = np.where(seen(s, int(length), causal)[:, None], x, np.float32(-np.inf))  # [S, H, N]
        m = x.max(-1, initial=-np.inf, keepdims=True)
        p = np.exp(x - np.where(np.isneginf(m), np.float32(0), m))
        l = p.sum(-1, keepdims=True, dtype=np.float32)
        p = p.astype(q.dtype).astype(np.float32)
        o[i] = np.einsum("shn,nd->shd", p, k[:, :dv]) / np.where(l == 0, np.float32(1), l)
        with np.errstate(divide="ignore"):
            lse[i] = (m + np.log(l))[..., 0].T
    return o.astype(q.dtype), lse


def merge(states):
    """(o, lse) of a request from those of its parts, which may be empty (lse -inf): ``[parts, S, H, DV]`` and
    ``[parts, H, S]``."""
    o, lse = (np.asarray(x) for x in states)
    top = lse.max(0, initial=-np.inf)  # [H, S]
    weight = np.exp(lse - np.where(np.isneginf(top), 0, top))  # [parts, H, S]
    total = weight.sum(0)  # [H, S]
    share = weight / np.where(total == 0, 1, total)  # [parts, H, S]
    with np.errstate(divide="ignore"):
        return np.einsum("phs,pshd->shd", share, o), top + np.log(total)


def seesaw(q, k, dv: int, scale: float, block: int = 64):
    """(o ``[M, DV]``, lse ``[M]``) two blocks of keys a step, each half of O's columns by a partner of its own.

    q is ``[M, D]``, k ``[N, D]``. O of 64 x 512 fills half of a multiprocessor's registers, so there is one, and two
    warpgroups have half of its columns each: ``left`` and ``right``. Each makes P of one block and lends it to the
    other. What the left one did in units of its own maximum is brought to the right one's, which saw more::

        left   P0 = exp(S0 - m0)   O_l = a0 O_l + P0 V0_l           then O_l = a1 O_l + P1 V1_l
        right  P1 = exp(S1 - m1)   O_r = a0 a1 O_r + P1 V1_r        then O_r = O_r + (a1 P0) V0_r
    """
    half, (m_rows, n) = dv // 2, (q.shape[0], k.shape[0])
    left, right = np.zeros((m_rows, half)), np.zeros((m_rows, dv - half))
    m, l = np.full((m_rows, 1), -np.inf), np.zeros((m_rows, 1))

    def decay(before, after):
        return np.exp(before - np.where(np.isneginf(after), 0, after))

    for at in range(0, n, 2 * block):
        k0, k1 = k[at : at + block], k[at + block : at + 2 * block]  # [64, D] each; the second may be empty
        s0, s1 = q @ k0.T * scale, q @ k1.T * scale  # [M, 64]
        m0 = np.maximum(m, s0.max(-1, initial=-np.inf, keepdims=True))  # [M, 1]
        m1 = np.maximum(m0, s1.max(-1, initial=-np.inf, keepdims=True))  # [M, 1]
        a0, a1, p0, p1 = decay(m, m0), decay(m0, m1), decay(s0, m0), decay(s1, m1)
        left = left * a0 + p0 @ k0[:, :half]
        right = right * (a0 * a1) + p1 @ k1[:, half:dv]
        right = right + (p0 * a1) @ k0[:, half:dv]
        left = left * a1 + p1 @ k1[:, :half]
        l = l * a0 * a1 + (p0 * a1).sum(-1, keepdims=True) + p1.sum(-1, keepdims=True)
        m = m1
    with np.errstate(divide="ignore"):
        return np.concatenate([left, right], -1) / np.where(l == 0, 1, l), (m + np.log(l))[:, 0]
