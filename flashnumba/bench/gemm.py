"""Every kernel of the stage gemm on a GPU beside ``torch.matmul``, which is cuBLAS, in one run.

A product of M x K and K x N counts as 2 M N K operations. Each kernel is first compared with float64 on some rows of C,
whole rows, and all of C must have been written; one that is wrong has no time. cuBLAS multiplies float32 without TF32;
of float16 and bfloat16 it may add partial sums in that type, which is torch's default.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from flashnumba.bench.environment import environment as base_environment
from flashnumba.bench.environment import place, torch_on_gpu
from flashnumba.bench.planned import kernels_of, planned
from flashnumba.bench.runner import Candidate, Clock, Measured, Runner, Size, check_written, rounded, spread
from flashnumba.compare import Comparison, compare
from flashnumba.machine import launcher
from flashnumba.stages.gemm.problem import A_MAJORS, B_MAJORS, Plan, Shape
from flashnumba.stages.gemm.reference import low_precision, naive

__all__ = ["MAJORS", "PEER", "Judge", "environment", "kernels", "launchable", "measure"]

PEER = "torch.matmul"
MAJORS = tuple(a + b for a in A_MAJORS for b in B_MAJORS)
"""A's major and B's; ``kn`` is both row-major."""
ROWS = 16
"""Rows of C that are compared with float64."""


def kernels() -> tuple[str, ...]:
    """Names of the kernels, from the first rung to the last."""
    return kernels_of("gemm")


def environment() -> dict[str, Any]:
    """What the figures depend on."""
    found, torch = base_environment("gemm"), torch_on_gpu("gemm")
    with full_float32(torch):
        settings = torch.backends.cuda.matmul
        return found | {
            "cuBLAS with TF32": bool(settings.allow_tf32),
            "cuBLAS adds float16 in float16": _yes(settings.allow_fp16_reduced_precision_reduction),
            "cuBLAS adds bfloat16 in bfloat16": _yes(settings.allow_bf16_reduced_precision_reduction),
        }


def _yes(setting: Any) -> bool:
    """Of a setting that newer versions of torch state in two parts."""
    return bool(setting[0]) if isinstance(setting, tuple) else bool(setting)


@contextmanager
def full_float32(torch: Any) -> Any:
    """torch multiplies float32 as float32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


class Judge:
    """Compares a product with float64 on some rows, and asks whether all of it was written."""

    def __init__(self, torch: Any, a: Any, b: Any, element: str) -> None:
        self.torch, self.element = torch, element
        self.rows = torch.tensor(spread(a.shape[0], ROWS), device=a.device)
        # float32 holds the values of the 16-bit types, and NumPy is slow with those.
        left, right = a[self.rows].float().cpu().numpy(), b.float().cpu().numpy()
        self.expected, self.low = naive(left, right), rounded(low_precision(left, right), element)

    def __call__(self, c: Any) -> Comparison:
        got = rounded(c[self.rows].float().cpu().numpy(), self.element)
        verdict = compare(got, self.expected, self.low)
        if verdict.ok:
            check_written(self.torch, c)
        return verdict


def measure(
    element: str, m: int, n: int, k: int, majors: str = "kn", *, names: Collection[str] = (), wide: bool = False,
    clock: Clock | None = None, until: float = float("inf"), machine: str = "cuda",
    report: Callable[[Size, Measured], None] = lambda size, measured: None,
) -> Size:  # fmt: skip
    """Measure all kernels on one size.

    Args:
        element: float16, bfloat16 or float32.
        m, n, k: sizes.
        majors: one of :data:`MAJORS`.
        names: these kernels alone; all that take the shape if empty.
        wide: also the kernels in other sizes.
        clock: a :class:`~flashnumba.bench.runner.Clock` if None.
        until: ``time.monotonic()`` after which no further kernel is begun.
        machine: ``"emulator"`` runs the kernels there, on tensors in host memory: for tests, with a clock of their own.
        report: called with each result as it is there.

    Raises:
        RuntimeError: no GPU, or no torch that uses it.
    """
    torch, device, arch = place("gemm", machine)
    shape = Shape.packed(element, m, n, k, *majors, arch)
    random = torch.Generator(device=device).manual_seed(0)

    def operand(rows: int, cols: int, major: bool) -> Any:
        sizes = (rows, cols) if major else (cols, rows)
        made = torch.randn(sizes, generator=random, device=device, dtype=getattr(torch, element))
        return made if major else made.t()

    a, b = operand(m, k, majors[0] == "k"), operand(k, n, majors[1] == "n")
    c = torch.empty((m, n), device=device, dtype=a.dtype)
    size = Size({"element": element, "m": m, "n": n, "k": k, "majors": majors})
    runner = Runner(
        size, lambda seconds: {"flops_per_second": shape.flops / seconds}, {"of_cublas": PEER},
        clock=clock or Clock(), until=until, report=report,
    )  # fmt: skip
    judge = Judge(torch, a, b, element)
    with full_float32(torch):
        runner.run(Candidate(PEER, lambda: [lambda: torch.matmul(a, b, out=c)], ours=False), judge)
        for name, plan in planned("gemm", shape, names or kernels(), asked=bool(names), wide=wide):
            runner.run(Candidate(name, partial(launchable, plan, a, b, c, machine)), judge)
    return size


def launchable(plan: Callable[[], Plan], a: Any, b: Any, c: Any, machine: str = "cuda") -> Sequence[Callable[[], Any]]:
    """A call that launches a plan on the current stream and returns C, which is NaN until then.

    Raises:
        ValueError: the plan, or the GPU, does not take the shape.
    """
    made = plan()
    c.fill_(float("nan"))
    args = made.arguments(a, b, c)
    ready = launcher.prepare(made.kernel, args, shared=made.shared, machine=machine)

    def call() -> Any:
        ready(made.grid, made.threads, args)
        return c

    return [call]
