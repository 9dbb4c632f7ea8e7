"""What an attack on the emulator found: legal kernels it refused, spins it did not see, casts it did not make."""

import numpy as np
import pytest

from flashnumba.machine.compiler import compile_kernel
from flashnumba.machine.emulator import Deadlock, LaunchLimit, Race, launch
from flashnumba.machine.function import kernel
from flashnumba.machine.instructions import (
    cp_async_16,
    cp_async_commit,
    cp_async_wait,
    global_address,
    shared_address,
    wgmma,
)
from flashnumba.machine.numba import cuda, float32, int32, int64, types, uint8, uint32, uint64

wait_all = cp_async_wait(0)


@kernel(threads=32)
def shrinking_tree(x, out):
    """A reduction whose masks shrink: lanes that are done wait at the last syncwarp."""
    t = cuda.threadIdx.x
    s = cuda.shared.array(32, float32)
    s[t] = x[t]
    cuda.syncwarp()
    if t < 16:
        s[t] += s[t + 16]
        cuda.syncwarp(0xFFFF)
        if t < 8:
            s[t] += s[t + 8]
    cuda.syncwarp()
    out[t] = s[t % 8]


def test_meetings_under_different_masks_are_independent():
    x, out = np.arange(32, dtype=np.float32), np.zeros(32, np.float32)
    for seed in range(4):
        launch(shrinking_tree, 1, 32, (x, out), seed=seed)
        np.testing.assert_array_equal(out, np.tile(x.reshape(4, 8).sum(0), 4))


@kernel(threads=1, arch="80")
def backwards(x, out):
    """The address of the row before, by a negative distance in 64 bits."""
    smem = cuda.shared.array(16, uint8, alignment=16)
    cp_async_16(shared_address(smem), global_address(x) + uint64(-16))
    cp_async_commit()
    wait_all()
    for i in range(16):
        out[i] = smem[i]


def test_addresses_wrap_at_64_bits():
    x, out = np.arange(32, dtype=np.uint8).reshape(2, 16), np.zeros(16, np.uint8)
    launch(backwards, 1, 1, (x[::-1], out))  # its first element lies in the second row
    np.testing.assert_array_equal(out, x[0])


@kernel(threads=64)
def spin_on_shared(x):
    s = cuda.shared.array(1, float32)
    t = cuda.threadIdx.x
    if t == 0:
        s[0] = float32(0)
    cuda.syncthreads()
    if t == 0:
        while s[0] == float32(0):
            pass
    if t == 32:
        s[0] = float32(1)


@kernel(threads=1, concurrent=True)
def spin_on_a_flag(flag):
    if cuda.blockIdx.x == 0:
        while flag[0] != 1:
            pass
        flag[1] = 5
    else:
        flag[0] = 1


@kernel(threads=1)
def spin_for_ever(flag):
    while flag[0] >= 0:
        pass


def test_spins_over_plain_loads():
    with pytest.raises(Race, match="no barrier lies between"):
        launch(spin_on_shared, 1, 64, (np.zeros(1, np.float32),))
    flag = np.zeros(2, np.int32)
    launch(spin_on_a_flag, 2, 1, (flag,))
    assert flag.tolist() == [1, 5]
    with pytest.raises(Deadlock, match="waits for a change of flag, which it loads again and again"):
        launch(spin_for_ever, 1, 1, (np.zeros(1, np.int32),))


@kernel(threads=1)
def casts(x, out):
    for i in range(x.shape[0]):
        out[i, 0] = int32(x[i])
        out[i, 1] = int64(uint32(x[i]))
        out[i, 2] = cuda.popc(int32(i - 1))


def test_casts_saturate_and_popc_counts_a_register():
    x = np.array([1.9, -1.9, 1e20, -1e20, np.nan, np.inf], np.float32)
    out = np.zeros((6, 3), np.int64)
    launch(casts, 1, 1, (x, out))
    assert out[:, 0].tolist() == [1, -1, 2**31 - 1, -(2**31), 0, 2**31 - 1]
    assert out[:, 1].tolist() == [1, 0, 2**32 - 1, 0, 0, 2**32 - 1]
    assert out[:, 2].tolist() == [32, 0, 1, 1, 2, 1]


def test_limits_are_value_errors_as_on_a_gpu():
    with pytest.raises(ValueError, match="64 threads a block"):
        launch(spin_for_ever, 1, 64, (np.zeros(1, np.int32),))
    assert issubclass(LaunchLimit, ValueError)
    with pytest.raises(ValueError, match="arch is '70'; the emulator knows 75"):
        launch(spin_for_ever, 1, 1, (np.zeros(1, np.int32),), arch="70")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": 0}, "threads is 0; a block has 1 to 1024"),
        ({"threads": 2000}, "threads is 2000"),
        ({"threads": 32, "min_blocks": -1}, "min_blocks is -1"),
        ({"threads": 32, "arch": "sm_80"}, "arch is 'sm_80'; it must be a compute capability"),
    ],
)
def test_declarations_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        kernel(**options)


def test_what_is_compiled_is_checked():
    with pytest.raises(TypeError, match="kernel is a function; declare it with"):
        compile_kernel(lambda x: None, (), 80)
    with pytest.raises(TypeError, match=r"signature\[0\] is a str; it must be a Numba type"):
        compile_kernel(spin_for_ever, ("a",), 80)
    with pytest.raises(ValueError, match=r"spin_for_ever takes 1 arguments \(flag\); the signature has 2"):
        compile_kernel(spin_for_ever, (types.int32, types.int32), 80)
    with pytest.raises(TypeError, match="float"):
        wgmma(8.0)
