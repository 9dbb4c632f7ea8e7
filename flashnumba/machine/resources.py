"""What a kernel takes of a multiprocessor, and records of it for computers without the compiler.

A record is a JSON file: the compiler's versions, and a line for each kernel and architecture. Two are in the
repository: ``docs/results/resources.json`` of every kernel of the ladder, which ``flashnumba resources --json`` writes,
and ``lessons/resources.json`` of what lessons ask about besides.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from flashnumba.machine.compiler import CompileCase, Compiled
from flashnumba.machine.occupancy import Budget, budget

__all__ = ["Resources", "compiler", "read", "resources_of", "write"]


@dataclass(frozen=True)
class Resources:
    """What the compiler gave a kernel on one architecture.

    Attributes:
        name: of the :class:`~flashnumba.machine.compiler.CompileCase`.
        arch: as :func:`~flashnumba.machine.compiler.compile_kernel` takes it.
        threads: a block.
        registers: 32-bit registers a thread.
        spills: bytes a thread stored to and loaded from memory for want of registers, as they stand in the code.
        stack: bytes of stack a thread.
        local_memory: bytes a thread of arrays that are in memory and not in registers.
        f64: whether there is double precision in it.
        shared: bytes of shared memory a block, static and dynamic.
        barriers: hardware barriers a block.
    """

    name: str
    arch: str
    threads: int
    registers: int
    spills: int = 0
    stack: int = 0
    local_memory: int = 0
    f64: bool = False
    shared: int = 0
    barriers: int = 0

    @property
    def budget(self) -> Budget:
        """How many blocks a multiprocessor holds, and what admits no more."""
        return budget(
            self.arch, threads=self.threads, registers=self.registers, shared=self.shared, barriers=self.barriers
        )


def resources_of(case: CompileCase, made: Compiled) -> Resources:
    """What a kernel takes that was compiled, launched as the case says."""
    return Resources(
        case.name, made.arch, case.threads, made.registers, made.spill_stores + made.spill_loads, made.stack,
        made.local_memory, made.uses_f64, made.shared + case.shared, made.barriers,
    )  # fmt: skip


def compiler() -> dict[str, str]:
    """Versions that the numbers depend on.

    Raises:
        ImportError: the compiler is not installed.
    """
    from cuda.bindings import nvjitlink

    linker = ".".join(map(str, nvjitlink.version()))
    return {"numba": version("numba"), "numba-cuda": version("numba-cuda"), "nvJitLink": linker}


def read(path: Path) -> tuple[dict[str, str], dict[tuple[str, str], Resources]]:
    """The compiler's versions, and resources by name and architecture.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no record.
    """
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        rows = [Resources(**row) for row in held["kernels"]]
        return dict(held["compiler"]), {(row.name, row.arch): row for row in rows}
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path.name} is no record of resources: {type(error).__name__}: {error}") from error


def write(path: Path, versions: Mapping[str, str], rows: Iterable[Resources]) -> None:
    """Write a record, a line for each kernel and architecture; whole or not at all."""
    lines = ",\n".join(f"  {json.dumps(asdict(row))}" for row in rows)
    text = f'{{\n "compiler": {json.dumps(dict(versions))},\n "kernels": [\n{lines}\n ]\n}}\n'
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
