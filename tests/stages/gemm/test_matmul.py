"""The product's host side: every array as it comes, every refusal before a launch, and the kernel that is chosen."""

import re

import ml_dtypes
import numpy as np
import pytest

from flashnumba.compare import assert_close
from flashnumba.data import load_minilm
from flashnumba.machine import gpu, launcher
from flashnumba.stages.gemm import matmul as host
from flashnumba.stages.gemm.matmul import KERNELS, PLANS, choose, matmul
from flashnumba.stages.gemm.problem import Shape
from flashnumba.stages.gemm.reference import low_precision, naive
from tests.stages.gemm.products import DTYPES, TAILS, matrix
from tests.stages.rowwise import Guarded

EVERY = (np.float32, *DTYPES)


def names(dtype):
    return np.dtype(dtype).name


def operands(m, n, k, dtype=np.float32, seed=0):
    return matrix(m, k, dtype, True, seed=2 * seed), matrix(k, n, dtype, True, seed=2 * seed + 1)


def assert_product(out, a, b, what=""):
    assert_close(out, naive(a, b), low_precision(a, b), what=what)


@pytest.fixture
def planned(monkeypatch):
    """The shapes that kernels are planned for, in a list."""
    seen = []
    for name, plan in PLANS.items():
        monkeypatch.setitem(PLANS, name, lambda shape, plan=plan: seen.append(shape) or plan(shape))
    return seen


@pytest.mark.parametrize("dtype", EVERY, ids=names)
@pytest.mark.parametrize("size", TAILS[1::2], ids=str)
def test_tails(machine, dtype, size):
    """Every one, by each kernel itself: the tests of the kernels."""
    a, b = operands(*size, dtype)
    out = Guarded(size[:2], dtype)
    assert matmul(a, b, out.array, machine=machine) is out.array
    assert_product(out.array, a, b)
    out.check()


@pytest.mark.parametrize("dtype", EVERY, ids=names)
def test_without_out_it_is_the_same_in_an_array_of_its_own(machine, dtype):
    a, b = operands(15, 31, 33, dtype)
    out, again = Guarded((15, 31), dtype), matmul(a, b, machine=machine)
    assert again.dtype == a.dtype and again.flags.c_contiguous
    np.testing.assert_array_equal(again, matmul(a, b, out.array, machine=machine))


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_by_name(machine, kernel):
    a, b = operands(24, 40, 16, np.float16)
    assert_product(matmul(a, b, kernel=kernel, machine=machine), a, b)


VIEWS = {
    "both packed along rows": (lambda x: x, ("k", "n")),
    "both packed along columns": (lambda x: np.asfortranarray(x), ("m", "k")),
    "rows with a gap": (lambda x: np.pad(x, ((0, 0), (0, 3)))[:, : x.shape[1]], ("k", "n")),
    "every second row": (lambda x: np.repeat(x, 2, 0)[::2], ("k", "n")),
    "every second column, copied": (lambda x: np.repeat(x, 2, 1)[:, ::2], ("k", "n")),
    "rows from the last to the first, copied": (lambda x: np.ascontiguousarray(x[::-1])[::-1], ("k", "n")),
    "columns from the last, copied": (lambda x: np.ascontiguousarray(x[:, ::-1])[:, ::-1], ("k", "n")),
    "a transposed part of a wide array": (
        lambda x: np.pad(x.T.copy(), ((0, 0), (2, 3)))[:, 2 : 2 + x.shape[0]].T,
        ("m", "k"),
    ),
    "read-only": (lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape), ("k", "n")),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("kernel", ["register_tile", "coalesced"])
def test_operands_of_any_strides(machine, planned, view, kernel):
    see, majors = VIEWS[view]
    a, b = operands(18, 21, 11)
    out = matmul(see(a), see(b), kernel=kernel, machine=machine)
    assert_product(out, a, b)
    assert (planned[-1].a_major, planned[-1].b_major) == majors


def test_a_broadcast_operand(machine):
    a, b = operands(1, 21, 11)
    wide = np.broadcast_to(a, (9, 11))
    assert_product(matmul(wide, b, machine=machine), wide, b)


@pytest.mark.parametrize(
    ("strides", "a_major"), [((30, 1), "k"), ((1, 20), "k"), ((60, 2), "k"), ((1, 18), "k")], ids=str
)
def test_results_of_any_strides(machine, planned, strides, a_major):
    a, b = operands(18, 21, 11)
    out = Guarded((18, 21), np.float32, strides)
    assert matmul(a, b, out.array, machine=machine) is out.array
    assert_product(out.array, a, b)
    out.check()
    turned = strides[0] == 1
    shape = planned[-1]
    assert (shape.m, shape.n) == ((21, 18) if turned else (18, 21))
    assert (shape.a_major, shape.b_major) == (("m", "k") if turned else ("k", "n"))


def test_a_result_turned_with_an_operand_copied(machine):
    a, b = operands(18, 21, 11)
    out = Guarded((18, 21), np.float32, (1, 18))
    matmul(np.repeat(a, 2, 1)[:, ::2], b, out.array, machine=machine)
    assert_product(out.array, a, b)


@pytest.mark.parametrize("size", [(1, 1, 1), (1, 30, 20), (30, 1, 20), (30, 20, 1), (1, 1, 40), (1, 40, 1)], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=names)
def test_axes_of_length_1(machine, planned, size, dtype):
    """Strides of an axis of length 1 mean nothing, and may be anything."""
    m, n, k = size
    a, b = operands(m, n, k, dtype)
    odd = [np.lib.stride_tricks.as_strided(x, x.shape, tuple(
        s if length > 1 else 6 for s, length in zip(x.strides, x.shape, strict=True)
    )) for x in (a, b)]  # fmt: skip
    for left, right in ((a, b), odd):
        assert_product(matmul(left, right, machine=machine), a, b)
    per_16 = 16 // a.itemsize
    shape = planned[-1]
    assert shape.lead_a % per_16 == 0 or (m > 1 and k > 1)


@pytest.mark.parametrize("size", [(0, 5, 3), (4, 0, 3), (0, 0, 0), (0, 5, 0)], ids=str)
def test_an_empty_result(machine, size):
    m, n, k = size
    assert matmul(np.zeros((m, k), np.float32), np.zeros((k, n), np.float32), machine=machine).shape == (m, n)


@pytest.mark.parametrize("dtype", EVERY, ids=names)
@pytest.mark.parametrize("strides", [None, (1, 4), (20, 2)], ids=str)
def test_an_empty_sum_is_zero(machine, dtype, strides):
    out = Guarded((4, 9), dtype, strides)
    matmul(np.zeros((4, 0), dtype), np.zeros((0, 9), dtype), out.array, machine=machine)
    np.testing.assert_array_equal(out.array.astype(np.float32), 0)
    out.check()


def test_real_data(machine):
    data = load_minilm()
    q, k, v = data.q[1, 5, :31], data.k[1, 5, :63], data.v[1, 5, :63]
    scores = matmul(q, k.T, machine=machine)
    assert_product(scores, q, k.T)
    weights = np.exp(scores.astype(np.float32) / np.sqrt(32))
    weights /= weights.sum(1, keepdims=True)
    assert_product(matmul(weights.astype(ml_dtypes.bfloat16), v.astype(ml_dtypes.bfloat16), machine=machine),
                   weights.astype(ml_dtypes.bfloat16), v.astype(ml_dtypes.bfloat16))  # fmt: skip


@pytest.mark.parametrize(
    ("element", "size", "arch", "name"),
    [
        ("float32", 4096, "90a", "register_tile"), ("float16", 4096, "90a", "wgmma"), ("float16", 64, "90a", "wgmma"),
        ("bfloat16", 4096, "90a", "wgmma"), ("float16", 4095, "90a", "mma"), ("float16", 4096, "80", "mma"),
        ("bfloat16", 4096, "100a", "mma"), ("float16", 4096, "75", "mma"), ("bfloat16", 4096, "75", "register_tile"),
    ],
)  # fmt: skip
def test_choice(element, size, arch, name):
    assert choose(Shape.packed(element, size, size, size, arch=arch)) == name


A, B = np.zeros((4, 6), np.float32), np.zeros((6, 5), np.float32)
LINE = np.zeros(100, np.float32)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ((A, B[:5]), ValueError, "b has shape (5, 5) and a (4, 6); b must have as many rows as a has columns"),
        ((A[0], B), ValueError, "a has shape (6,); it must have two axes: a [M, K], b [K, N]"),
        ((A, B[None]), ValueError, "b has shape (1, 6, 5); it must have two axes"),
        ((A, B.astype(np.float16)), TypeError, "b has elements of type float16 and a of float32; they must be"),
        ((A.astype(int), B), TypeError, "a has elements of type int64; matmul takes float16, bfloat16, float32"),
        ((A, B.astype(float)), TypeError, "b has elements of type float64; matmul takes float16, bfloat16, float32"),
        (([[1.0]], B), TypeError, "a is a list; it must be a NumPy, torch, CuPy, JAX or numba array"),
        ((A, B, A), ValueError, "out has shape (4, 6); the product of (4, 6) and (6, 5) is (4, 5)"),
        ((A, B, np.zeros((4, 5), np.float16)), TypeError, "out has elements of type float16; it must have those of a"),
        ((A, B, np.broadcast_to(np.float32(0), (4, 5))), ValueError, "out is read-only; it must be writable"),
        (
            (A, B, np.lib.stride_tricks.as_strided(LINE, (4, 5), (4, 4))), ValueError,
            "out has strides (4, 4), so several elements lie in one place; it must be a full array",
        ),
        (
            (LINE[:24].reshape(4, 6), B, LINE[20:40].reshape(4, 5)), ValueError,
            "out and a share memory; the product cannot be computed in place",
        ),
        ((A, LINE[:30].reshape(6, 5), LINE[:20].reshape(4, 5)), ValueError, "out and b share memory"),
        ((np.ma.zeros((4, 6), dtype=np.float32), B), TypeError, "a is a masked array"),
    ],
    ids=lambda v: v[:40] if isinstance(v, str) else "",
)  # fmt: skip
def test_bad_input_is_refused_before_a_launch(monkeypatch, arguments, kind, message):
    monkeypatch.setattr(launcher, "launch", lambda *args, **more: pytest.fail("it was launched"))
    with pytest.raises(kind, match=re.escape(message)):
        matmul(*arguments, machine="emulator")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": "cublas"}, "kernel is 'cublas'; it must be 'auto' or one of naive, coalesced, shared_tile"),
        ({"kernel": None}, "kernel is None; it must be 'auto' or one of"),
        ({"machine": "tpu"}, "machine is 'tpu'; it must be one of auto, cuda, emulator"),
        ({"kernel": "mma"}, "mma of float32 on sm_90a: it multiplies float16, and from sm_80 on bfloat16"),
        ({"kernel": "wgmma"}, "wgmma of float32 on sm_90a: it multiplies float16 and bfloat16 on sm_90a"),
    ],
)
def test_bad_options_are_refused(monkeypatch, options, message):
    monkeypatch.setattr(launcher, "launch", lambda *args, **more: pytest.fail("it was launched"))
    with pytest.raises(ValueError, match=re.escape(message)):
        matmul(A, B, **{"machine": "emulator", **options})


def test_what_wgmma_does_not_take_is_named():
    a, b = operands(24, 40, 17, np.float16)
    with pytest.raises(ValueError, match="vector_a is 2; wgmma's copy engine takes lines that start at"):
        matmul(a, b, kernel="wgmma", machine="emulator")


def test_an_array_too_long(monkeypatch):
    monkeypatch.setattr(host, "LONGEST", 5)
    with pytest.raises(ValueError, match=r"a has shape \(4, 6\); each axis must be at most 5 long"):
        matmul(A, B, machine="emulator")


def test_the_gpu_is_asked_for_and_there_is_none():
    if gpu.available():
        pytest.skip("there is one")
    with pytest.raises(RuntimeError):
        matmul(A, B, machine="cuda")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"element": "float8_e4m3fn"}, "element is 'float8_e4m3fn'; it must be one of float16, bfloat16, float32"),
        ({"a_major": "n"}, "a_major is 'n'; it must be one of k, m"),
        ({"b_major": "m"}, "b_major is 'm'; it must be one of n, k"),
        ({"k": 0}, "k is 0; it must be at least 1"),
        ({"lead_c": 0}, "lead_c is 0; it must be at least 1"),
        ({"vector_b": 2}, "vector_b is 2; for float32 it must be one of (16, 8, 4)"),
    ],
)
def test_a_shape_checks_itself(change, message):
    from dataclasses import replace

    with pytest.raises(ValueError, match=re.escape(message)):
        replace(Shape.packed("float32", 8, 8, 8), **change)


@pytest.mark.parametrize("majors", ["kn", "mk"])
@pytest.mark.parametrize("size", [(33, 7, 15), (8, 16, 24), (1, 1, 1), (1, 6, 12)], ids=str)
def test_a_packed_shape_is_that_of_packed_arrays(planned, majors, size):
    m, n, k = size
    a, b = operands(m, n, k, np.float16)
    a, b = (x if major == usual else np.asfortranarray(x) for x, major, usual in zip((a, b), majors, "kn", strict=True))
    aligned = [x.copy(order="K") for x in (a, b)]
    if any(x.ctypes.data % 16 for x in aligned):
        pytest.skip("the allocator did not align them")
    matmul(*aligned, machine="emulator")
    expected = Shape.packed("float16", m, n, k, *majors)
    if min(size) > 1:
        assert planned[-1] == expected
    assert planned[-1].flops == expected.flops == 2 * m * n * k


def test_torch_in_torch_out(machine):
    torch = pytest.importorskip("torch")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        a = torch.randn(31, 20, dtype=dtype, device="cuda" if machine == "cuda" else "cpu")
        b = torch.randn(33, 20, dtype=dtype, device=a.device)
        out = matmul(a, b.t(), machine=machine)
        assert out.dtype == a.dtype and out.device == a.device
        torch.testing.assert_close(out, (a.double() @ b.double().t()).to(dtype), rtol=2e-2, atol=1e-2)
        strided = torch.randn(20, 66, dtype=dtype, device=a.device)[:, ::2]
        torch.testing.assert_close(
            matmul(a, strided, machine=machine), (a.double() @ strided.double()).to(dtype), rtol=2e-2, atol=1e-2
        )
    with pytest.raises(ValueError, match="b requires a gradient, and this function records none"):
        matmul(a, b.t().clone().requires_grad_(), machine=machine)


def test_what_is_looked_at_each_time():
    assert host.RECIPES.key(A, B, None, "auto", "auto", None) is None
    torch = pytest.importorskip("torch")
    assert host.RECIPES.key(torch.zeros(2, 4), torch.zeros(4, 2), None, "auto", "auto", None) is None
