"""What a hand-over costs: by count, and in the machine code that the compiler makes.

By count, for one fragment of 16 rows and one operand of P, which is 16 keys, or 32 in FP8
(:mod:`flashnumba.tiles.chain`); what is not counted, the three ways have in common. In machine code, whole kernels,
every instruction as it stands in the text: loops over a tile are unrolled, so the differences between kernels are those
of one tile of keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from flashnumba.machine.listing import machine_code
from flashnumba.stages.chained_gemm import mma
from flashnumba.stages.heads import Shape, signature
from flashnumba.tiles.chain import WAYS, shared_of
from flashnumba.tiles.sizes import AttentionTiles

__all__ = ["BY_COUNT", "OPCODES", "InCode", "in_code", "machine_code"]

BY_COUNT: Mapping[str, Mapping[str, int]] = {
    "shared": {"store": 8, "load": 1, "barrier": 1, "take a half": 4},
    "shuffles": {"shuffle": 4, "select": 8, "join halves": 4},
    "registers": {},
}
"""Instructions of a warp by what they do, for one fragment and one operand of P. A store is of 16 bits a lane; the load
is one ldmatrix; all fragments of a warp share a barrier. How many instructions the compiler needs to take the upper
half of a word, or to join two halves, is its affair: one or two."""

OPCODES = {
    "HMMA": "product", "QMMA": "product", "MUFU": "exponential", "F2FP": "round and pack", "LDSM": "ldmatrix",
    "STS": "store to shared", "SHFL": "shuffle", "SEL": "select", "PRMT": "permute bytes", "LOP3": "and, or",
    "SHF": "shift",
}  # fmt: skip
"""NVIDIA's names of instructions that are looked at."""


@dataclass(frozen=True)
class InCode:
    """What the compiler made of a way.

    Attributes:
        opcodes: by :data:`OPCODES`, and ``all``.
        registers: a thread.
        spills: bytes a thread stored for want of registers.
        shared: bytes a block that the way itself uses beyond the tiles.
    """

    way: str
    opcodes: Mapping[str, int]
    registers: int
    spills: int
    shared: int


@cache
def in_code(
    d: int, arch: str = "90a", element: str = "float16", tiles: AttentionTiles | None = None
) -> tuple[InCode, ...]:  # fmt: skip
    """The three kernels as they are compiled, in the order of :data:`WAYS`.

    Raises:
        RuntimeError: the compiler, or nvdisasm, is not installed; the message has the command.
    """
    from flashnumba.machine.compiler import compile_kernel, sass
    from flashnumba.stages.chained_gemm import fp8

    eight = element == fp8.ELEMENT
    found = []
    for way in WAYS:
        plan = (fp8 if eight else mma).plan_chained(way, Shape(element, 1, 1, 1, 4096, 4096, d, arch=arch), tiles)
        (launch,) = plan.launches
        wanted = signature(element)
        made = compile_kernel(launch.kernel, wanted, arch)
        seen = machine_code(sass(launch.kernel, wanted, arch))
        opcodes = {name: seen[name] for name in OPCODES if seen[name]} | {"all": sum(seen.values())}
        used = tiles or (fp8.tiles_for(d, arch) if eight else mma.tiles_for(d, arch))
        found.append(InCode(way, opcodes, made.registers, made.spill_stores, shared_of(way, used)))
    return tuple(found)
