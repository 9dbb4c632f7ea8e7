"""Programs around asynchronous instructions: the emulator gives the bytes that an H200 gave."""

from pathlib import Path

import numpy as np
import pytest

from tests.machine.conformance.programs import PROGRAMS
from tests.machine.conformance.record_programs import run

VECTORS = Path(__file__).parent / "conformance" / "programs.npz"


@pytest.fixture(scope="module")
def recorded():
    with np.load(VECTORS) as held:
        return dict(held)


def test_every_program_was_recorded(recorded):
    assert {key.rsplit(".", 1)[0] for key in recorded} == set(PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_same_bytes(name, recorded):
    for i, got in enumerate(run(PROGRAMS[name], "emulator")):
        want = recorded[f"{name}.{i}"]
        assert got.shape == want.shape and got.dtype == want.dtype
        word = np.uint32 if got.dtype.itemsize == 4 else got.dtype
        different = np.ascontiguousarray(got).view(word) != np.ascontiguousarray(want).view(word)
        assert not different.any(), f"{different.sum()} of {different.size} elements differ"
