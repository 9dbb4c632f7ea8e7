"""What the names in a kernel's source mean on the emulator: ``cuda``, ``math``, casts, ``max`` and ``min``."""

from __future__ import annotations

import linecache
import math as host_math
import re
import sys
from functools import cache
from typing import Any

import numpy as np
from greenlet import getcurrent

from flashnumba.machine.emulator import faults
from flashnumba.machine.emulator.arrays import SharedArray
from flashnumba.machine.emulator.gang import meet
from flashnumba.machine.emulator.registers import LocalArray, LocalStore, wrapped
from flashnumba.machine.emulator.thread import Dim3, Thread
from flashnumba.machine.numba import types

__all__ = ["BUILTINS", "CASTS", "CUDA", "MATH", "shuffle", "vote"]

POLLS = (
    100_000  # atomics in vain by one thread, while nothing else in the launch happens, after which nothing ever will
)


_FLOATS = (float, np.floating)


# -- casts ------------------------------------------------------------------------------------------------------------
def _integer_cast(name: str) -> Any:
    """A function that cuts integers to a width as a register does, and says which dtype it stands for. Kernels hold
    integers as Python's, which are 64 bits wide in Numba's arithmetic too."""
    dtype = np.dtype(name)
    mask = (1 << dtype.itemsize * 8) - 1
    half = (mask >> 1) + 1

    low, high = (-half, half - 1) if dtype.kind == "i" else (0, mask)

    def rounded(value: Any) -> int:
        """A float toward zero, at the type's ends if it lies beyond, 0 for NaN: cvt.rzi."""
        return 0 if value != value else low if value <= low else high if value >= high else int(value)

    def unsigned(value: Any = 0) -> int:
        if value.__class__ is int:
            return value & mask
        if isinstance(value, _FLOATS):
            return rounded(value)
        return int(value) & mask

    def signed(value: Any = 0) -> int:
        if value.__class__ is int:
            return ((value + half) & mask) - half
        if isinstance(value, _FLOATS):
            return rounded(value)
        return ((int(value) + half) & mask) - half

    cast: Any = signed if dtype.kind == "i" else unsigned
    cast.__name__, cast.dtype = name, dtype
    return cast


CASTS: dict[Any, Any] = {
    **{getattr(types, f"float{n}"): np.dtype(f"float{n}").type for n in (16, 32, 64)},
    **{getattr(types, f"{s}int{n}"): _integer_cast(f"{s}int{n}") for s in ("", "u") for n in (8, 16, 32, 64)},
    types.boolean: bool,
}


def _dtype(given: Any) -> np.dtype:
    own = getattr(given, "dtype", None)
    return own if isinstance(own, np.dtype) else np.dtype(given)


# -- builtins and math ------------------------------------------------------------------------------------------------
def _max(a: Any, b: Any, *more: Any) -> Any:
    """The GPU's maximum: a NaN loses to a number."""
    best = a if a > b or b != b else b
    return _max(best, *more) if more else best


def _min(a: Any, b: Any, *more: Any) -> Any:
    best = a if a < b or b != b else b
    return _min(best, *more) if more else best


BUILTINS = {"max": _max, "min": _min}


class _Math:
    """``math`` with a GPU's manners: float32 stays float32, and inf or NaN come out where Python would raise."""

    pi, e, inf, nan = host_math.pi, host_math.e, host_math.inf, host_math.nan

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"math.{name} is not emulated")


def _named(**functions: Any) -> Any:
    return functions.items()


def _ufunc(name: str, ufunc: Any) -> Any:
    def call(*args: Any) -> Any:
        if len(args) == 1 and args[0].__class__ is np.float32:
            return ufunc(args[0])
        return ufunc(
            *(np.float64(a) if isinstance(a, (int, float)) and not isinstance(a, np.floating) else a for a in args)
        )

    call.__name__ = name
    return staticmethod(call)


for _name, _numpy in _named(
    exp=np.exp, exp2=np.exp2, expm1=np.expm1, log=np.log, log2=np.log2, log10=np.log10, log1p=np.log1p, sqrt=np.sqrt,
    sin=np.sin, cos=np.cos, tan=np.tan, tanh=np.tanh, sinh=np.sinh, cosh=np.cosh, fabs=np.fabs, pow=np.power,
    atan=np.arctan, atan2=np.arctan2, hypot=np.hypot, copysign=np.copysign, fmod=np.fmod,
):  # fmt: skip
    setattr(_Math, _name, _ufunc(_name, _numpy))
for _name in ("isnan", "isinf", "isfinite"):
    setattr(_Math, _name, staticmethod(lambda x, name=_name: bool(getattr(np, name)(x))))
for _name in ("floor", "ceil"):
    setattr(_Math, _name, staticmethod(lambda x, name=_name: int(getattr(np, name)(x))))
_Math.erf = staticmethod(lambda x: type(x)(host_math.erf(x)))  # type: ignore[attr-defined]
MATH = _Math()


# -- warp-wide exchanges ----------------------------------------------------------------------------------------------
_SOURCE = {
    "idx": lambda lane, by: by & 31, "up": lambda lane, by: lane - by, "down": lambda lane, by: lane + by,
    "xor": lambda lane, by: lane ^ by,
}  # fmt: skip
_SHUFFLE = {how: f"shfl_{how}_sync" for how in _SOURCE}


@cache
def _sources(how: str, by: int) -> tuple[int, ...]:
    """From which lane each of 32 has its value, when all ask for the same."""
    found = [_SOURCE[how](lane, by) for lane in range(32)]
    return tuple(source if 0 <= source < 32 else lane for lane, source in enumerate(found))


def shuffle(thread: Thread, mask: int, value: Any, how: str, operand: int) -> Any:
    """``shfl.sync``: ``how`` is idx, up, down or xor. A lane whose source is out of range keeps its own value."""
    source_of = _SOURCE[how]

    def compute(values: dict[int, Any]) -> Any:
        if len(values) == 32 and len({by for _, by in values.values()}) == 1:
            return [values[source][0] for source in _sources(how, values[0][1])]
        out = {}
        for lane, (own, by) in values.items():
            source = source_of(lane, by)
            if not 0 <= source < 32:
                out[lane] = own
            elif source not in values:
                raise thread.fault(
                    faults.DivergentCollective, f"lane {lane} shuffles from lane {source}, which the mask does not name"
                )
            else:
                out[lane] = values[source][0]
        return out

    return meet(thread, _SHUFFLE[how], mask, (value, int(operand)), compute)


def vote(thread: Thread, mask: int, predicate: Any, how: str) -> Any:
    """``vote.sync``: all, any, or ballot."""

    def compute(values: dict[int, Any]) -> dict[int, Any]:
        if how == "ballot":
            result: Any = sum(1 << lane for lane, p in values.items() if p)
        else:
            result = (all if how == "all" else any)(values.values())
        return dict.fromkeys(values, result)

    return meet(thread, f"{how}_sync", mask, bool(predicate), compute)


def syncwarp(thread: Thread, mask: int = 0xFFFFFFFF) -> None:
    """Order the memory accesses of the lanes of ``mask``."""
    first = thread.warp * 32

    def compute(values: dict[int, Any]) -> None:
        thread.block.order([thread.block.threads[first + lane] for lane in values])

    meet(thread, "syncwarp", mask, None, compute)


# -- memory -----------------------------------------------------------------------------------------------------------
class _Shared:
    """``cuda.shared``"""

    @staticmethod
    def array(shape: Any, dtype: Any, alignment: int | None = None) -> SharedArray:
        thread: Any = getcurrent()
        frame = sys._getframe(1)
        key = (frame.f_code, frame.f_lasti, id(frame.f_globals))  # copies of one function differ in their globals
        block = thread.block
        array = block.static.get(key)
        if array is None:
            array = block.static[key] = _allocate(thread, shape, _dtype(dtype), alignment)
        return array


def _allocate(thread: Thread, shape: Any, dtype: np.dtype, alignment: int | None) -> SharedArray:
    block, shape = thread.block, tuple(shape) if isinstance(shape, (tuple, list)) else (int(shape),)
    data = block.shared.data
    if shape == (0,):
        at, count = block.dynamic_address, block.dynamic_bytes // dtype.itemsize
        return thread.launch.shared_type(
            block.shared, data[at : at + count * dtype.itemsize].view(dtype), at, "dynamic shared memory"
        )
    align = alignment or dtype.itemsize
    at = (block.static_end + align - 1) // align * align
    nbytes = int(np.prod(shape)) * dtype.itemsize
    block.static_end = block.shared.end = at + nbytes
    static = block.static_end - block.dynamic_address - block.dynamic_bytes
    if static > 48 * 1024 or static + block.dynamic_bytes > block.shared.size:
        raise thread.fault(
            faults.LaunchLimit,
            f"{static} bytes of static shared memory (at most {48 * 1024}) and {block.dynamic_bytes} of dynamic; "
            f"a block has at most {block.shared.size}",
        )
    name = _name_of(sys._getframe(2))
    made = thread.launch.shared_type(block.shared, data[at : at + nbytes].view(dtype).reshape(shape), at, name)
    block.shared.arrays.append(made)
    return made


def _name_of(frame: Any) -> str:
    """The name that the source line of a frame gives to what it makes."""
    found = re.match(r"\s*(\w+) *=", linecache.getline(frame.f_code.co_filename, frame.f_lineno))
    return found[1] if found else "a shared array"


class _Local:
    """``cuda.local``"""

    @staticmethod
    def array(shape: Any, dtype: Any, alignment: int | None = None) -> LocalArray:
        thread: Any = getcurrent()
        frame = sys._getframe(1)
        key = (frame.f_code, frame.f_lasti, id(frame.f_globals))
        array = thread.locals.get(key)
        if array is not None:
            array.as_new()
            return array
        size = tuple(shape) if isinstance(shape, (tuple, list)) else (int(shape),)
        first, kind = thread.tid // 128 * 128, _dtype(dtype)
        stores, place = thread.block.stores, (key, first, size, kind)
        store = stores.get(place)
        if store is None:
            store = stores[place] = LocalStore(min(128, thread.block.size - first), size, kind)
        array = thread.locals[key] = thread.launch.local_type(thread, store, thread.tid - first)
        return array


class _Atomic:
    """``cuda.atomic``: on shared and global arrays; each returns the old value."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"cuda.atomic.{name} is not emulated")


def _atomic(name: str, new: Any) -> Any:
    def call(array: Any, index: Any, *args: Any) -> Any:
        thread: Any = getcurrent()
        at = array.offset(index) + array.address
        if isinstance(array, SharedArray):
            if thread.op is not None:
                thread.flush()
            if array.memory.checks:
                array.memory.check_atomic(at, at + array.itemsize, thread)
        else:
            if not array.data.flags.writeable:
                raise thread.fault(faults.ReadOnly, f"an atomic on {array.name}, which is read-only")
            array.memory.loaded += array.itemsize
            array.memory.stored += array.itemsize
        old = array.data.item(index) if array.integer else array.data[index]
        value = new(old, *args)
        array.data[index] = wrapped(value, array.data.dtype) if array.integer else value
        if array.data[index] == old:  # perhaps it waits for somebody else to change it
            thread.poll(f"a change of {array.name} by an atomic of another thread", POLLS)
        else:
            thread.launch.progress += 1
        return old

    call.__name__ = name
    return staticmethod(call)


for _name, _new in _named(
    add=lambda old, v: old + v, sub=lambda old, v: old - v, max=_max, min=_min, nanmax=_max, nanmin=_min,
    and_=lambda old, v: old & v, or_=lambda old, v: old | v, xor=lambda old, v: old ^ v, exch=lambda old, v: v,
    inc=lambda old, v: 0 if old >= v else old + 1, dec=lambda old, v: v if old == 0 or old > v else old - 1,
    cas=lambda old, expected, v: v if old == expected else old,
):  # fmt: skip
    setattr(_Atomic, _name, _atomic(_name, _new))


class _Cuda:
    """``numba.cuda`` inside an emulated kernel."""

    shared, local, atomic = _Shared, _Local, _Atomic()
    warpsize = 32

    @property
    def threadIdx(self) -> Dim3:
        return getcurrent().thread_idx  # type: ignore[attr-defined]

    @property
    def blockIdx(self) -> Dim3:
        return getcurrent().block.block_idx  # type: ignore[attr-defined]

    @property
    def blockDim(self) -> Dim3:
        return getcurrent().launch.block_dim  # type: ignore[attr-defined]

    @property
    def gridDim(self) -> Dim3:
        return getcurrent().launch.grid_dim  # type: ignore[attr-defined]

    @property
    def laneid(self) -> int:
        return getcurrent().lane  # type: ignore[attr-defined]

    @staticmethod
    def syncthreads() -> None:
        thread: Any = getcurrent()
        frame = sys._getframe(1)
        thread.block.syncthreads(thread, (frame.f_code, frame.f_lasti, id(frame.f_globals), frame.f_back.f_lasti))

    @staticmethod
    def syncwarp(mask: int = 0xFFFFFFFF) -> None:
        syncwarp(getcurrent(), mask)  # type: ignore[arg-type]

    @staticmethod
    def grid(ndim: int) -> Any:
        thread: Any = getcurrent()
        at = [
            b * d + t
            for b, d, t in zip(thread.block.block_idx, thread.launch.block_dim, thread.thread_idx, strict=True)
        ]
        return at[0] if ndim == 1 else tuple(at[:ndim])

    @staticmethod
    def gridsize(ndim: int) -> Any:
        thread: Any = getcurrent()
        size = [g * d for g, d in zip(thread.launch.grid_dim, thread.launch.block_dim, strict=True)]
        return size[0] if ndim == 1 else tuple(size[:ndim])

    @staticmethod
    def threadfence() -> None:
        """With atomics it orders accesses to shared memory; global memory is one for all blocks here."""
        thread: Any = getcurrent()
        thread.fence_memory()

    threadfence_block = threadfence_system = threadfence

    popc = staticmethod(lambda x: (int(x) & (0xFFFFFFFF if -(2**31) <= x < 2**32 else 2**64 - 1)).bit_count())
    ffs = staticmethod(lambda x: (int(x) & -int(x)).bit_length())
    fma = staticmethod(lambda a, b, c: type(a)(float(a) * float(b) + float(c)))
    selp = staticmethod(lambda p, a, b: a if p else b)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"cuda.{name} is not emulated")


for _how in ("xor", "up", "down", "idx"):
    setattr(
        _Cuda,
        "shfl_sync" if _how == "idx" else f"shfl_{_how}_sync",
        staticmethod(lambda mask, value, by, how=_how: shuffle(getcurrent(), mask, value, how, by)),  # type: ignore[arg-type]
    )
for _how in ("all", "any", "ballot"):
    setattr(
        _Cuda,
        f"{_how}_sync",
        staticmethod(lambda mask, predicate, how=_how: vote(getcurrent(), mask, predicate, how)),  # type: ignore[arg-type]
    )
CUDA = _Cuda()
