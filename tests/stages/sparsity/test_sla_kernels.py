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
from flashnumba.stages.flash_forward.mma import make_mma
from flashnumba.stages.heads import Launch, Shape
from flashnumba.stages.sparsity import (
    sla,
    sla_backward,
    sla_features,
    sla_forward,
    sla_linear_backward,
    sla_lists,
    sla_states,
)
from flashnumba.stages.sparsity import sla_reference as reference
from tests.stages.sparsity import sla_gather

GRADIENTS = ("dq", "dk", "dv", "dproj")
SHARES = (0.5, 0.25)
"""Of four tiles two critical ones, a marginal and a negligible one."""


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
) -> Problem:  # fmt: skip
    rng = np.random.default_rng(5)
    q, k, v, do = (rng.standard_normal((1, 1, rows, d)).astype(dtype) for rows in (m, n, n, m))
    proj = (rng.standard_normal((d, d)) / 8).astype(dtype) if projected else None
    shape = Shape(np.dtype(dtype).name, 1, 1, 1, m, n, d, causal, arch="90a")
    options = sla.check_options(*shares, feature_map, form, None, projected)
    how = {"feature_map": feature_map, "form": form, "causal": causal}
    classes = reference.classify(q, k, *shares, causal)
    low, low_gradients = reference.low_precision(q, k, v, classes, proj, do, **how)
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
    args = tuple(problem.known[name] for name in launch.args)
    if sla_gather.is_gather(launch.kernel) and launch.grid > 4:
        sla_gather.gather(launch.kernel, *(x.view(element_dtype(problem.shape.element)) for x in args))
        return
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


def copies(problem: Problem, kernel: str) -> dict[str, np.ndarray]:
    return {name: problem.known[name].copy() for name in RESULTS.get(kernel, ())}


CASES = {
    "paper": {},
    "all, elu, bfloat16, causal": {
        "dtype": ml_dtypes.bfloat16, "feature_map": "elu", "form": "all", "causal": True, "projected": False, "m": 150,
        "n": 150,
    },
    "rest, relu": {"feature_map": "relu", "form": "rest", "m": 64},
}  # fmt: skip


@cache
def solved(name: str = "paper") -> Problem:
    """A problem with all that kernels leave; faults are planted in them."""
    return solve(make(**CASES[name]))


# -- results -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", CASES)
def test_forward_and_gradients(name):
    problem = solved(name)
    assert np.array_equal(problem.known["classes"], problem.classes)
    assert {0, -1} & set(problem.classes.flat) and (problem.classes > 0).any()
    names = GRADIENTS if problem.options.projected else GRADIENTS[:3]
    assert problem.check(("o", "o_s", "o_l", "lse", *names)) == ""


@pytest.mark.parametrize("kernel", ["attend", "rows backward", "dk dv"])
def test_the_same_bits_whatever_the_order_of_threads(kernel):
    good = solved()
    known = dict(good.known) | {name: x.copy() for name, x in good.before[kernel].items()}
    run(next(x for x in launches_of(good) if x.kernel.name == f"sparsity.sla {kernel}"), replace(good, known=known), 3)
    assert all(np.array_equal(known[name], x) for name, x in good.after[kernel].items())


def test_all_critical_is_dense_attention_bit_for_bit():
    problem = make(shares=(1.0, 0.0))
    plan = sla.plan_forward(problem.shape, problem.options)
    for launch in plan.launches:
        run(launch, problem)
    assert (problem.known["counts"] == 4).all()
    tiles = sla_forward.forward_tiles(64)
    o, lse = nan(problem.known["o"].shape, "float16"), nan(problem.known["lse"].shape, "float32")
    known = {**problem.known, "o": o, "lse": lse}
    args = tuple(known[name] for name in heads.ARGUMENTS)
    launcher.launch(make_mma(tiles, "float16"), 2, tiles.threads, args, shared=tiles.shared, machine="emulator")
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
    kernel = sla_states.make_gather("float16", transposed, broken=fault)
    launch = Launch(kernel, 2, sla_states.GATHER_THREADS, sla_states.GATHER_SHARED, ("weights", "states", "sums"))
    known = {"weights": weights, "states": states, "sums": sums}
    problem = replace(solved(), known=known)
    if not fault:
        run(launch, problem)
        assert_close(sums, exact @ states.astype(np.float64))
        return
    for seed in range(3 if fault in ("wait", "barrier", "slot", "reuse") else 1):
        try:
            run(launch, problem, seed)
            found = not compare(sums, exact @ states[:, :, :depth].astype(np.float64)).ok
        except Fault:
            found = True
        assert found, f"{fault} was not caught with seed {seed}"


def test_equal_guesses_are_taken_in_order():
    """Means of small whole numbers: many guesses are the same, also at both limits, and some tiles are hidden."""
    rng = np.random.default_rng(0)
    q, k = (np.repeat(rng.integers(-1, 2, (1, 1, tiles, 64)), 64, 2).astype(np.float16) for tiles in (2, 40))
    for causal in (False, True):
        classes, means = np.full((1, 1, 2, 40), 77, np.int8), []
        for x in (q, k):
            means.append(x[:, :, ::64].astype(np.float32).swapaxes(-1, -2).copy())
        args = (*means, classes, *(np.int64(x) for x in (128, 2560, 300_000, 300_000)), np.int32(causal))
        launcher.launch(sla_lists.make_classify(64, 4), 1, 128, args, shared=640, machine="emulator")
        expected = reference.classify(q, k, 0.3, 0.3, causal)
        assert np.array_equal(classes, expected)
        wrong = classes.copy()
        args = (*means, wrong, *args[3:])
        launcher.launch(sla_lists.make_classify(64, 2, broken="ties"), 1, 64, args, shared=320, machine="emulator")
        assert not np.array_equal(wrong, expected)


# -- planted faults ----------------------------------------------------------------------------------------------------
def planted() -> list[tuple[str, str]]:
    faults = {
        "features": ("barrier", "tail"), "classify": ("wait",), "states": ("wait", "barrier", "reuse", "swizzle"),
        "attend": [x for x in sla_forward.ATTEND_FAULTS if x != "causal"], "combine": sla_forward.COMBINE_FAULTS,
        "rows backward": sla_linear_backward.FAULTS, "keys backward": ("barrier", "wait"),
        "dq": [x for x in sla_backward.FAULTS if x != "causal"],
        "dk dv": [x for x in sla_backward.FAULTS if x != "causal"], "project": ("barrier", "wait"),
    }  # fmt: skip
    return [(kernel, fault) for kernel, names in faults.items() for fault in names]


def broken_kernel(name: str, fault: str, element: str = "float16") -> Any:
    of_rows, of_keys = sla_backward.dq_tiles(64, "90a"), sla_backward.dkdv_tiles(64, "90a")
    makers = {
        "features": lambda: sla_features.make_features(64, element, "softmax", broken=fault),
        "classify": lambda: sla_lists.make_classify(64, 8, broken=fault),
        "states": lambda: sla_states.make_states(64, element, broken=fault),
        "attend": lambda: sla_forward.make_attend(sla_forward.forward_tiles(64), element, broken=fault),
        "combine": lambda: sla_forward.make_combine(64, element, broken=fault),
        "rows backward": lambda: sla_linear_backward.make_rows(64, element, "softmax", broken=fault),
        "keys backward": lambda: sla_linear_backward.make_keys(64, element, "softmax", broken=fault),
        "dq": lambda: sla_backward.make_dq(of_rows, element, broken=fault),
        "dk dv": lambda: sla_backward.make_dkdv(of_keys, element, broken=fault),
        "project": lambda: sla_linear_backward.make_project(64, element, broken=fault),
    }
    return makers[name]()


RESULTS = {
    "features": ("q_means",), "classify": ("classes",), "states": ("states",), "attend": ("o_s", "lse"),
    "combine": ("o",), "rows backward": ("dq", "dsums"), "keys backward": ("dk", "dv"), "dq": ("dq",),
    "dk dv": ("dk", "dv"), "project": ("parts",),
}  # fmt: skip


@pytest.mark.parametrize(("kernel", "fault"), planted())
def test_a_planted_fault_is_caught(kernel, fault):
    good = solved()
    launch = next(x for x in launches_of(good) if x.kernel.name == f"sparsity.sla {kernel}")
    for seed in range(2 if fault in ("barrier", "state_barrier", "wait", "reuse") else 1):
        known = dict(good.known) | {name: x.copy() for name, x in good.before[kernel].items()}
        try:
            run(replace(launch, kernel=broken_kernel(kernel, fault)), replace(good, known=known), seed)
            found = [name for name, x in good.after[kernel].items() if not np.array_equal(known[name], x)]
        except Fault as caught:
            found = [caught.name]
        assert found, f"{fault} of {kernel} was not caught with seed {seed}"


def test_a_mask_that_is_one_key_off_is_caught():
    problem = solved("all, elu, bfloat16, causal")
    for launch in launches_of(problem):
        name = launch.kernel.name.removeprefix("sparsity.sla ")
        if name in ("attend", "dq", "dk dv"):
            known = dict(problem.known) | {x: array.copy() for x, array in problem.before[name].items()}
            run(replace(launch, kernel=broken_kernel(name, "causal", "bfloat16")), replace(problem, known=known))
            assert all(not np.array_equal(known[x], array) for x, array in problem.after[name].items()), name
