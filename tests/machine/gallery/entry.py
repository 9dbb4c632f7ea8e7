"""What an entry of the fault gallery is, and how one is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flashnumba.machine.emulator import Fault, launch
from flashnumba.machine.function import Kernel

__all__ = ["Entry", "Inputs", "run", "vector"]

Inputs = tuple[list[Any], Any, Any]
"""A kernel's arguments, the array among them that it writes, and what must be in it afterwards."""


@dataclass(frozen=True)
class Entry:
    """One planted fault.

    Attributes:
        name: short, unique.
        fault: the class that must be raised.
        planted: what was done to the kernel, one phrase.
        make: ``make(broken)`` gives the kernel, with the fault planted or without.
        inputs: ``inputs(rng)`` gives arguments and the right result.
        line: text of the source line that the report names first; where a launch is refused, of the message.
        block, shared, arch: how it is launched, one block; ``broken_launch`` says what is changed to plant the fault.
        threads: the threads that the report must name; None where they depend on the order of execution.
    """

    name: str
    fault: type[Fault]
    planted: str
    make: Callable[[bool], Kernel]
    inputs: Callable[[np.random.Generator], Inputs]
    line: str
    block: int = 32
    shared: int = 0
    arch: str = "90a"
    threads: tuple[int, ...] | None = None
    broken_launch: dict[str, Any] = field(default_factory=dict)


def run(entry: Entry, broken: bool, seed: int = 0) -> None:
    """Launch an entry's kernel; raises its fault if broken, AssertionError if an unbroken kernel's result is wrong."""
    arguments, out, expected = entry.inputs(np.random.default_rng(7))
    options = {"block": entry.block, "shared": entry.shared, "arch": entry.arch}
    if broken:
        options.update(entry.broken_launch)
    launch(entry.make(broken), 1, options.pop("block"), arguments, seed=seed, **options)
    np.testing.assert_array_equal(out, expected, err_msg=entry.name)


def vector(n: int, expected: Callable[[np.ndarray], Any], size: int | None = None) -> Callable[[Any], Inputs]:
    """Inputs of a kernel ``f(x, out)``: ``x`` holds n distinct float32 integers, ``out`` has ``size`` (n) elements."""

    def inputs(rng: np.random.Generator) -> Inputs:
        x = rng.permutation(4 * n)[:n].astype(np.float32)
        out = np.full(size or n, np.nan, np.float32)
        return [x, out], out, np.broadcast_to(np.asarray(expected(x), np.float32), out.shape)

    return inputs
