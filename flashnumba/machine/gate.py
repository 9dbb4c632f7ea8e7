"""What no kernel may do, found without a GPU: keep arrays in memory, compute in double precision, spill, not fit."""

from __future__ import annotations

from flashnumba.machine.compiler import CompileCase, Compiled, compile_kernel
from flashnumba.machine.occupancy import Budget, budget

__all__ = ["budget_of", "problems"]


def budget_of(case: CompileCase, made: Compiled) -> Budget:
    """The multiprocessor's budget for a compiled kernel, launched as the case says."""
    return budget(
        made.arch, threads=case.threads, registers=made.registers, shared=made.shared + case.shared,
        barriers=made.barriers,
    )  # fmt: skip


def problems(case: CompileCase, arch: str, spills: int = 0) -> list[str]:
    """What is wrong with a kernel compiled for an architecture; empty if all is well.

    Args:
        case: the kernel as it is launched.
        arch: as :func:`flashnumba.machine.compiler.compile_kernel` takes it.
        spills: bytes of spill stores that were measured to pay.

    Raises:
        ValueError, RuntimeError, CompileError: as :func:`flashnumba.machine.compiler.compile_kernel`.
    """
    made = compile_kernel(case.kernel, case.signature, arch)
    here = budget_of(case, made)
    found = list(made.warnings)
    if made.local_memory:
        found.append(f"{made.local_memory} bytes of arrays are in local memory, not in registers")
    if made.uses_f64:
        first = next(line.strip() for line in made.ptx.splitlines() if ".f64" in line and ".reg" not in line)
        found.append(f"double precision: {' '.join(first.split())}")
    if made.spill_stores > spills:
        found.append(f"{made.spill_stores} bytes of spill stores where {spills} are allowed")
    if not here.blocks:
        found.append(f"no block fits: {', '.join(here.limited_by)}")
    if case.threads > case.kernel.threads:
        found.append(f"launched with {case.threads} threads, but compiled for at most {case.kernel.threads}")
    return found
