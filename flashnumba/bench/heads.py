"""What the benches of attention share: torch's own attention as a peer, a plan's launches, and who judges them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from flashnumba.bench.runner import Candidate, check_written, rounded, spread, willing
from flashnumba.compare import Comparison, compare
from flashnumba.machine import launcher
from flashnumba.machine.arrays import empty_like_kind
from flashnumba.stages.flash_forward.reference import dense, low_precision
from flashnumba.stages.heads import SCRATCH, Heads, Plan, Shape, maps_for, prepare_heads, signature

__all__ = [
    "CUDNN", "EFFICIENT", "FA2", "MATH", "PEERS", "Judge", "Place", "calls_of", "launches", "peer", "places",
    "settings", "shape_of",
]  # fmt: skip

FA2, CUDNN, EFFICIENT, MATH = "torch, FlashAttention-2", "torch, cuDNN", "torch, memory-efficient", "torch, plain"
PEERS = {FA2: "FLASH_ATTENTION", CUDNN: "CUDNN_ATTENTION", EFFICIENT: "EFFICIENT_ATTENTION", MATH: "MATH"}
"""Backends of ``torch.nn.functional.scaled_dot_product_attention``, by the names they have in tables."""

RUNS, ROWS = 4, 16
"""Runs of rows of each head looked at, and rows of a run, that are compared with float64."""
Inputs = tuple[Any, Any, Any]
"""q ``[B, H, M, D]``, k and v ``[B, Hkv, N, D]``, torch tensors."""


def settings(torch: Any) -> dict[str, Any]:
    """What the peers' figures depend on besides torch's version."""
    return {"cuDNN": torch.backends.cudnn.version(), "peers": "torch's scaled_dot_product_attention, by backend"}


def peer(torch: Any, name: str, sets: Sequence[Inputs], *, causal: bool = False) -> Candidate:
    """torch's attention by one backend, on several inputs in turn. A backend that refuses says why."""

    def attention(q: Any, k: Any, v: Any) -> Any:
        with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, PEERS[name])):
            more = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, **more)

    def prepare() -> Sequence[Callable[[], Any]]:
        import_module("torch.nn.attention")
        calls = [partial(attention, *inputs) for inputs in sets]
        willing(calls[0])
        return calls

    return Candidate(name, prepare, ours=False)


def shape_of(q: Any, k: Any, v: Any, *, causal: bool = False, machine: str = "cuda") -> Shape:
    """What plans are made for, as a call of the host function would find it."""
    return prepare_heads(q, k, v, causal=causal, scale=None, machine=machine, stream=None).shape


def launches(
    plan: Callable[[], Plan], sets: Sequence[Inputs], *, causal: bool = False, machine: str = "cuda"
) -> Sequence[Callable[[], Any]]:
    """Calls of a plan's prepared launches, each on one of several inputs of one shape, that return its (o, lse).

    Nothing is checked, planned or allocated any more; the results are NaN before the first call.

    Raises:
        ValueError: the plan, or the GPU, does not take the shape.
    """
    made = plan()
    prepare = partial(prepare_heads, causal=causal, scale=None, machine=machine, stream=None)
    return [calls_of(made, prepare(*inputs), machine) for inputs in sets]


def calls_of(plan: Plan, heads: Heads, machine: str) -> Callable[[], Any]:
    """A call of a plan's prepared launches on one problem, as of :func:`launches`."""
    for result in heads.results:
        result.fill_(float("nan"))
    known = {**heads.arrays, "scale": np.float32(heads.scale), "causal": np.int32(heads.shape.causal)}
    for name, shape in plan.scratch.items():
        known[name] = empty_like_kind(heads.results[0], shape, SCRATCH[name][0])
    steps = []
    for launch in plan.launches:
        types = signature(heads.shape.element, launch.args)
        ready = launcher.prepare(launch.kernel, types, shared=launch.shared, machine=machine, device=heads.device)
        given = known | maps_for(launch, known, heads.shape.element)
        steps.append((ready, launch.grid, launch.threads, tuple(given[name] for name in launch.args)))

    def call() -> Any:
        for ready, grid, threads, args in steps:
            ready(grid, threads, args)
        return heads.results

    return call


@dataclass(frozen=True)
class Place:
    """Rows of q that are looked at: of ``heads``, which all read head ``kv_head`` of one sequence of K."""

    batch: int
    kv_head: int
    heads: slice
    rows: slice

    def of(self, x: Any) -> np.ndarray:
        """The rows of ``[B, H, M, ...]``, one head's after the other's, as float32, which holds 16-bit values."""
        picked = x[self.batch, self.heads, self.rows]
        return picked.reshape(-1, *picked.shape[2:]).float().cpu().numpy()


def places(batch: int, heads: int, n: int) -> list[Place]:
    """Runs of rows of three heads, from the first row to the last, where each head has keys of its own."""
    picked = {(i * (batch - 1) // 2, i * (heads - 1) // 2) for i in range(3)}
    return [
        Place(b, h, slice(h, h + 1), slice(row, min(row + ROWS, n)))
        for b, h in sorted(picked)
        for row in spread(max(1, n - ROWS + 1), RUNS)
    ]


class Judge:
    """Compares attention with float64 at some places, and asks whether all of it was written."""

    def __init__(
        self, torch: Any, q: Any, k: Any, v: Any, element: str, places: Sequence[Place], *, causal: bool = False
    ) -> None:  # fmt: skip
        self.torch, self.element = torch, element
        self.known: list[tuple[Place, tuple[np.ndarray, ...]]] = []
        for place in places:
            # Heads that read the same K are as more rows: nothing of K is repeated. Where causal, keys end with those
            # that the last of the rows sees, so the reference aligns the rows with them.
            end = place.rows.stop + k.shape[2] - q.shape[2] if causal else k.shape[2]
            keys, values = (x[place.batch, place.kv_head, :end].float().cpu().numpy() for x in (k, v))
            some = rounded(place.of(q), element)
            exact, low = (attend(some, keys, values, causal=causal) for attend in (dense, low_precision))
            self.known.append((place, (*exact, *low)))

    def __call__(self, result: Any) -> Comparison:
        """The comparison of o at the place where its error is largest; of o, or then of lse, where one is not right.

        Each place has a budget of its own: rows that see few keys have larger values, and larger errors.

        Args:
            result: o, or (o, lse).

        Raises:
            Wrong: an element is not finite.
        """
        o, lse = result if isinstance(result, tuple) else (result, None)
        of_o, of_lse = [], []
        for place, (o_exact, lse_exact, o_low, lse_low) in self.known:
            of_o.append(compare(rounded(place.of(o), self.element), o_exact, o_low))
            if lse is not None:
                of_lse.append(compare(place.of(lse), lse_exact, lse_low))
        bad = next((verdict for verdict in (*of_o, *of_lse) if not verdict.ok), None)
        if bad is None:
            check_written(self.torch, *((o,) if lse is None else (o, lse)))
        return bad or max(of_o, key=lambda verdict: verdict.error)
