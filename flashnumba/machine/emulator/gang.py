"""Threads that execute an instruction together: the lanes of a warp, the four warps of a warpgroup.

A lane that reaches a collective instruction posts it and goes on; the last lane to post executes it for all, on arrays
with one row a lane. Only when a lane wants a register that a posted instruction has yet to write does it wait. So a
warp costs one switch a dependency, not one an instruction, and each lane still sees exactly what the hardware gives it:
instructions execute in program order, since an instruction is complete only after all before it are.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from flashnumba.machine.emulator import faults

if TYPE_CHECKING:
    from flashnumba.machine.emulator.block import Block
    from flashnumba.machine.emulator.thread import Thread

__all__ = ["Exchange", "Gang", "Op"]


class Op:
    """One collective instruction on its way: who has posted it, with what."""

    __slots__ = ("args", "count", "done", "first", "instruction", "name", "result", "uniform", "waiters")

    def __init__(self, instruction: Any, size: int, first: tuple[Any, ...]):
        self.instruction, self.name, self.first = instruction, instruction.name, first
        self.args: list[Any] = [None] * size
        self.count, self.done, self.uniform, self.result = 0, False, True, None
        self.waiters: list[Thread] = []


class Gang:
    """``size`` consecutive threads of a block, from ``first``."""

    def __init__(self, block: Block, first: int, size: int):
        self.block, self.first, self.size = block, first, size
        self.ops: deque[Op] = deque()
        self.posted = [0] * size
        self.executed = 0
        self.aligned = size  # how many it takes; a block may end within a warp

    def post(
        self, thread: Thread, instruction: Any, args: tuple[Any, ...], fragments: tuple[int, ...], execute: Any
    ) -> Op:
        """``thread`` reaches ``instruction``; the last of the gang executes it at once by ``execute(op, gang)``.

        ``fragments``: where local arrays stand among ``args``, each with its first index behind it.
        """
        lane, ops, posted = thread.tid - self.first, self.ops, self.posted
        ahead = posted[lane] - self.executed
        if ahead == len(ops):
            op = Op(instruction, self.size, args)
            ops.append(op)
        else:
            op = ops[ahead]
            if op.instruction is not instruction:
                self._diverged(thread, op, instruction)
            if op.uniform:
                first = op.first
                for at in fragments:
                    if args[at].store is not first[at].store or args[at + 1] != first[at + 1]:
                        op.uniform = False
                        break
        op.args[lane] = args
        op.count += 1
        posted[lane] += 1
        thread.op = op
        if op.count == self.size:
            ops.popleft()
            self.executed += 1
            execute(op, self)
            op.done = True
            if op.waiters:
                self.block.release(op.waiters)
        return op

    def _diverged(self, thread: Thread, op: Op, instruction: Any) -> None:
        others = [self.first + i for i, a in enumerate(op.args) if a is not None]
        raise thread.fault(
            faults.DivergentCollective,
            f"thread {thread.tid} executes {instruction.name} where thread{'s' if len(others) > 1 else ''} "
            f"{faults.ranges(others)} of its {instruction.group} execute{'' if len(others) > 1 else 's'} {op.name}; "
            f"all "
            f"{self.size} must execute the same",
            (thread.tid, *others),
        )

    def absent(self) -> list[int]:
        """Threads that the oldest posted instruction still waits for."""
        return [self.first + i for i, a in enumerate(self.ops[0].args) if a is None] if self.ops else []


class Exchange:
    """A meeting of the lanes named by a mask, each with a value, each getting one back (shuffles, votes, syncwarp)."""

    __slots__ = ("first", "kind", "mask", "members", "results", "values", "waiters")

    def __init__(self, kind: str, mask: int, members: frozenset[int], first: int):
        self.kind, self.mask, self.members, self.first = kind, mask, members, first
        self.values: dict[int, Any] = {}
        self.results: Any = None
        self.waiters: list[Thread] = []

    def __str__(self) -> str:
        absent = [self.first + lane for lane in self.members if lane not in self.values]
        return f"{self.kind}, to which thread{'s' if len(absent) > 1 else ''} {faults.ranges(absent)} did not come"


def meet(thread: Thread, kind: str, mask: int, value: Any, compute: Any) -> Any:
    """Meet the lanes of ``mask``; ``compute(values by lane) -> results by lane`` runs once; return this lane's.

    ``compute`` gets the dictionary of values and the block's threads, and may order clocks (syncwarp).
    """
    if thread.op is not None:
        thread.flush()
    block, warp, lane = thread.block, thread.warp, thread.lane
    mask = int(mask) & 0xFFFFFFFF
    if not mask >> lane & 1:
        raise thread.fault(
            faults.DivergentCollective,
            f"lane {lane} executes {kind} with the mask {mask:#010x}, which does not name it",
        )
    waiting = block.exchanges.setdefault(warp, [])
    for exchange in waiting:
        if exchange.mask == mask and lane not in exchange.values:
            break
    else:
        exchange = Exchange(kind, mask, block.lanes_of(mask), warp * 32)
        missing = [i for i in exchange.members if warp * 32 + i >= block.size]
        if missing:
            raise thread.fault(
                faults.DivergentCollective,
                f"the mask {mask:#010x} names lanes {faults.ranges(missing)}, which do not exist",
            )
        waiting.append(exchange)
    if exchange.kind != kind or exchange.mask != mask:
        others = [warp * 32 + i for i in exchange.values]
        raise thread.fault(
            faults.DivergentCollective,
            f"thread {thread.tid} executes {kind} (mask {mask:#010x}) where threads {faults.ranges(others)} of its "
            f"warp "
            f"execute {exchange.kind} for lanes {faults.ranges(exchange.members)}",
            (thread.tid, *others),
        )
    exchange.values[lane] = value
    if len(exchange.values) == len(exchange.members):
        waiting.remove(exchange)
        exchange.results = compute(exchange.values)
        if exchange.waiters:
            block.release(exchange.waiters)
    else:
        exchange.waiters.append(thread)
        thread.wait(exchange)
    return exchange.results[lane] if exchange.results is not None else None
