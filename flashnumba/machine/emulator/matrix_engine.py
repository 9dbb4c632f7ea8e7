"""The warpgroup's matrix engine: wgmma operands as descriptors say, work that is done at the wait and not before."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from flashnumba.machine.emulator import faults
from flashnumba.machine.emulator.clock import SHIFT, Clock
from flashnumba.machine.emulator.copies import swizzled
from flashnumba.machine.emulator.execution import gathered, join
from flashnumba.machine.emulator.gang import Gang, Op
from flashnumba.machine.emulator.one_thread import rows_of
from flashnumba.machine.emulator.tensor_core import dot

if TYPE_CHECKING:
    from flashnumba.machine.emulator.block import Block
    from flashnumba.machine.emulator.thread import Thread
    from flashnumba.machine.instruction import Instruction

__all__ = ["Shape", "accumulator_to_matrix", "commit", "issue", "matrix_to_accumulator", "wait"]


@dataclass(frozen=True)
class Shape:
    """What one wgmma multiplies: D[64, n] (+)= A[64, k] B[k, n], ``k`` elements of ``dtype`` making 32 bytes.

    ``a_mn``, ``b_mn``: the operand lies with its M or N axis contiguous (16-bit types only).
    """

    n: int
    format: str
    dtype: Any
    a_registers: bool
    a_mn: bool
    b_mn: bool


class _Queue:
    """A warpgroup's wgmma: what is open, what is committed, how many groups are done."""

    def __init__(self, block: Block, number: int):
        self.slot, self.block = block.first_group + number, block
        self.open: list[Any] = []
        self.groups: deque[list[Any]] = deque()
        self.committed = self.done = 0
        self.clocks: dict[int, Clock] = {}
        self.issued: dict[int, np.ndarray] = {}  # epoch of a group -> times of the 128 threads at its first wgmma

    def clock(self, groups: int) -> Clock:
        """Known to a thread that has waited for so many groups: their reads are over."""
        if groups not in self.clocks:
            vector = self.block.nothing()
            vector[self.slot] = groups
            self.clocks = {groups: Clock(vector), **dict(list(self.clocks.items())[:3])}
        return self.clocks[groups]


def _queue(block: Block, gang: Gang) -> _Queue:
    number = gang.first // 128
    if number not in block.groups:
        block.groups[number] = _Queue(block, number)
    return block.groups[number]


# -- registers --------------------------------------------------------------------------------------------------------
@lru_cache
def _accumulator_index(n: int) -> np.ndarray:
    """[64, n]: where D[row, column] lies among the registers [128 threads, n / 2]: warp w holds rows 16 w .. 16 w + 15,
    eight columns after eight columns in the m16n8 accumulator layout."""
    row, col = np.arange(64)[:, None], np.arange(n)[None]
    thread = row // 16 * 32 + row % 8 * 4 + col % 8 // 2
    register = col // 8 * 4 + row % 16 // 8 * 2 + col % 2
    return thread * (n // 2) + register


def accumulator_to_matrix(registers: np.ndarray) -> np.ndarray:
    """[128, n / 2] registers -> [64, n] matrix."""
    return registers.reshape(-1)[_accumulator_index(registers.shape[1] * 2)]


def matrix_to_accumulator(matrix: np.ndarray) -> np.ndarray:
    """[64, n] matrix -> [128, n / 2] registers."""
    out = np.empty(matrix.size, matrix.dtype)
    out[_accumulator_index(matrix.shape[1])] = matrix
    return out.reshape(128, -1)


def _a_from_registers(registers: np.ndarray, dtype: Any) -> np.ndarray:
    """[128, 4] 32-bit registers -> A [64, k]: register r, pair q of thread (w, g, q) holds row 16 w + g + 8 (r & 1)."""
    elements = np.ascontiguousarray(registers).view(dtype).reshape(4, 8, 4, 2, 2, -1)  # warp, g, q, k half, row half, e
    return elements.transpose(0, 4, 1, 3, 2, 5).reshape(64, -1)


# -- shared memory ----------------------------------------------------------------------------------------------------
@lru_cache(maxsize=4096)
def _chunks(descriptor: int, extent: int, mn_major: bool) -> tuple[np.ndarray, tuple[tuple[int, int], ...]]:
    """Addresses of the 16-byte chunks of an operand, and the byte ranges they make up.

    K-major: [extent, 2] (two chunks along k). MN-major: [16, extent / 8] (sixteen k, chunks of eight along m or n).
    Canonical layouts as in CUTLASS, ``include/cute/atom/mma_traits_sm90_gmma.hpp``.
    """
    base = (descriptor & 0x3FFF) << 4
    leading, stride = (descriptor >> 16 & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
    swizzle = {0: 0, 1: 128, 2: 64, 3: 32}[descriptor >> 62 & 3]
    if mn_major:
        k, c = np.arange(16)[:, None], np.arange(extent // 8)[None]
        if swizzle:
            wide = swizzle // 16
            at = k // 8 * stride + k % 8 * swizzle + c % wide * 16 + c // wide * leading
        else:
            at = k // 8 * leading + k % 8 * 16 + c * stride
    else:
        r, c = np.arange(extent)[:, None], np.arange(2)[None]
        at = r // 8 * stride + (r % 8 * swizzle + c * 16 if swizzle else r % 8 * 16 + c * leading)
    addresses = swizzled(base + at, swizzle)
    starts = np.unique(addresses)
    cuts = np.flatnonzero(np.diff(starts) != 16) + 1
    runs = [(int(part[0]), int(part[-1]) + 16) for part in np.split(starts, cuts)]
    return addresses, tuple(runs)


def _operand(block: Block, descriptor: int, extent: int, mn_major: bool, dtype: Any) -> np.ndarray:
    """[extent, k] elements."""
    addresses, _ = _chunks(descriptor, extent, mn_major)
    elements = block.shared.gather(addresses, 16).view(dtype)
    return elements.reshape(16, extent).T if mn_major else elements.reshape(extent, -1)


def _check_operand(threads: list[Thread], descriptor: int, extent: int, mn_major: bool, epoch: int) -> None:
    """The operand is there, ordered and fenced, for every thread that issues the wgmma."""
    block = threads[0].block
    _, runs = _chunks(descriptor, extent, mn_major)
    for thread in {id(t.clock): t for t in threads}.values():
        for lo, hi in runs:
            block.shared.check_read(lo, hi, thread, epoch, proxy=True)


# -- the instructions -------------------------------------------------------------------------------------------------
def issue(declared: Instruction, shape: Shape, thread: Thread, args: tuple[Any, ...]) -> None:
    """A thread reaches a wgmma: ``args`` are acc, acc_at, (a, a_at | a descriptor), b descriptor, accumulate."""
    gang = join(thread, 128)
    fragments = (0, 2) if shape.a_registers else (0,)
    fences, position = thread.register_fences, thread.position()
    if fences == 1:
        raise thread.fault(faults.MissingFence, f"no wgmma_fence() before the first {declared.name}")
    for at in fragments:
        array, first = args[at], int(args[at + 1])
        count = declared.operands[at // 2].count  # type: ignore[union-attr]
        if (array.touched[first : first + count] >= fences).any():
            raise thread.fault(
                faults.MissingFence,
                f"registers {first}..{first + count - 1} of a {declared.name} operand were touched after the last "
                f"wgmma_fence()",
            )
        thread.flying[id(array), first] = array.start_flight(first, first + count, thread.wgmma_commits + 1, position)
    op = gang.post(thread, declared, args, fragments, lambda op, gang: _start(op, gang, declared, shape))
    for at in fragments:
        args[at].op = op


def _start(op: Op, gang: Gang, declared: Instruction, shape: Shape) -> None:
    """The last thread has come: check the operands now, leave the product to the wait."""
    block, first = gang.block, op.args[0]
    threads = block.threads[gang.first : gang.first + 128]
    queue = _queue(block, gang)
    epoch = queue.slot << SHIFT | (queue.committed + 1)
    queue.issued.setdefault(epoch, np.array([t.time for t in threads]))
    accumulate = bool(first[-1])
    _check_uniform(op, threads, declared, 1 if shape.a_registers else 2)
    acc, a_fragment = declared.operands[0], declared.operands[1]
    if shape.a_registers:
        a_values = _a_from_registers(gathered(op, gang, 2, a_fragment, threads), shape.dtype).copy()  # type: ignore[arg-type]
        a_descriptor = None
    else:
        a_values, a_descriptor = None, int(first[2])
        _check_operand(threads, a_descriptor, 64, shape.a_mn, epoch)
    b_descriptor = int(first[-2])
    _check_operand(threads, b_descriptor, shape.n, shape.b_mn, epoch)
    if accumulate:
        gathered(op, gang, 0, acc, threads)  # type: ignore[arg-type]
    for x, thread in zip(op.args, threads, strict=True):
        rows_of(x[0], int(x[1]), shape.n // 2, thread, "out")
        x[0].init[int(x[1]) : int(x[1]) + shape.n // 2] = True  # as good as written: nobody may look before the wait

    def compute() -> None:
        a = a_values if a_descriptor is None else _operand(block, a_descriptor, 64, shape.a_mn, shape.dtype)
        b = _operand(block, b_descriptor, shape.n, shape.b_mn, shape.dtype).T
        rows = [rows_of(x[0], int(x[1]), shape.n // 2, t, "out") for x, t in zip(op.args, threads, strict=True)]
        c = accumulator_to_matrix(np.stack(rows)) if accumulate else np.zeros((64, shape.n), np.float32)
        product = matrix_to_accumulator(
            dot(a.astype(np.float32), b.astype(np.float32), c, shape.format, unit="wgmma", arch=block.launch.arch)
        )
        for row, registers in zip(rows, product, strict=True):
            row[:] = registers

    queue.open.append(compute)


def _check_uniform(op: Op, threads: list[Thread], declared: Instruction, scalars: int) -> None:
    """The last ``scalars`` + 1 operands, descriptors and the flag, are the same on all threads."""
    first = tuple(map(int, op.args[0][-1 - scalars :]))
    for other, thread in zip(op.args, threads, strict=True):
        if tuple(map(int, other[-1 - scalars :])) != first:
            raise thread.fault(
                faults.DivergentCollective,
                f"threads {threads[0].tid} and {thread.tid} execute {declared.name} with different descriptors or "
                f"flags: "
                f"{first} and {tuple(map(int, other[-1 - scalars :]))}",
                (threads[0].tid, thread.tid),
            )


def commit(declared: Instruction, thread: Thread) -> None:
    def close(op: Op, gang: Gang) -> None:
        queue = _queue(gang.block, gang)
        queue.groups.append(queue.open)
        queue.open = []
        queue.committed += 1
        while len(queue.issued) > 16:  # older ones are known to be done
            del queue.issued[next(iter(queue.issued))]

    thread.wgmma_commits += 1
    join(thread, 128).post(thread, declared, (), (), close)


def wait(thread: Thread, pending: int) -> None:
    """At most ``pending`` of the newest groups stay in flight; the results of the others are there."""
    thread.flush()
    queue = _queue(thread.block, thread.block.gang(thread, 128))
    while queue.committed - queue.done > pending and queue.done < thread.wgmma_commits - pending:
        for compute in queue.groups.popleft():
            compute()
        queue.done += 1
    over = min(queue.done, thread.wgmma_commits - pending)
    for key, flight in list(thread.flying.items()):
        if flight.group <= over:
            flight.landed = True
            del thread.flying[key]
    if over > 0:
        thread.learn(queue.clock(over))
