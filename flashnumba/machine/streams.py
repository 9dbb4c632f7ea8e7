"""Which stream a launch goes to: the one given, or the one its arrays' library is using now.

torch and CuPy have a current stream, which is followed. Other arrays may name one through
``__cuda_array_interface__``. Everything else goes to the legacy default stream, which waits for ordinary streams.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["current_stream", "stream_handle"]


def stream_handle(stream: Any) -> int:
    """The driver's handle of a stream: an int, or a torch, CuPy, numba, cuda.core or cuda.bindings stream.

    Raises:
        TypeError: it is none of these.
    """
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    for attribute in ("cuda_stream", "ptr"):  # torch, CuPy
        handle = getattr(stream, attribute, None)
        if isinstance(handle, int):
            return handle
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return int((protocol() if callable(protocol) else protocol)[1])
    handle = getattr(stream, "handle", stream)
    handle = getattr(handle, "value", handle) or 0  # numba wraps the handle in a ctypes pointer, whose null is None
    if hasattr(handle, "__int__") and not isinstance(handle, bool | float | str):
        return int(handle)
    raise TypeError(
        f"stream is a {type(stream).__name__}; it must be an integer handle, a torch, CuPy or numba stream, or None"
    )


def current_stream(kind: str | None, device: int, named: int | None = None) -> int:
    """Handle of the stream that arrays of ``kind`` are being used on now; ``named`` is what an interface asks for."""
    if kind == "torch-cuda":
        return _torch_stream()(device)
    if kind == "cupy":
        return int(sys.modules["cupy"].cuda.get_current_stream().ptr)
    return named or 0


_found: dict[str, Callable[[int], int]] = {}


def _torch_stream() -> Callable[[int], int]:
    """torch's raw current stream of a device. The private function, where there is one, builds no Stream object."""
    get = _found.get("torch")
    if get is None:
        torch = sys.modules["torch"]
        get = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        get = get or (lambda device: torch.cuda.current_stream(device).cuda_stream)
        _found["torch"] = get
    return get
