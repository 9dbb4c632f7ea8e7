"""Sparse-linear attention for PyTorch: a module to be fine-tuned in the place of attention, and the function in it.

>>> import torch
>>> from flashnumba.torch.sla import SparseLinearAttention
>>> attend = SparseLinearAttention(head_dim=64, critical=0.25, backend="numpy")
>>> q, k, v = (torch.randn(1, 2, 256, 64) for _ in range(3))
>>> attend(q, k, v).sum().backward()
>>> attend.proj_l.weight.grad.shape
torch.Size([64, 64])

A model gets the module in each layer and is trained on for a while, 2000 steps in the paper: softmax attention over few
tiles and linear attention over the others are normalised apart, and the projection has to learn to put them together.
It begins at zero, as the authors' does, so that an untrained module is its sparse part alone.

Importing this module declares two operators, ``flashnumba::sla_forward`` and ``flashnumba::sla_backward``, so that
``torch.compile`` sees one node for each. On a GPU both are the kernels of :mod:`flashnumba.stages.sparsity.sla`, in
float16 or bfloat16 with D up to 128; on a CPU they are computed by definition in float64, which also serves
``gradcheck``.
``torch.func.grad`` and ``vmap`` go through them; there are no second derivatives, and none in forward mode.

Source: Zhang et al., SLA, arXiv 2509.24006; the module's parameters are named as in thu-ml/SLA, and are those.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashnumba.stages import heads
from flashnumba.stages.sparsity.sla import check_options
from flashnumba.stages.sparsity.sla_reference import BLOCK, EPS
from flashnumba.torch.sla_operators import Functional, Maybe, Sla

__all__ = ["BACKENDS", "SparseLinearAttention", "sla_attention"]

BACKENDS = ("auto", "numpy", "emulator")


# -- what is called ----------------------------------------------------------------------------------------------------
def sla_attention(
    q: Tensor, k: Tensor, v: Tensor, *, proj: Tensor | None = None, critical: float = 0.05, negligible: float = 0.10,
    feature_map: str = "softmax", form: str = "paper", eps: float | None = None, classes: Tensor | None = None,
    causal: bool = False, scale: float | None = None, return_classes: bool = False, backend: str = "auto",
) -> Any:  # fmt: skip
    """:func:`flashnumba.sparse.sla.sla_attention` with gradients of q, k, v and proj; the map is held fixed.

    Args:
        q: ``[B, H, M, D]``, or with fewer leading axes; on a GPU float16 or bfloat16 with D from 1 to 128, on a CPU any
            floating-point type and D. Under autocast they are cast, float64 excepted.
        k, v: ``[B, Hkv, N, D]``; Hkv divides H, and gradients are summed over the heads of q that share one of k.
        proj: ``[D, D]`` of any floating-point type, rounded to q's; its gradient is of its own.
        critical, negligible, feature_map, form, eps, causal, scale: as there.
        classes: a map as ``return_classes`` gives it, int8 ``[B, H, row tiles, key tiles]``; None: it is guessed.
        return_classes: also return the map.
        backend: ``"auto"``: kernels on a GPU, by definition on a CPU. ``"numpy"``: that. ``"emulator"``: the kernels,
            on the emulator.

    Returns:
        o, packed, of q's shape and dtype; or ``(o, classes)``.

    Raises:
        TypeError, ValueError: an argument does not fit. Nothing has run then.
    """
    for name, x in {"q": q, "k": k, "v": v, "proj": proj, "classes": classes}.items():
        if not isinstance(x, Tensor) and not (x is None and name in ("proj", "classes")):
            raise TypeError(f"{name} is a {type(x).__name__}; it must be a torch tensor")
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}")
    if backend != "auto" and q.device.type != "cpu":
        raise ValueError(f"q is on {q.device} and backend is {backend!r}, which takes tensors in host memory")
    for name, x in {"causal": causal, "return_classes": return_classes}.items():
        if x.__class__ is not bool:
            raise TypeError(f"{name} is {x!r}; it must be True or False")
    if not torch.compiler.is_compiling():  # tracers know no class of numbers; the operator checks them again
        check_options(critical, negligible, feature_map, form, eps, proj is not None)
        scale = _check_scale(scale, q.shape[-1])
    _check(q, k, v, proj, classes)
    if torch.is_autocast_enabled(q.device.type):
        to = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x if x.dtype is torch.float64 else x.to(to) for x in (q, k, v))
    axes = q.dim()
    q, k, v = (x[(None,) * (4 - axes)] for x in (q, k, v))
    eps = EPS[form] if eps is None else eps
    how = critical, negligible, feature_map, form, eps, causal, scale, backend
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        o, *kept = Functional.apply(q, k, v, proj, classes, *how)
        classes = kept[0] if classes is None else classes
    else:
        result = Sla.apply(q, k, v, proj, classes, *how)
        o, classes = result if classes is None else (result, classes)
    o = o[(0,) * (4 - axes)]
    return (o, classes) if return_classes else o


def _check_scale(scale: Any, d: int) -> float | None:
    if scale is None:
        return None
    scale = heads.check_scale(scale, max(1, d))
    if scale <= 0:
        raise ValueError(f"scale is {scale}; SLA takes one above 0")
    return scale


def _check(q: Tensor, k: Tensor, v: Tensor, proj: Maybe, classes: Maybe) -> None:
    """Whether shapes fit together; what kernels do not take besides they refuse themselves."""
    shapes = f"q has shape {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}"
    if not 2 <= q.dim() <= 4 or k.shape != v.shape or q.dim() != k.dim():
        raise ValueError(f"{shapes}; they must have the same number of axes, 2 to 4, and k and v one shape")
    if q.shape[:-3] != k.shape[:-3] or q.shape[-1] != k.shape[-1]:
        raise ValueError(f"{shapes}; batch and head dimension must be the same")
    if 0 in q.shape or 0 in k.shape:
        raise ValueError(f"{shapes}; SLA takes at least one row and one key")
    if q.dim() > 2 and q.shape[-3] % k.shape[-3]:
        raise ValueError(f"{shapes}; the number of heads of k and v must divide that of q")
    if not q.is_floating_point() or not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; they must be one floating-point type")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v are on {q.device}, {k.device} and {v.device}; they must be in one place")
    d = q.shape[-1]
    if proj is not None and (tuple(proj.shape) != (d, d) or not proj.is_floating_point() or proj.device != q.device):
        raise ValueError(
            f"proj has shape {tuple(proj.shape)} of {proj.dtype} on {proj.device}; it must be {(d, d)}, of a "
            f"floating-point type, on {q.device}"
        )
    batch, head, m, n = *(1, 1, *q.shape[:-2])[-2:], q.shape[-2], k.shape[-2]
    wanted = (batch, head, -(-m // BLOCK), -(-n // BLOCK))
    if classes is not None and (
        classes.dtype is not torch.int8 or tuple(classes.shape) != wanted or classes.device != q.device
    ):
        raise ValueError(
            f"classes is {classes.dtype} of shape {tuple(classes.shape)}; it must be torch.int8 of shape {wanted} on "
            f"{q.device}"
        )


class SparseLinearAttention(torch.nn.Module):
    """SLA with its projection, in the place of softmax attention: ``module(q, k, v) -> o``.

    Args:
        head_dim: D of q, k and v.
        critical, negligible, feature_map, form, eps, causal, scale, backend: as of :func:`sla_attention`. The authors'
            module is ``form="all"`` on their main branch and ``form="rest"`` on SLA-1, with ``negligible=0``; it rounds
            the number of critical tiles down, here they are rounded up.
        bias: the projection has one, as in the authors' code; the paper has none.
        device, dtype: of the parameters; float32, as optimizers want them, whatever q is.

    Attributes:
        proj_l: ``torch.nn.Linear(D, D)``, zeros at first; it is rounded to the type of q.
    """

    def __init__(
        self, head_dim: int, *, critical: float = 0.05, negligible: float = 0.10, feature_map: str = "softmax",
        form: str = "paper", eps: float | None = None, causal: bool = False, scale: float | None = None,
        bias: bool = True, backend: str = "auto", device: Any = None, dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        super().__init__()
        if head_dim.__class__ is not int or head_dim < 1:
            raise ValueError(f"head_dim is {head_dim!r}; it must be a whole number from 1 on")
        check_options(critical, negligible, feature_map, form, eps, True)
        self.options: dict[str, Any] = {
            "critical": critical, "negligible": negligible, "feature_map": feature_map, "form": form, "eps": eps,
            "causal": causal, "scale": scale, "backend": backend,
        }  # fmt: skip
        self.proj_l = torch.nn.Linear(head_dim, head_dim, bias=bias, device=device, dtype=dtype)
        for parameter in self.proj_l.parameters():
            torch.nn.init.zeros_(parameter)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """o ``[B, H, M, D]`` of q ``[B, H, M, D]``, k and v ``[B, Hkv, N, D]``."""
        o = sla_attention(q, k, v, proj=self.proj_l.weight.t(), **self.options)
        return o if self.proj_l.bias is None else o + self.proj_l.bias.to(o.dtype)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items() if value is not None)
