"""``flashnumba bench`` of the forward of attention, and of what its stages vary."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from flashnumba.commands import refuse
from flashnumba.commands.bench.table import (
    HALVES,
    RATES,
    RESULTS,
    Column,
    Dims,
    Elements,
    Halves,
    Kernels,
    Lengths,
    Masks,
    Out,
    Place,
    Runs,
    Seconds,
    Tokens,
    Wide,
    Width,
    conditions,
    measure_all,
    names_of,
    numbers_of,
    swept,
    title_of,
)

__all__ = ["attention", "balance", "chain", "decode", "staged"]


def attention(
    out: Out = RESULTS / "attention.json",
    dims: Dims = "64,128,256",
    lengths: Lengths = "1024,4096,16384",
    tokens: Tokens = 16384,
    width: Width = 2048,
    causal: Masks = "no,yes",
    elements: Elements = "float16",
    kernels: Kernels = "",
    simt: Annotated[bool, typer.Option(help="Also one small size in float32.")] = True,
    runs: Runs = 20,
    seconds: Seconds = 100.0,
    wide: Wide = False,
) -> None:
    """Attention forward beside torch's FlashAttention-2 and cuDNN."""
    from flashnumba.bench import attention as benchmark
    from flashnumba.bench.runner import Clock
    from flashnumba.tiles.elements import ITEMSIZE

    names = names_of("--kernels", kernels, benchmark.kernels(), none=True)
    problems = swept(dims, lengths, causal, tokens, width, elements, tuple(ITEMSIZE))
    if simt and not names:
        problems.append(benchmark.SMALL)
    found = conditions("attention", benchmark.environment, out)
    places = [
        Place(title_of(p), partial(benchmark.measure, p, names=names, wide=wide, clock=Clock(runs))) for p in problems
    ]
    measure_all(places, [*RATES, Column("of FA2", "of_fa2"), Column("of cuDNN", "of_cudnn")], out, found, seconds)


def chain(
    out: Out = RESULTS / "chain.json",
    dims: Dims = "64,128",
    lengths: Lengths = "4096,16384",
    tokens: Tokens = 16384,
    width: Width = 2048,
    causal: Masks = "no,yes",
    elements: Halves = "float16",
    runs: Runs = 20,
    seconds: Seconds = 100.0,
) -> None:
    """P from one product to the next: by registers, by shuffles, through shared memory; beside FlashAttention-2."""
    from flashnumba.bench import chain as benchmark
    from flashnumba.bench.runner import Clock

    problems = swept(dims, lengths, causal, tokens, width, elements)
    found = conditions("chain", benchmark.environment, out)
    places = [Place(title_of(p), partial(benchmark.measure, p, clock=Clock(runs))) for p in problems]
    measure_all(places, [*RATES, Column("of shared", "of_shared"), Column("of FA2", "of_fa2")], out, found, seconds)


def staged(
    out: Out = RESULTS / "staged.json",
    dims: Dims = "64,128",
    lengths: Lengths = "4096,16384",
    tokens: Tokens = 16384,
    width: Width = 2048,
    causal: Masks = "no,yes",
    elements: Halves = "float16",
    kernels: Kernels = "",
    runs: Runs = 20,
    seconds: Seconds = 150.0,
    wide: Wide = False,
) -> None:
    """One ring of slots for K and V: one to four whole tiles or quarters of one; beside FlashAttention-2."""
    from flashnumba.bench import staged as benchmark
    from flashnumba.bench.runner import Clock

    names = names_of("--kernels", kernels, benchmark.kernels(), none=True)
    problems = swept(dims, lengths, causal, tokens, width, elements)
    found = conditions("staged", benchmark.environment, out)
    places = [
        Place(title_of(p), partial(benchmark.measure, p, names=names, wide=wide, clock=Clock(runs))) for p in problems
    ]
    columns = [*RATES, Column("KB", "shared", 1 / 1024, 1), Column("regs", "registers", digits=0)]
    columns += [Column("predicted", "predicted_blocks", digits=0), Column("blocks", "blocks", digits=0)]
    columns += [Column(f"of {benchmark.BASE}", "of_base"), Column("of FA2", "of_fa2")]
    measure_all(places, columns, out, found, seconds)


def balance(
    out: Out = RESULTS / "balance.json",
    dims: Dims = "64,128",
    lengths: Annotated[
        str, typer.Option(help="Tokens of a sequence, separated by commas.")
    ] = "1024,2048,4096,8192,16384",
    few: Annotated[str, typer.Option(help="Heads of one sequence, where they are few, separated by commas.")] = "8,16",
    tokens: Annotated[int, typer.Option(min=1, help="Where heads are many: in all sequences together.")] = 16384,
    width: Annotated[int, typer.Option(min=1, help="Where heads are many: columns of all of them together.")] = 2048,
    element: Annotated[str, typer.Option(help="float16 or bfloat16.")] = "float16",
    kernels: Kernels = "",
    runs: Runs = 20,
    seconds: Seconds = 240.0,
) -> None:
    """Causal attention by each schedule, beside what a simulation predicts, FlashAttention-2 and cuDNN."""
    from flashnumba.bench import balance as benchmark
    from flashnumba.bench.runner import Clock
    from flashnumba.stages.heads import MOST_D

    (chosen,) = names_of("--element", element, HALVES)[:1]
    names = names_of("--kernels", kernels, benchmark.kernels(), none=True)
    sizes = numbers_of("--dims", dims, MOST_D), numbers_of("--lengths", lengths), numbers_of("--few", few)
    found = conditions("balance", benchmark.environment, out)
    models: dict[Any, Any] = {}
    places = [
        Place(
            f"{p.element}, B {p.batch}, H {p.heads}, N {p.n}, D {p.d}, causal",
            partial(benchmark.measure, p, names=names, models=models, clock=Clock(runs)),
        )
        for p in benchmark.problems(chosen, *sizes, tokens=tokens, width=width)
    ]
    columns = [Column("ms", "seconds", 1e3), Column("predicted", "predicted", 1e3)]
    columns += [Column("x plain", "of_plain", 1, 2), Column("predicted", "predicted_of_plain", 1, 2)]
    columns += [Column("TFLOP/s", "flops_per_second", 1e-12, 1)]
    columns += [Column("of FA2", "of_fa2"), Column("of cuDNN", "of_cudnn")]
    measure_all(places, columns, out, found, seconds, lambda: {"models": benchmark.records(models)} if models else {})


def decode(
    out: Out = RESULTS / "decode.json",
    batches: Annotated[str, typer.Option(help="Sequences, separated by commas.")] = "1,4,16",
    lengths: Annotated[str, typer.Option(help="Keys of a sequence, separated by commas.")] = "8192,32768,131072",
    heads: Annotated[int, typer.Option(min=1, help="Heads of q.")] = 64,
    kv_heads: Annotated[int, typer.Option(min=1, help="Heads of K and V.")] = 8,
    dim: Annotated[int, typer.Option(min=1, max=256, help="Columns of a head.")] = 128,
    elements: Elements = "float16",
    kernels: Annotated[str, typer.Option(help="Kernels by name, separated by commas.", show_default="split")] = "",
    runs: Runs = 20,
    seconds: Seconds = 100.0,
    host: Annotated[bool, typer.Option(help="Also host time of small calls.")] = True,
) -> None:
    """Attention of one query a sequence beside copies and torch, and what a small call costs the host."""
    from flashnumba.bench import decode as benchmark
    from flashnumba.tiles.elements import ITEMSIZE

    chosen = names_of("--elements", elements, tuple(ITEMSIZE))
    names = names_of("--kernels", kernels, benchmark.kernels(), none=True)
    if heads % kv_heads:
        refuse(f"--heads is {heads} and --kv-heads {kv_heads}; the second must divide the first")
    problems = [
        benchmark.Problem(element, batch, n, heads, kv_heads, dim)
        for element in chosen
        for n in numbers_of("--lengths", lengths)
        for batch in numbers_of("--batches", batches)
    ]
    found = conditions("decode", benchmark.environment, out)
    places = [
        Place(
            f"{p.element}, B {p.batch}, H {p.heads}, Hkv {p.kv_heads}, M 1, N {p.n}, D {p.d}, {p.nbytes / 1e6:.4g} MB",
            partial(benchmark.measure, p, found[benchmark.BANDWIDTH], names=names, clock=benchmark.GraphClock(runs)),
        )
        for p in problems
    ]
    columns = [Column("us", "seconds", 1e6, 1), Column("TB/s", "bytes_per_second", 1e-12, 2)]
    columns += [Column("of copy", "of_copy"), Column("of equal copy", "of_equal_copy")]
    columns += [Column("of FA2", "of_fa2"), Column("of cuDNN", "of_cudnn")]

    def host_times() -> dict[str, Any]:
        if not host:
            return {}
        rows = benchmark.host_times()
        typer.echo("\nhost time of a call, us")
        for row in rows:
            time_ = "       -" if row["seconds"] is None else f"{row['seconds'] * 1e6:8.1f}"
            typer.echo(f"  q {row['q']:28} {row['name']:42} {time_}  {row['note']}".rstrip())
        return {"host": rows}

    measure_all(places, columns, out, found, seconds, host_times)
