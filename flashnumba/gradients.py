"""The gradients of attention for those who want to use them: one function for arrays of every library.

:func:`attention_backward` takes what :func:`flashnumba.attention` took and gave, and the gradients of what it gave. It
checks its arguments before anything runs, asks :data:`CHOICES` how to compute, and launches on the caller's current
stream.

Nothing heavy is imported before the first call.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from flashnumba.attention import Choice, NoGpuWarning
from flashnumba.stages.again import Recipes, kind, of_backward

if TYPE_CHECKING:
    from flashnumba.stages import heads
    from flashnumba.stages.backward.problem import Backward

__all__ = ["BACKENDS", "CHOICES", "KERNELS", "attention_backward", "choose"]

KERNELS = {"backward.simt": "simt", "backward.mma": "mma", "backward.one_pass": "mma"}
"""Kernels by name, ``stage.kernel``, and the file of the stage whose ``PLANS`` has it."""
BACKENDS = ("auto", *KERNELS, "numpy", "emulator")


def _tensor_cores(shape: heads.Shape) -> bool:
    return int(shape.arch.rstrip("a")) >= (75 if shape.element == "float16" else 80) and shape.element != "float32"


CHOICES = (
    Choice("there is no GPU of sm_75 or later", "numpy", lambda shape, gpu: not gpu),
    Choice(
        "float16 on sm_75 or later, bfloat16 on sm_80 or later", "backward.mma",
        lambda shape, gpu: _tensor_cores(shape),
    ),
    Choice("anything else", "backward.simt", lambda shape, gpu: True),
)  # fmt: skip
"""What ``backend="auto"`` means: the first row that holds. All of them give the same bits every time."""

RECIPES = Recipes()


def attention_backward(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, *, causal: bool = False, scale: float | None = None,
    dlse: Any = None, backend: str = "auto",
) -> tuple[Any, Any, Any]:  # fmt: skip
    """The gradients of ``o, lse = attention(q, k, v, return_lse=True)`` by q, k and v.

    Args:
        do: the gradient of o, of its shape and dtype. Here as for the others any strides: nothing is copied, except
            from host memory to a GPU and back.
        q: ``[B, H, M, D]``, ``[H, M, D]`` or ``[M, D]`` float16, bfloat16 or float32; M may be 0, D is 1 to 256. Arrays
            as :func:`flashnumba.attention` takes them.
        k, v: ``[B, Hkv, N, D]``; N may be 0. Head h of q reads head ``h // (H // Hkv)``.
        o, lse: what the forward gave for the same arguments: of q's shape, and ``[B, H, M]`` float32.
        causal, scale: as the forward's.
        dlse: the gradient of lse, ``[B, H, M]`` float32, where lse was used too; None is zero.
        backend: ``"auto"``: see :data:`CHOICES`; the same bits every time. ``"backward.one_pass"`` adds to dQ by
            atomics, with less to compute, but dq is NOT the same bits every time, and there is a float32 buffer of its
            size; D is then at most 128 (64 from sm_100 on), and rows are aligned to 4 bytes. ``"numpy"``: the CPU.
            Another kernel by name, or ``"emulator"``: what ``"auto"`` would launch on an sm_90a, checked for races and
            the like.

    Returns:
        (dq, dk, dv): new packed arrays of q's kind and dtype, in the shapes of q, k and v. dk and dv are sums over the
        heads of q that read a head of k. A row that sees no key has dq = 0. float32 inside; beside inputs and results
        a kernel keeps three float32 numbers a row.

    Raises:
        TypeError: an argument is no array, of elements that do not fit, or of another type than said above.
        ValueError: shapes, places or values that do not fit; a tensor that requires a gradient, none being recorded.
            The message names the argument and its value. Nothing has run then.

    Source: the mathematics and its limits are in :mod:`flashnumba.stages.backward.reference`.
    """
    given = (do, q, k, v, o, lse) if dlse is None else (do, q, k, v, o, lse, dlse)
    key = _key(given, causal, scale, backend)
    known = RECIPES.get(key)
    if known is not None:
        return known(*given)
    return _first(key, do, q, k, v, o, lse, causal, scale, dlse, backend)


def _key(given: tuple[Any, ...], causal: Any, scale: Any, backend: Any) -> Any:
    """What a recipe depends on; None for arguments that are looked at each time."""
    kinds = tuple(map(kind, given))
    # Equal is not enough: 1 == True, and 1 is no mask.
    if None in kinds or (causal.__class__, backend.__class__) != (bool, str):
        return None
    if scale is not None and scale.__class__ not in (float, int):
        return None
    return backend, causal, scale, scale.__class__, kinds


def _first(
    key: Any, do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, causal: Any, scale: Any, dlse: Any, backend: Any
) -> tuple[Any, Any, Any]:  # fmt: skip
    """A call whose kind is not known yet: check, choose, compute, remember."""
    from flashnumba.stages.backward.problem import prepare_backward

    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}")
    on_host = backend in ("numpy", "emulator")
    if on_host:
        given = {"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse} | ({} if dlse is None else {"dlse": dlse})
        _check_places(backend, given)
    made = prepare_backward(
        do, q, k, v, o, lse, causal=causal, scale=scale, dlse=dlse, machine="emulator" if on_host else "auto",
        stream=None,
    )  # fmt: skip
    chosen = backend
    if backend in ("auto", "emulator"):
        chosen = choose(made.shape, backend == "emulator" or _has_gpu(made)).backend
    if chosen == "numpy":
        if backend == "auto":
            _notice()
        return _on_numpy(made)
    plan = planner(chosen)(made.shape)
    results = made.run(plan)
    RECIPES.add(key, of_backward(made, plan))
    return results


def choose(shape: heads.Shape, gpu: bool) -> Choice:
    """The row of :data:`CHOICES` that holds for a problem; ``gpu`` says whether there is one to launch on."""
    return next(choice for choice in CHOICES if choice.holds(shape, gpu))


def planner(kernel: str) -> heads.Planner:
    """How one of :data:`KERNELS` is launched."""
    stage, name = kernel.split(".")
    return import_module(f"flashnumba.stages.{stage}.{KERNELS[kernel]}").PLANS[name]


def _check_places(backend: str, arrays: dict[str, Any]) -> None:
    from flashnumba.machine.arrays import describe

    for name, array in arrays.items():
        device = describe(array, name).device
        if device is not None:
            raise ValueError(
                f"{name} is on cuda:{device} and backend is {backend!r}, which takes arrays in host memory"
            )


def _has_gpu(made: Backward) -> bool:
    """Whether there is a GPU for a problem. One that is too old counts where the arrays are: a launch says why not."""
    from flashnumba.machine.instruction import runs_on

    return made.machine == "cuda" and (made.device is not None or runs_on(made.shape.arch, "75"))


def _on_numpy(made: Backward) -> tuple[Any, Any, Any]:
    """The reference's blocks in float64, head of k by head of k, so that memory is a block of scores of one group."""
    import numpy as np

    from flashnumba.machine.arrays import element_dtype
    from flashnumba.stages.backward.reference import blocked

    shape, arrays = made.shape, made.arrays
    dtype, group = element_dtype(shape.element), shape.heads // max(1, shape.kv_heads)
    q, k, v, o, do, dq, dk, dv = (
        arrays[name].view(dtype) for name in ("q", "k", "v", "o", "do", "dq", "dk", "dv")
    )  # fmt: skip
    for batch in range(shape.batch):
        for kv_head in range(shape.kv_heads):
            heads = (batch, slice(kv_head * group, (kv_head + 1) * group))
            one = (batch, slice(kv_head, kv_head + 1))
            dlse = arrays["dlse"][heads] if made.has_dlse else None
            with np.errstate(invalid="ignore", over="ignore", under="ignore"):  # inf of float16 is a result
                dq[heads], dk[one], dv[one] = blocked(
                    q[heads], k[one], v[one], o[heads], do[heads], arrays["lse"][heads], made.scale, shape.causal, dlse
                )
    return made.finish()


_noticed = False


def _notice() -> None:
    global _noticed
    if _noticed:
        return
    _noticed = True
    from flashnumba.machine import gpu

    reason = gpu.unavailable() or f"cuda:{gpu.current_device()} is sm_{gpu.device_arch()}"
    warnings.warn(
        f"attention_backward() found no GPU that it can use ({reason}) and computes with NumPy on the CPU, now and "
        "later. backend='numpy' asks for that and says nothing. `flashnumba doctor` says what is missing.",
        NoGpuWarning,
        stacklevel=4,
    )
