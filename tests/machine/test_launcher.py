"""Choosing a machine and launching on it."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest

from flashnumba.bench import timing
from flashnumba.machine import copies, gpu, launcher, prepared, tensor_encode
from flashnumba.machine.function import kernel
from flashnumba.machine.numba import cuda, float32, int32, int64, types
from tests.machine.fakes import Tensor


@kernel(threads=256)
def scale(out, x, factor, count):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i < count:
        out[i] = x[i] * factor


def test_signature_from_arguments():
    wide = np.zeros((4, 6), np.float32)
    got = launcher.signature_for(scale, (wide[:, 0], wide[0], 2.0, 4))
    assert got == (types.Array(float32, 1, "A"), types.Array(float32, 1, "C"), float32, int64)


def test_machine_is_checked(monkeypatch):
    with pytest.raises(ValueError, match="machine is 'gpu'; it must be one of auto, cuda, emulator"):
        launcher.launch(scale, 1, 1, (), machine="gpu")
    with pytest.raises(TypeError, match="kernel is a function; it must be declared"):
        launcher.launch(scale.function, 1, 1, ())
    monkeypatch.setattr(gpu, "unavailable", lambda: "there is none")
    with pytest.raises(RuntimeError, match="no GPU to launch on: there is none; use machine='emulator'"):
        launcher.launch(scale, 1, 1, (np.zeros(1, np.float32),) * 2 + (1.0, 1), machine="cuda")


def test_auto_follows_the_arrays_and_the_architecture(monkeypatch, fake_torch):
    tensor = Tensor(256, "torch.float32", (4,), (1,))
    monkeypatch.setattr(gpu, "available", lambda: False)
    assert launcher.machine_for(scale, (np.zeros(1),)) == "emulator"
    assert launcher.machine_for(scale, (np.zeros(1), tensor)) == "cuda"
    monkeypatch.setattr(gpu, "available", lambda: True)
    monkeypatch.setattr(gpu, "device_arch", lambda: "70")
    assert launcher.machine_for(scale) == "emulator"
    monkeypatch.setattr(gpu, "device_arch", lambda: "90a")
    assert launcher.machine_for(scale) == "cuda"


def test_what_a_device_lacks_is_said(monkeypatch):
    monkeypatch.setattr(gpu, "unavailable", lambda: "")
    monkeypatch.setattr(gpu, "device_arch", lambda device: "70")
    monkeypatch.setattr(gpu, "device_name", lambda device: "Old GPU")
    monkeypatch.setattr(gpu, "max_shared", lambda device: 1000)
    signature = (types.Array(float32, 1, "C"),) * 2 + (float32, int32)
    with pytest.raises(ValueError, match=r"scale needs sm_75; cuda:0 \(Old GPU\) is sm_70"):
        launcher.prepare(scale, signature, machine="cuda", device=0)
    monkeypatch.setattr(gpu, "device_arch", lambda device: "75")
    with pytest.raises(ValueError, match="shared is 1001 bytes; a block on cuda:0 can have 0 to 1000"):
        launcher.prepare(scale, signature, machine="cuda", device=0, shared=1001)


@pytest.mark.parametrize("layout", ["packed", "strided", "reversed"])
def test_strided_arrays(machine, layout):
    step = {"packed": slice(0, 37), "strided": slice(1, 75, 2), "reversed": slice(73, None, -2)}[layout]
    wide, x = np.full(80, np.nan, np.float32), np.arange(80, dtype=np.float32)
    count = len(wide[step])
    launcher.launch(scale, 2, 32, (wide[step], x[step], 2.5, count), machine=machine)
    expected = np.full(80, np.nan, np.float32)
    expected[step] = np.float32(2.5) * x[step]
    np.testing.assert_array_equal(wide, expected)


def test_in_place_and_overlapping(machine):
    x = np.arange(64, dtype=np.float32)
    launcher.launch(scale, 2, 32, (x[:40], x[:40], -1.0, 40), machine=machine)
    np.testing.assert_array_equal(x, np.r_[-np.arange(40), np.arange(40, 64)].astype(np.float32))


def test_prepared_runs_again(machine):
    ready_ = launcher.prepare(scale, (np.zeros(4, np.float32),) * 2 + (1.0, 4), machine=machine)
    assert ready_.machine == machine
    for n in (3, 5):
        out = np.zeros(n, np.float32)
        ready_(1, 32, (out, np.ones(n, np.float32), float(n), n))
        np.testing.assert_array_equal(out, np.full(n, n, np.float32))


def test_torch_cpu_tensors_are_written_in_place(machine):
    torch = pytest.importorskip("torch")
    x = torch.arange(10, dtype=torch.float32)
    out = torch.zeros(20)[::2]
    launcher.launch(scale, 1, 32, (out, x, 3.0, 10), machine=machine)
    assert torch.equal(out, 3 * x)


def test_the_driver_has_every_name_that_is_used():
    """Nothing here runs without a GPU, but cuda.bindings imports without one, and a misspelt name shows."""
    driver = pytest.importorskip("cuda.bindings.driver")
    used = set()
    for module in (gpu, launcher, prepared, tensor_encode, copies, timing):
        used |= set(re.findall(r"\bdriver\.((?:cu|CU)\w+(?:\.CU\w+)?)", inspect.getsource(module)))
    used |= {f"CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_{code}" for code in tensor_encode.CODE.values()}
    used |= {f"CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_{s}" for s in ("NONE", "32B", "64B", "128B")}
    used |= {f"CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_{s}" for s in ("NONE", "L2_64B", "L2_128B", "L2_256B")}
    used |= {f"CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_{s}" for s in ("NONE", "NAN_REQUEST_ZERO_FMA")}
    for name in re.findall(r'_attribute\("([A-Z_]+)"', inspect.getsource(gpu)):
        used.add(f"CUdevice_attribute.CU_DEVICE_ATTRIBUTE_{name}")
    assert len(used) > 40
    for name in sorted(used):
        value = driver
        for part in name.split("."):
            assert hasattr(value, part), name
            value = getattr(value, part)
