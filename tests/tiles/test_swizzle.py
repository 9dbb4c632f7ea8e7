"""The swizzle: a permutation of each row, no bank met twice, and the same on the host and in a kernel."""

import numpy as np
import pytest

from flashnumba.machine.emulator import launch
from flashnumba.machine.function import kernel
from flashnumba.machine.numba import cuda
from flashnumba.tiles.swizzle import make_place, place_of, swizzle_of

CHUNKS = [1, 2, 4, 8, 16, 32]


def banks(offsets):
    """Which group of four banks each 16-byte chunk comes from."""
    return offsets // 16 % 8


@pytest.mark.parametrize("chunks", CHUNKS)
def test_each_row_is_a_permutation_of_itself(chunks):
    row, chunk = np.ogrid[:64, :chunks]
    offsets = place_of(row, chunk, chunks)
    assert (np.sort(offsets, axis=1) == (row * chunks + chunk) * 16).all()
    plain = place_of(row, chunk, chunks, swizzled=False)
    assert (plain == (row * chunks + chunk) * 16).all()


@pytest.mark.parametrize("chunks", CHUNKS)
def test_eight_rows_at_one_chunk_and_eight_chunks_in_a_row_meet_no_bank_twice(chunks):
    row, chunk = np.ogrid[:64, :chunks]
    offsets = place_of(row, chunk, chunks)
    for first in range(0, 64, 8):
        for c in range(chunks):
            assert sorted(banks(offsets[first : first + 8, c])) == list(range(8))
    assert all(sorted(banks(eight)) == list(range(8)) for eight in offsets.reshape(-1, 8))


def test_without_it_eight_rows_of_128_bytes_meet_in_one_bank_group():
    assert set(banks(place_of(np.arange(8), 3, 8, swizzled=False))) == {3}


def test_rows_of_128_bytes_are_swizzled_as_the_copy_engine_does():
    row, chunk = np.ogrid[:16, :8]
    plain = place_of(row, chunk, 8, swizzled=False)
    np.testing.assert_array_equal(place_of(row, chunk, 8), plain ^ (plain >> 7 & 7) << 4)


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("swizzled", [True, False])
def test_a_kernel_finds_the_same_place(chunks, swizzled):
    place = make_place(chunks, swizzled)

    @kernel(threads=32)
    def places(out):
        for chunk in range(chunks):
            out[cuda.threadIdx.x, chunk] = place(cuda.threadIdx.x, chunk)

    out = np.zeros((32, chunks), np.uint32)
    launch(places, 1, 32, (out,))
    row, chunk = np.ogrid[:32, :chunks]
    np.testing.assert_array_equal(out, place_of(row, chunk, chunks, swizzled))


@pytest.mark.parametrize("chunks", [0, 3, 12])
def test_rows_that_do_not_pair_off(chunks):
    with pytest.raises(ValueError, match=f"rows of {chunks} chunks of 16 bytes; it must be a power of two"):
        swizzle_of(chunks)
