"""A launch on the emulator: the kernel's function exchanged, its arguments placed, its blocks run."""

from __future__ import annotations

import inspect
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from greenlet import GreenletExit, getcurrent

from flashnumba.machine import numba as room
from flashnumba.machine.emulator import faults
from flashnumba.machine.emulator.arrays import GlobalArray, SharedArray
from flashnumba.machine.emulator.block import Block
from flashnumba.machine.emulator.execution import bind
from flashnumba.machine.emulator.global_memory import GlobalMemory
from flashnumba.machine.emulator.names import BUILTINS, CASTS, CUDA, MATH
from flashnumba.machine.emulator.registers import LocalArray
from flashnumba.machine.emulator.tensor_core import settings
from flashnumba.machine.emulator.thread import Dim3, Thread
from flashnumba.machine.function import DeviceFunction, Kernel, exchange
from flashnumba.machine.instruction import Instruction, runs_on

__all__ = ["SHARED_LIMIT", "Launch", "Names", "Report", "as_python", "launch"]

SHARED_LIMIT = {"75": 65536, "80": 166912, "86": 101376, "89": 101376, "90": 232448, "100": 232448, "120": 101376}
"""Bytes of shared memory a block may have, by compute capability (CUDA programming guide, table of technical
specifications: 64, 163, 99, 99, 227, 227 and 99 KB)."""


@dataclass(frozen=True)
class Report:
    """What a launch did: bytes that kernels moved to and from device memory, and how often blocks met.

    Attributes:
        loaded, stored: bytes of global memory read and written by instructions and copy engines.
        blocks, threads: how many ran.
    """

    loaded: int
    stored: int
    blocks: int
    threads: int


def launch(
    kernel: Kernel,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    args: Sequence[Any],
    *,
    shared: int = 0,
    arch: str = "90a",
    checks: bool = True,
    seed: int = 0,
) -> Report:
    """Run a kernel on the CPU, one greenlet a thread.

    Args:
        kernel: a kernel declared with :func:`flashnumba.machine.function.kernel`.
        grid, block: sizes, one to three integers, x first.
        args: NumPy arrays (any strides; written in place), scalars, tensor maps. bfloat16 arrays arrive in the kernel
            as uint16, FP8 arrays as uint8. A Python float is a float32, a Python int an int64.
        shared: dynamic shared memory, bytes.
        arch: compute capability to emulate; it decides limits and which instructions exist.
        checks: look for races and uninitialised shared memory. Off, kernels run faster and unwatched; bounds,
            deadlocks and misuse of barriers are found all the same.
        seed: 0 runs threads in order; another number in an order drawn from it.

    Returns:
        What was moved; results are in the arrays.

    Raises:
        Fault: the kernel did what it must not; the kind of fault names it.
        ValueError: sizes that no launch may have.
    """
    if isinstance(getcurrent(), Thread):
        raise TypeError("a kernel cannot launch a kernel: launch() was called by an emulated thread")
    arch = str(arch)
    if arch.rstrip("a") not in SHARED_LIMIT:
        raise ValueError(f"arch is {arch!r}; the emulator knows {', '.join(SHARED_LIMIT)}, each also with an a")
    with settings.using(arch=arch):
        return Launch(kernel, grid, block, args, shared, arch, checks, seed).run()


def _three(what: str, sizes: int | Sequence[int]) -> tuple[int, int, int]:
    given = (sizes,) if isinstance(sizes, (int, np.integer)) else tuple(sizes)
    if not 1 <= len(given) <= 3 or any(int(n) < 1 for n in given):
        raise ValueError(f"{what} is {sizes!r}; it must be one to three positive integers")
    x, y, z = (*map(int, given), 1, 1)[:3]
    return x, y, z


class Names(NamedTuple):
    """What stands for the names in a kernel's source.

    ``title`` tells one set from another; ``bind`` makes of an instruction and an architecture what a thread calls.
    """

    title: str
    cuda: Any
    math: Any
    builtins: dict[str, Any]
    bind: Callable[[Instruction, str], Callable[..., Any]]


class Launch:
    """One launch; see :func:`launch`. What watches a launch is a subclass with types and names of its own."""

    block_type, local_type, shared_type, global_type = Block, LocalArray, SharedArray, GlobalArray
    names = Names("", CUDA, MATH, BUILTINS, bind)

    def __init__(
        self,
        kernel: Kernel,
        grid: Any,
        block: Any,
        args: Sequence[Any],
        shared: int,
        arch: str,
        checks: bool,
        seed: int,
    ):
        self.kernel, self.arch, self.checks, self.shared = kernel, arch, checks, int(shared)
        self.grid, self.block = _three("grid", grid), _three("block", block)
        self.grid_dim, self.block_dim = Dim3(*self.grid), Dim3(*self.block)
        self.shared_limit = SHARED_LIMIT[arch.rstrip("a")]
        self._check_limits()
        self.shuffle: Callable[[list[Any]], None] | None = random.Random(seed).shuffle if seed else None
        self.memory = GlobalMemory(kernel.early)
        self.function = translated(kernel, arch, self.names)
        self.args = self._place(args)
        self.ready: deque[Any] = deque()
        self.fresh: deque[Any] = deque()
        self.hub: Any = None
        self.progress = 0  # counts what may let a polling thread go on

    def _check_limits(self) -> None:
        threads = math.prod(self.block)
        if not runs_on(self.arch, self.kernel.arch):
            raise faults.UnsupportedInstruction(
                f"{self.kernel.__name__} needs sm_{self.kernel.arch}; this launch emulates sm_{self.arch}"
            )
        if threads > self.kernel.threads:
            raise faults.LaunchLimit(
                f"{threads} threads a block; {self.kernel.__name__} is compiled for at most {self.kernel.threads}"
            )
        if threads > 1024 or self.block[2] > 64:
            raise faults.LaunchLimit(f"a block of {self.block} threads; at most 1024 in all and 64 along z")
        if self.grid[1] > 65535 or self.grid[2] > 65535 or self.grid[0] > 2**31 - 1:
            raise faults.LaunchLimit(f"a grid of {self.grid} blocks; at most 2^31 - 1, 65535 and 65535")
        if not 0 <= self.shared <= self.shared_limit:
            raise faults.LaunchLimit(
                f"{self.shared} bytes of dynamic shared memory; a block of sm_{self.arch} has at most "
                f"{self.shared_limit}"
            )

    def _place(self, args: Sequence[Any]) -> tuple[Any, ...]:
        names = list(inspect.signature(self.kernel.function).parameters)
        if len(names) != len(args):
            raise ValueError(
                f"{self.kernel.__name__} takes {len(names)} arguments ({', '.join(names)}), not {len(args)}"
            )
        return tuple(self._argument(name, value) for name, value in zip(names, args, strict=True))

    def _argument(self, name: str, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            if value.dtype.kind == "V" or value.dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
                value = value.view(np.uint16 if value.dtype.itemsize == 2 else np.uint8)
            return self.global_type(self.memory, value, self.memory.add(name, value), name)
        if isinstance(value, (bool, np.bool_)):
            return bool(value)
        if isinstance(value, (int, np.integer)):
            return int(value)
        if isinstance(value, float) and not isinstance(value, np.floating):
            return np.float32(value)
        if hasattr(value, "swizzle"):  # a tensor map: copies read and write its array
            self.memory.add(name, value.array)
            return value
        if isinstance(value, np.floating):
            return value
        raise TypeError(
            f"argument {name} is {type(value).__name__}; a kernel takes NumPy arrays, numbers and tensor maps"
        )

    # -- running ------------------------------------------------------------------------------------------------------
    def body(self) -> None:
        """What each thread does."""
        thread: Any = getcurrent()
        with np.errstate(all="ignore"):
            self.function(*self.args)
            thread.block.finished(thread)

    def run(self) -> Report:
        self.hub = getcurrent()
        order = [(x, y, z) for z, y, x in product(*(range(n) for n in reversed(self.grid)))]
        if self.shuffle is not None:
            self.shuffle(order)
        if self.kernel.concurrent:
            self._run([self.block_type(self, index) for index in order])
        else:
            for index in order:
                self._run([self.block_type(self, index)])
        self.hub = None
        return Report(self.memory.loaded, self.memory.stored, len(order), len(order) * math.prod(self.block))

    def _run(self, blocks: list[Block]) -> None:
        threads = [t for b in blocks for t in b.threads]
        if self.shuffle is not None:
            self.shuffle(threads)
        ready, fresh = self.ready, self.fresh
        fresh.extend(threads)
        try:
            while fresh or ready:
                # Threads start from here only: a greenlet inherits the recursion depth of the one that starts it.
                (fresh or ready).popleft().switch()
            for block in blocks:
                if block.alive:
                    raise block.stuck()
        finally:
            ready.clear()
            fresh.clear()
            for thread in threads:
                # A greenlet left suspended would keep its frames, and they the block: the collector does not see
                # into them.
                if not thread.dead:
                    thread.throw(GreenletExit)
            for block in blocks:
                block.__dict__.clear()


def translated(kernel: Kernel, arch: str, names: Names) -> Callable[..., Any]:
    """The kernel's function with each name meaning what it means on the emulator; made once a kernel, architecture
    and set of names."""
    key = ("emulator", arch, names.title)
    if key not in kernel.cache:
        kernel.cache[key] = exchange(kernel.function, _meanings(arch, names), names.builtins)
    return kernel.cache[key]


@cache
def as_python(function: DeviceFunction) -> Callable[..., Any]:
    """A device function that computes with numbers alone, as a Python function: the code that a kernel runs, called
    without one. Casts cut integers to their width. What needs a thread, such as an instruction, fails."""
    return exchange(function.function, _meanings("90a", Launch.names), BUILTINS)


def _meanings(arch: str, names: Names) -> Callable[[Any], Any]:
    """What a name's value is exchanged for on the emulator."""
    memo: dict[int, Any] = {}

    def substitute(value: Any) -> Any:
        if value is room.cuda:
            return names.cuda
        if value is math:
            return names.math
        if isinstance(value, room.types.Type):
            return CASTS.get(value, value)
        if isinstance(value, (Instruction, DeviceFunction)):
            key = id(value)
            if key not in memo:
                if isinstance(value, Instruction):
                    memo[key] = names.bind(value, arch)
                else:
                    # A function that calls itself finds this while its own copy is being made.
                    memo[key] = lambda *args: memo[key](*args)
                    memo[key] = exchange(value.function, substitute, names.builtins)
            return memo[key]
        return value

    return substitute
