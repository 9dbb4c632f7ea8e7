"""Exchanges among the 32 lanes of a warp: shuffles, votes, and the barrier that orders their memory accesses.

All lanes of the warp take part. Shuffles and votes order nothing in memory; ``syncwarp`` does.
"""

from __future__ import annotations

from typing import Any

from flashnumba.machine.emulator.names import shuffle, vote
from flashnumba.machine.emulator.names import syncwarp as order_warp
from flashnumba.machine.instruction import Instruction, Scalar, instruction

__all__ = ["shfl_down", "shfl_idx", "shfl_up", "shfl_xor", "syncwarp", "vote_all", "vote_any", "vote_ballot"]

ALL = 0xFFFFFFFF


def _shuffle(name: str, ptx_mode: str, how: str, clamp: int, doc: str) -> Instruction:
    declare = instruction(
        name,
        f"shfl.sync.{ptx_mode}.b32 %result, %x, %lanes, {clamp}, -1;",
        (Scalar("x", "b32"), Scalar("lanes", "i32")),
        returns="b32",
        group="warp",
        effect="control",
        doc=doc,
    )

    def emulate(thread: Any, x: Any, lanes: int) -> Any:
        return shuffle(thread, ALL, x, how, lanes)

    emulate.__module__ = __name__
    return declare(emulate)


shfl_xor = _shuffle(
    "shfl_xor", "bfly", "xor", 31,
    """The value of lane ``lane ^ lanes`` (float32, int32 or uint32): the butterfly of a reduction. With 1 and then 2,
the four lanes that share a row of an accumulator all hold its maximum or sum.""",
)  # fmt: skip
shfl_up = _shuffle("shfl_up", "up", "up", 0, "The value of lane ``lane - lanes``; the first lanes keep their own.")
shfl_down = _shuffle(
    "shfl_down", "down", "down", 31, "The value of lane ``lane + lanes``; the last lanes keep their own."
)
shfl_idx = _shuffle("shfl_idx", "idx", "idx", 31, "The value of lane ``lanes`` (mod 32).")

_VOTE = "{ .reg .pred p, q; setp.ne.b32 p, %predicate, 0; vote.sync.%MODE.pred q, p, -1; selp.b32 %result, 1, 0, q; }"


@instruction(
    "vote_all",
    _VOTE.replace("%MODE", "all"),
    (Scalar("predicate", "pred"),),
    returns="pred",
    group="warp",
    effect="control",
)
def vote_all(thread: Any, predicate: Any) -> bool:
    """Whether the predicate is true on every lane."""
    return vote(thread, ALL, predicate, "all")


@instruction(
    "vote_any",
    _VOTE.replace("%MODE", "any"),
    (Scalar("predicate", "pred"),),
    returns="pred",
    group="warp",
    effect="control",
)
def vote_any(thread: Any, predicate: Any) -> bool:
    """Whether the predicate is true on some lane."""
    return vote(thread, ALL, predicate, "any")


@instruction(
    "vote_ballot",
    "{ .reg .pred p; setp.ne.b32 p, %predicate, 0; vote.sync.ballot.b32 %result, p, -1; }",
    (Scalar("predicate", "pred"),),
    returns="u32",
    group="warp",
    effect="control",
)
def vote_ballot(thread: Any, predicate: Any) -> int:
    """One bit a lane: bit i is the predicate of lane i."""
    return vote(thread, ALL, predicate, "ballot")


@instruction("syncwarp", "bar.warp.sync -1;", group="warp", effect="control")
def syncwarp(thread: Any) -> None:
    """Wait for all lanes, and order their shared-memory accesses: what was written before is seen after."""
    order_warp(thread)
