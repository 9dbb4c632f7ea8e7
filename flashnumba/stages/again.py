"""A call on torch tensors like those of an earlier one: what was found and planned then is used again.

Describing, checking and planning cost a host about as long as a GPU takes for 100 MB. They depend on shapes, strides,
types and alignment only, so a second call on tensors of the same kind looks the answer up: a :class:`Recipe` allocates
what is new and launches; of the arrays it only needs the addresses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashnumba.machine.prepared import Fixed
    from flashnumba.stages import heads, rows
    from flashnumba.stages.backward.problem import Backward

__all__ = ["Recipe", "Recipes", "has_tangent", "kind", "of_backward", "of_heads", "of_rows", "of_sla",
           "rows_key"]  # fmt: skip


ALIGNMENT = 256
"""Bytes that arrays in one room are aligned to."""


@dataclass(frozen=True)
class Recipe:
    """What to do with arguments of the kind that it was made for.

    Attributes:
        new: what allocates the arrays that are made anew.
        launches: each with the places of its arrays among the given ones, the new ones and those in the room.
        stream: the current stream's handle.
        returns: the place of what the caller gets, or several.
        room: what allocates the memory, all of it at once, for arrays that the caller does not get.
        offsets: where in it each of them begins, in bytes.
    """

    new: tuple[Callable[[], Any], ...]
    launches: tuple[tuple[Fixed, tuple[int, ...]], ...]
    stream: Callable[[], int]
    returns: int | tuple[int, ...]
    room: Callable[[], Any] | None = None
    offsets: tuple[int, ...] = ()

    def __call__(self, *given: Any) -> Any:
        """Allocate and launch on the current stream."""
        arrays = [*given, *[make() for make in self.new]]
        addresses = [array.data_ptr() for array in arrays]
        if self.room is not None:
            room = self.room()
            begin = room.data_ptr()
            addresses += [begin + offset for offset in self.offsets]
        stream = self.stream()
        for launch, places in self.launches:
            launch([addresses[place] for place in places], stream)
        if self.returns.__class__ is int:
            return arrays[self.returns]
        return tuple([arrays[place] for place in self.returns])


class Recipes:
    """The recipes of one function, by what they depend on. A key of None is neither found nor kept."""

    capacity = 1024

    def __init__(self) -> None:
        self._known: dict[Any, Recipe] = {}

    def get(self, key: Any) -> Recipe | None:
        return self._known.get(key)

    def add(self, key: Any, recipe: Recipe | None) -> None:
        if key is None or recipe is None:
            return
        if len(self._known) >= self.capacity:
            self._known.clear()
        self._known[key] = recipe


def kind(tensor: Any) -> Any:
    """What of a torch CUDA tensor a plan depends on; None for arrays that are looked at each time."""
    torch = sys.modules.get("torch")
    if torch is None or tensor.__class__ is not torch.Tensor or not tensor.is_cuda or tensor.requires_grad:
        return None
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # of torch.func, or a tracer's; some have the address 0
        return None
    if not address or tensor.is_neg() or has_tangent(tensor):
        return None
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.get_device(), address & 15


def has_tangent(array: Any) -> bool:
    """Whether ``array`` is a torch tensor with a tangent of the forward-mode differentiation that is under way."""
    forward = sys.modules.get("torch.autograd.forward_ad")
    if forward is None or getattr(forward, "_current_level", 0) < 0:
        return False
    return isinstance(array, sys.modules["torch"].Tensor) and forward.unpack_dual(array).tangent is not None


# -- functions over rows -----------------------------------------------------------------------------------------------
def rows_key(x: Any, out: Any, kernel: str, machine: str, stream: Any) -> Any:
    """What the recipe of ``kernel(x, out)`` depends on; None for arguments that are looked at each time."""
    of_x = kind(x)
    if of_x is None:
        return None
    if stream is not None or not (isinstance(kernel, str) and isinstance(machine, str)) or machine == "emulator":
        return None
    if out is None:
        return kernel, machine, of_x
    of_out = kind(out)
    if of_out is None:
        return None
    first, other = x.data_ptr(), out.data_ptr()
    if other != first and first < other + _reach(out) and other < first + _reach(x):
        return None
    return kernel, machine, of_x, of_out, other == first


def of_rows(rows: rows.Rows, out: Any) -> Recipe | None:
    """The recipe ``(x) -> out`` or, with ``out`` given, ``(x, out) -> out`` of a launch; None if it was on copies."""
    from flashnumba.machine import launcher

    if rows.planned is None or not rows.direct:
        return None
    torch = sys.modules["torch"]
    kernel, grid, threads, shared, scratch = rows.planned
    args = (rows.x, rows.out, *((rows.zeros(scratch),) if scratch else ()))
    ready = launcher.prepare(kernel, args, shared=shared, machine="cuda", device=rows.device)
    new = [] if out is not None else [_empty(rows.found.shape, rows.x.dtype, rows.x.device)]
    if scratch:
        new.append(partial(torch.zeros, scratch, dtype=torch.int64, device=rows.x.device))
    return _recipe(new, [(ready.fixed(grid, threads, args), range(len(args)))], rows.device, 1)


def _reach(tensor: Any) -> int:
    """Bytes from a tensor's first element to the end of its last; torch strides are never negative."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((n - 1) * s for n, s in steps)) * tensor.element_size()


# -- attention ---------------------------------------------------------------------------------------------------------
def of_heads(heads: heads.Heads, plan: heads.Plan, return_lse: bool) -> Recipe | None:
    """The recipe ``(q, k, v) -> o`` or ``(o, lse)`` of a plan that was run; None unless on torch tensors on a GPU."""
    from flashnumba.stages.heads import SCRATCH, map_of, maps_for, prepared

    if heads.found.kind != "torch-cuda":
        return None
    results = dict(zip(("o", "lse"), heads.results, strict=True))
    scratch = {name: (shape, SCRATCH[name][0]) for name, shape in plan.scratch.items()}
    known = {**heads.arrays, "scale": heads.scale, "causal": int(heads.shape.causal)}
    for one in plan.launches:
        known |= maps_for(one, heads.arrays, heads.shape.element)
    ready = [(prepared(one, heads.shape.element, "cuda", heads.device), one) for one in plan.launches]
    mapped = {map_of(name): name for name in "qkvo"}
    given, returns = ("q", "k", "v"), (3, 4) if return_lse else 3
    return _of_plan(given, results, scratch, known, ready, heads.device, returns, mapped)


def of_backward(made: Backward, plan: heads.Plan) -> Recipe | None:
    """The recipe ``(do, q, k, v, o, lse) -> (dq, dk, dv)``, or with dlse after lse, of a plan that was run; None unless
    on torch tensors on a GPU."""
    from flashnumba.stages.backward.problem import RESULTS, prepared

    if made.found.kind != "torch-cuda":
        return None
    given = ("do", "q", "k", "v", "o", "lse", *(("dlse",) if made.has_dlse else ()))
    results = dict(zip(RESULTS, made.results, strict=True))
    scratch = {name: (shape, "float32") for name, shape in plan.scratch.items()}
    known = {**made.arrays, "scale": made.scale, "causal": int(made.shape.causal), "has_dlse": int(made.has_dlse)}
    ready = [(prepared(one, made.shape.element, "cuda", made.device), one) for one in plan.launches]
    last = len(given)
    return _of_plan(given, results, scratch, known, ready, made.device, (last, last + 1, last + 2))


def of_sla(
    kept: Any, plan: heads.Plan, known: dict[str, Any], given: tuple[str, ...], returns: tuple[str, ...]
) -> Recipe:
    """The recipe ``(*given) -> returns``, all by name, of a plan of SLA's that was run on torch tensors on a GPU with
    the arguments ``known``; ``o`` is made anew, and so is the plan's scratch that is not given."""
    from flashnumba.stages.sparsity.sla_gather import ALIASES
    from flashnumba.stages.sparsity.sla_plans import sizes

    of = sizes(kept.shape)
    results = {"o": known["o"].view(kept.found.shape)}
    scratch = {name: (shape, of[name][0]) for name, shape in plan.scratch.items() if name not in given}
    ready = [(kept.prepared(one), one) for one in plan.launches]
    places = {name: at for at, name in enumerate((*given, "o", *scratch))}
    return _of_plan(given, results, scratch, known, ready, kept.device, tuple(places[x] for x in returns), ALIASES)


def _of_plan(
    given: tuple[str, ...], results: dict[str, Any], scratch: dict[str, tuple[tuple[int, ...], str]],
    known: dict[str, Any], ready: list[tuple[Any, heads.Launch]], device: int | None, returns: int | tuple[int, ...],
    mapped: dict[str, str] | None = None,
) -> Recipe:  # fmt: skip
    """The recipe of a plan's launches.

    Args:
        given: names of what a call gets; an array that stands in for another, as lse does for a dlse that is not there,
            is that one's place.
        results, scratch: what is made anew; scratch by shape and type. It lies in one room, beside results that are
            not returned, as an allocation costs a host as much as a launch's arguments do.
        returns: places of results, which follow what is given.
        known: arrays and scalars, by the names that launches have for them.
        mapped: of tensor maps, and of other views, which array's they are.
    """

    torch, place = sys.modules["torch"], next(iter(results.values())).device
    shapes = {name: (result.shape, result.dtype) for name, result in results.items()}
    shapes |= {name: (shape, getattr(torch, dtype)) for name, (shape, dtype) in scratch.items()}
    names = (*given, *shapes)
    wanted = [names[at] for at in ((returns,) if isinstance(returns, int) else returns)]
    new = {name: _empty(*shapes[name], place) for name in shapes if name in wanted}
    known = {**{name: _empty(*shapes[name], place)() for name in scratch if name not in known}, **known}
    apart, offsets, end = [name for name in shapes if name not in new], [], 0
    for name in apart:
        example = results[name] if name in results else known[name]
        offsets.append(end)
        end += -(-example.numel() * example.element_size() // ALIGNMENT) * ALIGNMENT
    places = {name: at for at, name in enumerate((*given, *new, *apart))}
    returned = places[wanted[0]] if isinstance(returns, int) else tuple(places[name] for name in wanted)
    places |= {name: places["lse"] for name in ("dlse",) if name in known and name not in places}
    launches, mapped = [], mapped or {}
    for prepared, launch in ready:
        args = tuple(known[name] for name in launch.args)
        arrays = [places[mapped.get(name, name)] for name in launch.args if mapped.get(name, name) in places]
        launches.append((prepared.fixed(launch.grid, launch.threads, args), arrays))
    recipe = _recipe(new.values(), launches, device, returned)
    return replace(recipe, room=_empty((end // 4,), torch.float32, place), offsets=tuple(offsets)) if apart else recipe


# -- both --------------------------------------------------------------------------------------------------------------
def _recipe(
    new: Iterable[Callable[[], Any]], launches: Iterable[tuple[Fixed, Iterable[int]]], device: int | None,
    returns: int | tuple[int, ...],
) -> Recipe:  # fmt: skip
    from flashnumba.machine.streams import current_stream

    steps = tuple((launch, tuple(places)) for launch, places in launches)
    return Recipe(tuple(new), steps, partial(current_stream, "torch-cuda", device), returns)


def _empty(shape: Iterable[int], dtype: Any, device: Any) -> Callable[[], Any]:
    return partial(sys.modules["torch"].empty, tuple(shape), dtype=dtype, device=device)
