"""flashnumba: attention on a GPU, from softmax to a FlashAttention-3 class kernel, in Python with Numba CUDA."""

from flashnumba.attention import NoGpuWarning, attention
from flashnumba.gradients import attention_backward

__all__ = ["NoGpuWarning", "attention", "attention_backward"]
