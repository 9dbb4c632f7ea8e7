"""What attention() refuses: every bad argument by name, before anything runs."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from flashnumba import attention
from tests.machine.fakes import Tensor
from tests.stages.flash_forward.attention_cases import INF, NAN, assert_attention, normal

F16 = np.ones((2, 4, 5, 8), np.float16)


def with_heads(n, dtype=np.float16):
    return np.ones((2, n, 5, 8), dtype)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"q": [1.0]}, TypeError, "q is a list; it must be a NumPy, torch, CuPy, JAX or numba array"),
        ({"k": None}, TypeError, "k is a NoneType; it must be"),
        ({"v": 3.0}, TypeError, "v is a float; it must be"),
        ({"q": F16.astype(np.float64)}, TypeError, "q has elements of type float64; attention takes float16, bfloat16"),
        ({"k": F16.astype(np.int32)}, TypeError, "k has elements of type int32; attention takes"),
        ({"v": F16.astype(complex)}, TypeError, "v has elements of type complex128"),
        ({"v": F16.astype(ml_dtypes.float8_e4m3fn)}, TypeError, "v has elements of type float8_e4m3fn; attention"),
        ({"k": F16.astype(np.float32)}, TypeError, "k has elements of type float32 and q of float16; they must be"),
        ({"v": F16.astype(ml_dtypes.bfloat16)}, TypeError, "v has elements of type bfloat16 and q of float16"),
        ({"q": F16.byteswap().view(F16.dtype.newbyteorder())}, TypeError, "q is byte-swapped"),
        ({"k": np.ma.masked_array(F16)}, TypeError, "k is a masked array; a kernel sees no masks"),
        ({"q": F16[0, 0, 0]}, ValueError, r"q has shape \(8,\); it must have 2 to 4 axes"),
        ({"q": F16[None]}, ValueError, r"q has shape \(1, 2, 4, 5, 8\); it must have 2 to 4 axes"),
        ({"k": F16[0]}, ValueError, r"k has shape \(4, 5, 8\) and q \(2, 4, 5, 8\); they must have the same number"),
        ({"v": F16[:, :, :4]}, ValueError, r"v has shape \(2, 4, 4, 8\) and k \(2, 4, 5, 8\); they must be the same"),
        ({"k": F16[:1], "v": F16[:1]}, ValueError, "the first axis, the batch, must be the same"),
        ({"k": F16[..., :7], "v": F16[..., :7]}, ValueError, r"k has shape \(2, 4, 5, 7\) and q .* head dimension"),
        ({"k": with_heads(3), "v": with_heads(3)}, ValueError, "q has 4 heads and k has 3; .* must divide"),
        ({"k": with_heads(0), "v": with_heads(0)}, ValueError, "q has 4 heads and k has 0; .* must divide"),
        ({"k": with_heads(8), "v": with_heads(8)}, ValueError, "q has 4 heads and k has 8; .* must divide"),
        (dict.fromkeys("qkv", np.ones((3, 257), np.float16)), ValueError, r"q has shape \(3, 257\).* 1 to 256"),
        (dict.fromkeys("qkv", np.ones((3, 0), np.float16)), ValueError, r"q has shape \(3, 0\); .* 1 to 256"),
        ({"causal": 1}, TypeError, "causal is 1; it must be True or False"),
        ({"causal": None}, TypeError, "causal is None; it must be True or False"),
        ({"scale": "1"}, TypeError, "scale is '1'; it must be a real number"),
        ({"scale": True}, TypeError, "scale is True; it must be a real number"),
        ({"scale": np.timedelta64(1)}, TypeError, r"scale is np\.timedelta64\(1\); it must be a real number"),
        ({"scale": 10**400}, ValueError, "scale is of type int and beyond float64; it must be a finite number"),
        ({"scale": -(10**5000)}, ValueError, "scale is of type int and beyond float64; it must be a finite number"),
        ({"scale": Fraction(10**400)}, ValueError, "scale is of type Fraction and beyond float64"),
        ({"scale": 1j}, TypeError, "scale is 1j; it must be a real number"),
        ({"scale": NAN}, ValueError, "scale is nan; it must be a finite number"),
        ({"scale": -INF}, ValueError, "scale is -inf; it must be a finite number"),
        ({"scale": 1e39}, ValueError, "scale is 1e\\+39; it must be a finite number"),
        ({"return_lse": 1}, TypeError, "return_lse is 1; it must be True or False"),
        ({"return_lse": "yes"}, TypeError, "return_lse is 'yes'"),
        ({"backend": "cuda"}, ValueError, "backend is 'cuda'; it must be one of auto, flash_forward.simt"),
        ({"backend": "simt"}, ValueError, "backend is 'simt'; it must be one of auto, flash_forward.simt"),
        ({"backend": None}, ValueError, "backend is None; it must be one of auto"),
        ({"backend": 0}, ValueError, "backend is 0; it must be one of auto"),
    ],
)
@pytest.mark.parametrize("backend", ["numpy", "emulator"])
def test_bad_input_is_named_before_anything_runs(change, error, said, backend, monkeypatch):
    monkeypatch.setattr("flashnumba.stages.heads.empty_like_kind", lambda *args: pytest.fail("something was allocated"))
    with pytest.raises(error, match=said):
        attention(**{"q": F16, "k": F16, "v": F16, "backend": backend, **change})


def test_a_kernel_that_does_not_take_the_input_says_which_does():
    q = np.ones((3, 8), np.float32)
    for name in ("flash_forward.mma", "flash_forward.split"):
        with pytest.raises(ValueError, match=r"q is float32; .* use flash_forward\.simt"):
            attention(q, q, q, backend=name)


@pytest.mark.parametrize("scale", [np.float32(0.5), np.float64(0.5), np.int64(1), 1, 0, -2.5])
@pytest.mark.parametrize("causal", [True, np.bool_(True)])
def test_numbers_of_any_type(scale, causal):
    case = normal(4, 6, 8, np.float32, scale=float(scale), causal=True)
    o, lse = attention(case.q, case.k, case.v, scale=scale, causal=causal, return_lse=np.True_, backend="numpy")
    assert_attention((o, lse), case)


def test_options_are_given_by_name():
    with pytest.raises(TypeError, match="positional"):
        attention(F16, F16, F16, True)


def test_arrays_that_lie_apart(fake_gpu, fake_torch):
    here, there, elsewhere = F16, *(Tensor(4096, "torch.float16", F16.shape, device=d) for d in (0, 1))
    for given, said in (
        ((here, there, there), "k is on cuda:0 and q in host memory; they must be in one place"),
        ((there, there, here), "v is in host memory and q on cuda:0"),
        ((there, elsewhere, there), "k is on cuda:1 and q on cuda:0"),
    ):
        with pytest.raises(ValueError, match=said):
            attention(*given)
    for backend in ("numpy", "emulator"):
        with pytest.raises(ValueError, match=f"v is on cuda:0 and backend is '{backend}', which takes arrays in host"):
            attention(here, here, there, backend=backend)
    assert not fake_gpu.launches and not fake_torch.made
