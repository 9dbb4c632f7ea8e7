"""Time on a GPU and on its host: medians, with the GPU kept fed and the caches kept honest.

All results are seconds or bytes a second. Everything here needs a GPU and waits for it.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from flashnumba.machine import gpu
from flashnumba.machine.streams import current_stream

__all__ = ["copy_bandwidth", "host_time", "once", "time_gpu", "time_graph"]


def _stream(device: int) -> int:
    """The stream that work goes to now: torch's or CuPy's current one where that library is in use."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return current_stream("torch-cuda", device)
    return current_stream("cupy" if "cupy" in sys.modules else None, device)


def time_gpu(
    f: Callable[..., Any], inputs: Sequence[tuple[Any, ...]] = ((),), *, warmup: int = 3, runs: int = 20
) -> float:
    """Median time of one call of ``f`` on the GPU, between CUDA events on the current stream.

    The calls are queued without waiting in between, so what the host does is hidden as long as it is quicker than the
    GPU; if it is not, that is what is measured.

    Args:
        f: launches work on the current stream, e.g. a prepared kernel or a torch function.
        inputs: argument tuples, used in turn. With more than the L2 cache holds in all, each call finds its data in
            device memory, as it would in use.
        warmup: calls before the first that counts; at least one for each input is made.
        runs: calls that count.

    Returns:
        Seconds.
    """
    gpu.require()
    driver, device = gpu.bindings(), gpu.current_device()
    flags = int(driver.CUevent_flags.CU_EVENT_DEFAULT)
    with gpu.on_device(device):
        for i in range(max(warmup, len(inputs))):
            f(*inputs[i % len(inputs)])
        stream = _stream(device)
        events = [[gpu.call(driver.cuEventCreate, flags) for _ in range(2)] for _ in range(runs)]
        try:
            for i, (start, stop) in enumerate(events):
                gpu.call(driver.cuEventRecord, start, stream)
                f(*inputs[i % len(inputs)])
                gpu.call(driver.cuEventRecord, stop, stream)
            gpu.call(driver.cuEventSynchronize, events[-1][1])
            return statistics.median(gpu.call(driver.cuEventElapsedTime, *pair) for pair in events) / 1e3
        finally:
            for pair in events:
                for event in pair:
                    driver.cuEventDestroy(event)


def once(f: Callable[[], Any]) -> tuple[Any, float]:
    """What a call of ``f`` returns, and the seconds until the GPU has done it, those of the host included."""
    gpu.require()
    driver = gpu.bindings()
    with gpu.on_device(gpu.current_device()):
        gpu.call(driver.cuCtxSynchronize)
        start = time.perf_counter()
        result = f()
        gpu.call(driver.cuCtxSynchronize)
        return result, time.perf_counter() - start


def time_graph(
    calls: Sequence[Callable[[], Any]], *, warmup: int = 3, runs: int = 20, least: float = 5e-3
) -> float:  # fmt: skip
    """Mean time of a call on the GPU in a CUDA graph, in which the calls follow one another: no host between them.

    For calls that take the GPU less time than the host. A graph holds all of ``calls`` once, or as often as it takes to
    keep the GPU busy for about ``least`` seconds; of its replays the median counts.

    Args:
        calls: each launches work on torch's current stream. With inputs of their own that are more than the L2 cache
            holds in all, each call finds its data in device memory.
        warmup, runs: replays of the graph before those that count, and those.

    Returns:
        Seconds.

    Raises:
        RuntimeError: a call cannot be captured.
    """
    torch = sys.modules["torch"]

    def all_of_them() -> None:
        for call in calls:
            call()

    all_of_them()  # what is loaded at the first call is not captured
    repeats = max(1, round(least / once(all_of_them)[1]))
    stream, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                all_of_them()
    finally:
        torch.cuda.set_stream(stream)  # a capture that fails leaves its own stream behind
    return time_gpu(graph.replay, warmup=warmup, runs=runs) / (repeats * len(calls))


def copy_bandwidth(nbytes: int = 1 << 30, *, runs: int = 20) -> float:
    """Bytes a second that a device-to-device copy reads and writes together: the ceiling of memory-bound work."""
    gpu.require()
    driver, device = gpu.bindings(), gpu.current_device()
    with gpu.on_device(device):
        buffers: list[Any] = []
        try:
            buffers += [gpu.call(driver.cuMemAlloc, nbytes) for _ in range(2)]
            source, target = buffers
            seconds = time_gpu(
                lambda: gpu.call(driver.cuMemcpyDtoDAsync, target, source, nbytes, _stream(device)), runs=runs
            )
            return 2 * nbytes / seconds
        finally:
            for pointer in buffers:
                driver.cuMemFree(pointer)


def host_time(f: Callable[[], Any], *, calls: int = 100, runs: int = 20) -> float:
    """Median host time of one call of ``f``, in seconds: ``runs`` batches of ``calls``, the GPU idle before each.

    A batch is short enough for the driver's queue, so a launch never waits for the GPU.
    """
    gpu.require()
    driver = gpu.bindings()
    with gpu.on_device(gpu.current_device()):
        f()
        each = []
        for _ in range(runs):
            gpu.call(driver.cuCtxSynchronize)
            start = time.perf_counter()
            for _ in range(calls):
                f()
            each.append((time.perf_counter() - start) / calls)
        gpu.call(driver.cuCtxSynchronize)
    return statistics.median(each)
