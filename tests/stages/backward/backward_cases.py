"""What tests of backward kernels share: cases with gradients of o and lse, guarded launches, the hunt for faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pytest

from flashnumba.compare import assert_close, compare
from flashnumba.machine import gpu, launcher
from flashnumba.machine.arrays import describe, host_view
from flashnumba.machine.emulator import Fault
from flashnumba.stages import heads
from flashnumba.stages.backward import problem, reference
from flashnumba.stages.flash_forward import reference as forward
from tests.stages.flash_forward import attention_cases
from tests.stages.rowwise import NAN, Guarded

__all__ = ["GRADIENTS", "Case", "assert_gradients", "caught", "hard_cases", "laid_out", "made", "normal", "run"]

GRADIENTS = ("dq", "dk", "dv")


@dataclass(eq=False)
class Case:
    """One problem of the forward, what it gave, and gradients of o and lse."""

    name: str
    inputs: attention_cases.Case
    do: np.ndarray
    o: np.ndarray
    lse: np.ndarray
    dlse: np.ndarray | None = None

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        given = {"q": self.inputs.q, "k": self.inputs.k, "v": self.inputs.v, "o": self.o, "do": self.do}
        return given | {"lse": self.lse, "dlse": self.lse if self.dlse is None else self.dlse}

    @property
    def shape(self) -> heads.Shape:
        found = {name: describe(array, name) for name, array in self.arrays.items()}
        return problem.check(found, causal=self.inputs.causal)

    @cached_property
    def expected(self) -> reference.Gradients:
        """(dq, dk, dv) in float64, from the definition."""
        c = self.inputs
        return reference.dense(c.q, c.k, c.v, self.do, c.scale, c.causal, self.dlse)

    @cached_property
    def lowprec(self) -> reference.Gradients:
        """(dq, dk, dv) as a GPU's precision has them: the error budget."""
        c = self.inputs
        return reference.low_precision(c.q, c.k, c.v, self.o, self.do, self.lse, c.scale, c.causal, self.dlse)

    def with_arrays(self, name: str, change: Callable[[np.ndarray], np.ndarray], which: tuple[str, ...]) -> Case:
        """The case with ``change`` made to the layout of some of its arrays."""
        of_q = {x: change(getattr(self.inputs, x)) for x in which if x in "qkv"}
        mine = {x: change(getattr(self, x)) for x in which if x not in "qkv"}
        return Case(**{**vars_of(self), **mine, "name": name, "inputs": replace(self.inputs, **of_q)})


def vars_of(case: Case) -> dict:
    return {x: getattr(case, x) for x in ("name", "inputs", "do", "o", "lse", "dlse")}


def made(inputs: attention_cases.Case, *, with_dlse: bool = False, seed: int = 0) -> Case:
    """The case with the forward's results, as its precision has them, and gradients of which no two are alike."""
    rng = np.random.default_rng((seed, *inputs.q.shape))
    do = rng.standard_normal(inputs.q.shape) + np.linspace(-0.5, 0.5, inputs.q.shape[-1])
    o, lse = forward.dense(inputs.q, inputs.k, inputs.v, inputs.scale, inputs.causal)
    dlse = rng.standard_normal(lse.shape).astype(np.float32) if with_dlse else None
    name = f"{inputs.name}{', dlse' if with_dlse else ''}"
    dtype = inputs.q.dtype
    with np.errstate(over="ignore"):
        return Case(name, inputs, do.astype(dtype), o.astype(dtype), lse.astype(np.float32), dlse)


def normal(*args, with_dlse: bool = False, **more) -> Case:
    """See :func:`tests.stages.flash_forward.attention_cases.normal`."""
    return made(attention_cases.normal(*args, **more), with_dlse=with_dlse)


FINITE = (
    "normal", "causal", "causal, as many rows as keys", "causal, rows that see nothing", "one query, causal",
    "one key", "one key, scale 0", "two heads share one of k", "all heads share one of k", "scale 0",
    "scale 0, causal", "negative scale", "large scale", "smallest scale", "keys of nothing but zeros",
    "a maximum that grows", "scores of 1e5 that differ little", "the same, causal",
    "scores of -1e5 that differ little", "powers of two", "a NaN in a row of q", "a NaN in a value",
    "infinity in a row of q",
)  # fmt: skip
"""Hard cases of the forward that are hard here too."""


def hard_cases(dtype, **sizes) -> list[Case]:
    """One case for each thing that may go wrong; every third has a gradient of lse."""
    by_name = {case.name: case for case in attention_cases.hard_cases(dtype, **sizes)}
    m, d = by_name["one key"].q.shape[-2:]
    # Without a gradient of lse its dQ is zero, and what rounding leaves of that, luck.
    by_name["one key"] = attention_cases.exact(3 * m, 1, d, dtype, heads=2, name="one key")
    return [made(by_name[name], with_dlse=i % 3 == 0 or name == "one key") for i, name in enumerate(FINITE)]


def laid_out(case: Case) -> Iterator[Case]:
    """The case with q, k, v, o and do each in a layout of its own, then lse and dlse in every second element."""
    ways = list(attention_cases.LAYOUTS.items())
    for at in range(len(ways)):
        changed = case
        for which, step in (("q", 0), ("k", 2), ("v", 5), ("do", 1), ("o", 3)):
            name, change = ways[(at + step) % len(ways)]
            title = f"{name} in {which}" if which == "q" else f"{changed.name}, {name} in {which}"
            changed = changed.with_arrays(title, change, (which,))
        yield changed

    def every_second(x):
        wide = np.full((*x.shape[:-1], 2 * x.shape[-1]), NAN, x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]

    yield case.with_arrays("rows apart in lse and dlse", every_second, ("lse", "dlse"))
    yield case.with_arrays("all columns one in do", lambda x: np.broadcast_to(x[..., :1], x.shape), ("do",))


def run(
    plan: heads.Planner, case: Case, machine: str = "emulator", *, seed: int = 0, arch: str = "90a", checks: bool = True
) -> reference.Gradients:  # fmt: skip
    """(dq, dk, dv) of a plan's launches, with outputs and scratch full of NaN, the outputs between guard bands.

    Raises:
        Fault: of the emulator.
        AssertionError: something was written outside the outputs.
    """
    shape = replace(case.shape, arch=gpu.device_arch() if machine == "cuda" else arch)
    planned = plan(shape)
    inputs = case.inputs
    out = {f"d{x}": Guarded(getattr(inputs, x).shape, inputs.q.dtype) for x in "qkv"}
    known = {**case.arrays, **{name: guarded.array for name, guarded in out.items()}}
    known |= {name: np.full(size, NAN, np.float32) for name, size in planned.scratch.items()}
    scale = heads.check_scale(inputs.scale, shape.d)
    scalars = {"scale": np.float32(scale), "causal": np.int32(inputs.causal)}
    scalars |= {"has_dlse": np.int32(case.dlse is not None)}
    for launch in planned.launches:
        args = tuple(host_view(known[a]) if a in known else scalars[a] for a in launch.args)
        if machine == "cuda":
            problem.prepared(launch, shape.element, machine, None)(launch.grid, launch.threads, args)
        else:
            options = {"seed": seed, "arch": arch, "checks": checks}
            launcher.launch(
                launch.kernel, launch.grid, launch.threads, args, shared=launch.shared, machine=machine,
                emulate=options,
            )  # fmt: skip
    for name, guarded in out.items():
        guarded.check(name)
    return tuple(guarded.array for guarded in out.values())


def assert_gradients(results: reference.Gradients, case: Case) -> None:
    """Each gradient within its budget."""
    for name, got, expected, low in zip(GRADIENTS, results, case.expected, case.lowprec, strict=True):
        assert_close(got, expected, low, what=f"{name} of {case.name}")


def caught(
    launch: Callable[[int], reference.Gradients], case: Case, seeds=(0, 1), which: tuple[str, ...] = GRADIENTS
) -> list[str]:  # fmt: skip
    """What catches a planted fault, seed by seed: a fault's name, or those of the gradients ``which`` that are wrong;
    the test fails if nothing does."""
    found = []
    for seed in seeds:
        try:
            results = zip(GRADIENTS, launch(seed), case.expected, case.lowprec, strict=True)
            found.append(" ".join(name for name, *each in results if name in which and not compare(*each).ok))
        except Fault as fault:
            found.append(fault.name)
        except AssertionError:
            found.append("written outside")
    if not all(found):
        missed = [seed for seed, what in zip(seeds, found, strict=True) if not what]
        pytest.fail(f"the planted fault was not caught for seeds {missed}")
    return found
