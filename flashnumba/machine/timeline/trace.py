"""The buffer that a traced kernel writes: its layout, and how it becomes spans.

One row of uint32 words for each warp of each block that is traced: a header, then the warp's marks in the order in
which it made them::

    word 0      marks made, those that found no room included
    word 1      multiprocessor (%smid)
    words 2-3   clock when the row was opened, low word first        words 4-5   global timer then, in ns
    words 6-7   clock when it was closed                             words 8-9   global timer then
    words 10-   two a mark: kind | slot << 8 | step << 16, and the low word of the clock

A warp does one thing at a time, so a mark says what it does from then on, until its next mark. The low word of a clock
of 2 GHz wraps round every two seconds; since marks of a warp are in order, differences put that right.

The clocks of two multiprocessors have nothing to do with one another. The global timer that stands beside them in the
header brings them together, to its own resolution (32 ns on an H200, up to 1 us elsewhere).
"""

from __future__ import annotations

import numpy as np

__all__ = [
    "ANY", "COPY", "HEADER", "KINDS", "OTHER", "PV", "QK", "SOFTMAX", "STORE", "WAIT", "empty_trace",
]  # fmt: skip

KINDS = ("other", "copy", "wait", "QK", "softmax", "PV", "store")
"""What a warp can be doing. ``other`` is neither drawn nor counted as work."""
OTHER, COPY, WAIT, QK, SOFTMAX, PV, STORE = range(len(KINDS))
ANY = 255
"""The slot of a mark that concerns all slots filled for its step, or none."""
HEADER = 10
"""Words before a row's marks."""


def empty_trace(blocks: int, warps: int, most: int) -> np.ndarray:
    """A buffer for the first ``blocks`` blocks of a launch, ``warps`` warps each, ``most`` marks a warp.

    Raises:
        ValueError: a size that is not positive, or a buffer of 2 GiB or more.
    """
    for name, value in (("blocks", blocks), ("warps", warps), ("most", most)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    words = blocks * warps * (HEADER + 2 * most)
    if words * 4 >= 1 << 31:
        raise ValueError(
            f"{most} marks of {warps} warps of {blocks} blocks take {words * 4} bytes; trace fewer blocks, so that "
            "they are less than 2 GiB"
        )
    return np.zeros((blocks, warps, HEADER + 2 * most), np.uint32)
