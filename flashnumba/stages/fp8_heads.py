"""Host side of attention kernels for 8-bit elements: what :mod:`flashnumba.stages.heads` does, and scales and layouts.

q, k and v are e4m3 or e5m2, as ml_dtypes' or a library's own type, or uint8 codes with their format said. o is
bfloat16, as FlashAttention-3 gives it for such inputs. Each of the three may have scales, float32: one number; one a
head, ``[B, H]``, for q also one for the heads that share k and v, ``[B, Hkv]``; or one for each 64 rows of a head,
``[B, H, blocks]``. Scales of the blocks of one head of v may be 2^81 apart, as O goes from one's units to the next
one's; the scales of q and k times one another, and times the scores of codes, must be float32. Nobody looks at values
on a GPU.

Kernels read 16 bytes at a time, so rows whose addresses or lengths are no multiple of that are copied into rows that
are. Kernels that multiply the codes as they are want v by columns, each at a multiple of 16 bytes: a v of another
layout is copied once a call; :func:`by_columns` makes such a v for several calls.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flashnumba.machine import gpu
from flashnumba.machine.arrays import Described, describe, element_dtype, empty_like_kind, host_view, is_array
from flashnumba.machine.streams import stream_handle
from flashnumba.stages.heads import EMULATED_MULTIPROCESSORS, Heads, Plan, Planner, Shape, check, check_scale, widest
from flashnumba.stages.host import check_machine, library_stream, machine_of, real_numbers, refuse_gradients
from flashnumba.tiles.descale import BLOCK
from flashnumba.tiles.fp8_convert import ELEMENTS

__all__ = ["ARGUMENTS", "FORMATS", "OUT", "Problem", "by_columns", "forward", "is_fp8", "prepare_fp8"]

ARGUMENTS = ("q", "k", "v", "o", "lse", "q_descale", "k_descale", "v_descale", "scale", "causal")
FORMATS = dict(zip(("e4m3", "e5m2"), ELEMENTS, strict=True))
OUT = "bfloat16"
"""Of o."""
MOST_APART = 81
"""How far scales of blocks of a head of v may be apart, a power of 2: sums of 2^24 keys are below 2^47."""


@dataclass
class Problem:
    """Checked arguments of :func:`forward`; q, k, v and scales are not laid out for a kernel yet."""

    shape: Shape
    given: dict[str, Any]
    found: dict[str, Described]
    scales: dict[str, Any]
    scale: float
    machine: str
    stream: Any

    @property
    def device(self) -> int | None:
        """Where q is; None in host memory."""
        return self.found["q"].device

    @property
    def empty(self) -> bool:
        return 0 in (self.shape.batch, self.shape.heads, self.shape.m)

    def heads(self, *, v_by_columns: bool) -> Heads:
        """The problem as kernels get it."""
        of_q, columns = self.found["q"], self.shape.d
        with library_stream(of_q, self.stream):
            arrays = {name: _rows(self.given[name], self.found[name], columns) for name in "qk"}
            lay_out = _by_columns if v_by_columns else _rows
            arrays["v"] = lay_out(self.given["v"], self.found["v"], columns)
            o = empty_like_kind(self.given["q"], (*of_q.shape[:-1], columns), OUT)
            lse = empty_like_kind(self.given["q"], of_q.shape[:-1], "float32")
            arrays["o"], arrays["lse"] = _axes(o, 4), _axes(lse, 3)
        return Heads(
            self.shape, arrays | self.scales, self.scale, self.machine, of_q.device, self.stream, of_q, (o, lse)
        )

    def run(self, plan: Plan) -> tuple[Any, Any]:
        """(o, lse) by a plan."""
        return self._cut(self.heads(v_by_columns=plan.v_by_columns).run(plan))

    def on_numpy(self) -> tuple[Any, Any]:
        """(o, lse) of arrays in host memory: codes become float32, and o is rounded at the end."""
        from flashnumba.stages.flash_forward import blas

        heads = self.heads(v_by_columns=False)
        exact = np.empty(heads.arrays["o"].shape, np.float32)
        blas.attend(
            *(_values(heads, name) for name in "qkv"), exact, heads.arrays["lse"], self.scale, self.shape.causal
        )
        heads.arrays["o"].view(element_dtype(OUT))[...] = exact
        return self._cut(heads.finish())

    def nothing(self) -> tuple[Any, Any]:
        """(o, lse) where there are no rows."""
        return self._cut(self.heads(v_by_columns=False).finish())

    def _cut(self, results: tuple[Any, Any]) -> tuple[Any, Any]:
        (o, lse), d = results, self.found["q"].shape[-1]
        return (o if d == self.shape.d else o[..., :d]), lse


def is_fp8(array: Any) -> bool:
    """Whether an array has one of the two 8-bit floating-point types."""
    return str(getattr(array, "dtype", "")).removeprefix("torch.") in ELEMENTS


def forward(
    q: Any, k: Any, v: Any, plan: Planner, *, fmt: str | None = None, q_descale: Any = None, k_descale: Any = None,
    v_descale: Any = None, causal: bool = False, scale: float | None = None, machine: str = "auto", stream: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Attention of 8-bit arrays by one kernel: shapes, conventions and errors as of :func:`.heads.forward`.

    Args:
        q, k, v: all of ``float8_e4m3fn`` or all of ``float8_e5m2``: NumPy with ml_dtypes, torch, CuPy; or uint8 codes.
        plan: of a stage's ``PLANS``.
        fmt: ``"e4m3"`` or ``"e5m2"``, of uint8 codes.
        q_descale, k_descale, v_descale: positive numbers that codes are multiplied with; 1 if None.

    Returns:
        (o, lse): o bfloat16 in q's shape, lse float32.

    Raises:
        TypeError, ValueError: an argument does not fit, before anything is launched.
    """
    problem = prepare_fp8(
        q, k, v, fmt=fmt, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, causal=causal, scale=scale,
        machine=machine, stream=stream,
    )  # fmt: skip
    return problem.nothing() if problem.empty else problem.run(plan(problem.shape))


def prepare_fp8(
    q: Any, k: Any, v: Any, *, fmt: Any, q_descale: Any, k_descale: Any, v_descale: Any, causal: bool,
    scale: float | None, machine: str, stream: Any,
) -> Problem:  # fmt: skip
    """Check the arguments of :func:`forward`."""
    check_machine(machine)
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    refuse_gradients(q=q, k=k, v=v, **descales)
    given = dict(zip("qkv", (q, k, v), strict=True))
    found = {name: _described(array, name, fmt) for name, array in given.items()}
    for name, array in found.items():
        if array.element != found["q"].element:
            raise TypeError(
                f"{name} has elements of type {array.element} and q of {found['q'].element}; they must be the same"
            )
    shape = check(*(replace(array, element="float16") for array in found.values()), causal=causal)
    scale = check_scale(scale, shape.d)
    if stream is not None:
        stream_handle(stream)
    machine, arch = machine_of(machine, found["q"], "q")
    units = EMULATED_MULTIPROCESSORS if machine == "emulator" else gpu.multiprocessors(found["q"].device)
    with library_stream(found["q"], stream):
        scales = {name: _descale(value, name, found["q"], shape, q) for name, value in descales.items()}
    varied = any(by_block for by_block, _ in scales.values())
    scaled = "block" if varied else "" if all(value is None for value in descales.values()) else "head"
    shape = replace(
        shape, element=found["q"].element, d=-(-shape.d // 16) * 16, vector=16, arch=arch, multiprocessors=units,
        scaled=scaled,
    )  # fmt: skip
    return Problem(shape, given, found, {name: array for name, (_, array) in scales.items()}, scale, machine, stream)


def _described(array: Any, name: str, fmt: Any) -> Described:
    """An array whose element is one of :data:`ELEMENTS`."""
    if fmt is not None and (not isinstance(fmt, str) or fmt not in FORMATS):
        raise ValueError(f"fmt is {fmt!r}; it must be 'e4m3' or 'e5m2', or None for arrays that say so themselves")
    found = describe(array, name)
    if found.element == "uint8":
        if fmt is None:
            raise TypeError(f"{name} has elements of type uint8, and fmt is None; say fmt='e4m3' or fmt='e5m2'")
        return replace(found, element=FORMATS[fmt])
    if found.element not in ELEMENTS:
        raise TypeError(f"{name} has elements of type {found.element}; it must be {' or '.join(ELEMENTS)}")
    if fmt is not None and FORMATS[fmt] != found.element:
        raise TypeError(f"{name} has elements of type {found.element}, and fmt is {fmt!r}")
    return found


# -- scales ------------------------------------------------------------------------------------------------------------
def _descale(value: Any, name: str, of_q: Described, shape: Shape, like: Any) -> tuple[bool, Any]:
    """(whether blocks have one each, float32 ``[batch, heads, blocks]`` beside q)."""
    heads = shape.heads if name == "q_descale" else shape.kv_heads
    rows, axes = (shape.m if name == "q_descale" else shape.n), len(of_q.shape) - 2
    value = 1.0 if value is None else value
    where = _place_of(value, name)
    if where is not None and where != of_q.device:
        raise ValueError(f"{name} is on cuda:{where} and q is not; they must be in one place")
    if where is None:
        value = _host_numbers(value, name)
    elif str(value.dtype).removeprefix("torch.") != "float32":
        raise TypeError(f"{name} has elements of type {value.dtype}; it must be float32")
    leading = (shape.batch, heads)[2 - axes :] if axes else ()
    shared = (shape.batch, shape.kv_heads)[2 - axes :] if axes else ()
    blocks = max(1, -(-rows // BLOCK))
    given = tuple(value.shape)
    if not rows and given == (*leading, 0):  # of no rows
        value, given, where = np.ones((*leading, 1), np.float32), (*leading, 1), None
    fits = {(), leading, shared, (*leading, blocks), (*leading, 1)}
    if given not in fits:
        wanted = " or ".join(str(one) for one in sorted(fits, key=lambda one: (len(one), one)))
        raise ValueError(f"{name} has shape {given}; it must be {wanted}: one, one a head, or one for {BLOCK} rows")
    if given == shared != leading:  # q's, for each head of k
        value = value[..., None].repeat(shape.group, -1) if where is None else _repeated(value, shape.group)
        value, given = value.reshape(leading), leading
    per_block = len(given) == len(leading) + 1
    if name == "v_descale" and per_block and where is None:
        _check_spread(value)
    seen = value.reshape((1,) * (3 - len(given) - (not per_block)) + given + (() if per_block else (1,)))
    target, varied = (shape.batch, heads, blocks), per_block and given[-1] > 1
    if where is not None:
        return varied, _expanded(seen, target)
    packed = np.ascontiguousarray(np.broadcast_to(seen, target))
    return varied, packed if of_q.device is None else _moved(packed, of_q, like)


def _place_of(value: Any, name: str) -> int | None:
    """The device that a scale lies on; None in host memory, and for what is no array."""
    if isinstance(value, float | int | np.generic | np.ndarray | list | tuple) or not is_array(value):
        return None
    return describe(value, name).device


def _host_numbers(value: Any, name: str) -> np.ndarray:
    plain = value
    if is_array(value) and not isinstance(value, np.ndarray | np.generic):
        plain = host_view(value, name).view(element_dtype(describe(value, name).element))
    numbers = real_numbers(plain, name)
    wrong = ~(np.isfinite(numbers) & (numbers > 0))
    if wrong.any():
        given = float(np.asarray(plain)[wrong].flat[0])
        raise ValueError(f"{name} has {given} in it; it must be finite and above 0, as float32")
    return numbers


def _check_spread(of_blocks: np.ndarray) -> None:
    """ValueError if O in units of one block's scale of v could be no float32 in those of another."""
    exponents = np.log2(of_blocks.astype(np.float64))  # [..., blocks]
    apart = (exponents.max(-1) - exponents.min(-1)).max(initial=0)
    if apart > MOST_APART:
        raise ValueError(
            f"v_descale has {of_blocks.min()} and {of_blocks.max()} in it, blocks of one head 2^{apart:.4g} apart; "
            f"they may be 2^{MOST_APART}"
        )


def _repeated(value: Any, group: int) -> Any:
    """Each element ``group`` times along the last axis, on a GPU."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return value.repeat_interleave(group, -1)
    return value.repeat(group, -1)


def _expanded(value: Any, shape: tuple[int, ...]) -> Any:
    """A view of a torch tensor or CuPy array on a GPU, of a larger shape."""
    if hasattr(value, "expand"):
        return value.expand(shape)
    return sys.modules["cupy"].broadcast_to(value, shape)


def _moved(numbers: np.ndarray, of_q: Described, like: Any) -> Any:
    """Numbers from host memory beside q, by q's library."""
    if of_q.kind == "torch-cuda":
        return sys.modules["torch"].from_numpy(numbers).to(like.device, non_blocking=True)
    if of_q.kind == "cupy":
        return sys.modules["cupy"].asarray(numbers)
    from flashnumba.machine.numba import cuda

    with cuda.gpus[of_q.device]:
        return cuda.to_device(numbers)


# -- layouts -----------------------------------------------------------------------------------------------------------
def by_columns(v: Any) -> Any:
    """``v [..., N, D]`` with its columns in memory one after the other, as some kernels read it: a copy, once.

    Returns:
        an array of v's shape, library and element, a view of ``[..., D, N']`` where N' is N up to a multiple of 16.
    """
    found = describe(v, "v")
    n, d = found.shape[-2:]
    made = _transposed(v, found, d)
    view = made[..., :n, :d]
    if found.device is None and found.kind == "numpy":
        view = view.view(v.dtype)
    elif found.kind.startswith("torch"):
        view = (view if found.device is not None else sys.modules["torch"].from_numpy(view)).view(v.dtype)
    elif found.kind == "cupy":
        view = view.view(v.dtype)
    return view.reshape(found.shape) if view.ndim == len(found.shape) else view[(0,) * (view.ndim - len(found.shape))]


def _axes(array: Any, rank: int) -> Any:
    """The array as the kernel sees it, with axes of length 1 in front."""
    found = describe(array, "array")
    array = host_view(array) if found.device is None else array
    more = rank - len(found.shape)
    return array[(None,) * more] if more else array


def _zeros(like: Any, found: Described, shape: tuple[int, ...], name: str) -> tuple[Any, Any]:
    """(zeros of bytes, ``like`` as bytes with four axes) in ``like``'s library."""
    if found.device is None:
        return np.zeros(shape, np.uint8), _axes(like, 4)
    if found.kind == "torch-cuda":
        torch = sys.modules["torch"]
        return torch.zeros(shape, dtype=torch.uint8, device=like.device), _axes(like.view(torch.uint8), 4)
    if found.kind == "cupy":
        return sys.modules["cupy"].zeros(shape, np.uint8), _axes(like.view(np.uint8), 4)
    raise ValueError(f"{name} has to be copied, and its library lends no way to; pass rows aligned to 16 bytes")


def _rows(array: Any, found: Described, columns: int) -> Any:
    """An array with four axes, rows aligned to 16 bytes; a copy with zeros behind each row where they are not."""
    if widest(found) >= 16 and found.shape[-1] == columns:
        return _axes(array, 4)
    made, given = _zeros(array, found, ((1, 1, *found.shape)[-4:-1] + (columns,)), "an argument")
    made[..., : found.shape[-1]] = given
    return made


def _by_columns(v: Any, found: Described, columns: int) -> Any:
    """v with four axes, by columns; a copy where it is not yet."""
    swapped = found.shape[:-2] + (found.shape[-1], -(-found.shape[-2] // 16) * 16)
    strides = (*found.strides[:-2], found.strides[-1], found.strides[-2])
    if widest(replace(found, shape=swapped, strides=strides)) >= 16 and found.shape[-1] == columns:
        return _axes(v, 4)
    return _transposed(v, found, columns)[..., : found.shape[-2], :]


def _transposed(v: Any, found: Described, columns: int) -> Any:
    """A copy of v by columns: bytes ``[batch, heads, N', columns]``, a view of ``[batch, heads, columns, N']``."""
    batch, heads, n, d = (1, 1, *found.shape)[-4:]
    made, given = _zeros(v, found, (batch, heads, columns, -(-n // 16) * 16), "v")
    view = made.swapaxes(-1, -2)
    view[..., :n, :d] = given
    return view


def _values(heads: Heads, name: str) -> np.ndarray:
    """What codes in host memory stand for, scaled: ``[batch, heads, rows, D]`` float32."""
    codes = heads.arrays[name].view(element_dtype(heads.shape.element))
    per_row = np.repeat(heads.arrays[f"{name}_descale"], BLOCK, -1)[..., : codes.shape[-2], None]
    return codes.astype(np.float32) * per_row
