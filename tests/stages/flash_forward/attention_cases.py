"""What tests of attention kernels share: cases, layouts, guarded launches of a plan, the hunt for planted faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import pytest

from flashnumba.compare import assert_close, compare
from flashnumba.machine import gpu, launcher
from flashnumba.machine.arrays import describe, host_view
from flashnumba.machine.emulator import Fault
from flashnumba.stages import heads
from flashnumba.stages.flash_forward.reference import dense, low_precision
from tests.stages.rowwise import DTYPES, INF, NAN, Guarded, names

__all__ = [
    "DTYPES", "LAYOUTS", "SIZES", "Case", "assert_attention", "caught", "exact", "hard_case", "hard_cases", "laid_out",
    "names", "normal", "one_odd_row", "plan_for", "right", "run",
]  # fmt: skip

SIZES = (1, 7, 15, 31, 33, 63, 100)
"""Lengths of which none is a multiple of a tile."""


@dataclass(frozen=True, eq=False)
class Case:
    """One problem: q ``[B, H, M, D]``, k and v ``[B, Hkv, N, D]``, and its answer on demand."""

    name: str
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    causal: bool = False
    scale: float | None = None

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"<{self.name}, {self.q.dtype}, causal={self.causal}, scale={self.scale}>"

    @property
    def shape(self) -> heads.Shape:
        """What a planner is told, with the emulator's architecture."""
        return heads.check(*(describe(getattr(self, name), name) for name in "qkv"), causal=self.causal)

    @property
    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """(o, lse) in float64."""
        return dense(self.q, self.k, self.v, self.scale, self.causal)

    @property
    def lowprec(self) -> tuple[np.ndarray, np.ndarray]:
        """(o, lse) as a GPU's precision has them: the error budget."""
        return low_precision(self.q, self.k, self.v, self.scale, self.causal)

    def with_arrays(self, name: str, change: Callable[[np.ndarray], np.ndarray], which: str = "qkv") -> Case:
        """The case with ``change`` made to some of its arrays."""
        return replace(self, name=name, **{x: change(getattr(self, x)) for x in which})


def normal(
    m: int, n: int, d: int, dtype=np.float32, *, batch: int = 1, heads: int = 1, kv_heads: int | None = None,
    causal: bool = False, scale: float | None = None, seed: int = 0, name: str = "",
) -> Case:  # fmt: skip
    """Normal numbers; heads differ in size, rows of q in spread, so that no two heads, rows or columns are alike."""
    rng = np.random.default_rng((seed, m, n, d, batch, heads))
    kv_heads = kv_heads or heads
    q = rng.standard_normal((batch, heads, m, d)) * np.geomspace(0.5, 2, m)[:, None]
    k = rng.standard_normal((batch, kv_heads, n, d)) + 0.3 * np.arange(kv_heads)[:, None, None]
    v = rng.standard_normal((batch, kv_heads, n, d)) + np.linspace(-1, 1, d) + np.arange(kv_heads)[:, None, None]
    title = name or f"{batch} x {heads}/{kv_heads} x {m} x {n} x {d}{' causal' if causal else ''}"
    return Case(title, q.astype(dtype), k.astype(dtype), v.astype(dtype), causal, scale)


def exact(m: int, n: int, d: int, dtype=np.float32, **more) -> Case:
    """:func:`normal` with q and k in steps of 1/4. Their products are exact in float32, in whatever order they are
    summed, so that scores of any size are held to the budget of the softmax alone."""

    def in_steps(x):
        return (np.round(4 * x.astype(np.float32)) / 4).astype(dtype)

    case = normal(m, n, d, dtype, **more)
    return replace(case, q=in_steps(case.q), k=in_steps(case.k))


def hard_cases(dtype, m: int = 7, n: int = 37, d: int = 32) -> list[Case]:
    """One case for each thing that may go wrong. ``2 <= m < n``, neither a multiple of a tile; ``d >= 2``."""
    plain = exact(m, n, d, dtype)
    masked = replace(plain, causal=True)
    middle, last = n // 2, n - 1

    def changed(name: str, causal: bool = False, scale: float | None = None, **edits) -> Case:
        """The plain case, changed: ``edits`` are q, k or v -> a function that changes ``[rows, D]`` in place."""
        arrays = {which: getattr(plain, which).copy() for which in "qkv"}
        for which, edit in edits.items():
            edit(arrays[which][0, 0])
        return replace(plain, name=name, causal=causal, scale=scale, **arrays)

    def put(value, rows, cols=slice(None)):
        def edit(x):
            x[rows, cols] = value

        return edit

    def first_column_only(values):
        def edit(x):
            x[:, 1:] = 0
            x[:, 0] = values[: len(x)]

        return edit

    powers = 2.0 ** (np.arange(n) % 7)
    near = 0.5 * (np.arange(n) % 11)
    largest = float(ml_dtypes.finfo(dtype).max)
    great = 2.0 ** (63 if largest > 1e30 else 15)

    def large(x):
        """Keys that score 320 * 320 plus a few."""
        x[:] = 0
        x[:, 0] = 320
        x[:, 1] = near

    def asks_large(x):
        x[:] = 0
        x[:, 0] = 320
        x[:, 1] = 1

    spread = np.where(np.arange(n) % 3 == 1, great, -great)
    ones, greatest = first_column_only(np.ones(m)), first_column_only(np.full(m, great))
    return [
        replace(plain, name="normal"),
        replace(masked, name="causal"),
        replace(exact(n, n, d, dtype, causal=True), name="causal, as many rows as keys"),
        replace(exact(n, m, d, dtype, causal=True), name="causal, rows that see nothing"),
        replace(exact(1, n, d, dtype, causal=True), name="one query, causal"),
        replace(exact(m, 1, d, dtype), name="one key"),
        replace(exact(m, 1, d, dtype), name="one key, scale 0", scale=0.0),
        replace(exact(m, n, d, dtype, heads=4, kv_heads=2, causal=True), name="two heads share one of k"),
        replace(exact(m, n, d, dtype, batch=2, heads=2, kv_heads=1), name="all heads share one of k"),
        replace(plain, name="scale 0", scale=0.0),
        replace(masked, name="scale 0, causal", scale=0.0),
        replace(masked, name="negative scale", scale=-0.3),
        replace(plain, name="large scale", scale=6.0),
        replace(masked, name="smallest scale", scale=1e-38),
        changed("keys of nothing but zeros", k=put(0, slice(None))),
        changed("a maximum that grows", q=ones, k=first_column_only(np.linspace(0, 30, n)), scale=1.0),
        changed("a maximum that comes first", q=ones, k=first_column_only(np.linspace(30, 0, n)), scale=1.0),
        changed("scores of 1e5 that differ little", q=asks_large, k=large, scale=1.0),
        changed("the same, causal", q=asks_large, k=large, scale=1.0, causal=True),
        changed("scores of -1e5 that differ little", q=asks_large, k=large, scale=-1.0),
        changed("scores of any size", q=greatest, k=first_column_only(spread), scale=1.0),
        changed("scores of any size, negative scale", q=greatest, k=first_column_only(spread), scale=-0.5),
        changed("powers of two", q=ones, k=first_column_only(powers), scale=0.25),
        changed("a NaN in a row of q", q=put(NAN, m // 2, d // 2)),
        changed("a NaN in the last row of q, causal", q=put(NAN, m - 1), causal=True),
        changed("a NaN in a key", k=put(NAN, middle, d - 1)),
        changed("a NaN in a key that not all see", k=put(NAN, last - m // 2, d - 1), causal=True),
        changed("the same, scale 0", k=put(NAN, last - m // 2, d - 1), causal=True, scale=0.0),
        changed("a NaN in the last key, causal", k=put(NAN, last), causal=True),
        changed("a NaN in a value", v=put(NAN, middle, d // 2)),
        changed("infinity in a row of q", q=put(INF, m // 2, 0)),
        changed("infinity in a key", k=put(INF, middle, 0)),
        changed("infinity in a key, scale 0, causal", k=put(INF, middle, 0), causal=True, scale=0.0),
        changed("keys of -infinity", q=put(1, slice(None), 0), k=put(-INF, slice(None), 0)),
        changed("first keys -infinity, causal", q=put(1, slice(None), 0), k=put(-INF, slice(middle), 0), causal=True),
    ]  # fmt: skip


def hard_case(name: str, dtype=np.float32, **sizes) -> Case:
    """One of :func:`hard_cases` by its name."""
    (case,) = [case for case in hard_cases(dtype, **sizes) if case.name == name]
    return case


# -- layouts: the same values lying otherwise in memory ----------------------------------------------------------------
def _heads_inside(x):
    return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)


def _columns_outside(x):
    return np.ascontiguousarray(x.swapaxes(2, 3)).swapaxes(2, 3)


def _reversed(*axes):
    return lambda x: np.flip(np.flip(x, axes).copy(), axes)


def _every_second(axis):
    def change(x):
        wide = np.full([2 * n if at == axis else n for at, n in enumerate(x.shape)], NAN, x.dtype)
        part = wide[tuple(slice(None, None, 2) if at == axis else slice(None) for at in range(4))]
        part[...] = x
        return part

    return change


def _moved(x):
    guarded = Guarded(x.shape, x.dtype, at=1)
    guarded.array[...] = x
    return guarded.array


def _padded(x):
    wide = np.full((*x.shape[:-1], x.shape[-1] + 8), NAN, x.dtype)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "heads inside rows": _heads_inside,
    "columns outside rows": _columns_outside,
    "rows reversed": _reversed(2),
    "columns reversed": _reversed(3),
    "all reversed": _reversed(0, 1, 2, 3),
    "every second row": _every_second(2),
    "every second column": _every_second(3),
    "one element off": _moved,
    "longer rows": _padded,
}
"""From a packed array to one of the same values with other strides; between the elements lies NaN."""


def laid_out(case: Case) -> Iterator[Case]:
    """The case with q, k and v in three layouts at a time, each layout in each of them; then with axes of stride 0."""
    ways = list(LAYOUTS.items())
    for at in range(len(ways)):
        changed = case
        for which, step in (("q", 0), ("k", 2), ("v", 5)):
            name, change = ways[(at + step) % len(ways)]
            title = f"{name} in {which}" if which == "q" else f"{changed.name}, {name} in {which}"
            changed = changed.with_arrays(title, change, which)
        yield changed
    yield case.with_arrays("all heads one in k and v", lambda x: np.broadcast_to(x[:, :1], x.shape), "kv")
    yield case.with_arrays("all rows one in q", lambda x: np.broadcast_to(x[:, :, :1], x.shape), "q")
    yield case.with_arrays("all columns one in v", lambda x: np.broadcast_to(x[..., :1], x.shape), "v")


def one_odd_row(n: int, d: int, dtype=np.float16) -> Case:
    """One query and n = 0 or 1 keys, each aligned to 16 bytes, out of rows that are one element longer than d: a next
    row would not be aligned. Numbers for a GPU's whole tile lie behind them."""

    def out_of_longer_rows(x):
        wide = np.full((*x.shape[:2], 64, d + 1), NAN, x.dtype)
        assert wide.ctypes.data % 16 == 0
        rows = wide[..., : x.shape[2], :d]
        rows[...] = x
        return rows

    return normal(1, n, d, dtype).with_arrays(f"{n} keys out of rows of {d + 1}", out_of_longer_rows)


# -- launching and judging ---------------------------------------------------------------------------------------------
def run(
    plan: heads.Planner, case: Case, machine: str = "emulator", *, seed: int = 0, arch: str = "90a",
    o_strides: tuple[int, ...] | None = None, checks: bool = True, stored: list[int] | None = None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """(o, lse) of a plan's launches, with outputs and scratch full of junk, the outputs between guard bands.

    Args:
        plan: a planner of a stage's ``PLANS``, or any function from a shape to a plan.
        seed, arch, checks: of the emulator; a GPU has its own architecture.
        o_strides: in elements; packed if None.
        stored: gets, on the emulator, the bytes that each launch stored.

    Raises:
        Fault: of the emulator.
        AssertionError: something was written outside the outputs.
    """
    shape = replace(case.shape, arch=gpu.device_arch() if machine == "cuda" else arch)
    planned = plan(shape)
    o, lse = Guarded(case.q.shape, case.q.dtype, o_strides), Guarded(case.q.shape[:3], np.float32)
    scale = heads.check_scale(case.scale, shape.d)
    known = {"q": case.q, "k": case.k, "v": case.v, "o": o.array, "lse": lse.array}
    known |= {name: junk(size, heads.SCRATCH[name][0]) for name, size in planned.scratch.items()}
    scalars = {"scale": np.float32(scale), "causal": np.int32(case.causal)}
    for launch in planned.launches:
        given = scalars | heads.maps_for(launch, known, shape.element)
        args = tuple(host_view(known[a]) if a in known else given[a] for a in launch.args)
        if machine == "cuda":
            ready = heads.prepared(launch, shape.element, machine, None)
            ready(launch.grid, launch.threads, args)
        else:
            options = {"seed": seed, "arch": arch, "checks": checks}
            report = launcher.launch(
                launch.kernel, launch.grid, launch.threads, args, shared=launch.shared, machine=machine,
                emulate=options,
            )  # fmt: skip
            if stored is not None and report is not None:
                stored.append(report.stored)
    o.check("o")
    lse.check("lse")
    return o.array, lse.array


def junk(shape: tuple[int, ...], element: str) -> np.ndarray:
    """What may be in memory that nobody has written: NaN, or large integers."""
    return np.full(shape, NAN if element.startswith("float") else 0x5EAF00D, element)


def plan_for(make: Callable[[heads.Shape], heads.Launch]) -> heads.Planner:
    """A planner of one launch."""
    return lambda shape: heads.Plan((make(shape),))


def assert_attention(results: tuple[np.ndarray, np.ndarray], case: Case) -> None:
    """Both results within the budget."""
    for name, got, expected, low in zip(("o", "lse"), results, case.expected, case.lowprec, strict=True):
        assert_close(got, expected, low, what=f"{name} of {case.name}")


def right(results: tuple[np.ndarray, np.ndarray], case: Case) -> bool:
    """Whether both results are within the budget."""
    return all(
        compare(got, expected, low).ok
        for got, expected, low in zip(results, case.expected, case.lowprec, strict=True)
    )  # fmt: skip


def caught(launch: Callable[[int], tuple[np.ndarray, np.ndarray]], case: Case, seeds=(0, 1, 2)) -> list[str]:
    """What catches a planted fault, seed by seed: a fault's name or ``"wrong result"``; the test fails if nothing does.

    Args:
        launch: ``launch(seed)`` runs the broken kernel on the case and returns (o, lse).
        seeds: orders of threads, see :func:`tests.stages.faults.seeds_for`.
    """
    found = []
    for seed in seeds:
        try:
            found.append("" if right(launch(seed), case) else "wrong result")
        except Fault as fault:
            found.append(fault.name)
        except AssertionError:
            found.append("written outside")
    if not all(found):
        missed = [seed for seed, what in zip(seeds, found, strict=True) if not what]
        pytest.fail(f"the planted fault was not caught for seeds {missed}")
    return found
