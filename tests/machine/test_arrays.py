"""Arrays of every kind: pointer, element, shape and strides, without a copy."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from flashnumba.machine import gpu
from flashnumba.machine.arrays import describe, empty_like_kind, host_view, is_array, is_contiguous, packed


def test_numpy():
    x = np.zeros((3, 4, 5), np.float32)[::-1, :, 1:]
    found = describe(x)
    assert (found.pointer, found.shape, found.strides) == (x.ctypes.data, (3, 4, 4), (-80, 20, 4))
    assert (found.kind, found.device, found.readonly, found.element) == ("numpy", None, False, "float32")
    low, high = found.span
    assert (low, high) == (x.ctypes.data - 160, x.ctypes.data + 3 * 20 + 3 * 4 + 4)
    x.flags.writeable = False
    assert describe(x).readonly


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [(ml_dtypes.bfloat16, np.uint16), (ml_dtypes.float8_e4m3fn, np.uint8), (ml_dtypes.float8_e5m2, np.uint8)],
)
def test_elements_numba_lacks_travel_as_integers(dtype, stored):
    x = np.arange(12).astype(dtype).reshape(3, 4)[:, ::2]
    found, view = describe(x), host_view(x)
    assert found.dtype == view.dtype == stored
    assert found.element == np.dtype(dtype).name
    assert found.strides == x.strides == view.strides
    view[1, 1] = 0
    assert x[1, 1] == 0, "the view shares the memory"


@pytest.mark.parametrize(
    ("shape", "strides", "answer"),
    [
        ((2, 3), (12, 4), True), ((2, 3), (4, 8), False), ((2, 1), (4, 400), True), ((1, 3), (7, 4), True),
        ((0, 3), (1, 1), True), ((), (), True), ((3,), (-4,), False), ((3,), (0,), False),
    ],
)  # fmt: skip
def test_contiguity(shape, strides, answer):
    assert is_contiguous(shape, strides, 4) is answer


def test_packed_strides():
    assert packed((2, 3, 4), 2) == (24, 8, 2)
    assert packed((), 2) == ()


@pytest.mark.parametrize("shape", [(0,), (3, 0), ()])
def test_empty_and_scalar_arrays(shape):
    found = describe(np.zeros(shape, np.float16))
    low, high = found.span
    assert found.shape == shape
    assert high - low == (2 if shape == () else 0)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ([1, 2], TypeError, "q is a list; it must be a NumPy, torch, CuPy, JAX or numba array"),
        (np.ndarray, TypeError, "q is the class ndarray; it must be a NumPy, torch"),
        (SimpleNamespace(__dlpack__=None), TypeError, "q is a SimpleNamespace; it must be a NumPy, torch"),
        (SimpleNamespace(__dlpack__=lambda **options: None), TypeError, "q is a SimpleNamespace; it must be"),
        (np.zeros(2, np.complex64), TypeError, "q has elements of type complex64; a kernel takes bool, int8"),
        (np.zeros(2, ">f4"), TypeError, "q is byte-swapped"),
        (np.zeros(9, np.uint8)[1:].view(np.float32), ValueError, "q is not aligned to the 4 bytes of float32"),
    ],
)
def test_what_is_refused(value, error, message):
    with pytest.raises(error, match=message):
        describe(value, "q")


def test_what_an_array_is():
    assert is_array(np.zeros(()))
    for other in (1, 2.0, np.float32(1), "x", None, [1], np.ndarray):
        assert not is_array(other)


class Interface:
    """An exporter of ``__cuda_array_interface__``."""

    def __init__(self, **changes):
        self.__cuda_array_interface__ = {
            "shape": (2, 3), "typestr": "<f2", "data": (4096, False), "strides": None, "version": 3, **changes
        }  # fmt: skip


def test_cuda_array_interface(monkeypatch):
    monkeypatch.setattr(gpu, "pointer_device", lambda pointer: 3)
    found = describe(Interface(stream=7, data=(4096, True)))
    assert (found.pointer, found.device, found.strides, found.stream, found.readonly) == (4096, 3, (6, 2), 7, True)
    assert describe(Interface(strides=(20, -2))).strides == (20, -2)
    with pytest.raises(ValueError, match="q has a mask"):
        describe(Interface(mask=object()), "q")
    with pytest.raises(TypeError, match="q has elements of type complex64"):
        describe(Interface(typestr="<c8"), "q")


def test_cupy(monkeypatch):
    class ndarray:
        dtype, shape, strides = np.dtype(np.float32), (4,), (8,)
        data, device = SimpleNamespace(ptr=512), SimpleNamespace(id=1)

    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=ndarray))
    found = describe(ndarray())
    assert (found.kind, found.pointer, found.device, found.strides) == ("cupy", 512, 1, (8,))
    with pytest.raises(ValueError, match="q is on cuda:1; here it must be in host memory"):
        host_view(ndarray(), "q")


class Exporter:
    """A DLPack exporter in host memory that is no library's array."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_dlpack_in_host_memory():
    x = np.arange(6, dtype=np.int32)
    assert describe(Exporter(x)).pointer == x.ctypes.data
    host_view(Exporter(x))[2] = 50
    assert x[2] == 50
    assert isinstance(empty_like_kind(Exporter(x), (2,)), np.ndarray)


def test_dlpack_on_another_device():
    class Elsewhere:
        def __dlpack__(self):
            raise AssertionError("not asked")

        def __dlpack_device__(self):
            return 10, 0

    with pytest.raises(ValueError, match="q is on DLPack device 10"):
        describe(Elsewhere(), "q")


def test_empty_like_numpy():
    like = np.zeros(3, np.float16)
    assert empty_like_kind(like, (2, 5)).dtype == np.float16
    assert empty_like_kind(like, (2, 5), "bfloat16").dtype == ml_dtypes.bfloat16
    assert empty_like_kind(like, (2, 5), "float32").shape == (2, 5)
    with pytest.raises(TypeError, match="the new array has elements of type complex64"):
        empty_like_kind(like, (1,), "complex64")


def test_torch_cpu():
    torch = pytest.importorskip("torch")
    x = torch.zeros(4, 6, dtype=torch.bfloat16, requires_grad=True).t()
    found, view = describe(x), host_view(x)
    assert (found.kind, found.device, found.element) == ("torch-cpu", None, "bfloat16")
    assert (found.pointer, found.shape, found.strides) == (x.data_ptr(), (6, 4), (2, 12))
    assert (view.dtype, view.strides, view.ctypes.data) == (np.uint16, (2, 12), x.data_ptr())
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        assert host_view(torch.zeros(3, dtype=dtype)).dtype == np.uint8
    made = empty_like_kind(x, (2, 3), "float32")
    assert isinstance(made, torch.Tensor)
    assert made.dtype == torch.float32
    with pytest.raises(ValueError, match=r"q has layout torch\.sparse_coo"):
        describe(torch.zeros(2, 2).to_sparse(), "q")
    with pytest.raises(ValueError, match="q is on meta"):
        describe(torch.zeros(2, device="meta"), "q")
    with pytest.raises(TypeError, match="elements of type complex64"):
        describe(torch.zeros(2, dtype=torch.complex64), "q")
    with pytest.raises(ValueError, match="q is a nested tensor"):
        describe(torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), "q")


def test_torch_tensors_whose_memory_is_not_what_they_say():
    torch = pytest.importorskip("torch")
    z = torch.full((2, 3), 1 + 2j)
    assert host_view(z.imag)[0, 0] == 2
    with pytest.raises(ValueError, match=r"q is a view that torch negates when it reads it; pass q\.resolve_neg\(\)"):
        describe(z.conj().imag, "q")
    assert host_view(z.conj().imag.resolve_neg())[0, 0] == -2
    x, seen = torch.ones(2, 3), []

    def look(x):
        with pytest.raises(TypeError, match="q is a tensor without memory"):
            describe(x, "q")
        seen.append(x)
        return x.sum()

    torch.func.vmap(look)(x)
    torch.func.grad(look)(x)
    torch.func.jvp(look, (x,), (x,))
    torch.func.functionalize(look)(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "data_ptr", lambda self: 0)  # fake tensors have that address, or none
        look(x)
        assert describe(x[:0]).shape == (0, 3)
    assert len(seen) == 5


def test_jax_cpu():
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "cpu":
        pytest.skip("JAX runs on a GPU here")
    x = jax.numpy.arange(6, dtype=jax.numpy.bfloat16)
    found = describe(x)
    assert (found.kind, found.device, found.readonly, found.element) == ("jax", None, True, "bfloat16")
    assert host_view(x).view(ml_dtypes.bfloat16).tolist() == [0, 1, 2, 3, 4, 5]
    assert isinstance(empty_like_kind(x, (2,)), np.ndarray)
    for traced in (jax.jit, jax.vmap, jax.make_jaxpr):
        with pytest.raises(TypeError, match="q is traced by JAX; it must be an array with values"):
            traced(lambda x: describe(x, "q"))(x)
    x.delete()
    with pytest.raises(ValueError, match="q has been deleted"):
        describe(x, "q")


@pytest.mark.gpu
@pytest.mark.parametrize("element", ["float16", "bfloat16", "float32", "float8_e4m3fn"])
def test_torch_cuda(element):
    torch = pytest.importorskip("torch")
    x = torch.zeros(4, 6, device="cuda").to(getattr(torch, element)).t()
    found = describe(x)
    assert (found.pointer, found.kind, found.device, found.element) == (x.data_ptr(), "torch-cuda", 0, element)
    assert empty_like_kind(x, (5,)).dtype == x.dtype


@pytest.mark.gpu
def test_cupy_cuda():
    cupy = pytest.importorskip("cupy")
    x = cupy.zeros((4, 6), cupy.float16)[:, ::-1]
    found = describe(x)
    assert (found.pointer, found.strides, found.kind, found.device) == (x.data.ptr, (12, -2), "cupy", 0)
    assert isinstance(empty_like_kind(x, (5,)), cupy.ndarray)


@pytest.mark.gpu
def test_jax_cuda():
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU here")
    x = jax.numpy.ones((4, 6), jax.numpy.bfloat16)
    found = describe(x)
    assert (found.kind, found.device, found.element, found.shape, found.strides) == (
        "jax",
        0,
        "bfloat16",
        (4, 6),
        (12, 2),
    )


@pytest.mark.gpu
def test_numba_cuda():
    from flashnumba.machine.numba import cuda

    x = cuda.to_device(np.zeros((4, 6), np.float32))
    found = describe(x)
    assert (found.kind, found.device, found.strides) == ("numba", 0, (24, 4))
    assert describe(empty_like_kind(x, (5,))).kind == "numba"
