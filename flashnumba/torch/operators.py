"""The two operators as torch knows them, with their derivatives, and the ways to call them.

A call on plain tensors goes to the kernels by an autograd.Function; under a tracer or on a tensor of another class it
goes through torch's dispatcher; under ``torch.func``, by a Function with a rule for vmap. All have the same derivative.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

from flashnumba.stages.again import has_tangent
from flashnumba.torch import kernels
from flashnumba.torch.kernels import Grad

__all__ = ["BACKWARD", "FORWARD", "call"]


# -- their derivatives -------------------------------------------------------------------------------------------------
def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)


def _derivative(ctx: Any, do: Grad, dlse: Grad) -> tuple[Grad, ...]:
    q, k, v, o, lse = ctx.saved_tensors
    if do is None and dlse is None:
        return (None,) * 6
    do = torch.zeros_like(o) if do is None else do
    way = "torch" if is_legacy_batchedtensor(do) else _way(do, q, o)  # of autograd.grad(is_grads_batched=True)
    if torch.is_grad_enabled() and way == "nobody":
        way = "torch"  # is recorded, to refuse a second derivative
    backward = kernels.backward if way == "nobody" else _Backward.apply if way == "torch.func" else BACKWARD
    return (*backward(do, dlse, q, k, v, o, lse, *ctx.options), None, None, None)


def _no_second_derivative(ctx: Any, *grads: Grad) -> None:
    raise RuntimeError(
        "flashnumba.torch.attention has no second derivatives: a gradient of it was differentiated again. "
        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) with torch's scaled_dot_product_attention has them"
    )


# -- the three ways to them --------------------------------------------------------------------------------------------
class _Eager(torch.autograd.Function):
    """Plain tensors, outside of all transforms and tracers, pass by torch's dispatcher, which costs a host as much as a
    launch."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Any:
        results = kernels.forward(q, k, v, *options)
        _keep(ctx, (q, k, v, *options), results)
        return results

    @staticmethod
    def backward(ctx: Any, do: Grad, dlse: Grad) -> Any:
        return _derivative(ctx, do, dlse)


class _Forward(torch.autograd.Function):
    """``torch.func`` does not reach a derivative that an operator has registered."""

    generate_vmap_rule = True
    setup_context = staticmethod(_keep)

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Any:
        return FORWARD(q, k, v, *options)

    @staticmethod
    def backward(ctx: Any, do: Grad, dlse: Grad) -> Any:
        return _derivative(ctx, do, dlse)


class _Backward(torch.autograd.Function):
    """The gradients for ``torch.func``."""

    generate_vmap_rule = True
    backward = staticmethod(_no_second_derivative)

    @staticmethod
    def forward(*args: Any) -> Any:
        return BACKWARD(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept: there is no derivative."""


def _way(x: Tensor, y: Tensor, z: Tensor) -> str:
    """Who is to see a call on these tensors: ``"nobody"``, ``"torch.func"`` or ``"torch"``, that is its dispatcher."""
    if torch.compiler.is_compiling():
        return "torch"
    if torch._C._are_functorch_transforms_active():
        return "torch.func"
    if any(has_tangent(t) for t in (x, y, z)):
        raise RuntimeError(
            "flashnumba.torch.attention has no jvp, that is no derivative in forward mode; use torch.autograd.grad or "
            "torch.func.vjp"
        )
    plain = all(t.__class__ in _PLAIN and not t.is_meta for t in (x, y, z))
    watched = torch._C._len_torch_dispatch_stack() or torch.jit.is_tracing()
    return "nobody" if plain and not watched else "torch"


_PLAIN = (Tensor, torch.nn.Parameter)


# -- under vmap: one batch more, which attention has already -----------------------------------------------------------
def _vmapped(operator: Any, tensors: int) -> Any:
    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        def fold(x: Grad, dim: int | None) -> Grad:
            if x is None:
                return None
            x = x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            return x.flatten(0, 1)

        folded = [fold(x, dim) for x, dim in zip(args[:tensors], in_dims[:tensors], strict=True)]
        results = operator(*folded, *args[tensors:])
        return tuple(x.unflatten(0, (info.batch_size, -1)) for x in results), (0,) * len(results)

    return rule


def _declare() -> tuple[torch.library.Library, Any, Any]:
    """The library, which must stay alive, and its two operators."""
    library = torch.library.Library("flashnumba", "DEF")
    options = "bool causal, float? scale, str backend"
    library.define(
        f"attention_forward(Tensor q, Tensor k, Tensor v, {options}) -> (Tensor o, Tensor lse)",
        tags=torch.Tag.pt2_compliant_tag,
    )
    library.define(
        "attention_backward(Tensor do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
        f"{options}) -> (Tensor dq, Tensor dk, Tensor dv)",
        tags=torch.Tag.pt2_compliant_tag,
    )
    forward = torch.ops.flashnumba.attention_forward.default
    backward = torch.ops.flashnumba.attention_backward.default
    for operator, does, fake in (
        (forward, kernels.forward, kernels.forward_fake), (backward, kernels.backward, kernels.backward_fake),
    ):  # fmt: skip
        name = operator.name().split("::")[1].removesuffix(".default")
        for device in ("CPU", "CUDA"):
            library.impl(name, does, device)
        torch.library.register_fake(f"flashnumba::{name}", fake, lib=library)
    register = torch.library.register_autograd
    register("flashnumba::attention_forward", _derivative, setup_context=_keep, lib=library)
    register("flashnumba::attention_backward", _no_second_derivative, lib=library)
    torch.library.register_vmap("flashnumba::attention_forward", _vmapped(forward, 3), lib=library)
    torch.library.register_vmap("flashnumba::attention_backward", _vmapped(backward, 7), lib=library)
    return library, forward, backward


_LIBRARY, FORWARD, BACKWARD = _declare()


def call(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, backend: str) -> tuple[Tensor, Tensor]:
    """(o, lse) of tensors with four axes, by the shortest way on which nobody misses the call."""
    way = _way(q, k, v)
    if way == "torch.func":
        return _Forward.apply(q, k, v, causal, scale, backend)
    if way == "torch":
        return FORWARD(q, k, v, causal, scale, backend)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _Eager.apply(q, k, v, causal, scale, backend)
    return kernels.forward(q, k, v, causal, scale, backend)
