"""What all tests share: where a kernel runs, and which tests need a GPU."""

from __future__ import annotations

import gc
import sys

import pytest

from flashnumba.machine import gpu, launcher, streams, tensor_map
from flashnumba.machine.function import Kernel
from flashnumba.machine.layout import parameters
from tests.machine.fakes import Driver, Torch

# Python's collector looks at all that is new after every 700 objects, and often at all there is: a sixth of collecting
# these tests, and a twentieth of running them. They leave little behind that only it finds.
gc.set_threshold(50_000, 20, 50)

LONG = ("tests/test_lessons.py::test_it_runs", "tests/test_docs.py::test_the_site")

WORDS = {"float32": "f", "int32": "i", "int64": "q", "uint64": "Q"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Spread over processes the longest tests come first, so that at the end no process waits for another's."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not item.nodeid.startswith(LONG))


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # modules and tests stay to the end


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and gpu.unavailable():
        pytest.skip(f"no GPU: {gpu.unavailable()}")


@pytest.fixture(params=["emulator", pytest.param("cuda", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest) -> str:
    """Each kernel test runs on the emulator, and on the GPU where there is one: ``launch(..., machine=machine)``."""
    return request.param


@pytest.fixture
def hopper(request: pytest.FixtureRequest) -> None:
    """On a GPU, kernels of wgmma need sm_90a."""
    on_gpu = "machine" in request.fixturenames and request.getfixturevalue("machine") == "cuda"
    if (on_gpu or request.node.get_closest_marker("gpu")) and (arch := gpu.device_arch()) != "90a":
        pytest.skip(f"this GPU is sm_{arch}")


@pytest.fixture
def cuda_torch():
    """torch, where it has a GPU."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch is a CPU build")
    torch.manual_seed(0)
    return torch


@pytest.fixture
def fake_torch(monkeypatch):
    """A stand-in for torch whose current stream on device d is 1000 + d."""
    fake = Torch()
    monkeypatch.setitem(sys.modules, "torch", fake)
    monkeypatch.setattr(streams, "_found", {})
    return fake


@pytest.fixture
def encoded(monkeypatch):
    """Tensor maps get an address in turn, and are not encoded; the arrays that they are of, by this address."""
    of: dict[int, int] = {}

    class Slot:
        def __init__(self, pointer):
            self.address = 0x5000 + 128 * len(of)
            of[self.address] = pointer

    monkeypatch.setattr(tensor_map, "encode", lambda found, *how: Slot(found.pointer))
    monkeypatch.setattr(tensor_map, "MAPS", type(tensor_map.MAPS)())
    return of


@pytest.fixture
def fake_gpu(monkeypatch, fake_torch, encoded):
    """A driver that remembers launches (:class:`Driver`), of an H200 whose kernels are never compiled."""
    driver = Driver(lambda kernel: driver.expected[kernel])
    driver.expected, caches = {}, {}

    def function(kernel, signature, device, shared):
        driver.expected[kernel] = "".join(WORDS[p.element] if p.array is None else "QQqqQ" + "qq" * p.array.ndim
                                          for p in parameters(kernel, signature))  # fmt: skip
        return kernel

    for name, value in (("unavailable", ""), ("device_arch", "90a"), ("multiprocessors", driver.count),
                        ("max_shared", 232448), ("bindings", driver), ("primary_context", 7),
                        ("device_name", "a stand-in"), ("current_device", 0)):  # fmt: skip
        monkeypatch.setattr(gpu, name, lambda *args, value=value: value)
    monkeypatch.setattr(launcher, "_function", function)
    # What is prepared here must not be found by a test with a real GPU, nor the other way round.
    # A kernel that is made while this stands keeps its own for later.
    cache = property(
        lambda kernel: caches.setdefault(kernel, {}), lambda kernel, value: kernel.__dict__.update(cache=value)
    )
    monkeypatch.setattr(Kernel, "cache", cache, raising=False)
    return driver
