"""sla_attention: NumPy and kernels agree, and what does not fit is refused before anything runs."""

from __future__ import annotations

import numpy as np
import pytest

from flashnumba.compare import assert_close
from flashnumba.sparse.sla import SlaInfo, sla_attention, sla_attention_backward
from flashnumba.stages.sparsity import sla_reference as reference
from flashnumba.stages.sparsity.sla_low_precision import low_precision
from tests.stages.sparsity import sla_gather


def made(m=192, n=192, d=64, dtype=np.float16, lead=(1, 2), kv_heads=None):
    rng, few = np.random.default_rng(0), lead if kv_heads is None else (*lead[:-1], kv_heads)
    return [rng.standard_normal((*axes, rows, d)).astype(dtype) for axes, rows in ((lead, m), (few, n), (few, n))]


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_numpy_is_the_reference_and_keeps_what_gradients_need(kv_heads):
    q, k, v = made(d=20, dtype=np.float32, kv_heads=kv_heads)
    proj = np.random.default_rng(1).standard_normal((20, 20)).astype(np.float32)
    o, info = sla_attention(q, k, v, proj=proj, critical=0.3, negligible=0.34, return_info=True, backend="numpy")
    classes = reference.classify(q, k, 0.3, 0.34)
    assert np.array_equal(info.tile_map, classes)
    assert info.shares() == pytest.approx({"critical": 1 / 3, "marginal": 1 / 3, "negligible": 1 / 3}, abs=1e-6)
    assert_close(o, reference.attend(q, k, v, classes, proj).o)
    do = np.random.default_rng(2).standard_normal(q.shape).astype(np.float32)
    found = sla_attention_backward(do, info)
    for got, exact in zip(found, reference.gradients(do, q, k, v, classes, proj), strict=True):
        assert_close(got, exact)


def test_kernels_on_the_emulator(monkeypatch):
    """Of arrays whose columns lie apart, and of a head dimension that is no multiple of 8."""
    sla_gather.use(monkeypatch)
    q, k, v = (np.asfortranarray(x) for x in made(128, 128, d=44, lead=()))
    o, info = sla_attention(q, k, v, critical=0.5, negligible=0, return_info=True, backend="emulator")
    classes = np.asarray(info.tile_map)[0, 0]
    assert sorted(classes.ravel()) == [0, 0, 1, 1]
    low, _ = low_precision(q, k, v, classes)
    assert_close(o, reference.attend(q, k, v, classes).o, low.o)


@pytest.mark.parametrize(("given", "error", "words"), [
    ({"critical": 1.5}, ValueError, "critical is 1.5; it must be from 0 to 1"),
    ({"negligible": "x"}, TypeError, "negligible is 'x'"),
    ({"feature_map": "gelu"}, ValueError, "feature_map is 'gelu'; it must be one of softmax, elu, relu"),
    ({"form": "SLA-1"}, ValueError, "form is 'SLA-1'"),
    ({"eps": -1.0}, ValueError, "eps is -1.0"),
    ({"scale": -0.5}, ValueError, "scale is -0.5"),
    ({"backend": "cuda"}, ValueError, "backend is 'cuda'"),
    ({"return_info": 1}, TypeError, "return_info is 1"),
    ({"causal": 1}, TypeError, "causal is 1"),
    ({"proj": np.ones((64, 32), np.float16)}, ValueError, r"proj has shape \(64, 32\)"),
    ({"proj": np.ones((64, 64), np.float32)}, TypeError, "proj has elements of type float32"),
    ({name: np.ones((1, 3, 192, 64), np.float16) for name in "kv"}, ValueError, "must divide that of q"),
    ({name: np.ones((1, 2, 192, 129), np.float16) for name in "qkv"}, ValueError, "head dimension of 1 to 128"),
    ({name: np.ones((1, 2, 192, 64), np.float32) for name in "qkv"}, TypeError, "float16 and bfloat16"),
    ({"q": np.ones((1, 2, 0, 64), np.float16)}, ValueError, "at least one row"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(given, error, words):
    q, k, v = made()
    arguments = {"q": q, "k": k, "v": v, "backend": "emulator"} | given
    with pytest.raises(error, match=words):
        sla_attention(**arguments)


def test_gradients_refuse_what_is_no_gradient_of_o():
    q, k, v = made()
    _, info = sla_attention(q, k, v, return_info=True, backend="numpy")
    with pytest.raises(ValueError, match="do has shape"):
        sla_attention_backward(q[:, :1], info)
    with pytest.raises(TypeError, match="do has elements of type float32"):
        sla_attention_backward(q.astype(np.float32), info)
    with pytest.raises(TypeError, match="info is SlaInfo"):
        sla_attention_backward(q, SlaInfo(info.tile_map, (64, 64)))
