"""Programmatic dependent launch: a kernel that starts before the one ahead of it on the stream has ended.

The launch of a kernel costs a GPU some microseconds between the last block of the kernel ahead and its own first one. A
kernel declared ``early=True`` may have them pass while the other still runs; what it does before the wait must not
touch global memory.

Source: PTX ISA, "griddepcontrol"; CUDA programming guide, "Programmatic dependent launch and synchronization".
"""

from __future__ import annotations

from typing import Any

from flashnumba.machine.instruction import instruction

__all__ = ["grid_dependency_trigger", "grid_dependency_wait"]


@instruction("grid_dependency_wait", "griddepcontrol.wait;", arch="90", effect="control")
def grid_dependency_wait(thread: Any) -> None:
    """Wait until the kernel ahead has ended and its stores are visible; at once where there is none."""
    thread.waited = True


@instruction("grid_dependency_trigger", "griddepcontrol.launch_dependents;", arch="90", effect="control")
def grid_dependency_trigger(thread: Any) -> None:
    """Let an early kernel that follows start once all blocks have come here or ended; it says nothing of stores."""
