"""The two operators of SLA as torch knows them, what they do, and the function with a derivative that is made of them.

On a GPU both are the kernels of :mod:`flashnumba.stages.sparsity.sla`; on a CPU they are computed by definition in
float64, :mod:`flashnumba.stages.sparsity.sla_reference`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from flashnumba.machine.arrays import describe
from flashnumba.stages import heads
from flashnumba.stages.host import machine_of
from flashnumba.stages.sparsity import sla
from flashnumba.stages.sparsity import sla_reference as reference

__all__ = ["BACKWARD", "FORWARD", "LEFT", "Maybe", "Sla", "backward", "forward", "forward_fake"]

LEFT = tuple(name for name in sla.KEPT if name not in ("q", "k", "v", "proj", "o", "classes"))
"""What the forward's kernels leave for those of the gradients, beside the inputs, o and the map."""
OPTIONS = (
    "float critical, float negligible, str feature_map, str form, float eps, bool causal, float? scale, str backend"
)
Maybe = Tensor | None


def by_kernels(q: Tensor, backend: str) -> bool:
    return backend == "emulator" or q.device.type != "cpu"


def plain(x: Tensor) -> Tensor:
    """As kernels take it: without a graph, and in memory what it stands for."""
    return x.detach().resolve_neg()


# -- what the operators do ---------------------------------------------------------------------------------------------
def forward(q: Tensor, k: Tensor, v: Tensor, proj: Maybe, classes: Maybe, *how: Any) -> tuple[Tensor, list[Tensor]]:
    """(o, [the map unless it is given, and what the kernels leave])."""
    options, causal, scale, backend = _options(proj, *how)
    if not by_kernels(q, backend):
        return _forward_by_definition(q, k, v, proj, classes, options, causal, scale)
    machine, cast = "emulator" if backend == "emulator" else "auto", None if proj is None else proj.detach().to(q.dtype)
    o, kept = sla.forward(
        plain(q), plain(k), plain(v), None if cast is None else cast.contiguous(), options, causal=causal,
        scale=scale, classes=None if classes is None else classes.contiguous(), machine=machine,
    )  # fmt: skip
    names = LEFT if classes is not None else ("classes", *LEFT)
    return o, [kept.arrays[name] for name in names]


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, proj: Maybe, o: Tensor, classes: Tensor, left: list[Tensor],
    *how: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv, dproj), the last of the dtype of proj, and empty without one."""
    options, causal, scale, backend = _options(proj, *how)
    if not by_kernels(q, backend):
        return _backward_by_definition(do, q, k, v, proj, classes, options, causal, scale)
    arrays = {
        "q": plain(q),
        "k": plain(k),
        "v": plain(v),
        "o": o.detach(),
        "classes": classes.contiguous(),
        **dict(zip(LEFT, left, strict=True)),
    }
    if proj is not None:
        arrays["proj"] = proj.detach().to(q.dtype).contiguous()
    of_q = describe(arrays["q"], "q")
    machine, arch = machine_of("emulator" if backend == "emulator" else "auto", of_q, "q")
    shape = replace(sla.check({name: describe(arrays[name], name) for name in "qkv"}, causal), arch=arch)
    kept = sla.Kept(shape, options, heads.check_scale(scale, shape.d), machine, of_q.device, of_q, arrays)
    dq, dk, dv, dproj = sla.backward(plain(do), kept)
    return dq, dk, dv, q.new_empty(0) if proj is None else dproj.to(proj.dtype)


def _options(
    proj: Maybe, critical: float, negligible: float, feature_map: str, form: str, eps: float, causal: bool,
    scale: float | None, backend: str,
) -> tuple[sla.Options, bool, float | None, str]:  # fmt: skip
    options = sla.check_options(critical, negligible, feature_map, form, eps, proj is not None)
    return options, causal, scale, backend


def _how(options: sla.Options, causal: bool, scale: float | None) -> dict[str, Any]:
    return {"feature_map": options.feature_map, "form": options.form, "eps": options.eps, "causal": causal,
            "scale": scale}  # fmt: skip


def _values(*tensors: Maybe) -> list[Any]:
    return [None if x is None else x.detach().resolve_neg().double().numpy() for x in tensors]


def _forward_by_definition(
    q: Tensor, k: Tensor, v: Tensor, proj: Maybe, classes: Maybe, options: sla.Options, causal: bool,
    scale: float | None,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    given = classes is not None
    if not given:
        found = reference.classify(*_values(q, k), options.critical, options.negligible, causal)
        classes = torch.from_numpy(found)
    result = reference.attend(*_values(q, k, v), classes.numpy(), *_values(proj), **_how(options, causal, scale))
    return torch.from_numpy(result.o).to(q.dtype).contiguous(), [] if given else [classes]


def _backward_by_definition(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, proj: Maybe, classes: Tensor, options: sla.Options, causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    how = _how(options, causal, scale)
    *found, dproj = reference.gradients(*_values(do, q, k, v), classes.numpy(), *_values(proj), **how)
    dq, dk, dv = (torch.from_numpy(x).to(y.dtype).contiguous() for x, y in zip(found, (q, k, v), strict=True))
    return dq, dk, dv, q.new_empty(0) if proj is None else torch.from_numpy(dproj).to(proj.dtype)


# -- what their results look like to a tracer --------------------------------------------------------------------------
def forward_fake(q: Tensor, k: Tensor, v: Tensor, proj: Maybe, classes: Maybe, *how: Any) -> Any:
    from flashnumba.stages.heads import Shape

    (batch, heads, m, d), (kv_heads, n) = q.shape, k.shape[1:3]
    shape = Shape(str(q.dtype).removeprefix("torch."), batch, heads, kv_heads, m, n, d)
    names = (() if classes is not None else ("classes",)) + (LEFT if by_kernels(q, how[-1]) else ())
    of = sla.sizes(shape)
    return q.new_empty(q.shape), [q.new_empty(of[name][1], dtype=getattr(torch, of[name][0])) for name in names]


def backward_fake(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, proj: Maybe, o: Tensor, classes: Tensor, left: list[Tensor],
    *how: Any,
) -> Any:  # fmt: skip
    return (*(x.new_empty(x.shape) for x in (q, k, v)), q.new_empty(0) if proj is None else proj.new_empty(proj.shape))


# -- under vmap: one batch more, which SLA has already; but a projection has a gradient for each sample ----------------
def _vmapped(operator: Any) -> Any:
    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        size, placed = info.batch_size, list(zip(args, in_dims, strict=True))
        proj = args[3 if operator is torch.ops.flashnumba.sla_forward.default else 4]

        def each(x: Any, dim: Any, pick: Any) -> Any:
            if isinstance(x, list | tuple):
                return [each(y, d, pick) for y, d in zip(x, dim, strict=True)]
            return pick(x, dim) if isinstance(x, Tensor) else x

        def fold(x: Tensor, dim: int | None) -> Tensor:
            x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            return x.flatten(0, 1).contiguous()

        if proj is None:
            results = operator(*(each(x, dim, fold) for x, dim in placed))
            return tree_map(
                lambda x: x.unflatten(0, (size, -1)) if x.numel() else x.expand(size, 0), results
            ), tree_map(lambda x: 0, results)
        samples = [
            operator(*(each(x, dim, lambda x, dim, i=i: x if dim is None else x.select(dim, i)) for x, dim in placed))
            for i in range(size)
        ]
        results = tree_map(lambda *x: torch.stack(x), *samples)
        return results, tree_map(lambda x: 0, results)

    return rule


def _declare() -> tuple[torch.library.Library, Any, Any]:
    """The library, which must stay alive, and its two operators."""
    library = torch.library.Library("flashnumba", "FRAGMENT")
    inputs = "Tensor q, Tensor k, Tensor v, Tensor? proj"
    library.define(
        f"sla_forward({inputs}, Tensor? classes, {OPTIONS}) -> (Tensor o, Tensor[] kept)",
        tags=torch.Tag.pt2_compliant_tag,
    )
    library.define(
        f"sla_backward(Tensor do, {inputs}, Tensor o, Tensor classes, Tensor[] kept, {OPTIONS}) -> (Tensor dq, "
        "Tensor dk, Tensor dv, Tensor dproj)",
        tags=torch.Tag.pt2_compliant_tag,
    )
    for name, does, fake in (("sla_forward", forward, forward_fake), ("sla_backward", backward, backward_fake)):
        for device in ("CPU", "CUDA"):
            library.impl(name, does, device)
        torch.library.register_fake(f"flashnumba::{name}", fake, lib=library)
    torch.library.register_autograd("flashnumba::sla_backward", _no_second_derivative, lib=library)
    operators = torch.ops.flashnumba
    for operator in (operators.sla_forward.default, operators.sla_backward.default):
        torch.library.register_vmap(operator.name().removesuffix(".default"), _vmapped(operator), lib=library)
    return library, operators.sla_forward.default, operators.sla_backward.default


def _no_second_derivative(ctx: Any, *grads: Any) -> None:
    raise RuntimeError("SLA has no second derivatives: a gradient of it was differentiated again")


_LIBRARY, FORWARD, BACKWARD = _declare()


class Sla(torch.autograd.Function):
    """The two operators as a function and its derivative; the map is held fixed. Returns o and the map, if it is not
    given."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, proj: Maybe, classes: Maybe, *how: Any) -> Any:
        o, kept = FORWARD(q, k, v, proj, classes, *how)
        _keep(ctx, (q, k, v, proj, classes, *how), (o, *kept))
        if classes is not None:
            return o
        ctx.mark_non_differentiable(kept[0])
        return o, kept[0]

    @staticmethod
    def backward(ctx: Any, do: Tensor, *others: Any) -> Any:
        return _derivative(ctx, do, BACKWARD)


class Functional(torch.autograd.Function):
    """The same for ``torch.func``, which does not see what a forward keeps unless it returns it: o and all of that."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, proj: Maybe, classes: Maybe, *how: Any) -> Any:
        o, kept = FORWARD(q, k, v, proj, classes, *how)
        return (o, *kept)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _keep(ctx, inputs, output)
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, do: Tensor, *others: Any) -> Any:
        return _derivative(ctx, do, FunctionalBackward.apply)


class FunctionalBackward(torch.autograd.Function):
    """The gradients for ``torch.func``."""

    generate_vmap_rule = True
    backward = staticmethod(_no_second_derivative)

    @staticmethod
    def forward(*args: Any) -> Any:
        do, q, k, v, proj, o, classes, *rest = args
        left, how = rest[: len(rest) - HOW], rest[len(rest) - HOW :]
        return BACKWARD(do, q, k, v, proj, o, classes, list(left), *how)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept: there is no derivative."""


HOW = len(OPTIONS.split(", "))
"""How many options the operators have."""


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, proj, classes, *ctx.how = inputs
    o, *kept = output
    found, left = (kept[0], kept[1:]) if classes is None else (classes, kept)
    ctx.save_for_backward(q, k, v, proj, o, found, *left)


def _derivative(ctx: Any, do: Tensor, backward: Any) -> Any:
    q, k, v, proj, o, classes, *left = ctx.saved_tensors
    rest = (left,) if backward is BACKWARD else left
    *found, dproj = backward(do, q, k, v, proj, o, classes, *rest, *ctx.how)
    return (*found, None if proj is None else dproj, None, *(None for _ in ctx.how))
