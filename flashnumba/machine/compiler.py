"""Any kernel for any architecture, with no GPU and no driver: PTX, registers, spills, shared memory, SASS.

Numba types the kernel and NVVM turns it into LTO-IR; nvJitLink then optimises that, prints the PTX that a launch would
assemble, and assembles it. Registers and spills are those of ptxas, read off nvJitLink's ``-verbose`` report. What is
linked is LTO-IR, not NVVM's own PTX: from PTX the unit would be relocatable, and ptxas would then ignore
``setmaxnreg`` and spill where a launch does not.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flashnumba.machine import install
from flashnumba.machine.function import Kernel
from flashnumba.machine.instruction import runs_on
from flashnumba.machine.numba import CAN_COMPILE, types
from flashnumba.machine.target import (
    check_instructions,
    instructions_of,
    launch_bounds,
    numba_target,
    numba_type,
    signature_of,
)

__all__ = [
    "ARCHITECTURES",
    "TARGETS",
    "CompileCase",
    "CompileError",
    "Compiled",
    "architectures",
    "check_instructions",
    "compile_kernel",
    "instructions_of",
    "launch_bounds",
    "numba_target",
    "numba_type",
    "sass",
    "signature_of",
    "why_not",
]

ARCHITECTURES = ("75", "80", "86", "89", "90", "90a", "100", "100a", "120", "120a")
"""What :func:`compile_kernel` takes."""

TARGETS = ("75", "80", "86", "89", "90a", "100a", "120a")
"""What a launch compiles for: from compute capability 9.0 on, Numba asks for the architecture's own features."""

_LOCK = threading.RLock()


class CompileError(RuntimeError):
    """The linker or assembler refused a kernel; the message holds what it said."""


@dataclass(frozen=True)
class CompileCase:
    """A kernel as a stage launches it, for tables and tests.

    Attributes:
        shared: bytes of dynamic shared memory.
        chosen_for: the architectures that a plan chooses this kernel for; empty for all that the kernel claims.
    """

    name: str
    kernel: Kernel
    signature: tuple[Any, ...]
    threads: int
    shared: int = 0
    chosen_for: tuple[str, ...] = ()

    @property
    def architectures(self) -> tuple[str, ...]:
        """Where it is launched."""
        claimed = architectures(self.kernel)
        return tuple(arch for arch in claimed if arch in self.chosen_for) if self.chosen_for else claimed


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a kernel.

    Attributes:
        name, arch: the kernel and the architecture, e.g. ``"90a"``.
        registers: 32-bit registers a thread, at entry.
        spill_stores, spill_loads: bytes a thread that ptxas moves to memory for want of registers.
        stack: bytes of stack a thread (spills and local arrays).
        shared: static shared memory a block in bytes.
        barriers: hardware barriers a block.
        local_memory: bytes a thread of arrays that the PTX keeps in memory (ptxas may still find registers for one).
        uses_f64: whether any double precision is left.
        census: how often each PTX instruction stands in the text, by its full name.
        warnings: what ptxas complained of, e.g. wgmma that it had to serialise.
        ptx: the text, after link-time optimisation.
        cubin: the assembled kernel.
    """

    name: str
    arch: str
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    shared: int
    barriers: int
    local_memory: int
    uses_f64: bool
    census: Mapping[str, int] = field(repr=False)
    warnings: tuple[str, ...]
    ptx: str = field(repr=False)
    cubin: bytes = field(repr=False)

    def count(self, instruction: str) -> int:
        """How many PTX instructions begin with these words, e.g. ``"wgmma.mma_async"``, ``"cp.async"``, ``"mma"``."""
        words = instruction.split(".")
        return sum(n for name, n in self.census.items() if name.split(".")[: len(words)] == words)


@lru_cache(maxsize=1)
def why_not() -> str:
    """Why this machine cannot compile kernels, and the command that mends it if one does; empty if it can."""
    if not CAN_COMPILE and sys.platform == "darwin":
        return "numba-cuda is not installed; it has no macOS wheels"
    if not CAN_COMPILE:
        return f"numba-cuda is not installed: {install.extra('cu13')}"
    from cuda import pathfinder

    missing = []
    for name in ("nvvm", "nvrtc", "nvJitLink"):
        try:
            pathfinder.load_nvidia_dynamic_lib(name)
        except (pathfinder.DynamicLibNotFoundError, RuntimeError, OSError):
            missing.append(name)
    return f"the compiler libraries {', '.join(missing)} are not installed: {install.extra('cu13')}" if missing else ""


def architectures(kernel: Kernel) -> tuple[str, ...]:
    """The architectures a kernel claims, as a launch would compile it for them."""
    return tuple(arch for arch in TARGETS if runs_on(arch, kernel.arch))


def compile_kernel(kernel: Kernel, signature: tuple[Any, ...], arch: str | int) -> Compiled:
    """Compile ``kernel`` for ``arch`` as a launch there would; the result is kept for the life of the process.

    Args:
        kernel: a kernel declared with :func:`flashnumba.machine.function.kernel`.
        signature: Numba types of its arguments; :func:`signature_of` has them from examples.
        arch: compute capability without the dot, e.g. ``80`` or ``"90a"``; one of :data:`ARCHITECTURES`.

    Raises:
        TypeError: not a kernel, or the signature is not of Numba types.
        ValueError: the architecture is unknown or older than the kernel's, an instruction is newer than that, or the
            signature has another number of arguments.
        RuntimeError: the compiler is not installed; the message has the command.
        CompileError: the linker refuses, e.g. more than 48 KB of static shared memory.
        numba.core.errors.NumbaError: the kernel does not type.
    """
    arch = str(arch)
    _check_signature(kernel, signature)
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch {arch!r} is not one of {', '.join(ARCHITECTURES)}")
    if not runs_on(arch, kernel.arch):
        raise ValueError(f"{kernel.__name__} needs sm_{kernel.arch}; it cannot run on sm_{arch}")
    check_instructions(kernel)
    if why_not():
        raise RuntimeError(f"cannot compile {kernel.__name__}: {why_not()}")
    key = ("compiled", tuple(signature), arch)
    with _LOCK:
        if key not in kernel.cache:
            kernel.cache[key] = _compile(kernel, tuple(signature), arch)
        return kernel.cache[key]


def _check_signature(kernel: Kernel, signature: tuple[Any, ...]) -> None:
    if not isinstance(kernel, Kernel):
        raise TypeError(f"kernel is a {type(kernel).__name__}; declare it with flashnumba.machine.function.kernel")
    for at, given in enumerate(signature):
        if not isinstance(given, types.Type):
            raise TypeError(
                f"signature[{at}] is a {type(given).__name__}; it must be a Numba type, which signature_of(args) gives"
            )
    code = kernel.function.__code__
    names = code.co_varnames[: code.co_argcount]
    if len(names) != len(signature):
        raise ValueError(
            f"{kernel.__name__} takes {len(names)} arguments ({', '.join(names)}); the signature has {len(signature)}"
        )


def sass(kernel: Kernel, signature: tuple[Any, ...], arch: str | int) -> str:
    """The machine code of a kernel, disassembled by nvdisasm.

    Raises:
        RuntimeError: nvdisasm is not installed; the message has the command.
        ValueError, CompileError: as :func:`compile_kernel`.
    """
    compiled = compile_kernel(kernel, signature, arch)
    from cuda import pathfinder

    tool = pathfinder.find_nvidia_binary_utility("nvdisasm")
    if tool is None:
        raise RuntimeError(f"nvdisasm is not installed: {install.pip('nvidia-cuda-nvdisasm')}")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(compiled.cubin)
        done = subprocess.run([tool, "-c", str(file)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"nvdisasm failed on {compiled.name}: {done.stderr.strip()}")
    return done.stdout


def _compile(kernel: Kernel, signature: tuple[Any, ...], arch: str) -> Compiled:
    from numba.cuda import compile_all

    number = arch.rstrip("a")
    capability: tuple[Any, ...] = (int(number[:-1]), int(number[-1]), *arch[len(number) :])
    with _stand_in_device(capability):
        codes, _ = compile_all(
            numba_target(kernel), types.void(*signature), device=False, cc=capability, abi="numba",
            fastmath=kernel.fastmath, launch_bounds=launch_bounds(kernel), output="ltoir",
        )  # fmt: skip
    # FP16 arithmetic brings a second unit, which numba has NVRTC compile to LTO-IR.
    units = [code if isinstance(code, bytes) else bytes(code.code) for code in codes]
    ptx = _link(kernel, units, arch, "-ptx")[0].decode().rstrip("\0\n ") + "\n"
    cubin, log = _link(kernel, units, arch, "-verbose")
    census = MappingProxyType(dict(Counter(_opcodes(ptx))))
    return Compiled(
        name=kernel.__name__,
        arch=arch,
        registers=_reported(r"Used (\d+) registers", log),
        spill_stores=_reported(r"(\d+) bytes spill stores", log),
        spill_loads=_reported(r"(\d+) bytes spill loads", log),
        stack=_reported(r"(\d+) bytes stack frame", log),
        shared=_reported(r"(\d+) bytes smem", log),
        barriers=_reported(r"used (\d+) barriers", log),
        local_memory=sum(map(int, re.findall(r"^\s*\.local\s.*?\[(\d+)\];", ptx, re.MULTILINE))),
        uses_f64=".f64" in ptx,
        census=census,
        warnings=_warnings(log),
        ptx=ptx,
        cubin=cubin,
    )


def _reported(pattern: str, log: str) -> int:
    """A number of ptxas's report; it leaves out what is zero. With several functions the largest is the bound."""
    return max(map(int, re.findall(pattern, log)), default=0)


def _warnings(log: str) -> tuple[str, ...]:
    """ptxas's numbered remarks and warnings, without the mangled names of functions."""
    said = re.findall(r"^ptxas (?:warning\s*:\s*|info\s*:\s*(?=\(C\d+\)))(.*)$", log, re.MULTILINE)
    return tuple(dict.fromkeys(re.sub(r"\s+in (?:the )?function '\S+'", "", line) for line in said))


def _opcodes(ptx: str) -> Iterator[str]:
    """The name of each instruction: statements end in a semicolon, and one line may hold several."""
    for statement in re.split(r"[;{}]", re.sub(r"//[^\n]*", "", ptx)):
        match = _STATEMENT.match(statement.strip())
        if match:
            yield match.group(1)


_STATEMENT = re.compile(r"(?:[\w$]+:\s*)*(?:@!?%?\w+\s+)?([a-z]\w*(?:[.:]+\w+)*)(?=\s|$)")
"""Labels, a guard, and the name; what stands between braces (registers, declarations) does not begin like this."""


def _link(kernel: Kernel, units: list[bytes], arch: str, output: str) -> tuple[bytes, str]:
    """nvJitLink's answer (PTX for ``-ptx``, a cubin otherwise) and what it reported."""
    from cuda.bindings import nvjitlink

    options = [f"-arch=sm_{arch}", "-lto", output]
    handle = nvjitlink.create(len(options), options)
    try:
        for i, unit in enumerate(units):
            nvjitlink.add_data(handle, nvjitlink.InputType.LTOIR, unit, len(unit), f"{kernel.__name__}.{i}")
        nvjitlink.complete(handle)
        kind = "ptx" if output == "-ptx" else "cubin"
        made = bytearray(getattr(nvjitlink, f"get_linked_{kind}_size")(handle))
        getattr(nvjitlink, f"get_linked_{kind}")(handle, made)
        log = bytearray(nvjitlink.get_info_log_size(handle))
        nvjitlink.get_info_log(handle, log)
        return bytes(made), log.decode(errors="replace")
    except nvjitlink.nvJitLinkError as error:
        log = bytearray(nvjitlink.get_error_log_size(handle))
        nvjitlink.get_error_log(handle, log)
        said = log.decode(errors="replace").strip("\0\n ") or str(error)
        raise CompileError(f"{kernel.__name__} for sm_{arch}: {said}") from error
    finally:
        nvjitlink.destroy(handle)


@contextmanager
def _stand_in_device(capability: tuple[Any, ...]) -> Iterator[None]:
    """Answer numba's question for the current device, which it asks for each device function, while compiling offline.

    Only the compiling thread gets the answer: another may be compiling for a real GPU.
    """
    from numba.cuda import dispatcher

    class Device:
        compute_capability = capability[:2]

    with _LOCK:
        asked, mine = dispatcher.get_current_device, threading.get_ident()
        dispatcher.get_current_device = lambda: Device if threading.get_ident() == mine else asked()
        try:
            yield
        finally:
            dispatcher.get_current_device = asked
