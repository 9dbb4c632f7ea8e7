"""``flashnumba bench`` before attention: softmax, matrix products, and the emulator beside numba's simulator."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from flashnumba.commands import refuse
from flashnumba.commands.bench.table import (
    RESULTS,
    Column,
    Elements,
    Kernels,
    Out,
    Place,
    Runs,
    Seconds,
    Wide,
    conditions,
    measure_all,
    names_of,
    numbers_of,
)

__all__ = ["gemm", "simulator", "softmax"]


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

    chosen, lengths = names_of("--elements", elements, tuple(ITEMSIZE)), numbers_of("--cols", cols)
    found = conditions("softmax", lambda: environment("softmax"), out)
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
    measure_all(places, columns, out, found, seconds)


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

    products = [numbers_of("--sizes", size.replace("x", ",")) for size in sizes.split(",")]
    if any(len(product) not in (1, 3) for product in products):
        refuse(f"--sizes is {sizes!r}; each must be one number, or three as in 4096x8192x1024")
    chosen = names_of("--elements", elements, tuple(ITEMSIZE))
    orders = names_of("--majors", majors, benchmark.MAJORS)
    names = names_of("--kernels", kernels, benchmark.kernels(), none=True)
    found = conditions("gemm", benchmark.environment, out)
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
    measure_all(places, [*columns, Column("of cuBLAS", "of_cublas")], out, found, seconds)


def simulator() -> None:
    """The emulator beside numba's own CUDA simulator: the same kernels, one run each."""
    from flashnumba.bench.simulator import KERNELS, race

    for raced in KERNELS:
        typer.echo(str(race(raced)))
