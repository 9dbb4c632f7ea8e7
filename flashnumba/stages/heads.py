"""Host side of attention kernels: check q, k and v, see them as [batch, heads, rows, columns], launch, hand back.

Shapes are ``q [B, H, M, D]``, ``k`` and ``v [B, Hkv, N, D]``, ``o`` as q, ``lse [B, H, M]`` float32; leading axes may
be left out. Kernels read the arrays where they lie, whatever the strides, so nothing is copied.

A stage gives a *plan*: which kernels to launch for a :class:`Shape`, their arguments by name. The names are those of
:data:`ARGUMENTS`; what a plan adds between its kernels is named in its ``scratch``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import numpy as np

from flashnumba.machine import gpu, launcher
from flashnumba.machine.arrays import Described, describe, empty_like_kind, host_view
from flashnumba.machine.function import Kernel
from flashnumba.machine.numba import types
from flashnumba.machine.streams import stream_handle
from flashnumba.machine.tensor_map import TensorMap
from flashnumba.stages.host import check_machine, finish, library_stream, machine_of, refuse_gradients
from flashnumba.tiles.elements import ITEMSIZE

__all__ = ["ARGUMENTS", "MOST_D", "SCRATCH", "Heads", "Launch", "Plan", "Shape", "forward", "map_of",
           "maps_for", "prepare_heads", "signature"]  # fmt: skip

MOST_D = 256
"""Largest head dimension."""
MOST_BLOCKS = 2**31 - 1
MOST_APART = 2**23
"""Bytes from row to row up to which a tile of 256 rows is reached by 32-bit offsets."""
EMULATED_MULTIPROCESSORS = 4
"""What a plan that fills a GPU is told of the emulator, where every block costs."""
ARGUMENTS = ("q", "k", "v", "o", "lse", "scale", "causal")
SCRATCH = {"acc_parts": ("float32", 5), "m_parts": ("float32", 4), "l_parts": ("float32", 4), "counter": ("int32", 1)}
"""Arrays that a plan may add: elements and rank, by name. They are packed, and nothing is in them beforehand."""


@dataclass(frozen=True)
class Shape:
    """What decides which kernel is best.

    Attributes:
        element: float16, bfloat16 or float32, of q, k, v and o; or one of 8 bits, of q, k and v.
        batch, heads, kv_heads, m, n, d: sizes.
        causal: key j is visible to row i iff ``j <= i + n - m``.
        vector: bytes of the widest vector that is aligned in every row of q, k, v and o, and would be in rows after the
            last: 16 down to one element; one element's where the last axis of one of them is not packed, or rows lie in
            reverse or more than :data:`MOST_APART` bytes apart.
        arch: compute capability it runs on.
        multiprocessors: of the GPU.
        mapped: the copy engine of sm_90 takes q, k and v as they lie: ``vector`` is 16, none is empty, and other axes
            than the last are walked upwards, none of more than one entry by steps of 0.
        scaled: of 8-bit elements alone: which scales they have, of :data:`flashnumba.tiles.descale.SCALED`.
    """

    element: str
    batch: int
    heads: int
    kv_heads: int
    m: int
    n: int
    d: int
    causal: bool = False
    vector: int = 16
    arch: str = "90a"
    multiprocessors: int = EMULATED_MULTIPROCESSORS
    mapped: bool = True
    scaled: str = ""

    @property
    def group(self) -> int:
        """Query heads that share one head of keys and values."""
        return self.heads // max(1, self.kv_heads)


@dataclass(frozen=True)
class Launch:
    """One kernel of a plan. ``args`` are names: of :data:`ARGUMENTS`, of the plan's scratch arrays, or, by
    :func:`map_of`, of tensor maps of the arrays in ``boxes``, each with the box that the copy engine moves at once."""

    kernel: Kernel
    grid: int
    threads: int
    shared: int = 0
    args: tuple[str, ...] = ARGUMENTS
    boxes: tuple[tuple[str, tuple[int, ...]], ...] = ()


@dataclass(frozen=True)
class Plan:
    """Kernels to launch one after the other, and the arrays of :data:`SCRATCH` that one leaves for the next, by name
    and shape. ``v_by_columns``: they read v so (:mod:`flashnumba.stages.fp8_heads`)."""

    launches: tuple[Launch, ...]
    scratch: dict[str, tuple[int, ...]] = field(default_factory=dict)
    v_by_columns: bool = False


Planner = Callable[[Shape], Plan]


@dataclass
class Heads:
    """The problem as kernels get it, ``arrays`` and scalars by name."""

    shape: Shape
    arrays: dict[str, Any]
    scale: float
    machine: str
    device: int | None
    stream: Any
    found: Described
    results: tuple[Any, Any]

    def run(self, plan: Plan) -> tuple[Any, Any]:
        """Launch a plan; returns (o, lse) as the caller gets them.

        Raises:
            ValueError: more blocks than a grid has.
        """
        known: dict[str, Any] = {
            **self.arrays,
            "scale": np.float32(self.scale),
            "causal": np.int32(self.shape.causal),
        }
        with library_stream(self.found, self.stream):
            for name, shape in plan.scratch.items():
                known[name] = empty_like_kind(self.results[0], shape, SCRATCH[name][0])
            for launch in plan.launches:
                if launch.grid > MOST_BLOCKS:
                    raise ValueError(
                        f"q has shape {self.found.shape}, {launch.grid} blocks of work; a launch takes {MOST_BLOCKS}: "
                        "split the batch"
                    )
                ready = prepared(launch, self.shape.element, self.machine, self.device)
                given = known | maps_for(launch, known, self.shape.element)
                ready(launch.grid, launch.threads, tuple(given[name] for name in launch.args), self.stream)
        return self.finish()

    def finish(self) -> tuple[Any, Any]:
        """The results as the caller gets them."""
        o, lse = (finish(result, self.found, self.stream) for result in self.results)
        return o, lse


def map_of(name: str) -> str:
    """The name of an array's tensor map among the arguments of a launch."""
    return f"{name} map"


def maps_for(launch: Launch, arrays: Mapping[str, Any], element: str) -> dict[str, TensorMap]:
    """The tensor maps of a launch, by the names that its arguments have for them."""
    return {map_of(name): TensorMap(arrays[name], box, element=element, name=name) for name, box in launch.boxes}


def signature(element: str, args: tuple[str, ...] = ARGUMENTS) -> tuple[Any, ...]:
    """Numba types of a kernel's arguments: q, k, v, o of any strides, scratch packed. The o of 8 bits is bfloat16."""
    eight = element.startswith("float8")
    plain = types.uint8 if eight else {
        "float32": types.float32, "float16": types.float16, "bfloat16": types.uint16
    }[element]  # fmt: skip
    known = {name: types.Array(plain, 4, "A") for name in "qkvo"}
    if eight:
        known["o"] = types.Array(types.uint16, 4, "A")
        known |= {f"{name}_descale": types.Array(types.float32, 3, "A") for name in "qkv"}
    known |= {"lse": types.Array(types.float32, 3, "C"), "scale": types.float32, "causal": types.int32}
    known |= {map_of(name): types.uint64 for name in "qkvo"}
    known |= {"trace": types.Array(types.uint32, 3, "C")}  # of a kernel that leaves marks
    known |= {name: types.Array(getattr(types, kind), rank, "C") for name, (kind, rank) in SCRATCH.items()}
    return tuple(known[a] for a in args)


def prepared(launch: Launch, element: str, machine: str, device: int | None) -> Any:
    """A launch, compiled once for each kernel and device."""
    key = ("heads", launch.args, element, launch.shared, machine, device)
    cache = launch.kernel.cache
    if key not in cache:
        wanted = signature(element, launch.args)
        cache[key] = launcher.prepare(launch.kernel, wanted, shared=launch.shared, machine=machine, device=device)
    return cache[key]


def forward(
    q: Any, k: Any, v: Any, plan: Planner, *, causal: bool = False, scale: float | None = None, machine: str = "auto",
    stream: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Attention by one kernel: ``o = softmax(scale q k^T) v`` and the log of the sum of exponentials.

    Args:
        q: ``[B, H, M, D]``, ``[H, M, D]`` or ``[M, D]`` float16, bfloat16 or float32, any strides: NumPy, torch, CuPy,
            JAX, numba, or what offers ``__cuda_array_interface__`` or DLPack. D is 1 to 256.
        k, v: ``[B, Hkv, N, D]`` with as many axes as q; Hkv divides H.
        plan: of a stage's ``PLANS``.
        causal: key j is visible to row i iff ``j <= i + N - M``: bottom-right aligned.
        scale: of the scores, finite; None is ``1 / sqrt(D)``.
        machine: ``"cuda"``, ``"emulator"``, or ``"auto"``: where the arrays are, else a GPU if there is one.
        stream: for a GPU; None follows the current stream of ``q``'s library.

    Returns:
        (o, lse): new arrays of q's kind; o as q, packed; lse ``[B, H, M]`` float32, the natural logarithm. A row that
        sees no key has o = 0 and lse = -inf.

    Raises:
        TypeError, ValueError: an argument does not fit, before anything is launched.
    """
    heads = prepare_heads(q, k, v, causal=causal, scale=scale, machine=machine, stream=stream)
    if 0 in (heads.shape.batch, heads.shape.heads, heads.shape.m):
        return heads.finish()
    return heads.run(plan(heads.shape))


def prepare_heads(
    q: Any, k: Any, v: Any, *, causal: bool, scale: float | None, machine: str, stream: Any
) -> Heads:  # fmt: skip
    """Check the arguments of :func:`forward` and allocate its results."""
    check_machine(machine)
    refuse_gradients(q=q, k=k, v=v)
    found = [describe(array, name) for name, array in zip("qkv", (q, k, v), strict=True)]
    shape = check(*found, causal=causal)
    scale = check_scale(scale, shape.d)
    if stream is not None:
        stream_handle(stream)
    device = found[0].device
    machine, arch = machine_of(machine, found[0], "q")
    for array, described in zip((q, k, v), found, strict=True):
        if described.kind == "jax" and device is not None:
            array.block_until_ready()
    with library_stream(found[0], stream):
        o = empty_like_kind(q, found[0].shape)
        lse = empty_like_kind(q, found[0].shape[:-1], "float32")
        seen = [replace(describe(x, "the result"), readonly=False) for x in (o, lse)]
        arrays = {
            name: _view(array, described, 3 if name == "lse" else 4)
            for name, array, described in zip(
                ("q", "k", "v", "o", "lse"), (q, k, v, o, lse), (*found, *seen), strict=True
            )
        }
    shape = replace(
        shape, arch=arch,
        multiprocessors=EMULATED_MULTIPROCESSORS if machine == "emulator" else gpu.multiprocessors(device),
    )  # fmt: skip
    return Heads(shape, arrays, scale, machine, device, stream, found[0], (o, lse))


def check(q: Described, k: Described, v: Described, *, causal: bool) -> Shape:
    """The shape of a problem; its architecture and multiprocessors are the emulator's.

    Raises:
        TypeError: elements that no kernel takes, or not the same in all three; causal is no bool.
        ValueError: shapes that do not fit together, or arrays that lie apart.
    """
    named = {"q": q, "k": k, "v": v}
    for name, array in named.items():
        if array.element not in ITEMSIZE:
            raise TypeError(f"{name} has elements of type {array.element}; attention takes {', '.join(ITEMSIZE)}")
    for name, array in named.items():
        if array.element != q.element:
            raise TypeError(f"{name} has elements of type {array.element} and q of {q.element}; they must be the same")
        if not 2 <= len(array.shape) <= 4:
            raise ValueError(
                f"{name} has shape {array.shape}; it must have 2 to 4 axes, the last of [batch, heads, rows, columns]"
            )
        if len(array.shape) != len(q.shape):
            raise ValueError(f"{name} has shape {array.shape} and q {q.shape}; they must have the same number of axes")
        if array.device != q.device:
            places = ["in host memory" if d is None else f"on cuda:{d}" for d in (array.device, q.device)]
            raise ValueError(f"{name} is {places[0]} and q {places[1]}; they must be in one place")
    if not isinstance(causal, bool | np.bool_):
        raise TypeError(f"causal is {causal!r}; it must be True or False")
    if k.shape != v.shape:
        raise ValueError(f"v has shape {v.shape} and k {k.shape}; they must be the same")
    batch, heads, m, d = (1, 1, *q.shape)[-4:]
    kv_batch, kv_heads, n, kv_d = (1, 1, *k.shape)[-4:]
    if kv_d != d:
        raise ValueError(f"k has shape {k.shape} and q {q.shape}; the last axis, the head dimension, must be the same")
    if not 1 <= d <= MOST_D:
        raise ValueError(f"q has shape {q.shape}; the last axis, the head dimension, must be 1 to {MOST_D}")
    if kv_batch != batch:
        raise ValueError(f"k has shape {k.shape} and q {q.shape}; the first axis, the batch, must be the same")
    if heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(
            f"q has {heads} heads and k has {kv_heads}; the number of heads of k and v must divide that of q"
        )
    return Shape(
        q.element, batch, heads, kv_heads, m, n, d, bool(causal), vector := widest(q, k, v),
        mapped=vector == 16 and mappable(q, k, v),
    )  # fmt: skip


def check_scale(scale: Any, d: int, name: str = "scale") -> float:
    """The scale as a float.

    Raises:
        TypeError: no real number.
        ValueError: not finite, or beyond what float32 scores in base 2 can be multiplied with.
    """
    if scale is None:
        return 1 / math.sqrt(d)
    is_number = isinstance(scale, Real | np.floating | np.integer)
    if not is_number or isinstance(scale, bool | np.bool_ | np.timedelta64):
        raise TypeError(f"{name} is {scale!r}; it must be a real number, or None for 1 / sqrt(D)")
    try:
        value = float(scale)
    except OverflowError:  # more digits than may be worth a line, or than Python prints
        raise ValueError(
            f"{name} is of type {type(scale).__name__} and beyond float64; it must be a finite number of at most 2e38, "
            "or None for 1 / sqrt(D)"
        ) from None
    if not math.isfinite(value) or abs(value) > 2e38:
        raise ValueError(f"{name} is {scale!r}; it must be a finite number of at most 2e38, or None for 1 / sqrt(D)")
    return value


def widest(*arrays: Described) -> int:
    """Bytes of the widest vector, 16 down to one element, at multiples of whose size every row begins and ends, and
    would after the last: a tile copies no byte of rows that are not there, but from an address all the same."""
    itemsize = arrays[0].dtype.itemsize
    odd = 16
    for array in arrays:
        *outer, last = zip(array.shape, array.strides, strict=True)
        if last[0] > 1 and last[1] != itemsize:
            return itemsize
        if outer[-1][0] > 1 and not 0 <= outer[-1][1] <= MOST_APART:
            return itemsize
        odd |= array.pointer | last[0] * itemsize | outer[-1][1]
        for n, stride in outer:
            odd |= stride if n > 1 else 0
    return odd & -odd


def mappable(*arrays: Described) -> bool:
    """Whether tensor maps take arrays whose rows are vectors of 16 bytes: :mod:`flashnumba.machine.tensor_map`."""
    return all(
        n and (n == 1 or 0 < stride < 1 << 40)
        for array in arrays for n, stride in zip(array.shape, array.strides, strict=True)
    )  # fmt: skip


def _view(array: Any, found: Described, rank: int) -> Any:
    """The array with axes of length 1 in front, sharing its memory."""
    more = rank - len(found.shape)
    if found.device is None:
        return host_view(array)[(None,) * more]
    if more == 0:
        return array
    if found.kind in ("torch-cuda", "cupy"):
        return array[(None,) * more]
    strides = (found.shape[0] * found.strides[0],) * more + found.strides
    return replace(found, shape=(1,) * more + found.shape, strides=strides, kind="numba")
