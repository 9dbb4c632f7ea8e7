"""The online kernels: right for every shape, layout and value, repeatable to the bit, wrong once a step is left out."""

import numpy as np
import pytest

from flashnumba.machine.emulator import Deadlock
from flashnumba.machine.instructions import ordered
from flashnumba.stages.online_softmax import simt
from flashnumba.stages.rows import Shape
from tests.stages.rowwise import COLS, DTYPES, Guarded, assert_softmax, caught, emulate, hard_rows, names, scores

KERNELS = tuple(name for name in simt.KERNELS if name != "split_ahead")
"""Those that take every row; split_ahead has its own tests."""


def split(element="float32", threads=32, vectors=1, **more):
    """A split kernel with small chunks: 128 float32."""
    return simt.make_split(element, threads, vectors, **more)


def run_split(kernel, x, out, chunks, blocks, seed=0):
    emulate(kernel, blocks, x, out, np.zeros(1 + len(x) * chunks, np.uint64), seed=seed)


@pytest.mark.parametrize("kernel", [*KERNELS, "auto"])
@pytest.mark.parametrize("dtype", DTYPES, ids=names)
@pytest.mark.parametrize("cols", COLS)
def test_every_length(machine, kernel, dtype, cols):
    x = scores(3 if cols < 1000 else 2, cols, dtype)
    out = Guarded(x.shape, dtype)
    assert simt.softmax(x, out.array, kernel=kernel, machine=machine) is out.array
    assert_softmax(out.array, x)
    out.check()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=names)
@pytest.mark.parametrize("cols", [5, 64])
def test_hard_rows(machine, kernel, dtype, cols):
    x = hard_rows(cols, dtype)
    out = simt.softmax(x, kernel=kernel, machine=machine)
    assert out.dtype == x.dtype
    assert_softmax(out, x)
    assert (out[1] == 0).all()
    assert np.isnan(out[3:6].astype(np.float32)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=names)
def test_hard_rows_over_warps_and_blocks(dtype):
    """Whole warps and whole blocks without a finite score; maxima that come late."""
    x = hard_rows(1024, dtype)
    elements = 16 // x.dtype.itemsize
    wide = simt.make_one_pass(names(dtype), 64, 1024 // (64 * elements), 1)
    out = Guarded(x.shape, dtype)
    emulate(wide, 3, x, out.array)
    assert_softmax(out.array, x)
    out = Guarded(x.shape, dtype)
    chunks = 1024 // (32 * elements)
    run_split(split(names(dtype), exact=True), x, out.array, chunks, blocks=chunks + 1)
    assert_softmax(out.array, x)


@pytest.mark.parametrize("kernel", [*KERNELS, "auto"])
@pytest.mark.parametrize(
    ("shape", "strides"),
    [((4, 40), (48, 1)), ((4, 40), (1, 5)), ((4, 40), (100, 2)), ((40, 8), (1, 40)), ((1, 24), (0, 1))],
)
def test_strides_of_the_output_and_of_the_input(machine, kernel, shape, strides):
    x = scores(*shape, np.float32)
    strided = Guarded(shape, np.float32, strides)
    simt.softmax(x, strided.array, kernel=kernel, machine=machine)
    assert_softmax(strided.array, x, "output strided")
    strided.check()
    strided.array[...] = x
    assert_softmax(simt.softmax(strided.array, kernel=kernel, machine=machine), x, "input strided")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=names)
@pytest.mark.parametrize("at", [0, 1, 2, 4])
def test_in_place_at_any_alignment(machine, kernel, dtype, at):
    x = scores(3, 64, dtype)
    moved = Guarded(x.shape, dtype, at=at)
    moved.array[...] = x
    simt.softmax(moved.array, moved.array, kernel=kernel, machine=machine)
    assert_softmax(moved.array, x)
    moved.check()


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 5)])
@pytest.mark.parametrize("kernel", [*KERNELS, "auto"])
def test_empty(machine, kernel, shape):
    assert simt.softmax(np.zeros(shape, np.float16), kernel=kernel, machine=machine).shape == shape


@pytest.mark.parametrize(
    ("group", "vectors", "rows", "at_once"),
    [(4, 2, 8, 1), (8, 1, 8, 4), (16, 1, 4, 2), (32, 1, 1, 4), (32, 1, 2, 1), (64, 1, 1, 1), (128, 1, 1, 1)],
)
def test_one_pass_of_every_make(group, vectors, rows, at_once):
    """Groups of lanes, several rows at once, and more rows than a grid of one block takes at a time."""
    x = scores(11, 32, np.float32)
    made = simt.make_one_pass("float32", group, vectors, rows, rows_at_once=at_once, exact=group * vectors == 8)
    for seed in range(3):
        out = Guarded(x.shape, np.float32)
        emulate(made, 1, x, out.array, seed=seed)
        assert_softmax(out.array, x)
        out.check()


@pytest.mark.parametrize("hint", ["plain", "once", "stream"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("arch", ["75", "80"])
def test_hints_and_architectures_change_no_bit(hint, recompute, arch):
    x = scores(4, 256, np.float16)
    outs = []
    for made in (
        simt.make_one_pass("float16", 32, 1, 1),
        simt.make_one_pass("float16", 32, 1, 1, hint=hint, recompute=recompute, arch=arch),
    ):
        outs.append(np.full_like(x, np.nan))
        emulate(made, 2, x, outs[-1])
    assert_softmax(outs[0], x)
    np.testing.assert_array_equal(*outs)


@pytest.mark.parametrize("draws", [True, False])
@pytest.mark.parametrize(("cols", "chunks"), [(128, 1), (129, 2), (500, 4), (640, 5)])
def test_split_into_small_chunks(draws, cols, chunks):
    x = scores(4, cols, np.float32)
    made = split(nbytes=16 if cols % 4 == 0 else 4, vectors=1 if cols % 4 == 0 else 4, draws=draws)
    results = []
    for seed, blocks in ((0, chunks), (1, chunks + 2), (2, 4 * chunks), (3, chunks)):
        out = Guarded(x.shape, np.float32)
        run_split(made, x, out.array, chunks, blocks, seed)
        assert_softmax(out.array, x)
        out.check()
        results.append(out.array.copy())
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0], "bitwise repeatable, whoever comes first")


def test_split_merges_more_chunks_than_a_warp_has_lanes():
    x = scores(1, 32 * 40, np.float32)
    out = Guarded(x.shape, np.float32)
    run_split(split(nbytes=4), x, out.array, 40, 40)
    assert_softmax(out.array, x)


def test_a_long_row_is_split(machine):
    x = scores(2, 20_000, np.float16)
    rows = []
    original = simt.run

    def spy(prepared, plan):
        rows.append(plan)
        return original(prepared, plan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simt, "run", spy)
        assert_softmax(simt.softmax(x, kernel="split", machine=machine), x)
    assert rows[0].chunks == 3 if machine == "cuda" else rows[0].chunks > 1


def test_waiting_for_what_nobody_publishes_is_a_deadlock(monkeypatch):
    monkeypatch.setattr(ordered, "PATIENCE", 5000)
    x = scores(2, 256, np.float32)
    with pytest.raises(Deadlock, match="waits for a change of the 8 bytes at global address"):
        run_split(split(broken="publish"), x, np.zeros_like(x), 2, 2)


def one(broken):
    return simt.make_one_pass("float32", 32, 3, 1, broken=broken)


def wide(broken):
    return simt.make_one_pass("float32", 64, 2, 1, broken=broken)


def two(broken):
    return simt.make_two_pass("float32", 64, 16, 2, broken=broken)


PLANTED = {
    one: ("lanes", "tail", "stride"),
    wide: ("barrier", "buffers", "rescale", "tail", "stride"),
    two: ("barrier", "buffers", "rescale", "recurrence", "tail", "stride"),
}


@pytest.mark.parametrize(("make", "broken"), [(make, b) for make, faults in PLANTED.items() for b in faults])
def test_planted_faults_are_caught(make, broken):
    x = scores(6, 300, np.float32)
    x = np.pad(x, ((0, 0), (0, 20)))[:, :300] if broken == "stride" else x
    sound = Guarded(x.shape, x.dtype)
    emulate(make(""), 2, x, sound.array)
    assert_softmax(sound.array, x)
    assert caught(lambda out, seed: emulate(make(broken), 2, x, out, seed=seed), x)


@pytest.mark.parametrize("broken", ["publish", "wait", "rescale", "tail", "barrier", "stride", "early"])
def test_planted_faults_of_split_are_caught(broken, monkeypatch):
    monkeypatch.setattr(ordered, "PATIENCE", 5000)
    x = scores(6, 300, np.float32)
    x = np.pad(x, ((0, 0), (0, 20)))[:, :300] if broken == "stride" else x
    sound = Guarded(x.shape, x.dtype)
    run_split(split(threads=64), x, sound.array, 2, 3)
    assert_softmax(sound.array, x)
    assert caught(lambda out, seed: run_split(split(threads=64, broken=broken), x, out, 2, 3, seed), x)


def test_sizes_that_do_not_go_together():
    with pytest.raises(ValueError, match="64 threads a row are a block, which has one row, not 2"):
        simt.make_one_pass("float32", 64, 1, 2)
    with pytest.raises(ValueError, match="1 rows of 8 threads; a block has whole warps"):
        simt.make_one_pass("float32", 8, 1, 1)
    with pytest.raises(ValueError, match="vectors of 2 bytes of float32; the widths are 16, 8, 4 and 4"):
        simt.make_two_pass("float32", 64, 2)
    with pytest.raises(ValueError, match="one_pass holds rows of up to 131072 bytes"):
        simt.softmax(np.zeros((1, 40_000), np.float32), kernel="one_pass", machine="emulator")


@pytest.mark.parametrize(
    ("cols", "element", "vector", "rows", "name"),
    [
        (128, "float16", 16, 1000, "one_pass"), (32768, "float32", 16, 1000, "one_pass"),
        (32772, "float32", 16, 1000, "split_ahead"), (65536, "float16", 16, 1000, "one_pass"),
        (65536, "float16", 2, 1000, "split"), (262144, "float16", 16, 1000, "split_ahead"),
        (32768, "float32", 16, 8, "split"), (4096, "float32", 16, 8, "one_pass"),
    ],
)  # fmt: skip
def test_choice(cols, element, vector, rows, name):
    assert simt.choose(Shape(element, rows, cols, vector)) == name


@pytest.mark.parametrize("element", ["float16", "bfloat16", "float32"])
def test_every_plan_covers_its_row(element):
    itemsize = 4 if element == "float32" else 2
    for cols in [*range(1, 70), 127, 128, 1000, 1023, 1024, 4096, 5000, 32768, 50_000, 262_144, 1 << 20]:
        for vector in (16, 8, 4, 2):
            if vector < itemsize or cols * itemsize % vector:
                continue
            for rows in (1, 5, 10_000):
                shape = Shape(element, rows, cols, vector)
                for name in {"two_pass", "split", simt.choose(shape)}:
                    plan = simt.PLANS[name](shape)
                    assert plan.threads == plan.kernel.threads and plan.threads % 32 == 0
                    if name == "one_pass":
                        assert plan.blocks <= rows
                        assert plan.kernel.min_blocks * plan.threads <= 1024


def test_torch_in_torch_out(machine):
    torch = pytest.importorskip("torch")
    x = torch.randn(3, 5000, dtype=torch.bfloat16, device="cuda" if machine == "cuda" else "cpu")
    for kernel in KERNELS:
        out = simt.softmax(x, kernel=kernel, machine=machine)
        assert out.dtype == x.dtype and out.device == x.device
        torch.testing.assert_close(out, torch.softmax(x, -1))
