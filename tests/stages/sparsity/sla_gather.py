"""SLA's gather by NumPy: its blocks would be most of what the emulator does in a test of everything else. The kernel
has a test of its own, and the ladder and its lesson run the stage whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashnumba.machine import emulator
from flashnumba.machine.function import Kernel

NAME = "sparsity.sla gather"
"""And with ``" back"`` the one that multiplies by the transposed weights."""


def is_gather(kernel: Kernel) -> bool:
    return kernel.__name__.startswith(NAME)


def gather(kernel: Kernel, weights: np.ndarray, states: np.ndarray, sums: np.ndarray) -> None:
    """What the kernel leaves in ``sums``, of arrays as it is given them, in the type that they stand for."""
    exact = weights.astype(np.float32)
    if kernel.__name__ != NAME:
        exact = exact.swapaxes(-1, -2)
    exact = exact[..., : sums.shape[2], : states.shape[2]]
    sums[...] = (exact @ states.astype(np.float32)).astype(sums.dtype)


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on the emulator leaves the gather of float16 to NumPy."""
    launch = emulator.launch

    def instead(kernel: Kernel, grid: Any, block: Any, args: tuple[Any, ...], **options: Any) -> Any:
        if is_gather(kernel):
            return gather(kernel, *(getattr(x, "array", x) for x in args[:3]))  # by wgmma they are tensor maps
        return launch(kernel, grid, block, args, **options)

    monkeypatch.setattr(emulator, "launch", instead)
