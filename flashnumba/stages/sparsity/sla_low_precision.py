"""SLA as a GPU computes it: in float32, with roundings where kernels have them. Error budgets come from it.

Source: as :mod:`flashnumba.stages.sparsity.sla_reference`, whose definitions these are.
"""

from __future__ import annotations

from math import sqrt

import numpy as np

from flashnumba.stages.sparsity.sla_reference import (
    BLOCK,
    EPS,
    SlaResult,
    features,
    group_of,
    linear_tiles,
    mean_of,
    over_groups,
    pull_back,
    spread,
    weights_of,
)

__all__ = ["low_precision"]


def low_precision(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, classes: np.ndarray, proj: np.ndarray | None = None,
    do: np.ndarray | None = None, *, feature_map: str = "softmax", form: str = "paper", eps: float | None = None,
    causal: bool = False, scale: float | None = None, block: int = BLOCK,
) -> tuple[SlaResult, tuple[np.ndarray, ...]]:  # fmt: skip
    """The forward, and (dq, dk, dv, dproj) if ``do`` is given, in float32 with roundings where kernels have them.

    Kernels project V and not O^l: O^l proj = phi(Q) H / (phi(Q) Z) with V proj in the place of V. ``o_l`` is that.
    Rounded to the dtype of q are what they hand to a tensor core or to one another: weights of the softmax and dS, phi,
    V proj, h_j, H_i, g, dH_i and dh_j, of which Z and dZ are the last rows, the gradient of V proj; and the linear part
    of a gradient before the other is added. H_i is a mean over tiles and not a sum, by a power of two, so that it stays
    in range. rowsum(dO o O^s) is what is left of rowsum(dO o O) without the linear part's: O^s need not be kept.
    """
    dtype, one = q.dtype, np.float32
    (m, n), d = (q.shape[-2], k.shape[-2]), q.shape[-1]
    scale, eps = one(1 / sqrt(d) if scale is None else scale), one(EPS[form] if eps is None else eps)

    def rounded(x: np.ndarray) -> np.ndarray:
        return x.astype(dtype).astype(one)

    q, k, v = (x.astype(one) for x in (q, k, v))
    group = group_of(q, k)
    k, v = spread(k, q), spread(v, q)  # [..., H, N, D]
    p, lse = weights_of(q, k, classes, causal, scale, block)  # [..., M, N], [..., M]
    o_s = rounded(p) @ v  # [..., M, D]
    phi_q, phi_k = rounded(features(q, feature_map)), rounded(features(k, feature_map))
    w = None if proj is None else rounded(proj)  # [D, D]
    v_l = v if w is None else rounded(v @ w)  # [..., N, D]
    tiles = linear_tiles(classes, form).astype(one)  # [..., row tiles, key tiles]
    unit = one(mean_of(tiles.shape[-1]))
    phi_k_tiles, v_tiles = _in_tiles(phi_k, block), _in_tiles(v_l, block)  # [..., key tiles, block, D]
    h = rounded(phi_k_tiles.swapaxes(-1, -2) @ v_tiles)  # [..., key tiles, D, D]
    z = rounded(phi_k_tiles.sum(-2))  # [..., key tiles, D]
    big_h = rounded(unit * np.einsum("...ij,...jrc->...irc", tiles, h))  # [..., row tiles, D, D]
    big_z = rounded(unit * (tiles @ z))  # [..., row tiles, D]
    phi_q_tiles = _in_tiles(phi_q, block)  # [..., row tiles, block, D]
    total = phi_q_tiles @ big_z[..., None] + eps * unit  # [..., row tiles, block, 1]
    share = np.where(total == 0, 0, 1 / np.where(total == 0, 1, total)).astype(one)  # [..., row tiles, block, 1]
    o_l = _flat(share * (phi_q_tiles @ big_h), m)  # [..., M, D]
    o = (o_s + o_l).astype(dtype)
    forward = SlaResult(o, o_s.astype(dtype), o_l.astype(dtype), lse)
    if do is None:
        return forward, ()

    do = do.astype(one)
    g = rounded(share * _in_tiles(do, block))  # [..., row tiles, block, D]
    dphi_q = g @ big_h.swapaxes(-1, -2)  # [..., row tiles, block, D]
    delta_l = (phi_q_tiles * dphi_q).sum(-1, keepdims=True)  # [..., row tiles, block, 1]
    beside = -share * delta_l  # [..., row tiles, block, 1]
    dphi_q = dphi_q + beside * big_z[..., None, :]  # [..., row tiles, block, D]
    delta = (do * o.astype(one)).sum(-1, keepdims=True) - _flat(delta_l, m)  # [..., M, 1]
    dp = do @ v.swapaxes(-1, -2)  # [..., M, N]
    ds = rounded(p * (dp - delta))  # [..., M, N]
    dq = scale * (ds @ k)  # [..., M, D]
    dk = scale * over_groups(ds.swapaxes(-1, -2) @ q, group)  # [..., Hkv, N, D]
    dv = over_groups(rounded(p).swapaxes(-1, -2) @ do, group)  # [..., Hkv, N, D]
    dbig_h = rounded(phi_q_tiles.swapaxes(-1, -2) @ g)  # [..., row tiles, D, D]
    dbig_z = rounded((phi_q_tiles * beside).sum(-2))  # [..., row tiles, D]
    # From here on by heads of keys, of which each group has had as many copies as heads.
    phi_k_tiles, v_tiles, phi_k, v = (
        x if group == 1 else x.swapaxes(0, x.ndim - axes)[::group].swapaxes(0, x.ndim - axes)
        for x, axes in ((phi_k_tiles, 4), (v_tiles, 4), (phi_k, 3), (v, 3))
    )
    dh = np.einsum("...ij,...irc->...jrc", tiles, dbig_h)  # [..., key tiles, D, D]
    dh = rounded(unit * over_groups(dh.reshape(*dh.shape[:-2], -1), group)).reshape(*v_tiles.shape[:-2], d, d)
    dz = rounded(unit * over_groups(tiles.swapaxes(-1, -2) @ dbig_z, group))  # [..., Hkv, key tiles, D]
    dphi_k = v_tiles @ dh.swapaxes(-1, -2) + dz[..., None, :]  # [..., Hkv, key tiles, block, D]
    dv_l = rounded(_flat(phi_k_tiles @ dh, n))  # [..., Hkv, N, D]
    dproj = (v.swapaxes(-1, -2) @ dv_l).reshape(-1, d, d).sum(0)  # [D, D]
    dq = (dq + rounded(pull_back(phi_q, _flat(dphi_q, m), feature_map))).astype(dtype)
    dk = (dk + rounded(pull_back(phi_k, _flat(dphi_k, n), feature_map))).astype(dtype)
    dv = (dv + (dv_l if w is None else rounded(dv_l @ w.T))).astype(dtype)
    return forward, (dq, dk, dv, dproj)


def _in_tiles(x: np.ndarray, block: int) -> np.ndarray:
    """Rows by tiles, zeros after the last: ``[..., tiles, block, D]``."""
    *lead, rows, d = x.shape
    more = -rows % block
    x = np.concatenate([x, np.zeros((*lead, more, d), x.dtype)], -2)
    return x.reshape(*lead, (rows + more) // block, block, d)


def _flat(x: np.ndarray, rows: int) -> np.ndarray:
    *lead, tiles, block, d = x.shape
    return x.reshape(*lead, tiles * block, d)[..., :rows, :]
