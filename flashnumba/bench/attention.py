"""Kernels of the stage flash_forward on a GPU beside torch's attention, in one run.

Forward, q, k and v alike in shape. An attention counts as 4 B H M N D operations, a causal one as half of that, as
FlashAttention's papers count; exponentials count nothing. ``mma`` and what comes after it run on float16 and bfloat16
beside FlashAttention-2 and cuDNN, as torch has them. ``simt`` runs on float32 beside torch's memory-efficient and plain
backends, at one small size: it is there to be read, and not tuned.

Each kernel is first compared with float64 on some rows of some heads, and all of it must have been written; one that is
wrong has no time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from flashnumba.bench.environment import environment as base_environment
from flashnumba.bench.environment import place, torch_on_gpu
from flashnumba.bench.heads import CUDNN, EFFICIENT, FA2, MATH, Judge, launches, peer, places, settings, shape_of
from flashnumba.bench.planned import kernels_of, planned
from flashnumba.bench.runner import Candidate, Clock, Measured, Runner, Size

__all__ = ["READABLE", "SMALL", "Problem", "environment", "kernels", "measure", "problems"]

READABLE = "simt"
"""The kernel that is measured on float32 only, and the others not at all."""


@dataclass(frozen=True)
class Problem:
    """Sizes of one attention."""

    element: str
    batch: int
    heads: int
    n: int
    d: int
    causal: bool = False

    @property
    def flops(self) -> float:
        """Multiplications and additions of the two products; half of them if causal."""
        return 4 * self.batch * self.heads * self.n**2 * self.d / (2 if self.causal else 1)


SMALL = Problem("float32", 4, 16, 1024, 64)
"""What :data:`READABLE` is measured on."""


def kernels() -> tuple[str, ...]:
    """Names of the kernels: all but ``split``, which is for few queries and has a bench of its own."""
    return tuple(name for name in kernels_of("flash_forward") if name != "split")


def problems(
    elements: Sequence[str], dims: Sequence[int], lengths: Sequence[int], masks: Sequence[bool], *, tokens: int = 16384,
    width: int = 2048,
) -> Iterator[Problem]:  # fmt: skip
    """Problems of ``tokens`` tokens in all and ``width`` columns in all heads, so that each has as much to read."""
    for element in elements:
        for d in dims:
            for causal in masks:
                for n in lengths:
                    yield Problem(element, max(1, tokens // n), max(1, width // d), n, d, causal)


def environment() -> dict[str, Any]:
    """What the figures depend on."""
    return base_environment("attention") | settings(torch_on_gpu("attention"))


def measure(
    problem: Problem, *, names: Collection[str] = (), wide: bool = False, clock: Clock | None = None,
    until: float = float("inf"), machine: str = "cuda",
    report: Callable[[Size, Measured], None] = lambda size, measured: None,
) -> Size:  # fmt: skip
    """Measure the peers and the kernels on one problem.

    Args:
        names: these kernels alone; those for the element if empty.
        wide: also the kernels in other sizes, as far as a file of the stage has them.
        clock: a :class:`~flashnumba.bench.runner.Clock` if None.
        until: ``time.monotonic()`` after which no further kernel is begun.
        machine: ``"emulator"`` runs the kernels there, on tensors in host memory: for tests, with a clock of their own.
        report: called with each result as it is there.

    Raises:
        RuntimeError: no GPU, or no torch that uses it.
    """
    torch, device, _ = place("attention", machine)
    random = torch.Generator(device=device).manual_seed(0)
    sizes = (problem.batch, problem.heads, problem.n, problem.d)
    dtype = getattr(torch, problem.element)
    q, k, v = (torch.randn(sizes, generator=random, device=device, dtype=dtype) for _ in range(3))
    size, full = Size(asdict(problem)), problem.element == "float32"
    peers = {"of_efficient": EFFICIENT, "of_math": MATH} if full else {"of_fa2": FA2, "of_cudnn": CUDNN}
    runner = Runner(
        size, lambda seconds: {"flops_per_second": problem.flops / seconds}, peers, clock=clock or Clock(), until=until,
        report=report,
    )  # fmt: skip
    judge = Judge(
        torch, q, k, v, problem.element, places(problem.batch, problem.heads, problem.n), causal=problem.causal
    )
    for name in peers.values():
        runner.run(peer(torch, name, [(q, k, v)], causal=problem.causal), judge)
    usual = [name for name in kernels() if (name == READABLE) == full]
    shape = shape_of(q, k, v, causal=problem.causal, machine=machine)
    for name, plan in planned("flash_forward", shape, names or usual, asked=bool(names), wide=wide):
        prepare = partial(launches, plan, [(q, k, v)], causal=problem.causal, machine=machine)
        runner.run(Candidate(name, prepare), judge)
    return size
