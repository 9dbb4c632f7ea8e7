"""Attention for PyTorch, with gradients: operators that autograd, ``torch.compile`` and CUDA graphs know.

:func:`attention` is :func:`flashnumba.attention` for tensors whose gradients are wanted, and
:func:`scaled_dot_product_attention` has the signature and the conventions of the function of that name in
``torch.nn.functional``. Importing this module declares two operators::

    flashnumba::attention_forward(q, k, v, causal, scale, backend) -> (o, lse)
    flashnumba::attention_backward(do, dlse, q, k, v, o, lse, causal, scale, backend) -> (dq, dk, dv)

each with what it does on a CPU and on a GPU, with the shapes of its results for tracers, with its derivative, and with
what it does under ``torch.vmap``. The derivative of the first is the second; that of the second is an error, since
no kernel computes second derivatives. Of the forward q, k, v, o and lse are kept for the backward: no matrix of scores.

float64 is what ``torch.autograd.gradcheck`` asks for: on the CPU it goes through the NumPy references of the stages,
with the same formulas for the gradients as the kernels'. No kernel takes it.

Sources: :mod:`flashnumba.stages.flash_forward.reference`, :mod:`flashnumba.stages.backward.reference`.
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":  # it is there and lacks something itself
        raise
    raise ImportError(
        "flashnumba.torch needs PyTorch, which is not installed: pip install 'flashnumba[torch]'"
    ) from error

from flashnumba.torch.functions import attention, scaled_dot_product_attention
from flashnumba.torch.kernels import BACKENDS

__all__ = ["BACKENDS", "attention", "scaled_dot_product_attention"]
