"""Kernels and device functions as data: recorded at definition, given to a compiler or to the emulator at first use.

A kernel is an ordinary Python function in Numba's CUDA dialect. The decorators here only write down the function and
its options, so a module full of kernels imports on any computer. A *target* (Numba, or the emulator) gets its own
copy of the function by :func:`exchange`: the same code object, with each global and closure value that the target
knows a substitute for (``cuda``, instructions, device functions) exchanged.
"""

from __future__ import annotations

import re
import types as pytypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

__all__ = ["DeviceFunction", "Kernel", "device", "exchange", "kernel", "named_values", "source_names"]


@dataclass(frozen=True, eq=False)
class DeviceFunction:
    """A function that kernels call; it is always inlined."""

    function: Callable[..., Any]

    @property
    def __name__(self) -> str:
        return self.function.__name__

    @property
    def __doc__(self) -> str | None:
        return self.function.__doc__

    def __call__(self, *args: Any) -> Any:
        raise TypeError(f"{self.__name__} is a device function: it runs inside a kernel, not on the host")


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel as written, and what a launch must know about it.

    Attributes:
        function: the plain Python function.
        threads: threads a block it is launched with (the upper bound, where the launch may choose fewer).
        min_blocks: blocks a multiprocessor the compiler must leave room for (0: no promise).
        arch: smallest compute capability, e.g. 75; a trailing ``a`` asks for the arch-specific set, e.g. ``"90a"``.
        fastmath: let the compiler contract, approximate and assume no NaN in comparisons.
        concurrent: blocks wait for one another; the emulator then runs them all at once.
        early: it may start before the kernel ahead of it on the stream has ended, so that the start costs no time, and
            calls ``grid_dependency_wait`` before it touches global memory (programmatic dependent launch, sm_90).
        name: how tables name it; the function's name otherwise.
    """

    function: Callable[..., Any]
    threads: int
    min_blocks: int = 0
    arch: str = "75"
    fastmath: bool = False
    concurrent: bool = False
    early: bool = False
    name: str = ""
    cache: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def __name__(self) -> str:
        return self.name or self.function.__name__

    @property
    def __doc__(self) -> str | None:
        return self.function.__doc__

    def __call__(self, *args: Any) -> Any:
        raise TypeError(f"{self.__name__} is a kernel: launch it with flashnumba.machine.launcher.launch")


def device(function: Callable[..., Any]) -> DeviceFunction:
    """Declare a device function."""
    return DeviceFunction(function)


def kernel(
    *,
    threads: int,
    min_blocks: int = 0,
    arch: str | int = "75",
    fastmath: bool = False,
    concurrent: bool = False,
    early: bool = False,
    name: str = "",
) -> Callable[[Callable[..., Any]], Kernel]:
    """Declare a kernel; the options are those of :class:`Kernel`.

    Raises:
        ValueError: threads outside 1 to 1024, a negative number of blocks, no architecture like 80 or "90a", or an
            early kernel below sm_90 or with blocks that wait for one another.
    """
    if not isinstance(threads, int) or not 1 <= threads <= 1024:
        raise ValueError(f"threads is {threads!r}; a block has 1 to 1024")
    if not isinstance(min_blocks, int) or min_blocks < 0:
        raise ValueError(f"min_blocks is {min_blocks!r}; it must be 0 or more")
    if not re.fullmatch(r"\d{2,3}a?", str(arch)):
        raise ValueError(f"arch is {arch!r}; it must be a compute capability like 80 or '90a'")

    if early and (concurrent or int(str(arch).rstrip("a")) < 90):
        raise ValueError(f"arch is {arch!r}, concurrent {concurrent}; an early kernel needs 90 or later, and False")

    def declare(function: Callable[..., Any]) -> Kernel:
        return Kernel(function, threads, min_blocks, str(arch), fastmath, concurrent, early, name)

    return declare


def source_names(code: pytypes.CodeType) -> set[str]:
    """Every global name that a code object, or a function nested in it, may look up."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, pytypes.CodeType):
            names |= source_names(constant)
    return names


def named_values(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Each global and closure variable that a function (or one nested in it) names, with its value.

    Raises:
        ValueError: a closure variable has no value yet.
    """
    module = function.__globals__
    for name in sorted(source_names(function.__code__)):
        if name in module:
            yield name, module[name]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            raise ValueError(f"{function.__qualname__} names {name}, which its enclosing function never set") from None


def exchange(
    function: Callable[..., Any], substitute: Callable[[Any], Any], extra: dict[str, Any] | None = None
) -> pytypes.FunctionType:
    """A copy of ``function`` that sees ``substitute(value)`` for each global and closure value it names.

    Args:
        function: a plain Python function; it is left as it is.
        substitute: returns what the target has in place of a value, or the value itself.
        extra: further globals, used where the function's module has no such name (stand-ins for builtins).

    Raises:
        ValueError: a closure variable has no value yet.
    """
    module, free = function.__globals__, set(function.__code__.co_freevars)
    seen = {name: substitute(value) for name, value in named_values(function)}
    known = {name: value for name, value in seen.items() if name not in free}
    scope = {**module, **{k: v for k, v in (extra or {}).items() if k not in module}, **known}
    cells = tuple(pytypes.CellType(seen[name]) for name in function.__code__.co_freevars)
    clone = pytypes.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, cells)
    clone.__kwdefaults__ = function.__kwdefaults__
    clone.__qualname__, clone.__module__, clone.__doc__ = function.__qualname__, function.__module__, function.__doc__
    return clone
