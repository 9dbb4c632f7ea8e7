"""The wgmma kernel: right for every major and length, persistent or not, and wrong once a step is left out."""

import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from flashnumba.stages.gemm import wgmma
from flashnumba.stages.gemm.problem import Shape
from flashnumba.stages.gemm.warp_specialised import Tiles, make_wgmma
from tests.stages.faults import seeds_for
from tests.stages.gemm.products import MAJORS, TAILS, arch_on, caught, product

pytestmark = pytest.mark.usefixtures("hopper")
TINY = Tiles(128, 64, slots=2)


def padded(m, n, k, dtype=np.float16, a_major="k", b_major="n", arch="90a", seed=0):
    """A product whose lines are padded to multiples of 16 bytes, by NaN; N is the next multiple of 8."""
    n += -n % 8
    lines = (k if a_major == "k" else m, n if b_major == "n" else k, n)
    return product(m, n, k, dtype, a_major, b_major, gaps=tuple(-line % 8 for line in lines), arch=arch, seed=seed)


@pytest.mark.parametrize(("a_major", "b_major"), MAJORS)
@pytest.mark.parametrize("size", TAILS, ids=str)
def test_every_tail_of_every_major(machine, size, a_major, b_major):
    made = padded(*size, np.float16, a_major, b_major, arch_on(machine))
    made.check(wgmma.plan_wgmma(made.shape), machine)


@pytest.mark.parametrize(("a_major", "b_major"), MAJORS)
@pytest.mark.parametrize("size", [(33, 63, 100), (136, 72, 200)], ids=str)
def test_bfloat16(machine, size, a_major, b_major):
    made = padded(*size, ml_dtypes.bfloat16, a_major, b_major, arch_on(machine))
    made.check(wgmma.plan_of(made.shape, TINY, blocks=1), machine)


@pytest.mark.parametrize(
    "tiles",
    [
        wgmma.LARGE, wgmma.MEDIUM, wgmma.SMALL, Tiles(128, 256, slots=3, panels=4), Tiles(256, 128, slots=4),
        Tiles(128, 192, slots=4, panels=1), Tiles(192, 256, slots=3, consumers=3, columns=128),
        Tiles(256, 64, slots=2, band=1),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(("a_major", "b_major"), [("k", "n"), ("m", "k")])
def test_every_size(machine, tiles, a_major, b_major):
    made = padded(tiles.bm - 5, tiles.bn - 3, 64 * tiles.slots + 8, np.float16, a_major, b_major, arch_on(machine), 3)
    made.check(wgmma.plan_of(made.shape, tiles), machine)


@pytest.mark.parametrize("blocks", [1, 2, 4, 100])
@pytest.mark.parametrize("k", [40, 200])
def test_blocks_that_walk_over_tiles(machine, blocks, k):
    made = padded(264, 72, k, arch=arch_on(machine))
    plan = wgmma.plan_of(made.shape, replace(TINY, band=2), blocks)
    assert plan.grid == min(blocks, 6)
    made.check(plan, machine)


def test_any_order_of_blocks_and_threads_gives_the_same_bits():
    made = padded(100, 136, 136)
    plan = wgmma.plan_of(made.shape, TINY, blocks=2)
    first = made.check(plan, seed=0)
    for seed in (1, 2):
        np.testing.assert_array_equal(made.check(plan, seed=seed), first)


def test_infinities_and_nans_stay_in_their_row_and_column(machine):
    made = padded(70, 36, 50, arch=arch_on(machine))
    made.a[3, 49], made.b[0, 7] = np.inf, np.nan
    made.judge_anew()
    made.check(wgmma.plan_of(made.shape, TINY), machine)


PLANTED = {
    "full": {"ReadInFlight"},
    "empty": {"MbarrierMisuse", "OverwriteInFlight"},
    "wait": {"OverwriteInFlight"},
    "store": {"OverwriteInFlight"},
    "fence": {"MissingFence"},
    "proxy": {"MissingProxyFence"},
    "lanes": {"Race"},
    "release": {"OverwriteInFlight"},
    "bytes": {"Deadlock"},
    "init": {"MbarrierMisuse"},
    "stride": {"ReadInFlight", "UninitialisedRead", "wrong result"},
    "swizzle": {"wrong result"},
    "accumulate": {"wrong result"},
}


def test_every_fault_that_can_be_planted_is_tested():
    told = make_wgmma.__wrapped__.__doc__.split("broken:")[1]
    assert set(re.findall(r'``"(\w+)"``', told)) == set(PLANTED)
    assert len(PLANTED) == 13


@pytest.mark.parametrize(("broken", "seed"), [(fault, i) for fault in PLANTED for i in seeds_for(PLANTED[fault])])
@pytest.mark.parametrize(("a_major", "b_major"), [("k", "n"), ("m", "k")])
def test_planted_faults_are_caught(broken, a_major, b_major, seed):
    m = 130 if broken == "store" else 70  # four tiles, as it shows where the place of C is used again, or two
    made = padded(m, 100, 264, np.float16, a_major, b_major)
    assert caught(made, wgmma.plan_of(made.shape, TINY, 1, broken), seed) in PLANTED[broken]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"bm": 192}, "bm is 192 for 2 consumers; 2 or 3 have equally many times 64 rows"),
        ({"bn": 96}, "bn is 96, 96 an instruction; they must be multiples of 64 up to 256"),
        ({"columns": 96}, "bn is 256, 96 an instruction"),
        ({"bm": 256}, "256 x 256 by 2 consumers is 256 accumulators a thread; it may have 240 registers"),
        ({"slots": 5}, "5 slots of 49152 bytes, 2 panels a warp: 279632 bytes of shared memory"),
        ({"slots": 1}, "it must be 2 to 8 slots"),
        ({"panels": 0}, "1 to 8 panels"),
    ],
)
def test_sizes_that_do_not_go_together(sizes, message):
    with pytest.raises(ValueError, match=message):
        Tiles(**sizes)


def test_rows_of_c_are_whole_16_bytes():
    """The copy engine would overwrite what lies between rows, as it did on an H200."""
    made = product(70, 36, 48, np.float16, gaps=(0, 4, 4))
    with pytest.raises(ValueError, match=r"n is 36; .* n must be a multiple of 8: use mma"):
        wgmma.plan_wgmma(made.shape)


def test_what_wgmma_does_not_take():
    fits = Shape.packed("float16", 64, 64, 64)
    with pytest.raises(ValueError, match=r"wgmma of float16 on sm_80: .* on sm_90a; use mma"):
        wgmma.plan_wgmma(replace(fits, arch="80"))
    with pytest.raises(ValueError, match=r"wgmma of float32 on sm_90a: .* use register_tile"):
        wgmma.plan_wgmma(Shape.packed("float32", 64, 64, 64))
    for operand in "abc":
        with pytest.raises(ValueError, match=f"vector_{operand} is 8; .* multiples of 16 bytes: use mma, or pad"):
            wgmma.plan_wgmma(replace(fits, **{f"vector_{operand}": 8}))
    with pytest.raises(ValueError, match="copy engine are 32 bits: use mma"):
        wgmma.plan_wgmma(replace(fits, k=2**31))


@pytest.mark.parametrize("size", [1, 128, 1000, 2048, 8192])
def test_plans_cover_c(size):
    plan = wgmma.plan_wgmma(Shape.packed("float16", size, 8 * size, 64))
    assert plan.threads == plan.kernel.threads
    assert plan.grid >= 1
    assert plan.shared <= 227 * 1024


def test_variants_fit():
    plans = wgmma.variants(Shape.packed("float16", 8192, 8192, 8192))
    assert len(plans) > 10 and all(plan.shared <= 227 * 1024 for plan in plans.values())
    assert plans["128x256, 4 slots, one tile a block"].grid == 2048


def test_transposed_shares_memory_and_keeps_what_it_cannot_transpose_described():
    a = np.arange(6, dtype=np.float16).reshape(2, 3)
    assert np.shares_memory(wgmma.transposed(a), a) and wgmma.transposed(a).shape == (3, 2)
    found = wgmma.transposed(wgmma.describe(a).__class__(4096, a.dtype, (2, 3), (6, 2), "jax", 0, True, "float16"))
    assert (found.shape, found.strides, found.pointer, found.device) == ((3, 2), (2, 6), 4096, 0)
