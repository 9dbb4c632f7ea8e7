"""``flashnumba bench``: times on a GPU beside others', and the emulator's beside numba's simulator."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from flashnumba.commands import output_folder, refuse, why_no_cuda

if TYPE_CHECKING:
    from flashnumba.bench.runner import Measured, Size

__all__ = ["register"]

bench = typer.Typer(no_args_is_help=True, help="Time kernels on a GPU, beside what others offer.")
RESULTS = Path("docs/results")
NAME = 46
"""Characters of a candidate's name in a table."""

Out = Annotated[Path, typer.Option(help="Where the figures go, as JSON.")]
Elements = Annotated[str, typer.Option(help="Of float16, bfloat16 and float32, separated by commas.")]
Kernels = Annotated[str, typer.Option(help="Kernels by name, separated by commas.", show_default="all that fit")]
Runs = Annotated[int, typer.Option(min=1, help="Calls that count; the median is taken.")]
Seconds = Annotated[float, typer.Option(help="After so long no further kernel is begun.")]
Dims = Annotated[str, typer.Option(help="Columns of a head, 1 to 256, separated by commas.")]
Lengths = Annotated[str, typer.Option(help="Tokens of a sequence, separated by commas.")]
Tokens = Annotated[int, typer.Option(min=1, help="In all sequences together; the batch follows.")]
Width = Annotated[int, typer.Option(min=1, help="Columns of all heads together; their number follows.")]
Masks = Annotated[str, typer.Option(help="no, yes, or both with a comma.")]
Halves = Annotated[str, typer.Option(help="Of float16 and bfloat16, separated by commas.")]
Wide = Annotated[bool, typer.Option("--wide", help="Other sizes of the kernels too, as they were chosen from.")]


def register(app: typer.Typer) -> None:
    app.add_typer(bench, name="bench")


# -- what the commands share -------------------------------------------------------------------------------------------
class Column(NamedTuple):
    """A column of the printed table: a figure's name, and what to multiply it with."""

    head: str
    figure: str
    factor: float = 1
    digits: int = 3


class Place(NamedTuple):
    """A size to measure: its title, and ``measure(until=, report=)``."""

    title: str
    measure: Callable[..., Size]


def _words(option: str, text: str, allowed: Sequence[str], *, none: bool = False) -> list[str]:
    """What is named with commas between; ends the program for a name that is not among the allowed, and for nothing
    named unless ``none`` is right too."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    unknown = [word for word in words if word not in allowed]
    if unknown or not (words or none):
        refuse(f"{option} has {', '.join(unknown) or 'no name in it'}; they must be of {', '.join(allowed)}")
    return list(dict.fromkeys(words))


def _numbers(option: str, text: str, most: int | None = None) -> list[int]:
    """Positive integers with commas between; ends the program for anything else."""
    numbers = [int(word) if word.strip().isdecimal() else 0 for word in text.split(",")]
    if min(numbers) < 1:
        refuse(f"{option} is {text!r}; it must be positive integers separated by commas")
    if most is not None and max(numbers) > most:
        refuse(f"{option} is {text!r}; {max(numbers)} is more than {most}")
    return numbers


def _environment(name: str, benchmark: Callable[[], dict[str, Any]], out: Path) -> dict[str, Any]:
    """What figures depend on; ends the program where nothing can be measured, or the file cannot be written."""
    if reason := why_no_cuda():
        refuse(f"the {name} bench needs a GPU, but {reason}")
    output_folder("--out", out.parent)
    try:
        found = benchmark()
    except RuntimeError as error:
        refuse(str(error))
    typer.echo(", ".join(f"{key} {_plain(value)}" for key, value in found.items()))
    return found


def _plain(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _measure_all(
    places: Sequence[Place], columns: Sequence[Column], out: Path, found: dict[str, Any], seconds: float,
    last: Callable[[], dict[str, Any]] = dict,
) -> None:  # fmt: skip
    """Measure one size after the other, print a line for each result and write the file anew after each size.

    Each size gets its share of what time is left. A size that cannot be set up is told, and the next one is tried.
    ``last`` measures what goes beside the sizes into the file. The exit code is 1 if a kernel was wrong or raised, or a
    size could not be measured.
    """
    from flashnumba.bench.runner import write

    start, sizes, failed = time.monotonic(), [], 0
    for i, place in enumerate(places):
        until = time.monotonic() + (seconds - (time.monotonic() - start)) / (len(places) - i)
        heads = " ".join(f"{c.head:>{_width(c)}}" for c in columns)
        typer.echo(f"\n{place.title}\n  {'kernel':{NAME}} {heads}  error")
        try:
            sizes.append(place.measure(until=until, report=lambda size, m: typer.echo(_line(m, columns))))
        except Exception as error:
            failed += 1
            typer.echo(f"  not measured: {type(error).__name__}: {' '.join(str(error).split())}")
        write(out, found, sizes)
    if more := last():
        write(out, found, sizes, **more)
    typer.echo(f"\nbest of each size, {time.monotonic() - start:.0f} s in all; figures in {out}")
    for size in sizes:
        if best := size.best():
            typer.echo(_line(best, columns, " ".join(map(str, size.about.values()))))
    if failed or any(m.bad for size in sizes for m in size.measured):
        raise typer.Exit(1)


def _width(column: Column) -> int:
    return max(8, len(column.head))


def _line(m: Measured, columns: Sequence[Column], about: str = "") -> str:
    name = f"{about}: {m.name}" if about else m.name
    if m.seconds is None:
        return f"  {name:{NAME}} {m.note}"
    values = {"seconds": m.seconds, **m.figures}

    def cell(column: Column) -> str:
        value = values.get(column.figure)
        return "-" if value is None else f"{value * column.factor:.{column.digits}f}"

    cells = [f"{cell(column):>{_width(column)}}" for column in columns]
    error = "" if m.error is None or m.budget is None else f"{m.error:.1e} of {m.budget:.1e}"
    return f"  {name:{NAME}} {' '.join(cells)}  {error}{'  ' if error and m.note else ''}{m.note}".rstrip()


# -- the commands ------------------------------------------------------------------------------------------------------
@bench.command()
def softmax(
    out: Out = RESULTS / "softmax.json",
    megabytes: Annotated[int, typer.Option(min=1, help="Size of each tensor.")] = 1024,
    cols: Annotated[str, typer.Option(help="Elements a row, separated by commas.")] = "128,1024,4096,32768,262144",
    elements: Elements = "float16,float32",
    runs: Runs = 20,
    seconds: Seconds = 220.0,
    only: Annotated[str, typer.Option(help="Kernels alone whose name has this in it.")] = "",
    wide: Wide = False,
) -> None:
    """Every softmax kernel beside torch.softmax and a device copy."""
    from flashnumba.bench import softmax as benchmark
    from flashnumba.bench.environment import environment
    from flashnumba.bench.runner import Clock
    from flashnumba.tiles.elements import ITEMSIZE

    chosen, lengths = _words("--elements", elements, tuple(ITEMSIZE)), _numbers("--cols", cols)
    found = _environment("softmax", lambda: environment("softmax"), out)
    places = [
        Place(
            f"{element}, rows of {length}",
            partial(
                benchmark.measure, element, length, megabytes << 20, wide=wide, clock=Clock(runs), only=only,
            ),
        )
        for length in lengths
        for element in chosen
    ]  # fmt: skip
    columns = [Column("ms", "seconds", 1e3), Column("TB/s", "bytes_per_second", 1e-12, 2)]
    columns += [Column("of copy", "of_copy"), Column("x torch", "of_torch")]
    _measure_all(places, columns, out, found, seconds)


@bench.command()
def gemm(
    out: Out = RESULTS / "gemm.json",
    sizes: Annotated[
        str, typer.Option(help="N for a product of N x N matrices, or MxNxK, separated by commas.")
    ] = "4096,8192",
    elements: Elements = "float32,float16",
    majors: Annotated[
        str,
        typer.Option(help="A's major and B's: kn (both row-major), kk, mn, mk (both column-major), with commas."),
    ] = "kn",
    kernels: Kernels = "",
    runs: Runs = 20,
    seconds: Seconds = 100.0,
    wide: Wide = False,
) -> None:
    """Every matrix product beside torch.matmul, which is cuBLAS; float32 without TF32."""
    from flashnumba.bench import gemm as benchmark
    from flashnumba.bench.runner import Clock
    from flashnumba.tiles.elements import ITEMSIZE

    products = [_numbers("--sizes", size.replace("x", ",")) for size in sizes.split(",")]
    if any(len(product) not in (1, 3) for product in products):
        refuse(f"--sizes is {sizes!r}; each must be one number, or three as in 4096x8192x1024")
    chosen = _words("--elements", elements, tuple(ITEMSIZE))
    orders = _words("--majors", majors, benchmark.MAJORS)
    names = _words("--kernels", kernels, benchmark.kernels(), none=True)
    found = _environment("gemm", benchmark.environment, out)
    places = [
        Place(
            f"{element}, {m} x {k} times {k} x {n}, majors {order}",
            partial(benchmark.measure, element, m, n, k, order, names=names, wide=wide, clock=Clock(runs)),
        )
        for m, n, k in (product * 3 if len(product) == 1 else product for product in products)
        for element in chosen
        for order in orders
    ]
    columns = [Column("ms", "seconds", 1e3), Column("TFLOP/s", "flops_per_second", 1e-12, 1)]
    _measure_all(places, [*columns, Column("of cuBLAS", "of_cublas")], out, found, seconds)


def _title(p: Any) -> str:
    """A problem of attention, as a heading."""
    return f"{p.element}, B {p.batch}, H {p.heads}, N {p.n}, D {p.d}{', causal' if p.causal else ''}"


@bench.command()
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
    from flashnumba.stages.heads import MOST_D
    from flashnumba.tiles.elements import ITEMSIZE

    chosen = _words("--elements", elements, tuple(ITEMSIZE))
    masks = [mask == "yes" for mask in _words("--causal", causal, ("no", "yes"))]
    names = _words("--kernels", kernels, benchmark.kernels(), none=True)
    sizes = _numbers("--dims", dims, MOST_D), _numbers("--lengths", lengths)
    problems = [*benchmark.problems(chosen, *sizes, masks, tokens=tokens, width=width)]
    if simt and not names:
        problems.append(benchmark.SMALL)
    found = _environment("attention", benchmark.environment, out)
    places = [
        Place(_title(p), partial(benchmark.measure, p, names=names, wide=wide, clock=Clock(runs))) for p in problems
    ]
    columns = [Column("ms", "seconds", 1e3), Column("TFLOP/s", "flops_per_second", 1e-12, 1)]
    _measure_all(places, [*columns, Column("of FA2", "of_fa2"), Column("of cuDNN", "of_cudnn")], out, found, seconds)


@bench.command()
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
    from flashnumba.bench.attention import problems
    from flashnumba.bench.runner import Clock
    from flashnumba.stages.heads import MOST_D

    chosen = _words("--elements", elements, ("float16", "bfloat16"))
    masks = [mask == "yes" for mask in _words("--causal", causal, ("no", "yes"))]
    sizes = _numbers("--dims", dims, MOST_D), _numbers("--lengths", lengths)
    found = _environment("chain", benchmark.environment, out)
    places = [
        Place(_title(p), partial(benchmark.measure, p, clock=Clock(runs)))
        for p in problems(chosen, *sizes, masks, tokens=tokens, width=width)
    ]
    columns = [Column("ms", "seconds", 1e3), Column("TFLOP/s", "flops_per_second", 1e-12, 1)]
    _measure_all(places, [*columns, Column("of shared", "of_shared"), Column("of FA2", "of_fa2")], out, found, seconds)


@bench.command()
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
    from flashnumba.bench.attention import problems
    from flashnumba.bench.decode import GraphClock
    from flashnumba.bench.runner import Clock
    from flashnumba.stages.heads import MOST_D

    masks = [mask == "yes" for mask in _words("--causal", causal, ("no", "yes"))]
    names = _words("--kernels", kernels, ("k32", "emulated"), none=True)
    sizes = _numbers("--dims", dims, MOST_D), _numbers("--lengths", lengths)
    steps = [_numbers("--decode", step.replace("x", ",")) for step in decode.split(",") if step.strip()]
    if any(len(step) != 2 for step in steps):
        refuse(f"--decode is {decode!r}; each must be two numbers, sequences x keys, as in 16x8192")
    found = _environment("fp8", benchmark.environment, out)
    places = [
        Place(_title(p), partial(benchmark.measure, p, names=names, clock=Clock(runs)))
        for p in problems(("float16",), *sizes, masks, tokens=tokens, width=width)
    ]
    for batch, n in steps:
        step = benchmark.DecodeProblem(batch, n)
        title = f"decoding, B {batch}, H {step.heads}/{step.kv_heads}, N {n}, D {step.d}"
        places.append(Place(title, partial(benchmark.measure_decode, step, clock=GraphClock(runs))))
    columns = [Column("ms", "seconds", 1e3), Column("TFLOP/s", "flops_per_second", 1e-12, 1)]
    columns += [Column("T elem/s", "elements_per_second", 1e-12), Column("of fp16", "of_float16")]
    columns += [Column("of FA2", "of_fa2")]

    def rest() -> dict[str, Any]:
        rows = benchmark.conversions(clock=Clock(runs))
        for row in rows:
            typer.echo(f"  float32 to {row['to']:14} {row['way']:13} {row['seconds'] * 1e3:8.3f} ms")
        return {"conversions": rows, "instructions": benchmark.instructions()}

    _measure_all(places, columns, out, found, seconds, rest)


@bench.command()
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
    from flashnumba.bench.attention import problems
    from flashnumba.bench.runner import Clock
    from flashnumba.stages.heads import MOST_D

    chosen = _words("--elements", elements, ("float16", "bfloat16"))
    masks = [mask == "yes" for mask in _words("--causal", causal, ("no", "yes"))]
    names = _words("--kernels", kernels, benchmark.kernels(), none=True)
    sizes = _numbers("--dims", dims, MOST_D), _numbers("--lengths", lengths)
    found = _environment("staged", benchmark.environment, out)
    places = [
        Place(_title(p), partial(benchmark.measure, p, names=names, wide=wide, clock=Clock(runs)))
        for p in problems(chosen, *sizes, masks, tokens=tokens, width=width)
    ]
    columns = [Column("ms", "seconds", 1e3), Column("TFLOP/s", "flops_per_second", 1e-12, 1)]
    columns += [Column("KB", "shared", 1 / 1024, 1), Column("regs", "registers", digits=0)]
    columns += [Column("predicted", "predicted_blocks", digits=0), Column("blocks", "blocks", digits=0)]
    columns += [Column(f"of {benchmark.BASE}", "of_base"), Column("of FA2", "of_fa2")]
    _measure_all(places, columns, out, found, seconds)


@bench.command()
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
    from flashnumba.bench.attention import problems
    from flashnumba.bench.runner import Clock
    from flashnumba.stages.heads import MOST_D

    chosen = _words("--elements", elements, ("float16", "bfloat16"))
    masks = [mask == "yes" for mask in _words("--causal", causal, ("no", "yes"))]
    names = _words("--kernels", kernels, benchmark.kernels(), none=True)
    sizes = _numbers("--dims", dims, MOST_D), _numbers("--lengths", lengths)
    found = _environment("backward", benchmark.environment, out)
    places = [
        Place(_title(p), partial(benchmark.measure, p, names=names, clock=Clock(runs)))
        for p in problems(chosen, *sizes, masks, tokens=tokens, width=width)
    ]
    columns = [Column("ms", "seconds", 1e3), Column("TFLOP/s", "flops_per_second", 1e-12, 1)]
    columns += [Column("extra MB", "extra_bytes", 2.0**-20, 1)]
    _measure_all(places, [*columns, Column("of FA2", "of_fa2"), Column("of cuDNN", "of_cudnn")], out, found, seconds)


@bench.command()
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

    chosen = _words("--elements", elements, tuple(ITEMSIZE))
    names = _words("--kernels", kernels, benchmark.kernels(), none=True)
    if heads % kv_heads:
        refuse(f"--heads is {heads} and --kv-heads {kv_heads}; the second must divide the first")
    problems = [
        benchmark.Problem(element, batch, n, heads, kv_heads, dim)
        for element in chosen
        for n in _numbers("--lengths", lengths)
        for batch in _numbers("--batches", batches)
    ]
    found = _environment("decode", benchmark.environment, out)
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

    _measure_all(places, columns, out, found, seconds, host_times)


@bench.command()
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

    (chosen,) = _words("--element", element, ("float16", "bfloat16"))[:1]
    names = _words("--kernels", kernels, benchmark.kernels(), none=True)
    sizes = _numbers("--dims", dims, MOST_D), _numbers("--lengths", lengths), _numbers("--few", few)
    found = _environment("balance", benchmark.environment, out)
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
    _measure_all(places, columns, out, found, seconds, lambda: {"models": benchmark.records(models)} if models else {})


@bench.command()
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

    chosen, sizes = _words("--stages", stages, STAGES), _numbers("--dims", dims, MOST_D)
    found = _environment("counters", benchmark.environment, out)
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
        _measure_all(places, columns, out, found, seconds)


@bench.command()
def simulator() -> None:
    """The emulator beside numba's own CUDA simulator: the same kernels, one run each."""
    from flashnumba.bench.simulator import KERNELS, race

    for raced in KERNELS:
        typer.echo(str(race(raced)))
