"""What a ring of slots leaves room for: registers and shared memory -> blocks a multiprocessor, as formulas.

A block of T threads takes ``4 R T`` bytes of the register file, where R is registers a thread, and the ring's bytes of
shared memory. The notes' sum: 256 threads of 256 registers take 256 KB; of 768 KB there are three such; so a block may
have 64 / 3 = 21 KB of shared memory without being fewer. Four quarter-size slots are 16 KB at D = 128 and 64 keys; two
whole tiles, 32 KB, leave two blocks.

:mod:`flashnumba.machine.occupancy` has the same for NVIDIA's machines, with their units of allocation and other limits.

Source: technical notes on attention for another machine, section 5.
"""

from __future__ import annotations

from typing import NamedTuple

from flashnumba.stages.staged_buffers.reference import parts_of

__all__ = ["Budget", "budget", "registers_held", "ring_bytes", "slot_bytes"]


def slot_bytes(cut: str, d: int, bn: int, itemsize: int = 2) -> int:
    """Bytes of a slot: the larger of a slice of K, ``bn x d/c``, and one of V, ``bn/c x d``, which are equal."""
    parts = parts_of(cut)
    return max(bn * (d // parts), (bn // parts) * d) * itemsize


def ring_bytes(stages: int, cut: str, d: int, bn: int, itemsize: int = 2) -> int:
    """Bytes of shared memory for all slots."""
    return stages * slot_bytes(cut, d, bn, itemsize)


def registers_held(d: int, bn: int, rows: int = 16, threads: int = 32) -> int:
    """Registers a thread for what is kept: O ``[rows, d]`` and S ``[rows, bn]`` in float32, Q ``[rows, d]`` in 16 bits.

    A warp of ``threads`` threads owns ``rows`` rows. Addresses, the state of the rows and operands come on top.
    """
    return rows * (d + bn) // threads + rows * d // (2 * threads)


class Budget(NamedTuple):
    """What a block takes, and how many blocks fit.

    Attributes:
        block_bytes: of registers a block takes.
        by_registers, by_shared: blocks that the register file, and the shared memory, have room for.
        blocks: the smaller of these.
        shared_within: bytes of shared memory a block may take without being the scarcer.
    """

    block_bytes: int
    by_registers: int
    by_shared: int
    blocks: int
    shared_within: int


def budget(registers: int, threads: int, ring: int, register_file: int, shared: int) -> Budget:
    """Blocks a multiprocessor, without units of allocation and other limits.

    Args:
        registers: 32-bit registers a thread.
        threads: a block.
        ring: bytes of shared memory a block.
        register_file, shared: bytes of both that a multiprocessor has.

    >>> budget(256, 256, 16 * 1024, 768 * 1024, 64 * 1024)
    Budget(block_bytes=262144, by_registers=3, by_shared=4, blocks=3, shared_within=21845)
    """
    block = 4 * registers * threads
    by_registers, by_shared = register_file // block, shared // ring
    within = shared // by_registers if by_registers else shared
    return Budget(block, by_registers, by_shared, min(by_registers, by_shared), within)
