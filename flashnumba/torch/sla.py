"""SLA for PyTorch: a function with gradients, and a module that can be fine-tuned.

The function keeps for its gradients what :mod:`flashnumba.stages.sparsity.sla` says; the map of tiles is held fixed.
It is an ``autograd.Function``, not an operator of torch: ``torch.compile`` runs it as it is, between compiled parts,
and ``torch.func`` does not know it. There are no second derivatives.

Source: Zhang et al., SLA, arXiv 2509.24006; the module's parameters as thu-ml/SLA has them: a projection with bias,
zero to begin with, so that an untrained module returns the softmax part alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from flashnumba.sparse.sla import sla_attention, sla_attention_backward

__all__ = ["SparseLinearAttention", "sla"]


class _Sla(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, proj: Tensor | None, options: dict[str, Any]) -> Tensor:
        o, info = sla_attention(
            q.detach(), k.detach(), v.detach(), proj=None if proj is None else proj.detach(), return_info=True,
            **options,
        )  # fmt: skip
        ctx.info = info
        ctx.dtype = None if proj is None else proj.dtype
        # Kept for torch's sake: it notices when one of them is changed in place before the gradients are asked for.
        ctx.save_for_backward(q, k, v, *(() if proj is None else (proj,)))
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        dq, dk, dv, dproj = sla_attention_backward(do.resolve_neg().contiguous(), ctx.info)
        return dq, dk, dv, None if dproj is None else dproj.to(ctx.dtype), None


@torch.compiler.disable
def sla(q: Tensor, k: Tensor, v: Tensor, proj: Tensor | None = None, **options: Any) -> Tensor:
    """:func:`flashnumba.sparse.sla.sla_attention` with gradients of q, k, v and proj.

    Args:
        q, k, v, proj: tensors, as there.
        options: critical, negligible, feature_map, form, eps, causal, scale and backend, as there.

    Raises:
        TypeError, ValueError: as there.
    """
    for name, x in (("q", q), ("k", k), ("v", v), ("proj", proj)):
        if not isinstance(x, Tensor) and not (name == "proj" and x is None):
            raise TypeError(f"{name} is a {type(x).__name__}; it must be a torch tensor")
    return _Sla.apply(q, k, v, proj, options)


class SparseLinearAttention(nn.Module):
    """SLA with a projection of its own, to put in the place of a model's attention and fine-tune.

    Args:
        head_dim: of q, k and v.
        critical, negligible, feature_map, form, eps, causal, scale, backend: as
            :func:`flashnumba.sparse.sla.sla_attention`.
        bias: the projection has one, as in the authors' code; the paper has none.

    Attributes:
        proj_l: ``nn.Linear(head_dim, head_dim)`` in float32, zero to begin with; it is cast to the type of q.

    >>> import torch
    >>> attend = SparseLinearAttention(64, critical=0.2)
    >>> q, k, v = torch.randn(3, 1, 2, 320, 64)
    >>> attend(q, k, v).shape
    torch.Size([1, 2, 320, 64])
    """

    def __init__(
        self, head_dim: int, *, critical: float = 0.05, negligible: float = 0.10, feature_map: str = "softmax",
        form: str = "paper", eps: float | None = None, causal: bool = False, scale: float | None = None,
        bias: bool = True, backend: str = "auto",
    ) -> None:  # fmt: skip
        from flashnumba.stages.sparsity.sla import check_options

        super().__init__()
        check_options(critical, negligible, feature_map, form, eps, True)
        self.options: dict[str, Any] = {
            "critical": critical, "negligible": negligible, "feature_map": feature_map, "form": form, "eps": eps,
            "causal": causal, "scale": scale, "backend": backend,
        }  # fmt: skip
        self.proj_l = nn.Linear(head_dim, head_dim, bias=bias)
        nn.init.zeros_(self.proj_l.weight)
        if bias:
            nn.init.zeros_(self.proj_l.bias)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """o of q, k and v ``[B, H, N, D]``."""
        proj = self.proj_l.weight.t().to(q.dtype).contiguous()
        o = sla(q, k, v, proj, **self.options)
        return o if self.proj_l.bias is None else o + self.proj_l.bias.to(q.dtype)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items() if value is not None)
