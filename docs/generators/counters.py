"""The section of hardware counters on the page of results: what the kernels of a stage did, and why warps waited."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flashnumba.bench.ncu import STALLS
from generators.measured import Row, facts_of, folded
from generators.tables import markdown

__all__ = ["section"]

HEADS = (
    "size", "kernel", "us", "M instructions", "ldmatrix, thousands", "M wavefronts", "conflicts of loads",
    "of stores", "tensor pipe", "issue", "warps a multiprocessor", "predicted",
)  # fmt: skip
TEXT = (
    "One launch of each kernel, by Nsight Compute (`ncu`), caches empty. A wavefront is a cycle of shared memory; "
    "conflicts are a share of the wavefronts of loads, and of stores. Tensor pipe and issue: share of the cycles in "
    "which the tensor cores worked, and in which an instruction was issued. Warps: on average while the multiprocessor "
    "had any, and as `flashnumba.machine.occupancy` predicts them. Times are of one launch that starts cold, and are "
    "not those of the other sections. [](how-to/profile.md) says how to read it.\n"
)


def section(path: Path) -> str:
    """Two tables a stage: what was counted, and stalls by reason."""
    held, _, facts = facts_of(path)
    text = f"## Counters\n\n{facts}\n{TEXT}"
    for stage in dict.fromkeys(size["stage"] for size in held["sizes"]):
        sizes = [size for size in held["sizes"] if size["stage"] == stage]
        rows = [(_about(size), one) for size in sizes for one in size["measured"] if one["seconds"]]
        text += f"\n**{stage}**\n\n" + markdown(HEADS, [_counted(about, one) for about, one in rows])
        text += "\nWarps that wait, whenever one issues, by reason:\n\n"
        stalls = [[about, one["name"], *(f"{one[f'stall_{why}']:.2f}" for why in STALLS)] for about, one in rows]
        text += markdown(["size", "kernel", *(why.replace("_", " ") for why in STALLS)], stalls)
    return text + folded(held["sizes"], "measured")


def _about(size: Row) -> str:
    return f"{size['m']} cubed" if "m" in size else f"D {size['d']}, N {size['n']}"


def _counted(about: str, one: Row) -> list[Any]:
    return [
        about, one["name"], f"{one['seconds'] * 1e6:.1f}", f"{one['instructions'] / 1e6:.1f}",
        f"{one['ldmatrix'] / 1e3:.0f}", f"{one['wavefronts'] / 1e6:.2f}", _share(one["load_conflicts_share"], 2),
        _share(one["store_conflicts_share"], 1), _share(one["tensor"]), _share(one["issue"]), f"{one['warps']:.1f}",
        one["predicted_warps"],
    ]  # fmt: skip


def _share(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}%}"
