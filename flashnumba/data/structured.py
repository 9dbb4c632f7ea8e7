"""Long q, k and v with the structure that attention of trained models shows, from nothing but a seed.

Normal random numbers have no tiles that could be left out: every key is about as good as any other. What makes models'
attention sparse is known well enough to be drawn:

    sinks            the first tokens are looked at by all rows
    a local band     the score falls with the distance, over a window of the head's own width
    topics           stretches of text that are about the same thing look at one another, wherever they are
    heavy tails      a few keys are many times as long as the others, and are looked at by whom they suit

Each head has its own mixture, of four kinds in turn (:data:`KINDS`). A token is a sum of directions, each with a
strength that is given as the score it makes::

    score_ij = sink + local * mean_w cos(w (i - j)) + topic [same topic] + noise * tail_j

Sources of what is drawn: StreamingLLM, arXiv 2309.17453 (sinks); MInference, arXiv 2407.02490 (kinds of heads). The
numbers are ours and stand for no model: they say how methods behave, not how good a model stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np

__all__ = ["KINDS", "Kind", "structured"]


@dataclass(frozen=True)
class Kind:
    """Strengths of one kind of head, in scores.

    Attributes:
        sink: of the first tokens, for all rows.
        local: at distance 0, falling off over ``window`` tokens.
        topic: between tokens of one topic.
        noise: standard deviation of what has no structure.
        tail: of the logarithm of a key's length.
    """

    sink: float
    local: float
    window: int
    topic: float
    noise: float
    tail: float


KINDS = {
    "local": Kind(sink=14, local=22, window=64, topic=0.5, noise=0.4, tail=0.1),
    "topics": Kind(sink=9, local=6, window=256, topic=20, noise=0.5, tail=0.1),
    "retrieval": Kind(sink=16, local=3, window=32, topic=3, noise=0.8, tail=0.4),
    "diffuse": Kind(sink=7, local=6, window=512, topic=3, noise=0.5, tail=0.1),
}
"""The four kinds, by name; head h has kind h mod 4."""

SINKS, TOPICS, STRETCH = 4, 24, 192
"""Tokens that are sinks; topics; tokens of a stretch on average."""


def structured(
    n: int, d: int = 128, *, heads: int = 4, kv_heads: int | None = None, batch: int = 1, m: int | None = None,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """q ``[batch, heads, m, d]``, k and v ``[batch, kv_heads, n, d]`` float16 for a scale of ``1 / sqrt(d)``.

    Args:
        n: tokens.
        kv_heads: as many as heads if None. A head of k has the kind of its own number, and so have q's heads that read
            it.
        m: q's rows are those of the last m tokens; all of them if None.

    Raises:
        ValueError: d below 32 or no multiple of 16, more rows than tokens, or heads that do not share out.
    """
    kv_heads, m = kv_heads or heads, n if m is None else m
    if d < 32 or d % 16 or m > n or heads % kv_heads:
        raise ValueError(
            f"n, d, heads, kv_heads and m are {n}, {d}, {heads}, {kv_heads} and {m}; d must be a multiple of 16 from "
            "32 on, m at most n, and kv_heads must divide heads"
        )
    rng = np.random.default_rng((seed, n, d, heads, kv_heads, batch))
    q = np.empty((batch, heads, m, d), np.float16)
    k, v = (np.empty((batch, kv_heads, n, d), np.float16) for _ in range(2))
    kinds = list(KINDS.values())
    for b in range(batch):
        for h in range(kv_heads):
            group = heads // kv_heads
            mine = slice(h * group, (h + 1) * group)
            q[b, mine], k[b, h], v[b, h] = _head(rng, kinds[h % len(kinds)], n, d, m, group)
    return q, k, v


def _head(rng: np.random.Generator, kind: Kind, n: int, d: int, m: int, group: int):
    """q ``[group, m, d]``, k and v ``[n, d]`` of one head of keys."""
    places = d // 2  # columns for the place; the rest for sinks, topics and noise
    w = np.geomspace(0.02, 2.5, places // 2) * 64 / kind.window  # [places / 2]
    angle = np.arange(n)[:, None] * w  # [n, places / 2]
    place = np.concatenate([np.cos(angle), np.sin(angle)], 1) / sqrt(places // 2)  # [n, places], of length 1
    rest = d - places
    basis = np.linalg.qr(rng.standard_normal((rest, rest)))[0]  # [rest, rest]
    sink, topics = basis[0], basis[1:][np.arange(TOPICS) % (rest - 1)]  # [rest], [TOPICS, rest]
    changes = rng.random(n) < 1 / STRETCH
    topic = rng.integers(0, TOPICS, changes.sum() + 1)[np.cumsum(changes)]  # [n]
    unit = d**0.25  # of which the product, scaled, is 1

    def strength(score: float) -> float:
        return unit * sqrt(score)

    def noise(rows: int) -> np.ndarray:
        return rng.standard_normal((rows, rest), np.float32) * (unit * sqrt(kind.noise) * rest**-0.25)

    k = np.concatenate([strength(kind.local) * place, strength(kind.topic) * topics[topic] + noise(n)], 1)  # [n, d]
    k *= np.exp(kind.tail * rng.standard_normal((n, 1)) - kind.tail**2)  # [n, d]
    k[:SINKS] = 0
    k[:SINKS, places:] = strength(kind.sink) * sink
    last = slice(n - m, n)
    q = np.stack([
        np.concatenate([
            strength(kind.local) * place[last],
            strength(kind.sink) * sink + strength(kind.topic) * topics[topic[last]] + noise(m),
        ], 1) for _ in range(group)
    ])  # [group, m, d]  # fmt: skip
    v = rng.standard_normal((n, d), np.float32) + topics[topic][:, :1]  # [n, d]
    return q, k, v
