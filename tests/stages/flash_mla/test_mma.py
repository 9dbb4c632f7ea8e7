"""The kernels of latent attention: requests of any length, pages, masks, scales; and each planted fault is caught."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashnumba.machine.compiler import why_not
from flashnumba.stages.flash_mla import attend, combine, mma
from flashnumba.stages.flash_mla.schedule import schedule
from flashnumba.stages.flash_mla.sizes import MLATiles
from tests.stages.flash_mla.problems import ONE, SHARED, caught, decode, prefill, problem, right

needs_compiler = pytest.mark.skipif(bool(why_not()), reason=why_not() or "the compiler is installed")
RAGGED = [0, 64, 200, 1]
DEEP = replace(SHARED, slots=2, deep=True)
"""Two warps share twice the rows, along half the columns each."""


@pytest.mark.parametrize("tiles", [ONE, SHARED], ids=["one", "shared"])
@pytest.mark.parametrize(("s", "h", "element", "causal"), [(2, 5, "float16", True), (1, 17, "bfloat16", False)])
def test_ragged_requests(machine, tiles, s, h, element, causal):
    """No token, one, a whole page, and a request in several parts; the heads are no multiple of a tile's rows."""
    given = problem(tiles, s, h, RAGGED, element=element, causal=causal)
    right(given, decode(given, tiles, machine))


def test_rows_shared_along_half_the_columns(machine):
    """The last request has no token: nobody may leave with Q still on its way."""
    given = problem(DEEP, 2, 9, [70, 0])
    right(given, decode(given, DEEP, machine, parts=1))


@pytest.mark.parametrize("seed", [0, 1])
def test_planted_fault_of_the_exchange(seed):
    given = problem(DEEP, 1, 17, [20])
    assert caught(given, lambda: decode(given, DEEP, parts=1, broken="exchange", seed=seed)) == "Race"


@pytest.mark.parametrize(("parts", "n"), [(1, 200), (30, 600)])
def test_parts(machine, parts, n):
    """One block for all, and a part for each page: more of them than are merged at once, and the keys grow, so that
    the maximum rises behind the first of those."""
    given = problem(ONE, 1, 3, [n, 3])
    for page, of_table in enumerate(given.table[0]):
        given.cache[of_table] *= 1 + page
    given.held[...] = given.cache
    assert parts == 1 or schedule(given.lengths, parts).num_splits[1] > combine.AT_ONCE
    right(given, decode(given, ONE, machine, parts=parts))


@pytest.mark.parametrize("n", [1, 31, 32, 33, 63, 65])
def test_ends_of_tiles_and_pages(machine, n):
    given = problem(ONE, 3, 2, [n])
    right(given, decode(given, ONE, machine, parts=1))


@pytest.mark.parametrize(("scale", "size"), [(0.0, 1.0), (-0.1, 1.0), (30.0, 30.0)])
def test_scales(machine, scale, size):
    """Zero, one below zero, and scores of 1e5, where one key has all the weight."""
    given = problem(ONE, 2, 4, [70], scale=scale, size=size)
    right(given, decode(given, ONE, machine, parts=2))


@pytest.mark.parametrize(("tiles", "n", "causal"), [(ONE, 15, True), (ONE, 77, False), (SHARED, 40, True)],
                         ids=["few keys", "all keys", "shared"])  # fmt: skip
def test_prefill(machine, tiles, n, causal):
    """Rows of two tiles; with few keys and the mask the first tokens see nothing."""
    given = problem(tiles, 20, 2, [n], causal=causal)
    right(given, prefill(given, tiles, machine))


WRONG = ("page", "rescale", "causal", "tail")
"""Faults that are wrong numbers, whatever the order of threads."""


@pytest.mark.parametrize(
    ("broken", "seed"), [(x, i) for x in attend.FAULTS if x != "scale" for i in range(1 if x in WRONG else 2)]
)
def test_planted_faults(broken, seed):
    tiles = SHARED if broken in ("maxima", "weights") else ONE
    given = problem(tiles, 2, 5, [150 if broken in ("wait", "free") else 90], size=3)
    said = caught(given, lambda: decode(given, tiles, parts=1, broken=broken, seed=seed))
    expected = {"wait": {"ReadInFlight"}} | {name: {"wrong"} for name in WRONG}
    assert said and said in expected.get(broken, {said}), said
    assert broken in expected or said != "wrong", f"{broken}: a missing barrier is a race, whatever came of it"


@pytest.mark.parametrize("broken", combine.COMBINE_FAULTS)
def test_planted_faults_of_the_merge(broken):
    """A part merged twice, parts of one weight, and parts that are read before they are there."""
    given = problem(ONE, 1, 3, [400])
    said = caught(given, lambda: decode(given, ONE, parts=3, merge=broken))
    assert said == ("EarlyAccess" if broken == "wait" else "wrong")


def test_sizes_that_do_not_fit():
    for change, match in (
        ({"bn": 48}, "bn is 48; it must be 16, 32 or 64"), ({"row_parts": 3}, "parts must divide the warps"),
        ({"dv": 96}, "they must be multiples of 64 and of 128"), ({"slots": 1}, "slots is 1"),
        ({"eight": True}, "with 8 bits"), ({"deep": True}, "deep is for"),
        ({"bm": 64, "bn": 32}, "with held Q lies in the place of a tile"),
    ):  # fmt: skip
        sizes = {"bm": 16, "bn": 32, "warps": 2, "slots": 2, "held": True, "d": 192, "dv": 128} | change
        with pytest.raises(ValueError, match=match):
            MLATiles(**sizes)
    with pytest.raises(ValueError, match="tiles for 8 bits take a code, others none"):
        mma.make_decode(ONE, "float16", code="float8_e4m3fn")


def test_tiles_fit_every_gpu():
    for arch, room in (("80", 163), ("86", 99), ("89", 99), ("90a", 227), ("100a", 227), ("120a", 99)):
        for rows in (1, 16, 17, 32, 33, 64, 128, 512):
            for eight in (False, True):
                tiles = mma.tiles_for(rows, arch, eight)
                blocks = max(1, tiles.min_blocks)
                assert blocks * (tiles.shared + 1024) <= (room + 1) * 1024, "a block takes a KB more than it asks for"


@needs_compiler
def test_many_rows_compile_without_a_spill():
    from flashnumba.machine.compiler import compile_kernel

    cases = [x for x in mma.compile_cases() if "decode bfloat16 64 rows" in x.name and "sm_90a" in x.name]
    made = [compile_kernel(x.kernel, x.signature, "90a") for x in cases]
    assert len(made) == 1 and not made[0].spill_stores and not made[0].local_memory and not made[0].uses_f64
