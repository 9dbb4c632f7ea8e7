"""attention(): every library's arrays in and out, every bad argument named, the table of choices, the second call."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from importlib.util import find_spec

import ml_dtypes
import numpy as np
import pytest

import flashnumba
from flashnumba import NoGpuWarning, attention
from flashnumba.attention import BACKENDS, CHOICES, KERNELS, choose, planner
from flashnumba.compare import assert_close
from flashnumba.machine import gpu
from flashnumba.stages.heads import Shape
from flashnumba.tiles.elements import ITEMSIZE
from tests.machine.fakes import Tensor
from tests.stages.flash_forward.attention_cases import (
    DTYPES,
    INF,
    NAN,
    Case,
    assert_attention,
    hard_cases,
    laid_out,
    names,
    normal,
)

room = sys.modules["flashnumba.attention"]
THERE = [name for name, file in KERNELS.items() if find_spec(f"flashnumba.stages.flash_forward.{file}")]


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
    if backend == "emulator" and dtype is np.float32 and "flash_forward.simt" not in THERE:
        pytest.skip("no kernel for float32")
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
    if backend == "emulator" and dtype == "float32" and "flash_forward.simt" not in THERE:
        pytest.skip("no kernel for float32")
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


# -- bad input ---------------------------------------------------------------------------------------------------------
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


# -- without a GPU -----------------------------------------------------------------------------------------------------
def noticed(*backends):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for backend in backends:
            attention(F16[0, 0], F16[0, 0], F16[0, 0], backend=backend)
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
        attention(F16, F16, F16)
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


@pytest.mark.parametrize("name", THERE)
def test_a_kernel_by_name_runs_on_the_emulator(name, no_gpu):
    case = normal(5, 9, 16, np.float16, heads=2, kv_heads=1, causal=True)
    assert_attention(attend(case, name), case)


def test_the_emulator_finds_faults_in_what_is_launched(no_gpu, monkeypatch):
    """It runs the real kernels, with all checks."""
    from flashnumba.machine.emulator import Fault
    from flashnumba.stages.flash_forward import mma

    make = mma.make_mma
    monkeypatch.setattr(mma, "make_mma", lambda *args, **options: make(*args, **options, broken="barrier"))
    with pytest.raises(Fault):
        attend(normal(70, 200, 32, np.float16), "emulator")


# -- the table ---------------------------------------------------------------------------------------------------------
def shape(element="float16", m=4096, n=4096, arch="90a", **sizes):
    sizes = {"batch": 2, "heads": 16, "kv_heads": 16, "d": 128, "multiprocessors": 132, **sizes}
    return Shape(element, m=m, n=n, arch=arch, **sizes)


@pytest.mark.parametrize(
    ("problem", "backend"),
    [
        (shape(), "flash_forward.mma"),
        (shape("bfloat16"), "flash_forward.mma"),
        (shape("float32"), "flash_forward.simt"),
        (shape("float32", m=1), "flash_forward.simt"),
        (shape(arch="75"), "flash_forward.mma"),
        (shape("bfloat16", arch="75"), "flash_forward.simt"),
        (shape("bfloat16", arch="80"), "flash_forward.mma"),
        (shape(m=1), "flash_forward.split"),
        (shape(m=1, arch="75"), "flash_forward.mma"),
        (shape(m=1, n=1023), "flash_forward.mma"),
        (shape(m=1, n=1024), "flash_forward.split"),
        (shape(m=16, batch=100), "flash_forward.split"),
        (shape(m=17, batch=100), "flash_forward.mma"),
        (shape(m=4, heads=32, kv_heads=8, batch=100), "flash_forward.split"),
        (shape(m=5, heads=32, kv_heads=8, batch=100), "flash_forward.mma"),
        (shape(m=128, batch=4, heads=16), "flash_forward.split"),
        (shape(m=129, batch=4, heads=16), "flash_forward.mma"),
        (shape(m=128, batch=67, heads=1, kv_heads=1), "flash_forward.mma"),
        (shape(m=128, batch=66, heads=1, kv_heads=1), "flash_forward.split"),
        (shape(d=256, arch="120", multiprocessors=170), "flash_forward.mma"),
    ],
)
def test_the_table_is_pinned(problem, backend):
    assert choose(problem, True).backend == backend
    assert choose(problem, False).backend == "numpy"


def test_the_table_in_words():
    assert [(choice.when, choice.backend) for choice in CHOICES] == [
        ("there is no GPU of sm_75 or later", "numpy"),
        (
            "float16 or bfloat16 on sm_80 or later, 1024 keys or more, and few queries: at most 16 rows for each head "
            "of k, or tiles of 128 rows for at most half of the multiprocessors",
            "flash_forward.split",
        ),
        ("float16 on sm_75 or later, bfloat16 on sm_80 or later", "flash_forward.mma"),
        ("anything else", "flash_forward.simt"),
    ]
    assert {choice.backend for choice in CHOICES} <= set(BACKENDS)
    assert choose(shape("float32"), True) is CHOICES[-1], "the last row always holds"


@pytest.mark.parametrize("arch", ["75", "80", "86", "89", "90", "90a", "100a", "120"])
@pytest.mark.parametrize("element", ITEMSIZE)
def test_what_is_chosen_can_be_launched_there(element, arch):
    from flashnumba.machine.instruction import runs_on

    for m, n in ((1, 0), (1, 5000), (100, 100), (5000, 5000)):
        for d in (1, 8, 33, 64, 80, 128, 200, 256):
            problem = shape(element, m, n, arch, d=d, vector=ITEMSIZE[element] if d % 8 else 16)
            chosen = choose(problem, True).backend
            if chosen in THERE:
                assert all(runs_on(arch, launch.kernel.arch) for launch in planner(chosen)(problem).launches)


# -- backends agree ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", ["numpy", *THERE])
def test_backends_agree(backend, no_gpu):
    """The fuzz has more of these."""
    for case in (
        normal(33, 70, 40, ml_dtypes.bfloat16, heads=2, kv_heads=1, causal=True),
        normal(20, 13, 17, np.float16, causal=True, scale=-0.4),
    ):
        assert_attention(attend(case, backend), case)


def test_the_emulator_runs_what_the_table_says(no_gpu, monkeypatch):
    asked, plan = [], planner
    monkeypatch.setattr(room, "planner", lambda name: asked.append(name) or plan(name))
    for case in (normal(1, 1024, 8, np.float16), normal(2, 3, 8, np.float16)):
        assert_attention(attend(case, "emulator"), case)
    assert asked == ["flash_forward.split", "flash_forward.mma"]


# -- the second call ---------------------------------------------------------------------------------------------------
@pytest.fixture
def once(monkeypatch, fake_gpu, fake_torch):
    """After ``once()`` a call that checks, chooses or plans anew fails."""
    monkeypatch.setattr(room, "RECIPES", type(room.RECIPES)())
    return lambda: monkeypatch.setattr(room, "_first", lambda *args: pytest.fail("looked a second time"))


def tensors(at, q=(2, 4, 256, 64), kv=(2, 2, 512, 64), dtype="torch.float16"):
    return [Tensor(at + 0x1000 * i, dtype, size) for i, size in enumerate((q, kv, kv))]


@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("strided", [False, True])
def test_a_second_call_differs_in_addresses_alone(rank, return_lse, strided, once, fake_gpu, fake_torch):
    launched, options = [], {"causal": True, "scale": -0.25, "return_lse": return_lse}
    for at in (0x10000, 0x20000):
        q, k, v = tensors(at, *((2, 4, 256, 64)[-rank:], (2, 2, 512, 64)[-rank:]))
        if strided:
            q = q.as_strided(q.shape, (999_999, 8, 16 * 64, 1)[-rank:])
        got = attention(q, k, v, backend="flash_forward.mma", **options)
        o, lse = got if return_lse else (got, fake_torch.made[-1])
        assert (o.shape, o.dtype, lse.shape, lse.dtype) == (q.shape, "torch.float16", q.shape[:-1], "torch.float32")
        ((function, *how, values),) = fake_gpu.launches
        fake_gpu.launches.clear()
        words = [4 + 13 * i for i in range(5)]
        assert [values[word] for word in words] == [x.data_ptr() for x in (q, k, v, o, lse)]
        assert values[-2:] == (-0.25, 1)
        assert how[-1] == 1000, "the current stream"
        launched.append((function, how, [word for i, word in enumerate(values) if i not in words]))
        once()
    assert launched[0] == launched[1]
    assert launched[0][2][:4] == [0, 0, int(np.prod(q.shape)), 2]


def test_a_second_call_with_scratch_between_two_kernels(once, fake_gpu, fake_torch):
    launched = []
    for at in (0x10000, 0x20000):
        before = len(fake_torch.made)
        q, k, v = tensors(at, (2, 4, 1, 64), (2, 2, 2048, 64))
        o, lse = attention(q, k, v, return_lse=True)
        part, merge = fake_gpu.launches
        fake_gpu.launches.clear()
        places = {tensor.data_ptr(): tensor for tensor in fake_torch.made[before:]}
        acc, m, l = (part[-1][at] for at in (3 * 13 + 4, 3 * 13 + 15 + 4, 3 * 13 + 15 + 13 + 4))
        assert [part[-1][13 * i + 4] for i in range(3)] == [x.data_ptr() for x in (q, k, v)]
        assert [merge[-1][at] for at in (4, 19, 32, 45, 58)] == [acc, m, l, o.data_ptr(), lse.data_ptr()]
        assert places[acc].shape == (*places[m].shape, 64) and places[m].shape == places[l].shape
        assert places[m].shape[1:] == (2, 4, 1) and places[m].shape[0] > 1
        assert len({acc, m, l, o.data_ptr(), lse.data_ptr()}) == 5
        launched.append([(launch[0], launch[1:4]) for launch in (part, merge)])
        once()
    assert launched[0] == launched[1]


def test_what_is_another_kind(once, fake_gpu, fake_torch):
    base = {"causal": False, "scale": None, "return_lse": False, "backend": "auto"}
    attention(*tensors(0x10000), **base)
    once()
    attention(*tensors(0x20000), **base)
    q, k, v = tensors(0x10000)
    others = [
        {"causal": True}, {"scale": 0.125}, {"return_lse": True}, {"backend": "flash_forward.split"},
        {"q": Tensor(0x10002, q.dtype, q.shape)}, {"k": k.as_strided(k.shape, (1 << 20, 1 << 16, 64, 1))},
        {"v": Tensor(0x3000, v.dtype, v.shape, device=1)}, {"q": Tensor(0x1000, "torch.bfloat16", q.shape)},
        {"q": Tensor(0x1000, q.dtype, (2, 4, 255, 64))}, {"causal": 0}, {"return_lse": 0}, {"scale": np.float32(1)},
        {"k": np.ones(k.shape, np.float16)},
    ]  # fmt: skip
    for change in others:
        with pytest.raises(pytest.fail.Exception, match="looked a second time"):
            attention(**{"q": q, "k": k, "v": v, **base, **change})
    asks = Tensor(0x10000, q.dtype, q.shape)
    asks.requires_grad = True
    with pytest.raises(pytest.fail.Exception, match="looked a second time"):
        attention(asks, k, v, **base)


def test_numbers_that_are_equal_are_not_taken_for_one_another(once, fake_gpu, fake_torch):
    given = tensors(0x10000)
    attention(*given, causal=True, scale=1)
    with pytest.raises(TypeError, match="causal is 1; it must be True or False"):
        attention(*given, causal=1, scale=1)
    with pytest.raises(TypeError, match="scale is True; it must be a real number"):
        attention(*given, causal=True, scale=True)


def test_what_fails_is_not_remembered(once, fake_gpu, fake_torch):
    q = tensors(0x10000, dtype="torch.float32")
    for _ in range(2):
        with pytest.raises(ValueError, match="q is float32"):
            attention(*q, backend="flash_forward.mma")
    q, k, v = tensors(0x10000)
    q.requires_grad = True
    for _ in range(2):
        with pytest.raises(ValueError, match="q requires a gradient"):
            attention(q, k, v)
    fake_torch.grad = False
    attention(q, k, v)
    assert not room.RECIPES._known


def test_importing_flashnumba_is_cheap():
    code = "import sys, flashnumba; print(*sorted({'numpy', 'numba', 'torch', 'cupy', 'jax'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


# -- on a GPU ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def cuda_torch(torch):
    if not torch.cuda.is_available():
        pytest.skip("torch is a CPU build")
    return torch


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("m", "n"), [(700, 1500), (1, 4000), (1500, 700)])
def test_torch_on_a_gpu(cuda_torch, m, n, dtype):
    torch = cuda_torch
    for seed in range(2):
        torch.manual_seed(seed)
        shapes = (2, 8, m, 80), (2, 2, n, 80), (2, 2, n, 80)
        q, k, v = (torch.randn(*size, device="cuda", dtype=getattr(torch, dtype)) for size in shapes)
        results = attention(q, k, v, causal=True, return_lse=True)
        case = Case("gpu", *(x.float().cpu().numpy() for x in (q, k, v)), causal=True)
        element = {"bfloat16": ml_dtypes.bfloat16}.get(dtype, dtype)
        case = case.with_arrays("gpu", lambda x, element=element: x.astype(element))
        got = [results[0].float().cpu().numpy().astype(element), results[1].cpu().numpy()]
        assert_attention(got, case)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(1, 4, 200, 64), (1, 4, 1, 64)])
def test_graph_capture(cuda_torch, size):
    torch = cuda_torch
    q = torch.randn(*size, device="cuda", dtype=torch.float16)
    k, v = (torch.randn(1, 2, 2000, 64, device="cuda", dtype=torch.float16) for _ in range(2))
    for _ in range(2):
        attention(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = attention(q, k, v)
    for seed in range(2):
        torch.manual_seed(seed)
        q.normal_()
        graph.replay()
        assert torch.equal(o, attention(q, k, v))


@pytest.mark.gpu
def test_the_callers_stream_is_used(cuda_torch):
    torch = cuda_torch
    q = torch.randn(2, 4, 300, 64, device="cuda", dtype=torch.float16)
    expected = attention(q, q, q)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        late = q * 1
        o = attention(late, late, late)
        assert not side.query(), "the call returned while the GPU was busy"
    torch.cuda.synchronize()
    assert torch.equal(o, expected)


@pytest.mark.gpu
def test_host_time_of_a_second_call(cuda_torch, capsys):
    from flashnumba.bench.timing import host_time

    torch = cuda_torch
    took = {}
    for size in ((2, 4, 128, 64), (128, 64)):
        q = torch.randn(*size, device="cuda", dtype=torch.float16)
        took[len(size)] = host_time(lambda q=q: attention(q, q, q))
    theirs = host_time(lambda: torch.nn.functional.scaled_dot_product_attention(q[None], q[None], q[None]))
    with capsys.disabled():
        said = ", ".join(f"{axes} axes {seconds * 1e6:.1f} us" for axes, seconds in took.items())
        print(f"\nhost time of attention(), launch included: {said}; torch's SDPA {theirs * 1e6:.1f} us")
    assert max(took.values()) <= 25e-6
