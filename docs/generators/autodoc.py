"""What autodoc does not see by itself: kernels, device functions, classes whose instances have their own docstrings."""

from __future__ import annotations

import ast
import inspect
from typing import Any

from sphinx.application import Sphinx
from sphinx.domains.python import PyObject
from sphinx.ext.autodoc import ClassDocumenter, FunctionDocumenter

from flashnumba.machine.function import DeviceFunction, Kernel

__all__ = ["setup"]


class KernelDocumenter(FunctionDocumenter):
    """Documents what :func:`~flashnumba.machine.function.kernel` and ``device`` return by the function inside."""

    objtype = "kernel"
    directivetype = "function"
    priority = 20  # before the documenters of functions and data

    @classmethod
    def can_document_member(cls, member: Any, membername: str, isattr: bool, parent: Any) -> bool:
        return isinstance(member, (DeviceFunction, Kernel))

    def import_object(self, raiseerror: bool = False) -> bool:
        found = super().import_object(raiseerror)
        if found and isinstance(self.object, (DeviceFunction, Kernel)):
            self.object = self.object.function
        return found


class HiddenDocumenter(ClassDocumenter):
    """Documents, where ``autohiddenclass`` asks for it, a class whose ``__doc__`` is a property for its instances: the
    class's own docstring is then in its source alone."""

    objtype = "hiddenclass"
    directivetype = "class"
    priority = -1  # no member by itself

    def get_doc(self) -> list[list[str]]:
        written = ast.get_docstring(ast.parse(inspect.cleandoc(inspect.getsource(self.object))).body[0])  # type: ignore[arg-type]
        return [[*(written or "").splitlines(), ""]]


def not_a_type(app: Sphinx, what: str, name: str, member: Any, options: Any, lines: list[str]) -> None:
    """Keep napoleon from reading what stands before the first colon of an attribute's docstring as its type."""
    if what in ("attribute", "data", "property"):
        lines.insert(0, "")


def names_are_no_types() -> None:
    """Of ``shared, block_shared: ...`` in an "Attributes" section Sphinx takes the first for the second's type, and
    looks for whatever is called so."""
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.typerolename = ""


def setup(app: Sphinx) -> None:
    names_are_no_types()
    app.add_autodocumenter(KernelDocumenter)
    app.add_autodocumenter(HiddenDocumenter)
    app.connect("autodoc-process-docstring", not_a_type, priority=400)  # napoleon's is 500
