"""Every softmax kernel on a GPU beside ``torch.softmax`` and a device copy, in one run.

Bytes are counted as one read and one write of the tensor, whatever a kernel really moves, so the figures of all kernels
can be compared with each other and with the copy, which is the ceiling. Each kernel is first compared with float64 on
some rows; one that is wrong has no time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from typing import Any

import numpy as np

from flashnumba.bench.timing import time_gpu
from flashnumba.compare import compare
from flashnumba.machine import gpu, install, launcher
from flashnumba.machine.function import Kernel
from flashnumba.stages.online_softmax import simt as online
from flashnumba.stages.online_softmax.split_ahead import shared_bytes
from flashnumba.stages.rows import Shape
from flashnumba.stages.softmax import simt as three_pass
from flashnumba.stages.softmax.reference import low_precision, safe
from flashnumba.tiles.elements import ITEMSIZE

__all__ = [
    "COLS",
    "ELEMENTS",
    "Measured",
    "Size",
    "Variant",
    "environment",
    "launchable",
    "measure",
    "summary",
    "variants",
]

COLS = (128, 1024, 4096, 32768, 262144)
ELEMENTS = ("float16", "float32")
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


@dataclass
class Measured:
    """One kernel, or torch, or the copy, on one size."""

    name: str
    seconds: float | None
    bytes_per_second: float | None = None
    of_copy: float | None = None
    of_torch: float | None = None
    error: float | None = None
    budget: float | None = None
    note: str = ""


@dataclass
class Size:
    """All that was measured on one size."""

    element: str
    rows: int
    cols: int
    nbytes: int
    measured: list[Measured] = field(default_factory=list)

    def best(self) -> Measured | None:
        """The fastest of our kernels."""
        ours = [m for m in self.measured if m.seconds and m.name not in ("copy", "torch.softmax")]
        return min(ours, key=lambda m: m.seconds or 0.0, default=None)

    def record(self) -> dict[str, Any]:
        return asdict(self)


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
    element: str, cols: int, nbytes: int = 1 << 30, *, wide: bool = False, runs: int = 20, until: float = float("inf"),
    report: Callable[[Size, Measured], None] = lambda size, measured: None, only: str = "",
) -> Size:  # fmt: skip
    """Measure all kernels on one size.

    Args:
        element: float16, bfloat16 or float32.
        cols: elements a row.
        nbytes: of the tensor, about.
        wide: try other sizes too.
        runs: calls that count, of which the median is taken.
        until: ``time.monotonic()`` after which further variants are left out.
        report: called with each result as it is there.
        only: of the variants, those alone whose name has this in it.

    Raises:
        RuntimeError: no GPU, or no torch that uses it.
    """
    torch = _torch()
    rows = max(1, nbytes // (cols * ITEMSIZE[element]))
    dtype = getattr(torch, element)
    x = torch.randn(rows, cols, device="cuda", dtype=dtype).mul_(3)
    out = torch.empty_like(x)
    size = Size(element, rows, cols, x.numel() * ITEMSIZE[element])
    shape = Shape(
        element, rows, cols, 16 if cols * ITEMSIZE[element] % 16 == 0 else ITEMSIZE[element], gpu.device_arch()
    )
    picked = torch.randperm(rows, device="cuda")[:SAMPLE] if rows > SAMPLE else torch.arange(rows, device="cuda")
    picked[-1] = rows - 1
    sample = x[picked].float().cpu().numpy()
    expected, low = safe(sample), _rounded(low_precision(sample), element)

    def add(name: str, seconds: float | None, **more: Any) -> None:
        rate = 2 * size.nbytes / seconds if seconds else None
        first = {m.name: m.seconds for m in size.measured}
        ratios = {
            key: first[name] / seconds if seconds and first.get(name) else None
            for key, name in (("of_copy", "copy"), ("of_torch", "torch.softmax"))
        }
        size.measured.append(Measured(name, seconds, rate, **ratios, **more))
        report(size, size.measured[-1])

    add("copy", time_gpu(lambda: out.copy_(x), runs=runs))
    add("torch.softmax", time_gpu(lambda: torch.softmax(x, -1), runs=runs))
    seen: set[Any] = set()
    for variant in variants(shape, wide):
        key = (variant.kernel, variant.grid)
        if key in seen or only not in variant.name:
            continue
        seen.add(key)
        if time.monotonic() > until:
            add(variant.name, None, note="out of time")
            continue
        try:
            call = launchable(variant, x, out, torch)
        except (RuntimeError, ValueError) as error:
            add(variant.name, None, note=str(error).splitlines()[0])
            continue
        out.fill_(float("nan"))
        call()
        verdict = compare(_rounded(out[picked].float().cpu().numpy(), element), expected, low)
        judged = {"error": verdict.error, "budget": verdict.budget}
        if verdict.ok:
            slow = time_gpu(call, runs=3, warmup=1)
            add(variant.name, slow if slow > 0.02 else time_gpu(call, runs=runs), **judged)
        else:
            add(variant.name, None, note=f"WRONG: {verdict}", **judged)
    return size


def launchable(variant: Variant, x: Any, out: Any, torch: Any) -> Callable[[], None]:
    """A call that launches a variant on the current stream, its scratch zeroed.

    Raises:
        ValueError: the GPU does not hold as many blocks at once as a row has chunks.
    """
    args: tuple[Any, ...] = (x, out)
    if variant.chunks:
        scratch = torch.zeros(1 + x.shape[0] * variant.chunks, dtype=torch.int64, device="cuda")
        args = (x, out, scratch.view(torch.uint64))
    ready = launcher.prepare(variant.kernel, args, shared=variant.shared, machine="cuda")
    grid, resident = variant.grid, ready.resident_blocks(variant.threads)
    if variant.chunks and resident < variant.chunks:
        raise ValueError(f"{variant.chunks} chunks a row; the GPU holds {resident} blocks")
    grid = grid or min(resident, x.shape[0] * max(1, variant.chunks))

    def call() -> None:
        if variant.chunks:
            scratch.zero_()
        ready(grid, variant.threads, args)

    return call


def _rounded(values: np.ndarray, element: str) -> np.ndarray:
    from flashnumba.machine.arrays import element_dtype

    return values.astype(element_dtype(element))


def _torch() -> Any:
    gpu.require()
    try:
        import torch
    except ImportError as error:
        raise RuntimeError(
            f"the softmax bench compares with torch, which is not installed: {install.pip('torch')}"
        ) from error
    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} sees no GPU; it must be a CUDA build")
    return torch


def environment() -> dict[str, Any]:
    """What the figures depend on."""
    import numba

    found = {"device": gpu.device_name(), "arch": gpu.device_arch(), "driver": gpu.driver_version()}
    torch = _torch()
    from importlib.metadata import version

    found["date"] = datetime.now(timezone.utc).date().isoformat()
    return found | {"torch": torch.__version__, "numba": numba.__version__, "numba-cuda": version("numba-cuda")}


def summary(sizes: Sequence[Size]) -> list[str]:
    """A line a size: the best kernel beside torch and the copy."""
    lines = []
    for size in sizes:
        best = size.best()
        if best:
            lines.append(
                f"{size.element:8} {size.cols:7}  {best.name:44} {(best.bytes_per_second or 0) / 1e12:5.2f} TB/s  "
                f"{best.of_copy or 0:.3f} of copy  {best.of_torch or 0:.3f} x torch"
            )
    return lines
