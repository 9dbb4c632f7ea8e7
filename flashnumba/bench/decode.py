"""Attention of one new token a sequence, as in generating text: the kernel ``split`` beside copies and torch.

With one query a head there are two operations for each element of K and V that is read, so memory decides, and the
figure is bytes of K and V a second. It is stated beside two copies on the device, of which reads and writes both count:

- one of 1 GiB, the speed that memory reaches when nothing else is in the way;
- one that moves as many bytes in all as K and V have. Small ones are slower, as starting and ending take their share.

Several sets of inputs are used in turn, 1 GiB or more of K and V in all, so that none is in the L2 cache when its turn
comes. The calls follow one another in a CUDA graph, so the host's time does not count; it is measured by itself, see
:func:`host_times`. Our kernels start early (:mod:`flashnumba.tiles.dependency`), so a call begins while the one before
it ends, as it would behind any other kernel; torch's wait for the end. Each kernel is first compared with float64 for
the first and the last sequence and head.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from flashnumba.bench import timing
from flashnumba.bench.environment import environment as base_environment
from flashnumba.bench.environment import place, torch_on_gpu
from flashnumba.bench.heads import CUDNN, FA2, Judge, Place, launches, peer, settings, shape_of
from flashnumba.bench.planned import kernels_of, planned
from flashnumba.bench.runner import Candidate, Clock, Measured, Runner, Size
from flashnumba.tiles.elements import ITEMSIZE

__all__ = ["BANDWIDTH", "COPY", "USUAL", "GraphClock", "Problem", "environment", "host_times", "kernels", "measure"]

COPY = "copy of as many bytes"
BANDWIDTH = "copy of 1 GiB, bytes a second"
USUAL = ("split",)
"""What is measured if nothing else is asked for."""
IN_TURN = 1 << 30
"""Bytes of K and V in all sets of inputs, at least: twenty times the L2 cache of an H200."""


@dataclass(frozen=True)
class Problem:
    """Sizes of one step: one query for each of ``heads`` heads of ``batch`` sequences of ``n`` keys."""

    element: str
    batch: int
    n: int
    heads: int = 64
    kv_heads: int = 8
    d: int = 128

    @property
    def nbytes(self) -> int:
        """Of K and V."""
        return 2 * self.batch * self.kv_heads * self.n * self.d * ITEMSIZE[self.element]


class GraphClock(Clock):
    """Times calls in a CUDA graph; those that cannot be captured one after the other, and says so."""

    def repeated(self, calls: Sequence[Callable[[], Any]], warmup: int, runs: int) -> tuple[float, str]:
        for i in range(warmup):
            calls[i % len(calls)]()
        try:
            return timing.time_graph(calls, runs=runs), ""
        except RuntimeError as error:
            seconds, _ = super().repeated(calls, 0, runs)
            return seconds, f"with the host's time, as no graph takes it: {' '.join(str(error).split())[:160]}"


def kernels() -> tuple[str, ...]:
    """Names of the kernels of the stage."""
    return kernels_of("flash_forward")


def environment() -> dict[str, Any]:
    """What the figures depend on, the speed of a copy of 1 GiB among it."""
    found = base_environment("decode") | settings(torch_on_gpu("decode"))
    return found | {BANDWIDTH: timing.copy_bandwidth(1 << 30)}


def measure(
    problem: Problem, bandwidth: float, *, names: Collection[str] = (), clock: Clock | None = None,
    until: float = float("inf"), in_turn: int = IN_TURN, machine: str = "cuda",
    report: Callable[[Size, Measured], None] = lambda size, measured: None,
) -> Size:  # fmt: skip
    """Measure a copy, the peers and the kernels on one problem.

    Args:
        bandwidth: bytes a second that the copy of 1 GiB reads and writes.
        names: these kernels alone; :data:`USUAL` if empty.
        clock: a :class:`GraphClock` if None.
        until: ``time.monotonic()`` after which no further kernel is begun.
        in_turn: bytes of K and V in all sets of inputs, at least.
        machine: ``"emulator"`` runs the kernels there, on tensors in host memory: for tests, with a clock of their own.
        report: called with each result as it is there.

    Raises:
        RuntimeError: no GPU, or no torch that uses it.
    """
    torch, device, _ = place("decode", machine)
    random = torch.Generator(device=device).manual_seed(0)

    def draw(heads: int, rows: int) -> Any:
        sizes = (problem.batch, heads, rows, problem.d)
        return torch.randn(sizes, generator=random, device=device, dtype=getattr(torch, problem.element))

    sets = [
        (draw(problem.heads, 1), *(draw(problem.kv_heads, problem.n) for _ in range(2)))
        for _ in range(-(-in_turn // problem.nbytes))
    ]
    size = Size({**asdict(problem), "nbytes": problem.nbytes})

    def rates(seconds: float) -> dict[str, float | None]:
        rate = problem.nbytes / seconds
        return {"bytes_per_second": rate, "of_copy": rate / bandwidth}

    ratios = {"of_equal_copy": COPY, "of_fa2": FA2, "of_cudnn": CUDNN}
    runner = Runner(size, rates, ratios, clock=clock or GraphClock(), until=until, report=report)
    runner.run(Candidate(COPY, partial(copies, torch, [k for _, k, _ in sets]), ours=False))
    group = problem.heads // problem.kv_heads
    ends = {(0, 0), (problem.batch - 1, problem.kv_heads - 1)}
    places = [Place(b, h, slice(h * group, (h + 1) * group), slice(0, 1)) for b, h in sorted(ends)]
    judge = Judge(torch, *sets[0], problem.element, places)
    for name in (FA2, CUDNN):
        runner.run(peer(torch, name, sets), judge)
    shape = shape_of(*sets[0], machine=machine)
    for name, plan in planned("flash_forward", shape, names or USUAL, asked=bool(names)):
        runner.run(Candidate(name, partial(launches, plan, sets, machine=machine)), judge)
    return size


def copies(torch: Any, sources: Sequence[Any]) -> Sequence[Callable[[], Any]]:
    """Copies of each K to a place of its own: half as many bytes as K and V have are read, and as many written."""
    return [partial(torch.empty_like(source).copy_, source) for source in sources]


def host_times(machine: str = "cuda") -> list[dict[str, Any]]:
    """Host time of :func:`flashnumba.attention` on small torch tensors beside that of its prepared launches alone.

    Returns:
        Rows for a table: what was called, ``seconds`` of a call, and ``note``, which says why there are none. The last
        row of each problem is the difference: what checking, choosing and allocating take.
    """
    torch, device, _ = place("decode", machine)
    rows: list[dict[str, Any]] = []
    for what, sizes in (
        ("[1, 4, 64, 64], 64 keys", ((1, 4, 64, 64), (1, 4, 64, 64))),
        ("[1, 8, 1, 128], 2048 keys", ((1, 8, 1, 128), (1, 1, 2048, 128))),
    ):
        q, k, v = (torch.randn(size, device=device, dtype=torch.float16) for size in (sizes[0], sizes[1], sizes[1]))
        rows += _host_times(torch, what, q, k, v, machine)
    return rows


def _host_times(torch: Any, what: str, q: Any, k: Any, v: Any, machine: str) -> list[dict[str, Any]]:
    found: dict[str, float | None] = {}
    rows = []

    def add(name: str, time: Callable[[], float]) -> None:
        note = ""
        try:
            found[name] = time()
        except Exception as error:
            found[name], note = None, f"not measured: {type(error).__name__}: {error}"
        rows.append({"q": what, "name": name, "seconds": found[name], "note": note})

    def prepared() -> float:
        from flashnumba.attention import choose, planner

        shape = shape_of(q, k, v, machine=machine)
        backend = choose(shape, True).backend
        (call,) = launches(partial(planner(backend), shape), [(q, k, v)], machine=machine)
        return timing.host_time(call)

    def attention() -> float:
        from flashnumba.attention import attention

        return timing.host_time(lambda: attention(q, k, v))

    def of_torch() -> float:
        grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
        return timing.host_time(partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, **grouped))

    add("torch's scaled_dot_product_attention", of_torch)
    add("flashnumba.attention", attention)
    add("its prepared launches alone", prepared)
    both = found["flashnumba.attention"], found["its prepared launches alone"]
    if None not in both:
        rows.append({"q": what, "name": "the rest of flashnumba.attention", "seconds": both[0] - both[1], "note": ""})
    return rows
