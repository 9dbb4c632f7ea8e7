"""The public functions: what each plans, and what it is in NumPy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from flashnumba.sparse.calibration import PUBLISHED, Calibration
from flashnumba.sparse.running import (
    KEYS,
    ROWS,
    WARP_ROWS,
    arrays,
    check_blocks,
    check_number,
    limit_for,
    mask_for,
    prepare,
    run,
    scores,
)

if TYPE_CHECKING:
    from flashnumba.stages.heads import Plan

__all__ = ["blasst_attention", "block_sparse_attention", "sparge_attention", "warp_skip_attention"]

DECODE_ROWS = 64
"""Query rows for each head of k up to which a step is one of decoding."""
NEVER = 50.0
"""SpargeAttn's ``pvthreshd`` from which on nothing is left out by it."""


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
            nothing, and is the dense kernel bit for bit: on sm_90 ``flash_forward.wgmma`` for arrays that it takes;
            elsewhere ``flash_forward.mma`` with tiles of 64 keys, which from a head dimension of 65 on is what
            ``attention`` launches on most GPUs. It should go down as 1 / N.
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
    problem = prepare(q, k, v, causal, scale, backend, return_info)
    shape = problem.shape
    decoding = shape.m * shape.group <= DECODE_ROWS and int(shape.arch.rstrip("a")) >= 80
    if calibration is not None and not isinstance(calibration, Calibration):
        raise TypeError(f"calibration is {calibration!r}; it must be a Calibration, as calibrate() makes one")
    if target_sparsity is not None:
        check_number("target_sparsity", target_sparsity)
        if not 0 <= target_sparsity < 1:
            raise ValueError(f"target_sparsity is {target_sparsity!r}; it must be at least 0 and below 1")
        chosen = calibration or PUBLISHED["decode" if decoding else "prefill"]
        threshold = chosen.threshold(target_sparsity, shape.n)
    limit = limit_for(threshold)
    from flashnumba.stages.sparsity import wgmma
    from flashnumba.tiles.specialised_tiles import takes

    warpgroups = takes(shape.element, shape.arch, shape.mapped) and not decoding
    rows, keys = wgmma.tile_of(shape) if warpgroups else (ROWS, KEYS)

    def plan() -> Plan:
        from flashnumba.stages.sparsity.decode import plan_decode
        from flashnumba.stages.sparsity.mma import plan_skip

        if decoding:
            return plan_decode(shape, noted=return_info)
        if warpgroups:
            return wgmma.plan_blasst(shape, noted=return_info)
        return plan_skip(shape, vote="block", noted=return_info)

    def by_numpy(reference: Any) -> Any:
        return reference.skip(scores(problem, reference), rows, keys, threshold), rows, False

    return run(
        problem, plan, by_numpy, {"limit": limit}, backend, return_info, "block", threshold or 0.0, decoding, rows,
        keys, (rows, keys) if warpgroups else None,
    )  # fmt: skip


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
    problem = prepare(q, k, v, causal, scale, backend, return_info)

    def plan() -> Plan:
        from flashnumba.stages.sparsity.mma import plan_skip

        return plan_skip(problem.shape, vote="warp", keep_sum=keep_sum, noted=return_info)

    def by_numpy(reference: Any) -> Any:
        return reference.skip(scores(problem, reference), WARP_ROWS, KEYS, threshold), WARP_ROWS, keep_sum

    given = {"limit": limit_for(threshold)}
    return run(problem, plan, by_numpy, given, backend, return_info, "warp", threshold, False)


def block_sparse_attention(
    q: Any, k: Any, v: Any, *, mask: Any, block_m: int = 128, block_n: int = 64, causal: bool = False,
    scale: float | None = None, return_info: bool = False, backend: str = "auto",
) -> Any:  # fmt: skip
    """Attention over the blocks of a mask alone: neither K nor V of the others is read.

    Args:
        q, k, v, causal, scale, return_info, backend: as :func:`blasst_attention`.
        mask: ``[B, H, ceil(M / block_m), ceil(N / block_n)]`` bool or uint8, with as many axes as q, of q's kind and in
            its place. What the causal mask hides stays hidden. Rows without a block give 0.
        block_m, block_n: multiples of 64; with a block_m of multiples of 128 sm_90 has wgmma for arrays that it takes.

    Returns:
        o as q, or ``(o, info)``.

    Raises:
        TypeError, ValueError: an argument does not fit, before anything is launched.
    """
    problem = prepare(q, k, v, causal, scale, backend, return_info)
    check_blocks(block_m, block_n)
    packed = mask_for(mask, problem, block_m, block_n)
    from flashnumba.stages.sparsity import wgmma

    warpgroups = wgmma.takes_blocks(problem.shape, block_m)

    def plan() -> Plan:
        from flashnumba.stages.sparsity.mma import plan_blocks

        chosen = wgmma.plan_blocks if warpgroups else plan_blocks
        return chosen(problem.shape, block_m=block_m, block_n=block_n, noted=return_info)

    def by_numpy(reference: Any) -> Any:
        return packed != 0, block_m, False

    given = {"limit": -math.inf, "mask": packed}
    said = wgmma.LISTED if warpgroups else None
    return run(problem, plan, by_numpy, given, backend, return_info, "", 0.0, False, block_m, block_n, said)


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
        pvthreshd: a warp leaves out what is below ``2**-pvthreshd``, as in :func:`warp_skip_attention` without the
            sum; by wgmma a warpgroup, of 64 rows and of the blocks of a tile, 64 to 192 keys. 10 to 20 is something;
            from 50 on, below the rounding of everything it is added to, nobody is asked.
        attention_sink: the first block is always kept.
        block_m, block_n: as :func:`block_sparse_attention`.

    Returns:
        o as q, or ``(o, info)``, whose ``mask`` is the prediction.

    Raises:
        TypeError, ValueError: an argument does not fit, before anything is launched; or more than 6144 blocks of keys,
            or than shared memory has room for: 3840 to 4064 on sm_75.

    Source: arXiv 2502.18137; names and defaults are those of thu-ml/SpargeAttn, of 16-bit products here.
    """
    for name, value in (("simthreshd1", simthreshd1), ("cdfthreshd", cdfthreshd), ("pvthreshd", pvthreshd)):
        check_number(name, value)
    if not 0 <= cdfthreshd <= 1:
        raise ValueError(f"cdfthreshd is {cdfthreshd}; it must be 0 to 1")
    if not (pvthreshd > 0 and 2.0 ** -min(pvthreshd, NEVER) < 1):
        raise ValueError(f"pvthreshd is {pvthreshd}; it must be positive, and 2**-pvthreshd below 1")
    if topk is not None:
        check_number("topk", topk)
        if not 0 <= topk <= 1:
            raise ValueError(f"topk is {topk}; it must be 0 to 1, the part of all blocks that is kept")
    if not isinstance(attention_sink, bool):
        raise TypeError(f"attention_sink is {attention_sink!r}; it must be True or False")
    problem = prepare(q, k, v, causal, scale, backend, return_info)
    check_blocks(block_m, block_n)
    threshold = 0.0 if pvthreshd >= NEVER else 2.0**-pvthreshd
    vote = "warp" if threshold else ""
    from flashnumba.stages.sparsity import predict, wgmma

    warpgroups = wgmma.takes_blocks(problem.shape, block_m)

    def plan() -> Plan:
        from flashnumba.stages.sparsity.mma import plan_sparge

        how: dict[str, Any] = {"by_count": topk is not None, "block_m": block_m, "block_n": block_n}
        if warpgroups:
            return wgmma.plan_sparge(problem.shape, vote=vote != "", noted=return_info, **how)
        return plan_sparge(problem.shape, vote=vote, noted=return_info, **how)

    def by_numpy(reference: Any) -> Any:
        blocks = reference.predict(
            *arrays(problem)[:2], rows=block_m, keys=block_n, alike=simthreshd1, cdf=cdfthreshd, topk=topk,
            sink=attention_sink, scale=problem.scale, causal=problem.shape.causal,
        )  # fmt: skip
        return blocks, block_m, False

    kept = predict.ALL if cdfthreshd >= 1 else cdfthreshd
    if topk is not None:
        kept = max(1, int(topk * -(-problem.shape.n // block_n)))
    given = {"limit": limit_for(threshold), "alike": simthreshd1, "kept": kept, "sink": attention_sink}
    said = wgmma.LISTED if warpgroups else None
    return run(problem, plan, by_numpy, given, backend, return_info, vote, threshold, False, block_m, block_n, said)
