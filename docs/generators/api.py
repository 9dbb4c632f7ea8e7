"""The API pages: which modules there are, found in the package."""

from __future__ import annotations

import ast
import pkgutil
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from flashnumba.ladder import NAMES

__all__ = ["MACHINE", "modules_of", "pages"]

MACHINE = (
    "function", "instruction", "emulator", "launcher", "arrays", "tensor_map", "compiler", "occupancy", "gate",
    "resources", "timeline", "timeline.trace", "timeline.record", "timeline.summary", "timeline.picture",
    "timeline.sources", "timeline.costs", "timeline.replay", "emulator.events", "gpu",
)  # fmt: skip
"""What of ``flashnumba.machine`` a kernel's author or user calls; the rest serves these."""


ABSENT = "The machine that built this site has no PyTorch, so that nothing is here.\n"
"""Instead of modules that cannot be imported."""


def modules_of(package: str) -> list[str]:
    """A package and every module below it that opens with a docstring, outer ones first."""
    spec = find_spec(package)
    assert spec is not None and spec.submodule_search_locations, f"{package} is no package"
    below = pkgutil.walk_packages(spec.submodule_search_locations, f"{package}.")
    return [name for name in (package, *(info.name for info in below)) if documented(name)]


def documented(module: str) -> bool:
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    return ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) is not None


def stages() -> list[str]:
    """What a stage is, then each stage in the order of the ladder, then what they share."""
    found, root = modules_of("flashnumba.stages"), "flashnumba.stages"
    order = ["stage", *NAMES]

    def place(module: str) -> int:
        head = module.removeprefix(root + ".").split(".")[0]
        return order.index(head) if head in order else len(order)

    return sorted(found, key=place)


def automodule(name: str, pages: set[str]) -> str:
    """A module's section, without what it only passes on from another of the ``pages``, and without classes that say
    nothing of themselves (the named faults: a table has their meanings)."""
    module = import_module(name)
    members = {member: getattr(module, member) for member in getattr(module, "__all__", ())}
    left_out = [
        member
        for member, value in members.items()
        if getattr(value, "__module__", name) in pages - {name}
        or (isinstance(value, type) and not vars(value).get("__doc__"))
    ]
    exclude = f"   :exclude-members: {', '.join(left_out)}\n" if left_out else ""
    # A class whose docstring is a property, for its instances, is none to autodoc.
    hidden = "".join(
        f"\n.. autohiddenclass:: {name}.{member}\n"
        for member, value in members.items()
        if isinstance(value, type) and isinstance(vars(value).get("__doc__"), property) and value.__module__ == name
    )
    return f"## {name}\n\n```{{eval-rst}}\n.. highlight:: text\n\n.. automodule:: {name}\n{exclude}{hidden}```\n"


def pages() -> dict[str, str]:
    """Markdown for each page under ``api/``, by name."""
    groups = {
        "attention": [
            "flashnumba.attention",
            "flashnumba.gradients",
            "flashnumba.fp8",
            "flashnumba.mla",
            *modules_of("flashnumba.sparse"),
        ],
        "stages": stages(),
        "tiles": modules_of("flashnumba.tiles"),
        "machine": [f"flashnumba.machine.{name}" for name in MACHINE],
        "torch": ["flashnumba.torch", "flashnumba.torch.sla"] if find_spec("torch") else [],
        "project": ["flashnumba.ladder", "flashnumba.compare", "flashnumba.data", *modules_of("flashnumba.bench")],
    }
    every = {name for names in groups.values() for name in names}
    return {page: "\n".join(automodule(name, every) for name in names) or ABSENT for page, names in groups.items()}
