"""What Python may expect of a kernel on the emulator: printing, exceptions, debuggers, notebooks, threads, no leaks."""

import gc
import linecache
import sys
import threading
import weakref

import numpy as np
import pytest

from flashnumba.machine.emulator import Deadlock, OutOfBounds, launch
from flashnumba.machine.emulator.tensor_core import settings
from flashnumba.machine.emulator.thread import Thread
from flashnumba.machine.function import device, kernel
from flashnumba.machine.instructions import bar_sync
from flashnumba.machine.numba import (
    cuda,
    float16,
    float32,
    float64,
    int8,
    int64,
    uint16,
    uint32,
    uint64,
)
from tests.machine.test_emulator import rotate


def test_recursive_device_function_with_a_closure():
    base = 2

    @device
    def power(n):
        return base * power(n - 1) if n else 1

    @kernel(threads=32)
    def powers(out):
        out[cuda.threadIdx.x] = power(cuda.threadIdx.x)

    out = np.zeros(32, np.int64)
    launch(powers, 1, 32, [out])
    np.testing.assert_array_equal(out, 2 ** np.arange(32))


@kernel(threads=4)
def talks(x):
    t = cuda.threadIdx.x
    print("thread", t, x[t])


def test_print(capsys):
    launch(talks, 1, 4, [np.arange(4) * 10])
    assert capsys.readouterr().out == "thread 0 0\nthread 1 10\nthread 2 20\nthread 3 30\n"


def test_an_exception_keeps_its_type_and_its_line():
    @device
    def inner(x):
        raise KeyError(x)

    @kernel(threads=32)
    def outer(out):
        cuda.syncthreads()
        inner(out[0])

    with pytest.raises(KeyError) as caught:
        launch(outer, 1, 32, [np.zeros(1, np.int64)])
    names = [entry.name for entry in caught.traceback]
    assert names[-2:] == ["outer", "inner"]


def test_a_debugger_sees_the_kernel():
    seen = []

    def look():
        frame = sys._getframe(1)
        seen.append((frame.f_code.co_name, frame.f_locals["value"], frame.f_locals["x"].shape))

    @kernel(threads=2)
    def looked_at(x):
        value = x[cuda.threadIdx.x] + 1
        look()
        value += 1

    launch(looked_at, 1, 2, [np.array([5, 6])])
    assert seen == [("looked_at", 6, (2,)), ("looked_at", 7, (2,))]


def test_a_kernel_from_a_notebook_cell():
    source = "@kernel(threads=32)\ndef cell(x):\n    s = cuda.shared.array(4, float32)\n    x[0] = s[7]\n"
    name = "<ipython-input-3-cell>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    scope = {"kernel": kernel, "cuda": cuda, "float32": float32}
    exec(compile(source, name, "exec"), scope)
    with pytest.raises(OutOfBounds, match=r"index \[7\] of s, whose shape is \(4,\)") as caught:
        launch(scope["cell"], 1, 32, [np.zeros(1, np.float32)])
    assert "<ipython-input-3-cell>:4 in cell: x[0] = s[7]" in str(caught.value)


def test_a_kernel_cannot_launch():
    @kernel(threads=1)
    def nested(out):
        launch(talks, 1, 1, [out])

    with pytest.raises(TypeError, match="cannot launch a kernel"):
        launch(nested, 1, 1, [np.zeros(1)])


def test_launches_leave_no_threads_behind(monkeypatch):
    born = []
    made = Thread.__init__

    def recording(self, *args):
        made(self, *args)
        born.append(weakref.ref(self))

    monkeypatch.setattr(Thread, "__init__", recording)
    x, out = np.arange(128, dtype=np.float32), np.empty(128, np.float32)

    @kernel(threads=32)
    def stuck(out):
        bar_sync(1 + cuda.threadIdx.x // 16, 32)

    for _ in range(5):
        launch(rotate, 2, 128, [x, out, 2])
        with pytest.raises(Deadlock):
            launch(stuck, 1, 32, [out])
    gc.collect()
    assert len(born) == 5 * (256 + 32) and not any(ref() for ref in born)


def test_python_threads_launch_at_once():
    x, failures = np.arange(128, dtype=np.float32), []

    def work(arch):
        for seed in range(4):
            out = np.empty(128, np.float32)
            launch(rotate, 1, 128, [x, out, 3], seed=seed, arch=arch)
            if not (out == np.roll(x, -3)).all() or settings.arch != "90a":
                failures.append(arch)

    workers = [threading.Thread(target=work, args=(arch,)) for arch in ("75", "80", "90a", "120")]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert failures == []


SCALARS = [
    (True, bool), (7, int64), (np.int8(-3), int8), (np.uint16(60000), uint16), (np.uint32(2**32 - 1), uint32),
    (np.uint64(2**63), uint64), (1.5, float32), (np.float16(0.25), float16), (np.float32(2.5), float32),
    (np.float64(0.1), float64),
]  # fmt: skip


@pytest.mark.parametrize(("value", "kind"), SCALARS, ids=lambda p: str(p))
def test_scalars_of_every_type(value, kind):
    @kernel(threads=1)
    def keep(value, out):
        out[0] = value

    out = np.zeros(1, kind if kind is bool else str(kind))
    launch(keep, 1, 1, [value, out])
    assert out[0] == value


@pytest.mark.parametrize("value", [1j, "x", None, [1.0]])
def test_other_arguments_are_refused(value):
    with pytest.raises(TypeError, match="argument x is"):
        launch(talks, 1, 1, [value])


def test_a_wrong_launch_says_what_is_wrong():
    with pytest.raises(ValueError, match="takes 1 arguments"):
        launch(talks, 1, 4, [])
    with pytest.raises(ValueError, match="grid is 0"):
        launch(talks, 0, 4, [np.zeros(1)])
