"""Attention for those who want to use it: one function for arrays of every library, on a GPU or without one.

:func:`attention` checks its arguments once, before anything runs; asks :data:`CHOICES`, a table, how to compute; and
launches on the caller's current stream. A second call on torch CUDA tensors of the same kind (dtype, shapes, strides,
alignment, device, options) finds its prepared launches again and does nothing else; it can be captured in a CUDA graph.

Nothing heavy is imported before the first call.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from flashnumba.stages.again import Recipes, kind, of_heads

if TYPE_CHECKING:
    from flashnumba.stages import heads

__all__ = ["BACKENDS", "CHOICES", "KERNELS", "Choice", "NoGpuWarning", "attention", "choose"]

KERNELS = {
    "flash_forward.simt": "simt", "flash_forward.mma": "mma", "flash_forward.split": "mma",
    "flash_forward.wgmma": "wgmma", "fp8.k32": "mma", "fp8.emulated": "mma", "fp8.split": "mma",
}  # fmt: skip
"""Kernels by name, ``stage.kernel``, and the file of the stage whose ``PLANS`` has it."""
BACKENDS = ("auto", *KERNELS, "numpy", "emulator")

TILE, WARP, LONG = 128, 16, 1024
"""Query rows of a block of ``mma`` and of a warp; keys from which it pays to share them out and merge."""
SHORT = {32: 2048, 64: 512}
"""Keys below which ``mma`` is faster than ``wgmma``, by the largest head dimension of which that holds."""


class NoGpuWarning(UserWarning):
    """``backend="auto"`` found no GPU and computes with NumPy; said once a process."""


@dataclass(frozen=True)
class Choice:
    """A row of :data:`CHOICES`.

    Attributes:
        when: the condition in words.
        backend: what is then used.
        holds: ``holds(shape, gpu)``: the condition; ``gpu`` says whether there is one to launch on.
    """

    when: str
    backend: str
    holds: Callable[[heads.Shape, bool], bool]


def _tensor_cores(shape: heads.Shape) -> bool:
    return int(shape.arch.rstrip("a")) >= (75 if shape.element == "float16" else 80) and shape.element != "float32"


def _eight(shape: heads.Shape) -> bool:
    return shape.element.startswith("float8")


def _warpgroups(shape: heads.Shape) -> bool:
    """What ``flash_forward.wgmma`` takes and is the fastest for."""
    from flashnumba.tiles.specialised_tiles import takes

    short = any(shape.d <= d and shape.n < keys for d, keys in SHORT.items())
    return takes(shape.element, shape.arch, shape.mapped) and not short


def _few_rows(shape: heads.Shape) -> bool:
    blocks = shape.batch * shape.heads * -(-shape.m // TILE)
    return shape.n >= LONG and (shape.m * shape.group <= WARP or 2 * blocks <= shape.multiprocessors)


CHOICES = (
    Choice("there is no GPU of sm_75 or later", "numpy", lambda shape, gpu: not gpu),
    Choice(
        f"8 bits an element on sm_80 or later, {LONG} keys or more, and few queries, as below",
        "fp8.split",
        lambda shape, gpu: _eight(shape) and int(shape.arch.rstrip("a")) >= 80 and _few_rows(shape),
    ),
    Choice(
        "8 bits an element on sm_89 or sm_120, whose mma.sync multiplies them",
        "fp8.k32",
        lambda shape, gpu: _eight(shape) and shape.arch.rstrip("a") in ("89", "120"),
    ),
    Choice("8 bits an element on another GPU", "fp8.emulated", lambda shape, gpu: _eight(shape)),
    Choice(
        f"float16 or bfloat16 on sm_80 or later, {LONG} keys or more, and few queries: at most {WARP} rows for each "
        f"head of k, or tiles of {TILE} rows for at most half of the multiprocessors",
        "flash_forward.split",
        lambda shape, gpu: _tensor_cores(shape) and int(shape.arch.rstrip("a")) >= 80 and _few_rows(shape),
    ),
    Choice(
        "float16 or bfloat16 on sm_90, rows that begin at multiples of 16 bytes as the copy engine takes them, and not "
        + " or ".join(f"fewer than {keys} keys with a head dimension of at most {d}" for d, keys in SHORT.items()),
        "flash_forward.wgmma",
        lambda shape, gpu: _warpgroups(shape),
    ),
    Choice(
        "float16 on sm_75 or later, bfloat16 on sm_80 or later",
        "flash_forward.mma",
        lambda shape, gpu: _tensor_cores(shape),
    ),
    Choice("anything else", "flash_forward.simt", lambda shape, gpu: True),
)
"""What ``backend="auto"`` means: the first row that holds. ``flashnumba doctor`` prints it."""

RECIPES = Recipes()


def attention(
    q: Any, k: Any, v: Any, *, causal: bool = False, scale: float | None = None, return_lse: bool = False,
    backend: str = "auto", q_descale: Any = None, k_descale: Any = None, v_descale: Any = None, fmt: str | None = None,
) -> Any:  # fmt: skip
    """``softmax(scale * q k^T) v``, without the matrix of scores in memory.

    Args:
        q: ``[B, H, M, D]``, ``[H, M, D]`` or ``[M, D]`` float16, bfloat16 or float32; M may be 0, D is 1 to 256. NumPy
            (bfloat16 as ml_dtypes'), torch, CuPy, JAX, numba, or what offers ``__cuda_array_interface__`` or DLPack.
            Any strides: nothing is copied, except from host memory to a GPU and back. Or float8_e4m3fn or float8_e5m2,
            as ml_dtypes', torch's or CuPy's, or uint8 codes with ``fmt``; see :mod:`flashnumba.stages.fp8_heads` for
            what of these is copied.
        k, v: ``[B, Hkv, N, D]``, as many axes as q, of its dtype, in one place with it; N may be 0. Hkv divides H, and
            head h of q reads head ``h // (H // Hkv)`` of k and v.
        causal: key j is visible to row i iff ``j <= i + N - M``: aligned bottom-right, the last row sees all keys.
            torch's ``is_causal`` is aligned top-left; the two are the same for M = N.
        scale: of the scores, any finite number; None is ``1 / sqrt(D)``.
        return_lse: also return the natural logarithm of each row's sum of exponentials of scaled scores.
        q_descale, k_descale, v_descale: of 8-bit elements, what codes are multiplied with, float32 and positive: one
            number; one a head, ``[B, H]`` and ``[B, Hkv]`` (q also ``[B, Hkv]``); or one for each 64 rows of a head,
            ``[B, H, blocks]``. As :func:`flashnumba.fp8.quantize` returns them. 1 if None.
        fmt: ``"e4m3"`` or ``"e5m2"``, of uint8 codes.
        backend: ``"auto"``: see :data:`CHOICES`. ``"numpy"``: the CPU. A kernel by name, e.g. ``"flash_forward.mma"``:
            on the GPU where the arrays are, for arrays in host memory on a GPU if there is one and else on the
            emulator. ``"emulator"``: what ``"auto"`` would launch on an sm_90a, checked for races and the like.

    Returns:
        o, a new packed array of q's shape, dtype and kind, on its device, bfloat16 for 8-bit elements as in
        FlashAttention-3; or ``(o, lse)``, lse ``[B, H, M]`` float32.
        A row that sees no key has o = 0 and lse = -inf; a NaN in a row of q gives NaN in that row. float32 inside.

    Raises:
        TypeError: an argument is no array, of elements that do not fit, or of another type than said above.
        ValueError: shapes, places or values that do not fit; a tensor that requires a gradient, none being recorded
            (:mod:`flashnumba.torch` does that). The message names the argument and its value. Nothing has run then.

    Source: the mathematics and its limits are in :mod:`flashnumba.stages.flash_forward.reference`.
    """
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    if fmt is not None or q_descale is not None or k_descale is not None or v_descale is not None:
        return _in_fp8(q, k, v, causal, scale, return_lse, backend, descales, fmt)
    key = _key(q, k, v, causal, scale, return_lse, backend)
    known = RECIPES.get(key)
    if known is not None:
        return known(q, k, v)
    return _first(key, q, k, v, causal, scale, return_lse, backend)


def _key(q: Any, k: Any, v: Any, causal: Any, scale: Any, return_lse: Any, backend: Any) -> Any:
    """What a recipe depends on; None for arguments that are looked at each time."""
    of_q = kind(q)
    if of_q is None:
        return None
    of_k, of_v = kind(k), kind(v)
    if of_k is None or of_v is None:
        return None
    # Equal is not enough: 1 == True, and 1 is no mask.
    types = causal.__class__, return_lse.__class__, backend.__class__, scale.__class__
    if types not in _USUAL:
        return None
    return backend, causal, scale, return_lse, of_q, of_k, of_v


_USUAL = {(bool, bool, str, number) for number in (type(None), float, int)}


def _first(
    key: Any, q: Any, k: Any, v: Any, causal: Any, scale: Any, return_lse: Any, backend: Any
) -> Any:  # fmt: skip
    """A call whose kind is not known yet: check, choose, compute, remember."""
    from flashnumba.stages.fp8_heads import is_fp8
    from flashnumba.stages.heads import prepare_heads

    if is_fp8(q):
        none = dict.fromkeys(("q_descale", "k_descale", "v_descale"))
        return _in_fp8(q, k, v, causal, scale, return_lse, backend, none, None)
    machine = _machine(q, k, v, return_lse, backend)
    heads = prepare_heads(q, k, v, causal=causal, scale=scale, machine=machine, stream=None)
    if 0 in (heads.shape.batch, heads.shape.heads, heads.shape.m):
        o, lse = heads.finish()
        return (o, lse) if return_lse else o
    chosen = backend
    if backend in ("auto", "emulator"):
        chosen = choose(heads.shape, backend == "emulator" or _has_gpu(heads)).backend
    if chosen == "numpy":
        if backend == "auto":
            _notice()
        o, lse = _on_numpy(heads)
    else:
        plan = planner(chosen)(heads.shape)
        o, lse = heads.run(plan)
        RECIPES.add(key, of_heads(heads, plan, bool(return_lse)))
    return (o, lse) if return_lse else o


def _in_fp8(
    q: Any, k: Any, v: Any, causal: Any, scale: Any, return_lse: Any, backend: Any, descales: dict[str, Any], fmt: Any
) -> Any:  # fmt: skip
    """A call with 8-bit elements: check, choose, compute."""
    from flashnumba.stages.fp8_heads import prepare_fp8

    machine = _machine(q, k, v, return_lse, backend)
    problem = prepare_fp8(q, k, v, fmt=fmt, **descales, causal=causal, scale=scale, machine=machine, stream=None)
    chosen = backend
    if backend in ("auto", "emulator"):
        chosen = choose(problem.shape, backend == "emulator" or _has_gpu(problem)).backend
    if chosen != "numpy" and not chosen.startswith("fp8."):
        raise ValueError(f"backend is {backend!r}, which does not take {problem.shape.element}; fp8's kernels do")
    if problem.empty:
        o, lse = problem.nothing()
    elif chosen == "numpy":
        if backend == "auto":
            _notice()
        o, lse = problem.on_numpy()
    else:
        o, lse = problem.run(planner(chosen)(problem.shape))
    return (o, lse) if return_lse else o


def choose(shape: heads.Shape, gpu: bool) -> Choice:
    """The row of :data:`CHOICES` that holds for a problem.

    Args:
        shape: of the problem, with the architecture and the multiprocessors that it would run on.
        gpu: whether there is a GPU to launch on.
    """
    return next(choice for choice in CHOICES if choice.holds(shape, gpu))


def planner(kernel: str) -> heads.Planner:
    """How one of :data:`KERNELS` is launched."""
    stage, name = kernel.split(".")
    return import_module(f"flashnumba.stages.{stage}.{KERNELS[kernel]}").PLANS[name]


def _machine(q: Any, k: Any, v: Any, return_lse: Any, backend: Any) -> str:
    """What kernels would run on, as :func:`flashnumba.stages.heads.forward` says it; errors as :func:`attention`."""
    _check_options(return_lse, backend)
    if backend not in ("numpy", "emulator"):
        return "auto"
    _check_places(backend, q=q, k=k, v=v)
    return "emulator"


def _check_options(return_lse: Any, backend: Any) -> None:
    import numpy as np

    if not isinstance(return_lse, bool | np.bool_):
        raise TypeError(f"return_lse is {return_lse!r}; it must be True or False")
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}")


def _check_places(backend: str, **arrays: Any) -> None:
    from flashnumba.machine.arrays import describe

    for name, array in arrays.items():
        device = describe(array, name).device
        if device is not None:
            raise ValueError(
                f"{name} is on cuda:{device} and backend is {backend!r}, which takes arrays in host memory"
            )


def _has_gpu(heads: Any) -> bool:
    """Whether there is a GPU for a problem. One that is too old counts where the arrays are: a launch says why not."""
    from flashnumba.machine.instruction import runs_on

    return heads.machine == "cuda" and (heads.device is not None or runs_on(heads.shape.arch, "75"))


def _on_numpy(heads: heads.Heads) -> tuple[Any, Any]:
    from flashnumba.machine.arrays import element_dtype
    from flashnumba.stages.flash_forward import blas

    dtype = element_dtype(heads.shape.element)
    q, k, v, o = (heads.arrays[name].view(dtype) for name in ("q", "k", "v", "o"))
    blas.attend(q, k, v, o, heads.arrays["lse"], heads.scale, heads.shape.causal)
    return heads.finish()


_noticed = False


def _notice() -> None:
    global _noticed
    if _noticed:
        return
    _noticed = True
    from flashnumba.machine import gpu

    reason = gpu.unavailable() or f"cuda:{gpu.current_device()} is sm_{gpu.device_arch()}"
    warnings.warn(
        f"attention() found no GPU that it can use ({reason}) and computes with NumPy on the CPU, now and later. "
        "backend='numpy' asks for that and says nothing; so does "
        "warnings.simplefilter('ignore', flashnumba.NoGpuWarning). `flashnumba doctor` says what is missing.",
        NoGpuWarning,
        stacklevel=4,
    )
