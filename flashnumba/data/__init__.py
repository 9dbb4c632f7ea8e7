"""Real Q, K and V: what a trained transformer computes when it reads a text.

Random numbers make poor attention: their scores are small and their softmax is flat. The scores here reach 79, far past
the 11.09 at which ``exp`` overflows float16. README.md beside this file tells the origin, the licence and the rebuild.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np

__all__ = ["MiniLM", "load_minilm"]


@dataclass(frozen=True, eq=False)
class MiniLM:
    """Queries, keys and values of three layers of all-MiniLM-L6-v2, reading the Apache License 2.0.

    The plain scale of these heads is ``1/sqrt(32)``. All arrays are read-only.

    Attributes:
        q, k, v: ``[3, 12, 512, 32]`` float16: layer, head, token, head dimension.
        layers: ``[3]`` int64, which of the model's six layers they are: 0, 3, 5.
        tokens: ``[512]`` str, the text as the model saw it, ``[CLS]`` first and ``[SEP]`` last.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    layers: np.ndarray
    tokens: np.ndarray

    def scores(self, layer: int, head: int) -> np.ndarray:
        """Scaled scores ``Q K^T / sqrt(32)`` of one head, ``[512, 512]`` float64.

        Args:
            layer: index into ``layers``, 0 to 2.
            head: 0 to 11.
        """
        q, k = self.q[layer, head].astype(np.float64), self.k[layer, head].astype(np.float64)
        return q @ k.T / np.sqrt(q.shape[-1])


@cache
def load_minilm() -> MiniLM:
    """The Q, K, V that ship with the package (3.3 MB on disk, 3.5 MB in memory; read once).

    Origin: the weights of sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0), run in float64 on the text of the Apache
    License 2.0, stored as float16. ``rebuild.py`` beside this file makes it again.
    """
    with files(__name__).joinpath("minilm_qkv.npz").open("rb") as file, np.load(file) as stored:
        data = MiniLM(*(stored[name] for name in ("q", "k", "v", "layers", "tokens")))
    for array in (data.q, data.k, data.v, data.layers, data.tokens):
        array.setflags(write=False)
    return data
