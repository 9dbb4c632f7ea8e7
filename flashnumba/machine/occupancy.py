"""How many blocks a multiprocessor holds, and which resource says so.

A block takes registers, shared memory, warp slots, a block slot and (since Hopper) barriers; the scarcest decides::

    registers   warps a block x roundup(32 x registers a thread, 256), spread over 4 partitions of the register file
    shared      roundup(bytes a block + what the driver reserves, 128)

Beside NVIDIA's machines stands the one of the technical notes this project began with: 768 KB of registers and 64 KB of
shared memory (LDS) a compute unit, wavefronts of 64. Its sum is the same: 256 threads of 256 four-byte registers take
256 KB, 768 / 256 = 3 blocks, and 3 blocks leave each 64 / 3 = 21 KB of LDS.

Sources: NVIDIA's ``cuda_occupancy.h`` (CUDA 13.5) for units, partitions, block slots and barriers;
``cuda/__device/arch_traits.h`` of CCCL 3.5 and the CUDA programming guide, "Technical specifications per compute
capability", for sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["MACHINES", "NOTES", "Budget", "Machine", "budget", "draw_budget", "machine_of"]

KB = 1024


@dataclass(frozen=True)
class Machine:
    """What one multiprocessor has; ``None`` where the source states no limit.

    Attributes:
        name: how tables and pictures call it.
        warp: threads a warp.
        registers: 32-bit registers.
        register_unit: a warp gets a multiple of so many.
        partitions: parts of the register file; a warp lives in one.
        max_registers: registers a thread, at most.
        threads, block_threads: threads in all, and in one block.
        blocks: block slots.
        barriers: hardware barriers, where they are shared between blocks.
        shared: bytes of shared memory in all.
        block_shared: bytes of it in one block (opted in).
        reserved: bytes a block that the driver keeps for itself.
        shared_unit: a block gets a multiple of so many bytes.
    """

    name: str
    warp: int
    registers: int
    register_unit: int
    partitions: int
    max_registers: int
    threads: int | None
    block_threads: int
    blocks: int | None
    barriers: int | None
    shared: int
    block_shared: int
    reserved: int
    shared_unit: int

    def shared_within(self, blocks: int) -> int:
        """Bytes of shared memory a block may take if ``blocks`` of them are to fit (0: none)."""
        share = self.shared // _positive("blocks", blocks) // self.shared_unit * self.shared_unit - self.reserved
        return max(0, min(share, self.block_shared))

    def registers_within(self, blocks: int, threads: int) -> int:
        """Registers a thread may take if ``blocks`` of ``threads`` threads are to fit (0: too many of them)."""
        warps = -(-_positive("threads", threads) // self.warp) * _positive("blocks", blocks)
        room = self.threads is None or warps * self.warp <= self.threads
        if threads > self.block_threads or not room or (self.blocks is not None and blocks > self.blocks):
            return 0
        in_one_partition = -(-warps // self.partitions)
        a_warp = self.registers // self.partitions // in_one_partition // self.register_unit * self.register_unit
        return min(a_warp // self.warp, self.max_registers)


def _nvidia(arch: str, *, threads: int, blocks: int, barriers: int | None, shared: int) -> Machine:
    since_ampere = int(arch) >= 80
    reserved = KB if since_ampere else 0
    return Machine(
        f"sm_{arch}", warp=32, registers=65536, register_unit=256, partitions=4, max_registers=255, threads=threads,
        block_threads=1024, blocks=blocks, barriers=barriers, shared=shared, block_shared=shared - reserved,
        reserved=reserved, shared_unit=128 if since_ampere else 256,
    )  # fmt: skip


NOTES = Machine(
    "the notes' machine", warp=64, registers=768 * KB // 4, register_unit=1, partitions=1, max_registers=256,
    threads=None, block_threads=1024, blocks=None, barriers=None, shared=64 * KB, block_shared=64 * KB, reserved=0,
    shared_unit=1,
)  # fmt: skip
"""The compute unit of the notes' section 5. It states no other limit, and no unit of allocation."""

MACHINES: Mapping[str, Machine] = {
    "75": _nvidia("75", threads=1024, blocks=16, barriers=None, shared=64 * KB),
    "80": _nvidia("80", threads=2048, blocks=32, barriers=None, shared=164 * KB),
    "86": _nvidia("86", threads=1536, blocks=16, barriers=None, shared=100 * KB),
    "89": _nvidia("89", threads=1536, blocks=24, barriers=None, shared=100 * KB),
    "90": _nvidia("90", threads=2048, blocks=32, barriers=64, shared=228 * KB),
    "100": _nvidia("100", threads=2048, blocks=32, barriers=64, shared=228 * KB),
    "120": _nvidia("120", threads=1536, blocks=24, barriers=24, shared=100 * KB),
    "notes": NOTES,
}


def machine_of(arch: str | int) -> Machine:
    """The multiprocessor of a compute capability, e.g. ``80`` or ``"90a"``, or ``"notes"``.

    Raises:
        ValueError: it is not in the table.
    """
    name = str(arch)
    found = MACHINES.get(name) or MACHINES.get(name.removesuffix("a"))
    if found is None:
        raise ValueError(f"arch {name!r} is not one of {', '.join(MACHINES)}")
    return found


@dataclass(frozen=True)
class Budget:
    """What a block takes of a multiprocessor and how many fit.

    Attributes:
        machine: the multiprocessor.
        threads: threads a block.
        takes: amount of each resource a block takes, as allocated: registers, bytes, threads, slots, barriers.
        holds: amount of each resource a block may have of the machine.
        admits: blocks that each resource admits (0: such a block cannot be launched).
    """

    machine: Machine
    threads: int
    takes: Mapping[str, int]
    holds: Mapping[str, int]
    admits: Mapping[str, int]

    @property
    def blocks(self) -> int:
        """Blocks a multiprocessor."""
        return min(self.admits.values())

    @property
    def limited_by(self) -> tuple[str, ...]:
        """The resources that admit no more blocks than this."""
        return tuple(name for name, blocks in self.admits.items() if blocks == self.blocks)

    @property
    def warps(self) -> int:
        """Warps a multiprocessor."""
        return self.blocks * -(-self.threads // self.machine.warp)

    @property
    def occupancy(self) -> float | None:
        """Warps there are over warp slots, 0 to 1; None where the number of slots is not known."""
        slots = self.machine.threads
        return None if slots is None else self.warps / (slots // self.machine.warp)


def budget(machine: Machine | str | int, *, threads: int, registers: int, shared: int = 0, barriers: int = 0) -> Budget:
    """How many blocks each resource of a multiprocessor admits.

    Args:
        machine: a :class:`Machine`, or what :func:`machine_of` takes.
        threads: threads a block.
        registers: 32-bit registers a thread.
        shared: bytes of shared memory a block, static and dynamic.
        barriers: hardware barriers a block (what ptxas reports).

    Raises:
        ValueError: a number is negative, or there are no threads or registers.
    """
    m = machine if isinstance(machine, Machine) else machine_of(machine)
    warps = -(-_positive("threads", threads) // m.warp)
    for name, value in (("shared", shared), ("barriers", barriers)):
        if value < 0:
            raise ValueError(f"{name} is {value}; it cannot be negative")
    fits = threads <= m.block_threads
    a_warp = _rounded(_positive("registers", registers) * m.warp, m.register_unit)
    bytes_ = _rounded(shared + m.reserved, m.shared_unit)

    takes = {"registers": a_warp * warps}
    holds = {"registers": m.registers}
    admits = {"registers": m.registers // m.partitions // a_warp * m.partitions // warps}
    # The launch check rounds a block's warps up to the partitions, whatever the allocation does.
    if registers > m.max_registers or a_warp * _rounded(warps, m.partitions) > m.registers:
        admits["registers"] = 0

    takes["shared memory"], holds["shared memory"] = bytes_, m.shared
    if shared > m.block_shared:
        admits["shared memory"] = 0
    elif bytes_:
        admits["shared memory"] = m.shared // bytes_
    if m.threads is not None or not fits:
        takes["threads"], holds["threads"] = warps * m.warp, m.threads or m.block_threads
        admits["threads"] = holds["threads"] // takes["threads"] if fits else 0
    if m.blocks is not None:
        takes["block slots"], holds["block slots"], admits["block slots"] = 1, m.blocks, m.blocks
    if m.barriers is not None and barriers:
        takes["barriers"], holds["barriers"], admits["barriers"] = barriers, m.barriers, m.barriers // barriers
    return Budget(m, threads, takes, holds, admits)


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"{name} is {value}; it must be at least 1")
    return value


def _rounded(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def draw_budget(budgets: Budget | Sequence[Budget], axes: Sequence[Axes] | None = None) -> Sequence[Axes]:
    """Draw each budget: a bar a resource, cut into what each resident block takes; what is left over stays pale.

    Args:
        budgets: one, or several to lay side by side.
        axes: one for each budget; a new figure otherwise.

    Returns:
        the axes; ``axes[0].figure`` is the figure.
    """
    import matplotlib.pyplot as plt

    shown = [budgets] if isinstance(budgets, Budget) else list(budgets)
    if axes is None:
        size = (5.2 * len(shown), 3.0)
        axes = list(plt.subplots(1, len(shown), figsize=size, squeeze=False, layout="constrained")[1][0])
    for ax, one in zip(axes, shown, strict=True):
        _draw_one(ax, one)
    return axes


def _draw_one(ax: Axes, one: Budget) -> None:
    names = list(one.takes)
    for row, name in enumerate(names):
        limiting = name in one.limited_by
        share = one.takes[name] / one.holds[name]
        ax.barh(row, 1, color="#eceff1", edgecolor="#b0bec5", height=0.62)
        for block in range(one.blocks):
            color = ("#d1495b", "#e07a88") if limiting else ("#30638e", "#5b8db5")
            ax.barh(
                row, share, left=block * share, color=color[block % 2], edgecolor="white", height=0.62, linewidth=0.6
            )
        blocks = one.admits[name]
        text = f"{_amount(one, name)} a block: {_counted(blocks)}{' (limit)' if limiting else ''}"
        ax.text(0.01, row + 0.44, text, fontsize=8, va="top", weight="bold" if limiting else "normal")
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.3, -0.5)
    ax.set_xlim(0, 1)
    ax.set_xticks([0, 0.5, 1], ["0", "50 %", "100 %"])
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    filled = "" if one.occupancy is None else f", occupancy {one.occupancy:.0%}"
    ax.set_title(
        f"{one.machine.name}: {_counted(one.blocks)} of {one.threads} threads{filled}", fontsize=10, loc="left"
    )


def _counted(blocks: int) -> str:
    return f"{blocks} block{'' if blocks == 1 else 's'}"


def _amount(one: Budget, name: str) -> str:
    takes, holds = one.takes[name], one.holds[name]
    if name == "registers":
        return f"{4 * takes / KB:.4g} of {4 * holds / KB:.4g} KB"
    return f"{takes / KB:.4g} of {holds / KB:.4g} KB" if name == "shared memory" else f"{takes} of {holds}"
