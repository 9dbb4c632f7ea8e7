"""What the two operators do, on tensors that have values, and what their results look like to a tracer."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import flashnumba

__all__ = ["BACKENDS", "Grad", "backward", "backward_fake", "forward", "forward_fake"]

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


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, backend: str) -> tuple[Tensor, Tensor]:
    """(o, lse) of q ``[B, H, M, D]``, k and v; lse is float32, for float64 float64."""
    if _by_reference(q, backend):
        return _forward64(q, k, v, causal, scale)
    q, k, v = _bare(q, k, v)
    return flashnumba.attention(q, k, v, causal=causal, scale=scale, return_lse=True, backend=BACKENDS[backend][0])


def backward(
    do: Tensor, dlse: Grad, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool,
    scale: float | None, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv) for the gradients of o and lse; a dlse of None is zero."""
    do, dlse = do.resolve_neg(), None if dlse is None else dlse.resolve_neg()  # torch itself makes such gradients
    if _by_reference(q, backend):
        return _backward64(do, dlse, q, k, v, o, lse, causal, scale)
    if backend == "backward.one_pass" and torch.are_deterministic_algorithms_enabled():
        _not_deterministic()
    if do.stride(-1) != 1:  # of a sum it is one number, expanded; read as it is it would cost all tensors their vectors
        do = do.contiguous()
    do, q, k, v, o, lse, *more = _bare(do, q, k, v, o, lse, *(() if dlse is None else (dlse,)))
    dlse = more[0] if more else None
    return flashnumba.attention_backward(
        do, q, k, v, o, lse, causal=causal, scale=scale, dlse=dlse, backend=BACKENDS[backend][1]
    )


def _not_deterministic() -> None:
    """As torch's own operators answer ``torch.use_deterministic_algorithms``."""
    said = (
        "backend is 'backward.one_pass', which is not deterministic, and torch.use_deterministic_algorithms(True) is "
        "set; 'auto' is"
    )
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError(said)
    warnings.warn(said, stacklevel=3)


def _by_reference(q: Tensor, backend: str) -> bool:
    return q.dtype is torch.float64 and q.device.type == "cpu" and backend in ("auto", "numpy")


def _bare(*tensors: Tensor) -> list[Tensor]:
    """Without what asks for a gradient: such a tensor would be described and planned anew at each call."""
    return [x.detach() if x.requires_grad else x for x in tensors]


def _forward64(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    from flashnumba.stages import heads
    from flashnumba.stages.flash_forward import reference

    scale = heads.check_scale(scale, heads.check(**_found64(q=q, k=k, v=v), causal=causal).d)
    o, lse = reference.dense(*(x.detach().numpy() for x in (q, k, v)), scale, causal)
    return torch.from_numpy(o).contiguous(), torch.from_numpy(lse).contiguous()


def _found64(**tensors: Tensor) -> dict[str, Any]:
    """Tensors of float64 as the stages' checks take them, for which they are float32."""
    from flashnumba.machine.arrays import describe

    for name, x in tensors.items():
        if x.dtype is not torch.float64:
            raise TypeError(f"{name} has elements of type {x.dtype} and q of float64; they must be the same")
    return {name: replace(describe(x, name), element="float32") for name, x in tensors.items()}


def _backward64(
    do: Tensor, dlse: Grad, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from flashnumba.stages.backward import problem, reference

    given = {"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse} | ({} if dlse is None else {"dlse": dlse})
    problem.check(_found64(**given), causal=causal)
    arrays = [x.detach().numpy() for x in (q, k, v, o, do, lse)]
    found = reference.blocked(*arrays, scale, causal, None if dlse is None else dlse.detach().numpy())
    dq, dk, dv = (torch.from_numpy(x).contiguous() for x in found)
    return dq, dk, dv


# -- their results, as tracers see them --------------------------------------------------------------------------------
def forward_fake(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, backend: str) -> Any:
    inside = torch.float64 if q.dtype is torch.float64 else torch.float32
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=inside)


def backward_fake(do: Tensor, dlse: Grad, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))
