"""The kernel simt: right for every size, layout, value and element type, and wrong once a step is left out."""

import numpy as np
import pytest

from flashnumba.stages.flash_forward.simt import Tiles, make_simt, plan_simt
from flashnumba.stages.flash_forward.simt_tiles import tiles_for
from flashnumba.stages.heads import Launch, Shape, forward
from flashnumba.tiles.window import window
from tests.stages.flash_forward.attention_cases import (
    DTYPES,
    LAYOUTS,
    assert_attention,
    caught,
    exact,
    hard_case,
    hard_cases,
    laid_out,
    names,
    normal,
    plan_for,
    run,
)

BY_ELEMENT = ("a NaN in a row of q", "infinity in a key", "keys of -infinity", "scores of 1e5 that differ little",
              "scores of any size", "causal", "causal, rows that see nothing")  # fmt: skip
"""Hard cases that float16 and bfloat16 need as well as float32."""


def small(broken="", **sizes):
    """A planner of tiles that leave several to a small problem: two warps, 8 rows x 32 keys if nothing is said."""

    def make(shape: Shape) -> Launch:
        d = -(-shape.d // 32) * 32
        tiles = Tiles(d, **{"bm": 8, "bn": 32, "bk": 8, "rows": 2, "vector": shape.vector} | sizes)
        blocks = -(-shape.m // tiles.bm) * shape.heads * shape.batch
        return Launch(make_simt(tiles, shape.element, broken), blocks, tiles.threads, tiles.shared)

    return plan_for(make)


WARP = small(rows=4)
"""One warp, which the emulator runs faster."""


@pytest.mark.parametrize("case", hard_cases(np.float32), ids=str)
def test_hard_values(machine, case):
    assert_attention(run(WARP, case, machine), case)


@pytest.mark.parametrize("name", BY_ELEMENT)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=names)
def test_hard_values_in_16_bits(machine, dtype, name):
    case = hard_case(name, dtype)
    assert_attention(run(WARP, case, machine), case)


@pytest.mark.parametrize(
    ("m", "n", "causal"),
    [
        (1, 7, True), (7, 15, False), (15, 1, True), (15, 1, False), (31, 15, True), (15, 31, True), (33, 63, True),
        (7, 100, False), (7, 100, True), (63, 33, True), (63, 33, False), (100, 7, True), (1, 100, True),
    ],
)  # fmt: skip
def test_every_length(machine, m, n, causal):
    """Rows and keys below, at and above the multiples of tiles; causal with M < N and M > N."""
    case = normal(m, n, 16, DTYPES[(m + n) % 3], causal=causal)
    assert_attention(run(small(bm=16, rows=8, bn=32), case, machine), case)


@pytest.mark.parametrize("d", [1, 7, 32, 33, 64, 100, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=names)
def test_every_head_dimension(machine, dtype, d):
    if machine == "emulator" and d >= 128 and dtype is DTYPES[1]:
        pytest.skip("as float16, but for conversions; a GPU runs it")
    case = exact(3, 15, d, dtype, causal=d % 2 == 0)
    assert_attention(run(small(bm=4, rows=2, bn=16), case, machine), case)


@pytest.mark.parametrize("case", list(laid_out(normal(5, 7, 8, heads=2, batch=2))), ids=str)
def test_every_layout(machine, case):
    assert_attention(run(small(bm=8, rows=4, bn=16), case, machine), case)


@pytest.mark.parametrize("layout", ["columns outside rows", "all reversed", "one element off"])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=names)
def test_layouts_in_16_bits(machine, dtype, layout):
    case = normal(5, 7, 8, dtype).with_arrays(layout, LAYOUTS[layout])
    assert_attention(run(small(bm=8, rows=4, bn=16), case, machine), case)


@pytest.mark.parametrize("vector", [16, 8, 4, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=names)
def test_every_width_of_loads(machine, dtype, vector):
    if vector < np.dtype(dtype).itemsize:
        pytest.skip("less than an element")
    case = normal(5, 15, 40, dtype)
    assert case.shape.vector == 16
    assert_attention(run(small(bm=8, rows=4, bn=16, vector=vector), case, machine), case)


def test_an_output_of_any_strides(machine):
    case = normal(7, 15, 5, heads=2)
    packed = run(small(), case, machine)
    strided = run(small(), case, machine, o_strides=(1000, 6, 60, 1))
    for one, other in zip(packed, strided, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("sizes", [
    {}, {"bm": 16, "rows": 4}, {"bm": 16, "rows": 1}, {"bn": 16, "bk": 4}, {"bn": 64, "bk": 64}, {"bk": 32},
    {"bd": 64}, {"bm": 32, "rows": 4, "bn": 16},
], ids=str)  # fmt: skip
def test_every_tile_gives_what_others_give(machine, sizes):
    case = exact(9, 20, 64, causal=True)
    assert_attention(run(small(**sizes), case, machine), case)


@pytest.mark.parametrize("shape", [(0, 2, 3, 4, 5), (2, 0, 3, 4, 5), (2, 2, 0, 4, 5), (2, 2, 3, 0, 5)])
@pytest.mark.parametrize("causal", [False, True])
def test_empty(machine, shape, causal):
    batch, heads, m, n, d = shape
    q, k = np.ones((batch, heads, m, d), np.float16), np.ones((batch, heads, n, d), np.float16)
    o, lse = forward(q, k, k, plan_simt, causal=causal, machine=machine)
    assert o.shape == q.shape and o.dtype == q.dtype and lse.shape == q.shape[:3] and lse.dtype == np.float32
    assert (o == 0).all() and (lse == -np.inf).all()


def test_no_keys_leaves_no_nan(machine):
    case = exact(7, 0, 8, heads=2)
    o, lse = run(WARP, case, machine)
    assert (o == 0).all() and (lse == -np.inf).all()


def test_bits_do_not_depend_on_the_order_of_threads(machine):
    case = normal(5, 50, 8, causal=True)
    first = run(small(), case, machine)
    for seed in (1, 2):
        for one, other in zip(first, run(small(), case, machine, seed=seed), strict=True):
            np.testing.assert_array_equal(one, other)


EMULATED = [(3, 20, 32, np.float16), (20, 40, 8, np.float32), (16, 9, 100, np.float32)]


@pytest.mark.parametrize(("m", "n", "d", "dtype"), EMULATED)
def test_planned_tiles(machine, m, n, d, dtype):
    case = exact(m, n, d, dtype, causal=True)
    assert_attention(forward(case.q, case.k, case.v, plan_simt, causal=True, machine=machine), case)


@pytest.mark.gpu
@pytest.mark.parametrize("d", range(32, 257, 32))
@pytest.mark.parametrize("m", [16, 150])
@pytest.mark.parametrize("dtype", DTYPES, ids=names)
def test_planned_tiles_of_every_size(m, d, dtype):
    for n, causal in ((130, False), (130, True), (200, True)):
        case = exact(m, n, d - (d == 96), dtype, batch=2, heads=4, kv_heads=2, causal=causal)
        assert_attention(forward(case.q, case.k, case.v, plan_simt, causal=causal, machine="cuda"), case)


@pytest.mark.parametrize("dtype", DTYPES, ids=names)
def test_the_oldest_gpu(dtype):
    """The emulator refuses what sm_75 lacks."""
    case = normal(3, 7, 8, dtype)
    assert_attention(run(plan_simt, case, arch="75"), case)


def test_leading_axes_may_be_left_out(machine):
    case = normal(3, 7, 8)
    o, lse = forward(case.q[0, 0], case.k[0, 0], case.v[0, 0], plan_simt, machine=machine)
    assert_attention((o[None, None], lse[None, None]), case)


def test_more_heads_than_a_grid_has_in_y(machine):
    batch, heads = (70_000, 1) if machine == "cuda" else (3, 2)
    case = normal(1, 3, 4, batch=batch, heads=heads)
    assert_attention(run(WARP, case, machine), case)
    assert plan_simt(Shape("float32", 300, 300, 300, 100, 7, 8)).launches[0].grid == 2 * 90_000


def test_offsets_beyond_32_bits(machine):
    """The second batch begins more than 2**31 bytes after the first; on a GPU 2**31 elements."""
    step = 2**31 + 64 if machine == "emulator" else 2**32 + 64
    case = normal(3, 7, 8, np.float16, batch=2)

    def far(x):
        base = np.zeros(step // 2 + x[0].size, x.dtype)
        view = np.lib.stride_tricks.as_strided(base, x.shape, (step, *x.strides[1:]))
        view[...] = x
        return view

    assert_attention(run(WARP, case.with_arrays("far", far, "k"), machine), case)


BARRIERS = ("k_free", "k_ready", "v_free", "v_ready")
PADDED = LAYOUTS["longer rows"]
WRONG = {
    "rescale": hard_case("a maximum that grows"),
    "anchor": hard_case("causal, rows that see nothing"),
    "product": hard_case("scores of 1e5 that differ little"),
    "tail": hard_case("normal"),
    "diagonal": hard_case("causal"),
    "top_left": hard_case("causal"),
    "order": hard_case("scale 0, causal"),
    "limit": hard_case("normal"),
    "stride": exact(3, 7, 8).with_arrays("longer rows in v", PADDED, "v"),
    "heads": exact(2, 7, 8, heads=4, kv_heads=2),
    "columns": exact(3, 7, 8),
}


@pytest.mark.parametrize("broken", BARRIERS)
@pytest.mark.parametrize("d", [32, 64])
def test_a_missing_barrier_is_a_race(broken, d):
    """One piece of K a tile, and two."""
    case = exact(9, 40, d)
    found = caught(lambda seed: run(small(broken), case, seed=seed), case, seeds=range(4))
    assert set(found) <= {"Race", "UninitialisedRead"}


@pytest.mark.parametrize("broken", WRONG)
def test_a_wrong_step_is_caught(broken):
    case = WRONG[broken]
    assert_attention(run(WARP, case), case)
    found = caught(lambda seed: run(small(broken, rows=4), case, seed=seed), case, seeds=(0, 1))
    assert set(found) <= {"wrong result", "OutOfBounds"}


def test_faults_are_all_tested():
    named = {word.strip('"`') for word in make_simt.__doc__.replace(",", " ").replace(".", " ").split() if '"' in word}
    assert named == {*BARRIERS, *WRONG}


@pytest.mark.parametrize(("sizes", "what"), [
    ({"d": 40}, "d is 40; it must be a multiple of 32 up to 256"),
    ({"d": 288}, "d is 288"),
    ({"bk": 0}, "a size is 0; all must be positive"),
    ({"bm": 30}, "bm is 30 and rows 8"),
    ({"bm": 8}, "16 threads; a block has whole warps"),
    ({"bn": 40}, "bn is 40; it must be a multiple of the 16 threads that share a row"),
    ({"bd": 96}, "bd is 96; it must be a multiple of 32 that divides d = 128"),
    ({"bk": 24}, "bk is 24; it must be a multiple of 4 that divides bn = 64"),
    ({"d": 256}, "100352 bytes of shared memory; a block on sm_75 has 65536"),
])  # fmt: skip
def test_tiles_that_do_not_go_together(sizes, what):
    with pytest.raises(ValueError, match=what):
        Tiles(**{"d": 128} | sizes)


@pytest.mark.parametrize("sizes", [(30, 32), (32, 34), (32, 28)])
def test_a_window_of_whole_loads_and_rows_at_multiples_of_16_bytes(sizes):
    with pytest.raises(ValueError, match="columns are a multiple of the elements, the pitch a multiple of 4"):
        window("float32", 16, 32, 4, *sizes)


def test_every_plan_fits():
    for d in range(1, 257):
        for element, itemsize in (("float32", 4), ("bfloat16", 2)):
            vector = min(16, (d & -d) * itemsize)
            for m, arch in ((1, "75"), (16, "90a"), (17, "80"), (1000, "90a")):
                shape = Shape(element, 2, 6, 3, m, 100, d, vector=vector, arch=arch)
                tiles, (launch,) = tiles_for(shape), plan_simt(shape).launches
                assert launch.threads == launch.kernel.threads == 128
                assert d <= tiles.d < d + 32 and launch.grid == -(-m // tiles.bm) * 12
                assert tiles.vector in (vector, itemsize)
                assert launch.kernel.arch == "75" or arch == "90a"


def test_torch_in_torch_out(machine):
    torch = pytest.importorskip("torch")
    from flashnumba.stages.flash_forward.reference import dense

    where = "cuda" if machine == "cuda" else "cpu"
    q, k, v = (torch.randn(2, 5, 3, 8, dtype=torch.bfloat16, device=where).transpose(1, 2) for _ in range(3))
    o, lse = forward(q, k, v, plan_simt, causal=True, machine=machine)
    assert o.dtype == q.dtype and o.device == q.device and o.shape == q.shape
    assert lse.dtype == torch.float32
    expected, _ = dense(*(x.cpu().double().numpy() for x in (q, k, v)), None, True)
    torch.testing.assert_close(o.cpu().double(), torch.from_numpy(expected), atol=2e-2, rtol=2e-2)
