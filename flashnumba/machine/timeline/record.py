"""What a traced launch did: spans of warps in cycles, from a GPU or from the emulator, in one form.

As JSON a record is a Chrome trace (Google, "Trace Event Format", JSON Object Format), which chrome://tracing and
ui.perfetto.dev open as it is: blocks are processes, warps are threads, times are microseconds. ``otherData`` and each
event's ``args`` hold what the format has no place for, so that :func:`from_json` gives back the same record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

from flashnumba.machine.timeline.trace import ANY, COPY, KINDS, PV, QK, SOFTMAX, WAIT

__all__ = ["COMPUTE", "FORMAT", "Fill", "Record", "Span", "from_json", "to_json"]

FORMAT = "flashnumba timeline 1"
COMPUTE = (QK, SOFTMAX, PV)
"""Kinds that are work on data."""


Key = tuple[int, int, int]  # block, step, slot


class Span(NamedTuple):
    """What a warp did from cycle ``begin`` to ``end``: a kind of :data:`~flashnumba.machine.timeline.trace.KINDS`, with
    which step's data, in which slot (:data:`~flashnumba.machine.timeline.trace.ANY`: in none, or in several)."""

    block: int
    warp: int
    kind: int
    step: int
    slot: int
    begin: float
    end: float


class Fill(NamedTuple):
    """One use of a slot by a block, in cycles.

    ``begin``: the first warp starts its part of the copy; ``ready``: the first warp has waited for it; ``used``,
    ``end``: the first product with it begins, the last ends. What did not happen is None.
    """

    block: int
    step: int
    slot: int
    begin: float
    ready: float | None
    used: float | None
    end: float | None


@dataclass(frozen=True)
class Record:
    """Spans in the order of (block, warp, begin), the first at cycle 0.

    Attributes:
        machine: "cuda" or "emulator"; device: its name in words.
        arch, ghz: compute capability, and the clock that turns cycles into time.
        kernel, size: what ran, in words.
        multiprocessors: by block, where it ran.
        spans: what warps did.
        lost: marks that found no room.
        costs: the model's numbers by name; empty for a GPU.
    """

    machine: str
    device: str
    arch: str
    ghz: float
    kernel: str
    size: str
    multiprocessors: Mapping[int, int]
    spans: tuple[Span, ...]
    lost: int = 0
    costs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cycles(self) -> float:
        """When the last span ends."""
        return max((span.end for span in self.spans), default=0.0)

    def of(self, blocks: Iterable[int]) -> Record:
        """The record of some blocks alone, the first of their spans at cycle 0.

        Raises:
            ValueError: a block that is not in it.
        """
        wanted = set(blocks)
        if not wanted <= set(self.multiprocessors):
            missing = sorted(wanted - set(self.multiprocessors))
            raise ValueError(f"blocks {missing} are not in the record; it has {sorted(self.multiprocessors)}")
        chosen = [span for span in self.spans if span.block in wanted]
        first = min((span.begin for span in chosen), default=0.0)
        moved = tuple(s._replace(begin=s.begin - first, end=s.end - first) for s in chosen)
        where = {b: m for b, m in self.multiprocessors.items() if b in wanted}
        return Record(
            self.machine, self.device, self.arch, self.ghz, self.kernel, self.size, where, moved, self.lost, self.costs
        )

    def fills(self) -> list[Fill]:
        """Uses of slots, as far as marks of copies name them, in the order in which they began.

        A wait counts for a copy that its warp has begun before, or, where others copy for it, for any begun before it
        ends.
        """
        begin: dict[Key, float] = {}
        own: dict[tuple[int, Key], float] = {}  # the same by warp
        slots: dict[tuple[int, int], list[int]] = {}  # by block and step
        for s in self.spans:
            if s.kind == COPY and s.slot != ANY:
                key = (s.block, s.step, s.slot)
                if key not in begin:
                    slots.setdefault(key[:2], []).append(s.slot)
                begin[key] = min(begin.get(key, s.begin), s.begin)
                own[s.warp, key] = min(own.get((s.warp, key), s.begin), s.begin)
        ready: dict[Key, float] = {}
        used: dict[Key, tuple[float, float]] = {}
        for s in self.spans:
            filled = slots.get((s.block, s.step), [])
            for slot in filled if s.slot == ANY else [s.slot] if s.slot in filled else []:
                key = (s.block, s.step, slot)
                began = own.get((s.warp, key))
                if s.kind == WAIT and (s.end > begin[key] if began is None else s.begin >= began):
                    ready[key] = min(ready.get(key, s.end), s.end)
                if s.kind in COMPUTE and s.slot != ANY:
                    lo, hi = used.get(key, (s.begin, s.end))
                    used[key] = min(lo, s.begin), max(hi, s.end)
        found = [Fill(*key, start, ready.get(key), *used.get(key, (None, None))) for key, start in begin.items()]
        return sorted(found, key=lambda fill: (fill.begin, fill[:3]))


def to_json(record: Record) -> dict[str, Any]:
    """A Chrome trace of the record."""

    def at(cycles: float) -> float:
        return cycles / (record.ghz * 1e3)

    events: list[dict[str, Any]] = []
    for block, multiprocessor in record.multiprocessors.items():
        name = f"block {block} on multiprocessor {multiprocessor}"
        events.append({"ph": "M", "name": "process_name", "pid": block, "args": {"name": name}})
    for block, warp in sorted({span[:2] for span in record.spans}):
        named = {"name": f"warp {warp}"}
        events.append({"ph": "M", "name": "thread_name", "pid": block, "tid": warp, "args": named})
    for s in record.spans:
        events.append({
            "ph": "X", "name": KINDS[s.kind], "cat": "warp", "pid": s.block, "tid": s.warp, "ts": at(s.begin),
            "dur": at(s.end - s.begin),
            "args": {"step": s.step, "slot": None if s.slot == ANY else s.slot, "begin": s.begin, "end": s.end},
        })  # fmt: skip
    about = {
        "format": FORMAT, "machine": record.machine, "device": record.device, "arch": record.arch, "ghz": record.ghz,
        "kernel": record.kernel, "size": record.size, "lost": record.lost, "costs": dict(record.costs),
        "multiprocessors": [[block, where] for block, where in record.multiprocessors.items()],
    }  # fmt: skip
    return {"displayTimeUnit": "ns", "otherData": about, "traceEvents": events}


def from_json(data: Any) -> Record:
    """The record of which :func:`to_json` made this.

    Raises:
        ValueError: it is not such a trace.
    """
    about = data.get("otherData") if isinstance(data, dict) else None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise ValueError(f"it is no trace that flashnumba wrote: otherData.format is not {FORMAT!r}")
    try:
        spans = tuple(
            Span(
                event["pid"], event["tid"], KINDS.index(event["name"]), args["step"],
                ANY if args["slot"] is None else args["slot"], args["begin"], args["end"],
            )
            for event in data["traceEvents"]
            if event["ph"] == "X"
            for args in (event["args"],)
        )  # fmt: skip
        record = Record(
            *(about[name] for name in ("machine", "device", "arch", "ghz", "kernel", "size")),
            dict(map(tuple, about["multiprocessors"])), spans, about["lost"], about["costs"],
        )  # fmt: skip
        _check(record)
        return record
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"it is a damaged trace: {type(error).__name__}: {error}") from None


def _check(record: Record) -> None:
    """That numbers are numbers, and that every span lies in a block that is there.

    Raises:
        TypeError, ValueError: they are not.
    """

    def check(name: str, value: Any, ok: bool) -> None:
        if not ok:
            raise ValueError(f"{name} is {value!r}")

    def whole(*values: Any) -> bool:
        return all(type(value) is int for value in values)

    for name in ("machine", "device", "arch", "kernel", "size"):
        check(name, getattr(record, name), isinstance(getattr(record, name), str))
    check("ghz", record.ghz, 0 < record.ghz < inf)
    check("lost", record.lost, whole(record.lost))
    check("costs", record.costs, isinstance(record.costs, dict))
    for place in record.multiprocessors.items():
        check("multiprocessors", place, whole(*place))
    for span in record.spans:
        right = whole(*span[:5]) and span.block in record.multiprocessors and 0 <= span.begin <= span.end < inf
        check("an event", tuple(span), right)
