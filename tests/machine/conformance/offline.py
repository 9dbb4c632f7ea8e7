"""Compile the recording kernels with no GPU, down to machine code."""

from __future__ import annotations

from typing import Any

from flashnumba.machine.instruction import Instruction
from tests.machine.conformance import record


def compile_all(declared: list[Instruction], arch: str) -> dict[str, str]:
    """Compile and assemble a kernel for each instruction; returns why any fails."""
    failed = {}
    for one in declared:
        try:
            assemble(one, arch)
        except Exception as error:
            failed[one.name] = f"{type(error).__name__}: {str(error)[-600:]}"
    return failed


def assemble(declared: Instruction, arch: str) -> str:
    """PTX of an instruction's recording kernel, after it has been assembled for ``arch``."""
    from cuda.bindings import nvjitlink
    from numba.cuda import dispatcher
    from numba.cuda.compiler import compile as numba_compile

    number = arch.rstrip("a")
    capability: tuple[Any, ...] = (int(number[:-1]), int(number[-1]), *(["a"] if arch != number else []))

    class NoGpu:
        compute_capability = capability[:2]

    asked, dispatcher.get_current_device = dispatcher.get_current_device, lambda: NoGpu
    try:
        function, parameters = record.kernel_of(declared)
        kinds = record.signature(declared, parameters)
        ptx, _ = numba_compile(function, kinds, device=False, cc=capability, abi="numba", output="ptx")
    finally:
        dispatcher.get_current_device = asked
    link = nvjitlink.create(1, [f"-arch=sm_{arch}"])
    try:
        nvjitlink.add_data(link, nvjitlink.InputType.PTX, ptx.encode(), len(ptx), declared.name)
        nvjitlink.complete(link)
    except nvjitlink.nvJitLinkError as error:
        log = bytearray(nvjitlink.get_error_log_size(link))
        nvjitlink.get_error_log(link, log)
        raise RuntimeError(log.decode(errors="replace")) from error
    finally:
        nvjitlink.destroy(link)
    return ptx
