"""Scales: the largest number is used, one scale a part, nothing twice; an orthogonal M leaves products alone."""

from __future__ import annotations

import numpy as np
import pytest

from flashnumba import fp8
from flashnumba.data import load_minilm
from flashnumba.stages.fp8 import codec, scales

SHAPES = {"tensor": (), "head": (2, 3), "block": (2, 3, 2), "token": (2, 3, 100)}


def made(seed=0):
    x = np.random.default_rng(seed).standard_normal((2, 3, 100, 32)).astype(np.float32)
    return x * np.exp2(np.arange(100) / 10)[:, None].astype(np.float32)


@pytest.mark.parametrize("scaling", SHAPES)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "int8"])
def test_each_part_uses_the_whole_range(fmt, scaling):
    x = made()
    codes, scale = scales.quantize(x, fmt, scaling)
    assert codes.shape == x.shape and scale.shape == SHAPES[scaling] and scale.dtype == np.float32
    parts = {
        "tensor": x.reshape(1, -1), "head": x.reshape(6, -1), "token": x.reshape(600, -1),
        "block": [part for head in x.reshape(6, 100, 32) for part in (head[:64], head[64:])],
    }[scaling]  # fmt: skip
    largest = 127 if fmt == "int8" else codec.FORMATS[fmt].largest
    np.testing.assert_allclose(scale.reshape(-1), [np.abs(part).max() / largest for part in parts], rtol=1e-6)
    error = np.abs(scales.dequantize(codes, scale, fmt) - x)
    size = np.broadcast_to(scales.per_row(scale, x.shape), x.shape)
    if fmt == "int8":
        assert (error <= 0.501 * size).all()
    else:
        half = 2.0 ** -(1 + codec.FORMATS[fmt].mantissa)
        assert (error <= np.maximum(half * np.abs(x), codec.FORMATS[fmt].step / 2 * size) * 1.001).all()


def test_finer_parts_lose_less():
    x = made(1)
    small = x * np.where(np.arange(100) < 64, 1, 1e-7)[:, None].astype(np.float32)
    per_head, per_block = (scales.scaled(small, "e4m3", scaling)[..., 64:, :] for scaling in ("head", "block"))
    assert (per_head == 0).mean() > 0.9 and (per_block == 0).mean() < 0.1


def test_zeros_have_scale_1_and_nan_no_say():
    x = np.zeros((4, 3), np.float32)
    for scaling in SHAPES:
        codes, scale = fp8.quantize(x, "e4m3", scaling)
        assert (np.asarray(scale) == 1).all() and (codes == 0).all()
    x[1], x[2] = [np.nan, 896, 1], np.nan
    for scaling in ("tensor", "head", "block"):
        codes, scale = fp8.quantize(x, "e4m3", scaling)
        assert scale == 2 and codes[1].tolist()[:2] == [0x7F, 0x7E] and (codes[2] == 0x7F).all()
    assert fp8.quantize(np.full((2, 2), np.float32(1e-44)), "e4m3")[1] == np.float32(2.0**-126)
    for scaling, shape in (("tensor", ()), ("head", (2,)), ("block", (2, 0)), ("token", (2, 0))):
        assert fp8.quantize(np.zeros((2, 0, 8), np.float32), "e5m2", scaling)[1].shape == shape


def test_blocks_are_not_too_far_apart_for_attention():
    x = np.ones((2, 256, 4), np.float32)
    x[0, :64], x[0, 64:128], x[1, :64], x[1, 64:] = 1e-30, 0, 0, 1e-30
    _, scale = fp8.quantize(x, "e4m3", "block")
    top = np.float32(1 / 448)
    np.testing.assert_allclose(scale[0], [top * 2.0**-40, 1, top, top], rtol=1e-6)
    np.testing.assert_allclose(scale[1], np.array([2.0**40, 1, 1, 1]) * 1e-30 / 448, rtol=1e-6)


def test_nothing_is_warned_of():
    """Signalling NaNs, and products beyond float32: pytest makes errors of warnings."""
    x = np.array([[0x7F800001, 0xFF800001, 0x3F800000]], np.uint32).view(np.float32)
    for scaling in SHAPES:
        assert fp8.quantize(x, "e4m3", scaling)[0].tolist() == [[0x7F, 0x7F, 0x7E]]
    codes = np.array([[0x7B, 0x7C, 0x7F]], np.uint8)
    np.testing.assert_array_equal(fp8.dequantize(codes, 1e38, "e5m2"), np.float32([[np.inf, np.inf, np.nan]]))
    np.testing.assert_array_equal(fp8.dequantize(codes, 0.0, "e5m2"), np.float32([[0, np.nan, np.nan]]))


def test_dequantize_multiplies_once():
    x = made(2).astype(np.float16)
    for scaling in SHAPES:
        codes, scale = fp8.quantize(x, "e5m2", scaling)
        np.testing.assert_allclose(
            fp8.dequantize(codes, np.asarray(scale) * 4, "e5m2"), 4 * fp8.dequantize(codes, scale, "e5m2"), rtol=1e-6
        )


def test_keys_without_their_mean_give_the_same_weights():
    data = load_minilm()
    q, k = data.q[0, 2].astype(np.float32), data.k[0, 2].astype(np.float32)
    less, mean = scales.smooth(k)
    np.testing.assert_allclose(less.mean(0), 0, atol=1e-5)
    shift = q @ k.T - q @ less.T
    np.testing.assert_allclose(shift, np.broadcast_to(q @ mean.T, shift.shape), atol=2e-3)
    assert scales.smooth(np.zeros((0, 4), np.float32))[1].shape == (1, 4)


@pytest.mark.parametrize("d", [1, 2, 32, 64, 128, 256])
def test_the_hadamard_matrix_is_orthogonal(d):
    h = scales.hadamard(np.eye(d, dtype=np.float32))
    np.testing.assert_allclose(h @ h.T, np.eye(d), atol=1e-6)
    np.testing.assert_allclose(np.abs(h), 1 / np.sqrt(d), rtol=1e-6)
    if d > 1:  # by the recursion [[H, H], [H, -H]]
        smaller = scales.hadamard(np.eye(d // 2, dtype=np.float32)) * np.sqrt(0.5)
        np.testing.assert_allclose(h, np.block([[smaller, smaller], [smaller, -smaller]]), atol=1e-6)


def test_incoherent_processing_keeps_products_and_spreads_outliers():
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((3, 50, 64)).astype(np.float32) for _ in range(2))
    k[..., 7] *= 100
    qm, km = scales.incoherent(q, k)
    np.testing.assert_allclose(qm @ km.swapaxes(-1, -2), q @ k.swapaxes(-1, -2), atol=2e-3)
    assert np.abs(km).max() < np.abs(k).max() / 4
    assert not np.array_equal(scales.incoherent(q, k, seed=1)[1], km)


def test_bad_arguments_are_named():
    x = made()
    with pytest.raises(ValueError, match="scaling is 'row'; it must be one of tensor, head, block, token"):
        fp8.quantize(x, "e4m3", "row")
    with pytest.raises(ValueError, match="fmt is 'int8'; it must be 'e4m3' or 'e5m2'"):
        fp8.quantize(x, "int8")
    with pytest.raises(ValueError, match="x has an infinity in it"):
        fp8.quantize(np.full((2, 2), np.float32(np.inf)), "e4m3")
    with pytest.raises(TypeError, match="x has elements of type float64"):
        fp8.quantize(x.astype(np.float64), "e4m3")
    with pytest.raises(ValueError, match=r"x has shape \(3,\); it must have rows and columns"):
        fp8.quantize(np.zeros(3, np.float32), "e4m3")
    codes, scale = fp8.quantize(x, "e4m3", "head")
    with pytest.raises(ValueError, match=r"scale has shape \(3,\) for codes of \(2, 3, 100, 32\); it must be one of"):
        fp8.dequantize(codes, scale[0], "e4m3")
    with pytest.raises(ValueError, match=r"codes have shape \(3,\); they must have rows and columns"):
        fp8.dequantize(codes[0, 0, 0, :3], 1.0, "e4m3")
    for bad in ("1", None, True, 1j, [[1], [1, 2]]):
        with pytest.raises(TypeError, match=r"scale .*; it must be a number or an array of them"):
            fp8.dequantize(codes, bad, "e4m3")
    with pytest.raises(ValueError, match="the last axis must be a power of two"):
        scales.hadamard(np.zeros((2, 12)))
    with pytest.raises(ValueError, match="block is 0; it must be a positive number of rows"):
        scales.quantize(x, "e4m3", "block", block=0)
