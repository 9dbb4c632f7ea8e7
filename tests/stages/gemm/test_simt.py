"""The product on CUDA cores: right for every major, length and alignment, and wrong once a step is left out."""

import os
import re
from dataclasses import replace

import numpy as np
import pytest

from flashnumba.machine.compiler import compile_kernel, sass, why_not
from flashnumba.stages.gemm import one_element, register_tile, shared_tile, simt, staging
from flashnumba.stages.gemm.problem import Shape, signature
from flashnumba.stages.gemm.register_tile import Tiles
from tests.stages.faults import seeds_for
from tests.stages.gemm.products import DTYPES, MAJORS, TAILS, arch_on, caught, product

EVERY = (np.float32, *DTYPES)
SMALL = simt.SMALL
SIMPLE = ("naive", "coalesced", "shared_tile")


def names(dtype):
    return np.dtype(dtype).name


@pytest.mark.parametrize("kernel", simt.PLANS)
@pytest.mark.parametrize("size", TAILS, ids=str)
def test_every_tail(machine, kernel, size):
    made = product(*size, np.float32, arch=arch_on(machine))
    made.check(simt.PLANS[kernel](made.shape), machine)


@pytest.mark.parametrize(("a_major", "b_major"), MAJORS[1:])
@pytest.mark.parametrize("size", TAILS, ids=str)
def test_every_tail_of_the_other_majors(machine, size, a_major, b_major):
    made = product(*size, np.float32, a_major, b_major, arch=arch_on(machine))
    made.check(simt.plan_register_tile(made.shape), machine)


@pytest.mark.parametrize("dtype", EVERY, ids=names)
@pytest.mark.parametrize(("a_major", "b_major"), MAJORS)
@pytest.mark.parametrize("size", [(15, 31, 33), (36, 40, 20)], ids=str)
def test_every_element_by_narrow_and_by_wide_loads(machine, dtype, a_major, b_major, size):
    made = product(*size, dtype, a_major, b_major, arch=arch_on(machine))
    plan = simt.plan_of(made.shape, SMALL)
    assert all(made.shape.whole(x) >= 4 * made.shape.itemsize for x in "abc") == (size[0] == 36)
    made.check(plan, machine)


@pytest.mark.parametrize("kernel", SIMPLE)
@pytest.mark.parametrize("dtype", EVERY, ids=names)
@pytest.mark.parametrize(("a_major", "b_major"), [("k", "k"), ("m", "n")])
def test_every_element_of_the_simple_kernels(machine, kernel, dtype, a_major, b_major):
    made = product(17, 9, 18, dtype, a_major, b_major, arch=arch_on(machine))
    made.check(simt.PLANS[kernel](made.shape), machine)


@pytest.mark.parametrize(("a_major", "b_major"), MAJORS)
@pytest.mark.parametrize(
    ("gaps", "at", "wide"),
    [
        ((4, 8, 4), (0, 0, 0), "abc"),
        ((3, 8, 1), (0, 0, 0), "b"),  # lines that are not aligned beside some that are
        ((4, 4, 4), (4, 1, 2), "a"),
        ((4, 5, 8), (2, 4, 4), "c"),
    ],
    ids=str,
)
def test_every_alignment_with_nan_between_the_lines(machine, gaps, at, wide, a_major, b_major):
    made = product(36, 40, 20, np.float32, a_major, b_major, gaps=gaps, at=at, arch=arch_on(machine))
    assert [x for x in "abc" if made.shape.whole(x) == 16] == list(wide)
    made.check(simt.plan_of(made.shape, SMALL), machine)


@pytest.mark.parametrize(("a_major", "b_major"), MAJORS)
def test_lines_that_are_aligned_but_end_within_a_vector(machine, a_major, b_major):
    """No load may reach beyond a line: NaN lies there."""
    lines = {"k": 19, "m": 33, "n": 38}
    gaps = (-lines[a_major] % 4, -lines[b_major] % 4, 2)
    made = product(33, 38, 19, np.float32, a_major, b_major, gaps=gaps, arch=arch_on(machine))
    assert (made.shape.vector_a, made.shape.vector_b, made.shape.vector_c) == (16, 16, 16)
    made.check(simt.plan_of(made.shape, SMALL), machine)


@pytest.mark.parametrize(
    "tiles",
    [
        simt.LARGE, simt.MEDIUM, Tiles(128, 128, 16, 8, 8, lanes_m=8), Tiles(128, 64, band=1),
        Tiles(64, 128, 8, 8, 16, lanes_m=8), Tiles(32, 64, 16, 4, 8, lanes_m=8), replace(SMALL, bk=16, band=3),
    ],
    ids=str,
)  # fmt: skip
def test_every_size(machine, tiles):
    made = product(tiles.bm - 8, tiles.bn - 24, 2 * tiles.bk + 4, np.float32, arch=arch_on(machine), seed=3)
    made.check(simt.plan_of(made.shape, tiles), machine)


def test_several_bands_of_tiles(machine):
    made = product(100, 70, 9, np.float32, "m", "k", arch=arch_on(machine))
    results = [made.check(simt.plan_of(made.shape, replace(SMALL, band=band)), machine) for band in (1, 2, 3, 8)]
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


@pytest.mark.parametrize("dtype", EVERY, ids=names)
@pytest.mark.parametrize("size", [(15, 31, 33), (36, 40, 20)], ids=str)
def test_as_built_for_sm_75(machine, dtype, size):
    made = product(*size, dtype, "m", "k", arch="75")
    for plan in (simt.plan_naive(made.shape), simt.plan_shared_tile(made.shape), simt.plan_of(made.shape, SMALL)):
        assert plan.kernel.arch == "75"
        made.check(plan, machine, arch="75")


@pytest.mark.parametrize("kernel", simt.PLANS)
def test_infinities_and_nans_stay_in_their_row_and_column(machine, kernel):
    made = product(20, 18, 21, np.float32, arch=arch_on(machine))
    made.a[3, 20], made.a[7, 0], made.b[5, 2] = np.inf, np.nan, -np.inf
    with np.errstate(invalid="ignore"):
        made.expected = made.a.astype(np.float64) @ made.b.astype(np.float64)
        made.low = (made.a @ made.b).astype(np.float32)
    out = made.check(simt.PLANS[kernel](made.shape), machine)
    assert np.isnan(out[7]).all() and np.isinf(out[3, :2]).all() and np.isinf(out[0, 2])
    assert np.isfinite(np.delete(np.delete(out, (3, 7), 0), 2, 1)).all()


@pytest.mark.parametrize("kernel", simt.PLANS)
def test_any_order_of_blocks_and_threads_gives_the_same_bits(kernel):
    made = product(36, 40, 20, np.float32)
    plan = simt.PLANS[kernel](made.shape)
    first = made.check(plan, seed=0)
    for seed in (1, 2):
        np.testing.assert_array_equal(made.check(plan, seed=seed), first)


SIMPLE_FAULTS = {"stride": {"OutOfBounds"}, "edge": {"OutOfBounds"}, "short": {"wrong result"}}
SHARED_FAULTS = {
    "before": {"Race", "UninitialisedRead"},
    "after": {"Race"},
    "stride": {"wrong result"},
    "mask": {"OutOfBounds"},
    "edge": {"OutOfBounds"},
}
REGISTER_FAULTS = {
    "barrier": {"Race", "UninitialisedRead"},
    "buffer": {"Race"},
    "turn": {"wrong result", "UninitialisedRead"},
    "stride": {"OutOfBounds", "wrong result"},
    "store": {"OutOfBounds", "wrong result"},
    "mask": {"OutOfBounds", "wrong result"},
    "edge": {"OutOfBounds"},
    "pad": {"wrong result", "UninitialisedRead"},
}
PLANTED = (
    [("naive", simt.plan_naive, name, found) for name, found in SIMPLE_FAULTS.items()]
    + [("coalesced", simt.plan_coalesced, name, found) for name, found in SIMPLE_FAULTS.items()]
    + [("shared_tile", simt.plan_shared_tile, name, found) for name, found in SHARED_FAULTS.items()]
)


def test_every_fault_that_can_be_planted_is_tested():
    assert set(SIMPLE_FAULTS) == set(one_element.BROKEN)
    assert set(SHARED_FAULTS) == set(shared_tile.BROKEN)
    assert set(REGISTER_FAULTS) == set(register_tile.BROKEN)
    for module, made in (
        (one_element, one_element.make_naive), (shared_tile, shared_tile.make_shared_tile),
        (register_tile, register_tile.make_register_tile),
    ):  # fmt: skip
        assert set(re.findall(r'``"(\w+)"``', made.__wrapped__.__doc__)) == set(module.BROKEN)
    assert len(PLANTED) + len(REGISTER_FAULTS) == 19


@pytest.mark.parametrize(
    ("kernel", "plan", "broken", "found", "seed"),
    [(*planted, seed) for planted in PLANTED for seed in seeds_for(planted[-1])],
    ids=lambda v: str(v) if isinstance(v, (str, int)) else "",
)
def test_planted_faults_of_the_simple_kernels_are_caught(kernel, plan, broken, found, seed):
    made = product(19, 23, 35, np.float32)
    assert caught(made, plan(made.shape, broken=broken), seed) in found


@pytest.mark.parametrize(
    ("broken", "seed"), [(fault, i) for fault in REGISTER_FAULTS for i in seeds_for(REGISTER_FAULTS[fault])]
)
@pytest.mark.parametrize(("size", "majors"), [((36, 44, 28), "kn"), ((35, 43, 27), "mk")], ids=str)
def test_planted_faults_of_the_register_tile_are_caught(broken, size, majors, seed):
    made = product(*size, np.float32, *majors)
    assert caught(made, simt.plan_of(made.shape, SMALL, broken), seed) in REGISTER_FAULTS[broken]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"bk": 4}, "bk is 4; it must be 8 or 16"),
        ({"lanes_m": 16}, "lanes_m is 16; it must be 4 or 8"),
        ({"tm": 6}, "tm is 6; it must be a multiple of 4"),
        ({"tn": 0}, "tn is 0; it must be a multiple of 4"),
        ({"tm": 16, "tn": 16}, "a thread has 16 x 16 sums; more than 128 leave too few registers"),
        ({"bm": 96}, "bm is 96; it must be a multiple of 64, which a warp has"),
        ({"bn": 32}, "bn is 32; it must be a multiple of 64, which a warp has"),
        ({"bm": 1024, "bn": 256}, "1024 x 256 by 16 x 8 takes 2048 threads; 1024 is most"),
        ({"band": 0}, "band is 0 and min_blocks 2; they must be at least 1 and 0"),
    ],
)
def test_tiles_check_themselves(sizes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        replace(Tiles(), **sizes)


def test_threads_that_do_not_share_a_tile_evenly():
    with pytest.raises(ValueError, match="512 threads do not share a tile of 128 x 8 evenly, 4 elements a load"):
        staging.staging("float32", 128, 8, 512, along_k=True, wide=True)
    with pytest.raises(ValueError, match="tile is 8; it must be 16 or 32"):
        shared_tile.make_shared_tile("float32", 8)


@pytest.mark.parametrize("kernel", SIMPLE)
def test_more_blocks_than_a_grid_has(kernel):
    with pytest.raises(ValueError, match=r"C is 1048576 x 2097152, \d+ blocks of \d+ x \d+; a grid has at most"):
        simt.PLANS[kernel](Shape.packed("float32", 1 << 20, 1 << 21, 1))


@pytest.mark.parametrize("size", [(4096, 4096, 4096), (8192, 8192, 64), (100, 100, 100), (700, 300, 5)], ids=str)
@pytest.mark.parametrize("element", ["float32", "float16", "bfloat16"])
def test_variants_cover_c(size, element):
    shape = Shape.packed(element, *size)
    plans = simt.variants(shape)
    assert len(plans) >= 12
    for name, plan in plans.items():
        bm, bn = map(int, re.match(r"(\d+)x(\d+)", name).groups())
        assert plan.grid == -(-size[0] // bm) * -(-size[1] // bn)
        assert plan.threads == plan.kernel.threads


@pytest.mark.parametrize("size", [(4096, 4096, 64), (1000, 1000, 64), (100, 100, 64)], ids=str)
def test_large_tiles_for_large_products(size):
    chosen = simt.plan_register_tile(Shape.packed("float32", *size))
    expected = {4096: simt.LARGE, 1000: simt.MEDIUM, 100: simt.SMALL}[size[0]]
    assert (chosen.threads, chosen.shared) == (expected.threads, expected.shared)


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "the compiler is installed")
@pytest.mark.parametrize(("a_major", "b_major"), MAJORS[:1] if "CI" in os.environ else MAJORS)
def test_the_loop_is_nine_tenths_ffma(a_major, b_major):
    """What the H200's arithmetic is given to do: FFMA with few instructions beside them, and 128-bit loads alone."""
    pytest.importorskip("cuda.pathfinder")
    shape = Shape.packed("float32", 4096, 4096, 4096, a_major, b_major)
    plan = simt.plan_register_tile(shape)
    made = compile_kernel(plan.kernel, signature(shape), "90a")
    assert (made.spill_stores, made.local_memory) == (0, 0)
    assert made.count("fma.rn.f32") == 2 * 16 * 8 * 8, "two tiles of 8 steps: the loop's and the last"
    try:
        text = sass(plan.kernel, signature(shape), "90a")
    except RuntimeError as error:
        pytest.skip(str(error))
    loop = longest_loop(text)
    count = {name: sum(line.split()[0].startswith(name) for line in loop) for name in ("FFMA", "LDS.128", "LDS", "BAR")}
    assert count["FFMA"] == 16 * 8 * 8
    assert count["LDS"] == count["LDS.128"] == 6 * 8
    assert count["BAR"] == 1
    assert count["FFMA"] > 0.9 * len(loop)


def longest_loop(text):
    """Instructions of the longest run that a backward branch closes."""
    lines, labels, best = [], {}, []
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(lines)
        elif code := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d\s+)?(.*?)\s*;", line):
            lines.append(code[1])
            target = re.search(r"BRA.*?(\.L_x_\d+)", code[1])
            if target and target[1] in labels:
                best = max(best, lines[labels[target[1]] :], key=len)
    return best
