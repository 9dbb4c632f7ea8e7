"""Host side of SLA: check the arguments, launch the kernels one after the other, keep what the gradients need.

Forward: ``features`` of q and of k, ``classify``, ``row lists``, ``states``, ``gather``, ``attend``, ``combine``.
Backward: ``key lists``, ``rows``, ``gather`` transposed, ``keys``, ``dq``, ``dk dv``, ``project``, ``add up``. They are
on tensor cores where they multiply tiles, float16 or bfloat16 in and float32 inside, with no atomics: the same bits
every time.

Beside its inputs and o a forward keeps phi of q and of k, O^s and O^l (of their sizes), the sums H (D + 1 numbers of 16
bits a row of q for tiles of 64: twice as many bytes as q at D = 128), five numbers a row, and the map.

Source: as :mod:`flashnumba.stages.sparsity.sla_reference`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from flashnumba.machine import launcher
from flashnumba.machine.arrays import Described, describe, empty_like_kind
from flashnumba.machine.numba import types
from flashnumba.stages import heads
from flashnumba.stages.heads import Launch, Plan, Shape
from flashnumba.stages.host import check_machine, finish, library_stream, machine_of, refuse_gradients
from flashnumba.stages.sparsity import sla_backward, sla_forward, sla_linear_backward, sla_states
from flashnumba.stages.sparsity.sla_features import THREADS, make_features
from flashnumba.stages.sparsity.sla_lists import (
    KEY_THREADS,
    classify_warps,
    make_classify,
    make_key_lists,
    make_row_lists,
)
from flashnumba.stages.sparsity.sla_reference import BLOCK, EPS, FEATURES, FORMS, MILLION, mean_of
from flashnumba.tiles.forward import tier

if TYPE_CHECKING:
    from flashnumba.machine.compiler import CompileCase

__all__ = ["DIMENSIONS", "KEPT", "Kept", "Options", "backward", "check_options", "compile_cases", "forward",
           "plan_backward", "plan_forward", "signature"]  # fmt: skip

DIMENSIONS = (64, 128)
"""Head dimensions that kernels take."""
CLAIMED = ("90a", "80", "86", "89", "100a", "120a")
"""What kernels are compiled for."""
OF_SM_90 = ("sparsity.sla attend", "sparsity.sla dk dv")
"""Those whose tiles are others on sm_90, at D = 128."""
PARTS = 264
"""Blocks that share out dproj: two for each multiprocessor of an H200."""
KEPT = (
    "q", "k", "v", "proj", "o_s", "o_l", "phi_q", "phi_k", "lse", "origin", "bias", "share", "classes", "lists",
    "counts", "weights", "sums",
)  # fmt: skip
"""What the forward keeps for the gradients, by name."""
OF_INPUT = ("q", "k", "v", "do", "o", "dq", "dk", "dv")
SCALARS = {
    "scale": types.float32, "causal": types.int32, "rows": types.int64, "keys": types.int64, "critical": types.int64,
    "negligible": types.int64, "unit": types.float32, "eps": types.float32,
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """How SLA is computed, checked by :func:`check_options`.

    Attributes:
        critical, negligible: shares of a row's tiles.
        feature_map, form, eps: as :mod:`~flashnumba.stages.sparsity.sla_reference` says them.
        projected: there is a projection; without one it is the identity.
    """

    critical: float = 0.05
    negligible: float = 0.10
    feature_map: str = "softmax"
    form: str = "paper"
    eps: float = 0.0
    projected: bool = True


def check_options(
    critical: Any, negligible: Any, feature_map: Any, form: Any, eps: Any, projected: bool
) -> Options:  # fmt: skip
    """The options.

    Raises:
        TypeError, ValueError: one that does not fit.
    """
    for name, value in (("critical", critical), ("negligible", negligible)):
        if not isinstance(value, Real) or isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}; it must be a number from 0 to 1")
        if not 0 <= value <= 1:
            raise ValueError(f"{name} is {value}; it must be from 0 to 1, a share of a row's tiles")
    for name, value, known in (("feature_map", feature_map, FEATURES), ("form", form, FORMS)):
        if value not in known:
            raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(known)}")
    if eps is None:
        eps = EPS[form]
    if not isinstance(eps, Real) or isinstance(eps, bool):
        raise TypeError(f"eps is {eps!r}; it must be a number from 0 on, or None")
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps is {eps}; it must be finite and not negative")
    return Options(float(critical), float(negligible), feature_map, form, float(eps), projected)


# -- plans -------------------------------------------------------------------------------------------------------------
def sizes(shape: Shape) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Elements and shape of everything that kernels leave for one another, by name."""
    b, h, m, n, d, element = shape.batch, shape.heads, shape.m, shape.n, shape.d, shape.element
    i, j = tiles_of(shape)
    parts = min(PARTS, b * h * i)
    return {
        **dict.fromkeys(("phi_q", "o_s", "o_l"), (element, (b, h, m, d))), "phi_k": (element, (b, h, n, d)),
        "q_means": ("float32", (b, h, d, i)), "k_means": ("float32", (b, h, d, j)), "classes": ("int8", (b, h, i, j)),
        "lists": ("int32", (b, h, i, j)), "counts": ("int32", (b, h, i)), "key_lists": ("int32", (b, h, j, i)),
        "key_counts": ("int32", (b, h, j)), "weights": (element, (b, h, i, -(-j // 8) * 8)),
        **dict.fromkeys(("states", "dstates"), (element, (b, h, j, d * (d + 1)))),
        **dict.fromkeys(("sums", "dsums"), (element, (b, h, i, d * (d + 1)))),
        **dict.fromkeys(("lse", "origin", "bias", "share", "delta"), ("float32", (b, h, m))),
        "parts": ("float32", (parts, d, d)), "dproj": ("float32", (d, d)), "proj": (element, (d, d)),
    }  # fmt: skip


def tiles_of(shape: Shape) -> tuple[int, int]:
    """Row tiles and key tiles of a head."""
    return -(-shape.m // BLOCK), -(-shape.n // BLOCK)


def gather_blocks(rows: int, shape: Shape) -> int:
    across = -(-shape.d * (shape.d + 1) // sla_states.GATHER_TILE)
    return -(-rows // sla_states.GATHER_TILE) * across * shape.batch * shape.heads


def plan_forward(shape: Shape, options: Options = Options(), *, given: bool = False) -> Plan:
    """The forward; ``given``: the map is the caller's."""
    d, element, arch, all_heads = shape.d, shape.element, tier(shape.arch), shape.batch * shape.heads
    i, j = tiles_of(shape)
    features = make_features(d, element, options.feature_map, arch)
    attend = sla_forward.forward_tiles(d, shape.arch)
    launches = [
        Launch(features, i * all_heads, THREADS, 0, ("q", "phi_q", "q_means")),
        Launch(features, j * all_heads, THREADS, 0, ("k", "phi_k", "k_means")),
    ]
    if not given:
        of_map = ("q_means", "k_means", "classes", "rows", "keys", "critical", "negligible", "causal")
        warps = classify_warps(j)
        blocks = -(-i // warps) * all_heads
        launches.append(Launch(make_classify(d, warps), blocks, 32 * warps, 4 * j * warps, of_map))
    launches += [
        Launch(
            make_row_lists(element, options.form, arch), i * all_heads, 32, 0,
            ("classes", "lists", "counts", "weights", "unit"),
        ),
        Launch(
            sla_states.make_states(d, element, arch), j * all_heads, 128, sla_states.states_shared(d),
            ("phi_k", "v", "states"),
        ),
        Launch(
            sla_states.make_gather(element, False, arch), gather_blocks(i, shape), sla_states.GATHER_THREADS,
            sla_states.GATHER_SHARED, ("weights", "states", "sums"),
        ),
        Launch(
            sla_forward.make_attend(attend, element, arch), i * all_heads, attend.threads, attend.shared,
            ("q", "k", "v", "o_s", "lse", "origin", "bias", "lists", "counts", "scale", "causal"),
        ),
        Launch(
            sla_forward.make_combine(d, element, options.projected, arch), i * all_heads, 128,
            sla_forward.combine_shared(d), ("phi_q", "sums", "proj", "o_s", "o_l", "o", "share", "eps"),
        ),
    ]  # fmt: skip
    return Plan(tuple(launches), scratch_of(shape, launches))


def plan_backward(shape: Shape, options: Options = Options()) -> Plan:
    """The gradients, from what the forward has kept."""
    d, element, arch, all_heads = shape.d, shape.element, tier(shape.arch), shape.batch * shape.heads
    i, j = tiles_of(shape)
    of_rows, of_keys = sla_backward.dq_tiles(d, shape.arch), sla_backward.dkdv_tiles(d, shape.arch)
    statistics = ("delta", "origin", "bias")
    key_blocks, parts, linear = -(-j // KEY_THREADS) * all_heads, min(PARTS, i * all_heads), sla_linear_backward
    launches = [
        Launch(make_key_lists(), key_blocks, KEY_THREADS, 0, ("classes", "key_lists", "key_counts")),
        Launch(
            linear.make_rows(d, element, options.feature_map, options.projected, arch), i * all_heads, 128,
            linear.rows_shared(d), ("do", "o_s", "o_l", "phi_q", "sums", "proj", "share", "dq", "dsums", "delta"),
        ),
        Launch(
            sla_states.make_gather(element, True, arch), gather_blocks(j, shape), sla_states.GATHER_THREADS,
            sla_states.GATHER_SHARED, ("weights", "dsums", "dstates"),
        ),
        Launch(
            linear.make_keys(d, element, options.feature_map, arch), j * all_heads, 128, linear.keys_shared(d),
            ("v", "phi_k", "dstates", "dk", "dv"),
        ),
        Launch(
            sla_backward.make_dq(of_rows, element, arch), i * all_heads, of_rows.threads, of_rows.shared,
            ("q", "k", "v", "do", "dq", *statistics, "lists", "counts", "scale", "causal"),
        ),
        Launch(
            sla_backward.make_dkdv(of_keys, element, arch), j * all_heads, of_keys.threads, of_keys.shared,
            ("q", "k", "v", "do", "dk", "dv", *statistics, "key_lists", "key_counts", "scale", "causal"),
        ),
    ]  # fmt: skip
    if options.projected:
        launches += [
            Launch(linear.make_project(d, element, arch), parts, 128, linear.project_shared(d), ("o_l", "do", "parts")),
            Launch(linear.make_add_up(), d * d // 128, 128, 0, ("parts", "dproj")),
        ]
    return Plan(tuple(launches), scratch_of(shape, launches))


def scratch_of(shape: Shape, launches: list[Launch]) -> dict[str, tuple[int, ...]]:
    known = sizes(shape)
    return {name: known[name][1] for launch in launches for name in launch.args if name in known}


def signature(shape: Shape, args: tuple[str, ...]) -> tuple[Any, ...]:
    """Numba types of a kernel's arguments: the caller's arrays of any strides, the others packed."""
    plain = {"float16": types.float16, "bfloat16": types.uint16}[shape.element]
    known = {name: types.Array(plain, 4, "A") for name in OF_INPUT} | SCALARS
    for name, (kind, size) in sizes(shape).items():
        of = plain if kind == shape.element else getattr(types, kind)
        known[name] = types.Array(of, len(size), "A" if name == "proj" else "C")
    return tuple(known[a] for a in args)


# -- a problem ---------------------------------------------------------------------------------------------------------
@dataclass
class Kept:
    """A forward's problem and what it leaves: arrays by name, of the caller's kind."""

    shape: Shape
    options: Options
    scale: float
    machine: str
    device: int | None
    found: Described
    arrays: dict[str, Any]

    def launch(self, plan: Plan, known: dict[str, Any], stream: Any = None) -> None:
        """Launch a plan, with new arrays for what of its scratch is not known yet."""
        with library_stream(self.found, stream):
            self.bind(plan, known, stream)()

    def bind(self, plan: Plan, known: dict[str, Any], stream: Any = None) -> Callable[[], None]:
        """What launches a plan again and again, with the same arrays; ``known`` gets those of its scratch too."""
        shape, unit = self.shape, mean_of(tiles_of(self.shape)[1])
        known |= {
            "scale": np.float32(self.scale), "causal": np.int32(shape.causal), "rows": np.int64(shape.m),
            "keys": np.int64(shape.n), "critical": np.int64(round(self.options.critical * MILLION)),
            "negligible": np.int64(round(self.options.negligible * MILLION)), "unit": np.float32(unit),
            "eps": np.float32(self.options.eps * unit),
        }  # fmt: skip
        of = sizes(shape)
        for name, size in plan.scratch.items():
            if name not in known:
                known[name] = empty_like_kind(self.arrays["q"], size, of[name][0])
        steps = [
            (self.prepared(launch), launch.grid, launch.threads, tuple(known[name] for name in launch.args))
            for launch in plan.launches
        ]

        def call() -> None:
            for ready, grid, threads, args in steps:
                ready(grid, threads, args, stream)

        return call

    def prepared(self, launch: Launch) -> Any:
        """A launch, compiled once for each kernel and device."""
        key = ("sla", launch.args, self.shape.element, launch.shared, self.machine, self.device)
        cache = launch.kernel.cache
        if key not in cache:
            wanted = signature(self.shape, launch.args)
            cache[key] = launcher.prepare(
                launch.kernel, wanted, shared=launch.shared, machine=self.machine, device=self.device
            )
        return cache[key]


def forward(
    q: Any, k: Any, v: Any, proj: Any = None, options: Options = Options(), *, causal: bool = False,
    scale: float | None = None, classes: Any = None, machine: str = "auto", stream: Any = None,
) -> tuple[Any, Kept]:  # fmt: skip
    """(o, what the gradients need) by kernels.

    Args:
        q, k, v: ``[B, H, M, D]`` and ``[B, H, N, D]``, or with fewer leading axes, float16 or bfloat16; D is 64 or 128,
            columns are packed and rows lie at multiples of 16 bytes.
        proj: ``[D, D]`` of their type, packed columns; None without one.
        classes: the map, int8 ``[B, H, row tiles, key tiles]`` of q's kind and packed; None: it is computed.
        causal, scale, machine, stream: as :func:`flashnumba.stages.heads.forward`; the scale is above 0.

    Raises:
        TypeError, ValueError: an argument does not fit, before anything is launched.
    """
    check_machine(machine)
    named = {"q": q, "k": k, "v": v} | ({} if proj is None else {"proj": proj})
    refuse_gradients(**named)
    found = {name: describe(x, name) for name, x in named.items()}
    shape = check(found, causal)
    scale = heads.check_scale(scale, shape.d)
    if scale <= 0:
        raise ValueError(f"scale is {scale}; SLA's kernels take one above 0")
    of_q = found["q"]
    machine, arch = machine_of(machine, of_q, "q")
    shape = replace(shape, arch=arch)
    if (shape.element == "bfloat16" and tier(arch) == "75") or int(arch.rstrip("a")) < 80:
        raise ValueError(f"q is on sm_{arch}; SLA's kernels need sm_80 or later")
    options = replace(options, projected=proj is not None)
    with library_stream(of_q, stream):
        o = empty_like_kind(q, of_q.shape)
    views = {name: heads._view(x, found[name], 4) for name, x in named.items() if name != "proj"}
    if proj is not None:
        views["proj"] = proj
    if classes is not None:
        views["classes"] = check_classes(classes, shape, of_q)
    views["o"] = heads._view(o, replace(describe(o, "o"), readonly=False), 4)
    kept = Kept(shape, options, scale, machine, of_q.device, of_q, {"q": q})
    kept.launch(plan_forward(shape, options, given=classes is not None), views, stream)
    kept.arrays = {name: views[name] for name in KEPT if name in views} | {"q": q, "k": k, "v": v}
    return finish(o, of_q, stream), kept


def backward(do: Any, kept: Kept, stream: Any = None) -> tuple[Any, Any, Any, Any]:
    """(dq, dk, dv, dproj): new packed arrays as q, k and v; dproj float32 ``[D, D]``, None without a projection.

    Raises:
        TypeError, ValueError: do is not as q, or lies elsewhere.
    """
    refuse_gradients(do=do)
    of_do, of_q = describe(do, "do"), kept.found
    if of_do.element != of_q.element:
        raise TypeError(f"do has elements of type {of_do.element}; they must be q's, {of_q.element}")
    if of_do.shape != of_q.shape or of_do.device != of_q.device:
        raise ValueError(f"do has shape {of_do.shape} on {of_do.device}; it must be as q: {of_q.shape}, {of_q.device}")
    if heads.widest(of_do) < 16:
        raise ValueError(f"do has strides {of_do.strides}; SLA's kernels take packed columns and rows at 16 bytes")
    arrays = kept.arrays
    with library_stream(of_q, stream):
        results = [empty_like_kind(arrays[name], describe(arrays[name], name).shape) for name in "qkv"]
    known = {name: heads._view(arrays[name], describe(arrays[name], name), 4) for name in "qkv"}
    known |= {name: arrays[name] for name in KEPT if name in arrays and name not in known}
    known["do"] = heads._view(do, of_do, 4)
    for name, result in zip(("dq", "dk", "dv"), results, strict=True):
        known[name] = heads._view(result, replace(describe(result, name), readonly=False), 4)
    kept.launch(plan_backward(kept.shape, kept.options), known, stream)
    dq, dk, dv = (finish(result, of_q, stream) for result in results)
    return dq, dk, dv, finish(known["dproj"], of_q, stream) if kept.options.projected else None


def check(found: dict[str, Described], causal: bool, *, kernels: bool = True) -> Shape:
    """The shape of a problem that SLA takes, and its ``kernels``.

    Raises:
        TypeError, ValueError: as :func:`flashnumba.stages.heads.check`, and for what these kernels do not take.
    """
    q = found["q"]
    shape = heads.check(q, found["k"], found["v"], causal=causal)
    if shape.kv_heads != shape.heads:
        raise ValueError(f"q has {shape.heads} heads and k {shape.kv_heads}; SLA takes as many of either")
    if 0 in (shape.batch, shape.heads, shape.m, shape.n):
        raise ValueError(f"q has shape {q.shape} and k {found['k'].shape}; SLA takes at least one row and one key")
    if kernels and shape.element not in ("float16", "bfloat16"):
        raise TypeError(f"q has elements of type {q.element}; SLA's kernels take float16 and bfloat16")
    if kernels and shape.d not in DIMENSIONS:
        raise ValueError(f"q has shape {q.shape}; SLA's kernels take a head dimension of 64 or 128")
    if kernels and shape.vector < 16:
        raise ValueError("q, k and v must have packed columns and rows at multiples of 16 bytes; pass them contiguous")
    if "proj" in found:
        proj = found["proj"]
        if proj.element != shape.element:
            raise TypeError(f"proj has elements of type {proj.element}; they must be q's, {shape.element}")
        if proj.shape != (shape.d, shape.d) or proj.device != q.device:
            raise ValueError(f"proj has shape {proj.shape}; it must be {(shape.d, shape.d)}, in one place with q")
        if kernels and heads.widest(proj) < 16:
            raise ValueError(f"proj has strides {proj.strides}; it must be contiguous")
    return shape


def check_classes(classes: Any, shape: Shape, of_q: Described) -> Any:
    """A map of the caller's, as kernels take it."""
    found, wanted = describe(classes, "classes"), (shape.batch, shape.heads, *tiles_of(shape))
    if found.element != "int8" or found.shape != wanted or found.device != of_q.device:
        raise ValueError(
            f"classes is {found.element} of shape {found.shape}; it must be int8 of shape {wanted}, in one place with q"
        )
    return classes


def compile_cases() -> Iterator[CompileCase]:
    """Kernels as they are launched, for the compiler's tables and gates: all of them at D = 128, and those whose
    registers depend on D at 64."""
    from flashnumba.machine.compiler import CompileCase

    def cases(element: str, d: int, chosen_for: tuple[str, ...], only: tuple[str, ...] = ()) -> Iterator[CompileCase]:
        shape = Shape(element, 1, 1, 1, 4096, 4096, d, arch=chosen_for[0])
        for launch in (*plan_forward(shape).launches[1:], *plan_backward(shape).launches):
            name = launch.kernel.name
            if (only and name not in only) or (not only and name in OF_SM_90):
                continue
            title = f"{name} {element} d {d}, tiles for sm_{chosen_for[0]}"
            wanted = signature(shape, launch.args)
            yield CompileCase(title, launch.kernel, wanted, launch.threads, launch.shared, chosen_for=chosen_for)

    yield from cases("float16", 128, CLAIMED)
    yield from cases("float16", 128, ("90a",), OF_SM_90)
    yield from cases("bfloat16", 128, ("90a",), OF_SM_90)
    yield from cases("float16", 128, tuple(arch for arch in CLAIMED if arch != "90a"), OF_SM_90)
    yield from cases("float16", 64, CLAIMED, (*OF_SM_90, "sparsity.sla dq", "sparsity.sla rows backward"))
