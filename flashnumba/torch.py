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

from dataclasses import replace
from typing import Any

try:
    import torch
except ImportError as error:
    raise ImportError(
        "flashnumba.torch needs PyTorch, which is not installed: pip install 'flashnumba[torch]'"
    ) from error

from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

import flashnumba
from flashnumba.stages.again import has_tangent

__all__ = ["BACKENDS", "attention", "scaled_dot_product_attention"]

BACKENDS = {
    "auto": ("auto", "auto"),
    "flash_forward.simt": ("flash_forward.simt", "backward.simt"),
    "flash_forward.mma": ("flash_forward.mma", "backward.mma"),
    "flash_forward.split": ("flash_forward.split", "backward.mma"),
    "backward.simt": ("auto", "backward.simt"),
    "backward.mma": ("auto", "backward.mma"),
    "backward.one_pass": ("auto", "backward.one_pass"),
    "numpy": ("numpy", "numpy"),
    "emulator": ("emulator", "emulator"),
}
"""What computes the forward and the gradients for each ``backend``."""

Grad = Tensor | None


# -- what the operators do ---------------------------------------------------------------------------------------------
def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, backend: str) -> tuple[Tensor, Tensor]:
    if _by_reference(q, backend):
        return _forward64(q, k, v, causal, scale)
    q, k, v = _bare(q, k, v)
    return flashnumba.attention(q, k, v, causal=causal, scale=scale, return_lse=True, backend=BACKENDS[backend][0])


def _backward(
    do: Tensor, dlse: Grad, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool,
    scale: float | None, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if _by_reference(q, backend):
        return _backward64(do, dlse, q, k, v, o, lse, causal, scale)
    if do.stride(-1) != 1:  # of a sum it is one number, expanded; read as it is it would cost all tensors their vectors
        do = do.contiguous()
    do, q, k, v, o, lse, *more = _bare(do, q, k, v, o, lse, *(() if dlse is None else (dlse,)))
    dlse = more[0] if more else None
    return flashnumba.attention_backward(
        do, q, k, v, o, lse, causal=causal, scale=scale, dlse=dlse, backend=BACKENDS[backend][1]
    )


def _by_reference(q: Tensor, backend: str) -> bool:
    return q.dtype is torch.float64 and q.device.type == "cpu" and backend in ("auto", "numpy")


def _bare(*tensors: Tensor) -> list[Tensor]:
    """Without what asks for a gradient: such a tensor would be described and planned anew at each call."""
    return [x.detach() if x.requires_grad else x for x in tensors]


def _forward64(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    from flashnumba.machine.arrays import describe
    from flashnumba.stages import heads
    from flashnumba.stages.flash_forward import reference

    found = {name: replace(describe(x, name), element="float32") for name, x in (("q", q), ("k", k), ("v", v))}
    for name, x in (("k", k), ("v", v)):
        if x.dtype is not torch.float64:
            raise TypeError(f"{name} has elements of type {x.dtype} and q of float64; they must be the same")
    scale = heads.check_scale(scale, heads.check(**found, causal=causal).d)
    o, lse = reference.dense(*(x.detach().numpy() for x in (q, k, v)), scale, causal)
    return torch.from_numpy(o).contiguous(), torch.from_numpy(lse).contiguous()


def _backward64(
    do: Tensor, dlse: Grad, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from flashnumba.stages.backward import reference

    arrays = [x.detach().numpy() for x in (q, k, v, o, do, lse)]
    found = reference.blocked(*arrays, scale, causal, None if dlse is None else dlse.detach().numpy())
    dq, dk, dv = (torch.from_numpy(x).contiguous() for x in found)
    return dq, dk, dv


# -- their results, as tracers see them --------------------------------------------------------------------------------
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, backend: str) -> Any:
    inside = torch.float64 if q.dtype is torch.float64 else torch.float32
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=inside)


def _backward_fake(do: Tensor, dlse: Grad, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


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
    backward = _backward if way == "nobody" else _Backward.apply if way == "torch.func" else BACKWARD
    return (*backward(do, dlse, q, k, v, o, lse, *ctx.options), None, None, None)


def _no_second_derivative(ctx: Any, *grads: Grad) -> None:
    raise RuntimeError(
        "flashnumba.torch.attention has no second derivatives: a gradient of it was differentiated again. "
        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) with torch's scaled_dot_product_attention has them"
    )


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
    for operator, does, fake in ((forward, _forward, _forward_fake), (backward, _backward, _backward_fake)):
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


# -- the three ways to them --------------------------------------------------------------------------------------------
class _Eager(torch.autograd.Function):
    """Plain tensors, outside of all transforms and tracers, pass by torch's dispatcher, which costs a host as much as a
    launch."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Any:
        results = _forward(q, k, v, *options)
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
    plain = all(t.__class__ in _PLAIN for t in (x, y, z)) and not torch._C._len_torch_dispatch_stack()
    return "nobody" if plain else "torch"


_PLAIN = (Tensor, torch.nn.Parameter)


# -- what is called ----------------------------------------------------------------------------------------------------
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None, return_lse: bool = False,
    backend: str = "auto",
) -> Any:  # fmt: skip
    """``softmax(scale * q k^T) v`` with gradients, without the matrix of scores in memory, forth or back.

    Args:
        q: ``[B, H, M, D]``, ``[H, M, D]`` or ``[M, D]`` float16, bfloat16 or float32, and on the CPU float64, for
            ``gradcheck``. Any strides. Under autocast q, k and v are cast as torch's own attention casts them: float64
            stays, the others become the autocast dtype.
        k, v: ``[B, Hkv, N, D]``; head h of q reads head ``h // (H // Hkv)``, and gradients are sums over these heads.
        causal: key j is visible to row i iff ``j <= i + N - M``: aligned bottom-right, the last row sees all keys. Of
            :func:`scaled_dot_product_attention` it is torch's, top-left; the two are the same for M = N.
        scale: of the scores, any finite number; None is ``1 / sqrt(D)``. It has no gradient.
        return_lse: also return the natural logarithm of each row's sum of exponentials of scaled scores, through which
            gradients flow too.
        backend: what :func:`flashnumba.attention` and :func:`flashnumba.attention_backward` get: see :data:`BACKENDS`.
            All but ``"backward.one_pass"`` give the same bits every time.

    Returns:
        o, a new packed tensor of q's shape and dtype, or ``(o, lse)``, lse ``[B, H, M]`` float32 (float64 for
        float64). A row that sees no key has o = 0, lse = -inf and adds nothing to any gradient.

    Raises:
        TypeError: an argument is no tensor, of elements that do not fit, or of another type than said above.
        ValueError: shapes, places or values that do not fit. Nothing has run then.
        RuntimeError: a second derivative is asked for.
    """
    if causal.__class__ is not bool:
        raise TypeError(f"causal is {causal!r}; it must be True or False")
    if return_lse.__class__ is not bool:
        raise TypeError(f"return_lse is {return_lse!r}; it must be True or False")
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}")
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, float | int)):
        raise TypeError(f"scale is {scale!r}; it must be a real number, or None for 1 / sqrt(D)")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; it must be a torch tensor")
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = _autocast(q, k, v)
    axes = q.dim()
    if axes != 4:
        if not axes == k.dim() == v.dim() or axes not in (2, 3):
            shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
            raise ValueError(f"q, k and v have shapes {shapes}; they must have the same number of axes, 2 to 4")
        q, k, v = (x[(None,) * (4 - axes)] for x in (q, k, v))
    way = _way(q, k, v)
    if way == "nobody":
        asked = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        forward = _Eager.apply if asked else _forward
    else:
        forward = _Forward.apply if way == "torch.func" else FORWARD
    o, lse = forward(q, k, v, causal, scale, backend)
    if axes != 4:
        o, lse = o[(0,) * (4 - axes)], lse[(0,) * (4 - axes)]
    return (o, lse) if return_lse else o


def _autocast(*tensors: Tensor) -> list[Tensor]:
    """As torch's list of operators in lower precision: all but float64, which has no business on a GPU here."""
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return [x if x.dtype is torch.float64 or not x.is_floating_point() else x.to(dtype) for x in tensors]


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """``torch.nn.functional.scaled_dot_product_attention``, computed here: its conventions, its results.

    Args:
        query: ``[..., H, M, D]``; query, key and value have the same leading axes, D is 1 to 256.
        key, value: ``[..., Hkv, N, D]``.
        attn_mask, dropout_p: None and 0: no kernel here takes a mask or drops weights.
        is_causal: aligned top-left, as torch does it: key j is visible to row i iff ``j <= i``. For M < N keys from M
            on are seen by nobody and left out; for M > N rows from N on see all keys and are a second call.
        scale: None is ``1 / sqrt(D)``.
        enable_gqa: whether key and value may have fewer heads than query.

    Returns:
        A new tensor of query's shape and dtype, with gradients.

    Raises:
        ValueError: what torch takes and this does not: a mask, dropout, leading axes or widths that differ.
        TypeError, ValueError: as :func:`attention`.
    """
    if attn_mask is not None:
        raise ValueError("attn_mask is given; here it must be None: no kernel takes a mask other than is_causal")
    if dropout_p:
        raise ValueError(f"dropout_p is {dropout_p}; it must be 0: no kernel drops weights")
    shapes = f"query has shape {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)}"
    if not query.dim() == key.dim() == value.dim() or query.shape[:-3] != key.shape[:-3]:
        raise ValueError(f"{shapes}; they must have the same leading axes")
    if query.dim() > 2 and query.shape[-3] != key.shape[-3] and not enable_gqa:
        raise ValueError(f"{shapes}; fewer heads of key than of query need enable_gqa=True")
    leading = query.shape[:-3]
    if query.dim() > 4:
        query, key, value = (x.flatten(0, -4) for x in (query, key, value))
    o = _top_left(query, key, value, scale) if is_causal else attention(query, key, value, scale=scale)
    return o.unflatten(0, leading) if len(leading) > 1 else o


def _top_left(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    m, n = q.shape[-2], k.shape[-2]
    if m < n:
        k, v = k[..., :m, :], v[..., :m, :]
    if m <= n:
        return attention(q, k, v, causal=True, scale=scale)
    square = attention(q[..., :n, :], k, v, causal=True, scale=scale)
    return torch.cat((square, attention(q[..., n:, :], k, v, scale=scale)), -2)
