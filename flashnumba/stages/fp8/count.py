"""What the kernels are made of: instructions of the main loop, for one tile of keys; and of a conversion.

The tiles that kernels are launched with differ, so loops are compared for one step of 64 keys and one warp's rows as
they are, and a product for what it does: 16 x 8 x 16 multiplications in an HMMA, twice that in a QMMA.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from flashnumba.machine.listing import PRODUCTS, machine_code, main_loop
from flashnumba.stages.fp8 import convert, mma
from flashnumba.stages.heads import Shape, signature

__all__ = ["LOOPS", "OPCODES", "RECORD", "InLoop", "conversions", "excerpt", "in_loop", "listing", "record", "recorded"]

RECORD = Path(__file__).resolve().parents[3] / "lessons" / "fp8_code.json"
"""What :func:`record` wrote, for computers without a compiler, and for readers without patience."""
LOOPS = (
    ("mma", "float16"), ("emulated", "float8_e4m3fn"), ("emulated", "float8_e5m2"), ("k32", "float8_e4m3fn"),
)  # fmt: skip
"""Kernels whose loops are compared."""

OPCODES = {
    "HMMA": "product, 16 deep", "QMMA": "product, 32 deep", "F2FP": "convert, pack", "LDSM": "ldmatrix",
    "MUFU": "exponential", "PRMT": "permute bytes", "LOP3": "and, or", "SHF": "shift", "FMUL": "multiply",
    "FFMA": "multiply-add", "FMNMX": "maximum", "FADD": "add", "MOV": "move",
}  # fmt: skip
"""NVIDIA's names of instructions that are looked at."""


@dataclass(frozen=True)
class InLoop:
    """The main loop of a kernel.

    Attributes:
        opcodes: by :data:`OPCODES`, and ``all``.
        rows, keys: of a warp, and of a step.
        registers, spills: a thread's, and bytes of it that go to memory.
    """

    name: str
    arch: str
    opcodes: Mapping[str, int]
    rows: int
    keys: int
    registers: int
    spills: int

    def per(self, opcode: str, d: int) -> float:
        """Of an opcode for each product 16 deep that the tile needs: QK and PV of ``rows x keys`` and ``d`` columns."""
        return self.opcodes.get(opcode, 0) / (2 * self.rows * self.keys * d / (16 * 8 * 16))


def kernel_of(name: str, element: str, d: int, arch: str):
    """(launch, Numba types, tiles) of a kernel of this stage, or of the flash forward's for float16."""
    shape = Shape(element, 1, 1, 1, 4096, 4096, d, arch=arch)
    if element == "float16":
        from flashnumba.stages.flash_forward.mma import plan_mma
        from flashnumba.tiles.forward import tiles_for

        (launch,) = plan_mma(shape).launches
        return launch, signature(element, launch.args), tiles_for(d, arch)
    (launch,) = mma.PLANS[name](shape).launches
    tiles = (
        mma.fp8.tiles_for(d, arch) if name == "k32" else mma.emulated_tiles(d, arch, narrow=element.endswith("e5m2"))
    )
    return launch, signature(element, launch.args), tiles


@cache
def listing(name: str, element: str = "float8_e4m3fn", d: int = 128, arch: str = "90a") -> str:
    """The main loop in machine code.

    Args:
        name: ``k32`` or ``emulated``; ``mma`` with element ``float16``.

    Raises:
        RuntimeError: the compiler, or nvdisasm, is not installed; the message has the command.
    """
    from flashnumba.machine.compiler import sass

    launch, types, _ = kernel_of(name, element, d, arch)
    return main_loop(sass(launch.kernel, types, arch))


@cache
def in_loop(name: str, element: str = "float8_e4m3fn", d: int = 128, arch: str = "90a") -> InLoop:
    """What stands in it; arguments and errors as of :func:`listing`."""
    from flashnumba.machine.compiler import compile_kernel

    launch, types, tiles = kernel_of(name, element, d, arch)
    made = compile_kernel(launch.kernel, types, arch)
    seen = machine_code(listing(name, element, d, arch))
    opcodes = {opcode: seen[opcode] for opcode in OPCODES if seen[opcode]} | {"all": sum(seen.values())}
    return InLoop(
        f"{name} {element}", arch, opcodes, tiles.bm // tiles.warps, tiles.bn, made.registers, made.spill_stores
    )


def excerpt(text: str, before: int = 8, after: int = 8) -> list[str]:
    """The instructions around the first product of a listing."""
    lines = [found[1] for line in text.splitlines() if (found := re.search(r"\*/\s+(.*?)\s*;", line))]
    first = next(i for i, line in enumerate(lines) if line.split(".")[0] in PRODUCTS)
    return lines[max(0, first - before) : first + after]


@cache
def conversions(arch: str) -> dict[str, Mapping[str, int]]:
    """Instructions of the kernels that convert four float32, by name: all there are, loads, stores and addresses too.

    Raises:
        RuntimeError: as :func:`listing`.
    """
    from flashnumba.machine.compiler import sass

    return {
        case.name.removeprefix("fp8."): machine_code(sass(case.kernel, case.signature, arch))
        for case in convert.compile_cases()
        if arch in case.architectures
    }


def record() -> None:
    """Compile and count everything that the lesson shows, and write it to :data:`RECORD`: ``python -m
    flashnumba.stages.fp8.count``."""
    loops, excerpts = [], {}
    for arch in ("89", "90a"):
        for name, element in LOOPS:
            loops.append(asdict(in_loop(name, element, 128, arch)) | {"kernel": name, "element": element})
        excerpts[arch] = excerpt(listing("k32", arch=arch))
    counted = {arch: {name: dict(of) for name, of in conversions(arch).items()} for arch in ("75", "89")}
    held = {"loops": loops, "excerpts": excerpts, "conversions": counted}
    RECORD.write_text(json.dumps(held, indent=1) + "\n")


def recorded() -> dict[str, Any]:
    """What :func:`record` wrote; empty where the lessons are not."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


if __name__ == "__main__":
    record()
