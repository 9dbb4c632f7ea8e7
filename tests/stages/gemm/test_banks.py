"""Shared memory as the register tile uses it, from recorded accesses: no bank is asked twice at a time.

The model: an access of 4 bytes a lane asks all 32 banks at once; one of 16 bytes is answered eight lanes at a time.
Lanes that want the same word are one.
"""

from collections import defaultdict

import numpy as np
import pytest

from flashnumba.machine.emulator.one_thread import ThreadMemory
from flashnumba.stages.gemm import simt
from flashnumba.stages.gemm.register_tile import Tiles
from tests.stages.gemm.products import MAJORS, product


@pytest.fixture
def accesses(monkeypatch):
    """(what, bytes, addresses of the lanes) of every warp-wide access by address, as the lanes make them in turn."""
    made, turns = defaultdict(dict), defaultdict(int)

    def watch(name, nbytes_of):
        original = getattr(ThreadMemory, name)

        def call(self, address, what):
            thread = self.thread
            turn = turns[thread.tid]
            turns[thread.tid] += 1
            made[thread.warp, turn, name, nbytes_of(what)][thread.lane] = int(address)
            return original(self, address, what)

        monkeypatch.setattr(ThreadMemory, name, call)

    watch("read_shared", lambda nbytes: nbytes)
    watch("write_shared", lambda data: data.shape[-1])
    return lambda: [(name, nbytes, [lanes[i] for i in range(32)]) for (_, _, name, nbytes), lanes in made.items()]


def cycles(addresses, nbytes):
    """How many turns the banks take: the most different words that one bank has for lanes answered together."""
    together = 32 // (nbytes // 4)
    total = 0
    for first in range(0, 32, together):
        words = {at // 4 + w for at in addresses[first : first + together] for w in range(nbytes // 4)}
        total += int(np.bincount([word % 32 for word in words], minlength=32).max())
    return total


@pytest.mark.parametrize(("a_major", "b_major"), MAJORS)
@pytest.mark.parametrize("tiles", [simt.LARGE, simt.MEDIUM, simt.SMALL, Tiles(64, 128, 8, 8, 16, lanes_m=8)], ids=str)
def test_no_bank_is_asked_twice(accesses, tiles, a_major, b_major):
    made = product(tiles.bm, tiles.bn, 8, np.float32, a_major, b_major)
    made.check(simt.plan_of(made.shape, tiles))
    seen = accesses()
    stored = {4 if along_k else 16 for along_k in (a_major == "k", b_major == "k")}
    assert {(name, nbytes) for name, nbytes, _ in seen} == {("read_shared", 16), *(("write_shared", n) for n in stored)}
    for name, nbytes, addresses in seen:
        assert cycles(addresses, nbytes) == nbytes // 4, (name, addresses)


@pytest.mark.parametrize("tiles", [simt.LARGE, Tiles(64, 128, 8, 8, 16, lanes_m=8)], ids=str)
def test_half_a_warp_reads_no_more_than_the_banks_hand_out_at_once(accesses, tiles):
    """The zigzag: each lane has a neighbour, one or two numbers on, that reads the same vector."""
    made = product(tiles.bm, tiles.bn, 8, np.float32)
    made.check(simt.plan_of(made.shape, tiles))
    for name, _, addresses in accesses():
        if name == "read_shared":
            assert any(all(addresses[i] == addresses[i ^ step] for i in range(32)) for step in (1, 2))
            assert all(len(set(addresses[half : half + 16])) <= 8 for half in (0, 16))


def test_the_model_finds_conflicts():
    assert cycles([4 * lane for lane in range(32)], 4) == 1
    assert cycles([128 * lane for lane in range(32)], 4) == 32
    assert cycles([0] * 32, 4) == 1
    assert cycles([16 * lane for lane in range(32)], 16) == 4
    assert cycles([128 * lane for lane in range(32)], 16) == 32
