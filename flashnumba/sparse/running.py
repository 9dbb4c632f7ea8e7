"""What the public functions of sparse attention share: checks of arguments, NumPy or kernels, and what was left out."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashnumba.stages.heads import Heads

__all__ = ["BACKENDS", "KEYS", "ROWS", "WARP_ROWS", "SparseInfo", "arrays", "check_blocks", "check_number", "limit_for",
           "mask_for", "prepare", "run", "scores"]  # fmt: skip

BACKENDS = ("auto", "numpy", "emulator")
"""Kernels where the arrays are, or NumPy if there is no GPU; the references in float64; kernels on the emulator."""
ROWS, KEYS, WARP_ROWS = 128, 64, 32
"""A tile of the references, and rows of a warp: those of the kernels on most GPUs."""


@dataclass(frozen=True)
class SparseInfo:
    """What was left out.

    Attributes:
        tile_map: uint8 ``[B, H, row tiles, key tiles]``, a torch tensor or CuPy array on q's device if q is one, else
            of NumPy; decoding has heads of k, and rows of all query heads that share one. 1: computed; 2: scores
            only, left out then; 0: not looked at, being hidden by the causal mask or off the list.
        tile: rows and keys of a tile.
        threshold: what was compared with, 0 if nothing was.
        mask: of blocks, predicted by SpargeAttn or given, uint8 ``[B, H, R, C]``; else None.
    """

    tile_map: Any
    tile: tuple[int, int]
    threshold: float = 0.0
    mask: Any = None

    def computed(self) -> int:
        """Tiles computed to the end; waits for the GPU."""
        return int((self.tile_map == 1).sum())

    def skipped(self) -> float:
        """The share left out of the tiles whose scores were looked at; waits for the GPU."""
        out = int((self.tile_map == 2).sum())
        return out / max(1, out + self.computed())


def check_number(name: str, value: Any) -> None:
    """TypeError if it is no finite number."""
    try:
        right = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(float(value))
    except OverflowError:  # an int beyond all floats
        right = False
    if not right:
        raise TypeError(f"{name} is {value!r:.40}; it must be a finite number")


def check_blocks(block_m: Any, block_n: Any) -> None:
    """ValueError if a size of blocks is no positive multiple of 64."""
    for name, value in (("block_m", block_m), ("block_n", block_n)):
        if not isinstance(value, Integral) or isinstance(value, bool) or value <= 0 or value % 64:
            raise ValueError(f"{name} is {value!r}; it must be a positive multiple of 64")


def limit_for(threshold: Any) -> float:
    """The kernels' limit for a threshold.

    Raises:
        TypeError, ValueError: it is no number, or not at least 0 and below 1.
    """
    from flashnumba.stages.sparsity.problem import limit_of

    check_number("threshold", threshold)
    return limit_of(float(threshold))


def prepare(q: Any, k: Any, v: Any, causal: Any, scale: Any, backend: Any, return_info: Any) -> Heads:
    """The problem, checked; its results are new.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    from flashnumba.stages.heads import prepare_heads

    if not isinstance(return_info, bool):
        raise TypeError(f"return_info is {return_info!r}; it must be True or False")
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}")
    problem = prepare_heads(
        q, k, v, causal=causal, scale=scale, machine="auto" if backend == "auto" else "emulator", stream=None
    )  # fmt: skip
    if problem.device is not None and backend != "auto":
        raise ValueError(f"q is on cuda:{problem.device} and backend {backend!r} takes arrays in host memory")
    if problem.shape.element == "float32":
        raise ValueError("q is float32; sparse attention takes float16 and bfloat16")
    return problem


def mask_for(mask: Any, problem: Heads, block_m: int, block_n: int) -> Any:
    """The mask as kernels take it: packed uint8 of four axes."""
    from flashnumba.machine.arrays import describe
    from flashnumba.stages.sparsity.lists import mask_shape

    wanted = mask_shape(problem.shape, block_m, block_n)
    axes = len(problem.found.shape)
    if not hasattr(mask, "shape") or tuple(mask.shape) != wanted[4 - axes :]:
        shape = getattr(mask, "shape", None)
        raise ValueError(f"mask has shape {shape}; for q {problem.found.shape} it must be {wanted[4 - axes :]}")
    if problem.found.kind.startswith("torch"):
        import torch

        if not isinstance(mask, torch.Tensor) or mask.dtype not in (torch.bool, torch.uint8):
            raise TypeError(f"mask is {type(mask).__name__}; beside torch tensors it must be one, of bool or uint8")
        mask = mask.to(torch.uint8).contiguous().reshape(wanted)
    elif str(mask.dtype) in ("bool", "uint8"):
        mask = mask.astype("uint8").reshape(wanted)
    else:
        raise TypeError(f"mask has elements of type {mask.dtype}; they must be bool or uint8")
    device = describe(mask, "mask").device
    if device != problem.device:
        raise ValueError(f"mask is on device {device} and q on {problem.device}; they must be in one place")
    if problem.device is None:
        from flashnumba.machine.arrays import host_view

        return host_view(mask)
    return mask


def arrays(problem: Heads) -> list[Any]:
    """q, k and v in host memory, of their own type."""
    from flashnumba.machine.arrays import element_dtype, host_view

    return [host_view(problem.arrays[name]).view(element_dtype(problem.shape.element)) for name in "qkv"]


def scores(problem: Heads, reference: Any) -> Any:
    """All scores in float64."""
    q, k, _ = arrays(problem)
    return reference.scores(q, k, problem.scale, problem.shape.causal)


def run(
    problem: Heads, plan: Callable[[], Any], by_numpy: Callable[[Any], Any], given: dict[str, Any], backend: str,
    return_info: bool, vote: str, threshold: float, decoding: bool, rows: int = ROWS, keys: int = KEYS,
    said: tuple[int, int] | None = None,
) -> Any:  # fmt: skip
    """Launch, or compute with NumPy; o, or (o, info). Tiles of the map are as ``said``; else of ``rows`` and ``keys``
    in NumPy, or a warp's, and in kernels as :func:`flashnumba.stages.sparsity.mma.sparse_tiles` makes of them."""
    import numpy as np

    from flashnumba.stages.sparsity import mma
    from flashnumba.stages.sparsity import problem as launching

    shape = problem.shape
    empty = 0 in (shape.batch, shape.heads, shape.m, shape.n)
    if backend == "numpy" or (backend == "auto" and problem.machine == "emulator"):
        listed = "mask" in given or "kept" in given
        return _on_numpy(problem, by_numpy, threshold, return_info, keys, listed, said)
    if empty:
        for result, value in zip(problem.results, (0, -np.inf), strict=True):
            result[...] = value
        made: dict[str, Any] = {}
    else:
        made = launching.run(problem, plan(), given)
    o = problem.finish()[0]
    if not return_info:
        return o
    from flashnumba.stages.sparsity.decode import decode_tiles
    from flashnumba.stages.sparsity.lists import mask_shape
    from flashnumba.tiles.sparse import unit_rows
    from flashnumba.tiles.sparse_split import TILE

    if decoding:
        tile = decode_tiles(shape.d, shape.m * shape.group).bm, TILE
    elif said:
        tile = said
    else:
        tiles = mma.sparse_tiles(shape, rows, keys)
        tile = unit_rows(tiles, vote), tiles.bn
    if empty:
        lines, heads = (shape.m * shape.group, shape.kv_heads) if decoding else (shape.m, shape.heads)
        found = np.zeros((shape.batch, heads, -(-lines // tile[0]), -(-shape.n // tile[1])), np.uint8)
        tile_map = _beside(found, o)
        if "kept" in given:
            made["mask"] = _beside(np.zeros(mask_shape(shape, rows, keys), np.uint8), o)
    else:
        tile_map = made["tile_map"]
        if shape.causal and not decoding:  # a warp goes with its block over tiles of which it sees nothing
            tile_map = _without_hidden(tile_map, shape, *tile)
    if hasattr(tile_map, "copy_to_host"):  # Numba's arrays cannot be compared
        tile_map = tile_map.copy_to_host()
    return o, SparseInfo(tile_map, tile, threshold, made.get("mask", given.get("mask")))


def _without_hidden(tile_map: Any, shape: Any, rows: int, keys: int) -> Any:
    """The map with 0 where the causal mask hides a tile from all its rows. Nothing is brought from the host, so that it
    can be part of a CUDA graph."""
    import numpy as np

    across, down = tile_map.shape[-1], tile_map.shape[-2]
    reach = shape.n - shape.m
    if _library(tile_map) == "torch":
        torch = sys.modules["torch"]
        last = torch.arange(1, down + 1, device=tile_map.device).mul(rows).clamp(max=shape.m)  # [R]
        seen = torch.arange(across, device=tile_map.device).mul(keys) < (last + reach)[:, None]  # [R, C]
        return tile_map * seen.to(torch.uint8)
    if _library(tile_map) == "cupy":
        cupy = sys.modules["cupy"]
        with tile_map.device:
            last = cupy.minimum(cupy.arange(1, down + 1) * rows, shape.m)
            return tile_map * (cupy.arange(across) * keys < (last + reach)[:, None]).astype(cupy.uint8)
    last = np.minimum(np.arange(1, down + 1) * rows, shape.m)
    seen = (np.arange(across) * keys < (last + reach)[:, None]).astype(np.uint8)
    return (tile_map.copy_to_host() if hasattr(tile_map, "copy_to_host") else tile_map) * seen


def _library(array: Any) -> str:
    return type(array).__module__.split(".")[0]


def _beside(array: Any, other: Any) -> Any:
    """A NumPy array as one of the other's kind, where that is."""
    if _library(other) == "torch":
        return sys.modules["torch"].from_numpy(array).to(other.device)
    if _library(other) == "cupy":
        with other.device:
            return sys.modules["cupy"].asarray(array)
    return array


def _on_numpy(
    problem: Heads, by_numpy: Any, threshold: float, return_info: bool, keys: int, given_mask: bool,
    said: tuple[int, int] | None,
) -> Any:  # fmt: skip
    import numpy as np

    from flashnumba.stages.sparsity import reference

    q, k, v = arrays(problem)
    shape = problem.shape
    blocks, rows, keep_sum = by_numpy(reference)  # [B, H, R, C]
    s = reference.scores(q, k, problem.scale, shape.causal)  # [B, H, M, N]
    seen = ~np.isneginf(s)  # [B, H, M, N]
    kept = reference.expand(blocks, rows, keys, shape.m, shape.n) & seen  # [B, H, M, N]
    tile = said if said and given_mask else (rows, keys)
    visible = reference.visible_blocks(shape.m, shape.n, *tile, shape.causal)  # [R, C]
    chosen = _finer(blocks, (rows, keys), tile, visible.shape) & visible  # [B, H, R, C]
    tile_map = np.where(chosen, 1, 0 if given_mask else np.where(visible, 2, 0))  # [B, H, R, C]
    if given_mask and threshold:  # the skip among the blocks that were chosen
        tile, s_kept = said or (WARP_ROWS, KEYS), np.where(kept, s, -np.inf)
        looked_at = reference.skip(s_kept, *tile, 0.0)  # [B, H, R, C]: what a row sees
        needed = _needed(reference, shape, s_kept, blocks, (rows, keys), threshold, said)  # [B, H, R, C]
        kept &= reference.expand(needed, *tile, shape.m, shape.n)
        tile_map = np.where(needed & looked_at, 1, np.where(looked_at, 2, 0))
    o, lse = reference.attend(s, v, kept, seen if keep_sum else kept)
    problem.arrays["o"].view(q.dtype)[...] = o
    problem.arrays["lse"][...] = lse
    result = problem.finish()[0]
    if not return_info:
        return result
    made = [tile_map.astype(np.uint8), blocks.astype(np.uint8) if given_mask else None]
    tile_map, mask = (None if x is None else _beside(x, result) for x in made)
    return result, SparseInfo(tile_map, tile, threshold, mask)


def _finer(blocks: Any, of: tuple[int, int], tile: tuple[int, int], shape: tuple[int, int]) -> Any:
    """A mask of blocks of so many rows and keys as one of tiles that they consist of, ``shape`` of them."""
    return blocks.repeat(of[0] // tile[0], -2).repeat(of[1] // tile[1], -1)[..., : shape[0], : shape[1]]


def _needed(
    reference: Any, shape: Any, s: Any, blocks: Any, of: tuple[int, int], threshold: float,
    said: tuple[int, int] | None,
) -> Any:  # fmt: skip
    """Tiles that are left by the skip among ``blocks`` of a size, beyond which S is -inf: a warp's own, or, if
    ``said``, a consumer's of ``wgmma``, by tiles gathered from blocks."""
    if said is None:
        return reference.skip(s, WARP_ROWS, KEYS, threshold)
    from flashnumba.stages.sparsity.wgmma import list_tiles

    tiles = list_tiles(shape.d)
    visible = reference.visible_blocks(shape.m, shape.n, tiles.bm, tiles.block, shape.causal)  # [row tiles, C]
    listed = _finer(blocks, of, (tiles.bm, tiles.block), visible.shape) & visible  # [B, H, row tiles, C]
    return reference.skip_gathered(s, listed, said[0], tiles.bm, tiles.block, tiles.bn // tiles.block, threshold)
