"""The two 8-bit floating-point formats from nothing: codes from numbers, and numbers from codes, bit for bit.

A code is a sign, E bits of exponent and M of mantissa; with e and m as integers and a bias b ::

    e > 0    (1 + m / 2^M) 2^(e - b)        normal
    e = 0         (m / 2^M) 2^(1 - b)       subnormal, and zero

    e4m3    E 4  M 3  b 7     largest 448      smallest normal 2^-6     step below it 2^-9
    e5m2    E 5  M 2  b 15    largest 57344    smallest normal 2^-14    step below it 2^-16

e5m2 is the upper byte of a float16, with its infinities and NaNs. e4m3 (e4m3fn to be exact) has no infinity, and NaN in
one mantissa only, so that 448 is still a number where IEEE 754 would end at 240.

Encoding rounds to nearest, ties to even, as one addition does. Seen as integers, the bits of positive floats are in the
order of their values, and a carry out of the mantissa raises the exponent as it should. So for a normal result one adds
half of the last place that is kept, less one unless that place is odd, and drops what is below. For a subnormal one the
float32 unit is made to round: in ``x + 2^23 step`` the last place is worth one step.

What is beyond the largest number becomes that (``saturate``, as GPUs convert), or infinity in e5m2 and NaN in e4m3, as
ml_dtypes converts; from the number on that rounding would carry there. Every NaN becomes code 0x7F, as on a GPU.

Through float16, as a GPU must that converts no float32 itself, a number is rounded *twice*: 1 + 2^-4 + 2^-13 lies above
the middle between two e4m3 numbers, is rounded to the middle first and then to the even one below. So a kernel is to be
compared with the path it takes; :func:`encode_by_float16` is that one.

Source: Micikevicius et al., FP8 Formats for Deep Learning, arXiv 2209.05433; OCP 8-bit Floating Point Specification.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["FORMATS", "NAN", "Format", "array_of", "decode", "encode", "encode_by_float16", "format_of"]

NAN = 0x7F
"""The code that every NaN gets."""
AT_ONCE = 1 << 16
"""Elements that are encoded together: what is in between stays in a cache."""


@dataclass(frozen=True)
class Format:
    """An 8-bit format.

    Attributes:
        name: ``"e4m3"`` or ``"e5m2"``.
        element: what ml_dtypes and torch call it.
        exponent, mantissa, bias: of the layout.
        top: code of the largest number.
        beyond: code of what is larger and not saturated: NaN, or infinity.
    """

    name: str
    element: str
    exponent: int
    mantissa: int
    bias: int
    top: int
    beyond: int

    @property
    def largest(self) -> float:
        return float(self.value(self.top))

    @property
    def smallest_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @property
    def step(self) -> float:
        """Between two subnormal numbers."""
        return 2.0 ** (1 - self.bias - self.mantissa)

    def value(self, code: int) -> np.float32:
        """What a code stands for, by the formula."""
        e, m = (code & 0x7F) >> self.mantissa, code & ((1 << self.mantissa) - 1)
        if (code & 0x7F) > self.top:
            size = np.inf if code & 0x7F == self.beyond != NAN else np.nan
        elif e == 0:
            size = m * self.step
        else:
            size = (1 + m / 2**self.mantissa) * 2.0 ** (e - self.bias)
        return np.float32(-size if code & 0x80 else size)

    @property
    def values(self) -> np.ndarray:
        """Of all 256 codes, float32."""
        return np.array([self.value(code) for code in range(256)], np.float32)  # [256]


FORMATS = {
    "e4m3": Format("e4m3", "float8_e4m3fn", 4, 3, 7, 0x7E, NAN),
    "e5m2": Format("e5m2", "float8_e5m2", 5, 2, 15, 0x7B, 0x7C),
}
VALUES = {name: form.values for name, form in FORMATS.items()}
FLOATS = ("float16", "bfloat16", "float32")


def format_of(fmt: Any) -> Format:
    """The format of a name.

    Raises:
        ValueError: no such format.
    """
    if not isinstance(fmt, str) or fmt not in FORMATS:
        raise ValueError(f"fmt is {fmt!r}; it must be 'e4m3' or 'e5m2'")
    return FORMATS[fmt]


def array_of(x: Any, name: str) -> np.ndarray:
    """An argument as a NumPy array.

    Raises:
        TypeError: it cannot be one: ragged, on a GPU, or of torch with a gradient or an element that NumPy has not.
    """
    try:
        return np.asarray(x)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} is of type {type(x).__name__}; it must be a NumPy array ({error})") from None


def encode(x: np.ndarray, fmt: str, saturate: bool = True) -> np.ndarray:
    """Codes of ``x``, rounded once.

    Args:
        x: float32, float16 or bfloat16, any shape.
        fmt: ``"e4m3"`` or ``"e5m2"``.
        saturate: beyond the largest number, and infinity, become the largest; else infinity in e5m2, NaN in e4m3.

    Returns:
        uint8 of x's shape.

    Raises:
        TypeError: x is of another type; float64 too, which would be rounded twice; or saturate is no bool.
        ValueError: no such format.
    """
    form = format_of(fmt)
    if not isinstance(saturate, bool | np.bool_):
        raise TypeError(f"saturate is {saturate!r}; it must be True or False")
    x = array_of(x, "x")
    if x.dtype.name not in FLOATS:
        raise TypeError(f"x has elements of type {x.dtype.name}; it must be of {', '.join(FLOATS)}")
    flat, codes = x.reshape(-1), np.empty(x.size, np.uint8)  # [elements]
    for i in range(0, x.size, AT_ONCE):
        codes[i : i + AT_ONCE] = _encoded(flat[i : i + AT_ONCE].astype(np.float32), form, saturate)
    return codes.reshape(x.shape)


def encode_by_float16(x: np.ndarray, fmt: str, saturate: bool = True) -> np.ndarray:
    """Codes of float32 ``x`` rounded to float16 and then to 8 bits: another code in a few cases of a thousand."""
    with np.errstate(over="ignore"):
        return encode(np.asarray(x).astype(np.float16), fmt, saturate)


def _encoded(x: np.ndarray, form: Format, saturate: bool) -> np.ndarray:
    bits = x.view(np.uint32)  # [elements]
    size = bits & np.uint32(0x7FFFFFFF)  # [elements]
    drop = 23 - form.mantissa
    odd = size >> np.uint32(drop) & np.uint32(1)  # [elements]
    rounded = (size + odd + np.uint32((1 << drop - 1) - 1)) >> np.uint32(drop)  # [elements]
    normal = rounded - np.uint32(127 - form.bias << form.mantissa)  # [elements], wraps where it is not used
    anchor = np.float32(2.0**23 * form.step)
    with np.errstate(invalid="ignore"):  # of signalling NaNs
        subnormal = (np.abs(x) + anchor).view(np.uint32) - anchor.view(np.uint32)  # [elements]
    below = size < np.float32(form.smallest_normal).view(np.uint32)  # [elements]
    code = np.where(below, subnormal, normal)  # [elements]
    code = np.minimum(code, np.uint32(form.top if saturate else form.beyond))  # [elements]
    code |= bits >> np.uint32(24) & np.uint32(0x80)
    code[size > np.uint32(0x7F800000)] = NAN
    return code.astype(np.uint8)  # [elements]


def decode(codes: np.ndarray, fmt: str) -> np.ndarray:
    """float32 values of uint8 ``codes``, exact.

    Raises:
        TypeError: codes are not uint8.
        ValueError: no such format.
    """
    form = format_of(fmt)
    codes = array_of(codes, "codes")
    if codes.dtype != np.uint8:
        raise TypeError(f"codes have elements of type {codes.dtype.name}; they must be uint8")
    return VALUES[form.name][codes]
