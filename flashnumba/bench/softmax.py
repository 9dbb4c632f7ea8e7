"""Every softmax kernel on a GPU beside ``torch.softmax`` and a device copy, in one run.

Bytes are counted as one read and one write of the tensor, whatever a kernel really moves, so the figures of all kernels
can be compared with each other and with the copy, which is the ceiling. Each kernel is first compared with float64 on
some rows; one that is wrong has no time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from flashnumba.bench.environment import place
from flashnumba.bench.runner import Candidate, Clock, Measured, Runner, Size, rounded
from flashnumba.compare import Comparison, compare
from flashnumba.machine import launcher
from flashnumba.machine.function import Kernel
from flashnumba.stages.online_softmax import simt as online
from flashnumba.stages.online_softmax.split_ahead import shared_bytes
from flashnumba.stages.rows import Shape
from flashnumba.stages.softmax import simt as three_pass
from flashnumba.stages.softmax.reference import low_precision, safe
from flashnumba.tiles.elements import ITEMSIZE

__all__ = ["COPY", "PEER", "Variant", "launchable", "measure", "variants"]

COPY, PEER = "copy", "torch.softmax"
SAMPLE = 64


@dataclass(frozen=True)
class Variant:
    """A kernel with the sizes it is made with; ``chunks`` a row where a row is split (``grid`` is then 0: as many
    blocks as fit), ``shared`` bytes of dynamic shared memory."""

    name: str
    kernel: Kernel
    grid: int
    threads: int
    chunks: int = 0
    shared: int = 0


def variants(shape: Shape, wide: bool = False) -> Iterator[Variant]:
    """The kernels of both stages as their hosts launch them; if ``wide``, also in other sizes."""
    for name in three_pass.KERNELS:
        kernel, blocks, threads = three_pass.make(name, shape)
        yield Variant(name, kernel, blocks, threads)
    chosen = online.choose(shape)
    for name in online.KERNELS:
        try:
            plan = online.PLANS[name](shape)
        except ValueError:  # rows too long to be held, or that the copy engine cannot bring
            continue
        label = f"{name} (auto)" if name == chosen else name
        grid = 0 if plan.chunks else plan.blocks
        yield Variant(label, plan.kernel, grid, plan.threads, plan.chunks, plan.shared)
    if wide:
        yield from other_sizes(shape)


def other_sizes(shape: Shape) -> Iterator[Variant]:
    """one_pass, split and split_ahead with other shares of a row for a thread, chunk sizes and hints to the caches."""
    element, count = shape.element, shape.cols * ITEMSIZE[shape.element] // 16
    for vectors in (1, 2, 4, 8):
        group = count // vectors
        if group * vectors != count or not 4 <= group <= 1024 or group & (group - 1):
            continue
        rows = max(1, 128 // group) if group <= 32 else 1
        for at_once in (1, 2) if group <= 32 else (1,):
            for hint in ("plain", "once"):
                kernel = online.make_one_pass(
                    element, group, vectors, rows, rows_at_once=at_once, exact=True, hint=hint
                )  # fmt: skip
                name = f"one_pass {group}x{vectors} rows {rows}x{at_once} {hint}"
                yield Variant(name, kernel, -(-shape.rows // (rows * at_once)), group * rows)
    for threads, vectors, fit in ((256, 8, 4), (512, 4, 4), (512, 8, 2)):
        if count > threads * vectors and count % (threads * vectors) == 0:
            kernel = online.make_split(element, threads, vectors, exact=True, min_blocks=fit)
            yield Variant(f"split {threads}x{vectors}", kernel, 0, threads, count // (threads * vectors))
    for threads, vectors, slots in ((256, 4, 3), (256, 8, 3), (512, 4, 3), (512, 8, 3)):
        if online.can_load_ahead(shape) and count > threads * vectors:
            kernel = online.make_split_ahead(element, threads, vectors, slots)
            chunks, shared = -(-count // (threads * vectors)), shared_bytes(threads, vectors, slots)
            yield Variant(f"split_ahead {threads}x{vectors} slots {slots}", kernel, 0, threads, chunks, shared)


def measure(
    element: str, cols: int, nbytes: int = 1 << 30, *, wide: bool = False, clock: Clock | None = None,
    until: float = float("inf"), report: Callable[[Size, Measured], None] = lambda size, measured: None, only: str = "",
    machine: str = "cuda",
) -> Size:  # fmt: skip
    """Measure all kernels on one size.

    Args:
        element: float16, bfloat16 or float32.
        cols: elements a row.
        nbytes: of the tensor, about.
        wide: try other sizes too.
        clock: a :class:`~flashnumba.bench.runner.Clock` if None.
        until: ``time.monotonic()`` after which further variants are left out.
        report: called with each result as it is there.
        only: of the variants, those alone whose name has this in it.
        machine: ``"emulator"`` runs the kernels there, on tensors in host memory: for tests, with a clock of their own.

    Raises:
        RuntimeError: no GPU, or no torch that uses it.
    """
    torch, device, arch = place("softmax", machine)
    rows = max(1, nbytes // (cols * ITEMSIZE[element]))
    x = torch.randn(rows, cols, device=device, dtype=getattr(torch, element)).mul_(3)
    out = torch.empty_like(x)
    size = Size({"element": element, "rows": rows, "cols": cols, "nbytes": x.numel() * ITEMSIZE[element]})
    vector = 16 if cols * ITEMSIZE[element] % 16 == 0 else ITEMSIZE[element]
    shape = Shape(element, rows, cols, vector, arch)
    picked = torch.randperm(rows, device=device)[:SAMPLE] if rows > SAMPLE else torch.arange(rows, device=device)
    picked[-1] = rows - 1
    sample = x[picked].float().cpu().numpy()
    expected, low = safe(sample), rounded(low_precision(sample), element)

    def judge(result: Any) -> Comparison:
        return compare(rounded(result[picked].float().cpu().numpy(), element), expected, low)

    runner = Runner(
        size, lambda seconds: {"bytes_per_second": 2 * size.about["nbytes"] / seconds},
        {"of_copy": COPY, "of_torch": PEER}, clock=clock or Clock(), until=until, report=report,
    )  # fmt: skip
    runner.run(Candidate(COPY, lambda: [lambda: out.copy_(x)], ours=False))
    runner.run(Candidate(PEER, lambda: [lambda: torch.softmax(x, -1)], ours=False), judge)
    seen: set[Any] = set()
    for variant in variants(shape, wide):
        key = (variant.kernel, variant.grid)
        if key not in seen and only in variant.name:
            seen.add(key)
            runner.run(Candidate(variant.name, partial(launchable, variant, x, out, torch, machine)), judge)
    return size


def launchable(
    variant: Variant, x: Any, out: Any, torch: Any, machine: str = "cuda"
) -> Sequence[Callable[[], Any]]:  # fmt: skip
    """A call that launches a variant on the current stream, its scratch zeroed, and returns ``out``, NaN until then.

    Raises:
        ValueError: the GPU does not hold as many blocks at once as a row has chunks.
    """
    out.fill_(float("nan"))
    args: tuple[Any, ...] = (x, out)
    if variant.chunks:
        scratch = torch.zeros(1 + x.shape[0] * variant.chunks, dtype=torch.int64, device=x.device)
        args = (x, out, scratch.view(torch.uint64))
    ready, grid = launcher.prepare(variant.kernel, args, shared=variant.shared, machine=machine), variant.grid
    if variant.chunks:
        resident = ready.resident_blocks(variant.threads)
        if resident < variant.chunks:
            raise ValueError(f"{variant.chunks} chunks a row; the GPU holds {resident} blocks")
        grid = min(resident, x.shape[0] * variant.chunks)

    def call() -> Any:
        if variant.chunks:
            scratch.zero_()
        ready(grid, variant.threads, args)
        return out

    return [call]
