"""What is called: attention with gradients, and what takes the place of torch's own."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
from torch import Tensor

from flashnumba.torch.kernels import BACKENDS
from flashnumba.torch.operators import call

__all__ = ["attention", "scaled_dot_product_attention"]


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
            All but ``"backward.one_pass"`` give the same bits every time; ``torch.use_deterministic_algorithms(True)``
            refuses that one.

    Returns:
        o, a new packed tensor of q's shape and dtype, or ``(o, lse)``, lse ``[B, H, M]`` float32 (float64 for
        float64). A row that sees no key has o = 0, lse = -inf and adds nothing to any gradient.

    Raises:
        TypeError: an argument is no tensor, of elements that do not fit, or of another type than said above.
        ValueError: shapes, places or values that do not fit. Nothing has run then.
        RuntimeError: a second derivative is asked for, or one in forward mode.
    """
    if not isinstance(causal, bool):
        raise TypeError(f"causal is {causal!r}; it must be True or False")
    if not isinstance(return_lse, bool):
        raise TypeError(f"return_lse is {return_lse!r}; it must be True or False")
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}")
    if scale is not None and type(scale) not in (float, int):  # tracers know no __class__ of numbers
        if isinstance(scale, bool) or not isinstance(scale, Real):
            raise TypeError(f"scale is {scale!r}; it must be a real number, or None for 1 / sqrt(D)")
        scale = float(scale)
    _check_tensors(q=q, k=k, v=v)
    if not q.is_meta and torch.is_autocast_enabled(q.device.type):
        q, k, v = _autocast(q, k, v)
    axes = q.dim()
    if axes != 4:
        if not axes == k.dim() == v.dim() or axes not in (2, 3):
            shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
            raise ValueError(f"q, k and v have shapes {shapes}; they must have the same number of axes, 2 to 4")
        q, k, v = (x[(None,) * (4 - axes)] for x in (q, k, v))
    o, lse = call(q, k, v, causal, scale, backend)
    if axes != 4:
        o, lse = o[(0,) * (4 - axes)], lse[(0,) * (4 - axes)]
    return (o, lse) if return_lse else o


def _check_tensors(**tensors: Any) -> None:
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; it must be a torch tensor")
        if x.is_nested:
            raise ValueError(
                f"{name} is a nested tensor; it must be an ordinary one, e.g. {name}.to_padded_tensor(0.0)"
            )


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
    _check_tensors(query=query, key=key, value=value)
    shapes = f"query has shape {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)}"
    if query.dim() != key.dim() or query.shape[:-3] != key.shape[:-3]:
        raise ValueError(f"{shapes}; they must have the same leading axes")
    if key.shape != value.shape:  # checked before keys that nobody sees are left out and axes are merged
        raise ValueError(f"{shapes}; key and value must have the same shape")
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
