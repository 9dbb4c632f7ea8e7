"""Host side of latent attention: check arrays, see them as the kernels take them, choose tiles, launch, hand back.

Shapes are FlashMLA's: ``q [B, S, H, 576]``, a cache of pages ``[pages, 64, 1, 576]`` in 16 bits or ``[pages, 64, 1,
656]`` in 8, ``kv [B, N, 1, 576]`` for prefill; ``out [B, S, H, 512]`` and ``lse [B, H, S]``. The cache is read where it
lies; a q whose rows are not packed or not at multiples of 16 bytes is copied first.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flashnumba.machine import gpu, launcher
from flashnumba.machine.arrays import Described, describe, empty_like_kind, host_view
from flashnumba.machine.function import Kernel
from flashnumba.machine.numba import types
from flashnumba.machine.streams import stream_handle
from flashnumba.stages.flash_mla.checks import (
    check_cache,
    check_flag,
    check_plan,
    check_q,
    check_rows,
    check_tables,
    check_together,
)
from flashnumba.stages.flash_mla.combine import COMBINE_ARGS, make_combine
from flashnumba.stages.flash_mla.mma import DECODE_ARGS, PREFILL_ARGS, make_decode, make_prefill, tiles_for
from flashnumba.stages.flash_mla.schedule import schedule
from flashnumba.stages.flash_mla.sizes import DV, D, MLATiles
from flashnumba.stages.heads import EMULATED_MULTIPROCESSORS, check_scale
from flashnumba.stages.host import check_machine, finish, library_stream, machine_of, packed_copy, refuse_gradients
from flashnumba.tiles.dependency import can_start_early
from flashnumba.tiles.fp8_convert import ELEMENTS, native

__all__ = ["CODES", "Decoding", "arch_for", "check_planned", "make_plan", "on_host", "placed", "prefill",
           "prepare_decode", "signature"]  # fmt: skip

CODES = dict(zip(("e4m3", "e5m2"), ELEMENTS, strict=True))
"""Formats of a cache in 8 bits, by name."""
MOST_BLOCKS = 2**31 - 1


def arch_for(arch: str, code: str = "") -> str:
    """What kernels for a GPU are made for: whether one starts before the other ends, and whether codes are converted by
    instructions."""
    return "90" if can_start_early(arch) else "89" if code and native(arch) else "80"


def signature(args: tuple[str, ...], element: str, code: str = "") -> tuple[Any, ...]:
    """Numba types of a kernel's arguments: q, cache and kv of any strides, the rest packed."""
    half = {"float16": types.float16, "bfloat16": types.uint16}[element]
    known = {"q": types.Array(half, 4, "A"), "kv": types.Array(half, 3, "A"), "o": types.Array(half, 4, "C")}
    known |= {"cache": types.Array(types.uint8 if code else half, 3, "A"), "scale": types.float32}
    known |= {name: types.Array(types.int32, 2, "C") for name in ("block_table", "parts")}
    known |= {name: types.Array(types.int32, 1, "C") for name in ("lengths", "num_splits")}
    known |= {name: types.Array(types.float32, 2, "C") for name in ("m_parts", "l_parts")}
    known |= {name: types.Array(types.float32, 3, "C") for name in ("acc_parts", "lse")} | {"causal": types.int32}
    return tuple(known[name] for name in args)


def prepared(made: Kernel, wanted: tuple[Any, ...], shared: int, machine: str, device: int | None) -> Any:
    """A kernel, compiled once for each device."""
    key = ("flash_mla", wanted, shared, machine, device)
    if key not in made.cache:
        made.cache[key] = launcher.prepare(made, wanted, shared=shared, machine=machine, device=device)
    return made.cache[key]


def on_host(array: Any, name: str) -> np.ndarray:
    """An array's numbers in host memory; of one on a GPU a copy, for which the host waits."""
    found = describe(array, name)
    if found.device is None:
        return host_view(array, name)
    if found.kind == "torch-cuda":
        return array.cpu().numpy()
    if found.kind == "cupy":
        return array.get()
    if hasattr(array, "copy_to_host"):
        return array.copy_to_host()
    return np.asarray(array)


def placed(array: np.ndarray, like: Described, stream: Any = None) -> Any:
    """A copy of a host array beside another array, of its kind."""
    if like.kind == "torch-cpu":
        return sys.modules["torch"].from_numpy(np.ascontiguousarray(array))
    if like.device is None:
        return np.ascontiguousarray(array)
    with library_stream(like, stream):
        if like.kind == "torch-cuda":
            return sys.modules["torch"].from_numpy(np.ascontiguousarray(array)).to(f"cuda:{like.device}")
        if like.kind == "cupy":
            cupy = sys.modules["cupy"]
            with cupy.cuda.Device(like.device):
                return cupy.asarray(array)
        from flashnumba.machine.numba import cuda

        with cuda.gpus[like.device]:
            return cuda.to_device(np.ascontiguousarray(array))


# -- decoding ----------------------------------------------------------------------------------------------------------
def parts_for(tiles: MLATiles, rows: int, multiprocessors: int) -> int:
    """As many parts as fill the GPU once, each of them a block for each tile of rows."""
    return max(1, multiprocessors * tiles.min_blocks // -(-rows // tiles.bm))


def check_planned(rows: Any) -> None:
    """ValueError for a ``num_q_tokens_per_head_k`` that is no number of rows."""
    if isinstance(rows, bool) or not isinstance(rows, int | np.integer) or rows < 1:
        raise ValueError(f"num_q_tokens_per_head_k is {rows!r}; it must be query tokens times heads, at least 1")


def make_plan(cache_seqlens: Any, rows: int, code: str, machine: str, lengths: np.ndarray | None = None) -> Any:
    """(tile_scheduler_metadata, num_splits) beside ``cache_seqlens``; ``lengths`` are the same numbers, if known."""
    check_machine(machine)
    found = describe(cache_seqlens, "cache_seqlens")
    if found.element != "int32" or len(found.shape) != 1:
        raise TypeError(f"cache_seqlens is {found.element} of shape {found.shape}; it must be int32, [requests]")
    check_planned(rows)
    machine, arch = machine_of(machine, found, "cache_seqlens")
    count = EMULATED_MULTIPROCESSORS if machine == "emulator" else gpu.multiprocessors(found.device)
    lengths = on_host(cache_seqlens, "cache_seqlens") if lengths is None else lengths
    if lengths.min(initial=0) < 0:
        raise ValueError(f"cache_seqlens[{lengths.argmin()}] is {lengths.min()}; it must be at least 0")
    made = schedule(lengths, parts_for(tiles_for(int(rows), arch, bool(code)), int(rows), count))
    return tuple(placed(x, found) for x in (made.parts, made.num_splits))


@dataclass
class Decoding:
    """A checked call: arrays as the kernels take them, by name."""

    arrays: dict[str, Any]
    found: Described
    results: tuple[Any, Any]
    scale: float
    causal: bool
    code: str
    machine: str
    arch: str
    stream: Any

    def run(self) -> tuple[Any, Any]:
        """(out, lse) as the caller gets them."""
        b, s, h, _ = self.found.shape
        if b * s * h:
            self.launch(b, s * h)
        out, lse = (finish(result, self.found, self.stream) for result in self.results)
        return out, lse

    def launch(self, requests: int, rows: int) -> None:
        element, known = self.found.element, dict(self.arrays)
        tiles = tiles_for(rows, self.arch, bool(self.code))
        parts = describe(known["parts"]).shape[0]
        most = requests + parts  # a cut makes one state more
        with library_stream(self.found, self.stream):
            for name, shape in (("acc_parts", (most, rows, DV)), ("m_parts", (most, rows)), ("l_parts", (most, rows))):
                known[name] = empty_like_kind(self.results[0], shape, "float32")
        known |= {"scale": np.float32(self.scale), "causal": np.int32(self.causal)}
        attend = make_decode(tiles, element, arch_for(self.arch, self.code), code=self.code)
        combine = make_combine(element, DV, arch_for(self.arch))
        for made, names, grid, threads, shared in (
            (attend, DECODE_ARGS, parts * -(-rows // tiles.bm), tiles.threads, tiles.shared),
            (combine, COMBINE_ARGS, requests * rows, combine.threads, 0),
        ):
            refuse_grid(grid, self.found)
            ready = prepared(made, signature(names, element, self.code), shared, self.machine, self.found.device)
            ready(grid, threads, tuple(known[name] for name in names), self.stream)


def refuse_grid(grid: int, q: Described) -> None:
    if grid > MOST_BLOCKS:
        raise ValueError(f"q has shape {q.shape}, {grid} blocks of work; a launch takes {MOST_BLOCKS}: split it")


def prepare_decode(
    q: Any, k_cache: Any, block_table: Any, cache_seqlens: Any, metadata: Any, num_splits: Any, *, scale: float | None,
    causal: bool, code: str, machine: str, stream: Any,
) -> Decoding:  # fmt: skip
    """Check a call of decoding, and allocate its results."""
    check_machine(machine)
    refuse_gradients(q=q, k_cache=k_cache)
    of_q, of_cache = describe(q, "q"), describe(k_cache, "k_cache")
    check_q(of_q)
    check_cache(of_q, of_cache, code)
    check_tables(of_q, of_cache, block_table, cache_seqlens)
    check_flag(causal)
    scale = check_scale(scale, D, "softmax_scale")
    if stream is not None:
        stream_handle(stream)
    asked, (machine, arch) = machine, machine_of(machine, of_q, "q")
    rows = of_q.shape[1] * of_q.shape[2]
    if metadata is None and num_splits is None:
        with library_stream(of_q, stream):  # where the lengths are ready, and whose parts they stay
            metadata, num_splits = make_plan(cache_seqlens, max(1, rows), code, asked)
    check_plan(of_q, metadata, num_splits, cache_seqlens)
    with library_stream(of_q, stream):
        o = empty_like_kind(q, (*of_q.shape[:3], DV))
        lse = empty_like_kind(q, (of_q.shape[0], of_q.shape[2], of_q.shape[1]), "float32")
        tables = {"block_table": block_table, "lengths": cache_seqlens, "parts": metadata, "num_splits": num_splits}
        arrays = {name: _packed(array, name) for name, array in tables.items()}
        arrays |= {"q": q_view(q, of_q), "cache": without_heads(k_cache, of_cache), "o": seen(o), "lse": seen(lse)}
    return Decoding(arrays, of_q, (o, lse), scale, bool(causal), code, machine, arch, stream)


def q_view(q: Any, found: Described) -> Any:
    """q as kernels take it; copied where rows are not packed at multiples of 16 bytes."""
    odd = found.pointer
    for n, stride in zip(found.shape[:3], found.strides[:3], strict=True):
        odd |= stride if n > 1 else 0
    if odd % 16 or found.strides[3] != 2:
        q, found = packed_copy(q, found, "q", "rows are read 16 bytes at a time")
    return seen(q)


def seen(array: Any) -> Any:
    """In host memory a NumPy view with the kernel's type."""
    return host_view(array) if describe(array).device is None else array


def without_heads(array: Any, found: Described) -> Any:
    """``[a, b, 1, c]`` as ``[a, b, c]``."""
    if found.device is None:
        return host_view(array)[:, :, 0]
    if found.kind in ("torch-cuda", "cupy"):
        return array[:, :, 0]
    kept = (0, 1, 3)
    shape, strides = (tuple(x[i] for i in kept) for x in (found.shape, found.strides))
    return replace(found, shape=shape, strides=strides, kind="numba")


def _packed(array: Any, name: str) -> Any:
    found = describe(array, name)
    return seen(array if found.contiguous else packed_copy(array, found, name, "tables are packed")[0])


# -- prefill -----------------------------------------------------------------------------------------------------------
def prefill(q: Any, kv: Any, *, scale: float | None, causal: bool, machine: str, stream: Any) -> tuple[Any, Any]:
    """(out, lse) of many query tokens on latent rows that lie one after the other."""
    check_machine(machine)
    refuse_gradients(q=q, kv=kv)
    of_q, of_kv = describe(q, "q"), describe(kv, "kv")
    check_q(of_q)
    if len(of_kv.shape) != 4 or (of_kv.shape[0], *of_kv.shape[2:]) != (of_q.shape[0], 1, D):
        raise ValueError(f"kv has shape {of_kv.shape} and q {of_q.shape}; it must be [{of_q.shape[0]}, rows, 1, {D}]")
    if of_kv.element != of_q.element:
        raise TypeError(f"kv has elements of type {of_kv.element} and q of {of_q.element}; they must be the same")
    check_together(of_q, kv=of_kv)
    if 0 not in of_kv.shape:
        check_rows(of_kv, "kv")
    check_flag(causal)
    scale = check_scale(scale, D, "softmax_scale")
    if stream is not None:
        stream_handle(stream)
    machine, arch = machine_of(machine, of_q, "q")
    b, s, h, _ = of_q.shape
    with library_stream(of_q, stream):
        o, lse = empty_like_kind(q, (b, s, h, DV)), empty_like_kind(q, (b, h, s), "float32")
        known = {"q": q_view(q, of_q), "kv": without_heads(kv, of_kv), "o": seen(o), "lse": seen(lse)}
    known |= {"scale": np.float32(scale), "causal": np.int32(bool(causal))}
    if b * s * h:
        tiles = tiles_for(s * h, arch)
        made, grid = make_prefill(tiles, of_q.element, arch_for(arch)), b * -(-s * h // tiles.bm)
        refuse_grid(grid, of_q)
        ready = prepared(made, signature(PREFILL_ARGS, of_q.element), tiles.shared, machine, of_q.device)
        ready(grid, tiles.threads, tuple(known[name] for name in PREFILL_ARGS), stream)
    out, sums = (finish(result, of_q, stream) for result in (o, lse))
    return out, sums
