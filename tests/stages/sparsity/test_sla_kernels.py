"""SLA's kernels on the emulator: forward and gradients by every form, bits of dense attention, and planted faults."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flashnumba.compare import assert_close, compare
from flashnumba.machine import launcher
from flashnumba.machine.arrays import element_dtype, host_view
from flashnumba.machine.emulator import Fault
from flashnumba.stages import heads
from flashnumba.stages.backward.reference import dense
from flashnumba.stages.flash_forward.mma import make_mma
from flashnumba.stages.heads import Launch, Shape
from flashnumba.stages.sparsity import (
    sla,
    sla_backward,
    sla_forward,
    sla_gather,
    sla_linear_backward,
    sla_lists,
    sla_states,
)
from flashnumba.stages.sparsity import sla_reference as reference
from flashnumba.stages.sparsity.sla_low_precision import low_precision
from flashnumba.stages.sparsity.sla_pieces import width_of
from flashnumba.stages.sparsity.sla_plans import columns_of
from tests.stages.sparsity import sla_gather as by_numpy

GRADIENTS = ("dq", "dk", "dv", "dproj")
SHARES = (0.5, 0.25)


@dataclass
class Problem:
    """Arrays by name, with what kernels leave once :func:`solve` has run, and what should come of them; ``before`` and
    ``after`` each kernel, its results."""

    shape: Shape
    options: sla.Options
    known: dict[str, Any]
    classes: np.ndarray
    forward: reference.SlaResult
    gradients: tuple[np.ndarray, ...]
    low: reference.SlaResult
    low_gradients: tuple[np.ndarray, ...]
    before: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    after: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)

    def check(self, names: tuple[str, ...]) -> str:
        """Those of the results that are wrong."""
        expected = self.forward._asdict() | dict(zip(GRADIENTS, self.gradients, strict=True))
        low = self.low._asdict() | dict(zip(GRADIENTS, self.low_gradients, strict=True))
        return " ".join(name for name in names if not compare(self.array(name), expected[name], low[name]).ok)

    def array(self, name: str) -> np.ndarray:
        found = self.known[name]
        return found.view(element_dtype(self.shape.element)) if found.dtype == np.uint16 else found


def make(
    dtype: Any = np.float16, m: int = 100, n: int = 200, d: int = 64, causal: bool = False,
    feature_map: str = "softmax", form: str = "paper", projected: bool = True, shares: tuple[float, float] = SHARES,
    apart: float = 0.0, seed: int = 5, heads: tuple[int, int] = (1, 1),
) -> Problem:  # fmt: skip
    """``apart``: how far queries and keys lie from 0, on either side, so that all scores are below it."""
    rng = np.random.default_rng(seed)
    made = [rng.standard_normal((1, heads[i], rows, d)) for i, rows in ((0, m), (1, n), (1, n), (0, m))]
    q, k, v, do = (x.astype(dtype) for x in (made[0] + apart, made[1] - apart, made[2], made[3]))
    proj = (rng.standard_normal((d, d)) / 8).astype(dtype) if projected else None
    shape = Shape(np.dtype(dtype).name, 1, *heads, m, n, d, causal, arch="90a")
    options = sla.check_options(*shares, feature_map, form, None, projected)
    how = {"feature_map": feature_map, "form": form, "causal": causal}
    classes = reference.classify(q, k, *shares, causal)
    low, low_gradients = low_precision(q, k, v, classes, proj, do, **how)
    inputs = {"q": q, "k": k, "v": v, "do": do} | ({} if proj is None else {"proj": proj})
    unit = reference.mean_of(classes.shape[3])
    known = {name: host_view(x) for name, x in inputs.items()} | {
        "scale": np.float32(d**-0.5), "causal": np.int32(causal), "rows": np.int64(m), "keys": np.int64(n),
        "critical": np.int64(round(shares[0] * 1e6)), "negligible": np.int64(round(shares[1] * 1e6)),
        "unit": np.float32(unit), "eps": np.float32(options.eps * unit),
    }  # fmt: skip
    for name in ("o", "dq"):
        known[name] = nan(known["q"].shape, shape.element)
    for name in ("dk", "dv"):
        known[name] = nan(known["k"].shape, shape.element)
    for name, (kind, size) in sla.sizes(shape).items():
        known.setdefault(name, nan(size, kind))
    return Problem(
        shape, options, known, classes, reference.attend(q, k, v, classes, proj, **how),
        reference.gradients(do, q, k, v, classes, proj, **how), low, low_gradients,
    )  # fmt: skip


def nan(size: tuple[int, ...], kind: str) -> np.ndarray:
    """An array of what no kernel should take for a number."""
    dtype = element_dtype(kind)
    return host_view(np.full(size, 77 if dtype.kind == "i" else np.nan, dtype))


def run(launch: Launch, problem: Problem, seed: int = 0) -> None:
    if by_numpy.is_gather(launch.kernel) and launch.grid > 1:
        element = element_dtype(problem.shape.element)
        names = [sla_gather.ALIASES.get(name, name) for name in launch.args[:3]]
        seen = sla_gather.arguments(problem.shape, problem.known, {f"{name} of groups" for name in names})
        arrays = (seen.get(f"{name} of groups", problem.known[name]) for name in names)
        by_numpy.gather(launch.kernel, *(x.view(element) for x in arrays))
        return
    known = problem.known | sla_gather.arguments(problem.shape, problem.known, set(launch.args))
    if launch.kernel.name == "sparsity.sla states":
        launch = replace(launch, grid=2)  # blocks that walk over several items
    args = tuple(known[name] for name in launch.args)
    options = {"seed": seed, "arch": "90a", "checks": True}
    launcher.launch(
        launch.kernel, launch.grid, launch.threads, args, shared=launch.shared, machine="emulator", emulate=options
    )


def launches_of(problem: Problem) -> tuple[Launch, ...]:
    plans = sla.plan_forward(problem.shape, problem.options), sla.plan_backward(problem.shape, problem.options)
    return tuple(launch for plan in plans for launch in plan.launches)


def solve(problem: Problem, seed: int = 0) -> Problem:
    for launch in launches_of(problem):
        name = launch.kernel.name.removeprefix("sparsity.sla ")
        problem.before.setdefault(name, copies(problem, name))
        run(launch, problem, seed)
        problem.after.setdefault(name, copies(problem, name))
    return problem


def copied(problem: Problem) -> dict[str, Any]:
    """All arguments, none of which the problem sees written."""
    return {name: x.copy() if isinstance(x, np.ndarray) else x for name, x in problem.known.items()}


def copies(problem: Problem, kernel: str) -> dict[str, np.ndarray]:
    return {name: problem.known[name].copy() for name in RESULTS.get(kernel, ())}


CASES = {
    "paper": {"apart": 2.0, "seed": 11},  # lists of rows and of keys that are no first tiles, and the last tile in them
    "groups": {  # of two heads, with 24 columns of 64
        "dtype": ml_dtypes.bfloat16, "feature_map": "elu", "form": "all", "causal": True, "projected": False, "m": 40,
        "n": 130, "d": 24, "heads": (4, 2),
    },
    "columns": {"form": "rest", "m": 40, "n": 100, "d": 96, "shares": (0.5, 0.5)},  # of 128
}  # fmt: skip


@cache
def solved(name: str) -> Problem:
    """A problem with all that kernels leave; faults are planted in them."""
    return solve(make(**CASES[name]))


# -- results -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", CASES)
def test_forward_and_gradients(name):
    problem = solved(name)
    assert np.array_equal(problem.known["classes"], problem.classes)
    assert {0, -1} & set(problem.classes.flat) and (problem.classes > 0).any()
    names = GRADIENTS if problem.options.projected else GRADIENTS[:3]
    assert problem.check(("o", "lse", *names)) == ""


@pytest.mark.parametrize("kernel", ["rows backward", "dk dv"])
def test_the_same_bits_whatever_the_order_of_threads(kernel):
    good = solved("paper")
    known = {**copied(good), **{name: x.copy() for name, x in good.before[kernel].items()}}
    run(next(x for x in launches_of(good) if x.kernel.name == f"sparsity.sla {kernel}"), replace(good, known=known), 3)
    assert all(np.array_equal(known[name], x) for name, x in good.after[kernel].items())


def test_all_critical_is_dense_attention_bit_for_bit_and_its_gradients_within_the_budget():
    problem = solve(make(m=64, n=100, shares=(1.0, 0.0), projected=False))
    assert (problem.known["counts"] == 2).all()
    assert problem.check(GRADIENTS[:3]) == ""
    exact = dense(*(problem.known[x] for x in ("q", "k", "v", "do")))
    assert all(np.allclose(a, b, atol=1e-12) for a, b in zip(problem.gradients, exact, strict=False))
    tiles = sla_forward.forward_tiles(64)
    o, lse = nan(problem.known["o"].shape, "float16"), nan(problem.known["lse"].shape, "float32")
    known = {**problem.known, "o": o, "lse": lse}
    args = tuple(known[name] for name in heads.ARGUMENTS)
    launcher.launch(make_mma(tiles, "float16"), 1, tiles.threads, args, shared=tiles.shared, machine="emulator")
    assert np.array_equal(problem.known["o"], o)
    assert np.array_equal(problem.known["lse"], lse)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("fault", ["", "wait", "barrier", "slot", "reuse", "tail"])
def test_states_are_summed_over_lists(transposed, fault):
    """More than two steps of depth, ends within a tile in all three directions."""
    rng = np.random.default_rng(0)
    rows, depth, length = 5, 120, 192
    weights = (rng.random((1, 1, depth, 8) if transposed else (1, 1, rows, 120)) < 0.5).astype(np.float16)
    states = rng.standard_normal((1, 1, depth, length)).astype(np.float16)
    sums = np.full((1, 1, rows, length), np.nan, np.float16)
    exact = weights.astype(np.float64)
    exact = exact.swapaxes(-1, -2)[..., :rows, :] if transposed else exact[..., :depth]
    if fault == "tail":  # beyond the depth there are rows of the next head's weights or whatever else
        weights = np.concatenate([weights, np.full((1, 1, 64, weights.shape[3]), np.nan, np.float16)], 2)
        states = np.concatenate([states, np.full((1, 1, 64, length), np.nan, np.float16)], 2)[:, :, :depth]
    kernel = sla_gather.make_gather("float16", transposed, broken=fault)

    def solve(seed):
        launcher.launch(kernel, 2, sla_gather.GATHER_THREADS, (weights, states, sums), machine="emulator",
                        shared=sla_gather.GATHER_SHARED, emulate={"seed": seed, "arch": "90a"})  # fmt: skip

    if not fault:
        solve(0)
        assert_close(sums, exact @ states.astype(np.float64))
        return
    for seed in range(3 if fault in ("wait", "barrier", "slot", "reuse") else 1):
        try:
            solve(seed)
            found = not compare(sums, exact @ states[:, :, :depth].astype(np.float64)).ok
        except Fault:
            found = True
        assert found, f"{fault} was not caught with seed {seed}"


@pytest.mark.parametrize("transposed", [False, True])
def test_states_are_summed_by_wgmma_for_all_heads(transposed, monkeypatch):
    """Rows and depth end within a tile and a slot, where another head's begin; padded weights are zeros."""
    rng = np.random.default_rng(0)
    shape = Shape("float16", 2, 2, 2, 70 * 64, 69 * 64, 64, arch="90a")
    monkeypatch.setattr(sla_gather, "state_of", lambda shape: 240)
    weights = (rng.random((2, 2, 70, 72)) < 0.5).astype(np.float16)
    weights[..., 69:] = 0
    rows, depth = (69, 70) if transposed else (70, 69)
    states = rng.standard_normal((2, 2, depth, 240)).astype(np.float16)
    sums = nan((2, 2, rows, 240), "float16")
    names = ("dsums", "dstates") if transposed else ("states", "sums")
    launch = sla_gather.plan_gather(shape, transposed)
    assert launch.grid == 4
    known = dict(zip(("weights", *names), (weights, states, sums), strict=True))
    run(replace(launch, grid=1), replace(solved("paper"), shape=shape, known=known))
    exact = weights.astype(np.float64)
    exact = (exact.swapaxes(-1, -2) if transposed else exact)[..., :rows, :depth]
    assert_close(sums, exact @ states.astype(np.float64))


def test_equal_guesses_are_taken_in_order():
    """Means of small whole numbers: many guesses are the same, also at both limits, and some tiles are hidden."""
    rng = np.random.default_rng(0)
    q, k = (np.repeat(rng.integers(-1, 2, (1, 1, tiles, 64)), 64, 2).astype(np.float16) for tiles in (2, 40))
    for causal in (False, True):
        expected, means = reference.classify(q, k, 0.3, 0.3, causal), []
        for x in (q, k):
            means.append(x[:, :, ::64].astype(np.float32).swapaxes(-1, -2).copy())
        for fault in ("", "ties"):
            left = nan((1, 1, 2, 40), "int8"), nan((1, 1, 2, 40), "int32"), nan((1, 1, 2), "int32")
            weights = nan((1, 1, 2, 40), "float16")
            shares = *(np.int64(x) for x in (128, 2560, 300_000, 300_000)), np.float32(0.25), np.int32(causal)
            kernel = sla_lists.make_classify(
                64, "float16", rows=2 if fault else 16, held=0 if causal else 8, broken=fault
            )
            launcher.launch(kernel, 1, sla_lists.CLASSIFY_THREADS, (*means, *left, weights, *shares),
                            shared=8192, machine="emulator")  # fmt: skip
            classes, lists, counts = left
            assert np.array_equal(classes, expected) == (not fault)
            for i in range(2):
                assert list(lists[0, 0, i, : counts[0, 0, i]]) == list(np.flatnonzero(classes[0, 0, i] > 0))
            assert np.array_equal(weights, np.where(classes == 0, np.float16(0.25), np.float16(0)))


# -- planted faults ----------------------------------------------------------------------------------------------------
def planted() -> list[tuple[str, str]]:
    faults = {
        "classify": ("wait", "barrier"), "states": sla_states.STATES_FAULTS,
        "attend": [x for x in sla_forward.FAULTS if x != "causal"],
        "rows backward": sla_linear_backward.FAULTS, "keys backward": ("barrier", "wait", "columns"),
        "dq": [x for x in sla_backward.FAULTS if x != "causal"],
        "dk dv": [x for x in sla_backward.FAULTS if x not in ("causal", "tail")], "project": ("barrier", "wait"),
    }  # fmt: skip
    # Of dk dv a missing row is a row of zeros with weight 1: it adds nothing.
    faults = [(kernel, fault) for kernel, names in faults.items() for fault in names]
    return [*(x for x in faults if x[1] != "group"), *((x, "group") for x in ("attend", "key lists", "dq", "dk dv"))]


def broken_kernel(problem: Problem, name: str, fault: str) -> Any:
    shape, feature_map, projected = problem.shape, problem.options.feature_map, problem.options.projected
    element, d, how, grouped = shape.element, width_of(shape.d), columns_of(shape), {"grouped": shape.group > 1}
    of_rows, of_keys = sla_backward.dq_tiles(d, "90a"), sla_backward.dkdv_tiles(d, "90a")
    makers = {
        "classify": lambda: sla_lists.make_classify(d, element, broken=fault),
        "states": lambda: sla_states.make_states(d, element, feature_map, projected, **how, broken=fault),
        "attend": lambda: sla_forward.make_attend(
            sla_forward.forward_tiles(d, **how), element, feature_map, **how, **grouped, broken=fault
        ),
        "key lists": lambda: sla_lists.make_key_lists(**grouped, broken=fault),
        "rows backward": lambda: sla_linear_backward.make_rows(d, element, feature_map, **how, broken=fault),
        "keys backward": lambda: sla_linear_backward.make_keys(
            d, element, feature_map, projected, **how, broken=fault
        ),
        "dq": lambda: sla_backward.make_dq(of_rows, element, **how, **grouped, broken=fault),
        "dk dv": lambda: sla_backward.make_dkdv(of_keys, element, **how, **grouped, broken=fault),
        "project": lambda: sla_linear_backward.make_project(d, element, **how, broken=fault),
    }  # fmt: skip
    return makers[name]()


RACES = ("barrier", "rows_barrier", "state", "state_barrier", "state_wait", "wait", "reuse", "mean")
ANYWHERE = ("swizzle", "stride", "delta", "linear", "divide", "sparse", "columns")
"""Faults of which one block tells, if it has a list."""
ENOUGH = {("attend", "group"): 3, ("dq", "group"): 3, ("dk dv", "group"): 2} | {("dk dv", x): 4 for x in ANYWHERE}
"""Blocks that tell of others: up to the first head of the second group, or up to the first list."""
RESULTS = {
    "classify": ("classes",), "key lists": ("key_lists", "key_counts"), "states": ("states", "q_means", "k_means"),
    "attend": ("o", "lse"), "rows backward": ("dq", "dsums"), "keys backward": ("dk", "dv"), "dq": ("dq",),
    "dk dv": ("dk", "dv"), "project": ("parts",),
}  # fmt: skip


def differs(found: np.ndarray, before: np.ndarray, right: np.ndarray, whole: bool) -> bool:
    """Whether a result is wrong: all of it, or what was written of it where only some blocks have run."""
    written = (
        np.ones(found.shape, bool) if whole else found.view(f"u{found.itemsize}") != before.view(f"u{found.itemsize}")
    )
    return not np.array_equal(found[written], right[written])


@pytest.mark.parametrize(("kernel", "fault"), planted())
def test_a_planted_fault_is_caught(kernel, fault):
    good = solved({"group": "groups", "columns": "columns"}.get(fault, "paper"))
    launch = next(x for x in launches_of(good) if x.kernel.name == f"sparsity.sla {kernel}")
    grid = launch.grid
    blocks = min(grid, ENOUGH.get((kernel, fault), 1 if fault in ANYWHERE else grid))
    launch = replace(launch, kernel=broken_kernel(good, kernel, fault), grid=blocks)
    for seed in range(2 if fault in RACES else 1):
        before, after = good.before[kernel], good.after[kernel]
        known = {**copied(good), **{name: x.copy() for name, x in before.items()}}
        try:
            run(launch, replace(good, known=known), seed)
            found = [name for name, x in after.items() if differs(known[name], before[name], x, whole=blocks == grid)]
        except Fault as caught:
            found = [caught.name]
        assert found, f"{fault} of {kernel} was not caught with seed {seed}"


def test_a_mask_that_is_one_key_off_is_caught():
    problem = solved("groups")
    for launch in launches_of(problem):
        name = launch.kernel.name.removeprefix("sparsity.sla ")
        if name in ("attend", "dq", "dk dv"):
            known = {**copied(problem), **{x: array.copy() for x, array in problem.before[name].items()}}
            run(replace(launch, kernel=broken_kernel(problem, name, "causal")), replace(problem, known=known))
            assert all(not np.array_equal(known[x], array) for x, array in problem.after[name].items()), name
