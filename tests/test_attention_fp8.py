"""attention() of 8-bit arrays: every backend, every kind of array and scale, and what does not fit."""

from __future__ import annotations

from importlib.util import find_spec

import ml_dtypes
import numpy as np
import pytest

from flashnumba import attention, fp8
from flashnumba.attention import KERNELS
from flashnumba.stages.flash_forward.reference import dense
from tests.stages.fp8.problems import made

BACKENDS = ("numpy", "emulator", *(name for name in KERNELS if name.startswith("fp8.")))


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    from flashnumba.machine import gpu

    monkeypatch.setattr(gpu, "unavailable", lambda: "there is none here")


def near(o, problem):
    exact, _ = problem.exact()
    assert np.abs(o.astype(np.float64) - exact).max() < 0.03 * np.abs(exact).max()


@pytest.mark.parametrize("backend", BACKENDS)
def test_backends(backend):
    problem = made(5, 70, 64, "e4m3", "block", heads=2, causal=True)
    o, lse = attention(
        *problem.codes.values(), **problem.scales, fmt="e4m3", causal=True, backend=backend, return_lse=True
    )
    assert o.dtype == ml_dtypes.bfloat16 and o.shape == (1, 2, 5, 64) and lse.dtype == np.float32
    near(o, problem)
    np.testing.assert_allclose(lse, problem.exact()[1], rtol=2e-2)


def test_arrays_that_say_their_format():
    problem = made(3, 40, 20, "e5m2", "tensor")
    q, k, v = (x.view(ml_dtypes.float8_e5m2)[0, 0] for x in problem.codes.values())
    near(attention(q, k, v, **problem.scales, backend="numpy"), problem)
    plain = attention(*(x.astype(np.float32) for x in (q, k, v)), backend="numpy")
    np.testing.assert_allclose(attention(q, k, v, backend="numpy").astype(np.float32), plain, rtol=2**-8)


def test_nothing_to_do():
    problem = made(0, 7, 64)
    for backend in ("numpy", "emulator"):
        o = attention(*problem.codes.values(), fmt="e4m3", backend=backend)
        assert o.shape == (1, 1, 0, 64) and o.dtype == ml_dtypes.bfloat16


def test_torch_tensors():
    torch = pytest.importorskip("torch")
    problem = made(5, 70, 64, "e4m3", "head", heads=2)
    given = [torch.from_numpy(x).view(torch.float8_e4m3fn) for x in problem.codes.values()]
    for scales in (problem.scales, {name: torch.from_numpy(x) for name, x in problem.scales.items()}):
        for backend in ("numpy", "fp8.emulated"):
            o = attention(*given, **scales, backend=backend)
            assert isinstance(o, torch.Tensor) and o.dtype == torch.bfloat16
            near(o.float().numpy(), problem)


@pytest.mark.parametrize("element", ["bfloat16", "float16", "float64", "float8_e5m2", "int32"])
def test_scales_of_any_element_are_numbers(element):
    """Elements that NumPy has not travel as integers of their bits, which scales must not."""
    q, twos = made(3, 40, 16).codes["q"], [np.full((1, 1), 2).astype(element)]
    if find_spec("torch"):
        import torch

        twos.append(torch.full((1, 1), 2.0).to(getattr(torch, element)))
    for scale in twos:
        o, lse = attention(q, q, q, fmt="e4m3", q_descale=scale, v_descale=scale, backend="numpy", return_lse=True)
        same = attention(q, q, q, fmt="e4m3", q_descale=2.0, v_descale=2.0, backend="numpy", return_lse=True)
        np.testing.assert_array_equal(o, same[0])
        np.testing.assert_array_equal(lse, same[1])


def test_scales_that_require_a_gradient():
    torch = pytest.importorskip("torch")
    problem = made(3, 7, 16)
    with pytest.raises(ValueError, match="v_descale requires a gradient, and this function records none"):
        attention(*problem.codes.values(), fmt="e4m3", v_descale=torch.ones((), requires_grad=True), backend="numpy")


@pytest.mark.parametrize("size", [0, 1e-36, 1e-20])
@pytest.mark.parametrize("backend", ["numpy", "fp8.k32", "fp8.emulated", "fp8.split"])
def test_a_block_of_next_to_nothing(backend, size):
    """Whatever quantize() makes of such blocks, O survives the way from one's units to another's."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 1, rows, 16)).astype(np.float32) for rows in (2, 130, 130))
    v[:, :, 64:128] *= size
    v *= np.float32(1e30) if size == 0 else 1
    codes, scales = zip(*(fp8.quantize(x, "e4m3", "block") for x in (q, k, v)), strict=True)
    descales = dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True))
    o = attention(*codes, **descales, fmt="e4m3", backend=backend).astype(np.float64)
    exact, _ = dense(*(fp8.dequantize(*one, "e4m3") for one in zip(codes, scales, strict=True)))
    assert np.abs(o - exact).max() < 0.05 * np.abs(exact).max()


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"fmt": None}, TypeError, "q has elements of type uint8; attention takes"),
        ({"fmt": None, "q_descale": 1.0}, TypeError, "q has elements of type uint8, and fmt is None; say fmt='e4m3'"),
        ({"fmt": "e3m4"}, ValueError, "fmt is 'e3m4'; it must be 'e4m3' or 'e5m2'"),
        ({"fmt": 8}, ValueError, "fmt is 8; it must be 'e4m3' or 'e5m2'"),
        ({"k": np.ones((1, 2, 70, 64), np.float16)}, TypeError, "k has elements of type float16; it must be float8"),
        ({"q_descale": float("nan")}, ValueError, "q_descale has nan in it; it must be finite and above 0"),
        ({"k_descale": 0}, ValueError, "k_descale has 0.0 in it; it must be finite and above 0"),
        ({"v_descale": np.ones((2, 2))}, ValueError, r"v_descale has shape \(2, 2\); it must be \(\) or"),
        ({"v_descale": "1"}, TypeError, "v_descale is '1'; it must be a number or an array of them"),
        ({"v_descale": object()}, TypeError, "v_descale is of type object; it must be a number or an array"),
        (
            {"backend": "flash_forward.mma"},
            ValueError,
            "backend is 'flash_forward.mma', which does not take",
        ),
        ({"v_descale": np.True_}, TypeError, "v_descale is np.True_; it must be a number or an array of them"),
        ({"v_descale": [True]}, TypeError, "v_descale has elements of type bool; it must be a number or an array"),
        ({"q_descale": np.ones((1, 2), complex)}, TypeError, "q_descale has elements of type complex128; it must be"),
        ({"q_descale": 1e-50}, ValueError, "q_descale has 1e-50 in it; it must be finite and above 0, as float32"),
        ({"q_descale": 1e39}, ValueError, r"q_descale has 1e\+39 in it; it must be finite and above 0, as float32"),
        ({"q_descale": 10**400}, TypeError, "q_descale is of type int; it must be a number or an array of them"),
        (
            {"v_descale": np.float32([[[1e-30, 1], [1, 1]]])},
            ValueError,
            r"v_descale has 1\..*e-30 and 1.0 in it, blocks of one head 2\^99.66 apart; they may be 2\^81",
        ),
        ({"scale": "1"}, TypeError, "scale is '1'; it must be a real number"),
        ({"backend": "fp8"}, ValueError, "backend is 'fp8'; it must be one of auto"),
    ],
)
def test_what_does_not_fit_is_named(change, error, said):
    problem = made(5, 70, 64, heads=2, kv_heads=2)
    with pytest.raises(error, match=said):
        attention(**{**problem.codes, "fmt": "e4m3", "backend": "numpy", **change})


def test_scales_and_kernels_are_for_8_bits():
    q = np.ones((3, 16), np.float16)
    with pytest.raises(TypeError, match="q has elements of type float16; it must be float8_e4m3fn or float8_e5m2"):
        attention(q, q, q, q_descale=2.0)
    for name in BACKENDS[2:]:
        with pytest.raises(ValueError, match="q is float16 with rows of 16; it must be float8_e4m3fn or float8_e5m2"):
            attention(q, q, q, backend=name)


def test_what_quantize_returns_is_what_attention_takes():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 100, 32)).astype(np.float32) for _ in range(3))
    plain = attention(q, k, v, backend="numpy")
    for scaling in ("tensor", "head", "block"):
        codes, scales = zip(*(fp8.quantize(x, "e4m3", scaling) for x in (q, k, v)), strict=True)
        o = attention(
            *codes, q_descale=scales[0], k_descale=scales[1], v_descale=scales[2], fmt="e4m3", backend="numpy"
        )
        assert np.sqrt(np.mean((o.astype(np.float32) - plain) ** 2)) < 0.015
