"""What the benches of attention share: torch's own attention as a peer, a plan's launches, and who judges them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from flashnumba.bench.runner import Candidate, rounded, willing
from flashnumba.compare import Comparison, compare
from flashnumba.machine import launcher
from flashnumba.machine.arrays import empty_like_kind
from flashnumba.stages.flash_forward.reference import attend
from flashnumba.stages.heads import Plan, Shape, prepare_heads, signature

__all__ = ["CUDNN", "FA2", "PEERS", "Judge", "launches", "peer", "settings", "shape_of"]

FA2, CUDNN = "torch, FlashAttention-2", "torch, cuDNN"
PEERS = {
    FA2: "FLASH_ATTENTION", CUDNN: "CUDNN_ATTENTION", "torch, efficient": "EFFICIENT_ATTENTION", "torch, math": "MATH",
}  # fmt: skip
"""Backends of ``torch.nn.functional.scaled_dot_product_attention``, by the names they have in tables."""

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
    return [_launches(made, *inputs, causal, machine) for inputs in sets]


def _launches(plan: Plan, q: Any, k: Any, v: Any, causal: bool, machine: str) -> Callable[[], Any]:
    heads = prepare_heads(q, k, v, causal=causal, scale=None, machine=machine, stream=None)
    for result in heads.results:
        result.fill_(float("nan"))
    known = {**heads.arrays, "scale": np.float32(heads.scale), "causal": np.int32(causal)}
    for name, shape in plan.scratch.items():
        known[name] = empty_like_kind(heads.results[0], shape, "float32")
    steps = []
    for launch in plan.launches:
        types = signature(heads.shape.element, launch.args)
        ready = launcher.prepare(launch.kernel, types, shared=launch.shared, machine=machine, device=heads.device)
        steps.append((ready, launch.grid, launch.threads, tuple(known[name] for name in launch.args)))

    def call() -> Any:
        for ready, grid, threads, args in steps:
            ready(grid, threads, args)
        return heads.results

    return call


class Judge:
    """Compares attention with float64 on some rows of some heads, and asks whether all of it was written.

    Args:
        places: (batch, head of k and v, heads of q that read it, rows of q).
    """

    def __init__(
        self, torch: Any, q: Any, k: Any, v: Any, element: str,
        places: Sequence[tuple[int, int, Sequence[int], Sequence[int]]], *, causal: bool = False,
    ) -> None:  # fmt: skip
        self.torch, self.element, self.places = torch, element, places
        dtype = rounded(np.zeros(1), element).dtype
        found: list[list[np.ndarray]] = [[], [], [], []]
        m, n = q.shape[2], k.shape[2]
        for batch, kv_head, heads, rows in places:
            # The heads that read one head of K are as more rows of it: nothing of K is repeated.
            some = self._picked(q, batch, heads, rows)
            keys, values = (x[batch, kv_head].float().cpu().numpy() for x in (k, v))
            visible = np.arange(n) <= np.array(rows)[:, None] + n - m if causal else np.ones((len(rows), n), bool)
            mask = np.tile(visible, (len(heads), 1))
            o, lse = attend(some, keys, values, None, mask)
            o_low, lse_low = attend(some, keys, values, None, mask, np.float32, dtype)
            for into, what in zip(found, (o, lse, o_low, lse_low), strict=True):
                into.append(what)
        self.o, self.lse, self.o_low, self.lse_low = map(np.concatenate, found)

    def _picked(self, x: Any, batch: int, heads: Sequence[int], rows: Sequence[int]) -> np.ndarray:
        """``[heads * rows, ...]`` as float32, which holds the 16-bit types' values."""
        picked = x[batch][list(heads)][:, list(rows)]
        return picked.reshape(len(heads) * len(rows), *picked.shape[2:]).float().cpu().numpy()

    def __call__(self, result: Any) -> Comparison:
        """The comparison of o; that of lse where o is right and lse is not. ``result`` is o, or (o, lse)."""
        o, lse = result if isinstance(result, tuple) else (result, None)
        got = np.concatenate([self._picked(o, b, heads, rows) for b, _, heads, rows in self.places])
        verdict = compare(rounded(got, self.element), self.o, rounded(self.o_low, self.element))
        if verdict.ok and lse is not None:
            got = np.concatenate([self._picked(lse, b, heads, rows) for b, _, heads, rows in self.places])
            of_lse = compare(got, self.lse, self.lse_low)
            verdict = verdict if of_lse.ok else of_lse
        if verdict.ok:
            for x in (o, *(() if lse is None else (lse,))):
                unwritten = (~self.torch.isfinite(x)).nonzero()
                if len(unwritten):
                    at = tuple(int(i) for i in unwritten[0])
                    return Comparison(False, np.inf, verdict.budget, at, float(x[at]), np.nan)
        return verdict
