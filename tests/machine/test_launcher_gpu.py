"""Launching on a real GPU: streams, graphs, shared memory, the libraries' arrays, and what a launch costs."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest

from flashnumba.bench.timing import copy_bandwidth, host_time, time_gpu
from flashnumba.machine import gpu
from flashnumba.machine.function import kernel
from flashnumba.machine.launcher import launch, prepare
from flashnumba.machine.numba import cuda, float32, int32, types, uint8, uint16

pytestmark = pytest.mark.gpu


@kernel(threads=256)
def scale(out, x, factor, count):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i < count:
        out[i] = x[i] * factor


@kernel(threads=256)
def weigh(out, a, b, c, rows, columns, factor):
    """Seven arguments, four of them matrices of any strides, for correctness and for the cost of a launch."""
    row, column = cuda.blockIdx.x, cuda.threadIdx.x
    if row < rows and column < columns:
        out[row, column] = factor * a[row, column] + b[row, column] * c[row, column]


@kernel(threads=256)
def reverse(out, x, count):
    """Reverse a row by way of dynamic shared memory."""
    tile = cuda.shared.array(0, float32)
    for i in range(cuda.threadIdx.x, count, cuda.blockDim.x):
        tile[i] = x[i]
    cuda.syncthreads()  # all of the tile is written before any is read
    for i in range(cuda.threadIdx.x, count, cuda.blockDim.x):
        out[i] = tile[count - 1 - i]


@kernel(threads=128, concurrent=True)
def meet(counter, out):
    """Each block waits until all have come."""
    if cuda.threadIdx.x == 0:
        cuda.atomic.add(counter, 0, int32(1))
        while cuda.atomic.add(counter, 0, int32(0)) < cuda.gridDim.x:
            pass
        out[cuda.blockIdx.x] = int32(1)


@kernel(threads=32)
def kinds(small, half, flag, wide, out):
    if cuda.threadIdx.x == 0:
        out[0] = float32(small)
        out[1] = float32(half)
        out[2] = float32(1) if flag else float32(0)
        out[3] = float32(wide >> types.uint64(60))


@pytest.fixture(scope="module")
def torch():
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    return module


def matrices(torch, rows=37, columns=53):
    make = torch.Generator(device="cuda").manual_seed(1)
    a = torch.randn(columns, rows, device="cuda", generator=make).t()
    b = torch.randn(rows * 2, columns * 3, device="cuda", generator=make)[::2, 1::3]
    c = torch.randn(rows, columns, device="cuda", generator=make)
    return torch.full((columns, rows), float("nan"), device="cuda").t(), a, b, c


def test_torch_tensors_of_any_strides(torch):
    out, a, b, c = matrices(torch)
    launch(weigh, 37, 64, (out, a, b, c, 37, 53, 2.0))
    torch.testing.assert_close(out, 2 * a + b * c)


def test_scalars_of_every_width(torch):
    out = torch.zeros(4, device="cuda")
    launch(kinds, 1, 32, (np.int8(-3), np.float16(0.25), True, np.uint64(2**63), out))
    assert out.tolist() == [-3, 0.25, 1, 8]


def test_dynamic_shared_memory_of_200_kb(torch):
    count = 200 * 1024 // 4
    if gpu.max_shared() < 4 * count:
        pytest.skip("this GPU has less")
    x = torch.arange(count, dtype=torch.float32, device="cuda")
    out = torch.empty_like(x)
    small = prepare(reverse, (out, x, count), shared=1024, machine="cuda")
    large = prepare(reverse, (out, x, count), shared=4 * count, machine="cuda")
    prepare(reverse, (out, x, count), shared=64 * 1024, machine="cuda")  # what was granted stays granted
    large(1, 256, (out, x, count))
    assert torch.equal(out, x.flip(0))
    small(1, 256, (out[:256], x[:256], 256))
    assert torch.equal(out[:256], x[:256].flip(0))


def test_the_current_stream_is_used(torch):
    """A copy on a side stream, after a long one, sees the kernel's result only if the kernel ran there too."""
    side = torch.cuda.Stream()
    n = 1 << 24
    x, out = torch.zeros(n, device="cuda"), torch.zeros(n, device="cuda")
    ready = prepare(scale, (out, x, 3.0, n), machine="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.fill_(1)
        ready(n // 256, 256, (out, x, 3.0, n))
        result = out.clone()
    side.synchronize()
    assert (result == 3).all()


def test_an_explicit_stream_is_used(torch):
    side = torch.cuda.Stream()
    n = 1 << 20
    x, out = torch.zeros(n, device="cuda"), torch.zeros(n, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.fill_(1)
    launch(scale, n // 256, 256, (out, x, 3.0, n), stream=side)
    side.synchronize()
    assert (out == 3).all()


def test_a_launch_does_not_wait(torch):
    x, out = torch.ones(256, device="cuda"), torch.zeros(256, device="cuda")
    ready = prepare(scale, (out, x, 3.0, 256), machine="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    ready(1, 256, (out, x, 3.0, 256))
    assert not torch.cuda.current_stream().query(), "the GPU is still busy when the launch returns"
    torch.cuda.synchronize()


def test_graph_capture(torch):
    n = 1000
    x, out = torch.ones(n, device="cuda"), torch.zeros(n, device="cuda")
    ready = prepare(scale, (out, x, 3.0, n), machine="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ready(4, 256, (out, x, 3.0, n))
        ready(4, 256, (out, out, 2.0, n))
    assert (out == 0).all(), "captured, not run"
    for value in (1, 5):
        x.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert (out == 6 * value).all()


def test_from_another_thread(torch):
    """A new thread has no CUDA context yet."""
    x, out = torch.ones(256, device="cuda"), torch.zeros(256, device="cuda")
    ready = prepare(scale, (out, x, 3.0, 256), machine="cuda")
    failed = []

    def work():
        try:
            ready(1, 256, (out, x, 3.0, 256), stream=0)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert not failed
    assert (out == 3).all()


def test_blocks_that_wait_for_one_another(torch):
    counter, out = (
        torch.zeros(1, dtype=torch.int32, device="cuda"),
        torch.zeros(100000, dtype=torch.int32, device="cuda"),
    )
    ready = prepare(meet, (counter, out), machine="cuda")
    room = ready.resident_blocks(128)
    ready(room, 128, (counter, out))
    torch.cuda.synchronize()
    assert out.sum().item() == room >= gpu.multiprocessors()
    with pytest.raises(ValueError, match=f"holds {room} at once"):
        ready(room + 1, 128, (counter, out))


def test_bfloat16_arrives_as_its_bits(torch):
    @kernel(threads=32)
    def bits(out, x):
        i = cuda.threadIdx.x
        out[i] = x[i] ^ uint16(0x8000)

    x = torch.linspace(-1, 1, 32, device="cuda").bfloat16()
    out = torch.empty_like(x)
    launch(bits, 1, 32, (out, x))
    assert torch.equal(out, -x)


def test_cupy_arrays_and_their_stream():
    cupy = pytest.importorskip("cupy")
    x = cupy.arange(256, dtype=cupy.float32)[::-1]
    out = cupy.zeros(256, cupy.float32)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        launch(scale, 1, 256, (out, x, 2.0, 256))
        stream.synchronize()
    assert (out == 2 * x).all()


def test_numba_arrays():
    x = np.arange(256, dtype=np.float32)
    out = cuda.device_array(256, np.float32)
    launch(scale, 1, 256, (out, cuda.to_device(x), 2.0, 256))
    np.testing.assert_array_equal(out.copy_to_host(), 2 * x)


def test_jax_arrays_in():
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU here")
    from flashnumba.machine.arrays import empty_like_kind

    x = jax.numpy.arange(256, dtype=jax.numpy.float32)
    out = empty_like_kind(x, (256,))
    launch(scale, 1, 256, (out, x, 2.0, 256))
    assert (out == 2 * x).all()


def test_a_kernel_for_another_architecture_is_refused(torch):
    @kernel(threads=32, arch="999a")
    def tomorrow(x):
        x[0] = uint8(1)

    with pytest.raises(ValueError, match="tomorrow needs sm_999a"):
        launch(tomorrow, 1, 32, (torch.zeros(1, dtype=torch.uint8, device="cuda"),), machine="cuda")


def test_gpu_and_host_do_not_mix(torch):
    with pytest.raises(ValueError, match="takes all its arrays in one place"):
        launch(scale, 1, 32, (torch.zeros(4, device="cuda"), np.zeros(4, np.float32), 1.0, 4))


def test_host_time_of_a_launch(torch, capsys):
    out, a, b, c = matrices(torch)
    args = (out, a, b, c, 37, 53, 2.0)
    ready = prepare(weigh, args, machine="cuda")
    with_handle = host_time(lambda: ready(37, 64, args, stream=0))
    prepared_ = host_time(lambda: ready(37, 64, args))
    launched = host_time(lambda: launch(weigh, 37, 64, args))
    torchs = host_time(lambda: out.add_(1.0))
    with capsys.disabled():
        print(
            f"\nhost time of a launch of 7 arguments, 4 of them torch matrices: prepared {prepared_ * 1e6:.1f} us, "
            f"with a stream given {with_handle * 1e6:.1f} us, launch() {launched * 1e6:.1f} us; "
            f"torch's own add_ of one tensor {torchs * 1e6:.1f} us"
        )
    assert prepared_ <= 10e-6


def test_timing_agrees_with_torch(torch, capsys):
    x = torch.zeros(1 << 28, device="cuda")
    y = torch.empty_like(x)
    ours = time_gpu(lambda a, b: a.copy_(b), [(x, y), (y, x)])
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(10):
        x.copy_(y)
    stop.record()
    torch.cuda.synchronize()
    theirs = start.elapsed_time(stop) / 1e4
    bandwidth = copy_bandwidth()
    with capsys.disabled():
        print(
            f"\ncopy of 1 GiB: {ours * 1e3:.3f} ms, torch's events {theirs * 1e3:.3f} ms; {bandwidth / 1e12:.2f} TB/s"
        )
    assert abs(ours / theirs - 1) < 0.1
    assert bandwidth == pytest.approx(2 * x.nbytes / ours, rel=0.15)


def test_a_first_launch_keeps_nothing_of_its_caller():
    """Numba's typing leaves cycles of frames; a tensor of the caller in one would stay in the memory of the GPU."""
    torch = pytest.importorskip("torch")

    @kernel(threads=32)
    def fresh(x):
        if cuda.threadIdx.x < min(x.shape[0], 32):
            x[cuda.threadIdx.x] = float32(1)

    class Held:
        """What a caller has in hand."""

    def called():
        held = Held()
        launch(fresh, 1, 32, (torch.zeros(32, device="cuda"),), machine="cuda")
        return weakref.ref(held)

    gc.disable()
    try:
        assert called()() is None
    finally:
        gc.enable()
