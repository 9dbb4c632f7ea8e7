"""Tensor maps: what the hardware is told, what is refused before it, and a copy through one on both machines."""

from __future__ import annotations

import gc
import struct
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from flashnumba.machine import arrays, gpu, tensor_encode, tensor_map
from flashnumba.machine.arrays import Described
from flashnumba.machine.function import kernel
from flashnumba.machine.instructions import (
    bulk_commit,
    bulk_wait,
    fence_mbarrier_init,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    shared_address,
    tma_load_2d,
    tma_store_2d,
)
from flashnumba.machine.launcher import TensorMap, launch
from flashnumba.machine.numba import cuda, uint8, uint32


def aligned(shape, dtype=np.float16, offset=0):
    """A packed array whose first element lies ``offset`` bytes past a multiple of 256."""
    dtype = np.dtype(dtype)
    count = int(np.prod(shape)) * dtype.itemsize
    raw = np.zeros(count + 512, np.uint8)
    start = -raw.ctypes.data % 256 + offset
    return raw[start : start + count].view(dtype).reshape(shape)


def described(shape, element="float16", strides=None, pointer=0x7F0000000000, device=0):
    dtype = arrays.KERNEL_DTYPE[element]
    return Described(
        pointer, dtype, shape, strides or arrays.packed(shape, dtype.itemsize), "numba", device, False, element
    )


def test_the_emulators_view():
    x = aligned((3, 40, 64), ml_dtypes.bfloat16)
    tensor = TensorMap(x, (1, 8, 64), swizzle=128)
    assert (tensor.box, tensor.swizzle, tensor.fill, tensor.element, tensor.device) == (
        (1, 8, 64),
        128,
        "zero",
        "bfloat16",
        None,
    )
    assert tensor.array.dtype == np.uint16
    tensor.array[1, 2, 3] = 0x3F80
    assert x[1, 2, 3] == 1
    assert tensor.array is tensor.array, "every copy asks for it"
    with pytest.raises(ValueError, match="x is in host memory"):
        _ = TensorMap(x, (1, 8, 64), name="x").device_address


WIDE = (4, 64)


@pytest.mark.parametrize(
    ("array", "box", "options", "error", "message"),
    [
        (aligned(WIDE), (4, 65), {"swizzle": 128}, ValueError, r"130 bytes wide; .*e\.g\. 72 elements"),
        (aligned(WIDE), (4, 72), {}, ValueError, "takes at most 64 elements of float16, so move it as 2 boxes"),
        (aligned(WIDE), (4, 64), {"swizzle": 64}, ValueError, "a swizzle of 64 bytes takes at most 32"),
        (aligned(WIDE), (4, 4), {"swizzle": 0}, ValueError, r"8 bytes wide; .*e\.g\. 8 elements"),
        (aligned(WIDE), (257, 64), {}, ValueError, "2 integers from 1 to 256"),
        (aligned(WIDE), (0, 64), {}, ValueError, "2 integers from 1 to 256"),
        (aligned(WIDE), (64,), {}, ValueError, "2 integers from 1 to 256, outermost axis first"),
        (aligned(WIDE), (4.0, 64), {}, ValueError, "2 integers from 1 to 256"),
        (aligned(WIDE), (4, 64), {"swizzle": 16}, ValueError, "swizzle is 16; it must be 0, 32, 64 or 128"),
        (aligned(WIDE), (4, 64), {"l2_promotion": 32}, ValueError, "l2_promotion is 32; it must be 0, 64, 128 or 256"),
        (aligned(WIDE), (4, 64), {"fill": "one"}, ValueError, "fill is 'one' for float16; it must be 'zero'"),
        (aligned(WIDE, np.uint8), (4, 64), {"fill": "nan"}, ValueError, "fill is 'nan' for uint8"),
        (aligned(WIDE), (4, 64), {"element": "float32"}, ValueError, "float32 does not have the 2 bytes of k"),
        (aligned(WIDE), (4, 64), {"element": "int4"}, TypeError, "k has elements of type int4; a tensor map"),
        (aligned(WIDE, offset=8), (4, 64), {}, ValueError, "8 bytes past a multiple of 16; it must"),
        (aligned((4, 100)), (4, 64), {}, ValueError, r"200 bytes in axis 0; .*pad the rows to a multiple of 8 elem"),
        (aligned((4, 128))[:, ::2], (4, 64), {}, ValueError, r"stride of 4 bytes in its last .* \(2 bytes\)"),
        (aligned(WIDE)[::-1], (4, 64), {}, ValueError, "stride of -128 bytes in axis 0"),
        (np.broadcast_to(aligned((1, 64)), WIDE), (4, 64), {}, ValueError, "stride of 0 bytes in axis 0"),
        (aligned((0, 64)), (4, 64), {}, ValueError, "every axis must have 1 to 2"),
        (aligned((1, 1, 1, 1, 4, 64)), (1, 1, 1, 1, 4, 64), {}, ValueError, "a tensor map takes 1 to 5 axes"),
        ([1, 2], (1, 8), {}, TypeError, "k is a list"),
    ],
)  # fmt: skip
def test_what_the_hardware_would_refuse(array, box, options, error, message):
    with pytest.raises(error, match=message):
        TensorMap(array, box, name="k", **options)


@pytest.mark.parametrize(
    ("array", "box", "options"),
    [
        (aligned((64,)), (64,), {}),
        (aligned((4, 112), np.uint8)[:, :96], (4, 32), {"swizzle": 32}),
        (aligned((4, 2, 8, 64))[:, :, 1::2], (2, 1, 4, 64), {}),
        (aligned((2, 2, 2, 8, 64)).transpose(0, 2, 1, 3, 4), (1, 1, 1, 8, 64), {}),
        (aligned(WIDE), (256, 64), {"fill": "nan"}),
        (aligned(WIDE, np.uint16), (4, 64), {"element": "bfloat16"}),
        (aligned((4, 256), np.uint8), (1, 256), {"swizzle": 0}),
    ],
)
def test_what_it_takes(array, box, options):
    assert TensorMap(array, box, **options).shape == array.shape


class Enum:
    """Answers any name with the name's last part."""

    def __getattr__(self, name):
        return name


class Driver:
    """As much of cuda.bindings.driver as an encoding needs; the 'encoded' words count the encodings."""

    def __init__(self):
        self.encoded, self.stored, self.freed, self.base = [], {}, [], 0
        for enum in ("DataType", "Swizzle", "L2promotion", "FloatOOBfill", "Interleave"):
            setattr(self, f"CUtensorMap{enum}", Enum())
        self.CUstream_flags = Enum()
        self.cuuint32_t = self.cuuint64_t = int

    def cuTensorMapEncodeTiled(self, *args):
        self.encoded.append(args)
        return 0, SimpleNamespace(opaque=[len(self.encoded)] * 16)

    def cuMemAlloc(self, size):
        self.base += 0x100000
        return 0, self.base

    def cuStreamCreate(self, flags):
        return 0, "stream"

    def cuMemcpyHtoDAsync(self, address, data, size, stream):
        assert address not in self.stored, "a place is written once"
        self.stored[address] = struct.unpack("<16Q", data)[0]
        return (0,)

    def cuStreamSynchronize(self, stream):
        assert stream == "stream", "only its own stream"
        return (0,)

    def cuMemFree(self, address):
        self.freed.append(address)
        return (0,)

    def cuStreamDestroy(self, stream):
        return (0,)


@pytest.fixture
def driver(monkeypatch):
    fake = Driver()

    @contextmanager
    def on_device(device):
        yield

    monkeypatch.setattr(gpu, "bindings", lambda: fake)
    monkeypatch.setattr(gpu, "require", lambda: None)
    monkeypatch.setattr(gpu, "on_device", on_device)
    monkeypatch.setattr(gpu, "relaxed_capture", nullcontext)
    memory, maps = tensor_encode._Memory(), tensor_encode._Maps()
    monkeypatch.setattr(tensor_encode, "_memory", memory)
    monkeypatch.setattr(tensor_map, "MAPS", maps)
    fake.maps = maps
    yield fake
    maps._entries.clear()
    memory._slabs.clear()
    gc.collect()


def test_what_the_driver_is_told(driver):
    TensorMap(
        described((2, 3, 40, 64), "bfloat16", (40 * 3 * 128, 128, 384, 2)), (1, 1, 8, 64), l2_promotion=128, fill="nan"
    )
    (args,) = driver.encoded
    kind, rank, pointer, dims, strides, box, steps, interleave, swizzle, l2, fill = args
    assert (kind, rank, pointer) == ("CU_TENSOR_MAP_DATA_TYPE_BFLOAT16", 4, 0x7F0000000000)
    assert (dims, strides, box, steps) == ([64, 40, 3, 2], [384, 128, 15360], [64, 8, 1, 1], [1, 1, 1, 1])
    assert interleave == "CU_TENSOR_MAP_INTERLEAVE_NONE"
    assert swizzle == "CU_TENSOR_MAP_SWIZZLE_128B"
    assert l2 == "CU_TENSOR_MAP_L2_PROMOTION_L2_128B"
    assert fill == "CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA"
    TensorMap(described((8, 32), "uint8"), (8, 32), swizzle=0, l2_promotion=0)
    assert driver.encoded[1][8:] == (
        "CU_TENSOR_MAP_SWIZZLE_NONE", "CU_TENSOR_MAP_L2_PROMOTION_NONE", "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE"
    )  # fmt: skip


def test_an_axis_of_one_may_have_any_stride(driver):
    TensorMap(described((1, 16, 64), "float16", (2, 128, 2)), (1, 16, 64))
    assert driver.encoded[0][4] == [128, 2048]
    TensorMap(described((16, 1, 64), "float16", (128, 7, 2)), (16, 1, 64))
    assert driver.encoded[1][4] == [128, 128]


def test_the_same_tensor_is_encoded_once(driver):
    first = TensorMap(described((16, 64)), (8, 64))
    assert TensorMap(described((16, 64)), (8, 64)).device_address == first.device_address
    assert len(driver.encoded) == 1
    others = [
        TensorMap(described((16, 64)), (16, 64)), TensorMap(described((16, 64), pointer=0x7F0000001000), (8, 64)),
        TensorMap(described((16, 64)), (8, 64), l2_promotion=64), TensorMap(described((8, 64)), (8, 64)),
        TensorMap(described((16, 64)), (8, 64), element="bfloat16"),
        TensorMap(replace(described((16, 64)), device=1), (8, 64)),
    ]  # fmt: skip
    addresses = [first.device_address, *(t.device_address for t in others)]
    assert len(set(addresses)) == 7
    assert all(a % 128 == 0 for a in addresses), "a tensor map lies at a multiple of 64"
    assert [driver.stored[a] for a in addresses] == [1, 2, 3, 4, 5, 6, 7]


def test_memory_is_freed_when_nobody_holds_a_map_in_it(driver, monkeypatch):
    monkeypatch.setattr(tensor_encode._Slab, "maps", 2)
    driver.maps.capacity = 2
    held = TensorMap(described((16, 64)), (8, 64))
    for i in range(1, 6):
        TensorMap(described((16, 64), pointer=0x7F0000000000 + 4096 * i), (8, 64))
    gc.collect()
    slabs = sorted({a & ~0xFFFFF for a in driver.stored})
    assert len(slabs) == 3
    assert driver.freed == [slabs[1]], "the first is held by the caller, the third by the cache"
    assert driver.stored[held.device_address] == 1
    held.pin()
    address = held.device_address
    del held
    driver.maps._entries.clear()
    gc.collect()
    assert address & ~0xFFFFF not in driver.freed, "a captured graph still refers to it"
    tensor_encode._pinned.clear()


def test_a_host_array_is_encoded_where_its_copy_lies(driver):
    tensor = TensorMap(aligned((16, 64)), (8, 64))
    assert not driver.encoded
    slot = tensor.encoded_at(0x123400, 0)
    assert driver.encoded[0][2] == 0x123400
    assert slot.address in driver.stored


BM, BD = 16, 32
TILE = BM * BD * 2
SHARED = TILE + 1024 + 8  # the tile starts at a multiple of 1024, and an mbarrier follows it
wait_all = bulk_wait(0)


@kernel(threads=32, arch="90")
def move(source, target, first, column):
    """Move one box from one tensor to the same place of another, by way of shared memory."""
    smem = cuda.shared.array(0, uint8)
    tile = (shared_address(smem) + uint32(1023)) & uint32(0xFFFFFC00)
    bar = tile + uint32(TILE)
    if cuda.threadIdx.x == 0:
        mbarrier_init(bar, uint32(1))
        fence_mbarrier_init()
        mbarrier_arrive_expect_tx(bar, uint32(TILE))
        tma_load_2d(tile, source, bar, column, first)
        mbarrier_wait(bar, uint32(0))
        tma_store_2d(target, tile, column, first)
        bulk_commit()
        wait_all()


@pytest.mark.parametrize(("first", "column"), [(0, 0), (16, 32), (20, 16), (3, 8)])
@pytest.mark.parametrize("swizzle", [64, 0])
def test_a_box_moves(machine, first, column, swizzle):
    x = aligned((30, 56), np.uint16)
    x[:] = np.arange(1, 1 + x.size).reshape(x.shape)
    out = aligned(x.shape, np.uint16)
    maps = [TensorMap(a, (BM, BD), swizzle=swizzle, element="float16") for a in (x, out)]
    launch(move, 1, 32, (*maps, np.int32(first), np.int32(column)), shared=SHARED, machine=machine)
    expected = np.zeros_like(x)
    box = slice(max(first, 0), first + BM), slice(max(column, 0), column + BD)
    expected[box] = x[box]
    np.testing.assert_array_equal(out, expected)


@pytest.mark.gpu
def test_a_box_moves_between_torch_tensors():
    torch = pytest.importorskip("torch")
    x = torch.arange(30 * 56, dtype=torch.int16, device="cuda").view(30, 56)
    out = torch.zeros_like(x)
    for _ in range(3):
        maps = [TensorMap(a, (BM, BD), swizzle=64) for a in (x, out)]
        launch(move, 1, 32, (*maps, np.int32(8), np.int32(16)), shared=SHARED)
    expected = torch.zeros_like(x)
    expected[8:24, 16:48] = x[8:24, 16:48]
    assert torch.equal(out, expected)
    assert maps[0].device_address == TensorMap(x, (BM, BD), swizzle=64).device_address


@pytest.mark.gpu
def test_a_captured_graph_keeps_its_maps():
    torch = pytest.importorskip("torch")
    x = torch.ones(30, 56, dtype=torch.int16, device="cuda")
    out = torch.zeros_like(x)
    maps = [TensorMap(a, (BM, BD), swizzle=64) for a in (x, out)]
    launch(move, 1, 32, (*maps, np.int32(0), np.int32(0)), shared=SHARED)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # A map made during the capture is uploaded at once, beside the graph.
        inside = [TensorMap(a, (BM, BD), swizzle=64, l2_promotion=64) for a in (x, out)]
        launch(move, 1, 32, (*inside, np.int32(14), np.int32(24)), shared=SHARED)
    slots = [m._slot for m in inside]
    del inside
    assert all(slot in tensor_encode._pinned for slot in slots)
    out.zero_()
    x.fill_(7)
    graph.replay()
    torch.cuda.synchronize()
    assert out.sum().item() == 7 * BM * BD
