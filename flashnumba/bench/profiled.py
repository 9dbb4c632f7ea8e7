"""What Nsight Compute looks at: one launch of each kernel of a stage, between the profiler's marks.

    ncu --profile-from-start off ... python -m flashnumba.bench.profiled staged_buffers --d 128 --n 2048 --heads 16

All kernels are compiled and launched once before the marks, and their results must be finite. Then each is launched
once more, and nothing else is: a line ``ORDER <stage> <kernel>`` on standard output says whose launch comes next, as
the names of kernels in Nsight Compute's tables are those of their factories.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from flashnumba.bench.environment import place
from flashnumba.bench.gemm import launchable
from flashnumba.bench.heads import launches, shape_of
from flashnumba.bench.runner import check_written

__all__ = ["IN_ORDER", "ORDER", "STAGES", "calls", "main"]

ORDER = "ORDER"
IN_ORDER = "mma, chunks in order"
"""The kernel ``mma`` of the stage gemm without the swizzle."""
STAGES = ("gemm", "flash_forward", "chained_gemm", "staged_buffers")
PROBE = "probe"
"""No stage: torch fills one number. Shows at little cost whether the counters may be read, and which there are."""
Call = Callable[[], Any]


def calls(stage: str, *, d: int, n: int, heads: int, machine: str = "cuda") -> Iterator[tuple[str, Call]]:
    """Each kernel's name, and a launch of it on random float16; compiled as it is asked for.

    Args:
        stage: one of :data:`STAGES`.
        d, n, heads: columns of a head, tokens and heads; of gemm n alone counts: a product of n x n matrices.
        machine: ``"emulator"`` for tests.

    Raises:
        RuntimeError: no GPU, or no torch that uses it.
        ValueError: a kernel does not take the sizes.
    """
    torch, device, arch = place("counters", machine)
    random = torch.Generator(device=device).manual_seed(0)
    made = partial(torch.randn, generator=random, device=device, dtype=torch.float16)
    if stage == "gemm":
        from flashnumba.stages.gemm import mma
        from flashnumba.stages.gemm.problem import Shape

        a, b, shape = made((n, n)), made((n, n)), Shape.packed("float16", n, n, n, arch=arch)
        for name, swizzled in (("mma", True), (IN_ORDER, False)):
            plan = partial(mma.plan_of, shape, replace(mma.LARGE, swizzled=swizzled))
            yield name, launchable(plan, a, b, torch.empty_like(a), machine)[0]
        return
    q, k, v = (made((1, heads, n, d)) for _ in range(3))
    shape = shape_of(q, k, v, machine=machine)
    for name, planner in _planners(stage, shape).items():
        yield name, launches(planner, [(q, k, v)], machine=machine)[0]


def _planners(stage: str, shape: Any) -> dict[str, Call]:
    if stage == "flash_forward":
        from flashnumba.stages.flash_forward.mma import plan_mma

        return {"mma": partial(plan_mma, shape)}
    if stage == "chained_gemm":
        from flashnumba.stages.chained_gemm.mma import plan_chained
        from flashnumba.tiles.chain import DETOUR, WAYS

        return {way: partial(plan_chained, way, shape) for way in (*WAYS, DETOUR)}
    from flashnumba.stages.staged_buffers.mma import PLANS

    return {name: partial(plan, shape) for name, plan in PLANS.items()}


def _probe() -> Iterator[tuple[str, Call]]:
    torch, device, _ = place("counters", "cuda")
    yield "fill", partial(torch.full, (1,), 1.0, device=device)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile, launch once, check; then launch once more between the marks."""
    parser = argparse.ArgumentParser(prog="flashnumba.bench.profiled", description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=(*STAGES, PROBE))
    for name, default in (("d", 128), ("n", 2048), ("heads", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args(arguments)
    found = list(_probe() if asked.stage == PROBE else calls(asked.stage, d=asked.d, n=asked.n, heads=asked.heads))
    torch, _, _ = place("counters", "cuda")
    for _, call in found:
        result = call()
        check_written(torch, *(result if isinstance(result, tuple) else (result,)))
    torch.cuda.synchronize()
    runtime = torch.cuda.cudart()
    runtime.cudaProfilerStart()
    for name, call in found:
        print(ORDER, asked.stage, name, flush=True)
        call()
        torch.cuda.synchronize()
    runtime.cudaProfilerStop()


if __name__ == "__main__":
    main()
