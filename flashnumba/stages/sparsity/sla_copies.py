"""Arrays as SLA's kernels read and write them: columns packed, rows at multiples of 16 bytes.

What lies so is read and written in place. What does not is copied: a head dimension that is no multiple of 8, columns
apart, rows in reverse or not aligned. Rows of a copy are as long as the next multiple of 8 columns, with zeros behind
the last. Results of such a head dimension are written to copies too, and from there to what the caller gets.

A copy reads and writes all numbers of an array once more, and takes a launch of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flashnumba.machine import launcher
from flashnumba.machine.arrays import Described, describe, empty_like_kind
from flashnumba.machine.function import kernel
from flashnumba.machine.instructions import ld_global_b16, st_global_b16
from flashnumba.machine.numba import cuda, int64, types, uint16, uint64
from flashnumba.stages import heads
from flashnumba.stages.sparsity.sla_pieces import address_of, piece_of

__all__ = ["COPY_THREADS", "Copies", "copy_columns", "copy_signature"]

COPY_THREADS = 128
ALIGNED = 16
"""Bytes that kernels copy and store at once."""
TOGETHER = 8
"""Columns of as many bytes, and those that a thread copies."""


@kernel(threads=COPY_THREADS, arch="75", name="sparsity.sla copy")
def copy_columns(x, to):
    """``to[b, h, r, c] = x[b, h, r, c]``, 16 bits each, and 0 from x's last column on; ``to`` may have more columns, or
    fewer. A thread for each eight columns of a row of ``to``."""
    number = int64(cuda.blockIdx.x) * COPY_THREADS + int64(cuda.threadIdx.x)
    chunks = (to.shape[3] + (TOGETHER - 1)) // TOGETHER
    first = number % chunks * TOGETHER
    batch, head, row = piece_of(number // chunks, to.shape[2], to.shape[1])
    if batch < to.shape[0]:
        x_from, to_row = address_of(x, batch, head, row), address_of(to, batch, head, row)
        for i in range(TOGETHER):
            column, value = first + i, uint16(0)
            if column < to.shape[3]:
                if column < x.shape[3]:
                    value = ld_global_b16(uint64(x_from + column * x.strides[3]))
                st_global_b16(uint64(to_row + column * to.strides[3]), value)


def copy_signature(element: str) -> tuple[Any, ...]:
    """Numba types of its arguments."""
    return (types.Array({"float16": types.float16, "bfloat16": types.uint16}[element], 4, "A"),) * 2


class Copies:
    """What of a call's arrays kernels take in place, and copies of the others. For the time in which a call allocates
    and launches on its stream.

    Args:
        like: an array of the caller's kind.
        machine, device, stream: where copies are made.

    Attributes:
        made: the copies; they are kept until the call is over.
    """

    def __init__(self, like: Any, machine: str, device: int | None, stream: Any) -> None:
        self.like, self.machine, self.device, self.stream = like, machine, device, stream
        self.made: list[Any] = []
        self.back: list[tuple[Any, Any, str]] = []

    def given(self, x: Any, found: Described, rank: int = 4) -> Any:
        """An input as kernels take it, with axes of length 1 in front up to ``rank``."""
        if heads.widest(found) >= ALIGNED:
            return heads._view(x, found, rank)
        room, of_room = self.room(found)
        self.copy(heads._view(x, found, 4), heads._view(room, of_room, 4), found.element)
        return heads._view(room, of_room, rank)

    def result(self, x: Any) -> Any:
        """A new array of the caller's, or what :meth:`hand_back` copies to it."""
        found = replace(describe(x), readonly=False)
        if heads.widest(found) >= ALIGNED:
            return heads._view(x, found, 4)
        seen = heads._view(*self.room(found), 4)
        self.back.append((seen, heads._view(x, found, 4), found.element))
        return seen

    def hand_back(self) -> None:
        """Copy results that kernels have left, those that were not written in place."""
        for copy in self.back:
            self.copy(*copy)

    def room(self, found: Described) -> tuple[Any, Described]:
        width = -(-found.shape[-1] // TOGETHER) * TOGETHER
        self.made.append(empty_like_kind(self.like, (*found.shape[:-1], width), found.element))
        return self.made[-1], replace(describe(self.made[-1]), readonly=False)

    def copy(self, x: Any, to: Any, element: str) -> None:
        batch, head, rows, columns = to.shape
        blocks = -(-batch * head * rows * -(-columns // TOGETHER) // COPY_THREADS)
        key, cache = ("sla copy", element, self.machine, self.device), copy_columns.cache
        if key not in cache:
            wanted = copy_signature(element)
            cache[key] = launcher.prepare(copy_columns, wanted, machine=self.machine, device=self.device)
        cache[key](blocks, COPY_THREADS, (x, to), self.stream)
