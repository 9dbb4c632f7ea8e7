"""Kernels that write the cache: new tokens behind those that each request has, as they are or in 8 bits.

A warp takes a token. In 16 bits its lanes copy 16 bytes each. In 8 bits a lane has 16 neighbouring numbers, so eight
lanes share a scale: their greatest number is three exchanges away. Quotients are divided out, not multiplied by a
reciprocal, so the bytes are those of :mod:`flashnumba.stages.flash_mla.codec`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from flashnumba.machine import launcher
from flashnumba.machine.arrays import describe, host_view
from flashnumba.machine.function import DeviceFunction, Kernel, device, kernel
from flashnumba.machine.instructions import (
    bits_to_f32,
    f32_to_bits,
    global_address,
    ld_global_b32,
    ld_global_v4,
    st_global_b32,
    st_global_f32,
    st_global_v4,
)
from flashnumba.machine.numba import cuda, float32, int64, types, uint32, uint64
from flashnumba.stages.flash_mla.sizes import BLOCK, DV, PAGE, D, token_bytes
from flashnumba.tiles.elements import vectors
from flashnumba.tiles.fp8_convert import ELEMENTS, make_encode4
from flashnumba.tiles.reduce import lanes_max

__all__ = ["APPEND_ARGS", "CODES", "FAULTS", "append", "compile_cases", "make_append", "make_quantize", "quantize"]

APPEND_ARGS = ("rows", "cache", "block_table", "lengths")
CODES = dict(zip(("e4m3", "e5m2"), ELEMENTS, strict=True))
"""Formats by name."""
LARGEST = dict(zip(ELEMENTS, (448.0, 57344.0), strict=True))
SMALLEST = 1e-4
WARPS = 4
"""Tokens a block."""
FAULTS = ("page", "block", "floor")
"""What can be planted: the first page for all tokens; a scale of four lanes' numbers; no smallest scale."""


@cache
def make_write(element: str, code: str, d: int, dv: int, arch: str, power_of_two: bool, broken: str) -> DeviceFunction:
    """``write(row, token)``: a warp's token from global address ``row`` to ``token``."""
    chunks, whole = d // 8, d // 8 // 32
    holders, blocks_at, rest_at = dv // 16, dv, dv + 4 * (dv // BLOCK)
    over_block = lanes_max(4 if broken == "block" else BLOCK // 16)
    low, high = (vectors(element, 16, arch=arch).low, vectors(element, 16, arch=arch).high)
    smallest, ropes = 0.0 if broken == "floor" else SMALLEST, (d - dv) // 2
    encode4, largest = (make_encode4(code, arch), LARGEST[code]) if code else (None, 1.0)

    @device
    def write_as_it_is(row, token):
        raw = cuda.local.array(4, uint32)
        lane = int64(cuda.threadIdx.x & 31)
        for i in range(whole + 1):
            if lane + 32 * i < chunks:
                ld_global_v4(raw, 0, row + uint64(16 * (lane + 32 * i)))
                st_global_v4(token + uint64(16 * (lane + 32 * i)), raw, 0)

    @device
    def write_codes(row, token):
        raw = cuda.local.array(8, uint32)
        x = cuda.local.array(16, float32)
        lane = int64(cuda.threadIdx.x & 31)
        for i in range(8):
            raw[i] = uint32(0)
        if lane < holders:
            ld_global_v4(raw, 0, row + uint64(32 * lane))
            ld_global_v4(raw, 4, row + uint64(32 * lane + 16))
        top = float32(0)
        for i in range(8):
            x[2 * i], x[2 * i + 1] = low(raw[i]), high(raw[i])
            top = max(top, max(abs(x[2 * i]), abs(x[2 * i + 1])))
        scale = max(over_block(top) / float32(largest), float32(smallest))
        if power_of_two:
            scale = bits_to_f32(uint32(f32_to_bits(scale) + uint32(0x7FFFFF)) & uint32(0xFF800000))
        if lane < holders:
            for i in range(4):
                raw[i] = encode4(x[4 * i] / scale, x[4 * i + 1] / scale, x[4 * i + 2] / scale, x[4 * i + 3] / scale)
            st_global_v4(token + uint64(16 * lane), raw, 0)
            if lane % 8 == 0:
                st_global_f32(token + uint64(blocks_at) + uint64(lane // 8 * 4), scale)
        for i in range(lane, ropes, 32):
            st_global_b32(token + uint64(rest_at) + uint64(4 * i), ld_global_b32(row + uint64(2 * dv) + uint64(4 * i)))

    return write_codes if code else write_as_it_is


@cache
def make_append(
    element: str, code: str = "", arch: str = "80", *, d: int = D, dv: int = DV, power_of_two: bool = False,
    broken: str = "",
) -> Kernel:  # fmt: skip
    """``(rows, cache, block_table, lengths)``, in blocks of four warps, a warp a token.

    ``rows [B, S, d]`` of 16 bits, packed; ``cache [pages, 64, d]``, or ``[pages, 64, width]`` bytes; ``block_table [B,
    most]`` and ``lengths [B]`` int32, the tokens that there are already.

    Args:
        element: float16 or bfloat16, of rows.
        code: one of :data:`flashnumba.tiles.fp8_convert.ELEMENTS`, or nothing for a cache of ``element``.
        power_of_two: scales are rounded up to powers of two.
        broken: plants one of :data:`FAULTS`.
    """
    write, width = make_write(element, code, d, dv, arch, power_of_two, broken), token_bytes(d, dv) if code else 2 * d
    first_page = broken == "page"

    @kernel(threads=32 * WARPS, arch=arch, name="flash_mla.append")
    def append(rows, cache, block_table, lengths):
        index, count = uint32(cuda.blockIdx.x * WARPS + (cuda.threadIdx.x >> 5)), uint32(rows.shape[1])
        if int64(index) < rows.shape[0] * rows.shape[1]:
            request, new = uint32(index // count), uint32(index % count)
            place = int64(lengths[request]) + int64(new)
            page = int64(block_table[request, int64(0) if first_page else place // PAGE])
            to = global_address(cache) + uint64((page * PAGE + place % PAGE) * width)
            write(global_address(rows) + uint64(index) * uint64(2 * d), to)

    return append


@cache
def make_quantize(
    element: str, code: str, arch: str = "80", *, d: int = D, dv: int = DV, power_of_two: bool = False
) -> Kernel:
    """``(rows [n, d], tokens [n, width] uint8)``: as :func:`make_append`, one token after the other."""
    write, width = make_write(element, code, d, dv, arch, power_of_two, ""), token_bytes(d, dv)

    @kernel(threads=32 * WARPS, arch=arch, name="flash_mla.quantize")
    def quantize(rows, tokens):
        index = int64(cuda.blockIdx.x) * WARPS + int64(cuda.threadIdx.x >> 5)
        if index < rows.shape[0]:
            row, token = global_address(rows) + uint64(index * (2 * d)), global_address(tokens) + uint64(index * width)
            write(row, token)

    return quantize


# -- host --------------------------------------------------------------------------------------------------------------
def arch_for(arch: str, code: str) -> str:
    """Which of the kernels' two forms a GPU gets: with instructions that convert, or without."""
    return "89" if code and int(arch.rstrip("a")) >= 89 else "80"


def append(
    rows: Any, cache: Any, block_table: Any, lengths: Any, *, code: str = "", power_of_two: bool = False,
    machine: str = "emulator", arch: str = "90a", stream: Any = None,
) -> None:  # fmt: skip
    """Launch :func:`make_append` on checked, packed arrays, all in one place; the cache changes, lengths do not."""
    found = describe(rows, "rows")
    batch, new, d = found.shape
    if batch * new == 0:
        return
    dv = d - 64 if code else d
    made = make_append(found.element, code, arch_for(arch, code), d=d, dv=dv, power_of_two=power_of_two)
    args = tuple(host_view(x) if describe(x).device is None else x for x in (rows, cache, block_table, lengths))
    launcher.launch(made, -(-batch * new // WARPS), 32 * WARPS, args, machine=machine, stream=stream)


def quantize(
    rows: Any, tokens: Any, *, code: str, power_of_two: bool = False, machine: str = "emulator", arch: str = "90a",
    stream: Any = None,
) -> None:  # fmt: skip
    """Launch :func:`make_quantize` on checked, packed arrays: ``rows [n, D]`` into ``tokens [n, width]``."""
    found = describe(rows, "rows")
    count, d = found.shape
    if count == 0:
        return
    made = make_quantize(found.element, code, arch_for(arch, code), d=d, dv=d - 64, power_of_two=power_of_two)
    args = tuple(host_view(x) if describe(x).device is None else x for x in (rows, tokens))
    launcher.launch(made, -(-count // WARPS), 32 * WARPS, args, machine=machine, stream=stream)


def compile_cases() -> Any:
    """Kernels as they are launched, for the compiler's tables and gates."""
    from flashnumba.machine.compiler import CompileCase

    def case(code: str, chosen_for: tuple[str, ...]) -> CompileCase:
        made = make_append("bfloat16", code, arch_for(chosen_for[0], code))
        element = types.uint8 if code else types.uint16
        arrays = (types.Array(types.uint16, 3, "C"), types.Array(element, 3, "C"))
        table = (types.Array(types.int32, 2, "C"), types.Array(types.int32, 1, "C"))
        title = f"flash_mla.append {code.removeprefix('float8_') or 'bfloat16'}, for sm_{chosen_for[0]}"
        return CompileCase(title, made, arrays + table, 32 * WARPS, chosen_for=chosen_for)

    yield case("", ("80", "86", "89", "90a", "100a", "120a"))
    for code in ELEMENTS:
        yield case(code, ("80", "86"))
        yield case(code, ("89", "90a", "100a", "120a"))
