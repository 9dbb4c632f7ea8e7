"""What tests of the sparse kernels share: data that leaves something out, and guarded runs of a plan."""

from __future__ import annotations

import numpy as np

from flashnumba.compare import compare
from flashnumba.machine import launcher
from flashnumba.machine.arrays import host_view
from flashnumba.stages import heads
from flashnumba.stages.heads import Shape
from flashnumba.stages.sparsity import problem
from flashnumba.stages.sparsity import reference as R
from flashnumba.tiles.sparse import COMPUTED
from flashnumba.tiles.sparse_split import TILE
from tests.stages.flash_forward.attention_cases import junk
from tests.stages.rowwise import NAN

__all__ = ["data", "dense_bits", "judge", "kept_by", "right", "run"]


def data(
    m: int, n: int, d: int = 32, *, heads: int = 1, kv_heads: int = 1, dtype=np.float16, seed: int = 0,
    stretch: tuple[int, int] = (16, 16),
):  # fmt: skip
    """q, k and v in stretches of rows and of keys about one of three things, so that whole tiles fit or do not.

    Keys fit more or less: at a scale of ``1 / sqrt(32)`` the exponents of 2 of those that fit best are 16, of others 11
    and 8 of the same. Every fourth stretch of rows is about nothing and sees all keys alike, and so do the last rows of
    the one before. The first keys are against everything, so that the first scores are below zero. No two heads of keys
    are alike.
    """
    rng = np.random.default_rng((seed, m, n, d))
    about = np.eye(4, d) * 8 * (d / 32) ** 0.25
    about[3] = 0
    kinds_q = (np.arange(m) // stretch[0])[None] + np.arange(heads)[:, None] * kv_heads // heads  # [heads, m]
    kinds_q = np.where((kinds_q % 4 == 2) & (np.arange(m) % stretch[0] >= 3 * stretch[0] // 4), 3, kinds_q)
    runs = np.arange(-(-n // stretch[1]))[None] - 1 + np.arange(kv_heads)[:, None]  # [kv_heads, runs]
    fit = np.take((1.0, 1.0, 1.0, 1.0, 0.7, 0.5, 0.7, 0.5), runs, mode="wrap")
    kinds_k, fit = (np.repeat(x, stretch[1], 1)[:, :n] for x in (runs, fit))  # [kv_heads, n]
    q = about[kinds_q % 4] + 0.1 * rng.standard_normal((heads, m, d))
    k = fit[..., None] * about[kinds_k % 4] + 0.1 * rng.standard_normal((kv_heads, n, d))
    k[:, : stretch[1]] = -0.6 * about.sum(0)
    v = rng.standard_normal((kv_heads, n, d)) + np.arange(kv_heads)[:, None, None]
    return tuple(x[None].astype(dtype) for x in (q, k, v))


def run(plan, qkv, given, *, causal=False, scale=None, machine="emulator", seed=0, arch="90a"):
    """(o, lse, made) of a plan; results and scratch are full of junk beforehand.

    Args:
        plan: from a shape to a plan.
    """
    made_for = heads.prepare_heads(*qkv, causal=causal, scale=scale, machine=machine, stream=None)
    shape = Shape(**{**vars(made_for.shape), "arch": made_for.shape.arch if machine == "cuda" else arch})
    planned = plan(shape)
    for result in made_for.results:
        result.fill(NAN)
    known = {**made_for.arrays, "scale": np.float32(made_for.scale), "causal": np.int32(causal)}
    known |= {name: problem.SCALARS[name](x) if name in problem.SCALARS else x for name, x in given.items()}
    made = {}
    for name, size in planned.scratch.items():
        element = problem.ARRAYS[name][0]
        made[name] = np.full(size, 77, element) if element == "uint8" else junk(size, element)
    known |= made
    for launch in planned.launches:
        given = known | heads.maps_for(launch, known, shape.element)
        args = tuple(host_view(given[a]) if isinstance(given[a], np.ndarray) else given[a] for a in launch.args)
        if machine == "cuda":
            problem.prepared(launch, shape.element, machine, None)(launch.grid, launch.threads, args)
        else:
            launcher.launch(
                launch.kernel, launch.grid, launch.threads, args, shared=launch.shared, machine=machine,
                emulate={"seed": seed, "arch": arch},
            )  # fmt: skip
    return (*made_for.results, made)


def judge(results, qkv, kept, *, summed=None, causal=False, scale=None):
    """What :func:`flashnumba.compare.compare` says of o and of lse over the scores that are kept."""
    q, k, v = qkv
    s = R.scores(q, k, scale, causal)
    kept = kept & ~np.isneginf(s)
    summed = kept if summed is None else summed & ~np.isneginf(s)
    o, lse = R.attend(s, v, kept, summed)
    o_low, lse_low = R.low_precision(q, k, v, kept, summed, scale)
    return compare(results[0], o, o_low), compare(results[1], lse, lse_low)


def right(results, qkv, kept, **more) -> bool:
    return all(verdict.ok for verdict in judge(results, qkv, kept, **more))


def dense_bits(results, dense) -> None:
    """Every bit of o and lse as the dense kernel's."""
    for got, wanted in zip(results[:2], dense, strict=True):
        np.testing.assert_array_equal(got.view(np.uint16), wanted.view(np.uint16))


def kept_by(tile_map, heads, m, n, bm):
    """Which scores decoding computes, ``[1, heads, m, n]``, from its map of packed rows."""
    group = heads // tile_map.shape[1]
    kept = np.zeros((1, heads, m, n), bool)
    for h in range(heads):
        for row in range(m):
            block = (row * group + h % group) // bm
            kept[0, h, row] = np.repeat(tile_map[0, h // group, block] == COMPUTED, TILE)[:n]
    return kept
