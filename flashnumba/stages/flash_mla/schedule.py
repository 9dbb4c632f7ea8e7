"""Which block attends to which pages: requests of any length, cut into parts of equal work.

A block for each request would wait for the longest one. So the pages of all requests are laid end to end, with
:data:`FIXED` pages more for each request, which is about what it costs to begin and end one, and cut into as many
parts as there are blocks at a time. A part may hold the end of one request, some whole ones and the beginning of
another; a request in several parts leaves a state in each, and :mod:`flashnumba.stages.flash_mla.combine` merges them.
Parts have as few pages as they can, each piece counted with its :data:`FIXED`::

    pages       |--- request 0 ---|- 1 -|--------- request 2 ---------|- 3 -|
    parts       |    0    |    1    |    2    |    3    |    4    |    5    |

A request without tokens has no page, and belongs to one part, which writes its zeros.

Source: FlashMLA, ``get_decoding_sched_meta.cu``; the layout of the table is ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flashnumba.stages.flash_mla.sizes import PAGE

__all__ = ["FIELDS", "FIXED", "SplitPlan", "schedule"]

FIXED = 5
"""Pages that a request costs beside its own."""
FIELDS = ("first_request", "first_page", "last_request", "end_page", "first_split")
"""Columns of :attr:`SplitPlan.parts`; eight are kept, the rest is zero."""


@dataclass(frozen=True, eq=False)
class SplitPlan:
    """Parts of equal work.

    Attributes:
        parts: int32 ``[parts, 8]``, :data:`FIELDS`: from page ``first_page`` of one request to before ``end_page`` of
            ``last_request``, and how many parts the first request has before this one. A part without work has a first
            request after its last.
        num_splits: int32 ``[B + 1]``: request b leaves states ``num_splits[b]`` to before ``num_splits[b + 1]``.
    """

    parts: np.ndarray
    num_splits: np.ndarray

    def pieces(self, lengths: np.ndarray) -> list[tuple[int, int, int, int, int]]:
        """(part, request, first page, end page, split) of all that is done, in order."""
        found = []
        for part, (first, page, last, end, split) in enumerate(self.parts[:, :5].tolist()):
            for request in range(first, last + 1):
                begins, ends = request == first, request == last
                to = end if ends else -(-int(lengths[request]) // PAGE)
                at = int(self.num_splits[request]) + (split if begins else 0)
                found.append((part, request, page if begins else 0, to, at))
        return found


def schedule(lengths: np.ndarray, parts: int) -> SplitPlan:
    """Cut requests of ``lengths`` tokens, ``[B]`` integers of at least 0, into ``parts`` parts.

    Raises:
        ValueError: no part, or a length below zero.
    """
    lengths = np.asarray(lengths, np.int64)
    if parts < 1:
        raise ValueError(f"parts is {parts}; it must be at least 1")
    if lengths.ndim != 1 or (lengths < 0).any():
        raise ValueError(f"lengths are {lengths.tolist()}; they must be a row of numbers of at least 0")
    pages = -(-lengths // PAGE)  # [B]
    least = -(-int((pages + FIXED).sum()) // parts)
    found = (_cut(pages.tolist(), parts, room) for room in range(max(least, FIXED + 1), max(least, 1) + FIXED + 1))
    table, splits = next(cut for cut in found if cut)
    return SplitPlan(table, np.concatenate([[0], np.cumsum(splits)]).astype(np.int32))


def _cut(pages: list[int], parts: int, room: int) -> tuple[np.ndarray, list[int]] | None:
    """(table, parts of each request) with ``room`` pages a part, counting :data:`FIXED` for each piece; None where that
    is too little."""
    table, splits = np.zeros((parts, 8), np.int32), [0] * len(pages)
    request = page = 0
    for part in range(parts):
        begins = (request, page, splits[request]) if request < len(pages) else (request, 0, 0)
        left, end, last = room, 0, request - 1
        while request < len(pages):
            rest = pages[request] - page
            if rest + FIXED <= left:
                left -= rest + FIXED
                last, end = request, pages[request]
                splits[request] += 1
                request, page = request + 1, 0
                continue
            if left > FIXED:
                page += left - FIXED
                last, end = request, page
                splits[request] += 1
            break
        table[part, :5] = (begins[0], begins[1], last, end, begins[2])
    return (table, splits) if request == len(pages) else None
