"""Prepared launches: what the driver is handed, and what is refused before it."""

from __future__ import annotations

import re
import threading

import numpy as np
import pytest

from flashnumba.machine import arrays, gpu, prepared
from flashnumba.machine.arrays import Described
from flashnumba.machine.compiler import compile_kernel, why_not
from flashnumba.machine.copies import merged
from flashnumba.machine.function import kernel
from flashnumba.machine.layout import Frame, dimensions, parameters
from flashnumba.machine.numba import boolean, cuda, float16, float32, int8, int32, int64, types, uint8, uint16, uint64
from flashnumba.machine.tensor_map import TensorMap
from tests.machine.fakes import Driver, Tensor


@kernel(threads=256)
def scale(out, x, factor, count):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i < count:
        out[i] = x[i] * factor


@kernel(threads=64)
def everything(matrix, flags, packed, f, i, small, yes, half, big):
    if yes and i > small:
        matrix[0, 0] = f + float32(half) + float32(packed[0]) + float32(big)
        flags[0, 0, 0] = uint16(1)


@kernel(threads=64, concurrent=True)
def waits(x):
    x[0] = float32(1)


EVERYTHING = (
    types.Array(float32, 2, "A"), types.Array(uint16, 3, "C"), types.Array(uint8, 1, "C"),
    float32, int32, int8, boolean, float16, uint64,
)  # fmt: skip


def ready(monkeypatch, kernel_, signature, formats, shared=0, **options):
    driver = Driver(formats, **options)
    monkeypatch.setattr(gpu, "bindings", lambda: driver)
    monkeypatch.setattr(gpu, "primary_context", lambda device: 7)
    monkeypatch.setattr(gpu, "multiprocessors", lambda device: driver.count)
    return driver, prepared.Prepared(kernel_, signature, 0, shared, "function")


def gpu_array(pointer, dtype, shape, strides=None, device=0):
    dtype = np.dtype(dtype)
    return Described(
        pointer, dtype, shape, strides or arrays.packed(shape, dtype.itemsize), "numba", device, False, dtype.name
    )


def flattened(array):
    """Numba's kernel ABI, written down a second time: dispatcher._Kernel._prepare_args of numba-cuda."""
    nitems = int(np.prod(array.shape, dtype=np.int64))
    return (0, 0, nitems, array.dtype.itemsize, array.pointer, *array.shape, *array.strides)


def test_every_parameter_arrives_where_numba_reads_it(monkeypatch):
    formats = "QQqqQqqqq" + "QQqqQqqqqqq" + "QQqqQqq" + "fib?eQ"
    driver, run = ready(monkeypatch, everything, EVERYTHING, formats, shared=512)
    matrix = gpu_array(0x7F0000000010, np.float32, (3, 5), (-40, 8))
    flags = gpu_array(0x7F0000001000, np.uint16, (2, 1, 4))
    packed = gpu_array(0x7F0000002000, np.uint8, (9,))
    scalars = (np.float32(1.5), np.int32(-7), np.int8(-3), True, np.float16(0.25), np.uint64(2**64 - 1))
    run((3, 2), 64, (matrix, flags, packed, *scalars), stream=5)
    ((function, sizes, shared, stream, values),) = driver.launches
    assert (function, sizes, shared, stream) == ("function", (3, 2, 1, 64, 1, 1), 512, 5)
    assert values == (
        *flattened(matrix), *flattened(flags), *flattened(packed), 1.5, -7, -3, True, 0.25, 2**64 - 1
    )  # fmt: skip


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_the_layout_is_that_of_the_compiled_kernel():
    ptx = compile_kernel(everything, EVERYTHING, 80).ptx
    entry = ptx[ptx.index(".entry") :]
    widths = [int(w) for w in re.findall(r"\.param\s+(?:\.align \d+ )?\.[a-z](\d+)\s", entry[: entry.index(")")])]
    ours = []
    for p in parameters(everything, EVERYTHING):
        ours += [64] * p.words if p.array is not None else [8 * p.packer.size]
    assert widths == ours


def test_numba_flattens_an_array_as_we_do():
    """The data model that the compiled kernel unpacks its arguments with."""
    pytest.importorskip("numba_cuda")
    from numba.cuda.descriptor import cuda_target
    from numba.cuda.np import numpy_support

    context = cuda_target.target_context
    model = context.data_model_manager[types.Array(float32, 3, "A")]
    assert model._fields == ("meminfo", "parent", "nitems", "itemsize", "data", "shape", "strides")
    assert [t.count for t in model._members[5:]] == [3, 3]
    assert numpy_support.from_dtype(np.dtype(np.uint16)) == uint16


def test_only_the_pointer_changes_between_like_tensors(monkeypatch, fake_torch):
    f32 = "torch.float32"
    signature = (types.Array(float32, 1, "A"), types.Array(float32, 1, "A"), float32, int64)
    driver, run = ready(monkeypatch, scale, signature, "QQqqQqq" * 2 + "fq")
    for pointer in (4096, 8192):
        run(1, 32, (Tensor(pointer, f32, (6,), (2,)), Tensor(64, f32, (6,), (1,)), 2.0, 6))
    run(1, 32, (Tensor(16, f32, (5,), (3,)), Tensor(64, f32, (6,), (1,)), 2.0, 5))
    outs = [values[:7] for *_, values in driver.launches]
    assert outs == [(0, 0, 6, 4, 4096, 6, 8), (0, 0, 6, 4, 8192, 6, 8), (0, 0, 5, 4, 16, 5, 12)]
    assert {stream for _, _, _, stream, _ in driver.launches} == {1000}, "torch's current stream is followed"
    assert driver.launches[-1][-1][-2:] == (2.0, 5)


def test_a_tensor_that_no_longer_fits_is_refused_on_the_fast_path_too(monkeypatch, fake_torch):
    signature = (types.Array(float32, 1, "C"), types.Array(float32, 1, "C"), float32, int64)
    driver, run = ready(monkeypatch, scale, signature, "QQqqQqq" * 2 + "fq")
    good = Tensor(4096, "torch.float32", (6,), (1,))
    run(1, 32, (good, good, 2.0, 6))
    for bad, message in [
        (Tensor(4096, "torch.float32", (6,), (2,)), "packed"),
        (Tensor(4096, "torch.float16", (6,), (1,)), "1 axes of float16; this launch was prepared for 1 of float32"),
        (Tensor(4096, "torch.float32", (6, 1), (1, 1)), "2 axes"),
        (Tensor(4096, "torch.float32", (6,), (1,), device=1), "cuda:1; the launch is on cuda:0"),
    ]:
        with pytest.raises((TypeError, ValueError), match=f"x has|x is.*{message}") as caught:
            run(1, 32, (good, bad, 2.0, 6))
        assert message in str(caught.value)
    assert len(driver.launches) == 1
    run(1, 32, (good, good, 3.0, 6))
    assert driver.launches[-1][-1][-2:] == (3.0, 6), "a refused launch leaves nothing behind"


@pytest.mark.parametrize(
    ("at", "value", "error", "message"),
    [
        (2, "two", TypeError, "factor is 'two'; for scale it must be of type float32"),
        (2, 1e300, ValueError, "factor is 1e\\+300; for scale it must be of type float32"),
        (3, 1.5, TypeError, "count is 1.5; for scale it must be of type int32"),
        (3, 2**31, ValueError, "count is 2147483648; for scale it must be of type int32"),
        (3, np.zeros(3), TypeError, "count is an array"),
        (0, 3, TypeError, "out is a int; it must be a NumPy, torch, CuPy, JAX or numba array"),
    ],
)
def test_bad_arguments_are_named(monkeypatch, at, value, error, message):
    signature = (types.Array(float32, 1, "C"), types.Array(float32, 1, "C"), float32, int32)
    driver, run = ready(monkeypatch, scale, signature, "QQqqQqq" * 2 + "fi")
    args = [gpu_array(256, np.float32, (4,)), gpu_array(512, np.float32, (4,)), 1.0, 4]
    args[at] = value
    with pytest.raises(error, match=message):
        run(1, 32, tuple(args))
    assert not driver.launches
    with pytest.raises(TypeError, match="takes 4 arguments, not 3"):
        run(1, 32, tuple(args[:3]))


@pytest.mark.parametrize(
    ("grid", "block", "message"),
    [
        (1, 0, "0 threads"), (1, 512, "declared for 1 to 256"), (1, (16, 32), "512 threads"),
        ((1, 70000), 32, "65535"), (-1, 32, "none negative"), ((1, 2, 3, 4), 32, "up to three"), (1.5, 32, "integer"),
    ],
)  # fmt: skip
def test_impossible_grids_and_blocks(monkeypatch, grid, block, message):
    signature = (types.Array(float32, 1, "C"), types.Array(float32, 1, "C"), float32, int32)
    _, run = ready(monkeypatch, scale, signature, "QQqqQqq" * 2 + "fi")
    x = gpu_array(256, np.float32, (4,))
    with pytest.raises(ValueError, match=message):
        run(grid, block, (x, x, 1.0, 4))


def test_an_empty_grid_runs_nothing(monkeypatch):
    signature = (types.Array(float32, 1, "C"), types.Array(float32, 1, "C"), float32, int32)
    driver, run = ready(monkeypatch, scale, signature, "QQqqQqq" * 2 + "fi")
    x = gpu_array(0, np.float32, (0,))
    run(0, 32, (x, x, 1.0, 0))
    run((4, 0), 32, (x, x, 1.0, 0))
    assert driver.launches == []


def test_blocks_that_wait_for_one_another_must_all_fit(monkeypatch):
    driver, run = ready(monkeypatch, waits, (types.Array(float32, 1, "C"),), "QQqqQqq", count=10, each=2)
    x = gpu_array(256, np.float32, (1,))
    run(20, 64, (x,))
    assert driver.launches[0][1][:3] == (20, 1, 1)
    with pytest.raises(ValueError, match=r"grid is 21, 21 blocks; the blocks of waits wait .* holds 20 at once"):
        run(21, 64, (x,))


def test_context_is_set_or_exchanged_and_put_back(monkeypatch):
    driver, run = ready(monkeypatch, waits, (types.Array(float32, 1, "C"),), "QQqqQqq")
    x = gpu_array(256, np.float32, (1,))
    driver.context = 0
    run(1, 64, (x,))
    assert driver.context == 7, "a thread without a context gets the device's"
    driver.context = 8
    run(1, 64, (x,))
    assert driver.context == 8
    assert len(driver.launches) == 2


def test_a_refused_launch_says_what_was_asked(monkeypatch):
    driver, run = ready(monkeypatch, waits, (types.Array(float32, 1, "C"),), "QQqqQqq", shared=64)
    driver.status = 701
    with pytest.raises(
        gpu.GpuError, match=r"waits was not launched: 701; grid \(2, 1, 1\), block \(64, 1, 1\), 64 bytes"
    ):
        run(2, 64, (gpu_array(256, np.float32, (1,)),))


def test_threads_do_not_share_a_buffer(monkeypatch):
    driver, run = ready(
        monkeypatch, scale, (types.Array(float32, 1, "C"),) * 2 + (float32, int32), "QQqqQqq" * 2 + "fi"
    )
    wrong = []

    def work(number):
        for _ in range(200):
            x = gpu_array(256 * number, np.float32, (number,))
            run(number, 32, (x, x, float(number), number), stream=number)

    workers = [threading.Thread(target=work, args=(n,)) for n in (1, 2, 3)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    for _, sizes, _, stream, values in driver.launches:
        if values[4] != 256 * stream or values[-2:] != (float(stream), stream) or sizes[0] != stream:
            wrong.append(values)
    assert len(driver.launches) == 600
    assert not wrong


# -- launches of which only addresses change ---------------------------------------------------------------------------
ADDRESSES = types.Array(float32, 1, "A"), types.Array(float32, 2, "C"), float32, int64


@kernel(threads=64)
def first_and_rows(x, rows, factor, count):
    rows[0, 0] = x[0] * factor


def test_a_fixed_launch_exchanges_addresses_alone(monkeypatch):
    driver, run = ready(monkeypatch, first_and_rows, ADDRESSES, "QQqqQqq" + "QQqqQqqqq" + "fq", shared=64)
    x, rows = gpu_array(4096, np.float32, (6,), (-8,)), gpu_array(512, np.float32, (2, 3))
    again = run.fixed((5, 2), 32, (x, rows, 2.5, 7))
    assert not driver.launches
    run((5, 2), 32, (x, rows, 2.5, 7), stream=3)
    for addresses, stream in (((4096, 512), 3), ((2**40, 16), 99)):
        again(addresses, stream)
    as_before, same, other = driver.launches
    assert same == as_before
    assert other[:4] == ("function", (5, 2, 1, 32, 1, 1), 64, 99)
    expected = list(as_before[-1])
    expected[4], expected[7 + 4] = 2**40, 16
    assert other[-1] == tuple(expected)
    with pytest.raises(ValueError, match="shorter"):
        again((4096,), 3)


def test_a_fixed_launch_in_several_threads(monkeypatch):
    driver, run = ready(monkeypatch, first_and_rows, ADDRESSES, "QQqqQqq" + "QQqqQqqqq" + "fq")
    x, rows = gpu_array(4096, np.float32, (6,)), gpu_array(512, np.float32, (2, 3))
    again = run.fixed(1, 32, (x, rows, 2.5, 7))

    def work(number):
        for _ in range(200):
            again((256 * number, 16 * number), number)

    workers = [threading.Thread(target=work, args=(n,)) for n in (1, 2, 3)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert len(driver.launches) == 600
    for *_, stream, values in driver.launches:
        assert (values[4], values[11], values[-2:]) == (256 * stream, 16 * stream, (2.5, 7))


def test_a_fixed_launch_of_nothing(monkeypatch):
    driver, run = ready(monkeypatch, first_and_rows, ADDRESSES, "QQqqQqq" + "QQqqQqqqq" + "fq")
    x, rows = gpu_array(4096, np.float32, (6,)), gpu_array(512, np.float32, (2, 3))
    run.fixed(0, 32, (x, rows, 2.5, 7))((4096, 512), 3)
    assert not driver.launches


def test_what_a_fixed_launch_does_not_take(monkeypatch):
    _, run = ready(monkeypatch, first_and_rows, ADDRESSES, "QQqqQqq" + "QQqqQqqqq" + "fq")
    x, rows = gpu_array(4096, np.float32, (6,)), gpu_array(512, np.float32, (2, 3))
    with pytest.raises(ValueError, match="first_and_rows was given arrays in host memory"):
        run.fixed(1, 32, (np.zeros(6, np.float32), rows, 2.5, 7))
    with pytest.raises(TypeError, match="first_and_rows takes 4 arguments, not 3"):
        run.fixed(1, 32, (x, rows, 2.5))
    with pytest.raises(ValueError, match="block is 65, 65 threads"):
        run.fixed(1, 65, (x, rows, 2.5, 7))
    with pytest.raises(TypeError, match="x is a TensorMap; it must be a NumPy"):
        run.fixed(1, 32, (object.__new__(TensorMap), rows, 2.5, 7))


@kernel(threads=64, arch="90")
def rows_and_maps(x, first, count, second):
    x[0, 0] = float32(count)


def test_a_fixed_launch_exchanges_the_arrays_of_tensor_maps(monkeypatch, encoded):
    signature = (types.Array(float32, 2, "C"), uint64, int64, uint64)
    driver, run = ready(monkeypatch, rows_and_maps, signature, "QQqqQqqqq" + "QqQ")
    x, first, second = (gpu_array(4096 * i, np.float32, (4, 32)) for i in (1, 2, 3))
    again = run.fixed(2, 32, (x, TensorMap(first, (4, 32)), 7, TensorMap(second, (2, 32))))
    for addresses in ((4096, 8192, 12288), (16, 32, 48), (4096, 48, 32), (16, 32, 48)):
        again(addresses, 5)
    found = [(values[4], encoded[values[-3]], values[-2], encoded[values[-1]]) for *_, values in driver.launches]
    assert found == [(4096, 8192, 7, 12288), (16, 32, 7, 48), (4096, 48, 7, 32), (16, 32, 7, 48)]
    assert driver.launches[1] == driver.launches[3], "a map at an address seen before is found again"
    boxes = driver.launches[1][-1][-3], driver.launches[2][-1][-1]
    assert encoded[boxes[0]] == encoded[boxes[1]] == 32 and boxes[0] != boxes[1], "of the same array, with another box"
    with pytest.raises(ValueError, match="shorter"):
        again((4096, 8192), 5)


def test_a_fixed_launch_forgets_tensor_maps_but_not_those_of_a_graph(monkeypatch, encoded):
    signature = (types.Array(float32, 2, "C"), uint64, int64, uint64)
    driver, run = ready(monkeypatch, rows_and_maps, signature, "QQqqQqqqq" + "QqQ")
    x, first, second = (gpu_array(4096 * i, np.float32, (4, 32)) for i in (1, 2, 3))
    monkeypatch.setattr(prepared._Moved, "capacity", 2)
    pinned = []
    monkeypatch.setattr(TensorMap, "pin", lambda tensor: pinned.append(tensor.found.pointer))
    again = run.fixed(2, 32, (x, TensorMap(first, (4, 32)), 7, TensorMap(second, (4, 32))))
    for i in range(1, 6):
        again((16 * i, 32 * i, 48 * i), 5)
    assert not pinned
    again((16, 32, 48), 99)  # this stream is being captured
    assert pinned == [32, 48]
    assert [encoded[values[-1]] for *_, values in driver.launches] == [48, 96, 144, 192, 240, 48]


def test_tensor_maps_forgotten_during_a_launch_are_still_kept_for_its_graph(monkeypatch, encoded):
    """A finaliser may launch in between, with arrays that are so many that all maps are forgotten."""
    signature = (types.Array(float32, 2, "C"), uint64, int64, uint64)
    driver, run = ready(monkeypatch, rows_and_maps, signature, "QQqqQqqqq" + "QqQ")
    x, first, second = (gpu_array(4096 * i, np.float32, (4, 32)) for i in (1, 2, 3))
    monkeypatch.setattr(prepared._Moved, "capacity", 2)
    pinned, go, inside = [], run._go, []
    monkeypatch.setattr(TensorMap, "pin", lambda tensor: pinned.append(tensor.found.pointer))
    again = run.fixed(2, 32, (x, TensorMap(first, (4, 32)), 7, TensorMap(second, (4, 32))))

    def going(*args):
        if not inside:
            inside.append(True)
            for i in range(5, 9):
                again((16 * i, 32 * i, 48 * i), 5)
        go(*args)

    monkeypatch.setattr(run, "_go", going)
    again((16, 32, 48), 99)  # this stream is being captured
    assert pinned == [32, 48] and len(driver.launches) == 5


def test_a_fixed_launch_takes_no_tensor_map_of_host_memory(monkeypatch):
    signature = (types.Array(float32, 2, "C"), uint64, int64, uint64)
    _, run = ready(monkeypatch, rows_and_maps, signature, "QQqqQqqqq" + "QqQ")
    on_host = TensorMap(np.zeros((4, 32), np.float32), (4, 32))
    with pytest.raises(ValueError, match="rows_and_maps was given arrays in host memory"):
        run.fixed(1, 32, (gpu_array(4096, np.float32, (4, 32)), on_host, 7, on_host))


def test_host_and_gpu_arrays_do_not_mix(monkeypatch):
    signature = (types.Array(float32, 1, "C"), types.Array(float32, 1, "C"), float32, int32)
    driver, run = ready(monkeypatch, scale, signature, "QQqqQqq" * 2 + "fi")
    with pytest.raises(ValueError, match="x in host memory and out on a GPU: scale takes all its arrays in one place"):
        run(1, 32, (gpu_array(256, np.float32, (4,)), np.zeros(4, np.float32), 1.0, 4))
    assert not driver.launches


def test_overlapping_host_spans_are_one():
    assert merged([]) == []
    assert merged([(0, 8), (8, 16)]) == [(0, 8), (8, 16)]
    assert merged([(10, 20), (0, 30), (25, 40)]) == [(0, 40)]


def test_dimensions():
    assert dimensions(3, "grid") == (3, 1, 1)
    assert dimensions((np.int64(3), 2), "grid") == (3, 2, 1)
    assert dimensions([1, 2, 3], "grid") == (1, 2, 3)


def test_a_frame_holds_one_word_a_parameter():
    frame = Frame(parameters(everything, EVERYTHING))
    assert len(frame.words) == 9 + 11 + 7 + 6
    assert [p - frame.pointers[0] for p in frame.pointers] == list(range(0, 8 * len(frame.words), 8))


def test_unknown_types_and_counts():
    with pytest.raises(TypeError, match=r"scale takes 4 arguments \(out, x, factor, count\), not 1"):
        parameters(scale, (float32,))
    with pytest.raises(TypeError, match="factor has type complex64"):
        parameters(scale, (types.Array(float32, 1, "C"), types.Array(float32, 1, "C"), types.complex64, int32))
