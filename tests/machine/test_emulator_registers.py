"""Local arrays on the emulator: a register holds what was written last, whoever wrote it."""

import numpy as np
import pytest

from flashnumba.machine.emulator import UninitialisedRead, launch
from flashnumba.machine.function import kernel
from flashnumba.machine.instructions import ld_shared_v4, ldmatrix_x4, mma_m16n8k16_f16, shared_address
from flashnumba.machine.numba import cuda, float32, uint32


@kernel(threads=32)
def changed_registers(out):
    words, sums = cuda.local.array(4, uint32), cuda.local.array(4, float32)
    a, smem, t = cuda.local.array(4, uint32), cuda.shared.array(128, uint32), uint32(cuda.threadIdx.x)
    for i in range(4):
        words[i], sums[i], a[i] = uint32(7), float32(i), uint32(0x3C003C00)  # pairs of 1.0 in float16
        smem[4 * t + i] = 100 + 4 * t + i
        out[t, i] = words[i] + uint32(sums[i])
    words[uint32(1)] = 2**32 + 5
    out[t, 4] = words[1]
    cuda.syncthreads()
    ld_shared_v4(words, 0, shared_address(smem) + uint32(16 * t))
    for i in range(4):
        out[t, 5 + i] = words[i]
    mma_m16n8k16_f16(sums, 0, a, 0, a, 0)
    for i in range(4):
        out[t, 9 + i] = uint32(sums[i])
    ldmatrix_x4(words, 0, shared_address(smem) + uint32(16 * t))
    for i in range(4):
        out[t, 13 + i] = words[i]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_register_read_before_is_read_anew(seed):
    """By whatever it was changed: a store, a load of one thread, an instruction of the warp."""
    out, t, i = np.zeros((32, 17), np.int64), np.arange(32)[:, None], np.arange(4)
    launch(changed_registers, 1, 32, [out], seed=seed)
    expected = [7 + i + 0 * t, 5 + 0 * t, 100 + 4 * t + i, 16 + i + 0 * t, 100 + 32 * i + t]
    np.testing.assert_array_equal(out, np.hstack(expected))


@kernel(threads=32)
def declared_again(out):
    for i in range(2):
        x = cuda.local.array(2, float32)
        if i == 0:
            x[0] = float32(1)
        out[cuda.threadIdx.x] = x[0]


def test_a_register_read_before_is_unknown_once_it_is_declared_again():
    with pytest.raises(UninitialisedRead, match="element 0 of a local array was never written"):
        launch(declared_again, 1, 32, [np.zeros(32, np.float32)])
