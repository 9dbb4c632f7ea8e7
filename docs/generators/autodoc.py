"""Kernels and device functions in the API pages: shown as the functions they are written as."""

from __future__ import annotations

from typing import Any

from sphinx.ext.autodoc import FunctionDocumenter

from flashnumba.machine.function import DeviceFunction, Kernel

__all__ = ["KernelDocumenter"]


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
