"""Tokens of the cache in 8 bits, in NumPy: what the kernels of :mod:`flashnumba.stages.flash_mla.cache` are judged by.

A token is its ``dv`` latent numbers as codes, a float32 scale for each 128 of them, and the rotated numbers as they
are, in 16 bits::

    bytes 0 .. 511    512 .. 527      528 .. 655
    512 codes         4 scales        64 numbers           656 bytes; in 16 bits a token takes 1152

A scale is the greatest of its 128 numbers over the format's largest, and at least 1e-4; it may be rounded up to a power
of two, with which codes times scales are exact in bfloat16.

Source: DeepSeek, FlashMLA, README and ``tests/quant.py``, for the layout and the smallest scale.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

__all__ = ["FORMATS", "append", "dequantize", "quantize"]

PAGE, BLOCK, SMALLEST = 64, 128, np.float32(1e-4)
FORMATS = {"e4m3": (ml_dtypes.float8_e4m3fn, 448.0), "e5m2": (ml_dtypes.float8_e5m2, 57344.0)}
"""Types and their largest numbers."""


def quantize(rows, fmt="e4m3", dv=512, power_of_two=False):
    """``rows [..., D]`` of 16 bits to bytes ``[..., width]``. A NaN stays one and has no say in the scale."""
    element, largest = FORMATS[fmt]
    blocks = rows[..., :dv].astype(np.float32).reshape(*rows.shape[:-1], dv // BLOCK, BLOCK)  # [..., dv / 128, 128]
    scale = np.maximum(np.fmax.reduce(np.abs(blocks), -1) / np.float32(largest), SMALLEST)  # [..., dv / 128]
    if power_of_two:
        bits = scale.view(np.uint32)  # [..., dv / 128]
        scale = ((bits + np.uint32(0x7FFFFF)) & np.uint32(0xFF800000)).view(np.float32)  # [..., dv / 128]
    codes = np.clip(blocks / scale[..., None], -largest, largest).astype(element).view(np.uint8)
    codes = np.where(np.isnan(blocks), np.uint8(0x7F), codes)  # [..., dv / 128, 128]; NaN as hardware writes it
    pieces = codes.reshape(*rows.shape[:-1], dv), scale, np.ascontiguousarray(rows[..., dv:])
    return np.concatenate([piece.view(np.uint8) for piece in pieces], -1)  # [..., width]


def dequantize(tokens, fmt="e4m3", dv=512, rotated=ml_dtypes.bfloat16):
    """What bytes ``[..., width]`` stand for, float64 ``[..., D]``; ``rotated`` is the type of the last numbers."""
    element, _ = FORMATS[fmt]
    at = dv + 4 * (dv // BLOCK)
    codes, scale, rest = (np.ascontiguousarray(x) for x in np.split(tokens, [dv, at], -1))
    values = codes.view(element).astype(np.float64)  # [..., dv]
    scales = np.repeat(scale.view(np.float32).astype(np.float64), BLOCK, -1)  # [..., dv]
    return np.concatenate([values * scales, rest.view(rotated).astype(np.float64)], -1)  # [..., D]


def append(cache, block_table, lengths, tokens):
    """Writes ``tokens [B, S, width]`` behind the ``lengths [B]`` tokens that each request has, in place.

    Args:
        cache: ``[pages, 64, width]``.
        block_table: ``[B, most]``: the pages of each request, in order.
    """
    for b, length in enumerate(lengths):
        for i in range(tokens.shape[1]):
            page, place = divmod(int(length) + i, PAGE)
            cache[block_table[b, page], place] = tokens[b, i]  # [width]
