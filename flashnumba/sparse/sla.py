"""SLA for those who want to use it: sparse attention with a linear one beside it, and its gradients.

>>> import numpy as np
>>> from flashnumba.sparse.sla import sla_attention
>>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 640, 64)).astype(np.float16)
>>> o, info = sla_attention(q, k, v, critical=0.2, negligible=0.3, return_info=True, backend="numpy")
>>> o.shape, info.tile_map.shape, info.shares()
((1, 2, 640, 64), (1, 2, 10, 10), {'critical': 0.2, 'marginal': 0.5, 'negligible': 0.3})

What SLA is and what it costs is told in :mod:`flashnumba.stages.sparsity.sla_reference`. As a module of a network that
is fine-tuned: :class:`flashnumba.torch.sla.SparseLinearAttention`. Nothing heavy is imported before the first call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashnumba.stages.sparsity.sla import Options

__all__ = ["BACKENDS", "SlaInfo", "sla_attention", "sla_attention_backward"]

BACKENDS = ("auto", "numpy", "emulator")
"""Kernels where the arrays are, or NumPy if there is no GPU; the reference in float64; kernels on the emulator."""


@dataclass(frozen=True)
class SlaInfo:
    """What was computed how, and what the gradients need of it.

    Attributes:
        tile_map: int8 ``[B, H, row tiles, key tiles]`` of q's kind, on its device: 1 critical, 2 critical because the
            causal mask cuts it, 0 marginal, -1 negligible, -2 hidden by the causal mask.
        tile: rows and keys of a tile.
    """

    tile_map: Any
    tile: tuple[int, int]
    _kept: Any = field(repr=False, default=None)

    def shares(self) -> dict[str, float]:
        """Of the tiles that some row sees, which share is of each class. Waits for a GPU."""
        import numpy as np

        tile_map = self.tile_map.cpu() if hasattr(self.tile_map, "cpu") else self.tile_map
        tile_map = np.asarray(tile_map.get() if hasattr(tile_map, "get") else tile_map)
        seen = max(1, int((tile_map > -2).sum()))
        which = {"critical": tile_map > 0, "marginal": tile_map == 0, "negligible": tile_map == -1}
        return {name: round(int(found.sum()) / seen, 6) for name, found in which.items()}


@dataclass
class OnHost:
    """What NumPy keeps for the gradients."""

    arrays: dict[str, Any]
    results: Any
    how: dict[str, Any]


def sla_attention(
    q: Any, k: Any, v: Any, *, proj: Any = None, critical: float = 0.05, negligible: float = 0.10,
    feature_map: str = "softmax", form: str = "paper", eps: float | None = None, causal: bool = False,
    scale: float | None = None, return_info: bool = False, backend: str = "auto",
) -> Any:  # fmt: skip
    """Softmax attention over the critical tiles of 64 x 64, linear attention over the marginal ones, and their sum.

    ``o = O^s + O^l proj``. Made for models that are fine-tuned with it: without that the linear part is a guess.

    Args:
        q: ``[B, H, M, D]``, or with fewer leading axes, any strides. Kernels take float16 and bfloat16 and D from 1 to
            128, from sm_80 on: their states, D by D, have to fit in a block. NumPy takes what
            :func:`flashnumba.attention` takes. Kernels read arrays in place where columns are packed and rows lie at
            multiples of 16 bytes, and copies of the others; D that is no multiple of 8 is copied in and out.
        k, v: ``[B, Hkv, N, D]``; Hkv divides H, and head h of q has theirs of number ``h // (H // Hkv)``.
        proj: ``[D, D]`` of q's type: ``o = O^s + O^l @ proj``; None is the identity.
        critical, negligible: shares of a row's tiles, 0 to 1; the others are marginal. With critical=1 o is attention.
        feature_map: phi of the linear part: softmax over the columns, elu (plus one), or relu.
        form: "paper": the linear part has the marginal tiles; "rest": all that are not critical, as the authors' branch
            SLA-1; "all": all tiles, as their main branch.
        eps: is added to the linear part's sum of weights; None is 1e-5 for "all", as there, and else 0.
        causal: bottom-right aligned; tiles that the mask cuts are critical.
        scale: of the scores, above 0; None is ``1 / sqrt(D)``.
        return_info: also return an :class:`SlaInfo`.
        backend: of :data:`BACKENDS`.

    Returns:
        o, a new packed array as q, or ``(o, info)``. The same bits every time.

    Raises:
        TypeError, ValueError: an argument does not fit, before anything is launched.

    Source: arXiv 2509.24006.
    """
    from flashnumba.stages.sparsity.sla import check_options

    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}")
    if not isinstance(return_info, bool):
        raise TypeError(f"return_info is {return_info!r}; it must be True or False")
    options = check_options(critical, negligible, feature_map, form, eps, proj is not None)
    if backend == "numpy" or (backend == "auto" and not _on_gpu(q)):
        o, tile_map, kept = _by_numpy(q, k, v, proj, options, causal, scale)
    else:
        from flashnumba.stages.sparsity.sla import forward

        machine = "emulator" if backend == "emulator" else "auto"
        o, kept = forward(q, k, v, proj, options, causal=causal, scale=scale, machine=machine)
        tile_map = kept.arrays["classes"]
    return (o, SlaInfo(tile_map, (64, 64), kept)) if return_info else o


def sla_attention_backward(do: Any, info: SlaInfo) -> tuple[Any, Any, Any, Any]:
    """The gradients of ``o, info = sla_attention(q, k, v, proj=proj, return_info=True)``, with the map held fixed.

    Args:
        do: the gradient of o, of its shape and type.
        info: what the forward returned. Its q, k, v and proj are used as they now are.

    Returns:
        (dq, dk, dv, dproj): as q ``[B, H, M, D]``, and as k and v ``[B, Hkv, N, D]``, summed over the heads of q that
        share one; dproj is float32 ``[D, D]``, summed over all heads and rows, or None where there was no proj. The
        same bits every time.

    Raises:
        TypeError, ValueError: do is not as q.
    """
    if not isinstance(info, SlaInfo) or info._kept is None:
        raise TypeError(f"info is {info!r}; it must be what sla_attention(..., return_info=True) returned")
    if isinstance(info._kept, OnHost):
        return _gradients_by_numpy(do, info._kept)
    from flashnumba.stages.sparsity.sla import backward

    return backward(do, info._kept)


def _on_gpu(q: Any) -> bool:
    from flashnumba.machine import gpu
    from flashnumba.machine.arrays import describe

    return describe(q, "q").device is not None or gpu.available()


# -- by NumPy, head by head, in float64 --------------------------------------------------------------------------------
def _by_numpy(
    q: Any, k: Any, v: Any, proj: Any, options: Options, causal: bool, scale: float | None
) -> tuple[Any, Any, OnHost]:  # fmt: skip
    from flashnumba.machine.arrays import describe, empty_like_kind
    from flashnumba.stages import heads
    from flashnumba.stages.host import refuse_gradients
    from flashnumba.stages.sparsity import sla_reference as reference
    from flashnumba.stages.sparsity.sla import check

    named = {"q": q, "k": k, "v": v} | ({} if proj is None else {"proj": proj})
    refuse_gradients(**named)
    found = {name: describe(x, name) for name, x in named.items()}
    for name, of in found.items():
        if of.device is not None:
            raise ValueError(f"{name} is on cuda:{of.device} and backend is 'numpy', which takes arrays in host memory")
    shape = check(found, causal, kernels=False)
    scale = heads.check_scale(scale, shape.d)
    if scale <= 0:
        raise ValueError(f"scale is {scale}; SLA takes one above 0")
    host = {name: _values(x, found[name].element) for name, x in named.items()}
    tile_map = empty_like_kind(q, (1,) * (4 - host["q"].ndim) + (*host["q"].shape[:-2], *_tiles(shape)), "int8")
    classes = reference.classify(host["q"], host["k"], options.critical, options.negligible, causal)
    _values(tile_map, "int8")[...] = classes.reshape(tile_map.shape)
    how = {"feature_map": options.feature_map, "form": options.form, "eps": options.eps, "causal": causal}
    how |= {"scale": scale}
    o = empty_like_kind(q, found["q"].shape)
    _values(o, found["q"].element)[...] = reference.attend(
        host["q"], host["k"], host["v"], classes, host.get("proj"), **how
    ).o
    return o, tile_map, OnHost(host | {"classes": classes}, named, how)


def _gradients_by_numpy(do: Any, kept: OnHost) -> tuple[Any, Any, Any, Any]:
    from flashnumba.machine.arrays import describe, empty_like_kind
    from flashnumba.stages.sparsity import sla_reference as reference

    of_do, of_q = (describe(x, name) for name, x in (("do", do), ("q", kept.results["q"])))
    if of_do.element != of_q.element:
        raise TypeError(f"do has elements of type {of_do.element}; they must be q's, {of_q.element}")
    if of_do.shape != of_q.shape or of_do.device is not None:
        raise ValueError(f"do has shape {of_do.shape}; it must be as q, {of_q.shape}, in host memory")
    arrays = kept.arrays
    exact = reference.gradients(
        _values(do, of_do.element), *(arrays[name] for name in ("q", "k", "v", "classes")), arrays.get("proj"),
        **kept.how,
    )  # fmt: skip
    results = []
    for name, gradient in zip(("q", "k", "v", "proj"), exact, strict=True):
        if name not in kept.results:
            results.append(None)
            continue
        like = kept.results[name]
        element = "float32" if name == "proj" else of_q.element
        result = empty_like_kind(like, gradient.shape, element)
        _values(result, element)[...] = gradient
        results.append(result)
    return tuple(results)  # type: ignore[return-value]


def _values(x: Any, element: str) -> Any:
    """An array in host memory as NumPy computes with it, sharing its memory."""
    from flashnumba.machine.arrays import element_dtype, host_view

    return host_view(x).view(element_dtype(element))


def _tiles(shape: Any) -> tuple[int, int]:
    from flashnumba.stages.sparsity.sla import tiles_of

    return tiles_of(shape)
