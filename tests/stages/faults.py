"""How often a planted fault has to be caught."""

from __future__ import annotations

from collections.abc import Iterable

ORDERLY = {"wrong result", "OutOfBounds", "Misaligned"}
"""What comes of wrong numbers and addresses, which are the same whatever the order of threads."""


def seeds_for(shows: Iterable[str], count: int = 3) -> range:
    """Orders of threads in which to look for a fault that ``shows`` in these ways: one, if the order is nothing to
    it."""
    return range(1 if set(shows) <= ORDERLY else count)
