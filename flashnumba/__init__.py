"""flashnumba: attention on a GPU, from softmax to a FlashAttention-3 class kernel, in Python with Numba CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashnumba.attention import NoGpuWarning, attention
from flashnumba.gradients import attention_backward

if TYPE_CHECKING:
    from flashnumba.mla import MLACache, mla_decode, mla_prefill

__all__ = ["MLACache", "NoGpuWarning", "attention", "attention_backward", "mla_decode", "mla_prefill"]


def __getattr__(name: str) -> Any:
    """Latent attention, imported when it is asked for: it needs NumPy and the compiler at once."""
    if name in ("MLACache", "mla_decode", "mla_prefill"):
        from flashnumba import mla

        return getattr(mla, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
