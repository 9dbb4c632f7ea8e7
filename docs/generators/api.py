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
    "function", "instruction", "emulator", "launcher", "arrays", "tensor_map", "compiler", "occupancy", "gate", "gpu",
)  # fmt: skip
"""What of ``flashnumba.machine`` a kernel's author or user calls; the rest serves these."""


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
    """A module's section. What it only passes on from another module of these pages is documented there."""
    module = import_module(name)
    passed_on = [
        member
        for member in getattr(module, "__all__", ())
        if getattr(getattr(module, member), "__module__", name) in pages - {name}
    ]
    exclude = f"   :exclude-members: {', '.join(passed_on)}\n" if passed_on else ""
    return f"## {name}\n\n```{{eval-rst}}\n.. highlight:: text\n\n.. automodule:: {name}\n{exclude}```\n"


def pages() -> dict[str, str]:
    """Markdown for each page under ``api/``, by name."""
    groups = {
        "stages": stages(),
        "tiles": modules_of("flashnumba.tiles"),
        "machine": [f"flashnumba.machine.{name}" for name in MACHINE],
        "project": ["flashnumba.ladder", "flashnumba.compare", "flashnumba.data", *modules_of("flashnumba.bench")],
    }
    every = {name for names in groups.values() for name in names}
    return {page: "\n".join(automodule(name, every) for name in names) for page, names in groups.items()}
