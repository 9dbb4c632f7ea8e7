"""Problems for fuzzing attention: sizes, heads, layouts, masks, scales and values that belong together.

One strategy for every backend; the sizes are the caller's.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from tests.stages.flash_forward.attention_cases import LAYOUTS, Case

__all__ = ["problems"]

HEADS = ((1, 1), (2, 2), (2, 1), (3, 1), (4, 2), (6, 2))
SCALES = (None, None, None, 0.0, 1.0, -0.25, 0.07, -1.0, 1e-30)
VALUES = ("normal", "normal", "flat", "peaked", "huge", "sparse", "nan in q", "masked by -inf")


@st.composite
def problems(
    draw: st.DrawFn, most_m: int, most_n: int, most_d: int = 256, most_batch: int = 2,
    dtypes: tuple[type, ...] = (np.float16, ml_dtypes.bfloat16, np.float32), mapped: bool = False,
) -> Case:  # fmt: skip
    """A case with its layout; equal draws give equal arrays. Sizes cluster at 0, 1, tiles' borders and the most.

    There are at least four rows and values are not near 0: a budget from few and tiny results would be luck. If
    ``mapped`` the copy engine takes q, k and v as they lie.
    """
    m, n, d = draw(_size(most_m)), draw(_size(most_n, least=int(mapped))), draw(_size(most_d, least=1))
    if mapped:
        d = -(-d // 8) * 8
    heads, kv_heads = draw(st.sampled_from(HEADS))
    batch, seed = draw(st.integers(1, most_batch)), draw(st.integers(0, 2**20))
    batch = max(batch, -(-4 // (heads * max(1, m))))
    dtype, kind = draw(st.sampled_from(dtypes)), draw(st.sampled_from(VALUES))
    scale, causal = draw(st.sampled_from(SCALES)), draw(st.booleans())
    rng = np.random.default_rng(seed)
    shapes = {"q": (batch, heads, m, d), "k": (batch, kv_heads, n, d), "v": (batch, kv_heads, n, d)}
    arrays = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    arrays["v"] += np.where(np.arange(d) % 2, 2, -2)
    if kind == "huge":
        # Whole numbers and a power of two: scores of 1e5 that are exact in float32, as is their scaling.
        side = np.sqrt(2e5 / d)
        arrays["q"], arrays["k"] = (np.round(arrays[name] * side).clip(-250, 250) for name in "qk")
        scale = draw(st.sampled_from([1.0, -1.0, 0.5]))
    arrays = {name: x.astype(dtype) for name, x in arrays.items()}
    _change(kind, arrays, rng)
    title = f"{kind} {batch} x {heads}/{kv_heads} x {m} x {n} x {d}, seed {seed}"
    case = Case(title, **arrays, causal=causal, scale=scale)
    for which in "qkv":
        layout = draw(st.sampled_from(["packed", "packed", *LAYOUTS]))
        if layout != "packed" and getattr(case, which).size:
            laid = case.with_arrays(f"{case.name}, {which} {layout}", LAYOUTS[layout], which)
            case = laid if laid.shape.mapped or not mapped else case
    return case


def _size(most: int, least: int = 0) -> st.SearchStrategy[int]:
    borders = [n for tile in (16, 32, 64, 128) for n in (tile - 1, tile, tile + 1)]
    near = sorted({least, 1, most, *(n for n in borders if n <= most)})
    return st.one_of(st.integers(least, most), st.sampled_from(near))


def _change(kind: str, arrays: dict[str, np.ndarray], rng: np.random.Generator) -> None:
    """Make the values what their kind says, in place."""
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    if kind == "flat":
        q[...] = 0
    elif kind == "peaked":
        q *= q.dtype.type(8)
    elif kind == "sparse":
        v[rng.random(v.shape) < 0.9] = 0
    elif kind == "nan in q" and q.size:
        q.reshape(-1)[rng.integers(q.size)] = np.nan
    elif kind == "masked by -inf" and k.size:
        # Some keys weigh nothing: a first column of -inf, met by queries of 1 there.
        q[..., 0] = 1
        k[rng.random(k.shape[:-1]) < 0.5, 0] = -np.inf
