"""Launching on a GPU with arrays in host memory: copy in, run, copy out, wait.

Arrays that overlap in host memory overlap on the GPU too, so a kernel that works in place, or takes two views of one
array, does the same thing there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flashnumba.machine import gpu
from flashnumba.machine.arrays import Described, describe, is_array
from flashnumba.machine.tensor_map import TensorMap

if TYPE_CHECKING:
    from flashnumba.machine.prepared import Prepared

__all__ = ["merged", "run_on_copies"]

_ALIGNMENT = 256


def merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join spans ``(first, past)`` that share bytes; empty ones are left out.

    >>> merged([(0, 8), (20, 24), (4, 12), (30, 30), (12, 13)])
    [(0, 12), (12, 13), (20, 24)]
    """
    joined: list[tuple[int, int]] = []
    for low, high in sorted(s for s in spans if s[0] < s[1]):
        if joined and low < joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], high))
        else:
            joined.append((low, high))
    return joined


def run_on_copies(prepared: Prepared, grid: Any, block: Any, args: tuple[Any, ...], stream: int) -> None:
    """Launch with host arrays on copies of them; every writable one then holds what the kernel left there.

    Raises:
        ValueError: some arrays are in host memory and others on a GPU.
    """
    found: dict[int, Described] = {}
    for i, (place, arg) in enumerate(zip(prepared.parameters, args, strict=True)):
        if isinstance(arg, TensorMap):
            found[i] = arg.found
        elif is_array(arg):
            found[i] = describe(arg, place.name)
    names = {i: prepared.parameters[i].name for i in found}
    on_gpu = [names[i] for i, a in found.items() if a.device is not None]
    if on_gpu:
        in_host = [names[i] for i, a in found.items() if a.device is None]
        raise ValueError(
            f"{', '.join(in_host)} in host memory and {', '.join(on_gpu)} on a GPU: "
            f"{prepared.kernel.__name__} takes all its arrays in one place"
        )
    driver = gpu.bindings()
    spans = merged([a.span for a in found.values()])
    allocated: list[Any] = []
    with gpu.on_device(prepared.device):
        try:
            moved: list[tuple[int, int, int]] = []
            for low, high in spans:
                allocated.append(gpu.call(driver.cuMemAlloc, high - low + _ALIGNMENT))
                # The copy starts as far past a multiple of 256 as the original, so it is aligned as that is.
                start = -(-int(allocated[-1]) // _ALIGNMENT) * _ALIGNMENT + low % _ALIGNMENT
                gpu.call(driver.cuMemcpyHtoDAsync, start, low, high - low, stream)
                moved.append((low, high, start - low))

            def there(array: Described) -> Described:
                low = array.span[0]
                shift = next((s for a, b, s in moved if a <= low < b), -array.pointer)
                return replace(array, pointer=array.pointer + shift, device=prepared.device, kind="copy")

            held, passed = [], list(args)
            for i, array in found.items():
                passed[i] = there(array)
                if isinstance(args[i], TensorMap):
                    held.append(args[i].encoded_at(passed[i].pointer, prepared.device))
                    passed[i] = held[-1].address
            prepared(grid, block, tuple(passed), stream)
            for array in found.values():
                low, high = array.span
                if low < high and not array.readonly:
                    gpu.call(driver.cuMemcpyDtoHAsync, low, there(array).span[0], high - low, stream)
            gpu.call(driver.cuStreamSynchronize, stream)
        finally:
            for pointer in allocated:
                driver.cuMemFree(pointer)
