"""attention_backward: what it takes and refuses, what it chooses, and that all of its ways agree."""

from __future__ import annotations

import warnings

import ml_dtypes
import numpy as np
import pytest

import flashnumba
from flashnumba import attention, attention_backward, gradients
from flashnumba.compare import assert_close
from flashnumba.stages.backward import reference
from flashnumba.stages.heads import Shape

NAMES = ("dq", "dk", "dv")


def made(dtype=np.float32, m=9, n=12, d=8, heads=4, kv_heads=2, batch=(2,), causal=False, scale=None):
    """Arguments by name, with what the forward gives."""
    rng = np.random.default_rng((m, n, d))
    q, do = (rng.standard_normal((*batch, heads, m, d)).astype(dtype) for _ in range(2))
    k, v = (rng.standard_normal((*batch, kv_heads, n, d)).astype(dtype) for _ in range(2))
    o, lse = attention(q, k, v, causal=causal, scale=scale, return_lse=True, backend="numpy")
    return {"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse}


def judge(got, given, causal=False, scale=None, dlse=None):
    do, q, k, v, o, lse = given.values()
    expected = reference.dense(q, k, v, do, scale, causal, dlse)
    low = reference.low_precision(q, k, v, o, do, lse, scale, causal, dlse)
    for name, a, b, c, like in zip(NAMES, got, expected, low, (q, k, v), strict=True):
        assert a.dtype == like.dtype and a.shape == like.shape
        assert_close(a, b, c, what=name)


@pytest.mark.parametrize(("backend", "causal"), [("numpy", False), ("numpy", True), ("emulator", True)])
def test_float32(backend, causal):
    given = made(causal=causal, m=4, heads=2, kv_heads=1, batch=(1,))
    dlse = np.random.default_rng(0).standard_normal(given["lse"].shape).astype(np.float32)
    judge(attention_backward(**given, causal=causal, dlse=dlse, backend=backend), given, causal, dlse=dlse)


@pytest.mark.parametrize(("backend", "dtype"), [
    ("numpy", np.float16), ("numpy", ml_dtypes.bfloat16), ("emulator", np.float16),
    ("backward.one_pass", ml_dtypes.bfloat16), ("backward.simt", np.float16),
])  # fmt: skip
def test_16_bits(backend, dtype):
    given = made(dtype, batch=(1,), heads=1, kv_heads=1, scale=-0.3, causal=True)
    judge(attention_backward(**given, causal=True, scale=-0.3, backend=backend), given, True, -0.3)


@pytest.mark.parametrize("axes", [2, 3])
def test_leading_axes_may_be_left_out(axes):
    given = made(np.float32, heads=1, kv_heads=1, batch=())
    given = {name: x[0] if axes == 2 else x for name, x in given.items()}
    judge(attention_backward(**given, backend="numpy"), given)


@pytest.mark.parametrize("shape", [{"m": 0}, {"n": 0}, {"batch": (0,)}, {"heads": 0, "kv_heads": 1}])
@pytest.mark.parametrize(("backend", "dtype"), [
    ("numpy", np.float16), ("emulator", np.float32), ("backward.one_pass", np.float16),
])  # fmt: skip
def test_nothing(shape, backend, dtype):
    given = made(dtype, **{"m": 2, "n": 2, "heads": 1, "kv_heads": 1, "batch": (1,)} | shape)
    for gradient, like in zip(attention_backward(**given, backend=backend), "qkv", strict=True):
        assert gradient.shape == given[like].shape and (gradient == 0).all()


def test_scores_of_1e5_on_the_cpu():
    q = np.float32([[320, 1]])
    k = np.stack([np.full(9, 320), np.arange(9) % 4], 1).astype(np.float32)
    v = np.random.default_rng(0).standard_normal((9, 2)).astype(np.float32)
    o, lse = attention(q, k, v, scale=1.0, return_lse=True, backend="numpy")
    do = np.float32([[1, -2]])
    got = attention_backward(do, q, k, v, o, lse, scale=1.0, backend="numpy")
    judge(got, {"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse}, scale=1.0)


@pytest.mark.parametrize(("dtype", "value"), [(np.float16, 6e4), (np.float32, np.inf)])
def test_what_is_too_large_is_infinite_or_no_number_and_no_warning(dtype, value):
    """As of a loss that was scaled too much: the caller looks for it in the results."""
    given = made(dtype)
    given["do"][...] = value * np.sign(given["do"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for gradient in attention_backward(**given, backend="numpy"):
            assert not np.isfinite(gradient).all()


def test_without_a_gpu_it_says_so_once(monkeypatch):
    from flashnumba.machine import gpu

    if gpu.available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(gradients, "_noticed", False)
    given = made()
    with pytest.warns(flashnumba.NoGpuWarning, match="attention_backward.. found no GPU"):
        first = attention_backward(**given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = attention_backward(**given)
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("element", "arch", "gpu", "backend"), [
    ("float32", "90a", True, "backward.simt"),
    ("float16", "75", True, "backward.mma"),
    ("bfloat16", "75", True, "backward.simt"),
    ("bfloat16", "90a", True, "backward.mma"),
    ("float16", "90a", False, "numpy"),
])  # fmt: skip
def test_the_table(element, arch, gpu, backend):
    assert gradients.choose(Shape(element, 1, 1, 1, 8, 8, 32, arch=arch), gpu).backend == backend


WRONG = {
    "do of another shape": ({"do": np.ones((2, 4, 9, 7), np.float32)}, ValueError, r"do has shape .*, 7\) and q"),
    "o of another type": ({"o": np.ones((2, 4, 9, 8), np.float16)}, TypeError, "o has elements of type float16"),
    "lse of another type": ({"lse": np.ones((2, 4, 9))}, TypeError, "lse has elements of type float64"),
    "lse with an axis more": ({"lse": np.ones((2, 4, 9, 1), np.float32)}, ValueError, "lse has shape"),
    "dlse of another shape": ({"dlse": np.ones((2, 4, 8), np.float32)}, ValueError, r"dlse has shape \(2, 4, 8\)"),
    "no array": ({"do": [1.0]}, TypeError, "do"),
    "k of other columns": ({"k": np.ones((2, 2, 12, 9), np.float32)}, ValueError, "has shape"),
    "causal": ({"causal": 1}, TypeError, "causal is 1"),
    "scale": ({"scale": np.inf}, ValueError, "scale is inf"),
    "backend": ({"backend": "cuda"}, ValueError, "backend is 'cuda'; it must be one of auto"),
    "float32 on tensor cores": ({"backend": "backward.mma"}, ValueError, "q is float32"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_it_refuses(what):
    change, error, words = WRONG[what]
    with pytest.raises(error, match=words):
        attention_backward(**(made() | {"backend": "numpy"} | change))


def test_torch_in_torch_out():
    torch = pytest.importorskip("torch")
    q, k, v, do = (torch.randn(2, 5, 3, 8, dtype=torch.bfloat16).transpose(1, 2) for _ in range(4))
    o, lse = attention(q, k, v, causal=True, return_lse=True, backend="numpy")
    got = attention_backward(do, q, k, v, o, lse, causal=True, backend="numpy")
    expected = reference.dense(*(x.double().numpy() for x in (q, k, v, do)), None, True)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == torch.bfloat16
        torch.testing.assert_close(a.double(), torch.from_numpy(b), atol=5e-2, rtol=5e-2)
    with pytest.raises(ValueError, match="q requires a gradient"):
        attention_backward(do, q.requires_grad_(), k, v, o, lse, backend="numpy")
