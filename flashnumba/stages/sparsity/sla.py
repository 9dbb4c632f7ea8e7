"""Host side of SLA: check the arguments, launch the kernels one after the other, keep what the gradients need.

Which kernels that are :mod:`flashnumba.stages.sparsity.sla_plans` says. They are on tensor cores where they multiply
tiles, float16 or bfloat16 in and float32 inside, with no atomics: the same bits every time.

Beside its inputs and o a forward keeps the sums H (W (W + 1) numbers of 16 bits for 64 rows, of tiles of W columns, 64
or 128: twice as many bytes as q at D = 128), four numbers a row, and the map.

Source: as :mod:`flashnumba.stages.sparsity.sla_reference`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import numpy as np

from flashnumba.machine import launcher
from flashnumba.machine.arrays import Described, describe, empty_like_kind
from flashnumba.stages import heads
from flashnumba.stages.again import Recipe, Recipes, kind, of_sla
from flashnumba.stages.heads import Launch, Plan, Shape
from flashnumba.stages.host import check_machine, finish, library_stream, machine_of, refuse_gradients
from flashnumba.stages.sparsity import sla_gather
from flashnumba.stages.sparsity.sla_copies import Copies
from flashnumba.stages.sparsity.sla_pieces import DIMENSIONS
from flashnumba.stages.sparsity.sla_plans import (
    DEFAULT,
    Options,
    plan_backward,
    plan_forward,
    signature,
    sizes,
    tiles_of,
)
from flashnumba.stages.sparsity.sla_reference import EPS, FEATURES, FORMS, MILLION, mean_of

__all__ = ["KEPT", "Kept", "Options", "backward", "check", "check_options", "forward", "plan_backward",
           "plan_forward", "signature", "sizes", "tiles_of"]  # fmt: skip

KEPT = (
    "q", "k", "v", "proj", "o", "lse", "origin", "bias", "share", "classes", "lists", "counts", "weights", "sums",
)  # fmt: skip
"""What the forward keeps for the gradients, by name."""


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

    def bind(self, plan: Plan, known: dict[str, Any], stream: Any = None) -> Callable[[], None]:
        """What launches a plan again and again, with the same arrays; ``known`` gets all arguments, and new arrays for
        what of the plan's scratch is not known yet."""
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
        known |= sla_gather.arguments(shape, known, {name for launch in plan.launches for name in launch.args})
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
    q: Any, k: Any, v: Any, proj: Any = None, options: Options = DEFAULT, *, causal: bool = False,
    scale: float | None = None, classes: Any = None, machine: str = "auto", stream: Any = None,
) -> tuple[Any, Kept]:  # fmt: skip
    """(o, what the gradients need) by kernels.

    Args:
        q, k, v: ``[B, H, M, D]`` and ``[B, Hkv, N, D]``, or with fewer leading axes, float16 or bfloat16; Hkv divides
            H, D is 1 to 128. They may have any strides; what is copied :mod:`flashnumba.stages.sparsity.sla_copies`
            says.
        proj: ``[D, D]`` of their type; None without one.
        classes: the map, int8 ``[B, H, row tiles, key tiles]`` of q's kind and packed; None: it is computed.
        causal, scale, machine, stream: as :func:`flashnumba.stages.heads.forward`; the scale is above 0.

    Raises:
        TypeError, ValueError: an argument does not fit, before anything is launched.
    """
    key = key_of(q, k, v, proj, classes, options, causal, scale, machine, stream)
    again = RECIPES.get(key)
    if again is not None:
        return again(q, k, v, proj, classes)
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
    if int(arch.rstrip("a")) < 80:
        raise ValueError(f"q is on sm_{arch}; SLA's kernels need sm_80 or later")
    options = replace(options, projected=proj is not None)
    if classes is not None:
        check_classes(classes, shape, of_q)
    kept = Kept(shape, options, scale, machine, of_q.device, of_q, {"q": q})
    plan = plan_forward(shape, options, given=classes is not None)
    with library_stream(of_q, stream):
        o, copies = empty_like_kind(q, of_q.shape), Copies(q, machine, of_q.device, stream)
        views = {name: copies.given(x, found[name], 2 if name == "proj" else 4) for name, x in named.items()}
        views |= {"o": copies.result(o)} | ({} if classes is None else {"classes": classes})
        kept.bind(plan, views, stream)()
        copies.hand_back()
    if key and not copies.made:
        RECIPES.add(key, remember(kept, plan, views, proj is not None, classes is not None))
    given = named | {"o": o}
    kept.arrays = {name: given.get(name, views.get(name)) for name in KEPT if name in views}
    return finish(o, of_q, stream), kept


def key_of(
    q: Any, k: Any, v: Any, proj: Any, classes: Any, options: Options, causal: Any, scale: Any, machine: Any,
    stream: Any,
) -> Any:  # fmt: skip
    """What the launches of a forward depend on; None for arguments that are looked at each time."""
    kinds = kind(q), kind(k), kind(v), proj is None or kind(proj), classes is None or kind(classes)
    if None in kinds or stream is not None or machine not in ("auto", "cuda") or causal.__class__ is not bool:
        return None
    if scale is not None and scale.__class__ is not float:
        return None
    return kinds, options, causal, scale


@dataclass(frozen=True)
class Again:
    """A forward on torch tensors like those of an earlier one."""

    recipe: Recipe
    kept: Kept
    names: tuple[str, ...]

    def __call__(self, q: Any, k: Any, v: Any, proj: Any, classes: Any) -> tuple[Any, Kept]:
        given = {"q": q, "k": k, "v": v, "proj": proj, "classes": classes}
        given = {name: x for name, x in given.items() if x is not None}
        made = dict(zip(self.names, self.recipe(*given.values()), strict=True))
        return made["o"], replace(self.kept, arrays=given | made)


def remember(kept: Kept, plan: Plan, known: dict[str, Any], projected: bool, mapped: bool) -> Again:
    """What launches a plan again that was launched with the arguments ``known``."""
    given = ("q", "k", "v", *(("proj",) if projected else ()), *(("classes",) if mapped else ()))
    names = tuple(name for name in KEPT if name not in given and name in known and name != "proj")
    return Again(of_sla(kept, plan, known, given, names), replace(kept, arrays={}), names)


RECIPES = Recipes()


def backward(do: Any, kept: Kept, stream: Any = None) -> tuple[Any, Any, Any, Any]:
    """(dq, dk, dv, dproj): new packed arrays as q ``[B, H, M, D]``, k and v ``[B, Hkv, N, D]``, the latter two summed
    over heads that share one; dproj float32 ``[D, D]``, None without a projection.

    Raises:
        TypeError, ValueError: do is not as q, or lies elsewhere.
    """
    refuse_gradients(do=do)
    of_do, of_q = describe(do, "do"), kept.found
    if of_do.element != of_q.element:
        raise TypeError(f"do has elements of type {of_do.element}; they must be q's, {of_q.element}")
    if of_do.shape != of_q.shape or of_do.device != of_q.device:
        raise ValueError(f"do has shape {of_do.shape} on {of_do.device}; it must be as q: {of_q.shape}, {of_q.device}")
    arrays, plan = kept.arrays, plan_backward(kept.shape, kept.options)
    with library_stream(of_q, stream):
        results = [empty_like_kind(arrays[name], describe(arrays[name], name).shape) for name in "qkv"]
        copies, known = Copies(arrays["q"], kept.machine, kept.device, stream), dict(arrays)
        for name in ("q", "k", "v", "o", *(("proj",) if "proj" in arrays else ())):
            known[name] = copies.given(arrays[name], describe(arrays[name], name), 2 if name == "proj" else 4)
        known["do"] = copies.given(do, of_do)
        known |= {name: copies.result(x) for name, x in zip(("dq", "dk", "dv"), results, strict=True)}
        kept.bind(plan, known, stream)()
        copies.hand_back()
    dq, dk, dv = (finish(result, of_q, stream) for result in results)
    return dq, dk, dv, finish(known["dproj"], of_q, stream) if kept.options.projected else None


def check(found: dict[str, Described], causal: bool, *, kernels: bool = True) -> Shape:
    """The shape of a problem that SLA takes, and its ``kernels``: these have tiles of up to 128 columns, and so no
    greater head dimension (:data:`flashnumba.stages.sparsity.sla_pieces.DIMENSIONS`).

    Raises:
        TypeError, ValueError: as :func:`flashnumba.stages.heads.check`, and for what these kernels do not take.
    """
    q = found["q"]
    shape = heads.check(q, found["k"], found["v"], causal=causal)
    if 0 in (shape.batch, shape.heads, shape.m, shape.n):
        raise ValueError(f"q has shape {q.shape} and k {found['k'].shape}; SLA takes at least one row and one key")
    if kernels and shape.element not in ("float16", "bfloat16"):
        raise TypeError(f"q has elements of type {q.element}; SLA's kernels take float16 and bfloat16")
    if kernels and shape.d > DIMENSIONS[-1]:
        raise ValueError(f"q has shape {q.shape}; SLA's kernels take a head dimension of 1 to {DIMENSIONS[-1]}")
    if "proj" in found:
        proj = found["proj"]
        if proj.element != shape.element:
            raise TypeError(f"proj has elements of type {proj.element}; they must be q's, {shape.element}")
        if proj.shape != (shape.d, shape.d) or proj.device != q.device:
            raise ValueError(f"proj has shape {proj.shape}; it must be {(shape.d, shape.d)}, in one place with q")
    return shape


def check_classes(classes: Any, shape: Shape, of_q: Described) -> None:
    """ValueError for a map of the caller's that kernels do not take."""
    found, wanted = describe(classes, "classes"), (shape.batch, shape.heads, *tiles_of(shape))
    if found.element != "int8" or found.shape != wanted or found.device != of_q.device or not found.contiguous:
        raise ValueError(
            f"classes is {found.element} of shape {found.shape} and strides {found.strides}; it must be int8 of shape "
            f"{wanted}, packed, in one place with q"
        )
