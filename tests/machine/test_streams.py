"""Which stream a launch goes to."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace

import pytest

from flashnumba.machine import streams


def test_streams_of_every_library():
    assert streams.stream_handle(17) == 17
    assert streams.stream_handle(SimpleNamespace(cuda_stream=18)) == 18  # torch
    assert streams.stream_handle(SimpleNamespace(ptr=19)) == 19  # CuPy
    assert streams.stream_handle(SimpleNamespace(__cuda_stream__=lambda: (0, 20))) == 20
    assert streams.stream_handle(SimpleNamespace(handle=ctypes.c_void_p(21))) == 21  # numba
    assert streams.stream_handle(SimpleNamespace(handle=ctypes.c_void_p(None))) == 0
    for bad in ("0", 1.5, True, object()):
        with pytest.raises(TypeError, match="stream is a"):
            streams.stream_handle(bad)


def test_current_stream_by_kind(monkeypatch, fake_torch):
    monkeypatch.setitem(
        sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda: SimpleNamespace(ptr=33)))
    )
    assert streams.current_stream("torch-cuda", 1) == 1001
    assert streams.current_stream("cupy", 0) == 33
    assert streams.current_stream("numba", 0, 44) == 44
    assert streams.current_stream("jax", 0) == streams.current_stream(None, 0) == 0


def test_torch_without_its_private_function(monkeypatch, fake_torch):
    fake_torch._C = SimpleNamespace()
    fake_torch.cuda = SimpleNamespace(current_stream=lambda device: SimpleNamespace(cuda_stream=50 + device))
    assert streams.current_stream("torch-cuda", 2) == 52
