"""Latent attention: decoding beside a copy on the device, a cache in 8 bits beside one in 16, and prefill.

With 16 heads a latent row is multiplied so little that reading it decides: the figure is bytes of the cache a second,
beside a copy of 1 GiB (reads and writes counted). With 128 heads products decide, and the figure is operations a
second: ``2 H S N (576 + 512)`` a request. The pages lie in random order. The parts are planned once for all layers of
a model, so here before the clock starts. torch's kernels take no head of 576 columns; they are asked, and what they
answer is noted.

Each kernel's result is first compared with float64 for some rows of the first and the last request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from flashnumba.bench import timing
from flashnumba.bench.decode import BANDWIDTH, GraphClock
from flashnumba.bench.environment import environment as base_environment
from flashnumba.bench.environment import place, torch_on_gpu
from flashnumba.bench.heads import CUDNN, FA2, peer, settings
from flashnumba.bench.runner import Candidate, Clock, Measured, Runner, Size, check_written, rounded
from flashnumba.compare import Comparison, compare
from flashnumba.machine import gpu, launcher
from flashnumba.stages.flash_mla import cache as caching
from flashnumba.stages.flash_mla import codec, combine, mma
from flashnumba.stages.flash_mla.schedule import schedule
from flashnumba.stages.flash_mla.sizes import DV, PAGE, D, token_bytes
from flashnumba.stages.heads import EMULATED_MULTIPROCESSORS

__all__ = ["BASE", "Problem", "environment", "measure"]

BASE = "flash_mla.decode"
PREFILL = "flash_mla.prefill"
SCALE = (128 + 64) ** -0.5
"""Of the heads before the projections are absorbed: 128 columns and 64 rotated ones."""
ROWS = 12
"""Of a request that are compared."""
IN_TURN = 1 << 29
"""Bytes of all inputs and results that are used in turn, at least: ten times the L2 cache of an H200."""


@dataclass(frozen=True)
class Problem:
    """Sizes: ``tokens`` queries of each of ``heads`` heads of ``batch`` requests with ``n`` tokens in the cache.

    ``prefill`` counts the queries among the n, each of which sees those before it.
    """

    batch: int
    n: int
    heads: int = 128
    tokens: int = 1
    prefill: bool = False
    element: str = "bfloat16"

    @property
    def nbytes(self) -> int:
        """Of the cache in 16 bits."""
        return self.batch * self.n * 2 * D

    @property
    def footprint(self) -> int:
        """Bytes of the cache, of the queries and of what comes of them."""
        return self.nbytes + 2 * self.batch * self.tokens * self.heads * (D + DV)

    @property
    def flops(self) -> int:
        seen = self.tokens * self.n - (self.tokens * (self.tokens - 1) // 2 if self.tokens > 1 else 0)
        return 2 * self.batch * self.heads * seen * (D + DV)


def environment() -> dict[str, Any]:
    """What the figures depend on, the speed of a copy of 1 GiB among it."""
    found = base_environment("mla") | settings(torch_on_gpu("mla"))
    return found | {BANDWIDTH: timing.copy_bandwidth(1 << 30)}


def measure(
    problem: Problem, bandwidth: float, *, clock: Clock | None = None, until: float = float("inf"),
    in_turn: int = IN_TURN, machine: str = "cuda",
    report: Callable[[Size, Measured], None] = lambda size, measured: None,
) -> Size:  # fmt: skip
    """Measure one problem.

    Args:
        bandwidth: bytes a second that the copy of 1 GiB reads and writes.
        clock: a :class:`flashnumba.bench.decode.GraphClock` if None.
        until: ``time.monotonic()`` after which no further kernel is begun.
        in_turn: bytes of all inputs and results, at least.
        machine: ``"emulator"`` runs the kernels there, on tensors in host memory: for tests, with a clock of their own.
        report: called with each result as it is there.

    Raises:
        RuntimeError: no GPU, or no torch that uses it.
    """
    torch, device, _ = place("mla", machine)
    random = torch.Generator(device=device).manual_seed(0)
    sets = [Inputs(torch, problem, device, random, machine) for _ in range(max(1, -(-in_turn // problem.footprint)))]
    size = Size({**asdict(problem), "nbytes": problem.nbytes})

    def rates(seconds: float, nbytes: int = problem.nbytes) -> dict[str, float | None]:
        moved = {} if problem.prefill else {
            "bytes_per_second": nbytes / seconds, "of_copy": nbytes / seconds / bandwidth
        }  # fmt: skip
        return {**moved, "flops_per_second": problem.flops / seconds}

    base = PREFILL if problem.prefill else BASE
    clock = clock or GraphClock()

    def run(candidate: Candidate, judge: Callable[[Any], Comparison] | None = None, nbytes: int = 0) -> None:
        by_bytes = partial(rates, nbytes=nbytes or problem.nbytes)
        Runner(size, by_bytes, {"of_bfloat16": base}, clock=clock, until=until, report=report).run(candidate, judge)

    for name in (FA2, CUDNN):
        run(peer(torch, name, [one.dense() for one in sets[:1]], causal=problem.prefill))
    if problem.prefill:
        run(Candidate(base, lambda: [one.prefill() for one in sets]), sets[0].judge(""))
        return size
    run(Candidate(base, lambda: [one.decode("") for one in sets]), sets[0].judge(""))
    for fmt in caching.CODES:
        for one in sets:
            one.encode(fmt)
        eight = problem.batch * problem.n * token_bytes()
        run(Candidate(f"{base}, {fmt}", partial(coded, sets, fmt)), sets[0].judge(fmt), eight)
    return size


def coded(sets: Sequence[Inputs], fmt: str) -> list[Callable[[], Any]]:
    return [one.decode(fmt) for one in sets]


class Inputs:
    """One set of inputs on a device, and calls on it."""

    def __init__(self, torch: Any, problem: Problem, device: Any, random: Any, machine: str) -> None:
        self.torch, self.problem, self.machine = torch, problem, machine
        pages = -(-problem.n // PAGE)
        kind = getattr(torch, problem.element)
        draw = partial(torch.randn, generator=random, device=device, dtype=kind)
        self.q = draw((problem.batch, problem.tokens, problem.heads, D))
        if problem.prefill:
            self.cache = draw((problem.batch, problem.n, D))
        else:
            self.cache = draw((problem.batch * pages, PAGE, D))
        order = torch.randperm(problem.batch * pages, generator=random, device=device)
        self.table = order.reshape(problem.batch, pages).to(torch.int32)
        self.lengths = torch.full((problem.batch,), problem.n, dtype=torch.int32, device=device)
        self.codes = None

    @property
    def arch(self) -> str:
        return gpu.device_arch(self.q.get_device()) if self.machine == "cuda" else "90a"

    @property
    def tier(self) -> str:
        return "90" if int(self.arch.rstrip("a")) >= 90 else "80"

    def dense(self) -> tuple[Any, Any, Any]:
        """(q, k, v) as torch takes them: heads before tokens, and one head of keys."""
        rows = self.cache.reshape(self.problem.batch, -1, D)[:, None, : self.problem.n]
        return self.q.transpose(1, 2).contiguous(), rows, rows[..., :DV].contiguous()

    def encode(self, fmt: str) -> None:
        """The cache in 8 bits, pages in the same places."""
        rows = self.cache.reshape(-1, D)
        self.codes = self.torch.empty((len(rows), token_bytes()), dtype=self.torch.uint8, device=rows.device)
        caching.quantize(rows, self.codes, code=caching.CODES[fmt], machine=self.machine, arch=self.arch)
        self.codes = self.codes.reshape(-1, PAGE, token_bytes())

    def results(self) -> dict[str, Any]:
        p, make = self.problem, partial(self.torch.full, fill_value=float("nan"), device=self.q.device)
        o = make((p.batch, p.tokens, p.heads, DV), dtype=self.q.dtype)
        known = {"o": o, "lse": make((p.batch, p.heads, p.tokens), dtype=self.torch.float32)}
        return known | {"q": self.q, "scale": np.float32(SCALE), "causal": np.int32(p.tokens > 1)}

    def decode(self, fmt: str) -> Callable[[], Any]:
        """A call of the prepared launches; it returns (o, lse)."""
        p, rows = self.problem, self.problem.tokens * self.problem.heads
        tiles = mma.tiles_for(rows, self.arch, bool(fmt))
        units = gpu.multiprocessors(self.q.get_device()) if self.machine == "cuda" else EMULATED_MULTIPROCESSORS
        row_tiles = -(-rows // tiles.bm)
        planned = schedule(self.lengths.cpu().numpy(), max(1, units * max(1, tiles.min_blocks) // row_tiles))
        to, empty = self.torch.from_numpy, partial(self.torch.empty, dtype=self.torch.float32, device=self.q.device)
        splits = int(planned.num_splits[-1])
        known = self.results() | {
            "cache": self.codes if fmt else self.cache, "block_table": self.table, "lengths": self.lengths,
            "parts": to(planned.parts).to(self.q.device), "num_splits": to(planned.num_splits).to(self.q.device),
            "acc_parts": empty((splits, rows, DV)), "m_parts": empty((splits, rows)), "l_parts": empty((splits, rows)),
        }  # fmt: skip
        kernel = mma.make_decode(tiles, p.element, self.tier, code=caching.CODES[fmt] if fmt else "")
        merge = combine.make_combine(p.element, DV, self.tier)
        steps = [(kernel, len(planned.parts) * row_tiles, tiles.shared, mma.DECODE_ARGS),
                 (merge, p.batch * rows, 0, combine.COMBINE_ARGS)]  # fmt: skip
        return self.calls(steps, known)

    def prefill(self) -> Callable[[], Any]:
        tiles = mma.tiles_for(self.problem.tokens * self.problem.heads, self.arch)
        kernel = mma.make_prefill(tiles, self.problem.element, self.tier)
        grid = self.problem.batch * -(-self.problem.tokens * self.problem.heads // tiles.bm)
        return self.calls([(kernel, grid, tiles.shared, mma.PREFILL_ARGS)], self.results() | {"kv": self.cache})

    def calls(self, steps: Sequence[tuple[Any, int, int, tuple[str, ...]]], known: dict[str, Any]) -> Callable[[], Any]:
        ready = []
        for kernel, grid, shared, names in steps:
            args = tuple(known[name] for name in names)
            prepared = launcher.prepare(kernel, args, shared=shared, machine=self.machine)
            ready.append((prepared, grid, kernel.threads, args))

        def call() -> Any:
            for prepared, grid, threads, args in ready:
                prepared(grid, threads, args)
            return known["o"], known["lse"]

        return call

    def judge(self, fmt: str) -> Callable[[Any], Comparison]:
        return partial(self._judge, fmt)

    def _judge(self, fmt: str, result: Any) -> Comparison:
        """The comparison where the error is largest: rows spread over the first and the last request."""
        p, (o, lse) = self.problem, result
        check_written(self.torch, o, lse)
        verdicts = []
        for b in sorted({0, p.batch - 1}):
            if p.prefill:
                k = self.cache[b]
            else:
                pages = self.table[b].long()
                k = (self.codes if fmt else self.cache)[pages].reshape(-1, token_bytes() if fmt else D)[: p.n]
            k = codec.dequantize(k.cpu().numpy(), fmt) if fmt else k.float().cpu().numpy().astype(np.float64)
            at = np.unique(np.linspace(0, p.tokens * p.heads - 1, ROWS).astype(int))
            q = self.q[b].reshape(-1, D)[at].float().cpu().numpy()
            ends = p.n - p.tokens + at // p.heads + 1
            exact, exact_lse = rows_of(q.astype(np.float64), k, ends)
            stored = rounded(k.astype(np.float32), p.element).astype(np.float32)
            low, low_lse = rows_of(q, stored, ends, p.element)
            got = o[b].reshape(-1, DV)[at].float().cpu().numpy()
            got_lse = lse[b].T.reshape(-1)[at].cpu().numpy()
            verdicts += [compare(rounded(got, p.element), exact, rounded(low, p.element))]
            verdicts += [compare(got_lse, exact_lse, low_lse)]
        bad = next((verdict for verdict in verdicts if not verdict.ok), None)
        return bad or max(verdicts[::2], key=lambda verdict: verdict.error)


def rows_of(q: np.ndarray, k: np.ndarray, ends: np.ndarray, element: str = "") -> tuple[np.ndarray, np.ndarray]:
    """(o, lse) of rows ``q [R, D]``, each with the first ``ends`` of ``k [N, D]``, in the precision of q and k; P is
    rounded to ``element`` before it is multiplied."""
    scores = q.dtype.type(SCALE) * (q @ k.T)  # [R, N]
    scores = np.where(np.arange(len(k)) < ends[:, None], scores, -np.inf).astype(q.dtype)  # [R, N]
    top = scores.max(-1, keepdims=True)  # [R, 1]
    weights = np.exp(scores - top)  # [R, N]
    total = weights.sum(-1, keepdims=True)  # [R, 1]
    if element:
        weights = rounded(weights, element).astype(q.dtype)
    return weights @ k[:, :DV] / total, (top + np.log(total))[:, 0]
