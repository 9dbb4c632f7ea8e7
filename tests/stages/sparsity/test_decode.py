"""Decoding with BLASST: equal to dense bit for bit at 0, right where it leaves out tiles, and only what it should."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from flashnumba.compare import compare
from flashnumba.data.structured import structured
from flashnumba.machine import launcher
from flashnumba.machine.arrays import host_view
from flashnumba.machine.emulator import Fault
from flashnumba.stages import heads
from flashnumba.stages.heads import Launch, Plan
from flashnumba.stages.sparsity import decode, problem, reference
from flashnumba.tiles.attention import AttentionTiles
from flashnumba.tiles.sparse import COMPUTED, SKIPPED
from flashnumba.tiles.sparse_split import ASKED, FAULTS, make_sparse_split
from flashnumba.tiles.split import SPLIT_ARGS, make_split

TILES = AttentionTiles(32, 16, 64, warps=1)
EACH = TILES.bn // ASKED
SPLITS = 2
THRESHOLD = 0.02


@cache
def inputs(m: int = 2, n: int = 300, d: int = 32, group: int = 2, seed: int = 3):
    """q, k and v of a head with a local band and one with topics, whose greatest scores are not the first."""
    q, k, v = structured(n, d, heads=2 * group, kv_heads=2, m=m, seed=seed)
    return q, k, v


def prepared(arrays, causal=False, scale=None, machine="emulator"):
    return heads.prepare_heads(*arrays, causal=causal, scale=scale, machine=machine, stream=None)


def run(arrays, threshold, *, causal=False, scale=None, machine="emulator", tiles=TILES, **options):
    """(o, lse, the map of tiles)."""
    of = prepared(arrays, causal, scale, machine)
    plan = decode.plan_decode(of.shape, noted=True, tiles=tiles, splits=SPLITS, **options)
    made = problem.run(of, plan, {"limit": problem.limit_of(threshold)})
    return *of.finish(), np.asarray(made["tile_map"])


def parts(n: int, tiles=TILES) -> list[slice]:
    """Keys of each part."""
    groups = -(-n // tiles.bn)
    ends = [groups * i // SPLITS * tiles.bn for i in range(SPLITS + 1)]
    return [slice(a, min(b, n)) for a, b in pairwise(ends)]


def expected_map(arrays, threshold, causal=False, scale=None) -> np.ndarray:
    """Which tiles the reference computes, all rows of a head of keys together: bool [B, Hkv, 1, tiles]."""
    q, k, _ = arrays
    s = reference.scores(q, k, scale, causal)  # [B, H, M, N]
    together = s.reshape(s.shape[0], k.shape[1], -1, s.shape[-1])  # [B, Hkv, rows, N]
    return np.concatenate([
        reference.skip(together[..., part], together.shape[-2], EACH, threshold) for part in parts(k.shape[-2])
    ], -1)  # fmt: skip


def judged(arrays, o, lse, tile_map, causal=False, scale=None):
    """The comparisons of o and lse with attention over the tiles that the map says were computed."""
    q, k, v = arrays
    s = reference.scores(q, k, scale, causal)
    kept = reference.expand(tile_map == COMPUTED, s.shape[1] // k.shape[1] * s.shape[2], EACH, 10**9, s.shape[-1])
    kept = kept.reshape(s.shape) & ~np.isneginf(s)
    exact, of_lse = reference.attend(s, v, kept)
    top = np.where(kept, s, -np.inf).astype(np.float32)
    p = np.exp(top - top.max(-1, keepdims=True))
    wide = np.repeat(v, s.shape[1] // v.shape[1], 1).astype(np.float32)
    low = (p.astype(np.float16).astype(np.float32) @ wide / p.sum(-1, keepdims=True)).astype(np.float16)
    return compare(o, exact, low), compare(lse, of_lse, of_lse.astype(np.float32) + np.float32(1e-5))


def dense(arrays, causal=False, scale=None, machine="emulator"):
    """(o, lse) of the kernel that leaves out nothing, with the same tiles and parts."""
    of = prepared(arrays, causal, scale, machine)
    attend, merge = decode.plan_decode(of.shape, tiles=TILES, splits=SPLITS).launches
    plan = decode.plan_decode(of.shape, tiles=TILES, splits=SPLITS)
    kernel = make_split(TILES, of.shape.element, of.shape.vector, even=of.shape.d == TILES.d, name="dense")
    return of.run(Plan((Launch(kernel, attend.grid, attend.threads, attend.shared, SPLIT_ARGS), merge), plan.scratch))


@pytest.mark.parametrize(("causal", "scale"), [(False, None), (True, -0.2), (False, 0.0)])
def test_a_threshold_of_zero_is_dense_bit_for_bit(machine, causal, scale):
    arrays = inputs(m=3)
    o, lse, tile_map = run(arrays, 0.0, causal=causal, scale=scale, machine=machine)
    assert (tile_map == COMPUTED).all()
    for got, wanted in zip((o, lse), dense(arrays, causal, scale, machine), strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("causal", [False, True])
def test_what_is_left_out_is_what_the_reference_leaves_out(machine, causal):
    arrays = inputs(m=3)
    o, lse, tile_map = run(arrays, THRESHOLD, causal=causal, machine=machine)
    np.testing.assert_array_equal(tile_map == COMPUTED, expected_map(arrays, THRESHOLD, causal))
    assert (tile_map == SKIPPED).sum() > 5, "something was left out"
    for verdict in judged(arrays, o, lse, tile_map, causal):
        assert verdict.ok, verdict


def test_dimensions_that_are_no_tiles_and_more_rows_than_a_block(machine):
    """20 columns of the 32, rows of 8 bytes; 18 rows are two blocks, of which the second has 2."""
    q, k, v = inputs(m=9)
    arrays = tuple(np.ascontiguousarray(x[..., :20]) for x in (q, k, v))
    o, lse, tile_map = run(arrays, THRESHOLD, machine=machine)
    assert tile_map.shape == (1, 2, 2, 19) and (tile_map == SKIPPED).any()
    s = reference.scores(arrays[0], arrays[1])
    together = s.transpose(0, 2, 1, 3).reshape(1, 9, 2, 2, 300).transpose(0, 2, 1, 3, 4).reshape(1, 2, 18, 300)
    kept = reference.expand(tile_map == COMPUTED, 16, EACH, 18, 300)
    exact, of_lse = reference.attend(together, arrays[2], kept)
    back = exact.reshape(1, 2, 9, 2, 20).transpose(0, 1, 3, 2, 4).reshape(1, 4, 9, 20)
    assert np.abs(o - back).max() < 2e-3 * np.abs(back).max()
    np.testing.assert_allclose(lse, of_lse.reshape(1, 2, 9, 2).transpose(0, 1, 3, 2).reshape(1, 4, 9), atol=2e-4)


def test_values_left_out_are_not_read():
    """NaN in them does no harm; in those that stay it does."""
    q, k, v = inputs()
    *_, tile_map = run((q, k, v), THRESHOLD)
    out = reference.expand(tile_map == SKIPPED, 1, EACH, 1, 300)[..., 0, :]  # [B, Hkv, N]
    o, lse, _ = run((q, k, np.where(out[..., None], np.float16("nan"), v)), THRESHOLD)
    for got, wanted in zip((o, lse), run((q, k, v), THRESHOLD)[:2], strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert np.isnan(run((q, k, np.where(out[..., None], v, np.float16("nan"))), THRESHOLD)[0]).all()


def test_twice_gives_the_same_bits(machine):
    first, second = (run(inputs(), THRESHOLD, machine=machine) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("fault", [*FAULTS, "tile_wide", "unscaled", "padding"])
@pytest.mark.parametrize("seed", [0, 1])
def test_planted_faults(fault, seed):
    """A fault of the emulator, a wrong result, or not the tiles that the reference leaves out."""
    arrays = inputs()
    of = prepared(arrays)
    plan = decode.plan_decode(of.shape, noted=True, tiles=TILES, splits=SPLITS, broken=fault)
    known = {**of.arrays, "scale": np.float32(of.scale), "causal": np.int32(0)}
    known["limit"] = np.float32(problem.limit_of(THRESHOLD))
    known |= {name: np.full(size, 7, problem.ARRAYS[name][0]) for name, size in plan.scratch.items()}
    try:
        for launch in plan.launches:
            args = tuple(host_view(known[x]) if hasattr(known[x], "strides") and known[x].shape else known[x]
                         for x in launch.args)  # fmt: skip
            launcher.launch(
                launch.kernel, launch.grid, launch.threads, args, shared=launch.shared, machine="emulator",
                emulate={"seed": seed, "arch": "90a"},
            )  # fmt: skip
    except Fault as fault_found:
        assert fault_found.name
        return
    o, lse = of.finish()
    if (known["tile_map"] == COMPUTED).tolist() == expected_map(arrays, THRESHOLD).tolist():
        assert not all(verdict.ok for verdict in judged(arrays, o, lse, known["tile_map"]))


def test_bad_arguments():
    of = prepared(inputs())
    with pytest.raises(ValueError, match=r"tiles are .*one warp"):
        make_sparse_split(AttentionTiles(32, 64, 64), "float16")
    with pytest.raises(ValueError, match="this is sm_75"):
        decode.plan_decode(heads.replace(of.shape, arch="75"))
    with pytest.raises(ValueError, match="q is float32"):
        decode.plan_decode(heads.replace(of.shape, element="float32"))


def test_registers():
    from flashnumba.machine.gate import problems

    case = next(case for case in decode.compile_cases() if "float16 d 128" in case.name)
    assert not problems(case, case.chosen_for[0])
