"""The instruction table, from the declarations themselves."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from flashnumba.machine import instructions as every
from flashnumba.machine.instruction import REGISTRY, Fragment, Instruction, Scalar

__all__ = ["DECLARED", "EXAMPLES", "FAMILIES", "factories", "table"]

FAMILIES = (
    "warp", "barrier", "memory", "ordered", "ldmatrix", "mma", "convert", "cp_async", "mbarrier", "tma", "wgmma",
    "dependency", "special",
)  # fmt: skip
DECLARED = tuple(i for i in REGISTRY.values() if getattr(every, i.name, None) is i)
"""What importing every family declares; what factories make is not among the package's names."""

EXAMPLES: dict[str, tuple[Any, ...]] = {
    "bulk_wait": (0,),
    "bulk_wait_read": (0,),
    "cp_async_wait": (2,),
    "setmaxnreg_dec": (40,),
    "setmaxnreg_inc": (232,),
    "wgmma": (128,),
    "wgmma_wait": (0,),
}
"""Arguments with which each factory makes the instruction that its row shows."""


def factories(family: str) -> Iterator[tuple[str, Callable[..., Instruction]]]:
    """The public functions of a family that make instructions."""
    module = import_module(f"{every.__name__}.{family}")
    for name in module.__all__:
        value = getattr(module, name)
        makes = inspect.signature(value).return_annotation if inspect.isroutine(inspect.unwrap(value)) else None
        if makes in ("Instruction", Instruction):
            yield name, value


def table() -> str:
    """A section a family: what its module says, then its instructions, one a row."""
    left = {i.family for i in DECLARED} - set(FAMILIES)
    assert not left, f"families {sorted(left)} are not in generators.instructions.FAMILIES"
    return "\n".join(section(family) for family in FAMILIES)


def section(family: str) -> str:
    lines = [f"## {family}", "", "```{eval-rst}", ".. highlight:: text", "", *module_docstring(family), ""]
    lines += [".. list-table::", "   :class: instructions", "   :header-rows: 1", "   :widths: 38 13 49", ""]
    lines += ["   * - call", "     - needs", "     - what it does"]
    for declared in DECLARED:
        if declared.family == family:
            lines += row(f"``{declared.signature}``{returned(declared)}", declared, declared.doc)
    for name, make in factories(family):
        example = make(*EXAMPLES[name])
        spelled = ", ".join(map(str, EXAMPLES[name]))
        call = f"``{name}({', '.join(parameters(make))})``"
        doc = f"{inspect.getdoc(make)}\n\n``{name}({spelled})`` is ``{example.signature}``: {example.doc}"
        lines += row(call, example, doc)
    return "\n".join([*lines, "```", ""])


def parameters(make: Callable[..., Any]) -> Iterator[str]:
    for p in inspect.signature(make).parameters.values():
        yield p.name if p.default is p.empty else f"{p.name}={p.default!r}"


def module_docstring(family: str) -> list[str]:
    path = import_module(f"{every.__name__}.{family}").__file__
    assert path is not None
    source = Path(path).read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").splitlines()


def returned(declared: Instruction) -> str:
    return f" → {declared.returns}" if declared.returns else ""


def operand(o: Scalar | Fragment) -> str:
    return f"{o.name}: {o.count} {o.type}, {o.role}" if isinstance(o, Fragment) else f"{o.name}: {o.type}"


def row(call: str, declared: Instruction, doc: str) -> list[str]:
    """One instruction: call and operands, its needs, its documentation and PTX."""
    operands = "; ".join(map(operand, declared.operands))
    first = [call, *(["", operands] if operands else [])]
    needs = ["| sm_" + declared.arch, "| " + declared.group, "| effect: " + declared.effect]
    does = [*plain(doc).splitlines(), "", ".. code-block::", "   :class: ptx", "", f"   {declared.ptx}"]
    cells = [("   * - ", first), ("     - ", needs), ("     - ", does)]
    return [
        (mark if i == 0 else " " * 7) + line if line else ""
        for mark, cell in cells
        for i, line in enumerate(cell)
    ]  # fmt: skip


def dedented(doc: str) -> list[str]:
    """The lines of a docstring. Where a drawing is all that follows the first line, it stays indented."""
    lines = inspect.cleandoc(doc).splitlines() or [""]
    drawing = lines[0].endswith("::") and not any(line.startswith(" ") for line in lines[1:3])
    return [lines[0], *("    " + line if drawing and line else line for line in lines[1:])]


def plain(doc: str) -> str:
    """A docstring whose sections (Args, Returns, Raises) are bullets: napoleon sees whole objects only."""
    lines: list[str] = []
    inside = False
    for line in dedented(doc):
        if line in ("Args:", "Returns:", "Raises:"):
            inside = True
            lines += [line, ""]
        elif inside and line.startswith("    ") and line[4] != " ":
            name, colon, rest = line.strip().partition(": ")
            lines.append(f"- ``{name}``: {rest}" if colon else f"- {name}")
        elif inside and line.strip():
            lines.append("  " + line.strip())
        else:
            inside = inside and not line
            lines.append(line)
    return "\n".join(lines)
