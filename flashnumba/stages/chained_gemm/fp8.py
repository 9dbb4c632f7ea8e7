"""The three ways in FP8, where the problem is not made but met: attention with e4m3 q, k and v on sm_89 and later.

``m16n8k32`` takes four neighbouring keys of P in a register, and the first product leaves two. With K in its natural
order the four lanes of a row stand exactly as those of :mod:`flashnumba.stages.chained_gemm.mma` do in mmac's, counted
in pairs of keys, so the same hand-overs serve. ``registers`` copies K in the order QUADS instead, and V stays as it is.

P, between 0 and 1, is multiplied by 2^8 before it is rounded to e4m3: 256 is less than the largest number, 448, and
weights down to 2^-17 leave something. Sums are float32, o is float16.

V has to lie by columns, each at a multiple of 16 bytes (:mod:`flashnumba.tiles.fp8`). A v of another layout is copied
once a call; :func:`by_columns` makes such a v for several calls. q and k whose rows are not aligned to 16 bytes, or no
multiple of that, are copied too.

Limits: no scales but the one of the scores; mma.sync computes in FP8 on sm_89 and sm_120, on sm_90 it is converted to
float16 by the assembler and gains nothing. sm_89 keeps 13 bits behind the point of its sums.

Sources: PTX ISA, mma.m16n8k32; Zhang et al., SageAttention2, arXiv 2411.10958; Shah et al., FlashAttention-3, arXiv
2407.08608, section 3.3.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from flashnumba.machine import gpu
from flashnumba.machine.arrays import Described, describe, empty_like_kind, host_view
from flashnumba.machine.streams import stream_handle
from flashnumba.stages.chained_gemm.mma import make_chained
from flashnumba.stages.heads import (
    EMULATED_MULTIPROCESSORS,
    Heads,
    Launch,
    Plan,
    Planner,
    Shape,
    check,
    check_scale,
    signature,
    widest,
)
from flashnumba.stages.host import check_machine, library_stream, machine_of, refuse_gradients
from flashnumba.tiles.attention import AttentionTiles
from flashnumba.tiles.chain import WAYS, shared_of

if TYPE_CHECKING:
    from flashnumba.machine.compiler import CompileCase

__all__ = ["ELEMENT", "PLANS", "by_columns", "compile_cases", "forward", "plan_chained", "tiles_for"]

ELEMENT = "float8_e4m3fn"
"""Of q, k and v, as ml_dtypes and torch call it."""


def tiles_for(d: int, arch: str) -> AttentionTiles:
    """Tiles for a head dimension. What registers hold is as large as for 16 bits, what lies in shared memory half.

    Elsewhere than on sm_89 the assembler's code takes more registers, so a warp has one fragment of rows.
    """
    d = -(-d // 64) * 64
    if d > 128:
        return AttentionTiles(d, 64, 64, nbytes=1)
    if arch != "89":
        return AttentionTiles(d, 64, 64, slots=2, nbytes=1)
    return AttentionTiles(d, 128, 64, slots=2 if d == 64 else 1, lazy=d == 128, nbytes=1)


def plan_chained(way: str, shape: Shape, tiles: AttentionTiles | None = None, *, broken: str = "") -> Plan:
    """One block for each tile of rows of each head, with the shared memory of the way that takes most.

    Raises:
        ValueError: another element, a GPU below sm_89, or rows that are not aligned as the kernels need them.
    """
    if shape.element != ELEMENT or shape.vector != 16 or shape.d % 16:
        raise ValueError(f"q is {shape.element} with rows of {shape.d}; it must be {ELEMENT}, in multiples of 16 bytes")
    if int(shape.arch.rstrip("a")) < 89:
        raise ValueError(f"tensor cores multiply {ELEMENT} from sm_89 on; this is sm_{shape.arch}")
    tiles = tiles or tiles_for(shape.d, shape.arch)
    made = make_chained(way, tiles, ELEMENT, 16, "89", even=shape.d == tiles.d, broken=broken)
    blocks = -(-shape.m // tiles.bm) * shape.heads * shape.batch
    most = max(shared_of(each, tiles) for each in WAYS)
    return Plan((Launch(made, blocks, tiles.threads, tiles.shared + most),))


PLANS: dict[str, Planner] = {way: partial(plan_chained, way) for way in WAYS}


def forward(
    q: Any, k: Any, v: Any, plan: Planner = PLANS["registers"], *, causal: bool = False, scale: float | None = None,
    machine: str = "auto", stream: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Attention of e4m3 arrays: shapes, conventions and errors as :func:`flashnumba.stages.heads.forward`.

    Args:
        q, k, v: NumPy with ml_dtypes' float8_e4m3fn, torch's, or CuPy's. ``by_columns(v)`` is not copied.

    Returns:
        (o, lse): o float16 in q's shape, lse float32.

    Raises:
        TypeError, ValueError: an argument does not fit, before anything is launched.
    """
    check_machine(machine)
    refuse_gradients(q=q, k=k, v=v)
    found = [describe(array, name) for name, array in zip("qkv", (q, k, v), strict=True)]
    for name, array in zip("qkv", found, strict=True):
        if array.element != ELEMENT:
            raise TypeError(f"{name} has elements of type {array.element}; it must be {ELEMENT}")
    shape = check(*(replace(array, element="float16") for array in found), causal=causal)
    scale = check_scale(scale, shape.d)
    if stream is not None:
        stream_handle(stream)
    machine, arch = machine_of(machine, found[0], "q")
    units = EMULATED_MULTIPROCESSORS if machine == "emulator" else gpu.multiprocessors(found[0].device)
    with library_stream(found[0], stream):
        columns = -(-shape.d // 16) * 16
        arrays = {name: _rows(array, f, columns) for name, array, f in zip("qk", (q, k), found[:2], strict=True)}
        arrays["v"] = _by_columns(v, found[2], columns)
        o = empty_like_kind(q, (*found[0].shape[:-1], columns), "float16")
        lse = empty_like_kind(q, found[0].shape[:-1], "float32")
        arrays["o"], arrays["lse"] = _axes(o, 4), _axes(lse, 3)
    shape = replace(shape, element=ELEMENT, d=columns, vector=16, arch=arch, multiprocessors=units)
    heads = Heads(shape, arrays, scale, machine, found[0].device, stream, found[0], (o, lse))
    empty = 0 in (shape.batch, shape.heads, shape.m)
    o, lse = heads.finish() if empty else heads.run(plan(shape))
    return (o if columns == found[0].shape[-1] else o[..., : found[0].shape[-1]]), lse


def by_columns(v: Any) -> Any:
    """``v [..., N, D]`` with its columns in memory one after the other, as the kernels read it: a copy, once.

    Returns:
        an array of v's shape, library and element, a view of ``[..., D, N']`` where N' is N up to a multiple of 16.
    """
    found = describe(v, "v")
    n, d = found.shape[-2:]
    made = _transposed(v, found, d)
    view = made[..., :n, :d]
    if found.device is None and found.kind == "numpy":
        view = view.view(v.dtype)
    elif found.kind.startswith("torch"):
        view = (view if found.device is not None else sys.modules["torch"].from_numpy(view)).view(v.dtype)
    elif found.kind == "cupy":
        view = view.view(v.dtype)
    return view.reshape(found.shape) if view.ndim == len(found.shape) else view[(0,) * (view.ndim - len(found.shape))]


# -- layouts -----------------------------------------------------------------------------------------------------------
def _axes(array: Any, rank: int) -> Any:
    """The array as bytes, with axes of length 1 in front."""
    found = describe(array, "array")
    array = host_view(array) if found.device is None else array
    more = rank - len(found.shape)
    return array[(None,) * more] if more else array


def _zeros(like: Any, found: Described, shape: tuple[int, ...], name: str) -> tuple[Any, Any]:
    """(zeros of bytes, ``like`` as bytes with four axes) in ``like``'s library."""
    if found.device is None:
        return np.zeros(shape, np.uint8), _axes(like, 4)
    if found.kind == "torch-cuda":
        torch = sys.modules["torch"]
        return torch.zeros(shape, dtype=torch.uint8, device=like.device), _axes(like.view(torch.uint8), 4)
    if found.kind == "cupy":
        return sys.modules["cupy"].zeros(shape, np.uint8), _axes(like.view(np.uint8), 4)
    raise ValueError(f"{name} has to be copied, and its library lends no way to; pass rows aligned to 16 bytes")


def _rows(array: Any, found: Described, columns: int) -> Any:
    """q or k with four axes, rows aligned to 16 bytes; a copy with zeros behind each row where they are not."""
    if widest(found) >= 16 and found.shape[-1] == columns:
        return _axes(array, 4)
    made, given = _zeros(array, found, ((1, 1, *found.shape)[-4:-1] + (columns,)), "q or k")
    made[..., : found.shape[-1]] = given
    return made


def _by_columns(v: Any, found: Described, columns: int) -> Any:
    """v with four axes, by columns; a copy where it is not yet."""
    swapped = found.shape[:-2] + (found.shape[-1], -(-found.shape[-2] // 16) * 16)
    strides = (*found.strides[:-2], found.strides[-1], found.strides[-2])
    if widest(replace(found, shape=swapped, strides=strides)) >= 16 and found.shape[-1] == columns:
        return _axes(v, 4)
    return _transposed(v, found, columns)[..., : found.shape[-2], :]


def _transposed(v: Any, found: Described, columns: int) -> Any:
    """A copy of v by columns: bytes ``[batch, heads, N', columns]``, a view of ``[batch, heads, columns, N']``."""
    batch, heads, n, d = (1, 1, *found.shape)[-4:]
    made, given = _zeros(v, found, (batch, heads, columns, -(-n // 16) * 16), "v")
    view = made.swapaxes(-1, -2)
    view[..., :n, :d] = given
    return view


def compile_cases() -> Iterator[CompileCase]:
    """Kernels as they are launched, for the compiler's tables and gates."""
    from flashnumba.machine.compiler import CompileCase

    for way in WAYS:
        for d in (64, 128):
            for chosen_for in (("89",), ("90a", "100a", "120a")):
                shape = Shape(ELEMENT, 1, 1, 1, 4096, 4096, d, arch=chosen_for[0])
                (launch,) = plan_chained(way, shape).launches
                title = f"chained_gemm.{way} e4m3 d {d}, tiles for sm_{chosen_for[0]}"
                yield CompileCase(
                    title, launch.kernel, signature(ELEMENT), launch.threads, launch.shared, chosen_for=chosen_for
                )
