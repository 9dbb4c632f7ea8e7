"""SLA by definition: softmax attention where it is needed, linear attention where low rank will do, nothing elsewhere.

The idea. A trained attention matrix is a few large weights, which need a softmax, and a background of small ones, which
is nearly of low rank. So tiles of ``block x block`` weights are sorted into three classes by a cheap guess, the softmax
of mean-pooled rows::

    P_c = softmax(mean(Q_i) mean(K_j)^T scale)
    M_ij = +1 critical     the greatest ``critical`` of the tiles of row i       softmax attention over these alone
            0 marginal     the others                                           linear attention over these alone
           -1 negligible   the least ``negligible`` of them                     nothing

    h_j = phi(K_j)^T V_j       z_j = sum of the rows of phi(K_j)                 once for each j
    H_i = sum_{M_ij = 0} h_j   Z_i = sum_{M_ij = 0} z_j
    O^l_i = phi(Q_i) H_i / (phi(Q_i) Z_i)                                        0 where Z_i is empty
    O = O^s + O^l proj

``proj`` (D x D) is learned: the two attentions are normalised apart, and the model is fine-tuned with the map in place.

Gradients, with the map held fixed, dO^s = dO, dO^l = dO proj^T, and D = rowsum(dO o O) of each kind::

    softmax part       as :mod:`flashnumba.stages.backward.reference`, over critical tiles
    g = dO^l / (phi(Q) Z)          w = -D^l / (phi(Q) Z)
    dphi(Q) = g H^T + w Z^T        dH_i = phi(Q_i)^T g_i          dZ_i = phi(Q_i)^T w_i
    dh_j = sum_{M_ij = 0} dH_i     dz_j likewise
    dphi(K_j) = V_j dh_j^T + 1 dz_j^T          dV_j += phi(K_j) dh_j          dproj = sum over rows of (O^l)^T dO

Feature maps: softmax over the columns of a row, elu + 1, relu.

Which tiles the linear part has is the ``form``. ``"paper"``: the marginal ones. ``"rest"``: all that are not critical,
as the authors' branch SLA-1 has it. ``"all"``: all, critical ones included, with ``eps`` of 1e-5 beside the sum, as
their main branch has it.

Conventions. q and do ``[..., H, M, D]``, k and v ``[..., Hkv, N, D]`` where Hkv divides H, and head h of q has that of
keys ``h // (H // Hkv)``; or all without heads. The map is ``[..., H, row tiles, key tiles]`` int8: each head of q has a
map of its own, and so sums H_i, while states h_j are those of the heads of keys. dk and dv are sums over a group. Of T
tiles that a row tile sees ``ceil(critical T)`` are critical and ``floor(negligible T)`` negligible, but no critical
one. Of equal guesses the earlier tile counts as the greater. A causal mask is bottom-right aligned; tiles that it cuts
are critical in any case (:data:`CUT`), and tiles that no row sees are of no class (:data:`UNSEEN`), so that the linear
part needs no mask.

The limits. The classes are a guess: a tile of one great weight among small ones can have a small mean. The scale is
positive. Nothing is differentiated through the choice of classes.

Source: Zhang et al., SLA, arXiv 2509.24006, sections 4 and 5; its algorithm 1 prints 0 for the negligible class in line
6, where equation 3 has -1. Code: thu-ml/SLA, ``sparse_linear_attention``.
"""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

import numpy as np

__all__ = ["BLOCK", "CUT", "EPS", "FEATURES", "FORMS", "UNSEEN", "SlaResult", "attend", "classify", "counts",
           "features", "gradients", "group_of", "linear_tiles", "mean_of", "over_groups", "pull_back", "spread",
           "weights_of"]  # fmt: skip

BLOCK = 64
"""Rows and keys of a tile."""
CUT, UNSEEN = 2, -2
"""What a map says of a tile that the causal mask cuts, and of one that it hides."""
FEATURES = ("softmax", "elu", "relu")
FORMS = ("paper", "rest", "all")
EPS = {"paper": 0.0, "rest": 0.0, "all": 1e-5}
"""What is added to phi(Q) Z in each form."""
MILLION = 1_000_000


class SlaResult(NamedTuple):
    """What the forward gives, and keeps for the gradients.

    Attributes:
        o: ``[..., M, D]``.
        o_s, o_l: its two parts, the linear one before the projection.
        lse: ``[..., M]``, of the critical keys' scores.
    """

    o: np.ndarray
    o_s: np.ndarray
    o_l: np.ndarray
    lse: np.ndarray


# -- groups of heads --------------------------------------------------------------------------------------------------
def group_of(q: np.ndarray, k: np.ndarray) -> int:
    """Heads of q ``[..., H, M, D]`` that share one of k ``[..., Hkv, N, D]``; 1 without heads."""
    return q.shape[-3] // k.shape[-3] if q.ndim > 2 else 1


def spread(x: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Of ``[..., Hkv, N, D]`` each head as often as heads of q share it: ``[..., H, N, D]``."""
    group = group_of(q, x)
    return x if group == 1 else np.repeat(x, group, -3)


def over_groups(x: np.ndarray, group: int) -> np.ndarray:
    """``[..., H, N, D]`` summed over each ``group`` heads that follow one another: ``[..., Hkv, N, D]``."""
    if group == 1:
        return x
    *lead, heads, rows, columns = x.shape
    return x.reshape(*lead, heads // group, group, rows, columns).sum(-3)


# -- the map -----------------------------------------------------------------------------------------------------------
def counts(tiles: int, critical: float, negligible: float) -> tuple[int, int]:
    """(critical, negligible) tiles of so many, in whole millionths so that kernels count the same."""
    most = -(-round(critical * MILLION) * tiles // MILLION)
    return most, min(round(negligible * MILLION) * tiles // MILLION, tiles - most)


def pooled(x: np.ndarray, block: int = BLOCK) -> np.ndarray:
    """The mean of each tile's rows, of the dtype of x: ``[..., tiles, D]``."""
    starts = range(0, x.shape[-2], block)
    means = [x[..., i : i + block, :].mean(-2) for i in starts]
    return np.stack(means, -2) if means else np.zeros((*x.shape[:-2], 0, x.shape[-1]), x.dtype)


def classify(
    q: np.ndarray, k: np.ndarray, critical: float = 0.05, negligible: float = 0.10, causal: bool = False,
    block: int = BLOCK,
) -> np.ndarray:  # fmt: skip
    """The map of a problem: ``[..., row tiles, key tiles]`` int8. Softmax and scale leave the order as it is."""
    (m, n), q64, k64 = (q.shape[-2], k.shape[-2]), q.astype(np.float64), k.astype(np.float64)
    of_keys = spread(pooled(k64, block), q64)  # [..., key tiles, D]
    guesses = pooled(q64, block) @ of_keys.swapaxes(-1, -2)  # [..., row tiles, key tiles]
    found = np.full(guesses.shape, UNSEEN, np.int8)
    for i in range(found.shape[-2]):
        last = min((i + 1) * block, m)
        end, whole = (min(n, max(0, last + n - m)), min(n, max(0, i * block + 1 + n - m))) if causal else (n, n)
        seen = -(-end // block)
        cut = np.array([min((j + 1) * block, n) > whole for j in range(seen)], bool)  # [seen]
        most, least = counts(seen, critical, negligible)
        most = max(most, int(cut.sum()))
        ranked = np.where(cut, np.inf, guesses[..., i, :seen])  # [..., seen]
        order = np.argsort(-ranked, -1, kind="stable")  # [..., seen]
        classes = np.zeros(ranked.shape, np.int8)
        np.put_along_axis(classes, order[..., :most], 1, -1)
        np.put_along_axis(classes, order[..., seen - min(least, seen - most) :], -1, -1)
        found[..., i, :seen] = np.where(cut, CUT, classes)
    return found


def linear_tiles(classes: np.ndarray, form: str = "paper") -> np.ndarray:
    """Which tiles the linear part has, bool."""
    if form == "paper":
        return classes == 0
    return (classes == 0) | (classes == -1) if form == "rest" else (classes != CUT) & (classes != UNSEEN)


def seen_keys(classes: np.ndarray, m: int, n: int, causal: bool, block: int = BLOCK) -> np.ndarray:
    """Which keys the softmax part of each row has: ``[..., M, N]`` bool."""
    wide = np.repeat(np.repeat(classes > 0, block, -2), block, -1)[..., :m, :n]
    return wide & (np.arange(n) <= np.arange(m)[:, None] + n - m) if causal else wide


# -- feature maps ------------------------------------------------------------------------------------------------------
def features(x: np.ndarray, feature_map: str = "softmax") -> np.ndarray:
    """phi of each row, of the dtype of x."""
    if feature_map == "softmax":
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)
    if feature_map == "elu":
        return np.where(x > 0, x + x.dtype.type(1), np.exp(np.minimum(x, x.dtype.type(0))))
    return np.maximum(x, x.dtype.type(0))


def pull_back(phi: np.ndarray, dphi: np.ndarray, feature_map: str = "softmax") -> np.ndarray:
    """The gradient of x from that of phi(x); no map needs x itself: elu + 1 is at most 1 where its slope is itself."""
    if feature_map == "softmax":
        return phi * (dphi - (dphi * phi).sum(-1, keepdims=True))
    return dphi * (np.minimum(phi, phi.dtype.type(1)) if feature_map == "elu" else phi > 0)


# -- by definition, in float64 -----------------------------------------------------------------------------------------
def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, classes: np.ndarray, proj: np.ndarray | None = None, *,
    feature_map: str = "softmax", form: str = "paper", eps: float | None = None, causal: bool = False,
    scale: float | None = None, block: int = BLOCK,
) -> SlaResult:  # fmt: skip
    """The forward in float64, with all weights in memory; ``proj`` None is the identity."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = spread(k, q), spread(v, q)  # [..., H, N, D]
    scale, eps = 1 / sqrt(q.shape[-1]) if scale is None else scale, EPS[form] if eps is None else eps
    p, lse = weights_of(q, k, classes, causal, scale, block)  # [..., M, N], [..., M]
    o_s = p @ v  # [..., M, D]
    phi_q, phi_k = features(q, feature_map), features(k, feature_map)
    a = (phi_q @ phi_k.swapaxes(-1, -2)) * _wide(linear_tiles(classes, form), q, k, block)  # [..., M, N]
    total = a.sum(-1, keepdims=True) + eps  # [..., M, 1]
    o_l = (a @ v) / np.where(total == 0, 1, total)  # [..., M, D]
    o = o_s + (o_l if proj is None else o_l @ proj.astype(np.float64))
    return SlaResult(o, o_s, o_l, lse)


def gradients(
    do: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, classes: np.ndarray, proj: np.ndarray | None = None,
    *, feature_map: str = "softmax", form: str = "paper", eps: float | None = None, causal: bool = False,
    scale: float | None = None, block: int = BLOCK,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """(dq, dk, dv, dproj) in float64, as the chain rule says them of the weights: dk and dv as k and v, summed over the
    heads of a group; dproj ``[D, D]``, summed over all heads."""
    do, q, k, v = (x.astype(np.float64) for x in (do, q, k, v))
    group = group_of(q, k)
    k, v = spread(k, q), spread(v, q)  # [..., H, N, D]
    scale, eps = 1 / sqrt(q.shape[-1]) if scale is None else scale, EPS[form] if eps is None else eps
    p, _ = weights_of(q, k, classes, causal, scale, block)  # [..., M, N]
    dp = do @ v.swapaxes(-1, -2)  # [..., M, N]
    ds = scale * p * (dp - (p * dp).sum(-1, keepdims=True))  # [..., M, N]
    dq, dk, dv = ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ do
    phi_q, phi_k = features(q, feature_map), features(k, feature_map)
    kept = _wide(linear_tiles(classes, form), q, k, block)  # [..., M, N]
    a = (phi_q @ phi_k.swapaxes(-1, -2)) * kept  # [..., M, N]
    total = a.sum(-1, keepdims=True) + eps  # [..., M, 1]
    share = np.where(total == 0, 0, 1 / np.where(total == 0, 1, total))  # [..., M, 1]
    weights = a * share  # [..., M, N]
    o_l = weights @ v  # [..., M, D]
    do_l = do if proj is None else do @ proj.astype(np.float64).T  # [..., M, D]
    dproj = (o_l.swapaxes(-1, -2) @ do).reshape(-1, *2 * q.shape[-1:]).sum(0)  # [D, D]
    dw = do_l @ v.swapaxes(-1, -2)  # [..., M, N]
    da = kept * share * (dw - (weights * dw).sum(-1, keepdims=True))  # [..., M, N]
    dq += pull_back(phi_q, da @ phi_k, feature_map)
    dk += pull_back(phi_k, da.swapaxes(-1, -2) @ phi_q, feature_map)
    dv += weights.swapaxes(-1, -2) @ do_l
    return dq, over_groups(dk, group), over_groups(dv, group), dproj


def _wide(tiles: np.ndarray, q: np.ndarray, k: np.ndarray, block: int) -> np.ndarray:
    """Of tiles, each weight: ``[..., M, N]``."""
    return np.repeat(np.repeat(tiles, block, -2), block, -1)[..., : q.shape[-2], : k.shape[-2]]


def weights_of(
    q: np.ndarray, k: np.ndarray, classes: np.ndarray, causal: bool, scale: float, block: int
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """The softmax over critical keys, and its lse; of a row that has none zeros, and -inf."""
    seen = seen_keys(classes, q.shape[-2], k.shape[-2], causal, block)  # [..., M, N]
    s = np.where(seen, q.dtype.type(scale) * (q @ k.swapaxes(-1, -2)), q.dtype.type(-np.inf))  # [..., M, N]
    top = s.max(-1, keepdims=True, initial=-np.inf)  # [..., M, 1]
    e = np.exp(s - np.where(top == -np.inf, 0, top).astype(q.dtype))  # [..., M, N]
    total = e.sum(-1, keepdims=True)  # [..., M, 1]
    with np.errstate(divide="ignore"):
        return e / np.where(total == 0, 1, total).astype(q.dtype), (top + np.log(total))[..., 0]


def mean_of(tiles: int) -> float:
    """The power of two that sums over so many tiles are multiplied with."""
    return 2.0 ** -(max(1, tiles).bit_length() - 1)
