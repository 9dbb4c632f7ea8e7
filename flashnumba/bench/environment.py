"""What figures depend on, and torch, which every bench compares with."""

from __future__ import annotations

from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any

from flashnumba.machine import gpu, install

__all__ = ["environment", "torch_on_gpu"]


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
