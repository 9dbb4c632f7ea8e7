"""Kernels of the stage backward on a GPU beside torch's attention backward, in one run.

Time is that of the backward alone: from dO, q, k, v, o and lse to dq, dk and dv. Of torch that is
``torch.autograd.grad`` of a forward that ran before, with its graph kept; of a kernel its prepared launches, the
preparation of rows, zeros and roundings among them. The gradients count as 10 B H M N D operations, two and a half
times the forward, as FlashAttention's papers count, and half of that where causal: products that a kernel makes again
count nothing.

``extra_bytes`` is what a call allocates at most beyond its three results, as torch's allocator counts.

Each result is first compared with float64 in whole heads; one that is wrong has no time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from math import sqrt
from typing import Any

import numpy as np

from flashnumba.bench.attention import Problem as Forward
from flashnumba.bench.environment import environment as base_environment
from flashnumba.bench.environment import place, torch_on_gpu
from flashnumba.bench.heads import CUDNN, FA2, PEERS, settings
from flashnumba.bench.planned import kernels_of, planned
from flashnumba.bench.runner import Candidate, Clock, Measured, Runner, Size, check_written, rounded, willing
from flashnumba.compare import Comparison, compare
from flashnumba.machine.arrays import empty_like_kind
from flashnumba.stages.heads import Plan, forward

__all__ = ["Judge", "Problem", "environment", "inputs_of", "kernels", "launches", "measure", "peer"]

READABLE = "simt"
"""The kernel that is there to be read, and not measured unless it is asked for."""
ROWS = 1024
"""Rows of scores that the judge has at a time."""


@dataclass(frozen=True)
class Problem(Forward):
    """Sizes of one attention whose gradients are asked for."""

    @property
    def flops(self) -> float:
        """Multiplications and additions of the five products; half of them if causal."""
        return 2.5 * super().flops


def kernels() -> tuple[str, ...]:
    """Names of the kernels."""
    return kernels_of("backward")


def environment() -> dict[str, Any]:
    """What the figures depend on."""
    peers = {"peers": "torch.autograd.grad of scaled_dot_product_attention, by backend, the graph kept"}
    return base_environment("backward") | settings(torch_on_gpu("backward")) | peers


def inputs_of(torch: Any, device: str, problem: Forward, machine: str) -> dict[str, Any]:
    """q, k, v and do, normal numbers; o and lse as the forward leaves them."""
    from flashnumba.stages.flash_forward.mma import PLANS

    random = torch.Generator(device=device).manual_seed(0)
    sizes, dtype = (problem.batch, problem.heads, problem.n, problem.d), getattr(torch, problem.element)
    q, k, v, do = (torch.randn(sizes, generator=random, device=device, dtype=dtype) for _ in range(4))
    o, lse = forward(q, k, v, PLANS["mma"], causal=problem.causal, machine=machine)
    return {"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse}


def peer(torch: Any, name: str, inputs: dict[str, Any], *, causal: bool = False) -> Candidate:
    """torch's gradients by one backend. A backend that refuses says why."""

    def prepare() -> Sequence[Callable[[], Any]]:
        import_module("torch.nn.attention")
        leaves = tuple(inputs[x].detach().requires_grad_() for x in "qkv")

        def run() -> Any:
            with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, PEERS[name])):
                return torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal)

        willing(run)
        return [partial(torch.autograd.grad, run(), leaves, inputs["do"], retain_graph=True)]

    return Candidate(name, prepare, ours=False)


def launches(
    plan: Callable[[], Plan], inputs: dict[str, Any], *, causal: bool = False, machine: str = "cuda"
) -> Sequence[Callable[[], Any]]:
    """A call of a plan's prepared launches that returns (dq, dk, dv).

    Nothing is checked, planned or allocated any more; results are NaN before the first call.

    Raises:
        ValueError: the plan, or the GPU, does not take the shape.
    """
    from flashnumba.stages.backward.problem import prepare_backward, prepared

    made = prepare_backward(**inputs, causal=causal, scale=None, dlse=None, machine=machine, stream=None)
    launched = plan()
    for result in made.results:
        result.fill_(float("nan"))
    known = {
        **made.arrays, "scale": np.float32(made.scale), "causal": np.int32(causal), "has_dlse": np.int32(False),
        **{name: empty_like_kind(made.results[0], size, "float32") for name, size in launched.scratch.items()},
    }  # fmt: skip
    steps = [
        (
            prepared(launch, made.shape.element, made.machine, made.device), launch.grid, launch.threads,
            tuple(known[name] for name in launch.args),
        )
        for launch in launched.launches
    ]  # fmt: skip

    def call() -> Any:
        for ready, grid, threads, args in steps:
            ready(grid, threads, args)
        return made.results

    return [call]


def extra_bytes(torch: Any, call: Callable[[], Any]) -> int:
    """Bytes that a call allocates on the GPU at most, beyond what it returns."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    kept = sum(-(-x.nbytes // 512) * 512 for x in result)  # as the allocator rounds
    return max(0, torch.cuda.max_memory_allocated() - before - kept)


class Judge:
    """Compares gradients with float64 in the first head of all and the last, and asks whether all was written."""

    def __init__(self, torch: Any, inputs: dict[str, Any], element: str, *, causal: bool = False) -> None:
        self.torch, self.element = torch, element
        batch, heads = inputs["q"].shape[:2]
        self.known = []
        for at in sorted({(0, 0), (batch - 1, heads - 1)}):
            head = {name: x[at] for name, x in inputs.items()}
            exact, low = (self._gradients(**head, causal=causal, low=low) for low in (False, True))
            self.known.append((at, exact, low))

    def _gradients(
        self, do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, *, causal: bool, low: bool
    ) -> list[np.ndarray]:  # fmt: skip
        """(dq, dk, dv) of one head in float64, by rows of scores. ``low``: P and dS rounded before their products, with
        delta from o and the results rounded too."""
        torch, element = self.torch, q.dtype
        scale = 1 / sqrt(q.shape[-1])
        k64, v64 = k.double(), v.double()
        dq, dk, dv = torch.zeros_like(q, dtype=torch.float64), torch.zeros_like(k64), torch.zeros_like(v64)

        def as_stored(x: Any) -> Any:
            return x.to(element).double() if low else x

        for start in range(0, q.shape[0], ROWS):
            rows = slice(start, min(start + ROWS, q.shape[0]))
            q64, do64 = q[rows].double(), do[rows].double()
            s = scale * (q64 @ k64.T)
            if causal:
                ahead = torch.arange(k.shape[0], device=q.device)[None] > torch.arange(
                    rows.start, rows.stop, device=q.device
                )[:, None] + (k.shape[0] - q.shape[0])  # fmt: skip
                s.masked_fill_(ahead, float("-inf"))
            p = torch.exp(s - lse[rows].double()[:, None]) if low else torch.softmax(s, -1)
            dp = do64 @ v64.T
            delta = (o[rows].double() * do64).sum(-1) if low else (p * dp).sum(-1)
            ds = as_stored(p * (dp - delta[:, None]))
            dv += as_stored(p).T @ do64
            dk += scale * (ds.T @ q64)
            dq[rows] = scale * (ds @ k64)
        return [as_stored(x).cpu().numpy() for x in (dq, dk, dv)]

    def __call__(self, result: Any) -> Comparison:
        """The comparison that is nearest to its budget, or the first that is beyond it.

        Raises:
            Wrong: an element is not finite.
        """
        found = [
            compare(rounded(got[at].detach().float().cpu().numpy(), self.element), exact, low)
            for at, *known in self.known
            for got, exact, low in zip(result, *known, strict=True)
        ]
        bad = next((verdict for verdict in found if not verdict.ok), None)
        if bad is None:
            check_written(self.torch, *result)
        return bad or max(found, key=lambda verdict: verdict.error / verdict.budget)


def measure(
    problem: Forward, *, names: Collection[str] = (), clock: Clock | None = None, until: float = float("inf"),
    machine: str = "cuda", report: Callable[[Size, Measured], None] = lambda size, measured: None,
) -> Size:  # fmt: skip
    """Measure the peers and the kernels on one problem; arguments as of :func:`flashnumba.bench.attention.measure`.

    Raises:
        RuntimeError: no GPU, or no torch that uses it.
    """
    from flashnumba.stages.backward.problem import backward, prepare_backward

    torch, device, _ = place("backward", machine)
    problem = Problem(**asdict(problem))
    inputs = inputs_of(torch, device, problem, machine)
    size = Size(asdict(problem))
    runner = Runner(
        size, lambda seconds: {"flops_per_second": problem.flops / seconds}, {"of_fa2": FA2, "of_cudnn": CUDNN},
        clock=clock or Clock(), until=until,
    )  # fmt: skip
    judge = Judge(torch, inputs, problem.element, causal=problem.causal)

    def told(measured: Measured, call: Callable[[], Callable[[], Any]]) -> None:
        """Add what does not depend on time, and report."""
        known = machine == "cuda" and measured.seconds is not None
        measured.figures["extra_bytes"] = extra_bytes(torch, call()) if known else None
        report(size, measured)

    for name in (FA2, CUDNN):
        candidate = peer(torch, name, inputs, causal=problem.causal)
        told(runner.run(candidate, judge), lambda candidate=candidate: candidate.prepare()[0])
    options = {"causal": problem.causal, "machine": machine}
    shape = prepare_backward(**inputs, **options, scale=None, dlse=None, stream=None).shape
    usual = [name for name in kernels() if name != READABLE]
    for name, plan in planned("backward", shape, names or usual, asked=bool(names)):
        ran = runner.run(Candidate(name, partial(launches, plan, inputs, **options)), judge)
        whole = partial(backward, **inputs, plan=lambda shape, plan=plan: plan(), **options)
        told(ran, lambda whole=whole: whole)
    return size
