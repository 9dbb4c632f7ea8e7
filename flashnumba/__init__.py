"""flashnumba: attention on a GPU, from softmax to a FlashAttention-3 class kernel, in Python with Numba CUDA."""

from flashnumba.attention import NoGpuWarning, attention
from flashnumba.gradients import attention_backward
from flashnumba.mla import MLACache, mla_decode, mla_prefill

__all__ = ["MLACache", "NoGpuWarning", "attention", "attention_backward", "mla_decode", "mla_prefill"]
