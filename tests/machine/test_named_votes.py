"""``bar_red_or``: a named barrier that says whether one of its threads voted yes; and how it is misused."""

from __future__ import annotations

import numpy as np
import pytest

from flashnumba.machine.emulator import launch
from flashnumba.machine.emulator.faults import BarrierMismatch, Deadlock
from flashnumba.machine.function import kernel
from flashnumba.machine.instructions import bar_arrive, bar_red_or, bar_sync
from flashnumba.machine.launcher import launch as launch_on
from flashnumba.machine.numba import cuda, float32, int32


@kernel(threads=192)
def votes(x, out, rounds):
    """Three groups of 64, a barrier each, vote in every round; between the rounds they use it as one without votes."""
    s = cuda.shared.array(192, float32)
    t = cuda.threadIdx.x
    group = int32(t // 64)
    for i in range(rounds):
        s[t] = x[i, t]
        agreed = bar_red_or(group + int32(1), int32(64), x[i, t] > float32(0))
        # What the others wrote before their votes is seen.
        out[i, t] = (float32(1) if agreed else float32(0)) + s[64 * group + 63 - t % 64]
        bar_sync(group + int32(1), int32(64))


@pytest.mark.parametrize("seed", [0, 1])
def test_one_vote_is_enough_and_groups_do_not_hear_one_another(machine, seed):
    rounds = 5
    x = np.full((rounds, 192), -1, np.float32)
    x[0, 7] = x[1, 100] = x[1, 191] = x[3, :64] = 1  # nobody in round 2 and 4: no vote is kept from the round before
    out = np.zeros_like(x)
    options = {"emulate": {"seed": seed}} if machine == "emulator" else {}
    launch_on(votes, 1, 192, (x, out, np.int64(rounds)), machine=machine, **options)
    groups = x.reshape(rounds, 3, 64)
    expected = (groups > 0).any(-1, keepdims=True) + groups[..., ::-1]
    np.testing.assert_array_equal(out, expected.reshape(rounds, 192))


@kernel(threads=64)
def misused(out, first, second, counts, how):
    """The warps come to barriers ``first`` and ``second``, warp 1 by ``how``."""
    t = cuda.threadIdx.x
    if t < 32:
        bar_red_or(first, int32(64), True)
    elif how == 0:
        bar_red_or(second, counts, False)
    elif how == 1:
        bar_sync(second, counts)
    else:
        bar_arrive(second, counts)
    out[t] = float32(1)


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize(
    ("second", "count", "how", "fault", "words"),
    [
        (1, 64, 1, BarrierMismatch, "named barrier 1 with(out)? a vote here, and with(out)? one where threads"),
        (1, 64, 2, BarrierMismatch, "named barrier 1 with(out)? a vote here, and with(out)? one where threads"),
        (1, 32, 0, BarrierMismatch, "named barrier 1 with (32|64) threads here, with (32|64) where threads"),
        (1, 48, 0, BarrierMismatch, "the count must be a positive multiple of 32"),
        (1, 96, 0, BarrierMismatch, "waits for 96 threads in a block of 64|with 64 threads here"),
        (16, 64, 0, BarrierMismatch, "named barrier 16; there are 16"),
        (2, 64, 0, Deadlock, r"named barrier 1 \(32 of 64 threads have come\)"),
    ],
)
def test_what_is_misuse(second, count, how, fault, words, seed):
    out = np.zeros(64, np.float32)
    with pytest.raises(fault, match=words):
        launch(misused, 1, 64, [out, 1, second, count, how], seed=seed)


def test_sound_use_of_the_same_kernel():
    out = np.zeros(64, np.float32)
    launch(misused, 1, 64, [out, 1, 1, 64, 0])
    assert (out == 1).all()
