"""attention(): every library's arrays in and out, without a GPU too, and every backend gives the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from functools import partial

import ml_dtypes
import numpy as np
import pytest

import flashnumba
from flashnumba import NoGpuWarning, attention
from flashnumba.attention import KERNELS as ALL_KERNELS
from flashnumba.attention import planner
from flashnumba.compare import assert_close
from flashnumba.machine import gpu
from tests.stages.flash_forward.attention_cases import (
    DTYPES,
    INF,
    assert_attention,
    hard_cases,
    laid_out,
    names,
    normal,
)

room = sys.modules["flashnumba.attention"]
SMALL = np.ones((5, 8), np.float16)

KERNELS = [name for name in ALL_KERNELS if not name.startswith("fp8.")]
"""Those of 8 bits have tests of their own."""


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(gpu, "unavailable", lambda: "no CUDA driver is installed")
    monkeypatch.setattr(room, "_noticed", True)


def attend(case, backend="numpy", **options):
    return attention(
        case.q, case.k, case.v, causal=case.causal, scale=case.scale, return_lse=True, backend=backend, **options
    )


# -- in and out --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES, ids=names)
@pytest.mark.parametrize(("backend", "axes"), [("numpy", 2), ("numpy", 3), ("numpy", 4), ("emulator", 3)])
def test_numpy(backend, axes, dtype):
    case = normal(9, 20, 16, dtype, batch=2, heads=2, kv_heads=1, causal=True)
    at = (1, 1)[: 4 - axes]
    q, (k, v) = case.q[at], (x[(1, 0)[: 4 - axes]] for x in (case.k, case.v))
    o, lse = attention(q, k, v, causal=True, return_lse=True, backend=backend)
    assert type(o) is type(lse) is np.ndarray
    assert (o.dtype, o.shape, lse.dtype, lse.shape) == (q.dtype, q.shape, np.float32, q.shape[:-1])
    assert o.flags.c_contiguous and o.flags.writeable
    for got, expected, low in zip((o, lse), case.expected, case.lowprec, strict=True):
        assert_close(got, expected[at], low[at])
    if backend == "numpy":
        np.testing.assert_array_equal(attention(q, k, v, causal=True, backend=backend), o)


@pytest.mark.parametrize("dtype", DTYPES, ids=names)
def test_whatever_may_go_wrong(dtype):
    for case in hard_cases(dtype):
        assert_attention(attend(case), case)


def test_layouts_and_read_only_arrays():
    for case in laid_out(normal(12, 18, 6, np.float16, batch=2, heads=4, kv_heads=2, causal=True)):
        for x in (case.q, case.k, case.v):
            x.setflags(write=False)
        assert_attention(attend(case), case)


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (0, 4), (0, 3, 4)])
@pytest.mark.parametrize("backend", ["numpy", "emulator", "auto"])
def test_nothing_to_do(shape, backend, no_gpu):
    q = np.zeros(shape, np.float16)
    o, lse = attention(q, q, q, return_lse=True, backend=backend)
    assert (o.shape, o.dtype, lse.shape, lse.dtype) == (shape, np.float16, shape[:-1], np.float32)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", ["numpy", "emulator"])
def test_no_keys(causal, backend):
    o, lse = attend(normal(5, 0, 4, np.float16, causal=causal), backend)
    assert (o == 0).all() and (lse == -INF).all()


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("backend", ["numpy", "emulator"])
def test_torch(torch, backend, dtype):
    torch.manual_seed(0)
    dtype = getattr(torch, dtype)
    q, k, v = (torch.randn(1, heads, 11, 24, dtype=dtype) for heads in (2, 1, 1))
    o, lse = attention(q, k, v, causal=True, return_lse=True, backend=backend)
    assert type(o) is type(lse) is torch.Tensor
    assert (o.dtype, o.shape, lse.dtype, lse.shape) == (dtype, q.shape, torch.float32, q.shape[:-1])
    each = [x.double() for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*each, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(o.double(), expected, rtol=2**-7, atol=2**-8 if dtype != torch.float32 else 1e-5)
    if backend == "numpy":
        tokens_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
        torch.testing.assert_close(attention(*tokens_first, causal=True, backend=backend), o)


def test_torch_and_its_gradients(torch):
    q = torch.randn(3, 8)
    for name in ("q", "k", "v"):
        asked = {other: q.clone().requires_grad_(other == name) for other in ("q", "k", "v")}
        with pytest.raises(ValueError, match=rf"{name} requires a gradient.*pass {name}.detach\(\)"):
            attention(**asked, backend="numpy")
        with torch.no_grad():
            assert attention(**asked, backend="numpy").grad_fn is None
    with torch.inference_mode():
        assert attention(q, q, q, backend="numpy").shape == q.shape


def test_jax():
    jax = pytest.importorskip("jax")
    rng = np.random.default_rng(0)
    q, k, v = (jax.numpy.asarray(rng.standard_normal((2, 9, 8)), dtype=jax.numpy.bfloat16) for _ in range(3))
    for backend in ("numpy", "emulator"):
        o, lse = attention(q, k, v, return_lse=True, backend=backend)
        assert isinstance(o, jax.Array) and isinstance(lse, jax.Array)
        assert (o.dtype, o.shape, lse.shape) == (q.dtype, q.shape, q.shape[:-1])
        s = jax.numpy.einsum("hmd,hnd->hmn", q, k, preferred_element_type="float32") / 8**0.5
        expected = jax.numpy.einsum("hmn,hnd->hmd", jax.nn.softmax(s, axis=-1), v.astype("float32"))
        assert jax.numpy.allclose(o.astype("float32"), expected, atol=2e-2)
        assert jax.numpy.allclose(lse, jax.nn.logsumexp(s, axis=-1), atol=1e-5)


def test_jax_results_lie_where_q_lies():
    pytest.importorskip("jax")
    code = """
import jax
from flashnumba import attention
default, other = jax.devices()
for device in (default, other):
    q = jax.device_put(jax.numpy.ones((3, 8)), device)
    assert all(x.devices() == {device} for x in attention(q, q, q, return_lse=True, backend="numpy"))
"""
    asked = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **asked}, check=True)


class Exporter:
    """An array of no known library, with DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_dlpack_in_numpy_out():
    case = normal(5, 7, 4, np.float32)
    o, lse = attention(*map(Exporter, (case.q, case.k, case.v)), return_lse=True, backend="numpy")
    assert type(o) is np.ndarray
    assert_attention((o, lse), case)


# -- without a GPU -----------------------------------------------------------------------------------------------------
def noticed(*backends):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for backend in backends:
            attention(SMALL, SMALL, SMALL, backend=backend)
    return said


def test_it_is_said_once_that_there_is_no_gpu(no_gpu, monkeypatch):
    monkeypatch.setattr(room, "_noticed", False)
    assert noticed("numpy", "emulator") == []
    (said,) = noticed("auto", "auto", "numpy", "auto")
    assert said.category is NoGpuWarning is flashnumba.NoGpuWarning
    assert said.filename == __file__, "the caller's line"
    text = str(said.message)
    assert "no CUDA driver is installed" in text and "backend='numpy'" in text
    monkeypatch.setattr(room, "_noticed", False)
    with warnings.catch_warnings(record=True) as unheard:
        warnings.simplefilter("always")
        eval(re.search(r"warnings\.simplefilter\(.*?\)", text)[0])
        attention(SMALL, SMALL, SMALL)
    assert unheard == []


def test_without_a_gpu_auto_is_numpy(no_gpu, monkeypatch):
    case = normal(7, 9, 8, np.float32, causal=True)
    monkeypatch.setattr(room, "planner", lambda name: pytest.fail(f"{name} was launched"))
    for a, b in zip(attend(case, "auto"), attend(case, "numpy"), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_gpu_that_is_too_old_is_not_used_for_arrays_in_host_memory(fake_gpu, monkeypatch):
    monkeypatch.setattr(gpu, "device_arch", lambda device=None: "61")
    monkeypatch.setattr(room, "_noticed", False)
    (said,) = noticed("auto")
    assert "cuda:0 is sm_61" in str(said.message)
    assert not fake_gpu.launches


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_by_name_runs_on_the_emulator(name, no_gpu):
    case = normal(5, 9, 16, np.float16, heads=2, kv_heads=1, causal=True)
    assert_attention(attend(case, name), case)


def test_the_emulator_finds_faults_in_what_is_launched(no_gpu, monkeypatch):
    """It runs the real kernels, with all checks."""
    from flashnumba.machine.emulator import Fault
    from flashnumba.stages.flash_forward import mma, wgmma

    for module, name, broken in ((mma, "make_mma", "barrier"), (wgmma, "make_wgmma", "k_wait")):
        monkeypatch.setattr(module, name, partial(getattr(module, name), broken=broken))
    for d in (71, 72):  # the copy engine takes rows of 144 bytes
        with pytest.raises(Fault):
            attend(normal(20, 200, d, np.float16), "emulator")


# -- backends agree ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", ["numpy", *KERNELS])
def test_backends_agree(backend, no_gpu):
    """The fuzz has more of these."""
    for case in (
        normal(33, 70, 40, ml_dtypes.bfloat16, heads=2, kv_heads=1, causal=True),
        normal(20, 13, 24 if backend == "flash_forward.wgmma" else 17, np.float16, causal=True, scale=-0.4),
    ):
        assert_attention(attend(case, backend), case)


def test_the_emulator_runs_what_the_table_says(no_gpu, monkeypatch):
    asked, plan = [], planner
    monkeypatch.setattr(room, "planner", lambda name: asked.append(name) or plan(name))
    for case in (normal(1, 1024, 8, np.float16), normal(2, 3, 72, np.float16), normal(2, 3, 7, np.float16)):
        assert_attention(attend(case, "emulator"), case)
    assert asked == ["flash_forward.split", "flash_forward.wgmma", "flash_forward.mma"]


def test_importing_flashnumba_is_cheap():
    code = "import sys, flashnumba; print(*sorted({'numpy', 'numba', 'torch', 'cupy', 'jax'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
