"""A launch on torch tensors like those of an earlier one: what was found and planned then is used again.

Describing, checking and planning cost a host about as long as a GPU takes for 100 MB. They depend on shapes, strides,
types and alignment only, so a second call on tensors of the same kind looks the answer up.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashnumba.machine import launcher

if TYPE_CHECKING:
    from flashnumba.stages.rows import Rows

__all__ = ["Recipe", "Recipes"]


@dataclass(frozen=True)
class Recipe:
    """A prepared launch of ``kernel(x, out, *scratch)``.

    Attributes:
        ready, grid, threads: the launch.
        x_view, out_view: (shape, strides) as the kernel wants them; None where the tensor is so already.
        scratch: uint64 zeros it needs.
    """

    ready: Any
    grid: int
    threads: int
    x_view: tuple[Any, Any] | None
    out_view: tuple[Any, Any] | None
    scratch: int

    def __call__(self, x: Any, out: Any) -> Any:
        """Launch on the current stream; the arguments are of the kind it was made for."""
        out = x.new_empty(x.shape) if out is None else out
        x2 = x if self.x_view is None else x.as_strided(*self.x_view)
        out2 = out if self.out_view is None else out.as_strided(*self.out_view)
        if self.scratch:
            torch = sys.modules["torch"]
            words = torch.zeros(self.scratch, dtype=torch.int64, device=x.device).view(torch.uint64)
            self.ready(self.grid, self.threads, (x2, out2, words))
        else:
            self.ready(self.grid, self.threads, (x2, out2))
        return out


class Recipes:
    """The recipes of one function, by the kind of its arguments."""

    capacity = 1024

    def __init__(self) -> None:
        self._known: dict[Any, Recipe] = {}

    @staticmethod
    def key(x: Any, out: Any, kernel: str, machine: str, stream: Any) -> Any:
        """What a recipe depends on; None for arguments that are looked at each time."""
        torch = sys.modules.get("torch")
        if torch is None or x.__class__ is not torch.Tensor or not x.is_cuda or x.requires_grad:
            return None
        if stream is not None or not (isinstance(kernel, str) and isinstance(machine, str)) or machine == "emulator":
            return None
        first = x.data_ptr()
        kind = (kernel, machine, x.dtype, x.shape, x.stride(), x.get_device(), first & 15)
        if out is None:
            return kind
        if out.__class__ is not torch.Tensor or not out.is_cuda or out.requires_grad:
            return None
        other = out.data_ptr()
        if other != first and first < other + _reach(out) and other < first + _reach(x):
            return None
        return (*kind, out.dtype, out.shape, out.stride(), out.get_device(), other & 15, other == first)

    def get(self, key: Any) -> Recipe | None:
        return self._known.get(key)

    def add(self, key: Any, rows: Rows, x: Any, out: Any) -> None:
        """Keep what a launch has found, unless it worked on copies."""
        if key is None or rows.planned is None or not rows.direct:
            return
        kernel, grid, threads, shared, scratch = rows.planned
        more = (rows.zeros(scratch),) if scratch else ()
        ready = launcher.prepare(kernel, (rows.x, rows.out, *more), shared=shared, machine="cuda", device=rows.device)
        x_view = None if _same(x, rows.x) else (rows.x.shape, rows.x.stride())
        # A new result is packed, so one of two axes is as the kernel wants it.
        as_it_is = x.shape == rows.out.shape if out is None else _same(out, rows.out)
        out_view = None if as_it_is else (rows.out.shape, rows.out.stride())
        if len(self._known) >= self.capacity:
            self._known.clear()
        self._known[key] = Recipe(ready, grid, threads, x_view, out_view, scratch)


def _same(a: Any, b: Any) -> bool:
    return a.shape == b.shape and a.stride() == b.stride()


def _reach(tensor: Any) -> int:
    """Bytes from a tensor's first element to the end of its last; torch strides are never negative."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((n - 1) * s for n, s in steps)) * tensor.element_size()
