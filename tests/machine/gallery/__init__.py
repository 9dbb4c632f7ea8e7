"""The fault gallery: one small kernel a fault, right as it stands, and wrong once its fault is planted.

It is data: ``GALLERY`` holds the entries, ``run(entry, broken, seed)`` launches one. The tests and the page on
reading a fault are made from it.
"""

from tests.machine.gallery import copies, launches, meetings, memory, tensor
from tests.machine.gallery.entry import Entry, run

__all__ = ["GALLERY", "Entry", "run"]

GALLERY: tuple[Entry, ...] = (
    *memory.ENTRIES,
    *meetings.ENTRIES,
    *copies.ENTRIES,
    *tensor.ENTRIES,
    *launches.ENTRIES,
)
