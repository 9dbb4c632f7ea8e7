"""The mma.sync kernel: right for every major, length and alignment, on sm_75 too, and wrong once a step is left out."""

import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from flashnumba.stages.gemm import mma
from flashnumba.stages.gemm.multistage import Tiles, make_mma
from flashnumba.stages.gemm.problem import Shape
from tests.stages.faults import seeds_for
from tests.stages.gemm.products import DTYPES, MAJORS, TAILS, arch_on, caught, product

TINY = Tiles(32, 32, 32, 16, 16, slots=3)
"""Four warps, and several tiles of C and of k for small matrices."""


@pytest.mark.parametrize(("a_major", "b_major"), MAJORS)
@pytest.mark.parametrize("size", TAILS, ids=str)
def test_every_tail_of_every_major(machine, size, a_major, b_major):
    made = product(*size, np.float16, a_major, b_major, arch=arch_on(machine))
    made.check(mma.plan_mma(made.shape), machine)


@pytest.mark.parametrize(("a_major", "b_major"), MAJORS)
@pytest.mark.parametrize("size", [(15, 31, 33), (33, 63, 100), (64, 40, 72)], ids=str)
def test_bfloat16(machine, size, a_major, b_major):
    made = product(*size, ml_dtypes.bfloat16, a_major, b_major, arch=arch_on(machine))
    made.check(mma.plan_mma(made.shape), machine)


@pytest.mark.parametrize(("a_major", "b_major"), MAJORS)
@pytest.mark.parametrize(
    ("gaps", "at", "widths"),
    [
        ((4, 3, 1), (0, 0, 0), (16, 16, 2)),  # lines that end within a copy
        ((4, 3, 9), (4, 2, 4), (8, 4, 8)),
        ((2, 1, 7), (2, 4, 2), (4, 8, 4)),
        ((3, 3, 2), (1, 0, 0), (2, 16, 2)),  # A through registers beside B by cp.async
    ],
    ids=str,
)
def test_every_alignment_with_nan_between_the_lines(machine, gaps, at, widths, a_major, b_major):
    m, n, k = 44, 45, 76
    lines = (k if a_major == "k" else m, n if b_major == "n" else k, n)
    units = [max(w // 2, 1) for w in widths]
    gaps = tuple(-line % unit + (gap // unit * unit) for line, unit, gap in zip(lines, units, gaps, strict=True))
    gaps = tuple(
        g + (u if u < 8 and (line + g) % (2 * u) == 0 else 0) for g, u, line in zip(gaps, units, lines, strict=True)
    )
    at = tuple(a // u * u for a, u in zip(at, units, strict=True))
    made = product(m, n, k, np.float16, a_major, b_major, gaps=gaps, at=at, arch=arch_on(machine))
    assert (made.shape.vector_a, made.shape.vector_b, made.shape.vector_c) == widths
    made.check(mma.plan_of(made.shape, TINY), machine)


@pytest.mark.parametrize(
    "tiles",
    [
        mma.LARGE, mma.MEDIUM, mma.SMALL, mma.STAGED_LARGE, Tiles(64, 128, 64, 32, 64, slots=2),
        Tiles(128, 32, 64, 64, 16, slots=4), Tiles(32, 64, 32, 16, 32, slots=8, band=1), replace(TINY, slots=2),
    ],
    ids=str,
)  # fmt: skip
def test_every_size(machine, tiles):
    made = product(tiles.bm - 8, tiles.bn - 24, 2 * tiles.bk + 8, arch=arch_on(machine), seed=3)
    made.check(mma.plan_of(made.shape, tiles), machine)


@pytest.mark.parametrize(("a_major", "b_major"), MAJORS)
@pytest.mark.parametrize("size", [(1, 7, 15), (33, 63, 100), (40, 44, 68), (48, 40, 64)], ids=str)
def test_as_built_for_sm_75(machine, size, a_major, b_major):
    made = product(*size, np.float16, a_major, b_major, arch="75")
    plan = mma.plan_of(made.shape, replace(TINY, slots=2))
    assert plan.kernel.arch == "75"
    made.check(plan, machine, arch="75")


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_infinities_nans_and_overflow_stay_in_their_row_and_column(machine, dtype):
    made = product(40, 36, 50, dtype, arch=arch_on(machine))
    made.a[3, 49], made.a[7, 0], made.a[9] = np.inf, np.nan, 6e4  # times 50 more than float16 holds
    made.b[:, 5] = np.abs(made.b[:, 5])
    made.judge_anew()
    out = made.check(mma.plan_of(made.shape, TINY), machine).astype(np.float32)
    assert np.isnan(out[7]).all() and np.isinf(out[3]).all()
    assert np.isposinf(out[9, 5]) == (dtype is np.float16)
    assert np.isfinite(np.delete(out, (3, 7, 9), 0)).all()


def test_any_order_of_blocks_and_threads_gives_the_same_bits():
    made = product(40, 68, 72, gaps=(8, 4, 4))
    plan = mma.plan_of(made.shape, replace(TINY, band=1))
    first = made.check(plan, seed=0)
    for seed in (1, 2):
        np.testing.assert_array_equal(made.check(plan, seed=seed), first)


PLANTED = {
    "barrier": {"Race"},
    "wait": {"ReadInFlight"},
    "slot": {"Race", "OverwriteInFlight"},
    "drain": {"Race", "OverwriteInFlight"},
    "lanes": {"Race"},
    "swizzle": {"wrong result"},
    "stride": {"Misaligned", "OutOfBounds", "wrong result"},
    "tail": {"OutOfBounds", "wrong result"},
}


def test_every_fault_that_can_be_planted_is_tested():
    assert set(re.findall(r'``"(\w+)"``\s+\(', make_mma.__wrapped__.__doc__)) == set(PLANTED)
    assert len(PLANTED) == 8


@pytest.mark.parametrize(("broken", "seed"), [(fault, i) for fault in PLANTED for i in seeds_for(PLANTED[fault])])
@pytest.mark.parametrize(("a_major", "b_major"), [("k", "n"), ("m", "k")])
def test_planted_faults_are_caught(broken, a_major, b_major, seed):
    made = product(40, 48, 200, np.float16, a_major, b_major)
    assert caught(made, mma.plan_of(made.shape, TINY, broken), seed) in PLANTED[broken]


@pytest.mark.parametrize(
    ("broken", "seed"),
    [(fault, seed) for fault in sorted(set(PLANTED) - {"wait"}) for seed in seeds_for(PLANTED[fault], 2)],
)
def test_planted_faults_on_sm_75_are_caught(broken, seed):
    made = product(40, 48, 128, arch="75")  # k ends with the ring, so the tile last read lies where C goes
    found = caught(made, mma.plan_of(made.shape, replace(TINY, slots=2), broken), seed, "75")
    assert found in PLANTED[broken]


def test_without_checks_a_missing_wait_still_shows():
    from flashnumba.machine.emulator import launch

    made = product(32, 32, 128)
    plan, out = mma.plan_of(made.shape, TINY, "wait"), made.guarded()
    launch(plan.kernel, plan.grid, plan.threads, (made.a, made.b, out.array), shared=plan.shared, checks=False)
    assert np.abs(out.array.astype(np.float64) - made.expected).max() > 1


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"bm": 96}, "bm is 96; it must be a power of two from 16 on"),
        ({"bk": 16}, "bk is 16; it must be 32 or more"),
        ({"wm": 256}, "a warp's 256 x 64 is more than the block's 128 x 256"),
        ({"slots": 1}, "slots is 1; it must be 2 to 8"),
        ({"wm": 128}, "a warp's 128 x 64 takes 352 registers a thread"),
        ({"wm": 16, "wn": 16}, "4096 threads; a block has at most 1024"),
    ],
)
def test_sizes_that_do_not_go_together(sizes, message):
    with pytest.raises(ValueError, match=message):
        Tiles(**sizes)


def test_elements_that_mma_does_not_multiply():
    with pytest.raises(ValueError, match=r"mma of float32 on sm_90a: .* use register_tile"):
        mma.plan_mma(Shape.packed("float32", 64, 64, 64))
    with pytest.raises(ValueError, match=r"mma of bfloat16 on sm_75: .* from sm_80 on bfloat16; use register_tile"):
        mma.plan_mma(Shape.packed("bfloat16", 64, 64, 64, arch="75"))
    with pytest.raises(ValueError, match="mma of float32 on sm_80; it multiplies float16"):
        make_mma("float32", Tiles())


@pytest.mark.parametrize("arch", ["75", "80", "86", "90a", "120a"])
@pytest.mark.parametrize("size", [1, 64, 500, 1536, 4096, 4097, 8192])
def test_plans_cover_c_and_fit_every_gpu(arch, size):
    shape = Shape.packed("float16", size, size + 5, 64, arch=arch)
    plan = mma.plan_mma(shape)
    assert plan.shared <= (64 if arch == "75" else 99) * 1024
    assert plan.threads == plan.kernel.threads
    largest = (128 * 128) if mma.staged(shape) else (128 * 256)
    assert plan.grid * largest >= size * (size + 5)


def test_variants_fit_their_gpu():
    for arch, limit in (("75", 64), ("80", 163), ("86", 99), ("90a", 227)):
        plans = mma.variants(Shape.packed("float16", 4096, 4096, 4096, arch=arch))
        assert len(plans) >= 4 and all(plan.shared <= limit * 1024 for plan in plans.values())
