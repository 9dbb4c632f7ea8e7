"""``flashnumba bench`` of gradients, FP8 and latent attention, and hardware counters."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from flashnumba.commands import refuse
from flashnumba.commands.bench.table import (
    RATES,
    RESULTS,
    Column,
    Dims,
    Halves,
    Kernels,
    Lengths,
    Masks,
    Out,
    Place,
    Runs,
    Seconds,
    Tokens,
    Width,
    conditions,
    measure_all,
    names_of,
    numbers_of,
    swept,
    title_of,
)

__all__ = ["backward", "counters", "fp8", "mla", "sparsity"]


def backward(
    out: Out = RESULTS / "backward.json",
    dims: Dims = "64,128",
    lengths: Lengths = "1024,2048,4096,8192,16384",
    tokens: Tokens = 16384,
    width: Width = 2048,
    causal: Masks = "no,yes",
    elements: Halves = "float16",
    kernels: Kernels = "",
    runs: Runs = 20,
    seconds: Seconds = 150.0,
) -> None:
    """The gradients of attention beside torch's FlashAttention-2 and cuDNN, backward alone."""
    from flashnumba.bench import backward as benchmark
    from flashnumba.bench.runner import Clock

    names = names_of("--kernels", kernels, benchmark.kernels(), none=True)
    problems = swept(dims, lengths, causal, tokens, width, elements)
    found = conditions("backward", benchmark.environment, out)
    places = [Place(title_of(p), partial(benchmark.measure, p, names=names, clock=Clock(runs))) for p in problems]
    columns = [*RATES, Column("extra MB", "extra_bytes", 2.0**-20, 1)]
    measure_all(places, [*columns, Column("of FA2", "of_fa2"), Column("of cuDNN", "of_cudnn")], out, found, seconds)


def fp8(
    out: Out = RESULTS / "fp8.json",
    dims: Dims = "128",
    lengths: Lengths = "4096,8192,16384",
    tokens: Tokens = 16384,
    width: Width = 2048,
    causal: Masks = "no,yes",
    kernels: Kernels = "",
    decode: Annotated[str, typer.Option(help="Sequences x keys of decoding, separated by commas.")] = "16x8192,4x32768",
    runs: Runs = 20,
    seconds: Seconds = 150.0,
) -> None:
    """8 bits an element beside float16: prefill, decoding, conversions, and instructions by count."""
    from flashnumba.bench import fp8 as benchmark
    from flashnumba.bench.decode import GraphClock
    from flashnumba.bench.runner import Clock

    names = names_of("--kernels", kernels, ("k32", "emulated"), none=True)
    steps = _steps(decode)
    problems = swept(dims, lengths, causal, tokens, width)
    found = conditions("fp8", benchmark.environment, out)
    places = [Place(title_of(p), partial(benchmark.measure, p, names=names, clock=Clock(runs))) for p in problems]
    for batch, n in steps:
        step = benchmark.DecodeProblem(batch, n)
        title = f"decoding, B {batch}, H {step.heads}/{step.kv_heads}, N {n}, D {step.d}"
        places.append(Place(title, partial(benchmark.measure_decode, step, clock=GraphClock(runs))))
    columns = [*RATES, Column("T elem/s", "elements_per_second", 1e-12), Column("of fp16", "of_float16")]
    columns += [Column("of FA2", "of_fa2")]

    def rest() -> dict[str, Any]:
        rows = benchmark.conversions(clock=Clock(runs))
        for row in rows:
            typer.echo(f"  float32 to {row['to']:14} {row['way']:13} {row['seconds'] * 1e3:8.3f} ms")
        return {"conversions": rows, "instructions": benchmark.instructions()}

    measure_all(places, columns, out, found, seconds, rest)


def _steps(decode: str) -> list[list[int]]:
    """Sequences and keys of each step of decoding."""
    steps = [numbers_of("--decode", step.replace("x", ",")) for step in decode.split(",") if step.strip()]
    if any(len(step) != 2 for step in steps):
        refuse(f"--decode is {decode!r}; each must be two numbers, sequences x keys, as in 16x8192")
    return steps


def sparsity(
    out: Out = RESULTS / "sparsity.json",
    dims: Dims = "128",
    lengths: Lengths = "16384,65536,8192,131072",
    tokens: Tokens = 16384,
    width: Width = 2048,
    causal: Masks = "no,yes",
    kernels: Kernels = "",
    decode: Annotated[str, typer.Option(help="Sequences x keys of decoding, separated by commas.")] = "16x16384",
    runs: Runs = 20,
    seconds: Seconds = 400.0,
) -> None:
    """Sparse attention beside the dense kernel, on structured data: times, and what was left out."""
    from flashnumba.bench import sla, sparse_decode
    from flashnumba.bench import sparsity as benchmark
    from flashnumba.bench.decode import GraphClock
    from flashnumba.bench.runner import Clock
    from flashnumba.stages.heads import MOST_D

    names = names_of("--kernels", kernels, benchmark.KERNELS, none=True)
    alike = swept(dims, lengths, "no", tokens, width)
    masks = [mask == "yes" for mask in names_of("--causal", causal, ("no", "yes"))]
    sizes = numbers_of("--dims", dims, MOST_D), numbers_of("--lengths", lengths)
    asked = [
        (p, names or benchmark.names_for(p)) for p in benchmark.problems(*sizes, masks, tokens=tokens, width=width)
    ]
    found = conditions("sparsity", benchmark.environment, out)
    places = [
        Place(title_of(p), partial(benchmark.measure, p, names=of, clock=Clock(runs)))
        for p, of in asked
        if set(of) & set(benchmark.BY_MMA)
    ]
    places += [
        Place(f"warpgroups, {title_of(p)}", partial(benchmark.measure_warpgroups, p, names=of, clock=Clock(runs)))
        for p, of in asked
        if set(of) & set(benchmark.BY_WGMMA)
    ]
    for batch, n in _steps(decode):
        step = sparse_decode.DecodeProblem(batch=batch, n=n)
        title = f"decoding, B {batch}, H {step.heads}/{step.kv_heads}, N {n}, D {step.d}"
        places.append(Place(title, partial(sparse_decode.measure_decode, step, clock=GraphClock(runs))))
    places += [
        Place(f"SLA, {title_of(p)}", partial(sla.measure, p, clock=Clock(runs)))
        for p in alike
        if "sla" in (names or benchmark.names_for(p))
    ]
    columns = [Column("ms", "seconds", 1e3), Column("skipped %", "skipped", 100, 1)]
    columns += [Column("of dense", "of_dense"), Column("of ideal", "of_ideal"), Column("of cuDNN", "of_cudnn")]
    measure_all(places, [*columns, Column("critical %", "critical", 100)], out, found, seconds)


def mla(
    out: Out = RESULTS / "mla.json",
    batch: Annotated[int, typer.Option(min=1, help="Requests.")] = 128,
    lengths: Lengths = "4096,8192,16384,32768",
    heads: Annotated[str, typer.Option(help="Heads, separated by commas.")] = "128,16",
    prefill: Annotated[str, typer.Option(help="Tokens of a prefill, separated by commas.")] = "1024,4096",
    runs: Runs = 20,
    seconds: Seconds = 200.0,
) -> None:
    """Latent attention: decoding beside a copy, a cache in 8 bits beside one in 16, and prefill."""
    from flashnumba.bench import mla as benchmark

    counts, keys = numbers_of("--heads", heads), numbers_of("--lengths", lengths)
    problems = [benchmark.Problem(batch, n, h) for h in counts for n in keys]
    asked = numbers_of("--prefill", prefill) if prefill.strip() else []
    problems += [benchmark.Problem(1, n, max(counts), n, prefill=True) for n in asked]
    found = conditions("mla", benchmark.environment, out)
    places = []
    for p in problems:
        step = f"prefill, B {p.batch}, {p.tokens} tokens" if p.prefill else f"decoding, B {p.batch}, N {p.n}"
        title = f"{step}, H {p.heads}, {p.nbytes / 1e6:.4g} MB"
        timed = partial(benchmark.measure, p, found[benchmark.BANDWIDTH], clock=benchmark.GraphClock(runs))
        places.append(Place(title, timed))
    columns = [Column("us", "seconds", 1e6, 1), Column("TB/s", "bytes_per_second", 1e-12, 2)]
    columns += [Column("of copy", "of_copy"), Column("TFLOP/s", "flops_per_second", 1e-12, 1)]
    measure_all(places, [*columns, Column("of bf16", "of_bfloat16")], out, found, seconds)


def counters(
    out: Out = RESULTS / "counters.json",
    stages: Annotated[str, typer.Option(help="Stages with commas.")] = "gemm,flash_forward,chained_gemm,staged_buffers",
    dims: Dims = "64,128",
    length: Annotated[int, typer.Option(min=1, help="Tokens of the sequence.")] = 2048,
    heads: Annotated[int, typer.Option(min=1, help="Heads of it.")] = 16,
    product: Annotated[int, typer.Option(min=1, help="N for gemm: a product of N x N matrices.")] = 2048,
    jobs: Annotated[int, typer.Option(min=1, help="Stages that compile at the same time.")] = 7,
    seconds: Annotated[float, typer.Option(help="For all stages; what runs longer is ended.")] = 500.0,
) -> None:
    """What the hardware counts in one launch of a kernel, by Nsight Compute: bank conflicts, warps, stalls."""
    from flashnumba.bench import counters as benchmark
    from flashnumba.bench.profiled import STAGES
    from flashnumba.stages.heads import MOST_D

    chosen, sizes = names_of("--stages", stages, STAGES), numbers_of("--dims", dims, MOST_D)
    found = conditions("counters", benchmark.environment, out)
    targets = benchmark.targets(chosen, sizes, length, heads, product)
    columns = [Column("us", "seconds", 1e6, 1), Column("M instr", "instructions", 1e-6, 2)]
    columns += [Column("waves M", "wavefronts", 1e-6, 2), Column("load %", "load_conflicts_share", 100, 2)]
    columns += [Column("store %", "store_conflicts_share", 100, 1), Column("tensor %", "tensor", 100, 1)]
    columns += [Column("issue %", "issue", 100, 1), Column("warps", "warps", digits=2)]
    columns += [Column("of", "predicted_warps", digits=0)]
    heads_of = {"short_scoreboard": "short", "long_scoreboard": "long", "math_pipe_throttle": "math"}
    columns += [Column(heads_of.get(why, why.split("_")[0]), f"stall_{why}", digits=2) for why in benchmark.STALLS]
    with benchmark.running(targets, jobs, seconds) as waits:
        places = [Place(target.title, wait) for target, wait in zip(targets, waits, strict=True)]
        measure_all(places, columns, out, found, seconds)
