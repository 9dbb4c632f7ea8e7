"""The public functions: check the arguments, plan, launch, hand back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

from flashnumba.sparse.calibration import PUBLISHED, Calibration

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashnumba.stages.heads import Heads, Plan

__all__ = ["BACKENDS", "SparseInfo", "blasst_attention", "block_sparse_attention", "sparge_attention",
           "warp_skip_attention"]  # fmt: skip

BACKENDS = ("auto", "numpy", "emulator")
"""Kernels where the arrays are, or NumPy if there is no GPU; the references in float64; kernels on the emulator."""
ROWS, KEYS, WARP_ROWS = 128, 64, 32
"""A tile of the references, and rows of a warp: those of the kernels on most GPUs."""
DECODE_ROWS = 64
"""Query rows for each head of k up to which a step is one of decoding."""


@dataclass(frozen=True)
class SparseInfo:
    """What was left out.

    Attributes:
        tile_map: uint8 ``[B, H, row tiles, key tiles]`` of q's kind, on its device; decoding has heads of k, and
            rows of all query heads that share one. 1: computed; 2: scores only, left out then; 0: not looked
            at, being hidden by the causal mask or off the list.
        tile: rows and keys of a tile.
        threshold: what was compared with, 0 if nothing was.
        mask: SpargeAttn's mask of blocks, uint8 ``[B, H, R, C]``; else None.
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


def blasst_attention(
    q: Any, k: Any, v: Any, *, threshold: float | None = None, target_sparsity: float | None = None,
    calibration: Calibration | None = None, causal: bool = False, scale: float | None = None,
    return_info: bool = False, backend: str = "auto",
) -> Any:  # fmt: skip
    """BLASST: a tile of keys is left out where it is below a threshold of the maximum so far, in all rows of a tile.

    Scores are always computed; exponentials and the product with V are saved. With few query rows (decoding: at most 64
    for each head of k) the keys are shared out over blocks, and the V of what is left out is not read either.

    Args:
        q, k, v, causal, scale: as :func:`flashnumba.attention.attention`; float16 or bfloat16.
        threshold: weights below this part of the row's greatest may be left out, 0 <= threshold < 1; 0 leaves out
            nothing, and is ``flash_forward.mma`` with tiles of 64 keys bit for bit: from a head dimension of 65 on
            that is what ``attention`` launches on most GPUs. It should go down as 1 / N.
        target_sparsity: instead of a threshold, the share of tiles to leave out: by ``calibration``.
        calibration: of :func:`flashnumba.sparse.calibrate`; :data:`flashnumba.sparse.PUBLISHED` if None, which are
            another model's.
        return_info: also return a :class:`SparseInfo`; this is another kernel, a little slower.
        backend: of :data:`BACKENDS`.

    Returns:
        o as q, or ``(o, info)``.

    Raises:
        TypeError, ValueError: an argument does not fit, before anything is launched.

    Source: arXiv 2512.12087.
    """
    if (threshold is None) == (target_sparsity is None):
        raise ValueError(
            f"threshold is {threshold!r} and target_sparsity {target_sparsity!r}; give one of the two, and not both"
        )
    problem = _prepare(q, k, v, causal, scale, backend, return_info)
    shape = problem.shape
    decoding = shape.m * shape.group <= DECODE_ROWS and int(shape.arch.rstrip("a")) >= 80
    if target_sparsity is not None:
        _check_number("target_sparsity", target_sparsity)
        chosen = calibration or PUBLISHED["decode" if decoding else "prefill"]
        threshold = chosen.threshold(target_sparsity, shape.n)
    limit = _limit(threshold)

    def plan() -> Plan:
        from flashnumba.stages.sparsity.decode import plan_decode
        from flashnumba.stages.sparsity.mma import plan_skip

        return plan_decode(shape, noted=return_info) if decoding else plan_skip(shape, vote="block", noted=return_info)

    def by_numpy(reference: Any) -> Any:
        return reference.skip(_scores(problem, reference), ROWS, KEYS, threshold), ROWS, False

    return _run(problem, plan, by_numpy, {"limit": limit}, backend, return_info, "block", threshold or 0.0, decoding)


def warp_skip_attention(
    q: Any, k: Any, v: Any, *, threshold: float, keep_sum: bool = True, causal: bool = False,
    scale: float | None = None, return_info: bool = False, backend: str = "auto",
) -> Any:  # fmt: skip
    """The test of :func:`blasst_attention`, each warp for its own rows (16 or 32).

    Args:
        q, k, v, causal, scale, return_info, backend, threshold: as :func:`blasst_attention`. SpargeAttn's ``pvthreshd``
            p is a threshold of ``2**-p``.
        keep_sum: what is left out still counts in the sum of exponentials, as in SpargeAttn's paper; False drops it, as
            its released code does, and saves the exponentials too.

    Returns:
        o as q, or ``(o, info)``.

    Raises:
        TypeError, ValueError: an argument does not fit, before anything is launched.

    Source: arXiv 2502.18137, section 3.4.
    """
    if not isinstance(keep_sum, bool):
        raise TypeError(f"keep_sum is {keep_sum!r}; it must be True or False")
    problem = _prepare(q, k, v, causal, scale, backend, return_info)

    def plan() -> Plan:
        from flashnumba.stages.sparsity.mma import plan_skip

        return plan_skip(problem.shape, vote="warp", keep_sum=keep_sum, noted=return_info)

    def by_numpy(reference: Any) -> Any:
        return reference.skip(_scores(problem, reference), WARP_ROWS, KEYS, threshold), WARP_ROWS, keep_sum

    given = {"limit": _limit(threshold)}
    return _run(problem, plan, by_numpy, given, backend, return_info, "warp", threshold, False)


def block_sparse_attention(
    q: Any, k: Any, v: Any, *, mask: Any, block_m: int = 128, block_n: int = 64, causal: bool = False,
    scale: float | None = None, return_info: bool = False, backend: str = "auto",
) -> Any:  # fmt: skip
    """Attention over the blocks of a mask alone: neither K nor V of the others is read.

    Args:
        q, k, v, causal, scale, return_info, backend: as :func:`blasst_attention`.
        mask: ``[B, H, ceil(M / block_m), ceil(N / block_n)]`` bool or uint8, with as many axes as q, of q's kind and in
            its place. What the causal mask hides stays hidden. Rows without a block give 0.
        block_m, block_n: multiples of 64.

    Returns:
        o as q, or ``(o, info)``.

    Raises:
        TypeError, ValueError: an argument does not fit, before anything is launched.
    """
    problem = _prepare(q, k, v, causal, scale, backend, return_info)
    _check_blocks(block_m, block_n)
    packed = _mask(mask, problem, block_m, block_n)

    def plan() -> Plan:
        from flashnumba.stages.sparsity.mma import plan_blocks

        return plan_blocks(problem.shape, block_m=block_m, block_n=block_n, noted=return_info)

    def by_numpy(reference: Any) -> Any:
        return packed != 0, block_m, False

    given = {"limit": -math.inf, "mask": packed}
    return _run(problem, plan, by_numpy, given, backend, return_info, "", 0.0, False, block_m, block_n)


def sparge_attention(
    q: Any, k: Any, v: Any, *, simthreshd1: float = 0.6, cdfthreshd: float = 0.98, topk: float | None = None,
    pvthreshd: float = 50.0, attention_sink: bool = False, block_m: int = 128, block_n: int = 64, causal: bool = False,
    scale: float | None = None, return_info: bool = False, backend: str = "auto",
) -> Any:  # fmt: skip
    """SpargeAttn: a mask of blocks predicted from mean tokens, then attention over it, with the warp's skip inside.

    Args:
        q, k, v, causal, scale, return_info, backend: as :func:`blasst_attention`.
        simthreshd1: blocks whose tokens have a mean cosine above it are alike; others are computed in full.
        cdfthreshd: blocks are kept while the sum of their predicted weights stays within it, 0 to 1.
        topk: instead, the part of all blocks that is kept, 0 to 1.
        pvthreshd: a warp leaves out what is below ``2**-pvthreshd``; 50 is as good as never, 10 to 20 is.
        attention_sink: the first block is always kept.
        block_m, block_n: multiples of 64.

    Returns:
        o as q, or ``(o, info)``, whose ``mask`` is the prediction.

    Raises:
        TypeError, ValueError: an argument does not fit, before anything is launched; or more than 6144 blocks of keys.

    Source: arXiv 2502.18137; names and defaults are those of thu-ml/SpargeAttn, of 16-bit products here.
    """
    for name, value in (("simthreshd1", simthreshd1), ("cdfthreshd", cdfthreshd), ("pvthreshd", pvthreshd)):
        _check_number(name, value)
    if not 0 <= cdfthreshd <= 1 or not pvthreshd > 0:
        raise ValueError(f"cdfthreshd is {cdfthreshd} and pvthreshd {pvthreshd}; they must be 0 to 1, and positive")
    if topk is not None:
        _check_number("topk", topk)
        if not 0 <= topk <= 1:
            raise ValueError(f"topk is {topk}; it must be 0 to 1, the part of all blocks that is kept")
    if not isinstance(attention_sink, bool):
        raise TypeError(f"attention_sink is {attention_sink!r}; it must be True or False")
    problem = _prepare(q, k, v, causal, scale, backend, return_info)
    _check_blocks(block_m, block_n)
    threshold = 2.0**-pvthreshd

    def plan() -> Plan:
        from flashnumba.stages.sparsity.mma import plan_sparge

        return plan_sparge(
            problem.shape, by_count=topk is not None, block_m=block_m, block_n=block_n, vote="warp", noted=return_info
        )

    def by_numpy(reference: Any) -> Any:
        blocks = reference.predict(
            *_arrays(problem)[:2], rows=block_m, keys=block_n, alike=simthreshd1, cdf=cdfthreshd, topk=topk,
            sink=attention_sink, scale=problem.scale, causal=problem.shape.causal,
        )  # fmt: skip
        return blocks, block_m, False

    kept = 1e30 if cdfthreshd >= 1 else cdfthreshd
    if topk is not None:
        kept = max(1, int(topk * -(-problem.shape.n // block_n)))
    given = {"limit": _limit(threshold), "alike": simthreshd1, "kept": kept, "sink": attention_sink}
    return _run(problem, plan, by_numpy, given, backend, return_info, "warp", threshold, False, block_m, block_n)


# -- what they share ---------------------------------------------------------------------------------------------------
def _check_number(name: str, value: Any) -> None:
    if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(float(value)):
        raise TypeError(f"{name} is {value!r}; it must be a finite number")


def _check_blocks(block_m: Any, block_n: Any) -> None:
    for name, value in (("block_m", block_m), ("block_n", block_n)):
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0 or value % 64:
            raise ValueError(f"{name} is {value!r}; it must be a positive multiple of 64")


def _limit(threshold: Any) -> float:
    from flashnumba.stages.sparsity.problem import limit_of

    _check_number("threshold", threshold)
    return limit_of(float(threshold))


def _prepare(q: Any, k: Any, v: Any, causal: Any, scale: Any, backend: Any, return_info: Any) -> Heads:
    from flashnumba.stages.heads import prepare_heads

    if not isinstance(return_info, bool):
        raise TypeError(f"return_info is {return_info!r}; it must be True or False")
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}")
    problem = prepare_heads(
        q, k, v, causal=causal, scale=scale, machine="auto" if backend == "auto" else "emulator", stream=None
    )  # fmt: skip
    if problem.device is not None and backend != "auto":
        raise ValueError(f"q is on cuda:{problem.device} and backend {backend!r} takes arrays in host memory")
    if problem.shape.element == "float32":
        raise ValueError("q is float32; sparse attention takes float16 and bfloat16")
    return problem


def _mask(mask: Any, problem: Heads, block_m: int, block_n: int) -> Any:
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


def _arrays(problem: Heads) -> list[Any]:
    from flashnumba.machine.arrays import element_dtype, host_view

    return [host_view(problem.arrays[name]).view(element_dtype(problem.shape.element)) for name in "qkv"]


def _scores(problem: Heads, reference: Any) -> Any:
    q, k, _ = _arrays(problem)
    return reference.scores(q, k, problem.scale, problem.shape.causal)


def _run(
    problem: Heads, plan: Callable[[], Plan], by_numpy: Callable[[Any], Any], given: dict[str, Any], backend: str,
    return_info: bool, vote: str, threshold: float, decoding: bool, rows: int = ROWS,
    keys: int = KEYS,
) -> Any:  # fmt: skip
    """Launch, or compute with NumPy; o, or (o, info)."""
    from flashnumba.stages.sparsity import mma
    from flashnumba.stages.sparsity.problem import run

    shape = problem.shape
    if backend == "numpy" or (backend == "auto" and problem.machine == "emulator"):
        return _on_numpy(problem, by_numpy, threshold, return_info, keys, "mask" in given or "kept" in given)
    if 0 in (shape.batch, shape.heads, shape.m, shape.n):
        import numpy as np

        for result, value in zip(problem.results, (0, -np.inf), strict=True):
            result[...] = value
        made: dict[str, Any] = {}
    else:
        made = run(problem, plan(), given)
    o = problem.finish()[0]
    if not return_info:
        return o
    from flashnumba.stages.sparsity.decode import decode_tiles
    from flashnumba.tiles.sparse import unit_rows
    from flashnumba.tiles.sparse_split import TILE

    if decoding:
        tile = decode_tiles(shape.d, shape.m * shape.group).bm, TILE
    else:
        tiles = mma.sparse_tiles(shape, rows, keys)
        tile = unit_rows(tiles, vote), tiles.bn
    return o, SparseInfo(made.get("tile_map"), tile, threshold, made.get("mask", given.get("mask")))


def _on_numpy(
    problem: Heads, by_numpy: Any, threshold: float, return_info: bool, keys: int, given_mask: bool
) -> Any:  # fmt: skip
    import numpy as np

    from flashnumba.stages.sparsity import reference

    q, k, v = _arrays(problem)
    blocks, rows, keep_sum = by_numpy(reference)  # [B, H, R, C]
    s = reference.scores(q, k, problem.scale, problem.shape.causal)  # [B, H, M, N]
    seen = ~np.isneginf(s)  # [B, H, M, N]
    kept = reference.expand(blocks, rows, keys, *s.shape[-2:]) & seen  # [B, H, M, N]
    o, lse = reference.attend(s, v, kept, seen if keep_sum else kept)
    problem.arrays["o"].view(q.dtype)[...] = o
    problem.arrays["lse"][...] = lse
    result = problem.finish()[0]
    if not return_info:
        return result
    shape = problem.shape
    visible = reference.visible_blocks(shape.m, shape.n, rows, keys, shape.causal)  # [R, C]
    other = 0 if given_mask else np.where(visible, 2, 0)  # [R, C]
    tile_map = np.where(blocks & visible, 1, other).astype(np.uint8)  # [B, H, R, C]
    return result, SparseInfo(tile_map, (rows, keys), threshold, blocks.astype(np.uint8) if given_mask else None)
