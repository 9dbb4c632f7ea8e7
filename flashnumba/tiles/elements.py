"""Elements of float16, bfloat16 and float32 arrays on their way between memory and float32 registers.

Two ways in and out, made once for an element type:

:func:`scalar`
    one element by its indices in an array, whatever the strides.
:func:`vectors`
    1 to 8 neighbours by their address, as the 32-bit words that memory holds: 16-bit types then take half a register an
    element until they are used.

::

    vector      float32           16-bit types                   words
    16 bytes    4 elements        8 elements, two a word         4
     8 bytes    2 elements        4 elements, two a word         2
     4 bytes    1 element         2 elements, two a word         1
     2 bytes                      1 element, upper half unused   1
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instruction import Instruction
from flashnumba.machine.instructions import (
    bf16_to_f32,
    bf16x2_high,
    bf16x2_low,
    bits_to_f32,
    f16_to_f32,
    f16x2_high,
    f16x2_low,
    f32_to_bf16,
    f32_to_bits,
    f32_to_f16,
    ld_global_b16,
    ld_global_b32,
    ld_global_once_b16,
    ld_global_once_b32,
    ld_global_once_v2,
    ld_global_once_v4,
    ld_global_v2,
    ld_global_v4,
    max_bf16x2,
    max_f16x2,
    pack_bf16x2,
    pack_f16x2,
    st_global_b16,
    st_global_b32,
    st_global_once_v2,
    st_global_once_v4,
    st_global_stream_v2,
    st_global_stream_v4,
    st_global_v2,
    st_global_v4,
)
from flashnumba.machine.numba import float16, float32, uint16, uint32

__all__ = ["HINTS", "ITEMSIZE", "Scalar", "Vectors", "arch_of", "round_bf16", "scalar", "vectors"]

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}
"""Element types and their bytes."""

HINTS = ("plain", "once", "stream")
"""What caches are told: nothing; that each byte is read and written once; the same, and that L2 may let it go first.
The last two read through the read-only path, so they are not for kernels that work in place."""


def arch_of(element: str, arch: str) -> str:
    """The smallest architecture of a kernel made for ``arch``: what is done to 16-bit pairs is for 75 or from 80 on."""
    return "80" if ITEMSIZE[element] == 2 and int(arch.rstrip("a")) >= 80 else "75"


@device
def round_bf16(x):
    """The bits of ``x`` rounded to bfloat16, to nearest, ties to even, in integers: sm_75 has no such conversion."""
    bits = f32_to_bits(x)
    if x != x:
        return uint32(0x7FFF)
    return uint32((bits + uint32(0x7FFF) + ((bits >> uint32(16)) & uint32(1))) >> uint32(16))


@device
def _round_bf16x2(low, high):
    return uint32(round_bf16(low) | (round_bf16(high) << uint32(16)))


class Scalar(NamedTuple):
    """Device functions ``load(array, row, col) -> float32`` and ``store(array, row, col, value)``."""

    load: DeviceFunction
    store: DeviceFunction


@cache
def scalar(element: str, arch: str = "80") -> Scalar:
    """Element access for a 2-D array of ``element``; below ``arch`` 80 bfloat16 is rounded in integers."""
    native = int(arch.rstrip("a")) >= 80

    @device
    def load_f32(array, row, col):
        return array[row, col]

    @device
    def store_f32(array, row, col, value):
        array[row, col] = value

    @device
    def load_f16(array, row, col):
        return float32(array[row, col])

    @device
    def store_f16(array, row, col, value):
        array[row, col] = float16(value)

    @device
    def load_bf16(array, row, col):
        return bf16_to_f32(array[row, col])

    @device
    def store_bf16(array, row, col, value):
        array[row, col] = f32_to_bf16(value)

    @device
    def store_bf16_by_integers(array, row, col, value):
        array[row, col] = uint16(round_bf16(value))

    return {
        "float32": Scalar(load_f32, store_f32),
        "float16": Scalar(load_f16, store_f16),
        "bfloat16": Scalar(load_bf16, store_bf16 if native else store_bf16_by_integers),
    }[element]


class Vectors(NamedTuple):
    """Access to vectors of an element type.

    Attributes:
        elements: in a vector.
        words: 32-bit words, so registers, that a vector takes.
        pairs: whether a word holds two elements; ``high`` is for these alone.
        nothing: a word of -inf, which changes neither a maximum nor a sum of exponentials.
        load: ``load(raw, at, address)``: a vector into ``raw[at : at + words]``, uint32.
        store: ``store(address, raw, at)``.
        low, high: ``low(word) -> float32``.
        pack: ``pack(low, high) -> word``, rounded to nearest; ``high`` is ignored where a word holds one element.
        larger: ``larger(word, word) -> word``, the greater in each half; None where there is no such instruction.
    """

    elements: int
    words: int
    pairs: bool
    nothing: int
    load: DeviceFunction
    store: DeviceFunction
    low: DeviceFunction
    high: DeviceFunction
    pack: DeviceFunction
    larger: Instruction | None


@cache
def vectors(element: str, nbytes: int, hint: str = "plain", arch: str = "80") -> Vectors:
    """Access to vectors of ``nbytes`` bytes (16, 8, 4, or 2 where an element is that small).

    Raises:
        ValueError: an unknown element or hint, or a width that the element does not have.
    """
    if element not in ITEMSIZE or hint not in HINTS:
        raise ValueError(f"vectors({element!r}, hint={hint!r}): elements are {', '.join(ITEMSIZE)}; hints {HINTS}")
    itemsize = ITEMSIZE[element]
    if nbytes not in (16, 8, 4, 2) or nbytes < itemsize:
        raise ValueError(f"vectors of {nbytes} bytes of {element}; the widths are 16, 8, 4 and {itemsize}")
    low, high, pack = _conversions(element, nbytes, arch)
    nothing = {"float32": 0xFF800000, "float16": 0xFC00FC00, "bfloat16": 0xFF80FF80}[element]
    pairs = itemsize == 2 and nbytes > 2
    larger = (
        {"float16": max_f16x2, "bfloat16": max_bf16x2}.get(element) if pairs and int(arch.rstrip("a")) >= 80 else None
    )
    return Vectors(
        nbytes // itemsize, max(1, nbytes // 4), pairs, nothing,
        _LOADS[nbytes, hint != "plain"], _STORES[nbytes, hint], low, high, pack, larger,
    )  # fmt: skip


def _conversions(element: str, nbytes: int, arch: str) -> tuple[DeviceFunction, DeviceFunction, DeviceFunction]:
    """(low, high, pack) for the words of a vector."""
    native = int(arch.rstrip("a")) >= 80

    @device
    def word_f32(word):
        return bits_to_f32(word)

    @device
    def pack_f32(low, high):
        return f32_to_bits(low)

    @device
    def single_f16(word):
        return f16_to_f32(uint16(word))

    @device
    def pack_single_f16(low, high):
        return uint32(f32_to_f16(low))

    @device
    def low_f16(word):
        return f16x2_low(word)

    @device
    def high_f16(word):
        return f16x2_high(word)

    @device
    def pack_f16(low, high):
        return pack_f16x2(low, high)

    @device
    def low_bf16(word):
        return bf16x2_low(word)

    @device
    def high_bf16(word):
        return bf16x2_high(word)

    @device
    def pack_bf16(low, high):
        return pack_bf16x2(low, high)

    @device
    def pack_bf16_by_integers(low, high):
        return _round_bf16x2(low, high)

    @device
    def pack_single_bf16(low, high):
        return uint32(f32_to_bf16(low))

    @device
    def pack_single_bf16_by_integers(low, high):
        return round_bf16(low)

    if element == "float32":
        return word_f32, word_f32, pack_f32
    if element == "float16":
        return (single_f16, single_f16, pack_single_f16) if nbytes == 2 else (low_f16, high_f16, pack_f16)
    if nbytes == 2:
        return low_bf16, low_bf16, pack_single_bf16 if native else pack_single_bf16_by_integers
    return low_bf16, high_bf16, pack_bf16 if native else pack_bf16_by_integers


@device
def _load_16(raw, at, address):
    ld_global_v4(raw, at, address)


@device
def _load_8(raw, at, address):
    ld_global_v2(raw, at, address)


@device
def _load_4(raw, at, address):
    raw[at] = ld_global_b32(address)


@device
def _load_2(raw, at, address):
    raw[at] = uint32(ld_global_b16(address))


@device
def _load_once_16(raw, at, address):
    ld_global_once_v4(raw, at, address)


@device
def _load_once_8(raw, at, address):
    ld_global_once_v2(raw, at, address)


@device
def _load_once_4(raw, at, address):
    raw[at] = ld_global_once_b32(address)


@device
def _load_once_2(raw, at, address):
    raw[at] = uint32(ld_global_once_b16(address))


@device
def _store_4(address, raw, at):
    st_global_b32(address, raw[at])


@device
def _store_2(address, raw, at):
    st_global_b16(address, uint16(raw[at]))


_LOADS = {
    (16, False): _load_16, (8, False): _load_8, (4, False): _load_4, (2, False): _load_2,
    (16, True): _load_once_16, (8, True): _load_once_8, (4, True): _load_once_4, (2, True): _load_once_2,
}  # fmt: skip
_STORES = {
    (16, "plain"): st_global_v4, (16, "once"): st_global_once_v4, (16, "stream"): st_global_stream_v4,
    (8, "plain"): st_global_v2, (8, "once"): st_global_once_v2, (8, "stream"): st_global_stream_v2,
    **{(4, hint): _store_4 for hint in HINTS}, **{(2, hint): _store_2 for hint in HINTS},
}  # fmt: skip
