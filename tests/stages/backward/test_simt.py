"""The kernels on CUDA cores: right for every size, layout, value and type, and wrong once a step is left out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flashnumba.stages.backward import rows, simt
from flashnumba.stages.backward.problem import Plan, Shape, rows_scratch
from flashnumba.stages.backward.reference import NEAR, delta_of
from flashnumba.stages.backward.simt_tiles import Tiles, tiles_for
from tests.stages.backward.backward_cases import (
    assert_gradients,
    caught,
    hard_cases,
    laid_out,
    made,
    normal,
    run,
)
from tests.stages.flash_forward import attention_cases
from tests.stages.flash_forward.attention_cases import DTYPES, names


def small(broken="", **sizes):
    """A planner of tiles that leave several to a small problem: one warp, 8 rows x 16 if nothing is said."""

    def plan(shape: Shape) -> Plan:
        d = -(-shape.d // 32) * 32
        tiles = Tiles(d, **{"own": 8, "other": 16, "bk": 8, "rows": 4, "vector": shape.vector} | sizes)
        return simt.plan_with(tiles, shape, broken)

    return plan


@pytest.mark.parametrize("case", hard_cases(np.float32, m=12, n=17, d=8), ids=str)
def test_hard_cases(machine, case):
    assert_gradients(run(small(), case, machine), case)


@pytest.mark.parametrize("case", hard_cases(np.float16, m=3, n=17, d=8)[1::6], ids=str)
def test_hard_cases_in_float16(machine, case):
    assert_gradients(run(small(), case, machine), case)


@pytest.mark.parametrize(
    ("m", "n", "causal"),
    [(1, 7, True), (7, 15, False), (15, 1, True), (31, 15, True), (15, 31, False), (17, 33, True), (3, 70, True),
     (70, 3, False)],
)  # fmt: skip
def test_every_length(machine, m, n, causal):
    case = normal(m, n, 16, DTYPES[(m + n) % 3], causal=causal, with_dlse=causal, heads=1 if m * n > 200 else 4)
    assert_gradients(run(small(own=16, rows=8, other=32), case, machine), case)


@pytest.mark.parametrize("d", [1, 7, 33, 64, 100, 256])
def test_every_head_dimension(machine, d):
    case = normal(3, 9, d, DTYPES[d % 3], causal=d % 2 == 0)
    assert_gradients(run(small(), case, machine), case)


LAID_OUT = list(laid_out(normal(5, 7, 8, heads=2, kv_heads=1, batch=2, with_dlse=True)))[1::2]
"""In each every array has another layout; ``test_mma.py`` has the other half."""


@pytest.mark.parametrize("case", LAID_OUT, ids=str)
def test_every_layout(machine, case):
    assert_gradients(run(small(), case, machine), case)


@pytest.mark.parametrize("vector", [16, 8, 4])
def test_every_width_of_loads(machine, vector):
    case = normal(5, 9, 40)
    assert_gradients(run(small(vector=vector), case, machine), case)


@pytest.mark.parametrize("shape", [(1, 2, 3, 0, 5), (1, 2, 0, 4, 5)])
@pytest.mark.parametrize("causal", [False, True])
def test_empty(machine, shape, causal):
    batch, heads, m, n, d = shape
    case = normal(m, n, d, batch=batch, heads=heads, causal=causal)
    for gradient in run(small(), case, machine):
        assert (gradient == 0).all()


def test_bits_do_not_depend_on_the_order_of_threads(machine):
    case = normal(9, 20, 8, causal=True)
    for one, other in zip(*(run(small(), case, machine, seed=seed) for seed in range(2)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_planned_tiles(machine):
    case = normal(9, 40, 32, DTYPES[1], causal=True)
    assert_gradients(run(simt.plan_simt, case, machine), case)


def test_the_oldest_gpu():
    """The emulator refuses what sm_75 lacks."""
    case = normal(3, 7, 8, DTYPES[1])
    assert_gradients(run(simt.plan_simt, case, arch="75"), case)


# -- the numbers of each row -------------------------------------------------------------------------------------------
def rows_of(case, machine="emulator", broken=""):
    """delta, origin and bias as the kernel has them."""
    taken = {}

    def plan(shape):
        for name in rows_scratch(shape):
            taken[name] = np.full((shape.batch, shape.heads, shape.m), np.nan, np.float32)
        return Plan((rows.launch_rows(shape, broken=broken),), {})

    given = dict(case.arrays)
    kind = type(case)

    class Watched(kind):
        arrays = property(lambda self: given | taken)
        shape = case.shape

    run(plan, Watched(**{x: getattr(case, x) for x in ("name", "inputs", "do", "o", "lse", "dlse")}), machine)
    return taken["delta"], taken["origin"], taken["bias"]


@pytest.mark.parametrize("dtype", DTYPES, ids=names)
@pytest.mark.parametrize("d", [1, 33, 40, 128])
@pytest.mark.parametrize("with_dlse", [False, True])
def test_delta(machine, dtype, d, with_dlse):
    case = normal(7, 9, d, dtype, heads=2, with_dlse=with_dlse)
    delta, origin, bias = rows_of(case, machine)
    expected = delta_of(case.o, case.do) - (case.dlse if with_dlse else 0)
    np.testing.assert_allclose(delta, expected, rtol=1e-5, atol=1e-5)
    assert (origin == 0).all()
    np.testing.assert_array_equal(bias, case.lse)


def test_rows_far_from_zero_ask_their_keys_again(machine):
    case = made(attention_cases.hard_case("scores of -1e5 that differ little", np.float32))
    _, origin, bias = rows_of(case, machine)
    s = case.inputs.q @ case.inputs.k.swapaxes(-1, -2)
    np.testing.assert_array_equal(origin, s.min(-1))  # the scale is -1
    np.testing.assert_allclose(bias, np.log(np.exp(s.min(-1, keepdims=True) - s).sum(-1)), rtol=1e-5)


def test_rows_far_from_zero_ask_the_keys_of_their_own_head(machine):
    rng = np.random.default_rng(0)
    q, k = (rng.integers(-60, 60, shape).astype(np.float32) for shape in ((2, 4, 3, 8), (2, 2, 9, 8)))
    inputs = replace(attention_cases.normal(3, 9, 8, np.float32, batch=2, heads=4, kv_heads=2), q=q, k=k, scale=1.0)
    case = made(inputs)
    _, origin, bias = rows_of(case, machine)
    s = q.astype(np.float64) @ k.repeat(2, 1).swapaxes(-1, -2)
    far = np.abs(case.lse) > NEAR
    assert far.mean() > 0.9
    np.testing.assert_array_equal(origin, np.where(far, s.max(-1), 0))
    np.testing.assert_allclose(bias[far], np.log(np.exp(s - s.max(-1, keepdims=True)).sum(-1))[far], atol=1e-5)


def test_rows_that_see_nothing(machine):
    case = normal(7, 3, 8, causal=True, with_dlse=True)
    case.dlse[..., :3] = np.nan, np.inf, -np.inf  # as of a function of lse = -inf
    delta, origin, bias = rows_of(case, machine)
    assert (bias[..., :4] == np.inf).all() and np.isfinite(bias[..., 4:]).all() and (origin == 0).all()
    assert (delta[..., :4] == 0).all() and (delta[..., 4:] != 0).all()


ROWS_WRONG = {
    "far": made(attention_cases.hard_case("scores of 1e5 that differ little", np.float32)),
    "nothing": normal(7, 3, 8, causal=True),
    "dlse": normal(3, 7, 8, with_dlse=True),
    "lanes": normal(3, 7, 32),
}


@pytest.mark.parametrize("broken", rows.FAULTS)
def test_a_wrong_number_of_a_row_is_caught(broken):
    """Not each shows in the gradients: a weight of a key that a row does not see is never made."""
    case = ROWS_WRONG[broken]
    right, wrong = rows_of(case), rows_of(case, broken=broken)
    assert not all(np.allclose(a, b, rtol=1e-5) for a, b in zip(right, wrong, strict=True))

    def plan(shape):
        good = small()(shape)
        return Plan((rows.launch_rows(shape, broken=broken), *good.launches[1:]), good.scratch)

    if broken != "nothing":
        assert set(caught(lambda seed: run(plan, case, seed=seed), case, (0,))) <= {"dq", "dk", "dq dk", "dq dk dv"}


# -- planted faults ----------------------------------------------------------------------------------------------------
WRONG = {
    "tail": (made(attention_cases.hard_case("scores of -1e5 that differ little", np.float32)), "dq dk dv"),
    "diagonal": (normal(9, 21, 8, causal=True), "dq dk dv"),
    "scale": (normal(9, 21, 8), "dq dk"),
    "delta": (normal(9, 21, 8), "dq dk"),
    "group": (normal(9, 17, 8, heads=2, kv_heads=1), "dk dv"),
    "start": (normal(21, 21, 8, causal=True), "dk dv"),
    "stride": (
        normal(9, 21, 8).with_arrays("longer rows", attention_cases.LAYOUTS["longer rows"], ("v", "do")), "dq dk dv",
    ),
}  # fmt: skip


@pytest.mark.parametrize("broken", ["free", "ready", "weights"])
def test_a_missing_barrier_is_a_race(broken):
    case = normal(9, 20, 40)
    found = caught(lambda seed: run(small(broken, own=16), case, seed=seed), case)
    assert set(found) <= {"Race", "UninitialisedRead"}


@pytest.mark.parametrize("broken", WRONG)
def test_a_wrong_step_is_caught(broken):
    """By the gradients that it touches, and no others."""
    case, touched = WRONG[broken]
    found = caught(lambda seed: run(small(broken), case, seed=seed), case, (0,))
    assert all(what == "OutOfBounds" or set(what.split()) <= set(touched.split()) for what in found), found


def test_faults_are_all_tested():
    assert {"free", "ready", "weights", *WRONG} == set(simt.FAULTS) and set(ROWS_WRONG) == set(rows.FAULTS)


# -- sizes -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("sizes", "what"), [
    ({"d": 40}, "d is 40; it must be a multiple of 32 up to 256"),
    ({"bk": 0}, "a size is 0; all must be positive"),
    ({"own": 30}, "own is 30 and rows 4"),
    ({"own": 4}, "16 threads; a block has whole warps"),
    ({"other": 40}, "other is 40; it must be a multiple of the 16 threads that share a row"),
    ({"bd": 96}, "bd is 96; it must be a multiple of 32 that divides 128"),
    ({"bk": 24}, "bk is 24; it must be a multiple of 4 that divides other = 64"),
    ({"d": 256}, "91648 bytes of shared memory; a block on sm_75 has 65536"),
])  # fmt: skip
def test_tiles_that_do_not_go_together(sizes, what):
    with pytest.raises(ValueError, match=what):
        Tiles(**{"d": 128} | sizes)


def test_every_plan_fits():
    for d in range(1, 257):
        for element, itemsize in (("float32", 4), ("bfloat16", 2)):
            shape = Shape(element, 2, 6, 3, 100, 70, d, vector=min(16, (d & -d) * itemsize))
            tiles, (of_rows, dq, dkdv) = tiles_for(shape), simt.plan_simt(shape).launches
            assert dq.threads == dkdv.threads == tiles.threads == 128 and d <= tiles.d < d + 32
            rows_a_block = 128 // rows.lanes_for(shape)
            assert of_rows.grid == -(-100 // rows_a_block) * 12
            assert (dq.grid, dkdv.grid) == (-(-100 // tiles.own) * 12, -(-70 // tiles.own) * 6)
