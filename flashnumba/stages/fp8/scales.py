"""What makes 8 bits enough: scales, K without its mean, and outliers spread over all columns.

**Scales.** A tensor, a head, a block of rows or a row is divided by ``scale = max|x| / largest`` before it is rounded,
and what comes of it is multiplied by the scale, once. The finer the parts, the less an outlier costs its neighbours. A
part that is all zeros has scale 1.

**K without its mean.** Keys of a head often share a large vector. ``q (k_j - mean)`` differs from ``q k_j`` by the same
number for all j, which the softmax does not see, and what is left to round is smaller.

**Incoherent processing.** With an orthogonal M, ``(Q M)(K M)^T = Q K^T``. With M random signs and then a Hadamard
matrix, divided by sqrt(D), an outlier in one column becomes small numbers in all of them. O(D log D) a row.

INT8 stands beside the two formats: 255 steps of one size.

Source: Shah et al., FlashAttention-3, arXiv 2407.08608, section 3.3; Zhang et al., SageAttention, arXiv 2410.02367.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flashnumba.stages.fp8 import codec
from flashnumba.stages.host import real_numbers

__all__ = [
    "BLOCK",
    "SCALINGS",
    "dequantize",
    "hadamard",
    "incoherent",
    "per_row",
    "quantize",
    "scaled",
    "smooth",
    "spread",
]

BLOCK = 64
"""Rows of a block that share a scale: the keys of a step of the kernels."""
SPREAD = 2.0**-40
"""Of the largest scale of a head, what those of its blocks have at least: far below what float32 sums keep."""
SCALINGS = ("tensor", "head", "block", "token")
INT8 = "int8"


def quantize(
    x: np.ndarray, fmt: str, scaling: str = "tensor", *, block: int = BLOCK
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Codes of ``x / scale``, and the scale.

    Args:
        x: ``[..., rows, D]`` float32, float16 or bfloat16. A NaN stays one and has no say in the scale.
        fmt: ``"e4m3"`` or ``"e5m2"``; ``"int8"``, for which codes are int8.
        scaling: what shares a scale: ``"tensor"``, ``"head"`` (the last two axes), ``"block"`` (``block`` rows of a
            head; the last may have fewer) or ``"token"`` (a row). A block's is at least :data:`SPREAD` of the largest
            of its head, and a block of zeros has 1 or, where that is further away, what is nearest to it.
        block: rows of a block.

    Returns:
        codes of x's shape, and float32 scales: ``[]``, ``x.shape[:-2]``, ``[..., blocks]`` or ``[..., rows]``.

    Raises:
        TypeError: x is of another type.
        ValueError: an unknown fmt or scaling, fewer than two axes, or an infinity in x, which has no scale.
    """
    x = _floats(x)
    largest = 127.0 if fmt == INT8 else codec.format_of(fmt).largest
    if not isinstance(scaling, str) or scaling not in SCALINGS:
        raise ValueError(f"scaling is {scaling!r}; it must be one of {', '.join(SCALINGS)}")
    _check_block(block)
    if np.isinf(x).any():
        raise ValueError("x has an infinity in it; there is no scale for that")
    size = np.fmax.reduce(np.abs(x), -1, initial=0) if scaling != "tensor" else np.abs(x)  # [..., rows]
    if scaling == "tensor":
        size = np.fmax.reduce(size, None, initial=0)  # []
    elif scaling == "head":
        size = np.fmax.reduce(size, -1, initial=0)  # [...]
    elif scaling == "block":
        starts = np.arange(0, x.shape[-2], block)  # [blocks]
        size = np.fmax.reduceat(size, starts, -1) if len(starts) else size  # [..., blocks]
    size = np.nan_to_num(np.asarray(size, np.float32))
    scale = np.where(size == 0, np.float32(1), np.maximum(size / np.float32(largest), np.float32(2.0**-126)))
    scale = scale.astype(np.float32)  # as size
    if scaling == "block":
        scale = _near_each_other(scale, size)
    with np.errstate(invalid="ignore"):  # of signalling NaNs
        ratio = x / per_row(scale, x.shape, block)  # [..., rows, D]
    if fmt == INT8:
        return np.clip(np.rint(np.nan_to_num(ratio)), -127, 127).astype(np.int8), scale
    return codec.encode(ratio, fmt), scale


def dequantize(codes: np.ndarray, scale: Any, fmt: str, *, block: int = BLOCK) -> np.ndarray:
    """``scale * decode(codes)``: float32 of codes' shape.

    Args:
        codes: ``[..., rows, D]`` uint8, or int8 for fmt ``"int8"``.
        scale: as of :func:`quantize`; its shape says what shares one.
        block: rows of a block.

    Raises:
        TypeError, ValueError: codes or fmt do not fit, or scale has another shape.
    """
    if fmt == INT8:
        values = codec.array_of(codes, "codes").astype(np.float32)  # [..., rows, D]
    else:
        values = codec.decode(codes, fmt)  # [..., rows, D]
    _check_block(block)
    if values.ndim < 2:
        raise ValueError(f"codes have shape {values.shape}; they must have rows and columns, [..., rows, D]")
    with np.errstate(invalid="ignore", over="ignore"):
        return values * per_row(scale, values.shape, block)


def per_row(scale: Any, shape: tuple[int, ...], block: int = BLOCK) -> np.ndarray:
    """The scale with as many axes as ``[..., rows, D]``: ``[..., rows or 1, 1]``."""
    scale = real_numbers(scale, "scale")
    rows, outer = shape[-2], shape[:-2]
    if scale.ndim == 0:
        return scale
    if scale.shape == outer:
        return scale[..., None, None]
    if scale.shape == (*outer, rows):
        return scale[..., None]
    if scale.shape == (*outer, -(-rows // block)):
        return np.repeat(scale, block, -1)[..., :rows, None]
    wanted = f"(), {outer}, {(*outer, -(-rows // block))} or {(*outer, rows)}"
    raise ValueError(f"scale has shape {scale.shape} for codes of {shape}; it must be one of {wanted}")


def _near_each_other(scale: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Scales of blocks ``[..., blocks]`` within ``SPREAD ** -2`` of one another, as attention needs v's."""
    top = np.where(size > 0, scale, np.float32(0)).max(-1, keepdims=True, initial=0)  # [..., 1]
    with np.errstate(over="ignore"):
        most = np.where((size == 0) & (top > 0), top * np.float32(1 / SPREAD), np.float32(np.inf))  # [..., blocks]
    return np.clip(scale, top * np.float32(SPREAD), most)  # [..., blocks]


def _check_block(block: Any) -> None:
    if not isinstance(block, int | np.integer) or isinstance(block, bool) or block < 1:
        raise ValueError(f"block is {block!r}; it must be a positive number of rows")


def _floats(x: Any) -> np.ndarray:
    x = codec.array_of(x, "x")
    if x.dtype.name not in codec.FLOATS:
        raise TypeError(f"x has elements of type {x.dtype.name}; it must be of {', '.join(codec.FLOATS)}")
    if x.ndim < 2:
        raise ValueError(f"x has shape {x.shape}; it must have rows and columns, [..., rows, D]")
    with np.errstate(invalid="ignore"):  # of signalling NaNs
        return x.astype(np.float32)


def scaled(x: np.ndarray, fmt: str, scaling: str, *, block: int = BLOCK) -> np.ndarray:
    """What is left of x: quantised and multiplied by its scale again."""
    return dequantize(*quantize(x, fmt, scaling, block=block), fmt, block=block)


def smooth(k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keys without their mean, and the mean: ``[..., N, D]`` and ``[..., 1, D]``, float32.

    Attention's o is the same; its lse is less by ``scale * q mean``.
    """
    k = _floats(k)
    mean = k.mean(-2, keepdims=True) if k.shape[-2] else np.zeros((*k.shape[:-2], 1, k.shape[-1]), np.float32)
    return k - mean, mean


def hadamard(x: np.ndarray) -> np.ndarray:
    """Rows times the Hadamard matrix over sqrt(D): ``[..., D]`` float32; its own inverse.

    Raises:
        ValueError: D is no power of two.
    """
    x = np.asarray(x, np.float32)
    d = x.shape[-1]
    if d & (d - 1) or d == 0:
        raise ValueError(f"x has shape {x.shape}; the last axis must be a power of two for a Hadamard matrix")
    half = 1
    while half < d:  # sums and differences of pairs, log2 D times
        pairs = x.reshape(*x.shape[:-1], d // (2 * half), 2, half)  # [..., D / 2 half, 2, half]
        x = np.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], -2)
        x = x.reshape(*pairs.shape[:-3], d)  # [..., D]
        half *= 2
    return x / np.float32(np.sqrt(d))


def spread(x: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """``x M``, where M is the diagonal of ``signs [D]``, each 1 or -1, times a Hadamard matrix: orthogonal."""
    return hadamard(_floats(x) * signs)


def incoherent(q: np.ndarray, k: np.ndarray, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """q and k by the same random M; their products are what they were, but for float32's rounding.

    Raises:
        ValueError: D is no power of two.
    """
    signs = np.random.default_rng(seed).choice(np.array([-1, 1], np.float32), q.shape[-1])  # [D]
    return spread(q, signs), spread(k, signs)
