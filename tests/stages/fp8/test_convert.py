"""Every conversion that a GPU has gives the codec's bits: all codes, and floats of any bits, ties and ends."""

from __future__ import annotations

import numpy as np
import pytest

from flashnumba.machine import launcher
from flashnumba.stages.fp8 import codec, convert

CODES = np.arange(256, dtype=np.uint8)
WAYS = [(fmt, way) for fmt in codec.FORMATS for way in convert.ENCODERS if way != "upper_byte" or fmt == "e5m2"]


def floats(fmt, machine):
    """All codes' numbers, what lies between two of them, next to that, the ends, and any bits."""
    values = codec.decode(CODES, fmt)
    values = np.unique(values[np.isfinite(values)])
    between = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
    near = [np.nextafter(between, np.float32(side)) for side in (-np.inf, np.inf)]
    ends = np.array([0, -0.0, np.nan, np.inf, -np.inf, 464, 465, 61440, 1e30, 1e-30, -1e-45], np.float32)
    count = 1 << 22 if machine == "cuda" else 3000
    any_bits = np.random.default_rng(0).integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32)
    twice = np.float32(1 + 2**-4 + 2**-13)  # two roundings give another code than one
    return np.concatenate([values, between, *near, ends, any_bits, [twice]])


@pytest.mark.parametrize(("fmt", "way"), WAYS)
def test_encoding(machine, fmt, way):
    x = floats(fmt, machine)
    expected = (codec.encode if way in ("instructions", "integers") else codec.encode_by_float16)(x, fmt)
    np.testing.assert_array_equal(convert.encode(x, fmt, way, machine), expected)


@pytest.mark.parametrize("way", convert.DECODERS)
@pytest.mark.parametrize("fmt", codec.FORMATS)
def test_decoding(machine, fmt, way):
    codes = np.concatenate([CODES, CODES[::-1], CODES[5:8]]).reshape(5, 103)
    values = convert.decode(codes, fmt, way, machine)
    np.testing.assert_array_equal(values, codec.decode(codes, fmt))
    np.testing.assert_array_equal(np.signbit(values[values == 0]), codes[values == 0] == 0x80)


@pytest.mark.parametrize("way", convert.INT8)
def test_signed_bytes(machine, way):
    x = np.concatenate([np.linspace(-200, 200, 1001), [0.49, -0.49, 126.6]]).astype(np.float32)
    codes = np.empty(x.size, np.uint8)
    launcher.launch(convert.make_encode("int8", way), 1, convert.THREADS, (x, codes), machine=machine)
    np.testing.assert_array_equal(codes.view(np.int8), np.clip(np.rint(x), -127, 127).astype(np.int8))


@pytest.mark.parametrize(("make", "way", "broken"), [(convert.make_encode, "upper_byte", "truncate"),
                                                     (convert.make_decode, "integers", "factor")])  # fmt: skip
def test_planted_faults(make, way, broken):
    encodes = make is convert.make_encode
    fmt = "e5m2" if encodes else "e4m3"
    x = codec.decode(CODES, fmt) if encodes else CODES
    x = x * np.float32(1.2) if encodes else x
    out = np.zeros(256, np.uint8 if encodes else np.float32)
    launcher.launch(make(codec.FORMATS[fmt].element, way, broken), 1, convert.THREADS, (x, out), machine="emulator")
    expected = codec.encode_by_float16(x, fmt) if encodes else codec.decode(x, fmt)
    assert not np.array_equal(out, expected, equal_nan=not encodes)


def test_bad_arguments_are_named():
    x = np.zeros((4, 4), np.float32)
    with pytest.raises(ValueError, match="way is 'upper_byte' and fmt 'e4m3'"):
        convert.encode(x, "e4m3", "upper_byte")
    with pytest.raises(ValueError, match="way is 'table'; it must be one of instructions, integers"):
        convert.decode(x.astype(np.uint8), "e4m3", "table")
    with pytest.raises(TypeError, match=r"x has elements of type float32, strides .* it must be packed float32"):
        convert.encode(x[:, ::2], "e4m3")
