"""The three-pass kernels: right for every shape, layout and value, and wrong as soon as a step is left out."""

import ml_dtypes
import numpy as np
import pytest

from flashnumba.stages.rows import Shape
from flashnumba.stages.softmax import simt
from tests.stages.rowwise import COLS, DTYPES, Guarded, assert_softmax, caught, emulate, hard_rows, names, scores

KERNELS = simt.KERNELS


@pytest.mark.parametrize("kernel", KERNELS)
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
def test_any_alignment(machine, kernel, dtype, at):
    x = scores(3, 64, dtype)
    moved = Guarded(x.shape, dtype, at=at)
    moved.array[...] = x
    simt.softmax(moved.array, moved.array, kernel=kernel, machine=machine)
    assert_softmax(moved.array, x)
    moved.check()


def test_axes_that_are_no_rows_are_copied(machine):
    x = scores(6, 20, np.float32).reshape(2, 3, 20).transpose(1, 0, 2)
    assert_softmax(simt.softmax(x, machine=machine), x)
    out = np.full((2, 3, 20), np.nan, np.float32).transpose(1, 0, 2)
    assert simt.softmax(x, out, machine=machine) is out
    assert_softmax(out, x)
    backwards = x[::-1, :, ::-1]
    assert_softmax(simt.softmax(backwards, machine=machine), backwards)
    repeated = np.broadcast_to(x[:, :1], (3, 4, 20))
    assert_softmax(simt.softmax(repeated, machine=machine), repeated)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 5)])
@pytest.mark.parametrize("kernel", [*KERNELS, "auto"])
def test_empty(machine, kernel, shape):
    assert simt.softmax(np.zeros(shape, np.float16), kernel=kernel, machine=machine).shape == shape


def test_one_axis(machine):
    x = scores(1, 50, np.float32)[0]
    assert_softmax(simt.softmax(x, machine=machine), x)


@pytest.mark.parametrize("kernel", KERNELS)
def test_several_rows_a_warp_or_block(kernel):
    """A grid that is smaller than the work: the loop over rows, with its barriers, in several orders of threads."""
    x = scores(5, 72, np.float32)
    made, _, _ = simt.make(kernel, Shape("float32", 5, 72, 16))
    for seed in range(4):
        out = Guarded(x.shape, np.float32)
        emulate(made, 1, x, out.array, seed=seed)
        assert_softmax(out.array, x)
        out.check()


def test_bfloat16_rounds_the_same_in_integers():
    x = scores(4, 64, ml_dtypes.bfloat16)
    x[2, 5] = np.nan
    both = []
    for arch in ("75", "80"):
        for make, more in ((simt.make_warp_per_row, ()), (simt.make_vectorized, (16,)), (simt.make_vectorized, (2,))):
            made = make("bfloat16", 1 if make is simt.make_warp_per_row else 32, *more, arch=arch)
            out = np.zeros_like(x)
            emulate(made, 4, x, out)
            assert_softmax(out, x)
            both.append(out.view(np.uint16))
    for one, other in zip(both[:3], both[3:], strict=True):
        np.testing.assert_array_equal(one, other)


PLANTED = {
    "warp_per_row": (lambda broken: simt.make_warp_per_row("float32", 1, broken=broken), ("anchor", "lanes", "row")),
    "block_per_row": (
        lambda broken: simt.make_block_per_row("float32", 64, broken=broken),
        ("barrier", "sum", "column"),
    ),
    "vectorized": (lambda broken: simt.make_vectorized("float32", 64, broken=broken), ("barrier", "tail", "stride")),
}


@pytest.mark.parametrize(("kernel", "broken"), [(k, b) for k, (_, faults) in PLANTED.items() for b in faults])
def test_planted_faults_are_caught(kernel, broken):
    make, _ = PLANTED[kernel]
    x = scores(4, 300, np.float32) * 4 + 90
    x = np.pad(x, ((0, 0), (0, 20)))[:, :300] if broken == "stride" else x
    sound = Guarded(x.shape, x.dtype)
    emulate(make(""), 2, x, sound.array)
    assert_softmax(sound.array, x)
    assert caught(lambda out, seed: emulate(make(broken), 2, x, out, seed=seed), x)


def test_choice():
    shape = Shape("float16", 100, 4096, 16)
    assert simt.choose(shape) == "vectorized"
    assert simt.choose(Shape("float16", 100, 4096, 2)) == "block_per_row"
    assert simt.choose(Shape("float16", 100, 64, 16)) == "warp_per_row"


X = np.zeros((2, 3), np.float32)
READ_ONLY = np.zeros((2, 3), np.float32)
READ_ONLY.flags.writeable = False
WIDE = np.zeros((2, 6), np.float32)
ONE_ROW_TWICE = np.lib.stride_tricks.as_strided(WIDE, (2, 3), (0, 4))


@pytest.mark.parametrize(
    ("error", "said", "args"),
    [
        (TypeError, "x is a list; it must be a NumPy, torch", ([1.0],)),
        (TypeError, "x has elements of type int32; softmax takes float16, bfloat16, float32", (X.astype(np.int32),)),
        (TypeError, "x has elements of type float64", (X.astype(np.float64),)),
        (ValueError, "x has no axes", (np.zeros((), np.float32),)),
        (TypeError, "out is a int; it must be a NumPy, torch", (X, 3)),
        (TypeError, "out has elements of type float16; it must have those of x, float32", (X, X.astype(np.float16))),
        (ValueError, r"out has shape \(3, 2\); it must have that of x, \(2, 3\)", (X, X.reshape(3, 2))),
        (ValueError, "out is read-only", (X, READ_ONLY)),
        (ValueError, "several elements lie in one place", (X, ONE_ROW_TWICE)),
        (ValueError, "out overlaps x in part", (WIDE[:, :3], WIDE[:, 1:4])),
    ],
)
def test_bad_arrays(error, said, args):
    with pytest.raises(error, match=said):
        simt.softmax(*args, machine="emulator")


@pytest.mark.parametrize(
    ("error", "said", "options"),
    [
        (ValueError, "kernel is 'fast'; it must be 'auto' or one of warp_per_row, block_per_row", {"kernel": "fast"}),
        (ValueError, "machine is 'tpu'; it must be one of auto, cuda, emulator", {"machine": "tpu"}),
        (TypeError, "stream is a str", {"stream": "0"}),
    ],
)
def test_bad_options(error, said, options):
    with pytest.raises(error, match=said):
        simt.softmax(X, **{"machine": "emulator", **options})


def test_windows_of_one_array_do_not_overlap(machine):
    both = np.zeros((3, 16), np.float32)
    both[:, :8] = scores(3, 8, np.float32)
    simt.softmax(both[:, :8], both[:, 8:], machine=machine)
    assert_softmax(both[:, 8:], both[:, :8])


def test_a_read_only_input_is_left_alone(machine):
    x = scores(2, 33, np.float32)
    before = x.copy()
    x.flags.writeable = False
    assert_softmax(simt.softmax(x, machine=machine), before)
    np.testing.assert_array_equal(x, before)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_torch_in_torch_out(machine, dtype):
    torch = pytest.importorskip("torch")
    x = torch.randn(3, 50, dtype=getattr(torch, dtype), device="cuda" if machine == "cuda" else "cpu")
    out = simt.softmax(x, machine=machine)
    assert out.dtype == x.dtype and out.device == x.device
    torch.testing.assert_close(out, torch.softmax(x, -1))
    turned = x.t()
    torch.testing.assert_close(simt.softmax(turned, machine=machine), torch.softmax(turned, -1))
