"""wgmma on the emulator against float64 products of small integers, which every format and every order of adding
gives exactly.

Operands are placed element by element here, as the canonical layouts say (CUTLASS,
``include/cute/atom/mma_traits_sm90_gmma.hpp``), without the emulator's own addressing.
"""

import ml_dtypes
import numpy as np
import pytest

from flashnumba.machine.emulator import DivergentCollective, UninitialisedRead, launch
from flashnumba.machine.function import kernel
from flashnumba.machine.instructions import (
    fence_proxy_async,
    shared_address,
    wgmma,
    wgmma_commit,
    wgmma_fence,
    wgmma_wait,
)
from flashnumba.machine.numba import cuda, float32, int32, uint8, uint32
from flashnumba.tiles.descriptor import make_descriptor

DTYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
WIDTHS = [8, 16, 24, 64, 128, 248, 256]
wait0, wait1 = wgmma_wait(0), wgmma_wait(1)
A_SPACE, B_SPACE = 8192, 32768  # bytes


def place(matrix: np.ndarray, major: str, swizzle: int, space: int) -> tuple[np.ndarray, int, int]:
    """Bytes of an operand [rows, k] in shared memory at a multiple of 1024, with leading and stride byte offsets.

    K-major: a row's k are contiguous, eight rows make an atom. MN-major: for one k, ``swizzle`` bytes of rows are
    contiguous, eight k make an atom. In an atom of rows of ``swizzle`` bytes the 16-byte chunks of row r are
    exchanged by xor.
    """
    size, image = matrix.dtype.itemsize, np.zeros(space, np.uint8)
    rows, depth = matrix.shape
    line = swizzle or 16
    if major == "k":
        leading, stride = (128, 256) if swizzle == 0 else (16, 8 * swizzle)
    elif swizzle == 0:
        leading, stride = 128 * (rows // 8), 128  # from 8 k to the next 8, from 8 rows to the next 8
    else:
        leading, stride = 16 * swizzle, 8 * swizzle
    for r in range(rows):
        for k in range(depth):
            if major == "k":
                byte = k * size
                at = r // 8 * stride + r % 8 * line + (byte if swizzle else byte // 16 * leading + byte % 16)
            elif swizzle == 0:
                at = k // 8 * leading + r // 8 * stride + k % 8 * 16 + r % 8 * size
            else:
                byte = r * size
                at = byte // swizzle * leading + k // 8 * stride + k % 8 * swizzle + byte % swizzle
            if swizzle:
                period = {32: 2, 64: 4, 128: 8}[swizzle]
                at ^= at // 128 % period * 16
            image[at : at + size] = matrix[r, k : k + 1].view(np.uint8)
    return image, leading, stride


def make_product(n, dtype, a_from, a_major, b_major, swizzle):
    multiply = wgmma(n, dtype, a_from, a_major, b_major)
    descriptor = make_descriptor(swizzle)
    registers, width = a_from == "registers", n // 2

    @kernel(threads=128, arch="90a")
    def product(image, a_registers, strides, c, out):
        smem = cuda.shared.array((A_SPACE + B_SPACE) // 4, uint32, alignment=1024)
        acc = cuda.local.array(width, float32)
        frag = cuda.local.array(4, uint32)
        t = cuda.threadIdx.x
        for i in range(t, image.shape[0], 128):
            smem[i] = image[i]
        for i in range(4):
            frag[i] = a_registers[t, i]
        row = t // 32 * 16 + t % 32 // 4
        for i in range(width):
            acc[i] = c[row + i // 2 % 2 * 8, i // 4 * 8 + t % 4 * 2 + i % 2]
        fence_proxy_async()
        cuda.syncthreads()
        b = descriptor(shared_address(smem) + uint32(A_SPACE), strides[2], strides[3])
        wgmma_fence()
        for accumulate in range(2):  # the first overwrites c when it is told to
            flag = int32(strides[4] if accumulate == 0 else 1)
            if registers:
                multiply(acc, 0, frag, 0, b, flag)
            else:
                multiply(acc, 0, descriptor(shared_address(smem), strides[0], strides[1]), b, flag)
        wgmma_commit()
        wait0()
        for i in range(width):
            out[row + i // 2 % 2 * 8, i // 4 * 8 + t % 4 * 2 + i % 2] = acc[i]

    return product


def fragments_of(a: np.ndarray) -> np.ndarray:
    """[128, 4] words: register r of thread (w, g, q) holds row 16 w + g + 8 (r mod 2), k from 4 bytes (q + 4 (r div
    2)) on."""
    words = np.ascontiguousarray(a).view(np.uint32)  # [64, 8]
    t, r = np.arange(128)[:, None], np.arange(4)[None]
    return words[t // 32 * 16 + t % 32 // 4 + 8 * (r % 2), t % 4 + 4 * (r // 2)]


def check(n, dtype, a_from="shared", a_major="k", b_major="k", swizzle=128, keep=1):
    rng, kind = np.random.default_rng(n), DTYPES[dtype]
    k = 32 // np.dtype(kind).itemsize
    a, b = (rng.integers(-4, 5, (rows, k)).astype(kind) for rows in (64, n))
    c, out = rng.integers(-50, 50, (64, n)).astype(np.float32), np.full((64, n), np.nan, np.float32)
    a_image, *a_strides = place(a, a_major, swizzle, A_SPACE)
    b_image, *b_strides = place(b, b_major, swizzle, B_SPACE)
    used = np.flatnonzero(b_image)[-1] // 1024 * 1024 + 1024  # whole atoms
    image = np.concatenate([a_image, b_image[:used]]).view(np.uint32)
    arguments = [image, fragments_of(a), np.array([*a_strides, *b_strides, keep]), c, out]
    launch(
        make_product(n, dtype, a_from, a_major, b_major, swizzle), 1, 128, arguments, checks=n in (8, 24), seed=n % 3
    )
    expected = 2 * a.astype(np.float64) @ b.astype(np.float64).T + keep * c
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("a_from", ["shared", "registers"])
def test_every_type_and_width(dtype, a_from):
    for n in WIDTHS if dtype == "f16" else (8, 24, 256):
        check(n, dtype, a_from)


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("a_major", ["k", "mn"])
@pytest.mark.parametrize("b_major", ["k", "mn"])
def test_every_layout(swizzle, a_major, b_major):
    # MN-major rows of S bytes hold S / 2 columns, so a narrower B does not fill its panel.
    for n in (24, 64, 128):
        check(n, "bf16", "shared", a_major, b_major, swizzle)
    if a_major == "k":
        check(64, "f16", "registers", "k", b_major, swizzle)
        check(64, "e4m3", "shared", "k", "k", swizzle)


@pytest.mark.parametrize("keep", [0, 1])
def test_accumulators_are_kept_or_overwritten(keep):
    check(24, "f16", keep=keep)


def make_pipeline(plant):
    multiply, descriptor = wgmma(8), make_descriptor(0)

    @kernel(threads=128, arch="90a")
    def pipeline(image, out):
        smem = cuda.shared.array(2048 + 256, uint8, alignment=128)
        acc = cuda.local.array(8, float32)  # two accumulators in one array
        t = cuda.threadIdx.x
        for i in range(t, image.shape[0], 128):
            smem[i] = image[i]
        fence_proxy_async()
        cuda.syncthreads()
        offset = 16 if plant == "descriptor" and t >= 64 else 0
        a = descriptor(shared_address(smem), 128, 256)
        b = descriptor(shared_address(smem) + uint32(2048 + offset), 128, 256)
        wgmma_fence()
        multiply(acc, 0, a, b, int32(1 if plant == "unwritten" else 0))
        wgmma_commit()
        multiply(acc, 4, a, b, int32(0))
        multiply(acc, 4, a, b, int32(1))
        wgmma_commit()
        wait1()
        for i in range(4):
            out[t, i] = acc[i]  # the first group is done, the second still runs
        wait0()
        for i in range(4, 8):
            out[t, i] = acc[i]

    return pipeline


def _pipeline_inputs():
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, (rows, 16)).astype(np.float16) for rows in (64, 8))
    image = np.concatenate([place(a, "k", 0, 2048)[0], place(b, "k", 0, 256)[0]])
    return image, a.astype(np.float64) @ b.astype(np.float64).T


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_two_groups_in_flight_and_one_waited_for(seed):
    (image, expected), out = _pipeline_inputs(), np.zeros((128, 8), np.float32)
    launch(make_pipeline(""), 1, 128, [image, out], seed=seed)
    t = np.arange(128)
    for i in range(4):
        product = expected[t // 32 * 16 + t % 32 // 4 + i // 2 * 8, t % 4 * 2 + i % 2]
        np.testing.assert_array_equal(out[:, i], product)
        np.testing.assert_array_equal(out[:, 4 + i], 2 * product)


@pytest.mark.parametrize(("plant", "fault"), [("descriptor", DivergentCollective), ("unwritten", UninitialisedRead)])
def test_a_descriptor_is_uniform_and_an_accumulator_written(plant, fault):
    with pytest.raises(fault):
        launch(make_pipeline(plant), 1, 128, [_pipeline_inputs()[0], np.zeros((128, 8), np.float32)])
