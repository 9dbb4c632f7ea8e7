"""What all tests share: where a kernel runs, and which tests need a GPU."""

from __future__ import annotations

import pytest

from flashnumba.machine import gpu


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and gpu.unavailable():
        pytest.skip(f"no GPU: {gpu.unavailable()}")


@pytest.fixture(params=["emulator", pytest.param("cuda", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest) -> str:
    """Each kernel test runs on the emulator, and on the GPU where there is one: ``launch(..., machine=machine)``."""
    return request.param
