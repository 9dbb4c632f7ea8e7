"""Sparse-linear attention (SLA): softmax attention where it is needed, linear attention where low rank will do.

>>> import numpy as np
>>> from flashnumba.sparse import sla
>>> q, k, v = (np.random.default_rng(i).standard_normal((1, 2, 256, 64), np.float32) for i in range(3))
>>> o, info = sla.sla_attention(q, k, v, critical=0.25, negligible=0.25, return_info=True, backend="numpy")
>>> o.shape, info.counts()
((1, 2, 256, 64), {'critical': 8, 'marginal': 16, 'negligible': 8, 'unseen': 0})

It is meant to be trained: :mod:`flashnumba.torch.sla` has the module. What each part is, and where the paper and the
authors' code differ, is in :mod:`flashnumba.stages.sparsity.sla_reference`.

Source: Zhang et al., SLA, arXiv 2509.24006; code: thu-ml/SLA.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from flashnumba.stages.sparsity.sla import Kept, Options

__all__ = ["BACKENDS", "Info", "sla_attention", "sla_attention_backward"]

KERNEL = "sparsity.sla"
BACKENDS = ("auto", KERNEL, "numpy", "emulator")


@dataclass(frozen=True)
class Info:
    """What a call has used, for the curious and for :func:`sla_attention_backward`.

    Attributes:
        classes: the map of 64 x 64 tiles, int8 ``[..., row tiles, key tiles]``: 1 critical, 2 critical because a causal
            mask cuts it, 0 marginal, -1 negligible, -2 hidden by the mask. Of the arrays' kind.
        backend: what computed it: the kernels' name, or ``"numpy"``.
    """

    classes: Any
    backend: str
    _kept: Kept | None = field(default=None, repr=False)
    _problem: dict[str, Any] = field(default_factory=dict, repr=False)

    def counts(self) -> dict[str, int]:
        """Tiles of each class in all heads. Waits for a GPU."""
        from flashnumba.stages.sparsity.sla_reference import UNSEEN

        classes = np.asarray(self.classes.cpu() if hasattr(self.classes, "cpu") else self.classes)
        classes = classes.get() if hasattr(classes, "get") else classes
        found = {"critical": classes > 0, "marginal": classes == 0, "negligible": classes == -1}
        return {name: int(x.sum()) for name, x in (found | {"unseen": classes == UNSEEN}).items()}


def sla_attention(
    q: Any, k: Any, v: Any, *, proj: Any = None, critical: float = 0.05, negligible: float = 0.10,
    feature_map: str = "softmax", form: str = "paper", eps: float | None = None, classes: Any = None,
    causal: bool = False, scale: float | None = None, return_info: bool = False, backend: str = "auto",
) -> Any:  # fmt: skip
    """``O^s + O^l proj``: softmax attention over critical tiles, and linear attention over marginal ones.

    Args:
        q: ``[B, H, M, D]``, ``[H, M, D]`` or ``[M, D]``. For kernels float16 or bfloat16, D 64 or 128, columns packed
            and rows at multiples of 16 bytes; for NumPy float32 too, any D and any strides.
        k, v: ``[B, H, N, D]``, as many heads as q. M and N are at least 1.
        proj: ``[D, D]`` of q's dtype, packed; None is the identity.
        critical: share of the tiles that a row tile sees which are critical, rounded up. 1: dense attention.
        negligible: share that is left out, rounded down.
        feature_map: ``"softmax"`` over the columns of a row, ``"elu"`` (+ 1), or ``"relu"``.
        form: which tiles the linear part has. ``"paper"``: the marginal ones; ``"rest"``: all that are not critical;
            ``"all"``: all. The latter two are those of the authors' code.
        eps: added to the linear part's sum of weights, at least 0; None is 1e-5 for ``"all"`` and else 0.
        classes: a map of one's own, as of :class:`Info`; int8 with q's leading axes, packed. None: it is guessed.
        causal: key j is visible to row i iff ``j <= i + N - M``. Tiles that the mask cuts are critical in any case.
        scale: of the scores, above 0; None is ``1 / sqrt(D)``.
        return_info: also return an :class:`Info`. It keeps in memory what gradients need.
        backend: ``"auto"``: the kernels on a GPU, NumPy without one. ``"sparsity.sla"``: the kernels, for arrays in
            host memory on a GPU if there is one and else on the emulator. ``"emulator"``: the kernels there, checked
            for races and the like. ``"numpy"``: by definition in float64, with all weights in memory.

    Returns:
        o, a new packed array of q's shape, dtype and kind; or ``(o, info)``.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it and its value. Nothing has run then.
    """
    from flashnumba.stages.sparsity import sla

    if not isinstance(return_info, bool | np.bool_):
        raise TypeError(f"return_info is {return_info!r}; it must be True or False")
    options = sla.check_options(critical, negligible, feature_map, form, eps, proj is not None)
    machine = _machine(q, backend)
    if machine == "numpy":
        o, info = _on_numpy(q, k, v, proj, options, classes, causal, scale)
    else:
        given = None if classes is None else _four_axes(classes, "classes")
        o, kept = sla.forward(
            q, k, v, proj, options, causal=causal, scale=scale, classes=given, machine=machine
        )  # fmt: skip
        found = kept.arrays["classes"]
        info = Info(found[(0,) * (4 - len(kept.found.shape))], KERNEL, kept)
    return (o, info) if return_info else o


def sla_attention_backward(do: Any, info: Info) -> tuple[Any, Any, Any, Any]:
    """The gradients of a call of :func:`sla_attention`, with its map held fixed.

    Args:
        do: the gradient of o, as q; for kernels with packed columns and rows at multiples of 16 bytes.
        info: of that call, made with ``return_info=True``. Its arrays must not have changed since.

    Returns:
        (dq, dk, dv, dproj): as q, k and v; dproj float32 ``[D, D]``, None without a proj. The same bits every time.

    Raises:
        TypeError, ValueError: do is not as q.
    """
    from flashnumba.stages.sparsity import sla

    if not isinstance(info, Info):
        raise TypeError(f"info is a {type(info).__name__}; it must be what sla_attention(..., return_info=True) gave")
    if info._kept is not None:
        return sla.backward(do, info._kept)
    return _gradients_on_numpy(do, info)


def _machine(q: Any, backend: Any) -> str:
    """``"numpy"``, or what kernels run on."""
    from flashnumba.attention import _notice
    from flashnumba.machine import gpu
    from flashnumba.machine.arrays import describe

    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}")
    if backend == KERNEL:
        return "auto"
    device = describe(q, "q").device
    if backend == "auto":
        if device is not None or gpu.available():
            return "auto"
        _notice()
        return "numpy"
    if device is not None:
        raise ValueError(f"q is on cuda:{device} and backend is {backend!r}, which takes arrays in host memory")
    return backend


def _four_axes(array: Any, name: str) -> Any:
    """The array with axes of length 1 in front."""
    from flashnumba.machine.arrays import describe
    from flashnumba.stages import heads

    found = describe(array, name)
    if not 2 <= len(found.shape) <= 4:
        raise ValueError(f"{name} has shape {found.shape}; it must have 2 to 4 axes")
    return heads._view(array, found, 4)


# -- with NumPy --------------------------------------------------------------------------------------------------------
def _on_numpy(
    q: Any, k: Any, v: Any, proj: Any, options: Options, classes: Any, causal: Any, scale: Any
) -> tuple[Any, Info]:  # fmt: skip
    from flashnumba.machine.arrays import describe, empty_like_kind
    from flashnumba.stages import heads
    from flashnumba.stages.host import refuse_gradients
    from flashnumba.stages.sparsity import sla_reference as reference

    named = {"q": q, "k": k, "v": v} | ({} if proj is None else {"proj": proj})
    refuse_gradients(**named)  # none is recorded
    found = {name: describe(x, name) for name, x in named.items()}
    shape = heads.check(*(found[name] for name in "qkv"), causal=causal)
    if shape.kv_heads != shape.heads:
        raise ValueError(f"q has {shape.heads} heads and k {shape.kv_heads}; SLA takes as many of either")
    if 0 in (shape.batch, shape.heads, shape.m, shape.n):
        raise ValueError(f"q has shape {found['q'].shape} and k {found['k'].shape}; SLA takes at least one row and key")
    if proj is not None and (found["proj"].shape != (shape.d, shape.d) or found["proj"].element != shape.element):
        raise ValueError(
            f"proj has shape {found['proj'].shape} of {found['proj'].element}; it must be {(shape.d, shape.d)} of "
            f"{shape.element}"
        )
    scale = heads.check_scale(scale, shape.d)
    if scale <= 0:
        raise ValueError(f"scale is {scale}; SLA takes one above 0")
    arrays = {name: _host(x, name) for name, x in named.items()} | ({"proj": None} if proj is None else {})
    how = {"feature_map": options.feature_map, "form": options.form, "eps": options.eps, "causal": bool(causal),
           "scale": scale}  # fmt: skip
    if classes is None:
        shares = options.critical, options.negligible
        classes = empty_like_kind(q, _map_shape(found["q"].shape, shape), "int8")
        _host(classes, "classes")[...] = reference.classify(arrays["q"], arrays["k"], *shares, bool(causal))
    else:
        of_map, wanted = describe(classes, "classes"), _map_shape(found["q"].shape, shape)
        if of_map.element != "int8" or of_map.shape != wanted:
            raise ValueError(
                f"classes is {of_map.element} of shape {of_map.shape}; it must be int8 of shape {wanted}"
            )  # fmt: skip
    held = _host(classes, "classes")
    o = _like(q, reference.attend(**_without(arrays, "proj"), classes=held, proj=arrays["proj"], **how).o)
    return o, Info(classes, "numpy", None, {"arrays": arrays, "classes": held, "how": how, "kinds": named})


def _gradients_on_numpy(do: Any, info: Info) -> tuple[Any, Any, Any, Any]:
    from flashnumba.machine.arrays import describe
    from flashnumba.stages.host import refuse_gradients
    from flashnumba.stages.sparsity import sla_reference as reference

    refuse_gradients(do=do)
    arrays, named = info._problem["arrays"], info._problem["kinds"]
    of_do, of_q = describe(do, "do"), describe(named["q"], "q")
    if of_do.element != of_q.element or of_do.shape != of_q.shape or of_do.device is not None:
        raise ValueError(
            f"do is {of_do.element} of shape {of_do.shape}; it must be as q: {of_q.element} of shape {of_q.shape}, in "
            "host memory"
        )
    given = {**_without(arrays, "proj"), "classes": info._problem["classes"], "proj": arrays["proj"]}
    *found, dproj = reference.gradients(_host(do, "do"), **given, **info._problem["how"])
    dq, dk, dv = (_like(named[name], x) for name, x in zip("qkv", found, strict=True))
    return dq, dk, dv, None if arrays["proj"] is None else _like(named["proj"], dproj, "float32")


def _without(arrays: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: x for key, x in arrays.items() if key != name}


def _map_shape(of_q: tuple[int, ...], shape: Any) -> tuple[int, ...]:
    from flashnumba.stages.sparsity.sla import tiles_of

    return (*of_q[:-2], *tiles_of(shape))


def _host(array: Any, name: str) -> np.ndarray:
    """An array in host memory as NumPy's, sharing its memory."""
    from flashnumba.machine.arrays import describe, element_dtype, host_view

    element = describe(array, name).element
    return host_view(array, name).view(np.int8 if element == "int8" else element_dtype(element))


def _like(array: Any, values: np.ndarray, element: str | None = None) -> Any:
    """``values``, rounded once, as a new array of the kind of another."""
    from flashnumba.machine.arrays import describe, empty_like_kind
    from flashnumba.stages.host import finish

    made = empty_like_kind(array, values.shape, *([] if element is None else [element]))
    _host(made, "the result")[...] = values
    return finish(made, describe(array, "the array"), None)
