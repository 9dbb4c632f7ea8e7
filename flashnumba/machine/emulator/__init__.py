"""The machine without a GPU: kernels run as they are written, thread by thread, and their faults are named."""

from flashnumba.machine.emulator.faults import (
    AccumulatorInFlight,
    BarrierMismatch,
    Deadlock,
    DivergentBarrier,
    DivergentCollective,
    EarlyAccess,
    Fault,
    LaunchLimit,
    MbarrierMisuse,
    Misaligned,
    MissingFence,
    MissingProxyFence,
    OutOfBounds,
    OverwriteInFlight,
    Race,
    ReadInFlight,
    ReadOnly,
    RegisterPool,
    UnfinishedCopy,
    UninitialisedRead,
    UnsupportedInstruction,
)
from flashnumba.machine.emulator.launch import Report, as_python, launch

__all__ = [
    "AccumulatorInFlight", "BarrierMismatch", "Deadlock", "DivergentBarrier", "DivergentCollective", "EarlyAccess",
    "Fault", "LaunchLimit", "MbarrierMisuse", "Misaligned", "MissingFence", "MissingProxyFence", "OutOfBounds",
    "OverwriteInFlight", "Race", "ReadInFlight", "ReadOnly", "RegisterPool", "Report", "UnfinishedCopy",
    "UninitialisedRead", "UnsupportedInstruction", "as_python", "launch",
]  # fmt: skip
