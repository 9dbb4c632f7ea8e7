"""What latent attention refuses before anything is launched, with the argument, its value and what would be right."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashnumba.machine.arrays import Described, describe, host_view
from flashnumba.stages.flash_mla.schedule import schedule
from flashnumba.stages.flash_mla.sizes import DV, PAGE, D, token_bytes

__all__ = [
    "HALVES",
    "check_cache",
    "check_dv",
    "check_flag",
    "check_plan",
    "check_q",
    "check_rows",
    "check_tables",
    "check_together",
]

HALVES = ("float16", "bfloat16")


def check_q(q: Described) -> None:
    """TypeError or ValueError for a q that no kernel takes."""
    if q.element not in HALVES:
        raise TypeError(f"q has elements of type {q.element}; latent attention takes {' and '.join(HALVES)}")
    if len(q.shape) != 4 or q.shape[3] != D:
        raise ValueError(f"q has shape {q.shape}; it must be [requests, query tokens, heads, {D}]")


def check_dv(head_dim_v: Any) -> None:
    if not isinstance(head_dim_v, int | np.integer) or head_dim_v != DV:
        raise ValueError(f"head_dim_v is {head_dim_v!r}; V is the first {DV} of K's {D} columns")


def check_together(q: Described, **others: Described) -> None:
    for name, array in others.items():
        if array.device != q.device:
            places = ["in host memory" if d is None else f"on cuda:{d}" for d in (array.device, q.device)]
            raise ValueError(f"{name} is {places[0]} and q {places[1]}; they must be in one place")


def check_rows(array: Described, name: str) -> None:
    """ValueError for rows that cannot be read 16 bytes at a time."""
    odd = array.pointer | array.strides[0] * (array.shape[0] > 1) | array.strides[1]
    if array.strides[3] != array.dtype.itemsize or odd % 16 or array.strides[1] < 0:
        raise ValueError(
            f"{name} has strides {array.strides} and address {array.pointer:#x}; rows must be packed and begin at "
            "multiples of 16 bytes: pass a contiguous array"
        )


def check_cache(q: Described, cache: Described, code: str) -> None:
    """The cache fits q, and a format that is stored in 8 bits."""
    width = token_bytes() if code else D
    if len(cache.shape) != 4 or cache.shape[1:] != (PAGE, 1, width):
        raise ValueError(f"k_cache has shape {cache.shape}; it must be [pages, {PAGE}, 1, {width}]")
    if code and cache.element not in ("uint8", code):
        raise TypeError(f"k_cache has elements of type {cache.element}; tokens in 8 bits are uint8, or {code}")
    if not code and cache.element != q.element:
        raise TypeError(f"k_cache has elements of type {cache.element} and q of {q.element}; they must be the same")
    check_rows(cache, "k_cache")
    if code and cache.strides[1] != width:
        raise ValueError(f"k_cache has strides {cache.strides}; tokens of a page in 8 bits must be packed")


def check_tables(q: Described, cache: Described, block_table: Any, cache_seqlens: Any) -> None:
    """Shapes of the tables; in host memory their numbers too, which on a GPU would mean to wait for it."""
    table, lengths = describe(block_table, "block_table"), describe(cache_seqlens, "cache_seqlens")
    for name, array, axes in (("block_table", table, 2), ("cache_seqlens", lengths, 1)):
        if array.element != "int32":
            raise TypeError(f"{name} has elements of type {array.element}; it must be int32")
        if len(array.shape) != axes or array.shape[0] != q.shape[0]:
            shape = f"[{q.shape[0]}, most pages]" if axes == 2 else f"[{q.shape[0]}]"
            raise ValueError(f"{name} has shape {array.shape} and q {q.shape}; it must be {shape}")
    check_together(q, k_cache=cache, block_table=table, cache_seqlens=lengths)
    if q.device is not None:
        return
    pages, counts = host_view(block_table), host_view(cache_seqlens)
    for b, count in enumerate(counts.tolist()):
        if not 0 <= count <= PAGE * table.shape[1]:
            raise ValueError(
                f"cache_seqlens[{b}] is {count}; it must be 0 to {PAGE * table.shape[1]}, the tokens of "
                f"{table.shape[1]} pages"
            )
        used = pages[b, : -(-count // PAGE)]
        wrong = (used < 0) | (used >= cache.shape[0])
        if wrong.any():
            at = int(wrong.argmax())
            raise ValueError(f"block_table[{b}, {at}] is {used[at]}; the cache has pages 0 to {cache.shape[0] - 1}")


def check_flag(causal: Any) -> None:
    if not isinstance(causal, bool | np.bool_):
        raise TypeError(f"causal is {causal!r}; it must be True or False")


def check_plan(q: Described, metadata: Any, num_splits: Any, cache_seqlens: Any) -> None:
    """The plan has the shapes that ``plan`` gives; in host memory, that it is the one for these lengths."""
    if metadata is None or num_splits is None:
        raise ValueError("tile_scheduler_metadata and num_splits belong together; pass both as plan gave them, or none")
    parts, splits = describe(metadata, "tile_scheduler_metadata"), describe(num_splits, "num_splits")
    check_together(q, tile_scheduler_metadata=parts, num_splits=splits)
    wrong = parts.element != "int32" or splits.element != "int32" or len(parts.shape) != 2 or parts.shape[0] < 1
    if wrong or parts.shape[1] != 8 or splits.shape != (q.shape[0] + 1,):
        raise ValueError(
            f"tile_scheduler_metadata is {parts.element} of shape {parts.shape} and num_splits {splits.element} of "
            f"{splits.shape}; for {q.shape[0]} requests plan gives int32 [parts, 8] and [{q.shape[0] + 1}]"
        )
    if q.device is None:
        right = schedule(host_view(cache_seqlens), parts.shape[0])
        given = host_view(metadata), host_view(num_splits)
        if not all(map(np.array_equal, given, (right.parts, right.num_splits))):
            raise ValueError("tile_scheduler_metadata is not for these cache_seqlens; plan anew when they change")
