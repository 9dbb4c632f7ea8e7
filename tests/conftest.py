"""What all tests share: where a kernel runs, and which tests need a GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from flashnumba.machine import gpu, streams
from tests.machine.fakes import Tensor


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and gpu.unavailable():
        pytest.skip(f"no GPU: {gpu.unavailable()}")


@pytest.fixture(params=["emulator", pytest.param("cuda", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest) -> str:
    """Each kernel test runs on the emulator, and on the GPU where there is one: ``launch(..., machine=machine)``."""
    return request.param


@pytest.fixture
def fake_torch(monkeypatch):
    """A stand-in for torch whose current stream on device d is 1000 + d."""
    fake = SimpleNamespace(
        Tensor=Tensor, _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda device: 1000 + device), current=0
    )
    monkeypatch.setitem(sys.modules, "torch", fake)
    monkeypatch.setattr(streams, "_found", {})
    return fake
