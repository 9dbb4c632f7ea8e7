"""Programs around asynchronous instructions: the emulator gives the bytes that an H200 gave."""

from pathlib import Path

import numpy as np
import pytest

from flashnumba.machine.emulator.faults import OutOfBounds
from tests.machine.conformance.programs import PROGRAMS
from tests.machine.conformance.record_programs import run

VECTORS = Path(__file__).parent / "conformance" / "programs.npz"


@pytest.fixture(scope="module")
def recorded():
    with np.load(VECTORS) as held:
        return dict(held)


def test_every_program_was_recorded(recorded):
    assert {key.rsplit(".", 1)[0] for key in recorded} == set(PROGRAMS)


def test_a_store_to_rows_that_end_within_16_bytes_is_named():
    with pytest.raises(OutOfBounds, match=r"rows end 36 bytes on: .* the 12 bytes that follow each row's end"):
        run(PROGRAMS["tma_1d_beyond"], "emulator")


@pytest.mark.parametrize("name", PROGRAMS)
def test_same_bytes(name, recorded):
    # This one stores to rows of 100 bytes: an H200 overwrites the 12 that follow, which was seen after the recording.
    checks = name != "tma_1d_beyond"
    for i, got in enumerate(run(PROGRAMS[name], "emulator", emulate={"checks": checks})):
        want = recorded[f"{name}.{i}"]
        assert got.shape == want.shape and got.dtype == want.dtype
        word = np.uint32 if got.dtype.itemsize == 4 else got.dtype
        different = np.ascontiguousarray(got).view(word) != np.ascontiguousarray(want).view(word)
        assert not different.any(), f"{different.sum()} of {different.size} elements differ"
