"""Every kernel of the stage sparsity once on a GPU, small, compared: what compute-sanitizer is pointed at.

::

    for tool in memcheck racecheck synccheck initcheck; do
        compute-sanitizer --tool $tool --report-api-errors no --error-exitcode 1 python -m tests.kernels.sparsity_target
    done

Tiles are those of real problems. Each kernel that leaves out something runs with its map, by which it is judged, and
without, for the same bits; something must have been left out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial

import ml_dtypes
import numpy as np

from flashnumba.compare import compare
from flashnumba.machine import gpu
from flashnumba.stages.sparsity import decode, mma, sla, wgmma
from flashnumba.stages.sparsity import reference as R
from flashnumba.stages.sparsity import sla_reference as reference
from flashnumba.stages.sparsity.problem import limit_of
from flashnumba.stages.sparsity.sla_low_precision import low_precision
from flashnumba.tiles.sparse import COMPUTED, SKIPPED
from tests.stages.sparsity.sparse_cases import data, judge, kept_by, run

LIMIT = limit_of(0.02)


def by_tiles(d: int, dtype: type, causal: bool, machine: str) -> Iterator[tuple[str, str]]:
    """(a kernel's name, what is wrong) of those that leave out tiles of a prefill."""
    m, n = 300, 450
    qkv = data(m, n, d, heads=2, kv_heads=1, dtype=dtype, stretch=(128, 64))
    mask = np.random.default_rng(1).random((1, 2, -(-m // 128), -(-n // 64))) < 0.6
    guess = {"alike": 0.3, "sink": 1}
    hopper = d % 8 == 0 and (machine == "emulator" or gpu.device_arch() == "90a")
    by_wgmma = (
        ("blasst_wgmma", wgmma.plan_blasst, {}),
        ("blocks_wgmma", wgmma.plan_blocks, {"mask": mask.astype(np.uint8)}),
        ("sparge_wgmma", partial(wgmma.plan_sparge, vote=True), guess | {"kept": 0.9}),
    )
    for name, plan, given in (
        *(by_wgmma if hopper else ()),
        ("blasst", partial(mma.plan_skip, vote="block"), {}),
        ("warp_skip", partial(mma.plan_skip, vote="warp"), {}),
        ("warp_skip_sum", partial(mma.plan_skip, vote="warp", keep_sum=True), {}),
        ("block_sparse", mma.plan_blocks, {"mask": mask.astype(np.uint8)}),
        ("sparge by sum", partial(mma.plan_sparge, vote="warp"), guess | {"kept": 0.9}),
        ("sparge by count", partial(mma.plan_sparge, by_count=True), guess | {"kept": 3}),
    ):
        given = {"limit": LIMIT, **given}
        *results, made = run(partial(plan, noted=True), qkv, given, causal=causal, machine=machine)
        again = run(plan, qkv, given, causal=causal, machine=machine)
        tile_map = made["tile_map"]
        kept = R.expand(tile_map == COMPUTED, each(m, tile_map.shape[2]), each(n, tile_map.shape[3]), m, n)
        summed = np.ones_like(kept) if name == "warp_skip_sum" else None
        bad = [str(verdict) for verdict in judge(results, qkv, kept, summed=summed, causal=causal) if not verdict.ok]
        if not all(np.array_equal(x.view(np.uint8), y.view(np.uint8)) for x, y in zip(results, again[:2], strict=True)):
            bad.append("other bits without the map")
        if not (tile_map == (0 if "mask" in given or "mask" in made else SKIPPED)).any():
            bad.append("nothing is left out")
        yield name, "; ".join(bad)


def each(length: int, count: int) -> int:
    """Rows or keys of a tile, of which a map has ``count``."""
    return next(size for size in (16, 32, 64, 128) if -(-length // size) == count)


def by_few_rows(d: int, causal: bool, machine: str) -> Iterator[tuple[str, str]]:
    """The same of decoding, with the merge, for few packed rows and for many."""
    for rows, heads in ((1, 4), (6, 16)):
        qkv = data(rows, 700, d, heads=heads, kv_heads=2, stretch=(4, 32))
        *results, made = run(
            partial(decode.plan_decode, noted=True, splits=3), qkv, {"limit": LIMIT}, causal=causal, machine=machine
        )
        again = run(partial(decode.plan_decode, splits=3), qkv, {"limit": LIMIT}, causal=causal, machine=machine)
        kept = kept_by(made["tile_map"], heads, rows, 700, decode.decode_tiles(d, rows * heads // 2).bm)
        bad = [str(verdict) for verdict in judge(results, qkv, kept, causal=causal) if not verdict.ok]
        if not all(np.array_equal(x.view(np.uint8), y.view(np.uint8)) for x, y in zip(results, again[:2], strict=True)):
            bad.append("other bits without the map")
        if not (made["tile_map"] == SKIPPED).any():
            bad.append("nothing is left out")
        yield f"blasst_decode {rows} x {heads} rows", "; ".join(bad)


def by_classes(d: int, dtype: type, causal: bool, machine: str) -> Iterator[tuple[str, str]]:
    """SLA, forward and gradients; if causal, two heads of queries share one of keys."""
    rng = np.random.default_rng(2)
    sizes = ((4 if causal else 2, 200), (2, 300))
    q, k, v, do = (rng.standard_normal((1, *sizes[i], d)).astype(dtype) for i in (0, 1, 1, 0))
    proj = (rng.standard_normal((d, d)) / 8).astype(dtype)
    for feature_map, form in (("softmax", "paper"), ("elu", "all"), ("relu", "paper")):
        how = {"feature_map": feature_map, "form": form, "causal": causal}
        classes = reference.classify(q, k, 0.4, 0.2, causal)
        options = sla.check_options(0.4, 0.2, feature_map, form, None, True)
        o, kept = sla.forward(q, k, v, proj, options, causal=causal, machine=machine)
        got = (o, *sla.backward(do, kept))
        low, low_gradients = low_precision(q, k, v, classes, proj, do, **how)
        exact = (
            reference.attend(q, k, v, classes, proj, **how).o,
            *reference.gradients(do, q, k, v, classes, proj, **how),
        )
        names = ("o", "dq", "dk", "dv", "dproj")
        bad = [] if np.array_equal(kept.arrays["classes"], classes) else ["other classes"]
        for name, *three in zip(names, got, exact, (low.o, *low_gradients), strict=True):
            verdict = compare(*three)
            bad += [] if verdict.ok else [f"{name}: {verdict}"]
        yield f"sla {feature_map}, {form}", "; ".join(bad)


def main(machine: str = "cuda") -> int:
    """Print a line a kernel; 1 if one of them is wrong."""
    wrong = 0
    for d, dtype, causal in ((64, np.float16, True), (128, np.float16, False), (128, ml_dtypes.bfloat16, True),
                             (100, np.float16, True)):  # fmt: skip
        found = [*by_tiles(d, dtype, causal, machine), *by_few_rows(d, causal, machine)]
        for name, why in [*found, *by_classes(d, dtype, causal, machine)]:
            wrong += bool(why)
            print(f"{name} d {d} {np.dtype(dtype).name}{' causal' if causal else ''}: {why or 'ok'}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
