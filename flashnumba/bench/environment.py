"""What figures depend on, and torch, which every bench compares with."""

from __future__ import annotations

from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any

from flashnumba.machine import gpu, install
from flashnumba.stages.host import EMULATED_ARCH

__all__ = ["environment", "place", "torch_on_gpu"]


def torch_on_gpu(bench: str) -> Any:
    """The module torch, where it sees the GPU.

    Args:
        bench: who asks, for the message.

    Raises:
        RuntimeError: no GPU, no torch, or one without CUDA.
    """
    gpu.require()
    try:
        import torch
    except ImportError as error:
        raise RuntimeError(
            f"the {bench} bench compares with torch, which is not installed: {install.pip('torch')}"
        ) from error
    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} sees no GPU; it must be a CUDA build")
    return torch


def place(bench: str, machine: str) -> tuple[Any, str, str]:
    """torch, the device of its tensors, and the architecture, for a bench on ``"cuda"`` or, as tests run one, on
    ``"emulator"``.

    Raises:
        RuntimeError: as :func:`torch_on_gpu`.
    """
    if machine == "cuda":
        return torch_on_gpu(bench), "cuda", gpu.device_arch()
    import torch

    return torch, "cpu", EMULATED_ARCH


def environment(bench: str) -> dict[str, Any]:
    """Device, driver, versions and date.

    Raises:
        RuntimeError: as :func:`torch_on_gpu`.
    """
    import numba

    torch = torch_on_gpu(bench)
    return {
        "device": gpu.device_name(),
        "arch": gpu.device_arch(),
        "driver": gpu.driver_version(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "torch": torch.__version__,
        "numba": numba.__version__,
        "numba-cuda": version("numba-cuda"),
    }
