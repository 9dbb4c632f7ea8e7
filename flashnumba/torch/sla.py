"""Sparse-linear attention for PyTorch: a module to be fine-tuned in the place of attention, and the function in it.

>>> import torch
>>> from flashnumba.torch.sla import SparseLinearAttention
>>> attend = SparseLinearAttention(head_dim=64, critical=0.25, backend="numpy")
>>> q, k, v = (torch.randn(1, 2, 256, 64) for _ in range(3))
>>> attend(q, k, v).sum().backward()
>>> attend.proj.grad.shape
torch.Size([64, 64])

A model gets the module in each layer and is trained on for a while, 2000 steps in the paper: softmax attention over few
tiles and linear attention over the others are normalised apart, and the projection has to learn to put them together.
It begins at zero, as the authors' does, so that an untrained module is its sparse part alone.

Importing this module declares two operators, ``flashnumba::sla_forward`` and ``flashnumba::sla_backward``, so that
``torch.compile`` sees one node for each. On a GPU both are the kernels of :mod:`flashnumba.stages.sparsity.sla`, in
float16 or bfloat16; on a CPU they are computed by definition in float64, which also serves ``gradcheck``.
``torch.func`` and second derivatives are not served.

Source: Zhang et al., SLA, arXiv 2509.24006; code: thu-ml/SLA, whose ``proj_l.weight`` is this ``proj`` transposed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashnumba.stages.sparsity import sla
from flashnumba.stages.sparsity import sla_reference as reference

__all__ = ["BACKENDS", "SparseLinearAttention", "sla_attention"]

BACKENDS = ("auto", "numpy", "emulator")
LEFT = tuple(name for name in sla.KEPT if name not in ("q", "k", "v", "proj", "classes"))
"""What the forward's kernels leave for those of the gradients, beside the inputs and the map."""
OPTIONS = (
    "float critical, float negligible, str feature_map, str form, float eps, bool causal, float? scale, str backend"
)
Maybe = Tensor | None


def by_kernels(q: Tensor, backend: str) -> bool:
    return backend == "emulator" or q.device.type != "cpu"


def aligned(x: Tensor) -> Tensor:
    """As kernels take it: columns packed, rows at multiples of 16 bytes."""
    from flashnumba.machine.arrays import describe
    from flashnumba.stages import heads

    x = x.detach().resolve_neg()
    return x if heads.widest(describe(x)) >= 16 else x.clone(memory_format=torch.contiguous_format)


# -- what the operators do ---------------------------------------------------------------------------------------------
def forward(q: Tensor, k: Tensor, v: Tensor, proj: Maybe, classes: Maybe, *how: Any) -> tuple[Tensor, list[Tensor]]:
    """(o, [the map unless it is given, and what the kernels leave])."""
    options, causal, scale, backend = _options(proj, *how)
    if not by_kernels(q, backend):
        return _forward_by_definition(q, k, v, proj, classes, options, causal, scale)
    machine, cast = "emulator" if backend == "emulator" else "auto", None if proj is None else proj.detach().to(q.dtype)
    o, kept = sla.forward(
        aligned(q), aligned(k), aligned(v), None if cast is None else cast.contiguous(), options, causal=causal,
        scale=scale, classes=classes, machine=machine,
    )  # fmt: skip
    names = LEFT if classes is not None else ("classes", *LEFT)
    return o, [kept.arrays[name] for name in names]


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, proj: Maybe, classes: Tensor, left: list[Tensor], *how: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv, dproj), the last of the dtype of proj, and empty without one."""
    from dataclasses import replace

    from flashnumba.machine.arrays import describe
    from flashnumba.stages import heads
    from flashnumba.stages.host import machine_of

    options, causal, scale, backend = _options(proj, *how)
    if not by_kernels(q, backend):
        return _backward_by_definition(do, q, k, v, proj, classes, options, causal, scale)
    arrays = {
        "q": aligned(q),
        "k": aligned(k),
        "v": aligned(v),
        "classes": classes,
        **dict(zip(LEFT, left, strict=True)),
    }
    if proj is not None:
        arrays["proj"] = proj.detach().to(q.dtype).contiguous()
    of_q = describe(arrays["q"], "q")
    machine, arch = machine_of("emulator" if backend == "emulator" else "auto", of_q, "q")
    shape = replace(sla.check({name: describe(arrays[name], name) for name in "qkv"}, causal), arch=arch)
    kept = sla.Kept(shape, options, heads.check_scale(scale, shape.d), machine, of_q.device, of_q, arrays)
    dq, dk, dv, dproj = sla.backward(aligned(do), kept)
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

    batch, heads, m, d = q.shape
    shape = Shape(str(q.dtype).removeprefix("torch."), batch, heads, heads, m, k.shape[2], d)
    names = (() if classes is not None else ("classes",)) + (LEFT if by_kernels(q, how[-1]) else ())
    of = sla.sizes(shape)
    return q.new_empty(q.shape), [q.new_empty(of[name][1], dtype=getattr(torch, of[name][0])) for name in names]


def backward_fake(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, proj: Maybe, classes: Tensor, left: list[Tensor], *how: Any
) -> Any:  # fmt: skip
    return (*(x.new_empty(x.shape) for x in (q, k, v)), q.new_empty(0) if proj is None else proj.new_empty(proj.shape))


def _declare() -> tuple[torch.library.Library, Any, Any]:
    """The library, which must stay alive, and its two operators."""
    library = torch.library.Library("flashnumba", "FRAGMENT")
    inputs = "Tensor q, Tensor k, Tensor v, Tensor? proj"
    library.define(
        f"sla_forward({inputs}, Tensor? classes, {OPTIONS}) -> (Tensor o, Tensor[] kept)",
        tags=torch.Tag.pt2_compliant_tag,
    )
    library.define(
        f"sla_backward(Tensor do, {inputs}, Tensor classes, Tensor[] kept, {OPTIONS}) -> (Tensor dq, Tensor dk, "
        "Tensor dv, Tensor dproj)",
        tags=torch.Tag.pt2_compliant_tag,
    )
    for name, does, fake in (("sla_forward", forward, forward_fake), ("sla_backward", backward, backward_fake)):
        for device in ("CPU", "CUDA"):
            library.impl(name, does, device)
        torch.library.register_fake(f"flashnumba::{name}", fake, lib=library)
    torch.library.register_autograd("flashnumba::sla_backward", _no_second_derivative, lib=library)
    operators = torch.ops.flashnumba
    return library, operators.sla_forward.default, operators.sla_backward.default


def _no_second_derivative(ctx: Any, *grads: Any) -> None:
    raise RuntimeError("SLA has no second derivatives: a gradient of it was differentiated again")


_LIBRARY, FORWARD, BACKWARD = _declare()


class _Sla(torch.autograd.Function):
    """The two operators as a function and its derivative; the map is held fixed."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, proj: Maybe, classes: Maybe, *how: Any) -> Any:
        o, kept = FORWARD(q, k, v, proj, classes, *how)
        found, left = (kept[0], kept[1:]) if classes is None else (classes, kept)
        ctx.how = how
        ctx.save_for_backward(q, k, v, proj, found, *left)
        if classes is not None:
            return o
        ctx.mark_non_differentiable(found)
        return o, found

    @staticmethod
    def backward(ctx: Any, do: Tensor, *others: Any) -> Any:
        q, k, v, proj, classes, *left = ctx.saved_tensors
        *found, dproj = BACKWARD(do, q, k, v, proj, classes, left, *ctx.how)
        return (*found, None if proj is None else dproj, None, *(None for _ in ctx.how))


# -- what is called ----------------------------------------------------------------------------------------------------
def sla_attention(
    q: Tensor, k: Tensor, v: Tensor, *, proj: Tensor | None = None, critical: float = 0.05, negligible: float = 0.10,
    feature_map: str = "softmax", form: str = "paper", eps: float | None = None, classes: Tensor | None = None,
    causal: bool = False, scale: float | None = None, return_classes: bool = False, backend: str = "auto",
) -> Any:  # fmt: skip
    """:func:`flashnumba.sparse.sla.sla_attention` with gradients of q, k, v and proj; the map is held fixed.

    Args:
        q, k, v: as there; on a GPU float16 or bfloat16 with D 64 or 128, rows that are not aligned are copied; on a CPU
            any floating-point type and D. Under autocast they are cast, float64 excepted.
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
        sla.check_options(critical, negligible, feature_map, form, eps, proj is not None)
        scale = _check_scale(scale, q.shape[-1])
    _check(q, k, v, proj, classes)
    if torch.is_autocast_enabled(q.device.type):
        to = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x if x.dtype is torch.float64 else x.to(to) for x in (q, k, v))
    axes = q.dim()
    q, k, v = (x[(None,) * (4 - axes)] for x in (q, k, v))
    eps = reference.EPS[form] if eps is None else eps
    how = critical, negligible, feature_map, form, eps, causal, scale, backend
    result = _Sla.apply(q, k, v, proj, classes, *how)
    o, classes = result if classes is None else (result, classes)
    o = o[(0,) * (4 - axes)]
    return (o, classes) if return_classes else o


def _check_scale(scale: Any, d: int) -> float | None:
    from flashnumba.stages import heads

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
    if q.shape[:-2] != k.shape[:-2] or q.shape[-1] != k.shape[-1]:
        raise ValueError(f"{shapes}; SLA takes as many heads of k as of q, and one head dimension")
    if 0 in q.shape or 0 in k.shape:
        raise ValueError(f"{shapes}; SLA takes at least one row and one key")
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
    wanted = (batch, head, -(-m // reference.BLOCK), -(-n // reference.BLOCK))
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
            module is ``form="all"`` on their main branch and ``form="rest"`` on SLA-1, with ``negligible=0`` and
            ``bias=True``; it rounds the number of critical tiles down, here they are rounded up.
        bias: the projection has one.
        device, dtype: of the parameters; float32, as optimizers want them, whatever q is.

    Attributes:
        proj: ``[D, D]``, zeros at first: O^l is multiplied with it from the right.
        bias: ``[D]``, or None.
    """

    def __init__(
        self, head_dim: int, *, critical: float = 0.05, negligible: float = 0.10, feature_map: str = "softmax",
        form: str = "paper", eps: float | None = None, causal: bool = False, scale: float | None = None,
        bias: bool = False, backend: str = "auto", device: Any = None, dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        super().__init__()
        if head_dim.__class__ is not int or head_dim < 1:
            raise ValueError(f"head_dim is {head_dim!r}; it must be a whole number from 1 on")
        sla.check_options(critical, negligible, feature_map, form, eps, True)
        self.options = {
            "critical": critical, "negligible": negligible, "feature_map": feature_map, "form": form, "eps": eps,
            "causal": causal, "scale": scale, "backend": backend,
        }  # fmt: skip
        self.proj = torch.nn.Parameter(torch.zeros(head_dim, head_dim, device=device, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.zeros(head_dim, device=device, dtype=dtype)) if bias else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """o of q ``[B, H, M, D]``, k and v ``[B, H, N, D]``."""
        o = sla_attention(q, k, v, proj=self.proj, **self.options)
        return o if self.bias is None else o + self.bias.to(o.dtype)

    def extra_repr(self) -> str:
        given = {"head_dim": self.proj.shape[0], **self.options, "bias": self.bias is not None}
        return ", ".join(f"{name}={value!r}" for name, value in given.items())
